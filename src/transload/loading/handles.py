"""What lies at a path of a checkpoint: the inert node, or the plain value it is."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from transload.dtypes import ITEMSIZE
from transload.errors import (
    BrokenFileError,
    CannotReadError,
    DoesNotFitError,
    LandingWarning,
    LoadError,
    NoDeviceError,
    NotACheckpointError,
    UnsafeError,
    UsageError,
    os_error,
)
from transload.formats import no_collecting
from transload.formats.safetensors import header_metadata
from transload.formats.tensors import called, short_key
from transload.io.sources import BytesSource, Source, SourceLike
from transload.loading.build import is_fake_mode
from transload.loading.placement import Arrival, wanted_devices
from transload.nodes import Call, Dict, Global, Persistent, Set
from transload.tensors.files import Files, Inflating, Piece, open_beside
from transload.tensors.views import View, pieces, select

if TYPE_CHECKING:
    from types import TracebackType

    import torch

    from transload.checkpoint import Checkpoint, Key, Leaf, Record, Storage, Tensor
    from transload.io.sources import SourceLike
    from transload.loading.placement import Plan
    from transload.tensors.files import Piece
    from transload.tensors.views import Index

__all__ = [
    "NOWHERE",
    "STAGE",
    "Destinations",
    "Handle",
    "Lazy",
    "Opened",
    "Paths",
    "Straight",
    "build_node",
    "caller",
    "changed",
    "check_composite",
    "check_one",
    "fill",
    "fill_sharded",
    "metadata_of",
    "open",
    "open_checkpoint",
    "plain",
    "read_composite",
    "read_one",
    "straight",
]


NOWHERE = object()
"""What is found where a path leads nowhere, or a value is not plain."""

_MAX_PLAIN = 100_000
_MAX_DEPTH = 8


class Paths:
    """Looks up nodes by path from a root. Each container is gone through once."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._members: dict[int, dict[Key, object]] = {}

    def at(self, path: tuple[Key, ...]) -> object:
        """The node there, or ``NOWHERE``."""
        node = self._root
        for step in path:
            node = self._inside(node).get(step, NOWHERE)
            if node is NOWHERE:
                break
        return node

    def _inside(self, node: Any) -> dict[Key, object]:
        known = self._members.get(id(node))
        if known is None:
            known = self._members[id(node)] = dict(_members(node))
        return known


def _members(node: Any) -> list[tuple[Key, object]]:
    """The children of a node that a path can name: entries, attributes, positions."""
    kind = type(node)
    if kind is Dict:
        return [(short_key(key), value) for key, value in node.pairs()]
    if kind is list or kind is tuple:
        return list(enumerate(node))
    if kind is not Call:
        return []
    ordered = called(node) == "collections.OrderedDict"
    found = _given(node) if ordered else _members(node.states[-1]) if node.states else []
    return [*found, *_members(Dict(node.items or [])), *enumerate(node.appended or [])]


def _given(node: Call) -> list[tuple[Key, object]]:
    """The pairs an ordered dictionary is made of, as Python 2 writes one."""
    pairs = node.args[0] if type(node.args) is tuple and node.args and type(node.args[0]) is list else []
    return [(short_key(pair[0]), pair[1]) for pair in pairs if type(pair) in (list, tuple) and len(pair) == 2]


def plain(node: object) -> Any:
    """The value of a node that is plain data, of a bounded size; ``NOWHERE`` for any other."""
    return _plain(node, [_MAX_PLAIN], _MAX_DEPTH)


def _plain(node: Any, left: list[int], depth: int) -> Any:
    kind = type(node)
    if node is None or kind in (bool, int, float, str, bytes):
        return node
    left[0] -= 1  # what is shared counts each time it is met
    if left[0] < 0 or not depth:
        return NOWHERE
    if kind is Dict or (kind is Call and called(node) == "collections.OrderedDict" and not node.states):
        pairs = [(key, _plain(value, left, depth - 1)) for key, value in _members(node)]
        return NOWHERE if any(value is NOWHERE for _, value in pairs) else dict(pairs)
    if kind is Call and called(node) == "_codecs.encode":
        return _encoded(node.args)
    if kind is not list and kind is not tuple:
        return NOWHERE
    inner = [_plain(part, left, depth - 1) for part in node]
    return NOWHERE if any(value is NOWHERE for value in inner) else kind(inner)


