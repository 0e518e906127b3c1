"""Archives damaged in ways that happen: each gives back what was in it."""

from __future__ import annotations

import functools
import struct
import zipfile
from pathlib import Path

import pytest
from tests.rescuing.makers import ROOT, flipped, hashes, rezipped

from transload import inspect, rescue, retag

FILE = ROOT / "h200" / "train_cuda0.ckpt"
DATA = FILE.read_bytes()
OTHER = (ROOT / "h200" / "data_cuda0.pt").read_bytes()
DIRECTORY = struct.unpack_from("<L", DATA, len(DATA) - 6)[0]
SCRIPT = (ROOT / "h200" / "torchscript_cuda0.pt").read_bytes()


def saved(data: bytes, tmp_path: Path, code: int = 0, **options: str) -> bytes:
    out = tmp_path / "out.pt"
    made = rescue(data, out, **options)  # type: ignore[arg-type]
    assert made.exit_code == code, str(made)
    return out.read_bytes()


EXACT = {
    "as it was": DATA,
    "no directory": DATA[:DIRECTORY],
    "half a directory": DATA[: DIRECTORY + 400],
    "no end record": DATA[:-22],
    "no end records at all": DATA[:-98],
    "directory twice": DATA + DATA[DIRECTORY:],
    "junk before": b"HTTP/1.1 200 OK\r\n\r\n" + DATA,
    "much junk before": bytes(range(256)) * 1000 + DATA,
    "junk after": DATA + b"<!-- cached -->" * 10,
    "much junk after": DATA + bytes(200_000),
    "junk before and after": b"JUNK" * 25 + DATA + b"JUNK" * 25,
    "another archive after it": DATA + OTHER,
    "begun twice": DATA[:5000] + DATA,
    "directory zeroed": DATA[:DIRECTORY] + bytes(len(DATA) - DIRECTORY),
    "first header zeroed": bytes(60) + DATA[60:],
    "directory says it is elsewhere": DATA[:-6] + struct.pack("<L", DIRECTORY + 1000) + DATA[-2:],
    "preallocated": DATA + bytes(10_000),
}


@pytest.mark.parametrize("name", EXACT)
def test_restored_byte_for_byte(name: str, tmp_path: Path) -> None:
    assert saved(EXACT[name], tmp_path) == DATA


