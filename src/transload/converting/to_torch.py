"""A torch zip, as ``torch.save`` writes it, without torch: ``torch.load`` takes it with ``weights_only=True``.

``structured`` keeps the source's own dictionaries and lists, with a ``Slot`` for each tensor, and drops what
``weights_only`` would refuse; a pickled module becomes its state dict. ``flat`` is for sources without such an object.
``laid_out`` decides which bytes become storages. ``write_torch`` then writes the pickle and the storages. Tensors that
only this format holds (sparse, quantized, nested) are carried over by the calls that make them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from transload.checkpoint import Tensor, contiguous
from transload.converting.casting import is_cast
from transload.converting.leftovers import KEY_TYPES, NOTHING, BoundedWalk, Dropped, tensor_attributes
from transload.converting.selection import Named, byte_span, call_items, last_pairs, node_at, overlapping, tie_of
from transload.converting.transfer import Data, Descriptor, Entry, Location
from transload.dtypes import ITEMSIZE, STORAGES
from transload.errors import ConvertError
from transload.formats.tensors import called, short_key
from transload.formats.zip_writer import PIECE, SMALL, Bunch, Chunk, Record, write_archive
from transload.nodes import Call, Dict, Global, Persistent
from transload.tensors.content import Allowance

if TYPE_CHECKING:
    from transload.checkpoint import Checkpoint, Key, Storage
    from transload.converting.output import Job
    from transload.tensors.content import Content

__all__ = ["Layout", "Slot", "Structure", "carried_calls", "flat", "laid_out", "structured", "write_torch"]

_MAX_PARTS = 10_000  # of a call that is looked through
_ORDERED_DICT = "collections.OrderedDict"


# -- tensors that are carried over as they are

_CARRIED_KINDS = ("quantized", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "nested")
_CARRIED_FORMATS = ("torch-zip", "torch-legacy", "torch-directory")
_CARRIED_CALLS = frozenset(  # what weights_only calls, and our reader understands, to make one
    {
        _ORDERED_DICT,
        "torch.Size",
        "torch.serialization._get_layout",
        "torch._utils._rebuild_nested_tensor",
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_qtensor",
        "torch._utils._rebuild_sparse_csr_tensor",
        "torch._utils._rebuild_sparse_tensor",
        "torch._utils._rebuild_tensor",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
    }
)
_NUMBERS = {"qint8": "int8", "quint8": "uint8", "qint32": "int32"}


def carried_calls(checkpoint: Checkpoint, named: tuple[Named, ...]) -> dict[tuple[Key, ...], Call]:
    """The calls of tensors that are carried over, by path: those that hold nothing but what belongs there."""
    if checkpoint.format not in _CARRIED_FORMATS:
        return {}
    keys = {storage.key for storage in checkpoint.storages}
    calls: dict[tuple[Key, ...], Call] = {}
    for _, tensor in named:
        if tensor.kind in _CARRIED_KINDS:
            node = node_at(checkpoint.root, tensor.path)
            if type(node) is Call and _is_clean(node, keys):
                calls[tensor.path] = node
    return calls


def _is_clean(node: Call, keys: set[str]) -> bool:
    """Whether a call is made of known calls, torch's own names, storages of the file and plain values."""
    parts: list[Any] = [node]
    for part in parts:  # grows as it goes; what is shared is counted again
        kind = type(part)
        if len(parts) > _MAX_PARTS:
            return False
        if kind is tuple:
            parts += part
        elif kind is Call:
            if called(part) not in _CARRIED_CALLS or part.states or part.appended or part.kind != "reduce":
                return False
            parts += [part.args, *(part.items or [])]
        elif kind is Persistent:
            if _storage_key(part) not in keys:
                return False
        elif not (part.module == "torch" if kind is Global else kind in (type(None), bool, int, float, str)):
            return False
    return True


def _storage_key(node: Persistent) -> str:
    """The file's own name of a storage; empty if the id has another form."""
    pid: Any = node.id
    known = type(pid) is tuple and len(pid) >= 5 and pid[0] == "storage" and type(pid[1]) is Global
    return pid[2] if known and type(pid[2]) is str else ""


# -- the object

