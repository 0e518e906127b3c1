"""The bytes of tensors on their way from the source to the target.

``Data`` gives the bytes of an ``Entry`` as the target has them. There are two ways into a file: a ``Writer`` goes from
front to back, and lets the kernel copy what the source holds as it is; ``pour`` writes a file and reads it back in one
pass, with several threads. ``compare`` reads back what was not poured. ``check_source`` compares the checksums that the
source was saved with.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from errno import EINVAL
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from transload.converting.casting import cast
from transload.dtypes import itemsize
from transload.errors import ConvertError, OverflowRefusedError
from transload.io.sources import FileSource
from transload.tensors.content import Content, ContentError, Run

if TYPE_CHECKING:
    from transload.checkpoint import Tensor

__all__ = ["CAN_POUR", "Data", "Descriptor", "Entry", "Location", "Writer", "check_source", "compare", "pour"]

_PIECE = 4 << 20
_DIFFERENT = "the bytes read back differ from those written"
_TRY_AGAIN = "Try again; if it happens again, the memory or the disk of this machine is failing."

Progress = Callable[[int], None]


class Entry(NamedTuple):
    """A tensor of the target."""

    name: str
    tensor: Tensor
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes it takes in the target."""
        return itemsize(self.dtype, self.tensor.numel)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.tensor.shape


class Data:
    """The bytes of entries; ``infinite`` counts finite numbers that became infinite, by the names of their tensors."""

    def __init__(self, content: Content, *, allow_inf: bool) -> None:
        self.content = content
        self._allow_inf = allow_inf
        self.infinite: dict[str, int] = {}

    def run(self, entry: Entry) -> Run | None:
        """Where exactly these bytes lie in a file of the source, if they do."""
        return None if entry.dtype != entry.tensor.dtype else self.content.run(entry.tensor)

    def pieces(self, entry: Entry, size: int = _PIECE) -> Iterator[Any]:
        """The bytes, in pieces that are valid until the next is asked for."""
        pieces = self.content.pieces(entry.tensor, size)
        if entry.dtype == entry.tensor.dtype:
            yield from pieces
            return
        count = 0
        for piece in pieces:
            made, infinite = cast(piece, entry.tensor.dtype, entry.dtype)
            count += infinite
            yield made
        if not count:
            return
        self.infinite[entry.name] = count
        if not self._allow_inf:
            what = f"{count:,} of the {entry.tensor.numel:,} values of {entry.name} are too large for {entry.dtype}"
            wider = "bfloat16 or float32" if entry.dtype == "float16" else "float64"
            fix = f"Choose {wider}, or add --allow-inf to store them as infinities."
            raise OverflowRefusedError(what, where=self.content.checkpoint.path, fix=fix)


# -- from front to back

_GATHERED = 1 << 20  # small writes are put together up to here
_LARGE = 256 << 10  # from here on the kernel copies; below, the call costs more than the copy
_AT_ONCE = 64 << 20  # between two copies of this size progress is reported, and a signal is handled


