"""Where each record of a zip archive lies, by torch's reading and by ``zipfile``'s.

Two readers open a torch checkpoint: miniz, inside torch, and Python's ``zipfile``, inside every scanner. They find the
directory by different rules, so an archive can be built that shows each of them another ``data.pkl``. This module reads as
torch does and reports, as a problem, every property on which the two part. The rules are in docs/formats.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple
from zlib import crc32

from transload.checkpoint import Record
from transload.findings import Problem
from transload.read.source import Source

__all__ = ["MAX_PAYLOAD", "Payload", "ZipIndex", "read_index", "read_payload", "starts_like_zip"]

MAX_PAYLOAD = 512 << 20
"""No index record of a real checkpoint comes near: 20,000 tensors take 2 MB. Larger ones are not read into memory."""

_TAIL = (1 << 16) + 22  # an end record and the longest comment; both readers look no further back
_ALL32 = 0xFFFFFFFF
_END = Struct("<4s4H2LH")
_END64 = Struct("<4sQ2H2L4Q")
_LOCATOR64 = Struct("<4sLQL")
_CENTRAL = Struct("<4s6H3L5H2L")
_LOCAL = Struct("<4s5H3L2H")
_SECRET_FLAGS = 0x2061  # encrypted, patch data, strong encryption, masked header: torch refuses them in the directory
_WINDOW = 4096


class Payload(NamedTuple):
    """The bytes of a record, or why there are none. ``intact`` is whether the checksum agrees."""

    data: bytes
    intact: bool
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ZipIndex:
    """The records of an archive by name below the common folder, in directory order.

    ``root`` is that folder as torch determines it, from the first entry. ``by_torch`` is whether the local headers bear the
    marks of torch's own writer (padding field ``FB``, no date). ``unsummed`` says that all checksums are zero: torch can be
    told to write none. ``end`` is where the directory begins, so where data ends.
    """

    root: str
    records: dict[str, Record]
    problems: tuple[Problem, ...]
    by_torch: bool = False
    unsummed: bool = False
    end: int = 0
    ok: bool = True


class _Entry(NamedTuple):
    """One line of the central directory."""

    raw_name: bytes
    flags: int
    method: int
    crc32: int
    stored: int
    size: int
    header: int


def starts_like_zip(source: Source) -> bool:
    """torch's own test: the first four bytes and nothing else."""
    return source.read(0, 4) == b"PK\x03\x04"


def read_index(source: Source) -> ZipIndex:
    """Read the central directory and every local header, and compare them. Never raises for what the file holds."""
    problems: list[Problem] = []
    try:
        start, size, count = _find_directory(source, problems)
        entries = _read_directory(source, start, size, count, problems)
    except _NoDirectoryError as reason:
        problems.append(Problem("zip-no-directory", detail=str(reason)))
        return ZipIndex("", {}, tuple(problems), ok=False)
    _check_names(entries, problems)
    root = _root(entries, problems)
    records, by_torch = _read_locals(source, entries, start, f"{root}/", problems)
    unsummed = not any(entry.crc32 for entry in entries) and any(entry.size for entry in entries)
    return ZipIndex(root, records, tuple(problems), by_torch, unsummed, start)


class _NoDirectoryError(Exception):
    """There is no directory to read; the text says why."""


