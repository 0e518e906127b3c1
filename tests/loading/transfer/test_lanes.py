"""The crew: jobs are done once, what fails is told, and nobody leaves while a thread may still write."""

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
from transload.loading import engine
from transload.loading.engine import run_lanes
from transload.loading.jobs import Job, NextJob, Run

DEADLINE = 20.0  # seconds after which a test that hangs gives up


class Broken(Exception):  # noqa: N818 - a signal of these tests
    """What goes wrong here."""


def jobs(count: int) -> list[Job]:
    return [Job(0, "cpu", (Run(10 * index, index, 0, 10),)) for index in range(count)]


class Lane:
    """Writes down what it does, and when, and in which thread."""

    def __init__(self, does: Callable[[Job], object] = lambda _: None) -> None:
        self.done = 0
        self.taken: list[Job] = []
        self.thread = 0
        self.left = False
        self._does = does

    def run(self, next_job: NextJob) -> None:
        self.thread = threading.get_ident()
        try:
            while (job := next_job()) is not None:
                self.taken.append(job)
                self._does(job)
                self.done += job.wanted
        finally:
            self.left = True


def done(lanes: list[Lane]) -> list[int]:
    """The numbers of the jobs that were done, in order."""
    return sorted(job.runs[0].request for lane in lanes for job in lane.taken)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


# -- all goes well


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("lanes", [1, 2, 5])
def test_every_job_is_done_once_and_told_of(lanes: int, count: int) -> None:
    crewed = [Lane() for _ in range(lanes)]
    told: list[int] = []
    run_lanes(iter(jobs(count)), crewed, told.append)
    assert done(crewed) == list(range(count))
    assert sum(told) == 10 * count
    assert all(number > 0 for number in told)


@pytest.mark.parametrize("lanes", [1, 3])
def test_no_jobs(lanes: int) -> None:
    told: list[int] = []
    run_lanes([], [Lane() for _ in range(lanes)], told.append)
    assert told == []


def test_a_single_lane_runs_in_the_thread_of_the_caller() -> None:
    lane = Lane()
    run_lanes(jobs(3), [lane])
    assert lane.thread == threading.get_ident()


def test_several_run_in_threads_of_their_own_at_the_same_time() -> None:
    together = threading.Barrier(3, timeout=DEADLINE)
    lanes = [Lane(lambda _: together.wait()) for _ in range(3)]
    run_lanes(jobs(3), lanes)
    assert len({lane.thread for lane in lanes} - {threading.get_ident()}) == 3


def test_the_first_jobs_are_done_while_the_last_are_prepared() -> None:
    lanes = [Lane(), Lane()]

    def prepared() -> Iterator[Job]:
        first, second = jobs(2)
        yield first
        until(lambda: sum(lane.done for lane in lanes) == 10)
        yield second

    run_lanes(prepared(), lanes)
    assert sum(lane.done for lane in lanes) == 20


def test_all_is_told_though_the_lanes_are_done_before_anyone_looks() -> None:
    """The one who prepares jobs is slow at the very end: there is nobody left to wait for."""
    lanes = [Lane(), Lane()]

    def prepared() -> Iterator[Job]:
        yield from jobs(4)
        until(lambda: sum(lane.done for lane in lanes) == 40)

    told: list[int] = []
    run_lanes(prepared(), lanes, told.append)
    assert sum(told) == 40


def test_bytes_are_told_while_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_POLL", 0.001)
    told: list[int] = []
    go_on = threading.Event()

    def does(job: Job) -> None:
        if job.runs[0].request:
            assert go_on.wait(DEADLINE)

    def report_progress(count: int) -> None:
        told.append(count)
        go_on.set()

    run_lanes(jobs(3), [Lane(does), Lane(does)], report_progress)
    assert len(told) > 1
    assert sum(told) == 30


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_lane_that_asks_again_after_the_last_job_gets_none_again(lanes: int) -> None:
    class Asks(Lane):
        def run(self, next_job: NextJob) -> None:
            super().run(next_job)
            self.again = [next_job(), next_job()]

    crewed = [Asks() for _ in range(lanes)]
    run_lanes(jobs(5), crewed)
    assert [lane.again for lane in crewed] == [[None, None]] * lanes


# -- errors


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_an_error_in_a_lane_stops_the_others(lanes: int) -> None:
    def does(job: Job) -> None:
        if job.runs[0].request == 5:
            raise Broken

    crewed = [Lane(does) for _ in range(lanes)]
    endless = (Job(0, "cpu", (Run(10 * index, index, 0, 10),)) for index in range(1 << 60))
    with pytest.raises(Broken):
        run_lanes(endless, crewed)
    assert all(lane.left for lane in crewed)


