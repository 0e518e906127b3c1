"""The records of a checkpoint beside its storages: those of torch 2.7 and later, which all since 1.6 can read."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from zlib import crc32

from transload.formats.zip_writer import Record
from transload.io.pool import cores

__all__ = ["ROOT", "closing_records", "opening_records", "threads_for"]

ROOT = b"archive"
"""The folder of all records. torch has taken the name of the file since 1.13, so that a copy under another name was
another file, and told the first name."""

_ALL = (1 << 64) - 1
_LITTLE = 4 << 20  # bytes from which threads are worth starting
_MAX_THREADS = 8


def opening_records(data: bytes, alignment: int) -> Iterator[Record]:
    """What comes before the storages."""
    for name, content in (
        (b"data.pkl", data),
        (b".format_version", b"1"),
        (b".storage_alignment", b"%d" % alignment),
        (b"byteorder", sys.byteorder.encode()),
    ):
        yield Record(name, len(content), content)


def closing_records(checksums: Sequence[int], origin: tuple[bytes, bytes]) -> Iterator[Record]:
    """What comes after them; ``checksums`` are of all records so far, ``origin`` is one more.

    The origin is not part of the id: equal contents have equal ids.
    """
    version = b"3\n"
    known = serialization_id([*checksums, crc32(version)])
    if origin[1]:
        yield Record(origin[0], len(origin[1]), origin[1])
    yield Record(b"version", len(version), version)
    yield Record(b".data/serialization_id", len(known), known)


def serialization_id(checksums: Sequence[int]) -> bytes:
    """Two numbers of 64 bits in 20 digits each: one for the names, one for the contents.

    The second is the one torch would compute. The first it makes from the order of a hash table of its own; here the
    names are known by their number.
    """
    content = 0
    for checksum in checksums:
        if checksum:
            content ^= (checksum + 0x9E3779B9 + (content << 6 & _ALL) + (content >> 2)) & _ALL
    name = int.from_bytes(blake2b(b"%d" % len(checksums), digest_size=8).digest(), "little")
    return b"%020d%020d" % (name, content)


def threads_for(nbytes: int) -> int:
    """Threads for the checksums of so many bytes, beside the one that writes."""
    count = min(cores() - 1, _MAX_THREADS)
    return count if nbytes >= _LITTLE and count else 0
