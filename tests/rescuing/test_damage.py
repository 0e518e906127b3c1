"""Archives damaged in realistic ways: their contents are restored."""

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
LEGACY = (ROOT / "torch-releases" / "torch-2.13.0-py3.11.7" / "state_dict_cuda0_other_format.pt").read_bytes()
NOTE = "the file was copied as text, from Latin-1 to UTF-8: this was undone"
SCRIPT = (ROOT / "h200" / "torchscript_cuda0.pt").read_bytes()


def rescued_bytes(data: bytes, tmp_path: Path, code: int = 0, **options: str) -> bytes:
    out = tmp_path / "out.pt"
    result = rescue(data, out, **options)  # type: ignore[arg-type]
    assert result.exit_code == code, str(result)
    return out.read_bytes()


DAMAGED = {
    "undamaged": DATA,
    "no directory": DATA[:DIRECTORY],
    "half a directory": DATA[: DIRECTORY + 400],
    "no end record": DATA[:-22],
    "no end records": DATA[:-98],
    "directory twice": DATA + DATA[DIRECTORY:],
    "junk before": b"HTTP/1.1 200 OK\r\n\r\n" + DATA,
    "much junk before": bytes(range(256)) * 1000 + DATA,
    "junk after": DATA + b"<!-- cached -->" * 10,
    "much junk after": DATA + bytes(200_000),
    "junk before and after": b"JUNK" * 25 + DATA + b"JUNK" * 25,
    "start repeated": DATA[:5000] + DATA,
    "directory zeroed": DATA[:DIRECTORY] + bytes(len(DATA) - DIRECTORY),
    "first header zeroed": bytes(60) + DATA[60:],
    "wrong directory offset": DATA[:-6] + struct.pack("<L", DIRECTORY + 1000) + DATA[-2:],
    "preallocated": DATA + bytes(10_000),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_archive_is_restored_byte_for_byte(name: str, tmp_path: Path) -> None:
    assert rescued_bytes(DAMAGED[name], tmp_path) == DATA


def test_another_archive_that_follows_counts_as_lost(tmp_path: Path) -> None:
    """Whatever its size: torch reads the first only if it is the same."""
    for other in (DATA, OTHER):
        checkpoint = inspect(DATA + other)
        assert (checkpoint.safety, checkpoint.problems[0].code) == ("dangerous", "zip-more-archives")
        assert f"begins at byte {len(DATA):,}" in checkpoint.problems[0].detail
        result = rescue(DATA + other, tmp_path / "out.pt", overwrite=True)
        assert (result.exit_code, [record.name for record in result.records]) == (1, ["another checkpoint"])
        assert (tmp_path / "out.pt").read_bytes() == DATA


REPACKED = {
    "zipped again": rezipped(DATA),
    "compressed": rezipped(DATA, compression=zipfile.ZIP_DEFLATED),
    "other folder": rezipped(DATA, folder="my model (1)/"),
    "nested folders": rezipped(DATA, folder="backup/old/model/"),
    "no folder": rezipped(DATA, folder=""),
    "zipped on macOS": rezipped(DATA, mac_files=True),
    "zipped on macOS, compressed": rezipped(DATA, compression=zipfile.ZIP_DEFLATED, mac_files=True),
}


@pytest.mark.parametrize("name", REPACKED)
def test_repacked_archive_keeps_all_tensors(name: str, tmp_path: Path) -> None:
    out = rescued_bytes(REPACKED[name], tmp_path)
    assert hashes(out) == hashes(DATA)
    assert inspect(out, verify=True).integrity == "whole"


@pytest.mark.parametrize("name", ["compressed", "zipped again"])
def test_truncated_repacked_archive_keeps_some_tensors(name: str, tmp_path: Path) -> None:
    """``zipfile`` writes sizes into the local headers, so records before the cut can be found."""
    data = REPACKED[name]
    out = hashes(rescued_bytes(data[: len(data) // 2], tmp_path, code=1))
    assert out
    assert out.items() <= hashes(DATA).items()


def test_repacked_torchscript_stays_torchscript(tmp_path: Path) -> None:
    out = rescued_bytes(rezipped(SCRIPT, compression=zipfile.ZIP_DEFLATED), tmp_path)
    assert hashes(out) == hashes(SCRIPT)
    assert inspect(out).format == "torchscript"


def test_missing_version_record_is_restored(tmp_path: Path) -> None:
    place = DATA.index(b"train_cuda0/version")
    no_version = DATA.replace(b"train_cuda0/version", b"train_cuda0/aersion")
    assert place
    out = rescued_bytes(no_version, tmp_path)
    assert hashes(out) == hashes(DATA)
    assert "zip-no-version" not in {finding.code for finding in inspect(out).findings}


def test_one_flipped_bit_per_record_is_repaired(tmp_path: Path) -> None:
    checkpoint = inspect(DATA)
    places = [record.offset for record in checkpoint.records if record.offset and record.size]
    broken = DATA
    for number, place in enumerate(places):
        broken = flipped(broken, place, number % 8)
    result = rescue(broken, tmp_path / "out.pt")
    assert (tmp_path / "out.pt").read_bytes() == DATA
    assert sorted(repair.position for repair in result.repairs) == sorted(places)
    assert {repair.certainty for repair in result.repairs} == {"proven"}


def test_flipped_bit_in_the_index_is_repaired_without_a_directory(tmp_path: Path) -> None:
    """The index is repaired first, because it gives the lengths of the records."""
    index = next(record for record in inspect(DATA).records if record.name == "data.pkl")
    for position in range(index.offset or 0, (index.offset or 0) + index.size, 97):
        out = tmp_path / f"{position}.pt"
        assert rescue(flipped(DATA, position, 3)[:DIRECTORY], out).exit_code == 0
        assert out.read_bytes() == DATA


def test_zeroed_block_loses_only_the_tensors_in_it(tmp_path: Path) -> None:
    """Damage of more than one bit is not guessed at: the tensor is lost, not wrongly repaired."""
    storage = max(inspect(DATA).storages, key=lambda item: item.nbytes)
    start = (storage.offset or 0) + 100
    broken = DATA[:start] + bytes(512) + DATA[start + 512 :]
    result = rescue(broken, tmp_path / "out.pt")
    assert result.exit_code == 1
    assert [item.name for item in result.lost] == list(storage.tensors)
    kept = hashes((tmp_path / "out.pt").read_bytes())
    assert kept == {name: value for name, value in hashes(DATA).items() if name not in storage.tensors}


def test_bytes_inserted_between_records_lose_nothing(tmp_path: Path) -> None:
    """Every later record is not where the directory says."""
    storage = inspect(DATA).storages[10]
    header = DATA.rindex(b"PK\x03\x04", 0, storage.offset)
    result = rescue(DATA[:header] + b"garbage" + DATA[header:], tmp_path / "out.pt")
    assert result.exit_code == 0, str(result)
    assert hashes((tmp_path / "out.pt").read_bytes()) == hashes(DATA)


def test_copies_as_text_are_undone(tmp_path: Path) -> None:
    assert hashes(rescued_bytes(DATA.replace(b"\n", b"\r\n"), tmp_path)) == hashes(DATA)
    for data in (DATA, LEGACY):
        (tmp_path / "copied.pt").write_bytes(data.decode("latin-1").encode())
        advice = [line for finding in inspect(tmp_path / "copied.pt").findings for line in finding.fix]
        assert any(line.startswith("$ transload rescue ") for line in advice)
        result = rescue(tmp_path / "copied.pt", tmp_path / "undone.pt", overwrite=True)
        assert (result.exit_code, result.notes[0]) == (0, NOTE)
        assert hashes((tmp_path / "undone.pt").read_bytes()) == hashes(data)


def test_flipped_bit_in_a_file_retagged_in_place_is_repaired(tmp_path: Path) -> None:
    """The new index is at the end of the archive, the old one, unused, at its start."""
    path = tmp_path / "model.pt"
    path.write_bytes(DATA)
    retag(path, "privateuseone:1")
    retagged = path.read_bytes()
    assert len(retagged) > len(DATA)
    for number, position in enumerate(range(0, len(retagged), 211)):
        if not _is_unused(position):
            assert rescue(flipped(retagged, position, number % 8), tmp_path / f"{number}.pt").exit_code == 0
            assert (tmp_path / f"{number}.pt").read_bytes() == retagged, position
    out = tmp_path / "no directory.pt"
    assert rescue(retagged[: retagged.rindex(b"PK\x01\x02") - 900], out).exit_code in (0, 1)


def _is_unused(position: int) -> bool:
    return position < _end_of_index()


@functools.cache
def _end_of_index() -> int:
    index = next(record for record in inspect(DATA).records if record.name == "data.pkl")
    return (index.offset or 0) + index.size + 16


@pytest.mark.parametrize("size", [4, 30, 46, 100], ids=str)
@pytest.mark.parametrize("data", [DATA, SCRIPT], ids=["archive", "script"])
def test_overwritten_directory_entries_are_restored_or_reported(data: bytes, size: int, tmp_path: Path) -> None:
    """A record without an entry was not replaced by a newer one: the end record gives the number of entries."""
    start = struct.unpack_from("<L", data, len(data) - 6)[0]
    for number, at in enumerate(range(start, len(data) - 98 - size, 61)):
        broken = data[:at] + bytes(range(1, size + 1)) + data[at + size :]
        result = rescue(broken, tmp_path / f"{number}.pt")
        assert result.exit_code or (tmp_path / f"{number}.pt").read_bytes() == data, at
        assert result.exit_code < 2, at
