"""Recover a damaged archive, and lay out archives as torch does.

Every byte of an archive written by torch that is not inside a record follows from the names, sizes and checksums of
its records. Once those are known, an undamaged copy can be made, and wherever it differs from the file, the file is
damaged. ``recover_archive`` checks every record, undoes flipped bits, and rebuilds headers and directory.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from struct import pack_into
from zlib import crc32

from transload.errors import RescueError
from transload.formats.torch_zip import RECORD as ORIGIN_RECORD
from transload.formats.zip import ALIGNMENT, LOCAL, text_of
from transload.formats.zip_scan import HAS_DESCRIPTOR, FoundRecord, Scan
from transload.formats.zip_writer import central_entry, descriptor, end_of_archive, local_header
from transload.frozen import NamedTuple
from transload.io.folder import Folder
from transload.io.packed import MAX_RATIO, Assembly, Inflating, SourceRange
from transload.io.sources import BytesSource, Source
from transload.render.words import plural
from transload.rescuing.bitflips import Claim, Repair, Verdict, check_records, repair_index, repaired_bytes
from transload.steps import tables

INDEX = "data.pkl"
NOT_IN_FILE = "its bytes are not in the file"
FEW = 8  # how many names a sentence lists
_UTF8 = 0x0800
_CHUNK = 1 << 20


class LostRange(NamedTuple):
    """Bytes of a recovered file that differ from those that were saved, and why."""

    start: int
    end: int
    why: str


class LostRecord(NamedTuple):
    """A record that could not be recovered as it was saved, and why."""

    name: str
    why: str


class Recovered(NamedTuple):
    """A damaged file as it should be, ready to be read.

    ``exact`` is whether it is, as far as can be known, byte for byte the file that was saved. ``records`` are those of
    an archive, from which another archive can be laid out. ``unchecked`` are records without a checksum;
    ``all_unchecked`` is whether nothing in the file has one. ``repaired_at`` are the offsets of repaired bytes in the
    recovered file. ``nbytes`` is the size of the damaged file. ``warnings`` say what is uncertain. ``index_rebuilt`` is
    whether its index was rebuilt from what is left of a damaged one. ``following`` is where another checkpoint begins
    in the damaged file, which this one does not have; 0 if none does.
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
    index_rebuilt: bool = False
    following: int = 0


