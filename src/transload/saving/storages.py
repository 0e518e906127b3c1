"""The records of storages in an archive, and copies of storages.

``records_of`` gives the records of storages where they are: CPU memory is written in place, CUDA memory passes through
pinned memory. ``snapshot_of`` copies all storages now, to be written later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from ctypes import string_at
from functools import partial
from itertools import groupby
from typing import Any

from transload.errors import SaveError
from transload.findings import join_names
from transload.formats.zip_writer import PIECE, SMALL, Chunk, Record
from transload.io.cuda_driver import DriverError, cuda_driver
from transload.io.memory import Pages, copy, memory_at
from transload.io.pool import cores, each
from transload.saving.pickling import Stored, merged_ranges

_MAX_THREADS = 8
_TOGETHER = 4096  # the most small storages that are fetched together
_BLOCK = 64 << 20  # bytes of memory for a snapshot: torch keeps pinned blocks of the same size for the next time

_Span = tuple[Any, int, int]  # bytes of a storage: the storage, the first byte, the number of bytes


# -- storages where they are


def _name(key: str) -> bytes:
    return b"data/" + key.encode()


def _host_chunks(address: int, nbytes: int, ready: Callable[[], object] | None = None) -> Iterator[Chunk]:
    for start in range(0, nbytes, PIECE):
        yield Chunk(memory_at(address + start, min(PIECE, nbytes - start)), ready)


def _copied_chunks(stored: Stored) -> Iterator[Chunk]:
    """The bytes of a storage on a device that only copies whole storages. The chunks keep the copy alive."""
    copied = stored.storage.cpu()
    yield from _host_chunks(copied.data_ptr() + stored.start, stored.nbytes, partial(id, copied))


_new = tuple.__new__  # a named tuple in one call, without the Python function that collects its fields


def records_of(storages: Sequence[Stored], fetchers: dict[str, CudaFetcher]) -> Iterator[Record]:
    """A record for each storage. ``fetchers`` has those of the CUDA devices."""
    import torch

    cpu = torch.device("cpu")
    at = 0
    while at < len(storages):
        stored = storages[at]
        storage, nbytes = stored.storage, stored.nbytes
        device = storage.device
        at += 1
        if device == cpu:
            address = storage.data_ptr() + stored.start if nbytes else 0
            content = string_at(address, nbytes) if nbytes <= SMALL else partial(_host_chunks, address, nbytes)
            yield _new(Record, (_name(stored.key), nbytes, content))
            continue
        fetcher = fetchers.get(str(device))
        if fetcher is None or nbytes > SMALL:
            chunks = partial(fetcher.chunks, stored) if fetcher else partial(_copied_chunks, stored)
            yield Record(_name(stored.key), nbytes, chunks if nbytes else b"")
            continue
        # Fetch it together with the small ones that follow.
        small, total = [stored], nbytes
        for one in storages[at : at + _TOGETHER]:
            total += one.nbytes
            if total > PIECE or one.nbytes > SMALL or one.storage.device != device:
                break
            small.append(one)
        slot, address = fetcher.slot(PIECE)
        fetcher.fetch(slot, [(one.storage, one.start, one.nbytes) for one in small if one.nbytes])()
        for one in small:
            yield Record(_name(one.key), one.nbytes, string_at(address, one.nbytes) if one.nbytes else b"")
            address += one.nbytes
        at += len(small) - 1


class CudaFetcher:
    """Copies from one CUDA device, on a stream that waits for the work already queued on the current one."""

    def __init__(self, device: Any) -> None:
        import torch

        self._device = device
        self.stream = torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))

    def chunks(self, stored: Stored) -> Iterator[Chunk]:
        """The bytes of a storage. Each chunk keeps its pinned memory alive until it is written.

        The thread that computes a chunk's checksum fetches it, while the writing thread waits for the disk.
        """
        for start in range(0, stored.nbytes, PIECE):
            count = min(PIECE, stored.nbytes - start)
            slot, address = self.slot(count)
            yield Chunk(memory_at(address, count), partial(self._fetch, slot, stored, start, count))

    def _fetch(self, slot: Any, stored: Stored, start: int, nbytes: int) -> None:
        self.fetch(slot, [(stored.storage, stored.start + start, nbytes)])()

    def slot(self, nbytes: int) -> tuple[Any, int]:
        """Pinned memory, and its address. When it is freed, torch keeps it, and gives it out again at once."""
        import torch

        made = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        return made, made.data_ptr()

    def fetch(self, slot: Any, parts: Sequence[_Span]) -> Any:
        """Start a copy; the returned function waits until it is complete."""
        import torch

        driver = cuda_driver()
        if driver is None:  # concatenate several parts on the device first
            with torch.no_grad(), torch.cuda.stream(self.stream):
                views = [
                    torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (nbytes,), (1,))
                    for storage, start, nbytes in parts
                ] or [slot[:0]]
                joined = torch.cat(views) if len(views) > 1 else views[0]
                slot[: len(joined)].copy_(joined, non_blocking=True)
        else:  # all copies in one call, which costs a tenth of what torch's calls would
            copies = []
            to = slot.data_ptr()
            for storage, start, nbytes in parts:
                copies.append((to, storage.data_ptr() + start, nbytes))
                to += nbytes
            try:
                before = driver.current_context()
                try:
                    driver.set_device(self._device.index)
                    driver.copy(copies, self.stream.cuda_stream)
                finally:
                    driver.set_context(before)
            except DriverError as reason:
                raise SaveError(reason.what, fix="`transload doctor` looks for the cause.") from reason
        event = torch.cuda.Event()
        event.record(self.stream)
        return event.synchronize


# -- copies of storages


_Run = tuple[int, int, Callable[[], object] | None, Any]
"""Copied bytes: their address, their number, a function that waits for them, and what keeps the memory alive."""


def _run_chunks(runs: Iterable[_Run]) -> Iterator[Chunk]:
    for address, nbytes, ready, _ in runs:
        yield from _host_chunks(address, nbytes, ready)


def snapshot_of(storages: Sequence[Stored]) -> list[Record]:
    """Copy all storages, and return the records of the copies.

    Afterwards CPU storages may be changed; those of devices by later work on their streams.
    """
    import torch

    cpu = torch.device("cpu")
    records: list[Record] = []
    by_device: dict[Any, list[tuple[list[_Run], Stored]]] = {}
    for stored in storages:
        if stored.nbytes <= SMALL and stored.storage.device == cpu:
            data = string_at(stored.storage.data_ptr() + stored.start, stored.nbytes) if stored.nbytes else b""
            records.append(Record(_name(stored.key), stored.nbytes, data))
        else:
            runs: list[_Run] = []
            records.append(Record(_name(stored.key), stored.nbytes, partial(_run_chunks, runs)))
            by_device.setdefault(stored.storage.device, []).append((runs, stored))
    parts: list[tuple[int, int, int]] = []  # (target, source, bytes) for the threads to copy
    for device, pairs in by_device.items():
        if device.type == "cuda":
            fetcher = CudaFetcher(device)
            fetch_all(fetcher, pairs)
            # Work that the program queues from now on waits for the copy.
            torch.cuda.current_stream(device).wait_stream(fetcher.stream)
            continue
        if device.type != "cpu":  # a device that only copies whole storages
            for runs, stored in pairs:
                copied = stored.storage.cpu()
                runs.append((copied.data_ptr() + stored.start, stored.nbytes, None, copied))
            continue
        for runs, storage, start, block, address, nbytes in _laid_out(pairs, _pages):
            runs.append((address, nbytes, None, block))
            source = storage.data_ptr() + start
            parts += ((address + at, source + at, min(PIECE, nbytes - at)) for at in range(0, nbytes, PIECE))
    each(parts, lambda: lambda part: copy(*part), min(cores(), _MAX_THREADS, len(parts)))
    return records


def fetch_all(fetcher: CudaFetcher, pairs: Sequence[tuple[list[_Run], Stored]]) -> None:
    """Copy storages of a device into blocks of pinned memory, one call per block."""
    for _, inside in groupby(_laid_out(pairs, fetcher.slot), lambda part: id(part[3])):
        parts = list(inside)
        ready = fetcher.fetch(parts[0][3], [(storage, start, nbytes) for _, storage, start, _, _, nbytes in parts])
        for runs, storage, _, block, address, nbytes in parts:
            runs.append((address, nbytes, ready, (block, storage)))  # the copy may still be in flight


def _laid_out(
    pairs: Sequence[tuple[list[_Run], Stored]], allocate: Callable[[int], tuple[Any, int]]
) -> Iterator[tuple[list[_Run], Any, int, Any, int, int]]:
    """Memory for the bytes of storages, in sequence, in blocks that are allocated when they are needed.

    For each run of bytes: the list it belongs to, the storage, its first byte there, the block, its address and its
    size.
    """
    left, room, block, address = sum(stored.nbytes for _, stored in pairs), 0, None, 0
    for runs, stored in pairs:
        start, end = stored.start, stored.start + stored.nbytes
        while start < end:
            if not room:
                room = min(_BLOCK, left)
                block, address = allocate(room)
            nbytes = min(end - start, room)
            yield runs, stored.storage, start, block, address, nbytes
            start, address = start + nbytes, address + nbytes
            left, room = left - nbytes, room - nbytes


def _pages(nbytes: int) -> tuple[Any, int]:
    pages = Pages(nbytes)
    return pages, pages.address


# -- storages of which little is used

_LITTLE = 1 << 20  # fewer unused bytes are not worth a warning
_SHARE = 10  # nor is a smaller percentage of the file
_NAMED = 3
_LOOKED_AT = 100_000


def bloat_warning(obj: Any, storages: Sequence[Stored]) -> str:
    """The warning about bytes that no tensor uses; empty if they are few."""
    unused: dict[int, int] = {}
    for stored in storages:
        if not stored.whole:
            views = set(stored.views)
            used = sum(end - start for start, end in merged_ranges(views))
            if len(views) == 1 and (view := views.pop()).is_sparse:
                used = view.nbytes
            unused[stored.storage._cdata] = stored.nbytes - used  # noqa: SLF001 - torch's identity of a storage
    waste, total = sum(unused.values()), sum(stored.nbytes for stored in storages)
    if waste < _LITTLE or waste * 100 < _SHARE * total:
        return ""
    names = list(_names(obj, {data for data, nbytes in unused.items() if nbytes >= _LITTLE // 16}))
    which = f"views of larger storages ({join_names(names, _NAMED)})" if names else "views of larger storages"
    return (
        f"{waste / 1e6:,.0f} of {total / 1e6:,.0f} MB in the file are bytes that no saved tensor uses: "
        f"some are {which}; compact=True leaves them out"
    )


def _names(obj: Any, wanted: set[int]) -> Iterator[str]:
    """The places in an object of tensors with some storages."""
    import torch

    stack: list[tuple[str, Any]] = [("", obj)]
    seen: set[int] = set()
    while stack and len(seen) < _LOOKED_AT:
        place, value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            with suppress(RuntimeError, NotImplementedError):  # a tensor without a storage
                if value.untyped_storage()._cdata in wanted:  # noqa: SLF001 - as above
                    yield place or "the tensor itself"
        elif isinstance(value, torch.nn.Module):
            stack.append((place, value.state_dict(keep_vars=True)))
        elif isinstance(value, dict):
            stack += [(f"{place}.{key}" if place else str(key), one) for key, one in reversed(value.items())]
        elif isinstance(value, (list, tuple)):
            stack += [(f"{place}[{index}]", one) for index, one in reversed(list(enumerate(value)))]
