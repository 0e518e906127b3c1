"""The pickled object of the source, as inert nodes: its numpy arrays as tensors, and everything else as plain data.

``with_arrays`` adds the numpy arrays in the object to the tensors of the source; numpy is not needed. ``Leftovers``
turns what a target cannot store into numbers, strings, lists and dictionaries for ``DST.leftovers.json``. The classes
of the file are never instantiated: an object becomes its attributes and the name of its class (``$class``), a module
its parameters, buffers and children. What is not plain data is only listed, and so is what a hostile file shares or
nests too often.
"""

from __future__ import annotations

from base64 import b64encode
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from math import isfinite, prod
from struct import unpack
from typing import Any

from transload.checkpoint import Key, Storage, Tensor
from transload.dtypes import FROM_NUMPY
from transload.formats.arrays import NUMPY_SCALARS, Array, array_of, raw_bytes
from transload.formats.graph import MODULE_KEYS, RECONSTRUCTORS, call_items, leaf_kind, short_key, with_slots
from transload.frozen import NamedTuple, replace
from transload.io.sources import BytesSource, Source
from transload.nodes import REBUILDS, Call, Dict, Global, Set, called, device_text, short
from transload.opening.elements import ElementReader

Path = tuple[Key, ...]


class Omission(NamedTuple):
    """Something that is not in the target, and why. ``lost``: it belongs there, but the format cannot store it."""

    name: str
    why: str
    lost: bool = False


NOTHING: Any = object()
"""Stands for what is not kept here: a tensor, which is stored by itself, or something that was listed."""

KEY_TYPES = (str, int, float, bool, type(None))


# -- walking the object


def object_state(node: Call) -> Dict | None:
    """The attributes of an object that consists of nothing else; ``None`` for any other object."""
    args = node.args
    if called(node) in RECONSTRUCTORS:  # args: class, base, state of the base (None for ``object``)
        bare = type(args) is tuple and len(args) == 3 and args[2] is None
    else:
        bare = args == () and (node.kwargs is None or (type(node.kwargs) is Dict and not node.kwargs.items))
    is_instance = node.kind in ("newobj", "reduce", "obj", "inst", "newobj_ex") and not node.items and not node.appended
    states: list[Any] = node.states or ([Dict([])] if node.kind == "newobj" else [])
    state = with_slots(states[0]) if len(states) == 1 else None
    return state if bare and is_instance and type(state) is Dict else None


def is_module(state: Dict) -> bool:
    """Whether these are the attributes of a module."""
    return all(state.get(key) is not None for key in MODULE_KEYS)


def tensor_attributes(node: Any) -> Dict:
    """Python attributes that somebody set on a tensor, which ``torch.save`` saves with it."""
    rebuild = REBUILDS.get(called(node)) if type(node) is Call and type(node.args) is tuple else None
    state = node.args[rebuild.state] if rebuild and rebuild.state < len(node.args) else None
    items: list[Any] = []
    for key, value in state.pairs() if type(state) is Dict else ():
        if type(value) is not Call or called(value) not in REBUILDS:  # not a tensor
            items += [key, value]
    return Dict(items)


_MAX_DEPTH = 200  # a hostile object may have a million levels; Python's recursion limit is a thousand
_MAX_REPEATS = 50_000  # a file can share one list under any number of names, for two bytes each


class BoundedWalk:
    """A walk through a possibly hostile object: endlessly nested, cyclic, or shared again and again."""

    def __init__(self) -> None:
        self.ancestors: set[int] = set()
        self._seen: set[int] = set()
        self._repeats = 0

    def why_stop(self, node: Any, depth: int) -> str:
        """Why not to descend into a node; empty if it is safe.

        Only shared nodes count as repeated: the size of the file limits everything else.
        """
        if id(node) in self.ancestors:
            return "contains itself"
        if id(node) in self._seen:
            self._repeats += 1 + (len(node) if type(node) in (list, tuple) else 0)
        self._seen.add(id(node))
        too_much = depth >= _MAX_DEPTH or self._repeats > _MAX_REPEATS
        return "nested too deeply or shared too often" if too_much else ""


# -- plain data

_MAX_TEXT = 64 << 20  # total characters of all strings, and of all listed names: a file can share one string endlessly
_MAX_LISTED = 10_000
_MAX_BITS = 4096  # of an integer: int.__str__ is slow for longer ones
_MAX_SHOWN_BITS = 128  # of an integer key in a path
_MAX_BYTES = 1 << 20

