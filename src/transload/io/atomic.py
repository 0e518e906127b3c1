"""Files that are written whole or not at all, and the sinks that an archive is written into.

``AtomicFile`` writes a hidden file beside the target and renames it when all of it has reached the disk. ``DirectFile``
writes into the target itself, as pipes and devices need it. They take buffers in order, as does a ``FileObject``.
"""

from __future__ import annotations

import io
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from errno import EACCES, EAGAIN, EIO, EISDIR
from functools import cache
from threading import Thread
from typing import TYPE_CHECKING, Any

from transload.errors import CannotWriteError, cannot_write

try:
    import fcntl
except ImportError:  # Windows, where a file that is open cannot be removed anyway
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from types import TracebackType

_AT_ONCE = 1000  # buffers: the system takes 1024
_BEHIND = 16 << 20  # bytes after which the system is asked to begin to write them to the disk
_BEGIN_WRITING = 2  # SYNC_FILE_RANGE_WRITE


class SystemFile:
    """A file by its descriptor. The disk begins with what is written at once, so that a flush has little left to do."""

    _written = _begun = 0

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def write(self, buffers: Sequence[Any]) -> None:
        """Write all of them, in this order."""
        for start in range(0, len(buffers), _AT_ONCE):
            left = list(buffers[start : start + _AT_ONCE])
            while left:  # the system may take fewer bytes than there are
                if hasattr(os, "writev"):
                    count = os.writev(self.descriptor, left)
                else:
                    count = os.write(self.descriptor, left[0])
                self._written += count
                while left and count >= len(left[0]):
                    count -= len(left.pop(0))
                if count:
                    left[0] = memoryview(left[0])[count:]
        if self._written - self._begun >= _BEHIND:
            # A save of 500 MB takes a third less on some disks. Only a hint: what the system answers does not matter.
            if begin := _sync_file_range():
                begin(self.descriptor, self._begun, self._written - self._begun, _BEGIN_WRITING)
            self._begun = self._written


@cache
def _sync_file_range() -> Any:
    import ctypes

    call = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return call


def write_at(descriptor: int, data: memoryview, offset: int) -> int:
    """Write bytes at a position; how many the system took."""
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, data, offset)
    os.lseek(descriptor, offset, os.SEEK_SET)  # Windows
    return os.write(descriptor, data)


class FileObject:
    """A file object of the caller, or a buffer."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, buffers: Sequence[Any]) -> None:
        """Write all of them, in this order."""
        for buffer in buffers:
            view = memoryview(buffer)
            while view.nbytes:
                count = self._file.write(view)
                if count is None and isinstance(self._file, io.RawIOBase):
                    raise BlockingIOError(EAGAIN, "it takes no more bytes for now, and does not wait")
                if type(count) is not int or count >= len(view):  # those who do not tell have written all
                    break
                if count < 1:
                    raise OSError(EIO, "it takes no more bytes")
                view = view[count:]


_MAX_NAME = 180  # bytes of the true name in the hidden one: 255 is what file systems take
_LARGE = 32 << 20  # bytes from which giving a file back is worth a thread
_OPEN = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_OPEN_STRAIGHT = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def is_atomic(path: str) -> bool:
    """Whether what is at a path can be replaced: a regular file, or nothing. Pipes and devices are written into.

    So is a file that has no name of its own, to which ``/dev/fd/3`` may lead.
    """
    try:
        found = os.stat(path)
    except OSError:
        return True
    try:
        return stat.S_ISREG(found.st_mode) and os.path.samestat(found, os.stat(os.path.realpath(path)))
    except OSError:
        return False


class DirectFile(SystemFile):
    """A file that is written in its place: what was in it is gone at once."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            super().__init__(os.open(path, _OPEN_STRAIGHT, 0o666))
        except OSError as error:
            raise cannot_write(error, path) from error

    def __enter__(self) -> Any:  # typing.Self is younger than Python 3.10
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                self.commit()
            else:
                self.discard()
        except OSError as refused:
            raise cannot_write(refused, self.path) from refused
        if isinstance(error, OSError) and not isinstance(error, CannotWriteError):
            raise cannot_write(error, self.path) from error

    def commit(self) -> None:
        """All is written."""
        os.close(self.descriptor)

    def discard(self) -> None:
        """Something failed."""
        with suppress(OSError):
            os.close(self.descriptor)


