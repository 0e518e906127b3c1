"""Long work: how many threads to start here, a pool that runs tasks in them, and progress."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from threading import Lock, Thread
from typing import TextIO, TypeVar

_GROUP = "/sys/fs/cgroup"
_MOST = 32  # more threads wait for memory bandwidth, and each has a buffer
_EVERY = 0.1  # seconds between two updates of the line
_POLL = 0.01  # seconds between two checks of the threads after an interrupt
_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_Task = TypeVar("_Task")


def cores(root: str = "") -> int:
    """The cores this process may use: its CPU affinity, limited by the CPU quota of its container."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = _words(f"{root}{_GROUP}/cpu.max")
    if len(limit) != 2:
        limit = _words(f"{root}{_GROUP}/cpu/cpu.cfs_quota_us") + _words(f"{root}{_GROUP}/cpu/cpu.cfs_period_us")
    if len(limit) == 2 and all(word.isdigit() for word in limit) and int(limit[1]):  # not "max", or -1
        bound = min(bound, -(-int(limit[0]) // int(limit[1])))  # quota divided by period, rounded up
    return max(1, bound)


def _words(path: str) -> list[str]:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().split()
    except (OSError, ValueError):
        return []


def threads() -> int:
    """How many threads to start here."""
    return min(cores(), _MOST)


def each(tasks: Iterable[_Task], worker: Callable[[], Callable[[_Task], None]], count: int) -> None:
    """Run all tasks, in any order, in ``count`` threads; a thread gets the function that runs them from ``worker()``.

    Only one thread at a time takes the next task. After the first error, or an interrupt, no thread takes another task,
    and the error is raised when all have finished theirs.
    """
    left = iter(tasks)
    lock = Lock()
    errors: list[BaseException] = []
    # ``Thread.is_alive`` is not reliable: after an interrupted ``join``, Python before 3.13 takes a running thread for
    # dead. So these lists say how many helpers have begun and ended.
    begun: list[None] = []
    ended: list[None] = []
    stopped = False

    def work() -> None:
        nonlocal stopped
        try:
            do = worker()
            while True:
                try:
                    with lock:
                        if stopped:
                            return
                        task = next(left)
                except StopIteration:
                    return
                do(task)
        except BaseException as error:  # noqa: BLE001 - raised again by the waiting thread
            stopped = True
            errors.append(error)

    def assist() -> None:
        begun.append(None)  # before ``stopped`` is read: a thread that starts too late must not call ``worker``
        try:
            if not stopped:
                work()
        finally:
            ended.append(None)

    helpers = [Thread(target=assist, daemon=True) for _ in range(count - 1)]
    try:
        for helper in helpers:
            try:
                helper.start()
            except RuntimeError:  # noqa: PERF203 - the system has no more threads: those that run do all the work
                break
        work()
    finally:
        # The caller may free what the helpers use, so wait for them even if Ctrl-C is pressed again.
        waiting = True
        while waiting:
            try:
                stopped = True  # there are no more tasks, or they are not to be done
                for helper in helpers:
                    if helper.is_alive():
                        helper.join()
                while len(ended) < len(begun):
                    time.sleep(_POLL)
                waiting = False
            except BaseException as error:  # noqa: BLE001, PERF203 - raised again when they have ended
                errors.append(error)
    if errors:
        try:
            raise min(errors, key=lambda error: isinstance(error, Exception))  # the first, or an interrupt
        finally:
            errors.clear()  # or the error would refer to itself through this frame, and keep all frames alive


# -- progress, reported to the caller's function or on a terminal


class Progress:
    """A line on a terminal that is overwritten: bytes done, the total, and the speed.

    It stays when all is done, unless it is ``passing``: then ``end`` removes it.

    >>> Progress(None).text(3_000_000_000, 4_000_000_000, 1.5)
    'loading 3.0 of 4.0 GB, 2.0 GB/s'
    >>> Progress(None).text(560, 4500, 0.001), Progress(None).text(20_000_000, 4_000_000_000, 1)
    ('loading 0.6 of 4.5 kB, 560.0 kB/s', 'loading 0.0 of 4.0 GB, 20.0 MB/s')
    """

    def __init__(self, stream: TextIO | None, verb: str = "loading", *, passing: bool = False) -> None:
        self._stream = stream
        self._verb = verb
        self._passing = passing
        self._begun = self._shown = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Update the line, not too often, and end it when all is done."""
        now = time.monotonic()
        is_over = done >= total and not self._passing
        if self._stream is None or (not is_over and now - self._shown < _EVERY):
            return
        self._shown = now
        end = "\n" if is_over else ""
        self._stream.write(f"\r{self.text(done, total, now - self._begun)}\x1b[K{end}")
        self._stream.flush()

    def end(self) -> None:
        """Remove a passing line, if one was shown."""
        if self._stream is not None and self._shown != self._begun:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def text(self, done: int, total: int, seconds: float) -> str:
        """The line itself."""
        speed = done / seconds if seconds > 0 else 0.0
        (unit, size), (speed_unit, step) = (
            next((each for each in _UNITS if number >= each[1]), _UNITS[-1]) for number in (total, speed)
        )
        return f"{self._verb} {done / size:.1f} of {total / size:.1f} {unit}, {speed / step:.1f} {speed_unit}/s"


def terminal() -> TextIO | None:
    """The stream for a line of progress: stderr, if it is a terminal."""
    try:
        return sys.stderr if sys.stderr.isatty() else None
    except (AttributeError, ValueError):  # there may be no stderr, or it may be closed
        return None


def progress_counter(
    progress: bool | Callable[[int, int], object] | None, total: int, verb: str = "loading"
) -> Callable[[int], None] | None:
    """A function to call with the number of bytes done since the last call; ``None`` if no progress is to be shown.

    It calls ``progress`` with the sum so far and the total; ``True`` shows them on a terminal, after ``verb``.
    """
    if progress is None or progress is False:
        return None
    show = progress
    if show is True:
        stream = terminal()
        if stream is None:
            return None
        show = Progress(stream, verb)
    done = 0

    def report_progress(count: int) -> None:
        nonlocal done
        done += count
        show(done, total)

    return report_progress