PACKED = {
    "zipped again": rezipped(DATA),
    "compressed": rezipped(DATA, compression=zipfile.ZIP_DEFLATED),
    "renamed": rezipped(DATA, folder="my model (1)/"),
    "deeper": rezipped(DATA, folder="backup/old/model/"),
    "no folder": rezipped(DATA, folder=""),
    "by a mac": rezipped(DATA, litter=True),
    "by a mac, compressed": rezipped(DATA, compression=zipfile.ZIP_DEFLATED, litter=True),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_again(name: str, tmp_path: Path) -> None:
    out = saved(PACKED[name], tmp_path)
    assert hashes(out) == hashes(DATA)
    assert inspect(out, verify=True).integrity == "whole"


@pytest.mark.parametrize("name", ["compressed", "zipped again"])
def test_packed_again_and_cut(name: str, tmp_path: Path) -> None:
    """zipfile writes sizes into the headers, so that what is before the cut is found."""
    data = PACKED[name]
    out = hashes(saved(data[: len(data) // 2], tmp_path, code=1))
    assert out
    assert out.items() <= hashes(DATA).items()


def test_a_program_packed_again(tmp_path: Path) -> None:
    out = saved(rezipped(SCRIPT, compression=zipfile.ZIP_DEFLATED), tmp_path)
    assert hashes(out) == hashes(SCRIPT)
    assert inspect(out).format == "torchscript"


def test_without_its_version(tmp_path: Path) -> None:
    place = DATA.index(b"train_cuda0/version")
    no_version = DATA.replace(b"train_cuda0/version", b"train_cuda0/aersion")
    assert place
    out = saved(no_version, tmp_path)
    assert hashes(out) == hashes(DATA)
    assert "zip-no-version" not in {finding.code for finding in inspect(out).findings}


def test_bits_of_several_records(tmp_path: Path) -> None:
    checkpoint = inspect(DATA)
    places = [record.offset for record in checkpoint.records if record.offset and record.size]
    broken = DATA
    for number, place in enumerate(places):
        broken = flipped(broken, place, number % 8)
    made = rescue(broken, tmp_path / "out.pt")
    assert (tmp_path / "out.pt").read_bytes() == DATA
    assert sorted(mend.position for mend in made.mends) == sorted(places)
    assert {mend.certainty for mend in made.mends} == {"proven"}


def test_a_bit_and_a_cut(tmp_path: Path) -> None:
    """The index is repaired first: it tells how long the records are."""
    index = next(record for record in inspect(DATA).records if record.name == "data.pkl")
    for position in range(index.offset or 0, (index.offset or 0) + index.size, 97):
        out = tmp_path / f"{position}.pt"
        assert rescue(flipped(DATA, position, 3)[:DIRECTORY], out).exit_code == 0
        assert out.read_bytes() == DATA


def test_a_page_of_zeros_costs_only_what_is_in_it(tmp_path: Path) -> None:
    """More than one bit is not guessed: the tensor is lost, not repaired into something else."""
    storage = max(inspect(DATA).storages, key=lambda each: each.nbytes)
    start = (storage.offset or 0) + 100
    broken = DATA[:start] + bytes(512) + DATA[start + 512 :]
    made = rescue(broken, tmp_path / "out.pt")
    assert made.exit_code == 1
    assert [each.name for each in made.lost] == list(storage.tensors)
    kept = hashes((tmp_path / "out.pt").read_bytes())
    assert kept == {name: value for name, value in hashes(DATA).items() if name not in storage.tensors}


def test_inserted_bytes(tmp_path: Path) -> None:
    """Every record after them is elsewhere than the directory says."""
    storage = inspect(DATA).storages[10]
    header = DATA.rindex(b"PK\x03\x04", 0, storage.offset)
    made = rescue(DATA[:header] + b"garbage" + DATA[header:], tmp_path / "out.pt")
    assert made.exit_code == 0, str(made)
    assert hashes((tmp_path / "out.pt").read_bytes()) == hashes(DATA)


def test_copied_as_text(tmp_path: Path) -> None:
    assert hashes(saved(DATA.replace(b"\n", b"\r\n"), tmp_path)) == hashes(DATA)


def test_retagged_in_place(tmp_path: Path) -> None:
    """A new index is at the end of the archive, the old one, unused, at its beginning."""
    path = tmp_path / "model.pt"
    path.write_bytes(DATA)
    retag(path, "privateuseone:1")
    whole = path.read_bytes()
    assert len(whole) > len(DATA)
    for number, position in enumerate(range(0, len(whole), 211)):
        if not _is_unused(position):
            assert rescue(flipped(whole, position, number % 8), tmp_path / f"{number}.pt").exit_code == 0
            assert (tmp_path / f"{number}.pt").read_bytes() == whole, position
    out = tmp_path / "no directory.pt"
    assert rescue(whole[: whole.rindex(b"PK\x01\x02") - 900], out).exit_code in (0, 1)


def _is_unused(position: int) -> bool:
    return position < _end_of_index()


@functools.cache
def _end_of_index() -> int:
    index = next(record for record in inspect(DATA).records if record.name == "data.pkl")
    return (index.offset or 0) + index.size + 16


@pytest.mark.parametrize("size", [4, 30, 46, 100], ids=str)
@pytest.mark.parametrize("data", [DATA, SCRIPT], ids=["archive", "script"])
def test_an_overwritten_place_in_the_directory(data: bytes, size: int, tmp_path: Path) -> None:
    """A record whose entry is gone was not replaced: the end record tells how many entries there were."""
    start = struct.unpack_from("<L", data, len(data) - 6)[0]
    for number, at in enumerate(range(start, len(data) - 98 - size, 61)):
        broken = data[:at] + bytes(range(1, size + 1)) + data[at + size :]
        made = rescue(broken, tmp_path / f"{number}.pt")
        assert made.exit_code or (tmp_path / f"{number}.pt").read_bytes() == data, at
        assert made.exit_code < 2, at
