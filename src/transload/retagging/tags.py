"""Where in a pickle the device tags stand: the opcodes of each storage's id, and who else reads the text of a tag.

The pickle machine says which persistent ids there are; here the stream is walked once more for the places of their
opcodes. A mistake made here does no harm: what is made of it is read by the machine again and compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from transload.formats.pickle_machine import opcodes
from transload.frozen import facts
from transload.io.journal import Change
from transload.nodes import Big, Call, Dict, Extension, Global, OutOfBand, Persistent, Pickle, Set

__all__ = [
    "FRAME",
    "LITERALS",
    "MEMOIZE",
    "NUMBERS",
    "PROTO",
    "PUTS",
    "Edit",
    "Found",
    "Op",
    "Site",
    "find_quickly",
    "find_sites",
    "in_stream",
    "patched",
    "rewritten",
    "same_but_tags",
    "spliced",
    "tag_of",
]


MARK, TUPLE, BINPERSID, PROTO, FRAME, MEMOIZE = 0x28, 0x74, 0x51, 0x80, 0x95, 0x94
_GETS = frozenset(b"hjg")
PUTS = frozenset(b"qrp\x94")
LITERALS = frozenset(b"XU\x8cTSV\x8d")
NUMBERS = frozenset(b"KMJ")
_SILENT = PUTS | {PROTO, FRAME}
_CLOSING = frozenset(b"tlduoei1\x90\x91")  # each takes everything down to the last MARK
_MAKING = LITERALS | _GETS | NUMBERS | frozenset(b"BC\x8eIL\x8a\x8bGFN\x88\x89)]}ctld\x85\x86\x87\x93")
_TAKING = {0x85: 1, 0x86: 2, 0x87: 3, 0x93: 2}
_TAG = 3  # ("storage", type, key, tag, numel), and in the legacy format a view of it
_LENGTHS = (5, 6)


class Op(NamedTuple):
    """An opcode and its argument in the stream; ``entry`` is the memo entry it reads or writes, -1 if it does not."""

    code: int
    at: int
    end: int
    entry: int = -1


class Site(NamedTuple):
    """The id of a storage: the opcodes that make its parts, and which of them makes the tag.

    ``entry`` is the memo entry that the tag is written to or read from, -1 if there is none.
    """

    node: Persistent
    ops: tuple[Op, ...]
    tag: Op
    entry: int

    @property
    def literal(self) -> bool:
        """Whether the text of the tag stands here, or elsewhere and is only referred to."""
        return self.tag.code in LITERALS


@facts(frozen=True)
class Found:
    """The sites of a stream.

    ``reads`` is where the memo entries of their texts are read for something else; ``unclear`` are ids that are not
    made as torch makes them.
    """

    sites: tuple[Site, ...]
    reads: dict[int, tuple[Op, ...]]
    frames: tuple[Op, ...]
    unclear: tuple[Persistent, ...]


def tag_of(node: Persistent) -> str | None:
    """The device tag of a persistent id, ``None`` if it is not that of a storage."""
    pid = node.id
    if type(pid) is not tuple or len(pid) not in _LENGTHS or pid[0] not in ("storage", b"storage"):
        return None
    tag = pid[_TAG]
    return tag if type(tag) is str else None


def find_sites(pickle: Pickle, data: bytes) -> Found:
    """Walk over a pickle and find every tag in it."""
    return _Walk(pickle, data).found()


class _Walk:
    def __init__(self, pickle: Pickle, data: bytes) -> None:
        self._pickle, self._data = pickle, data
        self._ids = {node.position: node for node in pickle.persistent}
        self._levels: list[list[Op]] = [[]]
        self._tuple: list[Op] | None = None  # the parts of the tuple on top of the stack
        self._reads: dict[int, list[Op]] = {}
        self._sites: list[Site] = []
        self._unclear: list[Persistent] = []
        self._frames: list[Op] = []

    def found(self) -> Found:
        for op in self._ops():
            if op.code == MARK:
                self._levels.append([op])
                self._tuple = None
            elif op.code in _CLOSING:
                self._close(op)
            else:
                self._see(op)
        own = {site.tag.at for site in self._sites}
        reads = {entry: tuple(op for op in ops if op.at not in own) for entry, ops in self._reads.items()}
        return Found(tuple(self._sites), reads, tuple(self._frames), tuple(self._unclear))

    def _ops(self) -> Iterator[Op]:
        written = 0
        before: tuple[int, int] | None = None
        for at, code in opcodes(self._data, self._pickle.start):
            if before is not None:
                op = self._op(before[1], before[0], at, written)
                written += op.code in PUTS
                yield op
            before = at, code
        if before is not None:
            yield Op(before[1], before[0], before[0] + 1)

    def _op(self, code: int, at: int, end: int, written: int) -> Op:
        if code in _GETS or code in PUTS:
            return Op(code, at, end, _entry(self._data, code, at, end, written))
        return Op(code, at, end)

    def _close(self, op: Op) -> None:
        begin, *parts = self._levels.pop() if len(self._levels) > 1 else [op]
        self._tuple = parts if op.code == TUPLE else None
        self._levels[-1].append(Op(op.code, begin.at, op.end))

    def _see(self, op: Op) -> None:
        if op.code == BINPERSID and (node := self._ids.get(op.end)) is not None:
            self._meet(node)
        elif op.code in _GETS and op.entry in self._reads:
            self._reads[op.entry].append(op)
        elif op.code == FRAME:
            self._frames.append(op)
        if op.code not in _SILENT:
            self._tuple = None
        if len(self._levels) > 1:  # what stands outside of every MARK is part of no id
            self._levels[-1].append(op)

    def _meet(self, node: Persistent) -> None:
        if tag_of(node) is None:
            return
        place = _tag_place(self._tuple or [])
        if self._tuple is None or place < 0:
            self._unclear.append(node)
            return
        ops, tag = tuple(self._tuple), self._tuple[place]
        after = ops[place + 1] if place + 1 < len(ops) else tag
        entry = after.entry if tag.code in LITERALS and after.code in PUTS else tag.entry
        if tag.code in LITERALS and entry >= 0:
            self._reads.setdefault(entry, [])
        self._sites.append(Site(node, ops, tag, entry))


def _entry(data: bytes, code: int, at: int, end: int, written: int) -> int:
    """The memo entry an opcode reads or writes."""
    if code == MEMOIZE:
        return written
    argument = data[at + 1 : end]
    if code in b"pg":
        return int(argument) if argument.strip().isdigit() else -1
    return int.from_bytes(argument, "little")


def _tag_place(ops: list[Op]) -> int:
    """Which of the opcodes makes the fourth part of the tuple they make together; -1 if that is not plain."""
    makers: list[int] = []
    for place, op in enumerate(ops):
        if op.code in _SILENT:
            continue
        taken = _TAKING.get(op.code, 0)
        if op.code not in _MAKING or taken > len(makers):
            return -1
        del makers[len(makers) - taken :]
        makers.append(place)
    plain = len(makers) in _LENGTHS and ops[makers[_TAG]].code in LITERALS | _GETS
    return makers[_TAG] if plain else -1


_GET = rb"h.|j...."
_PUT = rb"(q.|r....)?"
_NUMBER = rb"K.|M..|J....|\x8a[\x01-\x08].{1,8}?"
_ID = (
    rb"\((X\x07\0\0\0storage|U\x07storage|" + _GET + rb")" + _PUT + rb"(c[^\n]+\n[^\n]+\n|" + _GET + rb")" + _PUT,
    rb"(X.\0\0\0[0-9]+|U.[0-9]+|" + _GET + rb")" + _PUT,
    rb"(" + _NUMBER + rb")(N)?t" + _PUT + rb"Q",
)
_TAG_GROUP = 7
_LAST_GROUP = 10  # what follows the tuple is no part of it
_BACK = 512
_TRIES = 16  # a byte of a memo index may look like MARK


def find_quickly(pickle: Pickle, data: bytes, renamed: Callable[[str], str]) -> Found | None:
    """The sites of the tags that change; ``None`` if one of them is not as torch writes it."""
    patterns: dict[str, re.Pattern[bytes]] = {}
    sites: list[Site] = []
    for node in pickle.persistent:
        tag = tag_of(node)
        if tag is None or renamed(tag) == tag:
            continue
        pattern = patterns.get(tag) or patterns.setdefault(tag, _pattern(tag))
        site = _site(node, data, pattern)
        if site is None:
            return None
        sites.append(site)
    return Found(tuple(sites), {}, (), ())


def _pattern(tag: str) -> re.Pattern[bytes]:
    raw = tag.encode()
    wide, short = len(raw).to_bytes(4, "little"), bytes([min(len(raw), 255)])
    text = rb"(" + re.escape(b"X" + wide + raw) + rb"|" + re.escape(b"U" + short + raw) + rb"|" + _GET + rb")" + _PUT
    head, key, tail = _ID
    return re.compile(head + key + text + tail, re.DOTALL)


def _site(node: Persistent, data: bytes, pattern: re.Pattern[bytes]) -> Site | None:
    end = mark = node.position
    for _ in range(_TRIES):
        mark = data.rfind(b"(", max(0, end - _BACK), mark)
        if mark < 0:
            return None
        match = pattern.fullmatch(data, mark, end)
        if match is not None:
            return _read(node, data, match)
    return None


def _read(node: Persistent, data: bytes, match: re.Match[bytes]) -> Site:
    tag = _op(data, *match.span(_TAG_GROUP))
    if tag.code not in LITERALS:
        return Site(node, (tag,), tag, tag.entry)
    spans = [match.span(group) for group in range(1, _LAST_GROUP + 1)]
    ops = tuple(_op(data, at, end) for at, end in spans if at >= 0)
    place = ops.index(tag)
    after = ops[place + 1]
    return Site(node, ops, ops[place], after.entry if after.code in PUTS else -1)


def _op(data: bytes, at: int, end: int) -> Op:
    code = data[at]
    return Op(code, at, end, int.from_bytes(data[at + 1 : end], "little") if code in b"hjqr" else -1)


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
    forms = [_LENGTHS_STREAM[op.code](data, op) if op.code in _LENGTHS_STREAM else (op.end - op.at,) for op in site.ops]
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
_LENGTHS_STREAM: dict[int, Callable[[bytes, Op], tuple[int, ...]]] = {
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


_VALUES = frozenset({str, bytes, int, bool, type(None)})
_FIELDS: dict[type, tuple[str, ...]] = {
    Global: ("module", "name"),
    Extension: ("code",),
    Dict: ("items",),
    Set: ("frozen", "items"),
    Persistent: ("id",),
    Big: ("nbytes",),
    OutOfBand: (),
}
_FACTS = ("protocol", "python2", "undecoded", "rare", "broken", "cut")
_LISTS = ("calls", "built", "extensions", "persistent")


def same_but_tags(old: Pickle, new: Pickle, renamed: Callable[[str], str]) -> bool:
    """Whether ``new`` is ``old`` with every tag ``renamed``, and nothing else.

    Everything a loader would do is compared, in order; and what was one object is one object still.
    """
    if any(getattr(old, name) != getattr(new, name) for name in _FACTS):
        return False
    if list(old.globals) != list(new.globals) or len(old.irregular) != len(new.irregular):
        return False
    twins = _Twins(renamed)
    return all(twins.equal(getattr(old, name), getattr(new, name)) for name in (*_LISTS, "root"))


class _Twins:
    """Pairs of nodes that must be the same."""

    def __init__(self, renamed: Callable[[str], str]) -> None:
        self._renamed = renamed
        self._new: dict[int, object] = {}
        self._old: dict[int, object] = {}
        self._met: set[tuple[int, int]] = set()
        self._todo: list[tuple[Any, Any]] = []

    def equal(self, old: object, new: object) -> bool:
        """Whether two graphs are the same. They may have cycles, so it is asked of each pair of nodes once."""
        self._todo = [(old, new)]
        while self._todo:
            left, right = self._todo.pop()
            kind = type(left)
            if kind is not type(right):
                return False
            if kind in _VALUES:
                if left != right:
                    return False
            elif not self._alike(kind, left, right):
                return False
        return True

    def _alike(self, kind: type, left: Any, right: Any) -> bool:
        """One pair of nodes; what is in them is put on the list."""
        if kind is float:
            return bool(left.hex() == right.hex())
        if kind is not tuple and not self._is_twin(left, right):
            return False
        pair = id(left), id(right)
        if pair in self._met:
            return True
        self._met.add(pair)
        return self._items(left, right) if kind in (tuple, list) else self._node(kind, left, right)

    def _is_twin(self, left: object, right: object) -> bool:
        """What was one object is one object, and what was two is two."""
        return self._new.setdefault(id(left), right) is right and self._old.setdefault(id(right), left) is left

    def _node(self, kind: type, left: Any, right: Any) -> bool:
        if kind is bytearray:
            return bool(left == right)
        if kind is Persistent and tag_of(left) is not None:
            return self._storage(left, right)
        if kind is Call:
            return self._call(left, right)
        if kind not in _FIELDS:
            return False
        self._todo += ((getattr(left, name), getattr(right, name)) for name in _FIELDS[kind])
        return True

    def _call(self, left: Call, right: Call) -> bool:
        self._todo += ((left.callee, right.callee), (left.args, right.args))
        for mine, theirs in (
            (left.kwargs, right.kwargs),
            (left.states, right.states),
            (left.items, right.items),
            (left.appended, right.appended),
        ):
            if mine is not None or theirs is not None:
                self._todo.append((mine, theirs))
        return left.kind == right.kind

    def _items(self, left: Any, right: Any) -> bool:
        if len(left) != len(right):
            return False
        for mine, theirs in zip(left, right, strict=True):
            kind = type(mine)
            if kind not in _VALUES or kind is not type(theirs):
                self._todo.append((mine, theirs))
            elif mine is not theirs and mine != theirs:
                return False
        return True

    def _storage(self, left: Persistent, right: Persistent) -> bool:
        """Ids of storages, which differ by their tags as they should."""
        tag = tag_of(left)
        if tag is None or tag_of(right) != self._renamed(tag):
            return False
        mine: Any = left.id
        theirs: Any = right.id
        return self._items((*mine[:3], *mine[4:]), (*theirs[:3], *theirs[4:]))
