"""Objects from the inert graph of a pickle, through a fixed table: what a restricted unpickler does, without a pickle.

``build_object`` is the front: a ``_Builder`` walks over the graph. Plain values are made by ``BUILDERS``, tensors by a
``Rebuilder``, which does what torch's rebuild functions do after their arguments have been checked. torch trusts those
arguments. Here a view that reaches beyond its storage (which torch would silently enlarge), parts of a nested tensor
beyond its buffer, or scales that are fewer than the channels are damage, and are reported. Most tensors of most files
are ordinary, and take the short way through ``ordinary``.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from transload.dtypes import ITEMSIZE, itemsize
from transload.errors import BrokenFileError, LoadError, TransloadError, UnsafeError
from transload.loading.refusal import Allowed, Unknown, name_of
from transload.nodes import Big, Call, Dict, Extension, Global, OutOfBand, Persistent, Pickle, Set, module_class

if TYPE_CHECKING:
    import torch

    from transload.checkpoint import Storage, Tensor
    from transload.loading.placement import DeviceMap
    from transload.tensors import Piece

__all__ = [
    "Wrong",
    "build_object",
    "is_fake_mode",
    "kind_of",
    "ordinary",
    "plain_tensors",
    "sparse_tensor",
    "validate",
    "view",
]


Args = tuple[Any, ...]

_LATIN = ("latin1", "latin-1")
_MAX_RANK = 1024
_MAX_SIZE = 1 << 63

Step = Callable[[Any], None]

_ATOMS = frozenset({str, int, float, bool, bytes, type(None)})
_MAPPINGS = (dict, OrderedDict, Counter, defaultdict)
_FROM_TYPE = frozenset({"torch._tensor._rebuild_from_type_v2", "torch._tensor._rebuild_from_type"})
_GET_AGAIN = "No release of torch writes that. Get the file again from its author."
_ODD: dict[type, str] = {
    Big: "an integer of thousands of digits",
    Extension: "a name that it gives only by number",
    OutOfBand: "a buffer that lies outside the file",
}


class Wrong(Exception):  # noqa: N818 - a signal inside this room, never seen outside
    """A call that no checkpoint makes; the text says what is wrong with it, ``node`` where that was met."""

    node: object = None


def build_object(
    piece: Piece,
    pickle: Pickle,
    storages: dict[str, torch.UntypedStorage],
    device_map: DeviceMap,
    encoding: str = "utf-8",
) -> Any:
    """The object a pickle describes, over storages that are in place.

    ``BrokenFileError`` for a call that no checkpoint makes, ``UnsafeError`` for one that nobody has allowed.
    """
    where = f"{piece.checkpoint.path} › {pickle.name}" if pickle.name else piece.checkpoint.path
    rebuilder = Rebuilder(device_map)
    builder = _Builder(pickle, where, encoding, Storages(piece, storages, device_map), rebuilder)
    try:
        made = builder.run(pickle.root)
        rebuilder.check_sparse()
    except Wrong as reason:
        position = getattr(reason.node, "position", None)
        place = where if position is None else f"{where} › byte {position}"
        raise BrokenFileError(f"it holds {reason}", where=place, fix=_GET_AGAIN) from reason
    except Unknown as name:
        what = f"it holds {name}, which this torch does not have"
        raise LoadError(what, where=where, fix="A newer torch may have it.") from name
    except TransloadError:
        raise
    except Exception as error:
        first = str(error).partition("\n")[0]
        raise LoadError(f"torch failed on a tensor in it: {type(error).__name__}: {first}", where=where) from error
    return made


class _Missing(Exception):  # noqa: N818 - a signal inside this module
    """Something is needed that is not made yet; ``args[0]`` is the identity of its node."""


class _Builder:
    """One walk over one graph, with a stack of its own: a graph may be deeper than Python's.

    ``made`` are the objects so far, by the identity of their nodes. A node is *opened* when it is met: what can exist
    before its parts (a list, a dictionary) is made at once and filled later; what cannot (a tuple, the result of a
    call) is made when its parts are there, and is busy until then.
    """

    def __init__(self, pickle: Pickle, where: str, encoding: str, storages: Storages, rebuilder: Rebuilder) -> None:
        self.made: dict[int, Any] = {}
        self._where = where
        self._encoding = encoding
        self._built = pickle.built
        self._busy: set[int] = set()
        self._stack: list[tuple[Step, Any]] = []
        self._waiting: dict[int, list[tuple[Step, Any]]] = {}
        # Bytes in a pickle of Python 2 are text that the reader could not decode.
        self._atoms = _ATOMS - {bytes} if pickle.undecoded else _ATOMS
        self._storages = storages
        self._allowed = Allowed()
        self._rebuilder = rebuilder
        self._outside: dict[str, Any] = {}
        self._names = {node: name_of(node) for node in pickle.globals.values()}
        self._single = ordinary(storages.known, self.made, self._names)

    def run(self, root: object) -> Any:
        """The object of a node, with all that it needs; ``Wrong`` if there can be none."""
        if self._built:
            raise Wrong("attributes of something that has none")
        node = root
        self._need((root,))
        try:
            while self._stack:
                step, node = self._stack.pop()
                try:
                    step(node)
                except _Missing as missing:
                    self._waiting.setdefault(missing.args[0], []).append((step, node))
        except Wrong as reason:
            reason.node = node
            raise
        if self._waiting:
            raise Wrong("an object that has to be there before it is made")
        return self._get(root)

    def _get(self, node: Any) -> Any:
        """What a node has become; ``_Missing`` if it has not yet."""
        if type(node) in self._atoms:
            return node
        ident = id(node)
        if ident not in self.made:
            raise _Missing(ident)
        return self.made[ident]

    def _ready(self, nodes: Iterable[Any]) -> list[Any] | None:
        """What nodes have become, or become in one step; ``None`` if some take more than that."""
        atoms, made, single = self._atoms, self.made, self._single
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

    def _need(self, nodes: Iterable[Any]) -> None:
        """Let nodes be made next, those that are not yet."""
        atoms, made, step = self._atoms, self.made, self._open
        wanted = [(step, node) for node in nodes if type(node) not in atoms and id(node) not in made]
        wanted.reverse()
        self._stack += wanted

    def _later(self, step: Step, node: Any, needed: Iterable[Any]) -> None:
        """Take a step when other nodes have been made."""
        self._stack.append((step, node))
        self._need(needed)

    def _done(self, node: Any, value: Any) -> None:
        """A node that could not exist before its parts has become a value."""
        ident = id(node)
        self.made[ident] = value
        self._busy.discard(ident)
        if self._waiting:
            self._stack += reversed(self._waiting.pop(ident, ()))

    def _open(self, node: Any) -> None:
        ident = id(node)
        if ident in self.made or ident in self._busy:
            return
        opener = self._OPENERS.get(type(node))
        if opener is None:
            raise Wrong(_ODD.get(type(node), "something that is no value"))
        opener(self, node)

    # -- values

    def _open_bytearray(self, node: bytearray) -> None:
        self.made[id(node)] = node

    def _open_text(self, node: bytes) -> None:
        """Text of Python 2 that is not UTF-8."""
        if self._encoding == "bytes":
            self.made[id(node)] = node
            return
        try:
            self.made[id(node)] = node.decode(self._encoding)
        except UnicodeDecodeError as error:
            what = f"Python 2 wrote text into it that is not {self._encoding}"
            fix = "Pass encoding='latin1', or the encoding it was written in."
            raise LoadError(what, where=self._where, fix=fix) from error

    def _open_list(self, node: list[Any]) -> None:
        values = self.made[id(node)] = []
        ready = self._ready(node)
        if ready is None:
            self._later(lambda node: values.extend([self._get(child) for child in node]), node, node)
        else:
            values += ready

    def _open_tuple(self, node: tuple[Any, ...]) -> None:
        atoms = self._atoms
        if all(type(child) in atoms for child in node):
            self.made[id(node)] = node
            return
        self._busy.add(id(node))
        self._later(lambda node: self._done(node, tuple([self._get(child) for child in node])), node, node)

    def _open_dict(self, node: Dict) -> None:
        into: dict[Any, Any] = {}
        self.made[id(node)] = into
        ready = self._ready(node.items)
        if ready is None:
            self._later(lambda node: _set_items(into, [self._get(item) for item in node.items]), node, node.items)
        else:
            _set_items(into, ready)

    def _open_set(self, node: Set) -> None:
        if node.frozen:
            self._busy.add(id(node))
        else:
            self.made[id(node)] = set()
        self._later(self._fill_set, node, node.items)

    def _fill_set(self, node: Set) -> None:
        values = [self._get(item) for item in node.items]
        try:
            members = frozenset(values)
        except TypeError as error:
            raise Wrong(f"a set of what cannot be in one: {error}") from error
        if node.frozen:
            self._done(node, members)
        else:
            self.made[id(node)].update(members)

    # -- names and storages

    def _open_global(self, node: Global) -> None:
        self.made[id(node)] = self._object_of(node)

    def _object_of(self, node: Global) -> Any:
        """The object of an allowed name."""
        found = self._allowed.object_of(node)
        if found is None:
            raise UnsafeError(f"it names {node.full_name}, which nobody has allowed", where=self._where)
        return found

    def _open_persistent(self, node: Persistent) -> None:
        """A storage; in the older formats also a class, or a tensor described elsewhere."""
        outside = self._storages.outside(node)
        kind = module_class(node)
        if outside is not None:  # the same tensor each time it is named
            key = str(node.id)
            if key not in self._outside:
                args = (self._storages.typed(outside[0]), *outside[1:])
                self._outside[key] = self._rebuilder.make("torch._utils._rebuild_tensor", args)
            self.made[id(node)] = self._outside[key]
        elif type(kind) is Global and not self._storages.is_storage(node):
            self.made[id(node)] = self._object_of(kind)
        else:
            self.made[id(node)] = self._storages.typed(node)

    # -- calls

    def _open_call(self, node: Call) -> None:
        """When its arguments are there; an ordinary tensor at once."""
        tensor = self._single(node, self._checked)
        if tensor is not None:
            self.made[id(node)] = tensor
            return
        if type(node.args) is not tuple:
            raise Wrong("a call whose arguments are no tuple")
        self._busy.add(id(node))
        # The function is only named there, and is one of ours where torch has it no more.
        needed = node.args[1:] if self._called(node) in _FROM_TYPE else node.args
        self._later(self._call, node, needed if node.kwargs is None else (*needed, node.kwargs))

    def _checked(self, entry: Entry, args: Args) -> Any:
        """A tensor that is ordinary but for its numbers; ``None`` if this torch does not have its dtype."""
        dtype = entry[2][3]
        if dtype is None:
            return None
        made = self._rebuilder.strided(self._storages.own(entry), dtype, *args[1:4])
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
            made = self._apply(name, node, tuple([self._get(argument) for argument in arguments]))
        self._done(node, made)
        # The last on the stack comes first: what is appended, then items, then states.
        if node.states:
            self._stack.append((lambda node: self._later(self._set_states, node, node.states), node))
        if node.items:
            self._stack.append((self._open_items, node))
        if node.appended:
            self._stack.append((lambda node: self._later(self._append, node, node.appended), node))

    def _from_type(self, node: Call) -> Any:
        """``_rebuild_from_type_v2(function, class, arguments, state)``."""
        arguments: Any = node.args
        if len(arguments) != 4 or type(arguments[0]) is not Global:
            raise Wrong("a tensor that is made by something that is no name")
        kind, args, state = (self._get(argument) for argument in arguments[1:])
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
        if node.kwargs is None or (type(node.kwargs) is Dict and not node.kwargs.items):
            if name in BUILDERS:
                return BUILDERS[name](args)
            if self._rebuilder.has(name):
                return self._rebuilder.make(name, args)
        callee = _callee(node)
        target = self._allowed.user(callee)
        if target is None and self._allowed.is_known(callee):
            if args or not name.endswith("Tensor"):
                raise Wrong(f"a call of {name}, as no checkpoint has")
            kind = self._object_of(callee)  # torch.FloatTensor(): empty, to be given its state
            return self._run(name, kind.__new__, (kind,))
        # What the program has allowed is called as pickle would call it.
        if node.kind == "reduce" or target is None:
            return self._run(name, target, args)
        if not isinstance(target, type):
            raise Wrong(f"an object of {name}, which is no class")
        if node.kind in ("newobj", "newobj_ex") or not args:
            kwargs = {} if node.kwargs is None else self._get(node.kwargs)
            return self._run(name, target.__new__, (target, *args), kwargs)
        return self._run(name, target, args)

    def _run(self, name: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        if target is None:
            raise UnsafeError(f"it calls {name}, which nobody has allowed", where=self._where)
        try:
            return target(*args, **(kwargs or {}))
        except Exception as error:
            what = f"{name} failed on what the file gives it: {type(error).__name__}: {error}"
            raise LoadError(what, where=self._where) from error

    # -- what is put into the result of a call

    def _append(self, node: Call) -> None:
        made = self._get(node)
        self._check_type(made, (list, set), "are appended to")
        values = [self._get(value) for value in node.appended or ()]
        add = getattr(made, "extend", None) or getattr(made, "update", None)
        self._run(f"appending to {type(made).__name__}", add, (values,))

    def _open_items(self, node: Call) -> None:
        ready = self._ready(node.items or ())
        if ready is None:
            self._later(self._fill_items, node, node.items or ())
        else:
            self._set_items(node, ready)

    def _fill_items(self, node: Call) -> None:
        self._set_items(node, [self._get(item) for item in node.items or ()])

    def _set_items(self, node: Call, values: list[Any]) -> None:
        made = self._get(node)
        self._check_type(made, _MAPPINGS, "are put into")
        _set_items(made, values)

    def _set_states(self, node: Call) -> None:
        import torch

        made = self._get(node)
        for state in [self._get(state) for state in node.states or ()]:
            if type(made) is OrderedDict:
                _set_attributes(made, state)
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
        raise UnsafeError(what, where=self._where, fix=fix)

    # Not in the instance, which would then hold itself.
    _OPENERS: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        list: _open_list,
        tuple: _open_tuple,
        Dict: _open_dict,
        Set: _open_set,
        bytearray: _open_bytearray,
        bytes: _open_text,
        Call: _open_call,
        Global: _open_global,
        Persistent: _open_persistent,
    }


def _callee(node: Call) -> Global:
    callee = node.callee if type(node.callee) is Global else module_class(node.callee)
    if type(callee) is not Global:
        raise Wrong("a call of something that is no name")
    return callee


def _set_items(into: Any, values: list[Any]) -> None:
    """Put keys and values, in turn, into a dictionary."""
    pairs = zip(values[::2], values[1::2], strict=True)
    try:
        if type(into) in (dict, OrderedDict):  # a Counter would add the values up
            into.update(pairs)
            return
        for key, value in pairs:
            into[key] = value
    except TypeError as error:
        raise Wrong(f"a key that cannot be one: {error}") from error


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


def plain_tensors(piece: Piece, storages: dict[str, torch.UntypedStorage], device_map: DeviceMap) -> dict[str, Any]:
    """The tensors of a safetensors file by name."""
    checkpoint = piece.checkpoint
    known: dict[Any, Entry] = entries(checkpoint.storages, storages, device_map)
    rebuilder = Rebuilder(device_map)
    made: dict[str, Any] = {}
    for tensor in checkpoint.tensors:
        entry = known.get(tensor.storage)
        found = None
        if entry is not None and entry[2][4] == tensor.dtype:
            found = view(entry, tensor.offset, tensor.shape, tensor.stride)
        made[tensor.name] = _plain_tensor(checkpoint.path, tensor, entry, rebuilder) if found is None else found
    return made


def _plain_tensor(path: str, tensor: Tensor, entry: Entry | None, rebuilder: Rebuilder) -> Any:
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


class Storages:
    """The storages that were read, by persistent id; also tensors that a tar archive describes beside its pickle."""

    def __init__(self, piece: Piece, storages: dict[str, torch.UntypedStorage], device_map: DeviceMap) -> None:
        import torch

        self._torch = torch
        self.known = entries(piece.checkpoint.storages, storages, device_map)
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


def _counter(args: Args) -> Counter[Any]:
    made: Counter[Any] = Counter()
    dict.update(made, _content(args, "a Counter"))
    return made


def _content(args: Args, what: str) -> Any:
    """Nothing, a dictionary, or a list of pairs as Python 2 writes it."""
    if not args:
        return ()
    content = args[0] if len(args) == 1 else None
    pairs = type(content) is list and all(type(pair) in (list, tuple) and len(pair) == 2 for pair in content)
    if type(content) is dict or pairs:
        return content
    raise Wrong(f"{what} that is made from what is no dictionary")


def _set(args: Args) -> set[Any]:
    if len(args) > 1 or any(type(arg) not in (list, tuple) for arg in args):
        raise Wrong("a set that is made from what is no list")
    try:
        return set(*args)
    except TypeError as error:
        raise Wrong(f"a set of what cannot be in one: {error}") from error


def _bytearray(args: Args) -> bytearray:
    match args:
        case ():
            return bytearray()
        case (bytes() as data,):
            return bytearray(data)
        case (str() as text, str() as codec) if codec in _LATIN:
            return bytearray(_latin(text))
    raise Wrong("a byte array that is made from what are no bytes")


def _bytes(args: Args) -> bytes:
    if args:  # protocol 2 writes only the empty ones so
        raise Wrong("bytes that are made from something")
    return b""


def _defaultdict(args: Args) -> defaultdict[Any, Any]:
    if len(args) > 1 or any(factory is not None and factory not in _FACTORIES for factory in args):
        raise Wrong("a defaultdict that makes something else than plain values")
    return defaultdict(*args)


_FACTORIES = (bool, bytearray, bytes, complex, dict, float, frozenset, int, list, set, str, tuple, OrderedDict, Counter)


def _version(args: Args) -> Any:
    from torch.torch_version import TorchVersion

    if len(args) != 1 or type(args[0]) is not str:
        raise Wrong("a version that is no text")
    return TorchVersion(args[0])


def _encode(args: Args) -> bytes:
    match args:
        case (str() as text, str() as codec) if codec in _LATIN:
            return _latin(text)
    raise Wrong("a call of _codecs.encode for another codec than latin1")


def _latin(text: str) -> bytes:
    try:
        return text.encode("latin1")
    except UnicodeEncodeError:
        raise Wrong("bytes that are written as text which latin1 does not have") from None


def _complex(args: Args) -> complex:
    if len(args) > 2 or any(type(arg) not in (float, int) for arg in args):
        raise Wrong("a complex number that is made from what are no numbers")
    return complex(*args)


def _size(args: Args) -> Any:
    import torch

    if len(args) > 1 or any(type(arg) is not tuple or len(arg) > _MAX_RANK for arg in args):
        raise Wrong("a torch.Size that is made from what is no tuple")
    if args and any(type(size) is not int or not -(1 << 63) <= size < 1 << 63 for size in args[0]):
        raise Wrong("a torch.Size of what are no numbers")
    return torch.Size(*args)


def _device(args: Args) -> Any:
    import torch

    match args:
        case (str() | int(),) | (str(), int()):
            return torch.device(*args)
    raise Wrong("a torch.device that is made from what is no name and index")


def _layout(args: Args) -> Any:
    import torch

    if len(args) != 1 or type(args[0]) is not str:
        raise Wrong("a layout without its name")
    found = getattr(torch, args[0].removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise Wrong(f"the layout {args[0][:80]}, which there is not")
    return found


BUILDERS: dict[str, Callable[[Args], Any]] = {
    "_codecs.encode": _encode,
    "builtins.bytearray": _bytearray,
    "builtins.bytes": _bytes,
    "builtins.complex": _complex,
    "builtins.frozenset": lambda args: frozenset(_set(args)),
    "builtins.set": _set,
    "collections.Counter": _counter,
    "collections.OrderedDict": lambda args: OrderedDict(_content(args, "an OrderedDict")),
    "collections.defaultdict": _defaultdict,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": _layout,
    "torch.torch_version.TorchVersion": _version,
}


def _set_attributes(made: OrderedDict[Any, Any], state: object) -> None:
    """Attributes of an ordered dictionary, such as the ``_metadata`` of a state dict; none that it has already."""
    if not isinstance(state, Mapping):
        raise Wrong("an OrderedDict that is given a state which names no attributes")
    for name in state:
        if type(name) is not str or hasattr(OrderedDict, name):
            raise Wrong(f"an OrderedDict that is given the attribute {str(name)[:60]!r}, which it has already")
    vars(made).update(state)


Kind = tuple[Any, int, bool, Any, str]
"""An empty tensor of some dtype and device (``None`` if there is none), the bytes of an element, whether it can have
gradients; the dtype (``None`` if this torch has it not) and its name. The ``data`` of the empty tensor is a new one
with a version counter of its own, at a tenth of the price of ``torch.empty``."""
Entry = tuple[Any, int, Kind]
"""An untyped storage, its bytes, and what is in it."""

Make = Callable[..., Any]

_ABSENT = object()
_MAX_RANK_ORDINARY = 64
_V2 = "torch._utils._rebuild_tensor_v2"
_V3 = "torch._utils._rebuild_tensor_v3"
_PARAMETER = "torch._utils._rebuild_parameter"
_ORDERED = "collections.OrderedDict"


def kind_of(name: str, device: torch.device) -> Kind:
    """The kind of tensors of a dtype, by its name, on a device."""
    import torch

    dtype = getattr(torch, name, None)
    dtype = dtype if isinstance(dtype, torch.dtype) else None
    if dtype is None or device.type == "meta":  # some releases of torch change a meta storage with every view of it
        return None, 1, False, dtype, name
    try:
        empty = torch.empty((0,), dtype=dtype, device=device)
    except (RuntimeError, TypeError):
        return None, 1, False, dtype, name
    usable = type(empty) is torch.Tensor and empty.dtype == dtype and empty.device == device and not empty.is_quantized
    floats = dtype.is_floating_point or dtype.is_complex
    return (empty if usable else None), empty.element_size(), floats, dtype, name


def entries(
    storages: Iterable[Storage], held: Mapping[str, torch.UntypedStorage], device_map: DeviceMap
) -> dict[str, Entry]:
    """What there is to know of each storage, by id."""
    by_tag = bool(device_map.locations)  # a function of the caller's may put those of one tag on several devices
    kinds: dict[tuple[str, Any], Kind] = {}
    found: dict[str, Entry] = {}
    for each in storages:
        storage = held[each.id]
        key = each.dtype, each.device if by_tag else storage.device
        kind = kinds.get(key)
        if kind is None:
            kind = kinds[key] = kind_of(each.dtype, storage.device)
        found[each.id] = storage, storage.nbytes(), kind
    return found


def view(entry: Entry, offset: Any, size: Any, stride: Any) -> torch.Tensor | None:
    """A view of a storage, none of it outside; ``None`` where that, or that these are numbers, is not plain to see."""
    storage, nbytes, kind = entry
    empty = kind[0]
    if type(size) is not tuple or type(stride) is not tuple or type(offset) is not int or offset < 0 or empty is None:
        return None
    left = rank = len(size)
    if len(stride) != rank or rank > _MAX_RANK_ORDINARY:
        return None
    numel = 1
    while left:  # zip() would take as long as torch does
        left -= 1
        count, step = size[left], stride[left]
        if type(count) is not int or type(step) is not int or step != numel or count < 1:
            return empty.data.set_(storage, offset, size, stride) if _is_within(entry, offset, size, stride) else None
        numel *= count
    end = (offset + numel) * kind[1]
    if rank == 1 and end == nbytes and not offset:
        return empty.data.set_(storage)  # the whole of it, as it lies there
    return empty.data.set_(storage, offset, size, stride) if end <= nbytes else None


def _is_within(entry: Entry, offset: int, size: Any, stride: Any) -> bool:
    """Whether a view that is not contiguous is one of numbers, has elements, and lies in its storage."""
    _, nbytes, kind = entry
    last, numel = offset, 1
    for count, step in zip(size, stride, strict=True):
        if type(count) is not int or type(step) is not int or count < 1 or not 0 <= step <= nbytes:
            return False
        last += (count - 1) * step
        numel *= count
    return (last + 1) * kind[1] <= nbytes and numel <= nbytes


def ordinary(known: Mapping[str, Entry], made: dict[int, Any], names: Mapping[Global, str]) -> Make:
    """A function that makes the tensor of a call, and notes its hooks in ``made``; ``None`` if it is not so ordinary.

    ``names`` are what the names in the file stand for. With a second argument, that function gets the entry and the
    arguments of a tensor that is ordinary but for its numbers.
    """
    nodes = {name: node for node, name in names.items()}
    kinds: dict[tuple[str, Any], Kind] = {}
    v2, v3, hooked = (nodes.get(name, _ABSENT) for name in (_V2, _V3, _ORDERED))

    # A file has this by the ten thousand: taken apart into functions it takes half as long again.
    def make(node: Any, otherwise: Callable[..., Any] | None = None) -> Any:
        args: Any = node.args if type(node) is Call else None
        if type(args) is not tuple or node.states or node.items or node.appended or node.kwargs is not None:
            return None
        dtype = None
        if node.callee is v3 and len(args) == 7:
            args, dtype = args[:6], args[6]
        elif node.callee is not v2 or len(args) != 6:
            return None
        storage, offset, size, stride, grad, hooks = args
        pid = storage.id if type(storage) is Persistent else None
        if type(pid) is not tuple or not (len(pid) == 5 or (len(pid) == 6 and pid[5] is None)):
            return None
        entry = known.get(pid[2]) if pid[0] == "storage" and type(pid[2]) is str else None
        if entry is None or id(hooks) in made or not _is_fresh(hooks, hooked):
            return None
        if dtype is not None:  # it is named beside the storage, which does not know the newer ones
            untyped, nbytes, _ = entry
            key = names.get(dtype, "") if type(dtype) is Global else "", untyped.device
            if key not in kinds:
                kinds[key] = kind_of(key[0].removeprefix("torch."), untyped.device)
            entry = untyped, nbytes, kinds[key]
        tensor: Any = view(entry, offset, size, stride) if grad is False or (grad is True and entry[2][2]) else None
        if tensor is None:
            return None if otherwise is None else otherwise(entry, args)
        if grad:
            tensor.requires_grad = True
        made[id(hooks)] = tensor._backward_hooks = OrderedDict()  # noqa: SLF001 - torch has no public way
        return tensor

    return _with_parameters(make, made, nodes) if _PARAMETER in nodes else make


def _is_fresh(hooks: Any, hooked: object) -> bool:
    """Whether hooks are none: an empty dictionary that nothing is put into."""
    if type(hooks) is not Call or hooks.callee is not hooked or hooks.args != () or hooks.kwargs is not None:
        return False
    return not (hooks.states or hooks.items or hooks.appended)


def _with_parameters(make: Make, made: dict[int, Any], nodes: Mapping[str, Global]) -> Make:
    """A function that also makes parameters of ordinary tensors."""
    from torch.nn import Parameter

    callee, hooked = nodes[_PARAMETER], nodes.get(_ORDERED, _ABSENT)

    def single(node: Any, otherwise: Callable[..., Any] | None = None) -> Any:
        if type(node) is not Call or node.callee is not callee:
            return make(node, otherwise)
        args: Any = node.args
        if type(args) is not tuple or len(args) != 3 or node.states or node.items or node.appended:
            return None
        data, grad, hooks = args
        if type(grad) is not bool or not _is_fresh(hooks, hooked) or id(hooks) in made or node.kwargs is not None:
            return None
        tensor = None if id(data) in made else make(data)
        if tensor is None:
            return None
        made[id(data)] = tensor
        if grad and not (tensor.is_floating_point() or tensor.is_complex()):
            return None
        parameter: Any = Parameter(tensor, grad)
        made[id(hooks)] = parameter._backward_hooks = OrderedDict()  # noqa: SLF001 - torch has no public way
        return parameter

    return single


def _meta(maker: Rebuilder, dtype: object, size: Any, stride: Any, grad: object) -> torch.Tensor:
    if not are_sizes(size) or not are_sizes(stride) or len(size) != len(stride):
        raise Wrong("a meta tensor whose size or stride is no number")
    kind = maker.dtype(dtype)
    return maker.torch.empty_strided(size, stride, dtype=kind, device="meta", requires_grad=grad is True)


def _wrapper(maker: Rebuilder, *args: Any) -> torch.Tensor:
    """(class, dtype, size, stride, offset, layout, device, requires_grad)."""
    kind, dtype, size, stride, offset, layout, device, grad = args
    if not isinstance(kind, type) or not issubclass(kind, maker.torch.Tensor):
        raise Wrong("a wrapper of a class that is none of tensors")
    if not are_sizes(size) or not are_sizes(stride):
        raise Wrong("a wrapper whose size or stride is no number")
    made: torch.Tensor = maker.torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 - as torch.load does
        kind,
        size,
        strides=stride,
        dtype=maker.dtype(dtype),
        storage_offset=offset,
        layout=layout,
        device=maker.device_map.device(str(device)),
        requires_grad=grad is True,
    )
    return made


# -- quantized


def _quantized(maker: Rebuilder, *args: Any) -> Any:
    """(storage, offset, size, stride, quantizer, requires_grad, hooks)."""
    storage, offset, size, stride, quantizer, grad, hooks = args
    held, dtype = maker.storage(storage)
    device = maker.check(held, dtype, offset, size, stride)
    if type(quantizer) is not tuple or not quantizer:
        raise Wrong("a quantized tensor without a quantizer")
    if quantizer[0] == maker.torch.per_tensor_affine:
        if len(quantizer) != 3 or type(quantizer[1]) is not float or type(quantizer[2]) is not int:
            raise Wrong("a quantized tensor whose scale is no number")
        empty: Any = maker.torch._empty_affine_quantized  # noqa: SLF001 - as torch.load does
        made = empty(size, scale=quantizer[1], zero_point=quantizer[2], dtype=dtype, device=device)
    else:
        made = _by_channel(maker, size, quantizer, dtype, device)
    made.set_(held, offset, size, stride)
    return maker.finish(made, grad, hooks)


def _by_channel(maker: Rebuilder, size: Any, quantizer: Args, dtype: Any, device: Any) -> Any:
    """(scheme, scales, zero points, axis)."""
    torch = maker.torch
    kinds = {
        torch.per_channel_affine: (torch.double, torch.long),
        torch.per_channel_affine_float_qparams: (torch.float, torch.float),
    }.get(quantizer[0])
    if kinds is None or len(quantizer) != 4:
        raise Wrong("a quantized tensor of no known scheme")
    axis = quantizer[3]
    if type(axis) is not int or not 0 <= axis < len(size):
        raise Wrong("a quantized tensor whose axis is none of its dimensions")
    parts: list[Any] = []  # scales and zero points: tensors, or lists as older releases wrote them
    for part, kind in zip(quantizer[1:3], kinds, strict=True):
        if type(part) is list and all(type(number) in (int, float) for number in part):
            parts.append(torch.tensor(part, dtype=kind, device=device))
        else:
            parts.append(maker.tensor(part, "a quantized tensor with a scale"))
    if any(part.numel() != size[axis] for part in parts):
        raise Wrong("a quantized tensor with more or fewer scales than channels")
    empty: Any = torch._empty_per_channel_affine_quantized  # noqa: SLF001 - as torch.load does
    return empty(size, scales=parts[0], zero_points=parts[1], axis=axis, dtype=dtype, device=device)


# -- sparse


def _sparse(maker: Rebuilder, layout: Any, data: Any) -> Any:
    parts = 2 if layout == maker.torch.sparse_coo else 3
    most = 4  # of a COO tensor perhaps also whether it is coalesced
    if type(data) is not tuple or not parts < len(data) <= most or not are_sizes(data[parts]):
        raise Wrong("a sparse tensor whose parts are missing")
    for part in data[:parts]:
        maker.tensor(part, "a sparse tensor with a part")
    try:
        made = sparse_tensor(layout, data)
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise Wrong(f"a sparse tensor that makes no sense: {error}") from error
    maker.to_check.append(made)
    return made


def _sparse_csr(maker: Rebuilder, rows: object, columns: object, values: object, size: Any, _: object = None) -> Any:
    return _sparse(maker, maker.torch.sparse_csr, (rows, columns, values, size))


# -- nested


def _nested(maker: Rebuilder, buffer: object, sizes: object, strides: object, offsets: object) -> Any:
    held = maker.tensor(buffer, "a nested tensor with a buffer")
    numbers = [maker.tensor(part, "a nested tensor with sizes") for part in (sizes, strides, offsets)]
    if held.device.type != "meta":
        try:
            for size, stride, offset in zip(*(part.tolist() for part in numbers), strict=True):
                last = offset + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
                negative = any(type(number) is not int or number < 0 for number in (*size, *stride, offset))
                if negative or (0 not in size and last >= held.numel()):
                    raise Wrong("a nested tensor that reaches beyond its buffer")
        except (TypeError, ValueError) as error:
            raise Wrong("a nested tensor whose parts do not fit together") from error
    view: Any = getattr(maker.torch, "_nested_view_from_buffer", None)
    if view is None:
        raise Unknown("torch.nested: a nested tensor")
    return view(held, *numbers)


# -- other devices


def _from_cpu(maker: Rebuilder, data: object, dtype: object, device: object, grad: object) -> torch.Tensor:
    where = maker.device_map.device(str(device))
    made = maker.tensor(data, "a device tensor made of something").to(dtype=maker.dtype(dtype), device=where)
    made.requires_grad = grad is True
    return made


def _from_numpy(maker: Rebuilder, data: Any, dtype: object, device: object, grad: object) -> torch.Tensor:
    try:
        held = maker.torch.from_numpy(data)
    except TypeError as error:
        raise Wrong(f"a device tensor that is made of no array: {error}") from error
    return _from_cpu(maker, held, dtype, device, grad)


class Rebuilder:
    """Makes tensors for one load; ``make`` by the name of torch's function."""

    def __init__(self, device_map: DeviceMap) -> None:
        import torch

        self.torch = torch
        self.device_map = device_map
        self._names: dict[Any, str] = {}
        # What torch does with a tensor it loads while tensors are only pretended.
        self._faked = getattr(torch._utils, "_restore_device_fake_mode", None) if is_fake_mode() else None  # noqa: SLF001 - torch has no public way
        self.to_check: list[torch.Tensor] = []
        """Sparse tensors: their indices can be checked only when their bytes are there."""

    def has(self, name: str) -> bool:
        """Whether tensors are made by that name."""
        return name in _MAKERS

    def make(self, name: str, args: Args) -> Any:
        """What the function of that name makes of arguments that are built already."""
        maker, least, most = _MAKERS[name]
        if not least <= len(args) <= most:
            raise Wrong(f"{name} is called with {len(args)} arguments")
        return maker(self, *args)

    # -- checked arguments

    def storage(self, storage: object) -> tuple[torch.UntypedStorage, torch.dtype]:
        """A storage and the dtype it has."""
        if not isinstance(storage, self.torch.storage.TypedStorage):
            raise Wrong("a tensor without a storage")
        return storage._untyped_storage, storage.dtype  # noqa: SLF001 - the public way warns

    def dtype(self, dtype: object) -> torch.dtype:
        """A dtype."""
        if not isinstance(dtype, self.torch.dtype):
            raise Wrong("a tensor whose dtype is none")
        return dtype

    def tensor(self, value: object, what: str) -> torch.Tensor:
        """A tensor."""
        if not isinstance(value, self.torch.Tensor):
            raise Wrong(f"{what} that is no tensor")
        return value

    def check(
        self, storage: torch.UntypedStorage, dtype: torch.dtype, offset: object, size: Any, stride: Any
    ) -> torch.device:
        """That a view lies in a storage; the device of that."""
        if type(offset) is not int or offset < 0 or not are_sizes(size) or not are_sizes(stride):
            raise Wrong("a tensor whose offset, size or stride is no number")
        if len(size) != len(stride):
            raise Wrong(f"a tensor with {len(size)} sizes and {len(stride)} strides")
        end, numel = offset + 1, 1
        for count, step in zip(size, stride, strict=True):
            numel *= count
            end += (count - 1) * step
        if numel >= _MAX_SIZE:
            raise Wrong("a tensor with more elements than torch can count")
        device = storage.device
        # A meta storage has no memory, and older releases of torch change its size with every view of it.
        if numel and self._nbytes(dtype, end) > storage.nbytes() and device.type != "meta":
            raise Wrong(f"a tensor that reaches beyond its storage of {storage.nbytes():,} bytes")
        return device

    def _nbytes(self, dtype: torch.dtype, count: int) -> int:
        """The bytes of so many elements; of a dtype that is newer than our list, as torch counts them."""
        name = self._names.get(dtype)
        if name is None:
            name = self._names[dtype] = str(dtype).removeprefix("torch.")
        return itemsize(name, count) if name in ITEMSIZE else count * self.torch.empty((), dtype=dtype).element_size()

    # -- strided tensors

    def strided(
        self, storage: torch.UntypedStorage, dtype: torch.dtype, offset: object, size: Any, stride: Any
    ) -> torch.Tensor:
        """A view of a storage, none of it outside."""
        empty = self.torch.empty((0,), dtype=dtype, device=self.check(storage, dtype, offset, size, stride))
        return empty.set_(storage, offset, size, stride)

    def finish(self, made: Any, grad: object, hooks: object, flags: object = None) -> Any:
        """Gradients, hooks, and the conjugate and negative bits."""
        if grad is True:
            if not (made.is_floating_point() or made.is_complex()):
                raise Wrong(f"a tensor of {made.dtype} that asks for gradients")
            made.requires_grad = True
        elif grad is not False:
            raise Wrong("a tensor that does not say whether it wants gradients")
        if flags:
            if type(flags) is not dict or any(type(flag) is not bool for flag in flags.values()):
                raise Wrong("a tensor with flags that are none")
            self.torch._utils.set_tensor_metadata(made, flags)  # noqa: SLF001 - torch has no public way
        made._backward_hooks = hooks  # noqa: SLF001 - the same
        return made if self._faked is None else self._faked(made)

    # -- attributes and classes

    def with_state(self, made: Any, state: object) -> Any:
        """Attributes of a tensor: a dictionary, or a pair of them where its class has slots."""
        parts = state if type(state) is tuple else (state,)
        if len(parts) > 2 or any(part is not None and type(part) is not dict for part in parts):
            raise Wrong("a tensor that is given a state which names no attributes")
        names = [name for part in parts if part for name in part]
        odd = next((name for name in names if type(name) is not str or name.startswith("__")), None)
        if odd is not None:
            raise Wrong(f"a tensor that is given the attribute {str(odd)[:60]!r}")
        return self.torch._utils._set_obj_state(made, state)  # noqa: SLF001 - as torch.load does

    def as_type(self, made: Any, kind: Any, state: object) -> Any:
        """A tensor as one of a subclass, with its state: ``torch._tensor._rebuild_from_type_v2``."""
        tensor: Any = self.torch.Tensor
        if not isinstance(made, tensor) or not isinstance(kind, type) or not issubclass(kind, tensor):
            raise Wrong("a tensor of a class that is none of tensors")
        if type(made) is not kind:
            made = made.as_subclass(kind)
        if getattr(kind, "__setstate__", tensor.__setstate__) is not tensor.__setstate__:
            made.__setstate__(state)
            return made
        return self.with_state(made, state)

    def build(self, made: Any, state: Any) -> None:
        """The state that releases before 0.4 gave to a tensor or parameter."""
        if type(state) is not tuple or len(state) not in (3, 4, 5):
            raise Wrong("a tensor that is given a state no tensor has")
        if len(state) == 4:
            storage, dtype = self.storage(state[0])
            self.check(storage, dtype, *state[1:])
            made.set_(storage, *state[1:])
            return
        if len(state) == 5:
            made.data = self.tensor(state[0], "the data of a variable")
            state = (state[3], state[4], state[2])
        made.requires_grad = False
        self.finish(made, state[0], state[2])

    def check_sparse(self) -> None:
        """That the indices of all sparse tensors lie inside them."""
        if self._faked is not None:
            return
        try:
            for made in self.to_check:
                validate(made)
        except RuntimeError as error:
            raise Wrong(f"a sparse tensor that makes no sense: {error}") from error


