"""Turn numpy arrays in the pickle of a checkpoint into tensors that any format can store; numpy is not needed.

``with_arrays`` searches the pickled object, and adds what was found to the checkpoint. Arrays of anything but numbers
(objects, strings, structured dtypes) and instances of subclasses are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

from transload.checkpoint import PROGRAMS, Key, Storage, Tensor
from transload.dtypes import FROM_NUMPY
from transload.formats.arrays import NUMPY_SCALARS, Array, array_of, raw_bytes
from transload.formats.tensors import call_items, called, short_key
from transload.io.sources import BytesSource, Source
from transload.nodes import Call, Dict
from transload.tensors.content import Content
from transload.writing.objects import MAPPINGS, BoundedWalk, is_module, object_state

Path = tuple[Key, ...]
_MAX_SMALL = 64  # bytes: about what the call of an array takes


def _identity(data: Any) -> int:
    """A key that is equal for arrays of the same bytes object, or of the same string that encodes their bytes."""
    return id(data.args[0]) if type(data) is Call and type(data.args) is tuple and data.args else id(data)


def numeric_array(node: Call, lengths: dict[int, int]) -> Array | None:
    """The array that a call builds, if it contains numbers and torch has their dtype.

    Also a numpy scalar that JSON cannot represent (a complex number), as an array without dimensions. ``lengths``
    caches numbers of bytes, by identity: a file can build any number of arrays from the same long string.
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


class _Search(BoundedWalk):
    """Visits the same nodes as ``Leftovers`` or ``Structure``, which list every array that is not found here."""

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
        pairs: list[tuple[Any, Any]] = []
        children: Iterable[tuple[Any, Any]]
        if type(node) is Dict:
            pairs = node.pairs()
        elif type(node) is Call:
            array = self._arrays.get(id(node)) or numeric_array(node, self._lengths)
            if array is not None:
                self._arrays[id(node)] = array  # the same object each time, so that shared arrays stay shared
                self.found.append((path, array))
                return
            name = called(node)
            if name == "collections.OrderedDict" or (name in MAPPINGS and self._into_objects):
                pairs = Dict(call_items(node)).pairs() if not node.appended else []
            elif self._into_objects and (state := object_state(node)) is not None and not is_module(state):
                pairs = state.pairs()
        if type(node) in (list, tuple):
            children = enumerate(node)
        else:  # keys that are unambiguous in a path: of two keys with the same text one would be lost
            alike = Counter(str(short_key(key)) for key, _ in pairs)
            plain = [pair for pair in pairs if type(pair[0]) in (str, int) and short_key(pair[0]) == pair[0]]
            children = [pair for pair in plain if alike[str(pair[0])] == 1]
        self.ancestors.add(id(node))
        for key, child in children:
            self.visit(child, (*path, key), depth + 1)
        self.ancestors.discard(id(node))


def with_arrays(content: Content, modules: set[Path], *, into_objects: bool) -> tuple[Content, set[Path]]:
    """The source with the numpy arrays in its pickles as tensors, each named after its path; and these paths.

    Not those in pickled modules: they are not in a state dict. ``into_objects``: also those in the attributes of
    objects, and in mappings of other classes.
    """
    checkpoint = content.checkpoint
    main = [pickle for pickle in checkpoint.pickles if pickle.main and (pickle.path or checkpoint.format != "dcp")]
    named = any(module.partition(".")[0] == "numpy" for pickle in main for module, _ in pickle.globals)
    # Where several shards fill one dictionary, a path does not identify the shard.
    if not named or checkpoint.format in PROGRAMS or len({pickle.path for pickle in main}) != len(main):
        return content, set()
    search = _Search({tensor.path for tensor in checkpoint.tensors}, modules, into_objects=into_objects)
    for pickle in main:
        search.visit(pickle.root, pickle.path, 0)
    raw: dict[str, Any] = {}  # the bytes of each array, by a file name that no checkpoint has
    storages: dict[tuple[object, ...], Storage] = {}
    added: list[Tensor] = []
    for path, array in search.found:
        code, big_endian, width, _, _ = array.dtype
        dtype, nbytes = FROM_NUMPY[code], prod(array.shape) * width
        # Small values may be shared by chance (pickle memoizes them). A file could build any number of large arrays.
        small = nbytes <= _MAX_SMALL
        key = (id(array),) if small else (_identity(array.data), array.dtype)
        storage = storages.get(key)
        if storage is None:
            file = f"\0array {len(storages)}"
            raw[file] = array.data
            storage = Storage(file, file, "cpu", dtype, nbytes, nbytes, 0, file=file, big_endian=big_endian)
            storages[key] = storage
        added.append(Tensor(path, "/".join(map(str, path)), dtype, array.shape, array.stride, "cpu", storage.id))

    @lru_cache(maxsize=2)  # decoding bytes from a string makes a copy
    def in_memory(file: str) -> Source:
        return BytesSource(raw_bytes(raw[file]) or b"")

    def open_file(file: str) -> Source:
        return in_memory(file) if file in raw else content.open_file(file)

    tensors, found = (*checkpoint.tensors, *added), (*checkpoint.storages, *storages.values())
    return Content(replace(checkpoint, tensors=tensors, storages=found), open_file, content.parts), {
        tensor.path for tensor in added
    }
