"""Strided views, element by element: which blocks they are read in, and how a block is put in row-major order."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from math import prod
from typing import Any, Literal, NamedTuple

from transload.io.sources import Source

__all__ = ["FORMATS", "WINDOW", "Axis", "EndedError", "Gather", "axes_of", "blocks", "is_run", "packed"]

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
        if self._is_hard(axes, longest) and (numpy := _numpy()) is not None:
            _copy_at_once(numpy, axes, held, out[at:])
            return
        size, step, apart = longest
        reach, into = (size - 1) * step + 1, (size - 1) * apart + 1
        for here, there in _starts([axis for axis in axes if axis is not longest]):
            if step:
                run = held[here : here + reach : step]
            else:
                run = memoryview(held[here : here + 1].tobytes() * size).cast(self._format)
            out[at + there : at + there + into : apart] = run

    @staticmethod
    def _is_hard(axes: list[Axis], longest: Axis) -> bool:
        """Whether a copy run by run would be slow, and of so much that numpy is worth its import."""
        long_runs = longest.step == longest.apart == 1 and longest.size >= _LONG
        return not long_runs and prod(axis.size for axis in axes) >= _MANY


@cache
def _numpy() -> Any:
    """numpy, where it is installed: it moves elements ten times as fast."""
    try:
        return import_module("numpy")
    except Exception:  # noqa: BLE001 - not there, or broken
        return None


def _copy_at_once(numpy: Any, axes: list[Axis], held: memoryview, out: memoryview) -> None:
    shape = [axis.size for axis in axes]
    kind, width = f"u{held.itemsize}", held.itemsize
    source = numpy.ndarray(shape, kind, held, 0, [axis.step * width for axis in axes])
    target = numpy.ndarray(shape, kind, out, 0, [axis.apart * width for axis in axes])
    target[...] = source


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
