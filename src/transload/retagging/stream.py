"""A pickle with other tags: in the same number of bytes where that can be, else as long as it must be."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import NamedTuple

from transload.nodes import Pickle
from transload.retagging.changes import Change
from transload.retagging.sites import FRAME, MEMOIZE, NUMBERS, PROTO, Found, Op, Site, tag_of

__all__ = ["Edit", "in_stream", "patched", "rewritten", "spliced"]

_BINUNICODE, _SHORT_BINUNICODE, _SHORT_BINSTRING = b"X", b"\x8c", b"U"
_PYTHON2 = frozenset(b"UST")
_SHORT = {**dict.fromkeys(b"hj", b"h"), **dict.fromkeys(b"qr", b"q")}
_LONG = {**dict.fromkeys(b"hj", b"j"), **dict.fromkeys(b"qr", b"r")}
_MAX_CHOICES = 4096
_FILLER = 2  # bytes of a repeated PROTO
_GAP = 4096
"""Runs nearer to each other than this are one: a page is what a disk writes."""


class Edit(NamedTuple):
    """Bytes in place of those between two positions of a stream."""

    at: int
    end: int
    new: bytes


Renamed = Callable[[str], str]


def spliced(data: bytes, edits: Iterable[Edit]) -> bytes:
    """``data`` with all edits made.

    >>> spliced(b"abcd", [Edit(1, 3, b"XYZ")])
    b'aXYZd'
    """
    parts: list[bytes] = []
    done = 0
    for at, end, new in sorted(edits):
        parts += (data[done:at], new)
        done = end
    return b"".join((*parts, data[done:]))


def in_stream(data: bytes, edits: Iterable[Edit], offset: int) -> list[Change]:
    """Edits that keep the length of a stream, as changes of the file which holds it at ``offset``."""
    groups: list[list[Edit]] = []
    for edit in sorted(edits):
        if groups and edit.at - groups[-1][-1].end < _GAP:
            groups[-1].append(edit)
        else:
            groups.append([edit])
    return [_run(data, group, offset) for group in groups]


def _run(data: bytes, group: list[Edit], offset: int) -> Change:
    at, end = group[0].at, group[-1].end
    parts: list[bytes] = []
    done = at
    for edit in group:
        parts += (data[done : edit.at], edit.new)
        done = edit.end
    return Change(offset + at, data[at:end], b"".join(parts))


def patched(pickle: Pickle, data: bytes, found: Found, renamed: Renamed) -> list[Edit] | None:
    """Edits that keep every position of the stream; ``None`` if the new tags do not fit into the room of the old.

    A tag that is shorter leaves room, which is taken up by longer forms of the numbers beside it that mean the same;
    where there are none, the memo entry of a text that is never read again makes room for fillers.
    """
    read = {site.entry for site in found.sites if not site.literal}
    literal = {site.entry for site in found.sites if site.literal}
    edits: list[Edit] = []
    for site in _changing(found, renamed):
        if not site.literal:
            if site.entry in literal:
                continue
            return None  # the text is somebody else's, and a reference has no room for one
        if found.reads.get(site.entry):
            return None  # somebody else's text is this one
        text = _text(renamed(_tag(site)), site.tag.code)
        new = _fitted(data, site, text, pickle.protocol)
        if new is None and site.entry not in read:
            new = _fitted(data, site, text, pickle.protocol, forget=True)
        if new is None:
            return None
        edits.append(Edit(site.ops[0].at, site.ops[-1].end, new))
    return edits


def rewritten(pickle: Pickle, data: bytes, found: Found, renamed: Renamed) -> list[Edit]:
    """Edits that give every storage its tag and leave everybody else's text alone, whatever room that takes."""
    literal = {site.entry for site in found.sites if site.literal}
    edits: list[Edit] = []
    for site in _changing(found, renamed):
        new = renamed(_tag(site))
        if site.literal:
            edits.append(Edit(site.tag.at, site.tag.end, _text(new, site.tag.code)))
            old = data[site.tag.at : site.tag.end]
            edits += (Edit(op.at, op.end, old) for op in found.reads.get(site.entry, ()))
        elif site.entry not in literal:
            edits.append(Edit(site.tag.at, site.tag.end, _text(new, 0x55 if pickle.python2 else 0x58)))
    return [*edits, *_frames(data, found, edits)]


def _changing(found: Found, renamed: Renamed) -> Iterable[Site]:
    return (site for site in found.sites if renamed(_tag(site)) != _tag(site))


def _tag(site: Site) -> str:
    return tag_of(site.node) or ""


def _frames(data: bytes, found: Found, edits: list[Edit]) -> Iterable[Edit]:
    """The lengths of the frames that hold edits."""
    for op in found.frames:
        length = int.from_bytes(data[op.at + 1 : op.end], "little")
        grown = sum(len(new) - (end - at) for at, end, new in edits if op.end <= at < op.end + length)
        if grown:
            yield Edit(op.at + 1, op.end, (length + grown).to_bytes(8, "little"))


