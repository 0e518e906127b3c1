"""Compare every record with the checksum it was saved with: what torch itself never does."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from zlib import crc32, decompressobj
from zlib import error as zlib_error

from transload.checkpoint import Record, Storage
from transload.findings import Problem
from transload.read.source import Source

__all__ = ["verify_records"]

_CHUNK = 4 << 20


def verify_records(source: Source, records: Iterable[Record], storages: Iterable[Storage]) -> list[Problem]:
    """A problem for each record whose bytes do not have the checksum the directory states.

    Records are read in chunks by as many threads as there are cores: the checksum is computed outside the interpreter's
    lock.
    """
    todo = _within([r for r in records if r.offset is not None and r.crc32 is not None], source.size)
    users = {storage.record: storage.tensors for storage in storages}
    actual = _checksums(source, todo)
    return [
        Problem("crc-mismatch", record.name, _detail(record, value, users.get(record.name, ())))
        for record, value in zip(todo, actual, strict=True)
        if value != record.crc32
    ]


def _checksums(source: Source, records: list[Record]) -> list[int | None]:
    if sum(record.stored for record in records) < 2 * _CHUNK:  # not worth starting threads
        return [_checksum(source, record) for record in records]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return list(pool.map(lambda record: _checksum(source, record), records))


def _within(records: list[Record], budget: int) -> list[Record]:
    """The records, smallest first, as long as they fit into the file together, with the largest to be begun first.

    A hundred thousand records that lie over one another would be read a hundred thousand times; they are a finding of
    their own.
    """
    out: list[Record] = []
    for record in sorted(records, key=lambda r: r.stored):
        budget -= record.stored
        if budget < 0:
            break
        out.append(record)
    return out[::-1]


def _detail(record: Record, value: int | None, tensors: tuple[str, ...]) -> str:
    found = "its compressed data is damaged"
    if value is not None:
        found = f"checksum {value:08x}, saved with {record.crc32:08x}"
    shown = ", ".join(name or "the root" for name in tensors[:4])
    more = f" and {len(tensors) - 4} more" if len(tensors) > 4 else ""
    return f"{found}; holds {shown}{more}" if tensors else found


def _checksum(source: Source, record: Record) -> int | None:
    """CRC-32 of a record's unpacked bytes; ``None`` if it cannot be unpacked."""
    value = 0
    try:
        for piece in _inflated(source, record) if record.method == 8 else _chunks(source, record):
            value = crc32(piece, value)
    except zlib_error:
        return None
    return value


def _chunks(source: Source, record: Record) -> Iterator[bytes]:
    for start in range(0, record.stored, _CHUNK):
        yield source.read((record.offset or 0) + start, min(_CHUNK, record.stored - start))


def _inflated(source: Source, record: Record) -> Iterator[bytes]:
    """A deflated record in pieces, never more than it declares."""
    unpack, left = decompressobj(-15), record.size
    for packed in _chunks(source, record):
        piece = packed
        while left > 0:
            most = min(_CHUNK, left)
            plain = unpack.decompress(piece, most)
            yield plain
            left -= len(plain)
            piece = unpack.unconsumed_tail
            if not piece and len(plain) < most:  # a full piece may have more behind it, also when all input is taken
                break
