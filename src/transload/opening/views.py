"""Strided views as arithmetic: which elements of a storage a tensor, or a slice of it, looks at. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

__all__ = ["Index", "View", "pieces", "select"]

Index = Any
"""What may stand between the brackets: numbers, slices, ``...`` and ``None``, one or a tuple of them."""

_PAGE = 4096
_SPARSE = 4


class View(NamedTuple):
    """Sizes, strides and first element, all counted in elements of a storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    @property
    def numel(self) -> int:
        """How many elements it shows."""
        return prod(self.shape)

    @property
    def extent(self) -> int:
        """How many elements of the storage lie between its first and its last, both counted.

        >>> View((2, 3), (10, 1)).extent
        13
        """
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    @property
    def compact(self) -> bool:
        """Whether it covers its extent without holes and shows no element twice: contiguous, perhaps permuted."""
        reached = 1
        for step, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size > 1 and step != reached:
                return False
            reached *= size
        return True

    def like(self, shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
        """Whether those sizes and strides mean the same order in memory; the stride of a single row means nothing."""
        steps = zip(self.stride, stride, self.shape, strict=False)
        return self.shape == shape and (0 in shape or all(mine == other for mine, other, size in steps if size > 1))


def select(view: View, index: Index) -> View:
    """The part of a view that basic indexing names, as torch would give it.

    >>> select(View((10, 4), (4, 1)), (slice(2, 4), ..., 3))
    View(shape=(2,), stride=(4,), offset=11)

    ``IndexError`` for what lies outside or names too many dimensions, ``TypeError`` for what is no basic index,
    ``ValueError`` for a step that is not positive: torch has none.
    """
    if type(index) is tuple and not index:
        return view
    steps = _spelled_out(index, len(view.shape))
    shape: list[int] = []
    stride: list[int] = []
    offset, dim = view.offset, 0
    for step in steps:
        if step is None:
            shape.append(1)
            stride.append(0)
            continue
        size, apart = view.shape[dim], view.stride[dim]
        if isinstance(step, slice):
            first, count, every = _range(step, size)
            shape.append(count)
            stride.append(apart * every)
            offset += apart * first if count else 0
        else:
            offset += apart * _position(step, size, dim)
        dim += 1
    return View(tuple(shape), tuple(stride), offset)


def _spelled_out(index: Index, rank: int) -> list[int | slice | None]:
    """One step for each dimension: ``...`` and dimensions left out become full slices."""
    given = list(index) if isinstance(index, tuple) else [index]
    for step in given:
        if not _is_basic(step):
            raise TypeError(f"only numbers, slices, ... and None can be read from a file, not {type(step).__name__}")
    named = sum(step is not None and step is not ... for step in given)
    dots = [place for place, step in enumerate(given) if step is ...]
    if named > rank or len(dots) > 1:
        raise IndexError(f"too many indices: {named} for {rank} dimensions")
    at = dots[0] if dots else len(given)
    full = [slice(None)] * (rank - named)
    return [*given[:at], *full, *given[at + 1 :]]


def _is_basic(step: object) -> bool:
    """A number is whatever Python takes as an index; ``True`` would be one, and means another thing to torch."""
    if isinstance(step, bool):
        return False
    number = hasattr(step, "__index__") and not getattr(step, "ndim", 0)
    return step is None or step is ... or isinstance(step, slice) or number


def _range(step: slice, size: int) -> tuple[int, int, int]:
    first, last, every = step.indices(size)
    if every < 1:
        raise ValueError("a step must be positive, as in torch")
    return first, max(0, -(-(last - first) // every)), every


def _position(step: int | slice | None, size: int, dim: int) -> int:
    number: int = step.__index__()  # type: ignore[union-attr]
    if not -size <= number < size:
        raise IndexError(f"index {number} is out of range for dimension {dim} of size {size}")
    return number % size


def pieces(view: View, itemsize: int, limit: int) -> Iterator[tuple[tuple[slice, ...], View]]:
    """The view in parts, each with where it belongs, that lie within ``limit`` bytes (or are one element).

    Rows that are far apart, and of which little is wanted, come one by one, so that what lies between is not read.
    """
    if 0 in view.shape:
        return
    if view.extent * itemsize <= limit and not _scattered(view, itemsize):
        yield (), view
        return
    dim = max(range(len(view.shape)), key=lambda d: (view.shape[d] > 1, view.stride[d]))
    size, step = view.shape[dim], view.stride[dim]
    row = select(view, (*_all(dim), slice(0, 1)))
    many = 1 if _apart(row, step, itemsize) else max(1, (limit // itemsize - row.extent) // max(step, 1) + 1)
    for first in range(0, size, many):
        part = slice(first, min(first + many, size))
        for inner, piece in pieces(select(view, (*_all(dim), part)), itemsize, limit):
            yield _nested(dim, part, inner), piece


def _all(dim: int) -> tuple[slice, ...]:
    return (slice(None),) * dim


def _scattered(view: View, itemsize: int) -> bool:
    """Whether some dimension has its rows so far apart that reading them one by one pays."""
    for dim, (size, step) in enumerate(zip(view.shape, view.stride, strict=True)):
        if size > 1 and step == max(view.stride) and _apart(select(view, (*_all(dim), slice(0, 1))), step, itemsize):
            return True
    return False


def _apart(row: View, step: int, itemsize: int) -> bool:
    return step * itemsize >= _PAGE and row.extent * _SPARSE <= step


def _nested(dim: int, part: slice, inner: tuple[slice, ...]) -> tuple[slice, ...]:
    """Where a piece of a part of a whole stands in the whole: ``inner`` counts from the part's first row."""
    steps = [*inner, *(slice(None) for _ in range(dim + 1 - len(inner)))]
    start, stop, _ = steps[dim].indices(part.stop - part.start)
    steps[dim] = slice(part.start + start, part.start + stop)
    return tuple(steps)
