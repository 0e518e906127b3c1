"""The state of a pickle machine: its stack, its memo, and what it has read so far."""

from __future__ import annotations

from typing import Any

from transload.read.nodes import Call, Global, Pickle

__all__ = ["MAX_GAP", "MAX_IRREGULAR", "Broken", "Cut", "Machine"]

MAX_GAP = 64
"""Writers number the memo without gaps. Beyond this many (and a quarter of all entries) indexes are hashed with a
secret: integers hash to themselves, so a file could choose them to make every lookup walk over all the others."""

MAX_IRREGULAR = 100


class Broken(Exception):  # noqa: N818 - a signal inside the machine, never seen outside
    """All loaders stop here."""


class Cut(Broken):
    """The data ends here: with more of it, reading could go on."""


class Sparse(dict[Any, Any]):
    """A memo whose indexes are far apart: kept by their bytes, which Python hashes with a secret."""

    def __init__(self, dense: dict[int, Any]) -> None:
        super().__init__()
        for index, value in dense.items():
            self[index] = value

    def __setitem__(self, index: int, value: object) -> None:
        super().__setitem__(_bytes_of(index), value)

    def __getitem__(self, index: int) -> Any:
        try:
            return super().__getitem__(_bytes_of(index))
        except KeyError:
            raise KeyError(index) from None


def _bytes_of(index: int) -> bytes:
    return index.to_bytes(index.bit_length() // 8 + 1, "little", signed=True)


class Machine:
    """The state of one run. ``stack`` is the part above the last MARK, ``meta`` the parts below it, outermost first.

    ``memo`` is a list while each entry is written once and in order, as all writers but Python 2's number them; then a
    dictionary.
    """

    __slots__ = ("data", "frame_end", "frames", "given", "memo", "meta", "out", "pos", "size", "stack")

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

    def recall(self, index: int) -> Any:
        """The value of a memo entry; ``KeyError`` if there is none."""
        if type(self.memo) is list and not 0 <= index < len(self.memo):
            raise KeyError(index)
        return self.memo[index]

    # -- building

    def find(self, module: str, name: str) -> Global:
        """The node of a global: one for each name."""
        node = self.out.globals.get((module, name))
        if node is None:
            node = self.out.globals[module, name] = Global(module, name, self.pos)
        else:
            node.count += 1
        return node

    def call(self, callee: object, args: object, kind: str) -> Call:
        """Record a call; nothing is called."""
        node = Call(callee, args, kind, self.pos)
        self.out.calls.append(node)
        return node

    def pop_mark(self) -> list[Any]:
        """Everything above the last MARK, which goes away."""
        items = self.stack
        self.stack = self.meta.pop()
        return items
