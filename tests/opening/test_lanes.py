"""Threads of the transfer engine: each job runs once, errors are raised, no thread writes after the call returns."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import transload
from transload.io import pool
from transload.opening import engine
from transload.opening.engine import run_lanes
from transload.opening.jobs import CELL, Job, NextJob, Run

DEADLINE = 100.0  # seconds after which a hanging test gives up


class Broken(Exception):  # noqa: N818 - a signal of these tests
    """The error that these tests raise."""


def jobs(count: int) -> list[Job]:
    return [Job(0, "cpu", (Run(10 * index, index, 0, 10),)) for index in range(count)]


class Lane:
    """Records its jobs and its thread."""

    def __init__(self, action: Callable[[Job], object] = lambda _: None) -> None:
        self.done = 0
        self.taken: list[Job] = []
        self.thread = 0
        self.exited = False
        self._action = action

    def run(self, next_job: NextJob) -> None:
        self.thread = threading.get_ident()
        try:
            while (job := next_job()) is not None:
                self.taken.append(job)
                self._action(job)
                self.done += job.wanted
        finally:
            self.exited = True


def completed_jobs(lanes: list[Lane]) -> list[int]:
    """The sorted numbers of the jobs that ran."""
    return sorted(job.runs[0].request for lane in lanes for job in lane.taken)


@pytest.fixture(autouse=True)
def _no_thread_remains() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


# -- without errors


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("lane_count", [1, 2, 5])
def test_every_job_runs_once_and_is_reported(lane_count: int, count: int) -> None:
    lanes = [Lane() for _ in range(lane_count)]
    reported: list[int] = []
    run_lanes(iter(jobs(count)), lanes, reported.append)
    assert completed_jobs(lanes) == list(range(count))
    assert sum(reported) == 10 * count
    assert all(number > 0 for number in reported)


@pytest.mark.parametrize("lane_count", [1, 3])
def test_nothing_is_reported_without_jobs(lane_count: int) -> None:
    reported: list[int] = []
    run_lanes([], [Lane() for _ in range(lane_count)], reported.append)
    assert reported == []


def test_single_lane_runs_in_the_calling_thread() -> None:
    lane = Lane()
    run_lanes(jobs(3), [lane])
    assert lane.thread == threading.get_ident()


def test_several_lanes_run_concurrently_in_separate_threads() -> None:
    together = threading.Barrier(3, timeout=DEADLINE)
    lanes = [Lane(lambda _: together.wait()) for _ in range(3)]
    run_lanes(jobs(3), lanes)
    assert len({lane.thread for lane in lanes} - {threading.get_ident()}) == 3


def test_first_jobs_run_while_later_ones_are_prepared() -> None:
    lanes = [Lane(), Lane()]

    def prepared() -> Iterator[Job]:
        first, second = jobs(2)
        yield first
        wait_until(lambda: sum(lane.done for lane in lanes) == 10)
        yield second

    run_lanes(prepared(), lanes)
    assert sum(lane.done for lane in lanes) == 20


def test_all_bytes_are_reported_if_lanes_finish_before_the_first_poll() -> None:
    """Preparing jobs is slow at the very end: when it returns, no lane is left to wait for."""
    lanes = [Lane(), Lane()]

    def prepared() -> Iterator[Job]:
        yield from jobs(4)
        wait_until(lambda: sum(lane.done for lane in lanes) == 40)

    reported: list[int] = []
    run_lanes(prepared(), lanes, reported.append)
    assert sum(reported) == 40


def test_progress_is_reported_while_lanes_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_POLL", 0.001)
    reported: list[int] = []
    resume = threading.Event()

    def wait(job: Job) -> None:
        if job.runs[0].request:
            assert resume.wait(DEADLINE)

    def report_progress(count: int) -> None:
        reported.append(count)
        resume.set()

    run_lanes(jobs(3), [Lane(wait), Lane(wait)], report_progress)
    assert len(reported) > 1
    assert sum(reported) == 30


@pytest.mark.parametrize("lane_count", [1, 3])
def test_next_job_keeps_returning_none_after_the_last_job(lane_count: int) -> None:
    class AskingAgain(Lane):
        def run(self, next_job: NextJob) -> None:
            super().run(next_job)
            self.after_last = [next_job(), next_job()]

    lanes = [AskingAgain() for _ in range(lane_count)]
    run_lanes(jobs(5), lanes)
    assert [lane.after_last for lane in lanes] == [[None, None]] * lane_count


# -- errors


@pytest.mark.parametrize("lane_count", [1, 2, 4])
def test_error_in_a_lane_stops_all_lanes(lane_count: int) -> None:
    def fail(job: Job) -> None:
        if job.runs[0].request == 5:
            raise Broken

    lanes = [Lane(fail) for _ in range(lane_count)]
    endless = (Job(0, "cpu", (Run(10 * index, index, 0, 10),)) for index in range(1 << 60))
    with pytest.raises(Broken):
        run_lanes(endless, lanes)
    assert all(lane.exited for lane in lanes)


def test_first_error_is_raised() -> None:
    first = threading.Event()

    def fail(job: Job) -> None:
        if job.runs[0].request:
            assert first.wait(DEADLINE)
            time.sleep(0.01)
            raise Broken("second")
        first.set()
        raise Broken("first")

    lanes = [Lane(fail), Lane(fail)]

    def prepared() -> Iterator[Job]:
        job, other_job = jobs(2)
        yield job
        yield other_job
        wait_until(lambda: sum(len(lane.taken) for lane in lanes) == 2 or any(lane.exited for lane in lanes))

    with pytest.raises(Broken, match="first"):
        run_lanes(prepared(), lanes)


@pytest.mark.parametrize("lane_count", [1, 3])
def test_error_while_preparing_jobs_stops_all_lanes(lane_count: int) -> None:
    def prepared() -> Iterator[Job]:
        yield from jobs(4)
        raise Broken

    lanes = [Lane() for _ in range(lane_count)]
    with pytest.raises(Broken):
        run_lanes(prepared(), lanes)
    assert all(lane.exited for lane in lanes if lane.thread)


@pytest.mark.parametrize("lane_count", [1, 3])
@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt], ids=["error", "interrupt"])
def test_error_in_progress_callback_stops_all_lanes(
    lane_count: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_POLL", 0.001)

    def report_progress(_: int) -> None:
        raise error

    lanes = [Lane(lambda _: time.sleep(0.002)) for _ in range(lane_count)]
    with pytest.raises(error):
        run_lanes(jobs(50), lanes, report_progress)
    assert sum(len(lane.taken) for lane in lanes) < 50
    assert all(lane.exited for lane in lanes if lane.thread)


def test_error_is_not_kept_alive_by_a_reference_cycle() -> None:
    """Its frames may refer to device memory, which must be freed without waiting for the garbage collector."""

    class Memory:
        pass

    def run_failing_lanes() -> weakref.ref[Memory]:
        memory = Memory()

        def fail(_: Job) -> None:
            raise Broken(memory)

        try:
            run_lanes(jobs(2), [Lane(fail), Lane(fail)])
        except Broken:
            return weakref.ref(memory)
        raise AssertionError

    gc.collect()
    gc.disable()
    try:
        assert run_failing_lanes()() is None
    finally:
        gc.enable()


# -- more lanes while more are faster


def cells(count: int) -> list[Job]:
    return [Job(0, "cpu", (Run(CELL * index, index, 0, CELL),)) for index in range(count)]


def lanes_over_time(first: int, most: int, speed: Callable[[int], float]) -> list[int]:
    """The numbers of lanes during a long load, if so many lanes read ``speed`` cells a second."""
    growth = engine.Growth(first, most, far=True)
    counts = [growth.lanes]
    for _ in range(100):
        for lane in range(growth.lanes):
            growth.add(lane, CELL, growth.lanes / speed(growth.lanes), 0.0)
        growth.update()
        if growth.lanes != counts[-1]:
            counts.append(growth.lanes)
        if not growth.open:
            return counts
    raise AssertionError(counts)


@pytest.mark.parametrize(
    ("worked", "faster", "expected"),
    [(0.5, 1.1, 8), (0.5, 0.9, 2), (0.9, 1.1, 2)],
    ids=["shared cores", "not faster", "cores of its own"],
)
def test_lanes_that_wait_for_a_core_are_given_more(worked: float, faster: float, expected: int) -> None:
    growth = engine.Growth(2, 8)
    for _ in range(3):
        speed = faster if growth.lanes > 2 else 1.0
        for lane in [*range(growth.lanes)] * 2:
            seconds = growth.lanes / speed
            growth.add(lane, CELL, seconds, worked * seconds)
        if growth.open:
            growth.update()
    assert growth.lanes == expected
    assert growth.open is (worked > 0.75), "another program may begin at any time"


@pytest.mark.parametrize(
    ("speed", "expected"),
    [
        (lambda lanes: 10 * lanes, [8, 16, 32, 64]),
        (lambda lanes: 10 * min(lanes, 44), [8, 16, 32, 64]),
        (lambda lanes: 10 * min(lanes, 36), [8, 16, 32, 64, 32]),
        (lambda lanes: 10 * min(lanes, 9), [8, 16, 8]),
        (lambda _: 100, [8, 16, 8]),
    ],
    ids=["each connection", "44 connections", "36 connections", "9 connections", "the network"],
)
def test_lanes_double_while_that_is_faster(speed: Callable[[int], float], expected: list[int]) -> None:
    assert lanes_over_time(8, 64, speed) == expected


def test_lanes_double_no_further_than_they_may() -> None:
    assert lanes_over_time(8, 40, lambda lanes: 10 * lanes) == [8, 16, 32]
    assert not engine.Growth(8, 15, far=True).open


def test_the_first_job_of_each_lane_does_not_count() -> None:
    """The lanes that were added first connect."""
    growth = engine.Growth(2, 4, far=True)
    for seconds in (60.0, 1.0):
        for lane in range(2):
            growth.add(lane, CELL, seconds, 0.0)
    growth.update()
    assert growth.lanes == 4
    for seconds in (60.0, 1.0):
        for lane in range(4):
            growth.add(lane, CELL, seconds, 0.0)
    growth.update()
    assert (growth.lanes, growth.open) == (4, False)


def test_all_lanes_count() -> None:
    growth = engine.Growth(2, 4, far=True)
    for _ in range(10):
        growth.add(0, CELL, 1.0, 0.0)
    growth.add(1, CELL, 1.0, 0.0)
    growth.update()
    assert growth.lanes == 2
    growth.add(1, CELL, 1.0, 0.0)
    growth.update()
    assert growth.lanes == 4


def test_a_lane_that_hangs_does_not_stop_the_growth() -> None:
    growth = engine.Growth(4, 16, far=True)
    for lanes in (4, 8):
        assert (growth.lanes, growth.open) == (lanes, True)
        for _ in range(16):
            growth.update()
            assert growth.lanes == lanes
            for lane in range(1, lanes):  # the first never does a job
                growth.add(lane, CELL, 1.0, 0.0)
        growth.update()
    assert growth.lanes == 16


def test_many_lanes_that_hang_stop_the_growth() -> None:
    growth = engine.Growth(4, 16, far=True)
    for _ in range(100):
        growth.add(3, CELL, 1.0, 0.0)
    growth.update()
    assert growth.lanes == 4


@pytest.mark.parametrize("far", [False, True], ids=["here", "far"])
def test_lanes_are_added_while_they_wait(*, far: bool) -> None:
    lanes = [Lane(lambda _: time.sleep(0.02)) for _ in range(16)]
    run_lanes(cells(80), lanes, growth=engine.Growth(4, len(lanes), far=far))
    assert completed_jobs(lanes) == list(range(80))
    assert sum(bool(lane.taken) for lane in lanes) >= 8


def test_all_threads_start_before_memory_is_allocated() -> None:
    """A later one could get the heap of the thread that allocates it."""
    counts: list[int] = []

    def prepared() -> Iterator[Job]:
        for job in cells(80):
            counts.append(threading.active_count() - before)
            yield job

    before = threading.active_count()
    lanes = [Lane(lambda _: time.sleep(0.01)) for _ in range(8)]
    run_lanes(prepared(), lanes, growth=engine.Growth(2, len(lanes)))
    assert set(counts) == {8}
    assert completed_jobs(lanes) == list(range(80))


def test_lanes_that_do_not_help_end_before_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = threading.local()
    monkeypatch.setattr(engine, "perf_counter", lambda: getattr(clock, "now", 0.0))
    growth = engine.Growth(2, 4, far=True)

    def wait(_: Job) -> None:
        time.sleep(0.005)
        clock.now = getattr(clock, "now", 0.0) + (10.0 if growth.lanes > 2 else 1.0)

    lanes = [Lane(wait) for _ in range(4)]
    run_lanes(cells(100), lanes, growth=growth)
    assert completed_jobs(lanes) == list(range(100))
    counts = sorted(len(lane.taken) for lane in lanes)
    assert 0 < counts[0] <= counts[1] < 20 < counts[2]


def test_all_jobs_run_when_no_lane_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "Thread", LimitedThreads(2))
    lanes = [Lane(lambda _: time.sleep(0.002)) for _ in range(8)]
    run_lanes(cells(40), lanes, growth=engine.Growth(2, len(lanes), far=True))
    assert completed_jobs(lanes) == list(range(40))
    assert [bool(lane.taken) for lane in lanes] == [True] * 2 + [False] * 6


def test_error_of_a_lane_that_was_added_is_raised() -> None:
    growth = engine.Growth(2, 4, far=True)

    def work(_: Job) -> None:
        time.sleep(0.01)
        if growth.lanes > 2:
            raise Broken

    lanes = [Lane(work) for _ in range(4)]
    with pytest.raises(Broken):
        run_lanes(cells(200), lanes, growth=growth)
    assert sum(len(lane.taken) for lane in lanes) < 200


@pytest.mark.parametrize("first", [1, 2])
def test_lanes_that_wait_end_when_all_others_fail(first: int) -> None:
    def fail(_: Job) -> None:
        time.sleep(0.01)
        raise Broken

    with pytest.raises(Broken):
        run_lanes(cells(4), [Lane(fail) for _ in range(8)], growth=engine.Growth(first, 8))


# -- interrupts

INTERRUPTED = """
import signal, sys, threading, time
from transload.opening.engine import run_lanes
from transload.opening.jobs import Job, Run

