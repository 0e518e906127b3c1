"""The device fetches from the page cache: pages are pinned for reading, some at a time, and let go."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest
from tests.loading.transfer.fake import CALLS, FakeDriver, Goal

from transload.io.cuda_driver import DriverError
from transload.io.sources import FileSource
from transload.loading import engine
from transload.loading.engine import Choice, read_ranges
from transload.loading.jobs import CELL, Checksums, ReadRequest, ShortReadError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can pin file-backed pages")

LARGE = [ReadRequest(0, 77, 5 * CELL, "cuda:0")]
MIXED = [
    ReadRequest(0, 5, 100, "cuda:0"),
    ReadRequest(0, 200, 2 * CELL, "cuda:0"),
    ReadRequest(0, 2 * CELL + 300, CELL, "cuda:1"),
    ReadRequest(0, 3 * CELL + 400, CELL // 4, "cpu"),
    ReadRequest(0, 4 * CELL + 500, CELL, "cuda:1"),
    ReadRequest(0, 0, CELL, "cuda:0"),
    *(ReadRequest(0, 6 * CELL + 1000 + 320 * index, 256, "cuda:0") for index in range(300)),
]


@pytest.fixture(params=[1, 2], ids=["one core", "two cores"])
def count(request: pytest.FixtureRequest, set_cores: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> int:
    """So few processors that pages are mapped, and a file that is in the cache."""
    set_cores(request.param)
    monkeypatch.setattr(engine, "cached_fraction", lambda *_: 1.0)
    return int(request.param)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of one job each: there are many."""
    monkeypatch.setattr(engine, "_GROUP", 1)


def brought(
    path: Path, blob: bytes, requests: list[ReadRequest], cuda: FakeDriver, checksums: Checksums | None = None
) -> Choice:
    source, goal, told = FileSource(path), Goal(requests, cuda), list[int]()
    try:
        choice = read_ranges([source], requests, goal.place, report_progress=told.append, checksums=checksums)
        goal.check(blob)
    finally:
        source.close()
    assert sum(told) == sum(request.nbytes for request in requests)
    assert cuda.pending == 0
    return choice


def mappings(path: Path) -> int:
    """Parts of a file that are mapped at the moment."""
    return Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").count(str(path))


def let_go(path: Path, cuda: FakeDriver) -> bool:
    return mappings(path) == 0 and not any(read_only for _, read_only in cuda.pins.values())


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("requests", [LARGE, MIXED], ids=["large", "mixed"])
def test_pages_are_pinned_fetched_and_let_go(
    requests: list[ReadRequest], count: int, blob: bytes, blob_path: Path, cuda: FakeDriver
) -> None:
    choice = brought(blob_path, blob, requests, cuda)
    assert (choice.lanes, choice.mapped) == (count, True)
    assert cuda.calls["pin read-only"] > 0
    assert let_go(blob_path, cuda)


