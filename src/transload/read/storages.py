"""Storages: the runs of bytes that tensors look at, as a pickle names them and a container keeps them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from transload.checkpoint import Storage
from transload.dtypes import ITEMSIZE, STORAGES
from transload.read.nodes import Global, Persistent
from transload.read.noted import Noted
from transload.read.values import scalar

__all__ = ["MAX_SIZE", "Budget", "Place", "Slot", "StorageTable", "TooMuch"]

MAX_SIZE = 1 << 63
"""torch counts bytes in 64 signed bits; Python would go on multiplying for ever."""


class Place(NamedTuple):
    """Where a container keeps a storage. ``offset`` is ``None`` when the bytes cannot be read in place."""

    offset: int | None
    stored: int
    record: str = ""
    crc32: int | None = None
    compressed: bool = False


_MAX_SHOWN = 120


class TooMuch(Exception):  # noqa: N818 - a signal between the walk and its parts, never seen outside
    """A file asks for more work than its size can justify; the text says what."""


class Budget:
    """What reading a graph may cost beyond its own size.

    A graph can share an object under any number of names for two bytes each. Visiting a thing for the first time is
    paid for by the bytes that made it; everything seen again is counted, and so is the text of all names, since a long
    key high up stands in every name below it.
    """

    MAX_REPEATS = 50_000
    MAX_NAMES = 128 << 20

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._repeats = 0
        self._names = 0

    def seen(self, ident: int) -> bool:
        """Whether an object was met before; it is from now on."""
        if ident in self._seen:
            self.repeat()
            return True
        self._seen.add(ident)
        return False

    def meet(self, ident: int, size: int, *, again: bool) -> None:
        """Pay for a name of that size and for the object that bears it."""
        if again or ident in self._seen or self._names + size > self.MAX_NAMES:
            self.spend(size, again=again)
            self.seen(ident)
        else:
            self._names += size
            self._seen.add(ident)

    def spend(self, size: int, *, again: bool) -> None:
        """Pay for a name of that size; ``again`` if it is that of something met before."""
        self._names += size
        if self._names > self.MAX_NAMES:
            raise TooMuch(f"its names add up to more than {self.MAX_NAMES >> 20} MiB")
        if again:
            self.repeat()

    def repeat(self, count: int = 1) -> None:
        """Pay for so many things met before."""
        self._repeats += count
        if self._repeats > self.MAX_REPEATS:
            raise TooMuch(f"its objects are shared under more than {self.MAX_REPEATS:,} further names")


class Slot:
    """A storage being read: the claims of the index, the place in the container, the names of tensors met so far."""

    __slots__ = ("device", "dtype", "key", "names", "nbytes", "place")

    def __init__(self, key: str, device: str, dtype: str, nbytes: int, place: Place) -> None:
        self.key = key
        self.device = device
        self.dtype = dtype
        self.nbytes = nbytes
        self.place = place
        self.names: list[str] = []


class StorageTable:
    """The storages met so far, by key. ``locate`` asks the container where one lies.

    Each key counts once: torch restores a storage the first time it meets it and shares it afterwards.
    """

    def __init__(self, locate: Callable[[str, int], Place], *, big_endian: bool = False, file: str = "") -> None:
        self._locate = locate
        self._big_endian = big_endian
        self._file = file
        self.slots: dict[str, Slot] = {}
        self.noted = Noted()
        self.budget = Budget()
        self._seen: dict[int, tuple[Slot, int, str] | None] = {}
        self._kinds: dict[Global, tuple[str, int]] = {}
        self._views: dict[str, tuple[str, int, int]] = {}

    def enter(self, nodes: Iterable[Persistent]) -> None:
        """Take in the storages of a pickle, in the order it names them; the ordinary ones in one step."""
        slots, seen, locate, kinds = self.slots, self._seen, self._locate, self._kinds
        for node in nodes:
            pid = node.id
            if type(pid) is tuple and len(pid) == 5:
                mark, kind, key, device, numel = pid
                known = (kinds.get(kind) or self._known(kind)) if type(kind) is Global else None
                if known and mark == "storage" and type(key) is str and type(device) is str and type(numel) is int:
                    dtype, width = known
                    nbytes = numel * width
                    if key not in slots and 0 <= nbytes < MAX_SIZE and id(node) not in seen:
                        slot = slots[key] = Slot(key, device, dtype, nbytes, locate(key, nbytes))
                        seen[id(node)] = (slot, 0, dtype)
                        continue
            self.resolve(node)

    def _known(self, kind: Global) -> tuple[str, int] | None:
        """The dtype of a storage class and the bytes of its elements."""
        dtype = STORAGES.get(kind.name.rpartition(".")[2])
        if dtype is None:
            return None
        known = self._kinds[kind] = dtype, ITEMSIZE[dtype]
        return known

    def resolve(self, node: object) -> tuple[Slot, int, str] | None:
        """The storage a persistent id names, the element a view of it begins at, and the dtype it is read as."""
        if type(node) is not Persistent:
            return None
        key = id(node)
        if key not in self._seen:
            self._seen[key] = self._parse(node.id)
        return self._seen[key]

    def _parse(self, pid: object) -> tuple[Slot, int, str] | None:
        if type(pid) is not tuple or len(pid) not in (5, 6) or pid[0] not in ("storage", b"storage"):
            return None
        _, kind, key, device, numel = pid[:5]
        dtype = STORAGES.get(kind.name.rpartition(".")[2]) if type(kind) is Global else None
        if type(key) is int:
            key = str(key)
        if dtype is None or type(key) is not str or type(device) is not str or type(numel) is not int:
            self.noted.add("storage-malformed", "", "a storage id of the wrong shape")
            return None
        nbytes = numel * ITEMSIZE[dtype]
        slot = self.slots.get(key)
        if slot is None:
            slot = self._add(key, device, dtype, nbytes)
        elif slot.nbytes != nbytes or slot.device != device or slot.dtype != dtype:  # torch keeps to the first of them
            detail = f"named again with {scalar(nbytes)} bytes of {dtype} on {device[:_MAX_SHOWN]}, "
            detail += f"first with {slot.nbytes} of {slot.dtype} on {slot.device[:_MAX_SHOWN]}"
            self.noted.add("storage-conflict", f"storage {key[:_MAX_SHOWN]}", detail)
        first = self._first(pid[5], key, numel) if len(pid) == 6 else 0
        return None if first < 0 else (slot, first, dtype)

    def _first(self, view: object, key: str, numel: int) -> int:
        """The element a view begins at: (key, offset, size) of a part of the storage, ``None`` for all; -1 if odd."""
        if view is None:
            return 0
        match view:
            case (str() as name, int() as first, int() as size) if first >= 0 and size >= 0 and first + size <= numel:
                known = self._views.setdefault(name, (key, first, size))
                if known == (key, first, size) and (name == key or name not in self.slots):
                    return first
                self.noted.add("storage-conflict", f"storage {key[:_MAX_SHOWN]}", "its view bears the name of another")
            case _:
                self.noted.add("storage-malformed", "", "a view beyond its storage")
        return -1

    def _add(self, key: str, device: str, dtype: str, nbytes: int) -> Slot:
        if 0 <= nbytes < MAX_SIZE:
            place = self._locate(key, nbytes)
        else:
            self.noted.add("storage-size-absurd", f"storage {key[:_MAX_SHOWN]}", f"{scalar(nbytes)} bytes are claimed")
            place, nbytes = Place(None, 0), 0
        slot = self.slots[key] = Slot(key, device, dtype, nbytes, place)
        return slot

    def finish(self) -> tuple[Storage, ...]:
        """All storages, each with the names of its tensors."""
        return tuple([self._storage(slot) for slot in self.slots.values()])

    def _storage(self, slot: Slot) -> Storage:
        offset, stored, record, crc, compressed = slot.place
        key, nbytes = slot.key, slot.nbytes
        if not compressed and stored > nbytes:
            stored = nbytes
        return _new(
            Storage,
            (
                key,
                key,
                slot.device,
                slot.dtype,
                nbytes,
                stored,
                offset,
                record,
                self._file,
                crc,
                compressed,
                self._big_endian,
                tuple(slot.names),
            ),
        )


_new = tuple.__new__  # a named tuple in one call, without the Python function that collects its fields
