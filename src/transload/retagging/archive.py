"""Another ``data.pkl`` in a zip archive: over the old one where it has the same size, else behind all other records.

Neither moves a tensor. In the second case the old record stays as bytes that nothing names, and the directory, which
is the end of an archive, is written anew behind the new one.
"""

from __future__ import annotations

from struct import Struct
from zlib import crc32

from transload.checkpoint import Record
from transload.errors import RetagError
from transload.formats.zip_index import widen
from transload.formats.zip_writer import central_entry, descriptor, end_of_archive, local_header
from transload.frozen import facts
from transload.io.sources import Source
from transload.retagging.changes import Change, Changes
from transload.retagging.stream import Edit, in_stream, spliced

__all__ = ["Place", "appended", "find_record", "overwritten"]

_TAIL = 22 + 0xFFFF + 20 + 56
_CENTRAL = Struct("<4s6H3L5H2L")
_LOCAL = Struct("<4s5H3L2H")
_END = Struct("<4s4H2LH")
_END64 = Struct("<4sQ2H2L4Q")
_LOCATOR64 = Struct("<4sLQL")
_CRC_IN_CENTRAL, _CRC_IN_LOCAL = 16, 14
_FOLLOWS = 8  # the flag that size and checksum stand behind the bytes
_ODD = "its directory is not as the reader of the file understood it"


@facts(frozen=True)
class Place:
    """A record in its archive.

    ``header`` and ``payload`` are where its own header and its bytes begin, ``end`` where the next record may; ``sums``
    the places in the file where its checksum stands. The ``directory`` begins at ``start`` and has ``count`` lines;
    that of the record begins at ``line`` in it.
    """

    name: bytes
    header: int
    payload: int
    end: int
    sums: tuple[int, ...]
    directory: bytes
    start: int
    count: int
    line: int
    line_size: int


def find_record(source: Source, record: Record) -> Place:
    """Where a stored record and all that is said of it lies. The archive is one that was read without complaint."""
    start, size, count = _directory(source)
    directory = source.read(start, size)
    line = 0
    while line + _CENTRAL.size <= len(directory):
        fields = _CENTRAL.unpack_from(directory, line)
        n_name, n_extra, n_comment = fields[10:13]
        name_at = line + _CENTRAL.size
        name = directory[name_at : name_at + n_name]
        after = name_at + n_name + n_extra + n_comment
        if name.rpartition(b"/")[2].lower() == b"data.pkl":
            extra = directory[name_at + n_name : name_at + n_name + n_extra]
            header = widen(extra, *fields[9:7:-1], fields[16])[2]
            payload = _payload(source, header)
            if payload == record.offset:
                end, sums = _sums(source, record, header, payload)
                sums = (*sums, start + line + _CRC_IN_CENTRAL)
                return Place(name, header, payload, end, sums, directory, start, count, line, after - line)
        line = after
    raise RetagError(_ODD, where=source.name)


def _directory(source: Source) -> tuple[int, int, int]:
    """Where the directory begins, how long it is, and how many lines it has."""
    base = max(0, source.size - _TAIL)
    tail = source.read(base, _TAIL)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + _END.size != len(tail):
        raise RetagError(_ODD, where=source.name)
    _, _, _, _, count, size, start, _ = _END.unpack_from(tail, at)
    locator = tail[at - _LOCATOR64.size : at] if at >= _LOCATOR64.size else b""
    if locator[:4] == b"PK\x06\x07":
        end64 = source.read(_LOCATOR64.unpack(locator)[2], _END64.size)
        if len(end64) == _END64.size and end64[:4] == b"PK\x06\x06":
            count, size, start = _END64.unpack(end64)[7:10]
    return start, size, count


def _payload(source: Source, header: int) -> int:
    raw = source.read(header, _LOCAL.size)
    if len(raw) < _LOCAL.size:
        return -1
    n_name, n_extra = _LOCAL.unpack(raw)[9:11]
    return header + _LOCAL.size + int(n_name) + int(n_extra)


def _sums(source: Source, record: Record, header: int, payload: int) -> tuple[int, tuple[int, ...]]:
    """Where a record ends with what follows it, and where its checksum stands before and behind its bytes."""
    _, _, flags, _, _, _, crc, _, _, _, _ = _LOCAL.unpack(source.read(header, _LOCAL.size))
    places = [header + _CRC_IN_LOCAL] if crc or not flags & _FOLLOWS else []
    end = payload + record.stored
    if flags & _FOLLOWS:
        behind = source.read(end, 24)
        signed = 4 if behind[:4] == b"PK\x07\x08" else 0
        old = (record.crc32 or 0).to_bytes(4, "little")
        if behind[signed : signed + 4] == old:
            places.append(end + signed)
            wide = behind[signed + 4 : signed + 20] == record.stored.to_bytes(8, "little") * 2
            end += signed + (20 if wide else 12)
    return end, tuple(places)


def overwritten(source: Source, record: Record, data: bytes, edits: list[Edit]) -> Changes:
    """A record changed without a change of its size, and its checksum with it, wherever that stands."""
    place = find_record(source, record)
    runs = in_stream(data, edits, place.payload)
    if record.crc32 is not None:  # else the archive has none, and zeros in their place
        old, new = (crc32(each).to_bytes(4, "little") for each in (data, spliced(data, edits)))
        for at in place.sums:
            if source.read(at, 4) != old:
                raise RetagError(_ODD, where=source.name)
            runs.append(Change(at, old, new))
    return Changes(tuple(sorted(run for run in runs if run.old != run.new)), source.size, source.size)


def appended(source: Source, record: Record, data: bytes) -> Changes:
    """A record with other bytes, behind all others, and the directory behind it."""
    place = find_record(source, record)
    begin = place.header if place.end == place.start else place.start  # one that was appended before is written over
    crc = crc32(data) if record.crc32 is not None else 0
    lines = place.directory
    line = central_entry(place.name, len(data), crc, begin)
    directory = lines[: place.line] + line + lines[place.line + place.line_size :]
    head = local_header(place.name, len(data), begin) + data + descriptor(len(data), crc, begin)
    start = begin + len(head)
    new = head + directory + end_of_archive(place.count, start, len(directory))
    old = source.read(begin, source.size - begin)
    return Changes((Change(begin, old, new),), source.size, begin + len(new))
