"""What a checkpoint holds besides tensors, as plain data for ``DST.leftovers.json``.

``plain_data`` turns what was dropped into numbers, texts, lists and dictionaries. Nothing is made of the file's own
classes: an object becomes its attributes and the name of its class (``$class``), a module its parameters, buffers and
children. What is not plain data is listed, and so is what a hostile file shares or nests too often.
"""

from __future__ import annotations

from base64 import b64encode
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

from transload.converting.selection import Omission, call_items
from transload.formats.tensors import called, device_text, leaf_kind, short, short_key
from transload.nodes import Call, Dict, Global, Set

if TYPE_CHECKING:
    from transload.checkpoint import Key

__all__ = ["KEY_TYPES", "NOTHING", "BoundedWalk", "Dropped", "Leftovers", "plain_data", "tensor_attributes"]

_MAX_DEPTH = 200  # a hostile object may have a million levels, and Python's stack has a thousand
_MAX_REPEATS = 50_000  # a file can share one list under any number of names, for two bytes each
_MAX_TEXT = 64 << 20  # characters of all texts together: a file can share one as often. The same of all that is listed
_MAX_LISTED = 10_000
_MAX_BITS = 4096  # of an integer: Python takes long to write out longer ones
_MAX_SHOWN_BITS = 128  # of an integer key in a path
_MAX_BYTES = 1 << 20

KEY_TYPES = (str, int, float, bool, type(None))
_MODULE_KEYS = {"_parameters": "parameters", "_buffers": "buffers", "_modules": "modules"}
_RECONSTRUCTORS = frozenset({"copy_reg._reconstructor", "copyreg._reconstructor"})
_MAPPINGS = frozenset({"collections.OrderedDict", "collections.defaultdict", "collections.Counter"})
_SEQUENCES = frozenset({"builtins.set", "__builtin__.set", "builtins.frozenset", "__builtin__.frozenset", "torch.Size"})


class _Nothing:
    """Where there is nothing to keep: a tensor, which is kept elsewhere, or what was listed."""


NOTHING = _Nothing()


class Dropped(NamedTuple):
    """Something that is not in the target, and its path."""

    path: tuple[Key, ...]
    node: object


class Leftovers(NamedTuple):
    """Plain data (``None`` if there is none), and what is not plain data.

    ``versions``: a state dict has the versions of its modules with it. ``odd`` are tensors under keys that are neither
    text nor number, so that their names may not tell them apart.
    """

    data: Any
    listed: tuple[Omission, ...]
    versions: bool
    odd: tuple[str, ...] = ()


def plain_data(dropped: tuple[Dropped, ...], tensors: frozenset[tuple[Key, ...]]) -> Leftovers:
    """What was dropped, by its path where there are several; ``tensors`` are the paths of tensors, kept elsewhere."""
    walk = _PlainWalk(tensors)
    data: dict[str, Any] = {}
    for path, node in dropped:
        value = walk.plain(node, path, 0)
        if value is NOTHING or (not path and value in ({}, [])):
            continue
        name = "/".join(map(str, path))
        there = data.get(name)
        if isinstance(there, dict) and isinstance(value, dict) and not there.keys() & value.keys():
            there.update(value)  # one dictionary in several shards
            continue
        number, free = 2, name
        while free in data:
            free, number = f"{name}#{number}", number + 1
        data[free] = value
    listed = walk.listed
    if walk.unlisted:
        listed.append(Omission("…", f"and {walk.unlisted:,} more, too many to name"))
    return Leftovers(data[""] if set(data) == {""} else data or None, tuple(listed), walk.versions, tuple(walk.odd))


class BoundedWalk:
    """A walk through an object that may be hostile: nested without end, in a circle, or shared again and again."""

    def __init__(self) -> None:
        self.ancestors: set[int] = set()
        self._seen: set[int] = set()
        self._repeats = 0

    def is_too_much(self, node: Any, depth: int) -> bool:
        """Whether to stop here. Only what is shared counts as repeated: the size of the file limits everything else."""
        if depth >= _MAX_DEPTH:
            return True
        if id(node) in self._seen:
            self._repeats += 1 + (len(node) if type(node) in (list, tuple) else 0)
        self._seen.add(id(node))
        return self._repeats > _MAX_REPEATS


