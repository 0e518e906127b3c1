"""An index without the tensors that are lost: dictionaries lose them, elsewhere ``None`` stands in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transload.formats.tensors import READERS, called
from transload.nodes import Call, Dict, Set

__all__ = ["leave_out"]

_MAX_DEPTH = 200
"""Tuples in tuples that are made anew: those of a checkpoint are two deep, a hostile one has a million."""

_ORDERED = "collections.OrderedDict"


def leave_out(root: object, is_lost: Callable[[Call], bool]) -> object:
    """Take the tensors that are lost out of a graph, which is changed; ``is_lost`` is asked once for each."""
    return _Leaving(is_lost).run(root)


class _Leaving:
    def __init__(self, is_lost: Callable[[Call], bool]) -> None:
        self._is_lost = is_lost
        self._known: dict[int, bool] = {}
        self._tuples: dict[int, tuple[Any, ...]] = {}
        self._seen: set[int] = set()
        self._todo: list[Any] = []
        self._kept: list[
            Any
        ] = []  # what was made here stays alive, or its place in memory would be taken for another's

    def run(self, root: object) -> object:
        """Go through everything, and change it."""
        new = self._new(root, 0)
        while self._todo:
            self._enter(self._todo.pop())
        return new

    def _lost(self, node: object) -> bool:
        if type(node) is not Call or called(node) not in READERS:
            return False
        known = self._known.get(id(node))
        if known is None:
            known = self._known[id(node)] = self._is_lost(node)
        return known

    def _new(self, node: Any, depth: int) -> Any:
        """What stands in the place of a node; what is in it comes later, but for tuples."""
        if self._lost(node):
            return None
        if type(node) is tuple:
            return self._tuple(node, depth)
        if type(node) in (Dict, Call, list, Set) and id(node) not in self._seen:
            self._seen.add(id(node))
            self._todo.append(node)
        return node

    def _tuple(self, node: tuple[Any, ...], depth: int) -> tuple[Any, ...]:
        made = self._tuples.get(id(node))
        if made is None and depth < _MAX_DEPTH:
            parts = tuple(self._new(part, depth + 1) for part in node)
            made = parts if any(new is not old for new, old in zip(parts, node, strict=True)) else node
            self._tuples[id(node)] = made
            self._kept += (node, made)
        return node if made is None else made

    def _enter(self, node: Any) -> None:
        if type(node) is Dict:
            node.items[:] = self._pairs(node.items)
        elif type(node) is list:
            node[:] = [self._new(part, 0) for part in node]
        elif type(node) is Set:
            node.items[:] = [self._new(part, 0) for part in node.items]
        elif type(node) is Call:
            self._call(node)

    def _call(self, node: Call) -> None:
        if called(node) == _ORDERED and type(node.args) is tuple and node.args and type(node.args[0]) is list:
            pairs = node.args[0]  # how Python 2 writes an ordered dictionary
            pairs[:] = [pair for pair in pairs if not (type(pair) in (list, tuple) and any(map(self._lost, pair)))]
        node.args = self._new(node.args, 0)
        if node.items is not None:
            node.items[:] = self._pairs(node.items)
        if node.appended is not None:
            node.appended[:] = [self._new(part, 0) for part in node.appended]
        if node.states is not None:
            node.states[:] = [self._new(part, 0) for part in node.states]
        node.kwargs = self._new(node.kwargs, 0)

    def _pairs(self, items: list[Any]) -> list[Any]:
        """Keys and values in turn, without those whose value is lost."""
        out: list[Any] = []
        for key, value in zip(items[::2], items[1::2], strict=False):
            if not self._lost(value):
                out += (self._new(key, 0), self._new(value, 0))
        return out