def _encoded(args: object) -> Any:
    """Bytes, as protocol 2 writes them."""
    match args:
        case (str() as text, "latin1" | "latin-1") if text.isascii() or max(text) <= "\xff":
            return text.encode("latin1")
    return NOWHERE


def build_node(piece: Piece, node: object, arrival: Arrival) -> Any:
    """The object of a node; ``UnsafeError`` if it takes names that nobody has allowed."""
    from transload.loading.build import build
    from transload.loading.refusal import Allowed
    from transload.loading.storages import read_storages

    main = next(pickle for pickle in piece.checkpoint.pickles if pickle.main)
    names, keys = _within(node)
    part = copy(main)
    part.root = node
    part.globals = {key: name for key, name in main.globals.items() if id(name) in names}
    refused = sorted(name.full_name for name in Allowed().refused([part]))
    if refused:
        what = f"it is made by {', '.join(refused)}, which nobody has allowed"
        fix = "transload.load(path, weights_only=False) does it, for a file of people you trust."
        raise UnsafeError(what, where=piece.checkpoint.path, fix=fix)
    storages = tuple(storage for storage in piece.checkpoint.storages if storage.key in keys)
    alone = replace(piece, checkpoint=replace(piece.checkpoint, storages=storages))
    return build(alone, part, read_storages(alone, arrival), arrival)


def _within(root: object) -> tuple[set[int], set[str]]:
    """The globals below a node, by identity, and the keys of the storages there."""
    names: set[int] = set()
    keys: set[str] = set()
    seen: set[int] = set()
    waiting: list[Any] = [root]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if type(node) is Global:
            names.add(id(node))
        elif type(node) is Persistent and type(node.id) is tuple and len(node.id) > 2:
            keys.add(str(node.id[2]))
        waiting += _below(node)
    return names, keys


def _below(node: Any) -> list[Any]:
    kind = type(node)
    if kind is list or kind is tuple:
        return list(node)
    if kind is Dict or kind is Set:
        return list(node.items)
    if kind is Persistent:
        return [node.id]
    if kind is not Call:
        return []
    inside = (node.states, node.items, node.appended)
    return [node.callee, node.args, node.kwargs, *(part for parts in inside if parts for part in parts)]


