"""What lies at a path of a checkpoint: the inert node, and the plain value that it may be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transload.formats.tensors import called, short_key
from transload.nodes import Call, Dict

if TYPE_CHECKING:
    from transload.checkpoint import Key

__all__ = ["NOWHERE", "Paths", "plain"]


NOWHERE = object()
"""What is found where a path leads nowhere, or a value is not plain."""

_MAX_PLAIN = 100_000
_MAX_DEPTH = 8


class Paths:
    """Looks up nodes by path from a root. Each container is gone through once."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._members: dict[int, dict[Key, object]] = {}

    def at(self, path: tuple[Key, ...]) -> object:
        """The node there, or ``NOWHERE``."""
        node = self._root
        for step in path:
            node = self._inside(node).get(step, NOWHERE)
            if node is NOWHERE:
                break
        return node

    def _inside(self, node: Any) -> dict[Key, object]:
        known = self._members.get(id(node))
        if known is None:
            known = self._members[id(node)] = dict(_members(node))
        return known


def _members(node: Any) -> list[tuple[Key, object]]:
    """The children of a node that a path can name: entries, attributes, positions."""
    kind = type(node)
    if kind is Dict:
        return [(short_key(key), value) for key, value in node.pairs()]
    if kind is list or kind is tuple:
        return list(enumerate(node))
    if kind is not Call:
        return []
    ordered = called(node) == "collections.OrderedDict"
    found = _given(node) if ordered else _members(node.states[-1]) if node.states else []
    return [*found, *_members(Dict(node.items or [])), *enumerate(node.appended or [])]


def _given(node: Call) -> list[tuple[Key, object]]:
    """The pairs an ordered dictionary is made of, as Python 2 writes one."""
    pairs = node.args[0] if type(node.args) is tuple and node.args and type(node.args[0]) is list else []
    return [(short_key(pair[0]), pair[1]) for pair in pairs if type(pair) in (list, tuple) and len(pair) == 2]


def plain(node: object) -> Any:
    """The value of a node that is plain data, of a bounded size; ``NOWHERE`` for any other."""
    return _plain(node, [_MAX_PLAIN], _MAX_DEPTH)


def _plain(node: Any, left: list[int], depth: int) -> Any:
    kind = type(node)
    if node is None or kind in (bool, int, float, str, bytes):
        return node
    left[0] -= 1  # what is shared counts each time it is met
    if left[0] < 0 or not depth:
        return NOWHERE
    if kind is Dict or (kind is Call and called(node) == "collections.OrderedDict" and not node.states):
        pairs = [(key, _plain(value, left, depth - 1)) for key, value in _members(node)]
        return NOWHERE if any(value is NOWHERE for _, value in pairs) else dict(pairs)
    if kind is Call and called(node) == "_codecs.encode":
        return _encoded(node.args)
    if kind is not list and kind is not tuple:
        return NOWHERE
    inner = [_plain(part, left, depth - 1) for part in node]
    return NOWHERE if any(value is NOWHERE for value in inner) else kind(inner)


def _encoded(args: object) -> Any:
    """Bytes, as protocol 2 writes them."""
    match args:
        case (str() as text, "latin1" | "latin-1") if text.isascii() or max(text) <= "\xff":
            return text.encode("latin1")
    return NOWHERE
