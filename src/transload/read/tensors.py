"""The tensors and values in a pickle's graph, each with its path and its name.

The walk goes through what the file holds as a person would: dictionaries, lists, objects. A pickled module is walked
in the order of its ``state_dict()``, and its tensors get the names they have there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from transload.checkpoint import Key, Leaf, Storage, Tensor
from transload.findings import Problem
from transload.read.nodes import Call, Dict, Persistent, Set
from transload.read.noted import Noted
from transload.read.rebuild import READERS, BadTensor, Context, apply, ordinary
from transload.read.storages import StorageTable, TooMuch
from transload.read.values import called, leaf_kind, short, short_key

__all__ = ["MAX_DEPTH", "MAX_LEAVES", "Tree", "find_tensors"]

MAX_DEPTH = 1000
"""Nesting of a hostile file: a million nested tuples are a megabyte. No checkpoint goes beyond a few dozen levels."""

MAX_LEAVES = 10_000
"""Values kept beside the tensors; a loss history of a million floats is counted, not listed."""


@dataclass(frozen=True, slots=True)
class Tree:
    """What a pickle's root holds."""

    tensors: tuple[Tensor, ...]
    storages: tuple[Storage, ...]
    leaves: tuple[Leaf, ...]
    problems: tuple[Problem, ...]


class _Walk:
    """One search of a graph for tensors and leaves: iterative, cycle-safe, bounded.

    A frame is a container being walked: what is left of its children, its path and name, whether it was seen before.
    """

    def __init__(self, table: StorageTable, separator: str, outside: dict[str, tuple[Any, ...]]) -> None:
        self.table = table
        self.separator = separator
        self.outside = outside
        self.tensors: list[Tensor] = []
        self.leaves: list[Leaf] = []
        self.noted = Noted()
        self.skipped = 0
        self.frames: list[_Frame] = []
        self.on_path: set[int] = set()

    def run(self, root: object, context: Context) -> None:
        """Walk everything below ``root``."""
        path, name = context.path, context.name
        self._visit(root, path, name, context, again=False)
        tensors = self.tensors
        while self.frames:
            children, path, name, ident, again = self.frames[-1]
            for child, key, label in children:
                if type(child) in _ATOMS and len(self.leaves) >= MAX_LEAVES:
                    self.skipped += 1
                    self.table.budget.spend(0, again=again)
                    continue
                if label is not None:
                    steps: tuple[Key, ...] = (*path, *key)
                else:
                    key = short_key(key)  # noqa: PLW2901 - the raw key is not needed any more
                    steps = (*path, key)
                    label = f"{name}/{key}" if name else key if type(key) is str else str(key)  # noqa: PLW2901
                tensor = ordinary(context, child, steps, label, again) if type(child) is Call else None
                if tensor is not None:
                    tensors.append(tensor)
                elif self._visit(child, steps, label, context, again=again):
                    break
            else:
                self.frames.pop()
                self.on_path.discard(ident)

    def _visit(self, node: Any, path: tuple[Key, ...], name: str, context: Context, *, again: bool) -> bool:
        """Take a node; true if it is a container whose children come next."""
        self.table.budget.spend(len(name) + 8 * len(path), again=again)
        kind = type(node)
        if kind is Call:
            function = called(node)
            if function in READERS:
                self.table.budget.seen(id(node))
                self._take(function, node.args, path, name, context)
                return False
        elif kind is Persistent and self.outside and str(node.id) in self.outside:
            self._take(_PLAIN, self.outside[str(node.id)], path, name, context)
            return False
        children = _children(node, path, name, self.separator)
        if children is None:
            self._leaf(path, name, node)
            return False
        return self._enter(node, children, path, name)

    def _enter(self, node: object, children: _Children, path: tuple[Key, ...], name: str) -> bool:
        ident = id(node)
        if ident in self.on_path:
            return False
        if len(path) >= MAX_DEPTH:
            self.noted.add(
                "tree-too-deep", name[:200], f"nested deeper than {MAX_DEPTH} levels; what lies below is not shown"
            )
            return False
        again = False
        for part in (node, *_unpacked(node)):
            if self.table.budget.seen(id(part)):
                again = True
                self.table.budget.repeat(len(part.items) if type(part) is Dict else 1)
        self.on_path.add(ident)
        self.frames.append((children, path, name, ident, again))
        return True

    def _take(self, function: str, args: object, path: tuple[Key, ...], name: str, context: Context) -> None:
        context.path, context.name = path, name
        context.beside.clear()
        try:
            self.tensors += (apply(context, function, args), *context.beside)
        except BadTensor as reason:
            self.noted.add("tensor-broken", name or "the root", str(reason))
        except (IndexError, ValueError, TypeError):
            self.noted.add("tensor-broken", name or "the root", "its rebuild call has arguments of a wrong kind")

    def _leaf(self, path: tuple[Key, ...], name: str, node: object) -> None:
        if len(self.leaves) >= MAX_LEAVES:
            self.skipped += 1
            return
        found = self.table.resolve(node)
        if found is not None:  # a storage saved by itself
            slot = found[0]
            self.leaves.append(Leaf(path, name, "storage", f"storage {slot.key}: {slot.nbytes} bytes on {slot.device}"))
            return
        self.leaves.append(Leaf(path, name, leaf_kind(node), short(node)))