class Opened:
    """A judged checkpoint and its open files. Where it is a directory, ``folder`` is where names of files begin."""

    def __init__(self, files: Files, folder: str | None) -> None:
        self.checkpoint: Checkpoint = files.checkpoint
        self.closed = False
        self._files = files
        self._folder = folder
        self._storages = {storage.id: storage for storage in self.checkpoint.storages}
        self._pieces = {piece.path: piece for piece in files.pieces}
        self._sources: dict[str, Source] = {}
        self._inflating: dict[str, Source] = {}
        self._lock = Lock()

    def check_open(self) -> None:
        """``UsageError`` if it was closed."""
        if self.closed:
            raise UsageError("this checkpoint was closed", where=self.checkpoint.path, fix="Open it again to read.")

    def storage(self, id: str | None) -> Storage | None:
        """The storage of that id."""
        return self._storages.get(id or "")

    def file(self, name: str = "") -> Source:
        """One of its files, by the name storages give it; it stays open until all are closed."""
        with self._lock:
            self.check_open()
            known = self._sources.get(name)
            if known is None:
                known = self._sources[name] = self._open(name)
        return known

    def _open(self, name: str) -> Source:
        piece = self.piece(name)
        if piece is not None:
            return piece.open(name)
        return open_beside(os.path.join(self._folder or "", name), len(self._sources))  # noqa: PTH118 - pathlib costs ten milliseconds

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The checkpoints of all its files that are one by themselves."""
        return self._files.pieces

    def piece(self, name: str) -> Piece | None:
        """The checkpoint of one of its files; ``None`` if that was not read as one by itself."""
        if self._folder is None:
            return self._files.pieces[0]
        return self._pieces.get(os.path.join(self._folder, name)) or self._pieces.get("")  # noqa: PTH118 - as below

    def node(self, path: tuple[Key, ...]) -> tuple[Piece, object] | None:
        """The file of which a path leads somewhere, and the inert node there; ``None`` if it leads nowhere."""
        for piece, paths in zip(self.pieces, self._paths, strict=True):
            found = paths.at(path)
            if found is not NOWHERE:
                return piece, found
        return None

    @cached_property
    def _paths(self) -> list[Paths]:
        return [Paths(piece.checkpoint.root) for piece in self.pieces]

    def bytes_of(self, storage: Storage) -> tuple[Source, int]:
        """Where to read a storage, and the position of its first byte; ``LoadError`` if there is no such place."""
        if storage.offset is not None:
            return self.file(storage.file), storage.offset
        if not storage.compressed:
            raise BrokenFileError(f"storage {storage.key} is not in the file", where=self.checkpoint.path)
        source = self.file(storage.file)
        with self._lock:
            known = self._inflating.get(storage.id)
            if known is None:
                known = self._inflating[storage.id] = self._inflate(storage, source)
        return known, 0

    def _inflate(self, storage: Storage, source: Source) -> Source:
        record = self._record(storage, source)
        if record is None or record.offset is None or record.method != 8:
            what = f"storage {storage.key} lies in a record packed in a way torch does not read ({storage.record})"
            raise LoadError(what, where=self.checkpoint.path)
        return Inflating(source, record.offset, record.stored, record.size)

    def _record(self, storage: Storage, source: Source) -> Record | None:
        from transload.formats.zip_index import read_index

        known = {record.name: record for record in self.checkpoint.records} if self._folder is None else {}
        return (known or read_index(source).records).get(storage.record)

    def check_unchanged(self) -> None:
        """``BrokenFileError`` if somebody wrote to a file since it was opened."""
        self._files.check_unchanged()

    def close(self) -> None:
        """Close all files; twice does no harm."""
        with self._lock:
            self.closed = True
            for source in self._sources.values():
                source.close()
            self._files.close()
            self._sources.clear()
            self._inflating.clear()


def open_checkpoint(f: SourceLike) -> Opened:
    """Read what a path, bytes or a file object holds, judge it, and keep it open.

    ``NotACheckpointError`` if it is none; a damaged one opens: what is left of it can be read.
    """
    folder = _folder(os.fspath(f)) if isinstance(f, str | os.PathLike) else None
    try:
        with no_collecting():
            files = Files(f)
    except CannotReadError as error:
        raise os_error(error) from error
    if files.checkpoint.integrity == "not-a-checkpoint":
        files.close()
        raise _other(files.checkpoint)
    return Opened(files, folder)


def _folder(path: str) -> str | None:
    if os.path.isdir(path):  # noqa: PTH112 - as above
        return path
    return os.path.dirname(path) if path.endswith(".index.json") else None  # noqa: PTH120 - as above


def _other(checkpoint: Checkpoint) -> NotACheckpointError:
    """What the file is instead."""
    finding = next((found for found in checkpoint.findings if found.severity == "error"), None)
    what = finding.title if finding else "it is no checkpoint"
    return NotACheckpointError(what, where=checkpoint.path, fix="\n".join(finding.fix) if finding else "")


def metadata_of(opened: Opened) -> dict[str, Any]:
    """``__metadata__`` of a safetensors file, or of all shards together; the plain values of any other, by name."""
    checkpoint = opened.checkpoint
    if checkpoint.format == "safetensors":
        files = sorted({storage.file for storage in checkpoint.storages} or {""})
    else:
        files = [part.name for part in checkpoint.parts if ("format", "safetensors") in part.facts]
    out: dict[str, Any] = {}
    for name in files:
        out |= header_metadata(opened.file(name))
    for leaf in checkpoint.leaves:
        out.setdefault(leaf.name, _value(opened, leaf))
    return out


def _value(opened: Opened, leaf: Leaf) -> Any:
    """The value itself where it is plain; else what its text says."""
    held = opened.node(leaf.path)
    found = plain(held[1]) if held else NOWHERE
    if found is not NOWHERE:
        return found
    try:
        return _KINDS.get(leaf.kind, str)(leaf.text)
    except ValueError:  # an integer too long to be written out
        return leaf.text


_KINDS: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "bool": lambda text: text == "True",
    "None": lambda _: None,
}


class Destinations:
    """The device for each tag, by a plan that is made when it is first needed.

    A wish is what ``map_location`` is to ``transload.load``. Whether all of the checkpoint would fit is not asked:
    tensors are read one at a time, and perhaps not all of them.
    """

    def __init__(self, checkpoint: Checkpoint, wish: Any) -> None:
        self._checkpoint = checkpoint
        self._wish = wish
        self._known: dict[str, str] = {}
        self._told = False
        self._lock = Lock()

    def device(self, tag: str) -> str:
        """The device for what is tagged so; ``NoDeviceError`` if it is not here."""
        known = self._known.get(tag)
        if known is None:
            with self._lock:
                known = self._known[tag] = self.arrival.device(tag)
                self._tell(moved=known != tag)
        return known

    @cached_property
    def arrival(self) -> Arrival:
        """How storages get there."""
        return Arrival(self._plan, self._wish, self._checkpoint.path)

    @cached_property
    def _plan(self) -> Plan:
        from transload.loading.placement import devices_here, place

        checkpoint = self._checkpoint
        wanted = wanted_devices([use.device for use in checkpoint.devices], self._wish)
        plan = place(checkpoint, devices_here(wanted), self._wish)
        if plan.refused:
            fix = "\n".join(plan.fix).replace("map_location", "device")
            raise NoDeviceError(plan.refused, where=checkpoint.path, fix=fix)
        return plan

    def _tell(self, *, moved: bool) -> None:
        if moved and not self._told and self._plan.warning:
            self._told = True
            warnings.warn(f"{self._checkpoint.path}: {self._plan.warning}", LandingWarning, stacklevel=caller())


def caller() -> int:
    """How far above the one who asks the first frame is that is not ours: a warning shall name the user's line."""
    level = 1
    frame = sys._getframe(1)  # noqa: SLF001 - warnings has no other way before Python 3.12
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "transload":
        frame = frame.f_back
        level += 1
    return level


