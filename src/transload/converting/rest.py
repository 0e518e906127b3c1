"""What a target cannot hold, as plain data for a JSON file: numbers, texts, lists, dictionaries, attributes of objects.

Nothing is made of the file's own classes: an object becomes its attributes and the name of its class (``$class``).
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

from transload.converting.selection import Left
from transload.read.nodes import Call, Dict, Global, Set
from transload.read.values import called, device_text, leaf_kind, short, short_key

if TYPE_CHECKING:
    from transload.checkpoint import Key
    from transload.converting.structure import Dropped

__all__ = ["Rest", "rest_of"]

MAX_DEPTH = 200
MAX_REPEATS = 50_000
"""Values that are looked at again: a file can share one list under any number of names, for two bytes each."""

MAX_TEXT = 64 << 20
"""Characters of all texts together: a file can share one of a megabyte as often."""

_MAX_BYTES = 1 << 20
_MAX_BITS = 4096
_MAX_LISTED = 10_000
_MODULE_KEYS = ("_parameters", "_buffers", "_modules")
_RECONSTRUCTORS = frozenset({"copy_reg._reconstructor", "copyreg._reconstructor"})
_MAPPINGS = frozenset({"collections.OrderedDict", "collections.defaultdict", "collections.Counter"})
_SEQUENCES = frozenset({"builtins.set", "__builtin__.set", "builtins.frozenset", "__builtin__.frozenset", "torch.Size"})
_TEXTS = frozenset({"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "TorchVersion"})
_SCALARS = frozenset({"numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"})


class _Nothing:
    """Where there is nothing to keep: a tensor, which is kept elsewhere, or what was listed."""


_NOTHING = _Nothing()


class Rest(NamedTuple):
    """Plain data (``None`` if there is none), and what is none. ``versions``: those of modules are in a state dict."""

    data: Any
    listed: tuple[Left, ...]
    versions: bool


def rest_of(dropped: tuple[Dropped, ...], tensors: frozenset[tuple[Key, ...]]) -> Rest:
    """What was dropped, by its path where there are several; ``tensors`` are the paths of tensors, kept elsewhere."""
    walk = _Walk(tensors)
    found: dict[str, Any] = {}
    for path, node in dropped:
        made = walk.plain(node, path, 0)
        if made is not _NOTHING and made not in ({}, []):
            _enter(found, "/".join(map(str, path)), made)
    if set(found) == {""}:
        return Rest(found[""], tuple(walk.listed), walk.versions)
    return Rest(found or None, tuple(walk.listed), walk.versions)


def _enter(found: dict[str, Any], name: str, made: Any) -> None:
    """Enter what was at a path. Dictionaries of one path, as shards have them, become one where they do not meet."""
    there = found.get(name)
    if isinstance(there, dict) and isinstance(made, dict) and not there.keys() & made.keys():
        there.update(made)
        return
    number, free = 2, name
    while free in found:
        free, number = f"{name}#{number}", number + 1
    found[free] = made


class _Walk:
    def __init__(self, tensors: frozenset[tuple[Key, ...]]) -> None:
        self.tensors = tensors
        self.listed: list[Left] = []
        self.on_path: set[int] = set()
        self.seen: set[int] = set()
        self.repeats = 0
        self.text = MAX_TEXT
        self.versions = False

    def plain(self, node: Any, path: tuple[Key, ...], depth: int) -> Any:
        """A node as plain data."""
        if path in self.tensors:
            return _NOTHING
        if type(node) in (str, bytes, bytearray):
            self.text -= len(node)
        simple = _simple(node) if self.text >= 0 else _NOTHING
        if simple is not _NOTHING:
            return simple
        if depth >= MAX_DEPTH or self._is_too_much(node):
            return self._list(path, node, "nested too deep, or shared too often")
        if id(node) in self.on_path:
            return self._list(path, node, "holds itself")
        self.on_path.add(id(node))
        try:
            return self._container(node, path, depth + 1)
        finally:
            self.on_path.discard(id(node))

    def _is_too_much(self, node: object) -> bool:
        """Whether what is shared was looked at too often; what is not is paid for by the size of the file."""
        if id(node) in self.seen:
            self.repeats += 1 + (len(node) if type(node) in (list, tuple) else 0)  # type: ignore[arg-type]
        self.seen.add(id(node))
        return self.repeats > MAX_REPEATS

    def _list(self, path: tuple[Key, ...], node: object, why: str = "") -> _Nothing:
        if len(self.listed) < _MAX_LISTED:
            text = f"{leaf_kind(node)}: {short(node)}"[:200]
            self.listed.append(Left("/".join(map(str, path)), f"{text}, {why}" if why else text))
        return _NOTHING

    def _container(self, node: Any, path: tuple[Key, ...], depth: int) -> Any:
        if type(node) is Dict:
            return self._pairs(node, path, depth)
        if type(node) in (list, tuple, Set):
            return self._members(node.items if type(node) is Set else node, path, depth)
        if type(node) is not Call:
            return self._list(path, node)
        name = called(node)
        if name in _MAPPINGS:
            return self._mapping(node, path, depth)
        if name in _SEQUENCES and type(node.args) is tuple and len(node.args) == 1 and not node.states:
            inside = node.args[0]
            return self._members(inside, path, depth) if type(inside) in (list, tuple) else self._list(path, node)
        return self._object(node, path, depth)

    def _mapping(self, node: Call, path: tuple[Key, ...], depth: int) -> Any:
        """A dictionary of another class; one that ``state_dict()`` made has the versions of its modules with it."""
        made = self._pairs(Dict([*_given(node), *(node.items or [])]), path, depth)
        state = node.states[-1] if node.states else None
        if type(state) is Dict and state.items[::2] == ["_metadata"]:
            self.versions = True
        elif state is not None and (more := self.plain(state, (*path, "$attributes"), depth)) is not _NOTHING:
            return {**(made if made is not _NOTHING else {}), "$attributes": more}
        return made

    def _pairs(self, held: Dict, path: tuple[Key, ...], depth: int) -> Any:
        """A dictionary; what it holds of tensors is kept elsewhere, so with nothing else in it, it is nothing."""
        made: dict[str, Any] = {}
        pairs = held.pairs()
        for key, value in pairs:
            if type(key) not in (str, int, float, bool, type(None)):
                self._list((*path, short_key(key)), value, "under a key that is neither text nor number")
                continue
            plain = self.plain(value, (*path, short_key(key)), depth)
            if plain is not _NOTHING:
                self._enter(made, key, plain, path)
        return made if made or not pairs else _NOTHING

    def _enter(self, made: dict[str, Any], key: Any, plain: object, path: tuple[Key, ...]) -> None:
        """Put a value under the text of its key. ``1`` and ``"1"`` have the same: then the first is listed."""
        name = _key_text(key)
        if name in made:
            self._list((*path, name), made[name], "under a key that another one is written as")
        made[name] = plain
        self.text -= len(name)

    def _members(self, members: Any, path: tuple[Key, ...], depth: int) -> Any:
        made = [self.plain(value, (*path, index), depth) for index, value in enumerate(members)]
        if made and all(each is _NOTHING for each in made):
            return _NOTHING
        return [None if each is _NOTHING else each for each in made]

    # -- objects

    def _object(self, node: Call, path: tuple[Key, ...], depth: int) -> Any:
        """An object that is nothing but its attributes."""
        state = _state(node)
        if state is None:
            return self._list(path, node)
        parts = {key: state.get(key) for key in _MODULE_KEYS}
        made: dict[str, Any] = {"$class": _class(node)}
        if all(part is not None for part in parts.values()):
            made.update(self._module(state, parts["_modules"], path, depth))
            return made
        found = self._pairs(state, path, depth)
        return {**made, **found} if found is not _NOTHING else _NOTHING if state.items else made

    def _module(self, state: Dict, modules: object, path: tuple[Key, ...], depth: int) -> dict[str, Any]:
        """The attributes of a module, without the empty tables of hooks that every module has; and its children."""
        own = [(key, value) for key, value in state.pairs() if type(key) is str and key not in _MODULE_KEYS]
        made = {key: self.plain(value, (*path, key), depth) for key, value in own}
        kept = {key: value for key, value in made.items() if value is not _NOTHING and (value or key[:1] != "_")}
        children = Dict([*_given(modules), *(modules.items or [])]) if type(modules) is Call else modules
        if type(children) is Dict and children.items:
            inside: dict[str, Any] = {}
            for key, child in children.pairs():
                plain = self.plain(child, (*path, "_modules", short_key(key)), depth)
                if plain is not _NOTHING:
                    inside[str(key)] = plain
            kept["modules"] = inside
        return kept


def _key_text(key: Any) -> str:
    """A key as JSON has it; of an integer too long for Python to write out, a word on it."""
    return str(short_key(key)) if type(key) is int and key.bit_length() > _MAX_BITS else str(key)


def _given(node: Call) -> Iterator[Any]:
    """Keys and values that a mapping was made with, as Python 2 writes it."""
    if type(node.args) is tuple and node.args and type(node.args[0]) is list:
        for pair in node.args[0]:
            if type(pair) in (list, tuple) and len(pair) == 2:
                yield from pair


def _state(node: Call) -> Dict | None:
    """The attributes of an object that its class made without arguments; ``None`` for anything else."""
    bare = node.args == () or called(node) in _RECONSTRUCTORS
    plain = node.kind in ("newobj", "reduce", "obj", "inst", "newobj_ex") and not node.items and not node.appended
    if not bare or not plain:
        return None
    if not node.states:
        return Dict([]) if node.kind == "newobj" else None
    state = node.states[-1]
    if type(state) is tuple and len(state) == 2 and type(state[0]) is Dict and type(state[1]) is Dict:
        return Dict([*state[0].items, *state[1].items])
    return state if type(state) is Dict else None


def _class(node: Call) -> str:
    first = node.args[0] if type(node.args) is tuple and node.args else None
    if called(node) in _RECONSTRUCTORS and type(first) is Global:
        return first.full_name
    return called(node)


def _simple(node: Any) -> Any:
    """A value without parts."""
    kind = type(node)
    if node is None or kind in (bool, str):
        return node
    if kind is int:
        return node if node.bit_length() <= _MAX_BITS else _NOTHING
    if kind is float:
        return node if isfinite(node) else str(node)
    if kind in (bytes, bytearray):
        return {"$bytes": b64encode(node).decode()} if len(node) <= _MAX_BYTES else _NOTHING
    if kind is Global and node.module == "torch":
        return node.full_name
    return _simple_call(node) if kind is Call else _NOTHING


def _simple_call(node: Call) -> Any:
    """A value that is written as a call: a device, a path, bytes, a number of numpy."""
    name, args = called(node), node.args
    if type(args) is not tuple:
        return _NOTHING
    if name == "torch.device":
        return device_text(node)
    if name == "_codecs.encode" and len(args) == 2 and type(args[0]) is str and args[1] == "latin1":
        return _NOTHING if (raw := _latin(args[0])) is None else _simple(raw)
    if name.rpartition(".")[2] in _TEXTS and all(type(part) is str for part in args):
        return "/".join(args).replace("//", "/", 1)
    if name in ("builtins.complex", "__builtin__.complex") and all(type(part) is float for part in args):
        return [_simple(part) for part in args]
    return _number(args) if name in _SCALARS and len(args) == 2 else _NOTHING


_FORMS = {"f8": "d", "f4": "f", "f2": "e", "i8": "q", "i4": "i", "i2": "h", "i1": "b", "b1": "?"}
_FORMS |= {"u8": "Q", "u4": "I", "u2": "H", "u1": "B"}


def _number(args: tuple[Any, ...]) -> Any:
    """A scalar of numpy: a dtype and its bytes."""
    from struct import calcsize, unpack

    dtype, held = args
    code = dtype.args[0] if type(dtype) is Call and type(dtype.args) is tuple and dtype.args else None
    form = _FORMS.get(code) if type(code) is str else None
    raw = _bytes(held)
    if form is None or raw is None or len(raw) != calcsize(f"<{form}"):
        return _NOTHING
    state = dtype.states[-1] if dtype.states else None
    big = type(state) is tuple and state[1:2] == (">",)
    return _simple(unpack(f">{form}" if big else f"<{form}", raw)[0])


def _bytes(node: Any) -> bytes | None:
    if type(node) is Call and called(node) == "_codecs.encode" and type(node.args) is tuple and node.args:
        node = node.args[0]
    if type(node) is str:
        return _latin(node)
    return node if type(node) is bytes else None


def _latin(text: str) -> bytes | None:
    """Bytes that are written as a text; ``None`` if it holds what is no byte."""
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        return None
