"""Bytes inserted, removed, doubled, swapped or overwritten: no tensor is called whole that is not as it was saved."""

from __future__ import annotations

import io
import random
import struct
from pathlib import Path

import pytest
import torch
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


def moved(data: bytes, dice: random.Random) -> bytes:
    """Some of its bytes in another place, or gone, or there twice."""
    out = bytearray(data)
    size = dice.choice([1, 4, 8, 16, 64, 512])
    at, other = sorted(dice.sample(range(0, len(data) - size, size), 2))
    match dice.randrange(5):
        case 0:
            out[at:at] = dice.randbytes(size)
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
def test_an_archive(path: Path, fill: str | None, tmp_path: Path) -> None:
    data, out = path.read_bytes(), tmp_path / "out.pt"
    right, dice = hashes(data), random.Random(f"{path.name} {fill}")  # noqa: S311 - the same each time
    for number in range(30):
        try:
            made = rescue(moved(data, dice), out, overwrite=True, fill=fill)  # type: ignore[arg-type]
        except TransloadError:
            continue
        if not made.done:
            continue
        kept = {each.name for each in made.tensors if each.state != "lost"} & set(right)
        assert hashes(out.read_bytes(), kept) == {name: right[name] for name in kept}, number
        assert made.exit_code or kept == set(right), number
        assert verify(out).integrity != "damaged" or made.warnings, number


def test_blocks_of_two_records_that_were_swapped(tmp_path: Path) -> None:
    """Each with what follows it: bytes and the checksum behind them agree, and are those of another."""
    state = {name: torch.rand(4) for name in "abcd"}
    torch.save(state, tmp_path / "model.pt")
    data = bytearray((tmp_path / "model.pt").read_bytes())
    one, other = (data.index(state[name].numpy().tobytes()) for name in "bc")
    data[one : one + 32], data[other : other + 32] = data[other : other + 32], data[one : one + 32]
    made = rescue(bytes(data), tmp_path / "new.pt")
    assert (made.exit_code, [each.name for each in made.lost]) == (1, ["b", "c"])
    assert all(torch.equal(value, state[name]) for name, value in torch.load(tmp_path / "new.pt").items())


def test_zeros_to_the_end_of_the_file(tmp_path: Path) -> None:
    """As a download leaves it that allocates the whole file first: the record at its end is not all there."""
    state = {name: torch.rand(3000) for name in "abc"}
    torch.save(state, tmp_path / "model.pt")
    data = (tmp_path / "model.pt").read_bytes()
    at = data.index(state["b"].numpy().tobytes()) + 5000
    made = rescue(data[:at] + bytes(len(data) - at), tmp_path / "new.pt")
    assert (made.exit_code, [each.name for each in made.whole]) == (1, ["a"])
    assert set(torch.load(tmp_path / "new.pt")) == {"a"}


def test_a_damaged_header_costs_only_its_record(tmp_path: Path) -> None:
    """Nothing tells where the record ends: those behind it are found all the same."""
    state = {name: torch.rand(30) for name in "abcd"}
    torch.save(state, tmp_path / "model.pt")
    data = (tmp_path / "model.pt").read_bytes()
    at = data.index(b"model/data/1") - 20
    made = rescue(data[:at] + b"twelve bytes" + data[at:], tmp_path / "new.pt")
    assert {"a", "c", "d"} <= {each.name for each in made.whole}
    assert all(torch.equal(value, state[name]) for name, value in torch.load(tmp_path / "new.pt").items())


def test_a_damaged_byteorder_is_rebuilt(tmp_path: Path) -> None:
    """Several flipped bits, which no checksum undoes; its length tells what it was."""
    torch.save({"a": torch.rand(30)}, tmp_path / "model.pt")
    data = (tmp_path / "model.pt").read_bytes()
    at = data.index(b"little")
    made = rescue(data[:at] + b"lytxle" + data[at + 6 :], tmp_path / "new.pt")
    assert (made.exit_code, made.records) == (0, ())
    assert (tmp_path / "new.pt").read_bytes() == data


def test_the_version_of_a_program_is_not_invented(tmp_path: Path) -> None:
    """It tells what the operators mean."""
    data = (ROOT / "h200" / "torchscript_cuda0.pt").read_bytes()
    record = next(record for record in inspect(data).records if record.name == "version")
    broken = data[: record.offset] + b"\xff" * record.stored + data[(record.offset or 0) + record.stored :]
    made = rescue(broken, tmp_path / "new.pt")
    assert (made.exit_code, [lost.name for lost in made.records]) == (1, ["version"])


