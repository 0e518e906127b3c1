"""Saves in the background: a snapshot is taken at once, and written while the program goes on.

One thread writes, in the order of the calls, so the last save to a path is the one that stays. What fails there is
raised by the future; or, if nobody asks it, by the next call; or it is told when the program ends.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from threading import Condition, Thread

from transload.saving.errors import SaveError

__all__ = ["MAX_IN_FLIGHT", "Saving", "background", "settle"]

MAX_IN_FLIGHT = 2
"""Saves that are written or wait to be: each is a copy of everything it saves. One more waits for the first."""


def _nothing() -> None:
    """What is left of a save that is done."""


class Saving(Future[None]):
    """The future of a save. Whether its error was seen is known, so that none gets lost."""

    def __init__(self, path: str | None, write: Callable[[], None]) -> None:
        super().__init__()
        self.path = path
        self.seen = False
        self._write = write

    def result(self, timeout: float | None = None) -> None:
        """Wait for the save; raises what it has raised."""
        self.exception(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the save; what it has raised, or ``None``."""
        found = super().exception(timeout)
        self.seen = True
        return found

    def run(self) -> None:
        """Write what was taken apart, and let go of it."""
        write, self._write = self._write, _nothing
        self.set_running_or_notify_cancel()  # it is never cancelled: what was promised is written
        try:
            write()
        except BaseException as error:  # noqa: BLE001 - it is raised where the save is asked about
            self.set_exception(error)
        else:
            self.set_result(None)

    def cancel(self) -> bool:
        """A save that was begun is finished."""
        return False


class Background:
    """The queue, and the thread that works it off: there is one only as long as there is work."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._waiting: deque[Saving] = deque()
        self._current: Saving | None = None
        self._failed: list[Saving] = []
        self._working = False

    def submit(self, path: str | None, write: Callable[[], None]) -> Saving:
        """Enter a save."""
        saving = Saving(path, write)
        with self._changed:
            self._waiting.append(saving)
            if not self._working:
                self._working = True
                # Not a daemon: a program does not end before its last save has.
                Thread(target=self._work, name="transload save", daemon=False).start()
        return saving

    def _work(self) -> None:
        while True:
            with self._changed:
                self._current = self._waiting.popleft() if self._waiting else None
                if self._current is None:
                    self._working = False
                    self._changed.notify_all()
                    return
            self._current.run()
            with self._changed:
                if Future.exception(self._current) is not None:
                    self._failed.append(self._current)
                self._current = None
                self._changed.notify_all()

    def make_room(self) -> None:
        """Wait until one more save may be under way."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._pending()) < MAX_IN_FLIGHT)

    def settle(self, path: str | None) -> None:
        """Wait for saves to a path, and raise what an earlier one to any path has raised unnoticed."""
        with self._changed:
            if path is not None:
                place = os.path.realpath(path)
                self._changed.wait_for(lambda: all(each != place for each in self._places()))
            failed = self.unnoticed()
        if failed:
            raise _lost(failed)

    def _pending(self) -> list[Saving]:
        return [*self._waiting, *([self._current] if self._current else [])]

    def _places(self) -> list[str]:
        return [os.path.realpath(each.path) for each in self._pending() if each.path is not None]

    def unnoticed(self) -> list[Saving]:
        """Saves that failed while nobody looked; they are told once."""
        failed = [each for each in self._failed if not each.seen]
        self._failed = []
        for each in failed:
            each.seen = True
        return failed

    def wait(self) -> None:
        """Wait for all of them."""
        with self._changed:
            self._changed.wait_for(lambda: not self._working)


def _lost(failed: list[Saving]) -> SaveError:
    first = Future.exception(failed[0])
    where = ", ".join(each.path or "a file object" for each in failed)
    error = SaveError(f"an earlier save in the background failed: {first}", where=where, fix="Save again.")
    error.__cause__ = first
    return error


background = Background()


def settle(path: str | None) -> None:
    """Before a save: let those before it come first, and let no error get lost."""
    background.settle(path)


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
