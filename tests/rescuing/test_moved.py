"""Bytes inserted, removed, doubled, swapped or overwritten: no changed tensor is reported as intact."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
import torch
from tests.makers import saved
from tests.rescuing.makers import ROOT, hashes, ident

from transload import inspect, rescue, verify
from transload.errors import TransloadError

ARCHIVES = [
    ROOT / "h200" / "torchscript_cuda0.pt",
    ROOT / "h200" / "train_cuda0.ckpt",
    ROOT / "torch-releases" / "torch-1.6.0-py3.7.16" / "state_dict_cuda1.pt",
    ROOT / "torch-releases" / "torch-2.13.0-py3.11.7" / "state_dict_cuda7.pt",
    ROOT / "torch-releases" / "torch-2.13.0-py3.11.7" / "zoo_cuda0.pt",
]
LEGACY = (ROOT / "h200" / "state_dict_cuda0_legacy.pth").read_bytes()


def with_moved_bytes(data: bytes, rng: random.Random) -> bytes:
    """The data with bytes inserted, doubled, removed, swapped or zeroed."""
    out = bytearray(data)
    size = rng.choice([1, 4, 8, 16, 64, 512])
    at, other = sorted(rng.sample(range(0, len(data) - size, size), 2))
    match rng.randrange(5):
        case 0:
            out[at:at] = rng.randbytes(size)
        case 1:
            out[at:at] = out[at : at + size]
        case 2:
            del out[at : at + size]
        case 3:
            out[at : at + size], out[other : other + size] = out[other : other + size], out[at : at + size]
        case 4:
            out[at : at + size] = bytes(size)
    return bytes(out)


@pytest.mark.parametrize("fill", [None, "zeros"], ids=["left-out", "filled"])
@pytest.mark.parametrize("path", ARCHIVES, ids=ident)
def test_tensors_rescued_from_a_damaged_archive_equal_the_originals(
    path: Path, fill: str | None, tmp_path: Path
) -> None:
    data, out = path.read_bytes(), tmp_path / "out.pt"
    original, rng = hashes(data), random.Random(f"{path.name} {fill}")  # noqa: S311 - reproducible
    for number in range(30):
        try:
            result = rescue(with_moved_bytes(data, rng), out, overwrite=True, fill=fill)  # type: ignore[arg-type]
        except TransloadError:
            continue
        if not result.done:
            continue
        kept = {tensor.name for tensor in result.tensors if tensor.state != "lost"} & set(original)
        assert hashes(out.read_bytes(), kept) == {name: original[name] for name in kept}, number
        assert result.exit_code or kept == set(original), number
        assert verify(out).integrity != "damaged" or result.warnings, number


def test_tensors_in_swapped_blocks_are_lost(tmp_path: Path) -> None:
    """The blocks include the descriptors: bytes and checksums agree, but belong to the other record."""
    state = {name: torch.rand(4) for name in "abcd"}
    torch.save(state, tmp_path / "model.pt")
    data = bytearray((tmp_path / "model.pt").read_bytes())
    one, other = (data.index(state[name].numpy().tobytes()) for name in "bc")
    data[one : one + 32], data[other : other + 32] = data[other : other + 32], data[one : one + 32]
    result = rescue(bytes(data), tmp_path / "new.pt")
    assert (result.exit_code, [tensor.name for tensor in result.lost]) == (1, ["b", "c"])
    assert all(torch.equal(value, state[name]) for name, value in torch.load(tmp_path / "new.pt").items())


def test_file_zeroed_to_its_end_loses_the_incomplete_tensor(tmp_path: Path) -> None:
    """As after a download into a preallocated file: the last record is incomplete."""
    state = {name: torch.rand(3000) for name in "abc"}
    torch.save(state, tmp_path / "model.pt")
    data = (tmp_path / "model.pt").read_bytes()
    at = data.index(state["b"].numpy().tobytes()) + 5000
    result = rescue(data[:at] + bytes(len(data) - at), tmp_path / "new.pt")
    assert (result.exit_code, [tensor.name for tensor in result.whole]) == (1, ["a"])
    assert set(torch.load(tmp_path / "new.pt")) == {"a"}


def test_damaged_header_loses_at_most_its_record(tmp_path: Path) -> None:
    """Nothing says where the record ends, but the records after it are found."""
    state = {name: torch.rand(30) for name in "abcd"}
    torch.save(state, tmp_path / "model.pt")
    data = (tmp_path / "model.pt").read_bytes()
    at = data.index(b"model/data/1") - 20
    result = rescue(data[:at] + b"twelve bytes" + data[at:], tmp_path / "new.pt")
    assert {"a", "c", "d"} <= {tensor.name for tensor in result.whole}
    assert all(torch.equal(value, state[name]) for name, value in torch.load(tmp_path / "new.pt").items())


def test_damaged_byteorder_is_rebuilt(tmp_path: Path) -> None:
    """Several flipped bits cannot be undone by a checksum, but the length shows the content."""
    torch.save({"a": torch.rand(30)}, tmp_path / "model.pt")
    data = (tmp_path / "model.pt").read_bytes()
    at = data.index(b"little")
    result = rescue(data[:at] + b"lytxle" + data[at + 6 :], tmp_path / "new.pt")
    assert (result.exit_code, result.records) == (0, ())
    assert (tmp_path / "new.pt").read_bytes() == data


def test_destroyed_version_of_torchscript_is_not_guessed(tmp_path: Path) -> None:
    """It determines the meaning of the operators."""
    data = (ROOT / "h200" / "torchscript_cuda0.pt").read_bytes()
    record = next(record for record in inspect(data).records if record.name == "version")
    broken = data[: record.offset] + b"\xff" * record.stored + data[(record.offset or 0) + record.stored :]
    result = rescue(broken, tmp_path / "new.pt")
    assert (result.exit_code, [lost.name for lost in result.records]) == (1, ["version"])


@pytest.mark.parametrize("fill", [None, "zeros"], ids=["left-out", "filled"])
def test_torchscript_without_its_code_becomes_a_state_dict(fill: str | None, tmp_path: Path) -> None:
    """The names in the report are those in the file."""
    data = (ROOT / "h200" / "torchscript_cuda0.pt").read_bytes()
    at = data.index(b"constants.pkl")
    result = rescue(data[: at - 40], tmp_path / "new.pt", fill=fill)  # type: ignore[arg-type]
    assert (result.exit_code, result.how) == (1, "weights")
    rescued = hashes((tmp_path / "new.pt").read_bytes())
    assert rescued == {name: value for name, value in hashes(data).items() if name in rescued}
    assert set(rescued) == {tensor.name for tensor in result.whole}


# -- without checksums: redundant data shows the damage


def test_bytes_inserted_into_or_removed_from_a_legacy_stream_are_detected(tmp_path: Path) -> None:
    """The counts after the change are not where they should be."""
    original, start = hashes(LEGACY), min(storage.offset or 0 for storage in inspect(LEGACY).storages) - 8
    last = max(inspect(LEGACY).storages, key=lambda storage: storage.offset or 0)
    rng, out = random.Random(5), tmp_path / "out.pt"  # noqa: S311 - reproducible
    for _ in range(60):
        at = rng.randrange(start, (last.offset or 0) - 8)
        size = rng.choice([1, 4, 8, 64])
        change = rng.randbytes(size) if rng.random() < 0.5 else b""
        result = rescue(LEGACY[:at] + change + LEGACY[at if change else at + size :], out, overwrite=True)
        kept = {tensor.name for tensor in result.whole if tensor.name not in last.tensors}
        rescued = hashes(out.read_bytes()) if result.done else {}
        assert result.exit_code, at
        assert {name: rescued[name] for name in kept if name in rescued} == {name: original[name] for name in kept}, at


def test_overwritten_count_in_a_legacy_stream_loses_the_adjacent_storages(tmp_path: Path) -> None:
    """Since the file has the right length, all other storages are intact."""
    storages = sorted(inspect(LEGACY).storages, key=lambda item: item.offset or 0)
    at = (storages[3].offset or 0) - 8
    result = rescue(LEGACY[:at] + b"\xff" * 8 + LEGACY[at + 8 :], tmp_path / "out.pt")
    assert {item.name for item in result.lost} == {*storages[2].tensors, *storages[3].tensors}


def test_legacy_stream_with_a_damaged_object_gives_a_warning(tmp_path: Path) -> None:
    """No tensor can be read from it any more."""
    at = LEGACY.index(b"_rebuild_tensor_v2") + 3
    result = rescue(LEGACY[:at] + LEGACY[at + 2 :], tmp_path / "new.pt")
    assert (result.exit_code, len(result.tensors)) == (1, 0)
    assert "no tensor uses" in result.warnings[0]


def test_archive_without_checksums_yields_only_intact_tensors(tmp_path: Path) -> None:
    """Sizes show whether bytes were inserted or removed; the new file has checksums."""
    if not hasattr(torch.serialization, "set_crc32_options"):
        pytest.skip("this torch always writes checksums")
    state = {f"w{number}": torch.rand(100 + number) for number in range(6)}
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(compute_crc32=False)
    try:
        buffer = saved(state)
    finally:
        torch.serialization.set_crc32_options(before)
    data, rng = buffer, random.Random(1)  # noqa: S311 - reproducible
    first = data.index(state["w0"].numpy().tobytes())
    codes = set()
    for size in (1, 4, 8, 64, 100) * 6:
        at = rng.randrange(first, struct.unpack_from("<L", data, len(data) - 6)[0])
        change = rng.randbytes(size) if rng.random() < 0.5 else b""
        result = rescue(data[:at] + change + data[at if change else at + size :], tmp_path / "out.pt", overwrite=True)
        codes.add(result.exit_code)
        if result.done:
            loaded = torch.load(tmp_path / "out.pt")
            assert all(torch.equal(value, state[name]) for name, value in loaded.items()), at
            assert result.exit_code or len(loaded) == len(state), at
            assert verify(tmp_path / "out.pt").ok, at
    assert codes >= {1}


@pytest.mark.parametrize(
    ("file", "record"),
    [("torchscript_cuda0.pt", "code/__torch__.py"), ("export_cuda0.pt2", "models/model.json")],
    ids=["script", "export"],
)
def test_program_with_damaged_code_becomes_a_state_dict(file: str, record: str, tmp_path: Path) -> None:
    """No torch release loads such a program, but every release loads a state dict."""
    data = (ROOT / "h200" / file).read_bytes()
    at = next(item.offset or 0 for item in inspect(data).records if item.name == record)
    result = rescue(data[: at + 50] + b"overwritten" + data[at + 61 :], tmp_path / "new.pt")
    assert (result.exit_code, result.how, [lost.name for lost in result.records]) == (1, "weights", [record])
    assert hashes((tmp_path / "new.pt").read_bytes()) == hashes(data)
    assert set(torch.load(tmp_path / "new.pt")) == {item.name for item in result.whole}