def _find_directory(source: Source, problems: list[Problem]) -> tuple[int, int, int]:
    """Offset, size and entry count of the central directory as the end record states them, which is what torch believes."""
    base = max(0, source.size - _TAIL)
    tail = source.read(base, _TAIL)
    at = tail.rfind(b"PK\x05\x06", 0, max(0, len(tail) - 18))
    if at < 0:
        raise _NoDirectoryError("the end record is missing: the file is cut off, or its end was overwritten")
    _, disk, cd_disk, here, count, size, start, comment = _END.unpack_from(tail, at)
    end = base + at
    _check_end(tail, at, comment, problems)
    if disk or cd_disk or here != count:
        problems.append(Problem("zip-multi-disk", detail="the end record speaks of several disks; torch refuses that"))
    directory_end = end
    locator = source.read(end - 20, 20) if end >= 20 else b""
    if locator[:4] == b"PK\x06\x07":
        directory_end, size, start, count = _end64(source, end, locator, (count, size, start), problems)
    if start + size != directory_end:
        detail = (
            f"the end record puts the directory at {start} (torch reads there), it really ends at {directory_end}, "
            f"so zipfile reads at {directory_end - size}"
        )
        problems.append(Problem("zip-shifted", detail=detail))
    if start + size > source.size:
        raise _NoDirectoryError(f"the directory should end at byte {start + size}, the file has {source.size}")
    return start, size, count


def _check_end(tail: bytes, at: int, comment: int, problems: list[Problem]) -> None:
    extra = len(tail) - at - 22
    if extra:
        where = "an archive comment" if comment == extra else "after the end record"
        problems.append(Problem("zip-trailing-bytes", detail=f"{extra} bytes {where}"))
    before = tail.rfind(b"PK\x05\x06", 0, at)
    while before >= 0:
        length = int.from_bytes(tail[before + 20 : before + 22], "little")
        if before + 22 + length == len(tail) and length:
            problems.append(Problem("zip-two-ends", detail="one end record lies in the comment of another"))
            return
        before = tail.rfind(b"PK\x05\x06", 0, before)


def _end64(
    source: Source, end: int, locator: bytes, plain: tuple[int, int, int], problems: list[Problem]
) -> tuple[int, int, int, int]:
    """The zip64 end record: where it begins, and size, start and count of the directory."""
    _, _, stated, _ = _LOCATOR64.unpack(locator)
    raw = source.read(stated, _END64.size)
    if len(raw) < _END64.size or raw[:4] != b"PK\x06\x06":
        raise _NoDirectoryError("the zip64 end record is not where its locator says")
    if stated != end - 20 - _END64.size:  # zipfile does not look at the stated place but always right before the locator
        problems.append(Problem("zip-shifted", detail="the zip64 end record is not next to its locator"))
    *_, count, size, start = _END64.unpack(raw)
    for narrow, wide, full in zip(plain, (count, size, start), (0xFFFF, _ALL32, _ALL32), strict=True):
        if narrow not in (wide, full):
            problems.append(Problem("zip-two-sizes", detail=f"the end records say {narrow} and {wide}"))
    return stated, size, start, count


def _read_directory(source: Source, start: int, size: int, count: int, problems: list[Problem]) -> list[_Entry]:
    if count * _CENTRAL.size > size:  # four billion entries claimed in a kilobyte
        problems.append(Problem("zip-count", detail=f"{count} entries cannot fit into a directory of {size} bytes"))
    raw = source.read(start, size)
    entries: list[_Entry] = []
    position = 0
    while position + _CENTRAL.size <= len(raw) and raw[position : position + 4] == b"PK\x01\x02":
        entry, position = _read_entry(raw, position, problems)
        entries.append(entry)
    if position != len(raw):
        problems.append(Problem("zip-directory-broken", detail=f"entry {len(entries)} of the directory is no entry"))
    if len(entries) != count:
        problems.append(Problem("zip-count", detail=f"the directory holds {len(entries)} entries, its end says {count}"))
    if not entries:
        raise _NoDirectoryError("the directory holds no entry")
    return entries


def _read_entry(raw: bytes, position: int, problems: list[Problem]) -> tuple[_Entry, int]:
    fields = _CENTRAL.unpack_from(raw, position)
    _, _, _, flags, method, _, _, crc, stored, size, n_name, n_extra, n_comment, disk, _, _, header = fields
    name_at = position + _CENTRAL.size
    name = raw[name_at : name_at + n_name]
    if n_extra and _ALL32 in (stored, size, header):
        extra = raw[name_at + n_name : name_at + n_name + n_extra]
        size, stored, header = _widen(extra, size, stored, header)
    if disk or flags & _SECRET_FLAGS:
        detail = "an encrypted or split entry; torch refuses it"
        problems.append(Problem("zip-unreadable-entry", _text(name), detail))
    return _Entry(name, flags, method, crc, stored, size, header), name_at + n_name + n_extra + n_comment