def _v1(maker: Rebuilder, storage: object, offset: object, size: Any, stride: Any) -> torch.Tensor:
    return maker.strided(*maker.storage(storage), offset, size, stride)


def _v2(maker: Rebuilder, *args: Any) -> Any:
    """(storage, offset, size, stride, requires_grad, hooks), and perhaps flags."""
    return maker.finish(_v1(maker, *args[:4]), *args[4:])


def _v3(maker: Rebuilder, *args: Any) -> Any:
    """(storage, offset, size, stride, requires_grad, hooks, dtype), and perhaps flags."""
    made = maker.strided(maker.storage(args[0])[0], maker.dtype(args[6]), *args[1:4])
    return maker.finish(made, *args[4:6], *args[7:])


def _plain_parameter(maker: Rebuilder, data: object, grad: object = True) -> Any:
    return maker.torch.nn.Parameter(maker.tensor(data, "a Parameter made of something"), grad is not False)


def _parameter(maker: Rebuilder, data: object, grad: object, hooks: object, state: object = None) -> Any:
    made = maker.torch.nn.Parameter(maker.tensor(data, "a Parameter made of something"), requires_grad=False)
    return maker.with_state(maker.finish(made, grad, hooks), state)


_MAKERS: dict[str, tuple[Callable[..., Any], int, int]] = {
    # function: ours, least and most arguments
    "torch._utils._rebuild_tensor": (_v1, 4, 4),
    "torch._utils._rebuild_tensor_v2": (_v2, 6, 7),
    "torch._utils._rebuild_tensor_v3": (_v3, 7, 8),
    "torch._utils._rebuild_parameter": (_parameter, 3, 3),
    "torch._utils._rebuild_parameter_with_state": (_parameter, 4, 4),
    "torch.nn.parameter.Parameter": (_plain_parameter, 1, 2),
    "torch._utils._rebuild_qtensor": (_quantized, 7, 7),
    "torch._utils._rebuild_sparse_tensor": (_sparse, 2, 2),
    "torch._utils._rebuild_sparse_csr_tensor": (_sparse_csr, 4, 5),
    "torch._utils._rebuild_nested_tensor": (_nested, 4, 4),
    "torch._utils._rebuild_meta_tensor_no_storage": (_meta, 4, 4),
    "torch._utils._rebuild_wrapper_subclass": (_wrapper, 8, 8),
    "torch._utils._rebuild_device_tensor_from_numpy": (_from_numpy, 4, 4),
    "torch._utils._rebuild_xla_tensor": (_from_numpy, 4, 4),
    "torch._utils._rebuild_mlc_tensor": (_from_numpy, 4, 4),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": (_from_cpu, 4, 4),
}


