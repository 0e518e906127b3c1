"""Checkpoints of several files: all intact tensors go into one file, whatever happened to the others."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import zipfile
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from tests.makers import codes
from tests.rescuing.makers import rezipped

import transload
from transload import RescueError, UsageError, inspect, rescue
from transload.writing import to_dcp

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed warns that it is used by one process
STATE = {f"layer{index}.weight": torch.arange(600.0).mul(index + 1).sin().view(20, 30) for index in range(9)}


def flip_bit(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 8
    path.write_bytes(data)


def truncate(path: Path, at: int) -> None:
    path.write_bytes(path.read_bytes()[:at])


def write_shards(folder: Path, suffix: str) -> list[Path]:
    """Write three files of three tensors each, and their index."""
    folder.mkdir()
    names = list(STATE)
    weights: dict[str, str] = {}
    for number in range(3):
        file_name = f"model-{number + 1:05}-of-00003{suffix}"
        tensors = {name: STATE[name].clone() for name in names[number::3]}
        torch.save(tensors, folder / "model.pt")
        if suffix == ".safetensors":
            transload.convert(folder / "model.pt", folder / file_name)
            (folder / "model.pt").unlink()
        else:
            (folder / "model.pt").rename(folder / file_name)
        weights |= dict.fromkeys(tensors, file_name)
    index = {"metadata": {"total_size": 9 * 2400}, "weight_map": weights}
    (folder / f"model{suffix}.index.json").write_text(json.dumps(index), encoding="utf-8")
    return sorted(folder.glob(f"*{suffix}"))


def write_distributed(folder: Path) -> Path:
    if not hasattr(dcp, "save"):
        pytest.skip("this torch has no dcp.save")
    dcp.save({"model": {name: value.clone() for name, value in STATE.items()}, "epoch": 3}, checkpoint_id=folder)
    return folder / "__0_0.distcp"


def load(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, under the names they have in the source: those of DCP are flat."""
    tensors = load_file(path) if path.suffix == ".safetensors" else torch.load(path)
    model = tensors.get("model")
    return tensors if model is None else {f"model.{name}": value for name, value in model.items()}


def contains_exactly(path: Path, names: list[str], prefix: str = "") -> bool:
    """Whether a file holds exactly these tensors, unchanged."""
    tensors = load(path)
    return set(tensors) == {prefix + name for name in names} and all(
        torch.equal(tensors[prefix + name], STATE[name]) for name in names
    )


@pytest.mark.parametrize("out", ["new.pt", "new.safetensors"])
@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@pytest.mark.parametrize("by_index", [False, True], ids=["folder", "index"])
def test_truncated_shard_loses_only_its_incomplete_tensors(
    tmp_path: Path, suffix: str, out: str, by_index: bool
) -> None:
    files = write_shards(tmp_path / "set", suffix)
    source = tmp_path / "set" / (f"model{suffix}.index.json" if by_index else "")
    truncate(files[1], files[1].read_bytes().find(STATE["layer4.weight"].numpy().tobytes()) + 2399)  # all but one byte
    before = {path: path.read_bytes() for path in (tmp_path / "set").iterdir()}
    result = rescue(source, tmp_path / out)
    lost = [tensor.name for tensor in result.lost]
    assert (result.exit_code, result.how, len(lost)) == (1, "left-out", 2)
    assert set(lost) <= set(list(STATE)[1::3])
    assert contains_exactly(tmp_path / out, [name for name in STATE if name not in lost])
    assert {path: path.read_bytes() for path in (tmp_path / "set").iterdir()} == before
    report = json.loads((tmp_path / f"{out}.rescue.json").read_text(encoding="utf-8"))
    assert report["counts"] == {"whole": 7, "repaired": 0, "lost": 2}


def test_missing_shard_loses_its_tensors(tmp_path: Path) -> None:
    files = write_shards(tmp_path / "set", ".safetensors")
    files[0].unlink()
    result = rescue(tmp_path / "set", tmp_path / "new.pt")
    assert (result.exit_code, [tensor.name for tensor in result.lost]) == (1, list(STATE)[::3])
    assert "model-00001-of-00003.safetensors" in result.lost[0].why
    assert "lost        3 tensors\n" in str(result)  # nothing says how large they were
    assert " 0 B" not in str(result)
    assert contains_exactly(tmp_path / "new.pt", [name for name in STATE if name not in list(STATE)[::3]])