class Writer:
    """Writes a file by its descriptor; ``copied`` counts the bytes that the kernel copied by itself."""

    def __init__(self, descriptor: int, progress: Progress | None) -> None:
        from transload.io.atomic import SystemFile

        self._descriptor = descriptor
        self._sink = SystemFile(descriptor, push=True)
        self._progress = progress or (lambda _: None)
        self._gathered: list[bytes] = []
        self._nbytes = 0
        self._kernel_copies = hasattr(os, "copy_file_range")
        self.copied = 0
        self.written = 0

    def write(self, data: Any) -> None:
        """Write bytes, which may change afterwards; small ones are gathered as copies until ``flush``."""
        if len(data) >= _GATHERED:
            self.flush()
            self._sink.write([data])
        else:
            self._gathered.append(bytes(data))
            self._nbytes += len(data)
            if self._nbytes >= _GATHERED:
                self.flush()
        self._count(len(data))

    def flush(self) -> None:
        """Write what was gathered."""
        if self._gathered:
            self._sink.write([b"".join(self._gathered)])
            self._gathered, self._nbytes = [], 0

    def put(self, entry: Entry, data: Data) -> None:
        """Write the bytes of an entry."""
        before = self.written
        run = data.run(entry) if entry.nbytes >= _LARGE and self._kernel_copies else None
        source: Any = data.content.open_file(run.file) if run is not None else None
        if run is not None and hasattr(source, "descriptor"):
            done = self._copy(source, run)
            while done < run.nbytes:  # what the kernel did not copy
                piece = source.read(run.offset + done, min(_GATHERED, run.nbytes - done))
                if not piece:
                    raise ContentError(f"the file became shorter while it was being read: {source.name}")
                self.write(piece)
                done += len(piece)
            return
        for piece in data.pieces(entry):
            self.write(piece)
        if self.written - before != entry.nbytes:
            raise ContentError(f"{entry.name} has {self.written - before:,} bytes, not {entry.nbytes:,}")

    def _copy(self, source: Any, run: Run) -> int:
        """Let the kernel copy what it can, and return how many bytes that was."""
        self.flush()
        done = 0
        while done < run.nbytes:
            try:
                count = os.copy_file_range(
                    source.descriptor, self._descriptor, min(_AT_ONCE, run.nbytes - done), run.offset + done
                )
            except OSError:  # between file systems, or on a network; a full disk fails again in write()
                self._kernel_copies = False
                break
            if not count:
                break
            done += count
            self.copied += count
            self._count(count)
        return done

    def _count(self, nbytes: int) -> None:
        self.written += nbytes
        self._progress(nbytes)


class Descriptor(FileSource):
    """A file that was just written, read by its descriptor; closed by the one who has opened it."""

    def __init__(self, descriptor: int, name: str) -> None:
        self.name = name
        self.size = os.fstat(descriptor).st_size
        self._fd = descriptor
        self._lock = Lock()

    def close(self) -> None:
        """Leave it open."""


# -- written and read back in one pass
#
# One thread fills chunks in the order of the file; others sum, write, read and compare them, in any order. On Linux the
# bytes go to the disk and come back from it past the page cache, where the file system allows it: what is compared is
# then what the disk holds, no flush is left to wait for, and no other file is pushed out of memory.

CHUNK = 4 << 20
_SPARE_CHUNKS = 4  # besides those that are being written: one is filled, the others wait
_THREADS = 4  # perhaps more than cores: most of the time they wait for the disk
_PAST_THE_CACHE = 64 << 20  # bytes from which it is worth it; smaller files may as well stay in memory
_PAGE = 4096
CAN_POUR = hasattr(os, "pwrite") and hasattr(os, "preadv")


def pour(
    descriptor: int,
    head: bytes,
    entries: list[Entry],
    data: Data,
    *,
    where: str,
    progress: Progress | None = None,
) -> list[int]:
    """Write a file of ``head`` and the bytes of entries; the CRC-32 of each entry.

    ``ConvertError`` if the file does not hold what was written.
    """
    from transload.io.checksums import combined

    pool = ChunkPool(descriptor, len(head) + sum(entry.nbytes for entry in entries), where)
    with pool:
        filler = _Filler(pool, progress)
        filler.put(head, -1)
        for index, entry in enumerate(entries):
            filler.put_entry(index, entry, data)
        filler.finish()
    checksums: list[int | None] = [None] * len(entries)
    for index, _, nbytes, checksum in sorted(filler.sums):
        before = checksums[index]
        checksums[index] = checksum if before is None else combined(before, checksum, nbytes)
    return [checksum or 0 for checksum in checksums]


class Chunk:
    """A buffer, and the place in the file where it goes. ``parts`` are index of the entry, start and bytes of each."""

    def __init__(self, nbytes: int) -> None:
        from transload.io.memory import Pages, view

        self.pages = Pages(nbytes)
        self.view = view(self.pages.address, nbytes)
        self.clear(0)

    def clear(self, offset: int) -> None:
        """Empty it, for what goes to a place in the file."""
        self.offset = offset
        self.filled = 0
        self.parts: list[tuple[int, int, int]] = []
        self.sums: list[int] = []