_Make = Callable[["Opened", "Tensor"], "torch.Tensor"]


def read_composite(
    opened: Opened, tensor: Tensor, *, index: Index, device: str | torch.device, dtype: torch.dtype | None
) -> torch.Tensor:
    """A tensor that is no plain run of elements; read whole, whatever is wanted of it."""
    import torch

    check_composite(opened, tensor)
    make = _MAKERS.get(tensor.kind, _built)
    made = make(opened, tensor)
    if type(index) is not tuple or index:
        made = _indexed(made, index, opened, tensor)
    wanted = dtype if dtype is not None and made.dtype.is_floating_point else made.dtype
    # A class need not know how to be moved where it is already.
    return (
        made if made.is_meta or (made.device, made.dtype) == (torch.device(device), wanted) else made.to(device, wanted)
    )


def _indexed(made: torch.Tensor, index: Index, opened: Opened, tensor: Tensor) -> torch.Tensor:
    try:
        return made[index]
    except (NotImplementedError, RuntimeError) as error:
        what = f"torch cannot take a part of {tensor.name or 'the tensor'}, which is {tensor.kind}: {error}"
        raise LoadError(what, where=opened.checkpoint.path, fix="Read the whole tensor.") from error


def check_composite(opened: Opened, tensor: Tensor) -> None:
    """``LoadError`` if a tensor of this kind is not read by itself, or one of its parts cannot be."""
    if tensor.kind == "sharded" and not _covers(tensor):
        raise BrokenFileError(f"the pieces of {tensor.name} are not all there", where=opened.checkpoint.path)
    if (tensor.kind not in _MAKERS or not (tensor.parts or tensor.kind == "meta")) and _node(opened, tensor) is None:
        kind = f"of the class {tensor.cls}" if tensor.kind == "subclass" else tensor.kind
        what = f"{tensor.name or 'the tensor'} is {kind}, which is not read by itself"
        raise LoadError(what, where=opened.checkpoint.path, fix="Load the whole file instead.")
    for part in tensor.parts:
        check_one(opened, part)


def _node(opened: Opened, tensor: Tensor) -> tuple[Piece, object] | None:
    """The file a tensor is in, and the call there that makes it; ``None`` where there is no such call."""
    found = opened.node(tensor.path)
    return found if found and type(found[1]) is Call else None


def _built(opened: Opened, tensor: Tensor) -> torch.Tensor:
    """By the call that makes it, as the whole file would be loaded."""
    import torch

    found = _node(opened, tensor)
    if found is None:
        raise LoadError(f"{tensor.name} is not read by itself", where=opened.checkpoint.path)
    made = build_node(*found, Destinations(opened.checkpoint, "cpu").arrival)
    if not isinstance(made, torch.Tensor):
        raise BrokenFileError(f"{tensor.name} is no tensor", where=opened.checkpoint.path)
    return made.detach() if made.requires_grad else made


def _meta(opened: Opened, tensor: Tensor) -> torch.Tensor:  # noqa: ARG001 - it has no bytes
    import torch

    return torch.empty_strided(tensor.shape, tensor.stride, dtype=getattr(torch, tensor.dtype), device="meta")


