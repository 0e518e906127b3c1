"""Every call that changes something on a disk, in one place, so that a test can cut the power before any of them."""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = ["Disk", "read_at"]

_READ = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_CHANGE = os.O_RDWR | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


class Disk:
    """The file system, as far as retagging changes it."""

    def open(self, path: str) -> int:
        """Open an existing file to be changed."""
        return os.open(path, _CHANGE)

    def create(self, path: str, mode: int) -> int:
        """Open an empty file: a new one, or what is there cut to nothing."""
        return os.open(path, _CHANGE | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0), mode)

    def write(self, descriptor: int, data: bytes, offset: int) -> None:
        """Write all of ``data`` at ``offset``."""
        view = memoryview(data)
        while view:
            done = _pwrite(descriptor, view, offset)
            view, offset = view[done:], offset + done

    def cut(self, descriptor: int, size: int) -> None:
        """Set the length of a file."""
        os.ftruncate(descriptor, size)

    def sync(self, descriptor: int) -> None:
        """Return when everything written is on the disk."""
        os.fsync(descriptor)

    def sync_folder(self, folder: str) -> None:
        """Return when the names in a folder are on the disk, where the system has such a thing."""
        with suppress(OSError):  # Windows opens no folders; some network file systems flush none
            descriptor = os.open(folder or os.curdir, _READ)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def rename(self, old: str, new: str) -> None:
        """Give a file a name, which another may have had."""
        os.replace(old, new)  # noqa: PTH105 - pathlib costs ten milliseconds to import

    def remove(self, path: str) -> None:
        """Take a name away; it does no harm if there is no such name."""
        with suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108 - as above


if hasattr(os, "pwrite"):

    def _pwrite(descriptor: int, view: memoryview, offset: int) -> int:
        return os.pwrite(descriptor, view, offset)
else:  # pragma: no cover (Windows)

    def _pwrite(descriptor: int, view: memoryview, offset: int) -> int:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.write(descriptor, view)


def read_at(descriptor: int, offset: int, count: int) -> bytes:
    """The bytes of an open file, fewer at its end."""
    parts: list[bytes] = []
    while count > 0 and (part := _pread(descriptor, count, offset)):
        parts.append(part)
        offset, count = offset + len(part), count - len(part)
    return b"".join(parts)


if hasattr(os, "pread"):

    def _pread(descriptor: int, count: int, offset: int) -> bytes:
        return os.pread(descriptor, count, offset)
else:  # pragma: no cover (Windows)

    def _pread(descriptor: int, count: int, offset: int) -> bytes:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, count)
