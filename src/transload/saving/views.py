"""Which bytes of a storage its tensors use: pure arithmetic on offsets, sizes and strides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

__all__ = ["Geometry", "Run", "merged"]


class Run(NamedTuple):
    """Bytes of a storage, from ``start`` up to ``end``."""

    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """How many they are."""
        return self.end - self.start


class Geometry(NamedTuple):
    """Which elements of its storage a tensor is; ``itemsize`` is the bytes of each."""

    itemsize: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def run(self) -> Run:
        """From its first byte to its last; nothing for a tensor without elements.

        >>> Geometry(4, 10, (2, 3), (100, 2)).run
        Run(start=40, end=460)
        """
        if 0 in self.size:
            return Run(0, 0)
        last = self.offset + sum((count - 1) * step for count, step in zip(self.size, self.stride, strict=True))
        return Run(self.offset * self.itemsize, (last + 1) * self.itemsize)

    @property
    def nbytes(self) -> int:
        """What it would take without gaps, and each element written as often as it occurs."""
        return prod(self.size) * self.itemsize

    @property
    def is_sparse(self) -> bool:
        """Whether it leaves out at least half of the bytes between its first and its last."""
        return 2 * self.nbytes <= self.run.nbytes


def merged(runs: Iterable[Run], step: int = 1) -> Sequence[Run]:
    """Runs that overlap or touch, as one; each begins at a multiple of ``step``.

    What does not overlap shares no memory, so it can be kept apart.

    >>> merged([Run(80, 100), Run(0, 10), Run(90, 120), Run(10, 12)])
    [Run(start=0, end=12), Run(start=80, end=120)]
    """
    out: list[Run] = []
    for start, end in sorted(runs):
        if end == start:
            continue
        first = start - start % step
        if out and first <= out[-1].end:
            out[-1] = Run(out[-1].start, max(end, out[-1].end))
        else:
            out.append(Run(first, end))
    return out
