"""The bytes of a checkpoint into torch's storages: each read once, into memory that was just made, and put in place.

One function is all that the rest of loading knows of this: ``read_storages``. What lies in a file as it will lie in
memory, and goes to the host or to a CUDA device, is left to the engine, all of it at once. The rest is read
one by one: what is packed, or in the other byte order, or goes to where only torch, or a function of the caller's, can
bring it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from transload.checkpoint import Storage
from transload.errors import BrokenFileError, DoesNotFitError
from transload.io.memory import view
from transload.loading.build import is_fake_mode
from transload.loading.engine import Ended, ReadRequest, Settings, Sums, bring
from transload.tensors.files import PackedStorages

if TYPE_CHECKING:
    import torch

    from transload.io.sources import Source
    from transload.loading.placement import DeviceMap
    from transload.tensors.files import Piece

__all__ = ["ReadOptions", "read_storages"]

_CHUNK = 4 << 20  # bytes inflated between two signs of progress
_ALIGNED = 8  # where a mapped storage may begin: what any element of torch's wants, or a pair of them
_new = tuple.__new__  # a named tuple in one call, without the Python function that collects its fields
# In one step: there are as many storages as tensors.
_NAMES = ("device", "nbytes", "stored", "offset", "file", "compressed", "big_endian")
_FIELDS = itemgetter(*map(Storage._fields.index, _NAMES))
_AGAIN = "Download or copy the file again and compare its size and checksum with the original's."


class ReadOptions(NamedTuple):
    """How storages are read."""

    verify: bool = False
    """Compare every checksum there is."""
    mapped: bool = False
    """Map the file instead of reading it, where the bytes lie as they will lie in memory."""
    tell: Callable[[int], None] | None = None
    """Called with numbers of bytes, as they come."""
    settings: Settings = Settings()


DEFAULT = ReadOptions()


def read_storages(
    piece: Piece, device_map: DeviceMap, options: ReadOptions = DEFAULT
) -> dict[str, torch.UntypedStorage]:
    """Every storage of a checkpoint on its device, by id."""
    reader = _Reader(piece, device_map, options)
    together = reader.together()
    storages = piece.checkpoint.storages
    if len(together) == len(storages):
        return together
    return {each.id: together.get(each.id) or reader.storage(each) for each in storages}


class _Reader:
    """Reads the storages of one piece."""

    def __init__(self, piece: Piece, device_map: DeviceMap, options: ReadOptions) -> None:
        import torch

        self._torch = torch
        self._new = torch.UntypedStorage
        self._piece = piece
        self._device_map = device_map
        self._options = options
        self._faked = is_fake_mode()
        # torch.serialization.skip_data: storages are made, and not read.
        self._skips = bool(getattr(getattr(torch.serialization, "_serialization_tls", None), "skip_data", False))
        self._map = _mapping(piece) if options.mapped else None
        self._packed = PackedStorages(piece.checkpoint)
        self._order = _byte_order(piece)
        self._dtypes: dict[str, str] | None = None

    # -- those that the engine brings

    def together(self) -> dict[str, torch.UntypedStorage]:
        """The storages that lie in the file as they will in memory, by id: all read at once."""
        opened: list[Source] = []
        plain, wants = self._plain(opened)
        held: dict[int, torch.UntypedStorage] = {}

        def place(index: int) -> int:
            made = held[index] = self._empty(plain[index], wants[index][3])
            return made.data_ptr()  # type: ignore[no-any-return]

        if wants:
            self._bring(opened, wants, place, plain)
        return {storage.id: held[index] for index, storage in enumerate(plain)}

    def _plain(self, opened: list[Source]) -> tuple[list[Storage], list[ReadRequest]]:
        """The storages that the engine brings, and what is wanted for each; their files are opened."""
        plain: list[Storage] = []
        wants: list[ReadRequest] = []
        if self._faked or self._skips or self._map is not None:
            return plain, wants
        storages = self._piece.checkpoint.storages
        devices = {tag: self._reached(tag) for tag in {storage.device for storage in storages}}
        here, all_big = sys.byteorder == "big", self._order == "big"
        numbers: dict[str, int] = {}
        for storage in storages:
            tag, nbytes, stored, offset, file, compressed, big = _FIELDS(storage)
            device = devices[tag]
            if device and 0 < nbytes <= stored and offset is not None and not compressed and (big or all_big) == here:
                if file not in numbers:
                    numbers[file] = len(opened)
                    opened.append(self._piece.open(file))
                plain.append(storage)
                wants.append(_new(ReadRequest, (numbers[file], offset, nbytes, device)))
        return plain, wants

    def _reached(self, tag: str) -> str:
        """The device for a tag if the engine reaches it; else empty."""
        device = self._device_map.known(tag)
        if not device.startswith("cuda:"):
            return device if device == "cpu" else ""
        from transload.io.cuda_driver import cuda_driver

        return device if cuda_driver() is not None else ""

    def _bring(
        self,
        sources: Sequence[Source],
        wants: Sequence[ReadRequest],
        place: Callable[[int], int],
        storages: Sequence[Storage],
    ) -> None:
        """Bring the bytes of storages to where there is place for each."""
        sums = Sums() if self._options.verify else None
        try:
            bring(sources, wants, place, settings=self._options.settings, tell=self._options.tell, sums=sums)
        except Ended as end:
            storage = storages[end.want]
            detail = f"the file ends after {end.came:,} of {storage.nbytes:,} bytes"
            raise self._lost(storage, detail) from end
        if sums is not None:
            for storage, value in zip(storages, sums.whole(len(storages)), strict=True):
                self._check_sum(storage, value)

    # -- one by one

    def storage(self, storage: Storage) -> torch.UntypedStorage:
        """One storage where it belongs."""
        if self._faked or self._device_map.is_meta(storage.device):
            return self._meta(storage)
        if self._skips:
            return self._device_map.put(self._empty(storage), storage.device)
        held = self._mapped(storage) if self._map is not None else None
        if held is None:
            held = self._read(storage)
        if self._is_swapped(storage):
            self._swap(held, storage)
        return self._device_map.put(held, storage.device)

    def _meta(self, storage: Storage) -> torch.UntypedStorage:
        made = self._torch.UntypedStorage(storage.nbytes, device="meta")
        if storage.offset is not None:
            made._checkpoint_offset = storage.offset  # noqa: SLF001 - as torch.load leaves it
        if self._faked:
            made._fake_device = storage.device  # noqa: SLF001 - the same
        return made

    def _empty(self, storage: Storage, device: str = "cpu") -> torch.UntypedStorage:
        try:
            return self._new(storage.nbytes) if device == "cpu" else self._new(storage.nbytes, device=device)
        except RuntimeError as error:
            what = f"there is no memory for {_named(self._piece, storage)}: {storage.nbytes:,} bytes"
            fix = "Try mmap=True." if device == "cpu" else f"{device} is full; map_location='cpu' leaves it alone."
            raise DoesNotFitError(what, where=self._piece.checkpoint.path, fix=fix) from error

    def _read(self, storage: Storage) -> torch.UntypedStorage:
        if not storage.nbytes:
            return self._torch.UntypedStorage(0)
        if storage.compressed:
            return self._inflated(storage)
        if storage.offset is None or storage.stored < storage.nbytes:
            raise self._lost(storage, f"{storage.stored:,} of {storage.nbytes:,} bytes are in the file")
        held = self._empty(storage)
        want = ReadRequest(0, storage.offset, storage.nbytes)
        self._bring([self._piece.open(storage.file)], [want], lambda _: held.data_ptr(), [storage])
        return held

    def _compare(self, storage: Storage, held: torch.UntypedStorage) -> None:
        """The checksum of what is in memory, if that is asked for."""
        if self._options.verify:
            from zlib import crc32

            self._check_sum(storage, crc32(_view(held)))

    def _check_sum(self, storage: Storage, value: int) -> None:
        if storage.crc32 is not None and value != storage.crc32:
            raise self._lost(storage, f"checksum {value:08x}, saved with {storage.crc32:08x}", "are not those saved")

    def _tell(self, count: int) -> None:
        if self._options.tell is not None:
            self._options.tell(count)

    def _lost(self, storage: Storage, detail: str, how: str = "are not all there") -> BrokenFileError:
        what = f"the bytes of {_named(self._piece, storage)} {how}: {detail}"
        return BrokenFileError(what, where=self._piece.checkpoint.path, fix=_AGAIN)

    # -- compressed ones

    def _inflated(self, storage: Storage) -> torch.UntypedStorage:
        packed = self._packed.open(storage, self._piece.open(storage.file))
        if packed is None or packed.size != storage.nbytes:
            raise self._lost(storage, "they are packed in a way torch does not read", "cannot be read")
        held = self._empty(storage)
        into, done = _view(held), 0
        try:
            while came := packed.readinto(done, into[done : done + _CHUNK]):
                done += came
                self._tell(came)
        except BrokenFileError as error:
            raise self._lost(storage, error.what, "are damaged") from error
        if done != storage.nbytes:
            raise self._lost(storage, f"unpacked they are {done:,} of {storage.nbytes:,} bytes")
        self._compare(storage, held)
        return held

    # -- mapped ones

    def _mapped(self, storage: Storage) -> torch.UntypedStorage | None:
        """A part of the map of the file; ``None`` where the bytes there are not those to be in memory."""
        if storage.offset is None or storage.compressed or storage.offset % _ALIGNED or self._is_swapped(storage):
            return None
        if not storage.nbytes or storage.stored < storage.nbytes or self._map is None:
            return None
        part: torch.UntypedStorage = self._map[storage.offset : storage.offset + storage.nbytes]
        self._compare(storage, part)
        self._tell(storage.nbytes)
        return part

    # -- the other byte order

    def _is_swapped(self, storage: Storage) -> bool:
        return (storage.big_endian or self._order == "big") != (sys.byteorder == "big")

    def _swap(self, held: torch.UntypedStorage, storage: Storage) -> None:
        if self._dtypes is None:  # of the tensors in each storage: a storage itself does not know the newer dtypes
            self._dtypes = {}
            waiting = list(reversed(self._piece.checkpoint.tensors))
            while waiting:
                tensor = waiting.pop()
                waiting += reversed(tensor.parts)
                if tensor.storage is not None:
                    self._dtypes.setdefault(tensor.storage, tensor.dtype)
        dtype = getattr(self._torch, self._dtypes.get(storage.id, storage.dtype), None)
        if dtype is None:
            raise self._lost(storage, f"this torch has no {storage.dtype}", "cannot be turned round")
        held.byteswap(dtype)


def _named(piece: Piece, storage: Storage) -> str:
    """The tensors that need a storage."""
    names = storage.tensors
    for pickle in piece.checkpoint.pickles if piece.checkpoint.counted else ():  # its tensors were only counted
        from transload.formats.tensors import Place, StorageTable, find_tensors

        found = find_tensors(pickle.root, StorageTable(lambda _key, nbytes: Place(0, nbytes))).storages
        names = next((each.tensors for each in found if each.key == storage.key), names)
    shown = ", ".join(name or "the root" for name in names[:4]) or f"storage {storage.key}"
    more = len(names) - 4
    return f"{shown} and {more} more" if more > 0 else shown


def _view(held: torch.UntypedStorage) -> memoryview:
    return view(held.data_ptr(), held.nbytes())


def _mapping(piece: Piece) -> torch.UntypedStorage | None:
    """The whole file, mapped; ``None`` where it is no file by itself, or another one has taken its place."""
    import torch

    source = piece.open("") if piece.path else None
    is_still = getattr(source, "is_still", None)
    if source is None or is_still is None or not source.size or not is_still(piece.path):
        return None
    # Whether the program has asked torch to map files so that changes go to the file.
    ask = getattr(torch.serialization, "get_default_mmap_options", None)
    shared = False
    if ask is not None and sys.platform != "win32":
        from mmap import MAP_SHARED

        shared = bool(ask() == MAP_SHARED)
    try:
        return torch.UntypedStorage.from_file(piece.path, shared, source.size)
    except RuntimeError:  # a file system without maps, no room for one, or a file that was just cut: reading will tell
        return None


def _byte_order(piece: Piece) -> str:
    """The order of the bytes where the archive does not say: little, unless the program has told torch otherwise."""
    import torch

    ask = getattr(torch.serialization, "get_default_load_endianness", None)
    if piece.checkpoint.format != "torch-zip" or "byteorder" in dict(piece.checkpoint.facts) or ask is None:
        return "little"
    told = ask()
    named = "little" if told is None else str(told.name).lower()
    return sys.byteorder if named == "native" else named
