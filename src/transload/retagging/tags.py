"""Where in a pickle the device tags are, and the pickle with other tags.

The pickle machine says which persistent ids there are; ``find_sites`` finds the opcodes that make them. ``patched``
gives the edits that keep the length of the pickle, ``rewritten`` those that need not. ``same_but_tags`` proves the
result: a mistake made before does no harm.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

from transload.formats.pickle_machine import opcodes
from transload.nodes import Big, Call, Dict, Extension, Global, OutOfBand, Persistent, Pickle, Set

__all__ = ["Edit", "Sites", "find_sites", "patched", "rewritten", "same_but_tags", "spliced", "tag_of"]

_MARK, _TUPLE, _BINGET, _PROTO, _FRAME, _MEMOIZE = 0x28, 0x74, 0x68, 0x80, 0x95, 0x94
_GETS = frozenset(b"hjg")
_PUTS = frozenset(b"qrp\x94")
_LITERALS = frozenset(b"XU\x8cTSV\x8d")
_MEMO = _GETS | _PUTS
_SILENT = _PUTS | {_PROTO, _FRAME}
_CLOSING = frozenset(b"tlduoei1\x90\x91")  # each takes everything down to the last _MARK
_MAKING = _LITERALS | _GETS | frozenset(b"KMJBC\x8eIL\x8a\x8bGFN\x88\x89)]}ctld\x85\x86\x87\x93")
_TAKING = {0x85: 1, 0x86: 2, 0x87: 3, 0x93: 2}
_TAG = 3  # ("storage", type, key, tag, numel), and in the legacy format a view of it
_LENGTHS = (5, 6)
_MAX_OPCODES = 200  # of one id; torch writes at most 30, and a hostile file nests a million ids
_BINUNICODE, _SHORT_BINUNICODE, _SHORT_BINSTRING = b"X", b"\x8c", b"U"
_PYTHON2 = frozenset(b"UST")
_MAX_CHOICES = 4096
_FILLER = 2  # bytes of a repeated _PROTO

Renamed = Callable[[str], str]
"""The new tag for an old one."""


def tag_of(node: Persistent) -> str | None:
    """The device tag of a persistent id, ``None`` if it is not that of a storage."""
    pid = node.id
    if type(pid) is not tuple or len(pid) not in _LENGTHS or pid[0] not in ("storage", b"storage"):
        return None
    tag = pid[_TAG]
    return tag if type(tag) is str else None


# -- where the tags are


class _Op(NamedTuple):
    """An opcode and its argument in the stream; ``entry`` is the memo entry it reads or writes, -1 if it does not."""

    code: int
    at: int
    end: int
    entry: int = -1


class Site(NamedTuple):
    """The id of a storage: its tag, the opcodes that make its parts, and which of them makes the tag.

    ``entry`` is the memo entry that the tag is written to or read from, -1 if there is none.
    """

    tag: str
    ops: list[_Op]
    place: int
    entry: int

    @property
    def literal(self) -> bool:
        """Whether the text of the tag is here, or elsewhere and is only referred to."""
        return self.ops[self.place].code in _LITERALS


class Sites(NamedTuple):
    """The sites of a stream.

    ``reads`` is where the memo entries of their texts are read for something else; ``frames`` are the frames of the
    stream; ``unclear`` are the tags of ids that are not made as torch makes them.
    """

    sites: list[Site]
    reads: dict[int, list[_Op]]
    frames: list[_Op]
    unclear: list[str]


def find_sites(pickle: Pickle, data: bytes) -> Sites:
    """Find every tag in a pickle."""
    found = list(opcodes(data, pickle.start))
    positions = [at for at, _ in found]
    codes = bytes([code for _, code in found])
    puts = list(accumulate(code in _PUTS for code in codes)) if _MEMOIZE in codes else []

    def op(index: int) -> _Op:
        code, at, end = codes[index], positions[index], positions[index + 1]
        if code not in _MEMO:
            return _Op(code, at, end)
        if code == _MEMOIZE:
            return _Op(code, at, end, puts[index] - 1)
        argument = data[at + 1 : end]
        if code in b"gp":
            return _Op(code, at, end, int(argument) if argument.strip().isdigit() else -1)
        return _Op(code, at, end, int.from_bytes(argument, "little"))

    def parts_before(index: int) -> list[_Op]:
        """The opcodes that make the parts of the tuple on top of the stack; none if it is not made right there."""
        index -= 1
        while index > 0 and codes[index] in _SILENT:
            index -= 1
        if codes[index] != _TUPLE:
            return []
        parts: list[_Op] = []
        closed: list[_Op] = []  # what is inside is no part of the tuple
        for before in range(index - 1, max(-1, index - _MAX_OPCODES), -1):
            code = codes[before]
            if code in _CLOSING:
                closed.append(op(before))
            elif code == _MARK and not closed:
                return parts[::-1]
            elif code == _MARK:
                last = closed.pop()
                if not closed:
                    parts.append(_Op(last.code, positions[before], last.end))
            elif not closed:
                parts.append(op(before))
        return []

    sites: list[Site] = []
    unclear: list[str] = []
    for node in pickle.persistent:
        tag = tag_of(node)
        if tag is None:
            continue
        ops = parts_before(bisect_left(positions, node.position) - 1)
        place = _tag_place(bytes([part.code for part in ops]))
        if place < 0:
            unclear.append(tag)
            continue
        after = ops[place + 1] if place + 1 < len(ops) else ops[place]
        entry = after.entry if ops[place].code in _LITERALS and after.code in _PUTS else ops[place].entry
        sites.append(Site(tag, ops, place, entry))
    reads: dict[int, list[_Op]] = {site.entry: [] for site in sites if site.literal and site.entry >= 0}
    own = {site.ops[site.place].at for site in sites}
    for match in re.finditer(rb"[hjg]", codes) if reads else ():
        index = match.start()
        at = positions[index]
        # Most are short ones that read "storage" and the classes of storages.
        if at not in own and (codes[index] != _BINGET or data[at + 1] in reads):
            get = op(index)
            if get.entry in reads:
                reads[get.entry].append(get)
    return Sites(sites, reads, [op(match.start()) for match in re.finditer(rb"\x95", codes)], unclear)


@lru_cache(_MAX_CHOICES)
def _tag_place(codes: bytes) -> int:
    """Which of the opcodes makes the fourth part of the tuple they make together; -1 if that is not plain."""
    makers: list[int] = []
    for place, code in enumerate(codes):
        if code in _SILENT:
            continue
        taken = _TAKING.get(code, 0)
        if code not in _MAKING or taken > len(makers):
            return -1
        del makers[len(makers) - taken :]
        makers.append(place)
    plain = len(makers) in _LENGTHS and codes[makers[_TAG]] in _LITERALS | _GETS
    return makers[_TAG] if plain else -1


# -- other tags


class Edit(NamedTuple):
    """Bytes in place of those between two positions of a stream."""

    at: int
    end: int
    new: bytes


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


def patched(pickle: Pickle, data: bytes, found: Sites, renamed: Renamed) -> list[Edit] | None:
    """Edits that keep every position of the stream; ``None`` if the new tags do not fit into the room of the old.

    The room that a shorter tag leaves is filled by longer forms of the numbers beside it, which mean the same; where
    that is not enough, the memo entry of a text that is never read again makes room for fillers.
    """
    read = {site.entry for site in found.sites if not site.literal}
    literal = {site.entry for site in found.sites if site.literal}
    edits: list[Edit] = []
    for site in found.sites:
        tag = renamed(site.tag)
        if tag == site.tag:
            continue
        if not site.literal:
            if site.entry in literal:
                continue
            return None  # the text belongs to another value, and a reference has no room for one
        if found.reads.get(site.entry):
            return None  # another value refers to this text
        text = _text(tag, site.ops[site.place].code)
        new = _fitted(data, site, text, pickle.protocol)
        if new is None and site.entry not in read:
            new = _fitted(data, site, text, pickle.protocol, forget=True)
        if new is None:
            return None
        edits.append(Edit(site.ops[0].at, site.ops[-1].end, new))
    return edits


def rewritten(pickle: Pickle, data: bytes, found: Sites, renamed: Renamed) -> list[Edit]:
    """Edits that give every storage its tag and keep the texts of all other values, in as many bytes as that takes."""
    literal = {site.entry for site in found.sites if site.literal}
    edits: list[Edit] = []
    for site in found.sites:
        tag = renamed(site.tag)
        code, at, end, _ = site.ops[site.place]
        if tag == site.tag:
            continue
        if site.literal:
            edits.append(Edit(at, end, _text(tag, code)))
            edits += (Edit(op.at, op.end, data[at:end]) for op in found.reads.get(site.entry, ()))
        elif site.entry not in literal:
            edits.append(Edit(at, end, _text(tag, 0x55 if pickle.python2 else 0x58)))
    frames = []
    for op in found.frames:
        length = int.from_bytes(data[op.at + 1 : op.end], "little")
        grown = sum(len(new) - (end - at) for at, end, new in edits if op.end <= at < op.end + length)
        if grown:
            frames.append(Edit(op.at + 1, op.end, (length + grown).to_bytes(8, "little")))
    return [*edits, *frames]


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
    """The parts of an id with another tag in exactly the bytes they took; ``None`` if that is impossible.

    ``forget`` leaves out the opcode that puts the tag into the memo, but not MEMOIZE, which counts.
    """
    if any(op.code == _FRAME for op in site.ops):
        return None
    room = site.ops[-1].end - site.ops[0].at
    forms = [_forms(data, op) for op in site.ops]
    forms[site.place] = (text,)
    if text[:1] == _SHORT_BINUNICODE:
        forms[site.place] = text, _BINUNICODE + text[1:2] + bytes(3) + text[2:]
    if forget and site.entry >= 0 and site.ops[site.place + 1].code != _MEMOIZE:
        forms[site.place + 1] = (b"",)
    chosen = _choice(tuple(tuple(map(len, each)) for each in forms), room)
    if chosen is None:
        return None
    new = b"".join(each[index] for each, index in zip(forms, chosen, strict=True))
    return bytes((_PROTO, max(protocol, 2))) * ((room - len(new)) // _FILLER) + new


def _forms(data: bytes, op: _Op) -> tuple[bytes, ...]:
    """An opcode as it is, and in the other forms that mean the same to every loader."""
    own = data[op.at : op.end]
    if op.code == _PROTO:
        return own, b""
    if op.code in b"hjqr" and op.entry < 1 << 8:
        short, long = b"hj" if op.code in b"hj" else b"qr"
        if len(own) == 2:
            return own, bytes((long, op.entry, 0, 0, 0))
        return own, bytes((short, op.entry))
    if op.code in b"KMJ":
        value = int.from_bytes(own[1:], "little", signed=op.code == 0x4A)
        others = [b"J" + value.to_bytes(4, "little", signed=True)]
        if 0 <= value < 1 << 16:
            others.insert(0, b"M" + value.to_bytes(2, "little"))
        if 0 <= value < 1 << 8:
            others.insert(0, bytes((0x4B, value)))
        return (own, *(form for form in others if len(form) != len(own)))
    return (own,)


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


# -- the proof

_VALUES = frozenset({str, bytes, int, bool, type(None)})
_FIELDS: dict[type, Callable[[Any], tuple[object, ...]]] = {
    Call: attrgetter("kind", "callee", "args", "kwargs", "states", "items", "appended"),
    Global: attrgetter("module", "name"),
    Set: attrgetter("frozen", "items"),
    Extension: lambda node: (node.code,),
    Dict: lambda node: (node.items,),
    Persistent: lambda node: (node.id,),
    Big: lambda node: (node.nbytes,),
    OutOfBand: lambda _: (),
}
_FACTS = ("protocol", "python2", "undecoded", "rare", "broken", "cut")
_LISTS = ("calls", "built", "extensions", "persistent", "root")


def same_but_tags(old: Pickle, new: Pickle, renamed: Renamed) -> bool:
    """Whether ``new`` is ``old`` with every tag ``renamed``, and nothing else.

    Everything a loader would do is compared, in order; and what was one object is one object still.
    """
    if any(getattr(old, name) != getattr(new, name) for name in _FACTS):
        return False
    if list(old.globals) != list(new.globals) or len(old.irregular) != len(new.irregular):
        return False
    # The graphs may have cycles, so each pair of nodes is compared once.
    new_of: dict[int, object] = {}
    taken: set[int] = set()
    met: set[tuple[int, int]] = set()
    todo: list[tuple[Any, Any]] = [(getattr(old, name), getattr(new, name)) for name in _LISTS]
    while todo:
        left, right = todo.pop()
        kind = type(left)
        if kind is not type(right):
            return False
        if kind in _VALUES or kind is float:
            # NaN is the same as NaN, and -0.0 is not the same as 0.0.
            if left.hex() != right.hex() if kind is float else left != right:
                return False
            continue
        if kind is tuple:
            if (id(left), id(right)) in met:
                continue
            met.add((id(left), id(right)))
        else:  # what was one object must be one object, and what was two must be two
            twin = new_of.get(id(left))
            if twin is right:
                continue
            if twin is not None or id(right) in taken:
                return False
            new_of[id(left)] = right
            taken.add(id(right))
        if kind is Persistent and (tag := tag_of(left)) is not None:
            if tag_of(right) != renamed(tag):
                return False
            left, right = ((*node.id[:_TAG], *node.id[_TAG + 1 :]) for node in (left, right))
        elif kind in _FIELDS:
            left, right = _FIELDS[kind](left), _FIELDS[kind](right)
        elif kind not in (tuple, list, bytearray):
            return False
        if len(left) != len(right):
            return False
        for mine, theirs in zip(left, right, strict=True):
            if type(mine) not in _VALUES or type(theirs) not in _VALUES:
                todo.append((mine, theirs))
            elif type(mine) is not type(theirs) or mine != theirs:
                return False
    return True