class _PlainWalk(BoundedWalk):
    def __init__(self, tensors: frozenset[tuple[Key, ...]]) -> None:
        super().__init__()
        self.listed: list[Omission] = []
        self.unlisted = 0
        self.versions = False
        self.odd: list[str] = []
        self._tensors = tensors
        self._text_left = self._names_left = _MAX_TEXT
        self._below_odd = 0

    def plain(self, node: Any, path: tuple[Key, ...], depth: int) -> Any:
        """A node as plain data, or ``NOTHING``."""
        if path in self._tensors:
            if self._below_odd:
                self.odd.append("/".join(map(str, path)))
            attributes = tensor_attributes(node)
            more = self._pairs(attributes, (*path, "$attributes"), depth + 1) if attributes.items else NOTHING
            return {"$attributes": more} if more is not NOTHING else NOTHING
        value = _scalar(node) if self._text_left >= 0 else NOTHING
        if value is not NOTHING:
            self._text_left -= _text_length(value)
            return value if self._text_left >= 0 else self._list(path, node, "with more text than is kept")
        if self.is_too_much(node, depth):
            return self._list(path, node, "nested too deeply or shared too often")
        if id(node) in self.ancestors:
            return self._list(path, node, "contains itself")
        self.ancestors.add(id(node))
        try:
            return self._container(node, path, depth + 1)
        finally:
            self.ancestors.discard(id(node))

    def _list(self, path: tuple[Key, ...], node: object, why: str = "") -> _Nothing:
        name = "/".join(map(str, path))
        self._names_left -= len(name)
        if len(self.listed) < _MAX_LISTED and self._names_left >= 0:
            text = f"{leaf_kind(node)}: {short(node)}"[:200]
            self.listed.append(Omission(name, f"{text}, {why}" if why else text))
        else:
            self.unlisted += 1
        return NOTHING

    def _container(self, node: Any, path: tuple[Key, ...], depth: int) -> Any:
        if type(node) is Dict:
            return self._pairs(node, path, depth)
        name = called(node) if type(node) is Call else ""
        if name in _MAPPINGS:
            data = self._pairs(Dict(call_items(node)), path, depth)
            state = node.states[-1] if node.states else None
            if type(state) is Dict and state.items[::2] == ["_metadata"]:
                self.versions = True  # state_dict() has made it
            elif state is not None and (more := self.plain(state, (*path, "$attributes"), depth)) is not NOTHING:
                return {**(data if data is not NOTHING else {}), "$attributes": more}
            return data
        members = node.items if type(node) is Set else node
        if name in _SEQUENCES and type(node.args) is tuple and len(node.args) == 1 and not node.states:
            members = node.args[0]
        elif type(node) is Call:
            return self._object(node, path, depth)
        return self._members(members, path, depth) if type(members) in (list, tuple) else self._list(path, node)

    def _pairs(self, items: Dict, path: tuple[Key, ...], depth: int) -> Any:
        """A dictionary. Its tensors are kept elsewhere: with nothing else in it, it is nothing."""
        data: dict[str, Any] = {}
        pairs = items.pairs()
        for key, node in pairs:
            # The name of a tensor tells its key only if that is a text or a number, and not a huge one.
            odd = type(key) not in KEY_TYPES or (type(key) is int and key.bit_length() > _MAX_SHOWN_BITS)
            step = short_key(key)
            self._below_odd += odd
            value = self.plain(node, (*path, step), depth)
            self._below_odd -= odd
            if value is NOTHING:
                continue
            if type(key) not in KEY_TYPES or (type(key) is int and key.bit_length() > _MAX_BITS):
                self._list((*path, step), value, "under a key that is neither a string nor a number")
                continue
            name = str(key)
            if name in data:  # 1 and "1" have the same text: the first is listed
                self._list((*path, name), data[name], "under a key that is written like another one")
            data[name] = value
            self._text_left -= len(name)
        return data if data or not pairs else NOTHING

    def _members(self, members: Any, path: tuple[Key, ...], depth: int) -> Any:
        data = [self.plain(value, (*path, index), depth) for index, value in enumerate(members)]
        if data and all(each is NOTHING for each in data):
            return NOTHING
        return [None if each is NOTHING else each for each in data]

    def _object(self, node: Call, path: tuple[Key, ...], depth: int) -> Any:
        """An object that is nothing but its attributes; of a module, also its parameters, buffers and children."""
        state = _object_state(node)
        if state is None:
            return self._list(path, node)
        name = called(node)
        if name in _RECONSTRUCTORS and type(node.args) is tuple and node.args and type(node.args[0]) is Global:
            name = node.args[0].full_name
        tables: dict[str, Any] = {key: state.get(key) for key in _MODULE_KEYS}
        if any(table is None for table in tables.values()):
            data = self._pairs(state, path, depth)
            if data is NOTHING:
                return NOTHING if state.items else {"$class": name}
            return {"$class": name, **data}
        own = Dict([part for pair in state.pairs() if pair[0] not in _MODULE_KEYS for part in pair])
        data = self._pairs(own, path, depth)
        kept = {} if data is NOTHING else {key: value for key, value in data.items() if value or not _is_hook(key)}
        for where, table in tables.items():
            inside = Dict(call_items(table)) if type(table) is Call else table
            if type(inside) is Dict and where != "_modules":  # tensors are kept elsewhere, what is set on them is not
                with_more = [pair for pair in inside.pairs() if tensor_attributes(pair[1]).items]
                inside = Dict([part for pair in with_more for part in pair])
            if type(inside) is Dict and inside.items:
                data = self._pairs(inside, (*path, where), depth)
                plain_name = _MODULE_KEYS[where]
                kept[plain_name if plain_name not in kept else where] = {} if data is NOTHING else data
        return {"$class": name, **kept}


