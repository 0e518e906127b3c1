"""What writing a file raises: each also the ``OSError`` that ``open`` would have raised."""

from __future__ import annotations

import errno as numbers
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transload.errors import TransloadError

__all__ = ["CannotWriteError", "ForbiddenWriteError", "FullDiskError", "NoDirectoryError", "cannot_write", "told"]


class CannotWriteError(TransloadError, OSError, RuntimeError):
    """The operating system did not take the bytes; ``errno`` is its number for the reason.

    It is a ``RuntimeError`` too, since that is what ``torch.save`` raises.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "", errno: int | None = None) -> None:
        super().__init__(what, where=where, fix=fix)
        self.errno = errno

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), self.what, self.where, self.fix, self.errno)


class NoDirectoryError(CannotWriteError, FileNotFoundError):
    """The directory the file shall be in is not there."""


class ForbiddenWriteError(CannotWriteError, PermissionError):
    """The system does not let us write there."""


class FullDiskError(CannotWriteError):
    """There is no room: on the disk, in a quota, or below a limit for files."""


def _again(kind: type[CannotWriteError], what: str, where: str, fix: str, errno: int | None) -> CannotWriteError:
    return kind(what, where=where, fix=fix, errno=errno)


_ROOM = "Make room there, or write to another place."
_RIGHT = "Write to another place, or ask for the right to write there."
_REASONS: dict[int, tuple[type[CannotWriteError], str, str]] = {
    numbers.ENOSPC: (FullDiskError, "the disk is full", _ROOM),
    numbers.EDQUOT: (FullDiskError, "the quota on this disk is used up", _ROOM),
    numbers.EFBIG: (FullDiskError, "the file would be larger than this system allows", "`ulimit -f` shows the limit."),
    numbers.ENOENT: (NoDirectoryError, "its directory does not exist", "Make the directory first."),
    numbers.ENOTDIR: (NoDirectoryError, "part of its path is a file, not a directory", "Check the path."),
    numbers.EACCES: (ForbiddenWriteError, "permission denied", _RIGHT),
    numbers.EPERM: (ForbiddenWriteError, "permission denied", _RIGHT),
    numbers.EROFS: (ForbiddenWriteError, "the file system is read-only", "Write to another place."),
    numbers.EISDIR: (CannotWriteError, "it is a directory", "Add the name of a file."),
    numbers.EBUSY: (CannotWriteError, "it is a mount point, or in use by the system", "Write to another place."),
    numbers.ENAMETOOLONG: (CannotWriteError, "its name is too long", "Choose a shorter one."),
    numbers.ELOOP: (CannotWriteError, "its symbolic links point in a circle", "Check the path."),
}


def cannot_write(error: OSError, where: str) -> CannotWriteError:
    """Our error for one of the system's.

    >>> isinstance(cannot_write(OSError(2, "No such file or directory"), "x.pt"), FileNotFoundError)
    True
    """
    if isinstance(error, CannotWriteError):
        return error
    known = _REASONS.get(error.errno or 0)
    kind, what, fix = known or (CannotWriteError, os.strerror(error.errno) if error.errno else str(error), "")
    return kind(f"cannot be written: {what}", where=where, fix=fix, errno=error.errno)


@contextmanager
def told(where: str) -> Iterator[None]:
    """Let what the system refuses here be told as our error."""
    try:
        yield
    except OSError as error:
        if isinstance(error, TransloadError):
            raise
        raise cannot_write(error, where) from error
