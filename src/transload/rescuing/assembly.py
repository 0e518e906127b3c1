"""Files that do not exist yet, assembled from parts of others; and an archive laid out as torch lays it out.

Every byte of an archive written by torch that is not inside a record follows from the names, sizes and checksums of
its records. So an undamaged copy can be made as soon as those are known, and wherever the copy differs from the file,
the file is damaged.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from struct import pack_into
from typing import BinaryIO, NamedTuple, cast
from zlib import crc32

from transload.formats.zip import ALIGNMENT, central_entry, descriptor, end_of_archive, local_header
from transload.io.sources import BytesSource, ObjectSource, Source, copied
from transload.rescuing.result import Certainty, LostRecord, Repair

__all__ = [
    "HAS_DESCRIPTOR",
    "ArchiveRecord",
    "Assembly",
    "Filler",
    "LostRange",
    "Part",
    "Piece",
    "ReadOnlySource",
    "Recovered",
    "archive",
    "archive_pieces",
    "checksum",
    "differences",
    "file_source",
    "key_of",
    "literal",
    "repaired",
    "stored_record",
    "temporary_file",
]

HAS_DESCRIPTOR = 8
"""The zip flag that says that checksum and sizes follow the bytes, in a descriptor."""

_UTF8 = 0x0800
_CHUNK = 1 << 20


class LostRange(NamedTuple):
    """Bytes of a recovered file that are not those that were saved, and why."""

    start: int
    end: int
    why: str


class Recovered(NamedTuple):
    """A damaged file as it should be, ready to be read.

    ``exact`` is whether it is, as far as can be known, the very file that was saved. ``records`` are those of an
    archive, from which another archive can be laid out. ``unchecked`` are records without a checksum. ``repaired_at``
    are the offsets of repaired bytes in the recovered file. ``nbytes`` is the size of the damaged file. ``warnings``
    say what is uncertain.
    """

    source: Source
    exact: bool
    lost_ranges: tuple[LostRange, ...] = ()
    repairs: tuple[Repair, ...] = ()
    lost_records: tuple[LostRecord, ...] = ()
    notes: tuple[str, ...] = ()
    records: tuple[ArchiveRecord, ...] = ()
    unchecked: frozenset[str] = frozenset()
    all_unchecked: bool = False
    repaired_at: tuple[int, ...] = ()
    nbytes: int = 0
    warnings: tuple[str, ...] = ()


class ReadOnlySource:
    """A source that only has to implement ``read``."""

    name: str
    size: int

    def read(self, offset: int, count: int) -> bytes:
        """Up to ``count`` bytes from ``offset`` on."""
        raise NotImplementedError

    def readinto(self, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from ``offset`` on; how many bytes there were."""
        return copied(self, offset, buffer)

    def close(self) -> None:
        """Nothing to give back."""