def find_tensors(
    root: object,
    table: StorageTable,
    *,
    separator: str = "/",
    outside: dict[str, tuple[Any, ...]] | None = None,
    prefix: str = "",
) -> Tree:
    """All tensors and leaves below ``root``, in the order a reader of the file would meet them.

    ``separator`` joins attribute names of objects that are no modules. ``outside`` are tensors described elsewhere in
    the container, by persistent id: storage, offset, size and stride. ``prefix`` stands before every name and path. A
    tensor with impossible arguments becomes a problem, with its name, and is left out.
    """
    walk = _Walk(table, separator, outside or {})
    context = Context(table, (prefix,) if prefix else (), prefix, _search)
    try:
        walk.run(root, context)
    except TooMuch as reason:
        walk.noted.add("tree-too-large", "", str(reason))
    if walk.skipped:
        walk.noted.add("leaves-uncounted", "", f"{walk.skipped} further values are not listed")
    problems = (*walk.noted.problems(), *table.noted.problems())
    return Tree(tuple(walk.tensors), table.finish(), tuple(walk.leaves), problems)


def _search(context: Context, node: object) -> tuple[Tensor, ...]:
    """The tensors inside an object that is itself a tensor: a subclass keeps them in its state."""
    walk = _Walk(context.table, "/", {})
    walk.run(node, context.copy())
    for problem in walk.noted.problems():
        raise BadTensor(f"inside it, {problem.where}: {problem.detail}")
    return tuple(walk.tensors)


def _unpacked(node: object) -> tuple[Any, ...]:
    """Containers whose content is walked as if it lay in an object itself: many objects can share one."""
    if type(node) is not Call:
        return ()
    state = node.states[-1] if node.states else None
    given = node.args[0] if type(node.args) is tuple and node.args and type(node.args[0]) is list else None
    parts = state if type(state) is tuple else (state,)
    return tuple(part for part in (*parts[:2], given) if type(part) in (Dict, list))


_PLAIN = "torch._utils._rebuild_tensor"
_ATOMS = frozenset({int, float, str, bool, bytes, bytearray, type(None)})

# A child, its key, and its full name; without a name (``None``) that is the parent's name, a slash and the key. With a
# name the key is a tuple of steps.
_Children = Iterator[tuple[Any, Any, str | None]]
_Frame = tuple[_Children, tuple[Key, ...], str, int, bool]


def _children(node: Any, path: tuple[Key, ...], name: str, separator: str) -> _Children | None:
    """What lies directly in a node; ``None`` for a leaf. Nothing is made before it is asked for."""
    kind = type(node)
    if kind is Dict:
        return _pairs(node.items)
    if kind is list or kind is tuple:
        return _indexed(node)
    if kind is Set:
        return _indexed(node.items)
    if kind is Call and called(node) not in _PLAIN_CALLS:
        return _call_children(node, path, name, separator)
    return None