def _device(opened: Opened, tensor: Tensor) -> torch.Tensor:
    import torch

    if not tensor.parts:
        return _built(opened, tensor)
    return read_one(opened, tensor.parts[0]).to(getattr(torch, tensor.dtype))


def _sharded(opened: Opened, tensor: Tensor) -> torch.Tensor:
    import torch

    whole = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="cpu")
    fill_sharded(opened, tensor, whole)
    return whole


def fill_sharded(opened: Opened, tensor: Tensor, target: torch.Tensor) -> None:
    """Each piece read to its place in the whole; the path of a piece ends in the position of its first element."""
    for part in tensor.parts:
        at: tuple[Any, ...] = part.path[len(part.path) - len(part.shape) :]
        window = tuple(slice(first, first + size) for first, size in zip(at, part.shape, strict=True))
        fill(opened, part, target[window])


def _covers(tensor: Tensor) -> bool:
    """Whether the pieces are placed and as many elements as the whole, so that nothing is left as it was in memory."""
    rank = len(tensor.shape)
    placed = all(
        len(part.path) > rank
        and len(part.shape) == rank
        and all(
            type(first) is int and first + size <= end
            for first, size, end in zip(part.path[len(part.path) - rank :], part.shape, tensor.shape, strict=True)
        )
        for part in tensor.parts
    )
    return placed and sum(part.numel for part in tensor.parts) == tensor.numel


_MAKERS: dict[str, _Make] = {"meta": _meta, "device": _device, "sharded": _sharded}


STAGE = 16 << 20
"""Bytes of the buffer between the file and memory that cannot be read into."""

_ALONE = 16 << 20  # a tensor from this size on is read by several threads
_PIN = 1 << 20  # a smaller buffer is not worth the call that pins it


class _Run(NamedTuple):
    """A strided tensor as a reading task: where its storage begins, how much of it is there, and what it looks at."""

    name: str
    source: Source
    start: int
    stored: int
    view: View
    dtype: torch.dtype
    itemsize: int
    swapped: bool
    flags: tuple[str, ...]

    @property
    def as_it_lies(self) -> bool:
        """Whether the bytes in the file are those in memory."""
        return not self.swapped and not self.flags


class Straight(NamedTuple):
    """What of a file goes to which memory, as it is."""

    source: Source
    offset: int
    nbytes: int
    address: int
    device: str


def read_one(
    opened: Opened,
    tensor: Tensor,
    *,
    index: Index = (),
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """A tensor of a checkpoint, or what ``index`` names of it, on a device.

    ``dtype`` casts what is floating point. The strides are kept where they leave no gaps; else the result is
    contiguous. ``LoadError`` names the tensor where its bytes are not there.
    """
    if tensor.kind != "strided":
        return read_composite(opened, tensor, index=index, device=device, dtype=dtype)
    import torch

    where = torch.device(device)
    run = _run(opened, tensor, index)
    wanted = dtype if dtype is not None and run.dtype.is_floating_point else run.dtype
    if where.type == "meta" or is_fake_mode():
        return torch.empty_strided(run.view.shape, run.view.stride, dtype=wanted, device=where)
    if _is_reached(where) and wanted == run.dtype and run.as_it_lies and run.view.extent <= run.view.numel:
        return _straight(run, where)
    with _room(run, where):
        target = torch.empty(run.view.shape, dtype=wanted, device=where)
    _staged(run, target)
    return target


def fill(opened: Opened, tensor: Tensor, target: torch.Tensor, *, index: Index = ()) -> None:
    """Read a tensor into the memory of another of the same shape, where it lies; cast if the dtypes differ."""
    import torch

    with torch.no_grad():
        if tensor.kind == "sharded" and index == ():
            fill_sharded(opened, tensor, target)
            return
        if tensor.kind != "strided" or not _has_plain_memory(target):
            target.copy_(read_one(opened, tensor, index=index))
            return
        run = _run(opened, tensor, index)
        if run.view.shape != tuple(target.shape):
            raise ValueError(f"{list(run.view.shape)} does not go into {list(target.shape)}")
        inner = target.detach()
        if _lies_alike(run, inner):
            _bring(run, inner.data_ptr(), _named_device(inner.device), fresh=False)
        else:
            _staged(run, inner)
        changed(target)


def straight(opened: Opened, tensor: Tensor, target: torch.Tensor, *, index: Index = ()) -> Straight | None:
    """What ``fill`` would read, where nothing but bytes has to be moved and many threads can do it; else ``None``."""
    if tensor.kind != "strided" or not _has_plain_memory(target):
        return None
    run = _run(opened, tensor, index)
    inner = target.detach()
    if not run.view.extent or getattr(run.source, "descriptor", -1) < 0 or not _lies_alike(run, inner):
        return None
    offset = run.start + run.view.offset * run.itemsize
    return Straight(run.source, offset, run.view.extent * run.itemsize, inner.data_ptr(), _named_device(inner.device))


def _lies_alike(run: _Run, inner: torch.Tensor) -> bool:
    """Whether the bytes in the file are, in their order, those to be in the memory of a tensor."""
    alike: bool = inner.dtype == run.dtype and run.as_it_lies and run.view.compact and _is_reached(inner.device)
    return alike and run.view.like(tuple(inner.shape), inner.stride())


def _is_reached(device: torch.device) -> bool:
    """Whether the engine that moves bytes reaches a device."""
    if device.type != "cuda":
        return bool(device.type == "cpu")
    from transload.io.cuda_driver import cuda_driver

    return cuda_driver() is not None


def _named_device(device: torch.device) -> str:
    import torch

    if device.type == "cpu":
        return "cpu"
    return f"{device.type}:{torch.cuda.current_device() if device.index is None else device.index}"


def check_one(opened: Opened, tensor: Tensor) -> None:
    """``LoadError`` if it is clear, before a byte is read, that a tensor cannot be."""
    if tensor.kind == "strided":
        _run(opened, tensor, ())
        return

    check_composite(opened, tensor)


def _has_plain_memory(target: torch.Tensor) -> bool:
    """Whether a tensor is its elements in memory; what is not is left to torch to copy into."""
    import torch

    plain = type(target) in (torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.nn.Parameter))
    if not plain or target.layout is not torch.strided or target.is_quantized:
        return False
    return not (target.is_conj() or target.is_neg())  # what is in memory is not yet the number


