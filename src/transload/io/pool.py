"""How many threads are worth starting here, and a pool of them that does tasks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from threading import Lock, Thread
from typing import Generic, TypeVar

__all__ = ["cores", "each", "threads"]


_GROUP = "/sys/fs/cgroup"


def cores(root: str = "") -> int:
    """Processors this process may use: those it is bound to, and no more than the time its container is given."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(root)
    return max(1, min(bound, quota) if quota else bound)


def _quota(root: str) -> int:
    """Processors' worth of time the control group has, rounded up; 0 if it is not limited."""
    first = _words(f"{root}{_GROUP}/cpu.max")
    if len(first) != 2:
        first = _words(f"{root}{_GROUP}/cpu/cpu.cfs_quota_us") + _words(f"{root}{_GROUP}/cpu/cpu.cfs_period_us")
    if len(first) != 2 or not all(word.isdigit() for word in first):  # "max", or -1
        return 0
    time, period = map(int, first)
    return -(-time // period) if period else 0


def _words(path: str) -> list[str]:
    try:
        with open(path, encoding="ascii") as file:  # noqa: PTH123 - pathlib costs ten milliseconds
            return file.read().split()
    except (OSError, ValueError):
        return []


_Task = TypeVar("_Task")
_MOST = 32  # more of them wait for memory, and each has a buffer


def threads() -> int:
    """How many are worth it here."""
    return min(cores(), _MOST)


def each(tasks: Iterable[_Task], worker: Callable[[], Callable[[_Task], None]], count: int) -> None:
    """Do all tasks, in any order; ``worker`` makes for each thread the function that does one.

    The first error is raised when all threads have stopped. An interrupt stops them, too.
    """
    pool = _Pool(tasks, worker)
    helpers = [Thread(target=pool.work, daemon=True) for _ in range(count - 1)]
    try:
        for helper in helpers:
            try:
                helper.start()
            except RuntimeError:  # noqa: PERF203 - no more to be had: those that are there do it
                break
        pool.work()
    except BaseException:
        pool.stop()
        raise
    finally:
        for helper in helpers:
            if helper.ident is not None:
                helper.join()
    if pool.error is not None:
        raise pool.error


class _Pool(Generic[_Task]):
    def __init__(self, tasks: Iterable[_Task], worker: Callable[[], Callable[[_Task], None]]) -> None:
        self._tasks: Iterator[_Task] = iter(tasks)
        self._worker = worker
        self._lock = Lock()
        self.error: BaseException | None = None

    def work(self) -> None:
        """Take tasks until there are none, or somebody has failed."""
        try:
            do = self._worker()
            while (task := self._next()) is not None:
                do(task[0])
        except Exception as error:  # noqa: BLE001 - raised again by the one who waits
            with self._lock:
                self.error = self.error or error
            self.stop()

    def stop(self) -> None:
        """Hand out no more."""
        with self._lock:
            self._tasks = iter(())

    def _next(self) -> tuple[_Task] | None:
        with self._lock:
            for task in self._tasks:
                return (task,)
        return None
