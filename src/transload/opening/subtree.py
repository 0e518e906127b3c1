"""One object out of a checkpoint, built by the same table as the whole file; only its own storages are read."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from transload.loading.errors import UnsafeError
from transload.nodes import Call, Dict, Global, Persistent, Set

if TYPE_CHECKING:
    from transload.loading.arrival import Arrival
    from transload.loading.files import Piece

__all__ = ["build_node"]


def build_node(piece: Piece, node: object, arrival: Arrival) -> Any:
    """The object of a node; ``UnsafeError`` if it takes names that nobody has allowed."""
    from transload.loading.allowed import Allowed
    from transload.loading.build import build
    from transload.loading.storages import read_storages

    main = next(pickle for pickle in piece.checkpoint.pickles if pickle.main)
    names, keys = _within(node)
    part = copy(main)
    part.root = node
    part.globals = {key: name for key, name in main.globals.items() if id(name) in names}
    refused = sorted(name.full_name for name in Allowed().refused([part]))
    if refused:
        what = f"it is made by {', '.join(refused)}, which nobody has allowed"
        fix = "transload.load(path, weights_only=False) does it, for a file of people you trust."
        raise UnsafeError(what, where=piece.checkpoint.path, fix=fix)
    storages = tuple(storage for storage in piece.checkpoint.storages if storage.key in keys)
    alone = replace(piece, checkpoint=replace(piece.checkpoint, storages=storages))
    return build(alone, part, read_storages(alone, arrival), arrival)


def _within(root: object) -> tuple[set[int], set[str]]:
    """The globals below a node, by identity, and the keys of the storages there."""
    names: set[int] = set()
    keys: set[str] = set()
    seen: set[int] = set()
    waiting: list[Any] = [root]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if type(node) is Global:
            names.add(id(node))
        elif type(node) is Persistent and type(node.id) is tuple and len(node.id) > 2:
            keys.add(str(node.id[2]))
        waiting += _below(node)
    return names, keys


def _below(node: Any) -> list[Any]:
    kind = type(node)
    if kind is list or kind is tuple:
        return list(node)
    if kind is Dict or kind is Set:
        return list(node.items)
    if kind is Persistent:
        return [node.id]
    if kind is not Call:
        return []
    inside = (node.states, node.items, node.appended)
    return [node.callee, node.args, node.kwargs, *(part for parts in inside if parts for part in parts)]
