"""Long work: how many threads to start here, a pool that runs tasks in them, and progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Lock, Thread, local
from typing import TextIO, TypeVar

from transload.errors import CannotReadError, UsageError
from transload.io.limits import cores
from transload.io.sources import Progress, Source

_MOST = 32  # more threads wait for memory bandwidth, and each has a buffer
_EVERY = 0.1  # seconds between two updates of the line
TICK = 0.5  # seconds after which a thread that waits looks whether anybody still needs what it waits for
_POLL = 0.01  # seconds between two checks of threads that are to end
_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_ALONE = 4 << 20  # for fewer bytes of tensors it does not pay to start threads
_TINY = 8 << 10  # nor for tensors this small: finding them, one thread at a time, takes longer than reading them
_Task = TypeVar("_Task")
_Result = TypeVar("_Result")
_here = local()  # the pool that a thread works for


def threads() -> int:
    """How many threads to start here."""
    return min(cores(), _MOST)


def threads_for(sizes: Iterable[int], sources: Iterable[Source], most: int = _MOST) -> int:
    """How many threads to start here for tensors of these sizes, each of which one thread reads from its source."""
    few = sum(nbytes for nbytes in sizes if nbytes > _TINY) < _ALONE
    return 1 if few or any(source.pace == "seeking" for source in sources) else min(most, threads())


class ThreadPool:
    """Threads that work beside the thread that calls ``run``."""

    def __init__(self) -> None:
        self._threads: list[Thread] = []
        self.stopped = False
        """True after an error or an interrupt, and when the caller's part is over: begin nothing more."""
        self._errors: list[BaseException] = []
        # ``Thread.is_alive`` is not reliable: after an interrupted ``join``, Python before 3.13 takes a running thread
        # for dead. So these lists say how many threads have begun and ended.
        self._begun: list[None] = []
        self._ended: list[None] = []
        self._wakeups: SimpleQueue[None] = SimpleQueue()
        self._outer: ThreadPool | None = getattr(_here, "pool", None)

    @property
    def failed(self) -> bool:
        """Whether there was an error or an interrupt, here or in the pool that the thread works for that made this."""
        return bool(self._errors) or (self._outer is not None and self._outer.failed)

    def run(
        self,
        works: Sequence[Callable[[], None]],
        here: Callable[[], None],
        unblock: Callable[[], None] = lambda: None,
    ) -> None:
        """Do each of ``works`` in a thread and ``here`` in this one; return, or raise the first error, when all ended.

        If the system allows fewer threads, only the first of ``works`` are done: ``started`` says how many. When
        ``here`` has returned or raised, ``unblock`` is called until no thread waits for anything any more.
        """
        before, _here.pool = getattr(_here, "pool", None), self
        try:
            all(map(self._start, works))
            here()
        except BaseException as error:  # noqa: BLE001 - raised again when the threads have ended
            self._errors.append(error)
        finally:
            _here.pool = before
        # The caller may free what the threads use, so wait for them even if Ctrl-C is pressed again.
        waiting = True
        while waiting:
            try:
                self.stopped = True
                while len(self._ended) < len(self._begun):
                    unblock()
                    self.wait(_POLL)
                for thread in self._threads:
                    if thread.is_alive():
                        thread.join()
                waiting = False
            except BaseException as error:  # noqa: BLE001, PERF203 - raised again when the threads have ended
                self._errors.append(error)
        if self._errors:
            try:
                raise min(self._errors, key=lambda error: isinstance(error, Exception))  # the first, or an interrupt
            finally:
                self._errors.clear()  # or the error would refer to itself through this frame, and keep all frames alive

    def _start(self, work: Callable[[], None]) -> bool:
        """Do ``work`` in one more thread; false if the system allows no more."""
        thread = Thread(target=self._work, args=(work,), daemon=True)
        self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError:  # the system's limit on threads, or the interpreter is shutting down
            self._threads.pop()
            return False
        return True

    @property
    def started(self) -> int:
        """How many threads were started."""
        return len(self._threads)

    def _work(self, work: Callable[[], None]) -> None:
        _here.pool = self
        self._begun.append(None)  # before ``stopped`` is read: a thread that starts too late must do nothing
        try:
            if not self.stopped:
                work()
        except BaseException as error:  # noqa: BLE001 - raised again by the waiting thread
            self._errors.append(error)
            self.stopped = True
        finally:
            self._ended.append(None)
            self._wakeups.put(None)

    def wait(self, seconds: float) -> bool:
        """Wait until a thread ends, at most so long: Python handles signals only in between. Whether any still runs."""
        with suppress(Empty):
            self._wakeups.get(timeout=seconds)
        return len(self._ended) < len(self._threads)


