"""How many tensors an ordinary archive holds, each within its storage: all there is to know of them if it is whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from transload.formats.tensors import MAX_SIZE
from transload.nodes import Call, Dict, Global, Persistent

if TYPE_CHECKING:
    from transload.checkpoint import Checkpoint

__all__ = ["tensor_count"]

_TENSOR = "torch._utils._rebuild_tensor_v2"
_ORDERED_DICT = "collections.OrderedDict"
_ATOMS = frozenset({int, float, str, bool, bytes, type(None)})
_MOST_AXES = 8


class _Odd(Exception):  # noqa: N818 - a signal inside this module
    """Something that may be in order, or not: the long way tells."""


def tensor_count(checkpoint: Checkpoint) -> int | None:
    """Of a checkpoint whose tensors were only counted, how many names have one; ``None`` if any may be broken.

    The same number as of tensors that are listed. ``counted`` itself is of storages, and has looked at those alone.
    """
    pickle = checkpoint.pickles[0]
    try:
        return sum(_counts(pickle.root, pickle.end - pickle.start))
    except _Odd:
        return None


def _counts(root: object, most: int) -> Iterator[int]:
    """The tensors in each container. Whoever visits more values than the stream has bytes goes in circles."""
    waiting: list[Any] = [(root,)]
    for values in waiting:  # which grows meanwhile
        most -= len(values)
        if most < 0:
            raise _Odd
        below = [value for value in values if type(value) not in _ATOMS]
        held = [value for value in below if not _is_tensor(value)]
        waiting += map(_values, held)
        yield len(below) - len(held)


def _values(node: Any) -> Any:
    """What lies in a container."""
    kind = type(node)
    if kind is list or kind is tuple:
        return node
    if kind is Call and _is_dictionary(node):
        return _of_items(node.items or [])
    if kind is Dict:
        return _of_items(node.items)
    raise _Odd


def _of_items(items: list[Any]) -> list[Any]:
    texts = [key for key in items[::2] if type(key) is str]
    if len(set(texts)) < len(texts):  # of the same key the last one counts
        raise _Odd
    return items[1::2]


def _is_dictionary(node: Call) -> bool:
    callee = node.callee
    ordered = type(callee) is Global and callee.full_name == _ORDERED_DICT
    return ordered and node.args == () and not (node.states or node.appended)


def _is_tensor(node: Any) -> bool:
    """Whether a node is a tensor; ``_Odd`` if it is one that is not plain, or reaches beyond its storage."""
    if type(node) is not Call or type(node.callee) is not Global or node.callee.full_name != _TENSOR:
        return False
    args = node.args
    if type(args) is not tuple or len(args) != 6:
        raise _Odd
    storage, last, shape, stride, requires_grad, _ = args
    if type(storage) is not Persistent or not (type(shape) is type(stride) is tuple) or len(shape) != len(stride):
        raise _Odd
    if type(last) is not int or not 0 <= last < MAX_SIZE or requires_grad is not False or len(shape) > _MOST_AXES:
        raise _Odd
    numel = 1
    for size, step in zip(shape, stride):  # noqa: B905 - as long as each other, and a keyword costs as much as a pair
        if not (type(size) is type(step) is int) or size < 0 or not 0 <= step < MAX_SIZE:
            raise _Odd
        numel *= size
        if numel >= MAX_SIZE:
            raise _Odd
        last += (size - 1) * step
    held: Any = storage.id  # five parts, the last the number of elements: those were looked at when they were counted
    if numel and last >= held[4]:
        raise _Odd
    return True