@pytest.mark.parametrize("fill", [None, "zeros"], ids=["left-out", "filled"])
def test_a_program_without_its_code_is_a_dictionary(fill: str | None, tmp_path: Path) -> None:
    """The names in the report are those in the file."""
    data = (ROOT / "h200" / "torchscript_cuda0.pt").read_bytes()
    at = data.index(b"constants.pkl")
    made = rescue(data[: at - 40], tmp_path / "new.pt", fill=fill)  # type: ignore[arg-type]
    assert (made.exit_code, made.how) == (1, "weights")
    found = hashes((tmp_path / "new.pt").read_bytes())
    assert found == {name: value for name, value in hashes(data).items() if name in found}
    assert set(found) == {each.name for each in made.whole}


# -- without checksums: what is there twice tells


def test_a_stream(tmp_path: Path) -> None:
    """The counts behind the change are not where they should be."""
    right, start = hashes(LEGACY), min(each.offset or 0 for each in inspect(LEGACY).storages) - 8
    last = max(inspect(LEGACY).storages, key=lambda each: each.offset or 0)
    dice, out = random.Random(5), tmp_path / "out.pt"  # noqa: S311 - the same each time
    for _ in range(60):
        at = dice.randrange(start, (last.offset or 0) - 8)
        size = dice.choice([1, 4, 8, 64])
        change = dice.randbytes(size) if dice.random() < 0.5 else b""
        made = rescue(LEGACY[:at] + change + LEGACY[at if change else at + size :], out, overwrite=True)
        kept = {each.name for each in made.whole if each.name not in last.tensors}
        found = hashes(out.read_bytes()) if made.done else {}
        assert made.exit_code, at
        assert {name: found[name] for name in kept if name in found} == {name: right[name] for name in kept}, at


def test_a_stream_whose_count_was_overwritten(tmp_path: Path) -> None:
    """In a file of the right length that costs only the storages next to it."""
    storages = sorted(inspect(LEGACY).storages, key=lambda each: each.offset or 0)
    at = (storages[3].offset or 0) - 8
    made = rescue(LEGACY[:at] + b"\xff" * 8 + LEGACY[at + 8 :], tmp_path / "out.pt")
    assert {each.name for each in made.lost} == {*storages[2].tensors, *storages[3].tensors}


def test_a_stream_whose_object_is_damaged(tmp_path: Path) -> None:
    """Nothing in it is read as a tensor any more: a warning says so."""
    at = LEGACY.index(b"_rebuild_tensor_v2") + 3
    made = rescue(LEGACY[:at] + LEGACY[at + 2 :], tmp_path / "new.pt")
    assert (made.exit_code, len(made.tensors)) == (1, 0)
    assert "no tensor uses" in made.warnings[0]


def test_an_archive_without_checksums(tmp_path: Path) -> None:
    """Whatever is put in or taken out, its records end where their sizes say; and the new file has checksums."""
    if not hasattr(torch.serialization, "set_crc32_options"):
        pytest.skip("this torch always writes checksums")
    state = {f"w{number}": torch.rand(100 + number) for number in range(6)}
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(compute_crc32=False)
    try:
        held = io.BytesIO()
        torch.save(state, held)
    finally:
        torch.serialization.set_crc32_options(before)
    data, dice = held.getvalue(), random.Random(1)  # noqa: S311 - the same each time
    first = data.index(state["w0"].numpy().tobytes())
    codes = set()
    for size in (1, 4, 8, 64, 100) * 6:
        at = dice.randrange(first, struct.unpack_from("<L", data, len(data) - 6)[0])
        change = dice.randbytes(size) if dice.random() < 0.5 else b""
        made = rescue(data[:at] + change + data[at if change else at + size :], tmp_path / "out.pt", overwrite=True)
        codes.add(made.exit_code)
        if made.done:
            found = torch.load(tmp_path / "out.pt")
            assert all(torch.equal(value, state[name]) for name, value in found.items()), at
            assert made.exit_code or len(found) == len(state), at
            assert verify(tmp_path / "out.pt").ok, at
    assert codes >= {1}


@pytest.mark.parametrize(
    ("file", "record"),
    [("torchscript_cuda0.pt", "code/__torch__.py"), ("export_cuda0.pt2", "models/model.json")],
    ids=["script", "export"],
)
def test_a_program_whose_code_is_damaged_is_a_dictionary(file: str, record: str, tmp_path: Path) -> None:
    """No release of torch loads such a program, and every one loads this."""
    data = (ROOT / "h200" / file).read_bytes()
    at = next(each.offset or 0 for each in inspect(data).records if each.name == record)
    made = rescue(data[: at + 50] + b"overwritten" + data[at + 61 :], tmp_path / "new.pt")
    assert (made.exit_code, made.how, [lost.name for lost in made.records]) == (1, "weights", [record])
    assert hashes((tmp_path / "new.pt").read_bytes()) == hashes(data)
    assert set(torch.load(tmp_path / "new.pt")) == {each.name for each in made.whole}
