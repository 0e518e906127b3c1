"""Memory by its address: to read into, to copy, to take from the system in pages, to have in huge ones."""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache
from typing import Any

from transload.errors import DoesNotFitError

PAGE = 4096
"""What reading past the page cache wants positions, lengths and addresses to be multiples of."""

_HUGE = 2 << 20
_LITTLE = 4 << 20  # memory below this is not worth the call, and may lie among the heap's small things
_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
# What Python maps without being told is shared, and shared memory is hardly ever had in huge pages.
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
_WRITABLE = 0x200  # PyBUF_WRITE

_view = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)


def view(address: int, nbytes: int) -> memoryview:
    """Memory as something to read into. It must live longer than the view."""
    made: memoryview = _view(address, nbytes, _WRITABLE)
    return made


def copy(target: int, source: int, nbytes: int) -> None:
    """Copy between addresses; other threads run meanwhile."""
    libc().memmove(target, source, nbytes)


def is_equal(first: int, second: int, nbytes: int) -> bool:
    """Whether the bytes at two addresses are equal; other threads run meanwhile."""
    return not libc().memcmp(first, second, nbytes)


class Pages:
    """Memory that begins where a page does, in huge ones where the system has them. It lives as long as this does.

    A child process does not have it: were it to share the pages, the next to write would get others in their place,
    while a device goes on fetching from the old ones.
    """

    def __init__(self, nbytes: int, *, huge: bool = True) -> None:
        self.nbytes = nbytes
        try:
            self._map = mmap.mmap(-1, nbytes + _HUGE, **_PRIVATE)
        except OSError as error:
            raise DoesNotFitError(f"there is no memory for a buffer of {nbytes:,} bytes: {error.strerror}") from error
        self._held: Any = ctypes.c_char.from_buffer(self._map)
        address = ctypes.addressof(self._held)
        self.address = (address + _HUGE - 1) // _HUGE * _HUGE
        if sys.platform == "linux":
            libc().madvise(self.address, nbytes, _MADV_DONTFORK)
            if huge:
                libc().madvise(self.address, nbytes, _MADV_HUGEPAGE)


def huge_pages_pay(nbytes: int, root: str = "") -> bool:
    """Whether fresh memory of this size is had faster in huge pages, if they are asked for.

    They are where the system gives them to those who ask (where it gives them to all there is nothing to do), and has
    enough free blocks of that size. Without those it would move other memory about to make some, which takes longer
    than the small pages would have.
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


def in_huge_pages(address: int, nbytes: int) -> None:
    """Ask for huge pages in fresh memory: whole ones inside it only."""
    if nbytes >= _LITTLE:
        begin = (address + _HUGE - 1) // _HUGE * _HUGE
        end = (address + nbytes) // _HUGE * _HUGE
        libc().madvise(begin, end - begin, _MADV_HUGEPAGE)


@cache
def libc() -> Any:
    """The functions of C on memory, with the types of their arguments."""
    library = ctypes.CDLL(None if sys.platform != "win32" else "msvcrt")
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.memmove.argtypes = library.memcmp.argtypes = (address, address, size)
    if hasattr(library, "madvise"):
        library.madvise.argtypes = (address, size, number)
        library.mmap.argtypes, library.mmap.restype = (address, size, number, number, number, ctypes.c_long), address
        library.munmap.argtypes = (address, size)
    return library