def test_flipped_bits_in_shards_are_repaired(tmp_path: Path) -> None:
    files = write_shards(tmp_path / "set", ".bin")
    for file, tensor in ((files[0], "layer3.weight"), (files[2], "layer2.weight")):
        at = file.read_bytes().find(STATE[tensor].numpy().tobytes())
        flip_bit(file, at + 777)
    result = rescue(tmp_path / "set", tmp_path / "new.safetensors")
    assert result.exit_code == 0
    assert [outcome.name for outcome in result.repaired] == ["layer3.weight", "layer2.weight"]
    assert {repair.record.partition(" › ")[0] for repair in result.repairs} == {files[0].name, files[2].name}
    assert all(outcome.checked for outcome in result.tensors)
    assert contains_exactly(tmp_path / "new.safetensors", list(STATE))


def test_shard_with_a_damaged_pickle_is_left_out(tmp_path: Path) -> None:
    files = write_shards(tmp_path / "set", ".bin")
    flip_bit(files[1], files[1].read_bytes().find(b"layer4.weight") + 5)  # now layer<.weight
    result = rescue(tmp_path / "set", tmp_path / "new.pt")
    assert result.exit_code == 1
    assert result.records[0].name == f"{files[1].name} › data.pkl"
    rescued = load(tmp_path / "new.pt")
    assert set(rescued) == set(STATE) - set(list(STATE)[1::3])


@pytest.mark.parametrize("size", [-1, 0, 10], ids=["missing", "empty", "truncated"])
@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_unreadable_shard_without_an_index_is_reported(suffix: str, size: int, tmp_path: Path) -> None:
    """By the number in its name; its contents are unknown."""
    files = write_shards(tmp_path / "set", suffix)
    next((tmp_path / "set").glob("*.json")).unlink()
    files[1].unlink() if size < 0 else truncate(files[1], size)
    result = rescue(tmp_path / "set", tmp_path / "new.pt")
    assert (result.exit_code, result.how) == (1, "left-out")
    assert files[1].name in result.warnings[0]
    assert contains_exactly(tmp_path / "new.pt", [name for name in STATE if name not in list(STATE)[1::3]])


@pytest.mark.parametrize("change", [b"", b"sixteen bytes..."], ids=["removed", "inserted"])
@pytest.mark.parametrize("legacy", [False, True], ids=["archive", "stream"])
def test_bytes_inserted_into_or_removed_from_a_shard_are_detected(legacy: bool, change: bytes, tmp_path: Path) -> None:
    """After the change, no checksum or count is where it should be."""
    files = write_shards(tmp_path / "set", ".bin")
    if legacy:
        torch.save(torch.load(files[1]), files[1], _use_new_zipfile_serialization=False)
    data = files[1].read_bytes()
    first = min(transload.inspect(files[1]).tensors, key=lambda tensor: tensor.file_offset or 0).name
    at = data.index(STATE[first].numpy().tobytes()) + 800
    files[1].write_bytes(data[:at] + change + data[at if change else at + 16 :])
    result = rescue(tmp_path / "set", tmp_path / "new.pt")
    rescued = load(tmp_path / "new.pt")
    assert result.exit_code == 1
    assert first in {tensor.name for tensor in result.lost}
    assert all(torch.equal(value, STATE[name]) for name, value in rescued.items())
    assert set(rescued) == {tensor.name for tensor in result.whole} >= {*list(STATE)[::3], *list(STATE)[2::3]}
    assert first in {damage.name for damage in transload.verify(tmp_path / "set").damaged}


def test_unreadable_index_is_reported_and_nothing_written(tmp_path: Path) -> None:
    write_shards(tmp_path / "set", ".bin")
    truncate(next((tmp_path / "set").glob("*.json")), 100)
    result = rescue(tmp_path / "set", tmp_path / "new.pt")
    assert (result.exit_code, result.done) == (2, False)
    assert "move it away" in result.warnings[-1]


def test_damage_to_one_of_two_tensors_with_the_same_name_loses_both(tmp_path: Path) -> None:
    """One key contains the slash that joins two others, so the name does not say which tensor is damaged."""
    folder = tmp_path / "set"
    folder.mkdir()
    file = folder / "model-00001-of-00001.bin"
    torch.save({"a/b": torch.zeros(9), "a": {"b": torch.ones(9)}, "c": torch.ones(2)}, file)
    at = file.read_bytes().index(torch.ones(9).numpy().tobytes())
    for place in range(at, at + 9):
        flip_bit(file, place)
    result = rescue(folder, tmp_path / "new.pt")
    assert [(tensor.name, tensor.state) for tensor in result.tensors] == [
        ("a/b", "lost"),
        ("a/b", "lost"),
        ("c", "whole"),
    ]
    assert set(load(tmp_path / "new.pt")) == {"c"}


