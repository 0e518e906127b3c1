"""Compare every record with the checksum it was saved with, which torch itself never does.

All threads take parts of the file in order. The checksum of a large record is combined from those of its parts;
adjacent small records are read together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from threading import Lock
from zlib import crc32
from zlib import error as zlib_error

from transload.checkpoint import Record, Storage
from transload.errors import CannotReadError
from transload.findings import Problem, join_names
from transload.formats.zip import DEFLATED
from transload.frozen import NamedTuple
from transload.io.checksums import combined, fastest_crc32
from transload.io.packed import inflated
from transload.io.pool import each, threads
from transload.io.sources import Source, refuse_fault

_BUFFER = 1 << 20  # stays in the cache of a processor between being read and being summed
_PART = 16 * _BUFFER
_SMALL = 64 << 10
_TINY = 8 << 10  # zlib does not release the GIL for fewer bytes
_ALONE = 8 << 20  # fewer bytes are not worth starting threads

_Task = tuple[int, int, list[tuple[int, int, int]]]
"""Bytes to read (offset, size), and the records in them (offset, size, index): part of one, or several small ones."""


def verify_records(source: Source, records: Iterable[Record], storages: Iterable[Storage]) -> list[Problem]:
    """A problem for each record whose bytes do not have the checksum in the directory."""
    checked = [record for record in records if record.offset is not None and record.crc32 is not None]
    # In a file of several archives, many records have the same name.
    users = {key: one.tensors for one in storages for key in (one.record, (one.record, one.offset))}
    sums = ((checked[index], value) for index, value in checksums(source, checked).items())
    return [
        mismatch(record, value, users.get((record.name, record.offset)) or users.get(record.name, ()))
        for record, value in sums
        if value != record.crc32
    ]


def new_problems(bad: Iterable[Problem], noted: Sequence[Problem]) -> Iterator[Problem]:
    """The problems that the reader of the file has not noted yet: it reads some of the records, too."""
    changed = {problem.where for problem in noted if problem.code == "crc-mismatch"}
    unread = {problem.where for problem in noted if problem.code in ("pickle-unreadable", "record-unreadable")}
    for problem in bad:
        if problem.where not in changed and not (problem.code == "record-unreadable" and problem.where in unread):
            yield problem


class Lost(NamedTuple):
    """Why a record has no checksum, and the code of that problem."""

    why: str
    code: str = "crc-mismatch"


def mismatch(record: Record, value: int | Lost, tensors: tuple[str, ...] = ()) -> Problem:
    """The problem of a record whose bytes have another checksum, or cannot be read."""
    lost = value if isinstance(value, Lost) else Lost(f"checksum {value:08x}, saved with {record.crc32 or 0:08x}")
    detail = f"{lost.why}; holds {join_names([name or 'the root' for name in tensors], 4)}" if tensors else lost.why
    return Problem(lost.code, record.name, detail)


def checksums(
    source: Source, records: Sequence[Record], report_progress: Callable[[int], None] | None = None
) -> dict[int, int | Lost]:
    """The CRC-32 of the unpacked bytes of each record, by its index in the list, in order; or why there is none.

    A large record without a stored checksum is only read, and gets 0. ``report_progress`` is called with the number of
    bytes of each read. If the records together are longer than the file, some are left out: a hundred thousand that
    overlap would be read a hundred thousand times, and overlaps are a problem anyway.
    """
    places = [(offset or 0, stored, index) for index, (_, offset, _, stored, _, _) in enumerate(records)]
    if sum(place[1] for place in places) > source.size:
        places.sort(key=lambda place: place[1])
        reach = accumulate(place[1] for place in places)
        places = [place for place, total in zip(places, reach, strict=True) if total <= source.size]
    places.sort()
    sums: dict[int, int | Lost] = {}
    parts: list[tuple[int, int, int, int]] = []
    lost: list[tuple[int, int, Lost]] = []
    lock = Lock()

    def add_progress(count: int) -> None:
        if report_progress is not None:
            with lock:
                report_progress(count)

    def sum_part(offset: int, nbytes: int, index: int, buffer: memoryview) -> None:
        record, compute, value, size = records[index], fastest_crc32(), 0, 0
        try:
            if record.method == DEFLATED:
                for piece in inflated(source, offset, nbytes, record.size):
                    value, size = crc32(piece, value), size + len(piece)
                add_progress(nbytes)
                if size != record.size:  # torch refuses one that is shorter; a longer one has another checksum
                    short = Lost(f"it inflates to {size} of {record.size} bytes", "record-unreadable")
                    lost.append((index, offset, short))
            else:
                for at in range(0, nbytes, _BUFFER):
                    count = source.readinto(offset + at, buffer[: min(_BUFFER, nbytes - at)])
                    value = compute(buffer[:count], value) if record.crc32 is not None else 0
                    add_progress(count)
            parts.append((index, offset, nbytes, value))
        except zlib_error:
            lost.append((index, offset, Lost("its compressed data is damaged")))
        except CannotReadError as error:
            refuse_fault(error, source.name)
            lost.append((index, offset, Lost(f"it cannot be read: {error.what}", "record-unreadable")))

    def worker() -> Callable[[_Task], None]:
        buffer = memoryview(bytearray(_BUFFER))  # each thread has its own

        def do(task: _Task) -> None:
            begin, nbytes, contained = task
            _, size, index = contained[0]
            if size > _SMALL or records[index].method == DEFLATED:
                sum_part(begin, nbytes, index, buffer)
                return
            try:
                data = buffer[: source.readinto(begin, buffer[:nbytes])]
            except CannotReadError as error:  # perhaps only one of them
                refuse_fault(error, source.name)
                for start, size, index in contained:
                    sum_part(start, size, index, buffer)
                return
            for start, size, index in contained:
                sums[index] = crc32(data[start - begin : start - begin + size])
            add_progress(len(data))

        return do

    shared = sum(place[1] for place in places if place[1] > _TINY)
    each(_tasks(records, places), worker, threads() if shared >= _ALONE and source.pace != "seeking" else 1)
    sums.update(combined(parts))
    sums.update({index: why for index, _, why in sorted(lost, reverse=True)})  # the first reason for each
    return dict(sorted(sums.items()))


def _tasks(records: Sequence[Record], places: list[tuple[int, int, int]]) -> Iterator[_Task]:
    """Each large record, in parts; deflated ones whole, since they cannot be divided; adjacent small ones together.

    A larger gap between small ones is not read: other tasks read the large record there.
    """
    together: list[tuple[int, int, int]] = []
    first = reach = 0
    for place in places:
        start, size, index = place
        if size > _SMALL or records[index].method == DEFLATED:
            step = max(size, 1) if records[index].method == DEFLATED else _PART
            yield from ((start + at, min(step, size - at), [place]) for at in range(0, max(size, 1), step))
            continue
        end = start + size
        if together and (end - first > _BUFFER or start - reach > _SMALL):
            yield (first, reach - first, together)
            together = []
        if not together:
            first = reach = start
        together.append(place)
        reach = max(reach, end)
    if together:
        yield (first, reach - first, together)
