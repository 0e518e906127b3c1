"""Through pinned slots to devices: a driver that does everything later watches that nothing is done too early."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from zlib import crc32

import pytest
from tests.loading.transfer.fake import CALLS, CONTEXT, FakeDriver, Goal

from transload.io.cuda_driver import DriverError
from transload.io.sources import BytesSource, FileSource
from transload.loading import engine
from transload.loading.engine import read_ranges
from transload.loading.jobs import CELL, Checksums, ReadRequest, Settings, ShortReadError

SetCores = Callable[[int], None]
LARGE = [ReadRequest(0, 77, 5 * CELL, "cuda:0")]


def requests_of(seed: int, nbytes: int, *devices: str) -> list[ReadRequest]:
    dice = Random(seed)  # noqa: S311 - the same every time
    made = [ReadRequest(0, 50_000 + 320 * index, 256, dice.choice(devices)) for index in range(200)]
    for _ in range(6):
        size = dice.choice([1, 5000, 700_000, CELL, CELL + 77])
        made.append(ReadRequest(0, dice.randrange(nbytes - size), size, dice.choice(devices)))
    dice.shuffle(made)
    return made


def brought(
    path: Path, blob: bytes, requests: list[ReadRequest], cuda: FakeDriver, settings: Settings | None = None
) -> None:
    """Bring it, and look whether it received."""
    source, goal, told = FileSource(path), Goal(requests, cuda), list[int]()
    try:
        read_ranges([source], requests, goal.place, settings=settings or Settings(), report_progress=told.append)
        assert goal.pending == 0
        goal.check(blob)
        assert sum(told) == sum(request.nbytes for request in requests)
    finally:
        source.close()


def pinned_slots(cuda: FakeDriver) -> int:
    return sum(not read_only for _, read_only in cuda.pins.values())


# -- all goes well


@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "devices", [["cuda:0"], ["cuda:0", "cuda:1"], ["cuda:0", "cpu", "cuda:1"]], ids=["one", "two", "and the host"]
)
def test_requests_of_all_kinds(
    devices: list[str], threads: int, blob: bytes, blob_path: Path, cuda: FakeDriver, *, direct: bool
) -> None:
    requests = requests_of(threads, len(blob), *devices)
    brought(blob_path, blob, requests, cuda, Settings(threads=threads, direct=direct))
    assert pinned_slots(cuda) <= 2 * threads


def test_a_source_that_is_no_file(blob: bytes, cuda: FakeDriver) -> None:
    goal = Goal(LARGE, cuda)
    assert read_ranges([BytesSource(blob)], LARGE, goal.place).lanes == 1
    goal.check(blob)


def test_checksums(blob: bytes, blob_path: Path, cuda: FakeDriver) -> None:
    requests = requests_of(3, len(blob), "cuda:0", "cpu")
    source, goal, checksums = FileSource(blob_path), Goal(requests, cuda), Checksums()
    read_ranges([source], requests, goal.place, settings=Settings(threads=3), checksums=checksums)
    assert checksums.whole(len(requests)) == [
        crc32(blob[request.offset : request.offset + request.nbytes]) for request in requests
    ]
    source.close()


def test_little_takes_one_lane_in_the_thread_of_the_caller(blob: bytes, blob_path: Path, cuda: FakeDriver) -> None:
    before = threading.active_count()
    brought(blob_path, blob, [ReadRequest(0, 5, 1000, "cuda:0")], cuda)
    assert cuda.streams == 1
    assert pinned_slots(cuda) == 1
    assert threading.active_count() == before + 2  # the fake's: a stream, and the one who owned the memory before


def test_slots_are_not_more_than_allowed(blob: bytes, blob_path: Path, cuda: FakeDriver) -> None:
    brought(blob_path, blob, LARGE, cuda, Settings(pinned=16 << 20, threads=9))
    assert sum(nbytes for nbytes, _ in cuda.pins.values()) <= 16 << 20


@pytest.mark.parametrize("before", [0, CONTEXT + 1, 4242], ids=["none", "another device", "something else"])
@pytest.mark.parametrize("fails", [False, True], ids=["well", "failing"])
def test_the_thread_of_the_caller_keeps_its_device(
    before: int, blob: bytes, blob_path: Path, cuda: FakeDriver, *, fails: bool
) -> None:
    """Else ``torch.cuda.current_device()`` would be another one after a load."""
    cuda.at(before)
    requests = [ReadRequest(0, 5, 1000, "cuda:0"), ReadRequest(0, 2000, 1000, "cuda:1")]
    if fails:
        cuda.fails["copy"] = [2]
        with pytest.raises(DriverError):
            brought(blob_path, blob, requests, cuda)
    else:
        brought(blob_path, blob, requests, cuda)
    assert cuda.current_context() == before


# -- lanes that are kept


def test_lanes_are_kept_and_used_again(blob: bytes, blob_path: Path, cuda: FakeDriver) -> None:
    brought(blob_path, blob, LARGE, cuda, Settings(threads=3))
    kept = list(engine._idle)
    assert len(kept) == 3
    for _ in range(3):
        brought(blob_path, blob, LARGE, cuda, Settings(threads=3))
    assert set(engine._idle) == set(kept)
    assert cuda.calls["pin"] <= 6
    assert (cuda.calls["unpin"], cuda.calls["destroy"]) == (0, 0)
    assert cuda.calls["create_stream"] <= 3
    assert cuda.calls["create_event"] <= 6


def test_a_kept_lane_holds_nothing_of_the_last_load(blob: bytes, blob_path: Path, cuda: FakeDriver) -> None:
    import weakref

    source = FileSource(blob_path)
    requests = requests_of(1, len(blob), "cuda:0", "cpu")
    goal = Goal(requests, cuda)
    read_ranges([source], requests, goal.place, settings=Settings(threads=2))
    source.close()
    held: list[weakref.ref[object]] = [weakref.ref(source), weakref.ref(goal)]
    del source, goal
    gc.collect()
    assert [each() for each in held] == [None, None]
    assert len(engine._idle) == 2


def test_too_many_are_closed(blob: bytes, blob_path: Path, cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "KEPT", 2)
    cuda.at(77)
    brought(blob_path, blob, LARGE, cuda, Settings(threads=5))
    assert len(engine._idle) == 2
    assert pinned_slots(cuda) <= 4
    assert cuda.streams <= 2
    assert cuda.current_context() == 77


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="needs os.fork")
def test_forking_says_so() -> None:
    import subprocess
    import sys

    program = (
        "import os\n"
        "from transload.loading import engine\n"
        "engine._idle.append(object())\n"
        "child = os.fork()\n"
        "if not child: os._exit(len(engine._idle))\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(engine._idle))\n"
    )
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert made.stdout.split() == ["0", "1"], made.stderr


def test_several_loads_at_once(blob: bytes, blob_path: Path, cuda: FakeDriver) -> None:
    errors: list[BaseException] = []

    def load(seed: int) -> None:
        try:
            for turn in range(2):  # the second time with lanes that another load had
                requests = requests_of(10 * seed + turn, len(blob), "cuda:0", "cuda:1")
                brought(blob_path, blob, requests, cuda, Settings(threads=2))
        except BaseException as error:  # noqa: BLE001 - told below
            errors.append(error)

    threads = [threading.Thread(target=load, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(engine._idle) <= 8
    assert pinned_slots(cuda) <= 16


# -- what goes wrong


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_call_that_fails(
    call: str, number: int, threads: int, blob: bytes, blob_path: Path, cuda: FakeDriver
) -> None:
    """Everything is waited for, and the next load works."""
    cuda.fails[call] = [number]
    goal = Goal(LARGE, cuda)
    source = FileSource(blob_path)
    try:
        read_ranges([source], LARGE, goal.place, settings=Settings(threads=threads))
    except DriverError:
        assert cuda.calls[call] >= number
    else:
        assert call == "set_device" or cuda.calls[call] < number  # at the end it is only to be waited for
    source.close()
    assert cuda.pending == 0
    cuda.fails.clear()
    brought(blob_path, blob, LARGE, cuda, Settings(threads=threads))
    assert len(engine._idle) == threads


def test_a_lane_that_cannot_tell_whether_it_is_done_is_given_up(blob: bytes, blob_path: Path, cuda: FakeDriver) -> None:
    cuda.fails["wait_stream"] = [1]
    with pytest.raises(DriverError, match="wait_stream"):
        brought(blob_path, blob, [ReadRequest(0, 5, 1000, "cuda:0")], cuda)
    assert engine._idle == []
    cuda.fails.clear()
    brought(blob_path, blob, [ReadRequest(0, 5, 1000, "cuda:0")], cuda)
    assert len(engine._idle) == 1


def test_all_devices_are_waited_for_though_one_has_failed(blob: bytes, blob_path: Path, cuda: FakeDriver) -> None:
    cuda.fails["wait_stream"] = [1]
    with pytest.raises(DriverError, match="wait_stream"):
        brought(blob_path, blob, [ReadRequest(0, 5, 1000, "cuda:0"), ReadRequest(0, 2000, 1000, "cuda:1")], cuda)
    assert cuda.calls["wait_stream"] == 2


def test_a_device_that_has_failed_keeps_nobody_from_going_on(
    blob: bytes, blob_path: Path, cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lanes that are too many are closed as far as that goes."""
    monkeypatch.setattr(engine, "KEPT", 0)
    cuda.fails["unpin"] = range(1, 99)
    brought(blob_path, blob, LARGE, cuda, Settings(threads=3))
    assert engine._idle == []


