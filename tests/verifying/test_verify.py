"""What verify says: every damaged tensor by its key, and one hash for the same tensors in every container."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from tests import forge
from tests.each import each

import transload
from transload.cli.commands import expand_paths
from transload.errors import CannotReadError
from transload.judge import inspect
from transload.render.lines import as_text
from transload.verifying import Damage, Verification, report, verify

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


def saved(value: object, **how: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, **how)
    return out.getvalue()


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]


def named(found: Verification) -> list[str]:
    return [damage.name for damage in found.damaged]


def files() -> list[Any]:
    out = []
    for index in sorted(DATA.glob("torch-releases/*/expected.json")):
        for name, wanted in json.loads(index.read_text())["files"].items():
            out.append(pytest.param(index.parent / name, wanted["tensors"], id=f"{index.parent.name}/{name}"))
    return out


@each(("path", "wanted"), files())
def test_every_release_has_the_hashes_it_had(path: Path, wanted: dict[str, Any]) -> None:
    found = verify(path, hashes=True)
    assert found.ok
    assert found.integrity == ("whole" if path.read_bytes()[:2] == b"PK" else "unchecked")
    hashed = {"/" + tensor.name: tensor.sha256 for tensor in found.tensors if tensor.sha256}
    truths = {name: truth["sha256"] for name, truth in wanted.items() if truth["sha256"]}
    # What the truth has of quantized and sparse tensors is not of their integers and parts.
    assert {name: hashed[name] for name in truths if name in hashed and "quant" not in name} == {
        name: truth for name, truth in truths.items() if name in hashed and "quant" not in name
    }
    assert len(found.sha256) == 64


# -- damage, by the keys of tensors


def test_each_damaged_tensor_is_named_by_its_key() -> None:
    data = saved(state())
    for tensor in inspect(data).tensors:
        if not tensor.nbytes:
            continue
        found = verify(flipped(data, tensor.file_offset or 0))
        assert named(found) == [tensor.name]
        assert found.damaged[0].kind == "checksum"
        assert (found.ok, found.integrity) == (False, "damaged")


def test_several_at_once_and_all_that_share_a_storage() -> None:
    values = state()
    values["head.weight"] = values["embed.weight"]
    data = saved(values)
    for name in ("embed.weight", "layers.0.bias"):
        data = flipped(data, inspect(data).tensor(name).file_offset or 0)
    assert named(verify(data)) == ["embed.weight", "layers.0.bias", "head.weight"]


def test_parts_stand_for_the_tensor_they_make() -> None:
    data = saved({"plain": torch.ones(3), "sparse": torch.eye(4).to_sparse()})
    part = inspect(data).tensor("sparse").parts[1]
    assert named(verify(flipped(data, part.file_offset or 0))) == ["sparse"]


def test_a_damaged_index_is_a_finding_and_no_tensor() -> None:
    data = forge.checkpoint()
    at = data.index(b"w0")
    found = verify(flipped(data, at + 1))
    assert not found.ok
    assert "crc-mismatch" in {finding.code for finding in found.findings}


@pytest.mark.parametrize("how", [{}, {"_use_new_zipfile_serialization": False}], ids=["zip", "legacy"])
def test_a_file_that_is_cut_has_the_tensors_that_are_all_there(how: dict[str, Any]) -> None:
    data = saved(state(), **how)
    whole = inspect(data)
    ends = {t.name: (t.file_offset or 0) + t.nbytes for t in whole.tensors if t.nbytes}
    for cut in range(max(0, min(ends.values()) - 8), len(data), 37):
        found = verify(data[:cut])
        if inspect(data[:cut]).tensors:
            assert set(named(found)) == {name for name, end in ends.items() if end > cut}, cut


def test_a_safetensors_file_that_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(state(), path)
    data = path.read_bytes()
    ends = {t.name: (t.file_offset or 0) + t.nbytes for t in inspect(data).tensors if t.nbytes}
    for cut in range(min(ends.values()) - 1, len(data), 41):
        found = verify(data[:cut])
        assert set(named(found)) == {name for name, end in ends.items() if end > cut}, cut
        assert all(damage.kind == "cut" for damage in found.damaged)
    assert verify(data).integrity == "unchecked"


def test_a_storage_of_another_size_than_the_index_wants() -> None:
    longer = forge.remade(forge.entries(), "data/1", data=bytes(20))
    (damage,) = verify(forge.archive(longer)).damaged
    assert damage == Damage("w1", "broken", "data/1 holds 20 bytes, the index expects 16")
    shorter = forge.remade(forge.entries(), "data/1", data=bytes(12))
    (damage,) = verify(forge.archive(shorter)).damaged
    assert (damage.name, damage.kind) == ("w1", "cut")


def test_a_deflated_record_that_is_damaged() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(state()))) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    data = out.getvalue()
    assert "checksum" not in {damage.kind for damage in verify(data, hashes=True).damaged}
    record = next(record for record in inspect(data).records if record.name == "data/0")
    for hashes in (False, True):
        found = verify(flipped(data, (record.offset or 0) + 40), hashes=hashes)
        assert named(found) == ["embed.weight"]


def test_a_bad_place_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.pt"
    torch.save(state(), path)
    offset = inspect(path).tensor("layers.0.weight").file_offset or 0
    from transload.io.sources import FileSource

    def scratched(self: FileSource, at: int, buffer: memoryview, true: Any = FileSource.readinto) -> int:
        if at <= offset < at + len(buffer):
            raise CannotReadError("Input/output error", where=self.name)
        return int(true(self, at, buffer))

    monkeypatch.setattr(FileSource, "readinto", scratched)
    for hashes in (False, True):
        (damage,) = verify(path, hashes=hashes).damaged
        assert (damage.name, damage.kind) == ("layers.0.weight", "unreadable")
        assert "Input/output error" in damage.detail


# -- shards and directories


def sharded(folder: Path, *, suffix: str = "safetensors") -> dict[str, str]:
    """The state in three shards with an index; which tensor is where."""
    weights: dict[str, str] = {}
    for number, names in enumerate((("embed.weight",), ("layers.0.weight", "layers.0.bias"), ("mask", "scalar")), 1):
        file = f"model-{number:05d}-of-00003.{suffix}"
        held = {name: state()[name] for name in names}
        save_file(held, folder / file) if suffix == "safetensors" else torch.save(held, folder / file)
        weights |= dict.fromkeys(names, file)
    total = sum(state()[name].nbytes for name in weights)
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    (folder / f"model.{suffix}.index.json").write_text(json.dumps(index))
    return weights


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards_against_their_index(tmp_path: Path, suffix: str) -> None:
    weights = sharded(tmp_path, suffix=suffix)
    index = tmp_path / f"model.{suffix}.index.json"
    for path in (tmp_path, index):
        found = verify(path)
        assert found.ok
        assert found.integrity == ("whole" if suffix == "bin" else "unchecked")
    (tmp_path / weights["mask"]).unlink()
    found = verify(tmp_path)
    assert [(damage.name, damage.kind) for damage in found.damaged] == [("mask", "missing"), ("scalar", "missing")]


def test_a_flipped_bit_in_a_shard(tmp_path: Path) -> None:
    weights = sharded(tmp_path, suffix="bin")
    shard = tmp_path / weights["layers.0.bias"]
    shard.write_bytes(flipped(shard.read_bytes(), inspect(shard).tensor("layers.0.bias").file_offset or 0))
    (damage,) = verify(tmp_path).damaged
    assert damage.name == "layers.0.bias"
    assert damage.detail.startswith(f"{shard.name} › data/")
    again = verify(tmp_path, hashes=True)
    assert again.damaged == (damage,)


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_a_distributed_checkpoint(tmp_path: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    if not hasattr(dcp, "save"):
        pytest.skip("this torch has no dcp.save")
    values = {name: value for name, value in state().items() if value.numel()}
    path = tmp_path / "step"
    try:
        dcp.save(values, checkpoint_id=path, no_dist=True)
    except TypeError:  # older releases
        dcp.save(values, checkpoint_id=path)
    found = verify(path, hashes=True)
    assert found.ok
    assert found.checksums == len(values)
    assert found.sha256 == verify(saved(values), hashes=True).sha256
    whole = inspect(path)
    storage = next(s for s in whole.storages if s.id == whole.tensor("embed.weight").storage)
    file = path / storage.file
    file.write_bytes(flipped(file.read_bytes(), storage.offset or 0))
    assert named(verify(path)) == ["embed.weight"]


def test_an_unpacked_archive(tmp_path: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(saved(state()))) as archive:
        archive.extractall(tmp_path)
    found = verify(tmp_path, hashes=True)
    assert (found.ok, found.integrity, found.checksums) == (True, "unchecked", 0)
    assert found.sha256 == verify(saved(state()), hashes=True).sha256
    (longest,) = (file for file in tmp_path.rglob("data/0"))
    longest.write_bytes(longest.read_bytes()[:-4])
    assert named(verify(tmp_path)) == ["embed.weight"]


def test_what_a_directory_stands_for(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for name in ("runs/a.pt", "runs/b.pt"):
        torch.save(state(), tmp_path / name)
    assert expand_paths([str(tmp_path)]) == [str(tmp_path / "runs" / "a.pt"), str(tmp_path / "runs" / "b.pt")]
    save_file(state(), tmp_path / "model.safetensors")
    torch.save(state(), tmp_path / "optimizer.pt")
    assert expand_paths([str(tmp_path)]) == [str(tmp_path), str(tmp_path / "optimizer.pt")]
    assert expand_paths([str(tmp_path / "runs" / "a.pt")]) == [str(tmp_path / "runs" / "a.pt")]


# -- hashes


def test_one_hash_in_every_container(tmp_path: Path) -> None:
    values = {name: value for name, value in state().items() if name != "empty"}
    save_file(values, tmp_path / "model.safetensors")
    (tmp_path / "shards").mkdir()
    sharded(tmp_path / "shards")
    turned = {name: value.t().contiguous().t() if value.ndim == 2 else value for name, value in values.items()}
    every = {
        "zip": saved(values),
        "legacy": saved(values, _use_new_zipfile_serialization=False),
        "another order": saved(dict(reversed(values.items()))),
        "strided": saved(turned),
        "safetensors": tmp_path / "model.safetensors",
        "shards": tmp_path / "shards",
    }
    assert len({verify(f, hashes=True).sha256 for f in every.values()}) == 1  # type: ignore[arg-type]


@each(
    "change",
    [
        pytest.param(lambda v: v | {"scalar": torch.tensor(2.25)}, id="a number"),
        pytest.param(lambda v: v | {"embed.weight": v["embed.weight"].reshape(8, 40)}, id="a shape"),
        pytest.param(lambda v: v | {"layers.0.bias": v["layers.0.bias"].view(torch.float64)}, id="a dtype"),
        pytest.param(lambda v: v | {"more": torch.ones(1)}, id="one more"),
        pytest.param(lambda v: {name.replace("mask", "task"): value for name, value in v.items()}, id="a name"),
    ],
)
def test_another_hash_for_anything_else(change: Any) -> None:
    assert verify(saved(change(state())), hashes=True).sha256 != verify(saved(state()), hashes=True).sha256


def test_tied_tensors_in_safetensors(tmp_path: Path) -> None:
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


def test_second_names_count_once(tmp_path: Path) -> None:
    """Each shard may have the metadata of all, and ``format`` is not a tensor, though one may be called ``pt``."""
    values = {"pt": torch.arange(4.0), "b": torch.ones(2)}
    for number, name in enumerate(values, 1):
        shard = tmp_path / f"model-0000{number}-of-00002.safetensors"
        save_file({name: values[name]}, shard, {"format": "pt", "head": "pt"})
    found = verify(tmp_path, hashes=True)
    assert found.sha256 == verify(saved({**values, "head": values["pt"]}), hashes=True).sha256


def test_a_name_is_hashed_once_and_stands_for_each() -> None:
    shared = torch.randn(100)
    found = verify(saved({"a": shared, "b": shared, "c": shared[10:20]}), hashes=True)
    assert [tensor.name for tensor in found.tensors] == ["a", "b", "c"]
    assert found.tensors[0].sha256 == found.tensors[1].sha256 != found.tensors[2].sha256


def test_what_claims_more_than_the_file_holds_is_not_hashed() -> None:
    found = verify(saved({"x": torch.zeros(1).expand(1 << 30, 1 << 10), "y": torch.ones(2)}), hashes=True)
    assert [bool(tensor.sha256) for tensor in found.tensors] == [False, True]
    assert "claims" in found.tensors[0].note
    assert found.ok
    assert found.sha256 == ""


def test_values_by_tensor() -> None:
    half = torch.zeros(9, dtype=torch.float16)
    half[2], half[3:5] = float("nan"), float("-inf")
    found = verify(saved({"half": half, "whole": torch.ones(5), "count": torch.arange(3)}), values=True)
    assert [(tensor.nan, tensor.inf) for tensor in found.tensors] == [(1, 2), (0, 0), (None, None)]
    assert found.sha256 == ""
    assert found.ok


@pytest.mark.parametrize(
    ("count", "said"), [(1, "1 further entry without elements of its own"), (2, "2 further entries")]
)
def test_entries_that_consist_of_others_are_counted(count: int, said: str) -> None:
    found = verify(saved({f"w{n}": torch.eye(2).to_sparse() for n in range(count)}), hashes=True)
    assert said in as_text(report(found, hashes=True))


@pytest.mark.parametrize("wish", [{}, {"hashes": True}, {"values": True}, {"hashes": True, "values": True}], ids=str)
def test_large_tensors_in_threads(wish: dict[str, bool], tmp_path: Path) -> None:
    values = {f"w{i}": torch.arange(i, i + (1 << 20), dtype=torch.float32) for i in range(5)}
    path = tmp_path / "model.pt"
    torch.save(values, path)
    told: list[tuple[int, int]] = []
    found = verify(path, **wish, progress=lambda done, total: told.append((done, total)))  # type: ignore[arg-type]
    assert (found.integrity, found.checksums) == ("whole", len(inspect(path).records))
    assert told[-1][0] == found.nbytes_read >= 5 << 22
    offset = inspect(path).tensor("w3").file_offset or 0
    path.write_bytes(flipped(path.read_bytes(), offset + 3_000_000))
    assert named(verify(path, **wish)) == ["w3"]  # type: ignore[arg-type]


# -- what is no checkpoint, or cannot be read


@pytest.mark.parametrize("data", [b"", b"<html>", b"PK\x03\x04", bytes(2000)], ids=["empty", "html", "zip", "zeros"])
def test_what_is_no_checkpoint(data: bytes) -> None:
    found = verify(data, hashes=True, values=True)
    assert not found.ok
    assert found.findings
    assert found.sha256 == ""
    assert "not-a-checkpoint" in str(found) or "damaged" in str(found)


def test_there_is_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(CannotReadError):
        verify(tmp_path / "absent.pt")


def test_it_is_public() -> None:
    assert transload.verify is verify
    assert transload.Verification is Verification


@pytest.mark.parametrize("path", ["a\0b", "a\ud800b"], ids=["NUL", "half a letter"])
def test_a_path_that_no_file_can_have(path: str) -> None:
    with pytest.raises(CannotReadError):
        verify(path)


def test_a_tensor_whose_header_is_gone_is_named() -> None:
    """Its bytes may be there; where, nothing tells. With hashes it is named as well, and with the same words."""
    data = bytearray(saved(state()))
    name = next(tensor.name for tensor in inspect(bytes(data)).tensors if tensor.nbytes)
    at = data.rindex(b"PK\x03\x04", 0, data.index(b"/data/0"))
    data[at : at + 4] = b"\0\0\0\0"
    for hashes in (False, True):
        (damage,) = [each for each in verify(bytes(data), hashes=hashes).damaged if each.name == name]
        assert damage.kind == "cut"
        assert "where its record begins" in damage.detail
