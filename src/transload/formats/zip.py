"""Zip archives: their structures, and a reader of their directory.

An archive is

    header · bytes · descriptor, for each record; central entry, for each record; end

``read_index`` reads the end record, the central directory and every local header, and compares them: what two readers
could read differently is a problem. ``read_payload`` reads one record.

An archive has tens of thousands of entries, nearly all of them ordinary. So names are first checked all at once, and
headers are first compared with the one before.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from struct import Struct
from zlib import crc32
from zlib import error as zlib_error

from transload.checkpoint import Record
from transload.findings import Problem, Problems
from transload.frozen import NamedTuple
from transload.io.sources import Claim, Source

# The structures; each begins with its signature.
LOCAL = Struct("<4s5H3L2H")
CENTRAL = Struct("<4s6H3L5H2L")
DESCRIPTOR = Struct("<4s3L")
DESCRIPTOR64 = Struct("<4sL2Q")
END = Struct("<4s4H2LH")
END64 = Struct("<4sQ2H2L4Q")
LOCATOR64 = Struct("<4sLQL")
EXTRA = Struct("<2H")  # tag and length of an extra field
ALL32 = 0xFFFFFFFF  # means that the number is in the zip64 field
DEFLATED = 8

# The same, with the fields that rarely change between records as one.
_LOCAL_IN_SHORT = Struct("<26s2H")
_LOCAL_NUMBERS = Struct("<4s5H3L")
CENTRAL_IN_SHORT = Struct("<16s3LH12sL")
NOTHING_ELSE = bytes(12)  # no extra field, no comment, disk 0, no attributes

MAX_PAYLOAD = 512 << 20  # larger records are not read into memory; the index of 20,000 tensors takes 2 MB
_MAX_ENTRIES = 1_000_000  # an entry of 47 bytes costs a kilobyte of memory; 20,000 tensors are 20,006 entries
_TAIL = 4096 + 16 * 4093  # torch looks for the end record in steps of 4 KiB, and so a little further back than zipfile
_NEWEST_VERSION = 63  # "version needed to extract": zipfile refuses an archive that says more, torch does not look
_DOS_DIRECTORY = 0x10
_UNICODE_PATH = 0x7075
_ENCRYPTION_FLAGS = 0x2061  # encrypted, patch data, strong encryption, masked header: torch refuses them
_ENCRYPTED = (
    "the archive is protected by a password",
    ("Unpack it with its password (unzip and 7z ask for it), and zip the folder that was in it again without one.",),
)
_WINDOW = 4096
_WIDE_WINDOW = 256 << 10
_LONGEST_EXTRA = 0xFFFF
_NARROW = 8 << 10  # if there are fewer bytes between headers, many are read at a time
_new = tuple.__new__  # makes a named tuple without calling its __new__, which is a Python function

FOLDER_PROBLEMS = ("zip-no-folder", "zip-two-folders")  # only torch's own readers need a folder around the records
ALIGNMENT = 64  # torch's default, with which every vector unit reads the tensors of a mapped file at full speed


class DirectoryEntry(NamedTuple):
    """One line of the central directory."""

    raw_name: bytes
    flags: int
    method: int
    crc32: int
    stored: int
    size: int
    header: int


def text_of(raw: bytes) -> str:
    """A name as text; bytes that are not UTF-8 are escaped."""
    return raw.decode("utf-8", "backslashreplace")


def check_names(entries: list[DirectoryEntry], problems: Problems) -> None:
    """Note names that readers could confuse, or read differently: check all at once, or one by one if any is odd."""
    joined = b"\n".join([b"", *[entry[0] for entry in entries]])
    unusual = not joined.isascii() or b"\0" in joined or b"\\" in joined or b".." in joined or b"\n/" in joined
    names = joined.lower().split(b"\n")[1:]
    if not unusual and len(set(names)) == len(names) == len(entries):
        return
    seen: dict[bytes, DirectoryEntry] = {}
    for entry in entries:
        raw = entry[0]
        name = text_of(raw)
        folded = raw.lower()  # miniz compares ASCII letters without case, over an unstable sort
        before = seen.get(folded)
        # torch 1.1 wrote the code of a shared submodule once for each of its names.
        if before is not None and not (b"/code/" in raw and before[:6] == entry[:6]):
            detail = f"it repeats {text_of(before[0])}: which of them torch reads is unpredictable"
            problems.add("zip-duplicate-name", name, detail)
        seen[folded] = entry
        if b"\0" in raw:
            problems.add("zip-nul-name", name, "zipfile cuts a name at a NUL byte, torch does not")
        if b"\\" in raw or raw[:1] == b"/" or (b".." in raw and b".." in raw.split(b"/")):
            problems.add("zip-odd-name", name, "not a plain path below one folder")
        if raw.decode("utf-8", "replace") != name:
            problems.add("zip-name-encoding", name, "it is not UTF-8")


def find_root(entries: list[DirectoryEntry], problems: Problems) -> str | None:
    """The folder that torch reads records from: the first entry's or, if that has no index, one that has.

    ``None`` if the records are not in a folder.
    """
    first = entries[0].raw_name
    folder, slash, _ = first.partition(b"/")
    if not slash:
        problems.add("zip-no-folder", text_of(first), "records are at the top; torch needs them in one folder")
        return None
    inside = folder + b"/"
    outside = [entry.raw_name for entry in entries if not entry.raw_name.startswith(inside)]
    if outside:
        detail = f"{len(outside)} records are outside the folder {text_of(folder)}/"
        problems.add("zip-two-folders", text_of(outside[0]), detail)
        indexed = [raw[:-9] for raw in outside if raw.count(b"/") == 1 and raw.endswith(b"/data.pkl")]
        if indexed and folder + b"/data.pkl" not in {entry.raw_name for entry in entries}:
            return text_of(indexed[0])
    return text_of(folder)


def names_below(raw_names: list[bytes], prefix: str) -> list[str]:
    """The path of each record below ``prefix``; outside it, the whole path after a slash."""
    joined = b"\n".join([b"", *raw_names])
    names = text_of(joined).split(f"\n{prefix}")
    if joined.count(b"\n") == len(raw_names) == len(names) - 1:  # as nearly always
        return names[1:]
    names = [text_of(raw) for raw in raw_names]
    return [name[len(prefix) :] if name.startswith(prefix) else f"/{name}" for name in names]


def full_name(root: str, name: str) -> str:
    """The whole path of a record, whose ``name`` is relative to the folder ``root`` unless it begins with a slash."""
    return f"{root}/{name}" if root and name[:1] != "/" else name.removeprefix("/")


class Payload(NamedTuple):
    """The bytes of a record, or why there are none. ``intact`` is whether the checksum agrees."""

    data: bytes
    intact: bool
    problem: str = ""


class ZipIndex(NamedTuple):
    """The records of an archive by name below ``root``, the folder of the first entry, in directory order."""

    root: str
    records: dict[str, Record]
    problems: tuple[Problem, ...]
    ok: bool = True
    unread: int = 0
    """How many records of a file elsewhere have headers that are read, and compared, only when the records are."""

    @property
    def names(self) -> list[str]:
        """The full names of the records."""
        return [full_name(self.root, name) for name in self.records]


def starts_like_zip(source: Source) -> bool:
    """Whether torch takes it for a zip archive: it only checks the first four bytes."""
    return source.read(0, 4) == b"PK\x03\x04"


def ends_like_zip(source: Source) -> bool:
    """Whether zipfile would open it: it has an end record and a directory, but may begin with anything."""
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


def read_index(source: Source, *, headers: bool = False, loading: bool = False) -> ZipIndex:
    """Read the central directory and every local header, and compare them. Never raises for bad content.

    Of a ``far`` source, local headers are read only with ``headers``: where records are follows from the directory,
    and each header is compared when its record is read. So it is with a source that is not quick, for a program that is
    ``loading`` it and calls ``check_claims`` in the end.
    """
    problems = Problems()
    try:
        start, size, count = find_directory(source, problems)
        entries = _read_directory(source, start, size, count, problems)
    except _NoDirectoryError as reason:
        problems.add("zip-no-directory", detail=str(reason))
        return ZipIndex("", {}, tuple(problems), ok=False)
    check_names(entries, problems)
    root = find_root(entries, problems)
    late = not headers and (source.far or (loading and source.pace != "quick"))
    inferred = _infer_offsets(source, entries, start) if late else {}
    records = _read_locals(source, entries, start, "" if root is None else f"{root}/", problems, inferred)
    if not any(entry.crc32 for entry in entries) and any(entry.size for entry in entries):
        problems.add("no-checksums", detail="every checksum in it is zero: it was saved with checksums switched off")
        records = {name: record._replace(crc32=None) for name, record in records.items()}
    return ZipIndex(root or "", records, tuple(problems), unread=len(inferred))


class _NoDirectoryError(Exception):
    """There is no directory to read; the text says why."""


def find_directory(source: Source, problems: Problems) -> tuple[int, int, int]:
    """Offset, size and entry count of the central directory according to the end record, as torch reads them."""
    base, tail = _end(source)
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
            problems.add("zip-two-ends", detail="one end record is in the comment of another")
            break
        before = tail.rfind(b"PK\x05\x06", 0, before)
    if disk or cd_disk or here != count:
        problems.add("zip-multi-disk", detail="the end record lists several disks; torch refuses that")
    locator = source.read(end - 20, 20) if end >= END64.size + 20 else b""
    if locator[:4] == b"PK\x06\x07":
        # torch looks for the zip64 end record where the locator says, and uses the plain one if it is not there;
        # zipfile (before 2025) ignores that offset, and looks right before the locator.
        _, first_disk, stated, disks = LOCATOR64.unpack(locator)
        beside = end - 20 - END64.size
        raw = source.read(stated, END64.size)
        is_end = len(raw) == END64.size and raw[:4] == b"PK\x06\x06"
        if is_end != (source.read(beside, 4) == b"PK\x06\x06") or (is_end and stated != beside):
            before = beside - stated  # its own positions count from where the archive begins
            edge = source.read(before - END.size, END.size + 4) if before >= END.size else b""
            if edge[:4] == b"PK\x05\x06" and edge[END.size :] == b"PK\x03\x04":
                problems.add("zip-more-archives", detail=f"the last one begins at byte {before:,}")
            else:
                problems.add("zip-shifted", detail="the zip64 end record is not where its locator says")
        if stated + END64.size > source.size:
            raise _NoDirectoryError("the zip64 end record is not where its locator says")
        if not is_end:
            problems.add("zip-directory-broken", detail="the zip64 end record is invalid")
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
        # torch uses the stated offset; zipfile assumes that the directory ends at the end record.
        says = f"the end record puts the directory at {start} (torch reads there)"
        really = f"it really ends at {directory_end}, so zipfile reads at {directory_end - size}"
        shifted = start + size <= source.size and source.read(start, 4) == b"PK\x01\x02"
        problems.add("zip-shifted" if shifted else "zip-misplaced", detail=f"{says}, {really}")
        if not shifted:
            raise _NoDirectoryError(f"there is no directory at byte {start}, where the end record puts it")
    if size > MAX_PAYLOAD:
        detail = f"a directory of {size} bytes is more than the limit of {MAX_PAYLOAD}"
        problems.add("zip-directory-broken", detail=detail)
        raise _NoDirectoryError("the directory is too large to be one")
    return start, size, count


def _end(source: Source) -> tuple[int, bytes]:
    """Where to look for the end record, and the bytes from there on.

    Of a ``far`` source that is what is at hand, if the end record is at the end of it, where torch looks first. Another
    one before that, which zipfile would not take either, is then not noted.
    """
    base, short = max(0, source.size - _TAIL), max(0, source.size - END.size)
    if source.far and not source.holds(base, source.size - base) and source.holds(short, END.size):
        tail = source.read(short, END.size)
        if tail[:4] == b"PK\x05\x06" and tail[-2:] == bytes(2):
            return short, tail
    return base, source.read(base, _TAIL)


def _read_directory(source: Source, start: int, size: int, count: int, problems: Problems) -> list[DirectoryEntry]:
    """Read all entries. Most begin with the same sixteen bytes as the one before, and have nothing but a name."""
    if count * CENTRAL.size > size:  # four billion entries claimed in a kilobyte
        problems.add("zip-count", detail=f"{count} entries cannot fit into a directory of {size} bytes")
    raw = source.read(start, size)
    entries: list[DirectoryEntry] = []
    position, last = 0, len(raw) - CENTRAL.size
    plain, flags, method = b"", 0, 0  # how the last ordinary entry began
    while position <= last and len(entries) < _MAX_ENTRIES:
        begin, crc, stored, nbytes, n_name, rest, header = CENTRAL_IN_SHORT.unpack_from(raw, position)
        end = position + CENTRAL.size + n_name
        if begin == plain and rest == NOTHING_ELSE and stored == nbytes and raw[end - 1 : end] != b"/":
            name = raw[position + CENTRAL.size : end]
            entries.append(_new(DirectoryEntry, (name, flags, method, crc, stored, nbytes, header)))
            position = end
        elif begin[:4] == b"PK\x01\x02":
            count_before = len(problems)
            entry, position = read_entry(raw, position, problems)
            entries.append(entry)
            plain, flags, method = begin if len(problems) == count_before else b"", entry.flags, entry.method
        else:
            break
    if len(entries) >= _MAX_ENTRIES:
        problems.add("zip-count", detail=f"only the first {_MAX_ENTRIES} records were looked at")
        return entries
    if position != len(raw):
        detail = f"entry {len(entries)} of {count} in the directory is invalid"
        if position < len(raw) and len(entries) < count:  # torch and zipfile refuse the archive
            raise _NoDirectoryError(detail)
        problems.add("zip-directory-broken", detail=detail)
    if not entries:
        raise _NoDirectoryError("the directory has no entry")
    if len(entries) != count:
        problems.add("zip-count", detail=f"the directory has {len(entries)} entries, its end record says {count}")
    return entries


def read_entry(raw: bytes, position: int, problems: Problems) -> tuple[DirectoryEntry, int]:
    """An entry, and where it ends. Note what torch and zipfile read differently, or one refuses."""
    fields = CENTRAL.unpack_from(raw, position)
    _, _, needed, flags, method, _, _, crc, stored, size, n_name, n_extra, n_comment, disk, _, marks, header = fields
    name_at = position + CENTRAL.size
    raw_name = raw[name_at : name_at + n_name]
    name = text_of(raw_name)
    if n_extra:
        extra = raw[name_at + n_name : name_at + n_name + n_extra]
        fields_found = list(_extra_fields(extra))
        if sum(4 + length for _, length, _ in fields_found) > len(extra):
            problems.add("zip-one-reader", name, "zipfile refuses it: its extra fields are cut off")
        wide = [data for tag, _, data in fields_found if tag == 1]
        lacking = 8 * (size, stored, header).count(ALL32)
        if lacking and (len(wide) != 1 or len(wide[0]) < lacking):
            problems.add("zip-headers-differ", name, "its zip64 sizes are missing, or there are several")
        # zipfile uses this name from Python 3.12 on.
        names = [data[5:] for tag, _, data in fields_found if tag == _UNICODE_PATH]
        if any(other.partition(b"/")[2] != raw_name.partition(b"/")[2] for other in names):
            problems.add("zip-names-differ", name, f"an extra field calls it {text_of(names[0])[:80]}")
        if lacking:
            size, stored, header = widen(extra, size, stored, header)
    encrypted = flags & _ENCRYPTION_FLAGS
    if encrypted:
        problems.append(Problem("zip-unreadable-entry", name, "encrypted; torch refuses it", *_ENCRYPTED))
    elif disk:
        problems.add("zip-unreadable-entry", name, "in another part of a split archive; torch refuses it")
    if needed & 0xFF > _NEWEST_VERSION:
        problems.add("zip-one-reader", name, f"zipfile refuses it: it needs zip version {(needed & 0xFF) / 10}")
    if size and (marks & _DOS_DIRECTORY or raw_name[-1:] == b"/"):
        detail = "marked as a directory: torch reads nothing and uses uninitialized memory, zipfile reads its bytes"
        problems.add("zip-directory-record", name, detail)
    if stored != size and (not method or not stored) and not (encrypted and stored > size):  # 12 bytes check the key
        problems.add("zip-headers-differ", name, f"{stored} bytes are stored as they are, but the entry says {size}")
    entry = DirectoryEntry(raw_name, flags, method, crc, stored, size, header)
    return entry, name_at + n_name + n_extra + n_comment


def widen(extra: bytes, *values: int) -> list[int]:
    """Replace values that are all ones by those of the zip64 field, in order."""
    wide = next((data for tag, _, data in _extra_fields(extra) if tag == 1), b"")
    out: list[int] = []
    for value in values:
        if value == ALL32 and len(wide) >= 8:
            value, wide = int.from_bytes(wide[:8], "little"), wide[8:]  # noqa: PLW2901 - the point of the loop
        out.append(value)
    return out


def _extra_fields(extra: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Tag, stated length and data of each extra field; the data may be cut off."""
    position = 0
    while position + 4 <= len(extra):
        tag, length = EXTRA.unpack_from(extra, position)
        yield tag, length, extra[position + 4 : position + 4 + length]
        position += 4 + length


