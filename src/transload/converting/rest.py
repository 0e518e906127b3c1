"""What a target cannot hold, as plain data for a JSON file: numbers, texts, lists, dictionaries, attributes of objects.

Nothing is made of the file's own classes: an object becomes its attributes and the name of its class (``$class``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from transload.converting.scalars import MAX_BITS, NOTHING, Nothing, attributes, simple
from transload.converting.selection import Left
from transload.formats.tensors import called, leaf_kind, short, short_key
from transload.nodes import Call, Dict, Global, Set

if TYPE_CHECKING:
    from transload.checkpoint import Key
    from transload.converting.structure import Dropped

__all__ = ["Rest", "rest_of"]

MAX_DEPTH = 200
MAX_REPEATS = 50_000
"""Values that are looked at again: a file can share one list under any number of names, for two bytes each."""

MAX_TEXT = 64 << 20
"""Characters of all texts together: a file can share one of a megabyte as often. The same of all that is listed."""

_MAX_LISTED = 10_000
_MAX_SHOWN = 128  # bits of an integer that read.values.scalar shows
_KEYS = (str, int, float, bool, type(None))
_MODULE_KEYS = {"_parameters": "parameters", "_buffers": "buffers", "_modules": "modules"}
_RECONSTRUCTORS = frozenset({"copy_reg._reconstructor", "copyreg._reconstructor"})
_MAPPINGS = frozenset({"collections.OrderedDict", "collections.defaultdict", "collections.Counter"})
_SEQUENCES = frozenset({"builtins.set", "__builtin__.set", "builtins.frozenset", "__builtin__.frozenset", "torch.Size"})


class Rest(NamedTuple):
    """Plain data (``None`` if there is none), and what is none. ``versions``: those of modules are in a state dict.

    ``odd`` are tensors under keys that are neither text nor number, which no name can tell for sure.
    """

    data: Any
    listed: tuple[Left, ...]
    versions: bool
    odd: tuple[str, ...] = ()


def rest_of(dropped: tuple[Dropped, ...], tensors: frozenset[tuple[Key, ...]]) -> Rest:
    """What was dropped, by its path where there are several; ``tensors`` are the paths of tensors, kept elsewhere."""
    walk = _Walk(tensors)
    found: dict[str, Any] = {}
    for path, node in dropped:
        made = walk.plain(node, path, 0)
        if made is not NOTHING and (path or made not in ({}, [])):
            _enter(found, "/".join(map(str, path)), made)
    more = [Left("…", f"and {walk.more:,} more, which are too many to be named")] if walk.more else []
    data = found[""] if set(found) == {""} else found or None
    return Rest(data, (*walk.listed, *more), walk.versions, tuple(walk.odd))


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
        self.text = self.told = MAX_TEXT
        self.more = 0
        self.versions = False
        self.below_odd = 0
        self.odd: list[str] = []

    def plain(self, node: Any, path: tuple[Key, ...], depth: int) -> Any:
        """A node as plain data."""
        if path in self.tensors:
            if self.below_odd:
                self.odd.append("/".join(map(str, path)))
            found = attributes(node)
            more = self._pairs(found, (*path, "$attributes"), depth + 1) if found.items else NOTHING
            return {"$attributes": more} if more is not NOTHING else NOTHING
        value = simple(node) if self.text >= 0 else NOTHING
        if value is not NOTHING:
            self.text -= _length(value)
            return value if self.text >= 0 else self._list(path, node, "with more text than is kept")
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

    def _list(self, path: tuple[Key, ...], node: object, why: str = "") -> Nothing:
        name = "/".join(map(str, path))
        self.told -= len(name)
        if len(self.listed) < _MAX_LISTED and self.told >= 0:
            text = f"{leaf_kind(node)}: {short(node)}"[:200]
            self.listed.append(Left(name, f"{text}, {why}" if why else text))
        else:
            self.more += 1
        return NOTHING

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
        elif state is not None and (more := self.plain(state, (*path, "$attributes"), depth)) is not NOTHING:
            return {**(made if made is not NOTHING else {}), "$attributes": more}
        return made

    def _pairs(self, held: Dict, path: tuple[Key, ...], depth: int) -> Any:
        """A dictionary; what it holds of tensors is kept elsewhere, so with nothing else in it, it is nothing."""
        made: dict[str, Any] = {}
        pairs = held.pairs()
        for key, value in pairs:
            odd = not _is_exact(key)
            self.below_odd += odd
            plain = self.plain(value, (*path, short_key(key)), depth)
            self.below_odd -= odd
            if plain is not NOTHING:
                self._enter(made, key, plain, path)
        return made if made or not pairs else NOTHING

    def _enter(self, made: dict[str, Any], key: Any, plain: object, path: tuple[Key, ...]) -> None:
        """Put a value under the text of its key. ``1`` and ``"1"`` have the same: then the first is listed."""
        if type(key) not in _KEYS or (type(key) is int and key.bit_length() > MAX_BITS):
            self._list((*path, short_key(key)), plain, "under a key that is neither text nor number")
            return
        name = str(key)
        if name in made:
            self._list((*path, name), made[name], "under a key that another one is written as")
        made[name] = plain
        self.text -= len(name)

    def _members(self, members: Any, path: tuple[Key, ...], depth: int) -> Any:
        made = [self.plain(value, (*path, index), depth) for index, value in enumerate(members)]
        if made and all(each is NOTHING for each in made):
            return NOTHING
        return [None if each is NOTHING else each for each in made]

    # -- objects

    def _object(self, node: Call, path: tuple[Key, ...], depth: int) -> Any:
        """An object that is nothing but its attributes."""
        state = _state(node)
        if state is None:
            return self._list(path, node)
        parts = {key: state.get(key) for key in _MODULE_KEYS}
        made: dict[str, Any] = {"$class": _class(node)}
        if all(part is not None for part in parts.values()):
            made.update(self._module(state, parts, path, depth))
            return made
        found = self._pairs(state, path, depth)
        return {**made, **found} if found is not NOTHING else NOTHING if state.items else made

    def _module(self, state: Dict, parts: dict[str, Any], path: tuple[Key, ...], depth: int) -> dict[str, Any]:
        """The attributes of a module, without the empty tables of hooks that every module has; and its children."""
        own = Dict([part for pair in state.pairs() if pair[0] not in _MODULE_KEYS for part in pair])
        found = self._pairs(own, path, depth)
        made = {} if found is NOTHING else found
        kept = {key: value for key, value in made.items() if value or not _is_hook(key)}
        for where, name in _MODULE_KEYS.items():
            held = parts[where]
            inside = Dict([*_given(held), *(held.items or [])]) if type(held) is Call else held
            if type(inside) is Dict and where != "_modules":
                inside = Dict([part for pair in inside.pairs() if attributes(pair[1]).items for part in pair])
            if type(inside) is Dict and inside.items:
                plain = self._pairs(inside, (*path, where), depth)
                kept[name if name not in kept else where] = {} if plain is NOTHING else plain
        return kept


def _is_hook(key: str) -> bool:
    """Whether every module has an attribute of that name, which is nearly always empty."""
    return "_hook" in key or key == "_non_persistent_buffers_set"


def _is_exact(key: object) -> bool:
    """Whether the name of a tensor tells its key."""
    return type(key) in _KEYS and not (type(key) is int and key.bit_length() > _MAX_SHOWN)


def _length(value: Any) -> int:
    """About how many characters a simple value takes."""
    if type(value) is int:
        return value.bit_length() // 3
    return len(value["$bytes"]) if type(value) is dict else len(value) if type(value) is str else 0


def _given(node: Call) -> Iterator[Any]:
    """Keys and values that a mapping was made with: those of a counter, or in pairs, as Python 2 writes it."""
    given = node.args[0] if type(node.args) is tuple and node.args else None
    if type(given) is Dict:
        yield from given.items
    elif type(given) is list:
        for pair in given:
            if type(pair) in (list, tuple) and len(pair) == 2:
                yield from pair


def _state(node: Call) -> Dict | None:
    """The attributes of an object that its class made without arguments; ``None`` for anything else."""
    if called(node) in _RECONSTRUCTORS:  # of a class, what it is built on, and the value of that: nothing for object
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


def _class(node: Call) -> str:
    first = node.args[0] if type(node.args) is tuple and node.args else None
    if called(node) in _RECONSTRUCTORS and type(first) is Global:
        return first.full_name
    return called(node)
