"""The device copies from the page cache: mapped pages are pinned read-only, part by part, and released."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest
from tests.opening.fake import CALLS, FakeDriver, Targets

from transload.io.cuda_driver import DriverError
from transload.io.sources import FileSource
from transload.opening import engine
from transload.opening.engine import Choice, read_ranges
from transload.opening.jobs import CELL, Checksums, ReadRequest, ShortReadError

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
def cores(request: pytest.FixtureRequest, set_cores: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> int:
    """Few enough CPU cores that pages are mapped, and a file that is in the page cache."""
    set_cores(request.param)
    monkeypatch.setattr(engine, "cached_fraction", lambda *_: 1.0)
    return int(request.param)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make parts of one job each, so that there are many."""
    monkeypatch.setattr(engine, "_GROUP", 1)


def check_transfer(
    path: Path, blob: bytes, requests: list[ReadRequest], cuda: FakeDriver, checksums: Checksums | None = None
) -> Choice:
    source, targets, reported = FileSource(path), Targets(requests, cuda), list[int]()
    try:
        choice = read_ranges([source], requests, targets.place, report_progress=reported.append, checksums=checksums)
        targets.check(blob)
    finally:
        source.close()
    assert sum(reported) == sum(request.nbytes for request in requests)
    assert cuda.pending == 0
    return choice


def mappings(path: Path) -> int:
    """The number of parts of a file that are mapped."""
    return Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").count(str(path))


def is_released(path: Path, cuda: FakeDriver) -> bool:
    return mappings(path) == 0 and not any(read_only for _, read_only in cuda.pins.values())


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("requests", [LARGE, MIXED], ids=["large", "mixed"])
def test_pages_are_pinned_copied_and_released(
    requests: list[ReadRequest], cores: int, blob: bytes, blob_path: Path, cuda: FakeDriver
) -> None:
    choice = check_transfer(blob_path, blob, requests, cuda)
    assert (choice.lanes, choice.mapped) == (cores, True)
    assert cuda.calls["pin read-only"] > 0
    assert is_released(blob_path, cuda)