class Filler(Source):
    """A pattern repeated over ``size`` bytes, in place of lost bytes."""

    def __init__(self, size: int, pattern: bytes = b"\0") -> None:
        self.name, self.size, self._pattern = "<filler>", size, pattern

    def _read(self, offset: int, count: int) -> bytes:
        phase = offset % len(self._pattern)
        return (self._pattern * (count // len(self._pattern) + 2))[phase : phase + count]


def literal(data: bytes) -> SourceRange:
    """New bytes as a part."""
    return SourceRange(BytesSource(data), 0, len(data))


def replaced(source: Source, start: int, end: int, others: Iterable[tuple[int, SourceRange]]) -> Iterator[SourceRange]:
    """The bytes of a source from ``start`` to ``end``, with other parts in place of those at some offsets."""
    at = start
    for offset, part in others:
        if at <= offset < end and part.length:
            yield SourceRange(source, at, offset - at)
            yield part
            at = offset + part.length
    yield SourceRange(source, at, end - at)


def repaired(source: Source, offset: int, length: int, repairs: Iterable[Repair]) -> Iterator[SourceRange]:
    """Some bytes of a source, with repairs."""
    right = ((repair.position, literal(bytes([repair.new]))) for repair in sorted(repairs))
    return replaced(source, offset, offset + length, right)


def differences(offset: int, here: bytes, right: bytes, *, proven: bool = True) -> list[Repair]:
    """The repairs that turn the bytes at ``offset`` of a file into the right ones, as far as both go."""
    pairs = enumerate(zip(here, right, strict=False), offset) if here != right else ()
    return [Repair(at, old, new, "", "proven" if proven else "probable") for at, (old, new) in pairs if old != new]


def checksum(parts: Iterable[SourceRange]) -> int:
    """The CRC-32 of the concatenated parts."""
    source, value = Assembly(parts, ""), 0
    for start in range(0, source.size, _CHUNK):
        value = crc32(source.read(start, _CHUNK), value)
    return value


# -- archives


class ArchiveRecord(NamedTuple):
    """A record of an archive to be written.

    ``stored`` and ``size`` differ if it is compressed. ``padding`` is that of its header; with ``None`` its bytes are
    aligned. ``before`` are bytes in front of it that belong to no record. The directory is sorted by ``order``.
    ``header`` is its offset in the damaged file, -1 if it was not there; ``added`` is whether it is new. ``lost`` and
    ``repaired_at`` are as in ``Recovered``, relative to its first byte.
    """

    name: bytes
    content: tuple[SourceRange, ...]
    size: int
    stored: int
    crc32: int
    method: int = 0
    flags: int = _UTF8 | HAS_DESCRIPTOR
    time: int = 0
    date: int = 0
    padding: int | None = None
    before: tuple[SourceRange, ...] = ()
    order: int = 0
    header: int = -1
    added: bool = False
    lost: tuple[LostRange, ...] = ()
    repaired_at: tuple[int, ...] = ()


def name_below_root(name: bytes) -> str:
    """The name of a record without the folder of its archive."""
    return text_of(name.partition(b"/")[2] or name)


def stored_record(name: bytes, part: SourceRange, *, order: int = 0, crc32: int | None = None) -> ArchiveRecord:
    """An uncompressed record. Its checksum is computed unless it is given."""
    flags = _UTF8 | HAS_DESCRIPTOR if part.length else _UTF8  # torch writes no descriptor behind an empty record
    value = checksum([part]) if crc32 is None else crc32
    return ArchiveRecord(name, (part,), part.length, part.length, value, flags=flags, order=order)


class RebuiltArchive(Assembly):
    """An archive of these records; ``after`` are parts between the last record and the directory.

    ``generated`` are the headers, descriptors and the directory, with their offsets. ``starts`` is where the bytes of
    each record begin, by its name.
    """

    def __init__(self, records: Iterable[ArchiveRecord], name: str, after: Iterable[SourceRange] = ()) -> None:
        self.generated: list[tuple[int, bytes]] = []
        self.starts: dict[bytes, int] = {}
        parts: list[SourceRange] = []
        entries: list[tuple[int, bytes]] = []
        at = 0

        def put(*more: SourceRange) -> None:
            nonlocal at
            parts.extend(more)
            at += sum(part.length for part in more)

        def generate(data: bytes) -> None:
            self.generated.append((at, data))
            put(literal(data))

        for record in records:
            put(*record.before)
            # torch's writer stores records uncompressed, without a date. Other archives have compression, flags, times,
            # and another padding, which is kept.
            header = bytearray(local_header(record.name, record.stored, at, ALIGNMENT if record.padding is None else 1))
            if record.padding is not None:
                header[-2:] = record.padding.to_bytes(2, "little") + b"Z" * record.padding
                pack_into("<H", header, 28, (len(header) - LOCAL.size - len(record.name)) & 0xFFFF)
            entry = bytearray(central_entry(record.name, record.stored, record.crc32, at))
            common = (20 if record.method else 0, record.flags, record.method, record.time, record.date)
            pack_into("<5H", header, 4, *common)
            pack_into("<5H", entry, 6, *common)
            behind = descriptor(record.stored, record.crc32, at) if record.flags & HAS_DESCRIPTOR else b""
            if record.size != record.stored:
                pack_into("<L", entry, 24, record.size)
                width = (len(behind) - 8) // 2
                behind = behind[:-width] + record.size.to_bytes(width, "little") if behind else b""
            if record.stored and not behind:
                pack_into("<3L", header, 14, record.crc32, record.stored & 0xFFFFFFFF, record.size & 0xFFFFFFFF)
            entries.append((record.order, bytes(entry)))
            generate(bytes(header))
            self.starts.setdefault(record.name, at)
            put(*record.content)
            generate(behind)
        put(*after)
        directory = b"".join(entry for _, entry in sorted(entries, key=itemgetter(0)))
        generate(directory + end_of_archive(len(entries), at, len(directory)))
        super().__init__(parts, name)


def with_records(
    recovered: Recovered, records: Sequence[ArchiveRecord], archive: RebuiltArchive | None = None
) -> Recovered:
    """A recovered archive with other records, and what is lost and repaired in them."""
    archive = archive or RebuiltArchive(records, recovered.source.name)
    placed = [(archive.starts[record.name], record) for record in records]
    return recovered._replace(
        source=archive,
        records=tuple(records),
        lost_ranges=tuple(LostRange(at + lost.start, at + lost.end, lost.why) for at, r in placed for lost in r.lost),
        repaired_at=tuple(at + byte for at, record in placed for byte in record.repaired_at),
    )


# -- a damaged archive

# Records that torch reads as a number, and the most digits of each. torch refuses a file with anything else there.
_NUMBERS = {"version": 3, ".data/version": 3, ".storage_alignment": 6, ".data/serialization_id": 40}
# Records that do not describe the content: ``version`` can be rebuilt, torch does not need the others.
METADATA = frozenset({*_NUMBERS, ORIGIN_RECORD})
_MAX_REPAIRS = 4096
_MAX_DESCRIPTOR = 24
_MAX_FLIPPED = 2  # bits in which two copies of a checksum may differ
_BYTE_ORDERS = {3: b"big", 6: b"little"}  # the record ``byteorder`` by its length, which is enough to rebuild it


def recover_archive(source: Source) -> Recovered | None:
    """The archive that begins at byte 0 of a source; ``None`` if there is no record in it."""
    scan = Scan(source, repaired_bytes)
    checked = _check(source, scan)
    if not checked:
        return None
    padded = sum(record.local is not None and record.local.padded for record in scan.records)
    by_torch = 2 * padded > len(scan.records)
    records, lost = _rebuild(source, scan, checked, by_torch=by_torch)
    notes: list[str] = []
    after: list[SourceRange] = []
    if not by_torch:
        records = _normalized(records, notes)
    else:
        if not _has_checksums(scan.records):
            records = [record._replace(crc32=0) for record in records]
        # Bytes before the directory that belong to no record. A retagged file has some, where its old index was.
        start, stated = scan.directory.start, scan.directory.stated
        if max((record.end for record in scan.records), default=0) <= stated < start:
            start = stated  # its first entries are damaged
        ends = [record.end for record in scan.records if not record.replaced and record.end <= start]
        since = max(ends, default=start)
        if start > 0 and since < start:
            after = [SourceRange(source, since, start - since)]
    for index, record in enumerate(records):
        right = _BYTE_ORDERS.get(record.stored, b"") if record.name.endswith(b"/byteorder") else b""
        if right and any(name == "byteorder" for name, _ in lost):
            new = record._replace(content=(literal(right),), crc32=crc32(right), size=len(right))
            records[index] = new._replace(method=0, added=True, lost=())
            lost = [damage for damage in lost if damage.name != "byteorder"]
    records = _with_version(records, notes)
    lost += [LostRecord(name_below_root(entry.name), "it is not in the file") for entry in scan.missing]
    # Compare the new archive with the damaged file.
    archive = RebuiltArchive(records, source.name, after)
    in_place = not lost and {record.header for record in records} <= {offset for offset, _ in archive.generated}
    repairs: list[Repair] = []
    for scanned, verdict in checked:
        repairs += [repair._replace(record=name_below_root(scanned.name)) for repair in verdict.repairs]
    if not scan.directory.entries and not in_place:
        notes.insert(0, "the directory of the archive is missing: the records were found one by one")
    proven = all(record.name_proven for record, _ in checked)  # a header is no more certain than the name in it
    for offset, right in archive.generated if in_place else ():
        repairs += differences(offset, source.read(offset, len(right)), right, proven=proven)
    if len(repairs) > _MAX_REPAIRS:
        rest = f"the first {_MAX_REPAIRS:,} are listed"
        notes.append(f"{len(repairs):,} bytes of headers and directory were rebuilt; {rest}")
    shortfall = archive.size - source.size if in_place else 0
    following = archive.size if shortfall < 0 and source.read(archive.size, 4) == b"PK\x03\x04" else 0
    if shortfall > 0:
        were = "was" if shortfall == 1 else "were"
        notes.append(f"the last {plural(shortfall, 'byte')}, part of the directory, {were} missing and {were} rebuilt")
    if shortfall < 0:
        what = "another archive begins there" if following else "they belong to no record"
        notes.append(f"{-shortfall:,} bytes from byte {archive.size:,} on are left out: {what}")
    unsummed = [record for record, verdict in checked if verdict.state == "unchecked" and record.stored]
    unchecked = frozenset(name_below_root(record.name) for record in unsummed)
    listed = tuple(repairs[:_MAX_REPAIRS])
    recovered = Recovered(
        source, in_place, (), listed, tuple(lost), tuple(notes), unchecked=unchecked, following=following
    )
    return with_records(recovered, records, archive)


# -- checking records


def _check(source: Source, scan: Scan) -> list[tuple[FoundRecord, Verdict]]:
    """A verdict on every record that was not replaced, in the order of the file, with its name."""
    records = [record for record in scan.records if not record.replaced]
    named: dict[bytes, FoundRecord] = {}
    for record, (name, proven) in zip(records, _names(scan, records), strict=True):
        earlier = named.pop(name, None)  # the last record of a name counts: a new index is written after the old one
        sure = proven and (earlier is None or earlier.name_proven)
        named[name] = record._replace(name=name, name_proven=sure)
    summed = _has_checksums(named.values())
    claims = [claim_of(record, summed=summed) for record in named.values()]
    out: list[tuple[FoundRecord, Verdict]] = []
    for (name, record), claim, first in zip(named.items(), claims, check_records(source, claims), strict=True):
        verdict = first
        if verdict.state == "damaged" and claim.method:  # perhaps another of its stated sizes is right
            for size in {header.size for header in (record.entry, record.descriptor) if header} - {claim.size}:
                other = claim._replace(size=min(size, MAX_RATIO * record.stored + 64))
                (again,) = check_records(source, [other])
                if again.state == "whole":
                    verdict = again
        if verdict.state == "damaged" and name.endswith(b"/data.pkl"):
            verdict = repair_index(source, claim, verdict)
        # Without a checksum, a descriptor must follow the bytes if there should be one, unless the file ends first.
        # Otherwise the descriptor was overwritten or moved, and perhaps the bytes, too.
        followed = record.descriptor or (record.local and not record.local.flags & HAS_DESCRIPTOR)
        ends = record.end + _MAX_DESCRIPTOR >= source.size
        if verdict.state == "unchecked" and record.stored and not followed and not ends:
            verdict = Verdict("damaged")
        # A storage without a matching checksum must be as long as the index says, and begin where its header ends.
        # Otherwise bytes were inserted or removed, and it is damaged.
        folder, _, key = text_of(name).rpartition("/")
        if verdict.state not in ("whole", "repaired") and not record.endless and folder.endswith(("/data", "/tensors")):
            storage = scan.storages.get(key)
            placed = record.payload % ALIGNMENT == 0 or (record.local and record.local.end == record.payload)
            if storage is not None and not (placed and storage.nbytes == record.stored):
                present = max(0, min(storage.nbytes, source.size - record.payload))
                record = record._replace(stored=storage.nbytes, present=present)  # noqa: PLW2901 - as it should be
                verdict = Verdict("damaged")
        out.append((record, verdict))
    return out


def _has_checksums(records: Iterable[FoundRecord]) -> bool:
    """Whether an archive has checksums: torch can be configured to write zeros instead."""
    values = [value for record in records if record.stored for value in _checksums(record)]
    return 2 * sum(map(bool, values)) > len(values)


def _checksums(record: FoundRecord) -> tuple[int, ...]:
    """The copies of its checksum: in the directory, in its descriptor, and in its header if that has one.

    The descriptor moves with the bytes. If only its checksum differs from the directory, these are the bytes of another
    record, and the directory counts. An index that was being edited may look the same, so all its copies count.
    """
    entry, descriptor, local = record.entry, record.descriptor, record.local
    copies = [header.crc32 for header in (entry, descriptor) if header is not None]
    if local is not None and local.crc32 and not local.flags & HAS_DESCRIPTOR:
        copies.append(local.crc32)
    if entry is None or descriptor is None or entry.name.endswith(b".pkl") or not entry.crc32:
        return tuple(copies)
    same_size = (entry.stored, entry.size) == (descriptor.stored, descriptor.size)
    renamed = local is not None and local.name != entry.name
    moved = (entry.crc32 ^ descriptor.crc32).bit_count() > _MAX_FLIPPED
    return (entry.crc32,) if moved and (same_size or renamed) else tuple(copies)


def claim_of(record: FoundRecord, *, summed: bool) -> Claim:
    """What the headers say about the bytes of a record; without ``summed`` its checksums are ignored."""
    headers = (record.entry, record.descriptor, record.local)
    sizes = [header.size for header in headers if header is not None and header.size]
    size = record.stored
    if record.method:
        size = min(Counter(sizes).most_common(1)[0][0] if sizes else 0, MAX_RATIO * record.stored + 64)
    checksums = _checksums(record) if summed and record.stored else ()
    return Claim(record.payload, record.stored, size, record.method, checksums)


# -- names

_NUMBERED = re.compile(
    rb"(data/|tensors/|constants/|traced_inputs/|bytecode/|data/weights/weight_|data/constants/tensor_)(\d{1,20})"
)
_FACTS = 4  # the first reasons for a name are facts, the last is only what names usually look like


def _names(scan: Scan, records: Sequence[FoundRecord]) -> Iterator[tuple[bytes, bool]]:
    """The name of each record, and whether the file itself proves it.

    A record has two names if a bit was flipped in its header or in the directory.
    """
    named = [record.names for record in records]
    every = [name for names in named for name in names]
    roots = Counter(name.partition(b"/")[0] for name in every if b"/" in name)
    sure = {names[0] for names in named if len(names) == 1}
    usual: Counter[bytes] = Counter()
    expected = tables(__package__, "names")
    if len(every) > len(named):
        usual.update(word for name in every for word in _words(name))
        usual.update({word.encode(): 2 for word in expected["words"]})

    def evidence(name: bytes) -> tuple[int, ...]:
        """The reasons for a name, the strongest first."""
        top, _, below = name.partition(b"/")
        last = name.rpartition(b"/")[2]
        numbered = _NUMBERED.fullmatch(below)
        follows = False  # whether its number comes after that of another record
        if numbered is not None:
            digits = numbered[2]
            follows = not int(digits) or name[: -len(digits)] + b"%d" % (int(digits) - 1) in sure
        return (
            top == roots.most_common(1)[0][0] if roots else True,
            name not in sure,
            below.startswith((b"data/", b"tensors/")) and last.decode("latin-1") in scan.storages,
            below.decode("latin-1") in expected["records"] or follows,
            -sum(usual[word] < 2 for word in _words(name)),
        )

    for names in named:
        reasons = sorted(((evidence(name), name) for name in names), reverse=True) if len(names) > 1 else []
        if reasons:
            (best, name), (second, _) = reasons[:2]
            yield name, best[:_FACTS] > second[:_FACTS]
        else:
            yield names[0] if names else b"", True


def _words(name: bytes) -> set[bytes]:
    """The folders of a path, its stem and suffixes, and the words in them; all numbers are the same word."""
    plain = re.sub(rb"\d+", b"0", name)
    parts = plain.split(b"/")
    stem, dot, ending = parts[-1].partition(b".")
    return {*parts[:-1], stem, dot + ending, *filter(None, re.split(rb"[/._\-]+", plain))}


# -- rebuilding


def _rebuild(
    source: Source, scan: Scan, checked: Sequence[tuple[FoundRecord, Verdict]], *, by_torch: bool
) -> tuple[list[ArchiveRecord], list[LostRecord]]:
    """The records of the new archive, and those that could not be recovered as they were saved."""
    records: list[ArchiveRecord] = []
    lost: list[LostRecord] = []
    time = date = 0
    if by_torch:
        headers = [header for record in scan.records for header in (record.local, record.entry) if header]
        time, date = Counter((header.time, header.date) for header in headers).most_common(1)[0][0]
    root = Counter(record.name.partition(b"/")[0] for record, _ in checked).most_common(1)[0][0]
    reached = order = 0
    for record, verdict in checked:
        # torch writes the directory in the order of the file. If another program did not, keep its order.
        order = record.entry.position if record.entry else order
        # torch writes printable names, all in one folder: others are damaged.
        name, below = name_below_root(record.name), text_of(record.name[len(root) + 1 :])
        named = not by_torch or (record.name.startswith(root + b"/") and below.isprintable() and "\\" not in below)
        if verdict.usable:
            if not named:
                lost.append(LostRecord(name, "its name is damaged"))
            content = tuple(repaired(source, record.payload, record.stored, verdict.repairs))
            if record.method and not by_torch:
                packed = Assembly(content, source.name)
                content = (SourceRange(Inflating(packed, 0, record.stored, verdict.size), 0, verdict.size),)
        else:
            why = "the file ends within it" if verdict.state == "cut" else "its bytes are damaged"
            lost.append(LostRecord(name, why))
            if record.method or record.endless or name in METADATA:  # it is unknown how many bytes there were
                continue
            fill = SourceRange(Filler(record.stored), 0, record.stored - record.present)
            content = (SourceRange(source, record.payload, record.present), fill)
        if not named:
            continue
        stored = sum(part.length for part in content)
        flags = 0x0808 if record.stored else 0x0800
        padding: int | None = None
        before: tuple[SourceRange, ...] = ()
        missing: tuple[LostRange, ...] = ()
        if verdict.state == "damaged":
            why, places = "its bytes do not match their checksum", verdict.candidates
            if len(places) > 1:
                why += f"; a flipped bit in byte {' or '.join(f'{place:,}' for place in places)} would explain it"
            missing = (LostRange(0, stored, why),)
        elif not verdict.usable and record.present < stored:
            missing = (LostRange(record.present, stored, "the file ends before its last byte"),)
        if by_torch:
            if record.local is not None and record.entry is not None and record.local.flags == record.entry.flags:
                flags = record.local.flags
            wide = 12 if record.wide and record.stored < 0xFFFFFFFF else 20 if record.wide else 0
            room = record.payload - record.header - 34 - len(record.name) - wide
            padding = room if 0 <= room < 0xFFFF else None
            before = (SourceRange(source, reached, record.header - reached),) if reached < record.header else ()
        size, method = (verdict.size, record.method) if by_torch and record.method else (stored, 0)
        rebuilt = ArchiveRecord(record.name, content, size, stored, verdict.crc32 or 0, method, flags, time, date)
        rebuilt = rebuilt._replace(padding=padding, before=before, order=order, header=record.header, lost=missing)
        repaired_at = tuple(repair.position - record.payload for repair in verdict.repairs)
        records.append(rebuilt._replace(repaired_at=repaired_at))
        reached = record.end
    return records, lost


# -- archives packed by other programs


def _normalized(records: list[ArchiveRecord], notes: list[str]) -> list[ArchiveRecord]:
    """Move the records into one folder, where torch looks for them, and leave out those that archivers add."""
    names = [record.name for record in records if not is_clutter(record.name)]
    tops = Counter(name.partition(b"/")[0] + b"/" for name in names if b"/" in name)
    prefix = tops.most_common(1)[0][0] if tops else b""
    for index in (b"data.pkl", b"constants.pkl", b"model.json", b"archive_format", b"version"):
        indexes = [name for name in names if name.rpartition(b"/")[2].lower() == index]
        if indexes:  # the folder of the least nested index
            prefix = min(indexes, key=lambda name: (name.count(b"/"), len(name)))[: -len(index)]
            break
    root = prefix.rstrip(b"/").rpartition(b"/")[2] or b"archive"
    kept = {name for name in names if name.startswith(prefix)}
    outside = [record.name for record in records if record.name not in kept]
    if outside:
        some = text_of(outside[0])[:80]
        notes.append(f"left out: {plural(len(outside), 'record')} outside the checkpoint, such as {some}")
    if prefix != root + b"/":
        notes.append(f"the records were moved into the folder {text_of(root)}/, where torch looks for them")
    inside = [record for record in records if record.name in kept]
    return [record._replace(name=root + b"/" + record.name[len(prefix) :], header=-1) for record in inside]


def is_clutter(name: bytes) -> bool:
    """Whether a record is a folder, or one that macOS puts into every archive."""
    last = name.rpartition(b"/")[2]
    return not last or name.startswith(b"__MACOSX/") or last == b".DS_Store" or last.startswith(b"._")


def _with_version(records: list[ArchiveRecord], notes: list[str]) -> list[ArchiveRecord]:
    """Add ``version`` if it is missing, without which torch refuses an archive, and leave out damaged numbers.

    Without checksums, only their content shows that they are damaged.
    """
    kept: list[ArchiveRecord] = []
    for record in records:
        digits = _NUMBERS.get(name_below_root(record.name), 0)
        text = Assembly(record.content, "").read(0, 64).strip() if digits and not record.method else b""
        if not digits or record.method or (text.isdigit() and len(text) <= digits):
            kept.append(record)
    keys = {name_below_root(record.name): record for record in kept}
    index = keys.get("data.pkl")
    if index is None or "version" in keys or ".data/version" in keys:
        return kept
    notes.append("the record `version` was missing and was added: torch refuses an archive without it")
    name, order = index.name.removesuffix(b"data.pkl") + b"version", 1 + max(record.order for record in kept)
    return [*kept, stored_record(name, literal(b"3\n"), order=order)._replace(added=True)]


# -- unzipped directories


def recover_directory(folder: Folder) -> Recovered:
    """The archive that was unzipped into a directory, without checksums."""
    from transload.formats.sets.unpacked import open_archive

    path = folder.name
    opened = open_archive(folder)
    files = opened.records.values()
    needed = ("data.pkl", "constants.pkl", "model.json", "archive_format", ".data/extern_modules")
    if not any(file.name.rpartition("/")[2] in needed or file.name in needed for file in files):
        what = "this directory is neither a checkpoint of several files nor an unzipped archive"
        raise RescueError(what, where=path, fix="Rescue its files one by one.")
    notes = [f"{problem.where}: {problem.detail}" for problem in opened.problems[:8]]
    records: list[ArchiveRecord] = []
    # The index first, as torch writes it, so that a truncated file loses as little as possible.
    for order, file in enumerate(sorted(files, key=lambda file: not file.name.endswith("data.pkl"))):
        name = os.fsencode(f"{folder.title}/{file.name}")
        content = SourceRange(folder.open(file.name, keep=False), 0, file.size)
        records.append(stored_record(name, content, order=order))
    records = _with_version(_normalized(records, notes), notes)
    archive = RebuiltArchive(records, path)
    return Recovered(
        archive, exact=False, notes=tuple(notes), records=tuple(records), all_unchecked=True, nbytes=archive.size
    )
