"""numpy arrays that lie in the pickle itself, as tensors that any format can hold; numpy is not needed.

``find_arrays`` looks for them where a checkpoint keeps its own object, and ``with_arrays`` opens the checkpoint with
them. Arrays of anything but plain numbers (objects, text, fields), and those of a class of their own, are not taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

from transload.checkpoint import Key, Storage, Tensor
from transload.dtypes import FROM_NUMPY
from transload.formats.arrays import NUMPY_SCALARS, Array, array_of, raw_bytes
from transload.formats.tensors import called, short_key
from transload.io.sources import BytesSource, Source
from transload.nodes import Call, Dict
from transload.tensors.content import Content
from transload.writing.objects import (
    MAPPINGS,
    BoundedWalk,
    call_items,
    is_module,
    object_state,
)

Path = tuple[Key, ...]
_MAX_SMALL = 64  # bytes: about what the call of an array takes


def _identity(data: Any) -> int:
    """What arrays have in common that are made of the same bytes, or of the text that they are written as."""
    return id(data.args[0]) if type(data) is Call and type(data.args) is tuple and data.args else id(data)


def numbers_of(node: Call, lengths: dict[int, int]) -> Array | None:
    """The array that a call makes, if it is a plain one of numbers that torch has a dtype for.

    Also a number of numpy that JSON does not have (a complex one), as an array without dimensions. ``lengths`` keeps
    how many bytes there are, by identity: a file can make any number of arrays of the same large text.
    """
    found = array_of(node)
    if found is None or found.dtype.code not in FROM_NUMPY:
        return None
    if called(node) in NUMPY_SCALARS and found.dtype.code[0] != "c":
        return None
    if (identity := _identity(found.data)) not in lengths:
        raw = raw_bytes(found.data)
        lengths[identity] = -1 if raw is None else len(raw)
    return found if lengths[identity] == prod(found.shape) * found.dtype.itemsize else None


def find_arrays(
    roots: Iterable[tuple[Path, Any]], tensors: Iterable[Tensor], modules: set[Path], *, into_objects: bool
) -> list[tuple[Path, Array]]:
    """The plain arrays below ``roots``, by their paths; none of pickled modules, whose state dicts do not have them.

    ``into_objects``: also those that are attributes of objects, and values of mappings of other classes.
    """
    search = _Search({tensor.path for tensor in tensors}, modules, into_objects=into_objects)
    for path, root in roots:
        search.visit(root, path, 0)
    return search.found


class _Search(BoundedWalk):
    """Goes where ``Leftovers`` goes, or ``Structure``: what is found there is kept, and what is not they list."""

    def __init__(self, tensors: set[Path], modules: set[Path], *, into_objects: bool) -> None:
        super().__init__()
        self.found: list[tuple[Path, Array]] = []
        self._tensors, self._modules, self._into_objects = tensors, modules, into_objects
        self._arrays: dict[int, Array] = {}
        self._lengths: dict[int, int] = {}

    def visit(self, node: Any, path: Path, depth: int) -> None:
        if type(node) not in (Call, Dict, list, tuple) or path in self._tensors or path in self._modules:
            return
        if self.why_stop(node, depth):
            return
        if type(node) is Call:
            array = self._arrays.get(id(node)) or numbers_of(node, self._lengths)
            if array is not None:
                self._arrays[id(node)] = array  # one object, so that what is shared stays shared
                self.found.append((path, array))
                return
        self.ancestors.add(id(node))
        if type(node) in (list, tuple):
            for index, child in enumerate(node):
                self.visit(child, (*path, index), depth + 1)
        else:
            self._visit_pairs(self._pairs(node), path, depth + 1)
        self.ancestors.discard(id(node))

    def _pairs(self, node: Any) -> list[tuple[Any, Any]]:
        if type(node) is Dict:
            return node.pairs()
        name = called(node)
        if name == "collections.OrderedDict" or (name in MAPPINGS and self._into_objects):
            return Dict(call_items(node)).pairs() if not node.appended else []
        state = object_state(node) if self._into_objects else None
        return [] if state is None or is_module(state) else state.pairs()

    def _visit_pairs(self, pairs: list[tuple[Any, Any]], path: Path, depth: int) -> None:
        """Go below keys that a path tells apart: of two that are written alike, one would hide the other."""
        inside = [(short_key(key), key, child) for key, child in pairs]
        alike = Counter(str(step) for step, _, _ in inside)
        for step, key, child in inside:
            if type(key) in (str, int) and type(step) is type(key) and step == key and alike[str(step)] == 1:
                self.visit(child, (*path, step), depth)


def with_arrays(content: Content, arrays: list[tuple[Path, Array]]) -> tuple[Content, tuple[Tensor, ...]]:
    """The checkpoint with arrays as tensors, each named after its path, and these tensors."""
    if not arrays:
        return content, ()
    held: dict[str, Any] = {}  # the bytes of each array, by the name of a file that no checkpoint has
    storages: dict[tuple[object, ...], Storage] = {}
    tensors: list[Tensor] = []
    for path, array in arrays:
        code, big_endian, width, _, _ = array.dtype
        dtype, nbytes = FROM_NUMPY[code], prod(array.shape) * width
        # Python shares small values of its own accord. Of large ones a file could make any number of arrays.
        small = nbytes <= _MAX_SMALL
        key = (id(array),) if small else (_identity(array.data), array.dtype)
        storage = storages.get(key)
        if storage is None:
            file = f"\0array {len(storages)}"
            held[file] = array.data
            storage = Storage(file, file, "cpu", dtype, nbytes, nbytes, 0, file=file, big_endian=big_endian)
            storages[key] = storage
        tensors.append(Tensor(path, "/".join(map(str, path)), dtype, array.shape, array.stride, "cpu", storage.id))

    @lru_cache(maxsize=2)  # bytes that are written as a text are another copy
    def in_memory(file: str) -> Source:
        return BytesSource(raw_bytes(held[file]) or b"")

    def open_file(file: str) -> Source:
        return in_memory(file) if file in held else content.open_file(file)

    checkpoint = content.checkpoint
    everything = (*checkpoint.tensors, *tensors), (*checkpoint.storages, *storages.values())
    opened = replace(checkpoint, tensors=everything[0], storages=everything[1])
    return Content(opened, open_file, content.parts), tuple(tensors)
