"""Memory by its address: views, copies, page-aligned buffers, huge pages."""

from __future__ import annotations

import ctypes
import mmap
import sys
from _thread import allocate_lock
from collections.abc import Iterable
from functools import cache
from time import thread_time
from typing import Any

from transload.errors import DoesNotFitError

PAGE = 4096  # ``O_DIRECT`` needs positions, lengths and addresses that are multiples of this
_HUGE = 2 << 20
_TRIED = 8 << 20
_COMPARED = 32 << 20  # of huge pages, some of which may come late
_LITTLE = 1 << 20  # a smaller block may be part of the heap, whose other pages are not ours
_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_MADV_NOHUGEPAGE = 15
_MADV_WIPEONFORK = 18  # since Linux 4.14
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; an older kernel refuses it
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

    In a forked child it is all zeros: with copy-on-write the parent might get new pages, while a device still copies
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
            # Before Linux 4.14, a child has nothing there; if it then frees this object, it unmaps what came there.
            if libc().madvise(self.address, nbytes, _MADV_WIPEONFORK):
                libc().madvise(self.address, nbytes, _MADV_DONTFORK)
            if huge:
                libc().madvise(self.address, nbytes, _MADV_HUGEPAGE)


def huge_pages_pay(nbytes: int, root: str = "") -> bool:
    """Whether asking for huge pages makes fresh memory of this size faster.

    It does if the system gives them only on request (``madvise``), and has enough free blocks of that size. Otherwise
    it would first have to compact memory, which takes longer than using small pages.
    """
    try:
        with open(f"{root}/sys/kernel/mm/transparent_hugepage/enabled", encoding="utf-8") as file:
            if "[madvise]" not in file.read():
                return False
        with open(f"{root}/proc/buddyinfo", encoding="utf-8") as file:
            free = 0  # bytes in blocks of at least a huge page, from the table of free blocks by size
            for line in file:
                blocks = ((int(count), PAGE << order) for order, count in enumerate(line.split()[4:]))
                free += sum(count * size for count, size in blocks if size >= _HUGE)
            return free >= nbytes
    except (OSError, ValueError):
        return False


class FreshPages:
    """Provides fresh memory with pages; with huge ones, if asked to, unless they come more slowly than small ones.

    Usually they come faster, since there are fewer. But a virtual machine with free page reporting (WSL 2, Firecracker)
    has returned free blocks of that size to its host, and waits for them; a system with fragmented memory compacts it
    first. Both take the time of the thread that needs the pages. So the first bytes get small pages, to compare.
    """

    def __init__(self, *, huge: bool = False) -> None:
        self.huge = huge
        """Whether huge pages are asked for."""
        self._small = 0.0  # seconds per byte
        self._untried = _TRIED if huge else 0
        self._nbytes = 0
        self._seconds = 0.0
        self._advised: list[tuple[int, int]] = []
        self._lock = allocate_lock()

    def advise(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Ask for huge pages in blocks of an address and a length each, of which neighbours count as one.

        A huge page may then contain the end of one block and the begin of the next, with the allocator's bytes in
        between. The blocks are those that are populated next, in that order.
        """
        if not self.huge or sys.platform != "linux":
            return
        left = []
        for address, nbytes in blocks:
            small = min(nbytes, self._untried)
            self._untried -= small
            if nbytes - small >= _LITTLE:
                left.append((address + small, nbytes - small))
        spans: list[list[int]] = []
        for address, nbytes in sorted(left):
            if spans and address - spans[-1][1] <= 2 * PAGE:
                spans[-1][1] = address + nbytes
            else:
                spans.append([address, address + nbytes])
        for begin, end in spans:
            first, last = (begin + _HUGE - 1) // _HUGE * _HUGE, end // _HUGE * _HUGE
            if first < last and self.huge:
                self._advised.append((first, last - first))
                libc().madvise(first, last - first, _MADV_HUGEPAGE)

    def populate(self, address: int, nbytes: int) -> None:
        """Have the system provide the pages in one call, instead of one by one when they are written.

        It is a hint: pages that are there stay as they are, and where it fails they come one by one.
        """
        if nbytes < _LITTLE or sys.platform != "linux":
            return
        begin, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        before = thread_time()
        failed = libc().madvise(begin, end - begin, _MADV_POPULATE_WRITE)
        if self.huge and not failed:
            seconds = thread_time() - before
            with self._lock:
                self._compare(nbytes, seconds)

    def _compare(self, nbytes: int, seconds: float) -> None:
        self._nbytes += nbytes
        self._seconds += seconds
        if self._nbytes < (_COMPARED if self._small else _TRIED):
            return
        took, self._nbytes, self._seconds = self._seconds / self._nbytes, 0, 0.0
        if not self._small:
            self._small = took
        elif took > self._small:
            self.huge = False
            for address, length in self._advised:
                libc().madvise(address, length, _MADV_NOHUGEPAGE)


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
