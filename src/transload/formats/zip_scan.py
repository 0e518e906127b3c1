"""Find the records of an archive that is damaged, or has lost its directory.

Almost everything about a record is in the file twice: its name in its header and in the directory, its size in the
directory and in the descriptor after its bytes, its offset in the directory and as the end of the record before it.
Any header may have a flipped bit, and where two copies disagree, the offset that most of the evidence supports is
used. What is in the file only once is found by its content: ``data.pkl`` ends where its pickle ends, and the pickle has
the length of each storage. torch.save writes ``data.pkl`` first (from 1.6 on), so most truncated files still have it.
"""

from __future__ import annotations

import re
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice, product

from transload.checkpoint import Record, Storage
from transload.findings import Problems
from transload.formats import pickle_machine
from transload.formats.pickle_streams import run_at
from transload.formats.tensors import declared_storages
from transload.formats.zip import (
    ALIGNMENT,
    ALL32,
    CENTRAL,
    DEFLATED,
    DESCRIPTOR,
    DESCRIPTOR64,
    END,
    END64,
    LOCAL,
    MAX_PAYLOAD,
    ZipIndex,
    names_below,
    text_of,
    widen,
)
from transload.frozen import NamedTuple
from transload.io.packed import inflated
from transload.io.sources import Source

HAS_DESCRIPTOR = 8  # the zip flag for checksum and sizes that follow the bytes, in a descriptor
_LOCAL = b"PK\x03\x04"
_CENTRAL = b"PK\x01\x02"
_DESCRIPTOR = b"PK\x07\x08"
_END64 = b"PK\x06\x06"
_END = b"PK\x05\x06"
_CHUNK = 1 << 20
_BLOCK = 4096
_TAIL = 1 << 17
_PICKLE_WINDOW = 1 << 16
_MAX_NAME = 4096  # bytes; the names in a program have a hundred or two
_MAX_EXTRA = 1 << 16
_MAX_DIRECTORY = 64 << 20  # bytes: enough for half a million records
_MAX_ENDS = 8  # how many end records are tried: a hostile file can have any number of false ones
_MAX_STEPS = 300_000  # a gigabyte of empty headers would take minutes; 20,000 tensors are 20,006 records
_MAX_GAP = 1 << 30  # bytes searched for the next header, in all searches of one file together
_MIN_SEARCH = 256 << 20
_MAX_SEARCH = 4  # to find the ends of records, this many times the file size is searched, plus ``_MIN_SEARCH``
_MAX_INFLATED = 256 << 20
_MIN_ZEROS = 512


class Header(NamedTuple):
    """One of the two headers of a record: the local one before its bytes, or its entry in the directory.

    ``header`` is the offset of the local one; ``position`` and ``end`` are where this one begins and, if its lengths
    are right, ends.
    """

    position: int
    end: int
    header: int
    flags: int
    method: int
    time: int
    date: int
    crc32: int
    stored: int
    size: int
    name: bytes
    extra: bytes

    @property
    def padded(self) -> bool:
        """Whether torch's writer made it: it has a padding field ``FB``."""
        return 0 <= self.extra.find(b"FB") <= 20

    @property
    def wide(self) -> bool:
        """Whether it has a zip64 field; one bit of the field's length may be flipped."""
        length = int.from_bytes(self.extra[2:4], "little")
        return self.extra[:2] == b"\x01\x00" and any((length ^ right).bit_count() <= 1 for right in (8, 16, 24, 28))


class Descriptor(NamedTuple):
    """What follows the bytes of a record; ``length`` is that of the descriptor."""

    crc32: int
    stored: int
    size: int
    length: int


