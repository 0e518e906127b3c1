"""Find the device tags in a pickle, and edit them.

The pickle machine lists the persistent ids; ``find_sites`` finds the opcodes that build them, and ``tag_edits`` returns
the edits. ``same_but_tags`` proves the result, so that a mistake in the edits does no harm. A plain pickle embeds a
stream for each storage, which contains its tag: ``edits_inside`` edits all of them.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any

from transload.formats.pickle_machine import run
from transload.formats.plain_pickle import escaped
from transload.formats.rare_opcodes import opcodes
from transload.formats.torch_legacy import MAGIC_PICKLE
from transload.frozen import NamedTuple
from transload.nodes import Big, Call, Dict, Extension, Global, OutOfBand, Persistent, Pickle, Set, storage_id

_BINGET, _PROTO, _FRAME, _MEMOIZE = 0x68, 0x80, 0x95, 0x94
_GETS = frozenset(b"hjg")
_PUTS = frozenset(b"qrp\x94")
_LITERALS = frozenset(b"XU\x8cTSV\x8d")
_SILENT = _PUTS | {_PROTO, _FRAME}
_SILENT_BYTES = bytes(_SILENT)
_MAKING = _LITERALS | _GETS | frozenset(b"KMJBC\x8eIL\x8a\x8bGFN\x88\x89)]}c\x85\x86\x87\x93")
_TAKING = {0x85: 1, 0x86: 2, 0x87: 3, 0x93: 2}
_TAG = 3  # ("storage", type, key, tag, numel), in the legacy format followed by a view
_MAX_OPCODES = 200  # of one id; torch writes at most 30, but a hostile file may nest a million ids
_BINUNICODE, _SHORT_BINUNICODE, _SHORT_BINSTRING = b"X", b"\x8c", b"U"
_PYTHON2 = frozenset(b"UST")
_MAX_CHOICES = 4096
_FILLER = 2  # bytes of a PROTO opcode, which may be repeated

Renamed = Callable[[str], str]
"""Maps an old tag to the new one."""


def tag_of(node: Persistent) -> str | None:
    """The device tag in a persistent id; ``None`` if the id is not that of a storage."""
    pid = storage_id(node)
    return pid[_TAG] if pid and type(pid[_TAG]) is str else None


# -- where the tags are


class Site(NamedTuple):
    """The persistent id of a storage: its tag, and where the opcode that pushes the tag begins and ends.

    ``entry`` is the memo entry that the tag is written to or read from, -1 if there is none. ``parts`` are the
    positions of the opcodes that build the id, and the end of the last; the tag is opcode number ``place``.
    """

    tag: str
    code: int
    at: int
    end: int
    entry: int
    parts: list[int]
    place: int

    @property
    def literal(self) -> bool:
        """Whether the tag is spelled out here, instead of read from the memo."""
        return self.code in _LITERALS


def find_sites(
    pickle: Pickle, data: bytes
) -> tuple[list[Site], dict[int, list[tuple[int, int]]], list[int], list[str]]:
    """Find every tag in a pickle.

    Also returns the spans of opcodes that read the memo entry of a tag for something else, the positions of FRAME
    opcodes, and the tags of ids that are not built the way torch builds them.
    """
    positions = [position for position, _ in opcodes(data, pickle.start)]
    codes = bytes(map(data.__getitem__, positions))
    puts = list(accumulate(code in _PUTS for code in codes)) if _MEMOIZE in codes else []

    def entry_of(index: int) -> int:
        """The memo entry that an opcode reads or writes."""
        if codes[index] == _MEMOIZE:
            return puts[index] - 1
        return int.from_bytes(data[positions[index] + 1 : positions[index + 1]], "little")

    sites: list[Site] = []
    unclear: list[str] = []
    for node in pickle.persistent:
        tag = tag_of(node)
        if tag is None:
            continue
        # The opcodes between the TUPLE that becomes the id and its MARK.
        index = bisect_left(positions, node.position) - 1
        low = max(0, index - _MAX_OPCODES)
        before = codes[low:index].rstrip(_SILENT_BYTES)
        mark = before.rfind(b"(")
        place = _tag_place(before[mark + 1 : -1]) if mark >= 0 and before.endswith(b"t") else -1
        if place < 0:
            unclear.append(tag)
            continue
        first = low + mark + 1
        index = first + place
        code, entry = codes[index], -1
        if code in _GETS:
            entry = entry_of(index)
        elif codes[index + 1] in _PUTS:
            entry = entry_of(index + 1)
        parts = positions[first : low + len(before)]
        sites.append(Site(tag, code, positions[index], positions[index + 1], entry, parts, place))
    reads: dict[int, list[tuple[int, int]]] = {site.entry: [] for site in sites if site.literal and site.entry >= 0}
    places = {site.at for site in sites}
    for match in re.finditer(rb"[hjg]", codes) if reads else ():
        index = match.start()
        at = positions[index]
        # Most of them are short, and read "storage" or a storage class.
        if (codes[index] != _BINGET or data[at + 1] in reads) and at not in places:
            entry = entry_of(index)
            if entry in reads:
                reads[entry].append((at, positions[index + 1]))
    return sites, reads, [positions[match.start()] for match in re.finditer(rb"\x95", codes)], unclear


@lru_cache(_MAX_CHOICES)
def _tag_place(codes: bytes) -> int:
    """Which of the opcodes between MARK and TUPLE pushes the fourth item; -1 if torch does not write such opcodes."""
    makers: list[int] = []
    for index, code in enumerate(codes):
        if code in _SILENT:
            continue
        taken = _TAKING.get(code, 0)
        if code not in _MAKING or taken > len(makers):
            return -1
        del makers[len(makers) - taken :]
        makers.append(index)
    plain = len(makers) in (5, 6) and codes[makers[_TAG]] in _LITERALS | _GETS
    return makers[_TAG] if plain else -1


# -- edits


class Edit(NamedTuple):
    """New bytes for those between two positions of a stream."""

    at: int
    end: int
    new: bytes

    @property
    def grown(self) -> int:
        """How many bytes longer the stream gets."""
        return len(self.new) - (self.end - self.at)


def spliced(data: bytes, edits: Iterable[Edit]) -> bytes:
    """``data`` with all edits applied.

    >>> spliced(b"abcd", [Edit(1, 3, b"XYZ")])
    b'aXYZd'
    """
    parts: list[bytes] = []
    done = 0
    for at, end, new in sorted(edits):
        parts += (data[done:at], new)
        done = end
    return b"".join((*parts, data[done:]))


def tag_edits(pickle: Pickle, data: bytes, renamed: Renamed) -> list[Edit] | None:
    """Edits that give every storage its new tag; ``None`` if some id is not built the way torch builds it.

    If the new tags fit into the space of the old ones, nothing else in the stream moves. The space that a shorter tag
    leaves is filled with longer encodings of the opcodes next to it. If that is not enough, the opcode that memoizes
    a tag is replaced by fillers if nothing reads the memo entry.
    """
    sites, reads, frames, unclear = find_sites(pickle, data)
    if any(renamed(tag) != tag for tag in unclear):
        return None
    literal = {site.entry for site in sites if site.literal}
    to_rename: list[tuple[Site, str]] = []
    for site in sites:
        tag = renamed(site.tag)
        # A site that reads its tag from the memo changes with the site that wrote it there.
        if tag != site.tag and (site.literal or site.entry not in literal):
            to_rename.append((site, tag))
    edits: list[Edit] = []
    read_entries = {site.entry for site in sites if not site.literal}
    for site, tag in to_rename:
        # A read from the memo has no space for a tag; and a tag that something else reads must stay.
        new, text = None, _text(tag, site.code)
        if site.literal and not reads.get(site.entry):
            new = _fitted(data, site, text, pickle.protocol)
            if new is None and site.entry not in read_entries:
                new = _fitted(data, site, text, pickle.protocol, forget=True)
        if new is None:
            break
        edits.append(Edit(site.parts[0], site.parts[-1], new))
    else:
        return edits
    edits = []
    for site, tag in to_rename:
        code = site.code if site.literal else 0x55 if pickle.python2 else 0x58
        edits.append(Edit(site.at, site.end, _text(tag, code)))
        if site.literal:
            edits += (Edit(*read, data[site.at : site.end]) for read in reads.get(site.entry, ()))
    return [*edits, *_reframed(data, frames, edits)]


def _reframed(data: bytes, frames: list[int], edits: list[Edit]) -> Iterator[Edit]:
    """Edits to the lengths of frames that contain other edits."""
    edits = sorted(edits)
    places, grown_before = [edit.at for edit in edits], [0, *accumulate(edit.grown for edit in edits)]
    for frame in frames:
        begin = frame + 9  # after the opcode and its length
        length = int.from_bytes(data[frame + 1 : begin], "little")
        first, last = bisect_left(places, begin), bisect_left(places, begin + length)
        if grown := grown_before[last] - grown_before[first]:
            yield Edit(frame + 1, begin, (length + grown).to_bytes(8, "little"))


# -- streams inside a plain pickle

_BYTES = {0x42: 4, 0x43: 1, 0x8E: 8}  # BINBYTES, SHORT_BINBYTES, BINBYTES8: width of the length
_TEXTS = {0x58: 4, 0x8C: 1, 0x8D: 8, 0x56: 0}  # BINUNICODE, SHORT_BINUNICODE, BINUNICODE8; UNICODE, which is a line
_HEAD = 4096  # bytes of a stream that are searched: the storage itself begins after a few hundred


def edits_inside(pickle: Pickle, data: bytes, renamed: Renamed) -> list[Edit] | None:
    """Edits to the streams that a plain pickle embeds for its storages; ``None`` if not all of them are found.

    They keep the length of a stream if the new tag fits.
    """
    edits: list[Edit] = []
    frames: list[int] = []
    streams = 0
    for (at, code), (end, _) in pairwise(opcodes(data, pickle.start, pickle.raw)):
        if code == _FRAME:
            frames.append(at)
        if code not in _BYTES and code not in _TEXTS:
            continue
        begin = at + 1 + _BYTES.get(code, _TEXTS.get(code, 0))
        encoding = "raw-unicode-escape" if code == 0x56 else "utf-8" if code in _TEXTS else ""
        head = data[begin : min(end, begin + _HEAD)]
        try:
            text = getincrementaldecoder(encoding)().decode(head) if encoding else ""
            stream = text.encode("latin-1") if encoding else head
        except UnicodeError:
            continue
        if not stream.startswith(MAGIC_PICKLE):
            continue
        streams += 1
        main = run(stream, run(stream, run(stream, len(MAGIC_PICKLE)).end).end)
        inside = None if main.broken else tag_edits(main, stream, renamed)
        if inside is None:
            return None
        if not inside:
            continue
        old, new = stream[: main.end], spliced(stream[: main.end], inside)
        if encoding:
            encode = escaped if code == 0x56 else str.encode
            old, new = encode(old.decode("latin-1")), encode(new.decode("latin-1"))
        edits.append(Edit(begin, begin + len(old), new))
        if edits[-1].grown and code != 0x56:
            length = end - begin + edits[-1].grown
            codes, width = (_BYTES if code in _BYTES else _TEXTS), begin - at - 1
            if length.bit_length() > 8 * width:
                width = 4 if width == 1 else 8
                code = next(other for other in codes if codes[other] == width)  # noqa: PLW2901 - a longer form of it
            edits.append(Edit(at, begin, bytes([code]) + length.to_bytes(width, "little")))
    return [*edits, *_reframed(data, frames, edits)] if streams == len(pickle.persistent) else None


def _text(text: str, code: int) -> bytes:
    """The opcode that pushes a string: the same one as before if possible, else a similar one."""
    raw = text.encode()
    short = _SHORT_BINSTRING if code in _PYTHON2 else _SHORT_BINUNICODE if code == 0x8C else b""
    if short and len(raw) < 256:
        return short + bytes([len(raw)]) + raw
    return _BINUNICODE + len(raw).to_bytes(4, "little") + raw


# -- fitting a tag into the same number of bytes


def _fitted(data: bytes, site: Site, text: bytes, protocol: int, *, forget: bool = False) -> bytes | None:
    """The parts of an id with another tag in exactly as many bytes; ``None`` if that is impossible.

    ``forget`` omits the opcode that memoizes the tag, except MEMOIZE, whose index is implicit.
    """
    room = site.parts[-1] - site.parts[0]
    parts = [data[at:end] for at, end in pairwise(site.parts)]
    if any(part[0] == _FRAME for part in parts):
        return None
    forms = [_forms(part) for part in parts]
    forms[site.place] = (text,)
    if text[:1] == _SHORT_BINUNICODE:
        forms[site.place] = text, _BINUNICODE + text[1:2] + bytes(3) + text[2:]
    if forget and site.entry >= 0 and parts[site.place + 1][0] != _MEMOIZE:
        forms[site.place + 1] = (b"",)
    chosen = _choice(tuple([tuple(map(len, choices)) for choices in forms]), room)
    if chosen is None:
        return None
    new = b"".join([choices[index] for choices, index in zip(forms, chosen, strict=True)])
    return bytes((_PROTO, max(protocol, 2))) * ((room - len(new)) // _FILLER) + new


def _forms(opcode: bytes) -> tuple[bytes, ...]:
    """An opcode as it is, and its other encodings that mean the same to every unpickler."""
    code = opcode[0]
    if code in b"jr" and any(opcode[2:]):
        return (opcode,)
    if code in b"hjqr":
        short, long = b"hj" if code in b"hj" else b"qr"
        return opcode, bytes((long, opcode[1], 0, 0, 0)) if len(opcode) == 2 else bytes((short, opcode[1]))
    if code == _PROTO:
        return opcode, b""
    if code not in b"KMJ":
        return (opcode,)
    value = int.from_bytes(opcode[1:], "little", signed=code == 0x4A)
    others = [b"J" + value.to_bytes(4, "little", signed=True)]
    if 0 <= value < 1 << 16:
        others.insert(0, b"M" + value.to_bytes(2, "little"))
    if 0 <= value < 1 << 8:
        others.insert(0, bytes((0x4B, value)))
    return (opcode, *(form for form in others if len(form) != len(opcode)))


@lru_cache(_MAX_CHOICES)
def _choice(lengths: tuple[tuple[int, ...], ...], room: int) -> tuple[int, ...] | None:
    """Which form of each part to use so that all of them, with fillers, take exactly ``room`` bytes.

    It uses the fewest fillers, and then changes the fewest parts.

    >>> _choice(((2, 5), (8,), (2, 3, 5)), 15), _choice(((8,),), 11)
    ((0, 0, 2), None)
    """
    reach: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for choices in lengths:
        further: dict[int, tuple[int, tuple[int, ...]]] = {}
        for total, (changed, chosen) in reach.items():
            for index, length in enumerate(choices):
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
    tuple: lambda node: node,
    list: lambda node: node,
    bytearray: lambda node: (bytes(node),),
}
_PLAIN_FIELDS = attrgetter("protocol", "python2", "undecoded", "broken", "cut")
_LENGTH_FORMS = frozenset({"BINBYTES", "SHORT_BINBYTES", "BINBYTES8"})
_NODE_FIELDS = attrgetter("calls", "built", "extensions", "persistent", "root")


def same_but_tags(old: Pickle, new: Pickle, renamed: Renamed) -> bool:
    """Whether ``new`` differs from ``old`` only in its tags, which are ``renamed``.

    Everything an unpickler would do is compared, in order, including which objects are shared.
    """
    before, after = ((*_PLAIN_FIELDS(p), {*p.rare} - _LENGTH_FORMS, list(p.globals)) for p in (old, new))
    if before != after or len(old.irregular) != len(new.irregular):
        return False
    twins: dict[int, int] = {}  # the id of each node of old, and of the same node in new
    taken: set[int] = set()
    pending: list[tuple[Any, Any]] = [(_NODE_FIELDS(old), _NODE_FIELDS(new))]
    while pending:
        befores, afters = pending.pop()
        if len(befores) != len(afters):
            return False
        for before, after in zip(befores, afters, strict=False):
            if before is after:  # None, a small integer, an empty tuple: no node is in both graphs
                continue
            kind = type(before)
            if kind is not type(after):
                return False
            if kind in _VALUES:
                if before != after:
                    return False
            elif kind is float:
                if before.hex() != after.hex():  # NaN equals NaN here, and -0.0 differs from 0.0
                    return False
            elif (twin := twins.get(id(before))) is not None or id(after) in taken:
                if twin != id(after):
                    return False
            else:
                twins[id(before)] = id(after)
                taken.add(id(after))
                if kind is not Persistent or (tag := tag_of(before)) is None:
                    pending.append((_FIELDS[kind](before), _FIELDS[kind](after)))
                elif tag_of(after) is not None:
                    pending.append(((*before.id[:_TAG], renamed(tag), *before.id[_TAG + 1 :]), after.id))
                else:
                    return False
    return True
