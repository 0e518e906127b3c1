"""The elements of a tensor of one storage, in row-major order, in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from transload.checkpoint import Storage, Tensor
from transload.content.axes import FORMATS, WINDOW, EndedError, Gather, axes_of, blocks, packed
from transload.content.numbers import component, resolved
from transload.io.sources import Source

__all__ = ["Integers", "Place", "as_integers", "read_run", "read_view"]


class Place(NamedTuple):
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


class Integers(NamedTuple):
    """A view of elements that can be moved as integers: those wider than any are pairs of them."""

    itemsize: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def as_integers(itemsize: int, shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> Integers:
    """A view as one of integers.

    >>> as_integers(16, (3,), (2,), 5)
    Integers(itemsize=8, shape=(3, 2), stride=(4, 1), offset=10)
    """
    if itemsize in FORMATS:
        return Integers(itemsize, shape, stride, offset)
    return Integers(itemsize // 2, (*shape, 2), (*(2 * step for step in stride), 1), 2 * offset)


def read_run(place: Place, tensor: Tensor, offset: int, nbytes: int, size: int) -> Iterator[memoryview]:
    """Elements that lie one after the other, from byte ``offset`` of the storage on."""
    buffer = memoryview(bytearray(min(size, nbytes)))
    changes = place.changes(tensor)
    for at in range(0, nbytes, size):
        piece = buffer[: min(size, nbytes - at)]
        came = place.source.readinto(place.start + offset + at, piece)
        if came < len(piece):
            raise EndedError(nbytes - at - came)
        yield place.resolved(piece, tensor) if changes else piece


def read_view(place: Place, tensor: Tensor, size: int) -> Iterator[memoryview]:
    """Elements that lie anywhere in their storage."""
    view = as_integers(place.itemsize, tensor.shape, tensor.stride, tensor.offset)
    gather = Gather(place.source, place.start, view.itemsize)
    for axes, first in blocks(axes_of(view.shape, view.stride), WINDOW // view.itemsize, view.offset):
        block = memoryview(bytearray(prod(axis.size for axis in axes) * view.itemsize))
        gather.fill(packed(axes), first, block.cast(FORMATS[view.itemsize]))
        done = place.resolved(block, tensor)
        for at in range(0, len(done), size):
            yield done[at : at + size]
