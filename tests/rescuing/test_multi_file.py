"""Checkpoints of several files: what is whole of them goes into one, whatever happened to some."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from tests.rescuing.makers import rezipped

import transload
from transload import RescueError, UsageError, rescue

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed warns that it is used by one process
STATE = {f"layer{index}.weight": torch.arange(600.0).mul(index + 1).sin().view(20, 30) for index in range(9)}


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 8
    path.write_bytes(data)


def cut(path: Path, at: int) -> None:
    path.write_bytes(path.read_bytes()[:at])


def shards(folder: Path, suffix: str) -> list[Path]:
    """Three files of three tensors, and their index."""
    folder.mkdir()
    names = list(STATE)
    weights: dict[str, str] = {}
    for number in range(3):
        title = f"model-{number + 1:05}-of-00003{suffix}"
        part = {name: STATE[name].clone() for name in names[number::3]}
        torch.save(part, folder / "model.pt")
        if suffix == ".safetensors":
            transload.convert(folder / "model.pt", folder / title)
            (folder / "model.pt").unlink()
        else:
            (folder / "model.pt").rename(folder / title)
        weights |= dict.fromkeys(part, title)
    index = {"metadata": {"total_size": 9 * 2400}, "weight_map": weights}
    (folder / f"model{suffix}.index.json").write_text(json.dumps(index), encoding="utf-8")
    return sorted(folder.glob(f"*{suffix}"))


def distributed(folder: Path) -> Path:
    if not hasattr(dcp, "save"):
        pytest.skip("this torch has no dcp.save")
    dcp.save({"model": {name: value.clone() for name, value in STATE.items()}, "epoch": 3}, checkpoint_id=folder)
    return folder / "__0_0.distcp"


def loaded(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path)


def same(path: Path, wanted: list[str], prefix: str = "") -> bool:
    """Whether a file has just these tensors, each as it was."""
    held = loaded(path)
    return set(held) == {prefix + name for name in wanted} and all(
        torch.equal(held[prefix + name], STATE[name]) for name in wanted
    )


@pytest.mark.parametrize("out", ["new.pt", "new.safetensors"])
@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@pytest.mark.parametrize("by_index", [False, True], ids=["folder", "index"])
def test_a_shard_that_is_cut(tmp_path: Path, suffix: str, out: str, by_index: bool) -> None:
    files = shards(tmp_path / "set", suffix)
    source = tmp_path / "set" / (f"model{suffix}.index.json" if by_index else "")
    cut(files[1], files[1].read_bytes().find(STATE["layer4.weight"].numpy().tobytes()) + 2399)  # all but a byte
    before = {path: path.read_bytes() for path in (tmp_path / "set").iterdir()}
    made = rescue(source, tmp_path / out)
    lost = [each.name for each in made.lost]
    assert (made.exit_code, made.how, len(lost)) == (1, "left-out", 2)
    assert set(lost) <= set(list(STATE)[1::3])
    assert same(tmp_path / out, [name for name in STATE if name not in lost])
    assert {path: path.read_bytes() for path in (tmp_path / "set").iterdir()} == before
    report = json.loads((tmp_path / f"{out}.rescue.json").read_text(encoding="utf-8"))
    assert report["counts"] == {"whole": 7, "mended": 0, "lost": 2}


def test_a_shard_that_is_missing(tmp_path: Path) -> None:
    files = shards(tmp_path / "set", ".safetensors")
    files[0].unlink()
    made = rescue(tmp_path / "set", tmp_path / "new.pt")
    assert (made.exit_code, [each.name for each in made.lost]) == (1, list(STATE)[::3])
    assert "model-00001-of-00003.safetensors" in made.lost[0].why
    assert same(tmp_path / "new.pt", [name for name in STATE if name not in list(STATE)[::3]])


def test_flipped_bits_are_undone(tmp_path: Path) -> None:
    files = shards(tmp_path / "set", ".bin")
    for file, tensor in ((files[0], "layer3.weight"), (files[2], "layer2.weight")):
        at = file.read_bytes().find(STATE[tensor].numpy().tobytes())
        flip(file, at + 777)
    made = rescue(tmp_path / "set", tmp_path / "new.safetensors")
    assert made.exit_code == 0
    assert [each.name for each in made.mended] == ["layer3.weight", "layer2.weight"]
    assert {mend.record.partition(" › ")[0] for mend in made.mends} == {files[0].name, files[2].name}
    assert all(each.checked for each in made.tensors)
    assert same(tmp_path / "new.safetensors", list(STATE))


def test_a_damaged_index_is_not_believed(tmp_path: Path) -> None:
    files = shards(tmp_path / "set", ".bin")
    flip(files[1], files[1].read_bytes().find(b"layer4.weight") + 5)  # now layer<.weight
    made = rescue(tmp_path / "set", tmp_path / "new.pt")
    assert made.exit_code == 1
    assert made.records[0].name == f"{files[1].name} › data.pkl"
    held = loaded(tmp_path / "new.pt")
    assert set(held) == set(STATE) - set(list(STATE)[1::3])


@pytest.mark.parametrize("left", [-1, 0, 10], ids=["gone", "empty", "cut"])
@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_an_unreadable_shard_without_an_index_is_reported(suffix: str, left: int, tmp_path: Path) -> None:
    """By the number in its name; what was in it is unknown."""
    files = shards(tmp_path / "set", suffix)
    next((tmp_path / "set").glob("*.json")).unlink()
    files[1].unlink() if left < 0 else cut(files[1], left)
    made = rescue(tmp_path / "set", tmp_path / "new.pt")
    assert (made.exit_code, made.how) == (1, "left-out")
    assert files[1].name in made.warnings[0]
    assert same(tmp_path / "new.pt", [name for name in STATE if name not in list(STATE)[1::3]])


@pytest.mark.parametrize("change", [b"", b"sixteen bytes..."], ids=["taken out", "put in"])
@pytest.mark.parametrize("legacy", [False, True], ids=["archive", "stream"])
def test_bytes_moved_within_a_shard(legacy: bool, change: bytes, tmp_path: Path) -> None:
    """Behind them no checksum, and no count, is where it should be."""
    files = shards(tmp_path / "set", ".bin")
    if legacy:
        torch.save(torch.load(files[1]), files[1], _use_new_zipfile_serialization=False)
    data = files[1].read_bytes()
    first = min(transload.inspect(files[1]).tensors, key=lambda each: each.file_offset or 0).name
    at = data.index(STATE[first].numpy().tobytes()) + 800
    files[1].write_bytes(data[:at] + change + data[at if change else at + 16 :])
    made = rescue(tmp_path / "set", tmp_path / "new.pt")
    held = loaded(tmp_path / "new.pt")
    assert made.exit_code == 1
    assert first in {each.name for each in made.lost}
    assert all(torch.equal(value, STATE[name]) for name, value in held.items())
    assert set(held) == {each.name for each in made.whole} >= {*list(STATE)[::3], *list(STATE)[2::3]}
    assert first in {damage.name for damage in transload.verify(tmp_path / "set").damaged}


def test_an_index_that_cannot_be_read(tmp_path: Path) -> None:
    shards(tmp_path / "set", ".bin")
    cut(next((tmp_path / "set").glob("*.json")), 100)
    made = rescue(tmp_path / "set", tmp_path / "new.pt")
    assert (made.exit_code, made.done) == (2, False)
    assert "move it away" in made.warnings[-1]


def test_two_tensors_of_one_name(tmp_path: Path) -> None:
    """One key contains the slash that joins two others, so the name does not tell which one is damaged."""
    folder = tmp_path / "set"
    folder.mkdir()
    file = folder / "model-00001-of-00001.bin"
    torch.save({"a/b": torch.zeros(9), "a": {"b": torch.ones(9)}, "c": torch.ones(2)}, file)
    at = file.read_bytes().index(torch.ones(9).numpy().tobytes())
    for place in range(at, at + 9):
        flip(file, place)
    made = rescue(folder, tmp_path / "new.pt")
    assert [(each.name, each.state) for each in made.tensors] == [("a/b", "lost"), ("a/b", "lost"), ("c", "whole")]
    assert set(loaded(tmp_path / "new.pt")) == {"c"}


def test_a_compressed_shard(tmp_path: Path) -> None:
    """Its repairs are reported, though a compressed storage does not know where it is."""
    files = shards(tmp_path / "set", ".bin")
    torch.save({name: torch.arange(600.0).view(20, 30) for name in list(STATE)[1::3]}, files[1])
    files[1].write_bytes(rezipped(files[1].read_bytes(), compression=zipfile.ZIP_DEFLATED))
    record = next(each for each in transload.inspect(files[1]).records if each.name == "data/1")
    flip(files[1], (record.offset or 0) + record.stored // 2)
    made = rescue(tmp_path / "set", tmp_path / "new.pt")
    assert (made.exit_code, [each.name for each in made.mended]) == (0, ["layer4.weight"])
    assert all(each.checked for each in made.tensors)
    assert torch.equal(loaded(tmp_path / "new.pt")["layer4.weight"], torch.arange(600.0).view(20, 30))


def test_whole_files_become_one(tmp_path: Path) -> None:
    shards(tmp_path / "set", ".bin")
    assert rescue(tmp_path / "set", tmp_path / "new.pt").exit_code == 0
    assert same(tmp_path / "new.pt", list(STATE))


# -- torch.distributed.checkpoint


def test_a_distributed_checkpoint_that_was_not_finished(tmp_path: Path) -> None:
    """Wherever a rank file ends, what is before it is saved, going by torch's own offsets."""
    file = distributed(tmp_path / "whole")
    table = dcp.FileSystemReader(tmp_path / "whole").read_metadata().storage_data
    ends = {index.fqn: info.offset + info.length for index, info in table.items()}
    dice, counts = random.Random(3), set()  # noqa: S311 - the same each time
    size = file.stat().st_size
    for at in sorted(dice.sample(range(2000, size), 12)):
        folder = tmp_path / str(at)
        shutil.copytree(tmp_path / "whole", folder)
        cut(folder / file.name, at)
        made = rescue(folder, tmp_path / f"{at}.pt")
        kept = [each.name for each in made.whole]
        surely = {name for name, end in ends.items() if end <= at and name.startswith("model.")}
        assert surely <= set(kept)
        assert len(set(kept) - surely) <= 1  # one whose bytes are there, and the end of its archive is not
        assert made.done == bool(kept)
        assert not kept or same(tmp_path / f"{at}.pt", [name.removeprefix("model.") for name in kept], "model.")
        counts.add(len(kept))
    assert len(counts) > 4