def _widen(extra: bytes, *values: int) -> list[int]:
    """Values of the zip64 field in place of those that are all ones, in the order the format fixes."""
    wide = _extra_field(extra, 1)
    out: list[int] = []
    for value in values:
        if value == _ALL32 and len(wide) >= 8:
            value, wide = int.from_bytes(wide[:8], "little"), wide[8:]  # noqa: PLW2901 - the point of the loop
        out.append(value)
    return out


def _extra_field(extra: bytes, wanted: int) -> bytes:
    position = 0
    while position + 4 <= len(extra):
        tag, length = int.from_bytes(extra[position : position + 2], "little"), extra[position + 2] | extra[position + 3] << 8
        if tag == wanted:
            return extra[position + 4 : position + 4 + length]
        position += 4 + length
    return b""


def _read_locals(
    source: Source, entries: list[_Entry], data_end: int, prefix: str, problems: list[Problem]
) -> tuple[dict[str, Record], bool]:
    """Each record's place, from its local header, by name below ``prefix``; and whether torch's writer made the first one."""
    window, base = b"", 0
    records: dict[str, Record] = {}
    spans: list[tuple[int, int, str]] = []
    by_torch = False
    cut = len(prefix)
    for entry in entries:
        raw_name, entry_flags, entry_method, entry_crc, entry_stored, entry_size, header = entry
        name = raw_name.decode("utf-8", "backslashreplace")
        if cut > 1 and name.startswith(prefix):
            name = name[cut:]
        need = 30 + len(raw_name)
        at = header - base
        if at < 0 or at + need > len(window):
            base, at = header, 0
            window = source.read(base, max(need, _WINDOW))
        if window[at : at + 4] != b"PK\x03\x04" or at + need > len(window):
            problems.append(Problem("zip-no-local-header", name, f"no record header at byte {header}"))
            records[name] = Record(name, None, entry_size, entry_stored, entry_crc, entry_method)
            continue
        _, _, flags, method, _, date, crc, stored, size, n_name, n_extra = _LOCAL.unpack_from(window, at)
        if window[at + 30 : at + 30 + n_name] != raw_name:
            problems.append(Problem("zip-names-differ", name, "the record's own header bears another name"))
        if flags != entry_flags or method != entry_method or crc or stored or size or not flags & 8:
            _compare(entry, name, (flags, method, crc, stored, size), problems)
        offset = header + 30 + n_name + n_extra
        end = offset + entry_stored
        if not records:
            by_torch = date == 0 and n_extra >= 4 and b"FB" in source.read(offset - n_extra, n_extra)
        spans.append((header, end, name))
        if end > source.size:
            detail = f"{max(0, source.size - offset)} of {entry_stored} bytes are in the file"
            problems.append(Problem("zip-record-cut", name, detail))
        records[name] = Record(name, offset, entry_size, entry_stored, entry_crc, entry_method)
    _check_overlap(spans, data_end, problems)
    records.pop("", None)
    return records, by_torch


def _compare(entry: _Entry, name: str, local: tuple[int, int, int, int, int], problems: list[Problem]) -> None:
    """torch and zipfile believe the directory; readers that stream believe the local header. They must agree."""
    flags, method, crc, stored, size = local
    if (flags ^ entry.flags) & _SECRET_FLAGS or method != entry.method:
        problems.append(Problem("zip-headers-differ", name, "flags or method differ between header and directory"))
    if flags & 8 and not (crc or stored or size):
        return  # sizes follow the data: what torch writes
    known = ((crc, entry.crc32), (stored, entry.stored), (size, entry.size))
    if any(mine not in (_ALL32, 0, theirs) for mine, theirs in known):
        code = "zip-headers-differ" if (stored, size) != (entry.stored, entry.size) else "zip-crc-differs"
        problems.append(Problem(code, name, "size or checksum differ between header and directory"))