reported, times = sys.argv[1] == "reported", int(sys.argv[2])
taken, written = [], []
pressed = threading.Event()

class Lane:
    done = 0
    left = False

    def run(self, next_job):
        while (job := next_job()) is not None:
            taken.append(job)
            pressed.wait(10)
            time.sleep(0.1)
            written.append(job)
            self.done += job.wanted
        self.left = True

def press():
    while len(taken) < 2:
        time.sleep(0.001)
    for _ in range(times):
        time.sleep(0.04)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    pressed.set()

lanes = [Lane(), Lane()]
jobs = [Job(0, "cpu", (Run(10 * index, index, 0, 10),)) for index in range(100)]
presses = threading.Thread(target=press)
presses.start()
try:
    run_lanes(jobs, lanes, (lambda _: None) if reported else None)
except KeyboardInterrupt:
    count, all_left = len(written), all(lane.left for lane in lanes)
    presses.join()
    time.sleep(0.2)
    print(all_left, len(written) - count, 2 <= count < 100)
"""


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs signal.pthread_kill")
@pytest.mark.parametrize("progress", ["reported", "silent"])
@pytest.mark.parametrize("times", [1, 4])
def test_interrupt_waits_for_the_threads(progress: str, times: int) -> None:
    """Nothing is written after it is raised: the memory may have been reused by then."""
    source = str(Path(transload.__file__).parent.parent)
    program = f"import sys; sys.path.insert(0, {source!r})\n{INTERRUPTED}"
    process = subprocess.run(
        [sys.executable, "-c", program, progress, str(times)], capture_output=True, text=True, timeout=300, check=False
    )
    assert process.stdout.split() == ["True", "0", "True"], process.stderr


# -- threads that cannot start


class LimitedThreads:
    """A thread class of which only the first threads can start."""

    def __init__(self, remaining: int) -> None:
        self.remaining = remaining

    def __call__(self, *args: Any, **kwargs: Any) -> threading.Thread:
        thread = threading.Thread(*args, **kwargs)
        self.remaining -= 1
        if self.remaining < 0:
            thread.start = self._fail  # type: ignore[method-assign]
        return thread

    @staticmethod
    def _fail() -> None:
        raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("available", [0, 1, 2])
def test_all_jobs_run_when_some_threads_cannot_start(available: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "Thread", LimitedThreads(available))
    lanes = [Lane() for _ in range(4)]
    reported: list[int] = []
    run_lanes(jobs(9), lanes, reported.append)
    assert completed_jobs(lanes) == list(range(9))
    assert sum(reported) == 90


class LateThread:
    """A thread that runs only once ``go`` is set, and whose start is interrupted."""

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...], daemon: bool) -> None:
        self.go = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(target, args), daemon=daemon)
        late_threads.append(self)

    def _run(self, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        assert self.go.wait(DEADLINE)
        target(*args)

    def start(self) -> None:
        self.thread.start()
        raise KeyboardInterrupt

    def is_alive(self) -> bool:
        return False  # as Python reports for a thread that has not reached its own code


late_threads: list[LateThread] = []


def test_thread_that_starts_too_late_does_not_use_its_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another load may use the lane by then."""
    monkeypatch.setattr(pool, "Thread", LateThread)
    lanes = [Lane(), Lane()]
    with pytest.raises(KeyboardInterrupt):
        run_lanes(jobs(3), lanes)
    for late in late_threads:
        late.go.set()
        if late.thread.ident is not None:
            late.thread.join(DEADLINE)
    assert [lane.exited for lane in lanes] == [False, False]
