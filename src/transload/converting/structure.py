"""The object that a torch zip gets: the source's own dictionaries and lists, with what no plain file may hold left out.

A pickled module becomes its state dict. What is dropped is handed back, so that it can be told or kept elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from transload.converting.scalars import attributes
from transload.dtypes import ITEMSIZE
from transload.formats.tensors import called, short_key
from transload.nodes import Big, Call, Dict, Global, Set

if TYPE_CHECKING:
    from transload.checkpoint import Key
    from transload.converting.selection import Named

__all__ = ["Dropped", "Slot", "Structure", "flat", "structured"]

MAX_DEPTH = 200
"""Levels of an object that are kept: a hostile one may have a million, and Python's stack a thousand."""

MAX_REPEATS = 50_000
"""Values that are looked at again: a file can share one list under any number of names, for two bytes each."""

_ATOMS = frozenset({type(None), bool, int, float, str, bytes, bytearray})
_NOTHING = object()
# Calls that weights_only makes of plain arguments.
_PLAIN = frozenset({"torch.Size", "torch.device", "_codecs.encode", "builtins.set", "__builtin__.set"})
_PLAIN |= {"builtins.complex", "__builtin__.complex", "builtins.bytearray", "__builtin__.bytearray"}
_ORDERED = "collections.OrderedDict"


class Slot:
    """The place of a tensor in the object."""

    __slots__ = ("call", "named", "state")

    def __init__(self, named: Named, *, state: bool, call: Call | None = None) -> None:
        self.named = named
        self.state = state  # of a module's state dict, where parameters are plain tensors
        self.call = call  # of one that is taken over as it is


class Dropped(NamedTuple):
    """Something that is not in the object, and where it was."""

    path: tuple[Key, ...]
    node: object


class Structure(NamedTuple):
    """The object, the tensors in it in the order of a reader, and what was dropped."""

    root: object
    slots: tuple[Slot, ...]
    dropped: tuple[Dropped, ...]


def flat(named: tuple[Named, ...], calls: dict[tuple[Key, ...], Call]) -> Structure:
    """A dictionary of tensors by their names; ``calls`` are those of tensors that are taken over as they are."""
    slots = [Slot(each, state=True, call=calls.get(each.tensor.path)) for each in named]
    return Structure(Dict([part for slot in slots for part in (slot.named.name, slot)]), tuple(slots), ())


def structured(  # noqa: PLR0913 - a tree, and what is known of it
    root: object,
    named: tuple[Named, ...],
    *,
    known: frozenset[tuple[Key, ...]],
    modules: set[tuple[Key, ...]],
    start: tuple[Key, ...] = (),
    calls: dict[tuple[Key, ...], Call] | None = None,
) -> Structure:
    """The object below ``root``, which is at the path ``start``; ``known`` are the paths of all tensors there are.

    ``calls`` are those of tensors that are taken over as they are.
    """
    walk = _Walk({each.tensor.path: each for each in named}, known, modules)
    walk.calls = calls or {}
    made = walk.keep(root, start, 0)
    return Structure(Dict([]) if made is _NOTHING else made, tuple(walk.slots), tuple(walk.dropped))


