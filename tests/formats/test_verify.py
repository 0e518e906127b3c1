"""Checksums: every flipped byte of every record is found, whatever the record is and however it is stored."""

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
from tests.forge import Entry, archive, entries, remade

from transload.checkpoint import Record
from transload.errors import CannotReadError
from transload.formats.verify import checksums, verify_records
from transload.formats.zip import read_index
from transload.io.sources import BytesSource
from transload.judge import inspect
from transload.verifying import verify


def flipped(data: bytes, at: int, bit: int = 0) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def test_every_flipped_byte_of_every_record_is_found() -> None:
    whole = forge.checkpoint()
    for record in read_index(BytesSource(whole)).records.values():
        assert record.offset is not None
        for at in range(record.offset, record.offset + record.stored):
            told = inspect(flipped(whole, at, at % 8), verify=True)
            assert told.integrity == "damaged", record.name
            assert record.name in {p.where for p in told.problems if p.code == "crc-mismatch"}


def test_the_index_is_checked_without_being_asked() -> None:
    whole = forge.checkpoint()
    record = read_index(BytesSource(whole)).records["data.pkl"]
    assert record.offset is not None
    for at in range(record.offset, record.offset + record.stored):
        told = inspect(flipped(whole, at, at % 8))
        assert told.integrity == "damaged", at
        assert "crc-mismatch" in {problem.code for problem in told.problems}


def test_torch_loads_a_flipped_bit_without_a_word() -> None:
    whole = forge.checkpoint()
    offset = inspect(whole).tensor("w0").file_offset
    assert offset is not None
    bad = flipped(whole, offset + 6, 5)
    assert torch.load(io.BytesIO(bad))["w0"].tolist() != torch.load(io.BytesIO(whole))["w0"].tolist()
    told = inspect(bad, verify=True)
    found = next(problem for problem in told.problems if problem.code == "crc-mismatch")
    assert found.where == "data/0"
    assert found.detail.endswith("holds w0")


def test_every_flipped_bit_of_the_headers_is_harmless_or_found() -> None:
    """Whatever a flipped bit does to a header, what we then call whole is what it was before."""
    whole = forge.checkpoint()
    names = [tensor.name for tensor in inspect(whole).tensors]
    wanted = forge.records(whole)
    for at in range(len(whole)):
        bad = flipped(whole, at, at % 8)
        told = inspect(bad, verify=True)
        if told.ok and told.integrity == "whole":
            assert [tensor.name for tensor in told.tensors] == names, at
            assert forge.records(bad) == wanted, at


@each("size", [0, 1, 257, (4 << 20) - 1, 4 << 20, (4 << 20) + 1, 9_000_001])
@each("method", [0, 8], ids=["stored", "deflated"])
def test_records_of_any_size_are_whole(size: int, method: int) -> None:
    entry = Entry(b"a/zeros", bytes(size), method=method, flags=0x800)
    data = archive([entry])
    assert verify_records(BytesSource(data), read_index(BytesSource(data)).records.values(), ()) == []


@pytest.mark.parametrize("change", [{"crc32": 5}, {"size": 99}, {"raw": b"\xff" * 20, "stored": 20}])
def test_a_deflated_record_that_is_not_what_it_says_is_found(change: dict[str, object]) -> None:
    data = archive(remade([Entry(b"a/x", bytes(5000), method=8, flags=0x800)], "x", **change))
    (problem,) = verify_records(BytesSource(data), read_index(BytesSource(data)).records.values(), ())
    assert (problem.code, problem.where) == ("crc-mismatch", "x")


def test_a_deflated_record_that_is_shorter_than_the_directory_says() -> None:
    """Its checksum is right, and torch fails with "unexpected decompressed size"."""
    data = archive(remade([Entry(b"a/x", bytes(5000), method=8, flags=0x800)], "x", size=5001))
    (problem,) = verify_records(BytesSource(data), read_index(BytesSource(data)).records.values(), ())
    assert (problem.code, problem.detail) == ("record-unreadable", "it inflates to 5000 of 5001 bytes")


@each("name", ["data.pkl", "version"])
def test_a_record_that_the_reader_found_too_short_is_named_once(name: str) -> None:
    records = entries()
    size = len(records[forge.find(records, name)].data)
    data = archive(remade(records, name, method=8, flags=0x800, size=size + 1))
    for told in (inspect(data, verify=True), verify(data)):
        assert str(told.findings).count(f"{size} of {size + 1} bytes") == 1


def test_records_over_one_another_are_not_read_again_and_again() -> None:
    read = 0

    class Counting(BytesSource):
        def readinto(self, offset: int, buffer: memoryview) -> int:
            nonlocal read
            read += len(buffer)
            return super().readinto(offset, buffer)

    over = [Record(str(i), 0, 1 << 20, 1 << 20, 1) for i in range(1000)]
    assert verify_records(Counting(bytes(1 << 20)), over, ())
    assert read <= 2 << 20


