"""Compare every record with the checksum it was saved with: what torch itself never does."""

from __future__ import annotations

import os
from collections.abc import Iterable
from zlib import crc32

from transload.checkpoint import Record, Storage
from transload.findings import Problem
from transload.read.source import Source

__all__ = ["verify_records"]

_CHUNK = 4 << 20


def verify_records(source: Source, records: Iterable[Record], storages: Iterable[Storage]) -> list[Problem]:
    """A problem for each record whose bytes do not have the checksum the directory states.

    Records are read in chunks by as many threads as there are cores: the checksum is computed outside the interpreter's lock.
    """
    from concurrent.futures import ThreadPoolExecutor

    todo = sorted((r for r in records if r.offset is not None and r.crc32 is not None), key=lambda r: -r.stored)
    users = {storage.record: storage.tensors for storage in storages}
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        actual = list(pool.map(lambda record: _checksum(source, record), todo))
    return [
        Problem("crc-mismatch", record.name, _detail(record, value, users.get(record.name, ())))
        for record, value in zip(todo, actual, strict=True)
        if value != record.crc32
    ]


def _detail(record: Record, value: int | None, tensors: tuple[str, ...]) -> str:
    found = "its compressed data is damaged" if value is None else f"checksum {value:08x}, saved with {record.crc32:08x}"
    shown = ", ".join(tensors[:4]) + (f" and {len(tensors) - 4} more" if len(tensors) > 4 else "")
    return f"{found}; holds {shown}" if tensors else found


def _checksum(source: Source, record: Record) -> int | None:
    """CRC-32 of a record's unpacked bytes; ``None`` if it cannot be unpacked."""
    from zlib import decompressobj
    from zlib import error as zlib_error

    value = 0
    left = record.size
    unpack = decompressobj(-15) if record.method == 8 else None
    for start in range(0, record.stored, _CHUNK):
        piece = source.read((record.offset or 0) + start, min(_CHUNK, record.stored - start))
        while piece and left > 0:
            try:
                plain = piece if unpack is None else unpack.decompress(piece, min(_CHUNK, left))
            except zlib_error:
                return None
            value, left = crc32(plain, value), left - len(plain)
            piece = b"" if unpack is None else unpack.unconsumed_tail
    return value