class _Filler:
    """Fills chunks one after the other; ``sums`` are entry, place in the file, bytes and checksum of each part."""

    def __init__(self, pool: ChunkPool, progress: Progress | None) -> None:
        self._pool = pool
        self._progress = progress
        self._chunk = pool.free()
        self.sums: list[tuple[int, int, int, int]] = []

    def put_entry(self, index: int, entry: Entry, data: Data) -> None:
        """Add the bytes of an entry; straight into the chunk, if a file holds them as they are."""
        run = data.run(entry)
        done = 0
        if run is None:
            for piece in data.pieces(entry):
                self.put(piece, index)
                done += len(piece)
            if done != entry.nbytes:
                raise ContentError(f"{entry.name} has {done:,} bytes, not {entry.nbytes:,}")
            return
        source = data.content.open_file(run.file)
        while done < run.nbytes:
            count = source.readinto(run.offset + done, self._room(run.nbytes - done))
            if not count:
                raise ContentError("the file became shorter while it was being read", where=source.name)
            self._add(index, count)
            done += count

    def put(self, data: Any, index: int) -> None:
        """Add bytes of the entry with this index; -1 for none."""
        view = memoryview(data)
        while view:
            room = self._room(len(view))
            room[:] = view[: len(room)]
            self._add(index, len(room))
            view = view[len(room) :]

    def _room(self, nbytes: int) -> memoryview:
        chunk = self._chunk
        if chunk.filled == len(chunk.view):
            end = chunk.offset + chunk.filled
            self._pool.give(chunk)
            chunk = self._chunk = self._pool.free()
            self._collect(chunk)
            chunk.clear(end)
        return chunk.view[chunk.filled : chunk.filled + nbytes]

    def _add(self, index: int, nbytes: int) -> None:
        if index >= 0:
            self._chunk.parts.append((index, self._chunk.filled, nbytes))
        self._chunk.filled += nbytes

    def _collect(self, chunk: Chunk) -> None:
        """Take the checksums of a chunk that was written."""
        for (index, start, nbytes), checksum in zip(chunk.parts, chunk.sums, strict=True):
            self.sums.append((index, chunk.offset + start, nbytes, checksum))
        if self._progress is not None and chunk.filled:
            self._progress(chunk.filled)

    def finish(self) -> None:
        """Write the last chunk, and wait for all."""
        self._pool.give(self._chunk)
        for chunk in self._pool.finish():
            self._collect(chunk)


