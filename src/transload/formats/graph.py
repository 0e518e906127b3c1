"""The tensors, storages and values in the graph of a pickle.

``find_tensors`` walks a graph. ``tensors`` reads the calls of torch's rebuild functions, resolves persistent ids, and
bounds what a hostile graph can cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any

from transload.checkpoint import Key, Leaf, Storage, Tensor
from transload.findings import LimitedProblems, Problem
from transload.formats.tensors import Args, BadTensor, Place, RebuildReader, StorageTable, TooMuch
from transload.frozen import NamedTuple
from transload.nodes import REBUILDS, Call, Dict, Global, Persistent, Set, called, short

# Nesting of a hostile file: a million nested tuples are a megabyte. No checkpoint goes beyond a few dozen levels.
MAX_DEPTH = 1000
MAX_LEAVES = 10_000  # values kept beside the tensors; a loss history of a million floats is counted, not listed
_MAX_ATTRIBUTES = 2000  # keys and values of a module; looking for three names in a shared dictionary must stay cheap
_new = tuple.__new__  # a named tuple in one call, without the Python function that collects its fields


def short_key(key: object) -> Key:
    """A dictionary key as a step of a path: itself, or a short text where it is neither text nor number, or huge.

    A text of any length is kept: ``Budget`` limits all names together.
    """
    return key if type(key) is str or (type(key) is int and key.bit_length() < 64) else short(key)


def node_at(
    root: object, path: tuple[Key, ...], members: dict[int, dict[Key, Any]] | None = None, absent: object = None
) -> Any:
    """The node at a path; ``absent`` if there is none. ``members`` keeps those of nodes for further calls."""
    members = {} if members is None else members
    node: Any = root
    for step in path:
        if id(node) not in members:  # the last of equal keys wins
            members[id(node)] = {short_key(key): child for key, child in members_of(node)}
        node = members[id(node)].get(step, absent)
    return node


def members_of(node: Any) -> list[tuple[Any, object]]:
    """The children of an inert node that a path can name: entries, attributes, positions."""
    if type(node) is Dict:
        return node.pairs()
    if type(node) in (list, tuple):
        return list(enumerate(node))
    if type(node) is not Call:
        return []
    items = _items(node)
    state = with_slots(node.states[-1]) if items is None and node.states else None
    attributes = state.pairs() if type(state) is Dict else []  # any other state could be the object itself
    return [*attributes, *Dict(node.items or [] if items is None else items).pairs(), *enumerate(node.appended or [])]


def leaf_kind(node: object) -> str:
    """The name of a value's type."""
    if type(node) is Call:
        return called(node) or "call"
    if type(node) is Global:
        return "global"
    return type(node).__name__ if node is not None else "None"


class Tree(NamedTuple):
    """What a pickle's root contains."""

    tensors: tuple[Tensor, ...]
    storages: tuple[Storage, ...]
    leaves: tuple[Leaf, ...]
    problems: tuple[Problem, ...]
    facts: tuple[tuple[str, str], ...] = ()