def _text(text: str, code: int) -> bytes:
    """A text in the form it had, or the nearest that is as plain."""
    raw = text.encode()
    if code in _PYTHON2 and len(raw) < 256:
        return _SHORT_BINSTRING + bytes([len(raw)]) + raw
    if code == _SHORT_BINUNICODE[0] and len(raw) < 256:
        return _SHORT_BINUNICODE + bytes([len(raw)]) + raw
    return _BINUNICODE + len(raw).to_bytes(4, "little") + raw


# -- in the same number of bytes


def _fitted(data: bytes, site: Site, text: bytes, protocol: int, *, forget: bool = False) -> bytes | None:
    """The parts of an id with another tag in exactly the bytes they took; ``None`` if that cannot be.

    ``forget`` leaves out the opcode that enters the tag into the memo; MEMOIZE counts, so it must stay.
    """
    begin, end = site.ops[0].at, site.ops[-1].end
    place = site.ops.index(site.tag)
    forms = [_LENGTHS[op.code](data, op) if op.code in _LENGTHS else (op.end - op.at,) for op in site.ops]
    forms[place] = (len(text),) if text[0] != _SHORT_BINUNICODE[0] else (len(text), len(text) + 3)
    if forget and site.entry >= 0 and site.ops[place + 1].code != MEMOIZE:
        forms[place + 1] = (0,)
    chosen = _choice(tuple(forms), end - begin) if FRAME not in {op.code for op in site.ops} else None
    if chosen is None:
        return None
    parts = [b""]
    for op, lengths, index in zip(site.ops, forms, chosen, strict=True):
        if op is site.tag:
            parts.append(text if not index else _wider(text))
        else:
            same = not index and lengths[0] == op.end - op.at
            parts.append(data[op.at : op.end] if same else _form(data, op, lengths[index]))
    filled = sum(map(len, parts))
    parts[0] = bytes((PROTO, max(protocol, 2))) * ((end - begin - filled) // _FILLER)
    return b"".join(parts)


def _wider(text: bytes) -> bytes:
    """SHORT_BINUNICODE as BINUNICODE."""
    return _BINUNICODE + text[1:2] + bytes(3) + text[2:]


def _entry_lengths(_: bytes, op: Op) -> tuple[int, ...]:
    if op.entry >= 1 << 8:
        return (5,)
    return (2, 5) if op.end - op.at == 2 else (5, 2)


def _number_lengths(data: bytes, op: Op) -> tuple[int, ...]:
    value, length = _value(data, op), op.end - op.at
    fitting = (2, 3, 5) if 0 <= value < 1 << 8 else (3, 5) if 0 <= value < 1 << 16 else (5,)
    return (length, *(other for other in fitting if other != length))


def _proto_lengths(_: bytes, __: Op) -> tuple[int, ...]:
    return (2, 0)


def _value(data: bytes, op: Op) -> int:
    return int.from_bytes(data[op.at + 1 : op.end], "little", signed=op.code == 0x4A)


# How long an opcode is, and how long in the other forms that mean the same to every loader.
_LENGTHS: dict[int, Callable[[bytes, Op], tuple[int, ...]]] = {
    **dict.fromkeys(b"hjqr", _entry_lengths),
    **dict.fromkeys(NUMBERS, _number_lengths),
    PROTO: _proto_lengths,
}


def _form(data: bytes, op: Op, length: int) -> bytes:
    """An opcode in the form of that length."""
    if not length:
        return b""
    if op.code in NUMBERS:
        return {2: b"K", 3: b"M", 5: b"J"}[length] + _value(data, op).to_bytes(length - 1, "little", signed=length == 5)
    return (_SHORT if length == 2 else _LONG)[op.code] + op.entry.to_bytes(length - 1, "little")


@lru_cache(_MAX_CHOICES)
def _choice(lengths: tuple[tuple[int, ...], ...], room: int) -> tuple[int, ...] | None:
    """Which form of each part to take so that all of them, and fillers, take exactly the room.

    The fewest fillers, and then the fewest parts in another form than they had.

    >>> _choice(((2, 5), (8,), (2, 3, 5)), 15), _choice(((8,),), 11)
    ((0, 0, 2), None)
    """
    reach: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for each in lengths:
        further: dict[int, tuple[int, tuple[int, ...]]] = {}
        for total, (changed, chosen) in reach.items():
            for index, length in enumerate(each):
                now = changed + (index > 0), (*chosen, index)
                if total + length <= room and now < further.get(total + length, (len(lengths) + 1, ())):
                    further[total + length] = now
        reach = further
    fitting = [(room - total, *reach[total]) for total in reach if (room - total) % _FILLER == 0]
    return min(fitting)[2] if fitting else None
