"""Tasks done by as many threads as can run at the same time: for work that leaves the interpreter's lock alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from threading import Lock, Thread
from typing import Generic, TypeVar

from transload.cores import cores

__all__ = ["each", "threads"]

_Task = TypeVar("_Task")
_MOST = 32  # more of them wait for memory, and each has a buffer


def threads() -> int:
    """How many are worth it here."""
    return min(cores(), _MOST)


def each(tasks: Iterable[_Task], worker: Callable[[], Callable[[_Task], None]], count: int) -> None:
    """Do all tasks, in any order; ``worker`` makes for each thread the function that does one.

    The first error is raised when all threads have stopped. An interrupt stops them, too.
    """
    crew = _Crew(tasks, worker)
    helpers = [Thread(target=crew.work, daemon=True) for _ in range(count - 1)]
    try:
        for helper in helpers:
            try:
                helper.start()
            except RuntimeError:  # noqa: PERF203 - no more to be had: those that are there do it
                break
        crew.work()
    except BaseException:
        crew.stop()
        raise
    finally:
        for helper in helpers:
            if helper.ident is not None:
                helper.join()
    if crew.error is not None:
        raise crew.error


class _Crew(Generic[_Task]):
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
