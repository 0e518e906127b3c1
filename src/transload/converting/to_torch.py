"""A torch zip, as ``torch.save`` writes it, without torch: ``torch.load`` takes it with ``weights_only=True``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from transload.checkpoint import Tensor, contiguous
from transload.converting.carried import key_of, plain_dtype, rewritten
from transload.converting.casting import is_cast
from transload.converting.comparing import Back
from transload.converting.entries import Entry, tie_of
from transload.converting.moving import Descriptor
from transload.converting.structure import Slot
from transload.dtypes import ITEMSIZE, QUANTIZED, STORAGES, itemsize
from transload.errors import ConvertError
from transload.formats.zip_writer import PIECE, SMALL, Bunch, Chunk, Record, write_archive
from transload.nodes import Call, Dict, Global, Persistent
from transload.tensors import Allowance

if TYPE_CHECKING:
    from transload.converting.entries import Data
    from transload.converting.job import Job
    from transload.converting.structure import Structure
    from transload.io.atomic import AtomicFile
    from transload.tensors import Content

__all__ = ["Layout", "holds", "laid_out", "write_torch"]

_CLASSES = {
    dtype: name for name, dtype in reversed(STORAGES.items()) if name not in ("UntypedStorage", "_UntypedStorage")
}
_WIDEST = 16
_TOGETHER = 1000


def holds(dtype: str) -> bool:
    """Whether the format has a dtype as it is."""
    return dtype in ITEMSIZE and dtype not in QUANTIZED


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
    """Which bytes become storages, and how each slot looks at them."""

    storages: list[_Stored]
    views: dict[int, _View]

    @property
    def nbytes(self) -> int:
        """Bytes of all storages."""
        return sum(stored.entry.nbytes for stored in self.storages)


def write_torch(job: Job, made: Structure, layout: Layout, data: Data) -> list[Back]:
    """Write the object and its storages; where they are now."""
    from transload.formats.pickle_writer import dumps
    from transload.io.atomic import SystemFile
    from transload.saving.storages import ROOT, closing_records, threads_for

    storages, views = layout
    nodes = _Nodes(views, _Whole(storages, data))
    pickled = dumps(nodes.node(made.root), expand=(Slot, nodes.tensor))
    file = job.bundle.add(job.dst)
    write_archive(
        SystemFile(file.descriptor, push=True),
        ROOT,
        _records(pickled, storages, data),
        lambda sums: closing_records(sums, (b"", b"")),
        threads=threads_for(layout.nbytes),
        tell=job.tell,
    )
    return _found(file, made.slots, views, storages)


# -- which bytes become a storage


def laid_out(made: Structure, content: Content, wanted: str) -> Layout:
    """Storages, and the view of each slot: those that overlap keep one storage, all others get one of their own."""
    allowance = Allowance(content.checkpoint)
    slots = [slot for slot in made.slots if slot.call is None]
    storages: list[_Stored] = []
    views: dict[int, _View] = {}
    spans: dict[str, list[tuple[int, int, Slot]]] = {}
    alone: dict[Any, _Stored] = {}
    for slot in slots:
        tensor = slot.named.tensor
        dtype = wanted if is_cast(tensor.dtype, wanted) else tensor.dtype
        span = _span(tensor, content) if dtype == tensor.dtype else None
        if span is not None:
            spans.setdefault(tensor.storage or "", []).append((*span, slot))
            continue
        tie = tie_of(tensor) or id(slot)
        if tie not in alone:
            allowance.spend(tensor)
            alone[tie] = _Stored(str(len(storages)), Entry(slot.named.name, tensor, dtype))
            storages.append(alone[tie])
        views[id(slot)] = _View(alone[tie], dtype, 0, tensor.shape, contiguous(tensor.shape))
    for held in spans.values():
        for cluster in _clusters(held):
            _share(cluster, storages, views)
    return Layout(storages, views)


def _span(tensor: Tensor, content: Content) -> tuple[int, int] | None:
    """The bytes of its storage that a tensor reaches; ``None`` if it gets a storage of its own."""
    storage = content.storage(tensor)
    if tensor.kind != "strided" or tensor.flags or storage is None or not tensor.numel:
        return None
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True))
    low, high = itemsize(tensor.dtype, tensor.offset), itemsize(tensor.dtype, tensor.offset + last + 1)
    mixed = storage.big_endian and ITEMSIZE[tensor.dtype] != ITEMSIZE.get(storage.dtype, 0)
    scattered = high - low > 2 * tensor.nbytes + 4096
    return None if mixed or scattered else (low, high)


def _clusters(spans: list[tuple[int, int, Slot]]) -> Iterator[list[tuple[int, int, Slot]]]:
    """Those that overlap, directly or by way of others."""
    spans = sorted(spans, key=lambda span: span[:2])
    cluster, reached = spans[:1], spans[0][1]
    for span in spans[1:]:
        if span[0] >= reached:
            yield cluster
            cluster = []
        cluster.append(span)
        reached = max(reached, span[1])
    yield cluster


def _share(cluster: list[tuple[int, int, Slot]], storages: list[_Stored], views: dict[int, _View]) -> None:
    first = cluster[0][2].named
    dtypes = {slot.named.tensor.dtype for _, _, slot in cluster}
    dtype = first.tensor.dtype if len(dtypes) == 1 else "uint8"
    width = ITEMSIZE[dtype]
    low = cluster[0][0] if len(dtypes) == 1 else cluster[0][0] // _WIDEST * _WIDEST
    size = (max(high for _, high, _ in cluster) - low) // width
    whole = Tensor((), first.name, dtype, (size,), (1,), "cpu", first.tensor.storage, low // width)
    stored = _Stored(str(len(storages)), Entry(first.name, whole, dtype))
    storages.append(stored)
    for _, _, slot in cluster:
        tensor = slot.named.tensor
        offset = tensor.offset - low // ITEMSIZE[tensor.dtype]
        views[id(slot)] = _View(stored, tensor.dtype, offset, tensor.shape, tensor.stride)


# -- the pickle


class _Nodes:
    """Makes inert nodes of an object with slots."""

    def __init__(self, views: dict[int, _View], whole: _Whole) -> None:
        self._views = views
        self._whole = whole
        self._globals: dict[str, Global] = {}

    def node(self, node: Any) -> Any:
        """The object without what is no node, but for the slots. As deep as ``structure.MAX_DEPTH`` at most."""
        if type(node) is Dict:
            return Dict([self.node(part) for part in node.items])
        if type(node) is list:
            return [self.node(part) for part in node]
        if type(node) is tuple:
            return tuple(self.node(part) for part in node)
        if type(node) is Call and (node.items or node.states):
            made = Call(node.callee, node.args, node.kind, 0)
            made.items = [self.node(part) for part in node.items or []]
            made.states = [self.node(part) for part in node.states or []]
            return made
        return node

    def tensor(self, slot: Slot) -> Any:
        """The call for a tensor."""
        return self._tensor(slot) if slot.call is None else rewritten(slot.call, self._whole.storage)

    def _named(self, module: str, name: str) -> Global:
        return self._globals.setdefault(f"{module} {name}", Global(module, name, 0))

    def _call(self, module: str, name: str, *args: object) -> Call:
        return Call(self._named(module, name), args, "reduce", 0)

    def _tensor(self, slot: Slot) -> Call:
        view, tensor = self._views[id(slot)], slot.named.tensor
        parameter = tensor.cls == "Parameter" and not slot.state
        kind = _CLASSES.get(view.dtype)
        grad = tensor.requires_grad and not slot.state and not parameter and kind is not None
        held, hooks = self._storage(view), self._call("collections", "OrderedDict")
        args = (held, view.offset, view.shape, view.stride, grad, hooks)
        if kind is None:
            made = self._call("torch._utils", "_rebuild_tensor_v3", *args, self._named("torch", view.dtype))
        else:
            made = self._call("torch._utils", "_rebuild_tensor_v2", *args)
        if parameter:
            hooks = self._call("collections", "OrderedDict")
            return self._call("torch._utils", "_rebuild_parameter", made, tensor.requires_grad, hooks)
        return made

    def _storage(self, view: _View) -> Persistent:
        key, nbytes = view.stored.key, view.stored.entry.nbytes
        kind = _CLASSES.get(view.dtype)
        if kind is None:
            return Persistent(("storage", self._named("torch.storage", "UntypedStorage"), key, "cpu", nbytes), 0)
        return Persistent(("storage", self._named("torch", kind), key, "cpu", nbytes // ITEMSIZE[view.dtype]), 0)


class _Whole:
    """Storages that are taken over whole, for calls that are taken over as they are."""

    def __init__(self, storages: list[_Stored], data: Data) -> None:
        self._storages = storages
        self._by_key = {storage.key: storage for storage in data.content.checkpoint.storages}
        self._made: dict[str, _Stored] = {}

    def storage(self, node: Persistent) -> Persistent:
        """The id of a storage in the target."""
        key, pid = key_of(node), node.id
        if key not in self._made:
            held = self._by_key[key]
            dtype = plain_dtype(held)
            tensor = Tensor((), key, dtype, (held.nbytes // ITEMSIZE[dtype],), (1,), "cpu", held.id)
            self._made[key] = _Stored(
                str(len(self._storages)), Entry(held.tensors[0] if held.tensors else key, tensor, dtype)
            )
            self._storages.append(self._made[key])
        return Persistent(("storage", pid[1], self._made[key].key, "cpu", pid[4]), 0)  # type: ignore[index]


# -- the archive


class _Stream:
    """The bytes of an entry, for a writer that looks some pieces ahead."""

    def __init__(self, entry: Entry, data: Data) -> None:
        self._entry, self._data = entry, data

    def chunks(self) -> Iterator[Chunk]:
        for piece in self._data.pieces(self._entry, PIECE):
            yield Chunk(bytes(piece))


def _records(pickled: bytes, storages: list[_Stored], data: Data) -> Iterator[Record | Bunch]:
    for name, content in (
        (b"data.pkl", pickled),
        (b".format_version", b"1"),
        (b".storage_alignment", b"64"),
        (b"byteorder", b"little"),
    ):
        yield Record(name, len(content), content)
    small: list[tuple[bytes, bytes]] = []
    for stored in storages:
        name, size = b"data/" + stored.key.encode(), stored.entry.nbytes
        if size <= SMALL:
            small.append((name, b"".join(map(bytes, data.pieces(stored.entry)))))
        if small and (size > SMALL or len(small) >= _TOGETHER):
            yield Bunch(small)
            small = []
        if size > SMALL:
            yield Record(name, size, _Stream(stored.entry, data))
    if small:
        yield Bunch(small)


def _found(file: AtomicFile, slots: tuple[Slot, ...], views: dict[int, _View], storages: list[_Stored]) -> list[Back]:
    """Where the reader finds what was just written; it must find just that."""
    from transload.formats import read_source

    source = Descriptor(file.descriptor, file.path)
    read = read_source(source)
    problems = [problem for problem in read.problems if problem.code != "leaves-uncounted"]  # a long history of losses
    if len(read.tensors) != len(slots) or problems:
        raise ConvertError("it is not read back as it was written", where=file.path)
    for tensor, slot in zip(read.tensors, slots, strict=True):
        if not _is_same(tensor, slot, views.get(id(slot))):
            raise ConvertError(f"{slot.named.name} is not read back as it was written", where=file.path)
    offsets = {storage.key: storage.offset or 0 for storage in read.storages}
    return [Back(stored.entry, source, offsets[stored.key]) for stored in storages if stored.entry.nbytes]


def _is_same(tensor: Tensor, slot: Slot, view: _View | None) -> bool:
    """Whether a tensor is read back as it was written."""
    if view is None:
        before = slot.named.tensor
        return (tensor.kind, tensor.dtype, tensor.shape) == (before.kind, before.dtype, before.shape)
    told = (tensor.dtype, tensor.offset, tensor.shape, tensor.stride, tensor.storage)
    return told == (view.dtype, view.offset, view.shape, view.stride, view.stored.key)