class AtomicFile(DirectFile):
    """A file that takes its place when all of it has reached the disk.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with AtomicFile(f"{folder}/a") as file:
    ...         _ = os.write(file.descriptor, b"whole")
    ...     os.listdir(folder)
    ['a']
    """

    _hidden = ""
    descriptor = -1

    def __init__(self, path: str) -> None:
        self.path = path
        self._target = os.path.realpath(path)  # symbolic links stay, and what they point to is written
        for thread, nbytes in _REPLACED:
            if thread.is_alive() and _free(self._target) < 2 * nbytes:
                thread.join()
        try:
            before = self._existing()
            clear_debris(self._target)
            while self.descriptor < 0:
                self._hidden = hidden_name(self._target)
                with suppress(FileExistsError):
                    self.descriptor = os.open(self._hidden, _OPEN, 0o666)
                    # Before it was locked, another writer may have taken it for debris.
                    if lock(self.descriptor) is False or not (os.fstat(self.descriptor).st_nlink or os.name == "nt"):
                        os.close(self.descriptor)
                        self.descriptor = -1
            if before is not None and os.name != "nt":  # the rights of the old file, and its owner where we may
                own = os.fstat(self.descriptor)
                if (own.st_uid, own.st_gid) != (before.st_uid, before.st_gid):
                    try:
                        os.fchown(self.descriptor, before.st_uid, before.st_gid)
                    except OSError:  # only root gives files away; those who share a group keep it
                        with suppress(OSError):
                            os.fchown(self.descriptor, -1, before.st_gid)
                with suppress(OSError):  # file systems without rights
                    os.fchmod(self.descriptor, stat.S_IMODE(before.st_mode))
        except BaseException as error:
            self.discard()
            if isinstance(error, OSError):
                raise cannot_write(error, path) from error
            raise

    def _existing(self) -> os.stat_result | None:
        """What is at the place now. What may not be written may not be replaced either, though the system lets us."""
        if not os.path.basename(self.path):  # it ends with a slash, as only that of a directory may
            raise IsADirectoryError(EISDIR, "is a directory")
        try:
            found = os.stat(self._target)
        except FileNotFoundError:
            return None
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(EISDIR, "is a directory")
        if not os.access(self._target, os.W_OK):
            raise PermissionError(EACCES, "not writable")
        return found

    def commit(self) -> None:
        """Flush, rename, and flush the directory."""
        try:
            os.fsync(self.descriptor)
            if os.name == "nt":
                os.close(self.descriptor)
            with _large_file_kept(self._target):
                os.replace(self._hidden, self._target)
        except BaseException:
            self.discard()
            raise
        if os.name != "nt":
            os.close(self.descriptor)
            flush_directory(os.path.dirname(self._target))

    def discard(self) -> None:
        """Leave nothing behind."""
        with suppress(OSError):
            os.close(self.descriptor)
        with suppress(OSError):
            os.unlink(self._hidden)


_REPLACED: list[tuple[Thread, int]] = []
"""The thread that gives the last large file that was replaced back to the system, and its size.

Where the disk is short of space, the next file is not begun before that of the last is free.
"""


@contextmanager
def _large_file_kept(target: str) -> Iterator[None]:
    """Keep a large file open while it is replaced, and close it in a thread: freeing 3 GB takes most of a second.

    As long as it is open, replacing it is only a change of names.
    """
    descriptor = nbytes = -1
    with suppress(OSError):
        nbytes = os.stat(target).st_size
        if nbytes >= _LARGE and os.name != "nt":  # a file that is open there cannot be replaced
            descriptor = os.open(target, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0))
    try:
        yield
    finally:
        if descriptor >= 0:
            thread = Thread(target=os.close, args=(descriptor,), name="transload replaced", daemon=True)
            try:
                thread.start()
                _REPLACED[:] = [(thread, nbytes)]
            except RuntimeError:  # the program is ending, or there can be no more threads
                os.close(descriptor)


def _free(target: str) -> int:
    """Free bytes on the file system of a path; none where the system does not say."""
    with suppress(OSError):
        found = os.statvfs(os.path.dirname(target) or ".")
        return found.f_bavail * found.f_frsize
    return 0


def hidden_name(target: str) -> str:
    """A name beside the target, for what takes its place later."""
    folder, name = os.path.split(target)
    return os.path.join(folder, f"{_prefix(name)}{os.getpid()}-{secrets.token_hex(4)}.part")


def _prefix(name: str) -> str:
    return f".{os.fsdecode(os.fsencode(name)[:_MAX_NAME])}."


def lock(descriptor: int) -> bool | None:
    """Lock a file or a directory; whether it is ours now. ``None`` where it cannot be locked."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def flush_directory(folder: str) -> None:
    """Let the new name reach the disk. Some file systems cannot be asked to; they have the file all the same."""
    with suppress(OSError):
        descriptor = os.open(folder or ".", os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def abandoned(target: str, flags: int, ending: str = "") -> Iterator[tuple[str, re.Match[str]]]:
    """What killed writers of a file or directory have left beside it: its path, and what its name matches.

    ``flags`` open it, ``ending`` is a regular expression of what its name may end with. The lock, which is ours
    meanwhile, tells that no writer has it. Where it cannot be locked, its process does: it may be another one of the
    same number.
    """
    folder, name = os.path.split(target)
    pattern = re.compile(rf"{re.escape(_prefix(name))}(\d{{1,10}})-[0-9a-f]{{8}}\.part{ending}", re.DOTALL)
    for each in os.listdir(folder or "."):
        path, match = os.path.join(folder, each), pattern.fullmatch(each)
        if not match:
            continue
        try:
            descriptor = os.open(path, flags | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0))
        except OSError:
            continue
        try:
            ours = lock(descriptor)
            if os.name == "nt":  # where a file that is open cannot be removed
                os.close(descriptor)
            if ours or (ours is None and not _is_running(int(match[1]))):
                yield path, match
        finally:
            if os.name != "nt":
                os.close(descriptor)


def clear_debris(target: str) -> None:
    """Remove what killed writers of a file have left beside it."""
    with suppress(OSError):
        for path, _ in abandoned(target, os.O_RDWR):
            with suppress(OSError):
                os.unlink(path)


def _is_running(pid: int) -> bool:
    """Whether there is such a process here. Ours is: its own files are in use, or it removes them itself."""
    if os.name == "nt":
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
