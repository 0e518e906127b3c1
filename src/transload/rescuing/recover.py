"""Recover a damaged file of any format: the file that was saved, or as much of it as is left.

``unwrapped`` decompresses a file, or extracts it from an archive; ``journal_undone`` undoes a retag that was
interrupted. ``recover`` turns what is inside into a file that the reader can read. Legacy streams and safetensors files
begin with the names of their tensors, so everything before a cut can be read. They have no checksums: only what they
contain twice can be repaired.
"""

from __future__ import annotations

import json
import zlib
from codecs import getincrementaldecoder
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from errno import ENAMETOOLONG, ENOENT, ENOTDIR
from typing import Any, BinaryIO, cast

from transload.dtypes import ITEMSIZE
from transload.errors import RescueError, TransloadError
from transload.formats.pickle_streams import run_at
from transload.formats.safetensors import MAX_COUNT, MAX_HEADER, PREFIX, looks_like_safetensors
from transload.formats.tensors import declared_storages
from transload.formats.torch_legacy import BEGINNINGS, MAGIC_PICKLE, looks_like_legacy
from transload.formats.zip import DEFLATED, text_of
from transload.formats.zip_scan import FoundRecord, Scan, distance, find_directory, find_header, starts_record
from transload.io.journal import read_journal, state_of
from transload.io.packed import MAX_RATIO, UNWRAPPED, Assembly, SourceRange, decompressed, inflated, packed_as
from transload.io.sources import BytesSource, ObjectSource, Slice, Source, cannot_read, journal_path
from transload.nodes import Pickle
from transload.rescuing.archive import (
    Filler,
    LostRange,
    Recovered,
    claim_of,
    differences,
    is_clutter,
    name_below_root,
    recover_archive,
    repaired,
)
from transload.rescuing.bitflips import Repair, check_records, repaired_bytes

_MAX_SEARCH = 64 << 20  # how many bytes are searched for a checkpoint that follows other data
_CHUNK = 1 << 20
# The magic number and the protocol version, as torch writes them.
_LEGACY_OPENING = MAGIC_PICKLE + b"\x80\x02M\xe9\x03."
_MAX_FLIPPED = 2  # bits in which the opening, or a count, may differ
_COUNT = 8


def recover(source: Source, stack: ExitStack) -> Recovered | None:
    """Recover as much as possible of a source; ``None`` if there is no checkpoint in it."""
    best = max(_attempts(source), key=_worth, default=None)
    if best is None or not _worth(best)[0]:
        undone = {
            "the file was copied as text, with a CR before every LF: these were removed": _without_carriage_returns,
            "the file was copied as text, from Latin-1 to UTF-8: this was undone": _without_utf8,
        }
        for note, undo in undone.items():
            text = undo(source, stack)
            other = max(_attempts(text), key=_worth, default=None) if text is not None else None
            if other is not None and (best is None or _worth(other) > _worth(best)):
                return other[1]._replace(exact=False, notes=(note, *other[1].notes))
    if best is None or not best[0]:
        return best[1] if best else None
    offset, recovered = best
    repairs = tuple(repair._replace(position=repair.position + offset) for repair in recovered.repairs)
    kind = "another archive" if starts_record(source) else "other data"
    note = f"the checkpoint begins at byte {offset:,}, after {kind}"
    following = recovered.following and offset + recovered.following
    return recovered._replace(repairs=repairs, notes=(note, *recovered.notes), following=following)


def _worth(attempt: tuple[int, Recovered]) -> tuple[bool, int, int]:
    offset, recovered = attempt
    whole = not recovered.lost_records and not recovered.lost_ranges
    return whole, len(recovered.records) - len(recovered.lost_records), -offset


def _without_carriage_returns(source: Source, stack: ExitStack) -> Source | None:
    """Undo a copy as text, which inserted a CR before every LF; ``None`` if some LF has none."""
    file = _temporary_file(stack)
    ends, carried = 0, b""
    for at in range(0, source.size, _CHUNK):
        data = carried + source.read(at, _CHUNK)
        carried = b"\r" if data.endswith(b"\r") and at + _CHUNK < source.size else b""
        data = data[: len(data) - len(carried)]
        count = data.count(b"\r\n")
        if count != data.count(b"\n"):
            return None
        ends += count
        file.write(data.replace(b"\r\n", b"\n"))
    return _file_source(file, source.name) if ends else None


def _without_utf8(source: Source, stack: ExitStack) -> Source | None:
    """Undo a copy as text, which encoded every byte above 127 in UTF-8; ``None`` if it was another copy."""
    file, decoder = _temporary_file(stack), getincrementaldecoder("utf-8")()
    try:
        for at in range(0, source.size, _CHUNK):
            file.write(decoder.decode(source.read(at, _CHUNK)).encode("latin-1"))
    except UnicodeError:
        return None
    return _file_source(file, source.name) if file.tell() < source.size else None


