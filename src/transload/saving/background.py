"""Saves in the background: a snapshot is taken at once, and written while the program goes on.

One thread writes, in the order of the calls, so the last save to a path is the one that stays. What fails there is
raised by the future; or, if nobody asks it, by the next call; or it is told when the program ends.
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

__all__ = ["MAX_IN_FLIGHT", "Saving", "background"]

MAX_IN_FLIGHT = 2
"""Saves that are written or wait to be: each is a copy of everything it saves. One more waits for the first."""


def _nothing() -> None:
    """What is left of a save that is done."""


class Saving(Future[None]):
    """The future of a save. Whether its error was seen is known, so that none gets lost.

    ``target`` is where to: an absolute path, or a file object.
    """

    def __init__(self, target: object, write: Callable[[], None]) -> None:
        super().__init__()
        self.target = target
        self.seen = False
        self._write = write

    def result(self, timeout: float | None = None) -> None:
        """Wait for the save; raises what it has raised."""
        self.exception(timeout)
        try:
            return super().result(timeout)
        finally:
            del self  # see run: the caller's frames are among them

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the save; what it has raised, or ``None``."""
        found = super().exception(timeout)
        background.notice(self)
        return found

    def run(self) -> None:
        """Write what was taken apart, and let go of it."""
        self.set_running_or_notify_cancel()  # it is never cancelled: what was promised is written
        try:
            self._write()
        except BaseException as error:  # noqa: BLE001 - it is raised where the save is asked about
            clear_frames(error.__traceback__)  # else the copy of everything lives as long as the error
            done = partial(self.set_exception, error)
        else:
            done = partial(self.set_result, None)
        self._write = _nothing
        with suppress(BaseException):  # of a function that is called now: it ends that one alone
            done()
        del self, done  # an error holds the frames it went through: those must not hold the error

    def cancel(self) -> bool:
        """A save that was begun is finished."""
        return False


class Background:
    """The queue, and the thread that works it off: there is one only as long as there is work."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._pending: list[Saving] = []  # in the order of the calls
        self._failed: list[Saving] = []
        self._writer: int | None = None  # the thread that writes; 0 until it has begun

    def submit(self, target: object, write: Callable[[], None]) -> Saving:
        """Enter a save."""
        saving = Saving(target, write)
        with self._changed:
            self._pending.append(saving)
            begin = self._writer is None
            if begin:
                self._writer = 0
        if begin:
            self._begin()
        return saving

    def _begin(self) -> None:
        """Start the thread. Where there can be none, the caller does the work: nothing that was promised is lost."""
        if not main_thread().is_alive():  # the program is ending: it waits for no more threads
            self._work()
            _tell_at_exit()
            return
        try:
            # Not a daemon: a program does not end before its last save has.
            Thread(target=self._work, name="transload save", daemon=False).start()
        except RuntimeError:  # the system has no more of them
            self._work()

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
        """Saves under way; to a function that a save calls, those that are not begun: for its own it cannot wait."""
        if self._writer == get_ident():
            return [each for each in self._pending if not (each.running() or each.done())]
        return self._pending

    def make_room(self) -> None:
        """Wait until one more save may be under way."""
        self._until(lambda: len(self._left()) < MAX_IN_FLIGHT)

    def settle(self, target: object) -> None:
        """Wait for saves to a path or a file object, and raise what an earlier one has raised unnoticed."""
        place = _place(target)
        self._until(lambda: all(_place(each.target) != place for each in self._left()))
        self.raise_unnoticed()

    def wait(self) -> None:
        """Wait for all of them."""
        self._until(lambda: not self._left())

    def _until(self, ready: Callable[[], bool]) -> None:
        """Wait. A function that a save calls runs in the thread that writes: nobody else would write meanwhile."""
        if self._writer == get_ident():
            while not ready():
                self._write_next()
        else:
            with self._changed:
                self._changed.wait_for(ready)

    def notice(self, saving: Saving) -> None:
        """Let go of a save whose error, if it has one, is known to the caller: it holds the frames it went through."""
        with self._changed:
            saving.seen = True
            self._failed = [each for each in self._failed if each is not saving]

    def raise_unnoticed(self) -> None:
        """Raise what a save has raised while nobody looked."""
        with self._changed:
            failed = self.unnoticed()
        if failed:
            raise _lost(failed)

    def unnoticed(self) -> list[Saving]:
        """Saves that failed while nobody looked; they are told once."""
        failed, self._failed = self._failed, []
        for each in failed:
            each.seen = True
        return failed


def _place(target: object) -> object:
    """What two targets have in common that are one: the file a path leads to, or the identity of an object."""
    return os.path.realpath(target) if isinstance(target, str) else id(target)


def _lost(failed: list[Saving]) -> SaveError:
    first = Future.exception(failed[0])
    where = ", ".join(each.target if isinstance(each.target, str) else "a file object" for each in failed)
    error = SaveError(f"an earlier save in the background failed: {first}", where=where, fix="Save again.")
    error.__cause__ = first
    return error


background = Background()


def _tell_at_exit() -> None:
    """The threads have ended by now: Python waits for those that are no daemons."""
    background.wait()
    for failed in background.unnoticed():
        print(f"transload: {_lost([failed])}", file=sys.stderr)  # noqa: T201 - there is nobody left to raise it to


def _forget() -> None:
    """In a child process: the thread is its parent's."""
    background.__init__()  # type: ignore[misc] # the same object, as others hold it


atexit.register(_tell_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
