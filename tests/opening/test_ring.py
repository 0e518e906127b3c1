"""Transfers to devices through pinned slots. The fake driver runs copies late and records anything done too early."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from zlib import crc32

import pytest
from tests.opening.fake import CALLS, CONTEXT, FakeDriver, Targets

from transload.io.cuda_driver import DriverError
from transload.io.sources import BytesSource, FileSource
from transload.opening import engine
from transload.opening.engine import read_ranges
from transload.opening.jobs import CELL, Checksums, ReadRequest, Settings, ShortReadError

SetCores = Callable[[int], None]
LARGE = [ReadRequest(0, 77, 5 * CELL, "cuda:0")]


def random_requests(seed: int, nbytes: int, *devices: str) -> list[ReadRequest]:
    random = Random(seed)  # noqa: S311 - the same every time
    requests = [ReadRequest(0, 50_000 + 320 * index, 256, random.choice(devices)) for index in range(200)]
    for _ in range(6):
        size = random.choice([1, 5000, 700_000, CELL, CELL + 77])
        requests.append(ReadRequest(0, random.randrange(nbytes - size), size, random.choice(devices)))
    random.shuffle(requests)
    return requests


def check_transfer(
    path: Path, blob: bytes, requests: list[ReadRequest], cuda: FakeDriver, settings: Settings | None = None
) -> None:
    """Transfer the requests and check the bytes and the progress."""
    source, targets, reported = FileSource(path), Targets(requests, cuda), list[int]()
    try:
        read_ranges([source], requests, targets.place, settings=settings or Settings(), report_progress=reported.append)
        assert targets.pending == 0
        targets.check(blob)
        assert sum(reported) == sum(request.nbytes for request in requests)
    finally:
        source.close()


def pinned_slots(cuda: FakeDriver) -> int:
    return sum(not read_only for _, read_only in cuda.pins.values())


# -- without errors


@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "devices",
    [["cuda:0"], ["cuda:0", "cuda:1"], ["cuda:0", "cpu", "cuda:1"]],
    ids=["one device", "two devices", "devices and host"],
)
def test_random_requests_are_transferred(
    devices: list[str], threads: int, blob: bytes, blob_path: Path, cuda: FakeDriver, *, direct: bool
) -> None:
    requests = random_requests(threads, len(blob), *devices)
    check_transfer(blob_path, blob, requests, cuda, Settings(threads=threads, direct=direct))
    assert pinned_slots(cuda) <= 2 * threads


def test_source_that_is_not_a_file_takes_one_lane(blob: bytes, cuda: FakeDriver) -> None:
    targets = Targets(LARGE, cuda)
    assert read_ranges([BytesSource(blob)], LARGE, targets.place).lanes == 1
    targets.check(blob)


def test_checksums_of_device_requests_are_computed(blob: bytes, blob_path: Path, cuda: FakeDriver) -> None:
    requests = random_requests(3, len(blob), "cuda:0", "cpu")
    source, targets, checksums = FileSource(blob_path), Targets(requests, cuda), Checksums()
    read_ranges([source], requests, targets.place, settings=Settings(threads=3), checksums=checksums)
    assert checksums.whole(len(requests)) == [
        crc32(blob[request.offset : request.offset + request.nbytes]) for request in requests
    ]
    source.close()


def test_few_bytes_take_one_lane_in_the_calling_thread(blob: bytes, blob_path: Path, cuda: FakeDriver) -> None:
    before = set(threading.enumerate())
    check_transfer(blob_path, blob, [ReadRequest(0, 5, 1000, "cuda:0")], cuda)
    assert cuda.streams == 1
    assert pinned_slots(cuda) == 1
    # Of the fake: a stream, and the former owner of the memory.
    assert len(set(threading.enumerate()) - before) == 2


def test_pinned_slots_stay_within_the_limit(blob: bytes, blob_path: Path, cuda: FakeDriver) -> None:
    check_transfer(blob_path, blob, LARGE, cuda, Settings(pinned=16 << 20, threads=9))
    assert sum(nbytes for nbytes, _ in cuda.pins.values()) <= 16 << 20


@pytest.mark.parametrize("before", [0, CONTEXT + 1, 4242], ids=["none", "another device", "unknown context"])
@pytest.mark.parametrize("fails", [False, True], ids=["success", "failure"])
def test_calling_thread_keeps_its_current_context(
    before: int, blob: bytes, blob_path: Path, cuda: FakeDriver, *, fails: bool
) -> None:
    """Otherwise ``torch.cuda.current_device()`` would change during a load."""
    cuda.enter_context(before)
    requests = [ReadRequest(0, 5, 1000, "cuda:0"), ReadRequest(0, 2000, 1000, "cuda:1")]
    if fails:
        cuda.fails["copy"] = [2]
        with pytest.raises(DriverError):
            check_transfer(blob_path, blob, requests, cuda)
    else:
        check_transfer(blob_path, blob, requests, cuda)
    assert cuda.current_context() == before


# -- kept lanes


def test_lanes_are_kept_and_reused(blob: bytes, blob_path: Path, cuda: FakeDriver) -> None:
    check_transfer(blob_path, blob, LARGE, cuda, Settings(threads=3))
    kept = list(engine._idle)
    assert len(kept) == 3
    for _ in range(3):
        check_transfer(blob_path, blob, LARGE, cuda, Settings(threads=3))
    assert set(engine._idle) == set(kept)
    assert cuda.calls["pin"] <= 6
    assert (cuda.calls["unpin"], cuda.calls["destroy"]) == (0, 0)
    assert cuda.calls["create_stream"] <= 3
    assert cuda.calls["create_event"] <= 6


def test_kept_lane_does_not_refer_to_the_last_load(blob: bytes, blob_path: Path, cuda: FakeDriver) -> None:
    import weakref

    source = FileSource(blob_path)
    requests = random_requests(1, len(blob), "cuda:0", "cpu")
    targets = Targets(requests, cuda)
    read_ranges([source], requests, targets.place, settings=Settings(threads=2))
    source.close()
    references: list[weakref.ref[object]] = [weakref.ref(source), weakref.ref(targets)]
    del source, targets
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert len(engine._idle) == 2


def test_surplus_lanes_are_closed(
    blob: bytes, blob_path: Path, cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "KEPT", 2)
    cuda.enter_context(77)
    check_transfer(blob_path, blob, LARGE, cuda, Settings(threads=5))
    assert len(engine._idle) == 2
    assert pinned_slots(cuda) <= 4
    assert cuda.streams <= 2
    assert cuda.current_context() == 77


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="needs os.fork")
def test_forked_child_has_no_kept_lanes() -> None:
    import subprocess
    import sys

    program = (
        "import os\n"
        "from transload.opening import engine\n"
        "engine._idle.append(object())\n"
        "child = os.fork()\n"
        "if not child: os._exit(len(engine._idle))\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(engine._idle))\n"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert process.stdout.split() == ["0", "1"], process.stderr


def test_several_threads_can_transfer_at_the_same_time(blob: bytes, blob_path: Path, cuda: FakeDriver) -> None:
    errors: list[BaseException] = []

    def load(seed: int) -> None:
        try:
            for turn in range(2):  # the second time with lanes of another load
                requests = random_requests(10 * seed + turn, len(blob), "cuda:0", "cuda:1")
                check_transfer(blob_path, blob, requests, cuda, Settings(threads=2))
        except BaseException as error:  # noqa: BLE001 - asserted below
            errors.append(error)

    threads = [threading.Thread(target=load, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(engine._idle) <= 8
    assert pinned_slots(cuda) <= 16


# -- errors


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize("threads", [1, 3])
def test_failing_call_leaves_no_pending_copies_and_the_next_load_works(
    call: str, number: int, threads: int, blob: bytes, blob_path: Path, cuda: FakeDriver
) -> None:
    """The error is raised after all copies have finished."""
    cuda.fails[call] = [number]
    targets = Targets(LARGE, cuda)
    source = FileSource(blob_path)
    try:
        read_ranges([source], LARGE, targets.place, settings=Settings(threads=threads))
    except DriverError:
        assert cuda.calls[call] >= number
    else:
        assert call == "set_device" or cuda.calls[call] < number  # at the end a device is set only to wait for it
    source.close()
    assert cuda.pending == 0
    cuda.fails.clear()
    check_transfer(blob_path, blob, LARGE, cuda, Settings(threads=threads))
    assert len(engine._idle) == threads


def test_lane_whose_stream_wait_fails_is_not_kept(blob: bytes, blob_path: Path, cuda: FakeDriver) -> None:
    cuda.fails["wait_stream"] = [1]
    with pytest.raises(DriverError, match="wait_stream"):
        check_transfer(blob_path, blob, [ReadRequest(0, 5, 1000, "cuda:0")], cuda)
    assert engine._idle == []
    cuda.fails.clear()
    check_transfer(blob_path, blob, [ReadRequest(0, 5, 1000, "cuda:0")], cuda)
    assert len(engine._idle) == 1


def test_all_devices_are_waited_for_even_if_one_fails(blob: bytes, blob_path: Path, cuda: FakeDriver) -> None:
    cuda.fails["wait_stream"] = [1]
    with pytest.raises(DriverError, match="wait_stream"):
        check_transfer(blob_path, blob, [ReadRequest(0, 5, 1000, "cuda:0"), ReadRequest(0, 2000, 1000, "cuda:1")], cuda)
    assert cuda.calls["wait_stream"] == 2


def test_failure_to_unpin_a_surplus_lane_is_ignored(
    blob: bytes, blob_path: Path, cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Surplus lanes are closed as far as possible."""
    monkeypatch.setattr(engine, "KEPT", 0)
    cuda.fails["unpin"] = range(1, 99)
    check_transfer(blob_path, blob, LARGE, cuda, Settings(threads=3))
    assert engine._idle == []


