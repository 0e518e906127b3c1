"""Memory by its address: views, copies, page-aligned buffers, huge pages."""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache
from typing import Any

from transload.errors import DoesNotFitError

PAGE = 4096  # ``O_DIRECT`` needs positions, lengths and addresses that are multiples of this
_HUGE = 2 << 20
_LITTLE = 4 << 20  # a smaller block is not worth the call, and may be part of the heap
_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
# Python's default is a shared mapping, which hardly ever gets huge pages.
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
_WRITABLE = 0x200  # PyBUF_WRITE

_view = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)


def memory_at(address: int, nbytes: int) -> memoryview:
    """A writable view of memory. The memory must outlive the view."""
    view: memoryview = _view(address, nbytes, _WRITABLE)
    return view


def copy(target: int, source: int, nbytes: int) -> None:
    """Copy between addresses, without the GIL."""
    libc().memmove(target, source, nbytes)


def is_equal(first: int, second: int, nbytes: int) -> bool:
    """Compare the bytes at two addresses, without the GIL."""
    return not libc().memcmp(first, second, nbytes)


class Pages:
    """Page-aligned memory, in huge pages where the system has them. It lives as long as this object.

    A forked child does not inherit it: with copy-on-write the parent might get new pages, while a device still copies
    from the old ones.
    """

    def __init__(self, nbytes: int, *, huge: bool = True) -> None:
        self.nbytes = nbytes
        try:
            self._map = mmap.mmap(-1, nbytes + _HUGE, **_PRIVATE)
        except OSError as error:
            raise DoesNotFitError(f"there is no memory for a buffer of {nbytes:,} bytes: {error.strerror}") from error
        self._first: Any = ctypes.c_char.from_buffer(self._map)
        address = ctypes.addressof(self._first)
        self.address = (address + _HUGE - 1) // _HUGE * _HUGE
        if sys.platform == "linux":
            libc().madvise(self.address, nbytes, _MADV_DONTFORK)
            if huge:
                libc().madvise(self.address, nbytes, _MADV_HUGEPAGE)


def huge_pages_pay(nbytes: int, root: str = "") -> bool:
    """Whether asking for huge pages makes fresh memory of this size faster.

    It does if the system gives them only on request (``madvise``), and has enough free blocks of that size. Otherwise
    it would first have to compact memory, which takes longer than using small pages.
    """
    try:
        with open(f"{root}/sys/kernel/mm/transparent_hugepage/enabled", encoding="ascii") as file:
            if "[madvise]" not in file.read():
                return False
        with open(f"{root}/proc/buddyinfo", encoding="ascii") as file:
            free = 0  # bytes in blocks of at least a huge page, from the table of free blocks by size
            for line in file:
                blocks = ((int(count), PAGE << order) for order, count in enumerate(line.split()[4:]))
                free += sum(count * size for count, size in blocks if size >= _HUGE)
            return free >= nbytes
    except (OSError, ValueError):
        return False


def advise_huge_pages(address: int, nbytes: int) -> None:
    """Ask for huge pages, wherever one is entirely inside some fresh memory."""
    if nbytes >= _LITTLE and sys.platform == "linux":
        begin = (address + _HUGE - 1) // _HUGE * _HUGE
        end = (address + nbytes) // _HUGE * _HUGE
        libc().madvise(begin, end - begin, _MADV_HUGEPAGE)


@cache
def libc() -> Any:
    """The C library, with the argument types of the functions used here."""
    library = ctypes.CDLL(None if sys.platform != "win32" else "msvcrt")
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.memmove.argtypes = library.memcmp.argtypes = (address, address, size)
    if hasattr(library, "madvise"):
        library.madvise.argtypes = (address, size, number)
        library.mmap.argtypes, library.mmap.restype = (address, size, number, number, number, ctypes.c_long), address
        library.munmap.argtypes = (address, size)
    if hasattr(library, "sync_file_range"):
        library.sync_file_range.argtypes = (number, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return library