_PLAIN_TYPES = frozenset({type(None), bool, int, float, str, bytes, bytearray})
# Calls that weights_only makes of plain arguments.
_PLAIN_CALLS = frozenset({"torch.Size", "torch.device", "_codecs.encode", "builtins.set", "__builtin__.set"})
_PLAIN_CALLS |= {"builtins.complex", "__builtin__.complex", "builtins.bytearray", "__builtin__.bytearray"}


class Slot:
    """The place of a tensor in the object."""

    __slots__ = ("call", "named", "state")

    def __init__(self, named: Named, *, state: bool, call: Call | None = None) -> None:
        self.named = named
        self.state = state  # of a module's state dict, where parameters are plain tensors
        self.call = call  # of a tensor that is carried over


class Structure(NamedTuple):
    """The object, its tensors in the order in which a reader finds them, and what was dropped."""

    root: object
    slots: tuple[Slot, ...]
    dropped: tuple[Dropped, ...]


def flat(named: tuple[Named, ...], calls: dict[tuple[Key, ...], Call]) -> Structure:
    """A dictionary of tensors by their names; ``calls`` are those of tensors that are carried over."""
    slots = [Slot(each, state=True, call=calls.get(each.tensor.path)) for each in named]
    return Structure(Dict([part for slot in slots for part in (slot.named.name, slot)]), tuple(slots), ())


def structured(
    root: object,
    named: tuple[Named, ...],
    *,
    known: frozenset[tuple[Key, ...]],
    modules: set[tuple[Key, ...]],
    start: tuple[Key, ...],
    calls: dict[tuple[Key, ...], Call],
) -> Structure:
    """The object below ``root``, which is at the path ``start``; ``known`` are the paths of all tensors there are.

    ``modules`` are the paths of pickled modules, ``calls`` those of tensors that are carried over.
    """
    walk = _StructureWalk({each.tensor.path: each for each in named}, known, modules, calls)
    kept = walk.keep(root, start, 0)
    return Structure(Dict([]) if kept is NOTHING else kept, tuple(walk.slots), tuple(walk.dropped))


class _StructureWalk(BoundedWalk):
    def __init__(
        self,
        named: dict[tuple[Key, ...], Named],
        known: frozenset[tuple[Key, ...]],
        modules: set[tuple[Key, ...]],
        calls: dict[tuple[Key, ...], Call],
    ) -> None:
        super().__init__()
        self._named, self._known, self._modules, self._calls = named, known, modules, calls
        self.slots: list[Slot] = []
        self.dropped: list[Dropped] = []

    def keep(self, node: Any, path: tuple[Key, ...], depth: int) -> Any:
        """A node as the target has it, or ``NOTHING``."""
        if path in self._known:
            attributes = tensor_attributes(node)
            if attributes.items:
                self.dropped.append(Dropped((*path, "$attributes"), attributes))
            return self._slot(path, state=False)
        if path in self._modules:
            self.dropped.append(Dropped(path, node))
            return self._state_dict(path)
        if type(node) in _PLAIN_TYPES or _is_plain(node):
            return node
        ordered = type(node) is Call and called(node) == _ORDERED_DICT and not node.appended
        container = ordered or type(node) in (Dict, list, tuple)
        if not container or id(node) in self.ancestors or self.is_too_much(node, depth):
            self.dropped.append(Dropped(path, node))
            return NOTHING
        self.ancestors.add(id(node))
        try:
            if type(node) in (list, tuple):
                values = [self.keep(value, (*path, index), depth + 1) for index, value in enumerate(node)]
                kept = [None if value is NOTHING else value for value in values]
                return tuple(kept) if type(node) is tuple else kept
            return self._mapping(node, path, depth + 1)
        finally:
            self.ancestors.discard(id(node))

    def _slot(self, path: tuple[Key, ...], *, state: bool) -> Any:
        if path not in self._named:
            return NOTHING
        self.slots.append(Slot(self._named[path], state=state, call=self._calls.get(path)))
        return self.slots[-1]

    def _state_dict(self, path: tuple[Key, ...]) -> Call:
        items: list[object] = []
        for inside, each in self._named.items():
            if inside[: len(path)] == path:
                items += [each.name.rpartition("/")[2] if path else each.name, self._slot(inside, state=True)]
        made = Call(Global("collections", "OrderedDict", 0), (), "reduce", 0)
        made.items = items
        return made

    def _mapping(self, node: Any, path: tuple[Key, ...], depth: int) -> Dict | Call:
        items: list[object] = []
        for key, value in last_pairs(node.items if type(node) is Dict else call_items(node)):
            step = (*path, short_key(key))
            if type(key) not in KEY_TYPES:
                self.dropped.append(Dropped(step, value))
                continue
            kept = self.keep(value, step, depth)
            if kept is not NOTHING:
                items += [_key_of(kept, key), kept]
        if type(node) is Dict:
            return Dict(items)
        made = Call(node.callee, (), "reduce", 0)
        made.items = items
        if node.states:  # state_dict() keeps the versions of its modules there
            state = self.keep(node.states[-1], (*path, "$attributes"), depth)
            made.states = [state] if state is not NOTHING else None
        return made


