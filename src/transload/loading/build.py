"""A pickle's inert graph into objects, through a fixed table: what a restricted unpickler does, without a pickle."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from transload.errors import BrokenFileError, LoadError, TransloadError, UnsafeError
from transload.loading.rebuild import BUILDERS, Args, Entry, Rebuilder, Wrong, entries, ordinary, set_attributes, view
from transload.loading.refusal import Allowed, Unknown, name_of
from transload.nodes import Big, Call, Dict, Extension, Global, OutOfBand, Persistent, Pickle, Set, module_class

if TYPE_CHECKING:
    import torch

    from transload.checkpoint import Tensor
    from transload.loading.local_devices import Arrival
    from transload.nodes import Pickle
    from transload.tensors.files import Piece

__all__ = ["Held", "Missing", "Walk", "build", "plain_tensors", "set_items"]


class Held:
    """The storages that were read, by persistent id; also tensors that a tar archive describes beside its pickle."""

    def __init__(self, piece: Piece, storages: dict[str, torch.UntypedStorage], arrival: Arrival) -> None:
        import torch

        self._torch = torch
        self.known = entries(piece.checkpoint.storages, storages, arrival)
        self._typed: dict[object, Any] = {}
        self._tar = _Tar(piece) if piece.checkpoint.format == "torch-tar" else None

    def own(self, entry: Entry) -> Any:
        """The storage for one tensor: torch makes an empty one anew for each that has one."""
        storage, nbytes, _ = entry
        return storage if nbytes else self._torch.UntypedStorage(0, device=storage.device)

    def is_storage(self, node: Persistent) -> bool:
        """Whether an id names a storage."""
        pid = node.id
        return type(pid) is tuple and len(pid) in (5, 6) and pid[0] in ("storage", b"storage")

    def typed(self, node: object) -> Any:
        """The storage of an id as torch gives it to a program: the same one each time."""
        if type(node) is Persistent and self._tar is not None and not self.is_storage(node):
            node = self._tar.storages.get(str(node.id))
        if type(node) is not Persistent or not self.is_storage(node):
            raise Wrong("an id that names no storage")
        pid: Any = node.id
        key = str(pid[2])
        if key not in self.known:
            raise Wrong(f"an id that names the storage {key[:40]!r}, which is not in the file")
        storage, nbytes, (*_, dtype, name) = self.known[key]
        if dtype is None:
            raise Wrong(f"a storage of {name}, which this torch does not have")
        view = pid[5] if len(pid) == 6 else None
        if view is not None:
            return self._view(storage, dtype, view)
        if not nbytes:
            return self._wrapped(self.own(self.known[key]), dtype)
        if key not in self._typed:
            self._typed[key] = self._wrapped(storage, dtype)
        return self._typed[key]

    def _view(self, storage: Any, dtype: Any, view: Any) -> Any:
        """A part of a storage, by (key, first element, elements)."""
        match view:
            case (str() as key, int() as first, int() as count) if first >= 0 and count >= 0:
                width = self._torch.empty((), dtype=dtype, device="meta").element_size()
                if (first + count) * width > storage.nbytes():
                    raise Wrong("a part of a storage that reaches beyond it")
                if ("view", key) not in self._typed:
                    part = storage[first * width : (first + count) * width]
                    self._typed["view", key] = self._wrapped(part, dtype)
                return self._typed["view", key]
        raise Wrong("a part of a storage that is none")

    def _wrapped(self, storage: Any, dtype: Any) -> Any:
        return self._torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)

    def outside(self, node: Persistent) -> tuple[Any, ...] | None:
        """Storage, offset, size and stride of a tensor that is described beside the pickle."""
        return None if self._tar is None or type(node.id) is tuple else self._tar.tensors.get(str(node.id))


class _Tar:
    """The tables of a tar archive: its pickle names tensors and storages by number."""

    def __init__(self, piece: Piece) -> None:
        from transload.formats import torch_tar

        source = piece.open("")
        found = {member.name.removeprefix("./"): member for member in torch_tar.members(source)[0]}
        reader = torch_tar.Reader(source, found, [])  # the same walk that found its tensors
        reader.read_storages()
        reader.read_tensors()
        self.tensors = reader.tensor_args
        self.storages = reader.storage_ids


_UPDATED = frozenset({dict, OrderedDict})  # a Counter would add the values up
_ATOMS = frozenset({str, int, float, bool, bytes, type(None)})

Step = Callable[[Any], None]


class Missing(Exception):  # noqa: N818 - a signal inside this room, never seen outside
    """Something is needed that is not made yet; ``args[0]`` is the identity of its node."""


class Walk:
    """One walk over one graph. ``made`` are the objects so far, by the identity of their nodes."""

    openers: dict[type, Callable[[Any, Any], None]]
    """What is done with a node of each type when it is met; not in the instance, which would then hold itself."""

    def __init__(self, pickle: Pickle, where: str, encoding: str) -> None:
        self.where = where
        self.made: dict[int, Any] = {}
        self.busy: set[int] = set()
        self.stack: list[tuple[Step, Any]] = []
        self._waiting: dict[int, list[tuple[Step, Any]]] = {}
        self._encoding = encoding
        self.single: Callable[..., Any] = _nothing
        # Bytes in a pickle of Python 2 are text that the reader could not decode.
        self._atoms = _ATOMS - {bytes} if pickle.undecoded else _ATOMS

    def run(self, root: object) -> Any:
        """The object of a node, with all that it needs; ``Wrong`` if there can be none."""
        node = root
        self.need((root,))
        try:
            while self.stack:
                step, node = self.stack.pop()
                try:
                    step(node)
                except Missing as missing:
                    self._waiting.setdefault(missing.args[0], []).append((step, node))
        except Wrong as reason:
            reason.node = node
            raise
        if self._waiting:
            raise Wrong("an object that has to be there before it is made")
        return self.get(root)

    def get(self, node: Any) -> Any:
        """What a node has become; ``Missing`` if it has not yet."""
        if type(node) in self._atoms:
            return node
        made = self.made
        ident = id(node)
        if ident not in made:
            raise Missing(ident)
        return made[ident]

    def ready(self, nodes: Iterable[Any]) -> list[Any] | None:
        """What nodes have become, or become in one step; ``None`` if some take more than that."""
        atoms, made, single = self._atoms, self.made, self.single
        values: list[Any] = []
        append = values.append
        missing = False
        for node in nodes:
            if type(node) in atoms:
                append(node)
                continue
            ident = id(node)
            value = made.get(ident)
            if value is None and ident not in made:
                value = single(node)
                if value is None:
                    missing = True
                    continue
                made[ident] = value
            append(value)
        return None if missing else values

    def need(self, nodes: Iterable[Any]) -> None:
        """Let nodes be made next, those that are not yet."""
        atoms, made, step = self._atoms, self.made, self._open
        wanted = [(step, node) for node in nodes if type(node) not in atoms and id(node) not in made]
        wanted.reverse()
        self.stack += wanted

    def later(self, step: Step, node: Any, needed: Iterable[Any]) -> None:
        """Take a step when other nodes have been made."""
        self.stack.append((step, node))
        self.need(needed)

    def done(self, node: Any, value: Any) -> None:
        """A node that could not exist before its parts has become a value."""
        ident = id(node)
        self.made[ident] = value
        self.busy.discard(ident)
        if self._waiting:
            self.stack += reversed(self._waiting.pop(ident, ()))

    def _open(self, node: Any) -> None:
        ident = id(node)
        if ident in self.made or ident in self.busy:
            return
        opener = self.openers.get(type(node))
        if opener is None:
            raise Wrong(_ODD.get(type(node), "something that is no value"))
        opener(self, node)

    # -- values

    def open_bytearray(self, node: bytearray) -> None:
        """As it stands."""
        self.made[id(node)] = node

    def open_text(self, node: bytes) -> None:
        """Text of Python 2 that is not UTF-8."""
        if self._encoding == "bytes":
            self.made[id(node)] = node
            return
        try:
            self.made[id(node)] = node.decode(self._encoding)
        except UnicodeDecodeError as error:
            what = f"Python 2 wrote text into it that is not {self._encoding}"
            fix = "Pass encoding='latin1', or the encoding it was written in."
            raise LoadError(what, where=self.where, fix=fix) from error

    def open_list(self, node: list[Any]) -> None:
        """Empty first."""
        values = self.made[id(node)] = []
        ready = self.ready(node)
        if ready is None:
            self.later(self._fill_list, node, node)
        else:
            values += ready

    def _fill_list(self, node: list[Any]) -> None:
        self.made[id(node)].extend([self.get(child) for child in node])

    def open_tuple(self, node: tuple[Any, ...]) -> None:
        """When all in it is there; a tuple of plain values is itself."""
        atoms = self._atoms
        if all(type(child) in atoms for child in node):
            self.made[id(node)] = node
            return
        self.busy.add(id(node))
        self.later(self._close_tuple, node, node)

    def _close_tuple(self, node: tuple[Any, ...]) -> None:
        self.done(node, tuple([self.get(child) for child in node]))

    def open_dict(self, node: Dict) -> None:
        """Empty first."""
        into = self.made[id(node)] = {}
        ready = self.ready(node.items)
        if ready is None:
            self.later(self._fill_dict, node, node.items)
        else:
            set_items(into, ready)

    def _fill_dict(self, node: Dict) -> None:
        set_items(self.made[id(node)], [self.get(item) for item in node.items])

    def open_set(self, node: Set) -> None:
        """A frozen one when all in it is there, another one empty first."""
        if node.frozen:
            self.busy.add(id(node))
            self.later(self._close_frozen, node, node.items)
        else:
            self.made[id(node)] = set()
            self.later(self._fill_set, node, node.items)

    def _fill_set(self, node: Set) -> None:
        self.made[id(node)].update(self._members(node))

    def _close_frozen(self, node: Set) -> None:
        self.done(node, self._members(node))

    def _members(self, node: Set) -> frozenset[Any]:
        values = [self.get(item) for item in node.items]
        try:
            return frozenset(values)
        except TypeError as error:
            raise Wrong(f"a set of what cannot be in one: {error}") from error


def _nothing(node: object) -> None:
    """What is made of a node in one step; ``None`` if it takes more."""


def set_items(into: Any, values: list[Any]) -> None:
    """Keys and values in turn into a dictionary."""
    pairs = zip(values[::2], values[1::2], strict=True)
    try:
        if type(into) in _UPDATED:
            into.update(pairs)
            return
        for key, value in pairs:
            into[key] = value
    except TypeError as error:
        raise Wrong(f"a key that cannot be one: {error}") from error


_ODD: dict[type, str] = {
    Big: "an integer of thousands of digits",
    Extension: "a name that it gives only by number",
    OutOfBand: "a buffer that lies outside the file",
}


def plain_tensors(piece: Piece, storages: dict[str, torch.UntypedStorage], arrival: Arrival) -> dict[str, Any]:
    """The tensors of a safetensors file by name."""
    checkpoint = piece.checkpoint
    known: dict[Any, Entry] = entries(checkpoint.storages, storages, arrival)
    rebuilder = Rebuilder(arrival)
    made: dict[str, Any] = {}
    for tensor in checkpoint.tensors:
        entry = known.get(tensor.storage)
        found = None
        if entry is not None and entry[2][4] == tensor.dtype:
            found = view(entry, tensor.offset, tensor.shape, tensor.stride)
        made[tensor.name] = _checked(checkpoint.path, tensor, entry, rebuilder) if found is None else found
    return made


def _checked(path: str, tensor: Tensor, entry: Entry | None, rebuilder: Rebuilder) -> Any:
    """A tensor that is empty, on the meta device, or cannot be made."""
    import torch

    where = f"{path} › {tensor.name}"
    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype):
        what = f"its dtype {tensor.dtype} is none of torch {torch.__version__}"
        raise LoadError(what, where=where, fix="A newer torch may have it.")
    if entry is None:
        raise BrokenFileError("its bytes are not in the file", where=where)
    try:
        return rebuilder.strided(entry[0], dtype, tensor.offset, tensor.shape, tensor.stride)
    except Wrong as reason:
        raise BrokenFileError(f"it holds {reason}", where=where) from reason


_MAPPINGS = (dict, OrderedDict, Counter, defaultdict)
_FROM_TYPE = frozenset({"torch._tensor._rebuild_from_type_v2", "torch._tensor._rebuild_from_type"})
_GET_AGAIN = "No release of torch writes that. Get the file again from its author."


def build(
    piece: Piece,
    pickle: Pickle,
    storages: dict[str, torch.UntypedStorage],
    arrival: Arrival,
    encoding: str = "utf-8",
) -> Any:
    """The object a pickle describes, over storages that are in place.

    ``BrokenFileError`` for a call that no checkpoint makes, ``UnsafeError`` for one that nobody has allowed.
    """
    where = f"{piece.checkpoint.path} › {pickle.name}" if pickle.name else piece.checkpoint.path
    rebuilder = Rebuilder(arrival)
    builder = _Builder(pickle, where, encoding, Held(piece, storages, arrival), rebuilder)
    try:
        made = builder.run(pickle.root)
        rebuilder.check_sparse()
    except Wrong as reason:
        raise BrokenFileError(f"it holds {reason}", where=_place(where, reason.node), fix=_GET_AGAIN) from reason
    except Unknown as name:
        what = f"it holds {name}, which this torch does not have"
        raise LoadError(what, where=where, fix="A newer torch may have it.") from name
    except TransloadError:
        raise
    except Exception as error:
        first = str(error).partition("\n")[0]
        raise LoadError(f"torch failed on a tensor in it: {type(error).__name__}: {first}", where=where) from error
    return made


def _place(where: str, node: object) -> str:
    position = getattr(node, "position", None)
    return where if position is None else f"{where} › byte {position}"


class _Builder(Walk):
    """Adds what has a name: classes, functions, and what is made by calling them; and storages."""

    def __init__(self, pickle: Pickle, where: str, encoding: str, held: Held, rebuilder: Rebuilder) -> None:
        super().__init__(pickle, where, encoding)
        self._held = held
        self._allowed = Allowed()
        self._rebuilder = rebuilder
        self._outside: dict[str, Any] = {}
        self._built = pickle.built
        self._names = {node: name_of(node) for node in pickle.globals.values()}
        self.single = ordinary(held.known, self.made, self._names)

    def run(self, root: object) -> Any:
        """The object of a node."""
        if self._built:
            raise Wrong("attributes of something that has none")
        return super().run(root)

    # -- names and storages

    def open_global(self, node: Global) -> None:
        """The object of an allowed name."""
        self.made[id(node)] = self._object_of(node)

    def _object_of(self, node: Global) -> Any:
        found = self._allowed.object_of(node)
        if found is None:
            raise UnsafeError(f"it names {node.full_name}, which nobody has allowed", where=self.where)
        return found

    def open_persistent(self, node: Persistent) -> None:
        """A storage; in the older formats also a class, or a tensor described elsewhere."""
        outside = self._held.outside(node)
        kind = module_class(node)
        if outside is not None:
            self.made[id(node)] = self._from_outside(str(node.id), outside)
        elif type(kind) is Global and not self._held.is_storage(node):
            self.made[id(node)] = self._object_of(kind)
        else:
            self.made[id(node)] = self._held.typed(node)

    def _from_outside(self, key: str, args: tuple[Any, ...]) -> Any:
        """A tensor that another part of a tar archive describes: the same one each time it is named."""
        if key not in self._outside:
            storage = self._held.typed(args[0])
            self._outside[key] = self._rebuilder.make("torch._utils._rebuild_tensor", (storage, *args[1:]))
        return self._outside[key]

    # -- calls

    def open_call(self, node: Call) -> None:
        """When its arguments are there; an ordinary tensor at once."""
        tensor = self.single(node, self._checked)
        if tensor is not None:
            self.made[id(node)] = tensor
            return
        if type(node.args) is not tuple:
            raise Wrong("a call whose arguments are no tuple")
        self.busy.add(id(node))
        # The function is only named there, and is one of ours where torch has it no more.
        needed = node.args[1:] if self._called(node) in _FROM_TYPE else node.args
        self.later(self._call, node, needed if node.kwargs is None else (*needed, node.kwargs))

    def _checked(self, entry: Entry, args: Args) -> Any:
        """A tensor that is ordinary but for its numbers; ``None`` if this torch has not its dtype."""
        dtype = entry[2][3]
        if dtype is None:
            return None
        made = self._rebuilder.strided(self._held.own(entry), dtype, *args[1:4])
        self.made[id(args[5])] = OrderedDict()
        return self._rebuilder.finish(made, args[4], self.made[id(args[5])])

    def _called(self, node: Call) -> str:
        callee = _callee(node)
        return self._names.get(callee) or name_of(callee)

    def _call(self, node: Call) -> None:
        name = self._called(node)
        if name in _FROM_TYPE:
            made = self._from_type(node)
        else:
            arguments: Any = node.args
            made = self._apply(name, node, tuple([self.get(argument) for argument in arguments]))
        self.done(node, made)
        if node.states or node.items or node.appended:
            steps = ((self._states, node.states), (self._items, node.items), (self._appended, node.appended))
            self.stack += [(step, node) for step, given in steps if given]

    def _from_type(self, node: Call) -> Any:
        """``_rebuild_from_type_v2(function, class, arguments, state)``."""
        arguments: Any = node.args
        if len(arguments) != 4 or type(arguments[0]) is not Global:
            raise Wrong("a tensor that is made by something that is no name")
        kind, args, state = (self.get(argument) for argument in arguments[1:])
        if type(args) is not tuple:
            raise Wrong("a tensor that is made of arguments that are none")
        function = self._names[arguments[0]]
        if self._rebuilder.has(function):
            inner = self._rebuilder.make(function, args)
        else:
            inner = self._run(function, self._allowed.user(arguments[0]), args)
        return self._rebuilder.as_type(inner, kind, state)

    def _apply(self, name: str, node: Call, args: tuple[Any, ...]) -> Any:
        """What a name makes of its arguments."""
        plain = node.kwargs is None or (type(node.kwargs) is Dict and not node.kwargs.items)
        if plain and name in BUILDERS:
            return BUILDERS[name](args)
        if plain and self._rebuilder.has(name):
            return self._rebuilder.make(name, args)
        callee = _callee(node)
        target = self._allowed.user(callee)
        if target is None and self._allowed.is_known(callee):
            return self._tensor_class(name, callee, args)
        return self._allowed_call(name, node, target, args)

    def _tensor_class(self, name: str, callee: Global, args: tuple[Any, ...]) -> Any:
        """``torch.FloatTensor()``: empty, to be given its state."""
        if args or not name.endswith("Tensor"):
            raise Wrong(f"a call of {name}, as no checkpoint has")
        kind = self._object_of(callee)
        return self._run(name, kind.__new__, (kind,))

    def _allowed_call(self, name: str, node: Call, target: Any, args: tuple[Any, ...]) -> Any:
        """A call of what the program has allowed, as pickle makes it."""
        if node.kind == "reduce" or target is None:
            return self._run(name, target, args)
        if not isinstance(target, type):
            raise Wrong(f"an object of {name}, which is no class")
        if node.kind in ("newobj", "newobj_ex") or not args:
            kwargs = {} if node.kwargs is None else self.get(node.kwargs)
            return self._run(name, target.__new__, (target, *args), kwargs)
        return self._run(name, target, args)

    def _run(self, name: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        if target is None:
            raise UnsafeError(f"it calls {name}, which nobody has allowed", where=self.where)
        try:
            return target(*args, **(kwargs or {}))
        except Exception as error:
            what = f"{name} failed on what the file gives it: {type(error).__name__}: {error}"
            raise LoadError(what, where=self.where) from error

    # -- what is put into the result of a call

    def _appended(self, node: Call) -> None:
        self.later(self._append, node, node.appended or ())

    def _append(self, node: Call) -> None:
        made = self.get(node)
        self._check_type(made, (list, set), "are appended to")
        values = [self.get(value) for value in node.appended or ()]
        add = getattr(made, "extend", None) or getattr(made, "update", None)
        self._run(f"appending to {type(made).__name__}", add, (values,))

    def _items(self, node: Call) -> None:
        ready = self.ready(node.items or ())
        if ready is None:
            self.later(self._set, node, node.items or ())
        else:
            set_items(self._mapping(node), ready)

    def _set(self, node: Call) -> None:
        made = self._mapping(node)
        set_items(made, [self.get(item) for item in node.items or ()])

    def _mapping(self, node: Call) -> Any:
        made = self.get(node)
        self._check_type(made, _MAPPINGS, "are put into")
        return made

    def _states(self, node: Call) -> None:
        self.later(self._set_states, node, node.states or ())

    def _set_states(self, node: Call) -> None:
        made = self.get(node)
        for state in [self.get(state) for state in node.states or ()]:
            self._set_state(made, state)

    def _set_state(self, made: Any, state: Any) -> None:
        import torch

        if type(made) is OrderedDict:
            set_attributes(made, state)
        elif type(made) in (torch.Tensor, torch.nn.Parameter):
            self._rebuilder.build(made, state)
        else:
            self._check_type(made, (), "are given as state to")
            self._run(f"the state of {type(made).__name__}", _give_state, (made, state))

    def _check_type(self, made: Any, plain: tuple[type, ...], how: str) -> None:
        """That a class is one of the plain ones, or allowed itself: its methods are about to be called."""
        kind = type(made)
        if kind in plain or self._allowed.allows(kind):
            return
        name = f"{kind.__module__}.{kind.__qualname__}"
        what = f"values {how} an object of {name}, which nobody has allowed"
        fix = f"Only if you trust its author: torch.serialization.add_safe_globals([{name}])"
        raise UnsafeError(what, where=self.where, fix=fix)

    openers: dict[type, Callable[[Any, Any], None]] = {  # noqa: RUF012 - declared in the base
        list: Walk.open_list,
        tuple: Walk.open_tuple,
        Dict: Walk.open_dict,
        Set: Walk.open_set,
        bytearray: Walk.open_bytearray,
        bytes: Walk.open_text,
        Call: open_call,
        Global: open_global,
        Persistent: open_persistent,
    }


def _callee(node: Call) -> Global:
    callee = node.callee if type(node.callee) is Global else module_class(node.callee)
    if type(callee) is not Global:
        raise Wrong("a call of something that is no name")
    return callee


def _give_state(made: Any, state: Any) -> None:
    """BUILD, as pickle does it."""
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
        return
    slots = None
    if isinstance(state, tuple) and len(state) == 2:
        state, slots = state
    if state:
        vars(made).update(state)
    for name, value in (slots or {}).items():
        setattr(made, name, value)
