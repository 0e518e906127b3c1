"""Threads that take jobs until there are none: started, fed, watched, and always waited for.

Memory that a thread may still write into must not be given back. So whatever happens, an error in a thread, an
interrupt, a failure while jobs are prepared, nobody leaves before the last thread has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Protocol

from transload.loading.transfer.plan import Job

__all__ = ["Lane", "Take", "work"]

_TOLD_EVERY = 0.05
"""Seconds between two looks at how far the threads are."""

Take = Callable[[], "Job | None"]


class Lane(Protocol):
    """One thread's work."""

    done: int
    """Bytes it has brought in so far."""

    def run(self, take: Take) -> None:
        """Take jobs, and work, until there are none. When this returns or raises, nothing is under way any more."""
        ...


class _Crew:
    """The queue between the one who prepares jobs and the lanes.

    Who has come and who has left is written down here, since threads themselves do not tell it reliably: after an
    interrupted ``join`` Python before 3.13 takes a thread for dead that is still running.
    """

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = lanes
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._stopped = False
        self._errors: list[BaseException] = []
        self._came: list[Lane] = []
        self._left: list[Lane] = []
        self._news: SimpleQueue[None] = SimpleQueue()
        self._threads = [Thread(target=self._run, args=(lane,), daemon=True) for lane in lanes]

    def work(self, jobs: Iterable[Job], tell: Callable[[int], None] | None) -> None:
        """Let the lanes do all jobs."""
        try:
            begun = self._start()
            if begun:
                self._feed(jobs)
                self._watch(begun, tell)
            else:
                _alone(jobs, self._lanes[0], tell)
        finally:
            self._wait()
        if self._errors:
            try:
                raise self._errors[0]
            finally:
                self._errors.clear()  # an error that held itself by its frames would hold the memory there, too

    def _start(self) -> int:
        """Start as many threads as the system gives; how many those are."""
        for count, thread in enumerate(self._threads):
            try:
                thread.start()
            except RuntimeError:  # noqa: PERF203 - a limit of the system, or Python is about to end
                return count
        return len(self._threads)

    def _feed(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            if self._stopped:
                break
            self._queue.put(job)
        self._dismiss()

    def _dismiss(self) -> None:
        self._queue.put(None)

    def _run(self, lane: Lane) -> None:
        self._came.append(lane)  # before the look at the sign to stop: who comes too late must not touch the lane
        try:
            if not self._stopped:
                lane.run(self._take)
        except BaseException as error:  # noqa: BLE001 - raised again by the one who waits
            self._errors.append(error)
            self._stopped = True
        finally:
            self._left.append(lane)
            self._news.put(None)

    def _take(self) -> Job | None:
        job = self._queue.get()
        if job is None or self._stopped:
            self._dismiss()  # the others, and those who ask again
            return None
        return job

    def _watch(self, begun: int, tell: Callable[[int], None] | None) -> None:
        """Wait for all threads that were started, telling how many bytes came."""
        told = 0
        while len(self._left) < begun:
            self._sleep()
            told = self._tell(tell, told)
        self._join()
        self._tell(tell, told)

    def _sleep(self) -> None:
        """Wait until a thread leaves, but not long: a signal is to be seen on every system."""
        with suppress(Empty):
            self._news.get(timeout=_TOLD_EVERY)

    def _tell(self, tell: Callable[[int], None] | None, told: int) -> int:
        done = sum(lane.done for lane in self._lanes)
        if tell and done > told and not self._errors:
            tell(done - told)
        return done

    def _wait(self) -> None:
        """Wait for the threads, whoever interrupts."""
        while True:
            try:
                self._last()
            except KeyboardInterrupt:  # what has led here is raised, when they have left
                continue
            return

    def _last(self) -> None:
        """Stop the threads that are still here, and wait until they have left."""
        self._stopped = True
        while len(self._left) < len(self._came):
            self._dismiss()
            self._sleep()
        self._join()

    def _join(self) -> None:
        for thread in self._threads:
            if thread.is_alive():
                thread.join()


def work(jobs: Iterable[Job], lanes: Sequence[Lane], tell: Callable[[int], None] | None = None) -> None:
    """Let lanes do all jobs at the same time; a single one does them here. Raises what a lane has raised first.

    ``jobs`` may be made one by one: the first are done while the last are prepared. ``tell`` is called here, in the
    thread of the caller, with numbers of bytes as they come.
    """
    if len(lanes) == 1:
        _alone(jobs, lanes[0], tell)
    else:
        _Crew(lanes).work(jobs, tell)


def _alone(jobs: Iterable[Job], lane: Lane, tell: Callable[[int], None] | None) -> None:
    waiting = iter(jobs)
    told = 0

    def take() -> Job | None:
        nonlocal told
        if tell and lane.done > told:
            tell(lane.done - told)
            told = lane.done
        return next(waiting, None)

    lane.run(take)
