"""The state of one run of the pickle machine: its stack, its memo, and what it has found so far."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transload.nodes import Call, Dict, Extension, Global, Persistent, Pickle, Set

MAX_GAP = 64
"""Writers number the memo without gaps. Beyond this many (and a quarter of all entries) indexes are hashed with a
secret: integers hash to themselves, so a file could choose them to make every lookup walk over all the others."""

MAX_IRREGULAR = 100

LOADER = ("torch.storage", "_load_from_bytes")
"""What ``pickle.dump`` calls for the storage of each tensor: a checkpoint inside the pickle, as bytes."""

CONSTANTS = {0x4E: None, 0x88: True, 0x89: False}
"""What the opcodes NONE, NEWTRUE and NEWFALSE push."""

LONG_FRAME = "a frame is longer than the data"
_MAX_KEY_PARTS = 16
_UNHASHABLE = frozenset({list, bytearray, Dict})
_UNHASHABLE_CLASSES = frozenset({"OrderedDict", "Counter", "set", "bytearray"})
_NOBODY = object()


class Broken(Exception):  # noqa: N818 - a signal inside the machine, never seen outside
    """All loaders stop here."""


class Cut(Broken):
    """The data ends here: with more of it, reading could go on."""


class Sparse(dict[Any, Any]):
    """A memo whose indexes are far apart: kept as text, which Python hashes with a secret."""

    def __init__(self, dense: dict[int, Any]) -> None:
        super().__init__((hex(index), value) for index, value in dense.items())

    def __setitem__(self, index: int, value: object) -> None:
        super().__setitem__(hex(index), value)

    def __getitem__(self, index: int) -> Any:
        try:
            return super().__getitem__(hex(index))
        except KeyError:
            raise KeyError(index) from None


class Machine:
    """The state of one run. ``stack`` is the part above the last MARK, ``meta`` the parts below it, outermost first.

    ``memo`` is a list while each entry is written once and in order, as all writers but Python 2's number them; then a
    dictionary. ``loader`` is the global ``LOADER``, once the pickle has named it. ``read_storage`` is called with the
    arguments of each call of it and the position where the call ends, ``read_array`` with each call whose result gets a
    state. What they return replaces the call, unless it is ``None``.
    """

    def __init__(self, data: bytes, start: int, name: str) -> None:
        self.data = data
        self.size = len(data)
        self.pos = start
        self.stack: list[Any] = []
        self.meta: list[list[Any]] = []
        self.memo: list[Any] | dict[int, Any] = []
        self.frame_end = 0
        self.frames: list[int] = []
        self.given: set[int] = set()
        self.loader: object = _NOBODY
        self.read_storage: Callable[[Any, int], Persistent | None] = lambda _args, _end: None
        self.read_array: Callable[[Call], Any] = lambda _made: None
        self.out = Pickle(name, start)

    # -- reading arguments

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes, only if they are there."""
        end = self.pos + count
        if count < 0:
            raise Broken(f"a length of {count} bytes")
        if end > self.size:
            raise Cut(f"it needs {count} more bytes, {self.size - self.pos} are left")
        chunk = self.data[self.pos : end]
        self.pos = end
        return chunk

    def line(self) -> bytes:
        """Bytes up to the next newline.

        At the end of the data the Python unpicklers take what is there and cut its last byte; so do we, and note it.
        """
        end = self.data.find(b"\n", self.pos)
        if end < 0:
            text = self.data[self.pos : -1] if self.pos < self.size else b""
            self.pos = self.size
            self.out.cut = True
            self.odd("a line without its end")
            return text
        text = self.data[self.pos : end]
        self.pos = end + 1
        return text

    def odd(self, text: str) -> None:
        """Loaders differ on this, or refuse it."""
        if len(self.out.irregular) < MAX_IRREGULAR:
            self.out.irregular.append((self.pos, text))

    def ambiguous(self, text: str) -> None:
        """Loaders see different streams in the bytes from here on."""
        if len(self.out.ambiguous) < MAX_IRREGULAR:
            self.out.ambiguous.append((self.pos, text))

    # -- the memo

    def remember(self, index: int, value: object) -> None:
        """Enter a value into the memo, which becomes another one where the index is not the next."""
        memo = self.memo
        if type(memo) is list:
            if index == len(memo):
                memo.append(value)
                return
            memo = self.memo = dict(enumerate(memo))
        if type(memo) is dict and index > len(memo) * 5 // 4 + MAX_GAP:
            memo = self.memo = Sparse(memo)
        memo[index] = value

    # -- building

    def find(self, module: str, name: str) -> Global:
        """The node of a global: one for each name."""
        node = self.out.globals.get((module, name))
        if node is None:
            node = self.out.globals[module, name] = Global(module, name, self.pos)
            if (module, name) == LOADER:
                self.loader = node
        else:
            node.count += 1
        return node

    def call(self, callee: object, args: object, kind: str) -> Call:
        """Record a call; nothing is called."""
        node = Call(callee, args, kind, self.pos)
        self.out.calls.append(node)
        return node

    def extend(self, target: object, items: list[Any]) -> None:
        """Append values to a list, or to what a call makes."""
        if type(target) is list:
            if id(target) in self.given:
                self.odd("a list is changed after a call was given it")
            target.extend(items)
        elif type(target) is Call:
            if target.appended is None:
                target.appended = []
            target.appended.extend(items)
        else:
            self.changed(target, items, "values are appended to")

    def update(self, target: object, items: list[Any]) -> None:
        """Put keys and values, in turn, into a dictionary, or into what a call makes."""
        if type(target) is Dict:
            target.items.extend(items)
        elif type(target) is Call:
            if target.items is None:
                target.items = []
            target.items.extend(items)
        else:  # a list and a bytearray take SETITEM too, and torch up to 2.9 a tensor (CVE-2026-24747)
            self.changed(target, items, "keys are set on")
        for key in items[::2]:
            if type(key) is not str and _is_unhashable(key):
                self.odd("a key that cannot be hashed")

    def changed(self, target: object, items: list[Any], how: str) -> None:
        """Note items put into what was not made here: into a dictionary of some module it is BUILD by another name."""
        self.odd(f"{how} " + ("a global" if type(target) is Global else f"a {type(target).__name__.lower()}"))
        if type(target) is Global or type(target) is Extension:
            self.out.built.append((target, items))

    def pop_mark(self) -> list[Any]:
        """Everything above the last MARK, which goes away."""
        items = self.stack
        self.stack = self.meta.pop()
        return items


def _is_unhashable(key: object) -> bool:
    """Whether a loader cannot use it as a key; of a tuple with many parts, only the first are looked at."""
    parts = [key]
    for part in parts:
        if type(part) in _UNHASHABLE or (type(part) is Set and not part.frozen):
            return True
        if type(part) is Call and type(part.callee) is Global and part.callee.name in _UNHASHABLE_CLASSES:
            return True
        if type(part) is tuple and len(parts) < _MAX_KEY_PARTS:
            parts += part[:_MAX_KEY_PARTS]
    return False
