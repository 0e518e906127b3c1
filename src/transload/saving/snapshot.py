"""A copy of all storages as they are now, in memory of the host: what happens to them afterwards does not matter.

Those of the CPU are copied by threads before the call returns. Those of CUDA devices are copied by the device, into
pinned memory; what the program starts on its current stream afterwards waits for that, the program itself does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby, islice
from typing import Any, TypeVar

from transload.formats.zip_writer import PIECE, SMALL, Bunch, Chunk, Record
from transload.io.pool import cores
from transload.loading.transfer.memory import Pages, copy, view
from transload.saving.contents import Fetcher, Span, bytes_at
from transload.saving.desk import Stored

__all__ = ["Copy", "Snapshot", "fetch_all", "snapshot_of"]

T = TypeVar("T")

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


class Copy:
    """The bytes of one storage, in one or more runs of memory: (address, bytes, what waits for them); or few."""

    def __init__(self, key: str, nbytes: int) -> None:
        self.key = key
        self.nbytes = nbytes
        self.small: Callable[[], bytes] = bytes
        self.runs: list[tuple[int, int, Callable[[], object] | None]] = []
        self.owners: list[Any] = []

    def chunks(self) -> Iterator[Chunk]:
        """They, one part after the other."""
        for address, nbytes, ready in self.runs:
            for start in range(0, nbytes, PIECE):
                yield Chunk(view(address + start, min(PIECE, nbytes - start)), ready)


class Snapshot:
    """What ``records_of`` gives for storages, from the copies."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies = copies

    def records(self) -> Iterator[Record | Bunch]:
        """A record for each storage."""
        for has_runs, group in groupby(self._copies, lambda each: bool(each.runs)):
            if has_runs:
                yield from (Record(b"data/" + each.key.encode(), each.nbytes, each) for each in group)
            else:
                named = ((b"data/" + each.key.encode(), each.small()) for each in group)
                yield from map(Bunch, _batched(named, _TOGETHER))


def _batched(small: Iterable[T], count: int) -> Iterator[list[T]]:
    left = iter(small)
    while batch := list(islice(left, count)):
        yield batch


def snapshot_of(storages: Sequence[Stored]) -> Snapshot:
    """Copy everything. When this returns, storages of the CPU may change; and others, in the order of their stream."""
    import torch

    cpu = torch.device("cpu")
    copies = [Copy(each.key, each.nbytes) for each in storages]
    large: list[tuple[int, int, int]] = []
    blocks = _Blocks(_pages)
    by_device: dict[Any, list[tuple[Copy, Stored]]] = {}
    for made, stored in zip(copies, storages, strict=True):
        if stored.storage.device != cpu:
            by_device.setdefault(stored.storage.device, []).append((made, stored))
        elif stored.nbytes <= SMALL:
            if stored.nbytes:
                made.small = partial(_same, bytes_at(stored.storage.data_ptr() + stored.start, stored.nbytes))
        else:
            large += _planned(made, stored.storage.data_ptr() + stored.start, blocks)
    for device, pairs in by_device.items():
        _from_cuda(device, pairs) if device.type == "cuda" else _from_elsewhere(pairs)
    _copy_all(large)
    return Snapshot(copies)


def _planned(made: Copy, source: int, blocks: _Blocks) -> Iterator[tuple[int, int, int]]:
    """Memory for a copy, and the parts in which threads shall make it: (target, source, bytes)."""
    for block, _, address, nbytes in blocks.take(made.nbytes):
        made.owners.append(block)
        made.runs.append((address, nbytes, None))
        for start in range(0, nbytes, PIECE):
            yield address + start, source + start, min(PIECE, nbytes - start)
        source += nbytes


def _copy_all(parts: Sequence[tuple[int, int, int]]) -> None:
    threads = min(cores(), _MAX_THREADS, len(parts))
    if threads > 1:
        with suppress(RuntimeError):  # while a program ends there are no more threads, nor can this be imported
            from concurrent.futures import ThreadPoolExecutor

            with ThreadPoolExecutor(threads) as pool:
                for _ in pool.map(lambda part: copy(*part), parts):
                    pass
            return
    for part in parts:
        copy(*part)


def _from_elsewhere(pairs: Sequence[tuple[Copy, Stored]]) -> None:
    """Devices that can only be asked for a copy of a whole storage."""
    for made, stored in pairs:
        if made.nbytes:
            there = stored.storage.cpu()
            made.owners.append(there)
            made.runs.append((there.data_ptr() + stored.start, made.nbytes, None))


def _from_cuda(device: Any, pairs: Sequence[tuple[Copy, Stored]]) -> None:
    """By the device; what the current stream is given from now on waits until it has read everything."""
    import torch

    from transload.saving.cuda import CudaFetcher

    fetcher = CudaFetcher(device)
    fetch_all(fetcher, pairs)
    torch.cuda.current_stream(device).wait_stream(fetcher.stream)


def fetch_all(fetcher: Fetcher, pairs: Sequence[tuple[Copy, Stored]]) -> None:
    """Into blocks of pinned memory, filled one after the other; the small ones together."""
    blocks = _Blocks(fetcher.slot)
    small = [pair for pair in pairs if 0 < pair[1].nbytes <= SMALL]
    for batch in _batched(small, max(1, _BLOCK // SMALL)):
        _fetch_small(fetcher, batch)
    for made, stored in pairs:
        if stored.nbytes <= SMALL:
            continue
        made.owners.append(stored.storage)  # until the device has read it
        start = stored.start
        for block, at, address, nbytes in blocks.take(made.nbytes):
            ready = fetcher.fetch(block[at:], [Span(stored.storage, start, nbytes)])
            made.owners.append(block)
            made.runs.append((address, nbytes, ready))
            start += nbytes


def _fetch_small(fetcher: Fetcher, batch: Sequence[tuple[Copy, Stored]]) -> None:
    spans = [Span(stored.storage, stored.start, stored.nbytes) for _, stored in batch]
    block, address = fetcher.slot(sum(span.nbytes for span in spans))
    ready = fetcher.fetch(block, spans)
    for made, stored in batch:
        made.owners += block, stored.storage
        made.small = partial(_when_there, ready, address, stored.nbytes)
        address += stored.nbytes


def _same(data: bytes) -> bytes:
    return data


def _when_there(ready: Callable[[], object], address: int, nbytes: int) -> bytes:
    ready()
    data: bytes = bytes_at(address, nbytes)
    return data
