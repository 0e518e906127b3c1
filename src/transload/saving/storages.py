"""Views that hold much more than they show: what a file would be without it."""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from itertools import accumulate, groupby, islice
from typing import Any, NamedTuple, Protocol, TypeVar
from zlib import crc32

from transload.errors import SaveError
from transload.formats.zip_writer import AHEAD, PIECE, SMALL, Bunch, Chunk, Record
from transload.io.cuda_driver import Driver, DriverError, cuda_driver
from transload.io.memory import Pages, copy, view
from transload.io.pool import cores
from transload.saving.pickling import Stored, merged

__all__ = [
    "ROOT",
    "Copied",
    "Copy",
    "CudaFetcher",
    "Fetcher",
    "Memory",
    "Ring",
    "Snapshot",
    "Span",
    "bloat_words",
    "bytes_at",
    "closing_records",
    "fetch_all",
    "opening_records",
    "records_of",
    "rings_for",
    "snapshot_of",
    "threads_for",
]


_LITTLE = 1 << 20  # bytes that nobody needs to hear of
_SHARE = 10  # per cent of the file: less than this neither
_NAMED = 3
_LOOKED_AT = 100_000


def bloat_words(obj: Any, storages: Sequence[Stored]) -> str:
    """A sentence on what is written though no tensor uses it; empty if that is little."""
    unused = {each.storage._cdata: each.nbytes - _used(each) for each in storages if not each.whole}  # noqa: SLF001
    waste, total = sum(unused.values()), sum(each.nbytes for each in storages)
    if waste < _LITTLE or waste * 100 < _SHARE * total:
        return ""
    large = {data for data, nbytes in unused.items() if nbytes >= _LITTLE // 16}
    names = list(_names(obj, large))
    some = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
    which = f"views of larger storages ({some})" if names else "views of larger storages"
    return (
        f"{waste / 1e6:,.0f} of {total / 1e6:,.0f} MB in the file are bytes that no saved tensor uses: "
        f"some are {which}; compact=True leaves them out"
    )


def _used(stored: Stored) -> int:
    views = set(stored.views or ())
    if len(views) == 1:
        return min(each.nbytes if each.is_sparse else each.run.nbytes for each in views)
    return sum(run.nbytes for run in merged(each.run for each in views))


def _names(obj: Any, wanted: set[int]) -> Iterator[str]:
    """Where in an object the tensors of some storages are."""
    import torch

    stack: list[tuple[str, Any]] = [("", obj)]
    seen: set[int] = set()
    while stack and len(seen) < _LOOKED_AT:
        place, value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if _storage(value) in wanted:
                yield place or "the tensor itself"
        elif isinstance(value, torch.nn.Module):
            stack.append((place, value.state_dict(keep_vars=True)))
        elif isinstance(value, dict):
            stack += [(f"{place}.{key}" if place else str(key), each) for key, each in reversed(value.items())]
        elif isinstance(value, (list, tuple)):
            stack += [(f"{place}[{index}]", each) for index, each in reversed(list(enumerate(value)))]


def _storage(tensor: Any) -> int:
    try:
        data: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - by which torch tells storages apart
    except (RuntimeError, NotImplementedError):  # one without
        return 0
    return data


_TOGETHER = 4096  # small storages that are fetched from a device at once

bytes_at = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
"""A copy of the bytes at an address."""


class Memory:
    """Bytes that lie in the memory of the host, and are written from there. ``owner`` keeps them alive."""

    def __init__(self, address: int, nbytes: int, owner: Any) -> None:
        self._address, self._nbytes, self._owner = address, nbytes, owner

    def chunks(self) -> Iterator[Chunk]:
        """They, one part after the other."""
        for start in range(0, self._nbytes, PIECE):
            yield Chunk(view(self._address + start, min(PIECE, self._nbytes - start)))


class Copied:
    """Bytes of a device that can only be asked for all of them: the copy is dropped when it is written."""

    def __init__(self, stored: Stored) -> None:
        self._stored = stored

    def chunks(self) -> Iterator[Chunk]:
        """They, one part after the other."""
        stored = self._stored
        copy = stored.storage.cpu()
        address = copy.data_ptr() + stored.start
        for start in range(0, stored.nbytes, PIECE):
            part = view(address + start, min(PIECE, stored.nbytes - start))
            yield Chunk(part, done=lambda copy=copy: copy)  # type: ignore[misc]


class Span(NamedTuple):
    """Some bytes of a storage."""

    storage: Any
    start: int
    nbytes: int


class Fetcher(Protocol):
    """What a ring needs of a device."""

    def slot(self, nbytes: int) -> tuple[Any, int]:
        """Memory of the host that the device can write by itself; and its address."""
        ...

    def fetch(self, slot: Any, parts: Sequence[Span]) -> Any:
        """Begin to copy bytes of storages into a slot, one after the other; what is returned waits until all came."""
        ...

    def finish(self) -> None:
        """Wait until nothing is under way any more."""
        ...


class Ring:
    """A few slots of pinned memory that bytes of a device pass through, while those before them are written."""

    def __init__(self, fetcher: Fetcher, slots: int = AHEAD + 1, nbytes: int = PIECE) -> None:
        self.fetcher = fetcher
        self._nbytes = nbytes
        self._room = slots
        self._free: deque[tuple[Any, int]] = deque()

    def chunks(self, stored: Stored) -> Iterator[Chunk]:
        """The bytes of a storage. Each chunk has a slot until it is written: never more than the writer looks ahead.

        A chunk is fetched by the thread that computes its checksum, while the one that writes waits for the disk.
        """
        for start in range(0, stored.nbytes, self._nbytes):
            count = min(self._nbytes, stored.nbytes - start)
            held = self._take()
            fetch = partial(self._fetch, held[0], Span(stored.storage, stored.start + start, count))
            yield Chunk(view(held[1], count), fetch, partial(self._free.append, held))

    def _fetch(self, slot: Any, span: Span) -> None:
        self.fetcher.fetch(slot, [span])()

    def gathered(self, small: Sequence[Stored]) -> Bunch:
        """Storages that fit into a slot together, fetched at once."""
        slot, address = held = self._take()
        self.fetcher.fetch(slot, [Span(each.storage, each.start, each.nbytes) for each in small if each.nbytes])()
        records = []
        for each in small:
            records.append((b"data/" + each.key.encode(), bytes_at(address, each.nbytes) if each.nbytes else b""))
            address += each.nbytes
        self._free.append(held)
        return Bunch(records)

    def _take(self) -> tuple[Any, int]:
        if self._free:
            return self._free.popleft()
        if not self._room:
            raise RuntimeError("every slot is waiting to be written")
        self._room -= 1
        return self.fetcher.slot(self._nbytes)


class _Ringed:
    def __init__(self, ring: Ring, stored: Stored) -> None:
        self._ring, self._stored = ring, stored

    def chunks(self) -> Iterator[Chunk]:
        return self._ring.chunks(self._stored)


def records_of(storages: Sequence[Stored], rings: dict[str, Ring]) -> Iterator[Record | Bunch]:
    """A record for each storage. ``rings`` has the devices that write into memory of the host by themselves."""
    import torch

    cpu = torch.device("cpu")
    at = 0
    while at < len(storages):
        stored = storages[at]
        if stored.storage.device == cpu:
            small = _small_of_host(storages, at, cpu)
            yield Bunch(small) if small else _of_host(stored)
            at += len(small) or 1
            continue
        ring = rings.get(str(stored.storage.device))
        if ring is None or stored.nbytes > SMALL:
            content: Any = Copied(stored) if ring is None else _Ringed(ring, stored)
            yield Record(b"data/" + stored.key.encode(), stored.nbytes, content if stored.nbytes else b"")
            at += 1
            continue
        together = _together(storages, at)
        yield ring.gathered(together)
        at += len(together)


def _small_of_host(storages: Sequence[Stored], at: int, cpu: Any) -> list[tuple[bytes, bytes]]:
    """Names and bytes of the small storages from one on, as many as follow each other and make a write."""
    out, room = [], PIECE
    for stored in storages[at : at + PIECE // SMALL * 16]:
        storage, nbytes = stored.storage, stored.nbytes
        if nbytes > SMALL or room < 0 or storage.device != cpu:
            break
        out.append(
            (b"data/" + stored.key.encode(), bytes_at(storage.data_ptr() + stored.start, nbytes) if nbytes else b"")
        )
        room -= nbytes
    return out


def _of_host(stored: Stored) -> Record:
    address = stored.storage.data_ptr() + stored.start
    return Record(b"data/" + stored.key.encode(), stored.nbytes, Memory(address, stored.nbytes, stored.storage))


def _together(storages: Sequence[Stored], at: int) -> Sequence[Stored]:
    """Small storages of one device, from one on."""
    device, nbytes, end = storages[at].storage.device, 0, at
    for stored in storages[at : at + _TOGETHER]:
        nbytes += stored.nbytes
        if nbytes > PIECE or stored.nbytes > SMALL or stored.storage.device != device:
            break
        end += 1
    return storages[at:end]


class CudaFetcher:
    """One device's side of a ring. Its stream begins when all that the current one was given before is done."""

    def __init__(self, device: Any) -> None:
        import torch

        self._device = device
        self.stream = torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))

    def slot(self, nbytes: int) -> tuple[Any, int]:
        """Pinned memory; torch keeps it for the next save when it is given back."""
        import torch

        made = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        return made, made.data_ptr()

    def fetch(self, slot: Any, parts: Sequence[Span]) -> Any:
        """Begin to copy; what is returned waits until it is done."""
        import torch

        driver = cuda_driver()
        if driver is None:
            self._by_torch(slot, parts)
        else:
            self._by_driver(driver, slot, parts)
        event = torch.cuda.Event()
        event.record(self.stream)
        return event.synchronize

    def _by_driver(self, driver: Driver, slot: Any, parts: Sequence[Span]) -> None:
        """In one call, which costs a tenth of what torch's would."""
        ends = accumulate((part.nbytes for part in parts), initial=slot.data_ptr())
        copies = [(to, storage.data_ptr() + start, count) for to, (storage, start, count) in zip(ends, parts)]  # noqa: B905 - there is an end more
        try:
            before = driver.current()
            try:
                driver.enter(self._device.index)
                driver.copy(copies, self.stream.cuda_stream)
            finally:
                driver.back(before)
        except DriverError as reason:
            raise SaveError(reason.what, fix="`transload doctor` looks for the cause.") from reason

    def _by_torch(self, slot: Any, parts: Sequence[Span]) -> None:
        """Many are put together on the device first."""
        import torch

        with torch.no_grad(), torch.cuda.stream(self.stream):
            views = [as_bytes(part) for part in parts] or [slot[:0]]
            joined = torch.cat(views) if len(views) > 1 else views[0]
            slot[: len(joined)].copy_(joined, non_blocking=True)

    def finish(self) -> None:
        """Wait until nothing is under way any more."""
        self.stream.synchronize()