def test_what_zipfile_calls_good_is_good() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as out:
        for entry in entries():
            out.writestr(entry.name.decode(), entry.data)
    assert zipfile.ZipFile(buffer).testzip() is None
    assert "crc-mismatch" not in {p.code for p in inspect(buffer.getvalue(), verify=True).problems}


def test_whole_is_said_only_of_what_was_compared() -> None:
    assert inspect(forge.checkpoint()).integrity == "unchecked"
    assert inspect(forge.checkpoint(), verify=True).integrity == "whole"
    unsummed = archive([replace(entry, crc32=0) for entry in entries()])
    assert inspect(unsummed, verify=True).integrity == "unchecked"
    assert inspect(forge.legacy(), verify=True).integrity == "unchecked"


@each("size", [0, 1, 1023, 1024, 4096, 4097, 70_000])
def test_large_records_are_summed_in_parts(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the parts, and whoever sums them: every flipped byte is found, and nothing else."""
    for name, value in {"_BUFFER": 1024, "_PART": 4096, "_SMALL": 512, "_ALONE": 0}.items():
        monkeypatch.setattr(f"transload.formats.verify.{name}", value)
    monkeypatch.setattr("transload.formats.verify.threads", lambda: 3)
    held = [Entry(f"a/{i}".encode(), bytes(range(256)) * (n // 256) + bytes(n % 256)) for i, n in enumerate((9, size))]
    data = archive([*held, Entry(b"a/last", bytes(2000))])
    records = list(read_index(BytesSource(data)).records.values())
    assert verify_records(BytesSource(data), records, ()) == []
    begin = records[1].offset or 0
    for at in sorted({*range(0, size, max(1, size // 20)), *([size - 1] if size else [])}):
        (problem,) = verify_records(BytesSource(flipped(data, begin + at)), records, ())
        assert problem.where == "1"


def test_what_is_read_is_told() -> None:
    data = forge.checkpoint()
    records = list(read_index(BytesSource(data)).records.values())
    told: list[int] = []
    sums = checksums(BytesSource(data), records, told.append)
    assert sum(told) >= sum(record.stored for record in records)
    assert [sums[index] for index in range(len(records))] == [record.crc32 for record in records]


def test_a_bad_place_on_the_disk_costs_only_what_lies_there() -> None:
    data = forge.checkpoint()
    records = read_index(BytesSource(data)).records

    class Scratched(BytesSource):
        def readinto(self, offset: int, buffer: memoryview) -> int:
            if offset <= (records["data/1"].offset or 0) < offset + len(buffer):
                raise CannotReadError("Input/output error", where="disk")
            return super().readinto(offset, buffer)

    (problem,) = verify_records(Scratched(data), records.values(), ())
    assert (problem.code, problem.where) == ("record-unreadable", "data/1")
    assert "Input/output error" in problem.detail


class Counted(BytesSource):
    """Knows how much was read of it, and by whom."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.nbytes = 0
        self.threads: set[int] = set()

    def readinto(self, offset: int, buffer: memoryview) -> int:
        self.nbytes += (count := super().readinto(offset, buffer))
        self.threads.add(get_ident())
        return count


def test_small_records_between_large_ones_are_not_read_with_them() -> None:
    """Weights of 200 kB, each with its bias: nothing is read twice."""
    sizes = [200_000, 400] * 20
    data = archive([Entry(f"a/{i}".encode(), bytes([i]) * size) for i, size in enumerate(sizes)])
    source = Counted(data)
    assert verify_records(source, read_index(source).records.values(), ()) == []
    assert sum(sizes) <= source.nbytes <= len(data)


def test_small_records_are_left_to_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are summed without letting others run, so that others would only wait."""
    monkeypatch.setattr("transload.formats.verify._ALONE", 1 << 20)
    monkeypatch.setattr("transload.formats.verify.threads", lambda: 4)
    source = Counted(archive([Entry(f"a/{i}".encode(), bytes(8000)) for i in range(400)]))
    assert verify_records(source, read_index(source).records.values(), ()) == []
    assert source.threads == {get_ident()}


def test_sums_come_in_the_order_of_the_list() -> None:
    sizes = [70_000, 5, 0, 20 << 20, 9, 300_000]
    data = archive([Entry(f"a/{i}".encode(), bytes([i]) * size) for i, size in enumerate(sizes)])
    records = [*read_index(BytesSource(data)).records.values()][::-1]
    sums = checksums(BytesSource(data), records)
    assert list(sums) == list(range(len(sizes)))
    assert list(sums.values()) == [record.crc32 for record in records]


def test_of_records_over_one_another_the_smallest_are_summed() -> None:
    data = bytes(range(256)) * 4
    sizes = [1024, 100, 600, 300, 700]
    sums = checksums(BytesSource(data), [Record(str(size), 0, size, size, 1) for size in sizes])
    assert sums == {index: crc32(data[: sizes[index]]) for index in (1, 2, 3)}
