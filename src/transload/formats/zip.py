r"""Zip archives: their structures, the reader of their directory, and records as torch's own writer makes them.

An archive is

    header · bytes · descriptor, for each record; central entry, for each record; end

``read_index`` reads the end record, the central directory and every local header, and compares them: what makes two
readers see two things is a problem. ``read_payload`` reads one record. ``local_header``, ``descriptor``,
``central_entry`` and ``end_of_archive`` are the bytes that torch writes around records. torch stores every record as
it is. Its header does not give its size: size and checksum follow the bytes, in a descriptor, so a record can be
written before its checksum is known. A padding field in the header aligns the bytes.

An archive has tens of thousands of entries, and in nearly all of them nothing is unusual. So names are first checked
all at once, joined by newlines, and headers are first compared with the one before.

>>> data = b"3\n"
>>> start = local_header(b"a/version", len(data), 0)
>>> record = start + data + descriptor(len(data), 0x5567_6311, 0)
>>> entry = central_entry(b"a/version", len(data), 0x5567_6311, 0)
>>> archive = record + entry + end_of_archive(1, len(record), len(entry))
>>> archive.index(data) % ALIGNMENT, len(archive) == len(record) + len(entry) + len(end_of_archive(1, 0, 0))
(0, True)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from struct import Struct
from typing import NamedTuple
from zlib import crc32, decompressobj
from zlib import error as zlib_error

from transload.checkpoint import Record
from transload.findings import Problem, Problems
from transload.io.sources import Source, inflated

# The structures, each with its signature.
LOCAL = Struct("<4s5H3L2H")
CENTRAL = Struct("<4s6H3L5H2L")
DESCRIPTOR = Struct("<4s3L")
DESCRIPTOR64 = Struct("<4sL2Q")
END = Struct("<4s4H2LH")
END64 = Struct("<4sQ2H2L4Q")
LOCATOR64 = Struct("<4sLQL")
EXTRA = Struct("<2H")  # tag and length of an extra field
ALL32 = 0xFFFFFFFF  # the number is in the zip64 field

# The same, with what is usually equal from one record to the next in one piece.
_LOCAL_IN_SHORT = Struct("<26s2H")
_LOCAL_NUMBERS = Struct("<4s5H3L")
_CENTRAL_IN_SHORT = Struct("<16s3LH12sL")
_NOTHING_ELSE = bytes(12)  # no extra field, no comment, disk 0, no attributes

MAX_PAYLOAD = 512 << 20
"""No index record of a real checkpoint comes near: 20,000 tensors take 2 MB. Larger ones are not read into memory."""

_MAX_ENTRIES = 1_000_000
"""An entry of 47 bytes costs a kilobyte of memory; 20,000 tensors are 20,006 entries."""

_TAIL = 4096 + 16 * 4093  # torch looks for the end record in steps of 4 KiB, and so a little further back than zipfile
_NEWEST_VERSION = 63  # "version needed to extract": zipfile refuses an archive that says more, torch does not look
_DOS_DIRECTORY = 0x10
_UNICODE_PATH = 0x7075
_SECRET_FLAGS = 0x2061  # encrypted, patch data, strong encryption, masked header: torch refuses them in the directory
_WINDOW = 4096
_WIDE_WINDOW = 256 << 10
_NARROW = 8 << 10  # bytes between headers below which they are read many at a time
_new = tuple.__new__  # a named tuple in one call, without the Python function that collects its fields

ALIGNMENT = 64
"""torch's default, at which a mapped file gives tensors that every vector unit reads at full speed."""

_FLAGS = 0x0808  # the name is UTF-8; the sizes follow the bytes
_FLAGS_OF_NOTHING = 0x0800  # nothing follows no bytes
_MADE_BY = 0x031E  # in the end record alone, as miniz has it: Unix, version 3.0
_NEEDED = 45  # the first version of the specification with 64-bit sizes
_LOCAL_HEAD = LOCAL.pack(b"PK\x03\x04", 0, _FLAGS, 0, 0, 0, 0, 0, 0, 0, 0)[:26]
_CENTRAL_HEAD = CENTRAL.pack(b"PK\x01\x02", 0, 0, _FLAGS, *[0] * 13)[:16]


class Entry(NamedTuple):
    """One line of the central directory."""

    raw_name: bytes
    flags: int
    method: int
    crc32: int
    stored: int
    size: int
    header: int


def text_of(raw: bytes) -> str:
    """A name as text; bytes that are none are spelled out."""
    return raw.decode("utf-8", "backslashreplace")


