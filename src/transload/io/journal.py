"""Changing a file in place, so that after a crash at any moment it can be restored, or the change finished.

``apply`` writes a journal beside the file, with all old and new bytes, and flushes it; then it changes the file in
place, and removes the journal. ``recover`` finds the journal of an interrupted change, and restores the file or
finishes the change. A journal that is kept under another name lets ``undo_changes`` undo the change later.
``copy_changed`` makes a changed copy of the file instead.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from errno import EAGAIN, EIO, ELOOP, ENXIO
from hashlib import sha256
from struct import Struct
from typing import Literal

from transload.errors import BusyFileError, CannotWriteError, RetagError, UsageError
from transload.findings import quoted
from transload.frozen import Frozen, NamedTuple
from transload.io.atomic import AtomicFile, cannot_write, flush_directory, refuse_missing_directory, try_lock, write_at
from transload.io.packed import Assembly, SourceRange
from transload.io.sources import (
    BytesSource,
    FileSource,
    Source,
    cannot_read,
    has_journal,
    journal_path,
    read_at,
    real_path,
    system_path,
)

_CHANGE = os.O_RDWR | getattr(os, "O_BINARY", 0)
_CREATE = _CHANGE | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0)
_UNCHANGED = "nothing was changed"

_MAGIC = b"TLRETAG1"
_HEAD = Struct("<8s3Q?I")  # magic, inode, both sizes, whether to keep it, how many runs
_RUN = Struct("<3Q")
_DIGEST = 32
_MAX_SIZE = (1 << 63) - 1  # of a file; a larger offset makes the functions of ``os`` raise OverflowError

_FICLONE = 0x40049409
_PIECE = 16 << 20
_MOST = 1 << 30


class Change(NamedTuple):
    """A replacement of bytes."""

    offset: int
    old: bytes
    new: bytes


class Changes(Frozen):
    """All changes of a file, in order, and its size before and after.

    For a change in place, a run may change its length only at the end of the file.
    """

    runs: tuple[Change, ...]
    old_size: int
    new_size: int

    def undone(self) -> Changes:
        """The changes from the new file back to the old one."""
        runs = tuple(Change(run.offset, run.new, run.old) for run in self.runs)
        return Changes(runs, self.new_size, self.old_size)

    def applied(self, source: Source) -> Source:
        """The changed file as a source; nothing is written."""
        parts: list[SourceRange] = []
        at = 0
        for run in self.runs:
            parts += (SourceRange(source, at, run.offset - at), SourceRange(BytesSource(run.new), 0, len(run.new)))
            at = run.offset + len(run.old)
        return Assembly([*parts, SourceRange(source, at, self.old_size - at)], source.name)


def undo_path(path: str) -> str:
    """The path of the journal that undoes the last change of a file."""
    return journal_path(path).removesuffix("retag") + "undo"


def _remove(*paths: str) -> None:
    """Remove files of one folder, if they exist, and flush the folder."""
    for path in paths:
        with suppress(FileNotFoundError):
            os.unlink(path)
    flush_directory(os.path.dirname(paths[0]))


class Journal(NamedTuple):
    """A change of a file that is in progress. ``keep`` is whether it can be undone afterwards.

    ``recover`` uses a journal only for the file with this ``inode``, so that one that was downloaded has no effect.
    With ``anywhere`` it does not compare the inode, nor do ``undo_changes`` and ``rescue``.
    """

    changes: Changes
    inode: int = 0
    keep: bool = False

    def encoded(self) -> bytes:
        """The bytes of the journal."""
        old_size, new_size = self.changes.old_size, self.changes.new_size
        runs = self.changes.runs
        head = _HEAD.pack(_MAGIC, self.inode, old_size, new_size, self.keep, len(runs))
        table = b"".join(_RUN.pack(run.offset, len(run.old), len(run.new)) for run in runs)
        body = b"".join((head, table, *(part for run in runs for part in (run.old, run.new))))
        return body + sha256(body).digest()


def journal_of(data: bytes) -> Journal | None:
    """Decode a journal; ``None`` if the bytes are not a complete one, or its runs are not in order or beyond the file.

    Anyone can compute the digest, so it proves nothing about the rest.
    """
    body, digest = data[:-_DIGEST], data[-_DIGEST:]
    if len(body) < _HEAD.size or body[:8] != _MAGIC or sha256(body).digest() != digest:
        return None
    _, inode, old_size, new_size, keep, count = _HEAD.unpack_from(body)
    position = _HEAD.size + count * _RUN.size
    if position > len(body) or max(old_size, new_size) > _MAX_SIZE:
        return None
    runs: list[Change] = []
    reach = 0
    for offset, n_old, n_new in _RUN.iter_unpack(body[_HEAD.size : position]):
        middle, end = position + n_old, position + n_old + n_new
        if offset < reach or offset + n_old > old_size or offset + n_new > new_size or end > len(body):
            return None
        runs.append(Change(offset, body[position:middle], body[middle:end]))
        position, reach = end, offset + max(n_old, n_new)
    return Journal(Changes(tuple(runs), old_size, new_size), inode, keep) if position == len(body) else None


def state_of(descriptor: int, changes: Changes) -> Literal["old", "new", "between", "foreign"]:
    """Whether a file is unchanged, completely changed, partly changed, or another file.

    It is recognised by its size and by every byte of the changes.
    """
    size = os.fstat(descriptor).st_size
    pairs = [(read_at(descriptor, run.offset, max(len(run.old), len(run.new))), run) for run in changes.runs]
    if size == changes.old_size and all(data[: len(run.old)] == run.old for data, run in pairs):
        return "old"
    if size == changes.new_size and all(data[: len(run.new)] == run.new for data, run in pairs):
        return "new"
    least, most = sorted((changes.old_size, changes.new_size))
    # Between: each byte is the old or the new one. Bytes beyond the old end may be anything: they will be truncated.
    if least <= size <= most and all(
        byte in pair
        for data, run in pairs
        for byte, *pair in zip(data, run.old, run.new)  # noqa: B905 - up to the shortest
    ):
        return "between"
    return "foreign"


def refuse_in_place(path: str, *, hard_links: bool) -> None:
    """Refuse a file that must not be changed in place: a link, one with several names, one that is read-only."""
    try:
        status = os.lstat(system_path(path))
    except (OSError, ValueError) as error:
        raise cannot_read(path, error) from None
    copy = f"Make a copy (transload retag {quoted(path)} -o COPY …)"
    if stat.S_ISLNK(status.st_mode):
        what = "it is a symbolic link, and its target may be shared (in a download cache, for example)"
        raise RetagError(what, where=path, fix=f"{copy}, or name the file itself: {os.path.realpath(path)}")
    if not stat.S_ISREG(status.st_mode):
        raise RetagError("it is not a regular file", where=path)
    if status.st_nlink > 1 and not hard_links:
        what = f"the same file has {status.st_nlink} names (hard links), and would change under all of them"
        raise RetagError(what, where=path, fix=f"{copy}, or allow that: --hard-links (hard_links=True in Python).")
    if not status.st_mode & 0o222:
        FileSource(path).close()  # raises if it cannot be read either
        allow = "attrib -r" if os.name == "nt" else "chmod u+w"
        raise RetagError("it is read-only", where=path, fix=f"{copy}, or allow it: {allow} {quoted(path)}")


def refuse_written_by_others(descriptor: int, path: str) -> None:
    """Refuse a file, open for reading here, that another process has open for writing; only Linux can tell."""
    try:
        from fcntl import F_RDLCK, F_SETLEASE, F_SETSIG, F_UNLCK, fcntl
        from signal import SIGURG
    except ImportError:  # pragma: no cover (Windows, macOS)
        return
    try:
        # If a process opens it meanwhile, we get this signal, which is ignored by default.
        fcntl(descriptor, F_SETSIG, SIGURG)
        fcntl(descriptor, F_SETLEASE, F_RDLCK)  # granted only while no process has it open for writing
        fcntl(descriptor, F_SETLEASE, F_UNLCK)
    except OSError as error:
        if error.errno == EAGAIN:
            fix = "Wait until it is done (lsof shows who)."
            raise BusyFileError("another process has it open for writing", where=path, fix=fix) from None


def _lock(descriptor: int, path: str) -> None:
    """Lock an open file until it is closed; ``BusyFileError`` if another process has locked it."""
    if try_lock(descriptor) is False:
        raise BusyFileError("another process has locked it", where=path, fix="Wait until it is done.")


def _refuse_changed(seen: os.stat_result, now: os.stat_result, path: str) -> None:
    """Refuse a file that was written to, or replaced, since it was read."""
    if any(getattr(seen, name) != getattr(now, name) for name in ("st_dev", "st_ino", "st_size", "st_mtime_ns")):
        raise BusyFileError("it was changed while it was read", where=path, fix="Wait until it is written.")


def apply(path: str, changes: Changes, seen: os.stat_result, *, keep: bool = False) -> None:
    """Change a file in place. ``seen`` is its status when the changes were planned; if that differs now, refuse.

    If anything fails, the file is restored; if that fails too, the journal stays, and the next ``recover`` restores the
    file. With ``keep`` the change can be undone afterwards.
    """
    real = real_path(path)
    try:
        descriptor = os.open(real, _CHANGE)
    except OSError as error:
        raise cannot_write(error, path, outcome=_UNCHANGED) from error
    try:
        _lock(descriptor, path)
        _refuse_changed(seen, os.fstat(descriptor), path)
        try:
            now = os.stat(real)
        except OSError as error:
            raise BusyFileError("it was moved while it was read", where=path) from error
        _refuse_changed(seen, now, path)
        _write_journal(journal_path(path), Journal(changes, seen.st_ino, keep))
        try:
            _put(descriptor, changes)
        except BaseException as error:
            try:
                _put(descriptor, changes.undone())
                _remove(journal_path(path))
            except OSError as again:
                half = "the file is left half changed, and the next transload command on it restores it"
                raise cannot_write(again, path, outcome=half) from error
            if isinstance(error, OSError):
                raise cannot_write(error, path, outcome=_UNCHANGED) from error
            raise
        _finish(path, keep=keep)
    finally:
        os.close(descriptor)


def _write_journal(path: str, journal: Journal) -> None:
    """Write the journal beside the file, and flush it to the disk."""
    unfinished = f"{path}-new"
    try:
        descriptor = os.open(unfinished, _CREATE, 0o600)
        try:
            write_at(descriptor, journal.encoded(), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        _rename(unfinished, path)
    except BaseException as error:
        with suppress(OSError):
            _remove(unfinished, path)
        if isinstance(error, OSError):
            raise cannot_write(error, path, outcome=_UNCHANGED) from error
        raise


def _rename(old: str, new: str) -> None:
    os.replace(old, new)
    flush_directory(os.path.dirname(new))


def _put(descriptor: int, changes: Changes) -> None:
    for run in changes.runs:
        write_at(descriptor, run.new, run.offset)
    os.ftruncate(descriptor, changes.new_size)
    os.fsync(descriptor)


def _finish(path: str, *, keep: bool) -> None:
    """Remove the journal, or keep it to undo the change. Either way, remove the kept journal of an earlier change."""
    journal, undo = journal_path(path), undo_path(path)
    try:
        if keep:
            _rename(journal, undo)
        else:
            _remove(undo, journal)
    except OSError as error:
        done = "the file itself is changed and whole, but its journal stays beside it"
        raise cannot_write(error, journal, outcome=done) from error


RECOVERED = {
    "restored": "an interrupted retag was undone",
    "finished": "an interrupted retag was finished",
    "stale": "the journal of a retag next to it belongs to another file, and was ignored",
}
"""What ``recover`` has done, in words."""


def recover(path: str | os.PathLike[str], *, anywhere: bool = False) -> str:
    """Repair a file that an interrupted change has left partly changed. Without a journal this only checks for one.

    Returns a key of ``RECOVERED``, or an empty string if there was nothing to do. ``anywhere`` also accepts a journal
    that was copied together with its file.
    """
    if not has_journal(path):
        return ""
    path = os.fspath(path)
    try:
        descriptor = os.open(real_path(path), _CHANGE)
        try:
            _lock(descriptor, path)
            journal = read_journal(journal_path(path), descriptor)
            if journal is None or (journal.inode != os.fstat(descriptor).st_ino and not anywhere):
                return "stale"
            state = state_of(descriptor, journal.changes)
            if state == "foreign":
                return "stale"
            if state == "new":
                os.fsync(descriptor)
                _finish(path, keep=journal.keep)
                return "finished"
            if state == "between":
                _put(descriptor, journal.changes.undone())
            _remove(journal_path(path))
            return "restored"
        finally:
            os.close(descriptor)
    except FileNotFoundError:  # the file; or the journal, removed by the process that held the lock
        return ""
    except OSError as error:
        what = f"an earlier retag was interrupted, and the file could not be restored: {error.strerror or error}"
        fix = "Run any transload command on it as a user who may write the file and its folder."
        raise CannotWriteError(what, where=path, fix=fix, errno=error.errno) from error


def read_journal(path: str, descriptor: int) -> Journal | None:
    """The journal of an open file; ``None`` if it is invalid, or not owned by the file's owner, root or this user.

    In a folder that everyone can write to, such as /tmp, an attacker could put a journal that changes the file at will;
    or a pipe of that name, which would block all readers.
    """
    try:
        names = ("O_BINARY", "O_NOFOLLOW", "O_NONBLOCK")
        journal = os.open(path, os.O_RDONLY | sum(getattr(os, name, 0) for name in names))
    except OSError as error:
        if error.errno == ELOOP or os.path.isdir(path):  # a symbolic link; a directory, which Windows does not open
            return None
        raise
    try:
        status = os.fstat(journal)
        trusted = {0, os.fstat(descriptor).st_uid, os.geteuid() if hasattr(os, "geteuid") else 0}
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in trusted:
            return None
        return journal_of(read_at(journal, 0, status.st_size))
    finally:
        os.close(journal)


def stale_journal(path: str, *, tried: bool = False) -> RetagError:
    """The error for a file with a foreign or invalid journal; ``tried`` is whether undo was tried."""
    command = "del" if os.name == "nt" else "rm --"
    remove = f"remove the journal: {command} {quoted(journal_path(path))}"
    if tried:
        what = "the journal beside it belongs to another file, or another version of transload wrote it"
        return RetagError(what, where=path, fix=f"If the file is as it should be, {remove}")
    what = "there is a journal of an interrupted retag, and the file has been replaced or copied since"
    undo = f"If the retag of this file was interrupted, transload retag {quoted(path)} --undo restores it"
    return RetagError(what, where=path, fix=f"{undo}; if it is as it should be, {remove}")


def undo_changes(path: str) -> tuple[Changes, os.stat_result]:
    """The changes that undo the last change of a file; none if it is undone already.

    Raises ``RetagError`` if no journal was kept, or the file was changed since.
    """
    try:
        descriptor = os.open(real_path(path), os.O_RDONLY | getattr(os, "O_BINARY", 0))
    except OSError as error:
        raise cannot_read(path, error) from None
    try:
        kept = undo_path(path)
        journal = read_journal(kept, descriptor) if os.path.lexists(kept) else None
        if journal is None:
            fix = "Only a retag with --keep-undo can be undone."
            raise RetagError("no journal was kept that could undo its last retag", where=path, fix=fix)
        state, seen = state_of(descriptor, journal.changes), os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if state == "old":
        return Changes((), seen.st_size, seen.st_size), seen
    if state != "new":
        raise RetagError("it was changed since its last retag, which can no longer be undone", where=path)
    return journal.changes.undone(), seen


# -- a changed copy


def refuse_target(path: str, out: str) -> None:
    """Refuse to write a copy over anything that exists."""
    with suppress(OSError):
        if os.path.samefile(path, out):
            raise UsageError("the copy would be the file itself", where=out, fix="To change it in place, name no copy.")
    if os.path.lexists(out):
        raise UsageError("the file already exists", where=out, fix="Remove it, or choose another name.")
    refuse_missing_directory(out)


def copy_changed(source: int, out: str, changes: Changes, seen: os.stat_result) -> str:
    """Write a changed copy of an open file under a new name; return how the bytes were copied.

    ``out`` is written completely or not at all. ``seen`` is the status of the file when the changes were planned; if it
    differs after copying, there is no copy.
    """
    moves = any(len(run.old) != len(run.new) and run.offset + len(run.old) < changes.old_size for run in changes.runs)
    with AtomicFile(out) as file:
        target = file.descriptor
        if hasattr(os, "fchmod"):
            os.fchmod(target, os.fstat(source).st_mode & 0o777 | 0o600)
        shared = not moves and _clone(source, target)
        by_kernel = True
        read = written = 0
        for run in (*changes.runs, Change(changes.old_size, b"", b"")):
            if not shared:
                by_kernel = _copy(source, target, read, run.offset, written - read) and by_kernel
            written += run.offset - read
            write_at(target, run.new, written)
            read, written = run.offset + len(run.old), written + len(run.new)
        os.ftruncate(target, changes.new_size)
        _refuse_changed(seen, os.fstat(source), out)
        os.fsync(target)  # so that little time passes between the next check and the rename
        refuse_target("", out)
    return "shared" if shared else "copied by the kernel" if by_kernel else "copied"


def _clone(source: int, target: int) -> bool:
    """Share the blocks of the whole file (reflink): Btrfs, XFS, bcachefs, ZFS."""
    try:
        from fcntl import ioctl

        ioctl(target, _FICLONE, source)
    except (ImportError, OSError):
        return False
    return True


def _copy(source: int, target: int, begin: int, stop: int, shift: int) -> bool:
    """Copy the bytes between two positions to ``shift`` bytes further on; return whether the kernel copied them.

    Holes stay holes if the system can find them.
    """
    kernel, position = hasattr(os, "copy_file_range"), begin
    while position < stop:
        end = stop
        if hasattr(os, "SEEK_DATA"):
            try:
                position = os.lseek(source, position, os.SEEK_DATA)
                end = min(os.lseek(source, position, os.SEEK_HOLE), stop)
            except OSError as error:
                if error.errno == ENXIO:  # only a hole is left
                    break
        while position < end:
            done = 0
            if kernel:
                try:
                    done = os.copy_file_range(source, target, min(end - position, _MOST), position, position + shift)
                except OSError:  # across file systems before Linux 5.3, on some network file systems, on a full disk
                    kernel = False
            if not done:
                data = read_at(source, position, min(_PIECE, end - position))
                if not data:
                    raise OSError(EIO, "the file has become shorter")
                write_at(target, data, position + shift)
                done = len(data)
            position += done
    return kernel
