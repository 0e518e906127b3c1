"""Build the contents of a torch zip without torch; ``torch.load`` accepts it with ``weights_only=True``.

A ``Structure`` keeps the dictionaries and lists of the source, with a ``TargetTensor`` for each tensor, and drops what
``weights_only`` would refuse; a pickled module becomes its state dict. ``lay_out`` decides which bytes become storages,
and ``TensorCalls`` builds the calls in the pickle that refer to them. Tensors that only this format can store (sparse,
quantized, nested) are carried over as the calls that rebuild them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Any

from transload.checkpoint import Checkpoint, Storage, Tensor
from transload.contents import byte_span, tie_of
from transload.dtypes import ITEMSIZE, STORAGE_CLASSES
from transload.errors import ConvertError
from transload.formats.graph import call_items, last_pairs, node_at, short_key
from transload.geometry import contiguous
from transload.nodes import Call, Dict, Global, Persistent, called, storage_id
from transload.opening.elements import Allowance, ElementReader
from transload.writing.objects import KEY_TYPES, NOTHING, BoundedWalk, Path, numpy_number, tensor_attributes
from transload.writing.transfer import TargetTensor

_MAX_PARTS = 10_000  # parts of a call that are examined
_ORDERED_DICT = "collections.OrderedDict"
_PLAIN_TYPES = frozenset({type(None), bool, int, float, str, bytes, bytearray})


# -- tensors that are carried over as they are

_CARRIED_KINDS = ("quantized", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "nested")
_CARRIED_CALLS = frozenset(  # functions that weights_only allows and our reader understands
    {
        *(_ORDERED_DICT, "torch.Size", "torch.serialization._get_layout"),
        *(f"torch._utils._rebuild_{kind}_tensor" for kind in ("nested", "sparse", "sparse_csr")),
        *(f"torch._utils._rebuild_{kind}" for kind in ("parameter", "qtensor", "tensor", "tensor_v2", "tensor_v3")),
    }
)
_OLD_CSR = "torch._utils._rebuild_sparse_csr_tensor"  # up to torch 1.13; with the arguments of today's function
_UNQUANTIZED = {"qint8": "int8", "quint8": "uint8", "qint32": "int32"}


def carry_over(checkpoint: Checkpoint, entries: Iterable[TargetTensor]) -> None:
    """Set the calls of tensors that are carried over: only calls without anything unexpected in them."""
    if checkpoint.traits.container in ("", "tar"):
        return
    keys = {storage.key for storage in checkpoint.storages}

    def is_value(part: Any) -> bool:
        if type(part) is Persistent:
            return _storage_key(part) in keys
        return part.module == "torch" if type(part) is Global else type(part) in _PLAIN_TYPES

    for entry in entries:
        if entry.tensor.kind in _CARRIED_KINDS:
            node = node_at(checkpoint.root, entry.tensor.path)
            entry.call = node if _is_made_of(node, _CARRIED_CALLS, (tuple,), is_value) else None


def _is_made_of(
    node: Any, calls: frozenset[str], containers: tuple[type, ...], is_value: Callable[[Any], bool]
) -> bool:
    """Whether a node is one of these calls, and its arguments only containers, values and more of these calls."""
    parts: list[Any] = [node]
    for part in parts:  # grows during the loop; shared parts count each time
        if len(parts) > _MAX_PARTS or type(node) is not Call:
            return False
        if type(part) in containers:
            parts += part
        elif type(part) is Call:
            name = called(part)
            changed = part.states or part.appended or (part.items and name != _ORDERED_DICT)
            if name not in calls or changed or part.kind != "reduce" or type(part.args) is not tuple:
                return False
            parts += (part.args, *(part.items or ()))
        elif not is_value(part):
            return False
    return True


def _storage_key(node: Persistent) -> str:
    """The key of a storage in the file; empty if the id has another form, or names a part of a storage."""
    match storage_id(node):
        case (_, Global(), str() as key, _, _) | (_, Global(), str() as key, _, _, None):
            return key
    return ""


# -- the object

# Functions that weights_only calls with plain arguments.
_PLAIN_CALLS = frozenset({"torch.Size", "torch.device", "_codecs.encode", "builtins.set", "__builtin__.set"})
_PLAIN_CALLS |= {"builtins.complex", "__builtin__.complex", "builtins.bytearray", "__builtin__.bytearray"}


class Structure(BoundedWalk):
    """The object ``root``, which is at path ``start`` of the source, as the target stores it.

    ``entries`` are the tensors to keep, ``tensors`` the paths of all tensors, ``modules`` the paths of pickled modules.
    ``stripped``: the keys of tensors get the new names, without a prefix; else they stay as they are.
    ``placed`` are the entries in the order in which a reader finds them; ``dropped`` are the paths and nodes that were
    dropped, ``numbers`` the paths of numpy scalars that became Python numbers.
    """

    def __init__(
        self,
        root: object,
        start: Path,
        entries: Iterable[TargetTensor],
        *,
        tensors: frozenset[Path],
        modules: set[Path],
        stripped: bool,
    ) -> None:
        super().__init__()
        self._entries = {entry.tensor.path: entry for entry in entries}
        self._tensors, self._modules, self._stripped = tensors, modules, stripped
        self.placed: list[TargetTensor] = []
        self.dropped: list[tuple[Path, Any]] = []
        self.numbers: list[str] = []
        kept = self._keep(root, start, 0)
        self.root = Dict([]) if kept is NOTHING else kept

    def _keep(self, node: Any, path: Path, depth: int) -> Any:
        """A node as the target stores it, or ``NOTHING``."""
        if path in self._tensors:
            attributes = tensor_attributes(node)
            if attributes.items:
                self.dropped.append(((*path, "$attributes"), attributes))
            if path not in self._entries:
                return NOTHING
            self.placed.append(self._entries[path])
            self.placed[-1].state = False
            return self.placed[-1]
        if path in self._modules:
            self.dropped.append((path, node))
            state_dict = Call(Global("collections", "OrderedDict", 0), (), "reduce", 0)
            state_dict.items = []
            for inside, entry in self._entries.items():
                if inside[: len(path)] == path:
                    name = entry.name.rpartition("/")[2] if path else entry.name
                    self.placed.append(entry)
                    state_dict.items += [name, entry]
            return state_dict
        number = numpy_number(node) if type(node) is Call else NOTHING
        if number is not NOTHING:
            self.numbers.append("/".join(map(str, path)))
            return number
        is_dtype = type(node) is Global and node.module == "torch" and node.name in ITEMSIZE
        if type(node) in _PLAIN_TYPES or is_dtype:
            return node
        if _is_made_of(node, _PLAIN_CALLS, (tuple, list), lambda part: type(part) in _PLAIN_TYPES):
            return node
        ordered = type(node) is Call and called(node) == _ORDERED_DICT and not node.appended
        container = ordered or type(node) in (Dict, list, tuple)
        if not container or self.why_stop(node, depth):
            self.dropped.append((path, node))
            return NOTHING
        self.ancestors.add(id(node))
        kept: Any
        if type(node) in (list, tuple):
            values = [self._keep(value, (*path, index), depth + 1) for index, value in enumerate(node)]
            kept = type(node)(None if value is NOTHING else value for value in values)
        else:
            items: list[Any] = []
            renamed: list[str] = []
            for value, key, _ in last_pairs(call_items(node) if ordered else node.items):
                step = (*path, short_key(key))
                if type(key) not in KEY_TYPES:
                    self.dropped.append((step, value))
                    continue
                inner = self._keep(value, step, depth + 1)
                if inner is NOTHING:
                    continue
                named = type(inner) is TargetTensor and type(key) is str and inner.tensor.name.endswith(key)
                if type(inner) is TargetTensor and inner.key is not None:
                    key = inner.key  # noqa: PLW2901 - the same tensor under its new name
                    renamed.append(key)
                elif self._stripped and named:
                    if len(inner.tensor.name) == len(key):
                        key = inner.name  # noqa: PLW2901 - the same key under its new name
                    elif "/" not in key:
                        key = inner.name.rpartition("/")[2]  # noqa: PLW2901 - as above
                items += [key, inner]
            keys = items[::2]
            if twice := next((key for key in renamed if keys.count(key) > 1), None):
                place = "/".join(map(str, path)) or "the root"
                raise ConvertError(f"{place} has a value under the new name {twice!r} already")
            kept = Dict(items)
            if ordered:
                kept = Call(node.callee, (), "reduce", 0)
                kept.items = items
            if ordered and node.states:  # state_dict() keeps the versions of its modules there
                state = self._keep(node.states[-1], (*path, "$attributes"), depth + 1)
                kept.states = [state] if state is not NOTHING else None
        self.ancestors.discard(id(node))
        return kept


# -- which bytes become storages

_WIDEST = 16


def overlapping(entries: Iterable[TargetTensor]) -> Iterator[list[TargetTensor]]:
    """Groups of entries whose bytes overlap in a storage of the source, directly or through others."""
    storages: dict[str | None, list[tuple[int, int, TargetTensor]]] = {}
    for entry in entries:
        storages.setdefault(entry.tensor.storage, []).append((*byte_span(entry.tensor), entry))
    for spans in storages.values():
        group: list[TargetTensor] = []
        reached = 0
        for low, high, entry in sorted(spans, key=itemgetter(0, 1)):
            if group and low >= reached:
                yield group
                group = []
            group.append(entry)
            reached = max(reached, high)
        yield group


def lay_out(entries: Iterable[TargetTensor], reader: ElementReader) -> list[TargetTensor]:
    """The storages of an object: tensors that overlap share one, every other tensor gets its own."""
    allowance = Allowance(reader.checkpoint)
    storages: list[TargetTensor] = []
    sharing: list[TargetTensor] = []
    alone: dict[Any, int] = {}
    for entry in entries:
        if entry.call is not None:
            continue
        tensor, storage = entry.tensor, reader.storage(entry.tensor)
        is_plain = tensor.kind == "strided" and not tensor.flags and not entry.is_changed
        if is_plain and storage is not None and storage.item is None and tensor.numel:
            low, high = byte_span(tensor)
            mixed = storage.big_endian and ITEMSIZE[tensor.dtype] != ITEMSIZE.get(storage.dtype, 0)
            scattered = high - low > 2 * tensor.nbytes + 4096
            if not mixed and not scattered:
                sharing.append(entry)
                continue
        tie = (tie_of(tensor) or id(entry), entry.delta)
        if tie not in alone:
            allowance.spend(tensor)
            alone[tie] = len(storages)
            storages.append(entry)
        entry.storage, entry.stride = alone[tie], contiguous(tensor.shape)
    for group in overlapping(sharing):
        first, same = group[0], len({entry.dtype for entry in group}) == 1
        dtype = first.dtype if same else "uint8"
        width = ITEMSIZE[dtype]
        low = byte_span(first.tensor)[0]
        low -= 0 if same else low % _WIDEST
        size = (max(byte_span(entry.tensor)[1] for entry in group) - low) // width
        whole = Tensor((), first.name, dtype, (size,), (1,), "cpu", first.tensor.storage, low // width)
        for entry in group:
            entry.storage = len(storages)
            entry.offset = entry.tensor.offset - low // ITEMSIZE[entry.dtype]
            entry.stride = entry.tensor.stride
        storages.append(TargetTensor(first.name, whole, dtype))
    return storages


# -- the pickle


class TensorCalls:
    """Builds the call for each tensor. Storages of tensors that are carried over are added to ``storages``.

    ``source`` are the storages they have in the source. A class, because nested functions that call one another would
    keep the checkpoint alive in a reference cycle.
    """

    def __init__(self, storages: list[TargetTensor], source: Iterable[Storage]) -> None:
        self._storages = storages
        self._globals: dict[str, Global] = {}
        self._keys: dict[int, str] = {}
        self._source_storages = {storage.key: storage for storage in source}
        self._carried: dict[str, str] = {}

    def tensor(self, entry: TargetTensor) -> Any:
        """The call that rebuilds a tensor."""
        if entry.call is not None:
            return self._carry(entry.call)
        tensor = entry.tensor
        key = self._keys.setdefault(entry.storage, str(entry.storage))  # the same object, so that it is pickled once
        parameter = tensor.cls == "Parameter" and not entry.state
        grad = tensor.requires_grad and not entry.state and not parameter
        view = (entry.dtype, entry.offset, tensor.shape, entry.stride)
        call = self.strided(key, self._storages[entry.storage].nbytes, *view, grad=grad)
        if parameter:
            hooks = self._call("collections", "OrderedDict")
            return self._call("torch._utils", "_rebuild_parameter", call, tensor.requires_grad, hooks)
        return call

    def strided(
        self,
        key: str,
        nbytes: int,
        dtype: str,
        offset: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        *,
        grad: bool = False,
    ) -> Call:
        """The call that rebuilds a view of a storage of ``nbytes`` bytes."""
        kind, hooks = STORAGE_CLASSES.get(dtype), self._call("collections", "OrderedDict")
        if kind is None:  # a dtype without a storage class
            pid = ("storage", self._global("torch.storage", "UntypedStorage"), key, "cpu", nbytes)
            args = (Persistent(pid, 0), offset, shape, stride, False, hooks, self._global("torch", dtype))
            return self._call("torch._utils", "_rebuild_tensor_v3", *args)
        pid = ("storage", self._global("torch", kind), key, "cpu", nbytes // ITEMSIZE[dtype])
        return self._call("torch._utils", "_rebuild_tensor_v2", Persistent(pid, 0), offset, shape, stride, grad, hooks)

    def _global(self, module: str, name: str) -> Global:
        return self._globals.setdefault(f"{module} {name}", Global(module, name, 0))

    def _call(self, module: str, name: str, *args: object) -> Call:
        return Call(self._global(module, name), args, "reduce", 0)

    def _carry(self, node: Any) -> Any:
        """Copy a call, with the storages of the target. It recurses only as deep as tensors that our reader accepts."""
        if type(node) is tuple:
            return tuple(self._carry(part) for part in node)
        if type(node) is Call:
            old = called(node) == _OLD_CSR
            callee = self._global("torch._utils", "_rebuild_sparse_tensor") if old else node.callee
            call = Call(callee, self._carry(node.args), node.kind, 0)
            call.items = [self._carry(part) for part in node.items] if node.items else None
            return call
        if type(node) is not Persistent:
            return node
        pid: Any = node.id
        key = _storage_key(node)
        if key not in self._carried:
            storage = self._source_storages[key]
            dtype = _UNQUANTIZED.get(storage.dtype, storage.dtype)  # bytes are swapped by the width of the dtype
            width = ITEMSIZE.get(dtype, 0)
            if not width or dtype.startswith("q") or storage.nbytes % width:
                dtype, width = "uint8", 1
            tensor = Tensor((), key, dtype, (storage.nbytes // width,), (1,), "cpu", storage.id)
            self._carried[key] = str(len(self._storages))
            self._storages.append(TargetTensor(storage.tensors[0] if storage.tensors else key, tensor, dtype))
        return Persistent(("storage", pid[1], self._carried[key], "cpu", pid[4]), 0)