class FoundRecord(NamedTuple):
    """A record: its headers, the offset of its bytes (``payload``), and how many of them are ``present``.

    ``wide`` is whether its descriptor has sizes of eight bytes. ``replaced`` is whether a complete directory does not
    list it: a newer record took its place. ``endless`` is whether its end is unknown. Once it is checked, ``name`` is
    its name, and ``name_proven`` whether the file itself proves that.
    """

    header: int
    local: Header | None
    entry: Header | None
    wide: bool
    payload: int = 0
    stored: int = 0
    present: int = 0
    descriptor: Descriptor | None = None
    replaced: bool = False
    endless: bool = False
    name: bytes = b""
    name_proven: bool = True

    @property
    def end(self) -> int:
        """Where the next record should begin."""
        return self.payload + self.stored + (self.descriptor.length if self.descriptor else 0)

    @property
    def method(self) -> int:
        """Its compression method according to most of its headers."""
        methods = {header.method for header in (self.local, self.entry) if header is not None}
        if len(methods) == 1:
            return methods.pop()
        same_size = {sizes.stored == sizes.size for sizes in (self.entry, self.descriptor) if sizes is not None}
        return 0 if same_size == {True} or DEFLATED not in methods else DEFLATED

    @property
    def names(self) -> list[bytes]:
        """Its name, or both names if they differ in more than their lengths."""
        names = [self.entry.name] if self.entry else []
        if self.local and self.local.name:
            here = self.local.name + self.local.extra
            if not names or here[: len(names[0])] != names[0]:
                names.append(self.local.name)
        return names


# -- headers


def distance(one: bytes, other: bytes) -> int:
    """The number of bits that differ; if the lengths differ, all bits."""
    if one == other:
        return 0
    if len(one) != len(other):
        return 8 * max(len(one), len(other))
    return (int.from_bytes(one, "little") ^ int.from_bytes(other, "little")).bit_count()


def _is_near(one: bytes, other: bytes) -> bool:
    """Whether at most one bit differs."""
    return distance(one, other) <= 1


def starts_record(source: Source, offset: int = 0) -> bool:
    """Whether the signature of a record is at an offset."""
    return _is_near(source.read(offset, 4), _LOCAL)


def _read_local(source: Source, header: int) -> Header | None:
    """The header at an offset, with any signature; ``None`` if the file ends within it."""
    raw = source.read(header, LOCAL.size)
    if len(raw) < LOCAL.size:
        return None
    _, _, flags, method, time, date, crc, stored, size, n_name, n_extra = LOCAL.unpack(raw)
    head = source.read(header + LOCAL.size, n_name + n_extra)
    name, extra = head[:n_name], head[n_name:]
    if ALL32 in (stored, size):
        size, stored = widen(extra, size, stored)
    end = header + LOCAL.size + n_name + n_extra
    return Header(header, end, header, flags, method, time, date, crc, stored, size, name, extra)


def find_header(source: Source, data: bytes, base: int = 0) -> int:
    """The index of the first plausible header in ``data``, which begins at offset ``base``; -1 if there is none.

    The signature alone can occur in weights.
    """
    for match in re.finditer(_LOCAL, data):
        local = _read_local(source, base + match.start())
        if local is not None and 0 < len(local.name) <= _MAX_NAME and len(local.extra) <= _MAX_EXTRA:
            ordinary = local.method in (0, DEFLATED) and not local.flags & ~0x080E
            if ordinary and not any(byte < 32 for byte in local.name):
                return match.start()
    return -1


def _read_descriptor(source: Source, offset: int, *, wide: bool) -> Descriptor | None:
    """The descriptor at an offset, if there is one."""
    form = DESCRIPTOR64 if wide else DESCRIPTOR
    raw = source.read(offset, form.size)
    if len(raw) < form.size or not _is_near(raw[:4], _DESCRIPTOR):
        return None
    _, crc, stored, size = form.unpack(raw)
    return Descriptor(crc, stored, size, form.size)


# -- the directory


class Directory(NamedTuple):
    """The entries that were found, and where they begin; -1 if there are none.

    ``stated`` is where the directory begins according to the end record, ``stated_count`` how many entries it has; -1
    without an end record. ``complete`` is whether an end record follows the last entry.
    """

    entries: list[Header]
    start: int
    stated: int = -1
    stated_count: int = -1
    complete: bool = False


