"""The elements of the tensors of a checkpoint, in row-major order, in pieces; without torch.

``Content.pieces`` is the front. Elements that lie one after the other are read as they are, others are gathered
(``views``), and those of a tensor whose parts lie in several places are put together from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from transload.checkpoint import Storage, Tensor, contiguous
from transload.dtypes import ITEMSIZE, itemsize
from transload.errors import ContentError, TransloadError
from transload.io.sources import BytesSource, Source, SourceLike
from transload.tensors.files import OpenCheckpoint, PackedStorages
from transload.tensors.views import (
    FORMATS,
    WINDOW,
    Axis,
    EndedError,
    Gather,
    View,
    axes_of,
    blocks,
    component,
    is_run,
    packed,
    resolved,
)

if TYPE_CHECKING:
    from transload.checkpoint import Checkpoint

__all__ = ["Allowance", "Box", "Content", "ContentError", "Run", "as_integers", "boxes", "open_content"]


def open_content(f: SourceLike, *, tree: bool = True) -> Content:
    """Read and judge what a path, bytes or a file object holds, and keep it open; ``CannotReadError`` if it cannot be.

    ``tree`` is as for ``read_source``.

    >>> with open_content("model.pt") as content:  # doctest: +SKIP
    ...     for piece in content.pieces(content.checkpoint.tensor("weight")):
    ...         hash.update(piece)
    """
    from transload.formats import no_collecting

    with no_collecting():
        opened = OpenCheckpoint(f, tree=tree)
    return Content(opened.checkpoint, opened.file, opened.close, opened.parts)


_PIECE = 4 << 20
_MOST_PACKED = 1032  # times its size that anything can be deflated
_LOST = "Fetch the file again; its other tensors can be read."


class Run(NamedTuple):
    """Bytes of a file; ``file`` is as in ``Storage.file``."""

    file: str
    offset: int
    nbytes: int


class Content:
    """The elements of the tensors of a checkpoint; ``open_file`` gives the source of a ``Storage.file``.

    ``parts`` are its files that are a checkpoint by themselves, by name: itself, or its shards, or none. As a context
    manager it calls ``close`` at the end. May be used from several threads.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        open_file: Callable[[str], Source],
        close: Callable[[], None] | None = None,
        parts: tuple[tuple[str, Checkpoint], ...] | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.open_file = open_file
        self.parts = (("", checkpoint),) if parts is None else parts
        self._close = close
        self._storages = {storage.id: storage for storage in checkpoint.storages}
        self._packed = PackedStorages(checkpoint)

    def __enter__(self) -> Any:  # typing.Self is younger than Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close what was opened for it."""
        if self._close is not None:
            self._close()

    def storage(self, tensor: Tensor) -> Storage | None:
        """The storage a tensor looks at."""
        return self._storages.get(tensor.storage or "")

    def pieces(self, tensor: Tensor, size: int = _PIECE) -> Iterator[memoryview]:
        """The elements of a tensor in row-major order, little-endian, without gaps, as numbers (``flags`` resolved).

        Each piece has ``size`` bytes at most, whole elements, and is valid until the next is asked for.
        ``ContentError`` where bytes are missing, and for what is no plain run of numbers: quantized, sparse, nested, a
        subclass.
        """
        try:
            yield from self._pieces(tensor, max(16, size - size % 16))
        except EndedError as end:
            raise self._lost(tensor, f"the file ends {end.missing:,} bytes before they do") from end
        except LookupError as error:
            raise self._lost(tensor, f"its parts do not cover it ({error.args[0]})") from error

    def missing(self, tensor: Tensor) -> str:
        """Why the elements of a tensor cannot all be there, as far as that is clear before they are read; else empty.

        Of one that is made of others, or has no bytes, those are asked.
        """
        for part in tensor.parts:
            if why := self.missing(part):
                return why
        if tensor.kind == "sharded" and sum(part.numel for part in tensor.parts) != tensor.numel:
            return f"{len(tensor.parts):,} of its parts are there, and they do not cover it"
        if tensor.parts or (tensor.kind not in ("strided", "quantized")):
            return ""
        try:
            self._place(tensor)
        except TransloadError as error:
            return error.what.removeprefix(_not_there(tensor))
        return ""

    def run(self, tensor: Tensor) -> Run | None:
        """Where exactly the bytes that ``pieces`` gives lie in a file, if they do."""
        if tensor.kind == "device" and _same(tensor):
            return self.run(tensor.parts[0])
        storage = self.storage(tensor)
        if tensor.kind != "strided" or storage is None or storage.offset is None or storage.compressed:
            return None
        try:
            place = self._place(tensor)
        except ContentError:
            return None
        nbytes = _nbytes(tensor)
        first = itemsize(tensor.dtype, tensor.offset)
        if place.changes(tensor) or not _is_run(tensor) or place.start + first + nbytes > place.source.size:
            return None
        return Run(storage.file, place.start + first, nbytes)

    def _pieces(self, tensor: Tensor, size: int) -> Iterator[memoryview]:
        if tensor.kind == "sharded":
            self._refuse_dtype(tensor)
            return _read_sharded(tensor, ITEMSIZE[tensor.dtype], size, self.pieces)
        if tensor.kind == "device" and _same(tensor):
            return self._pieces(tensor.parts[0], size)
        if tensor.kind != "strided":
            kind = f"of the class {tensor.cls}" if tensor.kind == "subclass" else tensor.kind
            parts = f": it is made of {', '.join(part.name for part in tensor.parts[:4])}" if tensor.parts else ""
            raise self._error(tensor, f"is {kind}, not a plain run of numbers{parts}")
        place = self._place(tensor)
        if not tensor.numel:
            return iter(())
        if _is_run(tensor):
            return _read_run(place, tensor, itemsize(tensor.dtype, tensor.offset), _nbytes(tensor), size)
        return _read_view(place, tensor, size)

    def _place(self, tensor: Tensor) -> _Place:
        """Where to read a strided tensor; ``ContentError`` if it is clear now that its bytes are not all there."""
        storage = self.storage(tensor)
        self._refuse_dtype(tensor)
        if storage is None:
            raise self._lost(tensor, "the file does not say where they are")
        width = ITEMSIZE.get(tensor.dtype, 1)
        if not tensor.numel:
            return _Place(BytesSource(b""), 0, storage, width)
        end = itemsize(tensor.dtype, tensor.offset + View(tensor.shape, tensor.stride).extent)
        if end > storage.stored:
            raise self._lost(tensor, f"{storage.stored:,} of {storage.nbytes:,} bytes of its storage are in the file")
        if storage.offset is None and not storage.compressed:
            raise self._lost(tensor, "where its record begins, the file does not tell")
        source = self.open_file(storage.file)
        if storage.offset is not None:
            return _Place(source, storage.offset, storage, width)
        inflating = self._packed.open(storage, source)
        if inflating is None:
            raise self._error(tensor, f"lies in a record that is packed in a way not read here ({storage.record})")
        return _Place(inflating, 0, storage, width)

    def _refuse_dtype(self, tensor: Tensor) -> None:
        whole = tensor.dtype in ITEMSIZE and itemsize(tensor.dtype, 8) == 8 * ITEMSIZE[tensor.dtype]
        if not whole and (tensor.dtype == "unknown" or tensor.offset or not _is_run(tensor) or tensor.flags):
            raise self._error(tensor, f"has elements of {tensor.dtype}, which are not read by themselves")

    def _lost(self, tensor: Tensor, why: str) -> ContentError:
        what = f"{_not_there(tensor)}{why}"
        return ContentError(what, where=self.checkpoint.path, fix=_LOST)

    def _error(self, tensor: Tensor, what: str) -> ContentError:
        return ContentError(f"{_named(tensor)} {what}", where=self.checkpoint.path)


