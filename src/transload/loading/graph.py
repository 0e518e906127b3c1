"""A walk over a pickle's inert graph that makes plain values of it: the part of building that knows no names.

The graph may be a million levels deep, share anything and contain itself, so it is walked with a stack of its own.
Every list, dictionary and set exists before its content does, as in a pickle; a tuple or a call that still lacks
something waits for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from transload.loading.errors import LoadError
from transload.loading.objects import Wrong
from transload.nodes import Big, Dict, Extension, OutOfBand, Pickle, Set

__all__ = ["Missing", "Walk", "set_items"]

_UPDATED = frozenset({dict, OrderedDict})  # a Counter would add the values up
_ATOMS = frozenset({str, int, float, bool, bytes, type(None)})

Step = Callable[[Any], None]


class Missing(Exception):  # noqa: N818 - a signal inside this room, never seen outside
    """Something is needed that is not made yet; ``args[0]`` is the identity of its node."""


class Walk:
    """One walk over one graph. ``made`` are the objects so far, by the identity of their nodes."""

    openers: dict[type, Callable[[Any, Any], None]]
    """What is done with a node of each type when it is met; not in the instance, which would then hold itself."""

    def __init__(self, pickle: Pickle, where: str, encoding: str) -> None:
        self.where = where
        self.made: dict[int, Any] = {}
        self.busy: set[int] = set()
        self.stack: list[tuple[Step, Any]] = []
        self._waiting: dict[int, list[tuple[Step, Any]]] = {}
        self._encoding = encoding
        self.single: Callable[..., Any] = _nothing
        # Bytes in a pickle of Python 2 are text that the reader could not decode.
        self._atoms = _ATOMS - {bytes} if pickle.undecoded else _ATOMS

    def run(self, root: object) -> Any:
        """The object of a node, with all that it needs; ``Wrong`` if there can be none."""
        node = root
        self.need((root,))
        try:
            while self.stack:
                step, node = self.stack.pop()
                try:
                    step(node)
                except Missing as missing:
                    self._waiting.setdefault(missing.args[0], []).append((step, node))
        except Wrong as reason:
            reason.node = node
            raise
        if self._waiting:
            raise Wrong("an object that has to be there before it is made")
        return self.get(root)

    def get(self, node: Any) -> Any:
        """What a node has become; ``Missing`` if it has not yet."""
        if type(node) in self._atoms:
            return node
        made = self.made
        ident = id(node)
        if ident not in made:
            raise Missing(ident)
        return made[ident]

    def ready(self, nodes: Iterable[Any]) -> list[Any] | None:
        """What nodes have become, or become in one step; ``None`` if some take more than that."""
        atoms, made, single = self._atoms, self.made, self.single
        values: list[Any] = []
        append = values.append
        missing = False
        for node in nodes:
            if type(node) in atoms:
                append(node)
                continue
            ident = id(node)
            value = made.get(ident)
            if value is None and ident not in made:
                value = single(node)
                if value is None:
                    missing = True
                    continue
                made[ident] = value
            append(value)
        return None if missing else values

    def need(self, nodes: Iterable[Any]) -> None:
        """Let nodes be made next, those that are not yet."""
        atoms, made, step = self._atoms, self.made, self._open
        wanted = [(step, node) for node in nodes if type(node) not in atoms and id(node) not in made]
        wanted.reverse()
        self.stack += wanted

    def later(self, step: Step, node: Any, needed: Iterable[Any]) -> None:
        """Take a step when other nodes have been made."""
        self.stack.append((step, node))
        self.need(needed)

    def done(self, node: Any, value: Any) -> None:
        """A node that could not exist before its parts has become a value."""
        ident = id(node)
        self.made[ident] = value
        self.busy.discard(ident)
        if self._waiting:
            self.stack += reversed(self._waiting.pop(ident, ()))

    def _open(self, node: Any) -> None:
        ident = id(node)
        if ident in self.made or ident in self.busy:
            return
        opener = self.openers.get(type(node))
        if opener is None:
            raise Wrong(_ODD.get(type(node), "something that is no value"))
        opener(self, node)

    # -- values

    def open_bytearray(self, node: bytearray) -> None:
        """As it stands."""
        self.made[id(node)] = node

    def open_text(self, node: bytes) -> None:
        """Text of Python 2 that is not UTF-8."""
        if self._encoding == "bytes":
            self.made[id(node)] = node
            return
        try:
            self.made[id(node)] = node.decode(self._encoding)
        except UnicodeDecodeError as error:
            what = f"Python 2 wrote text into it that is not {self._encoding}"
            fix = "Pass encoding='latin1', or the encoding it was written in."
            raise LoadError(what, where=self.where, fix=fix) from error

    def open_list(self, node: list[Any]) -> None:
        """Empty first."""
        values = self.made[id(node)] = []
        ready = self.ready(node)
        if ready is None:
            self.later(self._fill_list, node, node)
        else:
            values += ready

    def _fill_list(self, node: list[Any]) -> None:
        self.made[id(node)].extend([self.get(child) for child in node])

    def open_tuple(self, node: tuple[Any, ...]) -> None:
        """When all in it is there; a tuple of plain values is itself."""
        atoms = self._atoms
        if all(type(child) in atoms for child in node):
            self.made[id(node)] = node
            return
        self.busy.add(id(node))
        self.later(self._close_tuple, node, node)

    def _close_tuple(self, node: tuple[Any, ...]) -> None:
        self.done(node, tuple([self.get(child) for child in node]))

    def open_dict(self, node: Dict) -> None:
        """Empty first."""
        into = self.made[id(node)] = {}
        ready = self.ready(node.items)
        if ready is None:
            self.later(self._fill_dict, node, node.items)
        else:
            set_items(into, ready)

    def _fill_dict(self, node: Dict) -> None:
        set_items(self.made[id(node)], [self.get(item) for item in node.items])

    def open_set(self, node: Set) -> None:
        """A frozen one when all in it is there, another one empty first."""
        if node.frozen:
            self.busy.add(id(node))
            self.later(self._close_frozen, node, node.items)
        else:
            self.made[id(node)] = set()
            self.later(self._fill_set, node, node.items)

    def _fill_set(self, node: Set) -> None:
        self.made[id(node)].update(self._members(node))

    def _close_frozen(self, node: Set) -> None:
        self.done(node, self._members(node))

    def _members(self, node: Set) -> frozenset[Any]:
        values = [self.get(item) for item in node.items]
        try:
            return frozenset(values)
        except TypeError as error:
            raise Wrong(f"a set of what cannot be in one: {error}") from error


def _nothing(node: object) -> None:
    """What is made of a node in one step; ``None`` if it takes more."""


def set_items(into: Any, values: list[Any]) -> None:
    """Keys and values in turn into a dictionary."""
    pairs = zip(values[::2], values[1::2], strict=True)
    try:
        if type(into) in _UPDATED:
            into.update(pairs)
            return
        for key, value in pairs:
            into[key] = value
    except TypeError as error:
        raise Wrong(f"a key that cannot be one: {error}") from error


_ODD: dict[type, str] = {
    Big: "an integer of thousands of digits",
    Extension: "a name that it gives only by number",
    OutOfBand: "a buffer that lies outside the file",
}