def _key_of(kept: object, key: object) -> object:
    """The key of a value: of a tensor, as the tensor is called now, without the prefix that was stripped."""
    if type(kept) is not Slot or type(key) is not str or not kept.named.tensor.name.endswith(key):
        return key
    name = kept.named.name
    if len(kept.named.tensor.name) == len(key):
        return name
    return name.rpartition("/")[2] if "/" not in key else key


def _is_plain(node: Any) -> bool:
    """Whether ``weights_only`` makes a value of a node without being asked to trust anybody."""
    if type(node) is Global:
        return node.module == "torch" and node.name in ITEMSIZE
    if type(node) is not Call or called(node) not in _PLAIN_CALLS or type(node.args) is not tuple:
        return False
    if node.states or node.items or node.appended:
        return False
    parts: list[Any] = list(node.args)
    for part in parts:  # grows as it goes
        if type(part) in (tuple, list) and len(parts) < _MAX_PARTS:
            parts += part
        elif type(part) not in _PLAIN_TYPES and not (part is not node and _is_encoded_bytes(part)):
            return False
    return True


def _is_encoded_bytes(node: Any) -> bool:
    """Whether a node is a call by which pickles of protocol 2 hold bytes."""
    if type(node) is not Call or called(node) != "_codecs.encode" or type(node.args) is not tuple:
        return False
    return all(type(part) is str for part in node.args)


# -- which bytes become storages

_CLASSES = {
    dtype: name for name, dtype in reversed(STORAGES.items()) if name not in ("UntypedStorage", "_UntypedStorage")
}
_WIDEST = 16


class _Stored(NamedTuple):
    """A storage of the target: the bytes of an entry, under a number."""

    key: str
    entry: Entry


class _View(NamedTuple):
    """How a tensor looks at its storage."""

    stored: _Stored
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Layout(NamedTuple):
    """The storages, and how each slot looks at them, by the ``id`` of the slot."""

    storages: list[_Stored]
    views: dict[int, _View]

    @property
    def nbytes(self) -> int:
        """Bytes of all storages."""
        return sum(stored.entry.nbytes for stored in self.storages)

    def add(self, entry: Entry) -> _Stored:
        """Add a storage."""
        stored = _Stored(str(len(self.storages)), entry)
        self.storages.append(stored)
        return stored


def laid_out(structure: Structure, content: Content, wanted: str) -> Layout:
    """The storages of an object: tensors that overlap share one, every other has one of its own."""
    allowance = Allowance(content.checkpoint)
    layout = Layout([], {})
    spans: dict[str, list[tuple[int, int, Slot]]] = {}
    alone: dict[Any, _Stored] = {}
    for slot in structure.slots:
        if slot.call is not None:
            continue
        tensor = slot.named.tensor
        dtype = wanted if is_cast(tensor.dtype, wanted) else tensor.dtype
        if dtype == tensor.dtype and _shares_storage(tensor, content):
            spans.setdefault(tensor.storage or "", []).append((*byte_span(tensor), slot))
            continue
        tie = tie_of(tensor) or id(slot)
        if tie not in alone:
            allowance.spend(tensor)
            alone[tie] = layout.add(Entry(slot.named.name, tensor, dtype))
        layout.views[id(slot)] = _View(alone[tie], dtype, 0, tensor.shape, contiguous(tensor.shape))
    for storage_spans in spans.values():
        for group in overlapping(storage_spans):
            _share(group, layout)
    return layout