class Allowance:
    """How many bytes may be made of a checkpoint: sixteen times what it holds, and a gigabyte in any case.

    A tensor can claim a trillion elements over a single number (an expanded one does), and so can fifty thousand.
    """

    TIMES = 16
    LEAST = 1 << 30

    def __init__(self, checkpoint: Checkpoint) -> None:
        packed = sum(storage.nbytes for storage in checkpoint.storages if storage.compressed)
        held = checkpoint.nbytes + min(packed, _MOST_PACKED * checkpoint.nbytes)
        self._path = checkpoint.path
        self._held = held
        self.left = max(self.LEAST, self.TIMES * held)

    def spend(self, tensor: Tensor) -> None:
        """Pay for the elements of a tensor; ``ContentError`` if it claims more than is left."""
        if tensor.nbytes > self.left:
            what = f"{_named(tensor)} claims {tensor.nbytes:,} bytes, of a file that holds {self._held:,}"
            raise ContentError(what, where=self._path)
        self.left -= tensor.nbytes


def _named(tensor: Tensor) -> str:
    return tensor.name or "the tensor"


def _not_there(tensor: Tensor) -> str:
    return f"the bytes of {_named(tensor)} are not all there: "


def _nbytes(tensor: Tensor) -> int:
    return itemsize(tensor.dtype, tensor.numel)


