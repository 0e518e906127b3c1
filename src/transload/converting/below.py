"""The node below a key: what ``--key`` chooses, as it stands in the file's own object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transload.read.nodes import Call, Dict
from transload.read.values import called, short_key

if TYPE_CHECKING:
    from transload.checkpoint import Key

__all__ = ["at", "below"]


def below(root: object, key: str, paths: list[tuple[Key, ...]]) -> tuple[Any, tuple[Key, ...]]:
    """The node and its path; ``(None, ())`` where the key is no container of the object."""
    wanted = key.replace("/", ".")
    start = next((found for path in paths if (found := _start(path, wanted)) is not None), None)
    if start is None:
        return None, ()
    node = at(root, start)
    return (None, ()) if node is None else (node, start)


def at(root: object, path: tuple[Key, ...]) -> Any:
    """What stands at a path; ``None`` if nothing does."""
    node = root
    for step in path:
        node = _inside(node, step)
        if node is None:
            return None
    return node


def _start(path: tuple[Key, ...], wanted: str) -> tuple[Key, ...] | None:
    """The beginning of a path that spells the key."""
    for length in range(1, len(path)):
        if ".".join(map(str, path[:length])).replace("/", ".") == wanted:
            return path[:length]
    return None


def _inside(node: Any, step: Key) -> Any:
    if type(node) in (list, tuple):
        return node[step] if type(step) is int and step < len(node) else None
    items = node.items if type(node) is Dict else _items(node) if type(node) is Call else []
    for index in range(len(items) // 2 * 2 - 2, -1, -2):
        if short_key(items[index]) == step:
            return items[index + 1]
    return None


def _items(node: Call) -> list[Any]:
    """Keys and values of a mapping, or the attributes of an object."""
    given = node.args[0] if type(node.args) is tuple and node.args and type(node.args[0]) is list else []
    pairs = [pair for pair in given if type(pair) in (list, tuple) and len(pair) == 2]
    state = node.states[-1] if node.states else None
    attributes = state.items if type(state) is Dict and called(node) != "collections.OrderedDict" else []
    return [*attributes, *(part for pair in pairs for part in pair), *(node.items or [])]