def is_fake_mode() -> bool:
    """Whether tensors are only pretended at the moment (``FakeTensorMode``)."""
    import torch

    active = getattr(torch._guards, "active_fake_mode", None)  # noqa: SLF001 - torch has no public way
    return active is not None and active() is not None


def sparse_tensor(layout: Any, data: Any) -> Any:
    """What ``torch._utils._rebuild_sparse_tensor`` makes, without the list of the whole process that it puts it on.

    ``check_invariants`` is as the program has it: any other value turns a switch of the whole process for a while, and
    two loads at a time would leave it so; left out, torch warns of that.
    """
    import torch

    switch = data[0].device.type != "meta" and torch.sparse.check_sparse_tensor_invariants.is_enabled()
    if layout == torch.sparse_coo:
        coalesced = data[3] if len(data) > 3 else None
        return torch.sparse_coo_tensor(*data[:3], check_invariants=switch, is_coalesced=coalesced)
    return torch.sparse_compressed_tensor(*data, layout=layout, check_invariants=switch)


def validate(made: Any) -> None:
    """``RuntimeError`` for a sparse tensor whose parts do not go together; torch has no public way to ask."""
    import torch

    if made.device.type == "meta":
        return
    if made.layout == torch.sparse_coo:
        look = torch._validate_sparse_coo_tensor_args  # noqa: SLF001 - the same
        indices: tuple[Any, ...] = (made._indices(),)  # noqa: SLF001 - the public way wants it coalesced
        rest = (made._values(), made.size(), made.is_coalesced())  # noqa: SLF001 - the same
    else:
        look = torch._validate_sparse_compressed_tensor_args  # noqa: SLF001 - the same
        rows = made.layout in (torch.sparse_csr, torch.sparse_bsr)
        indices = (made.crow_indices(), made.col_indices()) if rows else (made.ccol_indices(), made.row_indices())
        rest = (made.values(), made.size(), made.layout)
    try:
        look(*indices, *rest, check_pinning=False)  # which would start CUDA
    except TypeError:  # older releases have no such argument
        look(*indices, *rest)


def are_sizes(value: Any) -> bool:
    """A tuple of numbers from 0 on (``torch.Size`` is one)."""
    if not isinstance(value, tuple) or len(value) > _MAX_RANK:
        return False
    for number in value:  # noqa: SIM110 - this runs twice for each tensor, and all() takes twice as long
        if type(number) is not int or not 0 <= number < _MAX_SIZE:
            return False
    return True