def _attempts(source: Source) -> Iterator[tuple[int, Recovered]]:
    """The checkpoints that can be recovered from a source, with the offsets where they begin."""
    first: Recovered | None = None
    # Archives may begin at byte 0, and where the stated offset of the directory would be right.
    starts = [0] if starts_record(source) else []
    directory = find_directory(source)
    if directory.entries and directory.stated >= 0:
        shift = directory.start - directory.stated
        if shift > 0 and starts_record(source, shift):
            starts.append(shift)
    if not starts and directory.entries:
        starts.append(0)  # its first bytes were overwritten
    for offset in starts:
        if first is not None:  # this one may be inside an undamaged record of the first, or where one begins
            lost = {record.name for record in first.lost_records}
            whole = [record for record in first.records if name_below_root(record.name) not in lost]
            parts = [part for record in whole for part in record.content if part.source is source]
            inside = any(part.offset <= offset < part.offset + part.length for part in parts)
            if inside or any(record.payload == offset for record in Scan(source, repaired_bytes).records):
                continue
        recovered = recover_archive(Slice(source, offset, source.size - offset, source.name) if offset else source)
        if recovered is not None:
            first = first or recovered
            yield offset, recovered
    if first is not None:
        return
    if looks_like_legacy(source) or looks_like_damaged_legacy(source):
        first = _recover_legacy(source)
    if first is None and (looks_like_safetensors(source) or source.read(8, 2) == b'{"'):
        first = _recover_safetensors(source)
    if first is not None:
        yield 0, first
        return
    head = source.read(0, _MAX_SEARCH)  # look behind other data
    table = head.find(b'{"', PREFIX + 1)
    places = (
        (find_header(source, head), recover_archive),
        (head.find(MAGIC_PICKLE), _recover_legacy),
        (table - PREFIX if table < 1 << 20 else -1, _recover_safetensors),
    )
    for at, attempt in places:
        recovered = attempt(Slice(source, at, source.size - at, source.name)) if at > 0 else None
        if recovered is not None:
            yield at, recovered
            return


# -- legacy streams: five pickles, then the storages, each after the count of its elements


def looks_like_damaged_legacy(source: Source) -> bool:
    """Whether a source begins like a legacy stream, with at most two flipped bits."""
    return distance(source.read(0, len(_LEGACY_OPENING)), _LEGACY_OPENING) <= _MAX_FLIPPED