def as_bytes(span: Span) -> Any:
    """Some bytes of a storage as a tensor, without a copy."""
    import torch

    storage, start, nbytes = span
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (nbytes,), (1,))


def rings_for(storages: Sequence[Stored]) -> dict[str, Ring]:
    """A ring for each CUDA device that has storages here."""
    import torch

    cpu = torch.device("cpu")
    found = {each.storage.device for each in storages if each.storage.device != cpu}
    return {str(device): Ring(CudaFetcher(device)) for device in found if device.type == "cuda"}


T = TypeVar("T")

_BLOCK = 64 << 20  # bytes: torch keeps pinned blocks of the same size for the next time
_MAX_THREADS = 8
_TOGETHER_SNAPSHOT = 1000  # small records of a write, about


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
                yield from map(Bunch, _batched(named, _TOGETHER_SNAPSHOT))


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


ROOT = b"archive"
"""The folder of all records. torch has taken the name of the file since 1.13, so that a copy under another name was
another file, and told the first name."""

_ALL = (1 << 64) - 1
_LITTLE_ARCHIVE = 4 << 20  # bytes from which threads are worth starting


def opening_records(data: bytes, alignment: int) -> list[Record]:
    """The records before the storages."""
    contents = {
        b"data.pkl": data,
        b".format_version": b"1",
        b".storage_alignment": b"%d" % alignment,
        b"byteorder": sys.byteorder.encode(),
    }
    return [Record(name, len(content), content) for name, content in contents.items()]