def _is_hook(key: str) -> bool:
    """Whether every module has an attribute of that name, nearly always an empty table."""
    return "_hook" in key or key == "_non_persistent_buffers_set"


def _object_state(node: Call) -> Dict | None:
    """The attributes of an object that its class makes without arguments; ``None`` for anything else."""
    if called(node) in _RECONSTRUCTORS:  # of a class, its base, and the value of that: None for object
        bare = type(node.args) is tuple and len(node.args) == 3 and node.args[2] is None
    else:
        bare = node.args == () and (node.kwargs is None or (type(node.kwargs) is Dict and not node.kwargs.items))
    plain = node.kind in ("newobj", "reduce", "obj", "inst", "newobj_ex") and not node.items and not node.appended
    if not bare or not plain or len(node.states or ()) > 1:
        return None
    if not node.states:
        return Dict([]) if node.kind == "newobj" else None
    state = node.states[-1]
    if type(state) is tuple and len(state) == 2 and type(state[0]) is Dict and type(state[1]) is Dict:
        return Dict([*state[0].items, *state[1].items])
    return state if type(state) is Dict else None


_WITH_STATE = ("torch._tensor._rebuild_from_type_v2", "torch._utils._rebuild_parameter_with_state")


def tensor_attributes(node: Any) -> Dict:
    """What somebody has set on a tensor: plain attributes, which ``torch.save`` keeps with it."""
    args = node.args if type(node) is Call and called(node) in _WITH_STATE else ()
    state = args[3] if type(args) is tuple and len(args) == 4 else None
    items: list[Any] = []
    for key, value in state.pairs() if type(state) is Dict else ():
        tensor = type(value) is Call and called(value).startswith(("torch._utils._rebuild", "torch._tensor._rebuild"))
        if not tensor:
            items += [key, value]
    return Dict(items)


# -- values without parts

_PATHS = frozenset({"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "TorchVersion"})
_NUMPY_SCALARS = frozenset({"numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"})
_STRUCT_CODES = {"f8": "d", "f4": "f", "f2": "e", "i8": "q", "i4": "i", "i2": "h", "i1": "b", "b1": "?"}
_STRUCT_CODES |= {"u8": "Q", "u4": "I", "u2": "H", "u1": "B"}


def _text_length(value: Any) -> int:
    """About how many characters a value without parts takes."""
    if type(value) is int:
        return value.bit_length() // 3
    return len(value["$bytes"]) if type(value) is dict else len(value) if type(value) is str else 0


def _scalar(node: Any) -> Any:
    """A value without parts as JSON has it: a number, text, bytes, a device, a path; else ``NOTHING``."""
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
    return _called_scalar(node, node.args) if kind is Call and type(node.args) is tuple else NOTHING


def _called_scalar(node: Call, args: tuple[Any, ...]) -> Any:
    """A value that is pickled as a call: a device, a path, bytes, a complex number, a number of numpy."""
    name = called(node)
    if name == "torch.device":
        return device_text(node)
    if name == "_codecs.encode" and len(args) == 2 and type(args[0]) is str and args[1] == "latin1":
        raw = _bytes(args[0])
        return NOTHING if raw is None else _scalar(raw)
    if name.rpartition(".")[2] in _PATHS and all(type(part) is str for part in args):
        return "/".join(args).replace("//", "/", 1)
    if name in ("builtins.complex", "__builtin__.complex") and all(type(part) is float for part in args):
        return [_scalar(part) for part in args]
    return _numpy_scalar(*args) if name in _NUMPY_SCALARS and len(args) == 2 else NOTHING


def _numpy_scalar(dtype: Any, value: Any) -> Any:
    from struct import calcsize, unpack

    raw = _bytes(value)
    code = dtype.args[0] if type(dtype) is Call and type(dtype.args) is tuple and dtype.args else None
    form = _STRUCT_CODES.get(code) if type(code) is str else None
    if form is None or raw is None or len(raw) != calcsize(f"<{form}"):
        return NOTHING
    state = dtype.states[-1] if dtype.states else None
    big_endian = type(state) is tuple and state[1:2] == (">",)
    return _scalar(unpack(f">{form}" if big_endian else f"<{form}", raw)[0])


def _bytes(node: Any) -> bytes | None:
    """Bytes, also where they are written as a Latin-1 text; ``None`` for anything else."""
    if type(node) is Call and called(node) == "_codecs.encode" and type(node.args) is tuple and node.args:
        node = node.args[0]
    if type(node) is str:
        try:
            return node.encode("latin-1")
        except UnicodeEncodeError:
            return None
    return node if type(node) is bytes else None