def _infer_offsets(source: Source, entries: list[DirectoryEntry], data_end: int) -> dict[int, int]:
    """Where the bytes of records are, by their headers: right before the next header, or its descriptor before that.

    That is how every program writes archives; where it cannot be, and where the header is at hand, it must be read.
    """
    offsets: dict[int, int] = {}
    following = data_end
    for raw_name, flags, _, _, stored, size, header in sorted(entries, key=lambda entry: -entry[6]):
        wide = max(stored, size, header) >= ALL32
        descriptor = (DESCRIPTOR64 if wide else DESCRIPTOR).size if flags & 8 and size else 0
        offset = following - descriptor - stored
        named = header + LOCAL.size + len(raw_name)
        if named <= offset <= named + _LONGEST_EXTRA and not source.holds(header, named - header):
            offsets[header] = offset
        following = header
    return offsets


def _wrong_header(entry: DirectoryEntry, name: str, offset: int, raw: bytes) -> str:
    """What is wrong with a local header that was not read when the directory was; ``raw`` is all before the bytes."""
    problems = Problems()
    if raw[:4] != b"PK\x03\x04" or len(raw) < LOCAL.size:
        return f"{name}: no record header at byte {entry.header}"
    begin, n_name, n_extra = _LOCAL_IN_SHORT.unpack_from(raw)
    extra = raw[30 + n_name :]
    if raw[30 : 30 + n_name] != entry.raw_name:
        return f"{name}: the record's own header has another name"
    if entry.size and entry.header + 30 + n_name + n_extra != offset:
        return f"{name}: the record's own header puts its bytes elsewhere than the directory"
    _compare_header(begin, entry, extra, name, problems)
    return f"{name}: {problems[0].detail}" if problems else ""


