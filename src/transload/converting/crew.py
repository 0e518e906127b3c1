"""The threads that pour a file: each sums a chunk, writes it, reads it back and compares."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from errno import EINVAL
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple

from transload.errors import ConvertError

__all__ = ["CHUNK", "Chunk", "Crew", "Part"]

CHUNK = 4 << 20
_CHUNKS = 4  # beside those that are being written: one is filled, the others wait
_THREADS = 4  # more than cores, perhaps: most of the time they wait for the disk
_PAST_THE_CACHE = 64 << 20  # bytes from which it is worth it; smaller files may as well stay in memory
_PAGE = 4096
_AGAIN = "Try again; if it stays so, the memory or the disk of this machine is failing."


class Part(NamedTuple):
    """Bytes of an entry in a chunk."""

    entry: int
    start: int
    nbytes: int


class Chunk:
    """Memory, what of which file position is in it, and the checksums of its parts."""

    def __init__(self, nbytes: int) -> None:
        from transload.io.memory import Pages, view

        self.pages = Pages(nbytes)
        self.view = view(self.pages.address, nbytes)
        self.clear(0)

    def clear(self, offset: int) -> None:
        """Make it ready to be filled with what goes to a place in the file."""
        self.offset = offset
        self.filled = 0
        self.parts: list[Part] = []
        self.sums: list[int] = []


class Crew:
    """Threads that write chunks. Left with an error, they stop as soon as they can."""

    def __init__(self, descriptor: int, size: int, where: str) -> None:
        self._descriptor, self._where = descriptor, where
        count = _THREADS if size > CHUNK else 1
        self._chunks = [Chunk(min(CHUNK, -(-max(size, 1) // _PAGE) * _PAGE)) for _ in range(_CHUNKS + count)]
        self._free: SimpleQueue[Chunk | BaseException] = SimpleQueue()
        self._full: SimpleQueue[Chunk | None] = SimpleQueue()
        self._count = count
        self._threads: list[Thread] = []
        self._direct = size >= _PAST_THE_CACHE and _set_direct(descriptor, on=True)
        self._stopped = False
        self._tail = (0, b"")

    def __enter__(self) -> None:
        for _ in range(self._count):
            thread = Thread(target=self._work, name="transload pour", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more to be had
                break
            self._threads.append(thread)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stopped = kind is not None
        for _thread in self._threads:
            self._full.put(None)
        for thread in self._threads:
            thread.join()
        self._free = SimpleQueue()  # as below: errors that nobody has taken out
        if self._direct:
            _set_direct(self._descriptor, on=False)

    def first(self) -> Chunk:
        """The chunk to begin with."""
        for chunk in self._chunks[1:]:
            self._free.put(chunk)
        return self._chunks[0]

    def give(self, chunk: Chunk) -> None:
        """Let a chunk be written."""
        if self._threads:
            self._full.put(chunk)
        else:
            self._do(chunk, Chunk(len(chunk.view)))
            self._free.put(chunk)

    def free(self) -> Chunk:
        """A chunk that can be filled; the error of a thread, if there was one."""
        found = self._free.get()
        if isinstance(found, BaseException):
            try:
                raise found
            finally:
                del found  # an error that held itself by its frames would hold the chunks, too
        return found

    def finish(self) -> Iterable[Chunk]:
        """All chunks, when they are written."""
        done = [self.free() for _ in self._chunks]
        offset, data = self._tail
        if data:
            _set_direct(self._descriptor, on=False)
            os.pwrite(self._descriptor, data, offset)
            self._judge(same=os.pread(self._descriptor, len(data), offset) == data)
        return done

    def _work(self) -> None:
        try:
            again = Chunk(len(self._chunks[0].view))
            while (chunk := self._full.get()) is not None:
                if self._stopped:
                    return
                self._do(chunk, again)
                self._free.put(chunk)
        except BaseException as error:  # noqa: BLE001 - raised again by the one who waits
            self._free.put(error)

    def _do(self, chunk: Chunk, again: Chunk) -> None:
        from transload.io.checksums import fastest_crc32

        compute = fastest_crc32()
        chunk.sums = [compute(chunk.view[at : at + nbytes], 0) for _, at, nbytes in chunk.parts]
        whole = chunk.filled
        if self._direct and whole % _PAGE:  # the end of the file, which is no whole page: last, and as others write
            whole -= whole % _PAGE
            self._tail = (chunk.offset + whole, bytes(chunk.view[whole : chunk.filled]))
        self._write(chunk, whole)
        self._read(again, chunk.offset, whole)
        self._judge(same=_is_equal(chunk, again, whole))

    def _judge(self, *, same: bool) -> None:
        if not same:
            raise ConvertError("it was not written as it was read", where=self._where, fix=_AGAIN)

    def _write(self, chunk: Chunk, nbytes: int) -> None:
        done = 0
        while done < nbytes:
            done += self._write_some(chunk.view[done:nbytes], chunk.offset + done)

    def _write_some(self, data: memoryview, offset: int) -> int:
        return self._or_through_the_cache(lambda: os.pwrite(self._descriptor, data, offset))

    def _read(self, again: Chunk, offset: int, nbytes: int) -> None:
        done = 0
        while done < nbytes:
            count = self._read_some(again.view[done:nbytes], offset + done)
            if not count:
                raise ConvertError("it is shorter than what was written", where=self._where, fix=_AGAIN)
            done += count

    def _read_some(self, into: memoryview, offset: int) -> int:
        return self._or_through_the_cache(lambda: os.preadv(self._descriptor, [into], offset))

    def _or_through_the_cache(self, call: Callable[[], int]) -> int:
        """What a call returns; without O_DIRECT where the file system said that it can be done, and it cannot.

        All threads have the one file, and any of them may have turned it off since: so it is never asked who has.
        """
        try:
            return call()
        except OSError as error:
            if error.errno != EINVAL:
                raise
        _set_direct(self._descriptor, on=False)
        self._direct = False  # not before: a chunk that ends within a page must not be written past the cache
        return call()


def _set_direct(descriptor: int, *, on: bool) -> bool:
    """Whether a file is now written past the page cache."""
    if sys.platform != "linux":
        return False
    import fcntl

    try:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return True


def _is_equal(first: Chunk, second: Chunk, nbytes: int) -> bool:
    import ctypes

    if sys.platform == "win32":
        return bytes(first.view[:nbytes]) == bytes(second.view[:nbytes])
    compare = ctypes.CDLL(None).memcmp
    compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return not compare(first.pages.address, second.pages.address, nbytes)