def test_the_first_error_is_the_one_that_is_raised() -> None:
    first = threading.Event()

    def does(job: Job) -> None:
        if job.runs[0].request:
            assert first.wait(DEADLINE)
            time.sleep(0.01)
            raise Broken("second")
        first.set()
        raise Broken("first")

    lanes = [Lane(does), Lane(does)]

    def prepared() -> Iterator[Job]:
        one, other = jobs(2)
        yield one
        yield other
        until(lambda: sum(len(lane.taken) for lane in lanes) == 2 or any(lane.left for lane in lanes))

    with pytest.raises(Broken, match="first"):
        run_lanes(prepared(), lanes)


@pytest.mark.parametrize("lanes", [1, 3])
def test_an_error_while_jobs_are_prepared(lanes: int) -> None:
    def prepared() -> Iterator[Job]:
        yield from jobs(4)
        raise Broken

    crewed = [Lane() for _ in range(lanes)]
    with pytest.raises(Broken):
        run_lanes(prepared(), crewed)
    assert all(lane.left for lane in crewed if lane.thread)


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt], ids=["error", "interrupt"])
def test_an_error_of_the_one_who_is_told(
    lanes: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_POLL", 0.001)

    def report_progress(_: int) -> None:
        raise error

    crewed = [Lane(lambda _: time.sleep(0.002)) for _ in range(lanes)]
    with pytest.raises(error):
        run_lanes(jobs(50), crewed, report_progress)
    assert sum(len(lane.taken) for lane in crewed) < 50
    assert all(lane.left for lane in crewed if lane.thread)


def test_an_error_does_not_keep_itself_alive() -> None:
    """What it holds in its frames, memory of a device perhaps, is free when it is: no collector is waited for."""

    class Memory:
        pass

    def fails() -> weakref.ref[Memory]:
        memory = Memory()

        def does(_: Job) -> None:
            raise Broken(memory)

        try:
            run_lanes(jobs(2), [Lane(does), Lane(does)])
        except Broken:
            return weakref.ref(memory)
        raise AssertionError

    gc.collect()
    gc.disable()
    try:
        assert fails()() is None
    finally:
        gc.enable()


# -- interrupts

INTERRUPTED = """
import signal, sys, threading, time
from transload.loading.engine import run_lanes
from transload.loading.jobs import Job, Run

told, times = sys.argv[1] == "told", int(sys.argv[2])
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
    run_lanes(jobs, lanes, (lambda _: None) if told else None)
except KeyboardInterrupt:
    count, all_left = len(written), all(lane.left for lane in lanes)
    presses.join()
    time.sleep(0.2)
    print(all_left, len(written) - count, 2 <= count < 100)
"""


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs signal.pthread_kill")
@pytest.mark.parametrize("told", ["told", "silent"])
@pytest.mark.parametrize("times", [1, 4])
def test_an_interrupt_waits_for_the_threads(told: str, times: int) -> None:
    """Nothing is written after it is raised: the memory may be somebody else's by then."""
    source = str(Path(transload.__file__).parent.parent)
    program = f"import sys; sys.path.insert(0, {source!r})\n{INTERRUPTED}"
    made = subprocess.run(
        [sys.executable, "-c", program, told, str(times)], capture_output=True, text=True, timeout=60, check=False
    )
    assert made.stdout.split() == ["True", "0", "True"], made.stderr


# -- threads that are not to be had


class Refused:
    """Threads of which only some can be started."""

    def __init__(self, left: int) -> None:
        self.left = left

    def __call__(self, *arguments: Any, **named: Any) -> threading.Thread:
        thread = threading.Thread(*arguments, **named)
        self.left -= 1
        if self.left < 0:
            thread.start = self._fail  # type: ignore[method-assign]
        return thread

    @staticmethod
    def _fail() -> None:
        raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("given", [0, 1, 2])
def test_with_fewer_threads_than_wanted_all_is_done_all_the_same(given: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "Thread", Refused(given))
    lanes = [Lane() for _ in range(4)]
    told: list[int] = []
    run_lanes(jobs(9), lanes, told.append)
    assert done(lanes) == list(range(9))
    assert sum(told) == 90


class Late:
    """A thread that begins when it is told to, and whose start is interrupted."""

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...], daemon: bool) -> None:
        self.begin = threading.Event()
        self.true = threading.Thread(target=self._run, args=(target, args), daemon=daemon)
        made.append(self)

    def _run(self, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        assert self.begin.wait(DEADLINE)
        target(*args)

    def start(self) -> None:
        self.true.start()
        raise KeyboardInterrupt

    def is_alive(self) -> bool:
        return False  # so says Python of a thread that has not come to its own code yet


made: list[Late] = []


def test_a_thread_that_comes_too_late_does_not_touch_its_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another load may have the lane by then."""
    monkeypatch.setattr(pool, "Thread", Late)
    lanes = [Lane(), Lane()]
    with pytest.raises(KeyboardInterrupt):
        run_lanes(jobs(3), lanes)
    for late in made:
        late.begin.set()
        if late.true.ident is not None:
            late.true.join(DEADLINE)
    assert [lane.left for lane in lanes] == [False, False]
