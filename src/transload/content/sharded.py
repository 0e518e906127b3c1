"""Tensors in parts over several files, put together box by box: the whole is never in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from math import prod
from typing import NamedTuple

from transload.checkpoint import Tensor, contiguous
from transload.content.axes import FORMATS, WINDOW, Axis, Gather
from transload.content.reading import as_integers
from transload.io.sources import BytesSource

__all__ = ["Box", "boxes", "read_sharded"]


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


def read_sharded(
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
    here = as_integers(itemsize, shared.shape, contiguous(shared.shape))
    there = as_integers(itemsize, shared.shape, apart, first)
    axes = [Axis(*each) for each in zip(here.shape, here.stride, there.stride, strict=True) if each[0] > 1]
    Gather(BytesSource(held), 0, here.itemsize).fill(axes, 0, block.cast(FORMATS[here.itemsize]), there.offset)
