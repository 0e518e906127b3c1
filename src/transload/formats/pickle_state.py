"""The state of one run of the pickle machine: its stack, its memo, and what it has found so far."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transload.nodes import Call, Dict, Extension, Global, Persistent, Pickle, Set

# Writers number the memo without gaps. With a longer gap (plus a quarter of all entries), indexes are hashed with a
# secret: integers hash to themselves, so a file could choose indexes that all collide.
MAX_GAP = 64
MAX_IRREGULAR = 100

# The function that rebuilds each storage in a ``pickle.dump`` from bytes, which are a checkpoint.
LOADER = ("torch.storage", "_load_from_bytes")
CONSTANTS = {0x4E: None, 0x88: True, 0x89: False}  # what the opcodes NONE, NEWTRUE and NEWFALSE push
LONG_FRAME = "a frame is longer than the data"
_MAX_KEY_PARTS = 16
_UNHASHABLE = frozenset({list, bytearray, Dict})
_UNHASHABLE_CLASSES = frozenset({"OrderedDict", "Counter", "set", "bytearray"})
_UNSET = object()


class Broken(Exception):  # noqa: N818 - a signal inside the machine, never seen outside
    """Every loader stops here."""


class Cut(Broken):
    """The data ends here; with more data, reading could continue."""


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


class PickleMachine:
    """The state of one run. ``stack`` is the part above the last MARK, ``meta`` the parts below it, outermost first.

    ``memo`` is a list as long as each entry is written once and in order, as all writers but Python 2's do; then a
    dictionary. ``given`` are the ids of lists passed to calls. ``loader`` is the global ``LOADER``, once the pickle has
    named it. ``read_storage`` is called with the arguments and the end of each call of it, ``read_array`` with each
    call whose result gets a state. What they return replaces the call, unless it is ``None``.
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
        self.loader: object = _UNSET
        self.read_storage: Callable[[Any, int], Persistent | None] = lambda _args, _end: None
        self.read_array: Callable[[Call], Any] | None = None
        self.out = Pickle(name, start)

    # -- reading arguments

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes; ``Cut`` if there are fewer."""
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

        Without one, Python's unpicklers take the rest of the data but its last byte; so do we, and note it.
        """
        end = self.data.find(b"\n", self.pos)
        if end < 0:
            text = self.data[self.pos : -1] if self.pos < self.size else b""
            self.pos = self.size
            self.out.cut = True
            self.irregular("a line without its end")
            return text
        text = self.data[self.pos : end]
        self.pos = end + 1
        return text

    def irregular(self, text: str) -> None:
        """Note what loaders differ on, or refuse."""
        if len(self.out.irregular) < MAX_IRREGULAR:
            self.out.irregular.append((self.pos, text))

    def ambiguous(self, text: str) -> None:
        """Note that loaders read the bytes from here on differently."""
        if len(self.out.ambiguous) < MAX_IRREGULAR:
            self.out.ambiguous.append((self.pos, text))

    # -- the memo

    def remember(self, index: int, value: object) -> None:
        """Enter a value into the memo, which becomes a dictionary if the index is not the next."""
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
        """The node of a global; each name has one."""
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
        """Append values to a list, or to the result of a call."""
        if type(target) is list:
            if id(target) in self.given:
                self.irregular("a list is changed after it was passed to a call")
            target.extend(items)
        elif type(target) is Call:
            if target.appended is None:
                target.appended = []
            target.appended.extend(items)
        else:
            self.changed(target, items, "values are appended to")

    def update(self, target: object, items: list[Any]) -> None:
        """Put alternating keys and values into a dictionary, or the result of a call."""
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
                self.irregular("a key that cannot be hashed")

    def changed(self, target: object, items: list[Any], how: str) -> None:
        """Note items put into an unusual target. For a global, such as a module's dictionary, that is like BUILD."""
        self.irregular(f"{how} " + ("a global" if type(target) is Global else f"a {type(target).__name__.lower()}"))
        if type(target) is Global or type(target) is Extension:
            self.out.built.append((target, items))

    def pop_mark(self) -> list[Any]:
        """Pop the last MARK and everything above it."""
        items = self.stack
        self.stack = self.meta.pop()
        return items


def _is_unhashable(key: object) -> bool:
    """Whether a loader cannot use it as a key; only the first parts of a long tuple are examined."""
    parts = [key]
    for part in parts:
        if type(part) in _UNHASHABLE or (type(part) is Set and not part.frozen):
            return True
        if type(part) is Call and type(part.callee) is Global and part.callee.name in _UNHASHABLE_CLASSES:
            return True
        if type(part) is tuple and len(parts) < _MAX_KEY_PARTS:
            parts += part[:_MAX_KEY_PARTS]
    return False
