"""Builds objects from the inert graph of a pickle, through a fixed table, as a restricted unpickler would.

``build_object`` is the entry point: a ``_Builder`` walks over the graph. ``ordinary`` makes most tensors of most files;
a ``Rebuilder``, imported when first needed, makes all others, and rarer values.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from transload.errors import BrokenFileError, LoadError, Malformed, TransloadError
from transload.nodes import (
    PURPOSES,
    Big,
    Call,
    Dict,
    Extension,
    Global,
    OutOfBand,
    Persistent,
    Pickle,
    Set,
    is_empty_call,
    module_class,
)

if TYPE_CHECKING:
    import torch

    from transload.checkpoint import Storage
    from transload.loading.placement import DeviceMap
    from transload.loading.rebuild_tensors import Rebuilder
    from transload.opening import CheckpointFile

_Steps = Generator[Any, list[Any], None]
"""Makes one object: yields the nodes it needs, and is sent their objects."""
_Task = tuple[Any, "_Steps | None", Any]
"""A node, its generator (``None`` before it is started), and the nodes it needs now."""

_ATOMS = frozenset({str, int, float, bool, bytes, type(None)})
_MAPPINGS = (dict, OrderedDict, Counter, defaultdict)
_FROM_TYPE = frozenset({"torch._tensor._rebuild_from_type_v2", "torch._tensor._rebuild_from_type"})
_NOT_VALUES: dict[type, str] = {
    Big: "an integer with thousands of digits",
    Extension: "a name given only by number (an extension code)",
    OutOfBand: "a buffer outside the file",
}


def build_object(
    file: CheckpointFile,
    storages: dict[str, torch.UntypedStorage],
    device_map: DeviceMap,
    encoding: str = "utf-8",
    pickle: Pickle | None = None,
    made: Mapping[int, Any] | None = None,
) -> Any:
    """Build the object that a pickle describes, by default the main one, over storages that were read.

    ``made`` are objects that exist already, by the identity of their nodes.
    ``BrokenFileError`` for a call that no checkpoint makes, ``UnsafeError`` for one that is not allowed.
    """
    pickle = pickle or next((pickle for pickle in file.checkpoint.pickles if pickle.main), None)
    if pickle is None:
        raise LoadError("there is no object in it", where=file.checkpoint.path)
    where = f"{file.checkpoint.path} › {pickle.name}" if pickle.name else file.checkpoint.path
    try:
        builder = _Builder(file, pickle, storages, device_map, encoding)
        builder.objects.update(made or {})
        return builder.run()
    except TransloadError as error:
        position = error.position if isinstance(error, Malformed) else None
        error.where = error.where or (where if position is None else f"{where} › byte {position}")
        raise
    except Exception as error:
        first = str(error).partition("\n")[0]
        raise LoadError(f"torch failed on a tensor in it: {type(error).__name__}: {first}", where=where) from error


class _Builder:
    """One walk over one graph, with an explicit stack, since a graph may be deeper than Python's.

    ``objects`` has those made so far, by the identity of their nodes. A generator makes the object of a node: it yields
    the nodes it needs, and is sent their objects. Lists and dictionaries are made first and filled later, so they may
    contain themselves; tuples and results of calls are made after their parts.
    """

    def __init__(
        self,
        file: CheckpointFile,
        pickle: Pickle,
        storages: dict[str, torch.UntypedStorage],
        device_map: DeviceMap,
        encoding: str,
    ) -> None:
        self.objects: dict[int, Any] = {}
        self._file = file
        self._device_map = device_map
        self._encoding = encoding
        self._pickle = pickle
        # In a pickle of Python 2, bytes are text that is not UTF-8. Any other encoding applies to all of its text.
        self._texts = frozenset() if encoding == "utf-8" else pickle.python2_texts
        self._atoms = _ATOMS - ({bytes} if pickle.undecoded else set()) - ({str} if self._texts else set())
        self._entries = entries(file.checkpoint.storages, storages, device_map)
        self._names = {node: _name_of(node) for node in pickle.globals.values()}
        self._make_ordinary = ordinary(self._entries, self.objects, self._names)

    @cached_property
    def _rebuilder(self) -> Rebuilder:
        from transload.loading.rebuild_tensors import Rebuilder

        return Rebuilder(self._file, self._entries, self._device_map, fake=is_fake_mode())

    def run(self) -> Any:
        """Build the root and everything it refers to; ``Malformed`` if that is not possible."""
        if self._pickle.built:
            raise Malformed("attributes of something that cannot have any")
        node = root = self._pickle.root
        objects, atoms, ready = self.objects, self._atoms, self._ready
        begun: set[int] = set()
        waiting: dict[int, list[_Task]] = {}  # tasks that need an object which is not made yet
        stack: list[_Task] = [(root, None, ())]
        try:
            while stack:
                node, steps, needed = stack.pop()
                if steps is None:
                    if type(node) in atoms or id(node) in objects or id(node) in begun:
                        continue
                    begun.add(id(node))
                    steps, values = self._steps(node), None
                elif (values := ready(needed)) is None:
                    missing = next(id(part) for part in needed if type(part) not in atoms and id(part) not in objects)
                    waiting.setdefault(missing, []).append((node, steps, needed))
                    continue
                while (needed := _send(steps, values)) is not None and (values := ready(needed)) is not None:
                    pass
                if waiting and id(node) in objects:
                    stack += reversed(waiting.pop(id(node), ()))
                if needed is not None:
                    stack.append((node, steps, needed))
                    stack += [(part, None, ()) for part in reversed(needed)]
        except Malformed as error:
            error.position = getattr(node, "position", None)
            raise
        if waiting:
            raise Malformed("an object that can only be made from itself")
        return root if type(root) in atoms else objects[id(root)]

    def _ready(self, nodes: Iterable[Any]) -> list[Any] | None:
        """The objects of nodes, if each is made or can be made in one step; else ``None``."""
        atoms, objects, make_ordinary = self._atoms, self.objects, self._make_ordinary
        values: list[Any] = []
        append = values.append
        missing = False
        for node in nodes:
            if type(node) in atoms:
                append(node)
                continue
            ident = id(node)
            value = objects.get(ident)
            if value is None and ident not in objects:
                value = make_ordinary(node)
                if value is None:
                    missing = True
                    continue
                objects[ident] = value
            append(value)
        return None if missing else values

    def _steps(self, node: Any) -> _Steps:
        ident, kind, objects = id(node), type(node), self.objects
        if kind is Call:
            yield from self._call(node)
        elif kind is list:
            values: list[Any] = []
            objects[ident] = values
            values += yield node
        elif kind is Dict:
            into: dict[Any, Any] = {}
            objects[ident] = into
            _set_items(into, (yield node.items))
        elif kind is tuple:
            objects[ident] = node if all(type(child) in self._atoms for child in node) else tuple((yield node))
        elif kind is Set:
            from transload.loading.rebuild_tensors import value_of

            if node.frozen:
                objects[ident] = value_of("builtins.frozenset", ((yield node.items),))
            else:
                objects[ident] = members = set()
                members |= value_of("builtins.set", ((yield node.items),))
        elif kind is bytearray or (kind is str and ident not in self._texts):
            objects[ident] = node
        elif kind is bytes or kind is str:  # text of Python 2
            raw = node.encode() if kind is str else node
            try:
                objects[ident] = raw if self._encoding == "bytes" else raw.decode(self._encoding)
            except UnicodeDecodeError as error:
                what = f"Python 2 wrote text into it that is not {self._encoding}"
                fix = "Pass encoding='latin1', or the encoding it was written in."
                raise LoadError(what, fix=fix) from error
        elif kind is Global:
            objects[ident] = self._rebuilder.object_of(node)
        elif kind is Persistent:
            objects[ident] = self._rebuilder.persistent(node)
        else:
            raise Malformed(_NOT_VALUES.get(kind, "something that is not a value"))

    def _call(self, node: Call) -> _Steps:
        """Make the result of a call, then append to it, set its items and its state."""
        tensor = self._make_ordinary(node, self._checked)
        if tensor is not None:
            self.objects[id(node)] = tensor
            return
        if type(node.args) is not tuple:
            raise Malformed("a call whose arguments are not a tuple")
        callee = node.callee if type(node.callee) is Global else module_class(node.callee)
        name = (self._names.get(callee) or _name_of(callee)) if type(callee) is Global else ""
        if type(node.callee) is Call:  # getattr(Outer, "Inner")
            from transload.judge.safety import plain_value

            value = plain_value(node.callee) if node.kind == "reduce" else ""
            if value:
                from transload.loading.rebuild_tensors import value_of

                result = value_of(value, tuple((yield node.args)))
            else:  # look up what is called first
                target, *args = yield (node.callee, *node.args)
                kwargs = {} if node.kwargs is None else (yield (node.kwargs,))[0]
                result = self._rebuilder.call_attribute(target, node.kind, tuple(args), kwargs)
        elif type(callee) is not Global:
            raise Malformed("a call of something that is not a name")
        elif name in _FROM_TYPE and (local := self._local_tensor(node)) is not None:
            result = self._rebuilder.plain(node, (yield (local,))[0])
        elif name in _FROM_TYPE:
            # Its first argument is a function, which is used by name: torch may no longer have it.
            result = self._rebuilder.from_type(node.args[:1], (yield node.args[1:]))
        elif name.startswith("numpy.") and (array := self._rebuilder.from_numpy(name, node)) is not None:
            self.objects[id(node)] = array
            return
        else:
            args = yield node.args
            kwargs = {} if node.kwargs is None else (yield (node.kwargs,))[0]
            is_empty = name == _ORDERED and not args and node.kwargs is None
            result = OrderedDict() if is_empty else self._rebuilder.call(name, callee, node.kind, tuple(args), kwargs)
        self.objects[id(node)] = result
        if node.appended:
            self._rebuilder.append(result, (yield node.appended))
        if node.items:
            values = yield node.items
            if type(result) not in _MAPPINGS:
                self._rebuilder.check_type(result, "are put into")
            _set_items(result, values)
        for state in (yield node.states) if node.states else ():
            if type(result) is not OrderedDict:
                self._rebuilder.set_state(result, state)
                continue
            # Set attributes such as the _metadata of a state dict, but none that an OrderedDict has already.
            if not isinstance(state, Mapping):
                raise Malformed("an OrderedDict whose state does not name attributes")
            for name in state:
                text = name.decode("latin-1") if type(name) is bytes else name  # encoding="bytes" makes it bytes
                if type(text) is not str or hasattr(OrderedDict, text):
                    raise Malformed(f"an OrderedDict whose state sets {str(name)[:60]!r}, which it already has")
            vars(result).update(state)

    def _local_tensor(self, node: Call) -> object:
        """The node of all of a distributed tensor, if this process is no rank and torch could not use the mesh."""
        from transload.formats.pieces import local_tensors
        from transload.loading.refusal import in_process_group

        local = None if in_process_group() else local_tensors(node)
        args: Any = node.args
        return local[0] if local and len(local) == 1 and type(args[2]) is tuple and args[2] else None

    def _checked(self, entry: Entry, args: tuple[Any, ...]) -> Any:
        """A tensor whose offset, size or stride needs all checks; ``None`` if this torch does not have its dtype."""
        storage, _, (*_, dtype, _) = entry
        if dtype is None:
            return None
        tensor = self._rebuilder.strided(storage, dtype, *args[1:4])
        self.objects[id(args[5])] = OrderedDict()
        return self._rebuilder.finish(tensor, args[4], self.objects[id(args[5])])


def _name_of(node: Global) -> str:
    """The name under which a global is looked up; the current one if the file has an older name."""
    if (node.module, node.name) in PURPOSES:
        return node.full_name
    from transload.loading.refusal import name_of

    return name_of(node)


def _send(steps: _Steps, values: Any) -> Any:
    """The nodes a generator needs next; ``None`` when it has finished."""
    try:
        return steps.send(values)
    except StopIteration:
        return None


def _set_items(into: Any, values: list[Any]) -> None:
    """Put alternating keys and values into a dictionary."""
    pairs = zip(values[::2], values[1::2], strict=True)
    try:
        if type(into) in (dict, OrderedDict):  # a Counter would add the values up
            into.update(pairs)
            return
        for key, value in pairs:
            into[key] = value
    except TypeError as error:
        raise Malformed(f"a key that cannot be in a dictionary: {error}") from error


def plain_tensors(
    file: CheckpointFile, storages: dict[str, torch.UntypedStorage], device_map: DeviceMap
) -> dict[str, Any]:
    """The tensors, by name, of a file that holds nothing but tensors."""
    import torch

    checkpoint = file.checkpoint
    by_id: dict[Any, Entry] = entries(checkpoint.storages, storages, device_map)
    tensors: dict[str, Any] = {}
    for tensor in checkpoint.tensors:
        entry = by_id.get(tensor.storage)
        if entry is not None and entry[2][4] == tensor.dtype:
            view = tensor_view(entry, tensor.offset, tensor.shape, tensor.stride)
            if view is not None:
                tensors[tensor.name] = view
                continue
        # It is empty, on the meta device, or cannot be made.
        where = f"{checkpoint.path} › {tensor.name}"
        dtype = getattr(torch, tensor.dtype, None)
        if not isinstance(dtype, torch.dtype):
            what = f"torch {torch.__version__} does not have its dtype, {tensor.dtype}"
            raise LoadError(what, where=where, fix="A newer torch may have it.")
        if entry is None:
            raise BrokenFileError("its bytes are not in the file", where=where)
        from transload.loading.rebuild_tensors import Rebuilder

        rebuilder = Rebuilder(file, by_id, device_map, fake=is_fake_mode())
        try:
            tensors[tensor.name] = rebuilder.strided(entry[0], dtype, tensor.offset, tensor.shape, tensor.stride)
        except Malformed as error:
            error.where = where
            raise
    return tensors


# -- ordinary tensors

Kind = tuple[Any, int, bool, Any, str]
"""An empty tensor of a dtype on a device (``None`` if it cannot be made), the size of an element, whether it can have
gradients, the dtype (``None`` if this torch does not have it) and its name. Each ``data`` of the empty tensor is a new
tensor with a new version counter, in a tenth of the time of ``torch.empty``."""
Entry = tuple[Any, int, Kind]
"""An untyped storage, its size in bytes, and the kind of tensors in it."""

_ABSENT = object()
_MAX_RANK_ORDINARY = 64
_V2 = "torch._utils._rebuild_tensor_v2"
_V3 = "torch._utils._rebuild_tensor_v3"
_ORDERED = "collections.OrderedDict"
_PARAMETER = "torch._utils._rebuild_parameter"


def kind_of(name: str, device: torch.device) -> Kind:
    """The kind of tensors of a dtype, given by name, on a device."""
    import torch

    dtype = getattr(torch, name, None)
    dtype = dtype if isinstance(dtype, torch.dtype) else None
    if dtype is None or device.type == "meta":  # some releases of torch resize a meta storage with every view
        return None, 1, False, dtype, name
    try:
        empty = torch.empty((0,), dtype=dtype, device=device)
    except (RuntimeError, TypeError):
        return None, 1, False, dtype, name
    usable = type(empty) is torch.Tensor and empty.dtype == dtype and empty.device == device and not empty.is_quantized
    floats = dtype.is_floating_point or dtype.is_complex
    return (empty if usable else None), empty.element_size(), floats, dtype, name


def entries(
    storages: Iterable[Storage], loaded: Mapping[str, torch.UntypedStorage], device_map: DeviceMap
) -> dict[str, Entry]:
    """The entry of each storage, by id."""
    by_tag = bool(device_map.locations)  # a map_location function may put storages of one tag on several devices
    kinds: dict[tuple[str, Any], Kind] = {}
    by_id: dict[str, Entry] = {}
    for storage in storages:
        untyped = loaded[storage.id]
        key = storage.dtype, storage.device if by_tag else untyped.device
        kind = kinds.get(key)
        if kind is None:
            kind = kinds[key] = kind_of(storage.dtype, untyped.device)
        by_id[storage.id] = untyped, untyped.nbytes(), kind
    return by_id


def tensor_view(entry: Entry, offset: Any, size: Any, stride: Any) -> torch.Tensor | None:
    """A contiguous tensor within a storage; ``None`` for one without elements, and for any other arguments."""
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
            return None
        numel *= count
    end = (offset + numel) * kind[1]
    if rank == 1 and end == nbytes and not offset:
        return empty.data.set_(storage)  # all of it, as a vector
    return empty.data.set_(storage, offset, size, stride) if end <= nbytes else None


def ordinary(storages: Mapping[str, Entry], objects: dict[int, Any], names: Mapping[Global, str]) -> Callable[..., Any]:
    """Return a function that makes the tensor or parameter of a call, and puts its hooks into ``objects``.

    It returns ``None`` for any other node. Its second argument, if given, is called with the entry and the arguments
    of a tensor whose offset, size or stride needs all checks. ``names`` are the current names of the file's globals.
    """
    from torch.nn import Parameter

    nodes = {name: node for node, name in names.items()}
    kinds: dict[tuple[str, Any], Kind] = {}
    v2, v3, parameter, ordered_dict = (nodes.get(name, _ABSENT) for name in (_V2, _V3, _PARAMETER, _ORDERED))

    # A file may have ten thousand of these: split into functions, this would take half as long again.
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
        entry = storages.get(pid[2]) if pid[0] == "storage" and type(pid[2]) is str else None
        # The ids of an empty storage may name different classes.
        if entry is None or not entry[1] or id(hooks) in objects or not is_empty_call(hooks, ordered_dict):
            return None
        if dtype is not None:  # newer dtypes have no storage class: they are an argument
            untyped, nbytes, _ = entry
            key = names.get(dtype, "") if type(dtype) is Global else "", untyped.device
            if key not in kinds:
                kinds[key] = kind_of(key[0].removeprefix("torch."), untyped.device)
            entry = untyped, nbytes, kinds[key]
        is_usual = grad is False or (grad is True and entry[2][2])
        tensor: Any = tensor_view(entry, offset, size, stride) if is_usual else None
        if tensor is None:
            return None if otherwise is None else otherwise(entry, args)
        if grad:
            tensor.requires_grad = True
        objects[id(hooks)] = tensor._backward_hooks = OrderedDict()  # noqa: SLF001 - torch has no public way
        return tensor

    def make_parameter(node: Any, otherwise: Callable[..., Any] | None = None) -> Any:
        if type(node) is not Call or node.callee is not parameter:
            return make(node, otherwise)
        if type(node.args) is not tuple or len(node.args) != 3 or node.states or node.items or node.appended:
            return None
        data, grad, hooks = node.args
        if type(grad) is not bool or id(hooks) in objects or not is_empty_call(hooks, ordered_dict):
            return None
        tensor = None if id(data) in objects or node.kwargs is not None else make(data)
        if tensor is None:
            return None
        objects[id(data)] = tensor
        if grad and not (tensor.is_floating_point() or tensor.is_complex()):
            return None
        wrapped: Any = Parameter(tensor, grad)
        objects[id(hooks)] = wrapped._backward_hooks = OrderedDict()  # noqa: SLF001 - torch has no public way
        return wrapped

    return make if parameter is _ABSENT else make_parameter


def is_fake_mode() -> bool:
    """Whether ``FakeTensorMode`` is active."""
    import torch

    active = getattr(torch._guards, "active_fake_mode", None)  # noqa: SLF001 - torch has no public way
    return active is not None and active() is not None