def _is_run(tensor: Tensor) -> bool:
    return not tensor.numel or is_run(axes_of(tensor.shape, tensor.stride))


def _same(tensor: Tensor) -> bool:
    """Whether a tensor that is rebuilt on a device has the elements of its only part."""
    return len(tensor.parts) == 1 and tensor.parts[0].dtype == tensor.dtype


class _Place(NamedTuple):
    """Where the storage of a tensor begins, and how its elements lie there."""

    source: Source
    start: int
    storage: Storage
    itemsize: int

    def changes(self, tensor: Tensor) -> bool:
        """Whether the bytes in the file are not those of the numbers."""
        return bool(tensor.flags) or (self.storage.big_endian and component(tensor.dtype, self.itemsize) > 1)

    def resolved(self, data: memoryview, tensor: Tensor) -> memoryview:
        """Bytes of the file as those of the numbers."""
        swapped = self.storage.big_endian
        return resolved(data, tensor.dtype, self.itemsize, swapped=swapped, flags=tensor.flags)


def as_integers(itemsize: int, view: View) -> tuple[int, View]:
    """A view as one of integers, which elements are moved as: those wider than any integer are pairs of them.

    >>> as_integers(16, View((3,), (2,), 5))
    (8, View(shape=(3, 2), stride=(4, 1), offset=10))
    """
    if itemsize in FORMATS:
        return itemsize, view
    stride = (*(2 * step for step in view.stride), 1)
    return itemsize // 2, View((*view.shape, 2), stride, 2 * view.offset)


def _read_run(place: _Place, tensor: Tensor, offset: int, nbytes: int, size: int) -> Iterator[memoryview]:
    """Elements that lie one after the other, from byte ``offset`` of the storage on."""
    buffer = memoryview(bytearray(min(size, nbytes)))
    changes = place.changes(tensor)
    for at in range(0, nbytes, size):
        piece = buffer[: min(size, nbytes - at)]
        came = place.source.readinto(place.start + offset + at, piece)
        if came < len(piece):
            raise EndedError(nbytes - at - came)
        yield place.resolved(piece, tensor) if changes else piece