@pytest.mark.parametrize("refused", [range(1, 99), [1], [2]], ids=["all", "first", "second"])
@pytest.mark.parametrize("threads", [1, 3])
def test_memory_that_cannot_be_pinned_is_used_unpinned(
    refused: list[int], threads: int, blob: bytes, blob_path: Path, cuda: FakeDriver
) -> None:
    """A container may not allow pinning; torch.load works there, so this must too."""
    cuda.fails["pin"] = refused
    check_transfer(blob_path, blob, LARGE, cuda, Settings(threads=threads))


@pytest.mark.parametrize("threads", [1, 3])
def test_error_while_placing_a_request_is_raised_and_lanes_are_kept(
    threads: int, blob: bytes, blob_path: Path, cuda: FakeDriver
) -> None:
    requests = [ReadRequest(0, CELL * index, CELL, "cuda:0") for index in range(7)]
    targets, source = Targets(requests, cuda), FileSource(blob_path)

    def place(index: int) -> int:
        if index == 5:
            raise MemoryError("full")
        return targets.place(index)

    with pytest.raises(MemoryError, match="full"):
        read_ranges([source], requests, place, settings=Settings(threads=threads))
    assert cuda.pending == 0
    assert len(engine._idle) == threads
    source.close()
    check_transfer(blob_path, blob, requests, cuda, Settings(threads=threads))