def _shares_storage(tensor: Tensor, content: Content) -> bool:
    """Whether a tensor may keep a storage in common with others; else it gets one of its own."""
    storage = content.storage(tensor)
    if tensor.kind != "strided" or tensor.flags or storage is None or not tensor.numel:
        return False
    low, high = byte_span(tensor)
    mixed = storage.big_endian and ITEMSIZE[tensor.dtype] != ITEMSIZE.get(storage.dtype, 0)
    scattered = high - low > 2 * tensor.nbytes + 4096
    return not mixed and not scattered


def _share(group: list[tuple[int, int, Slot]], layout: Layout) -> None:
    first = group[0][2].named
    dtypes = {slot.named.tensor.dtype for _, _, slot in group}
    dtype = first.tensor.dtype if len(dtypes) == 1 else "uint8"
    width = ITEMSIZE[dtype]
    low = group[0][0] if len(dtypes) == 1 else group[0][0] // _WIDEST * _WIDEST
    size = (max(high for _, high, _ in group) - low) // width
    whole = Tensor((), first.name, dtype, (size,), (1,), "cpu", first.tensor.storage, low // width)
    stored = layout.add(Entry(first.name, whole, dtype))
    for _, _, slot in group:
        tensor = slot.named.tensor
        offset = tensor.offset - low // ITEMSIZE[tensor.dtype]
        layout.views[id(slot)] = _View(stored, tensor.dtype, offset, tensor.shape, tensor.stride)


# -- the pickle


class _TensorCalls:
    """Makes the call for each slot. Storages that are carried over are added to the layout when they are needed."""

    def __init__(self, layout: Layout, storages: tuple[Storage, ...]) -> None:
        self._layout = layout
        self._globals: dict[str, Global] = {}
        self._source_storages = {storage.key: storage for storage in storages}
        self._carried: dict[str, _Stored] = {}

    def tensor(self, slot: Slot) -> Any:
        """The call for a tensor."""
        if slot.call is not None:
            return self._carry(slot.call)
        view, tensor = self._layout.views[id(slot)], slot.named.tensor
        parameter = tensor.cls == "Parameter" and not slot.state
        kind = _CLASSES.get(view.dtype)
        key, nbytes = view.stored.key, view.stored.entry.nbytes
        if kind is None:  # a dtype without a storage class of its own
            pid = ("storage", self._global("torch.storage", "UntypedStorage"), key, "cpu", nbytes)
        else:
            pid = ("storage", self._global("torch", kind), key, "cpu", nbytes // ITEMSIZE[view.dtype])
        grad = tensor.requires_grad and not slot.state and not parameter and kind is not None
        hooks = self._call("collections", "OrderedDict")
        args = (Persistent(pid, 0), view.offset, view.shape, view.stride, grad, hooks)
        if kind is None:
            made = self._call("torch._utils", "_rebuild_tensor_v3", *args, self._global("torch", view.dtype))
        else:
            made = self._call("torch._utils", "_rebuild_tensor_v2", *args)
        if parameter:
            hooks = self._call("collections", "OrderedDict")
            return self._call("torch._utils", "_rebuild_parameter", made, tensor.requires_grad, hooks)
        return made

    def _global(self, module: str, name: str) -> Global:
        return self._globals.setdefault(f"{module} {name}", Global(module, name, 0))

    def _call(self, module: str, name: str, *args: object) -> Call:
        return Call(self._global(module, name), args, "reduce", 0)

    def _carry(self, node: Any) -> Any:
        """A clean call with the storages of the target; no deeper than the tensors that our reader understands."""
        if type(node) is Persistent:
            pid: Any = node.id
            return Persistent(("storage", pid[1], self._carried_key(_storage_key(node)), "cpu", pid[4]), 0)
        if type(node) is tuple:
            return tuple(self._carry(part) for part in node)
        if type(node) is Call:
            made = Call(node.callee, self._carry(node.args), node.kind, 0)
            made.items = [self._carry(part) for part in node.items] if node.items else None
            return made
        return node

    def _carried_key(self, key: str) -> str:
        """The key in the target of a storage that is carried over whole."""
        if key not in self._carried:
            storage = self._source_storages[key]
            dtype = _NUMBERS.get(storage.dtype, storage.dtype)  # as its bytes are read: they may have to be swapped
            width = ITEMSIZE.get(dtype, 0)
            if not width or dtype.startswith("q") or storage.nbytes % width:
                dtype, width = "uint8", 1
            tensor = Tensor((), key, dtype, (storage.nbytes // width,), (1,), "cpu", storage.id)
            self._carried[key] = self._layout.add(Entry(storage.tensors[0] if storage.tensors else key, tensor, dtype))
        return self._carried[key].key


# -- the archive

_MAX_BUNCH = 1000


def write_torch(job: Job, structure: Structure, layout: Layout, data: Data) -> list[Location]:
    """Write the object and its storages; where a reader finds them."""
    from transload.formats.pickle_writer import dumps
    from transload.io.atomic import SystemFile
    from transload.saving.storages import ROOT, closing_records, threads_for

    layout = Layout([*layout.storages], layout.views)  # the plan stays as it is
    calls = _TensorCalls(layout, data.content.checkpoint.storages)
    pickled = dumps(structure.root, expand=(Slot, calls.tensor))
    file = job.bundle.add(job.dst)
    write_archive(
        SystemFile(file.descriptor, push=True),
        ROOT,
        _records(pickled, layout.storages, data),
        lambda sums: closing_records(sums, (b"", b"")),
        threads=threads_for(layout.nbytes),
        tell=job.progress,
    )
    return _read_back(Descriptor(file.descriptor, file.path), structure.slots, layout)


class _Stream:
    """The bytes of an entry, for a writer that looks some pieces ahead."""

    def __init__(self, entry: Entry, data: Data) -> None:
        self._entry, self._data = entry, data

    def chunks(self) -> Iterator[Chunk]:
        for piece in self._data.pieces(self._entry, PIECE):
            yield Chunk(bytes(piece))


def _records(pickled: bytes, storages: list[_Stored], data: Data) -> Iterator[Record | Bunch]:
    yield Record(b"data.pkl", len(pickled), pickled)
    yield Record(b".format_version", 1, b"1")
    yield Record(b".storage_alignment", 2, b"64")
    yield Record(b"byteorder", 6, b"little")
    small: list[tuple[bytes, bytes]] = []
    for stored in storages:
        name, size = b"data/" + stored.key.encode(), stored.entry.nbytes
        if size <= SMALL:
            small.append((name, b"".join(map(bytes, data.pieces(stored.entry)))))
        if small and (size > SMALL or len(small) >= _MAX_BUNCH):
            yield Bunch(small)
            small = []
        if size > SMALL:
            yield Record(name, size, _Stream(stored.entry, data))
    if small:
        yield Bunch(small)


def _read_back(source: Descriptor, slots: tuple[Slot, ...], layout: Layout) -> list[Location]:
    """Where the reader finds what was just written; it must find just that."""
    from transload.formats import read_source

    read = read_source(source)
    problems = [problem for problem in read.problems if problem.code != "leaves-uncounted"]  # a long history of losses
    if len(read.tensors) != len(slots) or problems:
        raise ConvertError("it does not read back as it was written", where=source.name)
    for tensor, slot in zip(read.tensors, slots, strict=True):
        view, before = layout.views.get(id(slot)), slot.named.tensor
        if view is None:
            same = (tensor.kind, tensor.dtype, tensor.shape) == (before.kind, before.dtype, before.shape)
        else:
            found = (tensor.dtype, tensor.offset, tensor.shape, tensor.stride, tensor.storage)
            same = found == (view.dtype, view.offset, view.shape, view.stride, view.stored.key)
        if not same:
            raise ConvertError(f"{slot.named.name} does not read back as it was written", where=source.name)
    offsets = {storage.key: storage.offset or 0 for storage in read.storages}
    return [Location(entry, source.read, offsets[key]) for key, entry in layout.storages if entry.nbytes]