def _recover_legacy(source: Source) -> Recovered | None:
    """Recover a legacy stream; ``None`` if one of its pickles is lost.

    The count before each storage is also in the object. A wrong one shows that bytes were inserted or removed.
    """
    repairs: list[Repair] = []
    if looks_like_damaged_legacy(source):
        repairs = differences(0, source.read(0, len(_LEGACY_OPENING)), _LEGACY_OPENING)
    opened = Assembly(repaired(source, 0, source.size, repairs), source.name)
    pickles: list[Pickle] = []
    first = 0
    for number in range(1, 6):
        pickle, first = run_at(opened, first, f"part {number}")
        if pickle.broken:
            return None
        pickles.append(pickle)
    root = pickles[4].root if type(pickles[4].root) is list else []
    keys = [key.decode("latin-1") if type(key) is bytes else str(key) for key in root if type(key) in (str, bytes, int)]
    declared = declared_storages(pickles[3].persistent)
    if any(key not in declared for key in keys):
        return None
    slots, at = [declared[key] for key in keys], first
    end = at + sum(_COUNT + slot.nbytes for slot in slots)
    # In a file of the right size only some counts were overwritten, or had a bit or two flipped. Otherwise everything
    # after a wrong one is displaced.
    same_size = end == source.size
    right: list[bool] = []
    for slot in slots:
        here, count = source.read(at, _COUNT), (slot.nbytes // ITEMSIZE[slot.dtype]).to_bytes(_COUNT, "little")
        repairs += differences(at, here.ljust(_COUNT, b"\0"), count)
        right.append(len(here) < _COUNT or distance(here, count) <= (_MAX_FLIPPED if same_size else 0))
        at += _COUNT + slot.nbytes
    at, lost = first, False
    ranges: list[LostRange] = []
    for index, slot in enumerate(slots):
        lost = not all(right[index : index + 2]) or (lost and not same_size)
        start, at = at + _COUNT, at + _COUNT + slot.nbytes
        if lost and start < min(at, source.size):
            ranges.append(LostRange(start, min(at, source.size), "its bytes are not where they should be"))
    recovered = _resized(source, end, repairs, ranges, "storage")
    warning = "the file is longer than its counts say: unless the extra bytes are at its end, the last storage is wrong"
    if source.read(end, len(MAGIC_PICKLE)).startswith(BEGINNINGS):  # then this one ends where it should
        return recovered._replace(following=end)
    return recovered._replace(warnings=(warning,)) if source.size > end else recovered


def _resized(source: Source, end: int, repairs: list[Repair], ranges: list[LostRange], last: str) -> Recovered:
    """A file without checksums, repaired, and cut or padded to the size it should have."""
    shortfall = max(0, end - source.size)
    filler = SourceRange(Filler(shortfall), 0, shortfall)
    whole = Assembly([SourceRange(source, 0, end - shortfall), filler], source.name)
    if shortfall:
        ranges.append(LostRange(source.size, end, "the file ends before its last byte"))
    notes = (f"{source.size - end:,} bytes after the last {last} are left out",) if source.size > end else ()
    resized = Assembly(repaired(whole, 0, end, repairs), source.name)
    within = tuple(repair for repair in repairs if repair.position < source.size)
    return Recovered(resized, not ranges, tuple(ranges), within, notes=notes, all_unchecked=True)


# -- safetensors: a length, a table, then the tensors


def _recover_safetensors(source: Source) -> Recovered | None:
    """Recover a safetensors file; ``None`` if its table is not complete."""
    # If the stated length of the table is wrong, use the one it really has.
    stated = length = int.from_bytes(source.read(0, PREFIX), "little")
    table = _table(source.read(PREFIX, stated)) if 1 < stated <= min(MAX_HEADER, source.size - PREFIX) else None
    if table is None:
        head = source.read(PREFIX, min(MAX_HEADER, source.size - PREFIX))
        text = head.decode("latin-1")  # one character for each byte, so that indexes are offsets
        try:
            _, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            return None
        length = end + len(text[end:]) - len(text[end:].lstrip(" "))
        table = _table(head[:length])
        if table is None or (stated ^ length).bit_count() > 2:
            return None
    repairs = differences(0, source.read(0, PREFIX), length.to_bytes(PREFIX, "little"))
    end = PREFIX + length
    for entry in table.values():
        match entry:
            case {"data_offsets": [int() as first, int() as last]} | [_, _, [int() as first, int() as last]]:
                if 0 <= first <= last < MAX_COUNT:
                    end = max(end, PREFIX + length + last)
    recovered = _resized(source, end, repairs, [], "tensor")
    warning = "the file is longer than its table says: unless the extra bytes are at its end, tensors are wrong"
    return recovered._replace(warnings=(warning,)) if source.size > end else recovered


def _table(data: bytes) -> dict[str, Any] | None:
    try:
        table = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return table if isinstance(table, dict) else None


# -- layers around a checkpoint

_MAX_LAYERS = 3  # a zip in a zip in a gzip is the most that occurs; a hostile file can go on forever
# A file may decompress to 200 times its size, or to 4 GiB: a megabyte can become a gigabyte.
_MAX_UNPACKED_RATIO = 200
_MIN_UNPACKED_LIMIT = 4 << 30
# Records of an archive that is a checkpoint itself.
_RECORDS = (
    *(b"/data.pkl", b"/constants.pkl", b"/model.json", b"/archive_format", b"/data/0", b"/tensors/0", b"/byteorder"),
    *(b"/version", b"/.data/extern_modules", b"/.data/python_version"),
)
_SUFFIXES = (b".pt", b".pth", b".ckpt", b".bin", b".safetensors", b".pt2", b".tar", b".gz", b".zip", b".pkl")


def unwrapped(source: Source, member: str, stack: ExitStack, notes: list[str]) -> tuple[Source, bool]:
    """Remove the layers around a checkpoint, if there are any, and return whether they were undamaged."""
    whole = True
    for _ in range(_MAX_LAYERS):
        inner = _decompressed(source, stack, notes) or _extracted(source, member, stack, notes)
        if inner is None:
            break
        source, whole = inner
    return source, whole


def journal_undone(path: str, source: Source, notes: list[str]) -> Source | None:
    """The file as it was before an interrupted retag, using the journal beside it; ``None`` if there was none."""
    descriptor = getattr(source, "descriptor", -1)
    try:
        journal = read_journal(journal_path(path), descriptor) if descriptor >= 0 else None
    except OSError as error:
        if error.errno in (ENOENT, ENOTDIR, ENAMETOOLONG):  # most often, there is none
            return None
        raise cannot_read(journal_path(path), error) from error
    if journal is None or state_of(descriptor, journal.changes) != "between":  # it has not begun, or is done
        return None
    notes.append("a retag of the file was interrupted: it is read as it was before, using the journal next to it")
    return journal.changes.undone().applied(source)


def _temporary_file(stack: ExitStack) -> BinaryIO:
    """An anonymous file, deleted when the rescue is done."""
    from tempfile import TemporaryFile  # which imports every compressor Python has

    return cast(BinaryIO, stack.enter_context(TemporaryFile()))


def _file_source(file: BinaryIO, name: str) -> Source:
    file.seek(0)
    source = ObjectSource(file)
    source.name = name
    return source


def _unpacked_limit(source: Source) -> int:
    return max(_MIN_UNPACKED_LIMIT, _MAX_UNPACKED_RATIO * source.size)


# -- compression


def _decompressed(source: Source, stack: ExitStack, notes: list[str]) -> tuple[Source, bool] | None:
    """Decompress a source into a temporary file, and return whether that is all; ``None`` if not compressed."""
    kind = packed_as(source.read(0, 8))
    if kind not in UNWRAPPED:
        return None
    file, limit, written, whole = _temporary_file(stack), _unpacked_limit(source), 0, True
    try:
        for piece in decompressed(source, kind, limit + 1):
            file.write(piece)
            written += len(piece)
    except TransloadError:  # such as that it was changed, which is an EOFError, too
        raise
    except EOFError:
        whole = False
    except ImportError as error:
        what = f"the file is compressed with {kind}, and no module that reads it is installed"
        fix = f"{'pip install zstandard, or decompress' if kind == 'zstd' else 'Decompress'} it first: {kind} -d FILE."
        raise RescueError(what, where=source.name, fix=fix) from error
    if written > limit:
        raise RescueError(f"the file decompresses to more than {limit:,} bytes", where=source.name)
    unpacked = _file_source(file, source.name)
    if not unpacked.size:
        what = f"the file is compressed with {kind}, and none of it can be decompressed"
        raise RescueError(what, where=source.name)
    cut = "" if whole else "; the compressed data breaks off there"
    notes.append(f"decompressed from {kind}: {unpacked.size:,} bytes{cut}")
    return unpacked, whole


# -- an archive around a checkpoint


def _extracted(source: Source, member: str, stack: ExitStack, notes: list[str]) -> tuple[Source, bool] | None:
    """Extract the checkpoint from an archive, and return whether it is undamaged.

    ``None`` if there is none in it, or if the archive is a checkpoint itself.
    """
    if not starts_record(source):
        return None
    records = [record for record in Scan(source, repaired_bytes).records if record.names and not record.replaced]
    if any((b"/" + record.names[0]).endswith(_RECORDS) for record in records):
        return None
    checkpoints: list[tuple[str, FoundRecord]] = []
    for record in records:
        raw, name = record.names[0], text_of(record.names[0])
        if is_clutter(raw) or member not in ("", name):
            continue
        head = _head(source, record)
        suffixed = raw.lower().endswith(_SUFFIXES) and record.present > 64
        if suffixed or starts_record(head) or looks_like_damaged_legacy(head):
            checkpoints.append((name, record))
    if not checkpoints:
        return None
    (name, record), *others = checkpoints
    if others:
        what = f"{len(checkpoints)} checkpoints are in the archive: {', '.join(name for name, _ in checkpoints[:8])}"
        raise RescueError(what, where=source.name, fix="Name one of them: --member NAME.")
    notes.append(f"extracted from an archive: {name}")
    repairs: tuple[Repair, ...] = ()
    damaged = False
    if not starts_record(_head(source, record)):  # only the archive has a checksum for it
        (verdict,) = check_records(source, [claim_of(record, summed=True)])
        repairs = verdict.repairs
        if verdict.state == "repaired":
            place, _, _, _, certainty = repairs[0]
            notes.append(f"a flipped bit in it was repaired, using its checksum ({certainty}): byte {place:,}")
        damaged = verdict.state in ("damaged", "cut") or any(repair.certainty != "proven" for repair in repairs)
    content: Source = Assembly(repaired(source, record.payload, record.present, repairs), source.name)
    if record.method == DEFLATED:
        file, limit = _temporary_file(stack), _unpacked_limit(source)
        for piece in _inflated(content, record):
            file.write(piece)
            if file.tell() >= limit:
                break
        content = _file_source(file, source.name)
    return content, not damaged


def _head(source: Source, record: FoundRecord) -> Source:
    if record.method != DEFLATED:
        return Slice(source, record.payload, min(64, record.present), source.name)
    packed = Slice(source, record.payload, record.present, source.name)
    return BytesSource(next(filter(None, _inflated(packed, record)), b"")[:64])


def _inflated(packed: Source, record: FoundRecord) -> Iterator[bytes]:
    """The inflated bytes of a record, up to the first damage, and no more than its stated size."""
    size = record.entry.size if record.entry else record.descriptor.size if record.descriptor else 1 << 62
    with suppress(zlib.error):
        yield from inflated(packed, 0, packed.size, min(size, MAX_RATIO * record.present + 64))
