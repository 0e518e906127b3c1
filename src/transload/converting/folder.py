"""A directory of tensors that is there whole or not at all: filled under a hidden name, and renamed in the end.

What a killed conversion leaves is a hidden directory (``.weights.4711-9f3c2a1b.part``). It is locked as long as its
writer lives; the next conversion to the same place removes those that are not.
"""

from __future__ import annotations

import os
import re
import secrets
from contextlib import suppress

from transload.converting.swapping import swapped
from transload.errors import UsageError, cannot_write
from transload.io.atomic import flush_directory, place_of

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["Folder"]


class Folder:
    """A directory that takes its place when all of it has reached the disk. What it replaces was written by us."""

    def __init__(self, path: str, *, overwrite: bool) -> None:
        self.path = path.rstrip("/" + os.sep) or path
        self._target = place_of(self.path)
        self._overwrite = overwrite
        self._lock = -1
        try:
            _clear(self._target)
            self._refuse()
            self.hidden = _hidden(self._target)
            os.mkdir(self.hidden)  # noqa: PTH102 - texts throughout, as given
        except OSError as error:
            raise cannot_write(error, path) from error
        with suppress(OSError):
            self._lock = os.open(self.hidden, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            _is_free(self._lock)

    def _refuse(self) -> None:
        if not os.path.lexists(self.path):
            return
        if not os.path.isdir(self.path):  # noqa: PTH112
            raise UsageError("there is a file already", where=self.path, fix="Choose another name.")
        held = os.listdir(self.path)  # noqa: PTH208
        if held and not (self._overwrite and _is_ours(held)):
            fix = "Choose another name." if self._overwrite else "Choose another name, or say --force."
            raise UsageError("there is a directory already, and it is not empty", where=self.path, fix=fix)

    def commit(self) -> None:
        """Rename it; what was there before is removed when that is done."""
        old = f"{self.hidden}.old"
        try:
            self._refuse()
            flush_directory(self.hidden)
            if not os.path.isdir(self._target):  # noqa: PTH112
                os.rename(self.hidden, self._target)  # noqa: PTH104
            elif swapped(self.hidden, self._target):
                old = self.hidden
            else:
                os.rename(self._target, old)  # noqa: PTH104
                os.rename(self.hidden, self._target)  # noqa: PTH104
        except BaseException:
            if os.path.isdir(old) and not os.path.lexists(self._target):  # noqa: PTH112
                os.rename(old, self._target)  # noqa: PTH104
            self.discard()
            raise
        flush_directory(os.path.dirname(self._target))  # noqa: PTH120
        _remove(old)
        self._unlock()

    def discard(self) -> None:
        """Leave nothing behind."""
        _remove(self.hidden)
        self._unlock()

    def _unlock(self) -> None:
        with suppress(OSError):
            os.close(self._lock)
        self._lock = -1


def _is_ours(names: list[str]) -> bool:
    return "index.json" in names and all(re.fullmatch(r"index\.json|[0-9]{6,}\.bin", name) for name in names)


def _remove(folder: str) -> None:
    """Remove a directory of plain files."""
    with suppress(OSError):
        for name in os.listdir(folder):  # noqa: PTH208
            os.unlink(os.path.join(folder, name))  # noqa: PTH108, PTH118
        os.rmdir(folder)  # noqa: PTH106


def _hidden(target: str) -> str:
    lead, name = os.path.split(target)
    return os.path.join(lead, f".{name[:150]}.{os.getpid()}-{secrets.token_hex(4)}.part")  # noqa: PTH118


def _clear(target: str) -> None:
    """Remove what killed conversions have left. If one was killed between two renames, what was there is put back."""
    lead, name = os.path.split(target)
    pattern = re.compile(rf"\.{re.escape(name[:150])}\.[0-9]+-[0-9a-f]{{8}}\.part(\.old)?", re.DOTALL)
    with suppress(FileNotFoundError):
        for each in os.listdir(lead or "."):  # noqa: PTH208
            found, path = pattern.fullmatch(each), os.path.join(lead, each)  # noqa: PTH118
            if not found or not _is_left(path):
                continue
            if found[1] and not os.path.lexists(target):
                os.rename(path, target)  # noqa: PTH104
            else:
                _remove(path)


def _is_left(path: str) -> bool:
    """Whether a hidden directory is nobody's: true only where that can be told."""
    if fcntl is None:
        return False
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return _is_free(descriptor)
    finally:
        os.close(descriptor)


def _is_free(descriptor: int) -> bool:
    """Whether a directory could be locked; it is from now on."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