def changed(target: torch.Tensor) -> None:
    """Tell autograd of bytes written behind its back, as an operation in place would have."""
    from torch.autograd import graph

    if not target.is_inference() and hasattr(graph, "increment_version"):
        graph.increment_version(target)


def _run(opened: Opened, tensor: Tensor, index: Index) -> _Run:
    """The task of reading a strided tensor; ``LoadError`` if it is clear now that it cannot be done."""
    import torch

    storage = opened.storage(tensor.storage)
    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype):
        what = f"{_named(tensor)} has the dtype {tensor.dtype}, which torch {torch.__version__} does not have"
        raise LoadError(what, where=opened.checkpoint.path, fix="A newer torch may have it.")
    view = select(View(tensor.shape, tensor.stride, tensor.offset), index)
    if storage is None:
        raise _lost(opened, tensor, "the file does not say where they are")
    itemsize = ITEMSIZE[tensor.dtype]
    end = (view.offset + view.extent) * itemsize
    if view.extent and (end > storage.stored or (storage.offset is None and not storage.compressed)):
        raise _lost(opened, tensor, f"{storage.stored:,} of {storage.nbytes:,} bytes of its storage are in the file")
    empty = not view.extent
    source, start = (BytesSource(b""), 0) if empty else opened.bytes_of(storage)
    swapped = storage.big_endian != (sys.byteorder == "big") and itemsize > 1
    where = f"{opened.checkpoint.path} › {_named(tensor)}"
    return _Run(where, source, start, storage.stored, view, dtype, itemsize, swapped, tensor.flags)


def _named(tensor: Tensor) -> str:
    return tensor.name or "the tensor"


def _lost(opened: Opened, tensor: Tensor, why: str) -> BrokenFileError:
    what = f"the bytes of {_named(tensor)} are not all there: {why}"
    return BrokenFileError(
        what, where=opened.checkpoint.path, fix="Fetch the file again; its other tensors can be read."
    )


@contextmanager
def _room(run: _Run, device: object) -> Iterator[None]:
    """While memory for a tensor is made."""
    try:
        yield
    except RuntimeError as error:  # torch has no class of its own for the CPU
        what = f"{device} has no room for its {run.view.numel * run.itemsize:,} bytes: {error}"
        raise DoesNotFitError(what, where=run.name) from error