def test_a_distributed_checkpoint_with_a_flipped_bit(tmp_path: Path) -> None:
    file = distributed(tmp_path / "set")
    flip(file, file.read_bytes().find(STATE["layer5.weight"].numpy().tobytes()) + 100)
    made = rescue(tmp_path / "set", tmp_path / "new.safetensors")
    assert made.exit_code == 0
    assert [each.name for each in made.mended] == ["model.layer5.weight"]
    assert same(tmp_path / "new.safetensors", list(STATE), "model.")
    leftovers = tmp_path / "new.safetensors.leftovers.json"
    assert json.loads(leftovers.read_text(encoding="utf-8"))["data"] == {"epoch": 3}


def test_the_pickle_of_one_tensor_of_a_distributed_checkpoint(tmp_path: Path) -> None:
    """It has a stride in it: nothing else in the directory says that the elements are in another order."""
    file = distributed(tmp_path / "whole")
    data = file.read_bytes()
    begin = data.rfind(b"\x80\x02", 0, data.index(b"_rebuild_tensor_v2"))
    for at in range(begin, data.index(b"PK\x07\x08", begin), 3):
        shutil.copytree(tmp_path / "whole", tmp_path / "set", dirs_exist_ok=True)
        flip(tmp_path / "set" / file.name, at)
        made = rescue(tmp_path / "set", tmp_path / "new.pt", overwrite=True)
        held = loaded(tmp_path / "new.pt")
        assert made.exit_code == 1, at
        assert all(torch.equal(value, STATE[name.removeprefix("model.")]) for name, value in held.items()), at
        assert len(held) == len(STATE) - 1, at