def _joined(entries: list[Entry]) -> bytes:
    r"""All names, a newline before each; empty if a name has one itself.

    >>> _joined([Entry(b"a/b", 0, 0, 0, 0, 0, 0), Entry(b"a/c", 0, 0, 0, 0, 0, 0)])
    b'\na/b\na/c'
    """
    joined = b"\n".join([b"", *[entry[0] for entry in entries]])
    return joined if joined.count(b"\n") == len(entries) else b""


def check_names(entries: list[Entry], problems: Problems) -> None:
    """Names that readers take for the same, or read in different ways."""
    joined = _joined(entries)
    odd = not joined.isascii() or b"\0" in joined or b"\\" in joined or b".." in joined or b"\n/" in joined
    if odd or len(set(joined.lower().split(b"\n")[1:])) != len(entries):
        _check_each(entries, problems)


def _check_each(entries: list[Entry], problems: Problems) -> None:
    seen: dict[bytes, Entry] = {}
    for entry in entries:
        raw = entry[0]
        name = text_of(raw)
        folded = raw.lower()  # miniz compares ASCII letters without case, over an unstable sort
        before = seen.get(folded)
        # torch 1.1 wrote the code of a shared submodule once for each of its names.
        if before is not None and not (b"/code/" in raw and before[:6] == entry[:6]):
            detail = f"again, after {text_of(before[0])}: which of them torch reads is chance"
            problems.add("zip-duplicate-name", name, detail)
        seen[folded] = entry
        if b"\0" in raw:
            problems.add("zip-nul-name", name, "zipfile cuts a name at a NUL byte, torch does not")
        if b"\\" in raw or raw[:1] == b"/" or (b".." in raw and b".." in raw.split(b"/")):
            problems.add("zip-odd-name", name, "not a plain path below one folder")
        if raw.decode("utf-8", "replace") != name:
            problems.add("zip-name-encoding", name, "it is not UTF-8")


def find_root(entries: list[Entry], problems: Problems) -> str | None:
    """The folder torch takes all records from, that of the first entry; where it holds no index, one that does.

    ``None`` if the records lie in no folder.
    """
    first = entries[0].raw_name
    folder, slash, _ = first.partition(b"/")
    if not slash:
        problems.add("zip-no-folder", text_of(first), "records lie at the top; torch wants them in one folder")
        return None
    lead = folder + b"/"
    if _joined(entries).count(b"\n" + lead) == len(entries):
        return text_of(folder)
    outside = [entry.raw_name for entry in entries if not entry.raw_name.startswith(lead)]
    if outside:
        detail = f"{len(outside)} records lie outside the folder {text_of(folder)}/"
        problems.add("zip-two-folders", text_of(outside[0]), detail)
        indexed = [raw[:-9] for raw in outside if raw.count(b"/") == 1 and raw.endswith(b"/data.pkl")]
        if indexed and folder + b"/data.pkl" not in {entry.raw_name for entry in entries}:
            return text_of(indexed[0])
    return text_of(folder)


def names_below(entries: list[Entry], prefix: str) -> list[str]:
    """Each name as its path below ``prefix``; those outside it whole, with a slash before them."""
    names = text_of(_joined(entries)).split(f"\n{prefix}")
    if len(names) == len(entries) + 1:
        return names[1:]
    names = [text_of(entry.raw_name) for entry in entries]
    cut = len(prefix)
    return [name[cut:] if name.startswith(prefix) else f"/{name}" for name in names] if cut else names


class Payload(NamedTuple):
    """The bytes of a record, or why there are none. ``intact`` is whether the checksum agrees."""

    data: bytes
    intact: bool
    problem: str = ""


class ZipIndex(NamedTuple):
    """The records of an archive by name below the common folder, in directory order.

    ``root`` is that folder as torch determines it, from the first entry. ``by_torch`` is whether the local headers bear
    the marks of torch's own writer (padding field ``FB``, no date). ``unsummed`` says that all checksums are zero:
    torch can be told to write none. ``end`` is where the directory begins, so where data ends.
    """

    root: str
    records: dict[str, Record]
    problems: tuple[Problem, ...]
    by_torch: bool = False
    unsummed: bool = False
    end: int = 0
    ok: bool = True


def starts_like_zip(source: Source) -> bool:
    """torch's own test: the first four bytes and nothing else."""
    return source.read(0, 4) == b"PK\x03\x04"


