"""What ``verify`` reports: damaged tensors by name, and one hash for the same tensors in every container."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from tests import forge
from tests.each import each
from tests.makers import saved

import transload
from transload.cli.commands import expand_paths
from transload.errors import BrokenFileError, CannotReadError
from transload.opening import inspect
from transload.opening.damage import Damage
from transload.render.lines import as_text
from transload.verifying import Verification, report, verify

DATA = Path(__file__).parent.parent / "data"


def state() -> dict[str, torch.Tensor]:
    torch.default_generator.manual_seed(0)
    return {
        "embed.weight": torch.randn(40, 8),
        "layers.0.weight": torch.randn(8, 8).bfloat16(),
        "layers.0.bias": torch.arange(8),
        "mask": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]


def damaged_names(result: Verification) -> list[str]:
    return [damage.name for damage in result.damaged]


def recorded_files() -> list[Any]:
    out = []
    for index in sorted(DATA.glob("torch-releases/*/expected.json")):
        for name, recorded in json.loads(index.read_text())["files"].items():
            out.append(pytest.param(index.parent / name, recorded["tensors"], id=f"{index.parent.name}/{name}"))
    return out


@each(("path", "recorded"), recorded_files())
def test_hashes_of_fixtures_equal_the_recorded_ones(path: Path, recorded: dict[str, Any]) -> None:
    result = verify(path, hashes=True)
    assert result.ok
    assert result.integrity == ("whole" if path.read_bytes()[:2] == b"PK" else "unchecked")
    hashed = {"/" + tensor.name: tensor.sha256 for tensor in result.tensors if tensor.sha256}
    expected = {name: entry["sha256"] for name, entry in recorded.items() if entry["sha256"]}
    # The recorded hashes of quantized and sparse tensors do not cover their integers and parts.
    assert {name: hashed[name] for name in expected if name in hashed and "quant" not in name} == {
        name: entry for name, entry in expected.items() if name in hashed and "quant" not in name
    }
    assert len(result.sha256) == 64


# -- damage, by tensor name


def test_damaged_tensor_is_reported_by_name() -> None:
    data = saved(state())
    for tensor in inspect(data).tensors:
        if not tensor.nbytes:
            continue
        result = verify(flipped(data, tensor.file_offset or 0))
        assert damaged_names(result) == [tensor.name]
        assert result.damaged[0].kind == "checksum"
        assert (result.ok, result.integrity) == (False, "damaged")


def test_damage_is_reported_for_every_tensor_of_a_storage() -> None:
    values = state()
    values["head.weight"] = values["embed.weight"]
    data = saved(values)
    for name in ("embed.weight", "layers.0.bias"):
        data = flipped(data, inspect(data).tensor(name).file_offset or 0)
    assert damaged_names(verify(data)) == ["embed.weight", "layers.0.bias", "head.weight"]


def test_damage_in_a_part_is_reported_for_its_sparse_tensor() -> None:
    data = saved({"plain": torch.ones(3), "sparse": torch.eye(4).to_sparse()})
    part = inspect(data).tensor("sparse").parts[1]
    assert damaged_names(verify(flipped(data, part.file_offset or 0))) == ["sparse"]


def test_damaged_index_is_reported_as_a_finding() -> None:
    data = forge.checkpoint()
    at = data.index(b"w0")
    result = verify(flipped(data, at + 1))
    assert not result.ok
    assert "crc-mismatch" in {finding.code for finding in result.findings}


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}], ids=["zip", "legacy"])
def test_truncated_file_damages_only_the_tensors_after_the_cut(options: dict[str, Any]) -> None:
    data = saved(state(), **options)
    checkpoint = inspect(data)
    ends = {t.name: (t.file_offset or 0) + t.nbytes for t in checkpoint.tensors if t.nbytes}
    for cut in range(max(0, min(ends.values()) - 8), len(data), 37):
        result = verify(data[:cut])
        if inspect(data[:cut]).tensors:
            assert set(damaged_names(result)) == {name for name, end in ends.items() if end > cut}, cut


def test_truncated_safetensors_damages_only_the_tensors_after_the_cut(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(state(), path)
    data = path.read_bytes()
    ends = {t.name: (t.file_offset or 0) + t.nbytes for t in inspect(data).tensors if t.nbytes}
    for cut in range(min(ends.values()) - 1, len(data), 41):
        result = verify(data[:cut])
        assert set(damaged_names(result)) == {name for name, end in ends.items() if end > cut}, cut
        assert all(damage.kind == "cut" for damage in result.damaged)
    assert verify(data).integrity == "unchecked"


def test_storage_of_the_wrong_size_is_reported() -> None:
    longer = forge.with_changes(forge.entries(), "data/1", data=bytes(20))
    (damage,) = verify(forge.archive(longer)).damaged
    assert damage == Damage("w1", "broken", "data/1 holds 20 bytes, the index expects 16")
    shorter = forge.with_changes(forge.entries(), "data/1", data=bytes(12))
    (damage,) = verify(forge.archive(shorter)).damaged
    assert (damage.name, damage.kind) == ("w1", "cut")


def test_damaged_deflated_record_is_reported() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(state()))) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    data = out.getvalue()
    assert "checksum" not in {damage.kind for damage in verify(data, hashes=True).damaged}
    record = next(record for record in inspect(data).records if record.name == "data/0")
    for hashes in (False, True):
        result = verify(flipped(data, (record.offset or 0) + 40), hashes=hashes)
        assert damaged_names(result) == ["embed.weight"]


def test_unreadable_sector_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.pt"
    torch.save(state(), path)
    offset = inspect(path).tensor("layers.0.weight").file_offset or 0
    from transload.io.sources import FileSource

    def failing_readinto(self: FileSource, at: int, buffer: memoryview, real: Any = FileSource.readinto) -> int:
        if at <= offset < at + len(buffer):
            raise CannotReadError("Input/output error", where=self.name)
        return int(real(self, at, buffer))

    monkeypatch.setattr(FileSource, "readinto", failing_readinto)
    for hashes in (False, True):
        (damage,) = verify(path, hashes=hashes).damaged
        assert (damage.name, damage.kind) == ("layers.0.weight", "unreadable")
        assert "Input/output error" in damage.detail


# -- shards and directories


def write_shards(folder: Path, *, suffix: str = "safetensors") -> dict[str, str]:
    """Write the state as three shards with an index; return the file of each tensor."""
    weights: dict[str, str] = {}
    for number, names in enumerate((("embed.weight",), ("layers.0.weight", "layers.0.bias"), ("mask", "scalar")), 1):
        file = f"model-{number:05d}-of-00003.{suffix}"
        tensors = {name: state()[name] for name in names}
        save_file(tensors, folder / file) if suffix == "safetensors" else torch.save(tensors, folder / file)
        weights |= dict.fromkeys(names, file)
    total = sum(state()[name].nbytes for name in weights)
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    (folder / f"model.{suffix}.index.json").write_text(json.dumps(index))
    return weights


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_missing_shard_is_reported_by_tensor(tmp_path: Path, suffix: str) -> None:
    weights = write_shards(tmp_path, suffix=suffix)
    index = tmp_path / f"model.{suffix}.index.json"
    for path in (tmp_path, index):
        result = verify(path)
        assert result.ok
        assert result.integrity == ("whole" if suffix == "bin" else "unchecked")
    (tmp_path / weights["mask"]).unlink()
    result = verify(tmp_path)
    assert [(damage.name, damage.kind) for damage in result.damaged] == [("mask", "missing"), ("scalar", "missing")]


def test_flipped_bit_in_a_shard_is_reported(tmp_path: Path) -> None:
    weights = write_shards(tmp_path, suffix="bin")
    shard = tmp_path / weights["layers.0.bias"]
    shard.write_bytes(flipped(shard.read_bytes(), inspect(shard).tensor("layers.0.bias").file_offset or 0))
    (damage,) = verify(tmp_path).damaged
    assert damage.name == "layers.0.bias"
    assert damage.detail.startswith(f"{shard.name} › data/")
    with_hashes = verify(tmp_path, hashes=True)
    assert with_hashes.damaged == (damage,)


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_distributed_checkpoint_is_verified(tmp_path: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    if not hasattr(dcp, "save"):
        pytest.skip("this torch has no dcp.save")
    values = {name: value for name, value in state().items() if value.numel()}
    path = tmp_path / "step"
    try:
        dcp.save(values, checkpoint_id=path, no_dist=True)
    except TypeError:  # older releases
        dcp.save(values, checkpoint_id=path)
    result = verify(path, hashes=True)
    # .metadata has no checksum: a changed bit in the name of a tensor cannot be detected.
    assert (result.ok, result.integrity, result.unsummed) == (True, "unchecked", 1)
    assert result.checksums == len(values)
    assert result.sha256 == verify(saved(values), hashes=True).sha256
    checkpoint = inspect(path)
    storage = next(s for s in checkpoint.storages if s.id == checkpoint.tensor("embed.weight").storage)
    file = path / storage.file
    file.write_bytes(flipped(file.read_bytes(), storage.offset or 0))
    assert damaged_names(verify(path)) == ["embed.weight"]


def test_unpacked_archive_is_verified(tmp_path: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(saved(state()))) as archive:
        archive.extractall(tmp_path)
    result = verify(tmp_path, hashes=True)
    assert (result.ok, result.integrity, result.checksums) == (True, "unchecked", 0)
    assert result.sha256 == verify(saved(state()), hashes=True).sha256
    (longest,) = (file for file in tmp_path.rglob("data/0"))
    longest.write_bytes(longest.read_bytes()[:-4])
    assert damaged_names(verify(tmp_path)) == ["embed.weight"]


def test_expand_paths_finds_the_checkpoints_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for name in ("runs/a.pt", "runs/b.pt"):
        torch.save(state(), tmp_path / name)

    def expanded(name: str) -> list[str]:
        return expand_paths([name], str)[0]

    assert expanded(str(tmp_path)) == [str(tmp_path / "runs" / "a.pt"), str(tmp_path / "runs" / "b.pt")]
    save_file(state(), tmp_path / "model.safetensors")
    torch.save(state(), tmp_path / "optimizer.pt")
    assert expanded(str(tmp_path)) == [str(tmp_path), str(tmp_path / "optimizer.pt")]
    assert expanded(str(tmp_path / "runs" / "a.pt")) == [str(tmp_path / "runs" / "a.pt")]


# -- hashes


def test_hash_is_the_same_in_every_container(tmp_path: Path) -> None:
    values = {name: value for name, value in state().items() if name != "empty"}
    save_file(values, tmp_path / "model.safetensors")
    (tmp_path / "shards").mkdir()
    write_shards(tmp_path / "shards")
    transposed = {name: value.t().contiguous().t() if value.ndim == 2 else value for name, value in values.items()}
    containers = {
        "zip": saved(values),
        "legacy": saved(values, _use_new_zipfile_serialization=False),
        "another order": saved(dict(reversed(values.items()))),
        "strided": saved(transposed),
        "safetensors": tmp_path / "model.safetensors",
        "shards": tmp_path / "shards",
    }
    assert len({verify(f, hashes=True).sha256 for f in containers.values()}) == 1  # type: ignore[arg-type]


@each(
    "change",
    [
        pytest.param(lambda v: v | {"scalar": torch.tensor(2.25)}, id="a value"),
        pytest.param(lambda v: v | {"embed.weight": v["embed.weight"].reshape(8, 40)}, id="a shape"),
        pytest.param(lambda v: v | {"layers.0.bias": v["layers.0.bias"].view(torch.float64)}, id="a dtype"),
        pytest.param(lambda v: v | {"more": torch.ones(1)}, id="an added tensor"),
        pytest.param(lambda v: {name.replace("mask", "task"): value for name, value in v.items()}, id="a name"),
    ],
)
def test_hash_differs_after_any_change(change: Any) -> None:
    assert verify(saved(change(state())), hashes=True).sha256 != verify(saved(state()), hashes=True).sha256


def test_tied_tensors_in_safetensors_give_the_hash_of_the_state_dict(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(10, 4)
            self.head = torch.nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    save_model(model, str(tmp_path / "tied.safetensors"))
    in_safetensors = verify(tmp_path / "tied.safetensors", hashes=True)
    assert in_safetensors.tensor_count == 1
    assert in_safetensors.sha256 == verify(saved(model.state_dict()), hashes=True).sha256


def test_alias_repeated_in_every_shard_is_hashed_once(tmp_path: Path) -> None:
    """Each shard may repeat all metadata, and ``format`` is not an alias, even if a tensor is called ``pt``."""
    values = {"pt": torch.arange(4.0), "b": torch.ones(2)}
    for number, name in enumerate(values, 1):
        shard = tmp_path / f"model-0000{number}-of-00002.safetensors"
        save_file({name: values[name]}, shard, {"format": "pt", "head": "pt"})
    result = verify(tmp_path, hashes=True)
    assert result.sha256 == verify(saved({**values, "head": values["pt"]}), hashes=True).sha256


def test_tensors_sharing_a_storage_are_all_hashed() -> None:
    shared = torch.randn(100)
    result = verify(saved({"a": shared, "b": shared, "c": shared[10:20]}), hashes=True)
    assert [tensor.name for tensor in result.tensors] == ["a", "b", "c"]
    assert result.tensors[0].sha256 == result.tensors[1].sha256 != result.tensors[2].sha256


def test_tensor_that_claims_more_than_the_file_is_not_hashed() -> None:
    result = verify(saved({"x": torch.zeros(1).expand(1 << 30, 1 << 10), "y": torch.ones(2)}), hashes=True)
    assert [bool(tensor.sha256) for tensor in result.tensors] == [False, True]
    assert "claims" in result.tensors[0].note
    assert result.ok
    assert result.sha256 == ""


def test_nan_and_infinity_are_counted_per_tensor() -> None:
    half = torch.zeros(9, dtype=torch.float16)
    half[2], half[3:5] = float("nan"), float("-inf")
    result = verify(saved({"half": half, "whole": torch.ones(5), "count": torch.arange(3)}), values=True)
    assert [(tensor.nan, tensor.inf) for tensor in result.tensors] == [(1, 2), (0, 0), (None, None)]
    assert result.sha256 == ""
    assert result.ok


@pytest.mark.parametrize(
    ("count", "message"), [(1, "1 further entry without elements of its own"), (2, "2 further entries")]
)
def test_report_counts_sparse_entries(count: int, message: str) -> None:
    result = verify(saved({f"w{n}": torch.eye(2).to_sparse() for n in range(count)}), hashes=True)
    assert message in as_text(report(result, hashes=True))


@pytest.mark.parametrize("options", [{}, {"hashes": True}, {"values": True}, {"hashes": True, "values": True}], ids=str)
def test_large_tensors_are_verified_with_all_options(options: dict[str, bool], tmp_path: Path) -> None:
    values = {f"w{i}": torch.arange(i, i + (1 << 20), dtype=torch.float32) for i in range(5)}
    path = tmp_path / "model.pt"
    torch.save(values, path)
    reported: list[tuple[int, int]] = []
    result = verify(path, **options, progress=lambda done, total: reported.append((done, total)))  # type: ignore[arg-type]
    assert (result.integrity, result.checksums) == ("whole", len(inspect(path).records))
    assert reported[-1][0] == result.nbytes_read >= 5 << 22
    offset = inspect(path).tensor("w3").file_offset or 0
    path.write_bytes(flipped(path.read_bytes(), offset + 3_000_000))
    assert damaged_names(verify(path, **options)) == ["w3"]  # type: ignore[arg-type]


# -- bad input


@pytest.mark.parametrize("data", [b"", b"<html>", b"PK\x03\x04", bytes(2000)], ids=["empty", "html", "zip", "zeros"])
def test_content_that_is_not_a_checkpoint_is_not_ok(data: bytes) -> None:
    result = verify(data, hashes=True, values=True)
    assert not result.ok
    assert result.findings
    assert result.sha256 == ""
    assert "not-a-checkpoint" in str(result) or "damaged" in str(result)


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CannotReadError):
        verify(tmp_path / "absent.pt")


def test_verify_is_public() -> None:
    assert transload.verify is verify
    assert transload.Verification is Verification


@pytest.mark.parametrize("path", ["a\0b", "a\ud800b"], ids=["NUL", "lone surrogate"])
def test_impossible_path_is_an_error(path: str) -> None:
    with pytest.raises(CannotReadError):
        verify(path)


def test_tensor_without_its_header_is_reported() -> None:
    """Its bytes may be present, but nothing says where. The report is the same with hashes."""
    data = bytearray(saved(state()))
    name = next(tensor.name for tensor in inspect(bytes(data)).tensors if tensor.nbytes)
    at = data.rindex(b"PK\x03\x04", 0, data.index(b"/data/0"))
    data[at : at + 4] = b"\0\0\0\0"
    for hashes in (False, True):
        (damage,) = [item for item in verify(bytes(data), hashes=hashes).damaged if item.name == name]
        assert damage.kind == "cut"
        assert "where its record begins" in damage.detail


def test_no_rescue_is_suggested_that_would_save_nothing(tmp_path: Path) -> None:
    """Without its index, no tensor of a DCP directory is found."""
    (tmp_path / "__0_0.distcp").write_bytes(saved(state()))
    result = verify(tmp_path)
    assert (result.format, result.integrity) == ("dcp", "damaged")
    assert "transload rescue" not in str(result)
    assert transload.rescue(tmp_path, tmp_path.with_suffix(".pt"), dry_run=True).exit_code == 2


def test_a_file_that_changes_meanwhile_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(saved(state()))
    with pytest.raises(BrokenFileError, match="was changed while it was read"):
        verify(path, progress=lambda *_: os.utime(path, ns=(0, 0)))
