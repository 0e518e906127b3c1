"""One tensor, or a slice of it, straight from the file: only the bytes it needs are read, into memory of its own.

What is contiguous in the file is read where it will stay. Anything else (another device, a cast, bytes in the other
order, rows with gaps between them) goes through a buffer of bounded size, so that no second copy of a tensor is made.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from transload.dtypes import ITEMSIZE
from transload.io.sources import BytesSource, Source
from transload.loading.errors import BrokenFileError, DoesNotFitError, LoadError
from transload.loading.rebuild import is_fake_mode
from transload.opening.views import View, pieces, select

if TYPE_CHECKING:
    import torch

    from transload.checkpoint import Tensor
    from transload.opening.opened import Opened
    from transload.opening.views import Index

__all__ = ["STAGE", "Straight", "changed", "check_one", "fill", "read_one", "straight"]

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
        from transload.opening.composite import read_composite

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
            from transload.opening.composite import fill_sharded

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
    from transload.loading.transfer.driver import cuda_driver

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
    from transload.opening.composite import check_composite

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
    from transload.loading.transfer import Ended, Want, bring

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
    from transload.loading.transfer import memory

    count = view.extent * run.itemsize
    got = run.source.readinto(run.start + view.offset * run.itemsize, memory.view(address, count)) if count else 0
    if got < count:
        raise _too_short(run, count - got)