def ends_like_zip(source: Source) -> bool:
    """Whether zipfile would open it, wherever the archive in it begins: it has an end record and a directory."""
    tail = source.read(max(0, source.size - _TAIL), _TAIL)
    at = tail.rfind(b"PK\x05\x06", 0, max(0, len(tail) - 18))
    if at < 0:
        return False
    end = max(0, source.size - _TAIL) + at
    size, start = END.unpack_from(tail, at)[5:7]
    places = [start, end - size]
    wide = source.read(end - 20 - END64.size, END64.size) if end >= 20 + END64.size else b""
    if wide[:4] == b"PK\x06\x06":
        size, start = END64.unpack(wide)[8:10]
        places += [start, end - 20 - END64.size - size]
    return any(0 <= place < end and source.read(place, 4) == b"PK\x01\x02" for place in places)


def read_index(source: Source) -> ZipIndex:
    """Read the central directory and every local header, and compare them. Never raises for what the file holds."""
    problems = Problems()
    try:
        start, size, count = _find_directory(source, problems)
        entries = _read_directory(source, start, size, count, problems)
    except _NoDirectoryError as reason:
        problems.add("zip-no-directory", detail=str(reason))
        return ZipIndex("", {}, tuple(problems), ok=False)
    check_names(entries, problems)
    root = find_root(entries, problems)
    unsummed = not any(entry.crc32 for entry in entries) and any(entry.size for entry in entries)
    records, by_torch = _read_locals(source, entries, start, "" if root is None else f"{root}/", problems)
    if unsummed:
        problems.add("no-checksums", detail="every checksum in it is zero: it was saved with checksums switched off")
        records = {name: record._replace(crc32=None) for name, record in records.items()}
    return ZipIndex(root or "", records, tuple(problems), by_torch, unsummed, start)


class _NoDirectoryError(Exception):
    """There is no directory to read; the text says why."""


def _find_directory(source: Source, problems: Problems) -> tuple[int, int, int]:
    """Offset, size and entry count of the central directory as the end record states them: what torch believes."""
    base = max(0, source.size - _TAIL)
    tail = source.read(base, _TAIL)
    at = tail.rfind(b"PK\x05\x06", 0, max(0, len(tail) - 18))
    if at < 0:
        raise _NoDirectoryError("the end record is missing: the file is cut off, or its end was overwritten")
    _, disk, cd_disk, here, count, size, start, comment = END.unpack_from(tail, at)
    end = directory_end = base + at
    extra = len(tail) - at - 22
    if extra:
        where = "an archive comment" if comment == extra else "after the end record"
        problems.add("zip-trailing-bytes", detail=f"{extra} bytes {where}")
    before = tail.rfind(b"PK\x05\x06", 0, at)
    while before >= 0:
        length = int.from_bytes(tail[before + 20 : before + 22], "little")
        if before + 22 + length == len(tail) and length:
            problems.add("zip-two-ends", detail="one end record lies in the comment of another")
            break
        before = tail.rfind(b"PK\x05\x06", 0, before)
    if disk or cd_disk or here != count:
        problems.add("zip-multi-disk", detail="the end record speaks of several disks; torch refuses that")
    locator = source.read(end - 20, 20) if end >= END64.size + 20 else b""
    if locator[:4] == b"PK\x06\x07":
        # torch looks for the zip64 end record where the locator says, and believes the plain one if it is not there;
        # zipfile (before 2025) does not look at what the locator says but right before it.
        _, first_disk, stated, disks = LOCATOR64.unpack(locator)
        beside = end - 20 - END64.size
        raw = source.read(stated, END64.size)
        found = len(raw) == END64.size and raw[:4] == b"PK\x06\x06"
        if found != (source.read(beside, 4) == b"PK\x06\x06") or (found and stated != beside):
            problems.add("zip-shifted", detail="the zip64 end record is not where its locator says")
        if stated + END64.size > source.size:
            raise _NoDirectoryError("the zip64 end record is not where its locator says")
        if not found:
            problems.add("zip-directory-broken", detail="the zip64 end record is no end record")
        else:
            plain = (count, size, start)
            _, length, _, _, disk, cd_disk, here, count, size, start = END64.unpack(raw)
            directory_end = stated
            if first_disk or disks != 1 or disk or cd_disk or here != count or length < END64.size - 12:
                problems.add("zip-multi-disk", detail="the zip64 end record is not one that torch reads")
            for narrow, wide, full in zip(plain, (count, size, start), (0xFFFF, ALL32, ALL32), strict=True):
                if narrow not in (wide, full):
                    problems.add("zip-two-sizes", detail=f"the end records say {narrow} and {wide}")
    if start + size != directory_end:
        # torch looks for it where it is said to be; zipfile where one that ends at the end record begins.
        detail = (
            f"the end record puts the directory at {start} (torch reads there), it really ends at {directory_end}, "
        )
        detail += f"so zipfile reads at {directory_end - size}"
        shifted = start + size <= source.size and source.read(start, 4) == b"PK\x01\x02"
        problems.add("zip-shifted" if shifted else "zip-misplaced", detail=detail)
        if not shifted:
            raise _NoDirectoryError(f"there is no directory at byte {start}, where the end record puts it")
    if size > MAX_PAYLOAD:
        problems.add("zip-directory-broken", detail=f"a directory of {size} bytes is more than we read")
        raise _NoDirectoryError("the directory is too large to be one")
    return start, size, count


