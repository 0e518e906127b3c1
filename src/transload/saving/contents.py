"""The bytes of storages, as records of an archive: out of the memory of the host, or fetched from a device."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from transload.formats.zip_writer import AHEAD, PIECE, SMALL, Bunch, Chunk, Record
from transload.loading.transfer.memory import view
from transload.saving.desk import Stored

__all__ = ["Copied", "Fetcher", "Memory", "Ring", "Span", "bytes_at", "records_of"]

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
