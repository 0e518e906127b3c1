"""A changed copy: the bytes are shared with the original where the file system can, else copied by the kernel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from errno import EIO, ENXIO
from typing import NamedTuple

from transload.errors import UsageError
from transload.io.journal import Changes, Disk, cannot_write, lock, read_at, refuse_changed, same_file

__all__ = ["copy_changed", "refuse_target"]

_FICLONE = 0x40049409
_PIECE = 16 << 20
_MOST = 1 << 30


class _Part(NamedTuple):
    """Bytes of the one file, and where they go in the other."""

    read: int
    write: int
    length: int


def refuse_target(path: str, out: str) -> None:
    """Refuse to write a copy over anything that exists."""
    if same_file(path, out):
        raise UsageError("the copy would be the file itself", where=out, fix="Leave -o out to change it in place.")
    if os.path.lexists(out):
        raise UsageError("there is a file already", where=out, fix="Remove it, or choose another name.")
    if not os.path.isdir(os.path.dirname(out) or os.curdir):  # noqa: PTH112, PTH120 - pathlib is slow to import
        raise UsageError("there is no such folder", where=os.path.dirname(out))  # noqa: PTH120


def copy_changed(source: int, out: str, changes: Changes, seen: os.stat_result, *, disk: Disk | None = None) -> str:
    """Write a copy of an open file, with changes, under a new name; how the bytes got there.

    It is written beside and renamed: ``out`` is there whole or not at all. ``seen`` is what the file was when the
    changes were made up; if it is not when all is copied, there is no copy.
    """
    disk = disk or Disk()
    folder, name = os.path.split(os.path.abspath(out))  # noqa: PTH100 - as above
    beside = os.path.join(folder, f".{name}.transload-copy")  # noqa: PTH118
    try:
        target = disk.create(beside, os.fstat(source).st_mode & 0o777 | 0o600)
    except OSError as error:
        raise cannot_write(error, out) from error
    try:
        lock(target, out)
        how = _fill(disk, source, target, changes)
        refuse_changed(seen, os.fstat(source), out)
        disk.sync(target)
        refuse_target("", out)
        disk.rename(beside, out)
        disk.sync_folder(folder)
    except BaseException as error:
        with suppress(OSError):
            disk.remove(beside)
        if isinstance(error, OSError):
            raise cannot_write(error, out, changed="no copy was made") from error
        raise
    finally:
        os.close(target)
    return how


def _fill(disk: Disk, source: int, target: int, changes: Changes) -> str:
    """All bytes of the new file."""
    moved = sum(len(run.new) - len(run.old) for run in changes.runs)
    if changes.old_size + moved != changes.new_size or _shifts(changes):
        return _fill_shifted(disk, source, target, changes)
    how = "shared" if _clone(source, target) else _copy(disk, source, target, _Part(0, 0, changes.old_size))
    for run in changes.runs:
        disk.write(target, run.new, run.offset)
    disk.cut(target, changes.new_size)
    return how


def _shifts(changes: Changes) -> bool:
    """Whether a change in the middle makes what follows it move."""
    return any(len(run.old) != len(run.new) and run.offset + len(run.old) < changes.old_size for run in changes.runs)


def _fill_shifted(disk: Disk, source: int, target: int, changes: Changes) -> str:
    how, read, written = "copied", 0, 0
    for run in changes.runs:
        how = _copy(disk, source, target, _Part(read, written, run.offset - read))
        written += run.offset - read
        disk.write(target, run.new, written)
        read, written = run.offset + len(run.old), written + len(run.new)
    how = _copy(disk, source, target, _Part(read, written, changes.old_size - read))
    disk.cut(target, changes.new_size)
    return how


def _clone(source: int, target: int) -> bool:
    """Share the blocks of a whole file: Btrfs, XFS, bcachefs, ZFS."""
    try:
        from fcntl import ioctl

        ioctl(target, _FICLONE, source)
    except (ImportError, OSError):
        return False
    return True


def _copy(disk: Disk, source: int, target: int, part: _Part) -> str:
    """Copy bytes that there are; holes stay holes."""
    kernel = hasattr(os, "copy_file_range")
    shift = part.write - part.read
    for start, end in _extents(source, part.read, part.read + part.length):
        position = start
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
                disk.write(target, data, position + shift)
                done = len(data)
            position += done
    return "copied by the kernel" if kernel else "copied"


def _extents(source: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Where a file has bytes, between two positions; all of it where the system does not tell."""
    if not hasattr(os, "SEEK_DATA"):
        yield start, end
        return
    while start < end:
        try:
            data = os.lseek(source, start, os.SEEK_DATA)
            hole = os.lseek(source, data, os.SEEK_HOLE)
        except OSError as error:
            if error.errno != ENXIO:  # which says that there is nothing but a hole
                yield start, end
            return
        if data >= end:
            return
        yield data, min(hole, end)
        start = hole