class ChunkPool:
    """Threads that sum, write, read back and compare chunks. Left with an error, they stop as soon as they can."""

    def __init__(self, descriptor: int, size: int, where: str) -> None:
        self._descriptor, self._where = descriptor, where
        self._count = _THREADS if size > CHUNK else 1
        self._nbytes = min(CHUNK, -(-max(size, 1) // _PAGE) * _PAGE)
        self._free: SimpleQueue[Chunk | BaseException] = SimpleQueue()
        self._full: SimpleQueue[Chunk | None] = SimpleQueue()
        self._chunks = _SPARE_CHUNKS + self._count
        for _ in range(self._chunks):
            self._free.put(Chunk(self._nbytes))
        self._threads: list[Thread] = []
        self._direct = size >= _PAST_THE_CACHE and _set_direct(descriptor, on=True)
        self._stopped = False
        self._tail = (0, b"")

    def __enter__(self) -> None:
        for _ in range(self._count):
            thread = Thread(target=self._work, name="transload pour", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no more threads
                break
            self._threads.append(thread)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stopped = kind is not None
        for _thread in self._threads:
            self._full.put(None)
        for thread in self._threads:
            thread.join()
        self._free = SimpleQueue()  # errors that nobody has taken out would hold the chunks
        if self._direct:
            _set_direct(self._descriptor, on=False)

    def free(self) -> Chunk:
        """A chunk that can be filled; the error of a thread, if there was one."""
        chunk = self._free.get()
        if isinstance(chunk, BaseException):
            try:
                raise chunk
            finally:
                del chunk  # an error that holds itself by its frames would hold the chunks, too
        return chunk

    def give(self, chunk: Chunk) -> None:
        """Have a chunk written."""
        if self._threads:
            self._full.put(chunk)
        else:
            self._process(chunk, Chunk(self._nbytes))
            self._free.put(chunk)

    def finish(self) -> list[Chunk]:
        """All chunks, when they are written."""
        done = [self.free() for _ in range(self._chunks)]
        offset, data = self._tail
        if data:
            _set_direct(self._descriptor, on=False)
            os.pwrite(self._descriptor, data, offset)
            self._require(os.pread(self._descriptor, len(data), offset) == data, _DIFFERENT)
        return done

    def _work(self) -> None:
        try:
            again = Chunk(self._nbytes)
            while (chunk := self._full.get()) is not None:
                if self._stopped:
                    return
                self._process(chunk, again)
                self._free.put(chunk)
        except BaseException as error:  # noqa: BLE001 - raised again by the one who waits
            self._free.put(error)

    def _process(self, chunk: Chunk, again: Chunk) -> None:
        """Sum a chunk, write it, read it into another and compare."""
        from transload.io.checksums import fastest_crc32

        compute = fastest_crc32()
        chunk.sums = [compute(chunk.view[at : at + nbytes], 0) for _, at, nbytes in chunk.parts]
        whole = chunk.filled
        if self._direct and whole % _PAGE:  # the end of the file, less than a page: written last, through the cache
            whole -= whole % _PAGE
            self._tail = (chunk.offset + whole, bytes(chunk.view[whole : chunk.filled]))
        done = 0
        while done < whole:
            done += self._retry_cached(os.pwrite, chunk.view[done:whole], chunk.offset + done)
        done = 0
        while done < whole:
            count = self._retry_cached(os.preadv, [again.view[done:whole]], chunk.offset + done)
            self._require(count > 0, "the file is shorter than what was written")
            done += count
        self._require(_is_equal(chunk, again, whole), _DIFFERENT)

    def _require(self, condition: bool, what: str) -> None:
        if not condition:
            raise ConvertError(what, where=self._where, fix=_TRY_AGAIN)

    def _retry_cached(self, call: Callable[[int, Any, int], int], buffer: Any, offset: int) -> int:
        """Read or write; without O_DIRECT where the file system accepts the flag and then refuses the call.

        All threads share the file, and any of them may have turned the flag off meanwhile, so nobody asks who did.
        """
        try:
            return call(self._descriptor, buffer, offset)
        except OSError as error:
            if error.errno != EINVAL:
                raise
        _set_direct(self._descriptor, on=False)
        self._direct = False  # not before: a chunk that ends within a page must not be written past the cache
        return call(self._descriptor, buffer, offset)


def _set_direct(descriptor: int, *, on: bool) -> bool:
    """Turn writing past the page cache on or off; whether that was done."""
    if sys.platform != "linux":
        return False
    import fcntl

    with suppress(OSError):
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
        return True
    return False


def _is_equal(first: Chunk, second: Chunk, nbytes: int) -> bool:
    import ctypes

    if sys.platform == "win32":
        return bytes(first.view[:nbytes]) == bytes(second.view[:nbytes])
    compare = ctypes.CDLL(None).memcmp
    compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return not compare(first.pages.address, second.pages.address, nbytes)


# -- read back

_COMPARED = 1 << 20  # bytes at once: two of these fit into the cache of a core
_TASK = 64 << 20  # bytes that one thread compares


class Location(NamedTuple):
    """Where a reader of the target finds the bytes of an entry: ``read`` takes an offset and a count."""

    entry: Entry
    read: Callable[[int, int], bytes]
    offset: int


def compare(locations: list[Location], data: Data, where: str, progress: Progress | None) -> None:
    """Read the source and the target again and compare every byte; ``ConvertError`` if any differs."""
    from transload.io.pool import each, threads

    lock = Lock()

    def tasks() -> Iterator[tuple[Location, int, int]]:
        for location in locations:
            nbytes = location.entry.nbytes
            # What lies in files on both sides can be cut into parts for several threads.
            step = _TASK if nbytes > _TASK and data.run(location.entry) is not None else max(nbytes, 1)
            for start in range(0, max(nbytes, 1), step):
                yield location, start, min(step, nbytes - start)

    def check(task: tuple[Location, int, int]) -> None:
        location, start, nbytes = task
        if not _is_same(location, data, start, nbytes):
            raise ConvertError(f"{location.entry.name}: {_DIFFERENT}", where=where, fix=_TRY_AGAIN)
        if progress is not None:
            with lock:
                progress(nbytes)

    total = sum(location.entry.nbytes for location in locations)
    each(tasks(), lambda: check, threads() if total >= _TASK else 1)


def _is_same(location: Location, data: Data, start: int, nbytes: int) -> bool:
    entry, read, offset = location
    run = data.run(entry)
    if run is not None:
        source = data.content.open_file(run.file)
        for at in range(start, start + nbytes, _COMPARED):
            count = min(_COMPARED, start + nbytes - at)
            if source.read(run.offset + at, count) != read(offset + at, count):
                return False
        return True
    at = offset
    for piece in data.pieces(entry, _COMPARED):
        if read(at, len(piece)) != bytes(piece):
            return False
        at += len(piece)
    return at - offset == nbytes


def check_source(entries: tuple[Entry, ...], carried: Iterable[Tensor], data: Data, checksums: dict[int, int]) -> None:
    """Compare the checksums that the source was saved with; ``ConvertError`` if one is wrong.

    ``checksums`` are those that are known already, by the ``id`` of their entry: these storages are not read again.
    """
    content = data.content
    tensors = [*(entry.tensor for entry in entries), *carried]
    unchecked = {each.storage for tensor in tensors for each in (tensor, *tensor.parts) if each.storage}
    damaged: list[str] = []
    for entry in entries:
        if id(entry) not in checksums:
            continue
        run, storage = data.run(entry), content.storage(entry.tensor)
        if run is None or storage is None or (storage.offset, storage.nbytes) != (run.offset, run.nbytes):
            continue  # the source's checksum is not that of just these bytes
        if storage.crc32 is not None:
            unchecked.discard(storage.id)
            if storage.crc32 != checksums[id(entry)]:
                damaged.append(
                    f"checksum {checksums[id(entry)]:08x}, saved with {storage.crc32:08x}; holds {entry.name}"
                )
    damaged += _damaged_records(content, unchecked)
    if damaged:
        what = f"{len(damaged)} of its records are damaged: {damaged[0]}"
        raise ConvertError(what, where=content.checkpoint.path, fix="transload rescue saves what is intact.")


def _damaged_records(content: Content, storages: set[str]) -> list[str]:
    """What is wrong with the records of some storages."""
    from transload.checkpoint import Record
    from transload.formats.verify import verify_records

    known = {record.name: record for record in content.checkpoint.records}
    used = [each for each in content.checkpoint.storages if each.id in storages and each.crc32 is not None]
    by_file: dict[str, dict[str, Record]] = {}
    for each in used:
        record = known.get(each.record) if not each.file else None
        if record is None and each.offset is not None and not each.compressed:
            record = Record(each.record, each.offset, each.nbytes, each.nbytes, each.crc32)
        if record is not None:
            by_file.setdefault(each.file, {})[record.name] = record
    return [
        problem.detail
        for file, records in by_file.items()
        for problem in verify_records(content.open_file(file), list(records.values()), used)
    ]
