"""Objects from the inert graph of a pickle, through a fixed table: what a restricted unpickler does, without a pickle.

``build_object`` is the front: a ``_Builder`` walks over the graph. Most tensors of most files are made by ``ordinary``
here; all others, and rarer values, by a ``Rebuilder``, which is imported when it is first needed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from transload.errors import BrokenFileError, LoadError, TransloadError, UnsafeError
from transload.judge.ordinary import PURPOSES
from transload.loading.signals import NeedsTrust, Unknown, Wrong
from transload.nodes import Big, Call, Dict, Extension, Global, OutOfBand, Persistent, Pickle, Set, module_class

if TYPE_CHECKING:
    import torch

    from transload.checkpoint import Storage
    from transload.loading.placement import DeviceMap
    from transload.loading.rebuild import Rebuilder
    from transload.tensors import Piece

Args = tuple[Any, ...]
_Steps = Generator[Any, list[Any], None]
"""Makes one object: yields the nodes it needs, and is sent what they have become."""
_Task = tuple[Any, "_Steps | None", Any]
"""A node, what makes it (``None`` if that has not begun), and the nodes it needs now."""

_ATOMS = frozenset({str, int, float, bool, bytes, type(None)})
_MAPPINGS = (dict, OrderedDict, Counter, defaultdict)
_FROM_TYPE = frozenset({"torch._tensor._rebuild_from_type_v2", "torch._tensor._rebuild_from_type"})
_GET_AGAIN = "No release of torch writes that. Get the file again from its author."
_ODD: dict[type, str] = {
    Big: "an integer of thousands of digits",
    Extension: "a name that it gives only by number",
    OutOfBand: "a buffer that lies outside the file",
}


def build_object(
    piece: Piece,
    storages: dict[str, torch.UntypedStorage],
    device_map: DeviceMap,
    encoding: str = "utf-8",
    pickle: Pickle | None = None,
) -> Any:
    """The object that a pickle describes, the main one if none is given, over storages that are in place.

    ``BrokenFileError`` for a call that no checkpoint makes, ``UnsafeError`` for one that nobody has allowed.
    """
    pickle = pickle or next((pickle for pickle in piece.checkpoint.pickles if pickle.main), None)
    if pickle is None:
        raise LoadError("there is no object in it", where=piece.checkpoint.path)
    where = f"{piece.checkpoint.path} › {pickle.name}" if pickle.name else piece.checkpoint.path
    builder = _Builder(piece, pickle, storages, device_map, where, encoding)
    try:
        made = builder.run(pickle.root)
    except Wrong as reason:
        position = getattr(reason.node, "position", None)
        place = where if position is None else f"{where} › byte {position}"
        raise BrokenFileError(f"it holds {reason}", where=place, fix=_GET_AGAIN) from reason
    except NeedsTrust as reason:
        from transload.loading.refusal import in_phrases

        fix = "Only if you trust its author: pass weights_only=False, which runs whatever the file says."
        what = in_phrases(f"it holds {reason}, which is more than plain data", getattr(reason.node, "callee", None))
        raise UnsafeError(what, where=where, fix=fix) from reason
    except Unknown as name:
        what = f"it holds {name}, which this torch does not have"
        raise LoadError(what, where=where, fix="A newer torch may have it.") from name
    except TransloadError:
        raise
    except Exception as error:
        first = str(error).partition("\n")[0]
        raise LoadError(f"torch failed on a tensor in it: {type(error).__name__}: {first}", where=where) from error
    return made


class _Builder:
    """One walk over one graph, with a stack of its own: a graph may be deeper than Python's.

    ``made`` are the objects so far, by the identity of their nodes. Each node that is met is made by a generator, which
    yields the nodes it needs and is sent what they have become. What can exist before its parts (a list, a dictionary)
    is made at once and filled later; what cannot (a tuple, the result of a call), when its parts are there.
    """

    def __init__(
        self,
        piece: Piece,
        pickle: Pickle,
        storages: dict[str, torch.UntypedStorage],
        device_map: DeviceMap,
        where: str,
        encoding: str,
    ) -> None:
        self.made: dict[int, Any] = {}
        self._piece = piece
        self._device_map = device_map
        self._where = where
        self._encoding = encoding
        self._built = pickle.built
        # Bytes in a pickle of Python 2 are text that the reader could not decode, and its texts may be wanted as bytes.
        self._texts = pickle.python2_texts if encoding == "bytes" else frozenset()
        self._atoms = _ATOMS - ({bytes} if pickle.undecoded else set()) - ({str} if self._texts else set())
        self._known = entries(piece.checkpoint.storages, storages, device_map)
        self._names = {node: _name_of(node) for node in pickle.globals.values()}
        self._single = ordinary(self._known, self.made, self._names)

    @cached_property
    def _rebuilder(self) -> Rebuilder:
        """For what is not ordinary."""
        from transload.loading.rebuild import Rebuilder

        return Rebuilder(self._piece, self._known, self._device_map, fake=is_fake_mode(), where=self._where)

    def run(self, root: object) -> Any:
        """The object of a node, with all that it needs; ``Wrong`` if there can be none."""
        if self._built:
            raise Wrong("attributes of something that has none")
        made, atoms, ready = self.made, self._atoms, self._ready
        begun: set[int] = set()
        waiting: dict[int, list[_Task]] = {}  # for something that is not made yet
        node = root
        stack: list[_Task] = [(root, None, ())]
        try:
            while stack:
                node, steps, needed = stack.pop()
                if steps is None:
                    if type(node) in atoms or id(node) in made or id(node) in begun:
                        continue
                    begun.add(id(node))
                    steps, values = self._steps(node), None
                elif (values := ready(needed)) is None:
                    missing = next(id(each) for each in needed if type(each) not in atoms and id(each) not in made)
                    waiting.setdefault(missing, []).append((node, steps, needed))
                    continue
                while (needed := _send(steps, values)) is not None and (values := ready(needed)) is not None:
                    pass
                if waiting and id(node) in made:
                    stack += reversed(waiting.pop(id(node), ()))
                if needed is not None:
                    stack.append((node, steps, needed))
                    stack += [(each, None, ()) for each in reversed(needed)]
        except (Wrong, NeedsTrust) as reason:
            reason.node = node
            raise
        if waiting:
            raise Wrong("an object that has to be there before it is made")
        if "_rebuilder" in vars(self):
            self._rebuilder.check_sparse()
        return root if type(root) in atoms else made[id(root)]

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

    def _steps(self, node: Any) -> _Steps:
        """Make what is met for the first time, now or as soon as its parts are there."""
        ident, kind, made = id(node), type(node), self.made
        if kind is Call:
            yield from self._call(node)
        elif kind is list:
            values: list[Any] = []
            made[ident] = values
            values += yield node
        elif kind is Dict:
            into: dict[Any, Any] = {}
            made[ident] = into
            _set_items(into, (yield node.items))
        elif kind is tuple:
            made[ident] = node if all(type(child) in self._atoms for child in node) else tuple((yield node))
        elif kind is Set and node.frozen:
            made[ident] = self._rebuilder.make("builtins.frozenset", ((yield node.items),))
        elif kind is Set:
            made[ident] = members = set()
            members |= self._rebuilder.make("builtins.set", ((yield node.items),))
        elif kind is bytearray:
            made[ident] = node
        elif kind is bytes:
            made[ident] = self._text(node)
        elif kind is str:
            made[ident] = node.encode() if ident in self._texts else node
        elif kind is Global:
            made[ident] = self._rebuilder.object_of(node)
        elif kind is Persistent:
            # A storage; in the older formats also a class, or a tensor described elsewhere.
            named = module_class(node)
            if type(named) is Global and not self._rebuilder.is_described(node):
                made[ident] = self._rebuilder.object_of(named)
            else:
                made[ident] = self._rebuilder.persistent(node)
        else:
            raise Wrong(_ODD.get(kind, "something that is not a value"))

    def _text(self, node: bytes) -> Any:
        """Text of Python 2 that is not UTF-8."""
        if self._encoding == "bytes":
            return node
        try:
            return node.decode(self._encoding)
        except UnicodeDecodeError as error:
            what = f"Python 2 wrote text into it that is not {self._encoding}"
            fix = "Pass encoding='latin1', or the encoding it was written in."
            raise LoadError(what, where=self._where, fix=fix) from error

    # -- calls

    def _call(self, node: Call) -> _Steps:
        """When its arguments are there; an ordinary tensor at once."""
        tensor = self._single(node, self._checked)
        if tensor is not None:
            self.made[id(node)] = tensor
            return
        if type(node.args) is not tuple:
            raise Wrong("a call whose arguments are not a tuple")
        callee = node.callee if type(node.callee) is Global else module_class(node.callee)
        name = (self._names.get(callee) or _name_of(callee)) if type(callee) is Global else ""
        if type(node.callee) is Call and node.kind == "reduce" and (value := _plain_value(node.callee)):
            from transload.loading.values import make

            made = make(value, tuple((yield node.args)))
        elif type(node.callee) is Call:  # getattr(Outer, "Inner"), which is looked up first
            target, *found = yield (node.callee, *node.args)
            kwargs = {} if node.kwargs is None else (yield (node.kwargs,))[0]
            made = self._rebuilder.call_found(target, node.kind, tuple(found), kwargs)
        elif type(callee) is not Global:
            raise Wrong("a call of something that is not a name")
        elif name in _FROM_TYPE:
            # The function is only named there, and is one of ours where torch has it no more.
            made = self._rebuilder.from_type(node.args[:1], (yield node.args[1:]))
        elif name.startswith("numpy.") and _makes_array(name):
            from transload.loading.values import from_numpy

            self.made[id(node)] = from_numpy(node)
            return
        else:
            args = tuple((yield node.args))
            kwargs = {} if node.kwargs is None else (yield (node.kwargs,))[0]
            is_empty = name == _ORDERED and not args and node.kwargs is None
            made = OrderedDict() if is_empty else self._rebuilder.call(name, callee, node.kind, args, kwargs)
        self.made[id(node)] = made
        if node.appended:
            self._rebuilder.append(made, (yield node.appended))
        if node.items:
            values = yield node.items
            if type(made) not in _MAPPINGS:
                self._rebuilder.check_type(made, "are put into")
            _set_items(made, values)
        for state in (yield node.states) if node.states else ():
            if type(made) is OrderedDict:
                _set_attributes(made, state)
            else:
                self._rebuilder.set_state(made, state)

    def _checked(self, entry: Entry, args: Args) -> Any:
        """A tensor that is ordinary but for its numbers; ``None`` if this torch does not have its dtype."""
        from transload.loading.rebuild import own

        dtype = entry[2][3]
        if dtype is None:
            return None
        made = self._rebuilder.strided(own(entry[0]), dtype, *args[1:4])
        self.made[id(args[5])] = OrderedDict()
        return self._rebuilder.finish(made, args[4], self.made[id(args[5])])


def _name_of(node: Global) -> str:
    """The name under which a global is looked up, also where the file has an older one for it."""
    if (node.module, node.name) in PURPOSES:
        return node.full_name
    from transload.loading.refusal import name_of

    return name_of(node)


def _plain_value(callee: Call) -> str:
    """The name of a plain value that ``getattr`` finds in its class; else empty."""
    from transload.judge.safety import plain_value

    return plain_value(callee)


def _makes_array(name: str) -> bool:
    """Whether a function makes an array, a number or a dtype of numpy."""
    from transload.formats.arrays import NUMPY_CALLS

    return name in NUMPY_CALLS


def _send(steps: _Steps, values: Any) -> Any:
    """What a generator needs next; ``None`` when it has ended."""
    try:
        return steps.send(values)
    except StopIteration:
        return None


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


def _set_attributes(made: OrderedDict[Any, Any], state: Any) -> None:
    """Attributes such as the ``_metadata`` of a state dict; none that it has already."""
    if not isinstance(state, Mapping):
        raise Wrong("an OrderedDict that is given a state which names no attributes")
    for name in state:
        text = name.decode("latin-1") if type(name) is bytes else name  # bytes by encoding="bytes", as in torch
        if type(text) is not str or hasattr(OrderedDict, text):
            raise Wrong(f"an OrderedDict that is given the attribute {str(name)[:60]!r}, which it has already")
    vars(made).update(state)


def plain_tensors(piece: Piece, storages: dict[str, torch.UntypedStorage], device_map: DeviceMap) -> dict[str, Any]:
    """The tensors of a file without objects by name."""
    import torch

    checkpoint = piece.checkpoint
    known: dict[Any, Entry] = entries(checkpoint.storages, storages, device_map)
    made: dict[str, Any] = {}
    for tensor in checkpoint.tensors:
        entry = known.get(tensor.storage)
        if entry is not None and entry[2][4] == tensor.dtype:
            found = view(entry, tensor.offset, tensor.shape, tensor.stride)
            if found is not None:
                made[tensor.name] = found
                continue
        # It is empty, on the meta device, or cannot be made.
        where = f"{checkpoint.path} › {tensor.name}"
        dtype = getattr(torch, tensor.dtype, None)
        if not isinstance(dtype, torch.dtype):
            what = f"torch {torch.__version__} does not have its dtype, {tensor.dtype}"
            raise LoadError(what, where=where, fix="A newer torch may have it.")
        if entry is None:
            raise BrokenFileError("its bytes are not in the file", where=where)
        from transload.loading.rebuild import Rebuilder

        rebuilder = Rebuilder(piece, known, device_map, fake=is_fake_mode())
        try:
            made[tensor.name] = rebuilder.strided(entry[0], dtype, tensor.offset, tensor.shape, tensor.stride)
        except Wrong as reason:
            raise BrokenFileError(f"it holds {reason}", where=where) from reason
    return made


# -- ordinary tensors

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
_ORDERED = "collections.OrderedDict"
_PARAMETER = "torch._utils._rebuild_parameter"


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
        # An empty storage may be named with another class each time.
        if entry is None or not entry[1] or id(hooks) in made or not _is_fresh(hooks, hooked):
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


def is_fake_mode() -> bool:
    """Whether tensors are only pretended at the moment (``FakeTensorMode``)."""
    import torch

    active = getattr(torch._guards, "active_fake_mode", None)  # noqa: SLF001 - torch has no public way
    return active is not None and active() is not None
