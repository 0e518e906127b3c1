"""The true names of tensors whose keys are so long that the reader shows them cut off."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from transload.converting.below import children
from transload.errors import ConvertError

if TYPE_CHECKING:
    from transload.checkpoint import Checkpoint, Key, Tensor

__all__ = ["with_true_names"]

MAX_NAMES = 64 << 20
"""Characters of all these names together: a key of a megabyte can stand above any number of tensors."""

_CUT = re.compile(r".{200}… \([0-9]{4,} characters\)", re.DOTALL)  # as read.values.short writes it


def with_true_names(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the whole names; ``ConvertError`` where they cannot be told, or are too much."""
    if not checkpoint.pickles or not any("… (" in tensor.name for tensor in checkpoint.tensors):
        return checkpoint
    names = _Names(checkpoint)
    return replace(checkpoint, tensors=tuple(map(names.whole, checkpoint.tensors)))


class _Names:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self._where = checkpoint.path
        self._roots = [(pickle.path, pickle.root) for pickle in checkpoint.pickles if pickle.main]
        self._inside: dict[int, dict[Key, list[tuple[Any, Any]]]] = {}
        self._alike = Counter(tensor.path for tensor in checkpoint.tensors)
        self._met: Counter[tuple[Key, ...]] = Counter()
        self._left = MAX_NAMES

    def whole(self, tensor: Tensor) -> Tensor:
        """A tensor under its whole name."""
        if not any(type(step) is str and _CUT.fullmatch(step) for step in tensor.path):
            return tensor
        number = self._met[tensor.path]
        self._met[tensor.path] += 1
        for start, root in self._roots:
            keys = self._keys(root, tensor.path[len(start) :], number) if tensor.path[: len(start)] == start else None
            if keys is not None:
                return _renamed(tensor, tensor.name, self._spelled(tensor, start, keys))
        what = f"a key is longer than 1,000 characters, and not to be told from others: {tensor.name[-60:]}"
        raise ConvertError(what, where=self._where, fix="Save it again with shorter keys.")

    def _keys(self, node: Any, path: tuple[Key, ...], number: int) -> list[Any] | None:
        """The keys that a path stands for; of tensors with one path, the one with that number."""
        found = []
        for index, step in enumerate(path):
            named = self._named(node, step)
            alike = index == len(path) - 1 and len(named) == self._alike[path]
            if not named or (len(named) > 1 and not alike):
                return None
            key, node = named[number if alike else 0]
            found.append(key)
        return found

    def _named(self, node: Any, step: Key) -> list[tuple[Any, Any]]:
        """The keys that a step stands for, and what lies there."""
        if type(node) in (list, tuple):
            return [(step, node[step])] if type(step) is int and step < len(node) else []
        if id(node) not in self._inside:
            made: dict[Key, list[tuple[Any, Any]]] = {}
            for name, key, child in children(node):
                made.setdefault(name, []).append((key, child))
            self._inside[id(node)] = made
        return self._inside[id(node)].get(step, [])

    def _spelled(self, tensor: Tensor, start: tuple[Key, ...], keys: list[Any]) -> str:
        name, at = tensor.name, 0
        for step, key in zip(tensor.path[len(start) :], keys, strict=True):
            if type(key) is str and type(step) is str and key != step and (at := name.find(step, at)) >= 0:
                name = f"{name[:at]}{key}{name[at + len(step) :]}"
                at += len(key)
                self._left -= len(key)
            if self._left < 0:
                raise ConvertError(f"its names add up to more than {MAX_NAMES >> 20} MiB", where=self._where)
        return name


def _renamed(tensor: Tensor, old: str, new: str) -> Tensor:
    """A tensor and its parts, whose names begin with its own."""
    parts = tuple(_renamed(part, old, new) for part in tensor.parts)
    return tensor._replace(name=f"{new}{tensor.name[len(old) :]}", parts=parts)