def _read_directory(source: Source, start: int, size: int, count: int, problems: Problems) -> list[Entry]:
    """All entries. Most begin with the same sixteen bytes as the one before, and have nothing but a name."""
    if count * CENTRAL.size > size:  # four billion entries claimed in a kilobyte
        problems.add("zip-count", detail=f"{count} entries cannot fit into a directory of {size} bytes")
    raw = source.read(start, size)
    entries: list[Entry] = []
    position, last = 0, len(raw) - CENTRAL.size
    plain, flags, method = b"", 0, 0  # how an entry begins in which nothing was odd
    while position <= last and len(entries) < _MAX_ENTRIES:
        begin, crc, stored, nbytes, n_name, rest, header = _CENTRAL_IN_SHORT.unpack_from(raw, position)
        end = position + CENTRAL.size + n_name
        if begin == plain and rest == _NOTHING_ELSE and stored == nbytes and raw[end - 1 : end] != b"/":
            name = raw[position + CENTRAL.size : end]
            entries.append(_new(Entry, (name, flags, method, crc, stored, nbytes, header)))
            position = end
        elif begin[:4] == b"PK\x01\x02":
            known = len(problems)
            entry, position = _read_entry(raw, position, problems)
            entries.append(entry)
            plain, flags, method = begin if len(problems) == known else b"", entry.flags, entry.method
        else:
            break
    if len(entries) >= _MAX_ENTRIES:
        problems.add("zip-count", detail=f"only the first {_MAX_ENTRIES} records were looked at")
        return entries
    if position != len(raw):
        detail = f"entry {len(entries)} of {count} in the directory is no entry"
        if position < len(raw) and len(entries) < count:  # neither torch nor zipfile reads any of it then
            raise _NoDirectoryError(detail)
        problems.add("zip-directory-broken", detail=detail)
    if not entries:
        raise _NoDirectoryError("the directory holds no entry")
    if len(entries) != count:
        problems.add("zip-count", detail=f"the directory holds {len(entries)} entries, its end says {count}")
    return entries


def _read_entry(raw: bytes, position: int, problems: Problems) -> tuple[Entry, int]:
    """An entry, and where it ends. Noted is what makes torch and zipfile differ about it, or one of them refuse it."""
    fields = CENTRAL.unpack_from(raw, position)
    _, _, needed, flags, method, _, _, crc, stored, size, n_name, n_extra, n_comment, disk, _, marks, header = fields
    name_at = position + CENTRAL.size
    raw_name = raw[name_at : name_at + n_name]
    name = text_of(raw_name)
    if n_extra:
        extra = raw[name_at + n_name : name_at + n_name + n_extra]
        found = list(_extra_fields(extra))
        if sum(4 + length for _, length, _ in found) > len(extra):
            problems.add("zip-one-reader", name, "zipfile refuses it: its extra fields are cut off")
        wide = [data for tag, _, data in found if tag == 1]
        lacking = 8 * (size, stored, header).count(ALL32)
        if lacking and (len(wide) != 1 or len(wide[0]) < lacking):
            problems.add("zip-headers-differ", name, "its zip64 sizes are missing, or there are several")
        # zipfile from 3.12 on takes another name from here.
        names = [data[5:] for tag, _, data in found if tag == _UNICODE_PATH]
        if any(other.partition(b"/")[2] != raw_name.partition(b"/")[2] for other in names):
            problems.add("zip-names-differ", name, f"an extra field calls it {text_of(names[0])[:80]}")
        if lacking:
            size, stored, header = widen(extra, size, stored, header)
    if disk or flags & _SECRET_FLAGS:
        problems.add("zip-unreadable-entry", name, "an encrypted or split entry; torch refuses it")
    if needed & 0xFF > _NEWEST_VERSION:
        problems.add("zip-one-reader", name, f"zipfile refuses it: it wants zip version {(needed & 0xFF) / 10}")
    if size and (marks & _DOS_DIRECTORY or raw_name[-1:] == b"/"):
        detail = "marked as a directory: torch reads nothing and takes whatever lies in memory, zipfile reads its bytes"
        problems.add("zip-directory-record", name, detail)
    if stored != size and (not method or not stored):
        problems.add("zip-headers-differ", name, f"{stored} bytes are stored as they are, but the entry says {size}")
    entry = Entry(raw_name, flags, method, crc, stored, size, header)
    return entry, name_at + n_name + n_extra + n_comment


