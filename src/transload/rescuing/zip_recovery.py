"""A damaged archive put together again: every record checked, flipped bits undone, headers and directory rebuilt."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple
from zlib import crc32

from transload.findings import Problem
from transload.formats.zip import ALIGNMENT
from transload.io.sources import FileSource, Source
from transload.rescuing.assembly import (
    HAS_DESCRIPTOR,
    ArchiveRecord,
    Assembly,
    Filler,
    LostRange,
    Part,
    ReadOnlySource,
    Recovered,
    archive,
    archive_pieces,
    differences,
    key_of,
    literal,
    repaired,
    stored_record,
)
from transload.rescuing.bitflips import DEFLATED, MAX_RATIO, Claim, Verdict, check_records, repairs_of
from transload.rescuing.result import Certainty, LostRecord
from transload.rescuing.zip_scan import FoundRecord, Scan

__all__ = ["METADATA", "claim_of", "recover_archive", "recover_directory"]

METADATA = frozenset({"version", ".data/serialization_id", ".data/version", ".transload/origin.json"})
"""Records that say nothing of the content: one can be rebuilt, torch does not need the others."""

_MAX_REPAIRS = 4096
_MAX_DESCRIPTOR = 24
_MAX_FLIPPED = 2  # bits in which two copies of a checksum may differ
_NUMBERS = {"version": 3, ".data/version": 3, ".data/serialization_id": 40}
"""Records that torch reads as a number of so many digits, and that keep it from loading a file where they are not."""

_BYTE_ORDERS = {3: b"big", 6: b"little"}
"""What the record ``byteorder`` can hold, by its length: that is enough to rebuild it."""


class _Checked(NamedTuple):
    """A record, its name, and what became of its bytes.

    ``settled`` is whether the file itself tells that the name is right.
    """

    found: FoundRecord
    name: bytes
    method: int
    verdict: Verdict
    settled: bool = True

    @property
    def usable(self) -> bool:
        """Whether its bytes are those that were saved, as far as can be known."""
        return self.verdict.state in ("whole", "mended", "unchecked")


def recover_archive(source: Source) -> Recovered | None:
    """The archive that begins at byte 0 of a source; ``None`` if there is no record in it."""
    found = Scan(source)
    checked = _check(source, found)
    if not checked:
        return None
    by_torch = 2 * sum(record.local is not None and record.local.padded for record in found.records) > len(
        found.records
    )
    records, lost = _rebuild(source, found, checked, by_torch=by_torch)
    notes: list[str] = []
    after: list[Part] = []
    if not by_torch:
        records = _normalized(records, notes)
    else:
        if not _has_checksums(found.records):
            records = [record._replace(crc32=0) for record in records]
        after = _before_directory(source, found)
    records = _with_version(_with_byteorder(records, lost), notes)
    lost += [LostRecord(key_of(entry.name), "it is not in the file") for entry in found.missing]
    made = _assemble(source, records, checked, lost, after)
    if not found.directory.entries and not made.exact:
        notes.insert(0, "the directory of the archive is missing: the records were found one by one")
    return made._replace(notes=(*notes, *made.notes))


# -- checking records


def _check(source: Source, found: Scan) -> list[_Checked]:
    """A verdict on every record that was not replaced, in the order of the file."""
    records = [record for record in found.records if not record.replaced]
    named: dict[bytes, FoundRecord] = {}
    unsettled: set[bytes] = set()
    for record, (name, settled) in zip(records, _Names(source, found, records).chosen(), strict=True):
        named.pop(name, None)  # of several records of one name the last: a new index is behind the old one
        named[name] = record
        if not settled:
            unsettled.add(name)
    summed = _has_checksums(named.values())
    claims = [claim_of(record, _method(record), summed=summed) for record in named.values()]
    out: list[_Checked] = []
    for (name, record), claim, first in zip(named.items(), claims, check_records(source, claims), strict=True):
        verdict = _vouched(source, record, _with_other_size(source, record, claim, first))
        fitted, verdict = _with_size_of_index(source, found, record, name, verdict)
        out.append(_Checked(fitted, name, claim.method, verdict, name not in unsettled))
    return out


def _method(record: FoundRecord) -> int:
    methods = {each.method for each in (record.local, record.entry) if each is not None}
    if len(methods) == 1:
        return methods.pop()
    same_size = {each.stored == each.size for each in (record.entry, record.descriptor) if each is not None}
    return 0 if same_size == {True} or DEFLATED not in methods else DEFLATED


def _has_checksums(records: Iterable[FoundRecord]) -> bool:
    """Whether an archive has checksums: torch can write zeros instead."""
    values = [value for record in records if record.stored for value in _checksums(record)]
    return 2 * sum(map(bool, values)) > len(values)


def _checksums(record: FoundRecord) -> tuple[int, ...]:
    """The copies of its checksum: in the directory, behind its bytes, and in its header if that has one.

    What is next to its bytes moves with them. Where it is another one altogether, and the directory is right about
    everything else, these are the bytes of another record. An index that was being edited may look the same.
    """
    entry, descriptor, local = record.entry, record.descriptor, record.local
    copies = [each.crc32 for each in (entry, descriptor) if each is not None]
    if local is not None and local.crc32 and not local.flags & HAS_DESCRIPTOR:
        copies.append(local.crc32)
    if entry is None or descriptor is None or entry.name.endswith(b".pkl") or not entry.crc32:
        return tuple(copies)
    same_size = (entry.stored, entry.size) == (descriptor.stored, descriptor.size)
    renamed = local is not None and local.name != entry.name
    moved = (entry.crc32 ^ descriptor.crc32).bit_count() > _MAX_FLIPPED
    return (entry.crc32,) if moved and (same_size or renamed) else tuple(copies)


def claim_of(record: FoundRecord, method: int, *, summed: bool) -> Claim:
    """What the headers say of the bytes of a record; ``summed`` is whether its checksums mean something."""
    sizes = [each.size for each in (record.entry, record.descriptor, record.local) if each is not None and each.size]
    size = record.stored
    if method:
        size = min(Counter(sizes).most_common(1)[0][0] if sizes else 0, MAX_RATIO * record.stored + 64)
    checksums = _checksums(record) if summed and record.stored else ()
    return Claim(record.payload, record.stored, record.present, size, method, checksums)


def _with_other_size(source: Source, record: FoundRecord, claim: Claim, verdict: Verdict) -> Verdict:
    """The verdict on a deflated record, if need be with the other one of the sizes that are given for it."""
    if verdict.state == "damaged" and claim.method:
        for size in {each.size for each in (record.entry, record.descriptor) if each is not None} - {claim.size}:
            other = claim._replace(size=min(size, MAX_RATIO * record.stored + 64))
            (again,) = check_records(source, [other])
            if again.state == "whole":
                return again
    return verdict


def _vouched(source: Source, record: FoundRecord, verdict: Verdict) -> Verdict:
    """The verdict; without a checksum only if what must follow the bytes does, or the file ends before.

    Otherwise the descriptor was overwritten or is elsewhere, and so may the bytes be.
    """
    followed = record.descriptor or (record.local and not record.local.flags & HAS_DESCRIPTOR)
    if verdict.state == "unchecked" and record.stored and not followed and record.end + _MAX_DESCRIPTOR < source.size:
        return Verdict("damaged")
    return verdict


def _with_size_of_index(
    source: Source, found: Scan, record: FoundRecord, name: bytes, verdict: Verdict
) -> tuple[FoundRecord, Verdict]:
    """A storage that no checksum vouches for, as long as the index says.

    If it is not so long, or does not begin where its header ends, bytes were inserted or removed, and it is damaged.
    """
    folder, _, key = name.decode("utf-8", "backslashreplace").rpartition("/")
    if verdict.state in ("whole", "mended") or record.endless or not folder.endswith(("/data", "/tensors")):
        return record, verdict
    slot = found.slots.get(key)
    placed = record.payload % ALIGNMENT == 0 or (record.local is not None and record.local.end == record.payload)
    if slot is None or (placed and slot.nbytes == record.stored):
        return record, verdict
    present = max(0, min(slot.nbytes, source.size - record.payload))
    return record._replace(stored=slot.nbytes, present=present), Verdict("damaged")


# -- names


class _Names:
    """Which of two names of a record is right: one bit of its header or of the directory was flipped."""

    _KNOWN = frozenset(
        b"data.pkl version byteorder constants.pkl .format_version .storage_alignment .data/serialization_id "
        b".data/version .transload/origin.json model.json attributes.pkl archive_format archive_version "
        b"traced_inputs.pkl extra/producer_info.json bytecode.pkl models/model.json data/sample_inputs/model.pt "
        b"data/weights/model_weights_config.json data/constants/model_constants_config.json .data/extern_modules "
        b".data/python_version".split()
    )
    _PARTS = frozenset(
        b"code data debug constants tensors weights models extra .py .py.debug_pkl .pkl .json .so .cubin .cpp .txt .pt "
        b"__torch__ torch nn modules aotinductor model".split()
    )
    _NUMBERED = re.compile(
        rb"(data/|tensors/|constants/|traced_inputs/|bytecode/|data/weights/weight_|data/constants/tensor_)(\d{1,20})"
    )
    _ORDINARY = re.compile(rb"[A-Za-z0-9_.\-/]+")
    _FACTS = 4  # the first reasons for a name are facts, the others are what names look like
    _MAX_SEARCHED = 1 << 30  # a hostile file has a million odd names
    _MAX_TEXT = 8 << 20

    def __init__(self, source: Source, found: Scan, records: Sequence[FoundRecord]) -> None:
        self._source, self._scan, self._records = source, found, records
        self._names = [record.names for record in records]
        every = [name for names in self._names for name in names]
        roots = Counter(name.partition(b"/")[0] for name in every if b"/" in name)
        self._root = roots.most_common(1)[0][0] if roots else b""
        self._sure = Counter(names[0] for names in self._names if len(names) == 1)
        self._words = Counter(word for name in every for word in _words(name))
        self._folders = Counter(name.rpartition(b"/")[0] for name in every)
        self._budget = self._MAX_SEARCHED
        self._found: dict[bytes, bool] = {}

    def chosen(self) -> Iterator[tuple[bytes, bool]]:
        """The name of each record, and whether the file itself settles it."""
        for names in self._names:
            if len(names) < 2:
                yield names[0] if names else b"", True
            else:
                weights = [(self._weight(name), name) for name in names]
                (best, name), (second, _) = sorted(weights, key=itemgetter(0), reverse=True)[:2]
                yield name, best[: self._FACTS] > second[: self._FACTS]

    def _weight(self, name: bytes) -> tuple[object, ...]:
        """The evidence for a name, the strongest first."""
        top, _, below = name.partition(b"/")
        folder, _, last = name.rpartition(b"/")
        stem, dot, ending = last.partition(b".")
        numbered = self._NUMBERED.fullmatch(below)
        words = _words(name)
        return (
            top == self._root,
            not self._sure[name],
            below.startswith((b"data/", b"tensors/")) and last.decode("latin-1") in self._scan.slots,
            below in self._KNOWN or (numbered is not None and self._follows(name, numbered[2])),
            numbered is not None,
            bool(self._ORDINARY.fullmatch(name)) and bool(last),
            self._occurs(below),
            self._folders[folder] > 1,
            self._words[dot + ending] > 1 or dot + ending in self._PARTS,
            self._occurs(stem),
            -sum(self._words[word] < 2 and word not in self._PARTS for word in words),
            -sum(65 <= letter <= 90 for letter in name),
            sum(min(self._words[word], 3) for word in words),
            sum(map(self._occurs, words)),
        )

    def _follows(self, name: bytes, digits: bytes) -> bool:
        """Whether a record has a number that comes after that of another one."""
        return not int(digits) or name[: -len(digits)] + b"%d" % (int(digits) - 1) in self._sure

    def _occurs(self, word: bytes) -> bool:
        """Whether a word is in one of the records that are small enough to be texts."""
        if word not in self._found:
            self._found[word] = len(word) > 1 and any(word in text for text in self._texts())
        return self._found[word]

    def _texts(self) -> Iterator[bytes]:
        for record in self._records:
            if record.present <= self._MAX_TEXT and self._budget > 0:
                self._budget -= record.present + 1000
                yield self._source.read(record.payload, record.present)


def _words(name: bytes) -> set[bytes]:
    """The parts of a path, the words in them, and the endings of the last; all numbers are one word."""
    plain = re.sub(rb"\d+", b"0", name)
    parts = plain.split(b"/")
    stem, dot, ending = parts[-1].partition(b".")
    return {*parts[:-1], stem, dot + ending, *filter(None, re.split(rb"[/._\-]+", plain))}


# -- rebuilding


def _rebuild(
    source: Source, found: Scan, checked: Sequence[_Checked], *, by_torch: bool
) -> tuple[list[ArchiveRecord], list[LostRecord]]:
    """The records of the new archive, and those that are not in it as they were saved."""
    records: list[ArchiveRecord] = []
    lost: list[LostRecord] = []
    time = date = 0
    if by_torch:
        headers = [each for record in found.records for each in (record.local, record.entry) if each]
        time, date = Counter((each.time, each.date) for each in headers).most_common(1)[0][0]
    root = Counter(each.name.partition(b"/")[0] for each in checked).most_common(1)[0][0]
    # In the order of the file, as torch has it, unless the directory has another.
    listed = [each for each in checked if each.found.entry]
    by_entry = sorted(listed, key=lambda each: each.found.entry.position if each.found.entry else 0)
    ordered = checked if by_entry == listed else [*by_entry, *(each for each in checked if not each.found.entry)]
    order = {each.name: number for number, each in enumerate(ordered)}
    reached = 0
    for each in checked:
        record, verdict = each.found, each.verdict
        named = not by_torch or _is_torch_name(each.name, root)
        if not each.usable:
            why = "the file ends within it" if verdict.state == "cut" else "its bytes are damaged"
            lost.append(LostRecord(key_of(each.name), why))
        elif not named:
            lost.append(LostRecord(key_of(each.name), "its name is damaged"))
        content = _content(source, each, keep=by_torch)
        if content is None or not named or (key_of(each.name) in METADATA and not each.usable):
            continue
        stored = sum(part.length for part in content)
        made = ArchiveRecord(
            each.name,
            content,
            verdict.size if by_torch and each.method else stored,
            stored,
            verdict.crc32 or 0,
            each.method if by_torch else 0,
            _flags(record, by_torch=by_torch),
            time,
            date,
            _padding(each) if by_torch else None,
            (Part(source, reached, record.header - reached),) if by_torch and reached < record.header else (),
            order[each.name],
            record.header,
            each.name,
        )
        records.append(made)
        reached = record.end
    return records, lost


def _is_torch_name(name: bytes, root: bytes) -> bool:
    """Whether a name is one that torch gives, below the folder of all: others are damaged."""
    below = name[len(root) + 1 :].decode("utf-8", "backslashreplace")
    return name.startswith(root + b"/") and below.isprintable() and "\\" not in below


def _flags(record: FoundRecord, *, by_torch: bool) -> int:
    local, entry = record.local, record.entry
    if by_torch and local is not None and entry is not None and local.flags == entry.flags:
        return local.flags
    return 0x0808 if record.stored else 0x0800


def _padding(each: _Checked) -> int | None:
    wide = 12 if each.found.wide and each.found.stored < 0xFFFFFFFF else 20 if each.found.wide else 0
    padding = each.found.payload - each.found.header - 34 - len(each.name) - wide
    return padding if 0 <= padding < 0xFFFF else None


def _before_directory(source: Source, found: Scan) -> list[Part]:
    """Bytes before the directory that belong to no record, as a retagged file has where its index was before."""
    start, stated = found.directory.start, found.directory.stated
    if start <= 0:
        return []
    if max((record.end for record in found.records), default=0) <= stated < start:
        start = stated  # its first entries are damaged
    ends = [record.end for record in found.records if not record.replaced and record.end <= start]
    since = max(ends, default=start)
    return [Part(source, since, start - since)] if since < start else []


def _content(source: Source, each: _Checked, *, keep: bool) -> tuple[Part, ...] | None:
    """The bytes of a record: as they are, repaired, inflated, or filled up; ``None`` if their number is unknown."""
    record, verdict = each.found, each.verdict
    if not each.usable:
        if each.method or record.endless:
            return None
        fill = Part(Filler(record.stored), 0, record.stored - record.present)
        return (Part(source, record.payload, record.present), fill)
    repairs = repairs_of(source, verdict, "")
    parts = tuple(part for part in repaired(source, record.payload, record.stored, repairs) if part.length)
    if not each.method or keep:
        return parts
    from transload.tensors import Inflating

    return (Part(Inflating(Assembly(parts, source.name), 0, record.stored, verdict.size), 0, verdict.size),)


def _assemble(
    source: Source,
    records: Sequence[ArchiveRecord],
    checked: Sequence[_Checked],
    lost: list[LostRecord],
    after: Sequence[Part],
) -> Recovered:
    """Lay the records out, and compare the archive with the damaged file."""
    pieces = list(archive_pieces(records, after))
    whole = Assembly((piece.part for piece in pieces), source.name)
    headers = {piece.offset for piece in pieces if piece.generated}
    in_place = not lost and all(record.header in headers for record in records)
    repairs = [repair for each in checked for repair in repairs_of(source, each.verdict, key_of(each.name))]
    if in_place:
        # Headers are no surer than the names in them.
        certainty: Certainty = "proven" if all(each.settled for each in checked) else "probable"
        for offset, part, generated, _ in pieces:
            if generated:
                right = part.source.read(0, part.length)
                repairs += differences(offset, source.read(offset, part.length), right, certainty)
    by_name = {each.name: each for each in checked}
    repaired_at: list[int] = []
    ranges: list[LostRange] = []
    for offset, part, _, record in pieces:
        each = by_name.get(record.origin) if record is not None else None
        if each is None:
            continue
        if record is not None and part is record.content[0]:
            repaired_at += [offset + bit.byte - each.found.payload for bit in each.verdict.bits]
        if each.verdict.state == "damaged":
            ranges.append(LostRange(offset, offset + part.length, _damage(each.verdict)))
        elif not each.usable and isinstance(part.source, Filler):
            ranges.append(LostRange(offset, offset + part.length, "the file ends before its last byte"))
    return Recovered(
        whole,
        in_place,
        tuple(ranges),
        tuple(repairs[:_MAX_REPAIRS]),
        tuple(lost),
        tuple(_notes(source, whole, in_place=in_place, repairs=len(repairs))),
        tuple(records),
        frozenset(key_of(each.name) for each in checked if each.verdict.state == "unchecked" and each.found.stored),
        repaired_at=tuple(repaired_at),
    )


def _damage(verdict: Verdict) -> str:
    why = "its bytes do not match their checksum"
    if len(verdict.candidates) < 2:
        return why
    return f"{why}; a flipped bit in byte {' or '.join(f'{place:,}' for place in verdict.candidates)} would explain it"


def _notes(source: Source, whole: Assembly, *, in_place: bool, repairs: int) -> Iterator[str]:
    if repairs > _MAX_REPAIRS:
        yield f"{repairs:,} bytes of headers and directory were rebuilt; the first {_MAX_REPAIRS:,} are listed"
    if in_place and whole.size > source.size:
        yield f"the last {whole.size - source.size:,} bytes, part of the directory, were missing and were rebuilt"
    if in_place and whole.size < source.size:
        another = source.read(whole.size, 4) == b"PK\x03\x04"
        what = "another archive begins there" if another else "they belong to no record"
        yield f"{source.size - whole.size:,} bytes from byte {whole.size:,} on are left out: {what}"


# -- archives packed by other programs


def _normalized(records: list[ArchiveRecord], notes: list[str]) -> list[ArchiveRecord]:
    """The records below one folder, where torch looks for them, without those that archivers add."""
    prefix = _folder_of([record.name for record in records if not _is_clutter(record.name)])
    root = prefix.rstrip(b"/").rpartition(b"/")[2] or b"archive"
    inside: list[ArchiveRecord] = []
    outside: list[ArchiveRecord] = []
    for record in records:
        kept = not _is_clutter(record.name) and record.name.startswith(prefix)
        (inside if kept else outside).append(record)
    if outside:
        some = outside[0].name.decode("utf-8", "backslashreplace")[:80]
        notes.append(f"{len(outside)} records that are not part of the checkpoint were left out, such as {some}")
    if prefix != root + b"/":
        folder = root.decode("utf-8", "backslashreplace")
        notes.append(f"the records were moved into the folder {folder}/, where torch looks for them")
    return [record._replace(name=root + b"/" + record.name[len(prefix) :], header=-1) for record in inside]


def _is_clutter(name: bytes) -> bool:
    """Whether a record is a folder, or what macOS puts into every archive."""
    last = name.rpartition(b"/")[2]
    return not last or name.startswith(b"__MACOSX/") or last == b".DS_Store" or last.startswith(b"._")


def _folder_of(names: list[bytes]) -> bytes:
    """The folder of the records, with its slash: that of the index which is highest."""
    for index in (b"data.pkl", b"constants.pkl", b"model.json", b"archive_format", b"version"):
        found = [name for name in names if name.rpartition(b"/")[2].lower() == index]
        if found:
            best = min(found, key=lambda name: (name.count(b"/"), len(name)))
            return best[: len(best) - len(index)]
    tops = Counter(name.partition(b"/")[0] + b"/" for name in names if b"/" in name)
    return tops.most_common(1)[0][0] if tops else b""


def _with_version(records: list[ArchiveRecord], notes: list[str]) -> list[ArchiveRecord]:
    """The records with ``version``, without which torch refuses an archive, and without damaged numbers.

    Where there are no checksums, only their content tells that they are damaged.
    """
    kept: list[ArchiveRecord] = []
    for record in records:
        digits = _NUMBERS.get(key_of(record.name), 0)
        text = Assembly(record.content, "").read(0, 64).strip() if digits and not record.method else b""
        if not digits or record.method or (text.isdigit() and len(text) <= digits):
            kept.append(record)
    keys = {key_of(record.name): record for record in kept}
    index = keys.get("data.pkl")
    if index is None or "version" in keys or ".data/version" in keys:
        return kept
    notes.append("the record `version` was missing and was added: torch refuses an archive without it")
    name, order = index.name.removesuffix(b"data.pkl") + b"version", 1 + max(record.order for record in kept)
    return [*kept, stored_record(name, literal(b"3\n"), order=order)]


def _with_byteorder(records: list[ArchiveRecord], lost: list[LostRecord]) -> list[ArchiveRecord]:
    """The records with the one that names the byte order rebuilt if it is damaged; then it is not lost."""
    damaged = next((each for each in lost if each.name == "byteorder"), None)
    at = next((index for index, record in enumerate(records) if record.name.endswith(b"/byteorder")), None)
    if damaged is None or at is None or records[at].stored not in _BYTE_ORDERS:
        return records
    lost.remove(damaged)
    right = _BYTE_ORDERS[records[at].stored]
    made = records[at]._replace(content=(literal(right),), crc32=crc32(right), method=0, size=len(right), origin=b"")
    return [*records[:at], made, *records[at + 1 :]]


# -- unzipped directories


class _File(ReadOnlySource):
    """A file that is open only while it is read: an archive has more records than a process may have files open."""

    def __init__(self, path: str, size: int) -> None:
        self.name = path
        self.size = size

    def read(self, offset: int, count: int) -> bytes:
        source = FileSource(self.name)
        try:
            return source.read(offset, min(count, self.size - offset))
        finally:
            source.close()


def recover_directory(path: str) -> Recovered | None:
    """The archive that was unzipped into a directory; ``None`` if it was none. Its files have no checksums."""
    from transload.formats.directory import open_directory

    problems: list[Problem] = []
    files = open_directory(path, problems).records.values()
    needed = ("data.pkl", "constants.pkl", "model.json", "archive_format", ".data/extern_modules")
    if not any(file.name.rpartition("/")[2] in needed or file.name in needed for file in files):
        return None
    notes = [f"{problem.where}: {problem.detail}" for problem in problems[:8]]
    top = os.path.realpath(path)
    records: list[ArchiveRecord] = []
    # The index first, as torch writes it, so that a cut of the new file loses as little as possible.
    for order, file in enumerate(sorted(files, key=lambda file: not file.name.endswith("data.pkl"))):
        name = os.fsencode(f"{os.path.basename(top)}/{file.name}")  # noqa: PTH119 - texts throughout, as given
        content = Part(_File(os.path.join(top, file.name), file.size), 0, file.size)  # noqa: PTH118 - as above
        records.append(stored_record(name, content, order=order, origin=name))
    records = _with_version(_normalized(records, notes), notes)
    made = archive(records, path)
    return Recovered(made, exact=False, notes=tuple(notes), records=tuple(records), all_unchecked=True)
