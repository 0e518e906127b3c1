"""A changed copy: the bytes are shared with the original where the file system can, else copied by the kernel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from errno import EIO, ENXIO

from transload.errors import UsageError
from transload.io.atomic import AtomicFile
from transload.io.journal import Changes, Disk, read_at, refuse_changed, same_file

__all__ = ["copy_changed", "refuse_target"]

_FICLONE = 0x40049409
_PIECE = 16 << 20
_MOST = 1 << 30


def refuse_target(path: str, out: str) -> None:
    """Refuse to write a copy over anything that exists."""
    if same_file(path, out):
        raise UsageError("the copy would be the file itself", where=out, fix="Leave -o out to change it in place.")
    if os.path.lexists(out):
        raise UsageError("there is a file already", where=out, fix="Remove it, or choose another name.")
    if not os.path.isdir(os.path.dirname(out) or os.curdir):  # noqa: PTH112, PTH120 - pathlib is slow to import
        raise UsageError("there is no such folder", where=os.path.dirname(out))  # noqa: PTH120


def copy_changed(source: int, out: str, changes: Changes, seen: os.stat_result) -> str:
    """Write a copy of an open file, with changes, under a new name; how the bytes were copied.

    ``out`` is there whole or not at all. ``seen`` is the state of the file when the changes were planned; if it is
    another when all is copied, there is no copy.
    """
    with AtomicFile(out) as file:
        target = file.descriptor
        if hasattr(os, "fchmod"):
            os.fchmod(target, os.fstat(source).st_mode & 0o777 | 0o600)
        how = _fill(source, target, changes)
        refuse_changed(seen, os.fstat(source), out)
        os.fsync(target)  # so that little time passes between the next line and the renaming
        refuse_target("", out)
    return how


def _fill(source: int, target: int, changes: Changes) -> str:
    """Write all bytes of the new file."""
    disk = Disk()
    moves = any(len(run.old) != len(run.new) and run.offset + len(run.old) < changes.old_size for run in changes.runs)
    grown = sum(len(run.new) - len(run.old) for run in changes.runs)
    how, read, written = "copied", 0, 0
    if not moves and changes.old_size + grown == changes.new_size:  # all other bytes keep their places
        how = "shared" if _clone(source, target) else _copy(source, target, 0, changes.old_size)
        for run in changes.runs:
            disk.write(target, run.new, run.offset)
    else:
        for run in changes.runs:
            _copy(source, target, read, run.offset, written - read)
            written += run.offset - read
            disk.write(target, run.new, written)
            read, written = run.offset + len(run.old), written + len(run.new)
        how = _copy(source, target, read, changes.old_size, written - read)
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


def _copy(source: int, target: int, begin: int, stop: int, shift: int = 0) -> str:
    """Copy the bytes between two positions to where they are ``shift`` further; holes stay holes."""
    kernel = hasattr(os, "copy_file_range")
    for start, end in _extents(source, begin, stop):
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
                Disk().write(target, data, position + shift)
                done = len(data)
            position += done
    return "copied by the kernel" if kernel else "copied"


def _extents(source: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """The parts of a file that are not holes, between two positions; all of it where the system cannot say."""
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