def widen(extra: bytes, *values: int) -> list[int]:
    """Values of the zip64 field in place of those that are all ones, in the order the format fixes."""
    wide = next((data for tag, _, data in _extra_fields(extra) if tag == 1), b"")
    out: list[int] = []
    for value in values:
        if value == ALL32 and len(wide) >= 8:
            value, wide = int.from_bytes(wide[:8], "little"), wide[8:]  # noqa: PLW2901 - the point of the loop
        out.append(value)
    return out


def _extra_fields(extra: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Tag, stated length and data of each extra field; of one that is cut off, what is left."""
    position = 0
    while position + 4 <= len(extra):
        tag, length = EXTRA.unpack_from(extra, position)
        yield tag, length, extra[position + 4 : position + 4 + length]
        position += 4 + length


def _read_locals(
    source: Source, entries: list[Entry], data_end: int, prefix: str, problems: Problems
) -> tuple[dict[str, Record], bool]:
    """Each record's place, from its local header; and whether torch's writer made the first one.

    Records are named by their path below ``prefix``, those outside it by their whole path and a slash before it. Most
    headers begin with the same bytes as the one before, which agreed with the directory.
    """
    window, base = b"", 0
    wide = data_end if data_end < len(entries) * _NARROW else 0  # bytes left to read in wide windows: all of them once
    records: dict[str, Record] = {}
    spans: list[tuple[int, int, str]] = []
    by_torch, file_size = False, source.size
    plain, plain_flags, plain_method = b"", -1, -1
    for entry, name in zip(entries, names_below(entries, prefix), strict=True):
        raw_name, entry_flags, entry_method, entry_crc, entry_stored, entry_size, header = entry
        need = 30 + len(raw_name)
        at = header - base
        if at < 0 or at + need > len(window):
            base, at = header, 0
            window = source.read(base, max(need, _WIDE_WINDOW if wide > 0 else _WINDOW))
            wide -= len(window)
        if at + need > len(window) or window[at : at + 4] != b"PK\x03\x04":
            problems.add("zip-no-local-header", name, f"no record header at byte {header}")
            records[name] = Record(name, None, entry_size, entry_stored, entry_crc, entry_method)
            continue
        begin, n_name, n_extra = _LOCAL_IN_SHORT.unpack_from(window, at)
        offset = header + 30 + n_name + n_extra
        if window[at + 30 : at + 30 + n_name] != raw_name:
            problems.add("zip-names-differ", name, "the record's own header bears another name")
        if begin != plain or entry_flags != plain_flags or entry_method != plain_method:
            if _compare(entry, name, begin, source, offset - n_extra, n_extra, problems):
                plain, plain_flags, plain_method = begin, entry_flags, entry_method
            if not records:
                dated = any(begin[12:14])
                by_torch = not dated and n_extra >= 4 and b"FB" in source.read(offset - n_extra, n_extra)
        end = offset + entry_stored
        spans.append((header, end, name))
        if end > file_size:
            present = max(0, file_size - offset)
            problems.add("zip-record-cut", name, f"{present} of {entry_stored} bytes are in the file")
            offset, entry_stored = min(offset, file_size), present
        records[name] = _new(Record, (name, offset, entry_size, entry_stored, entry_crc, entry_method))
    spans.sort()
    reach, owner = 0, ""
    for header, end, name in spans:
        if header < reach:  # one payload behind many names is how a zip bomb is folded (CVE-2024-0450)
            problems.add("zip-overlap", name, f"shares bytes with {owner}")
        if end > reach:
            reach, owner = end, name
    if reach > data_end:
        problems.add("zip-overlap", owner, "reaches into the directory")
    records.pop("", None)
    return records, by_torch


def _compare(
    entry: Entry, name: str, begin: bytes, source: Source, extra_at: int, n_extra: int, problems: Problems
) -> bool:
    """Compare a local header with the directory; whether it leaves the numbers to it, as torch's writer does.

    torch and zipfile believe the directory; readers that stream believe the local header. They must agree.
    """
    _, _, flags, method, _, _, crc, stored, size = _LOCAL_NUMBERS.unpack(begin)
    later = flags & 8  # a zero then says that the number follows the data: what torch writes
    if flags == entry.flags and method == entry.method and later and not (crc or stored or size):
        return True
    if ALL32 in (stored, size):
        size, stored = widen(source.read(extra_at, n_extra), size, stored)
    if (flags ^ entry.flags) & _SECRET_FLAGS or method != entry.method:
        problems.add("zip-headers-differ", name, "flags or method differ between header and directory")
    if any(mine != theirs and (mine or not later) for mine, theirs in ((stored, entry.stored), (size, entry.size))):
        problems.add("zip-headers-differ", name, "the size differs between header and directory")
    if crc != entry.crc32 and (crc or not later):
        problems.add("zip-crc-differs", name, "the checksum differs between header and directory")
    return False


def read_payload(source: Source, record: Record, limit: int = MAX_PAYLOAD) -> Payload:
    """A record's bytes, unpacked if it is deflated, never more than it declares nor than ``limit``."""
    raw, problem = b"", ""
    if record.offset is None:
        problem = "its header is lost"
    elif record.size > limit or record.stored > limit:
        problem = f"{record.size} bytes are more than the {limit} we read"
    elif record.method == 0:
        raw = source.read(record.offset, record.stored)
    elif record.method == 8:
        try:
            # One byte more than declared shows a record that would go on: a bomb stops here.
            raw = b"".join(inflated(source, record.offset, record.stored, record.size + 1))
        except zlib_error as error:
            problem = f"its compressed data is damaged ({error})"
        if len(raw) > record.size:
            raw, problem = raw[: record.size], "it unpacks to more than it declares"
    else:
        problem = f"compression method {record.method} is not one torch reads"
    if not problem and len(raw) < record.size:
        problem = f"{len(raw)} of {record.size} bytes are in the file"
    if problem:
        return Payload(raw, intact=False, problem=problem)
    return Payload(raw[: record.size], intact=record.crc32 is None or crc32(raw) == record.crc32)


# -- an archive without its directory, read from the local headers: what is left of a cut-off checkpoint
#
# torch writes no sizes into local headers, so the walk has to know them: ``data.pkl`` ends where its pickle ends, a
# storage is as long as the pickle says, and other records end where a descriptor with their own checksum begins.
# torch.save writes ``data.pkl`` first (from 1.6 on), so a truncated file usually still tells what it held.

_DESCRIPTOR = b"PK\x07\x08"
_TWO = Struct("<2L")
_CHUNK = 1 << 20
_BLOCK = 512
_PICKLE_WINDOW = 1 << 16

_MAX_SEARCH = 256 << 20
"""How far the end of a record is looked for; only TorchScript writes large records before it tells their sizes."""

_MAX_STEPS = 1_000_000
"""A gigabyte of empty headers would keep us for minutes; 20,000 tensors are 20,006 records."""


def walk_index(source: Source, broken: ZipIndex) -> ZipIndex:
    """The records that can be found by going from header to header; the problems of ``broken`` and what was lost."""
    walk = _Walk(source, Problems(broken.problems))
    for _ in range(_MAX_STEPS):
        if not walk.step():
            break
    reached = min(walk.position, source.size)
    detail = f"{len(walk.records)} records were found without it, up to byte {reached} of {source.size}"
    walk.problems.add("zip-walked", detail=detail)
    # Zero bytes at the end, as far as a megabyte tells: a full disk, or a download that was set up and never came.
    tail = source.read(max(0, source.size - (1 << 20)), 1 << 20)
    zeros = len(tail) - len(tail.rstrip(b"\0"))
    if zeros >= _BLOCK:
        walk.problems.add("zeros-at-end", detail=f"the file ends in at least {zeros} zero bytes")
    problems = tuple(walk.problems)
    return ZipIndex(walk.root, walk.records, problems, by_torch=True, end=walk.position, ok=bool(walk.records))


class _Walk:
    def __init__(self, source: Source, problems: Problems) -> None:
        self.source = source
        self.problems = problems
        self.position = 0
        self.root = ""
        self.records: dict[str, Record] = {}
        self.sizes: dict[str, int] = {}  # of the storages, by key

    def step(self) -> bool:
        """Take the record at the present position; false where there is none, or it is cut."""
        raw = self.source.read(self.position, LOCAL.size)
        if len(raw) < LOCAL.size or raw[:4] != b"PK\x03\x04":
            return False
        _, _, flags, method, _, _, crc, stored, size, n_name, n_extra = LOCAL.unpack(raw)
        head = self.source.read(self.position + LOCAL.size, n_name + n_extra)
        if len(head) < n_name:
            return False
        name, extra = text_of(head[:n_name]), head[n_name:]
        if not self.records:
            self.root = name.partition("/")[0] if "/" in name else ""
        if self.root:
            name = name[len(self.root) + 1 :] if name.startswith(f"{self.root}/") else f"/{name}"
        if len(extra) < n_extra:
            if not self.records:  # all that is left, and it tells what the file was
                self._add(Record(name, None, 0, 0, None, method))
            return False
        offset = self.position + LOCAL.size + n_name + n_extra
        if ALL32 in (stored, size):
            size, stored = widen(extra, size, stored)
        if flags & 8 and not stored:
            stored, size = self._unpacked(offset) if method == 8 else (self._measure(name, offset),) * 2
        if stored < 0:
            return False
        present = max(0, min(stored, self.source.size - offset))
        end = offset + stored
        if flags & 8:
            # Its checksum is in the descriptor after it: 24 bytes where zip64 was needed, else 16.
            after = self.source.read(end, 24)
            crc = None
            if after[:4] == _DESCRIPTOR and len(after) >= 16:
                crc = int.from_bytes(after[4:8], "little")
                end += 24 if extra[:2] == b"\x01\x00" else 16
            elif end + 16 <= self.source.size:
                self.problems.add("zip-no-descriptor", name, f"none at byte {end}, where it should end")
        self._add(Record(name, offset, size, present, crc if present == stored else None, method))
        self.position = end
        return bool(present == stored and end < self.source.size)

    def _add(self, record: Record) -> None:
        """Enter a record; an earlier one of its name keeps a place under another, so that both are looked at."""
        earlier = self.records.pop(record.name, None)
        if earlier is not None:
            where = f"at byte {earlier.offset} and at byte {record.offset}"
            self.problems.add("zip-found-twice", record.name, where)
            aside = f"{earlier.name}@{earlier.offset}"
            self.records[aside] = earlier._replace(name=aside)
        self.records[record.name] = record

    def _measure(self, name: str, offset: int) -> int:
        """How long a record must be; -1 where nothing tells."""
        if name.endswith(".pkl"):
            from transload.formats.pickle_machine import run_at
            from transload.formats.tensors import claimed

            pickle, end = run_at(self.source, offset, name, _PICKLE_WINDOW)
            if pickle.broken:
                return max(0, self.source.size - offset)
            if name == "data.pkl":
                self.sizes = {key: slot.nbytes for key, slot in claimed(pickle).items()}
            return end - offset
        key = name.partition("/")[2]
        if key in self.sizes and name.startswith(("data/", "tensors/")):
            return self.sizes[key]
        return self._search(offset)

    def _search(self, offset: int) -> int:
        """Length of a record that ends where a descriptor with its own checksum begins; -1 if there is none."""
        value = 0
        for start in range(offset, min(offset + _MAX_SEARCH, self.source.size), _CHUNK):
            window = self.source.read(start, _CHUNK + 11)  # a descriptor may begin in this chunk and end in the next
            done, at = 0, window.find(_DESCRIPTOR)
            while 0 <= at < _CHUNK:
                value, done = crc32(window[done:at], value), at
                length = start + at - offset
                if window[at + 4 : at + 12] == _TWO.pack(value, length & ALL32):
                    return length
                at = window.find(_DESCRIPTOR, at + 1)
            value = crc32(window[done:_CHUNK], value)
        return -1

    def _unpacked(self, offset: int) -> tuple[int, int]:
        """Both lengths of a deflated record, which tells its own end; -1 if it does not. TorchScript packs its code."""
        unpack, size = decompressobj(-15), 0
        for start in range(offset, min(offset + _MAX_SEARCH, self.source.size), _BLOCK):
            try:
                size += len(unpack.decompress(self.source.read(start, _BLOCK)))
            except zlib_error:
                break
            if unpack.eof:
                return start + _BLOCK - len(unpack.unused_data) - offset, size
        return -1, -1


# -- what torch writes around records


def local_header(name: bytes, size: int, offset: int, alignment: int = ALIGNMENT) -> bytes:
    """What stands before the bytes of a record, with the padding that brings them to a multiple of ``alignment``.

    ``name`` is the whole name, its folder with it; ``offset`` is where the header begins in the archive.
    """
    wide = _wide(size, 0, offset)
    padding = -(offset + LOCAL.size + len(name) + len(wide) + EXTRA.size) % alignment
    flags = _FLAGS if size else _FLAGS_OF_NOTHING
    extra = len(wide) + EXTRA.size + padding
    head = LOCAL.pack(b"PK\x03\x04", 0, flags, 0, 0, 0, 0, 0, 0, len(name), extra)
    return b"".join((head, name, wide, b"FB", padding.to_bytes(2, "little"), b"Z" * padding))


def descriptor(size: int, crc32: int, offset: int) -> bytes:
    """What follows the bytes of a record whose header begins at ``offset``: nothing if it has none."""
    if not size:
        return b""
    form = DESCRIPTOR64 if max(size, offset) >= ALL32 else DESCRIPTOR
    return form.pack(b"PK\x07\x08", crc32, size, size)


def central_entry(name: bytes, size: int, crc32: int, offset: int) -> bytes:
    """The line of the directory for a record whose header begins at ``offset``."""
    wide = _wide(size, size, offset)
    flags = _FLAGS if size else _FLAGS_OF_NOTHING
    told = min(size, ALL32)
    rest = (len(name), len(wide), 0, 0, 0, 0, min(offset, ALL32))
    head = CENTRAL.pack(b"PK\x01\x02", 0, 0, flags, 0, 0, 0, crc32, told, told, *rest)
    return head + name + wide if wide else head + name


def end_of_archive(count: int, start: int, size: int) -> bytes:
    """What follows a directory of ``count`` entries and ``size`` bytes which begins at ``start``; it ends the file."""
    end = start + size
    wide = END64.pack(b"PK\x06\x06", END64.size - 12, _MADE_BY, _NEEDED, 0, 0, count, count, size, start)
    locator = LOCATOR64.pack(b"PK\x06\x07", 0, end, 1)
    told = min(count, 0xFFFF)
    return wide + locator + END.pack(b"PK\x05\x06", 0, 0, told, told, min(size, ALL32), min(start, ALL32), 0)


def small_records(
    named: Iterable[tuple[bytes, bytes]], offset: int, alignment: int, checksums: list[int]
) -> tuple[list[bytes], list[bytes], int]:
    """The bytes of records from ``offset`` on, those of their directory, and where they end; each in many parts.

    What ``local_header``, ``descriptor`` and ``central_entry`` would make, at a third of the time.
    """
    out: list[bytes] = []
    entries: list[bytes] = []
    fillers: dict[int, bytes] = {}
    lengths, describe, enter = EXTRA.pack, DESCRIPTOR.pack, _CENTRAL_IN_SHORT.pack
    for name, content in named:
        size, length, checksum = len(content), len(name), crc32(content)
        checksums.append(checksum)
        if not size or offset >= ALL32 - size:
            header = local_header(name, size, offset, alignment)
            tail = descriptor(size, checksum, offset)
            out += (header, content, tail)
            entries.append(central_entry(name, size, checksum, offset))
            offset += len(header) + size + len(tail)
            continue
        least = offset + 34 + length
        padding = -least % alignment
        if padding not in fillers:
            fillers[padding] = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
        out += (
            _LOCAL_HEAD,
            lengths(length, padding + 4),
            name,
            fillers[padding],
            content,
            describe(b"PK\x07\x08", checksum, size, size),
        )
        entries += (enter(_CENTRAL_HEAD, checksum, size, size, length, _NOTHING_ELSE, offset), name)
        offset = least + padding + size + 16
    return out, entries, offset


def _wide(size: int, stored: int, offset: int) -> bytes:
    """The field of what does not fit into 32 bits: empty if all does."""
    if size < ALL32 and offset < ALL32:
        return b""
    numbers = [size, stored] if size >= ALL32 else []
    if offset >= ALL32:
        numbers.append(offset)
    return EXTRA.pack(1, 8 * len(numbers)) + b"".join(number.to_bytes(8, "little") for number in numbers)
