"""Files that are written whole or not at all, and the sinks that an archive is written into.

``AtomicFile`` writes a hidden file beside the target, flushes it to disk and renames it. ``InPlaceFile`` writes into
the target itself, which pipes and devices need. Both take buffers in order, as ``FileObject`` does.
"""

from __future__ import annotations

import errno as numbers
import io
import ntpath
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from threading import Thread
from time import sleep
from types import TracebackType
from typing import Any

from transload.errors import CannotWriteError, ForbiddenWriteError, FullDiskError, NoDirectoryError, UsageError
from transload.findings import quoted
from transload.io.sources import is_url, real_path, shown, system_path

try:
    import fcntl
except ImportError:  # Windows, where a file that is open cannot be removed anyway
    fcntl = None  # type: ignore[assignment]

_SYNCHRONIZE, _WAIT_TIMEOUT = 0x100000, 258  # of Windows: a right, and that a process has not ended
_AT_ONCE = 1000  # buffers per writev: the limit (IOV_MAX) is 1024
_BEHIND = 16 << 20  # bytes after which the kernel is asked to start writing them to the disk
_BEGIN_WRITING = 2  # SYNC_FILE_RANGE_WRITE
_MAX_NAME = 180  # bytes of the target's name in the hidden one: file systems allow 255
_LARGE = 32 << 20  # bytes from which freeing a file is worth a thread
_OPEN = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
_OPEN_IN_PLACE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)

_REPLACED: list[tuple[Thread, int]] = []
"""The thread that frees the last large file that was replaced, and its size. If space is short, the next file waits."""


class DescriptorFile:
    """A file by its descriptor. Writeback to the disk starts early, so that the final flush has little left to do."""

    written = 0
    """How many bytes were written."""
    _begun = 0

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def write(self, buffers: Sequence[Any]) -> None:
        """Write all buffers, in order."""
        for start in range(0, len(buffers), _AT_ONCE):
            left = list(buffers[start : start + _AT_ONCE])
            while left:  # writev may write fewer bytes than it was given
                if hasattr(os, "writev"):
                    count = os.writev(self.descriptor, left)
                else:
                    count = os.write(self.descriptor, left[0])
                self.written += count
                while left and count >= len(left[0]):
                    count -= len(left.pop(0))
                if count:
                    left[0] = memoryview(left[0])[count:]
        if self.written - self._begun >= _BEHIND:
            from transload.io.memory import libc

            # On some disks this makes a save of 500 MB a third faster. It is only a hint, so errors are ignored.
            if hasattr(libc(), "sync_file_range"):  # Linux
                libc().sync_file_range(self.descriptor, self._begun, self.written - self._begun, _BEGIN_WRITING)
            self._begun = self.written


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of ``data`` at a position."""
    view = memoryview(data)
    while view:
        if hasattr(os, "pwrite"):
            count = os.pwrite(descriptor, view, offset)
        else:
            os.lseek(descriptor, offset, os.SEEK_SET)  # Windows
            count = os.write(descriptor, view)
        view, offset = view[count:], offset + count


class FileObject:
    """The caller's file object."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, buffers: Sequence[Any]) -> None:
        """Write all buffers, in order."""
        for buffer in buffers:
            view = memoryview(buffer)
            while view.nbytes:
                count = self._file.write(view)
                if count is None and isinstance(self._file, io.RawIOBase):
                    raise BlockingIOError(numbers.EAGAIN, "it accepts no more bytes for now, and does not block")
                if type(count) is not int or count >= len(view):  # no count: all was written
                    break
                if count < 1:
                    raise OSError(numbers.EIO, "it accepts no more bytes")
                view = view[count:]


def target_path(path: str) -> str:
    """The path of a new file for calls of the system; ``UsageError`` if no file can have it.

    That is an empty one, one with a NUL or half of a surrogate pair, and what Windows would give to something else.
    """
    if is_url(path):
        what = "transload writes files, not to URLs"
        raise UsageError(what, where=shown(path), fix="Write a file, and upload that.")
    try:
        valid = path and b"\0" not in (os.fsencode(path) if os.name != "nt" else path.encode())
    except UnicodeEncodeError:
        valid = False
    if not valid:
        raise UsageError(f"no file can have the name {path!r:.80}", fix="Choose another name.")
    if os.name == "nt" and (why := refused_by_windows(path)):
        raise UsageError(f"Windows cannot store a file under this name: {why}", where=path, fix="Choose another name.")
    return system_path(path)