# Calls whose result is a value, shown as a leaf.
_PLAIN_CALLS = {
    *("torch.device", "torch.Size", "torch.serialization._get_layout", "torch.torch_version.TorchVersion"),
    *("_codecs.encode", "uuid.UUID"),
    *(f"{module}.{name}" for module in ("builtins", "__builtin__") for name in ("complex", "bytearray")),
    *("numpy.dtype", "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"),
    *(f"datetime.{name}" for name in ("datetime", "date", "timedelta")),
    *(f"pathlib.{name}" for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")),
    "pathlib._local.PosixPath",
}
_ATOMS = frozenset({int, float, str, bool, bytes, bytearray, type(None)})
_HOLDERS = frozenset({Call, Dict, list, tuple, Set, Persistent})
_ORDERED_DICT = "collections.OrderedDict"
RECONSTRUCTORS = frozenset({"copy_reg._reconstructor", "copyreg._reconstructor"})
MODULE_KEYS = ("_parameters", "_buffers", "_modules")

# A child, its key, and its full name; without a name (``None``) that is the parent's name, a slash and the key. With a
# name the key is a tuple of steps.
_Children = Iterator[tuple[Any, Any, str | None]]
_Frame = tuple[_Children, tuple[Key, ...], str, int, bool, bool]
_Outside = dict[str, Args] | None


class _Walk(RebuildReader):
    """One search of a graph for tensors and leaves: iterative, cycle-safe, bounded.

    A frame is a container being walked: what is left of its children, its path and name, whether it was seen before,
    and whether it belongs to an attribute of a tensor. Such attributes often lead back to the model or the dictionary
    that has the tensor: in them only tensors count, and a container only where it is seen first.
    """

    def __init__(self, table: StorageTable, separator: str = "/", outside: _Outside = None) -> None:
        super().__init__(table)
        self.separator = separator
        self.outside = outside or {}
        self.tensors: list[Tensor] = []
        self.leaves: list[Leaf] = []
        self.noted = LimitedProblems()
        self.skipped = 0
        self.frames: list[_Frame] = []
        self.on_path: set[int] = set()

    def run(self, root: object, path: tuple[Key, ...] = (), name: str = "") -> None:
        """Walk everything below ``root``, which has that path and name."""
        self._visit(root, path, name, again=False)
        while self.frames:
            children, path, name, ident, again, attribute = self.frames[-1]
            for child, key, label in children:
                if type(child) in _ATOMS and (attribute or len(self.leaves) >= MAX_LEAVES):
                    self.skipped += not attribute
                    self.table.budget.spend(0, again=again)
                    continue
                if label is not None:
                    steps: tuple[Key, ...] = (*path, *key)
                else:
                    if type(key) is not str:
                        key = short_key(key)  # noqa: PLW2901 - the raw key is not needed any more
                    steps = (*path, key)
                    label = f"{name}/{key}" if name else key if type(key) is str else str(key)  # noqa: PLW2901
                if self._visit(child, steps, label, again=again, attribute=attribute):
                    break
            else:
                self.frames.pop()
                self.on_path.discard(ident)

    def _visit(self, node: Any, path: tuple[Key, ...], name: str, *, again: bool, attribute: bool = False) -> bool:
        """Add a node; true if it is a container whose children come next."""
        budget = self.table.budget
        budget.spend(len(name) + 8 * len(path), again=again)
        kind = type(node)
        if kind is Call:
            callee = node.callee
            function = callee.full_name if type(callee) is Global else called(node)
            if function in REBUILDS:
                budget.seen(id(node))
                return self._take(function, node.args, (path, name))
            if function not in _PLAIN_CALLS:
                children = self._call_children(node, function, path, name)
                return self._enter(node, children, path, name, attribute=attribute)
        elif kind is Dict:
            return self._enter(node, last_pairs(node.items), path, name, attribute=attribute)
        elif kind is list or kind is tuple:
            return self._enter(node, _indexed(node), path, name, attribute=attribute)
        elif kind is Set:
            return self._enter(node, _indexed(node.items), path, name, attribute=attribute)
        elif kind is Persistent and type(node.id) in (str, int) and str(node.id) in self.outside:
            return self._take("torch._utils._rebuild_tensor", self.outside[str(node.id)], (path, name))
        if attribute:
            return False
        if len(self.leaves) >= MAX_LEAVES:
            self.skipped += 1
        elif storage := self.table.resolve(node):  # a storage saved by itself
            text = f"storage {storage[0].key}: {storage[0].nbytes} bytes on {storage[0].device}"
            self.leaves.append(Leaf(path, name, "storage", text))
        else:
            self.leaves.append(Leaf(path, name, leaf_kind(node), short(node)))
        return False

    def _enter(self, node: Any, children: _Children, path: tuple[Key, ...], name: str, *, attribute: bool) -> bool:
        budget, again = self.table.budget, False
        if id(node) in self.on_path or (attribute and id(node) in budget.objects):
            return False
        if len(path) >= MAX_DEPTH:
            detail = f"nested deeper than {MAX_DEPTH} levels; what is below is not shown"
            self.noted.add("tree-too-deep", name[:200], detail)
            return False
        parts: list[Any] = [node]
        if type(node) is Call:
            # Containers whose content is walked as if it were in the object: many objects can share one.
            state = node.states[-1] if node.states else None
            given = node.args[:1] if type(node.args) is tuple and called(node) == _ORDERED_DICT else ()
            inner = state[:2] if type(state) is tuple else (state,)
            parts += [part for part in (*inner, *given) if type(part) in (Dict, list)]
        for part in parts:
            if budget.seen(id(part)):
                again = True
                budget.repeat(len(part.items) if type(part) is Dict else 1)
        self.on_path.add(id(node))
        self.frames.append((children, path, name, id(node), again, attribute))
        return True

    def _call_children(self, node: Call, callee: str, path: tuple[Key, ...], name: str) -> _Children:
        """Arguments that can contain tensors, then the state, items and appended values."""
        if callee == _ORDERED_DICT:
            yield from last_pairs(_items(node) or [])
            return
        if type(node.args) is tuple and callee not in RECONSTRUCTORS:
            for index, argument in enumerate(node.args):
                if type(argument) in _HOLDERS:
                    yield argument, index, None
        if node.states:
            yield from self._state_children(node.states[-1], path, name)
        yield from last_pairs(node.items or [])
        yield from _indexed(node.appended or [])

    def _state_children(self, state: Any, path: tuple[Key, ...], name: str) -> _Children:
        state = with_slots(state)
        if type(state) is not Dict:
            yield state, "state", None
            return
        parts = [_items(state.get(key)) for key in MODULE_KEYS] if len(state.items) <= _MAX_ATTRIBUTES else [None]
        if None in parts:
            for child, key, _ in last_pairs(state.items):
                step = short_key(key)
                yield child, (step,), f"{name}{self.separator}{step}" if name else str(step)
            return
        # An ``nn.Module``: names as its ``state_dict()`` would give, joined by dots, ``None`` left out. The name so far
        # is the module's own: "model" + "/" for one in a dictionary, "fc" + "." for one in a module.
        buffers: Any = state.get("_non_persistent_buffers_set")
        members = buffers.items if type(buffers) is Set else []
        if type(buffers) is Call and type(buffers.args) is tuple and buffers.args and type(buffers.args[0]) is list:
            members = buffers.args[0]  # protocol 2: ``builtins.set([...])``
        unsaved = {member for member in members if type(member) is str}
        joiner = "." if path[-2:-1] == ("_modules",) else "/"
        prefix = f"{name}{joiner}" if name else ""
        for where, items in zip(MODULE_KEYS, parts, strict=True):
            for child, raw, _ in last_pairs(items or []):
                if child is not None:
                    step = short_key(raw)
                    hidden = where == "_buffers" and step in unsaved
                    yield child, (where, step), f"{prefix}{where}/{step}" if hidden else f"{prefix}{step}"
        for child, key, _ in last_pairs(state.items):
            if key not in MODULE_KEYS and type(child) in _HOLDERS:
                yield child, key, None

    def _take(self, function: str, args: object, at: Place) -> bool:
        """Add the tensor that a call would make; true if it has attributes, which come next."""
        attributes = self.attributes = []
        try:
            self.tensors.append(self.rebuild(function, args, at))
        except (BadTensor, IndexError, ValueError, TypeError) as error:
            wrong = str(error) if type(error) is BadTensor else "its rebuild call has arguments of a wrong kind"
            self.noted.add("tensor-broken", at[1] or "the root", wrong)
            return False
        before = len(self.frames)
        for attribute in reversed(attributes):
            self._visit(attribute, *at, again=False, attribute=True)
        return len(self.frames) > before

    def tensors_in(self, node: object, at: Place) -> tuple[Tensor, ...]:
        """The tensors inside an object that is itself a tensor: a subclass keeps them in its state."""
        walk = _Walk(self.table)
        walk.depth, walk.on_path = self.depth, self.on_path
        walk.run(node, *at)
        for problem in walk.noted.problems():
            raise BadTensor(f"inside it, {problem.where}: {problem.detail}")
        return tuple(walk.tensors)


def find_tensors(root: object, table: StorageTable, *, separator: str = "/", outside: _Outside = None) -> Tree:
    """All tensors and leaves below ``root``, in the order of the file.

    ``separator`` joins attribute names of objects that are not modules. ``outside`` are tensors described elsewhere in
    the container, by persistent id: storage, offset, size and stride. A tensor with impossible arguments becomes a
    problem, with its name, and is left out.
    """
    walk = _Walk(table, separator, outside)
    try:
        walk.run(root)
    except TooMuch as reason:
        walk.noted.add("tree-too-large", "", str(reason))
    if walk.skipped:
        walk.noted.add("leaves-uncounted", "", f"{walk.skipped} further values are not listed")
    facts: tuple[tuple[str, str], ...] = ()
    if table.shares:
        world, rank, place = max(table.shares)
        who = f"rank {rank} of {world}" if rank >= 0 else f"the rank at place {place} of {world} in its mesh"
        if world:
            facts = (("place in the mesh" if rank < 0 else "rank", str(max(rank, place))), ("world size", str(world)))
        if pieces := [tensor for tensor in walk.tensors if tensor.is_sharded]:
            from transload.formats.pieces import share_words

            walk.noted.add("rank-file", "", f"{who if world else 'it'} has a piece of {share_words(pieces)}")
    problems = (*walk.noted.problems(), *table.noted.problems())
    users = table.users
    storages = tuple([_new(Storage, (*storage[:-1], tuple(users[key]))) for key, storage in table.storages.items()])
    return Tree(tuple(walk.tensors), storages, tuple(walk.leaves), problems, facts)


def with_slots(state: Any) -> Any:
    """The state of an object; its attributes together if there are some in ``__dict__`` and some in slots."""
    if type(state) is tuple and len(state) == 2 and type(state[0]) is Dict and type(state[1]) is Dict:
        return Dict([*state[0].items, *state[1].items])
    return state


def last_pairs(items: list[Any]) -> _Children:
    """Values with their keys; only the last of equal text keys, as in a dictionary."""
    keys, values = items[: len(items) // 2 * 2 : 2], items[1::2]
    texts = [key for key in keys if type(key) is str]
    if len(set(texts)) == len(texts):
        yield from zip(values, keys, repeat(None))
        return
    last = {key: index for index, key in enumerate(keys) if type(key) is str}
    for index, (key, value) in enumerate(zip(keys, values, strict=True)):
        if type(key) is not str or last[key] == index:
            yield value, key, None


def _indexed(values: list[Any] | tuple[Any, ...]) -> _Children:
    for index, child in enumerate(values):
        yield child, index, None


def _items(node: object) -> list[Any] | None:
    """The alternating keys and values of a dictionary or an ordered one."""
    if type(node) is Dict:
        return node.items
    return call_items(node) if type(node) is Call and called(node) == _ORDERED_DICT else None


def call_items(node: Call) -> list[Any]:
    """Keys and values of a mapping: its constructor's (a ``Counter``, or pairs from Python 2), then those set later."""
    given = node.args[0] if type(node.args) is tuple and node.args else None
    items: list[Any] = [*given.items] if type(given) is Dict else []
    for pair in given if type(given) is list else ():
        if type(pair) in (list, tuple) and len(pair) == 2:
            items += pair
    return [*items, *(node.items or [])]
