"""Compare every record with the checksum it was saved with: what torch itself never does.

All threads take parts of the file in its order. A large record is summed in parts that are put together; small ones
that lie side by side are read at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from threading import Lock
from typing import NamedTuple
from zlib import crc32
from zlib import error as zlib_error

from transload.checkpoint import Record, Storage
from transload.errors import CannotReadError
from transload.findings import Problem
from transload.io.checksums import combined, fastest_crc32
from transload.io.pool import each, threads
from transload.io.sources import Source, inflated

__all__ = ["Lost", "checksums", "mismatch", "verify_records"]


_BUFFER = 1 << 20  # stays in the cache of a processor between being read and being summed
_PART = 16 * _BUFFER
_SMALL = 64 << 10
_TINY = 8 << 10  # zlib sums fewer bytes without letting other threads run
_DEFLATED = 8
_ALONE = 8 << 20  # fewer bytes are not worth starting threads


def verify_records(source: Source, records: Iterable[Record], storages: Iterable[Storage]) -> list[Problem]:
    """A problem for each record whose bytes do not have the checksum the directory states."""
    todo = [record for record in records if record.offset is not None and record.crc32 is not None]
    users = {storage.record: storage.tensors for storage in storages}
    found = ((todo[index], value) for index, value in checksums(source, todo).items())
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
    """CRC-32 of the unpacked bytes of each record, by its place in the list, in order; or why there is none.

    A large record without a checksum of its own is only read, and gets 0. ``tell`` is called with numbers of bytes as
    they are read. Records that lie over one another are left out when together they are longer than the file.
    """
    places = _within(records, source.size)
    sums = _Sums(source, records, tell)
    shared = sum(place[1] for place in places if place[1] > _TINY)
    each(_tasks(records, places), sums.worker, threads() if shared >= _ALONE else 1)
    return sums.found()


_Place = tuple[int, int, int]
"""Where a record begins, how long it is, and its place in the list: plain, since there may be a hundred thousand."""


def _within(records: Sequence[Record], budget: int) -> list[_Place]:
    """The records in the order of the file; if they do not fit into it together, only the smallest of them, which do.

    A hundred thousand records that lie over one another would be read a hundred thousand times; they are a finding of
    their own.
    """
    places = [(offset or 0, stored, index) for index, (_, offset, _, stored, _, _) in enumerate(records)]
    if sum(place[1] for place in places) > budget:
        places.sort(key=lambda place: place[1])
        reach = accumulate(place[1] for place in places)
        places = [place for place, total in zip(places, reach, strict=True) if total <= budget]
    places.sort()
    return places


class _Part(NamedTuple):
    """A part of a stored record; ``alone`` if it is all of it."""

    record: int
    offset: int
    nbytes: int
    alone: bool = True


class _Batch(NamedTuple):
    """Small records that lie side by side, and the bytes that hold them all."""

    places: list[_Place]
    offset: int
    nbytes: int


class _Packed(NamedTuple):
    """A deflated record."""

    record: int


_Task = _Part | _Batch | _Packed


def _tasks(records: Sequence[Record], places: list[_Place]) -> Iterator[_Task]:
    """Packed ones first, since none of them can be shared; then all others as they lie."""
    packed = {index for index, record in enumerate(records) if record.method == _DEFLATED}
    yield from (_Packed(index) for _, _, index in places if index in packed)
    stored = [place for place in places if place[2] not in packed]
    for start, size, index in stored:
        if size > _SMALL:
            alone = size <= _PART
            yield from (_Part(index, start + at, min(_PART, size - at), alone) for at in range(0, size, _PART))
    yield from _batches([place for place in stored if place[1] <= _SMALL])


def _batches(small: list[_Place]) -> Iterator[_Batch]:
    """Never over a gap that is more than a small record: a large one lies there, which others read."""
    held: list[_Place] = []
    first = reach = 0
    for place in small:
        start = place[0]
        end = start + place[1]
        if held and (end - first > _BUFFER or start - reach > _SMALL):
            yield _Batch(held, first, reach - first)
            held = []
        if not held:
            first = reach = start
        held.append(place)
        reach = max(reach, end)
    if held:
        yield _Batch(held, first, reach - first)


class _Sums:
    """The sums so far: of whole records; of others the parts, where each begins and how long it is."""

    def __init__(self, source: Source, records: Sequence[Record], tell: Callable[[int], None] | None) -> None:
        self._source = source
        self._records = records
        self._tell = tell
        self._whole: list[int | Lost | None] = [None] * len(records)
        self._parts: dict[int, list[tuple[int, int, int | Lost]]] = {}
        self._lock = Lock()

    def found(self) -> dict[int, int | Lost]:
        """All sums, by the place of their record."""
        for index, parts in self._parts.items():
            self._whole[index] = _put_together(sorted(parts))
        return {index: value for index, value in enumerate(self._whole) if value is not None}

    def worker(self) -> Callable[[_Task], None]:
        """What one thread does with a task, in memory of its own."""
        buffer = memoryview(bytearray(_BUFFER))

        def do(task: _Task) -> None:
            if isinstance(task, _Batch):
                self._batch(task, buffer)
            elif isinstance(task, _Part):
                self._enter(task, self._part(task, buffer))
            else:
                self._whole[task.record] = self._inflated(self._records[task.record])

        return do

    def _enter(self, task: _Part, value: int | Lost) -> None:
        if task.alone:
            self._whole[task.record] = value
            return
        with self._lock:
            self._parts.setdefault(task.record, []).append((task.offset, task.nbytes, value))

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
        whole, begin = self._whole, task.offset
        try:
            held = buffer[: self._source.readinto(begin, buffer[: task.nbytes])]
        except CannotReadError:  # one of them, perhaps
            for offset, size, index in task.places:
                whole[index] = self._part(_Part(index, offset, size), buffer)
            return
        for offset, size, index in task.places:
            start = offset - begin
            whole[index] = crc32(held[start : start + size])
        self._told(len(held))

    def _inflated(self, record: Record) -> int | Lost:
        value = 0
        try:
            for piece in inflated(self._source, record.offset or 0, record.stored, record.size):
                value = crc32(piece, value)
        except zlib_error:
            return Lost("its compressed data is damaged")
        except CannotReadError as error:
            return _unreadable(error)
        self._told(record.stored)
        return value


def _put_together(parts: list[tuple[int, int, int | Lost]]) -> int | Lost:
    total = 0
    for place, (_, length, value) in enumerate(parts):
        if isinstance(value, Lost):
            return value
        total = combined(total, value, length) if place else value
    return total


def _unreadable(error: CannotReadError) -> Lost:
    return Lost(f"it cannot be read: {error.what}", "record-unreadable")