def _straight(run: _Run, device: torch.device) -> torch.Tensor:
    """Memory of the tensor's own, in the order of the file."""
    import torch

    name = _named_device(device)
    with _room(run, "the CPU" if name == "cpu" else name):
        memory = torch.UntypedStorage(run.view.extent * run.itemsize, device=name)
    _bring(run, memory.data_ptr(), name)
    return _typed(memory, run.dtype, run.view)


def _bring(run: _Run, address: int, device: str, *, fresh: bool = True) -> None:
    """Read all of a compact view to an address, on any device that is reached."""
    from transload.loading.engine import Ended, Want, bring

    count = run.view.extent * run.itemsize
    if device == "cpu" and count < _ALONE:
        _read(run, run.view, address)
        return
    want = Want(0, run.start + run.view.offset * run.itemsize, count, device)
    try:
        bring([run.source], [want], lambda _: address, fresh=fresh)
    except Ended as end:
        raise _too_short(run, count - end.came) from end


def _too_short(run: _Run, missing: int) -> BrokenFileError:
    return BrokenFileError(f"the file ends {missing:,} bytes before this tensor does", where=run.name)


def _typed(memory: torch.UntypedStorage, dtype: torch.dtype, view: View) -> torch.Tensor:
    """The view of some memory, which begins with its first element."""
    import torch

    made: torch.Tensor = torch.empty(0, dtype=dtype, device=memory.device).set_(memory, 0, view.shape, view.stride)
    return made


