"""A copy of all storages as they are now, in memory of the host: what happens to them afterwards does not matter.

Those of the CPU are copied by threads before the call returns. Those of CUDA devices are copied by the device, into
pinned memory; what the program starts on its current stream afterwards waits for that, the program itself does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby, islice
from typing import Any

from transload.loading.transfer.memory import Pages, copy, view
from transload.saving.contents import bytes_at
from transload.saving.desk import Stored
from transload.writing.archive import PIECE, SMALL, Bunch, Chunk, Record

__all__ = ["Snapshot", "snapshot_of"]

_BLOCK = 64 << 20  # bytes: torch keeps pinned blocks of the same size for the next time
_MAX_THREADS = 8
_TOGETHER = 1000  # small records of a write, about


class _Blocks:
    """Memory that is handed out from front to back, in blocks made when they are needed."""

    def __init__(self, make: Callable[[int], tuple[Any, int]]) -> None:
        self._make = make
        self._block: Any = None
        self._address = self._used = self._size = 0

    def take(self, nbytes: int) -> Iterator[tuple[Any, int, int, int]]:
        """Runs of memory for so many bytes: the block, where in it, the address, and how many."""
        while nbytes:
            if self._used == self._size:
                self._block, self._address = self._make(_BLOCK)
                self._used, self._size = 0, _BLOCK
            count = min(nbytes, self._size - self._used)
            yield self._block, self._used, self._address + self._used, count
            self._used += count
            nbytes -= count


def _pages(nbytes: int) -> tuple[Any, int]:
    pages = Pages(nbytes)
    return pages, pages.address


class _Copy:
    """The bytes of one storage, in one or more runs of memory: (address, bytes, what waits for them)."""

    def __init__(self, key: str, nbytes: int) -> None:
        self.key = key
        self.nbytes = nbytes
        self.small = b""
        self.runs: list[tuple[int, int, Callable[[], object] | None]] = []
        self.owners: list[Any] = []

    def chunks(self) -> Iterator[Chunk]:
        for address, nbytes, ready in self.runs:
            for start in range(0, nbytes, PIECE):
                yield Chunk(view(address + start, min(PIECE, nbytes - start)), ready)


class Snapshot:
    """What ``records_of`` gives for storages, from the copies."""

    def __init__(self, copies: Sequence[_Copy]) -> None:
        self._copies = copies

    def records(self) -> Iterator[Record | Bunch]:
        """A record for each storage."""
        for has_runs, group in groupby(self._copies, lambda each: bool(each.runs)):
            if has_runs:
                yield from (Record(b"data/" + each.key.encode(), each.nbytes, each) for each in group)
            else:
                yield from map(Bunch, _batched((b"data/" + each.key.encode(), each.small) for each in group))


def _batched(small: Iterable[tuple[bytes, bytes]]) -> Iterator[list[tuple[bytes, bytes]]]:
    left = iter(small)
    while batch := list(islice(left, _TOGETHER)):
        yield batch


def snapshot_of(storages: Sequence[Stored]) -> Snapshot:
    """Copy everything. When this returns, storages of the CPU may change; and others, in the order of their stream."""
    import torch

    cpu = torch.device("cpu")
    copies = [_Copy(each.key, each.nbytes) for each in storages]
    large: list[tuple[int, int, int]] = []
    blocks = _Blocks(_pages)
    by_device: dict[Any, list[tuple[_Copy, Stored]]] = {}
    for made, stored in zip(copies, storages, strict=True):
        if stored.storage.device != cpu:
            by_device.setdefault(stored.storage.device, []).append((made, stored))
        elif stored.nbytes <= SMALL:
            made.small = bytes_at(stored.storage.data_ptr() + stored.start, stored.nbytes) if stored.nbytes else b""
        else:
            large += _planned(made, stored.storage.data_ptr() + stored.start, blocks)
    for device, pairs in by_device.items():
        _from_cuda(device, pairs) if device.type == "cuda" else _from_elsewhere(pairs)
    _copy_all(large)
    return Snapshot(copies)


def _planned(made: _Copy, source: int, blocks: _Blocks) -> Iterator[tuple[int, int, int]]:
    """Memory for a copy, and the parts in which threads shall make it: (target, source, bytes)."""
    for block, _, address, nbytes in blocks.take(made.nbytes):
        made.owners.append(block)
        made.runs.append((address, nbytes, None))
        for start in range(0, nbytes, PIECE):
            yield address + start, source + start, min(PIECE, nbytes - start)
        source += nbytes


def _copy_all(parts: Sequence[tuple[int, int, int]]) -> None:
    from transload.loading.transfer.cores import cores

    if len(parts) < 2:
        for part in parts:
            copy(*part)
        return
    with ThreadPoolExecutor(min(cores(), _MAX_THREADS)) as pool:
        for _ in pool.map(lambda part: copy(*part), parts):
            pass


def _from_elsewhere(pairs: Sequence[tuple[_Copy, Stored]]) -> None:
    """Devices that can only be asked for a copy of a whole storage."""
    for made, stored in pairs:
        if made.nbytes:
            there = stored.storage.cpu()
            made.owners.append(there)
            made.runs.append((there.data_ptr() + stored.start, made.nbytes, None))


def _from_cuda(device: Any, pairs: Sequence[tuple[_Copy, Stored]]) -> None:
    """Into blocks of pinned memory, filled one after the other."""
    import torch

    from transload.saving.cuda import CudaFetcher

    fetcher = CudaFetcher(device)
    blocks = _Blocks(fetcher.slot)
    for made, stored in pairs:
        made.owners.append(stored.storage)  # until the device has read it
        start = stored.start
        for block, at, address, nbytes in blocks.take(made.nbytes):
            ready = fetcher.fetch(block[at:], stored.storage, start, nbytes)
            made.owners.append(block)
            made.runs.append((address, nbytes, ready))
            start += nbytes
    torch.cuda.current_stream(device).wait_stream(fetcher.stream)