@pytest.mark.usefixtures("small_parts")
def test_file_is_not_read_with_one_core(
    cores: int, blob: bytes, blob_path: Path, cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cores == 1:
        monkeypatch.setattr(FileSource, "readinto", lambda *_, **__: pytest.fail("the file is read"))
    check_transfer(blob_path, blob, LARGE, cuda)
    assert cuda.calls["pin"] <= 2 * (cores - 1)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("cores", [1], indirect=True)
def test_two_parts_are_copied_at_once(
    cores: int, blob: bytes, blob_path: Path, cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part waits only for its own event: the next one is copied while a third is pinned."""
    waited: list[tuple[int, int]] = []
    real_finish = engine.MappedLane._finish_oldest

    def recorded(lane: engine.MappedLane) -> None:
        waited.append((lane._parts[0].event, lane._parts[-1].event if len(lane._parts) > 1 else 0))
        real_finish(lane)

    monkeypatch.setattr(engine.MappedLane, "_finish_oldest", recorded)
    check_transfer(blob_path, blob, LARGE, cuda)
    assert len(waited) > 2 * cores
    assert all(first != last for first, last in waited)


@pytest.mark.usefixtures("small_parts", "cores")
def test_streams_and_events_are_not_leaked(blob: bytes, blob_path: Path, cuda: FakeDriver) -> None:
    check_transfer(blob_path, blob, LARGE, cuda)
    streams, events = cuda.streams, cuda.events
    for _ in range(3):
        check_transfer(blob_path, blob, LARGE, cuda)
    assert cuda.streams <= streams + 1  # for the kept lane, if it had no job the first time
    assert cuda.events - events <= 3 + 2  # the fake creates a fence for each load


@pytest.mark.parametrize("refused", [range(1, 99), [1], [2]], ids=["all", "first", "second"])
@pytest.mark.usefixtures("small_parts", "cores")
def test_pages_that_cannot_be_pinned_are_read(
    refused: list[int], blob: bytes, blob_path: Path, cuda: FakeDriver
) -> None:
    cuda.fails["pin read-only"] = refused
    check_transfer(blob_path, blob, MIXED, cuda)
    assert is_released(blob_path, cuda)


@pytest.mark.usefixtures("small_parts", "cores")
def test_pages_that_cannot_be_mapped_are_read(
    blob: bytes, blob_path: Path, cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Libc:
        mmap = staticmethod(lambda *_: 2**64 - 1)

    monkeypatch.setattr(engine, "libc", Libc)
    check_transfer(blob_path, blob, MIXED, cuda)
    assert cuda.calls["pin read-only"] == 0


@pytest.mark.usefixtures("cores")
def test_file_is_read_if_checksums_are_needed(blob: bytes, blob_path: Path, cuda: FakeDriver) -> None:
    """Touching a mapped page of a file that was just truncated would kill the process."""
    checksums = Checksums()
    check_transfer(blob_path, blob, MIXED, cuda, checksums)
    assert cuda.calls["pin read-only"] == 0
    assert checksums.whole(len(MIXED)) == [
        crc32(blob[request.offset : request.offset + request.nbytes]) for request in MIXED
    ]


@pytest.mark.parametrize("cut", [3 * CELL + 5, 5 * CELL + 76])
@pytest.mark.usefixtures("small_parts", "cores")
def test_truncated_file_is_a_short_read_error(cut: int, blob: bytes, tmp_path: Path, cuda: FakeDriver) -> None:
    """The rest of its last page would be zeros."""
    path = tmp_path / "cut"
    path.write_bytes(blob)
    source = FileSource(path)
    os.truncate(path, cut)
    with pytest.raises(ShortReadError) as raised:
        read_ranges([source], LARGE, Targets(LARGE, cuda).place)
    assert (raised.value.request, raised.value.received) == (0, cut - 77)
    assert is_released(path, cuda)
    source.close()


@pytest.mark.usefixtures("small_parts", "cores")
@pytest.mark.parametrize("cores", [1], indirect=True)
@pytest.mark.parametrize("number", [1, 6], ids=["first", "last"])
def test_file_truncated_during_the_transfer_is_a_short_read_error(
    number: int, blob: bytes, tmp_path: Path, cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cut"
    path.write_bytes(blob)
    source = FileSource(path)
    cut = 5 * CELL + 77 - 5
    real_wait = FakeDriver.wait_event

    def truncating_wait(driver: FakeDriver, event: int) -> None:
        real_wait(driver, event)
        if driver.calls["wait_event"] == number:
            os.truncate(path, cut)

    monkeypatch.setattr(FakeDriver, "wait_event", truncating_wait)
    with pytest.raises(ShortReadError) as raised:
        read_ranges([source], LARGE, Targets(LARGE, cuda).place)
    assert (raised.value.request, raised.value.received) == (0, 5 * CELL - 5)
    assert is_released(path, cuda)
    source.close()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.usefixtures("small_parts")
def test_failing_call_releases_all_pages_and_the_next_load_works(
    call: str, number: int, cores: int, blob: bytes, blob_path: Path, cuda: FakeDriver
) -> None:
    cuda.fails[call] = [number]
    targets, source = Targets(MIXED, cuda), FileSource(blob_path)
    with pytest.raises(DriverError, match="told to fail"):
        read_ranges([source], MIXED, targets.place)
    source.close()
    assert cuda.pending == 0
    assert is_released(blob_path, cuda)
    assert len(engine._idle) == cores - 1
    cuda.fails.clear()
    check_transfer(blob_path, blob, MIXED, cuda)


@pytest.mark.usefixtures("small_parts", "cores")
def test_only_pages_that_cannot_be_unpinned_stay_mapped(blob: bytes, tmp_path: Path, cuda: FakeDriver) -> None:
    path = tmp_path / "x"
    path.write_bytes(blob)
    cuda.fails["unpin"] = [1]
    source = FileSource(path)
    with pytest.raises(DriverError, match="unpin was told to fail"):
        read_ranges([source], LARGE, Targets(LARGE, cuda).place)
    source.close()
    assert mappings(path) == sum(read_only for _, read_only in cuda.pins.values()) == 1


@pytest.mark.usefixtures("small_parts", "cores")
def test_interrupt_in_progress_callback_releases_all_pages(blob_path: Path, cuda: FakeDriver) -> None:
    source, targets = FileSource(blob_path), Targets(LARGE, cuda)

    def report_progress(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_ranges([source], LARGE, targets.place, report_progress=report_progress)
    assert is_released(blob_path, cuda)
    source.close()