def _pairs(items: list[Any]) -> _Children:
    """Values with their keys; of a text key that stands twice only the last, as in a dictionary."""
    keys, values = items[: len(items) // 2 * 2 : 2], items[1::2]
    texts = [key for key in keys if type(key) is str]
    if len(set(texts)) == len(texts):
        yield from zip(values, keys, repeat(None))
        return
    last = {items[index]: index for index in range(0, len(items) - 1, 2) if type(items[index]) is str}
    for index in range(0, len(items) - 1, 2):
        key = items[index]
        if type(key) is not str or last[key] == index:
            yield items[index + 1], key, None


def _indexed(values: list[Any] | tuple[Any, ...]) -> _Children:
    for index, child in enumerate(values):
        yield child, index, None


def _call_children(node: Call, path: tuple[Key, ...], name: str, separator: str) -> _Children:
    """Arguments that can hold tensors, then the state, then items and appended values."""
    callee = called(node)
    if callee == "collections.OrderedDict":
        yield from _pairs(_items(node) or [])
        return
    if type(node.args) is tuple and callee not in _RECONSTRUCTORS:
        for index, argument in enumerate(node.args):
            if type(argument) in _HOLDERS:
                yield argument, index, None
    if node.states:
        yield from _state_children(node.states[-1], path, name, separator)
    yield from _pairs(node.items or [])
    yield from _indexed(node.appended or [])


def _state_children(state: Any, path: tuple[Key, ...], name: str, separator: str) -> _Children:
    if type(state) is tuple and len(state) == 2 and type(state[0]) is Dict and type(state[1]) is Dict:
        state = Dict([*state[0].items, *state[1].items])  # attributes, and those in slots
    if type(state) is not Dict:
        yield state, "state", None
        return
    parts = _module_parts(state) if len(state.items) <= _MAX_ATTRIBUTES else None
    if parts:
        yield from _module_children(state, parts, path, name)
    elif separator == "/":
        yield from _pairs(state.items)
    else:
        for child, key, _ in _pairs(state.items):
            yield child, (short_key(key),), f"{name}{separator}{short_key(key)}" if name else str(short_key(key))


_HOLDERS = frozenset({Call, Dict, list, tuple, Set, Persistent})


# Calls whose result is a value, shown as a leaf.
_PLAIN_CALLS = frozenset(
    {
        "torch.device",
        "torch.Size",
        "torch.serialization._get_layout",
        "_codecs.encode",
        "torch.torch_version.TorchVersion",
        "builtins.complex",
        "__builtin__.complex",
        "builtins.bytearray",
        "__builtin__.bytearray",
        "numpy.dtype",
        "numpy.core.multiarray.scalar",
        "numpy._core.multiarray.scalar",
        "datetime.datetime",
        "datetime.date",
        "datetime.timedelta",
        "pathlib.PosixPath",
        "pathlib.PurePosixPath",
        "pathlib.WindowsPath",
        "pathlib.PureWindowsPath",
        "pathlib._local.PosixPath",
        "uuid.UUID",
    }
)
_RECONSTRUCTORS = frozenset({"copy_reg._reconstructor", "copyreg._reconstructor"})
_MODULE_KEYS = ("_parameters", "_buffers", "_modules")
_MAX_ATTRIBUTES = 2000  # of a module, keys and values; looking for three names in a shared dictionary must stay cheap


def _module_parts(state: Dict) -> tuple[list[Any], ...] | None:
    """The items of ``_parameters``, ``_buffers`` and ``_modules`` if the state is that of an ``nn.Module``."""
    found = tuple(_items(state.get(key)) for key in _MODULE_KEYS)
    return None if None in found else found  # type: ignore[return-value]


def _items(node: object) -> list[Any] | None:
    """Keys and values in turn of a dictionary or an ordered one."""
    if type(node) is Dict:
        return node.items
    if type(node) is not Call or called(node) != "collections.OrderedDict":
        return None
    given: list[Any] = []
    if type(node.args) is tuple and node.args and type(node.args[0]) is list:  # how Python 2 writes it
        pairs = [pair for pair in node.args[0] if type(pair) in (list, tuple) and len(pair) == 2]
        given = [part for pair in pairs for part in pair]
    return [*given, *(node.items or [])]


def _module_children(state: Dict, parts: tuple[list[Any], ...], path: tuple[Key, ...], name: str) -> _Children:
    """A module's children under the names its ``state_dict()`` would give: joined by dots, ``None`` left out."""
    unsaved = _texts(state.get("_non_persistent_buffers_set"))
    # The name so far is the module's own: "model" + "/" for one in a dictionary, "fc" + "." for one in a module.
    joiner = "." if path[-2:-1] == ("_modules",) else "/"
    lead = f"{name}{joiner}" if name else ""
    for where, items in zip(_MODULE_KEYS, parts, strict=True):
        for child, raw, _ in _pairs(items):
            if child is None:
                continue
            key = short_key(raw)
            hidden = where == "_buffers" and key in unsaved
            label = f"{lead}{where}/{key}" if hidden else f"{lead}{key}"
            yield child, (where, key), label
    for child, key, _ in _pairs(state.items):
        if key not in _MODULE_KEYS and type(child) in _HOLDERS:
            yield child, key, None


def _texts(node: object) -> set[str]:
    """The texts in a set, also as protocol 2 writes one: ``builtins.set([...])``."""
    members = node.items if type(node) is Set else []
    if type(node) is Call and type(node.args) is tuple and node.args and type(node.args[0]) is list:
        members = node.args[0]
    return {member for member in members if type(member) is str}
