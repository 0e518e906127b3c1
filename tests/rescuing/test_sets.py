"""Checkpoints of several files: what is whole of them goes into one, whatever happened to some."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import transload
from transload.errors import UsageError
from transload.rescuing import rescue
from transload.rescuing.errors import RescueError

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
        pytest.skip("this torch writes no such directory from one process")
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
    lost = [fate.name for fate in made.lost]
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
    assert (made.exit_code, [fate.name for fate in made.lost]) == (1, list(STATE)[::3])
    assert "model-00001-of-00003.safetensors" in made.lost[0].why
    assert same(tmp_path / "new.pt", [name for name in STATE if name not in list(STATE)[::3]])


def test_flipped_bits_are_undone(tmp_path: Path) -> None:
    files = shards(tmp_path / "set", ".bin")
    for file, tensor in ((files[0], "layer3.weight"), (files[2], "layer2.weight")):
        at = file.read_bytes().find(STATE[tensor].numpy().tobytes())
        flip(file, at + 777)
    made = rescue(tmp_path / "set", tmp_path / "new.safetensors")
    assert made.exit_code == 0
    assert [fate.name for fate in made.mended] == ["layer3.weight", "layer2.weight"]
    assert {mend.record.partition(" › ")[0] for mend in made.mends} == {files[0].name, files[2].name}
    assert all(fate.checked for fate in made.tensors)
    assert same(tmp_path / "new.safetensors", list(STATE))


def test_a_damaged_index_is_not_believed(tmp_path: Path) -> None:
    files = shards(tmp_path / "set", ".bin")
    flip(files[1], files[1].read_bytes().find(b"layer4.weight") + 5)  # now layer<.weight
    made = rescue(tmp_path / "set", tmp_path / "new.pt")
    assert made.exit_code == 1
    assert made.records[0].name == f"{files[1].name} › data.pkl"
    held = loaded(tmp_path / "new.pt")
    assert set(held) == set(STATE) - set(list(STATE)[1::3])


def test_whole_files_become_one(tmp_path: Path) -> None:
    shards(tmp_path / "set", ".bin")
    assert rescue(tmp_path / "set", tmp_path / "new.pt").exit_code == 0
    assert same(tmp_path / "new.pt", list(STATE))


# -- torch.distributed.checkpoint


def test_a_distributed_checkpoint_that_was_not_finished(tmp_path: Path) -> None:
    """Wherever a rank's file ends, what lies before is saved; held against torch's own offsets."""
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
        kept = [fate.name for fate in made.whole]
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
    assert [fate.name for fate in made.mended] == ["model.layer5.weight"]
    assert same(tmp_path / "new.safetensors", list(STATE), "model.")
    leftovers = tmp_path / "new.safetensors.leftovers.json"
    assert json.loads(leftovers.read_text(encoding="utf-8"))["data"] == {"epoch": 3}


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
    assert ([fate.state for fate in made.tensors].count("whole"), len(made.mended), len(made.lost)) == (7, 1, 1)
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


def test_a_plan_writes_nothing(tmp_path: Path) -> None:
    files = shards(tmp_path / "set", ".safetensors")
    cut(files[2], 3000)
    before = set(tmp_path.rglob("*"))
    assert rescue(tmp_path / "set", dry_run=True).exit_code == 1
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("options", [{"fill": "zeros"}, {"member": "x"}], ids=["fill", "member"])
def test_what_is_for_one_file(tmp_path: Path, options: dict[str, Any]) -> None:
    shards(tmp_path / "set", ".safetensors")
    with pytest.raises(UsageError, match="several files"):
        rescue(tmp_path / "set", tmp_path / "new.pt", **options)


def test_nothing_is_written_over(tmp_path: Path) -> None:
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


def test_a_folder_of_anything_else(tmp_path: Path) -> None:
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
    assert (made.exit_code, [fate.state for fate in made.tensors]) == (2, ["lost"])
