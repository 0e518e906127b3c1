"""What became of each tensor: whole, mended, or lost."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Literal, NamedTuple

from transload.checkpoint import Checkpoint, Storage, Tensor
from transload.dtypes import itemsize
from transload.rescuing.mended import Gone, Mended

__all__ = ["Fate", "Fates", "extents"]

State = Literal["whole", "mended", "lost"]


class Fate(NamedTuple):
    """A tensor by its name. ``checked`` is whether a checksum vouches for its bytes; ``why`` tells why it is lost."""

    name: str
    state: State
    nbytes: int
    checked: bool
    why: str = ""


class Fates:
    """Looks at the bytes of tensors: which of them are gone, which were mended."""

    def __init__(self, checkpoint: Checkpoint, mended: Mended) -> None:
        self._storages = {storage.id: storage for storage in checkpoint.storages}
        self._gone = sorted(mended.gone)
        self._touched = sorted(mended.touched)
        self._unchecked = mended.unchecked
        self._all_unchecked = mended.all_unchecked or any(lost.name == "data.pkl" for lost in mended.lost)
        cut = [storage.record for storage in checkpoint.storages if self._is_cut(storage)] if self._gone else []
        self._cut = frozenset(cut)

    def of(self, tensor: Tensor) -> Fate:
        """What became of a tensor."""
        state: State = "whole"
        checked = True
        for storage, start, end in extents(tensor, self._storages):
            why = self._why(storage, start, end)
            if why:
                return Fate(tensor.name, "lost", tensor.nbytes, checked=False, why=why)
            if start < end and bisect_left(self._touched, start) < bisect_left(self._touched, end):
                state = "mended"
            if self._all_unchecked or storage.record in self._unchecked or storage.record in self._cut:
                checked = False
        return Fate(tensor.name, state, tensor.nbytes, checked)

    def _why(self, storage: Storage, start: int, end: int) -> str:
        if start >= end or storage.device == "meta":
            return ""
        if storage.offset is None or storage.compressed:
            return "its bytes are not in the file"
        if end > storage.offset + storage.stored:
            return "the file ends before its last byte"
        gone = self._gone_in(start, end)
        return gone.why if gone else ""

    def _gone_in(self, start: int, end: int) -> Gone | None:
        """The first run of bytes that are gone in an interval; the runs do not overlap."""
        index = bisect_right(self._gone, start, key=lambda gone: gone.end)
        found = self._gone[index] if index < len(self._gone) else None
        return found if found is not None and found.start < end else None

    def _is_cut(self, storage: Storage) -> bool:
        """Whether some of its bytes are gone: no checksum speaks for the others."""
        return storage.offset is not None and self._gone_in(storage.offset, storage.offset + storage.nbytes) is not None


def extents(tensor: Tensor, storages: dict[str, Storage]) -> Iterator[tuple[Storage, int, int]]:
    """The storages a tensor and its parts look at, and from which byte of the file to which."""
    for part in tensor.parts:
        yield from extents(part, storages)
    storage = storages.get(tensor.storage or "")
    if storage is None:
        return
    if not tensor.numel:
        yield storage, 0, 0
        return
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=False))
    base = storage.offset or 0
    yield storage, base + itemsize(tensor.dtype, tensor.offset), base + itemsize(tensor.dtype, tensor.offset + last + 1)