def has_failed() -> bool:
    """Whether the pool that this thread works for has failed, so that nobody needs what the thread waits for."""
    pool: ThreadPool | None = getattr(_here, "pool", None)
    return pool is not None and pool.failed


def aside(work: Callable[[], _Result]) -> _Result:
    """Call a function that notices neither Ctrl-C nor errors of other threads, in a thread that is then left alone.

    Code that is not Python's, such as that of a library for buckets, may wait for minutes.
    """
    done: SimpleQueue[tuple[list[_Result], BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            done.put(([work()], None))
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            done.put(([], error))

    try:
        Thread(target=run, daemon=True).start()
    except RuntimeError:  # the system allows no more threads
        return work()
    while True:
        with suppress(Empty):
            results, error = done.get(timeout=TICK)
            if error is None:
                return results[0]
            try:
                raise error
            finally:
                del error  # or it would refer to itself through this frame
        if has_failed():
            raise CannotReadError("nobody needs it any more")


def each(tasks: Iterable[_Task], worker: Callable[[], Callable[[_Task], object]], count: int) -> None:
    """Run all tasks, in any order, in ``count`` threads; a thread gets the function that runs them from ``worker()``.

    Only one thread at a time takes the next task. After the first error, or an interrupt, no thread takes another task,
    and the error is raised when all have finished theirs.
    """
    left = iter(tasks)
    lock = Lock()
    pool = ThreadPool()

    def work() -> None:
        do = worker()
        while True:
            try:
                with lock:
                    if pool.stopped:
                        return
                    task = next(left)
            except StopIteration:
                return
            do(task)

    pool.run([work] * (count - 1), work)


# -- progress, reported to the caller's function or on a terminal


class ProgressLine:
    """A line on a terminal that is overwritten: bytes done, the total, and the speed.

    It stays when all is done, unless it is ``passing``: then ``end`` removes it.

    >>> ProgressLine(None).text(3_000_000_000, 4_000_000_000, 1.5)
    'loading 3.0 of 4.0 GB, 2.0 GB/s'
    >>> ProgressLine(None).text(560, 4500, 0.001), ProgressLine(None).text(20_000_000, 4_000_000_000, 1)
    ('loading 0.6 of 4.5 kB, 560.0 kB/s', 'loading 0.0 of 4.0 GB, 20.0 MB/s')
    """

    def __init__(self, stream: TextIO | None, verb: str = "loading", *, passing: bool = False) -> None:
        self._stream = stream
        self._verb = verb
        self._passing = passing
        self._over = False
        self._begun = self._shown = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Update the line, not too often, and end it when all is done."""
        now = time.monotonic()
        is_over = done >= total and not self._passing
        if self._stream is None or self._over or (not is_over and now - self._shown < _EVERY):
            return
        self._shown, self._over = now, is_over
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
            next((unit for unit in _UNITS if number >= unit[1]), _UNITS[-1]) for number in (total, speed)
        )
        return f"{self._verb} {done / size:.1f} of {total / size:.1f} {unit}, {speed / step:.1f} {speed_unit}/s"


def terminal() -> TextIO | None:
    """The stream for a line of progress: stderr, if it is a terminal."""
    try:
        return sys.stderr if sys.stderr.isatty() else None
    except (AttributeError, ValueError):  # there may be no stderr, or it may be closed
        return None


def progress_counter(progress: Progress, total: int, verb: str = "loading") -> Callable[[int], None] | None:
    """A function to call with the number of bytes done since the last call; ``None`` if no progress is to be shown.

    It calls ``progress`` with the sum so far and the total; ``True`` shows them on a terminal, after ``verb``.
    """
    if progress is None or progress is False:
        return None
    show = progress
    if show is not True and not callable(show):
        fix = "Pass True, or a function that takes the bytes done and the total."
        raise UsageError(f"progress is of type {type(show).__name__}", fix=fix)
    if show is True:
        stream = terminal()
        if stream is None:
            return None
        show = ProgressLine(stream, verb)
    done = 0

    def report_progress(count: int) -> None:
        nonlocal done
        done = min(done + count, total)  # small records that are read with the others do not count
        show(done, total)

    return report_progress