class Filler(ReadOnlySource):
    """A pattern repeated over ``size`` bytes, in place of bytes that are lost."""

    name = "<filler>"

    def __init__(self, size: int, pattern: bytes = b"\0") -> None:
        self.size = size
        self._pattern = pattern

    def read(self, offset: int, count: int) -> bytes:
        """Up to ``count`` bytes from ``offset`` on."""
        count = min(count, self.size - offset)
        if count <= 0:
            return b""
        width = len(self._pattern)
        phase = offset % width
        return (self._pattern * ((count + phase) // width + 1))[phase : phase + count]


def temporary_file(stack: ExitStack) -> BinaryIO:
    """A file without a name, which is gone when the rescue is done."""
    from tempfile import TemporaryFile

    return cast(BinaryIO, stack.enter_context(TemporaryFile()))


def file_source(file: BinaryIO, name: str) -> Source:
    """What was written into a temporary file, as a source."""
    source = ObjectSource(file)
    source.name = name
    return source


class Part(NamedTuple):
    """``length`` bytes of a source from ``offset`` on."""

    source: Source
    offset: int
    length: int


def literal(data: bytes) -> Part:
    """New bytes as a part."""
    return Part(BytesSource(data), 0, len(data))


def repaired(source: Source, offset: int, length: int, repairs: Iterable[Repair]) -> Iterator[Part]:
    """Some bytes of a source, with repairs."""
    at, end = offset, offset + length
    for repair in sorted(repairs):
        if at <= repair.position < end:
            yield Part(source, at, repair.position - at)
            yield literal(bytes([repair.new]))
            at = repair.position + 1
    yield Part(source, at, end - at)


class Assembly(ReadOnlySource):
    """Parts one after the other, as a source. Their sources are closed by whoever opened them."""

    def __init__(self, parts: Iterable[Part], name: str) -> None:
        self._parts = [part for part in parts if part.length]
        self._starts: list[int] = []
        self.name = name
        self.size = 0
        for part in self._parts:
            self._starts.append(self.size)
            self.size += part.length

    def read(self, offset: int, count: int) -> bytes:
        """Up to ``count`` bytes from ``offset`` on."""
        found: list[bytes] = []
        end = min(offset + count, self.size)
        index = bisect_right(self._starts, offset) - 1
        while offset < end:
            part = self._parts[index]
            inside = offset - self._starts[index]
            data = part.source.read(part.offset + inside, min(part.length - inside, end - offset))
            if not data:
                break
            found.append(data)
            offset += len(data)
            index += inside + len(data) == part.length
        return found[0] if len(found) == 1 else b"".join(found)


def differences(offset: int, here: bytes, right: bytes, certainty: Certainty = "proven") -> list[Repair]:
    """The repairs that turn the bytes at ``offset`` of a file into the right ones, as far as both go."""
    pairs = enumerate(zip(here, right, strict=False), offset) if here != right else ()
    return [Repair(at, old, new, "", certainty) for at, (old, new) in pairs if old != new]


def checksum(parts: Iterable[Part]) -> int:
    """The CRC-32 of parts one after the other."""
    source, value = Assembly(parts, ""), 0
    for start in range(0, source.size, _CHUNK):
        value = crc32(source.read(start, _CHUNK), value)
    return value


# -- archives


class ArchiveRecord(NamedTuple):
    """A record of an archive to be written.

    ``stored`` and ``size`` differ if it is compressed. ``padding`` is that of its header; ``None`` is what aligns its
    bytes. ``before`` are bytes in front of it that belong to no record. ``order`` is its place in the directory.
    ``header`` is where it was in the damaged file, -1 if it was not there; ``origin`` is its name there.
    """

    name: bytes
    content: tuple[Part, ...]
    size: int
    stored: int
    crc32: int
    method: int = 0
    flags: int = _UTF8 | HAS_DESCRIPTOR
    time: int = 0
    date: int = 0
    padding: int | None = None
    before: tuple[Part, ...] = ()
    order: int = 0
    header: int = -1
    origin: bytes = b""


def key_of(name: bytes) -> str:
    """The name of a record without the folder of its archive."""
    return (name.partition(b"/")[2] or name).decode("utf-8", "backslashreplace")


def stored_record(
    name: bytes, part: Part, *, order: int = 0, origin: bytes = b"", crc32: int | None = None
) -> ArchiveRecord:
    """A record of these bytes, uncompressed. Their checksum is computed unless it is given."""
    flags = _UTF8 | HAS_DESCRIPTOR if part.length else _UTF8  # torch writes no descriptor behind an empty record
    value = checksum([part]) if crc32 is None else crc32
    return ArchiveRecord(name, (part,), part.length, part.length, value, flags=flags, order=order, origin=origin)


class Piece(NamedTuple):
    """A part of an archive and its offset there.

    ``generated`` is whether it was made here: a header, a descriptor or the directory. ``record`` is the record whose
    bytes it is.
    """

    offset: int
    part: Part
    generated: bool = False
    record: ArchiveRecord | None = None


def archive(records: Sequence[ArchiveRecord], name: str) -> Assembly:
    """An archive of these records."""
    return Assembly((piece.part for piece in archive_pieces(records)), name)


def archive_pieces(records: Sequence[ArchiveRecord], after: Iterable[Part] = ()) -> Iterator[Piece]:
    """The pieces of an archive in order; ``after`` are parts between the last record and the directory."""
    entries: list[tuple[int, bytes]] = []
    at = 0
    for record in records:
        for part in record.before:
            yield Piece(at, part)
            at += part.length
        header, start = _local_header(record, at), at
        entries.append((record.order, _central_entry(record, at)))
        yield Piece(at, literal(header), generated=True)
        at += len(header)
        for part in record.content:
            yield Piece(at, part, record=record)
            at += part.length
        behind = _descriptor(record, start)
        yield Piece(at, literal(behind), generated=True)
        at += len(behind)
    for part in after:
        yield Piece(at, part)
        at += part.length
    directory = b"".join(entry for _, entry in sorted(entries, key=lambda each: each[0]))
    yield Piece(at, literal(directory + end_of_archive(len(entries), at, len(directory))), generated=True)


# torch's own writer stores records uncompressed, without a date. These three add what other archives have: compression,
# flags, times, and padding that is kept as it was.


def _local_header(record: ArchiveRecord, at: int) -> bytes:
    unpadded = local_header(record.name, record.stored, at, 1)
    padding = -(at + len(unpadded)) % ALIGNMENT if record.padding is None else record.padding
    out = bytearray(unpadded[:-2] + padding.to_bytes(2, "little") + b"Z" * padding)
    pack_into("<5H", out, 4, 20 if record.method else 0, record.flags, record.method, record.time, record.date)
    if not record.flags & HAS_DESCRIPTOR and record.stored:
        pack_into("<3L", out, 14, record.crc32, record.stored & 0xFFFFFFFF, record.size & 0xFFFFFFFF)
    pack_into("<H", out, 28, (len(out) - 30 - len(record.name)) & 0xFFFF)
    return bytes(out)


def _descriptor(record: ArchiveRecord, at: int) -> bytes:
    if not record.flags & HAS_DESCRIPTOR:
        return b""
    out = bytearray(descriptor(record.stored, record.crc32, at))
    if record.size != record.stored and out:
        pack_into("<L" if len(out) == 16 else "<Q", out, len(out) - (len(out) - 8) // 2, record.size)
    return bytes(out)


def _central_entry(record: ArchiveRecord, at: int) -> bytes:
    out = bytearray(central_entry(record.name, record.stored, record.crc32, at))
    pack_into("<5H", out, 6, 20 if record.method else 0, record.flags, record.method, record.time, record.date)
    if record.size != record.stored:
        pack_into("<L", out, 24, record.size)
    return bytes(out)