def closing_records(checksums: Sequence[int], origin: tuple[bytes, bytes]) -> Iterator[Record]:
    """What comes after them; ``checksums`` are of all records so far, ``origin`` is one more.

    The origin is not part of the id: equal contents have equal ids.
    """
    version = b"3\n"
    known = serialization_id([*checksums, crc32(version)])
    if origin[1]:
        yield Record(origin[0], len(origin[1]), origin[1])
    yield Record(b"version", len(version), version)
    yield Record(b".data/serialization_id", len(known), known)


def serialization_id(checksums: Sequence[int]) -> bytes:
    """Two numbers of 64 bits in 20 digits each: one for the names, one for the contents.

    The second is the one torch would compute. The first it makes from the order of a hash table of its own; here the
    names are known by their number.
    """
    content = 0
    for checksum in checksums:
        if checksum:
            content ^= (checksum + 0x9E3779B9 + (content << 6 & _ALL) + (content >> 2)) & _ALL
    name = int.from_bytes(blake2b(b"%d" % len(checksums), digest_size=8).digest(), "little")
    return b"%020d%020d" % (name, content)


def threads_for(nbytes: int) -> int:
    """Threads for the checksums of so many bytes, beside the one that writes."""
    count = min(cores() - 1, _MAX_THREADS)
    return count if nbytes >= _LITTLE_ARCHIVE and count else 0