_NO_DIRECTORY = Directory([], -1)


def find_directory(source: Source) -> Directory:
    """Find the directory by the end records of a file, or by its entries; if there is none, it has no entries."""
    base = max(0, source.size - _TAIL)
    tail = source.read(base, _TAIL)
    best = _NO_DIRECTORY
    tried: set[int] = set()
    ends: list[tuple[int, int, int, int]] = []  # the offset of each end record, and its size, start and count
    for signature, form, (size, start, count) in ((_END, END, (5, 6, 4)), (_END64, END64, (8, 9, 7))):
        for match in [*re.finditer(signature, tail)][: -_MAX_ENDS - 1 : -1]:
            if match.start() + form.size <= len(tail):
                fields = form.unpack_from(tail, match.start())
                ends.append((base + match.start(), fields[size], fields[start], fields[count]))
    for position, size, start, count in ends:
        for place in (start, position - size):
            if place in tried or len(tried) >= _MAX_ENDS or not 0 <= place < position:
                continue
            if _is_near(source.read(place, 4), _CENTRAL):
                tried.add(place)
                directory = _read_directory(source, place)._replace(stated=start, stated_count=count)
                if directory.complete and len(directory.entries) == count:
                    return directory
                if len(directory.entries) > len(best.entries):
                    best = directory
    if best.entries:
        return best
    # The end record or the first entry is lost: take the first entry in the tail, and those that end where it begins.
    for match in islice(re.finditer(_CENTRAL, tail), _MAX_ENDS):
        directory = _read_directory(source, base + match.start())
        if directory.entries and (directory.complete or directory.entries[-1].end + CENTRAL.size >= source.size):
            start, earlier = directory.start, list[Header]()
            while start > 0:
                before = max(0, start - _MAX_NAME)
                data = source.read(before, start - before)
                at = data.rfind(_CENTRAL)
                entry = _read_entry(data, at, before) if at >= 0 else None
                if entry is None or entry.end != start:
                    break
                earlier.append(entry)
                start = entry.position
            stated, count = ends[0][2:] if ends else (-1, -1)
            return Directory([*reversed(earlier), *directory.entries], start, stated, count, directory.complete)
    return _NO_DIRECTORY


def _read_directory(source: Source, start: int) -> Directory:
    """The entries from ``start`` on. A damaged one ends where the next one begins."""
    data = source.read(start, min(_MAX_DIRECTORY, source.size - start))
    entries: list[Header] = []
    at, least = 0, CENTRAL.size + 1
    while at + least <= len(data) and _is_near(data[at : at + 4], _CENTRAL):
        entry = _read_entry(data, at, start)
        end = entry.end - start if entry else at
        following = data[end : end + 4]
        continues = not following or any(_is_near(following, signature) for signature in (_CENTRAL, _END64, _END))
        if entry is None or _CENTRAL in data[at + 4 : end] or not continues:
            ends = [data.find(signature, at + least, at + _MAX_NAME) for signature in (_CENTRAL, _END64, _END)]
            length = min((end - at for end in ends if end > 0), default=0)
            entry = _read_entry(data, at, start, length) if length else entry
        if entry is None:
            break
        entries.append(entry)
        at = entry.end - start
    complete = any(_is_near(data[at : at + 4], signature) for signature in (_END64, _END))
    return Directory(entries, start, complete=complete)