_DEVICES = re.compile(r"(?:con|prn|aux|nul|conin\$|conout\$|(?:com|lpt)[0-9\xb9\xb2\xb3]) *(?:[.:].*)?", re.IGNORECASE)


def refused_by_windows(path: str) -> str:
    r"""Why Windows would write something else than a file of this name, and report success; empty if it does not.

    >>> refused_by_windows("runs/Aux.pt"), refused_by_windows("a.pt."), refused_by_windows(r"C:\runs\auxiliary.pt")
    ("'Aux.pt' is a device", "the dot or space at the end of 'a.pt.' would be dropped", '')

    ``nul`` itself is meant: it is ``os.devnull``. After ``\\?\`` Windows takes every name as it is.
    """
    if path.startswith("\\\\?\\") or path.lower() == "nul":
        return ""
    for name in ntpath.splitdrive(path)[1].replace("/", "\\").split("\\"):
        if _DEVICES.fullmatch(name):
            return f"{name!r} is a device"
        if name != name.rstrip(". ") and name not in (".", ".."):
            return f"the dot or space at the end of {name!r} would be dropped"
        if found := re.search(r'[<>:"|?*\x01-\x1f]', name):
            return f"it contains {found[0]!r}"
    return ""


def refuse_missing_directory(path: str) -> None:
    """Refuse a path in a directory that does not exist, before anything is read for it."""
    try:
        os.stat(os.path.join(os.path.dirname(real_path(path)), ""))  # the slash: not of a file
    except OSError as error:
        raise cannot_write(error, path) from error


def is_atomic(path: str) -> bool:
    """Whether the file at a path can be replaced: it is a regular file, or does not exist.

    Pipes and devices are written in place, and so is a file without a name, to which ``/dev/fd/3`` may lead.
    """
    try:
        status = os.stat(system_path(path))
    except OSError:
        return True
    try:
        return stat.S_ISREG(status.st_mode) and os.path.samestat(status, os.stat(real_path(path)))
    except OSError:
        return False