class _Walk:
    def __init__(
        self, named: dict[tuple[Key, ...], Named], known: frozenset[tuple[Key, ...]], modules: set[tuple[Key, ...]]
    ) -> None:
        self.named, self.known, self.modules = named, known, modules
        self.slots: list[Slot] = []
        self.dropped: list[Dropped] = []
        self.on_path: set[int] = set()
        self.seen: set[int] = set()
        self.repeats = 0
        self.calls: dict[tuple[Key, ...], Call] = {}

    def keep(self, node: Any, path: tuple[Key, ...], depth: int) -> Any:
        """A node as the target has it, or nothing."""
        if path in self.known:
            if (set_on_it := attributes(node)).items:
                self.dropped.append(Dropped((*path, "$attributes"), set_on_it))
            return self._slot(path)
        if path in self.modules:
            self.dropped.append(Dropped(path, node))
            return self._state_dict(path)
        if type(node) in _ATOMS or _is_plain(node):
            return node
        inner = _container(node)
        if inner is None or depth >= MAX_DEPTH or id(node) in self.on_path or self._is_too_much(node):
            self.dropped.append(Dropped(path, node))
            return _NOTHING
        self.on_path.add(id(node))
        try:
            return self._filled(node, inner, path, depth + 1)
        finally:
            self.on_path.discard(id(node))

    def _is_too_much(self, node: Any) -> bool:
        """Whether what is shared was looked at too often; what is not is paid for by the size of the file."""
        if id(node) in self.seen:
            self.repeats += 1 + (len(node) if type(node) in (list, tuple) else 0)
        self.seen.add(id(node))
        return self.repeats > MAX_REPEATS

    def _slot(self, path: tuple[Key, ...], *, state: bool = False) -> Any:
        if path not in self.named:
            return _NOTHING
        self.slots.append(Slot(self.named[path], state=state, call=self.calls.get(path)))
        return self.slots[-1]

    def _state_dict(self, path: tuple[Key, ...]) -> Call:
        made = Call(Global("collections", "OrderedDict", 0), (), "reduce", 0)
        made.items = []
        for inside, each in self.named.items():
            if inside[: len(path)] == path:
                name = each.name.rpartition("/")[2] if path else each.name
                made.items += [name, self._slot(inside, state=True)]
        return made

    def _filled(self, node: Any, inner: Any, path: tuple[Key, ...], depth: int) -> Any:
        if type(inner) is Dict:
            items: list[object] = []
            for key, value in _last(inner):
                made = self.keep(value, (*path, short_key(key)), depth) if _is_key(key) else _NOTHING
                if not _is_key(key):
                    self.dropped.append(Dropped((*path, short_key(key)), value))
                if made is not _NOTHING:
                    items += [_renamed(key, made), made]
            made_dict = _like(node, items)
            if type(made_dict) is Call and node.states:  # state_dict() keeps the versions of its modules there
                state = self.keep(node.states[-1], (*path, "$attributes"), depth)
                made_dict.states = [state] if state is not _NOTHING else None
            return made_dict
        made_list = [self.keep(value, (*path, index), depth) for index, value in enumerate(inner)]
        kept = [None if each is _NOTHING else each for each in made_list]
        return tuple(kept) if type(node) is tuple else kept


def _renamed(key: object, made: object) -> object:
    """The key of a tensor as the tensor is called now: without the prefix that was to be stripped."""
    if type(made) is not Slot or type(key) is not str or not made.named.tensor.name.endswith(key):
        return key
    lead = len(made.named.tensor.name) - len(key)
    name = made.named.name
    return name if not lead else name.rpartition("/")[2] if "/" not in key else key


def _like(node: Any, items: list[object]) -> Dict | Call:
    if type(node) is Dict:
        return Dict(items)
    made = Call(node.callee, (), "reduce", 0)
    made.items = items
    return made


def _container(node: Any) -> Any:
    """What a container holds: a dictionary, or a sequence; ``None`` for anything else."""
    if type(node) in (Dict, list, tuple):
        return node
    if type(node) is Call and called(node) == _ORDERED and not node.appended:
        given = node.args[0] if type(node.args) is tuple and node.args and type(node.args[0]) is list else []
        pairs = [pair for pair in given if type(pair) in (list, tuple) and len(pair) == 2]
        return Dict([*(part for pair in pairs for part in pair), *(node.items or [])])
    return None


def _last(held: Dict) -> Iterator[tuple[Any, Any]]:
    """Keys and values; of a text key that stands twice the last, as in a dictionary."""
    pairs = held.pairs()
    last = {key: index for index, (key, _) in enumerate(pairs) if type(key) is str}
    for index, (key, value) in enumerate(pairs):
        if type(key) is not str or last[key] == index:
            yield key, value


def _is_key(key: object) -> bool:
    return type(key) in (str, int, float, bool, type(None))


def _is_plain(node: Any) -> bool:
    """Whether a node is a value that every loader makes without being asked to trust anybody."""
    if type(node) is Global:
        return node.module == "torch" and node.name in ITEMSIZE
    if type(node) is not Call or called(node) not in _PLAIN or node.states or node.items or node.appended:
        return False
    parts: list[Any] = list(node.args) if type(node.args) is tuple else [Big(0)]
    for part in parts:
        if type(part) in (tuple, list) and len(parts) < _MAX_PARTS:
            parts += part
        elif type(part) not in _ATOMS and not (type(part) is Call and part is not node and _is_plain_bytes(part)):
            return False
    return not any(type(part) is Set for part in parts)


_MAX_PARTS = 10_000


def _is_plain_bytes(node: Call) -> bool:
    args = node.args
    return called(node) == "_codecs.encode" and type(args) is tuple and all(type(part) is str for part in args)