MAPPINGS = frozenset({"collections.OrderedDict", "collections.defaultdict", "collections.Counter"})
_SEQUENCES = frozenset({"builtins.set", "__builtin__.set", "builtins.frozenset", "__builtin__.frozenset", "torch.Size"})


class Leftovers(BoundedWalk):
    """What was dropped: ``data`` is plain data (``None`` if there is none), ``listed`` is everything else.

    ``dropped`` are paths and nodes, ``tensors`` the paths of tensors, which are stored by themselves. ``versions`` is
    whether a state dict came with the versions of its modules. ``ambiguous`` are the names of tensors under keys that
    are neither strings nor numbers.
    """

    def __init__(self, dropped: Iterable[tuple[Path, Any]], tensors: frozenset[Path]) -> None:
        super().__init__()
        self.listed: list[Omission] = []
        self.versions = False
        self.ambiguous: list[str] = []
        self._tensors = tensors
        self._text_left = self._names_left = _MAX_TEXT
        self._unlisted = self._below_ambiguous = 0
        data: dict[str, Any] = {}
        for path, node in dropped:
            value = self._plain(node, path, 0)
            if value is NOTHING or (not path and value in ({}, [])):
                continue
            name = "/".join(map(str, path))
            existing = data.get(name)
            if isinstance(existing, dict) and isinstance(value, dict) and not existing.keys() & value.keys():
                existing.update(value)  # one dictionary in several shards
                continue
            number, unused = 2, name
            while unused in data:
                unused, number = f"{name}#{number}", number + 1
            data[unused] = value
        self.data: Any = data[""] if set(data) == {""} else data or None
        if self._unlisted:
            self.listed.append(Omission("…", f"and {self._unlisted:,} more, too many to name"))

    def _list(self, path: Path, node: object, why: str = "") -> Any:
        name = "/".join(map(str, path))
        self._names_left -= len(name)
        if len(self.listed) < _MAX_LISTED and self._names_left >= 0:
            text = f"{leaf_kind(node)}: {short(node)}"[:200]
            self.listed.append(Omission(name, f"{text}, {why}" if why else text))
        else:
            self._unlisted += 1
        return NOTHING

    def _plain(self, node: Any, path: Path, depth: int) -> Any:
        """A node as plain data, or ``NOTHING``."""
        if path in self._tensors:
            if self._below_ambiguous:
                self.ambiguous.append("/".join(map(str, path)))
            attributes = tensor_attributes(node)
            more = self._pairs(attributes, (*path, "$attributes"), depth + 1) if attributes.items else NOTHING
            return {"$attributes": more} if more is not NOTHING else NOTHING
        value = _scalar(node) if self._text_left >= 0 else NOTHING
        if value is not NOTHING:
            if type(value) is int:
                self._text_left -= value.bit_length() // 3
            elif type(value) is str:
                self._text_left -= len(value)
            elif type(value) is dict:
                self._text_left -= len(value["$bytes"])
            return value if self._text_left >= 0 else self._list(path, node, "with more text than is kept")
        if why := self.why_stop(node, depth):
            return self._list(path, node, why)
        self.ancestors.add(id(node))
        data = self._container(node, path, depth + 1)
        self.ancestors.discard(id(node))
        return data

    def _container(self, node: Any, path: Path, depth: int) -> Any:
        if type(node) is Dict:
            return self._pairs(node, path, depth)
        name = called(node) if type(node) is Call else ""
        if name in MAPPINGS:
            data = self._pairs(Dict(call_items(node)), path, depth)
            state = node.states[-1] if node.states else None
            if type(state) is Dict and state.items[::2] == ["_metadata"]:
                self.versions = True  # it comes from state_dict()
            elif state is not None and (more := self._plain(state, (*path, "$attributes"), depth)) is not NOTHING:
                return {**(data if data is not NOTHING else {}), "$attributes": more}
            return data
        members = node.items if type(node) is Set else node
        if name in _SEQUENCES and type(node.args) is tuple and len(node.args) == 1 and not node.states:
            members = node.args[0]
        elif type(node) is Call:
            return self._object(node, path, depth)
        if type(members) not in (list, tuple):
            return self._list(path, node)
        values = [self._plain(value, (*path, index), depth) for index, value in enumerate(members)]
        if values and all(value is NOTHING for value in values):
            return NOTHING
        return [None if value is NOTHING else value for value in values]

    def _pairs(self, items: Dict, path: Path, depth: int) -> Any:
        """A dictionary without its tensors, or ``NOTHING`` if it has nothing else."""
        data: dict[str, Any] = {}
        pairs = items.pairs()
        for key, node in pairs:
            # The name of a tensor shows its key exactly only if that is a string or a number that is not huge.
            bits = key.bit_length() if type(key) is int else 0
            ambiguous = type(key) not in KEY_TYPES or bits > _MAX_SHOWN_BITS
            step = short_key(key)
            self._below_ambiguous += ambiguous
            value = self._plain(node, (*path, step), depth)
            self._below_ambiguous -= ambiguous
            if value is NOTHING:
                continue
            if type(key) not in KEY_TYPES or bits > _MAX_BITS:
                self._list((*path, step), value, "under a key that is neither a string nor a number")
                continue
            name = str(key)
            if name in data:  # 1 and "1" have the same form in JSON: the first is only listed
                self._list((*path, name), data[name], "under a key that is written like another one")
            data[name] = value
            self._text_left -= len(name)
        return data if data or not pairs else NOTHING

    def _object(self, node: Call, path: Path, depth: int) -> Any:
        """The attributes of an object; for a module, also its parameters, buffers and children."""
        state = object_state(node)
        if state is None:
            return self._list(path, node)
        name, args = called(node), node.args
        if name in RECONSTRUCTORS and type(args) is tuple and type(args[0]) is Global:
            name = args[0].full_name
        if not is_module(state):
            data = self._pairs(state, path, depth)
            if data is NOTHING:
                return NOTHING if state.items else {"$class": name}
            return {"$class": name, **data}
        attributes = Dict([part for pair in state.pairs() if pair[0] not in MODULE_KEYS for part in pair])
        data = self._pairs(attributes, path, depth)
        kept: dict[str, Any] = {
            key: value
            for key, value in (data.items() if data is not NOTHING else ())
            # Every module has dictionaries of hooks, nearly always empty.
            if value or not ("_hook" in key or key == "_non_persistent_buffers_set")
        }
        for where in MODULE_KEYS:
            table: Any = state.get(where)
            inside = Dict(call_items(table)) if type(table) is Call else table
            if type(inside) is Dict and where != "_modules":  # of tensors only their attributes belong here
                with_attributes = [pair for pair in inside.pairs() if tensor_attributes(pair[1]).items]
                inside = Dict.of(with_attributes)
            if type(inside) is Dict and inside.items:
                data = self._pairs(inside, (*path, where), depth)
                kept[where if where[1:] in kept else where[1:]] = {} if data is NOTHING else data
        return {"$class": name, **kept}