def _read_view(place: _Place, tensor: Tensor, size: int) -> Iterator[memoryview]:
    """Elements that lie anywhere in their storage."""
    width, view = as_integers(place.itemsize, View(tensor.shape, tensor.stride, tensor.offset))
    gather = Gather(place.source, place.start, width)
    for axes, first in blocks(axes_of(view.shape, view.stride), WINDOW // width, view.offset):
        block = memoryview(bytearray(prod(axis.size for axis in axes) * width))
        gather.fill(packed(axes), first, block.cast(FORMATS[width]))
        done = place.resolved(block, tensor)
        for at in range(0, len(done), size):
            yield done[at : at + size]


class Box(NamedTuple):
    """A part of a whole: where it begins in each dimension, and how far it goes."""

    first: tuple[int, ...]
    shape: tuple[int, ...]

    def common(self, other: Box) -> Box | None:
        """What it shares with another."""
        edges = zip(self.first, self.shape, other.first, other.shape, strict=True)
        spans = [(max(a, b), min(a + n, b + m)) for a, n, b, m in edges]
        if any(end <= begin for begin, end in spans):
            return None
        return Box(tuple(begin for begin, _ in spans), tuple(end - begin for begin, end in spans))


def boxes(shape: tuple[int, ...], most: int) -> Iterator[Box]:
    """A whole in boxes of ``most`` elements at most, in row-major order.

    >>> [box.first for box in boxes((3, 4), 8)]
    [(0, 0), (2, 0)]
    """
    if prod(shape) <= most:
        yield Box((0,) * len(shape), shape)
        return
    dim = next(dim for dim in range(len(shape)) if prod(shape[dim + 1 :]) <= most)
    many, rest = most // prod(shape[dim + 1 :]), shape[dim + 1 :]
    for outer in product(*map(range, shape[:dim])):
        for index in range(0, shape[dim], many):
            size = min(many, shape[dim] - index)
            yield Box((*outer, index, *(0 for _ in rest)), (*(1 for _ in outer), size, *rest))


def _read_sharded(
    tensor: Tensor, itemsize: int, size: int, pieces: Callable[[Tensor], Iterator[memoryview]]
) -> Iterator[memoryview]:
    """The elements of a sharded tensor, of whose parts ``pieces`` gives those; ``LookupError`` where parts are missing.

    The path of a part ends in the position of its first element.
    """
    rank = len(tensor.shape)
    parts = [(_placed(part, rank), part) for part in tensor.parts if part.numel]
    for box in boxes(tensor.shape, WINDOW // itemsize):
        block, inside = memoryview(bytearray(prod(box.shape) * itemsize)), []
        for where, part in parts:
            shared = box.common(where)
            if shared is not None:
                held = b"".join(pieces(_cut(part, where, shared)))
                _lay(held, block, box, shared, itemsize)
                inside.append(shared)
        _refuse_gaps(box, inside)
        for at in range(0, len(block), size):
            yield block[at : at + size]


def _refuse_gaps(box: Box, inside: list[Box]) -> None:
    """Every element of a box must be in just one part: of two that overlap nobody knows which is right."""
    found, wanted = sum(prod(part.shape) for part in inside), prod(box.shape)
    if found == wanted and len(inside) > 1:
        marks = memoryview(bytearray(wanted))
        for part in inside:
            _lay(b"\1" * prod(part.shape), marks, box, part, 1)
        found = bytes(marks).count(1)
    if found != wanted:
        raise LookupError(f"{found:,} of {wanted:,} elements")


def _placed(part: Tensor, rank: int) -> Box:
    at = part.path[len(part.path) - rank :] if rank else ()
    if len(at) != rank or len(part.shape) != rank or not all(type(step) is int for step in at):
        raise LookupError("a part without a place")
    return Box(at, part.shape)  # type: ignore[arg-type]


def _cut(part: Tensor, where: Box, shared: Box) -> Tensor:
    """What a box shares with a part, as a view of the part's storage."""
    steps = zip(shared.first, where.first, part.stride, strict=True)
    return part._replace(shape=shared.shape, offset=part.offset + sum((a - b) * step for a, b, step in steps))


def _lay(held: bytes, block: memoryview, box: Box, shared: Box, itemsize: int) -> None:
    """Elements in row-major order to their places in a box."""
    apart = contiguous(box.shape)
    first = sum((a - b) * step for a, b, step in zip(shared.first, box.first, apart, strict=True))
    width, here = as_integers(itemsize, View(shared.shape, contiguous(shared.shape)))
    _, there = as_integers(itemsize, View(shared.shape, apart, first))
    axes = [Axis(*each) for each in zip(here.shape, here.stride, there.stride, strict=True) if each[0] > 1]
    Gather(BytesSource(held), 0, width).fill(axes, 0, block.cast(FORMATS[width]), there.offset)