def _staged(run: _Run, target: torch.Tensor) -> None:
    """Fill a target piece by piece through a buffer that is read into."""
    import torch

    largest = min(STAGE, run.view.extent * run.itemsize)
    pinned = target.device.type == "cuda" and largest >= _PIN
    buffer = torch.empty(largest, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    # Bytes are moved as integers of their size: not every dtype can be copied everywhere.
    carrier = run.dtype if target.dtype != run.dtype or run.flags else _carrier(run.itemsize)
    goal = target if target.dtype != run.dtype or run.flags else target.view(carrier)
    for where, piece in pieces(run.view, run.itemsize, STAGE):
        _read(run, piece, buffer.data_ptr())
        held = buffer[: piece.extent * run.itemsize]
        if run.swapped:
            held = _swapped(held, run)
        part = _typed(held.untyped_storage(), carrier, piece)
        goal[where].copy_(_resolved(part, run.flags))


def _carrier(itemsize: int) -> torch.dtype:
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[itemsize]


def _swapped(held: torch.Tensor, run: _Run) -> torch.Tensor:
    width = run.itemsize // 2 if run.dtype.is_complex else run.itemsize
    return held.view(-1, width).flip(1).contiguous()


def _resolved(part: torch.Tensor, flags: tuple[str, ...]) -> torch.Tensor:
    """The numbers themselves, where those in the file still have to be conjugated or negated."""
    if "conj" in flags:
        part = part.conj()
    return part.neg() if "neg" in flags else part


def _read(run: _Run, view: View, address: int) -> None:
    """Read the bytes a view spans to an address in memory."""
    from transload.io import memory

    count = view.extent * run.itemsize
    got = run.source.readinto(run.start + view.offset * run.itemsize, memory.view(address, count)) if count else 0
    if got < count:
        raise _too_short(run, count - got)


def open(f: SourceLike, *, device: Any = "auto", dtype: Any = None) -> Handle:  # noqa: A001 - as torch has load
    """Open a checkpoint of any format; its tensors are read one by one, when they are asked for.

    >>> import io, torch
    >>> file = io.BytesIO()
    >>> torch.save({"model": {"fc.weight": torch.eye(3)}, "epoch": 7}, file)
    >>> with open(file) as handle:
    ...     list(handle), handle.metadata["epoch"], handle.slice("model/fc.weight")[1]
    (['model/fc.weight'], 7, tensor([0., 1., 0.]))

    ``device`` is what ``map_location`` is to ``transload.load``: ``"auto"`` lands each tensor where this machine can
    have it, ``None`` on the device of its tag. ``dtype`` casts what is floating point. Nothing in a file is run to
    read its tensors, so files that torch.load would only load on trust open too; of a damaged one every tensor whose
    bytes are there can be read.
    """
    return Handle(open_checkpoint(f), device, _dtype(dtype))


class Handle(Mapping[str, "torch.Tensor"]):
    """The tensors of an open checkpoint by name, in the order of the file.

    A name is the path joined by slashes, ``model/fc.weight``, as ``transload inspect`` shows it; a path itself, as a
    tuple, will do as well. Every access reads anew into memory of its own, so tensors that share storage in the file
    come as separate copies, without gradients. Reading from several threads is safe.
    """

    def __init__(self, opened: Opened, device: Any, dtype: torch.dtype | None) -> None:
        self._opened = opened
        self._landing = Destinations(opened.checkpoint, device)
        self._dtype = dtype
        self._metadata: dict[str, Any] | None = None
        self._names: dict[str, Tensor] = {}
        for tensor in opened.checkpoint.tensors:
            self._names.setdefault(tensor.name, tensor)

    @property
    def checkpoint(self) -> Checkpoint:
        """What ``transload.inspect`` says of it."""
        return self._opened.checkpoint

    @property
    def metadata(self) -> dict[str, Any]:
        """What the file holds beside tensors: ``__metadata__`` of safetensors, else plain values by name.

        A value that is not plain (a ``torch.device``, a date) is there as its text.
        """
        if self._metadata is None:
            self._opened.check_open()
            self._metadata = metadata_of(self._opened)
        return dict(self._metadata)

    def __getitem__(self, name: str | tuple[Key, ...]) -> torch.Tensor:
        return self._read(self._find(name), ())

    def slice(self, name: str | tuple[Key, ...]) -> Lazy:
        """A tensor that is read when it is indexed, and only what the index names.

        Whole rows are read exactly; of what is cut through its rows, the bytes from the first to the last one named,
        or row by row where little of each is wanted.
        """
        return Lazy(self, self._find(name))

    def _read(self, tensor: Tensor, index: Index) -> torch.Tensor:
        self._opened.check_open()
        return read_one(
            self._opened, tensor, index=index, device=self._landing.device(tensor.device), dtype=self._dtype
        )

    def _find(self, name: str | tuple[Key, ...]) -> Tensor:
        self._opened.check_open()
        found = self._paths.get(name) if isinstance(name, tuple) else self._names.get(name)
        if found is None:
            raise KeyError(self._unknown(name))
        return found

    @cached_property
    def _paths(self) -> dict[tuple[Key, ...], Tensor]:
        return {tensor.path: tensor for tensor in self.checkpoint.tensors}

    def _unknown(self, name: object) -> str:
        """Why there is no such tensor, and which are close."""
        text = "/".join(map(str, name)) if isinstance(name, tuple) else str(name)
        if any(leaf.name == text for leaf in self.checkpoint.leaves):
            return f"{text!r} is no tensor: its value is in metadata[{text!r}]"
        from difflib import get_close_matches

        below = [known for known in self._names if known.startswith(f"{text}/")]
        ending = [known for known in self._names if known.endswith((f"/{text}", f".{text}"))]
        near = below[:3] or ending[:3] or get_close_matches(text, self._names, 3)
        return f"no tensor {text!r}" + (f"; close: {', '.join(near)}" if near else "")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in (self._paths if isinstance(name, tuple) else self._names)

    __eq__ = object.__eq__  # a mapping would compare its tensors, and read them all for that
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        closed = ", closed" if self._opened.closed else ""
        return f"<{self.checkpoint.path}: {len(self):,} tensors{closed}>"

    def __reduce__(self) -> NoReturn:
        """An open file does not travel between processes."""
        fix = "Pass its path, and open it in each process."
        raise UsageError("an open checkpoint is not pickled or copied", where=self.checkpoint.path, fix=fix)

    def close(self) -> None:
        """Close the file; what was read stays."""
        self._opened.close()

    def __enter__(self) -> Handle:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Lazy:
    """One tensor of an open checkpoint, not read yet: ``lazy[10:20]`` reads ten rows."""

    def __init__(self, handle: Handle, tensor: Tensor) -> None:
        self._handle = handle
        self._tensor = tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        return self._tensor.shape

    @property
    def dtype(self) -> str:
        """Its dtype in the file, by name."""
        return self._tensor.dtype

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without dimensions has no length")
        return self.shape[0]

    def __getitem__(self, index: Index) -> torch.Tensor:
        return self._handle._read(self._tensor, index)  # noqa: SLF001 - two faces of one object

    def __repr__(self) -> str:
        return f"<{self._tensor.name or 'tensor'}: {self.dtype} {list(self.shape)}, not read>"


def _dtype(dtype: Any) -> torch.dtype | None:
    """A dtype, or the name of one."""
    import torch

    if dtype is None:
        return None
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise UsageError(f"{dtype!r} is no dtype", fix="Pass one of torch's, such as torch.bfloat16.")
    return found
