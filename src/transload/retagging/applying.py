"""Changes made to a file, so that it is never lost: journal, write, flush, forget the journal. And what undoes them."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from errno import ELOOP

from transload.errors import CannotReadError, CannotWriteError, RetagError
from transload.retagging.changes import Changes
from transload.retagging.disk import Disk, read_at
from transload.retagging.guard import cannot_write, lock, refuse_changed, refuse_replaced
from transload.retagging.journal import Journal, journal_of, state_of
from transload.retagging.names import Names, names_of

__all__ = ["apply", "recover", "stale_journal", "undo_changes"]

_PRIVATE = 0o600
_READ = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_BINARY", "O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK"))


def apply(path: str, changes: Changes, seen: os.stat_result, *, keep: bool = False, disk: Disk | None = None) -> Names:
    """Change a file in place. ``seen`` is what it was when the changes were made up; if it is not, it is refused.

    If anything goes wrong the file is put back as it was; if not even that can be done, the journal stays and the
    next ``recover`` does it.
    """
    disk = disk or Disk()
    names = names_of(path)
    try:
        descriptor = disk.open(names.path)
    except OSError as error:
        raise cannot_write(error, path) from error
    try:
        lock(descriptor, path)
        refuse_changed(seen, os.fstat(descriptor), path)
        refuse_replaced(seen, names.path)
        _write_journal(disk, names, Journal(changes, seen.st_ino, keep))
        _write(disk, names, descriptor, changes, path)
        _finish(disk, names, keep=keep)
    finally:
        os.close(descriptor)
    return names


def _write_journal(disk: Disk, names: Names, journal: Journal) -> None:
    """Put the journal beside the file, and onto the disk."""
    try:
        descriptor = disk.create(names.unfinished, _PRIVATE)
        try:
            disk.write(descriptor, journal.encoded(), 0)
            disk.sync(descriptor)
        finally:
            os.close(descriptor)
        disk.rename(names.unfinished, names.journal)
        disk.sync_folder(names.folder)
    except BaseException as error:
        with suppress(OSError):
            disk.remove(names.unfinished)
            disk.remove(names.journal)
        if isinstance(error, OSError):
            raise cannot_write(error, names.journal) from error
        raise


def _write(disk: Disk, names: Names, descriptor: int, changes: Changes, path: str) -> None:
    """Make the changes, or take them back."""
    try:
        _put(disk, descriptor, changes)
    except BaseException as error:
        try:
            _put(disk, descriptor, changes.undone())
            disk.remove(names.journal)
            disk.sync_folder(names.folder)
        except OSError as again:
            left = "the file is left half changed, and the next transload command on it puts it back"
            raise cannot_write(again, path, changed=left) from error
        if isinstance(error, OSError):
            raise cannot_write(error, path) from error
        raise


def _put(disk: Disk, descriptor: int, changes: Changes) -> None:
    for run in changes.runs:
        disk.write(descriptor, run.new, run.offset)
    disk.cut(descriptor, changes.new_size)
    disk.sync(descriptor)


def _finish(disk: Disk, names: Names, *, keep: bool) -> None:
    """Forget the journal, or keep it as what undoes the change. What undid an earlier change no longer fits."""
    try:
        if keep:
            disk.rename(names.journal, names.undo)
        else:
            disk.remove(names.undo)
            disk.remove(names.journal)
        disk.sync_folder(names.folder)
    except OSError as error:
        done = "the file itself is changed and whole, but its journal stays beside it"
        raise cannot_write(error, names.journal, changed=done) from error


def recover(path: str | os.PathLike[str], disk: Disk | None = None, *, anywhere: bool = False) -> str:
    """Put right what an interrupted change has left; what was done.

    ``restored``: the file is as it was before. ``finished``: it was changed already. ``stale``: the journal is not that
    of this file, and both are left alone. Empty: there was nothing to do. ``anywhere`` also believes the journal of a
    file that was copied since, together with it.
    """
    disk, path = disk or Disk(), os.fspath(path)
    names = names_of(path)
    if not os.path.lexists(names.journal):
        return ""
    try:
        descriptor = disk.open(names.path)
        try:
            lock(descriptor, path)
            return _put_right(disk, names, descriptor, anywhere=anywhere)
        finally:
            os.close(descriptor)
    except FileNotFoundError:  # the file; or the journal, removed by who held the lock
        return ""
    except OSError as error:
        what = f"{error.strerror or error}; a retag of it was interrupted, and it cannot be put right"
        fix = "Who may write the file and its folder can: any transload command on it does."
        raise CannotWriteError(what, where=path, fix=fix, errno=error.errno) from error


def _put_right(disk: Disk, names: Names, descriptor: int, *, anywhere: bool) -> str:
    journal = _read_journal(names.journal, descriptor)
    if journal is None or (journal.inode != os.fstat(descriptor).st_ino and not anywhere):
        return "stale"
    state = state_of(descriptor, journal.changes)
    if state == "foreign":
        return "stale"
    if state == "new":
        disk.sync(descriptor)
        _finish(disk, names, keep=journal.keep)
        return "finished"
    if state == "between":
        _put(disk, descriptor, journal.changes.undone())
    disk.remove(names.journal)
    disk.sync_folder(names.folder)
    return "restored"


def _read_journal(path: str, descriptor: int) -> Journal | None:
    """The journal of an open file, ``None`` if it is none, or that of somebody who has no say over the file.

    In a folder that all may write to, such as /tmp, a stranger could leave one that changes the file as he likes; or
    a pipe of that name, for which everybody would wait.
    """
    try:
        journal = os.open(path, _READ)
    except OSError as error:
        if error.errno == ELOOP:  # a symbolic link
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
    """What to say of a file whose journal is that of another, or no journal; ``tried`` is whether undo was."""
    from shlex import quote

    remove = f"remove the journal: rm -- {quote(names_of(path).journal)}"
    if tried:
        what = "what lies beside it is not the journal of this file, or of a version of transload that is not this one"
        return RetagError(what, where=path, fix=f"If the file is as it should be, {remove}")
    return RetagError(
        "beside it lies the journal of an interrupted retag, and the file has been replaced or copied since",
        where=path,
        fix=f"If it is the one that was interrupted, transload retag {quote(path)} --undo puts it back; "
        f"if it is as it should be, {remove}",
    )


def undo_changes(path: str) -> tuple[Changes, os.stat_result]:
    """What would undo the last change of a file; nothing if it is undone already.

    An error where nothing was kept, or the file is no longer the one that was left.
    """
    names = names_of(path)
    try:
        descriptor = os.open(names.path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    except OSError as error:
        raise CannotReadError(error.strerror or str(error), where=path, errno=error.errno) from None
    try:
        journal = _read_journal(names.undo, descriptor) if os.path.lexists(names.undo) else None
        if journal is None:
            fix = "Only a retag with --keep-undo can be undone."
            raise RetagError("nothing was kept that would undo its last retag", where=path, fix=fix)
        state, seen = state_of(descriptor, journal.changes), os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if state == "old":
        return Changes((), seen.st_size, seen.st_size), seen
    if state != "new":
        raise RetagError("it was changed since its last retag, which can no longer be undone", where=path)
    return journal.changes.undone(), seen
