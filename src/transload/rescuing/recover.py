"""A damaged file, whatever its format, as the file it was or as much of it as there is.

Archives have a module of their own. Legacy streams and safetensors files begin with what names their tensors, so what
is before a cut is all there. They have no checksums: only what is in them twice can be repaired.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

from transload.dtypes import ITEMSIZE
from transload.formats.pickle_machine import run_at
from transload.formats.safetensors import MAX_COUNT, MAX_HEADER, PREFIX
from transload.formats.safetensors import looks_like as looks_like_safetensors
from transload.formats.tensors import Slot, claimed
from transload.formats.torch_legacy import looks_like_legacy
from transload.io.sources import Slice, Source
from transload.nodes import Pickle
from transload.rescuing.assembly import (
    Assembly,
    Filler,
    LostRange,
    Part,
    Recovered,
    differences,
    file_source,
    key_of,
    repaired,
    temporary_file,
)
from transload.rescuing.result import Repair
from transload.rescuing.zip_recovery import recover_archive
from transload.rescuing.zip_scan import Scan, find_directory, find_header, starts_record

__all__ = ["looks_like_damaged_legacy", "recover"]

_MAX_SEARCH = 64 << 20
"""How far the beginning of a checkpoint is searched for behind something else."""

_CHUNK = 1 << 20
_LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_LEGACY_OPENING = _LEGACY_MAGIC + b"\x80\x02M\xe9\x03."
"""The magic number and the protocol version, as torch has always written them."""

_MAX_FLIPPED = 2  # bits in which the opening, or a count, may differ
_PICKLES = 5
_COUNT = 8


class _Attempt(NamedTuple):
    offset: int
    made: Recovered

    @property
    def worth(self) -> tuple[bool, int, int]:
        made = self.made
        return not made.lost_records and not made.lost_ranges, len(made.records) - len(made.lost_records), -self.offset


def recover(source: Source, stack: ExitStack) -> Recovered | None:
    """The best that can be made of a source; ``None`` if no checkpoint can be seen in it."""
    best = max(_attempts(source), key=lambda attempt: attempt.worth, default=None)
    if best is None or not best.worth[0]:
        text = _without_carriage_returns(source, stack)
        other = max(_attempts(text), key=lambda attempt: attempt.worth, default=None) if text is not None else None
        if other is not None and (best is None or other.worth > best.worth):
            note = "the file was copied as text, with a CR before every LF: these were removed"
            return other.made._replace(exact=False, notes=(note, *other.made.notes))
    if best is None or not best.offset:
        return best.made if best else None
    repairs = tuple(repair._replace(position=repair.position + best.offset) for repair in best.made.repairs)
    kind = "another archive" if starts_record(source) else "other data"
    note = f"the checkpoint begins at byte {best.offset:,}, after {kind}"
    return best.made._replace(repairs=repairs, notes=(note, *best.made.notes))


def _without_carriage_returns(source: Source, stack: ExitStack) -> Source | None:
    """The file without the CR before every LF that a program put in, taking it for text; ``None`` if it did not."""
    file = temporary_file(stack)
    ends, carried = 0, b""
    for at in range(0, source.size, _CHUNK):
        data = carried + source.read(at, _CHUNK)
        carried = b"\r" if data.endswith(b"\r") and at + _CHUNK < source.size else b""
        data = data[: len(data) - len(carried)]
        found = data.count(b"\r\n")
        if found != data.count(b"\n"):
            return None
        ends += found
        file.write(data.replace(b"\r\n", b"\n"))
    return file_source(file, source.name) if ends else None


def _attempts(source: Source) -> Iterator[_Attempt]:
    first: Recovered | None = None
    for offset in _archive_starts(source):
        if first is not None and _is_within(source, offset, first):
            continue
        made = recover_archive(_from(source, offset))
        if made is not None:
            first = first or made
            yield _Attempt(offset, made)
    if first is not None:
        return
    if looks_like_legacy(source) or looks_like_damaged_legacy(source):
        first = _recover_legacy(source)
    if first is None and (looks_like_safetensors(source) or source.read(8, 2) == b'{"'):
        first = _recover_safetensors(source)
    if first is not None:
        yield _Attempt(0, first)
        return
    head = source.read(0, _MAX_SEARCH)  # it begins with something else
    table = head.find(b'{"', PREFIX + 1)
    places = (
        (find_header(source, head), recover_archive),
        (head.find(_LEGACY_MAGIC), _recover_legacy),
        (table - PREFIX if table < 1 << 20 else -1, _recover_safetensors),
    )
    for at, attempt in places:
        made = attempt(_from(source, at)) if at > 0 else None
        if made is not None:
            yield _Attempt(at, made)
            return


def _from(source: Source, offset: int) -> Source:
    return Slice(source, offset, source.size - offset, source.name) if offset else source


def _archive_starts(source: Source) -> list[int]:
    """Where archives may begin: at the beginning, and where a directory would be right about its place."""
    starts = [0] if starts_record(source) else []
    directory = find_directory(source)
    if directory.entries and directory.stated >= 0:
        shift = directory.start - directory.stated
        if shift > 0 and starts_record(source, shift):
            starts.append(shift)
    if not starts and directory.entries:
        starts.append(0)  # its beginning was overwritten
    return starts


def _is_within(source: Source, offset: int, outer: Recovered) -> bool:
    """Whether a place is in a whole record of an archive, or where a record begins: what is there is a part of it."""
    lost = {record.name for record in outer.lost_records}
    for record in outer.records:
        places = () if key_of(record.name) in lost else record.content
        if any(part.source is source and part.offset <= offset < part.offset + part.length for part in places):
            return True
    return any(record.payload == offset for record in Scan(source).records)


# -- legacy streams: five pickles, then the storages, each after the count of its elements


def looks_like_damaged_legacy(source: Source) -> bool:
    """Whether a source begins like a legacy stream, but for a bit or two."""
    return _distance(source.read(0, len(_LEGACY_OPENING)), _LEGACY_OPENING) <= _MAX_FLIPPED


def _distance(one: bytes, other: bytes) -> int:
    """Bits that differ; many if one is shorter."""
    if len(one) != len(other):
        return 8 * len(other)
    return (int.from_bytes(one, "little") ^ int.from_bytes(other, "little")).bit_count()


def _recover_legacy(source: Source) -> Recovered | None:
    """The stream as it should be; ``None`` if its pickles are not all there.

    The count before each storage is also in the object. One that is not where it should be tells that bytes were
    inserted or removed before it.
    """
    repairs: list[Repair] = []
    if looks_like_damaged_legacy(source):
        repairs = differences(0, source.read(0, len(_LEGACY_OPENING)), _LEGACY_OPENING)
    found = _legacy_storages(Assembly(repaired(source, 0, source.size, repairs), source.name))
    if found is None:
        return None
    at, slots = found
    end = at + sum(_COUNT + slot.nbytes for slot in slots)
    # In a file as long as it should be only some counts were overwritten, and a bit or two of one may have flipped.
    # Otherwise everything behind a wrong one is displaced.
    same_size = end == source.size
    right: list[bool] = []
    for slot in slots:
        here, count = source.read(at, _COUNT), (slot.nbytes // ITEMSIZE[slot.dtype]).to_bytes(_COUNT, "little")
        repairs += differences(at, here.ljust(_COUNT, b"\0"), count)
        right.append(len(here) < _COUNT or _distance(here, count) <= (_MAX_FLIPPED if same_size else 0))
        at += _COUNT + slot.nbytes
    at, lost = found[0], False
    ranges: list[LostRange] = []
    for index, slot in enumerate(slots):
        lost = not all(right[index : index + 2]) or (lost and not same_size)
        start, at = at + _COUNT, at + _COUNT + slot.nbytes
        if lost and start < min(at, source.size):
            ranges.append(LostRange(start, min(at, source.size), "its bytes are not where they should be"))
    made = _resized(source, end, repairs, ranges, "storage")
    # Another stream may follow. Whole ones end where they should.
    if source.size <= end or source.read(end, len(_LEGACY_OPENING)) == _LEGACY_OPENING:
        return made
    warning = "the file is longer than its counts say: unless the extra bytes are at its end, the last storage is wrong"
    return made._replace(warnings=(warning,))


def _resized(source: Source, end: int, repairs: list[Repair], ranges: list[LostRange], last: str) -> Recovered:
    """A file without checksums, repaired, and cut or filled up to the size it should have."""
    lack = max(0, end - source.size)
    whole = Assembly([Part(source, 0, end - lack), Part(Filler(lack), 0, lack)], source.name)
    if lack:
        ranges.append(LostRange(source.size, end, "the file ends before its last byte"))
    made = Recovered(
        Assembly(repaired(whole, 0, end, repairs), source.name),
        not ranges,
        tuple(ranges),
        tuple(repair for repair in repairs if repair.position < source.size),
        all_unchecked=True,
    )
    if source.size <= end:
        return made
    return made._replace(notes=(f"{source.size - end:,} bytes after the last {last} are left out",))


def _legacy_storages(source: Source) -> tuple[int, list[Slot]] | None:
    """Where the storages begin, and what the object says of each; ``None`` if the pickles are not all there."""
    pickles: list[Pickle] = []
    at = 0
    while len(pickles) < _PICKLES and not (pickles and pickles[-1].broken):
        pickle, at = run_at(source, at, f"part {len(pickles) + 1}")
        pickles.append(pickle)
    if len(pickles) < _PICKLES or pickles[-1].broken:
        return None
    root = pickles[4].root if type(pickles[4].root) is list else []
    keys = [key.decode("latin-1") if type(key) is bytes else str(key) for key in root if type(key) in (str, bytes, int)]
    slots = claimed(pickles[3])
    return None if any(key not in slots for key in keys) else (at, [slots[key] for key in keys])


# -- safetensors: a length, a table, then the tensors


def _recover_safetensors(source: Source) -> Recovered | None:
    """The file as it should be; ``None`` if its table is not all there."""
    length = _table_length(source)
    if length is None:
        return None
    repairs = differences(0, source.read(0, PREFIX), length.to_bytes(PREFIX, "little"))
    end = PREFIX + length
    for entry in json.loads(source.read(PREFIX, length)).values():
        match entry:
            case {"data_offsets": [int() as first, int() as last]} if 0 <= first <= last < MAX_COUNT:
                end = max(end, PREFIX + length + last)
    made = _resized(source, end, repairs, [], "tensor")
    if source.size <= end:
        return made
    return made._replace(
        warnings=("the file is longer than its table says: unless the extra bytes are at its end, tensors are wrong",)
    )


def _table_length(source: Source) -> int | None:
    """The length of the table: what the file says, or where the table really ends."""
    stated = int.from_bytes(source.read(0, PREFIX), "little")
    if 1 < stated <= min(MAX_HEADER, source.size - PREFIX) and _is_table(source.read(PREFIX, stated)):
        return stated
    head = source.read(PREFIX, min(MAX_HEADER, source.size - PREFIX))
    text = head.decode("latin-1")  # one character for each byte; the table itself is read again as what it is
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None
    length = end + len(text[end:]) - len(text[end:].lstrip(" "))
    return length if _is_table(head[:length]) and (stated ^ length).bit_count() <= 2 else None


def _is_table(data: bytes) -> bool:
    try:
        return isinstance(json.loads(data), dict)
    except (ValueError, RecursionError):
        return False
