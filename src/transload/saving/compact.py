"""Views cut out of their storages: only bytes in use are written, and what shares memory goes on sharing it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from transload.saving.views import Geometry, Run, merged

__all__ = ["Cuts", "Piece"]


class Piece(NamedTuple):
    """What is written for a tensor instead of its storage, and where in it, and how, the tensor lies."""

    name: tuple[int, int]
    storage: Any
    run: tuple[int, int]
    """Its first byte in the storage, and how many they are."""
    offset: int
    stride: tuple[int, ...]


class Cuts:
    """For each storage the runs of bytes that its tensors use. It keeps the storages alive: their numbers stay theirs.

    A run that a single view uses, and that mostly consists of what the view leaves out, is not written as it is: the
    elements of the view are, one after the other.
    """

    def __init__(self, uses: Iterable[tuple[Any, list[Geometry], bool]]) -> None:
        self._runs: dict[int, list[Run]] = {}
        self._dense: dict[tuple[int, Geometry], Any] = {}
        self._held: list[Any] = []
        for storage, views, whole in uses:
            if not whole:
                self._cut(storage, views)

    def _cut(self, storage: Any, views: list[Geometry]) -> None:
        if any(each.run.end > storage.nbytes() for each in views):
            return  # of a storage that was made smaller under its tensors, there is nothing to cut
        self._held.append(storage)
        data = storage._cdata  # noqa: SLF001 - by which torch tells storages apart
        step = max((each.itemsize for each in views), default=1)
        runs = list(merged((each.run for each in views), step))
        distinct = set(views)
        for run in list(runs):
            inside = [each for each in distinct if each.run.nbytes and run.start <= each.run.start < run.end]
            if len(inside) == 1 and inside[0].is_sparse:
                self._dense[data, inside[0]] = _dense(storage, inside[0])
                runs.remove(run)
        self._runs[data] = runs

    def piece(self, storage: Any, geometry: Geometry | None) -> Piece | None:
        """What to write for a tensor; ``None``: the whole storage."""
        data = storage._cdata  # noqa: SLF001 - as above
        runs = self._runs.get(data)
        if runs is None or geometry is None:
            return None
        dense = self._dense.get((data, geometry))
        if dense is not None:
            return Piece((data, ~geometry.offset), dense, (0, dense.nbytes()), 0, _strides(geometry.size))
        used = geometry.run
        if not used.nbytes:
            return Piece((data, -1 << 62), storage, (0, 0), 0, geometry.stride)
        for run in runs:
            if run.start <= used.start and used.end <= run.end:
                offset = geometry.offset - run.start // geometry.itemsize
                return Piece((data, run.start), storage, (run.start, run.nbytes), offset, geometry.stride)
        return None


def _strides(size: tuple[int, ...]) -> tuple[int, ...]:
    """Those of a tensor of this size without gaps.

    >>> _strides((2, 3, 5))
    (15, 5, 1)
    """
    out, step = [], 1
    for count in reversed(size):
        out.append(step)
        step *= max(count, 1)
    return tuple(reversed(out))


_WORDS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}


def _dense(storage: Any, geometry: Geometry) -> Any:
    """A storage with the elements of a view, in order."""
    import torch

    with torch.no_grad():
        dtype = getattr(torch, _WORDS[geometry.itemsize])
        view = torch.empty(0, dtype=dtype, device=storage.device)
        view.set_(storage, geometry.offset, geometry.size, geometry.stride)
        return view.clone(memory_format=torch.contiguous_format).untyped_storage()
