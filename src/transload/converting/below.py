"""What lies at a path, as it stands in the file's own object: below the key that ``--key`` names, for one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transload.formats.tensors import called, short_key
from transload.nodes import Call, Dict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transload.checkpoint import Key

__all__ = ["at", "below", "children"]


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
        if _spelled(path[:length]) == wanted:
            return path[:length]
    return None


def _spelled(path: tuple[Key, ...]) -> str:
    """A path as names have it: without the tables of a module's parts."""
    return ".".join(str(step) for step in path if step != "_modules").replace("/", ".")


def _inside(node: Any, step: Key) -> Any:
    if type(node) in (list, tuple):
        return node[step] if type(step) is int and step < len(node) else None
    items = _items(node)
    for index in range(len(items) // 2 * 2 - 2, -1, -2):
        if short_key(items[index]) == step:
            return items[index + 1]
    return None


def children(node: Any) -> Iterator[tuple[Key, Any, Any]]:
    """What a mapping or an object holds: the step of a path, the key, and itself; of equal texts the last."""
    items = _items(node)
    last = {key: index for index, key in enumerate(items[::2]) if type(key) is str}
    for index, (key, child) in enumerate(zip(items[::2], items[1::2], strict=False)):
        if type(key) is not str or last[key] == index:
            yield short_key(key), key, child


def _items(node: Any) -> list[Any]:
    """Keys and values of a mapping, or the attributes of an object; nothing of what is neither."""
    if type(node) is Dict:
        return node.items
    if type(node) is not Call:
        return []
    given = node.args[0] if type(node.args) is tuple and node.args and type(node.args[0]) is list else []
    pairs = [pair for pair in given if type(pair) in (list, tuple) and len(pair) == 2]
    state = node.states[-1] if node.states else None
    attributes = state.items if type(state) is Dict and called(node) != "collections.OrderedDict" else []
    return [*attributes, *(part for pair in pairs for part in pair), *(node.items or [])]
