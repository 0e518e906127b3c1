"""A pickle's inert graph into objects, through a fixed table: what a restricted unpickler does, without a pickle."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transload.errors import TransloadError
from transload.loading.allowed import Allowed, Unknown, name_of
from transload.loading.errors import BrokenFileError, LoadError, UnsafeError
from transload.loading.graph import Walk, set_items
from transload.loading.held import Held
from transload.loading.objects import BUILDERS, Args, Wrong, set_attributes
from transload.loading.ordinary import Entry, ordinary
from transload.loading.rebuild import Rebuilder
from transload.nodes import Call, Dict, Global, Persistent, Set, module_class

if TYPE_CHECKING:
    import torch

    from transload.loading.arrival import Arrival
    from transload.loading.files import Piece
    from transload.nodes import Pickle

__all__ = ["build"]

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
