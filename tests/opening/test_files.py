"""The files a transfer reads from."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from transload.io.memory import PAGE, Pages, memory_at
from transload.io.sources import BytesSource, FileSource, ObjectSource, Slice, Source
from transload.opening.jobs import CELL, File, Job, ReadRequest, Run, ShortReadError, jobs


@pytest.fixture
def slot() -> Pages:
    return Pages(CELL)


@pytest.fixture
def short(tmp_path: Path, blob: bytes) -> Path:
    """A file that ends in its second cell, in the middle of a page."""
    path = tmp_path / "short"
    path.write_bytes(blob[: CELL + 5000])
    return path


@pytest.fixture
def direct(blob_path: Path) -> Iterator[File]:
    """A file that is read past the page cache, if the file system of the tests supports that."""
    source = FileSource(blob_path)
    file = File(source)
    try:
        file.go_direct()
        if not file.direct:
            pytest.skip("this file system does not support O_DIRECT")
        yield file
    finally:
        file.close()
        source.close()


def read(file: File, job: Job, slot: Pages) -> bytes:
    start = file.read_job(job, slot.address)
    return bytes(memory_at(start + job.begin, job.end - job.begin))


SPANS = {
    "a byte": (0, 1),
    "a page": (PAGE, PAGE),
    "across pages": (PAGE - 1, PAGE + 2),
    "a cell": (CELL, CELL),
    "the end of a cell": (2 * CELL - 7, 7),
    "unaligned": (3 * CELL + 4097, 1_000_001),
    "the end of the file": (10 * CELL + 12_000, 345),
}


@pytest.mark.parametrize(("offset", "nbytes"), SPANS.values(), ids=SPANS.keys())
class TestReadJob:
    def test_buffered_read_returns_the_bytes(
        self, offset: int, nbytes: int, blob: bytes, blob_path: Path, slot: Pages
    ) -> None:
        (job,) = jobs([ReadRequest(0, offset, nbytes)])
        source = FileSource(blob_path)
        assert read(File(source), job, slot) == blob[offset : offset + nbytes]
        source.close()

    def test_direct_read_returns_the_bytes(
        self, offset: int, nbytes: int, blob: bytes, direct: File, slot: Pages
    ) -> None:
        (job,) = jobs([ReadRequest(0, offset, nbytes)])
        assert direct.direct
        assert read(direct, job, slot) == blob[offset : offset + nbytes]


def test_memory_around_a_slot_is_not_written(direct: File) -> None:
    pages = Pages(3 * CELL)
    memory = memory_at(pages.address, 3 * CELL)
    memory[:] = b"\xaa" * (3 * CELL)
    (job,) = jobs([ReadRequest(0, CELL + 5, CELL - 5)])
    direct.read_job(job, pages.address + CELL)
    assert bytes(memory[:CELL]) == bytes(memory[2 * CELL :]) == b"\xaa" * CELL


def test_only_an_open_file_on_disk_has_a_descriptor(blob_path: Path) -> None:
    source = FileSource(blob_path)
    assert File(source).descriptor == source.descriptor >= 0
    for other in (BytesSource(b"abc"), ObjectSource(io.BytesIO(b"abc")), Slice(source, 1, 2, "")):
        file = File(other)
        assert file.descriptor == -1
        file.go_direct()
        assert not file.direct
    source.close()
    assert File(source).descriptor == -1


def test_close_closes_the_direct_descriptor(blob_path: Path, direct: File) -> None:
    descriptor = direct._direct_descriptor
    assert os.fstat(descriptor).st_size == blob_path.stat().st_size
    direct.close()
    direct.close()
    assert not direct.direct
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(descriptor)


@pytest.mark.skipif(os.name == "nt", reason="Windows does not replace or remove an open file")
def test_opened_file_is_read_even_if_its_path_was_replaced(tmp_path: Path, blob: bytes, slot: Pages) -> None:
    path = tmp_path / "x"
    path.write_bytes(blob[:9000])
    source = FileSource(path)
    (tmp_path / "y").write_bytes(bytes(9000))
    (tmp_path / "y").replace(path)
    file = File(source)
    file.go_direct()
    (job,) = jobs([ReadRequest(0, 10, 8000)])
    assert read(file, job, slot) == blob[10:8010]
    file.close()
    source.close()


# -- file systems with short or failing reads


class ShortPreadv:
    """An ``os.preadv`` that reads at most the given counts, or raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, counts: list[int | type[Exception]]) -> None:
        self._counts = iter(counts)
        self._preadv = os.preadv
        monkeypatch.setattr(os, "preadv", self)

    def __call__(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        limit = next(self._counts, None)
        if isinstance(limit, type):
            raise limit
        return self._preadv(descriptor, [buffers[0][:limit]], offset)


@pytest.mark.parametrize(
    "counts",
    [[OSError], [PAGE, 3 * PAGE], [PAGE, OSError], [512], [PAGE, 512 * 3], [0], [OverflowError]],
    ids=["error", "short", "error later", "small block", "small block later", "nothing", "overflow"],
)
def test_short_or_failed_direct_read_falls_back_to_buffered(
    counts: list[Any], direct: File, blob: bytes, slot: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = jobs([ReadRequest(0, PAGE + 100, 60_000)])
    ShortPreadv(monkeypatch, counts)
    assert read(direct, job, slot) == blob[PAGE + 100 : PAGE + 60_100]


# -- truncated files


def short_read(source: Source, run: Run) -> tuple[int, int]:
    """The request and count that ``ShortReadError`` reports, the same by ``read`` and ``read_job``."""
    memory = Pages(CELL)
    file = File(source)
    with pytest.raises(ShortReadError) as by_run:
        file.read(run, memory.address)
    with pytest.raises(ShortReadError) as by_job:
        file.read_job(Job(0, "cpu", (run,)), memory.address)
    assert (by_run.value.request, by_run.value.received) == (by_job.value.request, by_job.value.received)
    return by_run.value.request, by_run.value.received


@pytest.mark.parametrize("kind", ["file", "bytes", "object"])
def test_short_read_reports_the_bytes_received_of_the_request(kind: str, short: Path) -> None:
    """Not those of the run that was being read."""
    opened: Any = None
    if kind == "file":
        source: Source = FileSource(short)
    elif kind == "bytes":
        source = BytesSource(short.read_bytes())
    else:
        opened = short.open("rb")
        source = ObjectSource(opened)
    assert short_read(source, Run(CELL, 3, CELL - 100, 9000)) == (3, CELL + 4900)
    assert short_read(source, Run(CELL + 4999, 3, 0, 2)) == (3, 1)
    assert short_read(source, Run(CELL + 5000, 3, 0, 2)) == (3, 0)
    source.close()
    if opened:
        opened.close()


def test_short_read_of_a_later_run_reports_the_bytes_received_of_the_request(short: Path) -> None:
    source = FileSource(short)
    assert short_read(source, Run(2 * CELL, 3, 2 * CELL - 50, 100)) == (3, CELL + 4950)
    source.close()


def test_short_read_reports_the_first_incomplete_request(short: Path, slot: Pages) -> None:
    source = FileSource(short)
    requests = [ReadRequest(0, CELL, 2000), ReadRequest(0, CELL + 4000, 2000), ReadRequest(0, CELL + 6500, 10)]
    (job,) = jobs(requests)
    with pytest.raises(ShortReadError) as raised:
        File(source).read_job(job, slot.address)
    assert (raised.value.request, raised.value.received) == (1, 1000)
    source.close()


@pytest.mark.parametrize("offset", [2**62, 2**63 - 1, 2**63, 2**64 + 5, 10**40])
@pytest.mark.parametrize("use_direct", [True, False], ids=["direct", "buffered"])
def test_offset_beyond_any_file_is_a_short_read(offset: int, short: Path, slot: Pages, *, use_direct: bool) -> None:
    source = FileSource(short)
    file = File(source)
    if use_direct:
        file.go_direct()
    (job, *_) = jobs([ReadRequest(0, offset, 10)])
    with pytest.raises(ShortReadError) as raised:
        file.read_job(job, slot.address)
    assert (raised.value.request, raised.value.received) == (0, 0)
    file.close()
    source.close()


@pytest.mark.parametrize("use_direct", [True, False], ids=["direct", "buffered"])
def test_file_truncated_after_opening_is_a_short_read(short: Path, slot: Pages, *, use_direct: bool) -> None:
    source = FileSource(short)
    file = File(source)
    if use_direct:
        file.go_direct()
    os.truncate(short, CELL + 100)
    with pytest.raises(ShortReadError) as raised:
        file.read_job(Job(0, "cpu", (Run(CELL, 0, 0, 5000),)), slot.address)
    assert raised.value.received == 100
    file.close()
    source.close()


def test_check_raises_for_a_truncated_file(short: Path) -> None:
    source = FileSource(short)
    file = File(source)
    runs = [Run(0, 0, 0, 10), Run(CELL, 1, 0, 5000)]
    file.check(runs)
    os.truncate(short, CELL + 4000)
    with pytest.raises(ShortReadError) as raised:
        file.check(runs)
    assert (raised.value.request, raised.value.received) == (1, 4000)
    source.close()
