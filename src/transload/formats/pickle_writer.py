r"""Pickle a graph of inert nodes that a reader made, and that may have been changed since.

>>> dumps([1, "a"])
b'\x80\x02]q\x00(K\x01X\x01\x00\x00\x00aq\x01e.'

Nothing is imported, called or compared. The result is what Python's pickler would write with protocol 2, so torch's
``weights_only`` unpickler knows every opcode, unless the graph has a cycle through a tuple or a kind of call that only
other protocols have.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from struct import pack
from typing import Any, ClassVar

from transload.errors import TransloadError
from transload.frozen import NamedTuple
from transload.nodes import Call, Dict, Extension, Global, OutOfBand, Persistent, Set, Unread, is_unread

# The most steps for tuples and calls that contain themselves. Each is started again inside itself, which a file of a
# megabyte could make 10^10 times; real files need a few.
MAX_RESTARTS = 1_000_000
_SMALL_TUPLES = (b")", b"\x85", b"\x86", b"\x87")
_Step = Callable[["_Writer", Any], None]


class CannotPickleGraphError(TransloadError, ValueError):
    """Something in the graph cannot be pickled."""


def dumps(root: object, protocol: int = 2, expand: tuple[type, Callable[[Any], object]] | None = None) -> bytes:
    """The pickle of a graph of inert nodes and plain values (``transload.nodes``).

    What is shared stays shared, and cycles stay cycles. ``bytes``, ``bytearray`` and sets are written as calls, as in
    protocol 2. Raises ``CannotPickleGraphError`` for an integer whose value is not known (``Big``), and for anything
    but nodes. ``protocol`` is only the number that the pickle begins with, at least 2: from 4 on, loaders find a nested
    class (``A.B``) by its name. ``expand`` is a type, and a function that is called for each node of that type when
    it is written; its result is written instead, and not kept.
    """
    writers = _Writer.WRITERS
    if expand is not None:
        kind, expanded = expand
        writers = {**writers, kind: lambda writer, node: writer.expanded(expanded(node))}
    writer = _Writer()
    pending, memo, out = writer.pending, writer.memo, writer.out
    out.extend(b"\x80%c" % max(protocol, 2))
    pending.append(root)
    while pending:
        node = pending.pop()
        number = memo.get(id(node))
        if number is not None:
            out.extend(b"h%c" % number if number < 256 else pack("<cI", b"j", number))
            continue
        write = writers.get(type(node))
        if write is None:
            raise CannotPickleGraphError(f"a {type(node).__name__} cannot be written into a pickle")
        write(writer, node)
    out.extend(b".")
    return bytes(out)


class _Do(NamedTuple):
    """A step to take after those above it on the stack: a method of the writer, and its argument."""

    act: _Step
    argument: Any


class _Writer:
    """The pickle so far, and a stack of what remains: a graph can be deeper than Python's recursion limit."""

    def __init__(self) -> None:
        self.out = bytearray()
        self.memo: dict[int, int] = {}
        self.numbers = 0
        self.pending: list[Any] = []
        self.started: set[int] = set()
        self.kept: list[object] = []  # keeps new objects alive, so that their ids in the memo stay unique
        self.temporary: list[object] | None = None  # the same for an expanded node, until it is written
        self.globals: dict[str, Global] = {}
        self.restarts = 0

    def _emit(self, code: bytes) -> None:
        self.out.extend(code)

    def expanded(self, node: object) -> None:
        """Write a temporary graph, and forget it."""
        self.temporary = []
        self.then(node, _Do(_Writer._forget, None))

    def _forget(self, _: None) -> None:
        for node in self.temporary or ():
            del self.memo[id(node)]
            self.started.discard(id(node))
        self.temporary = None

    def _put(self, node: object) -> None:
        if self.temporary is not None and type(node) is not Global:
            # Texts are kept: most of them are the same in every expanded node.
            (self.kept if type(node) is str else self.temporary).append(node)
        number = self.memo[id(node)] = self.numbers
        self.numbers += 1
        self.out.extend(b"q%c" % number if number < 256 else pack("<cI", b"r", number))

    def then(self, *steps: Any) -> None:
        self.pending += steps[::-1]

    def _text(self, text: str) -> None:
        raw = text.encode("utf-8", "surrogatepass")
        long = len(raw) > 0xFFFFFFFF
        self.out.extend((b"\x8d" + pack("<Q", len(raw)) if long else b"X" + pack("<I", len(raw))) + raw)
        self._put(text)

    def _global(self, node: Global) -> None:
        line = f"c{node.module}\n{node.name}\n"
        try:
            raw = line.encode() if line.count("\n") == 2 else b""
        except UnicodeEncodeError:
            raw = b""
        if raw:
            self.out.extend(raw)
            self._put(node)
        else:
            self.then(node.module, node.name, _Do(_Writer._emit, b"\x93"), _Do(_Writer._put, node))

    def _extension(self, node: Extension) -> None:
        self.out.extend(pack("<ci", b"\x84", node.code))  # EXT4, whatever the code: no checkpoint has one
        self._put(node)

    # -- containers: mutable ones are put into the memo before their content is written

    def container(self, node: Any, items: list[Any], opcodes: bytes, width: int) -> None:
        """Write an empty container, then its only item of ``width`` values, or all items after a MARK."""
        empty, single, many = (opcodes[at : at + 1] for at in range(3))
        self.out.extend(empty)
        self._put(node)
        items = items[: len(items) // width * width]
        if len(items) > width:
            self.out.extend(b"(")
        if items:
            self.then(*items, _Do(_Writer._emit, single if len(items) == width else many))

    def _tuple(self, node: tuple[Any, ...]) -> None:
        if not node:
            self.out.extend(b")")
            return
        self._begin(node, len(node))
        if len(node) < len(_SMALL_TUPLES):
            ended = (node, _SMALL_TUPLES[len(node)], len(node))
        else:
            self.out.extend(b"(")
            ended = (node, b"t", 0)
        self.then(*node, _Do(_Writer._end, ended))

    def _begin(self, node: object, parts: int) -> None:
        """Start a node that enters the memo only when it is complete. If it was started before, it contains itself."""
        if id(node) in self.started:
            self.restarts += parts
            if self.restarts > MAX_RESTARTS:
                raise CannotPickleGraphError("it contains itself in too many ways to be written into a pickle")
        self.started.add(id(node))

    def _end(self, ended: tuple[object, bytes, int]) -> None:
        """Complete a node. If it was already completed inside itself, discard its parts, and get it from the memo.

        ``ended`` is the node, the opcode that makes it, and how many values that pops (0: all above a MARK).
        """
        node, opcode, taken = ended
        number = self.memo.get(id(node))
        if number is None:
            self.out.extend(opcode)
            self._put(node)
        else:
            self.out.extend((b"0" * taken if taken else b"1") + pack("<cI", b"j", number))

    # -- calls

    def _call(self, node: Call) -> None:
        kind, args = node.kind, node.args
        if is_unread(node):
            self.out.extend(b"N")
            return
        self._begin(node, 4)
        steps: list[Any]
        if kind in ("obj", "inst") and type(args) is tuple:
            self.out.extend(b"(")
            steps = [node.callee, *args, _Do(_Writer._end, (node, b"o", 0))]
        elif kind == "newobj_ex":
            steps = [node.callee, args, node.kwargs, _Do(_Writer._end, (node, b"\x92", 3))]
        elif kind == "stack_global" and type(args) is tuple:
            steps = [*args, _Do(_Writer._end, (node, b"\x93", 2))]
        else:
            steps = [node.callee, args, _Do(_Writer._end, (node, b"\x81" if kind == "newobj" else b"R", 2))]
        self.then(*steps, _Do(_Writer._complete, node))

    def _complete(self, node: Call) -> None:
        """Write what is put into the result of a call; only once, even if the call was started twice."""
        if id(node) not in self.started:
            return
        self.started.discard(id(node))
        steps: list[Any] = []
        if node.appended:
            steps += (_Do(_Writer._emit, b"("), *node.appended, _Do(_Writer._emit, b"e"))
        if node.items:
            steps += (_Do(_Writer._emit, b"("), *node.items[: len(node.items) // 2 * 2], _Do(_Writer._emit, b"u"))
        for state in node.states or ():
            steps += (state, _Do(_Writer._emit, b"b"))
        self.then(*steps)

    # -- what has no opcode in protocol 2, or none that weights_only knows

    def write_as_call(self, node: object, module: str, name: str, args: tuple[Any, ...]) -> None:
        callee = self.globals.setdefault(name, Global(module, name, 0))
        self.kept.append(args)
        self._begin(node, 4)
        self.then(callee, args, _Do(_Writer._end, (node, b"R", 2)))

    # Functions, not bound methods: a reference cycle would keep the graph until the garbage collector runs.
    WRITERS: ClassVar[Mapping[type, _Step]] = {
        type(None): lambda writer, _: writer.out.extend(b"N"),
        bool: lambda writer, value: writer.out.extend(b"\x88" if value else b"\x89"),
        int: lambda writer, value: writer.out.extend(pickle.dumps(value, 2)[2:-1]),  # without PROTO and STOP
        float: lambda writer, value: writer.out.extend(pack(">cd", b"G", value)),
        str: _text,
        bytes: lambda writer, raw: writer.write_as_call(raw, "_codecs", "encode", (raw.decode("latin-1"), "latin1")),
        bytearray: lambda writer, raw: writer.write_as_call(raw, "builtins", "bytearray", (bytes(raw),)),
        tuple: _tuple,
        list: lambda writer, node: writer.container(node, node, b"]ae", 1),
        Dict: lambda writer, node: writer.container(node, node.items, b"}su", 2),
        Set: lambda writer, node: writer.write_as_call(
            node, "builtins", "frozenset" if node.frozen else "set", (node.items,)
        ),
        Global: _global,
        Call: _call,
        Unread: _call,
        # Written again at each use, without the memo: picklers do so, and readers expect it.
        Persistent: lambda writer, node: writer.then(node.id, _Do(_Writer._emit, b"Q")),
        Extension: _extension,
        OutOfBand: lambda writer, _: writer.out.extend(b"\x97"),
        _Do: lambda writer, do: do.act(writer, do.argument),
    }