def _check_overlap(spans: list[tuple[int, int, str]], data_end: int, problems: list[Problem]) -> None:
    spans.sort()
    reach, owner = 0, ""
    for begin, end, name in spans:
        if begin < reach:  # one payload behind many names is how a zip bomb is folded (CVE-2024-0450)
            problems.append(Problem("zip-overlap", name, f"shares bytes with {owner}"))
        if end > reach:
            reach, owner = end, name
    if reach > data_end:
        problems.append(Problem("zip-overlap", owner, "reaches into the directory"))


def _check_names(entries: list[_Entry], problems: list[Problem]) -> None:
    seen: dict[bytes, bytes] = {}
    for entry in entries:
        raw = entry[0]
        folded = raw.lower()  # miniz compares ASCII letters without case, over an unstable sort
        if folded in seen:
            detail = f"again, after {_text(seen[folded])}: which of them torch reads is chance"
            problems.append(Problem("zip-duplicate-name", _text(raw), detail))
        seen[folded] = raw
        if b"\0" in raw:
            problems.append(Problem("zip-nul-name", _text(raw), "zipfile cuts a name at a NUL byte, torch does not"))
        if b"\\" in raw or raw[:1] == b"/" or (b".." in raw and b".." in raw.split(b"/")):
            problems.append(Problem("zip-odd-name", _text(raw), "not a plain path below one folder"))


def _root(entries: list[_Entry], problems: list[Problem]) -> str:
    """The folder torch takes all records from: that of the first entry. Where it holds no index, one that does."""
    first = _text(entries[0].raw_name)
    root, slash, _ = first.partition("/")
    if not slash:
        problems.append(Problem("zip-no-folder", first, "records lie at the top; torch wants them in one folder"))
        return ""
    prefix = f"{root}/".encode("utf-8", "surrogateescape")
    outside = [entry.raw_name for entry in entries if not entry.raw_name.startswith(prefix)]
    if outside:
        detail = f"{len(outside)} records lie outside the folder {root}/"
        problems.append(Problem("zip-two-folders", _text(outside[0]), detail))
        indexed = [_text(raw)[: -len("/data.pkl")] for raw in outside if raw.count(b"/") == 1 and raw.endswith(b"/data.pkl")]
        if indexed and prefix + b"data.pkl" not in {entry.raw_name for entry in entries}:
            return indexed[0]
    return root


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")


def read_payload(source: Source, record: Record, limit: int = MAX_PAYLOAD) -> Payload:
    """A record's bytes, unpacked if it is deflated, never more than it declares nor than ``limit``."""
    if record.offset is None:
        return Payload(b"", intact=False, problem="its header is lost")
    if record.size > limit or record.stored > limit:
        return Payload(b"", intact=False, problem=f"{record.size} bytes are more than the {limit} we read")
    raw = source.read(record.offset, record.stored)
    if record.method == 8:
        raw, problem = _inflate(raw, record.size)
        if problem:
            return Payload(raw, intact=False, problem=problem)
    elif record.method != 0:
        return Payload(b"", intact=False, problem=f"compression method {record.method} is not one torch reads")
    if len(raw) < record.size:
        return Payload(raw, intact=False, problem=f"{len(raw)} of {record.size} bytes are in the file")
    return Payload(raw, intact=not record.crc32 or crc32(raw) == record.crc32)


def _inflate(raw: bytes, size: int) -> tuple[bytes, str]:
    from zlib import decompressobj
    from zlib import error as zlib_error

    try:
        # One byte more than declared shows a record that would go on: a bomb stops here.
        data = decompressobj(-15).decompress(raw, size + 1)
    except zlib_error as error:
        return b"", f"its compressed data is damaged ({error})"
    if len(data) > size:
        return data[:size], "it unpacks to more than it declares"
    return data, ""
