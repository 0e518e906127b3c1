"""Checksums: every flipped bit of every record is found, stored or deflated, small or large."""

from __future__ import annotations

import io
import zipfile
from dataclasses import replace
from threading import get_ident
from zlib import crc32

import pytest
import torch
from tests import forge
from tests.each import each
from tests.forge import Entry, archive, entries, with_changes

from transload.checkpoint import Record
from transload.errors import CannotReadError
from transload.formats.record_checksums import checksums, verify_records
from transload.formats.zip import read_index
from transload.io.sources import BytesSource
from transload.opening import inspect
from transload.verifying import verify


def flipped(data: bytes, at: int, bit: int = 0) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def test_flipped_bit_in_any_byte_of_any_record_is_found() -> None:
    intact = forge.checkpoint()
    for record in read_index(BytesSource(intact)).records.values():
        assert record.offset is not None
        for at in range(record.offset, record.offset + record.stored):
            checkpoint = inspect(flipped(intact, at, at % 8), verify=True)
            assert checkpoint.integrity == "damaged", record.name
            assert record.name in {p.where for p in checkpoint.problems if p.code == "crc-mismatch"}


def test_index_is_checked_without_verify() -> None:
    intact = forge.checkpoint()
    record = read_index(BytesSource(intact)).records["data.pkl"]
    assert record.offset is not None
    for at in range(record.offset, record.offset + record.stored):
        checkpoint = inspect(flipped(intact, at, at % 8))
        assert checkpoint.integrity == "damaged", at
        assert "crc-mismatch" in {problem.code for problem in checkpoint.problems}


def test_flipped_bit_that_torch_loads_silently_is_found() -> None:
    intact = forge.checkpoint()
    offset = inspect(intact).tensor("w0").file_offset
    assert offset is not None
    damaged = flipped(intact, offset + 6, 5)
    assert torch.load(io.BytesIO(damaged))["w0"].tolist() != torch.load(io.BytesIO(intact))["w0"].tolist()
    checkpoint = inspect(damaged, verify=True)
    mismatch = next(problem for problem in checkpoint.problems if problem.code == "crc-mismatch")
    assert mismatch.where == "data/0"
    assert mismatch.detail.endswith("holds w0")


def test_flipped_bit_anywhere_is_harmless_or_found() -> None:
    """If a file with a flipped bit is still reported as whole, its tensors and records are unchanged."""
    intact = forge.checkpoint()
    names = [tensor.name for tensor in inspect(intact).tensors]
    expected = forge.records(intact)
    for at in range(len(intact)):
        damaged = flipped(intact, at, at % 8)
        checkpoint = inspect(damaged, verify=True)
        if checkpoint.ok and checkpoint.integrity == "whole":
            assert [tensor.name for tensor in checkpoint.tensors] == names, at
            assert forge.records(damaged) == expected, at


@each("size", [0, 1, 257, (4 << 20) - 1, 4 << 20, (4 << 20) + 1, 9_000_001])
@each("method", [0, 8], ids=["stored", "deflated"])
def test_intact_records_of_any_size_have_no_problem(size: int, method: int) -> None:
    entry = Entry(b"a/zeros", bytes(size), method=method, flags=0x800)
    data = archive([entry])
    assert verify_records(BytesSource(data), read_index(BytesSource(data)).records.values(), ()) == []


@pytest.mark.parametrize("change", [{"crc32": 5}, {"size": 99}, {"raw": b"\xff" * 20, "stored": 20}])
def test_deflated_record_with_wrong_size_or_checksum_is_found(change: dict[str, object]) -> None:
    data = archive(with_changes([Entry(b"a/x", bytes(5000), method=8, flags=0x800)], "x", **change))
    (problem,) = verify_records(BytesSource(data), read_index(BytesSource(data)).records.values(), ())
    assert (problem.code, problem.where) == ("crc-mismatch", "x")


def test_deflated_record_shorter_than_its_listed_size_is_found() -> None:
    """Its checksum is right, but torch fails with "unexpected decompressed size"."""
    data = archive(with_changes([Entry(b"a/x", bytes(5000), method=8, flags=0x800)], "x", size=5001))
    (problem,) = verify_records(BytesSource(data), read_index(BytesSource(data)).records.values(), ())
    assert (problem.code, problem.detail) == ("record-unreadable", "it inflates to 5000 of 5001 bytes")


@each("name", ["data.pkl", "version"])
def test_record_found_too_short_is_reported_once(name: str) -> None:
    records = entries()
    size = len(records[forge.find(records, name)].data)
    data = archive(with_changes(records, name, method=8, flags=0x800, size=size + 1))
    for report in (inspect(data, verify=True), verify(data)):
        assert str(report.findings).count(f"{size} of {size + 1} bytes") == 1


def test_overlapping_records_are_not_read_repeatedly() -> None:
    read = 0

    class CountingSource(BytesSource):
        def readinto(self, offset: int, buffer: memoryview, *, ahead: bool = True) -> int:
            nonlocal read
            read += len(buffer)
            return super().readinto(offset, buffer, ahead=ahead)

    overlapping = [Record(str(i), 0, 1 << 20, 1 << 20, 1) for i in range(1000)]
    assert verify_records(CountingSource(bytes(1 << 20)), overlapping, ())
    assert read <= 2 << 20


