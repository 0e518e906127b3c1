"""Compare every record with the checksum it was saved with: what torch itself never does.

All threads take parts of the file in its order. A large record is summed in parts that are put together; small ones
that lie side by side are read at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Lock
from typing import NamedTuple
from zlib import crc32, decompressobj
from zlib import error as zlib_error

from transload.checkpoint import Record, Storage
from transload.errors import CannotReadError
from transload.findings import Problem
from transload.read.checksum import combined, fastest_crc32
from transload.read.source import Source
from transload.read.threads import each, threads

__all__ = ["Lost", "checksums", "mismatch", "verify_records"]

_BUFFER = 1 << 20  # stays in the cache of a processor between being read and being summed
_PART = 16 * _BUFFER
_SMALL = 64 << 10
_DEFLATED = 8
_ALONE = 8 << 20  # fewer bytes are not worth starting threads


def verify_records(source: Source, records: Iterable[Record], storages: Iterable[Storage]) -> list[Problem]:
    """A problem for each record whose bytes do not have the checksum the directory states."""
    todo = [record for record in records if record.offset is not None and record.crc32 is not None]
    users = {storage.record: storage.tensors for storage in storages}
    found = ((todo[index], value) for index, value in sorted(checksums(source, todo).items()))
    return [mismatch(each, value, users.get(each.name, ())) for each, value in found if value != each.crc32]


class Lost(NamedTuple):
    """Why a record has no checksum, and the code of that problem."""

    why: str
    code: str = "crc-mismatch"


def mismatch(record: Record, value: int | Lost, tensors: tuple[str, ...] = ()) -> Problem:
    """What is wrong with a record whose bytes have another checksum, or cannot be had."""
    shown = ", ".join(name or "the root" for name in tensors[:4])
    more = f" and {len(tensors) - 4} more" if len(tensors) > 4 else ""
    lost = value if isinstance(value, Lost) else Lost(f"checksum {value:08x}, saved with {record.crc32 or 0:08x}")
    detail = f"{lost.why}; holds {shown}{more}" if tensors else lost.why
    return Problem(lost.code, record.name, detail)


def checksums(
    source: Source, records: Sequence[Record], tell: Callable[[int], None] | None = None
) -> dict[int, int | Lost]:
    """CRC-32 of the unpacked bytes of each record, by its place in the list; or why there is none.

    A record without a checksum of its own is only read, and gets 0. ``tell`` is called with numbers of bytes as they
    are read. Records that lie over one another are left out when together they are longer than the file.
    """
    chosen = _within(records, source.size)
    sums = _Sums(source, records, tell)
    many = threads() if sum(records[index].stored for index in chosen) >= _ALONE else 1
    each(_tasks(records, chosen), sums.worker, many)
    return {index: sums.whole(index) for index in chosen}


def _within(records: Sequence[Record], budget: int) -> list[int]:
    """The records, smallest first, as long as they fit into the file together; then in the order of the file.

    A hundred thousand records that lie over one another would be read a hundred thousand times; they are a finding of
    their own.
    """
    out: list[int] = []
    for index in sorted(range(len(records)), key=lambda index: records[index].stored):
        budget -= records[index].stored
        if budget < 0:
            break
        out.append(index)
    return sorted(out, key=lambda index: records[index].offset or 0)


class _Part(NamedTuple):
    """A part of a stored record."""

    record: int
    offset: int
    nbytes: int


class _Batch(NamedTuple):
    """Small records that lie side by side, and the bytes that hold them all."""

    records: list[int]
    offset: int
    nbytes: int


class _Packed(NamedTuple):
    """A deflated record."""

    record: int


_Task = _Part | _Batch | _Packed


def _tasks(records: Sequence[Record], chosen: list[int]) -> Iterator[_Task]:
    """Packed ones first, since none of them can be shared; then all others as they lie."""
    stored = [index for index in chosen if records[index].method != _DEFLATED]
    yield from (_Packed(index) for index in chosen if records[index].method == _DEFLATED)
    for index in stored:
        size, start = records[index].stored, records[index].offset or 0
        if size > _SMALL:
            yield from (_Part(index, start + at, min(_PART, size - at)) for at in range(0, size, _PART))
    yield from _batches(records, [index for index in stored if records[index].stored <= _SMALL])


def _batches(records: Sequence[Record], small: list[int]) -> Iterator[_Batch]:
    held: list[int] = []
    first = reach = 0
    for index in small:
        start = records[index].offset or 0
        end = start + records[index].stored
        if held and end - first > _BUFFER:
            yield _Batch(held, first, reach - first)
            held = []
        if not held:
            first = reach = start
        held.append(index)
        reach = max(reach, end)
    if held:
        yield _Batch(held, first, reach - first)


class _Sums:
    """The sums so far: of each record the parts, by where they begin."""

    def __init__(self, source: Source, records: Sequence[Record], tell: Callable[[int], None] | None) -> None:
        self._source = source
        self._records = records
        self._tell = tell
        self._parts: dict[int, dict[int, tuple[int | Lost, int]]] = {}
        self._lock = Lock()

    def whole(self, index: int) -> int | Lost:
        """The sum of a record."""
        total = 0
        for place, (_, (value, length)) in enumerate(sorted(self._parts.get(index, {}).items())):
            if isinstance(value, Lost):
                return value
            total = combined(total, value, length) if place else value
        return total

    def worker(self) -> Callable[[_Task], None]:
        """What one thread does with a task, in memory of its own."""
        buffer = memoryview(bytearray(_BUFFER))

        def do(task: _Task) -> None:
            if isinstance(task, _Batch):
                self._batch(task, buffer)
            elif isinstance(task, _Part):
                self._enter(task.record, task.offset, self._part(task, buffer), task.nbytes)
            else:
                record = self._records[task.record]
                self._enter(task.record, 0, self._inflated(record), record.size)

        return do

    def _enter(self, record: int, offset: int, value: int | Lost, length: int) -> None:
        with self._lock:
            self._parts.setdefault(record, {})[offset] = value, length

    def _told(self, count: int) -> None:
        if self._tell is not None:
            with self._lock:
                self._tell(count)

    def _part(self, task: _Part, buffer: memoryview) -> int | Lost:
        compute, value = fastest_crc32(), 0
        is_summed = self._records[task.record].crc32 is not None
        try:
            for at in range(0, task.nbytes, _BUFFER):
                count = self._source.readinto(task.offset + at, buffer[: min(_BUFFER, task.nbytes - at)])
                value = compute(buffer[:count], value) if is_summed else 0
                self._told(count)
        except CannotReadError as error:
            return _unreadable(error)
        return value

    def _batch(self, task: _Batch, buffer: memoryview) -> None:
        try:
            held = buffer[: self._source.readinto(task.offset, buffer[: task.nbytes])]
        except CannotReadError:  # one of them, perhaps
            for index in task.records:
                part = _Part(index, self._records[index].offset or 0, self._records[index].stored)
                self._enter(index, 0, self._part(part, buffer), part.nbytes)
            return
        for index in task.records:
            start = (self._records[index].offset or 0) - task.offset
            piece = held[start : start + self._records[index].stored]
            self._enter(index, 0, crc32(piece), len(piece))
        self._told(len(held))

    def _inflated(self, record: Record) -> int | Lost:
        value = 0
        try:
            for piece in _inflated(self._source, record):
                value = crc32(piece, value)
        except zlib_error:
            return Lost("its compressed data is damaged")
        except CannotReadError as error:
            return _unreadable(error)
        self._told(record.stored)
        return value


def _unreadable(error: CannotReadError) -> Lost:
    return Lost(f"it cannot be read: {error.what}", "record-unreadable")


def _inflated(source: Source, record: Record) -> Iterator[bytes]:
    """A deflated record in pieces, never more than it declares."""
    unpack, left = decompressobj(-15), record.size
    for start in range(0, record.stored, _BUFFER):
        piece = source.read((record.offset or 0) + start, min(_BUFFER, record.stored - start))
        while left > 0:
            most = min(_BUFFER, left)
            plain = unpack.decompress(piece, most)
            yield plain
            left -= len(plain)
            piece = unpack.unconsumed_tail
            if not piece and len(plain) < most:  # a full piece may have more behind it, also when all input is taken
                break