def _compare_header(begin: bytes, entry: DirectoryEntry, extra: bytes, name: str, problems: Problems) -> bool:
    """Note where a local header differs from the directory; whether it is as torch writes it.

    torch and zipfile use the directory; readers that stream use the local header. They must agree.
    """
    _, _, flags, method, _, _, crc, stored, size = _LOCAL_NUMBERS.unpack(begin)
    later = flags & 8  # a zero means that the number follows the data, as torch writes it
    plain = flags == entry.flags and method == entry.method and bool(later) and not (crc or stored or size)
    if ALL32 in (stored, size):
        size, stored = widen(extra, size, stored)
    if (flags ^ entry.flags) & _ENCRYPTION_FLAGS or method != entry.method:
        problems.add("zip-headers-differ", name, "flags or method differ between header and directory")
    sizes = ((stored, entry.stored), (size, entry.size))
    if any(mine != listed and (mine or not later) for mine, listed in sizes):
        problems.add("zip-headers-differ", name, "the size differs between header and directory")
    if crc != entry.crc32 and (crc or not later):
        problems.add("zip-crc-differs", name, "the checksum differs between header and directory")
    return plain


def _read_locals(
    source: Source,
    entries: list[DirectoryEntry],
    data_end: int,
    prefix: str,
    problems: Problems,
    inferred: dict[int, int],
) -> dict[str, Record]:
    """Each record, with its offset from its local header, unless that is ``inferred``.

    Records have the names of ``names_below``. Most headers begin with the same bytes as the one before, which agreed
    with the directory.
    """
    window, base = b"", 0
    claims: list[Claim] = []
    fetched: dict[int, bytes] = {}
    if source.far:
        unknown = [entry for entry in entries if entry.header not in inferred]
        unknown = [entry for entry in unknown if not source.holds(entry.header, 30 + len(entry.raw_name))]
        raw = source.read_all([(entry.header, 30 + len(entry.raw_name) + 64) for entry in unknown])
        fetched = dict(zip((entry.header for entry in unknown), raw, strict=True))
    elif source.pace != "quick" and not inferred:
        source.prepare([(entry.header, max(30 + len(entry.raw_name), _WINDOW)) for entry in entries])
    wide = data_end if data_end < len(entries) * _NARROW else 0  # bytes left to read in wide windows: all of them once
    records: dict[str, Record] = {}
    spans: list[tuple[int, int, str]] = []
    file_size = source.size
    plain, plain_flags, plain_method = b"", -1, -1
    for entry, name in zip(entries, names_below([entry[0] for entry in entries], prefix), strict=True):
        raw_name, entry_flags, entry_method, entry_crc, entry_stored, entry_size, header = entry
        if inferred and header in inferred:
            offset = inferred[header]
            claims.append(Claim(header, offset, offset + entry_stored, partial(_wrong_header, entry, name, offset)))
            spans.append((header, offset + entry_stored, name))
            records[name] = _new(Record, (name, offset, entry_size, entry_stored, entry_crc, entry_method))
            continue
        need = 30 + len(raw_name)
        at = header - base
        if at < 0 or at + need > len(window):
            base, at = header, 0
            most = need if source.far else max(need, _WIDE_WINDOW if wide > 0 else _WINDOW)
            window = fetched.get(header, b"") or source.read(base, most)
            wide -= len(window)
        if at + need > len(window) or window[at : at + 4] != b"PK\x03\x04":
            problems.add("zip-no-local-header", name, f"no record header at byte {header}")
            records[name] = Record(name, None, entry_size, entry_stored, entry_crc, entry_method)
            continue
        begin, n_name, n_extra = _LOCAL_IN_SHORT.unpack_from(window, at)
        offset = header + 30 + n_name + n_extra
        if n_name != len(raw_name) or window[at + 30 : at + need] != raw_name:
            problems.add("zip-names-differ", name, "the record's own header has another name")
        if begin != plain or entry_flags != plain_flags or entry_method != plain_method:
            wide_sizes = begin[-8:-4] == b"\xff" * 4 or begin[-4:] == b"\xff" * 4
            extra = source.read(offset - n_extra, n_extra) if wide_sizes else b""
            if _compare_header(begin, entry, extra, name, problems):
                plain, plain_flags, plain_method = begin, entry_flags, entry_method
        end = offset + entry_stored
        spans.append((header, end, name))
        if end > file_size:
            present = max(0, file_size - offset)
            problems.add("zip-record-cut", name, f"{present} of {entry_stored} bytes are in the file")
            offset, entry_stored = min(offset, file_size), present
        # If the lengths of its names differ, nobody knows where its bytes begin.
        known = offset if n_name == len(raw_name) else None
        records[name] = _new(Record, (name, known, entry_size, entry_stored, entry_crc, entry_method))
    spans.sort()
    reach, owner = 0, ""
    for header, end, name in spans:
        if header < reach:  # in a zip bomb many names share one payload (CVE-2024-0450)
            problems.add("zip-overlap", name, f"shares bytes with {owner}")
        if end > reach:
            reach, owner = end, name
    if reach > data_end:
        problems.add("zip-overlap", owner, "reaches into the directory")
    records.pop("", None)
    source.expect(claims)
    return records


def read_payload(source: Source, record: Record, limit: int = MAX_PAYLOAD) -> Payload:
    """Read and inflate a record: no more bytes than it declares, nor than ``limit``."""
    raw, problem = b"", ""
    if record.offset is None:
        problem = "its header is lost"
    elif record.size > limit or record.stored > limit:
        problem = f"{record.size} bytes are more than the limit of {limit}"
    elif record.method == 0:
        raw = source.read(record.offset, record.stored)
    elif record.method == DEFLATED:
        from transload.io.packed import inflated

        try:
            # One byte more than declared is enough to detect a record that is too long.
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