def _read_entry(data: bytes, at: int, base: int, length: int = 0) -> Header | None:
    """The entry at ``at`` of ``data``, which begins at offset ``base``.

    If ``length`` is given, it is that of the entry, and everything after the fixed fields is the name.
    """
    if at + CENTRAL.size > len(data):
        return None
    fields = CENTRAL.unpack_from(data, at)
    _, _, _, flags, method, time, date, crc, stored, size, n_name, n_extra, n_comment = fields[:13]
    if length:
        n_name, n_extra, n_comment = length - CENTRAL.size, 0, 0
    name_end = at + CENTRAL.size + n_name
    end = name_end + n_extra + n_comment
    if end > len(data) or not 0 < n_name <= _MAX_NAME:
        return None
    name, extra, header = data[at + CENTRAL.size : name_end], data[name_end : name_end + n_extra], fields[16]
    if ALL32 in (stored, size, header):
        size, stored, header = widen(extra, size, stored, header)
    return Header(base + at, base + end, header, flags, method, time, date, crc, stored, size, name, extra)


# -- records


class Scan:
    """Every record of an archive that begins at byte 0 of a source, in the order of the file.

    Without ``listed`` the directory is not used, and a record whose end is far away is the last. ``read_index`` is
    called with the source, offset, size and checksum of ``data.pkl``. ``missing`` are entries of the directory without
    a record.
    """

    def __init__(
        self, source: Source, read_index: Callable[[Source, int, int, int | None], bytes], *, listed: bool = True
    ) -> None:
        self._source = source
        self._read_index = read_index
        self._listed = listed
        self.records: list[FoundRecord] = []
        directory = find_directory(source) if listed else _NO_DIRECTORY
        # The directory of an archive inside this one lists none of its records.
        first = _read_local(source, 0)
        is_its_own = first is not None and any(entry.name == first.name for entry in directory.entries)
        self._run(directory if is_its_own or any(map(self._has_record, directory.entries)) else _NO_DIRECTORY)
        if listed and not self.directory.entries and _is_near(source.read(self._position, 4), _CENTRAL):
            self._run(_read_directory(source, self._position))
        directory = self.directory
        listed_at = {record.entry.position for record in self.records if record.entry}
        self.missing = [entry for entry in directory.entries if entry.position not in listed_at]
        if directory.complete and not self.missing and directory.stated_count == len(directory.entries):
            self.records = [record if record.entry else record._replace(replaced=True) for record in self.records]

    def _has_record(self, entry: Header) -> bool:
        """Whether an entry of the directory points to a record of its name."""
        local = _read_local(self._source, entry.header) if starts_record(self._source, entry.header) else None
        return local is not None and local.name == entry.name

    def _run(self, directory: Directory) -> None:
        """Go from record to record."""
        self.directory = directory
        self.records = []
        self._position = 0
        self._by_header: dict[int, Header] = {}
        for entry in directory.entries:
            if entry.header not in self._by_header or self._has_record(entry):
                self._by_header[entry.header] = entry
        self._by_name = {entry.name: entry for entry in directory.entries}
        self._headers = sorted(header for header in self._by_header if starts_record(self._source, header))
        self._storages: dict[str, Storage] = {}
        self._index: tuple[int, int, int | None] | None = None
        self._gap_budget = _MAX_GAP if self._listed else 0
        self._search_budget = _MIN_SEARCH + _MAX_SEARCH * self._source.size
        for _ in range(_MAX_STEPS):
            if not self._step():
                break

    def _step(self) -> bool:
        """Add the record at the current position; false if there is none."""
        position, directory = self._position, self.directory
        if position == directory.start or position >= self._source.size:
            return False
        entry = self._by_header.get(position)
        local = _read_local(self._source, position) if starts_record(self._source, position) else None
        if entry is None and local is None:
            return self._skip()
        if local is not None and (entry is None or local.name != entry.name):
            # The entry of this name may point elsewhere by mistake, and the entry that points here may be another's.
            named = self._by_name.get(local.name)
            if named is not None and not self._has_record(named):
                entry = entry if entry is not None and _is_near(entry.name, named.name) else named
        following = self._next(position)
        if following is None and directory.complete and directory.start > position:
            following = directory.start
        wide = position >= ALL32 or (local is not None and local.wide)
        record = self._locate(FoundRecord(position, local, entry, wide), following)
        if record is None:
            return local is None and self._skip()
        self.records.append(record)
        is_index = any(name.rpartition(b"/")[2] == b"data.pkl" for name in record.names)
        if is_index and record.present == record.stored <= MAX_PAYLOAD:
            copy = entry or record.descriptor
            self._index = (record.payload, record.stored, copy.crc32 if copy else None)
        self._position = record.payload if record.endless else record.end
        return self._skip() if record.endless else record.present == record.stored

    def _next(self, position: int) -> int | None:
        """The next header that the directory lists."""
        index = bisect_right(self._headers, position)
        return self._headers[index] if index < len(self._headers) else None

    def _skip(self) -> bool:
        """Move to the next header: the next that looks like one, or that the directory lists."""
        listed, directory = self._next(self._position), self.directory
        stop = listed or (directory.start if directory.start > 0 else self._source.size)
        at = stop if _is_near(self._source.read(self._position, 4), _CENTRAL) else self._position + 1
        while at < stop and self._gap_budget > 0:
            ahead = find_header(self._source, self._source.read(at, _CHUNK + 3), at)
            if 0 <= ahead < stop - at:
                self._position = at + ahead
                return True
            at += _CHUNK
            self._gap_budget -= _CHUNK
        if listed is not None:
            self._position = listed
        return listed is not None

    # -- where the bytes of a record are

    def _locate(self, record: FoundRecord, following: int | None) -> FoundRecord | None:
        """Find the bytes of a record; ``following`` is where the next record begins, if that is known."""
        local, entry = record.local, record.entry
        # Usually everything agrees. Weighing the evidence anyway makes a rescue of many records 1.5 times as slow.
        if local is not None and entry is not None and (local.name, local.header) == (entry.name, entry.header):
            expected = bool(entry.stored and local.flags & HAS_DESCRIPTOR)
            descriptor = _read_descriptor(self._source, local.end + entry.stored, wide=local.wide) if expected else None
            agree = not expected or (descriptor and descriptor[:3] == (entry.crc32, entry.stored, entry.size))
            whole = record._replace(payload=local.end, stored=entry.stored, present=entry.stored, descriptor=descriptor)
            if agree and whole.end == following:
                return whole
        score, best = max(self._options(record, following), key=lambda option: option[0], default=(0, record))
        if score > 0:
            return best
        if local is None or local.end > self._source.size:  # the file ends within its header
            return None
        length = self._size_by_index(local) if entry is None else entry.stored
        left = max(0, self._source.size - local.end)
        record = record._replace(payload=local.end, wide=local.wide)
        if length is None:  # at least its descriptor is missing, perhaps more
            return record._replace(stored=left + 1, present=left, endless=True)
        return record._replace(stored=length, present=min(length, left))

    def _options(self, record: FoundRecord, following: int | None) -> Iterator[tuple[int, FoundRecord]]:
        """Each offset and size that the bytes may have, with a score: how much more evidence is for it than against."""
        source, (header, local, entry, wide, *_) = self._source, record
        names = [copy.name for copy in (local, entry) if copy is not None and copy.name]
        fields = (0, 12, 20) if wide else (0,)  # sizes of the zip64 field
        unpadded = {header + LOCAL.size + 4 + len(name) + field for name in names for field in fields}
        padded = {start + int.from_bytes(source.read(start - 2, 2), "little") for start in unpadded}
        starts = padded | {start + -start % ALIGNMENT for start in unpadded}
        sizes: set[int] = set()
        if local is not None:
            starts.add(local.end)
            if local.stored and not local.flags & HAS_DESCRIPTOR:
                sizes.add(local.stored)
        if entry is not None:
            sizes |= {entry.stored} if entry.method else {entry.stored, entry.size}
        if following is not None:
            width = 24 if wide else 16
            before = _read_descriptor(source, following - width, wide=wide)
            if before is not None:
                sizes |= {before.stored, before.size}
                starts |= {following - width - before.stored, following - width - before.size}
            sizes |= {following - less - start for start in starts for less in (0, width)}
        measured = self._measure(local, following) if local is not None and entry is None else None
        if measured is not None:
            sizes.add(measured)
        for start, size in product(sorted(starts), sorted(sizes)):
            if size < 0 or not header + LOCAL.size <= start <= source.size:
                continue
            present = max(0, min(size, source.size - start))
            descriptor = _read_descriptor(source, start + size, wide=wide) if size else None
            option = record._replace(payload=start, stored=size, present=present, descriptor=descriptor)
            cut = descriptor is None and option.end + 24 > source.size  # the file ends within the descriptor
            evidence = [start in padded]  # true is for this offset and size, false is against it
            if following is not None:
                evidence.append(option.end == following)
            if not cut and option.end < source.size:
                evidence.append(any(_is_near(source.read(option.end, 4), mark) for mark in (_LOCAL, _CENTRAL)))
            if local is not None:
                evidence.append(local.end == start)
                if local.stored or not local.flags & HAS_DESCRIPTOR:
                    evidence += [local.stored == size] * 2
            if entry is not None:
                evidence += [entry.stored == size] if entry.method else [entry.stored == size, entry.size == size]
            if descriptor is not None:
                evidence += (True, size in (descriptor.stored, descriptor.size))
                if entry is not None:
                    evidence.append(descriptor.crc32 == entry.crc32)
            elif size and not cut:
                evidence.append(local is not None and not local.flags & HAS_DESCRIPTOR)
            yield 2 * sum(evidence) - len(evidence), option

    # -- the size of a record whose header does not have it

    @property
    def storages(self) -> dict[str, Storage]:
        """The storages that the index names, by key. The index is read on first use."""
        if self._index is not None:
            data = self._read_index(self._source, *self._index)
            self._storages = declared_storages(pickle_machine.run(data, name="data.pkl").persistent)
            self._index = None
        return self._storages

    def _size_by_index(self, local: Header) -> int | None:
        parts = text_of(local.name).split("/")
        if len(parts) < 2 or parts[-2] not in ("data", "tensors"):
            return None
        storage = self.storages.get(parts[-1])
        return None if storage is None else storage.nbytes

    def _measure(self, local: Header, following: int | None) -> int | None:
        """The stored size of a record; ``None`` if it cannot be found."""
        if not local.flags & HAS_DESCRIPTOR:
            return local.stored
        if local.method == DEFLATED:  # a deflate stream marks its end
            unpack, inflated, at = zlib.decompressobj(-15), 0, local.end
            while at < self._source.size and inflated < _MAX_INFLATED and self._search_budget > 0:
                data = self._source.read(at, _BLOCK)
                self._search_budget -= len(data)
                at += len(data)
                try:
                    inflated += len(unpack.decompress(data))
                except zlib.error:
                    return None
                if unpack.eof:
                    return at - len(unpack.unused_data) - local.end
            return None
        size = self._size_by_index(local)
        if size is None:
            size = self._size_by_descriptor(local, following)
        if size is None and local.name.endswith(b".pkl"):
            pickle, end = run_at(self._source, local.end, "data.pkl", _PICKLE_WINDOW)
            return None if pickle.broken else end - local.end
        return size

    def _size_by_descriptor(self, local: Header, following: int | None) -> int | None:
        """The distance to a descriptor that states the same distance as the size."""
        form = DESCRIPTOR64 if local.wide else DESCRIPTOR
        at, stop, step = local.end, following or self._source.size, _BLOCK
        stop = stop if self._listed else min(stop, at + _MIN_SEARCH)
        while at < stop and self._search_budget > 0:
            window = self._source.read(at, step + form.size)
            self._search_budget -= len(window)
            for match in re.finditer(_DESCRIPTOR, window[: step + 3]):
                index = match.start()
                size = at + index - local.end
                if index + form.size > len(window):  # the file ends within it: its checksum must be right
                    crc = window[index + 4 : index + 8]
                    checkable = len(crc) == 4 and size <= MAX_PAYLOAD
                    content = self._source.read(local.end, size) if checkable else b""
                    return size if checkable and zlib.crc32(content) == int.from_bytes(crc, "little") else None
                _, _, stored, whole = form.unpack_from(window, index)
                if size and size in (stored, whole):
                    return size
            at, step = at + step, min(4 * step, _CHUNK)
        return None