def test_flipped_bit_in_a_compressed_shard_is_repaired(tmp_path: Path) -> None:
    """The repair is reported although a compressed storage has no file offset."""
    files = write_shards(tmp_path / "set", ".bin")
    torch.save({name: torch.arange(600.0).view(20, 30) for name in list(STATE)[1::3]}, files[1])
    files[1].write_bytes(rezipped(files[1].read_bytes(), compression=zipfile.ZIP_DEFLATED))
    record = next(item for item in transload.inspect(files[1]).records if item.name == "data/1")
    flip_bit(files[1], (record.offset or 0) + record.stored // 2)
    result = rescue(tmp_path / "set", tmp_path / "new.pt")
    assert (result.exit_code, [item.name for item in result.repaired]) == (0, ["layer4.weight"])
    assert all(item.checked for item in result.tensors)
    assert torch.equal(load(tmp_path / "new.pt")["layer4.weight"], torch.arange(600.0).view(20, 30))


def test_intact_shards_are_merged(tmp_path: Path) -> None:
    write_shards(tmp_path / "set", ".bin")
    assert rescue(tmp_path / "set", tmp_path / "new.pt").exit_code == 0
    assert contains_exactly(tmp_path / "new.pt", list(STATE))


# -- torch.distributed.checkpoint


def test_truncated_distributed_checkpoint_yields_the_tensors_before_the_cut(tmp_path: Path) -> None:
    """Wherever a rank file ends, the tensors before that offset, as torch recorded it, are saved."""
    file = write_distributed(tmp_path / "whole")
    table = dcp.FileSystemReader(tmp_path / "whole").read_metadata().storage_data
    ends = {index.fqn: info.offset + info.length for index, info in table.items()}
    rng, counts = random.Random(3), set()  # noqa: S311 - reproducible
    size = file.stat().st_size
    for at in sorted(rng.sample(range(2000, size), 12)):
        folder = tmp_path / str(at)
        shutil.copytree(tmp_path / "whole", folder)
        truncate(folder / file.name, at)
        result = rescue(folder, tmp_path / f"{at}.pt")
        kept = [tensor.name for tensor in result.whole]
        before_the_cut = {name for name, end in ends.items() if end <= at and name.startswith("model.")}
        assert before_the_cut <= set(kept)
        assert len(set(kept) - before_the_cut) <= 1  # one whose bytes are present, but not the end of its archive
        assert result.done == bool(kept)
        assert not kept or contains_exactly(
            tmp_path / f"{at}.pt", [name.removeprefix("model.") for name in kept], "model."
        )
        counts.add(len(kept))
    assert len(counts) > 4


def test_flipped_bit_in_a_distributed_checkpoint_is_repaired(tmp_path: Path) -> None:
    file = write_distributed(tmp_path / "set")
    flip_bit(file, file.read_bytes().find(STATE["layer5.weight"].numpy().tobytes()) + 100)
    result = rescue(tmp_path / "set", tmp_path / "new.safetensors")
    assert result.exit_code == 0
    assert [tensor.name for tensor in result.repaired] == ["model.layer5.weight"]
    assert contains_exactly(tmp_path / "new.safetensors", list(STATE), "model.")
    leftovers = tmp_path / "new.safetensors.leftovers.json"
    assert json.loads(leftovers.read_text(encoding="utf-8"))["data"] == {"epoch": 3}


def test_damaged_pickle_in_a_distributed_checkpoint_loses_only_its_tensor(tmp_path: Path) -> None:
    """It contains the stride; nothing else in the directory says that the elements are in another order."""
    file = write_distributed(tmp_path / "whole")
    data = file.read_bytes()
    begin = data.rfind(b"\x80\x02", 0, data.index(b"_rebuild_tensor_v2"))
    for at in range(begin, data.index(b"PK\x07\x08", begin), 3):
        shutil.copytree(tmp_path / "whole", tmp_path / "set", dirs_exist_ok=True)
        flip_bit(tmp_path / "set" / file.name, at)
        result = rescue(tmp_path / "set", tmp_path / "new.pt", overwrite=True)
        rescued = load(tmp_path / "new.pt")
        assert result.exit_code == 1, at
        assert all(torch.equal(value, STATE[name.removeprefix("model.")]) for name, value in rescued.items()), at
        assert len(rescued) == len(STATE) - 1, at


def test_damaged_value_in_a_distributed_checkpoint_is_reported(tmp_path: Path) -> None:
    file = write_distributed(tmp_path / "set")
    flip_bit(file, file.read_bytes().index(b"\x80\x02K\x03.") + 3)
    result = rescue(tmp_path / "set", tmp_path / "new.pt")
    assert (result.exit_code, len(result.records)) == (1, 1)
    assert result.records[0].name.endswith("data.pkl")


def test_tensors_without_their_chunks_are_lost_and_the_others_saved(tmp_path: Path) -> None:
    """More tensors than the reader names; the intact ones are saved anyway."""
    metadata = pytest.importorskip("torch.distributed.checkpoint.metadata")
    file = write_distributed(tmp_path / "set")
    path = file.parent / ".metadata"
    table = pickle.loads(path.read_bytes())
    for number in range(30):
        chunks = [metadata.ChunkStorageMetadata(torch.Size([at]), torch.Size([2])) for at in (0, 2)]
        described = table.state_dict_metadata["model.layer0.weight"]
        entry = metadata.TensorStorageMetadata(described.properties, torch.Size([4]), chunks)
        table.state_dict_metadata[f"sharded{number}"] = entry
    path.write_bytes(pickle.dumps(table))
    result = rescue(tmp_path / "set", tmp_path / "new.pt")
    assert (result.exit_code, len(result.lost), len(result.whole)) == (1, 30, 9)
    assert contains_exactly(tmp_path / "new.pt", list(STATE), "model.")
    assert len(transload.verify(tmp_path / "set").damaged) == 30


def test_file_of_one_rank_alone_is_refused(tmp_path: Path) -> None:
    file = write_distributed(tmp_path / "set")
    with pytest.raises(RescueError, match="one of the files") as refused:
        rescue(file, tmp_path / "new.pt")
    assert refused.value.fix.splitlines()[1] == f"$ transload rescue {tmp_path / 'set'} NEW.pt"


# -- DeepSpeed ranks, and bad input


def test_damaged_deepspeed_rank_file_is_rescued(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "global_step1"
    folder.mkdir(parents=True)
    file = folder / "mp_rank_00_model_states.pt"
    torch.save({"module": dict(STATE), "dp_world_size": 1, "mp_world_size": 1}, file)
    assert transload.inspect(tmp_path / "run").format == "deepspeed"
    flip_bit(file, file.read_bytes().find(STATE["layer1.weight"].numpy().tobytes()) + 10)
    at = file.read_bytes().find(STATE["layer6.weight"].numpy().tobytes())
    for place in range(at, at + 8):
        flip_bit(file, place)
    result = rescue(tmp_path / "run", tmp_path / "new.safetensors")
    assert ([tensor.state for tensor in result.tensors].count("whole"), len(result.repaired), len(result.lost)) == (
        7,
        1,
        1,
    )
    assert "layer6.weight" in result.lost[0].name
    rescued = load_file(tmp_path / "new.safetensors")
    assert len(rescued) == 8
    assert all(torch.equal(value, STATE[name[-13:]]) for name, value in rescued.items())


def test_nothing_is_written_when_no_tensor_is_intact(tmp_path: Path) -> None:
    for file in write_shards(tmp_path / "set", ".safetensors"):
        truncate(file, 600)
    result = rescue(tmp_path / "set", tmp_path / "new.pt")
    assert (result.exit_code, result.how, result.done) == (2, "nothing", False)
    assert not (tmp_path / "new.pt").exists()


def test_dry_run_writes_nothing(tmp_path: Path) -> None:
    files = write_shards(tmp_path / "set", ".safetensors")
    truncate(files[2], 3000)
    before = set(tmp_path.rglob("*"))
    assert rescue(tmp_path / "set", dry_run=True).exit_code == 1
    assert set(tmp_path.rglob("*")) == before


def test_member_is_refused_for_several_files(tmp_path: Path) -> None:
    write_shards(tmp_path / "set", ".safetensors")
    with pytest.raises(UsageError, match="several files"):
        rescue(tmp_path / "set", tmp_path / "new.pt", member="x")


def test_if_no_tensor_is_whole_the_report_says_how_to_keep_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(to_dcp, "SPLIT", 300)
    state = {"a": torch.randn(8, 30)}
    torch.save(state, tmp_path / "whole.pt")
    transload.convert(tmp_path / "whole.pt", tmp_path / "set", to="dcp")
    data = tmp_path / "set" / "__0_0.distcp"
    raw = data.read_bytes()
    data.write_bytes(raw[: raw.index(state["a"][6].numpy().tobytes())])

    result = rescue(tmp_path / "set", tmp_path / "new.pt")
    assert (result.exit_code, result.how) == (2, "nothing")
    assert "--fill zeros" in result.warnings[-1]
    result = rescue(tmp_path / "set", tmp_path / "new.pt", fill="nan")
    assert not any("--fill" in warning for warning in result.warnings)
    assert torch.equal(torch.load(tmp_path / "new.pt")["a"][:6], state["a"][:6])


def test_objects_that_are_lost_with_a_rank_are_listed(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data / "dcp" / "torch-2.15.0", tmp_path / "set")
    (tmp_path / "set" / "__1_0.distcp").unlink()
    result = rescue(tmp_path / "set", tmp_path / "new.pt", fill="zeros")
    assert [record.name for record in result.records] == [
        "optim.param_groups.0.lr",
        "optim.param_groups.0.params",
        "epoch",
    ]
    assert "all tensors, with zeros in place of what is lost" in str(result)
    assert "dcp-object-missing" in codes(inspect(tmp_path / "set"))


@pytest.mark.parametrize("fill", ["zeros", "nan"])
def test_fill_replaces_only_the_rows_that_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fill: Literal["zeros", "nan"]
) -> None:
    monkeypatch.setattr(to_dcp, "SPLIT", 300)
    state = {"a": torch.randn(8, 30), "b": torch.arange(200), "c": torch.randn(2, 2, dtype=torch.complex64)}
    torch.save(state, tmp_path / "whole.pt")
    transload.convert(tmp_path / "whole.pt", tmp_path / "set", to="dcp")
    data = tmp_path / "set" / "__0_0.distcp"
    raw = bytearray(data.read_bytes())
    for row in (2, 3, 6):
        at = raw.index(state["a"][row].numpy().tobytes())
        raw[at : at + 12] = b"overwritten!"
    data.write_bytes(raw[: raw.index(state["b"][150:160].numpy().tobytes())])  # the end of b, all of c

    result = rescue(tmp_path / "set", tmp_path / "new.pt", fill=fill)
    assert (result.exit_code, result.how) == (1, "filled")
    reasons = {outcome.name: outcome.why for outcome in result.lost}
    assert reasons["a"].startswith("[2:4], [6:8] of [8, 30]: ")
    assert "[150:200] of [200]" in reasons["b"]
    lost = {"zeros": 0, "nan": torch.nan}[fill]
    new = torch.load(tmp_path / "new.pt")
    expected = state["a"].clone()
    expected[2:4] = expected[6:8] = lost
    assert torch.equal(new["a"].nan_to_num(7.0), expected.nan_to_num(7.0))
    assert new["b"].tolist() == [*range(150), *[0] * 50]
    assert new["c"].isnan().all() if fill == "nan" else not new["c"].any()


def test_existing_output_needs_overwrite_and_sources_are_never_overwritten(tmp_path: Path) -> None:
    files = write_shards(tmp_path / "set", ".safetensors")
    (tmp_path / "new.pt").write_bytes(b"mine")
    with pytest.raises(UsageError, match="exists"):
        rescue(tmp_path / "set", tmp_path / "new.pt")
    with pytest.raises(UsageError):
        rescue(tmp_path / "set", files[0])
    with pytest.raises(UsageError):
        rescue(tmp_path / "set", files[0], overwrite=True)
    assert rescue(tmp_path / "set", tmp_path / "new.pt", overwrite=True).exit_code == 0
    assert contains_exactly(tmp_path / "new.pt", list(STATE))


def test_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(RescueError, match="neither a checkpoint of several files"):
        rescue(tmp_path, tmp_path.with_suffix(".pt"))


def test_index_entry_outside_the_directory_is_not_read(tmp_path: Path) -> None:
    write_shards(tmp_path / "other", ".safetensors")
    folder = tmp_path / "set"
    folder.mkdir()
    index = {"weight_map": {"layer0.weight": "../other/model-00001-of-00003.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    result = rescue(folder, tmp_path / "new.pt")
    assert (result.exit_code, [tensor.state for tensor in result.tensors]) == (2, ["lost"])
