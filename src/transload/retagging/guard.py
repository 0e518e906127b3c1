"""What speaks against changing a file in place: found out before anything is written."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

from transload.errors import BusyFileError, CannotReadError, CannotWriteError, RetagError

__all__ = [
    "cannot_write",
    "lock",
    "refuse_changed",
    "refuse_in_place",
    "refuse_replaced",
    "refuse_written_by_others",
    "same_file",
]


def refuse_in_place(path: str, *, hard_links: bool) -> None:
    """Refuse a file that is not to be changed where it is: a link, one with several names, one that is read-only."""
    try:
        status = os.lstat(path)
    except (OSError, ValueError) as error:
        fix = "Check the spelling and the current directory." if isinstance(error, FileNotFoundError) else ""
        reason, number = getattr(error, "strerror", None) or str(error), getattr(error, "errno", None)
        raise CannotReadError(reason, where=path, fix=fix, errno=number) from None
    from shlex import quote

    copy = f"Make a copy (transload retag {quote(path)} -o COPY …)"
    if stat.S_ISLNK(status.st_mode):
        raise RetagError(
            "it is a symbolic link, and what it leads to may be shared (a download cache, for one)",
            where=path,
            fix=f"{copy}, or name the file itself: {os.path.realpath(path)}",
        )
    if not stat.S_ISREG(status.st_mode):
        raise RetagError("it is no regular file", where=path)
    if status.st_nlink > 1 and not hard_links:
        raise RetagError(
            f"the same file has {status.st_nlink} names (hard links), and would change under all of them",
            where=path,
            fix=f"{copy}, or pass --hard-links if it shall change under all of them.",
        )
    if not status.st_mode & 0o222:
        raise RetagError("it is read-only", where=path, fix=f"{copy}, or allow it: chmod u+w {quote(path)}")


def refuse_written_by_others(descriptor: int, path: str) -> None:
    """Refuse a file, open for reading, that somebody has open for writing, if the system tells: Linux, a local disk."""
    try:
        from fcntl import F_RDLCK, F_SETLEASE, F_SETSIG, F_UNLCK, fcntl
        from signal import SIGURG
    except ImportError:  # pragma: no cover (Windows, macOS)
        return
    try:
        fcntl(descriptor, F_SETSIG, SIGURG)  # who opens it meanwhile sends a signal: one that is ignored
        fcntl(descriptor, F_SETLEASE, F_RDLCK)  # granted only while nobody has it open for writing
        fcntl(descriptor, F_SETLEASE, F_UNLCK)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            raise BusyFileError(
                "another process has it open for writing", where=path, fix="Wait until it is done (lsof shows who)."
            ) from None


def lock(descriptor: int, path: str) -> None:
    """Keep every other transload, and whoever else asks, away from an open file until it is closed."""
    try:
        from fcntl import LOCK_EX, LOCK_NB, flock
    except ImportError:  # pragma: no cover (Windows)
        return
    try:
        flock(descriptor, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        raise BusyFileError("another process has locked it", where=path, fix="Wait until it is done.") from None
    except OSError:  # a network file system without locks
        return


def cannot_write(error: OSError, path: str, *, changed: str = "nothing was changed") -> CannotWriteError:
    """One of our errors for one of the system's."""
    reason = error.strerror or str(error)
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    fix = "Free some space." if full else ""
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        fix = "Write where you may, with -o COPY."
    return CannotWriteError(f"{reason}; {changed}", where=path, fix=fix, errno=error.errno)


def same_file(path: str, other: str) -> bool:
    """Whether two names lead to one file."""
    with suppress(OSError):
        return os.path.samefile(path, other)  # noqa: PTH121 - pathlib costs ten milliseconds to import
    return False


def refuse_changed(seen: os.stat_result, now: os.stat_result, path: str) -> None:
    """Refuse a file that was written to since it was read, or whose name another one has."""
    if _mark(seen) != _mark(now):
        raise BusyFileError("it was changed while it was read", where=path, fix="Wait until it is written.")


def refuse_replaced(seen: os.stat_result, path: str) -> None:
    """Refuse where a path no longer leads to the file that was read."""
    try:
        now = os.stat(path)  # noqa: PTH116 - pathlib costs ten milliseconds to import
    except OSError as error:
        raise BusyFileError("it was moved while it was read", where=path) from error
    refuse_changed(seen, now, path)


def _mark(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
