"""Reads storages: each once, into freshly allocated memory, and puts it on its device.

Storages that have the same bytes in the file as in memory, and go to the host or to a CUDA device, are read together by
the engine. The others are read one by one: those that are compressed, or in the other byte order, or go to a device
that only torch, or the caller's ``map_location`` function, can copy to.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from threading import Thread
from typing import TYPE_CHECKING

from transload.checkpoint import Storage
from transload.contents import with_parts
from transload.errors import BrokenFileError, DoesNotFitError
from transload.findings import join_names
from transload.frozen import NamedTuple
from transload.io.memory import libc, memory_at
from transload.io.sources import FileSource, Source
from transload.loading.build import is_fake_mode
from transload.loading.placement import DeviceMap
from transload.opening import CheckpointFile, Range, fill
from transload.opening.jobs import (
    FEW_BYTES,
    Checksums,
    ReportProgress,
    Settings,
    ShortReadError,
    can_read_to,
    file_ends,
)

if TYPE_CHECKING:
    import torch

    from transload.opening.elements import ElementReader

_GROUP = 256 << 20
"""Bytes of storages whose CUDA memory is taken from the driver together. For 8 GB in 300 storages on an H200 that takes
5 ms instead of 24, in which threads that pin memory would wait for the driver. More together would keep more memory
with torch until the last of the storages is gone."""
_POOLED = 1 << 20  # torch's allocator takes memory for this size and less in blocks of its own
_ROUND = 512  # to multiples of which it rounds
_LARGE = 64 << 10  # bytes that the C library must free at once to return memory to the system
_ALIGNED = 8  # the alignment that any element, or either half of a complex one, needs in a mapped storage
_AGAIN = "Download or copy the file again and compare its size and checksum with the original's."


class ReadOptions(NamedTuple):
    """How storages are read."""

    verify: bool = False
    """Compare every checksum there is."""
    mapped: bool = False
    """Map the file instead of reading it, where its bytes are the same as in memory."""
    report_progress: ReportProgress | None = None
    settings: Settings = Settings()


def read_storages(
    files: Sequence[CheckpointFile], device_map: DeviceMap, options: ReadOptions
) -> list[dict[str, torch.UntypedStorage]]:
    """Read every storage of some files to its device; return those of each file, by id."""
    readers = [_StorageReader(file, device_map, options) for file in files]
    plain = [reader.plain() for reader in readers]
    ranges = [each for reader, storages in zip(readers, plain, strict=True) for each in reader.ranges(storages)]
    owners = [(reader, storage) for reader, storages in zip(readers, plain, strict=True) for storage in storages]
    loaded = iter(_read(owners, ranges, options) if ranges else ())
    by_file = []
    for file, reader, storages in zip(files, readers, plain, strict=True):
        by_id = {storage.id: next(loaded) for storage in storages}
        every = file.checkpoint.storages
        if len(by_id) < len(every):
            by_id = {storage.id: by_id.get(storage.id) or reader.alone(storage) for storage in every}
        by_file.append(by_id)
    return by_file


class _StorageReader:
    def __init__(self, file: CheckpointFile, device_map: DeviceMap, options: ReadOptions) -> None:
        import torch

        self._new = torch.UntypedStorage  # looked up once, not for each tensor
        self._devices: dict[str, str] = {}
        self._file = file
        self._device_map = device_map
        self._options = options
        self._faked = is_fake_mode()
        # torch.serialization.skip_data: storages are allocated, but not read.
        self._skips = bool(getattr(getattr(torch.serialization, "_serialization_tls", None), "skip_data", False))
        self._map: torch.UntypedStorage | None = None
        source = file.open("") if options.mapped and file.path else None
        # The path may lead to another file by now.
        if isinstance(source, FileSource) and source.size and source.is_same_file(file.path):
            # Whether the program has set torch's mmap options so that writes go to the file.
            mmap_options = getattr(torch.serialization, "get_default_mmap_options", None)
            shared = False
            if mmap_options is not None and sys.platform != "win32":
                from mmap import MAP_SHARED

                shared = bool(mmap_options() == MAP_SHARED)
            # Mapping fails without mmap or address space, or if the file was just truncated: reading reports which.
            with suppress(RuntimeError):
                self._map = torch.UntypedStorage.from_file(file.path, shared, source.size)
        # The byte order if the archive does not say: little, unless the program has set another default in torch.
        self._big_endian = False
        default_order = getattr(torch.serialization, "get_default_load_endianness", None)
        is_unstated = file.checkpoint.traits.container == "zip" and "byteorder" not in dict(file.checkpoint.facts)
        if is_unstated and default_order is not None:
            default = default_order()
            named = "little" if default is None else str(default.name).lower()
            self._big_endian = (sys.byteorder if named == "native" else named) == "big"

    @cached_property
    def _content(self) -> ElementReader:
        from transload.opening.elements import ElementReader

        return ElementReader(self._file.checkpoint, self._file.open)

    def plain(self) -> list[Storage]:
        """The storages that have the same bytes in the file as in memory, and whose devices can be read to."""
        if self._faked or self._skips or self._map is not None:
            return []
        storages = self._file.checkpoint.storages
        planned = {tag: self._device_map.planned_device(tag) for tag in {storage.device for storage in storages}}
        self._devices = {tag: device for tag, device in planned.items() if can_read_to(device.partition(":")[0])}
        big = sys.byteorder == "big"
        return [
            each
            for each in storages
            if each.device in self._devices
            and each.offset is not None
            and 0 < each.nbytes <= each.stored
            and (each.big_endian or self._big_endian) == big
            and not each.compressed
        ]

    def ranges(self, storages: Sequence[Storage]) -> list[Range]:
        """What to read for storages; for a compressed one, of its content."""
        sources: dict[str, Source] = {}
        for storage in storages:
            if storage.file not in sources:
                packed = self._content.unpacked(storage) if storage.compressed else None
                if storage.compressed and (packed is None or packed.size != storage.nbytes):
                    raise self.lost(storage, "they are compressed in a way torch does not read", "cannot be read")
                sources[storage.file] = packed or self._file.open(storage.file)
        devices = self._devices
        return [(sources[each.file], each.offset or 0, each.nbytes, devices[each.device]) for each in storages]

    def alone(self, storage: Storage) -> torch.UntypedStorage:
        """Map a storage, or read it by itself, and put it on its device."""
        if self._faked or self._device_map.planned_device(storage.device) == "meta":
            untyped = self._new(storage.nbytes, device="meta")
            if storage.offset is not None:
                untyped._checkpoint_offset = storage.offset  # noqa: SLF001 - as torch.load leaves it
            if self._faked and self._file.checkpoint.traits.container != "stream":  # where torch forgets the device
                untyped._fake_device = storage.device  # noqa: SLF001 - the same
            return untyped
        if self._skips or not storage.nbytes:
            return self._device_map.put(self.empty(storage), storage.device)
        is_swapped = (storage.big_endian or self._big_endian) != (sys.byteorder == "big")
        # Where its bytes begin, if the file has all of them, and not compressed.
        start = None if storage.compressed or storage.stored < storage.nbytes else storage.offset
        if self._map is not None and start is not None and start % _ALIGNED == 0 and not is_swapped:
            loaded: torch.UntypedStorage = self._map[start : start + storage.nbytes]
            if self._options.verify:
                from zlib import crc32

                self.check_sum(storage, crc32(memory_at(loaded.data_ptr(), loaded.nbytes())))
            if self._options.report_progress is not None:
                self._options.report_progress(storage.nbytes)
        elif start is not None or storage.compressed:
            self._devices = {storage.device: "cpu"}
            (loaded,) = _read([(self, storage)], self.ranges([storage]), self._options)
        else:
            raise self.lost(storage, f"{storage.stored:,} of {storage.nbytes:,} bytes are in the file")
        if is_swapped:
            from transload.opening.elements import component, swap_bytes

            memory = memory_at(loaded.data_ptr(), loaded.nbytes())
            swap_bytes(memory, component(self._dtypes.get(storage.id, storage.dtype)))
        return self._device_map.put(loaded, storage.device)

    @cached_property
    def _dtypes(self) -> dict[str | None, str]:
        """The dtype of the first tensor of each storage, since storage classes lack the newer dtypes."""
        tensors = [part for tensor in self._file.checkpoint.tensors for part in with_parts(tensor)]
        return {tensor.storage: tensor.dtype for tensor in reversed(tensors)}

    def empty(self, storage: Storage, device: str = "cpu") -> torch.UntypedStorage:
        try:
            return self._new(storage.nbytes) if device == "cpu" else self._new(storage.nbytes, device=device)
        except RuntimeError as error:
            what = f"there is no memory for {_named(self._file, storage)}: {storage.nbytes:,} bytes"
            fix = f"{device} is full; map_location='cpu' leaves it alone."
            if device == "cpu":
                fix = "Try mmap=True." if os.path.isfile(self._file.path) else ""
            raise DoesNotFitError(what, where=self._file.checkpoint.path, fix=fix) from error

    def check_sum(self, storage: Storage, value: int) -> None:
        if storage.crc32 is not None and value != storage.crc32:
            raise self.lost(storage, f"checksum {value:08x}, saved with {storage.crc32:08x}", "have changed")

    def lost(self, storage: Storage, detail: str, how: str = "are incomplete") -> BrokenFileError:
        what = f"the bytes of {_named(self._file, storage)} {how}: {detail}"
        return BrokenFileError(what, where=self._file.checkpoint.path, fix=_AGAIN)


def _read(
    owners: Sequence[tuple[_StorageReader, Storage]], ranges: Sequence[Range], options: ReadOptions
) -> list[torch.UntypedStorage]:
    """Read storages in one call; ``BrokenFileError`` names one that is truncated or damaged."""
    import torch

    targets: dict[int, torch.UntypedStorage] = {}
    groups = _groups(ranges)
    large: dict[int, torch.UntypedStorage] | None = None

    def address_of(index: int) -> int:
        nonlocal large
        if large is None:
            large = _large(ranges)
        device = ranges[index][3]
        if index in groups:
            # Freed at once: torch keeps the memory, and cuts the storages out of it.
            with suppress(RuntimeError):  # there may be no room for all of them in one piece
                torch.UntypedStorage(groups[index], device=device)
        reader, storage = owners[index]
        target = targets[index] = large.pop(index, None) or reader.empty(storage, device)
        return target.data_ptr()  # type: ignore[no-any-return]

    checksums = Checksums() if options.verify else None
    try:
        fill(ranges, address_of, options.settings, options.report_progress, checksums)
    except ShortReadError as end:
        reader, storage = owners[end.request]
        raise reader.lost(storage, file_ends(storage.nbytes - end.received)) from end
    except BrokenFileError as error:
        reader, storage = owners[0]
        if not storage.compressed:  # the file itself was changed, or contradicts itself
            raise
        # A compressed storage, which is read alone, is damaged.
        raise reader.lost(storage, error.what, "are damaged") from error
    if checksums is not None:
        for (reader, storage), value in zip(owners, checksums.whole(len(owners)), strict=True):
            reader.check_sum(storage, value)
    return [targets[index] for index in range(len(owners))]


def _large(ranges: Sequence[Range]) -> dict[int, torch.UntypedStorage]:
    """Host storages for the large ranges; those that there is no memory for are empty.

    A thread allocates them. The C library gives it a heap of its own, so that nothing else lies between the storages,
    and all their memory returns to the system when they are freed. In the main thread's heap, what lies below any block
    that lives on remains. For the same reason torch's records of the storages are made before.

    The next thread that the program starts gets the same heap, and its blocks may lie above storages that are freed
    later. What such blocks keep goes back to the system here, or it would grow with each load.
    """
    import torch

    sizes = {index: each[2] for index, each in enumerate(ranges) if each[2] >= _LARGE and each[3] == "cpu"}
    if sys.platform != "linux" or sum(sizes.values()) < FEW_BYTES:
        return {}
    if torch.autograd._profiler_enabled():  # noqa: SLF001 - it sees only what its own thread allocates
        return {}
    if hasattr(libc(), "malloc_trim"):  # musl has none
        libc().malloc_trim(0)
    storages = {index: torch.UntypedStorage(0) for index in sizes}

    def allocate() -> None:
        with suppress(RuntimeError):
            for index, storage in storages.items():
                storage.resize_(sizes[index])

    with suppress(RuntimeError):  # the system allows no more threads
        thread = Thread(target=allocate, daemon=True)
        thread.start()
        thread.join()
    return storages


def _groups(ranges: Sequence[Range]) -> dict[int, int]:
    """The first of each group of large storages for a CUDA device, as an index, and the bytes of the group.

    The groups follow the order in which memory is asked for, that of the file. There are none for a device whose memory
    torch has enough of, unused.
    """
    needed: Counter[str] = Counter()
    for _, _, nbytes, device in ranges:
        if device != "cpu":
            needed[device] += nbytes
    short = {device for device, nbytes in needed.items() if nbytes > _unused(device)}
    if not short:
        return {}
    groups: dict[int, int] = {}
    newest: dict[str, int] = {}
    sources = {source: number for number, source in enumerate(dict.fromkeys(each[0] for each in ranges))}
    for index in sorted(range(len(ranges)), key=lambda index: (sources[ranges[index][0]], ranges[index][1])):
        _, _, nbytes, device = ranges[index]
        if nbytes > _POOLED and device in short:
            first = newest.get(device, -1)
            if first < 0 or groups[first] + nbytes > _GROUP:
                first = newest[device] = index
            groups[first] = groups.get(first, 0) + -(-nbytes // _ROUND) * _ROUND
    return groups


def _unused(device: str) -> int:
    """Bytes of a CUDA device that torch has taken from the driver, and nothing uses."""
    from torch.cuda import memory_allocated, memory_reserved

    return int(memory_reserved(device) - memory_allocated(device))


def _named(file: CheckpointFile, storage: Storage) -> str:
    names = storage.tensors
    for pickle in file.checkpoint.pickles if file.checkpoint.counted else ():  # its tensors were only counted
        from transload.formats.graph import find_tensors
        from transload.formats.tensors import StorageTable

        storages = find_tensors(pickle.root, StorageTable()).storages
        names = next((other.tensors for other in storages if other.key == storage.key), names)
    return join_names([name or "the root" for name in names], 4) or f"storage {storage.key}"
