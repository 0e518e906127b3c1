"""The queue of saves in the background, and the thread that writes them.

One thread writes, in the order of the calls, so the last save to a path is the one that stays. An error is raised by
the future; if nobody asks the future, by the next call; or it is printed when the program ends.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from threading import Condition, Thread, get_ident, main_thread
from traceback import clear_frames

from transload.errors import SaveError

with suppress(RuntimeError):  # while a program ends
    from concurrent.futures import ThreadPoolExecutor  # noqa: F401 - a writer must not import it in its thread

MAX_IN_FLIGHT = 2
"""Saves that are being written or wait: each is a copy of everything it saves. A further call waits for the first."""


class Saving(Future[None]):
    """The future of a save, which notes whether its error was seen, so that none gets lost.

    ``target`` is an absolute path, or a file object.
    """

    def __init__(self, target: object, write: Callable[[], None]) -> None:
        super().__init__()
        self.target = target
        self.seen = False
        self._write = write

    def result(self, timeout: float | None = None) -> None:
        """Wait for the save; raise its error."""
        self.exception(timeout)
        try:
            return super().result(timeout)
        finally:
            del self  # an error refers to the frames it passed through: see run

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the save; its error, or ``None``."""
        error = super().exception(timeout)
        background.notice(self)
        return error

    def run(self) -> None:
        """Write the file, and release the copies."""
        self.set_running_or_notify_cancel()  # it is never cancelled
        try:
            self._write()
        except BaseException as error:  # noqa: BLE001 - it is raised by the future
            clear_frames(error.__traceback__)  # or the copies would live as long as the error
            done = partial(self.set_exception, error)
        else:
            done = partial(self.set_result, None)
        del self._write
        with suppress(BaseException):  # of a callback: it must not stop the other saves
            done()
        del self, done  # an error refers to the frames it passed through: those must not refer to it

    def cancel(self) -> bool:
        """A save cannot be cancelled."""
        return False


class Background:
    """The queue, and the thread that writes: it exists only as long as there is work."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._pending: list[Saving] = []  # in the order of the calls
        self._failed: list[Saving] = []
        self._writer: int | None = None  # the thread that writes; 0 until it has begun

    def submit(self, target: object, write: Callable[[], None]) -> Saving:
        """Append a save to the queue. Where no thread can be started, the caller does the work: no save is lost."""
        saving = Saving(target, write)
        with self._changed:
            self._pending.append(saving)
            begin = self._writer is None
            if begin:
                self._writer = 0
        if not begin:
            return saving
        if not main_thread().is_alive():  # the program is ending, and does not wait for further threads
            self._work()
            _tell_at_exit()
            return saving
        try:
            # Not a daemon: a program does not end before its last save has.
            Thread(target=self._work, name="transload save", daemon=False).start()
        except RuntimeError:  # the system has no more threads
            self._work()
        return saving

    def _work(self) -> None:
        self._writer = get_ident()
        while True:
            with self._changed:
                if not self._pending:
                    self._writer = None
                    self._changed.notify_all()
                    return
            self._write_next()

    def _write_next(self) -> None:
        saving = self._left()[0]
        saving.run()
        with self._changed:
            self._pending.remove(saving)
            if Future.exception(saving) is not None and not saving.seen:
                self._failed.append(saving)
            self._changed.notify_all()
        del saving  # see Saving.run

    def _left(self) -> list[Saving]:
        """Pending saves; for a callback of a save only those that are not begun: it cannot wait for its own."""
        if self._writer == get_ident():
            return [each for each in self._pending if not (each.running() or each.done())]
        return self._pending

    def make_room(self) -> None:
        """Wait until one more save may be pending."""
        self._until(lambda: len(self._left()) < MAX_IN_FLIGHT)

    def settle(self, target: object) -> None:
        """Wait for saves to a path or a file object, and raise errors that were not seen."""
        place = _place(target)
        self._until(lambda: all(_place(each.target) != place for each in self._left()))
        self.raise_unnoticed()

    def wait(self) -> None:
        """Wait for all saves."""
        self._until(lambda: not self._left())

    def _until(self, ready: Callable[[], bool]) -> None:
        """Wait. A callback runs in the thread that writes, so it has to write itself."""
        if self._writer == get_ident():
            while not ready():
                self._write_next()
        else:
            with self._changed:
                self._changed.wait_for(ready)

    def notice(self, saving: Saving) -> None:
        """Forget a save whose error, if any, is known to the caller."""
        with self._changed:
            saving.seen = True
            self._failed = [each for each in self._failed if each is not saving]

    def raise_unnoticed(self) -> None:
        """Raise the error of a save that nobody has asked about."""
        with self._changed:
            failed = self.unnoticed()
        if failed:
            raise _lost(failed)

    def unnoticed(self) -> list[Saving]:
        """Saves that failed and that nobody has asked about; each is returned once."""
        failed, self._failed = self._failed, []
        for each in failed:
            each.seen = True
        return failed


def _place(target: object) -> object:
    """The identity of a target: the file a path leads to, or that of an object."""
    return os.path.realpath(target) if isinstance(target, str) else id(target)


def _lost(failed: list[Saving]) -> SaveError:
    first = Future.exception(failed[0])
    where = ", ".join(each.target if isinstance(each.target, str) else "a file object" for each in failed)
    error = SaveError(f"an earlier save in the background failed: {first}", where=where, fix="Save again.")
    error.__cause__ = first
    return error


background = Background()


def _tell_at_exit() -> None:
    """The threads have ended by now: Python waits for those that are not daemons."""
    background.wait()
    for failed in background.unnoticed():
        print(f"transload: {_lost([failed])}", file=sys.stderr)  # noqa: T201 - nothing is left to raise it in


atexit.register(_tell_at_exit)
if hasattr(os, "register_at_fork"):  # the thread belongs to the parent; the object stays, since others refer to it
    os.register_at_fork(after_in_child=background.__init__)  # type: ignore[misc]