@pytest.mark.parametrize("threads", [1, 3])
def test_truncated_file_is_a_short_read_error(threads: int, blob: bytes, tmp_path: Path, cuda: FakeDriver) -> None:
    path = tmp_path / "cut"
    path.write_bytes(blob)
    source = FileSource(path)
    os.truncate(path, 3 * CELL + 5)
    with pytest.raises(ShortReadError) as raised:
        read_ranges([source], LARGE, Targets(LARGE, cuda).place, settings=Settings(threads=threads))
    assert (raised.value.request, raised.value.received) == (0, 3 * CELL + 5 - 77)
    assert cuda.pending == 0
    source.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_interrupt_in_progress_callback_leaves_no_pending_copies(
    threads: int, blob: bytes, blob_path: Path, cuda: FakeDriver
) -> None:
    source, targets = FileSource(blob_path), Targets(LARGE, cuda)

    def report_progress(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_ranges([source], LARGE, targets.place, settings=Settings(threads=threads), report_progress=report_progress)
    assert cuda.pending == 0
    source.close()
    check_transfer(blob_path, blob, LARGE, cuda, Settings(threads=threads))


def test_kept_lanes_survive_a_failure_to_allocate_another(
    blob: bytes, blob_path: Path, cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_transfer(blob_path, blob, LARGE, cuda, Settings(threads=2))
    kept = set(engine._idle)

    def no_memory(_: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(engine, "Pages", no_memory)
    with pytest.raises(OSError, match="Cannot allocate"):
        check_transfer(blob_path, blob, LARGE, cuda, Settings(threads=3))
    assert set(engine._idle) == kept
    check_transfer(blob_path, blob, LARGE, cuda, Settings(threads=2))


def test_missing_driver_is_an_error(blob: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    from transload.io import cuda_driver as driver

    monkeypatch.setattr(driver, "cuda_driver", lambda: None)
    with pytest.raises(RuntimeError, match="no CUDA driver"):
        read_ranges([BytesSource(blob)], LARGE, lambda _: 0)