@pytest.mark.parametrize("refused", [range(1, 99), [1], [2]], ids=["all", "first", "second"])
@pytest.mark.parametrize("threads", [1, 3])
def test_memory_that_cannot_be_pinned_is_used_as_it_is(
    refused: list[int], threads: int, blob: bytes, blob_path: Path, cuda: FakeDriver
) -> None:
    """A container may not be allowed to: what torch.load can do there, we can."""
    cuda.fails["pin"] = refused
    brought(blob_path, blob, LARGE, cuda, Settings(threads=threads))


@pytest.mark.parametrize("threads", [1, 3])
def test_there_is_no_place(threads: int, blob: bytes, blob_path: Path, cuda: FakeDriver) -> None:
    requests = [ReadRequest(0, CELL * index, CELL, "cuda:0") for index in range(7)]
    goal, source = Goal(requests, cuda), FileSource(blob_path)

    def place(index: int) -> int:
        if index == 5:
            raise MemoryError("full")
        return goal.place(index)

    with pytest.raises(MemoryError, match="full"):
        read_ranges([source], requests, place, settings=Settings(threads=threads))
    assert cuda.pending == 0
    assert len(engine._idle) == threads
    source.close()
    brought(blob_path, blob, requests, cuda, Settings(threads=threads))


@pytest.mark.parametrize("threads", [1, 3])
def test_a_file_that_was_cut(threads: int, blob: bytes, tmp_path: Path, cuda: FakeDriver) -> None:
    path = tmp_path / "cut"
    path.write_bytes(blob)
    source = FileSource(path)
    os.truncate(path, 3 * CELL + 5)
    with pytest.raises(ShortReadError) as raised:
        read_ranges([source], LARGE, Goal(LARGE, cuda).place, settings=Settings(threads=threads))
    assert (raised.value.request, raised.value.received) == (0, 3 * CELL + 5 - 77)
    assert cuda.pending == 0
    source.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_the_one_who_is_told_interrupts(threads: int, blob: bytes, blob_path: Path, cuda: FakeDriver) -> None:
    source, goal = FileSource(blob_path), Goal(LARGE, cuda)

    def report_progress(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_ranges([source], LARGE, goal.place, settings=Settings(threads=threads), report_progress=report_progress)
    assert cuda.pending == 0
    source.close()
    brought(blob_path, blob, LARGE, cuda, Settings(threads=threads))


def test_lanes_are_not_lost_when_there_is_no_memory_for_more(
    blob: bytes, blob_path: Path, cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    brought(blob_path, blob, LARGE, cuda, Settings(threads=2))
    kept = set(engine._idle)

    def full(_: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(engine, "Pages", full)
    with pytest.raises(OSError, match="Cannot allocate"):
        brought(blob_path, blob, LARGE, cuda, Settings(threads=3))
    assert set(engine._idle) == kept
    brought(blob_path, blob, LARGE, cuda, Settings(threads=2))


def test_there_is_no_driver(blob: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    from transload.io import cuda_driver as driver

    monkeypatch.setattr(driver, "cuda_driver", lambda: None)
    with pytest.raises(RuntimeError, match="no CUDA driver"):
        read_ranges([BytesSource(blob)], LARGE, lambda _: 0)
