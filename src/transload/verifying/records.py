"""Every record of every file of a checkpoint, read and compared with its checksum where it has one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, NamedTuple

from transload.checkpoint import Record
from transload.findings import Problem
from transload.formats.verify import Lost, checksums, mismatch

if TYPE_CHECKING:
    from transload.checkpoint import Storage
    from transload.content import Content

__all__ = ["Key", "Region", "Sums", "key_of", "regions", "sum_regions"]

Key = tuple[str, str, int]
"""File, name and position: what tells a record from all others of a checkpoint."""


class Region(NamedTuple):
    """A file, and the records in it that lie somewhere."""

    file: str
    records: tuple[Record, ...]


class Sums(NamedTuple):
    """What came of comparing: how many were, how many have no checksum, and which are not what was saved."""

    compared: int
    unsummed: int
    bad: dict[Key, Problem]


def regions(content: Content) -> list[Region]:
    """The records of each file: those of its archive, or the storages themselves where there is none."""
    known = {name: checkpoint.records for name, checkpoint in content.parts}
    storages: dict[str, list[Storage]] = {name: [] for name in known}
    for storage in content.checkpoint.storages:
        storages.setdefault(storage.file, []).append(storage)
    out = []
    for file, held in storages.items():
        records = known.get(file) or _archived(content, file) or _as_records(held)
        out.append(Region(file, tuple(record for record in records if record.offset is not None)))
    return out


def _archived(content: Content, file: str) -> Iterable[Record]:
    """The records of a rank's file. One of distributed checkpoints is a row of archives, and told by its storages."""
    from transload.formats.zip_index import read_index, starts_like_zip

    if content.checkpoint.format not in ("deepspeed", "megatron") or file.endswith(".distcp"):
        return ()
    source = content.open_file(file)
    return read_index(source).records.values() if starts_like_zip(source) else ()


def _as_records(storages: Iterable[Storage]) -> Iterable[Record]:
    return [Record(each.record or each.key, each.offset, each.stored, each.stored, each.crc32) for each in storages]


def sum_regions(
    content: Content, every: Iterable[Region], skip: Collection[Key], tell: Callable[[int], None] | None = None
) -> Sums:
    """Read and compare all records but those to ``skip``, which somebody else does."""
    compared = unsummed = 0
    bad: dict[Key, Problem] = {}
    for file, records in every:
        compared += sum(record.crc32 is not None for record in records)
        unsummed += sum(record.crc32 is None and record.size > 0 for record in records)
        todo = [record for record in records if key_of(file, record) not in skip] if skip else records
        for index, value in checksums(content.open_file(file), todo, tell).items():
            record = todo[index]
            if value != record.crc32 and (record.crc32 is not None or isinstance(value, Lost)):
                bad[key_of(file, record)] = mismatch(record, value)
    return Sums(compared, unsummed, bad)


def key_of(file: str, record: Record) -> Key:
    """The key of a record."""
    return file, record.name, record.offset or 0
