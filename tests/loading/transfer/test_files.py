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
from transload.loading.jobs import CELL, File, Job, ReadRequest, Run, ShortReadError, jobs


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
    """A file that is read past the page cache, where the file system of the tests knows that."""
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
    "odd": (3 * CELL + 4097, 1_000_001),
    "the end": (10 * CELL + 12_000, 345),
}


@pytest.mark.parametrize(("offset", "nbytes"), SPANS.values(), ids=SPANS.keys())
class TestSpans:
    def test_buffered(self, offset: int, nbytes: int, blob: bytes, blob_path: Path, slot: Pages) -> None:
        (job,) = jobs([ReadRequest(0, offset, nbytes)])
        source = FileSource(blob_path)
        assert read(File(source), job, slot) == blob[offset : offset + nbytes]
        source.close()

    def test_direct(self, offset: int, nbytes: int, blob: bytes, direct: File, slot: Pages) -> None:
        (job,) = jobs([ReadRequest(0, offset, nbytes)])
        assert direct.direct
        assert read(direct, job, slot) == blob[offset : offset + nbytes]


def test_what_lies_beside_a_slot_is_not_touched(direct: File) -> None:
    both = Pages(3 * CELL)
    whole = memory_at(both.address, 3 * CELL)
    whole[:] = b"\xaa" * (3 * CELL)
    (job,) = jobs([ReadRequest(0, CELL + 5, CELL - 5)])
    direct.read_job(job, both.address + CELL)
    assert bytes(whole[:CELL]) == bytes(whole[2 * CELL :]) == b"\xaa" * CELL


def test_only_a_file_on_disk_has_a_descriptor(blob_path: Path) -> None:
    source = FileSource(blob_path)
    assert File(source).descriptor == source.descriptor >= 0
    for other in (BytesSource(b"abc"), ObjectSource(io.BytesIO(b"abc")), Slice(source, 1, 2, "")):
        file = File(other)
        assert file.descriptor == -1
        file.go_direct()
        assert not file.direct
    source.close()
    assert File(source).descriptor == -1


def test_a_second_descriptor_is_closed(blob_path: Path, direct: File) -> None:
    descriptor = direct._direct_descriptor
    assert os.fstat(descriptor).st_size == blob_path.stat().st_size
    direct.close()
    direct.close()
    assert not direct.direct
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(descriptor)


def test_the_file_that_was_opened_is_read_though_its_path_leads_to_another(
    tmp_path: Path, blob: bytes, slot: Pages
) -> None:
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


# -- where a file system does not keep its word


class Reading:
    """``os.preadv`` that gives less than it could, or nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, counts: list[int | type[Exception]]) -> None:
        self._counts = iter(counts)
        self._true = os.preadv
        monkeypatch.setattr(os, "preadv", self)

    def __call__(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        most = next(self._counts, None)
        if isinstance(most, type):
            raise most
        return self._true(descriptor, [buffers[0][:most]], offset)


@pytest.mark.parametrize(
    "counts",
    [[OSError], [PAGE, 3 * PAGE], [PAGE, OSError], [512], [PAGE, 512 * 3], [0], [OverflowError]],
    ids=["refused", "slow", "refused later", "a small block", "a small block later", "nothing", "too far"],
)
def test_what_is_not_read_directly_is_read_all_the_same(
    counts: list[Any], direct: File, blob: bytes, slot: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = jobs([ReadRequest(0, PAGE + 100, 60_000)])
    Reading(monkeypatch, counts)
    assert read(direct, job, slot) == blob[PAGE + 100 : PAGE + 60_100]


# -- files that end too early


def ended(source: Source, run: Run) -> tuple[int, int]:
    """What is said of a part, read straight and as a job."""
    memory = Pages(CELL)
    file = File(source)
    with pytest.raises(ShortReadError) as straight:
        file.read(run, memory.address)
    with pytest.raises(ShortReadError) as slotted:
        file.read_job(Job(0, "cpu", (run,)), memory.address)
    assert (straight.value.request, straight.value.received) == (slotted.value.request, slotted.value.received)
    return straight.value.request, straight.value.received


@pytest.mark.parametrize("kind", ["file", "bytes", "object"])
def test_the_end_says_how_much_of_a_want_there_is(kind: str, short: Path) -> None:
    """Not how much of the part that was being read."""
    opened: Any = None
    if kind == "file":
        source: Source = FileSource(short)
    elif kind == "bytes":
        source = BytesSource(short.read_bytes())
    else:
        opened = short.open("rb")
        source = ObjectSource(opened)
    assert ended(source, Run(CELL, 3, CELL - 100, 9000)) == (3, CELL + 4900)
    assert ended(source, Run(CELL + 4999, 3, 0, 2)) == (3, 1)
    assert ended(source, Run(CELL + 5000, 3, 0, 2)) == (3, 0)
    source.close()
    if opened:
        opened.close()


def test_the_end_says_so_though_a_later_part_is_read_first(short: Path) -> None:
    source = FileSource(short)
    assert ended(source, Run(2 * CELL, 3, 2 * CELL - 50, 100)) == (3, CELL + 4950)
    source.close()


def test_the_end_names_the_first_that_is_not_all_there(short: Path, slot: Pages) -> None:
    source = FileSource(short)
    requests = [ReadRequest(0, CELL, 2000), ReadRequest(0, CELL + 4000, 2000), ReadRequest(0, CELL + 6500, 10)]
    (job,) = jobs(requests)
    with pytest.raises(ShortReadError) as raised:
        File(source).read_job(job, slot.address)
    assert (raised.value.request, raised.value.received) == (1, 1000)
    source.close()


@pytest.mark.parametrize("offset", [2**62, 2**63 - 1, 2**63, 2**64 + 5, 10**40])
@pytest.mark.parametrize("straight", [True, False], ids=["direct", "buffered"])
def test_positions_that_no_file_has(offset: int, short: Path, slot: Pages, *, straight: bool) -> None:
    source = FileSource(short)
    file = File(source)
    if straight:
        file.go_direct()
    (job, *_) = jobs([ReadRequest(0, offset, 10)])
    with pytest.raises(ShortReadError) as raised:
        file.read_job(job, slot.address)
    assert (raised.value.request, raised.value.received) == (0, 0)
    file.close()
    source.close()


@pytest.mark.parametrize("straight", [True, False], ids=["direct", "buffered"])
def test_a_file_that_is_cut_after_it_was_opened(short: Path, slot: Pages, *, straight: bool) -> None:
    source = FileSource(short)
    file = File(source)
    if straight:
        file.go_direct()
    os.truncate(short, CELL + 100)
    with pytest.raises(ShortReadError) as raised:
        file.read_job(Job(0, "cpu", (Run(CELL, 0, 0, 5000),)), slot.address)
    assert raised.value.received == 100
    file.close()
    source.close()


def test_a_file_is_long_enough_or_not(short: Path) -> None:
    source = FileSource(short)
    file = File(source)
    runs = [Run(0, 0, 0, 10), Run(CELL, 1, 0, 5000)]
    file.check(runs)
    os.truncate(short, CELL + 4000)
    with pytest.raises(ShortReadError) as raised:
        file.check(runs)
    assert (raised.value.request, raised.value.received) == (1, 4000)
    source.close()
