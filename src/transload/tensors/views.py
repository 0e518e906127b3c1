"""Strided views of a storage: indexing, the parts they are read in, and how elements are put in row-major order.

``View`` says which elements. Readers with torch split one into ``pieces``, each copied by torch. Those without torch
turn it into ``axes``, which also say where an element goes, and let ``Gather`` copy.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from math import prod
from typing import Any, Literal, NamedTuple

from transload.io.sources import Source

__all__ = [
    "FORMATS",
    "WINDOW",
    "Axis",
    "EndedError",
    "Gather",
    "Index",
    "View",
    "axes_of",
    "blocks",
    "component",
    "is_run",
    "packed",
    "pieces",
    "resolved",
    "select",
]


Index = Any
"""What may stand between the brackets: numbers, slices, ``...`` and ``None``, one or a tuple of them."""

WINDOW = 16 << 20
"""Bytes of a file held at once while its elements are put in another order."""

FORMATS: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}
"""What ``memoryview.cast`` calls elements of these sizes."""

_PAGE = 4096
_SPARSE = 4
_COPIED = 16  # moving a run of so many elements takes as long as moving one that stands alone
_LINE = 64  # of a processor's cache: rows a power of two apart would all fall into the same few of them
_LONG = 1024
_MANY = 1 << 18


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


class Axis(NamedTuple):
    """A dimension: how many, and how far apart in the storage and in the result, in elements."""

    size: int
    step: int
    apart: int


_ONE = Axis(1, 1, 1)


class EndedError(Exception):
    """A file ends before the elements do; so many bytes are missing."""

    def __init__(self, missing: int) -> None:
        super().__init__(missing)
        self.missing = missing


def axes_of(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[Axis]:
    """A view of row-major order with as few dimensions as it can be said with.

    >>> axes_of((4, 1, 5), (5, 7, 1))
    [Axis(size=20, step=1, apart=1)]
    """
    axes: list[Axis] = []
    apart = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size == 1:
            continue
        last = axes[-1] if axes else None
        if last is not None and step == last.step * last.size:
            axes[-1] = Axis(last.size * size, last.step, last.apart)
        else:
            axes.append(Axis(size, step, apart))
        apart *= size
    return axes[::-1]


def is_run(axes: list[Axis]) -> bool:
    """Whether the elements lie one after the other."""
    return not axes or (len(axes) == 1 and axes[0].step == 1)


def blocks(axes: list[Axis], most: int, first: int = 0) -> Iterator[tuple[list[Axis], int]]:
    """The view in blocks of ``most`` elements at most, in row-major order, each with its first element."""
    if not axes or prod(axis.size for axis in axes) <= most:
        yield axes, first
        return
    outer, *rest = axes
    many = most // prod(axis.size for axis in rest)
    for index in range(0, outer.size, max(1, many)):
        start = first + index * outer.step
        if many > 1:
            yield [outer._replace(size=min(many, outer.size - index)), *rest], start
        else:
            yield from blocks(rest, most, start)


def packed(axes: list[Axis]) -> list[Axis]:
    """The same dimensions with a result of their own, that has no gaps."""
    out: list[Axis] = []
    apart = 1
    for axis in reversed(axes):
        out.append(axis._replace(apart=apart))
        apart *= axis.size
    return out[::-1]


class Gather:
    """Reads views of a storage, which begins at ``start`` of a source, into memory where their elements lie in order.

    ``itemsize`` is one of ``FORMATS``. What lies between the elements is read with them, unless it is much.
    """

    def __init__(self, source: Source, start: int, itemsize: int) -> None:
        self._source = source
        self._start = start
        self._itemsize = itemsize
        self._format = FORMATS[itemsize]

    def fill(self, axes: list[Axis], first: int, out: memoryview, at: int = 0) -> None:
        """Put the elements of a view, from ``first`` of the storage on, into ``out``, from its element ``at`` on."""
        outer = max(axes, key=lambda axis: axis.step, default=_ONE)
        rest = [axis for axis in axes if axis is not outer]
        most, inner = WINDOW // self._itemsize, _span(rest)
        scattered = outer.step * self._itemsize >= _PAGE and inner * _SPARSE <= outer.step
        if not scattered and _span(axes) <= most:
            self._copy(axes, self._read(first, _span(axes)), out, at)
            return
        many = most // inner if scattered else (most - inner) // outer.step + 1
        for index in range(0, outer.size, max(1, many)):
            few = outer._replace(size=max(1, min(many, outer.size - index)))
            start, into = first + index * outer.step, at + index * outer.apart
            if many < 1:
                self.fill(rest, start, out, into)
            elif scattered:
                step = inner + _LINE // self._itemsize
                self._copy([few._replace(step=step), *rest], self._read_rows(start, few, inner, step), out, into)
            else:
                self.fill([few, *rest] if few.size > 1 else rest, start, out, into)

    def _read(self, first: int, count: int) -> memoryview:
        data = self._source.read(self._start + first * self._itemsize, count * self._itemsize)
        if len(data) < count * self._itemsize:
            raise EndedError(count * self._itemsize - len(data))
        return memoryview(data).cast(self._format)

    def _read_rows(self, first: int, rows: Axis, count: int, apart: int) -> memoryview:
        """So many elements of each row, with little between the rows."""
        width, apart = count * self._itemsize, apart * self._itemsize
        held = memoryview(bytearray(rows.size * apart))
        start, step = self._start + first * self._itemsize, rows.step * self._itemsize
        for row in range(rows.size):
            came = self._source.readinto(start + row * step, held[row * apart : row * apart + width])
            if came < width:
                raise EndedError(width - came)
        return held.cast(self._format)

    def _copy(self, axes: list[Axis], held: memoryview, out: memoryview, at: int) -> None:
        """Run by run: of a dimension that is one on both sides, or of the longest there is."""
        if not axes:
            out[at] = held[0]
            return
        longest = max(axes, key=lambda axis: axis.size * (_COPIED if axis.step == axis.apart == 1 else 1))
        long_runs = longest.step == longest.apart == 1 and longest.size >= _LONG
        if not long_runs and prod(axis.size for axis in axes) >= _MANY and (numpy := _numpy()) is not None:
            # Run by run this would be slow, and it is so much that numpy is worth its import.
            shape, kind, width = [axis.size for axis in axes], f"u{self._itemsize}", self._itemsize
            source = numpy.ndarray(shape, kind, held, 0, [axis.step * width for axis in axes])
            target = numpy.ndarray(shape, kind, out[at:], 0, [axis.apart * width for axis in axes])
            target[...] = source
            return
        size, step, apart = longest
        reach, into = (size - 1) * step + 1, (size - 1) * apart + 1
        for here, there in _starts([axis for axis in axes if axis is not longest]):
            if step:
                run = held[here : here + reach : step]
            else:
                run = memoryview(held[here : here + 1].tobytes() * size).cast(self._format)
            out[at + there : at + there + into : apart] = run


@cache
def _numpy() -> Any:
    """numpy, where it is installed: it moves elements ten times as fast."""
    try:
        return import_module("numpy")
    except Exception:  # noqa: BLE001 - not there, or broken
        return None


def _span(axes: list[Axis]) -> int:
    """Elements of the storage from the first of a view to its last, both counted."""
    return 1 + sum((axis.size - 1) * axis.step for axis in axes)


def _starts(axes: list[Axis]) -> Iterator[tuple[int, int]]:
    """Where each run begins, in the storage and in the result."""
    if not axes:
        yield 0, 0
        return
    (size, step, apart), *rest = axes
    for index in range(size):
        for here, there in _starts(rest):
            yield index * step + here, index * apart + there


_OTHER_SIGN = bytes(value ^ 0x80 for value in range(256))
_COMPLEX = {"complex32", "bcomplex32", "complex64", "complex128"}


def component(dtype: str, itemsize: int) -> int:
    """Bytes of one number: a complex element is two of them."""
    return itemsize // 2 if dtype in _COMPLEX else itemsize


def resolved(data: memoryview, dtype: str, itemsize: int, *, swapped: bool, flags: tuple[str, ...]) -> memoryview:
    """The same elements as plain little-endian numbers; ``data`` may be changed for it."""
    width = component(dtype, itemsize)
    if swapped and width > 1:
        turned = array(FORMATS[width], data.tobytes())
        turned.byteswap()
        data = memoryview(turned).cast("B")
    if dtype in _COMPLEX:
        if "neg" in flags:
            _change_sign(data, width - 1, 2 * width)
        if ("neg" in flags) != ("conj" in flags):
            _change_sign(data, 2 * width - 1, 2 * width)
    elif "neg" in flags and dtype.startswith(("float", "bfloat")):
        _change_sign(data, width - 1, width)
    elif "neg" in flags:
        mask = (1 << 8 * width) - 1
        values = (int.from_bytes(data[at : at + width], "little") for at in range(0, len(data), width))
        data = memoryview(b"".join((-value & mask).to_bytes(width, "little") for value in values))
    return data


def _change_sign(data: memoryview, first: int, every: int) -> None:
    """The sign is the highest bit of the last byte of a number."""
    data[first::every] = data[first::every].tobytes().translate(_OTHER_SIGN)


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
            first, last, every = step.indices(size)
            if every < 1:
                raise ValueError("a step must be positive, as in torch")
            count = max(0, -(-(last - first) // every))
            shape.append(count)
            stride.append(apart * every)
            offset += apart * first if count else 0
        else:
            number = step.__index__()
            if not -size <= number < size:
                raise IndexError(f"index {number} is out of range for dimension {dim} of size {size}")
            offset += apart * (number % size)
        dim += 1
    return View(tuple(shape), tuple(stride), offset)


def _spelled_out(index: Index, rank: int) -> list[int | slice | None]:
    """One step for each dimension: ``...`` and dimensions left out become full slices."""
    given = list(index) if isinstance(index, tuple) else [index]
    for step in given:
        # A number is whatever Python takes as an index; True would be one, and means another thing to torch.
        number = hasattr(step, "__index__") and not getattr(step, "ndim", 0) and not isinstance(step, bool)
        if not (number or step is None or step is ... or isinstance(step, slice)):
            raise TypeError(f"only numbers, slices, ... and None can be read from a file, not {type(step).__name__}")
    named = sum(step is not None and step is not ... for step in given)
    dots = [place for place, step in enumerate(given) if step is ...]
    if named > rank or len(dots) > 1:
        raise IndexError(f"too many indices: {named} for {rank} dimensions")
    at = dots[0] if dots else len(given)
    full = [slice(None)] * (rank - named)
    return [*given[:at], *full, *given[at + 1 :]]


def pieces(view: View, itemsize: int, limit: int) -> Iterator[tuple[tuple[slice, ...], View]]:
    """The view in parts, each with where it belongs, that lie within ``limit`` bytes (or are one element).

    Rows that are far apart, and of which little is wanted, come one by one, so that what lies between is not read.
    """
    if 0 in view.shape:
        return
    scattered = any(
        size > 1 and step == max(view.stride) and _apart(view, dim, itemsize)
        for dim, (size, step) in enumerate(zip(view.shape, view.stride, strict=True))
    )
    if view.extent * itemsize <= limit and not scattered:
        yield (), view
        return
    dim = max(range(len(view.shape)), key=lambda d: (view.shape[d] > 1, view.stride[d]))
    size, step = view.shape[dim], view.stride[dim]
    many = 1
    if not _apart(view, dim, itemsize):
        many = max(1, (limit // itemsize - _row(view, dim).extent) // max(step, 1) + 1)
    outer = (slice(None),) * dim
    for first in range(0, size, many):
        last = min(first + many, size)
        for inner, piece in pieces(select(view, (*outer, slice(first, last))), itemsize, limit):
            # ``inner`` counts from the first row of the part.
            steps = [*inner, *(slice(None) for _ in range(dim + 1 - len(inner)))]
            start, stop, _ = steps[dim].indices(last - first)
            steps[dim] = slice(first + start, first + stop)
            yield tuple(steps), piece


def _row(view: View, dim: int) -> View:
    return select(view, (*(slice(None),) * dim, slice(0, 1)))


def _apart(view: View, dim: int, itemsize: int) -> bool:
    """Whether the rows of a dimension lie so far apart that reading them one by one pays."""
    step = view.stride[dim]
    return step * itemsize >= _PAGE and _row(view, dim).extent * _SPARSE <= step
