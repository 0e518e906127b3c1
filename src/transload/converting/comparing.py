"""Whether a target holds, byte for byte, what was read: every conversion is read back before it gets its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from transload.errors import ConvertError

if TYPE_CHECKING:
    from transload.converting.entries import Data, Entry
    from transload.io.sources import Source
    from transload.tensors import Content

__all__ = ["Back", "compare", "damaged_records", "whole_checksum"]

_PIECE = 1 << 20  # two of them fit into the cache of a core
_TASK = 64 << 20


class Back(NamedTuple):
    """Where the bytes of an entry lie in the target, as somebody finds them who reads it."""

    entry: Entry
    source: Source
    offset: int


def compare(places: list[Back], data: Data, where: str, tell: Callable[[int], None] | None) -> None:
    """Read both sides again and compare every byte; ``ConvertError`` if any is another one."""
    from threading import Lock

    from transload.io.pool import each, threads

    lock = Lock()

    def check(task: _Task) -> None:
        if not _same(task):
            raise ConvertError(f"{task.place.entry.name} was not written as it was read", where=where, fix=_AGAIN)
        if tell is not None:
            with lock:
                tell(task.nbytes)

    total = sum(place.entry.nbytes for place in places)
    tasks = (task for place in places for task in _tasks(place, data))
    each(tasks, lambda: check, threads() if total >= _TASK else 1)


_AGAIN = "Try again; if it stays so, the memory or the disk of this machine is failing."


class _Task(NamedTuple):
    place: Back
    data: Data
    start: int
    nbytes: int


def _tasks(place: Back, data: Data) -> Iterator[_Task]:
    """Parts that lie in files on both sides can be compared by several threads; others only as a whole."""
    nbytes = place.entry.nbytes
    if nbytes <= _TASK or data.run(place.entry) is None:
        yield _Task(place, data, 0, nbytes)
        return
    for start in range(0, nbytes, _TASK):
        yield _Task(place, data, start, min(_TASK, nbytes - start))


def _same(task: _Task) -> bool:
    place, data, start, nbytes = task
    run = data.run(place.entry)
    if run is not None:
        source = data.content.open_file(run.file)
        return all(
            source.read(run.offset + at, count) == place.source.read(place.offset + at, count)
            for at, count in _cuts(start, nbytes)
        )
    at = place.offset
    for piece in data.pieces(place.entry, _PIECE):
        if place.source.read(at, len(piece)) != bytes(piece):
            return False
        at += len(piece)
    return at - place.offset == nbytes


def _cuts(start: int, nbytes: int) -> Iterator[tuple[int, int]]:
    for at in range(start, start + nbytes, _PIECE):
        yield at, min(_PIECE, start + nbytes - at)


def whole_checksum(entry: Entry, data: Data) -> int | None:
    """The checksum that the source has of exactly the bytes of an entry; ``None`` if it has none of just these."""
    run, storage = data.run(entry), data.content.storage(entry.tensor)
    if run is None or storage is None or (storage.offset, storage.nbytes) != (run.offset, run.nbytes):
        return None
    return storage.crc32


def damaged_records(content: Content, storages: set[str]) -> list[str]:
    """What is wrong with the records of some storages, by the checksums they were saved with."""
    from transload.checkpoint import Record
    from transload.formats.verify import verify_records

    known = {record.name: record for record in content.checkpoint.records}
    found: list[str] = []
    by_file: dict[str, list[Record]] = {}
    used = [each for each in content.checkpoint.storages if each.id in storages and each.crc32 is not None]
    for each in used:
        record = known.get(each.record) if not each.file else None
        if record is None and each.offset is not None and not each.compressed:
            record = Record(each.record, each.offset, each.nbytes, each.nbytes, each.crc32)
        if record is not None:
            by_file.setdefault(each.file, []).append(record)
    for file, records in by_file.items():
        once = list({record.name: record for record in records}.values())
        found += [problem.detail for problem in verify_records(content.open_file(file), once, used)]
    return found
