"""The page cache of one file: how much of it is cached, and how to fill or drop it."""

from __future__ import annotations

import ctypes
import mmap
import os

CHUNK = 16 << 20


def cached(path: str) -> float | None:
    """The fraction of a file in the page cache, from 0 to 1; None if the system does not report it."""
    try:
        mincore = ctypes.CDLL(None, use_errno=True).mincore
    except (AttributeError, OSError):
        return None
    fd = os.open(path, os.O_RDONLY)
    try:
        with mmap.mmap(fd, 0, access=mmap.ACCESS_COPY) as mapped:
            pages = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
            first = ctypes.c_char.from_buffer(mapped)
            failed = mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(mapped)), pages)
            del first  # or the mapping could not be closed
    finally:
        os.close(fd)
    return None if failed else sum(bytes(pages).translate(_LOWEST)) / len(pages)


_LOWEST = bytes(value & 1 for value in range(256))  # the other bits of mincore are not defined


def drop(path: str) -> None:
    """Remove a file from the page cache, after a flush, because only pages on the disk can be removed."""
    if not hasattr(os, "posix_fadvise"):
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def warm(path: str) -> None:
    """Read a file unless all of it is in the page cache."""
    if cached(path) == 1:
        return
    buffer = bytearray(CHUNK)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
