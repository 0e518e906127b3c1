"""The queue of saves in the background, and the thread that writes them.

One thread writes, in the order of the calls, so the last save to a path wins. An error is raised by the future; if the
program does not ask the future, by the next call; or it is printed when the program ends.
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
from transload.io.sources import real_path

with suppress(RuntimeError):  # while the program ends
    from concurrent.futures import ThreadPoolExecutor  # noqa: F401 - a writer must not import it in its thread

MAX_IN_FLIGHT = 2
"""The most pending saves: each has a copy of everything it saves. Another call waits for the first."""


class Saving(Future[None]):
    """The future of a save. It records whether its error was seen, so that no error gets lost.

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
            del self  # or the error would refer to it through this frame: see run

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the save; its error, or ``None``."""
        error = super().exception(timeout)
        background.mark_seen(self)
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
        with suppress(BaseException):  # an error of a callback must not stop the other saves
            done()
        del self, done  # the error refers to this frame, which must not refer to the error

    def cancel(self) -> bool:
        """A save cannot be cancelled."""
        return False


class Background:
    """The queue, and the thread that writes, which exists only while there is work."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._pending: list[Saving] = []  # in the order of the calls
        self._failed: list[Saving] = []
        self._writer: int | None = None  # the ID of the thread that writes; 0 before it has started

    def submit(self, target: object, write: Callable[[], None]) -> Saving:
        """Append a save to the queue. If no thread can be started, the caller does the work: no save is lost."""
        saving = Saving(target, write)
        with self._changed:
            self._pending.append(saving)
            begin = self._writer is None
            if begin:
                self._writer = 0
        if begin and not main_thread().is_alive():  # the program is ending, and waits for no more threads
            self._work()
            _report_at_exit()
        elif begin:
            # It runs before the functions that the program has registered so far. These may save, too: see above.
            atexit.unregister(_report_at_exit)
            atexit.register(_report_at_exit)
            try:
                # Not a daemon: a program does not end before its last save.
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
        saving = self._waitable()[0]
        saving.run()
        with self._changed:
            self._pending.remove(saving)
            if Future.exception(saving) is not None and not saving.seen:
                self._failed.append(saving)
            self._changed.notify_all()
        del saving  # see Saving.run

    def _waitable(self) -> list[Saving]:
        """The pending saves to wait for; in a callback only those not yet started, since it runs inside a save."""
        if self._writer == get_ident():
            return [saving for saving in self._pending if not (saving.running() or saving.done())]
        return self._pending

    def make_room(self) -> None:
        """Wait until one more save may be pending."""
        self._until(lambda: len(self._waitable()) < MAX_IN_FLIGHT)

    def wait_for_target(self, target: object) -> None:
        """Wait for saves to a path or a file object, and raise errors that were not seen."""
        place = _identity(target)
        self._until(lambda: all(_identity(saving.target) != place for saving in self._waitable()))
        self.raise_unseen()

    def wait(self) -> None:
        """Wait for all saves."""
        self._until(lambda: not self._waitable())

    def _until(self, ready: Callable[[], bool]) -> None:
        """Wait for a condition. A callback, which runs in the writing thread, writes the next saves instead."""
        if self._writer == get_ident():
            while not ready():
                self._write_next()
        else:
            with self._changed:
                self._changed.wait_for(ready)

    def mark_seen(self, saving: Saving) -> None:
        """Forget the error of a save, if any: the caller has seen it."""
        with self._changed:
            saving.seen = True
            self._failed = [other for other in self._failed if other is not saving]

    def raise_unseen(self) -> None:
        """Raise the errors that nobody has seen, as one."""
        with self._changed:
            failed = self.take_unseen()
        if failed:
            raise _background_error(failed)

    def take_unseen(self) -> list[Saving]:
        """The failed saves whose errors nobody has seen; each is returned once."""
        failed, self._failed = self._failed, []
        for saving in failed:
            saving.seen = True
        return failed


def _identity(target: object) -> object:
    """The identity of a target: the real path, or the id of a file object."""
    return real_path(target) if isinstance(target, str) else id(target)


def _background_error(failed: list[Saving]) -> SaveError:
    first = Future.exception(failed[0])
    where = ", ".join(save.target if isinstance(save.target, str) else "a file object" for save in failed)
    error = SaveError(f"an earlier save in the background failed: {first}", where=where, fix="Save again.")
    error.__cause__ = first
    return error


background = Background()


def _report_at_exit() -> None:
    """Print errors that nobody has seen. Python has waited for the thread by now."""
    background.wait()
    for failed in background.take_unseen():
        print(f"transload: {_background_error([failed])}", file=sys.stderr)  # noqa: T201 - nothing is left to raise it in


if hasattr(os, "register_at_fork"):  # a child has no thread; reset in place, since others refer to the object
    os.register_at_fork(after_in_child=background.__init__)  # type: ignore[misc]