class InPlaceFile(DescriptorFile):
    """A file that is written in place: its old content is lost immediately."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            super().__init__(os.open(system_path(path), _OPEN_IN_PLACE, 0o666))
        except OSError as error:
            raise cannot_write(error, path) from error

    def __enter__(self) -> Any:  # typing.Self is newer than Python 3.10
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
        """Close the file after everything was written."""
        os.close(self.descriptor)

    def discard(self) -> None:
        """Close the file after an error."""
        with suppress(OSError):
            os.close(self.descriptor)


class AtomicFile(InPlaceFile):
    """A file that replaces the target when all of it has reached the disk."""

    _hidden = ""
    descriptor = -1

    def __init__(self, path: str) -> None:
        self.path = path
        self._target = real_path(path)  # write to the file that symbolic links point to
        for thread, nbytes in _REPLACED:
            if thread.is_alive() and _free(self._target) < 2 * nbytes:
                thread.join()
        try:
            before = None
            with suppress(FileNotFoundError):
                before = os.stat(self._target)
            # A path that ends with a slash names a directory. A read-only file is not replaced, though it could be.
            if not os.path.basename(path) or (before and stat.S_ISDIR(before.st_mode)):
                raise IsADirectoryError(numbers.EISDIR, "is a directory")  # noqa: TRY301 - as the system would
            if before and not os.access(self._target, os.W_OK):
                raise PermissionError(numbers.EACCES, "not writable")  # noqa: TRY301 - as above
            remove_leftovers(self._target)
            while self.descriptor < 0:
                self._hidden = hidden_name(self._target)
                with suppress(FileExistsError):
                    self.descriptor = os.open(self._hidden, _OPEN, 0o666)
                    # Before it was locked, another writer may have removed it as a leftover.
                    locked = try_lock(self.descriptor) is not False
                    if not locked or (os.name != "nt" and not os.fstat(self.descriptor).st_nlink):
                        os.close(self.descriptor)
                        self.descriptor = -1
            if before is not None and os.name != "nt":  # keep its permissions, and its owner if possible
                status = os.fstat(self.descriptor)
                if (status.st_uid, status.st_gid) != (before.st_uid, before.st_gid):
                    try:
                        os.fchown(self.descriptor, before.st_uid, before.st_gid)
                    except OSError:  # only root can change the owner; others may be able to keep the group
                        with suppress(OSError):
                            os.fchown(self.descriptor, -1, before.st_gid)
                with suppress(OSError):  # file systems without permissions
                    os.fchmod(self.descriptor, stat.S_IMODE(before.st_mode))
        except BaseException as error:
            self.discard()
            if isinstance(error, OSError):
                raise cannot_write(error, path) from error
            raise

    def commit(self) -> None:
        """Flush, rename, and flush the directory."""
        old = nbytes = -1
        try:
            os.fsync(self.descriptor)
            if os.name == "nt":
                os.close(self.descriptor)
            with suppress(OSError):
                # Freeing 3 GB takes most of a second. So a large file is kept open while it is replaced, which then
                # only changes names, and closed in a thread. Windows cannot replace an open file.
                nbytes = os.stat(self._target).st_size
                if nbytes >= _LARGE and os.name != "nt":
                    old = os.open(self._target, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
            _replace(self._hidden, self._target)
        except BaseException:
            self.discard()
            raise
        finally:
            if old >= 0:
                thread = Thread(target=os.close, args=(old,), name="transload replaced", daemon=True)
                try:
                    thread.start()
                    _REPLACED[:] = [(thread, nbytes)]
                except RuntimeError:  # the program is ending, or the system has no more threads
                    os.close(old)
        if os.name != "nt":
            os.close(self.descriptor)
            flush_directory(os.path.dirname(self._target))

    def discard(self) -> None:
        """Remove the hidden file."""
        super().discard()
        with suppress(OSError):
            os.unlink(self._hidden)


def _replace(old: str, new: str) -> None:
    """Rename a file over another.

    Windows refuses that while a program has the other one open. A virus scanner has it open for a moment, so it is
    tried again.
    """
    for wait in (0.01, 0.04, 0.15, 0.4, 0):
        try:
            os.replace(old, new)
        except PermissionError as error:  # noqa: PERF203 - it is rare
            if not wait or getattr(error, "winerror", 0) not in _IN_USE:
                raise
            sleep(wait)
        else:
            return


def _free(target: str) -> int:
    """Free bytes on the file system of a path; 0 if the system does not say."""
    with suppress(OSError):
        space = os.statvfs(os.path.dirname(target) or ".")
        return space.f_bavail * space.f_frsize
    return 0


def hidden_name(target: str) -> str:
    """A name beside the target for a file that will replace it."""
    folder, name = os.path.split(target)
    return os.path.join(folder, f"{_prefix(name)}{os.getpid()}-{secrets.token_hex(4)}.part")


def _prefix(name: str) -> str:
    return f".{os.fsdecode(os.fsencode(name)[:_MAX_NAME])}."


def try_lock(descriptor: int) -> bool | None:
    """Try to lock a file or directory; return whether that succeeded, or ``None`` if locks are not supported."""
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
    """Flush a directory to the disk, so that a new name in it survives a crash. Not all file systems support this."""
    with suppress(OSError):
        descriptor = os.open(folder or ".", os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def abandoned(target: str, flags: int, ending: str = "") -> Iterator[tuple[str, re.Match[str]]]:
    """What killed writers of a file or directory have left beside it: each path, and the match of its name.

    ``flags`` are those for opening it, ``ending`` is a regular expression for the end of its name. It is abandoned if
    it can be locked, and stays locked while the caller handles it. If locks are not supported, nothing is yielded,
    since the writer may be alive, perhaps on another machine; except on Windows, which does not remove open files, and
    where a directory is abandoned if the process in its name has ended.
    """
    folder, name = os.path.split(target)
    pattern = re.compile(rf"{re.escape(_prefix(name))}(?P<process>\d{{1,10}})-[0-9a-f]{{8}}\.part{ending}", re.DOTALL)
    for entry in os.listdir(folder or "."):
        path, match = os.path.join(folder, entry), pattern.fullmatch(entry)
        if not match:
            continue
        if os.name == "nt" and os.path.isdir(path):  # which Windows does not open
            if not is_running(int(match["process"])):
                yield path, match
            continue
        try:
            descriptor = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0))
        except OSError:
            continue
        try:
            locked = try_lock(descriptor)
            if os.name == "nt":  # Windows cannot remove an open file
                os.close(descriptor)
            if locked or os.name == "nt":
                yield path, match
        finally:
            if os.name != "nt":
                os.close(descriptor)


def is_running(process: int) -> bool:
    """Whether a process runs, on Windows: elsewhere locks say more."""
    import ctypes

    if sys.platform != "win32":
        return True
    kernel = ctypes.windll.kernel32
    kernel.OpenProcess.restype = ctypes.c_void_p
    handle = ctypes.c_void_p(kernel.OpenProcess(_SYNCHRONIZE, False, process))
    waits = bool(handle) and kernel.WaitForSingleObject(handle, 0) == _WAIT_TIMEOUT
    kernel.CloseHandle(handle)
    return waits


def remove_leftovers(target: str) -> None:
    """Remove what killed writers of a file have left beside it."""
    with suppress(OSError):
        for path, _ in abandoned(target, os.O_RDWR):
            with suppress(OSError):
                os.unlink(path)


# -- errors

_ROOM = "Free some space there, or write to another place."
_RIGHT = "Write to another place, or ask for permission to write there."
_REASONS: dict[int, tuple[type[CannotWriteError], str, str]] = {
    numbers.ENOSPC: (FullDiskError, "the disk is full", _ROOM),
    numbers.EDQUOT: (FullDiskError, "the quota on this disk is used up", _ROOM),
    numbers.EFBIG: (FullDiskError, "the file would be larger than this system allows", "`ulimit -f` shows the limit."),
    numbers.ENOENT: (NoDirectoryError, "its directory does not exist", "Check the path, or create the directory:"),
    numbers.ENOTDIR: (NoDirectoryError, "part of its path is a file, not a directory", "Check the path."),
    numbers.EACCES: (ForbiddenWriteError, "permission denied", _RIGHT),
    numbers.EPERM: (ForbiddenWriteError, "permission denied", _RIGHT),
    numbers.EROFS: (ForbiddenWriteError, "the file system is read-only", "Write to another place."),
    numbers.EISDIR: (CannotWriteError, "it is a directory", "Add the name of a file."),
    numbers.EBUSY: (CannotWriteError, "it is a mount point, or in use by the system", "Write to another place."),
    numbers.ENAMETOOLONG: (CannotWriteError, "its name is too long", "Choose a shorter one."),
    numbers.ELOOP: (CannotWriteError, "its symbolic links form a loop", "Check the path."),
}
_DENIED = 5
_IN_USE = (_DENIED, 32, 33, 1224)  # what Windows answers: access denied, two violations of sharing, mapped into memory
_USED = (
    ForbiddenWriteError,
    "a program has the file open, perhaps this one, and Windows does not replace it meanwhile",
    "Close it there (in Python, delete what transload.open or load(mmap=True) returned), or choose another name.",
)


def cannot_write(error: OSError, where: str, *, outcome: str = "") -> CannotWriteError:
    """Our error for an ``OSError``; ``outcome`` says what happened to the file."""
    if isinstance(error, CannotWriteError):
        return error
    reason = _REASONS.get(error.errno or 0)
    if error.errno in (numbers.ENOENT, numbers.EACCES) and os.name == "nt":  # for which other systems have more words
        if error.errno == numbers.EACCES and os.path.isdir(where):
            reason = _REASONS[numbers.EISDIR]
        elif os.path.isfile(os.path.dirname(where)):
            reason = _REASONS[numbers.ENOTDIR]
    code = getattr(error, "winerror", None)
    if code in _IN_USE and (code != _DENIED or error.filename2):  # to a rename, Windows answers only that
        reason = _USED
    kind, what, fix = reason or (CannotWriteError, os.strerror(error.errno) if error.errno else str(error), "")
    if reason is _REASONS[numbers.ENOENT]:
        folder = os.path.dirname(where.rstrip(os.sep))
        if not folder or os.path.isdir(folder):  # then where is a link, or the current directory is gone
            folder = os.path.dirname(real_path(where))
        if os.path.isdir(folder):  # such as /proc, where no file can be created
            what, fix = "no file can be created there", "Write to another place."
        else:
            fix += f"\n$ mkdir {'-p ' if os.name != 'nt' else ''}{quoted(folder)}"
    what = f"cannot be written: {what}" + (f"; {outcome}" if outcome else "")
    return kind(what, where=where, fix=fix, errno=error.errno)
