"""Whether two pickles make the same thing but for the tags of its storages: their graphs, node by node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transload.nodes import Big, Call, Dict, Extension, Global, OutOfBand, Persistent, Pickle, Set
from transload.retagging.sites import tag_of

__all__ = ["same_but_tags"]

_VALUES = frozenset({str, bytes, int, bool, type(None)})
_FIELDS: dict[type, tuple[str, ...]] = {
    Global: ("module", "name"),
    Extension: ("code",),
    Dict: ("items",),
    Set: ("frozen", "items"),
    Persistent: ("id",),
    Big: ("nbytes",),
    OutOfBand: (),
}
_FACTS = ("protocol", "python2", "undecoded", "rare", "broken", "cut")
_LISTS = ("calls", "built", "extensions", "persistent")


def same_but_tags(old: Pickle, new: Pickle, renamed: Callable[[str], str]) -> bool:
    """Whether ``new`` is ``old`` with every tag ``renamed``, and nothing else.

    Everything a loader would do is compared, in order; and what was one object is one object still.
    """
    if any(getattr(old, name) != getattr(new, name) for name in _FACTS):
        return False
    if list(old.globals) != list(new.globals) or len(old.irregular) != len(new.irregular):
        return False
    twins = _Twins(renamed)
    return all(twins.equal(getattr(old, name), getattr(new, name)) for name in (*_LISTS, "root"))


class _Twins:
    """Pairs of nodes that must be the same."""

    def __init__(self, renamed: Callable[[str], str]) -> None:
        self._renamed = renamed
        self._new: dict[int, object] = {}
        self._old: dict[int, object] = {}
        self._met: set[tuple[int, int]] = set()
        self._todo: list[tuple[Any, Any]] = []

    def equal(self, old: object, new: object) -> bool:
        """Whether two graphs are the same. They may have cycles, so it is asked of each pair of nodes once."""
        self._todo = [(old, new)]
        while self._todo:
            left, right = self._todo.pop()
            kind = type(left)
            if kind is not type(right):
                return False
            if kind in _VALUES:
                if left != right:
                    return False
            elif not self._alike(kind, left, right):
                return False
        return True

    def _alike(self, kind: type, left: Any, right: Any) -> bool:
        """One pair of nodes; what is in them is put on the list."""
        if kind is float:
            return bool(left.hex() == right.hex())
        if kind is not tuple and not self._is_twin(left, right):
            return False
        pair = id(left), id(right)
        if pair in self._met:
            return True
        self._met.add(pair)
        return self._items(left, right) if kind in (tuple, list) else self._node(kind, left, right)

    def _is_twin(self, left: object, right: object) -> bool:
        """What was one object is one object, and what was two is two."""
        return self._new.setdefault(id(left), right) is right and self._old.setdefault(id(right), left) is left

    def _node(self, kind: type, left: Any, right: Any) -> bool:
        if kind is bytearray:
            return bool(left == right)
        if kind is Persistent and tag_of(left) is not None:
            return self._storage(left, right)
        if kind is Call:
            return self._call(left, right)
        if kind not in _FIELDS:
            return False
        self._todo += ((getattr(left, name), getattr(right, name)) for name in _FIELDS[kind])
        return True

    def _call(self, left: Call, right: Call) -> bool:
        self._todo += ((left.callee, right.callee), (left.args, right.args))
        for mine, theirs in (
            (left.kwargs, right.kwargs),
            (left.states, right.states),
            (left.items, right.items),
            (left.appended, right.appended),
        ):
            if mine is not None or theirs is not None:
                self._todo.append((mine, theirs))
        return left.kind == right.kind

    def _items(self, left: Any, right: Any) -> bool:
        if len(left) != len(right):
            return False
        for mine, theirs in zip(left, right, strict=True):
            kind = type(mine)
            if kind not in _VALUES or kind is not type(theirs):
                self._todo.append((mine, theirs))
            elif mine is not theirs and mine != theirs:
                return False
        return True

    def _storage(self, left: Persistent, right: Persistent) -> bool:
        """Ids of storages, which differ by their tags as they should."""
        tag = tag_of(left)
        if tag is None or tag_of(right) != self._renamed(tag):
            return False
        mine: Any = left.id
        theirs: Any = right.id
        return self._items((*mine[:3], *mine[4:]), (*theirs[:3], *theirs[4:]))
