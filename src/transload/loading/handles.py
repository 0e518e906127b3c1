"""``transload.open``: the tensors of a checkpoint, read one by one when they are asked for.

``Handle`` is what users see. ``TensorReader.read`` makes a tensor, ``TensorReader.fill`` reads into an existing one;
both read ``Elements``, which say where a strided tensor's bytes are. Other tensors are made from their parts, or as
``load`` would make them (``build_node``). ``load_into`` uses the same methods.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from copy import copy
from functools import cached_property
from itertools import product
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from transload.checkpoint import Checkpoint, Key, Tensor
from transload.errors import (
    BrokenFileError,
    ContentError,
    DoesNotFitError,
    LandingWarning,
    LoadError,
    TransloadError,
    UnsafeError,
    UsageError,
    warn,
)
from transload.findings import join_names
from transload.formats.arrays import raw_bytes
from transload.formats.gguf import header_values
from transload.frozen import NamedTuple, replace
from transload.geometry import Box, View, boxes, contiguous
from transload.io.memory import memory_at
from transload.io.paths import Place
from transload.io.sources import SourceLike
from transload.judge.problems import refuse_broken
from transload.loading.build import build_object, is_fake_mode
from transload.loading.placement import DeviceMap, listed, plan_here
from transload.loading.storages import ReadOptions, read_storages
from transload.nodes import Call, Global, Persistent, walk_nodes
from transload.opening import CheckpointFile, OpenCheckpoint, fill
from transload.opening.elements import Elements, MissingBytesError, Read
from transload.opening.jobs import ReportProgress, Settings, ShortReadError, can_read_to

if TYPE_CHECKING:
    import torch

Index = Any
"""A basic index: an integer, a slice, ``...`` or ``None``, or a tuple of them; or a ``Box``."""

STAGE = 16 << 20
"""Bytes of the buffer between the file and memory that cannot be read into directly."""

LONG_ROW = 1 << 20
"""Bytes of a row that many threads read. One thread reads shorter ones as fast: a request costs 28 µs. Measured on an
H200 with rows of 7 and 28 KiB, where requests were four times as slow, and on two cores with rows of 64 to 256 KiB."""

_PIN = 1 << 20  # pinning a smaller buffer is not worth the call
_ABSENT = ("shard-missing", "part-unreadable", "directory-unreadable")
_DEFAULT = Settings()
_OPTIONS = ReadOptions()
_VALUES: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "bool": lambda text: text == "True",
    "None": lambda _: None,
}


def open(f: SourceLike, *, device: Any = "auto", dtype: Any = None) -> Handle:  # noqa: A001 - as torch has load
    """Open a checkpoint of any format; its tensors are read one by one, when they are asked for.

    >>> import io, torch
    >>> file = io.BytesIO()
    >>> torch.save({"model": {"fc.weight": torch.eye(3)}, "epoch": 7}, file)
    >>> with open(file.getvalue()) as handle:
    ...     list(handle), handle.metadata["epoch"], handle.slice("model/fc.weight")[1]
    (['model/fc.weight'], 7, tensor([0., 1., 0.]))

    ``device`` takes what ``map_location`` of ``transload.load`` takes: ``"auto"`` puts each tensor on a device that
    this machine has, ``None`` on the device it was saved on. ``dtype`` converts floating-point tensors. Nothing in the
    file is run, so files that ``torch.load`` only loads with ``weights_only=False`` can be opened, too; only reading a
    tensor of a class that is not allowed, such as a quantized one of torchao, raises ``UnsafeError``. In a damaged
    file, every tensor whose bytes are there can be read. Once a program has written to the file, nothing more can be.
    """
    import torch

    wanted = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if dtype is not None and not isinstance(wanted, torch.dtype):
        raise UsageError(f"{dtype!r} is not a dtype", fix="Pass one of torch's, such as torch.bfloat16.")
    opened = TensorReader(f, device)
    try:
        if not (isinstance(device, str) and device == "auto"):
            opened.device_map  # noqa: B018 - which fails now, as in load, if a device is missing
    except BaseException:
        opened.close()
        raise
    return Handle(opened, wanted)


class Handle(Mapping[str, "torch.Tensor"]):
    """The tensors of an open checkpoint by name, in the order of the file.

    A name is the path joined by slashes, ``model/fc.weight``, as ``transload inspect`` shows it; the path itself, as a
    tuple, works as well. Every access reads into new memory, so tensors that share storage in the file are separate
    copies, without gradients. Reading from several threads is safe.
    """

    def __init__(self, opened: TensorReader, dtype: torch.dtype | None) -> None:
        self._opened = opened
        self._dtype = dtype
        self._names: dict[str, Tensor] = {}
        for tensor in opened.checkpoint.tensors:
            self._names.setdefault(tensor.name, tensor)

    @property
    def checkpoint(self) -> Checkpoint:
        """What ``transload.inspect`` says about it."""
        return self._opened.checkpoint

    @property
    def metadata(self) -> dict[str, Any]:
        """What the file has besides tensors: the metadata of safetensors and GGUF files, else plain values by name.

        A value that is not plain (a ``torch.device``, a date) is given as text.
        """
        return dict(self._metadata)

    @cached_property
    def _metadata(self) -> dict[str, Any]:
        opened, checkpoint = self._opened, self.checkpoint
        opened.check_open()
        out: dict[str, Any] = header_values(opened.file()) if checkpoint.traits.metadata == "values" else {}
        out |= opened.elements.header_metadata()
        for leaf in checkpoint.leaves:
            if leaf.name in out:
                continue
            place = opened.node(leaf.path)
            node = place[1] if place else leaf
            raw = raw_bytes(node) if type(node) is Call else None
            value: Any = node if raw is None else bytes(raw)
            if not isinstance(value, bool | int | float | str | bytes | None):  # fall back to its text
                try:
                    value = _VALUES.get(leaf.kind, str)(leaf.text)
                except ValueError:  # an integer too long to be written out
                    value = leaf.text
            out[leaf.name] = value
        return out

    def __getitem__(self, name: str | tuple[Key, ...]) -> torch.Tensor:
        return self._read(self._find(name), ())

    def slice(self, name: str | tuple[Key, ...]) -> Lazy:
        """A tensor that is read when it is indexed, and only the part that the index selects.

        Whole rows are read exactly. If the index cuts through rows, all bytes from the first selected element to the
        last are read; or row by row, where little of each row is selected.
        """
        return Lazy(self, self._find(name))

    def _read(self, tensor: Tensor, index: Index) -> torch.Tensor:
        opened = self._opened
        opened.check_open()
        try:
            return opened.read(tensor, index, opened.device(tensor.device), self._dtype)
        finally:  # also if it has become too short
            opened.check_unchanged(far=False)  # those elsewhere compare each answer, or could only be asked again

    def _find(self, name: str | tuple[Key, ...]) -> Tensor:
        self._opened.check_open()
        tensor = self._paths.get(name) if isinstance(name, tuple) else self._names.get(name)
        if tensor is not None:
            return tensor
        text = "/".join(map(str, name)) if isinstance(name, tuple) else str(name)
        if any(leaf.name == text for leaf in self.checkpoint.leaves):
            raise KeyError(f"{text!r} is not a tensor: its value is in metadata[{text!r}]")
        from difflib import get_close_matches

        below = [other for other in self._names if other.startswith(f"{text}/")]
        ending = [other for other in self._names if other.endswith((f"/{text}", f".{text}"))]
        near = below[:3] or ending[:3] or get_close_matches(text, self._names, 3)
        what = f"there is no tensor {text!r}" + (f"; similar: {', '.join(near)}" if near else "")
        if missing := [problem.where for problem in self.checkpoint.problems if problem.code in _ABSENT]:
            what += f"; files are missing or cannot be read: {join_names(missing, 3)}"
        raise KeyError(what)

    @cached_property
    def _paths(self) -> dict[tuple[Key, ...], Tensor]:
        return {tensor.path: tensor for tensor in self.checkpoint.tensors}

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def keys(self) -> KeysView[str]:
        """Return the names; ``UsageError`` if it was closed, as with ``safe_open``."""
        self._opened.check_open()
        return super().keys()

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in (self._paths if isinstance(name, tuple) else self._names)

    __eq__ = object.__eq__  # a mapping would compare its tensors, and read them all for that
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        from transload.render.words import plural

        closed = ", closed" if self._opened.closed else ""
        return f"<{self.checkpoint.path}: {plural(len(self), 'tensor')}{closed}>"

    def __reduce__(self) -> NoReturn:
        """Refuse: an open file cannot be sent to another process."""
        fix = "Pass its path, and open it in each process."
        raise UsageError("an open checkpoint cannot be pickled or copied", where=self.checkpoint.path, fix=fix)

    def close(self) -> None:
        """Close the file. Tensors that were read remain valid."""
        self._opened.close()

    def __enter__(self) -> Handle:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
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
        return self._handle._read(self._tensor, index)  # noqa: SLF001 - Handle and Lazy are one interface

    def __repr__(self) -> str:
        return f"<{self._tensor.name or 'tensor'}: {self.dtype} {list(self.shape)}, not read>"


class Prepared(NamedTuple):
    """A tensor, or a part of it, to read into another, and what to read; ``None`` if torch copies it there."""

    tensor: Tensor
    target: torch.Tensor
    part: Index
    reads: list[Read] | None


class TensorReader(OpenCheckpoint):
    """An open checkpoint whose tensors are read one by one, from a path, bytes or a file object.

    ``map_location`` is as for ``transload.load``; the plan is made when first needed. Memory is not checked, since
    tensors are read one at a time, and perhaps not all of them. ``NotACheckpointError`` if it is not a checkpoint. A
    damaged one can be opened as long as it has any tensors.
    """

    def __init__(self, f: SourceLike | Place, map_location: Any, *, verify: bool = False) -> None:
        super().__init__(f, verify=verify, lazy=True)
        self._map_location = map_location
        self._warning = ""
        if self.checkpoint.integrity == "not-a-checkpoint" or not self.checkpoint.tensors:
            try:
                refuse_broken(self.checkpoint)
            except LoadError:
                self.close()
                raise

    def device(self, tag: str) -> str:
        """The device for tensors with a tag; ``NoDeviceError`` if this machine does not have it."""
        device = self.device_map.device(tag)
        if device != tag and self._warning:
            text, self._warning = f"{self.checkpoint.path}: {self._warning}", ""  # once
            warn(text, LandingWarning)
        return device

    @cached_property
    def device_map(self) -> DeviceMap:
        """Where each storage goes."""
        plan = plan_here(self.checkpoint, self._map_location, 0, "device")
        self._warning = plan.warning
        return DeviceMap(plan, self._map_location, self.checkpoint.path)

    def read(
        self, tensor: Tensor, index: Index = (), device: str | torch.device = "cpu", dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Read a tensor, or the part that ``index`` selects, onto a device.

        ``dtype`` casts floating-point tensors. Strides without gaps are kept; else the result is contiguous.
        ``LoadError`` names a tensor whose bytes are missing.
        """
        if not tensor.is_dense:
            return self._read_composite(tensor, index, device, dtype)
        import torch

        where = torch.device(device)
        layout, reads, rest = self._reads(tensor, index)
        saved = self.dtype_of(tensor)
        wanted = dtype if dtype is not None and saved.is_floating_point else saved
        if where.type == "meta" or is_fake_mode():
            return torch.empty_strided(layout.shape, layout.stride, dtype=wanted, device=where)[rest]
        same_bytes = wanted == saved and not any(read.elements.differ(sys.byteorder) for read in reads)
        straight = same_bytes and layout.extent <= layout.numel and can_read_to(where.type)
        try:
            stride = layout.stride if straight else contiguous(layout.shape)
            target = torch.empty_strided(layout.shape, stride, dtype=wanted, device=where)
        except RuntimeError as error:  # torch has no OutOfMemoryError for the CPU
            short = "the CPU" if where.type == "cpu" else str(where)
            what = f"{short} has no memory for its {tensor.nbytes:,} bytes: {error}"
            raise DoesNotFitError(what, where=self._place(tensor)) from error
        if straight and tensor.kind == "strided":  # also into gaps, which are its own
            self._read_straight([(tensor, reads[0].elements, target)])
        else:
            self._fill([(tensor, read, target) for read in reads])
        return target[rest] if rest else target

    def fill(
        self,
        items: Iterable[tuple[Tensor, torch.Tensor, Index]],
        settings: Settings = _DEFAULT,
        report_progress: ReportProgress | None = None,
    ) -> None:
        """Read tensors, or the parts that indices select, into existing ones of the same shape; cast if dtypes differ.

        All that is in files, and can be read straight into memory, is read in one call.
        """
        self.fill_prepared(self.prepare(items), settings, report_progress)

    def prepare(self, items: Iterable[tuple[Tensor, torch.Tensor, Index]]) -> list[Prepared]:
        """Find what to read for ``fill``; ``LoadError`` if it is known before reading that something cannot be read."""
        prepared = []
        for tensor, target, index in items:
            reads: list[Read] | None = None
            if tensor.is_dense and _has_plain_memory(target):
                _, reads, rest = self._reads(tensor, index)
                reads = None if rest else reads
            else:
                self.check(tensor, index)
            prepared.append(Prepared(tensor, target, index, reads))
        return prepared

    def fill_prepared(
        self,
        items: Iterable[Prepared],
        settings: Settings = _DEFAULT,
        report_progress: ReportProgress | None = None,
    ) -> None:
        """Read what was prepared."""
        import torch
        from torch.autograd import graph

        jobs: list[tuple[Tensor, Read, torch.Tensor]] = []
        try:
            with torch.no_grad():
                for tensor, target, index, reads in items:
                    if reads is None:
                        target.copy_(self.read(tensor, index))
                        continue
                    jobs += [(tensor, read, target) for read in reads]
                    # Count it as an in-place operation: torch does not see the write.
                    if not target.is_inference() and hasattr(graph, "increment_version"):
                        graph.increment_version(target)
                self._fill(jobs, settings, report_progress)
        except TransloadError:
            raise
        except (RuntimeError, NotImplementedError) as error:
            what = f"what was read for {tensor.name or 'the tensor'} cannot be copied into it: {error}"
            raise LoadError(what, where=self.checkpoint.path) from error

    def check(self, tensor: Tensor, index: Index = ()) -> None:
        """Raise ``LoadError`` if a tensor or a part of it cannot be read, as far as is known before reading."""
        if tensor.is_dense:
            self._reads(tensor, index)
            return
        if tensor.kind != "meta" and not (tensor.kind == "device" and tensor.parts):
            place = self.node(tensor.path)
            if place is None or type(place[1]) is not Call:
                kind = f"of the class {tensor.cls}" if tensor.kind == "subclass" else tensor.kind
                what = f"{tensor.name or 'the tensor'} is {kind}, which cannot be read alone"
                raise LoadError(what, where=self.checkpoint.path, fix="Load the whole file instead.")
        for part in tensor.parts:
            self.check(part)

    def _read_composite(
        self, tensor: Tensor, index: Index, device: str | torch.device, dtype: torch.dtype | None
    ) -> torch.Tensor:
        """Read a tensor that is not dense; all of it, even if only a part is wanted."""
        import torch

        self.check(tensor)
        if tensor.kind == "meta":
            whole = torch.empty_strided(tensor.shape, tensor.stride, dtype=getattr(torch, tensor.dtype), device="meta")
        elif tensor.kind == "device" and tensor.parts:
            whole = self.read(tensor.parts[0]).to(getattr(torch, tensor.dtype))
        else:  # by the call in the pickle, as load() would
            place = self.node(tensor.path)
            whole = build_node(*place) if place else None
            if not isinstance(whole, torch.Tensor):
                raise BrokenFileError(f"{tensor.name} is not a tensor", where=self.checkpoint.path)
            whole = whole.detach() if whole.requires_grad else whole
        if type(index) is not tuple or index:
            try:
                whole = whole[index.slices if type(index) is Box else index]
            except (NotImplementedError, RuntimeError) as error:
                what = f"torch cannot take a part of {tensor.name or 'the tensor'}, which is {tensor.kind}: {error}"
                raise LoadError(what, where=self.checkpoint.path, fix="Read the whole tensor.") from error
        wanted = dtype if dtype is not None and whole.dtype.is_floating_point else whole.dtype
        # A subclass may not support ``.to``, even to the device and dtype it has.
        stays = whole.is_meta or (whole.device, whole.dtype) == (torch.device(device), wanted)
        return whole if stays else whole.to(device, wanted)

    def dtype_of(self, tensor: Tensor) -> torch.dtype:
        """The dtype of a tensor; ``LoadError`` if this torch does not have it."""
        import torch

        dtype = getattr(torch, tensor.dtype, None)
        if not isinstance(dtype, torch.dtype):
            absent = f"the dtype {tensor.dtype}, which torch {torch.__version__} does not have"
            what = f"{tensor.name or 'the tensor'} has {absent}"
            raise LoadError(what, where=self.checkpoint.path, fix="A newer torch may have it.")
        return dtype

    def _reads(self, tensor: Tensor, index: Index) -> tuple[View, list[Read], tuple[Any, ...]]:
        """What to read for a dense tensor, or for the part that a basic index selects.

        Returns the layout of what is read, the reads, and the index that is left to apply to it: of a sharded tensor,
        the box around the part is read. ``LoadError`` if it is known that elements cannot be read. Errors about the
        index are torch's.
        """
        self.dtype_of(tensor)
        shape, rest = tensor.shape, ()
        try:
            if type(index) is tuple and not index:
                reads = self.elements.reads(tensor)
            elif type(index) is Box:
                reads, shape = self.elements.reads(tensor, index), index.shape
            elif tensor.is_sharded:
                box, rest = _bounds(tensor.shape, _basic(index))
                reads, shape = self.elements.reads(tensor, box), box.shape
            else:
                tensor = self.elements.located(tensor)
                view = self._part(tensor, _basic(index))
                reads = [Read(self.elements.elements(tensor, view), Box((0,) * len(view.shape), view.shape))]
        except ContentError as error:
            raise BrokenFileError(error.what, where=error.where, fix=error.fix) from error
        return reads[0].elements.view if tensor.kind == "strided" else View(shape, contiguous(shape)), reads, rest

    def _part(self, tensor: Tensor, steps: tuple[Any, ...]) -> View:
        """The view of the elements that a basic index selects."""
        import torch

        try:
            whole = torch.empty_strided(tensor.shape, tensor.stride, dtype=torch.uint8, device="meta")
        except RuntimeError as error:
            raise BrokenFileError(f"torch cannot represent it: {error}", where=self._place(tensor)) from error
        part = whole[steps]
        return View(tuple(part.shape), part.stride(), tensor.offset + part.storage_offset())

    def _fill(
        self,
        jobs: Iterable[tuple[Tensor, Read, torch.Tensor]],
        settings: Settings = _DEFAULT,
        report_progress: ReportProgress | None = None,
    ) -> None:
        """Read elements into their boxes of tensors: straight into memory where it has the same bytes."""
        straight: dict[bool, list[tuple[Tensor, Elements, torch.Tensor]]] = {}
        for tensor, (elements, into), whole in jobs:
            target = whole if into.shape == tuple(whole.shape) else whole[into.slices]
            dtype = self.dtype_of(tensor)
            direct = target.dtype == dtype and can_read_to(target.device.type) and not elements.differ(sys.byteorder)
            if direct and elements.view.has_layout(tuple(target.shape), target.stride()):
                straight.setdefault(elements.source.streams > 1, []).append((tensor, elements, target))
            elif direct and (rows := _long_rows(elements, target)):
                parts = straight.setdefault(elements.source.streams > 1, [])
                parts += [(tensor, row, into) for row, into in rows]
            else:
                self._read_staged(tensor, elements, dtype, target.detach())
                if report_progress is not None:
                    report_progress(elements.view.numel * elements.itemsize)
        for parts in straight.values():
            self._read_straight(parts, settings, report_progress)

    def _read_straight(
        self,
        parts: Sequence[tuple[Tensor, Elements, torch.Tensor]],
        settings: Settings = _DEFAULT,
        report_progress: ReportProgress | None = None,
    ) -> None:
        """Read elements straight into the memory of tensors."""
        ranges, addresses = [], []
        for _, elements, target in parts:
            ranges.append((elements.source, elements.offset, elements.nbytes, str(target.device)))
            addresses.append(target.data_ptr())
        try:
            fill(ranges, addresses.__getitem__, settings, report_progress)
        except ShortReadError as end:
            tensor, elements, _ = parts[end.request]
            raise self._cut(tensor, elements, elements.offset + end.received) from end

    def _read_staged(self, tensor: Tensor, elements: Elements, dtype: torch.dtype, target: torch.Tensor) -> None:
        """Read elements into a tensor: into its memory where that is in order, else through a buffer."""
        import torch

        width = elements.itemsize
        # Rows that do not fit the buffer are split, but elements never are.
        most = max(1, STAGE // width)
        largest = min(most, elements.view.numel) * width
        same = target.dtype == dtype
        in_place = same and target.device.type == "cpu"
        if same:
            # Copy as integers of the same size: not every dtype supports copies on every device.
            integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
            dtype = integers[width]
            target = target.view(dtype)
        buffer = None
        for box in boxes(elements.view.shape, most) if elements.view.numel else ():
            part = target[box.slices]
            chunk = part
            if not (in_place and part.is_contiguous()):
                if buffer is None:
                    pinned = target.device.type == "cuda" and largest >= _PIN
                    buffer = torch.empty(largest, dtype=torch.uint8, device="cpu", pin_memory=pinned)
                chunk = buffer[: prod(box.shape) * width].view(dtype).view(box.shape)
            try:
                elements.read(box, memory_at(chunk.data_ptr(), prod(box.shape) * width), sys.byteorder)
            except MissingBytesError as end:
                raise self._cut(tensor, elements, end.position) from end
            if chunk is not part:
                part.copy_(chunk)

    def _cut(self, tensor: Tensor, elements: Elements, position: int) -> BrokenFileError:
        error = self.elements.incomplete(tensor, elements.ends_at(position))
        return BrokenFileError(error.what, where=error.where, fix=error.fix)

    def _place(self, tensor: Tensor) -> str:
        return f"{self.checkpoint.path} › {tensor.name or 'the tensor'}"


def build_node(
    file: CheckpointFile,
    node: object,
    device_map: DeviceMap | None = None,
    options: ReadOptions = _OPTIONS,
    made: Mapping[int, Any] = MappingProxyType({}),
) -> Any:
    """The object of a node, by default on the CPU; ``UnsafeError`` if building it needs names that are not allowed.

    ``made`` are objects in it that exist already, by the identity of their nodes.
    """
    from transload.loading.refusal import Allowed

    main = next(pickle for pickle in file.checkpoint.pickles if pickle.main)
    nodes = list(walk_nodes([node], lambda call: () if id(call) in made else None))
    names = {id(inner) for inner in nodes if type(inner) is Global}
    ids = [inner.id for inner in nodes if type(inner) is Persistent]
    keys = {str(pid[2]) for pid in ids if type(pid) is tuple and len(pid) > 2}
    part = copy(main)
    part.root = node
    part.globals = {key: name for key, name in main.globals.items() if id(name) in names}
    refused = sorted(name.full_name for name in Allowed().refused([part]))
    if refused:
        what = f"building it needs {listed(refused)}, which {'are' if refused[1:] else 'is'} not allowed"
        fix = "transload.load(path, weights_only=False) builds it, if you trust the author of the file."
        raise UnsafeError(what, where=file.checkpoint.path, fix=fix)
    device_map = device_map or DeviceMap(plan_here(file.checkpoint, "cpu", 0), "cpu", file.checkpoint.path)
    storages = tuple(storage for storage in file.checkpoint.storages if storage.key in keys)
    alone = replace(file, checkpoint=replace(file.checkpoint, storages=storages))
    (loaded,) = read_storages([alone], device_map, options)
    return build_object(alone, loaded, device_map, pickle=part, made=made)


def _basic(index: Index) -> tuple[Any, ...]:
    """The steps of a basic index; ``TypeError`` for any other."""
    import torch

    if isinstance(index, list) and not index:  # it selects nothing
        index = slice(0)
    steps = []
    for step in index if isinstance(index, tuple) else (index,):
        # Anything with ``__index__`` is a number, except True and False, which are masks to torch.
        mask = isinstance(step, bool) or getattr(step, "dtype", None) is torch.bool
        number = hasattr(step, "__index__") and not getattr(step, "ndim", 0) and not mask
        if not (number or step is None or step is ... or isinstance(step, slice)):
            raise TypeError(f"only numbers, slices, ... and None can be read from a file, not {type(step).__name__}")
        steps.append(step.__index__() if number else step)
    return tuple(steps)


def _bounds(shape: tuple[int, ...], steps: tuple[Any, ...]) -> tuple[Box, tuple[Any, ...]]:
    """The box around the part of a shape that a basic index selects, and the index of that part in the box.

    >>> _bounds((10, 6), (slice(2, 8, 3), None, -1))
    (Box(start=(2, 5), shape=(4, 1)), (slice(None, None, 3), None, 0))
    """
    import torch

    torch.empty(shape, dtype=torch.uint8, device="meta")[steps]  # raises if the index does not fit
    count = sum(step is not None and step is not ... for step in steps)
    at = next((place for place, step in enumerate(steps) if step is ...), len(steps))
    every = (*steps[:at], *(slice(None),) * (len(shape) - count), *steps[at + 1 :])
    spans: list[tuple[int, int]] = []
    rest: list[slice | int | None] = []
    sizes = iter(shape)
    for step in every:
        if step is None:
            rest.append(None)
            continue
        size = next(sizes)
        chosen = range(size)[step] if isinstance(step, slice) else range(size)[step : step + 1 or None]
        spans.append((chosen[0], chosen[-1] + 1 - chosen[0]) if chosen else (0, 0))
        rest.append(slice(None, None, chosen.step) if isinstance(step, slice) else 0)
    return Box(tuple(start for start, _ in spans), tuple(size for _, size in spans)), tuple(rest)


def _long_rows(elements: Elements, target: torch.Tensor) -> list[tuple[Elements, torch.Tensor]]:
    """The rows of a part of a tensor, each in one run in the file and in memory; none if they are short.

    Longer ones are read by many threads, short ones are gathered by one.
    """
    view = elements.view
    size, step, width = view.shape, view.stride, elements.itemsize
    for rank in range(1, len(size)):
        inner = View(size[rank:], step[rank:])
        if inner.numel * width < LONG_ROW:
            break
        if inner.is_contiguous and View(size[rank:], target.stride()[rank:]).is_contiguous:
            rows = []
            for index in product(*map(range, size[:rank])):
                place = view.part(Box((*index, *(0 for _ in inner.shape)), (*(1 for _ in index), *inner.shape)))
                row = elements._replace(view=View(inner.shape, inner.stride, place.offset), nbytes=inner.numel * width)
                rows.append((row, target[index]))
            return rows
    return []


def _has_plain_memory(target: torch.Tensor) -> bool:
    """Whether a tensor is nothing but its elements in memory; torch copies into any other."""
    import torch

    plain = type(target) in (torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.nn.Parameter))
    if not plain or target.layout is not torch.strided or target.is_quantized:
        return False
    return not (target.is_conj() or target.is_neg())  # the numbers in memory are not yet the values