# -- scalars

_PATHS = frozenset({"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "TorchVersion"})
_STRUCT_CODES = {"f8": "d", "f4": "f", "f2": "e", "i8": "q", "i4": "i", "i2": "h", "i1": "b", "b1": "?"}
_STRUCT_CODES |= {"u8": "Q", "u4": "I", "u2": "H", "u1": "B"}


def _scalar(node: Any) -> Any:
    """A number, a string, bytes, a device or a path in the form it has in JSON; ``NOTHING`` for anything else."""
    kind = type(node)
    if node is None or kind in (bool, str):
        return node
    if kind is int:
        return node if node.bit_length() <= _MAX_BITS else NOTHING
    if kind is float:
        return node if isfinite(node) else str(node)
    if kind in (bytes, bytearray):
        return {"$bytes": b64encode(node).decode()} if len(node) <= _MAX_BYTES else NOTHING
    if kind is Global and node.module == "torch":
        return node.full_name
    if kind is not Call or type(node.args) is not tuple:
        return NOTHING
    name, args = called(node), node.args
    if name == "torch.device":
        return device_text(node)
    if name == "_codecs.encode" and len(args) == 2 and type(args[0]) is str and args[1] == "latin1":
        raw = raw_bytes(node)
        return NOTHING if raw is None else _scalar(raw)
    if name.rpartition(".")[2] in _PATHS and all(type(part) is str for part in args):
        return "/".join(args).replace("//", "/", 1)
    if name in ("builtins.complex", "__builtin__.complex") and all(type(part) is float for part in args):
        return [_scalar(part) for part in args]
    number = numpy_number(node)
    return NOTHING if number is NOTHING else _scalar(number)


def numpy_number(node: Call) -> Any:
    """A numpy scalar as the equal Python number; ``NOTHING`` for anything else."""
    scalar = array_of(node) if called(node) in NUMPY_SCALARS else None
    form, raw = (_STRUCT_CODES.get(scalar.dtype.code), raw_bytes(scalar.data)) if scalar else (None, None)
    if scalar is None or form is None or raw is None or len(raw) != scalar.dtype.itemsize:
        return NOTHING
    return unpack(f"{'>' if scalar.dtype.big_endian else '<'}{form}", raw)[0]


# -- numpy arrays as tensors that any format can store
#
# Arrays of anything but numbers (objects, strings, structured dtypes) and instances of subclasses are left out.

_MAX_SMALL = 64  # bytes: about what the call of an array takes


def _identity(data: Any) -> int:
    """A key that is equal for arrays of the same bytes object, or of the same string that encodes their bytes."""
    return id(data.args[0]) if type(data) is Call and type(data.args) is tuple and data.args else id(data)


def numeric_array(node: Call, lengths: dict[int, int]) -> Array | None:
    """The array that a call builds, if it contains numbers and torch has their dtype.

    Also a numpy scalar that JSON cannot represent (a complex number), as an array without dimensions. ``lengths``
    caches numbers of bytes, by identity: a file can build any number of arrays from the same long string.
    """
    array = array_of(node)
    if array is None or array.dtype.code not in FROM_NUMPY:
        return None
    if called(node) in NUMPY_SCALARS and array.dtype.code[0] != "c":
        return None
    if (identity := _identity(array.data)) not in lengths:
        raw = raw_bytes(array.data)
        lengths[identity] = -1 if raw is None else len(raw)
    return array if lengths[identity] == prod(array.shape) * array.dtype.itemsize else None


class _Search(BoundedWalk):
    """Visits the same nodes as ``Leftovers`` or ``Structure``, which list every array that is not found here."""

    def __init__(self, tensors: set[Path], modules: set[Path], *, into_objects: bool) -> None:
        super().__init__()
        self.arrays: list[tuple[Path, Array]] = []
        self._tensors, self._modules, self._into_objects = tensors, modules, into_objects
        self._by_call: dict[int, Array] = {}
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
            array = self._by_call.get(id(node)) or numeric_array(node, self._lengths)
            if array is not None:
                self._by_call[id(node)] = array  # the same object each time, so that shared arrays stay shared
                self.arrays.append((path, array))
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


def with_arrays(reader: ElementReader, modules: set[Path], *, into_objects: bool) -> tuple[ElementReader, set[Path]]:
    """The source with the numpy arrays in its pickles as tensors, each named after its path; and these paths.

    Arrays in pickled modules are left out, since a state dict does not have them. ``into_objects`` adds those in the
    attributes of objects, and in mappings of other classes.
    """
    checkpoint = reader.checkpoint
    form = checkpoint.traits
    main = [pickle for pickle in checkpoint.pickles if pickle.main]
    named = any(module.partition(".")[0] == "numpy" for pickle in main for module, _ in pickle.globals)
    roots = [((), checkpoint.root)] if form.composed else [(pickle.path, pickle.root) for pickle in main]
    # Where several shards fill one dictionary, a path does not identify the shard.
    if not named or form.program or len({path for path, _ in roots}) != len(roots):
        return reader, set()
    search = _Search({tensor.path for tensor in checkpoint.tensors}, modules, into_objects=into_objects)
    for path, root in roots:
        search.visit(root, path, 0)
    raw: dict[str, Any] = {}  # the bytes of each array, by a file name that no checkpoint has
    storages: dict[tuple[object, ...], Storage] = {}
    added: list[Tensor] = []
    for path, array in search.arrays:
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
        return in_memory(file) if file in raw else reader.open_file(file)

    tensors, every_storage = (*checkpoint.tensors, *added), (*checkpoint.storages, *storages.values())
    with_added = replace(checkpoint, tensors=tensors, storages=every_storage)
    return ElementReader(with_added, open_file, reader.files), {tensor.path for tensor in added}
