"""Where in a pickle the device tags stand: the opcodes of each storage's id, and who else reads the text of a tag.

The pickle machine says which persistent ids there are; here the stream is walked once more for the places of their
opcodes. A mistake made here does no harm: what is made of it is read by the machine again and compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from transload.formats.pickle_machine import opcodes
from transload.frozen import facts
from transload.nodes import Persistent, Pickle

__all__ = [
    "FRAME",
    "LITERALS",
    "MEMOIZE",
    "NUMBERS",
    "PROTO",
    "PUTS",
    "Found",
    "Op",
    "Site",
    "find_sites",
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