@pytest.mark.usefixtures("small_parts")
def test_with_one_core_nothing_is_read(
    count: int, blob: bytes, blob_path: Path, cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    if count == 1:
        monkeypatch.setattr(FileSource, "readinto", lambda *_: pytest.fail("the file is read"))
    brought(blob_path, blob, LARGE, cuda)
    assert cuda.calls["pin"] <= 2 * (count - 1)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("count", [1], indirect=True)
def test_two_parts_are_under_way_at_once(
    count: int, blob: bytes, blob_path: Path, cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part waits for its own event only: the next one is fetched while a third is pinned."""
    waited: list[tuple[int, int]] = []
    true_wait = engine.MappedLane._finish_oldest

    def fetched(lane: engine.MappedLane) -> None:
        waited.append((lane._parts[0].event, lane._parts[-1].event if len(lane._parts) > 1 else 0))
        true_wait(lane)

    monkeypatch.setattr(engine.MappedLane, "_finish_oldest", fetched)
    brought(blob_path, blob, LARGE, cuda)
    assert len(waited) > 2 * count
    assert all(first != last for first, last in waited)


@pytest.mark.usefixtures("small_parts", "count")
def test_streams_and_events_are_given_back(blob: bytes, blob_path: Path, cuda: FakeDriver) -> None:
    brought(blob_path, blob, LARGE, cuda)
    streams, events = cuda.streams, cuda.events
    for _ in range(3):
        brought(blob_path, blob, LARGE, cuda)
    assert cuda.streams <= streams + 1  # of the lane that is kept, if it had nothing to do the first time
    assert cuda.events - events <= 3 + 2  # a fence for each load, which are the fake's


@pytest.mark.parametrize("refused", [range(1, 99), [1], [2]], ids=["all", "first", "second"])
@pytest.mark.usefixtures("small_parts", "count")
def test_pages_that_cannot_be_pinned_are_read(
    refused: list[int], blob: bytes, blob_path: Path, cuda: FakeDriver
) -> None:
    cuda.fails["pin read-only"] = refused
    brought(blob_path, blob, MIXED, cuda)
    assert let_go(blob_path, cuda)


@pytest.mark.usefixtures("small_parts", "count")
def test_pages_that_cannot_be_mapped_are_read(
    blob: bytes, blob_path: Path, cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Libc:
        mmap = staticmethod(lambda *_: 2**64 - 1)

    monkeypatch.setattr(engine, "libc", Libc)
    brought(blob_path, blob, MIXED, cuda)
    assert cuda.calls["pin read-only"] == 0


@pytest.mark.usefixtures("count")
def test_what_is_to_be_looked_at_is_read(blob: bytes, blob_path: Path, cuda: FakeDriver) -> None:
    """Touching a mapped page of a file that was just cut would end the process."""
    checksums = Checksums()
    brought(blob_path, blob, MIXED, cuda, checksums)
    assert cuda.calls["pin read-only"] == 0
    assert checksums.whole(len(MIXED)) == [
        crc32(blob[request.offset : request.offset + request.nbytes]) for request in MIXED
    ]


@pytest.mark.parametrize("cut", [3 * CELL + 5, 5 * CELL + 76])
@pytest.mark.usefixtures("small_parts", "count")
def test_a_file_that_was_cut(cut: int, blob: bytes, tmp_path: Path, cuda: FakeDriver) -> None:
    """The rest of its last page would come as zeros."""
    path = tmp_path / "cut"
    path.write_bytes(blob)
    source = FileSource(path)
    os.truncate(path, cut)
    with pytest.raises(ShortReadError) as raised:
        read_ranges([source], LARGE, Goal(LARGE, cuda).place)
    assert (raised.value.request, raised.value.received) == (0, cut - 77)
    assert let_go(path, cuda)
    source.close()


@pytest.mark.usefixtures("small_parts", "count")
@pytest.mark.parametrize("count", [1], indirect=True)
@pytest.mark.parametrize("number", [1, 6], ids=["first", "last"])
def test_a_file_that_is_cut_while_it_is_finish_oldest(
    number: int, blob: bytes, tmp_path: Path, cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cut"
    path.write_bytes(blob)
    source = FileSource(path)
    cut = 5 * CELL + 77 - 5
    true_wait = FakeDriver.wait_event

    def later(driver: FakeDriver, event: int) -> None:
        true_wait(driver, event)
        if driver.calls["wait_event"] == number:
            os.truncate(path, cut)

    monkeypatch.setattr(FakeDriver, "wait_event", later)
    with pytest.raises(ShortReadError) as raised:
        read_ranges([source], LARGE, Goal(LARGE, cuda).place)
    assert (raised.value.request, raised.value.received) == (0, 5 * CELL - 5)
    assert let_go(path, cuda)
    source.close()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.usefixtures("small_parts")
def test_a_call_that_fails(call: str, number: int, count: int, blob: bytes, blob_path: Path, cuda: FakeDriver) -> None:
    cuda.fails[call] = [number]
    goal, source = Goal(MIXED, cuda), FileSource(blob_path)
    with pytest.raises(DriverError, match="told to fail"):
        read_ranges([source], MIXED, goal.place)
    source.close()
    assert cuda.pending == 0
    assert let_go(blob_path, cuda)
    assert len(engine._idle) == count - 1
    cuda.fails.clear()
    brought(blob_path, blob, MIXED, cuda)


@pytest.mark.usefixtures("small_parts", "count")
def test_pages_that_cannot_be_let_go_stay_and_the_others_do_not(blob: bytes, tmp_path: Path, cuda: FakeDriver) -> None:
    path = tmp_path / "x"
    path.write_bytes(blob)
    cuda.fails["unpin"] = [1]
    source = FileSource(path)
    with pytest.raises(DriverError, match="unpin was told to fail"):
        read_ranges([source], LARGE, Goal(LARGE, cuda).place)
    source.close()
    assert mappings(path) == sum(read_only for _, read_only in cuda.pins.values()) == 1


@pytest.mark.usefixtures("small_parts", "count")
def test_the_one_who_is_told_interrupts(blob_path: Path, cuda: FakeDriver) -> None:
    source, goal = FileSource(blob_path), Goal(LARGE, cuda)

    def report_progress(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_ranges([source], LARGE, goal.place, report_progress=report_progress)
    assert let_go(blob_path, cuda)
    source.close()