# -- an archive without its directory


def walk_index(source: Source, broken: ZipIndex) -> ZipIndex:
    """Find records by going from header to header; the problems of ``broken`` are kept, and new ones added."""
    scan = Scan(source, lambda source, offset, length, _: source.read(offset, length), listed=False)
    problems = Problems(broken.problems)
    records: dict[str, Record] = {}
    reached = 0
    first = scan.records[0].local if scan.records else _read_local(source, 0)
    root = text_of(first.name.partition(b"/")[0]) if first is not None and b"/" in first.name else ""
    prefix = f"{root}/" if root else ""
    for record in scan.records:
        local = record.local
        if local is None or (record.endless and not local.name.endswith(b".pkl")):
            break
        (name,) = names_below([local.name], prefix)
        size, present = local.size or record.stored, record.present
        checksum: int | None = local.crc32
        if local.flags & HAS_DESCRIPTOR:
            checksum = record.descriptor.crc32 if record.descriptor else None
            if local.method == DEFLATED:
                with suppress(zlib.error):
                    size = sum(map(len, inflated(source, record.payload, record.present, MAX_PAYLOAD)))
        earlier = records.pop(name, None)
        if earlier is not None:  # keep it under another name, so that both are judged
            problems.add("zip-found-twice", name, f"at byte {earlier.offset} and at byte {record.payload}")
            aside = f"{name}@{earlier.offset}"
            records[aside] = earlier._replace(name=aside)
        reached = source.size if record.endless else record.end
        if name.endswith(".pkl") and not local.method:
            # What looks like its end may be a part of the pickle, and more of it must be judged. Then this record
            # is the last: otherwise the bytes that follow could be run once for every record in them.
            pickle, end = run_at(source, record.payload, name, _BLOCK)
            if record.endless or end > record.payload + present:
                reached = source.size if pickle.broken else end
                size = present = reached - record.payload
        ended = record.descriptor or not local.flags & HAS_DESCRIPTOR or source.read(reached, 4) == _DESCRIPTOR
        if not ended and reached + DESCRIPTOR.size <= source.size:
            problems.add("zip-no-descriptor", name, f"none at byte {reached}, where it should end")
        whole = present == record.stored
        if local.method and not whole:  # its size, that before compression, does not show that bytes are missing
            problems.add("zip-record-cut", name, f"{present} of {record.stored} bytes are in the file")
        records[name] = Record(name, record.payload, size, present, checksum if whole else None, local.method)
        if not whole:
            break
    if not any(record.crc32 for record in records.values()):  # saved with checksums switched off
        records = {name: record._replace(crc32=None) for name, record in records.items()}
    if not scan.records and first is not None and len(first.name) == int.from_bytes(source.read(26, 2), "little"):
        (name,) = names_below([first.name], prefix)  # all that is left, and it shows what the file was
        records[name] = Record(name, None, 0, 0, None, first.method)
    within = f"up to byte {min(reached, source.size)} of {source.size}"
    problems.add("zip-walked", detail=f"{len(records)} records were found without it, {within}")
    # Zeros at the end: a full disk, or a download that reserved the space and never completed.
    tail = source.read(max(0, source.size - _CHUNK), _CHUNK)
    zeros = len(tail) - len(tail.rstrip(b"\0"))
    if zeros >= _MIN_ZEROS:
        problems.add("zeros-at-end", detail=f"the file ends in at least {zeros} zero bytes")
    return ZipIndex(root, records, tuple(problems), ok=bool(records))