def test_a_value_of_a_distributed_checkpoint(tmp_path: Path) -> None:
    file = distributed(tmp_path / "set")
    flip(file, file.read_bytes().index(b"\x80\x02K\x03.") + 3)
    made = rescue(tmp_path / "set", tmp_path / "new.pt")
    assert (made.exit_code, len(made.records)) == (1, 1)
    assert made.records[0].name.endswith("data.pkl")


def test_many_tensors_lack_a_rank(tmp_path: Path) -> None:
    """More than the reader names: those that are whole are saved all the same."""
    reader = pytest.importorskip("torch.distributed.checkpoint.metadata")
    file = distributed(tmp_path / "set")
    path = file.parent / ".metadata"
    table = pickle.loads(path.read_bytes())
    for number in range(30):
        chunks = [reader.ChunkStorageMetadata(torch.Size([at]), torch.Size([2])) for at in (0, 2)]
        described = table.state_dict_metadata["model.layer0.weight"]
        entry = reader.TensorStorageMetadata(described.properties, torch.Size([4]), chunks)
        table.state_dict_metadata[f"sharded{number}"] = entry
    path.write_bytes(pickle.dumps(table))
    made = rescue(tmp_path / "set", tmp_path / "new.pt")
    assert (made.exit_code, len(made.lost), len(made.whole)) == (1, 30, 9)
    assert same(tmp_path / "new.pt", list(STATE), "model.")
    assert len(transload.verify(tmp_path / "set").damaged) == 30