def test_archive_that_zipfile_accepts_has_no_crc_mismatch() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as out:
        for entry in entries():
            out.writestr(entry.name.decode(), entry.data)
    assert zipfile.ZipFile(buffer).testzip() is None
    assert "crc-mismatch" not in {p.code for p in inspect(buffer.getvalue(), verify=True).problems}


def test_integrity_is_whole_only_if_checksums_were_compared() -> None:
    assert inspect(forge.checkpoint()).integrity == "unchecked"
    assert inspect(forge.checkpoint(), verify=True).integrity == "whole"
    without_checksums = archive([replace(entry, crc32=0) for entry in entries()])
    assert inspect(without_checksums, verify=True).integrity == "unchecked"
    assert inspect(forge.legacy(), verify=True).integrity == "unchecked"


@each("size", [0, 1, 1023, 1024, 4096, 4097, 70_000])
def test_checksums_of_large_records_in_parts(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several buffers, parts and threads, every flipped byte is found, and only the changed record is reported."""
    for name, value in {"_BUFFER": 1024, "_PART": 4096, "_SMALL": 512, "_ALONE": 0}.items():
        monkeypatch.setattr(f"transload.formats.record_checksums.{name}", value)
    monkeypatch.setattr("transload.formats.record_checksums.threads", lambda: 3)
    first = [Entry(f"a/{i}".encode(), bytes(range(256)) * (n // 256) + bytes(n % 256)) for i, n in enumerate((9, size))]
    data = archive([*first, Entry(b"a/last", bytes(2000))])
    records = list(read_index(BytesSource(data)).records.values())
    assert verify_records(BytesSource(data), records, ()) == []
    begin = records[1].offset or 0
    for at in sorted({*range(0, size, max(1, size // 20)), *([size - 1] if size else [])}):
        (problem,) = verify_records(BytesSource(flipped(data, begin + at)), records, ())
        assert problem.where == "1"


def test_progress_reports_the_bytes_read() -> None:
    data = forge.checkpoint()
    records = list(read_index(BytesSource(data)).records.values())
    reported: list[int] = []
    sums = checksums(BytesSource(data), records, reported.append)
    assert sum(reported) >= sum(record.stored for record in records)
    assert [sums[index] for index in range(len(records))] == [record.crc32 for record in records]


def test_read_error_affects_only_the_record_at_that_place() -> None:
    data = forge.checkpoint()
    records = read_index(BytesSource(data)).records

    class FailingSource(BytesSource):
        def readinto(self, offset: int, buffer: memoryview, *, ahead: bool = True) -> int:
            if offset <= (records["data/1"].offset or 0) < offset + len(buffer):
                raise CannotReadError("Input/output error", where="disk")
            return super().readinto(offset, buffer, ahead=ahead)

    (problem,) = verify_records(FailingSource(data), records.values(), ())
    assert (problem.code, problem.where) == ("record-unreadable", "data/1")
    assert "Input/output error" in problem.detail


class RecordingSource(BytesSource):
    """Records how many bytes were read, and by which threads."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.nbytes = 0
        self.threads: set[int] = set()

    def readinto(self, offset: int, buffer: memoryview, *, ahead: bool = True) -> int:
        self.nbytes += (count := super().readinto(offset, buffer, ahead=ahead))
        self.threads.add(get_ident())
        return count


def test_small_records_between_large_ones_are_read_once() -> None:
    """Weights of 200 kB, each with its bias: no byte is read twice."""
    sizes = [200_000, 400] * 20
    data = archive([Entry(f"a/{i}".encode(), bytes([i]) * size) for i, size in enumerate(sizes)])
    source = RecordingSource(data)
    assert verify_records(source, read_index(source).records.values(), ()) == []
    assert sum(sizes) <= source.nbytes <= len(data)


def test_small_records_are_read_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their checksums are computed with the GIL held, so that other threads would only wait."""
    monkeypatch.setattr("transload.formats.record_checksums._ALONE", 1 << 20)
    monkeypatch.setattr("transload.formats.record_checksums.threads", lambda: 4)
    source = RecordingSource(archive([Entry(f"a/{i}".encode(), bytes(8000)) for i in range(400)]))
    assert verify_records(source, read_index(source).records.values(), ()) == []
    assert source.threads == {get_ident()}


def test_checksums_are_in_the_order_of_the_records() -> None:
    sizes = [70_000, 5, 0, 20 << 20, 9, 300_000]
    data = archive([Entry(f"a/{i}".encode(), bytes([i]) * size) for i, size in enumerate(sizes)])
    records = [*read_index(BytesSource(data)).records.values()][::-1]
    sums = checksums(BytesSource(data), records)
    assert list(sums) == list(range(len(sizes)))
    assert list(sums.values()) == [record.crc32 for record in records]


def test_only_the_smallest_of_overlapping_records_have_a_checksum() -> None:
    data = bytes(range(256)) * 4
    sizes = [1024, 100, 600, 300, 700]
    sums = checksums(BytesSource(data), [Record(str(size), 0, size, size, 1) for size in sizes])
    assert sums == {index: crc32(data[: sizes[index]]) for index in (1, 2, 3)}