def test_a_file_of_one_rank_is_not_rescued_alone(tmp_path: Path) -> None:
    file = distributed(tmp_path / "set")
    with pytest.raises(RescueError, match="one of the files") as refused:
        rescue(file, tmp_path / "new.pt")
    assert refused.value.fix.splitlines()[1] == f"$ transload rescue {tmp_path}/set NEW.pt"


# -- ranks, and bad input


def test_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "global_step1"
    folder.mkdir(parents=True)
    file = folder / "mp_rank_00_model_states.pt"
    torch.save({"module": dict(STATE), "dp_world_size": 1, "mp_world_size": 1}, file)
    assert transload.inspect(tmp_path / "run").format == "deepspeed"
    flip(file, file.read_bytes().find(STATE["layer1.weight"].numpy().tobytes()) + 10)
    at = file.read_bytes().find(STATE["layer6.weight"].numpy().tobytes())
    for place in range(at, at + 8):
        flip(file, place)
    made = rescue(tmp_path / "run", tmp_path / "new.safetensors")
    assert ([each.state for each in made.tensors].count("whole"), len(made.mended), len(made.lost)) == (7, 1, 1)
    assert "layer6.weight" in made.lost[0].name
    held = load_file(tmp_path / "new.safetensors")
    assert len(held) == 8
    assert all(torch.equal(value, STATE[name[-13:]]) for name, value in held.items())


def test_nothing_is_left(tmp_path: Path) -> None:
    for file in shards(tmp_path / "set", ".safetensors"):
        cut(file, 600)
    made = rescue(tmp_path / "set", tmp_path / "new.pt")
    assert (made.exit_code, made.how, made.done) == (2, "nothing", False)
    assert not (tmp_path / "new.pt").exists()


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    files = shards(tmp_path / "set", ".safetensors")
    cut(files[2], 3000)
    before = set(tmp_path.rglob("*"))
    assert rescue(tmp_path / "set", dry_run=True).exit_code == 1
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("options", [{"fill": "zeros"}, {"member": "x"}], ids=["fill", "member"])
def test_options_for_one_file_only(tmp_path: Path, options: dict[str, Any]) -> None:
    shards(tmp_path / "set", ".safetensors")
    with pytest.raises(UsageError, match="several files"):
        rescue(tmp_path / "set", tmp_path / "new.pt", **options)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    files = shards(tmp_path / "set", ".safetensors")
    (tmp_path / "new.pt").write_bytes(b"mine")
    with pytest.raises(UsageError, match="exists"):
        rescue(tmp_path / "set", tmp_path / "new.pt")
    with pytest.raises(UsageError):
        rescue(tmp_path / "set", files[0])
    with pytest.raises(UsageError):
        rescue(tmp_path / "set", files[0], overwrite=True)
    assert rescue(tmp_path / "set", tmp_path / "new.pt", overwrite=True).exit_code == 0
    assert same(tmp_path / "new.pt", list(STATE))


def test_a_directory_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(RescueError, match="neither a checkpoint of several files"):
        rescue(tmp_path, tmp_path / "new.pt")


def test_a_hostile_index(tmp_path: Path) -> None:
    shards(tmp_path / "other", ".safetensors")
    folder = tmp_path / "set"
    folder.mkdir()
    index = {"weight_map": {"layer0.weight": "../other/model-00001-of-00003.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    made = rescue(folder, tmp_path / "new.pt")
    assert (made.exit_code, [each.state for each in made.tensors]) == (2, ["lost"])
