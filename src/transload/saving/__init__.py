"""``transload.save`` and ``transload.save_async``: ``torch.save``, with a file that loads anywhere, written atomically.

A ``_Save`` checks the options, pickles the object (``pickling``), collects the storages it refers to, and writes the
archive to a file or a file object: ``records_of`` makes the records of the storages. ``save_async`` copies
the storages in between (``snapshot_of``), and leaves the writing to a thread (``background``).

A record in the file says where it comes from: the software it was saved with, and the devices of the tensors. It does
not say who saved it, on which host, or to which path. torch ignores a record of this name.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import platform
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from ctypes import string_at
from datetime import datetime, timezone
from errno import EACCES, EBUSY, EPERM, EROFS
from functools import partial
from itertools import groupby
from typing import Any

from transload._version import __version__
from transload.errors import CannotWriteError, NotAFileError, NoTorchError, SaveError, SaveWarning, UsageError
from transload.findings import join_names
from transload.formats.torch_legacy import write_legacy
from transload.formats.torch_zip import RECORD as ORIGIN_RECORD
from transload.formats.zip import ALIGNMENT
from transload.formats.zip_writer import PIECE, SMALL, Chunk, NewRecord, Sink, opening_records, write_checkpoint
from transload.frozen import NamedTuple
from transload.io import gc_paused
from transload.io.atomic import AtomicFile, FileObject, InPlaceFile, is_atomic, target_path
from transload.io.checksums import fastest_crc32
from transload.io.cuda_driver import DriverError, cuda_driver
from transload.io.limits import cores
from transload.io.memory import Pages, copy, memory_at
from transload.io.pool import each, progress_counter
from transload.io.sources import Progress
from transload.saving.background import background
from transload.saving.pickling import Stored, merged_ranges, pickled

__all__ = ["save", "save_async"]

_MAX_ALIGNMENT = 1 << 16  # the length of the padding is a 16-bit number
_NO_NEW_FILES = (EACCES, EPERM, EBUSY, EROFS)  # errors of a directory that cannot have a new file

Origin = bool | Mapping[str, Any]


class _Options(NamedTuple):
    """The arguments of ``save`` besides the object and the file, in that order."""

    module: Any
    protocol: int | None
    zipped: bool
    without_byteorder: bool
    device: str
    origin: Origin
    compact: bool
    atomic: bool
    progress: Progress


def save(
    obj: Any,
    f: Any,
    pickle_module: Any = None,
    pickle_protocol: int = 2,
    _use_new_zipfile_serialization: bool = True,
    _disable_byteorder_record: bool = False,
    *,
    device: str = "cpu",
    origin: Origin = True,
    compact: bool = False,
    atomic: bool = True,
    progress: Progress = None,
) -> None:
    """Save an object as ``torch.save`` does, so that plain ``torch.load(path)`` loads it on any machine.

    ``f`` is a path, or an object with ``write``. In the file, every tensor is tagged as a CPU tensor, whatever device
    it is on; no tensor is moved. ``device="keep"`` writes the devices they are on, as torch does.

    A file is written under another name, flushed to the disk and renamed: even a crash leaves the old file or the new
    one. ``atomic=False`` writes straight into the file, as is always done with an object with ``write``.

    ``compact`` writes only bytes that a tensor uses, where torch writes the whole storage behind a view. ``origin``
    records in the file which software and devices it was saved with; if it is a dict of plain values, these as well.
    With ``origin=False`` equal objects give equal files. ``progress`` is ``True`` for a line on the terminal, or a
    function that gets the bytes done and the total.

    The two arguments with an underscore are those of ``torch.save``: without the first, the file has the format of
    torch before 1.6, which cannot store ``origin``. Inside ``torch.serialization.skip_data()`` this is ``torch.save``.

    >>> import transload
    >>> transload.save({"model": model.state_dict()}, "model.pt")  # doctest: +SKIP
    """
    of_torch = pickle_module, pickle_protocol, _use_new_zipfile_serialization, _disable_byteorder_record
    path = _path(f)
    background.wait_for_target(path or f)
    if getattr(getattr(sys.modules.get("torch.serialization"), "_serialization_tls", None), "skip_data", False):
        from torch.serialization import save as torch_save  # only torch writes records without contents

        torch_save(obj, f, pickle_module or pickle, *of_torch[1:])
        return
    with gc_paused(user_objects=True):
        _Save(obj, f, path, _Options(*of_torch, device, origin, compact, atomic, progress)).write()


def save_async(
    obj: Any,
    f: Any,
    pickle_module: Any = None,
    pickle_protocol: int = 2,
    _use_new_zipfile_serialization: bool = True,
    _disable_byteorder_record: bool = False,
    *,
    device: str = "cpu",
    origin: Origin = True,
    compact: bool = False,
    atomic: bool = True,
    progress: Progress = None,
) -> Future[None]:
    """Save in the background: the object is copied now and written while the program goes on.

    Later changes to the object do not affect the file. The future's ``result()`` waits until the file is in place, and
    raises what went wrong. An error that was not raised there is raised by the next save, or printed when the program
    ends, which waits for its saves. Saves are written one after the other, in the order of the calls; while two are
    pending, the next call waits.

    >>> future = transload.save_async(checkpoint, "step-1000.pt")  # doctest: +SKIP
    """
    path = _path(f)
    background.raise_unseen()
    background.make_room()
    of_torch = pickle_module, pickle_protocol, _use_new_zipfile_serialization, _disable_byteorder_record
    prepared = _Save(obj, f, path, _Options(*of_torch, device, origin, compact, atomic, progress))
    if path is not None:
        # The working directory may change meanwhile. Path.absolute() would drop the slash at the end of a directory.
        prepared.path = os.path.join(os.getcwd(), path)
    prepared.copies, prepared.storages = snapshot_of(prepared.storages), []
    fastest_crc32()  # it imports a package, which a thread cannot do while the program ends
    return background.submit(prepared.path or f, prepared.write)


def _path(f: Any) -> str | None:
    """The path of a target; ``None`` for a file object."""
    if isinstance(f, (str, bytes, os.PathLike)):
        return target_path(os.fsdecode(f))
    if not callable(getattr(f, "write", None)):
        what = f"cannot save to an object of type {type(f).__name__}"
        raise NotAFileError(what, fix="Give a path, or an object with write().")
    return None


class _Save:
    """Everything to write for an object, to a path or to the file object ``f``; ``write`` writes it.

    Warns of a file name that torch misinterprets, and of bytes that no tensor uses.
    """

    def __init__(self, obj: Any, f: Any, path: str | None, options: _Options) -> None:
        protocol, compact, legacy = options.protocol, options.compact, not options.zipped
        if options.device not in ("cpu", "keep"):
            what = f"device must be 'cpu' or 'keep', not {options.device!r}"
            raise UsageError(what, fix="To write other tags, use transload.retag afterwards.")
        if protocol is None or protocol == -1:  # as pickle interprets them
            protocol = pickle.DEFAULT_PROTOCOL if protocol is None else pickle.HIGHEST_PROTOCOL
        elif protocol not in range(2, pickle.HIGHEST_PROTOCOL + 1):  # 2 is the first with binary persistent ids
            what = f"pickle_protocol={protocol!r}: it must be a number from 2 to {pickle.HIGHEST_PROTOCOL}"
            raise UsageError(what, fix="2 is what torch.load reads with weights_only=True.")
        if options.module is not None and not callable(getattr(options.module, "Pickler", None)):
            raise UsageError(f"pickle_module={options.module!r:.80} has no Pickler", fix="Give a module like pickle.")
        if options.progress is not None and not isinstance(options.progress, bool) and not callable(options.progress):
            raise UsageError(f"progress={options.progress!r:.80}: it must be True, or a function of two numbers")
        try:
            import torch  # from here on it is needed
        except ImportError as error:
            raise NoTorchError(f"torch cannot be imported: {error}", fix="`transload doctor` says why.") from error
        if getattr(getattr(torch.serialization, "_serialization_tls", None), "skip_data", False):
            what = "torch.serialization.skip_data() is active"
            raise SaveError(what, fix="Use save for a file without contents.")
        self.file, self.path, self.options, self.protocol = f, path, options, int(protocol)
        self.copies: list[NewRecord] | None = None  # copies of the storages, to write instead
        alignment: Any = ALIGNMENT
        with suppress(ImportError, AttributeError):  # before torch 2.7
            from torch.utils.serialization import config

            alignment = config.save.storage_alignment
        if alignment not in range(1, _MAX_ALIGNMENT + 1):
            what = f"torch is set to a storage_alignment of {alignment!r:.80}"
            fix = f"torch.utils.serialization.config.save.storage_alignment = {ALIGNMENT}"
            raise SaveError(f"{what}: it must be a number from 1 to {_MAX_ALIGNMENT}", fix=fix)
        self.alignment = int(alignment)
        with gc_paused(user_objects=True):
            how = {"portable": options.device == "cpu", "compact": compact, "legacy": legacy}
            self.data, self.storages = pickled(obj, options.module, self.protocol, **how)
            bloat = "" if compact else bloat_warning(obj, self.storages)
            unrecorded = legacy or options.origin in (False, None)
            self.origin = b"" if unrecorded else _origin_of(options.origin, self.storages)
            self.numels = [stored.numel for stored in self.storages]
            self.nbytes = sum(stored.nbytes for stored in self.storages)
        if path and path.lower().endswith(".safetensors"):
            what = "because of its name, torch 2.13 and later reads it as safetensors, and fails. Name it .pt."
            warnings.warn(f"{path}: {what}", SaveWarning, stacklevel=3)
        if bloat:
            warnings.warn(f"{path}: {bloat}" if path else bloat, SaveWarning, stacklevel=3)

    def write(self) -> None:
        """Write the file."""
        if self.path is None:
            self._write_into(FileObject(self.file))
            if callable(getattr(self.file, "flush", None)):
                self.file.flush()
            return
        whole = self.options.atomic and is_atomic(self.path)
        try:
            with (AtomicFile if whole else InPlaceFile)(self.path) as file:
                self._write_into(file)
        except CannotWriteError as error:
            in_use = getattr(error.__cause__, "winerror", None)  # on Windows
            if whole and error.errno in _NO_NEW_FILES and not in_use and os.access(self.path, os.W_OK):
                error.fix = "The file cannot be replaced there; atomic=False writes into the file itself."
            raise

    def _write_into(self, sink: Sink) -> None:
        devices = {stored.storage.device for stored in self.storages}
        fetchers = {str(device): CudaFetcher(device) for device in devices if device.type == "cuda"}
        with ExitStack() as cleanup:
            for fetcher in fetchers.values():
                cleanup.callback(fetcher.stream.synchronize)  # wait for all copies
            records = records_of(self.storages, fetchers) if self.copies is None else self.copies
            progress = self.options.progress
            if not self.options.zipped:
                report_progress = progress_counter(progress, self.nbytes, "saving")
                write_legacy(sink, self.data, self.protocol, self.numels, records, report_progress)
                return
            opening = opening_records(self.data, self.alignment, sys.byteorder)
            if self.options.without_byteorder:
                opening = [record for record in opening if record[0] != b"byteorder"]
            total = self.nbytes + sum(size for _, size, _ in opening)
            write_checkpoint(
                sink,
                opening,
                records,
                self.nbytes,
                origin=(ORIGIN_RECORD.encode(), len(self.origin), self.origin) if self.origin else None,
                alignment=self.alignment,
                report_progress=progress_counter(progress, total, "saving"),
            )


# -- where the file comes from

_MAX_ENTRIES = 64 << 10  # bytes of JSON that the caller may add: every inspection reads them
_MAX_DEPTH = 8
_MAX_BITS = 64  # of an integer: other JSON readers do not support longer ones
_FIX = "It takes names with plain values: texts, numbers, True, False, None, and lists and dicts of these."


def _origin_of(origin: Any, storages: list[Stored]) -> bytes:
    """The record in JSON; ``origin`` is ``True``, or a dictionary of the caller's entries."""
    import torch

    facts: dict[str, Any] = {"schema": 1, "transload": __version__}
    facts |= {"torch": str(torch.__version__), "python": platform.python_version()}
    facts |= {name: str(version) for name in ("cuda", "hip") if (version := getattr(torch.version, name, None))}
    facts |= {"system": platform.system().lower(), "machine": platform.machine().lower()}
    with suppress(Exception):  # a device that fails must not stop a save
        if torch.cuda.is_initialized():  # saving CPU tensors must not initialise CUDA
            gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
            facts["gpus"] = [
                {"name": str(gpu.name), "capability": f"{gpu.major}.{gpu.minor}", "memory": int(gpu.total_memory)}
                for gpu in gpus
            ]
            with open("/sys/module/nvidia/version", encoding="ascii") as file:
                if driver := file.read(64).strip():
                    facts["driver"] = driver
    facts["time"] = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    # The devices of the storages in order, run-length encoded: a device, and the number of storages in a row on it.
    cpu = torch.device("cpu")
    rows = groupby(stored.storage.device for stored in storages)
    facts["storages"] = [["cpu" if device == cpu else str(device), sum(1 for _ in row)] for device, row in rows]
    if origin is not True:
        if not isinstance(origin, Mapping):
            raise UsageError(f"origin has the type {type(origin).__name__}; it must be True, False or a dict", fix=_FIX)
        facts["entries"] = _plain(origin, "origin", 0)
        nbytes = len(json.dumps(facts["entries"], ensure_ascii=False).encode("utf-8", "surrogatepass"))
        if nbytes > _MAX_ENTRIES:
            what = f"the entries of origin take {nbytes} bytes; {_MAX_ENTRIES} is the limit"
            raise UsageError(what, fix="Leave some out.")
    return json.dumps(facts, ensure_ascii=False, allow_nan=False).encode()


def _plain(value: Any, place: str, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise UsageError(f"{place} is nested too deep: {_MAX_DEPTH} levels is the limit", fix=_FIX)
    if isinstance(value, Mapping):
        wrong = next((key for key in value if not isinstance(key, str)), None)
        if wrong is not None:
            raise UsageError(f"{place} has the name {wrong!r:.80}, which is not text", fix=_FIX)
        return {_plain(key, place, 0): _plain(item, f"{place}[{key!r:.80}]", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{place}[{index}]", depth + 1) for index, item in enumerate(value)]
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"{place} has text that is not Unicode", fix=_FIX) from error
        return str(value)
    if type(value) is int and value.bit_length() > _MAX_BITS:
        raise UsageError(f"{place} is a number of more than {_MAX_BITS} bits", fix="Write it as text.")
    if value is None or type(value) in (bool, int) or (type(value) is float and math.isfinite(value)):
        return value
    raise UsageError(f"{place} is {value!r:.80}, a {type(value).__name__}, which JSON cannot represent", fix=_FIX)


# -- storages where they are: CPU memory is written in place, CUDA memory passes through pinned memory

_MAX_THREADS = 8
_TOGETHER = 4096  # the most small storages that are fetched together
_BLOCK = 64 << 20  # bytes of memory for a snapshot: torch keeps pinned blocks of the same size for the next time


def _host_chunks(address: int, nbytes: int, ready: Callable[[], object] | None = None) -> Iterator[Chunk]:
    for start in range(0, nbytes, PIECE):
        yield Chunk(memory_at(address + start, min(PIECE, nbytes - start)), ready)


def _copied_chunks(stored: Stored) -> Iterator[Chunk]:
    """The bytes of a storage on a device that only copies whole storages. The chunks keep the copy alive."""
    copied = stored.storage.cpu()
    yield from _host_chunks(copied.data_ptr() + stored.start, stored.nbytes, partial(id, copied))


def records_of(storages: Sequence[Stored], fetchers: dict[str, CudaFetcher]) -> Iterator[NewRecord]:
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
            yield stored.record, nbytes, content
            continue
        fetcher = fetchers.get(str(device))
        if fetcher is None or nbytes > SMALL:
            chunks = partial(fetcher.chunks, stored) if fetcher else partial(_copied_chunks, stored)
            yield stored.record, nbytes, chunks if nbytes else b""
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
            yield one.record, one.nbytes, string_at(address, one.nbytes) if one.nbytes else b""
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
        """Pinned memory, and its address. torch keeps such memory when it is freed, and reuses it at once."""
        import torch

        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        return memory, memory.data_ptr()

    def fetch(self, slot: Any, parts: Sequence[tuple[Any, int, int]]) -> Any:
        """Start to copy parts, each (storage, first byte, size). The returned function waits until they are copied."""
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
                with ExitStack() as cleanup:
                    cleanup.callback(driver.set_context, driver.current_context())
                    driver.set_device(self._device.index)
                    driver.copy(copies, self.stream.cuda_stream)
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


def snapshot_of(storages: Sequence[Stored]) -> list[NewRecord]:
    """Copy all storages, and return the records of the copies.

    Afterwards the program may change CPU storages, and queue work that changes those on devices.
    """
    import torch

    cpu = torch.device("cpu")
    records: list[NewRecord] = []
    by_device: dict[Any, list[tuple[list[_Run], Stored]]] = {}
    for stored in storages:
        if stored.nbytes <= SMALL and stored.storage.device == cpu:
            data = string_at(stored.storage.data_ptr() + stored.start, stored.nbytes) if stored.nbytes else b""
            records.append((stored.record, stored.nbytes, data))
        else:
            runs: list[_Run] = []
            records.append((stored.record, stored.nbytes, partial(_run_chunks, runs)))
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
    """Place the bytes of storages one after the other into blocks, which are allocated when they are needed.

    Yields for each run of bytes: the list it belongs to, the storage, its first byte there, the block, its address and
    its size.
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


# -- bytes that no tensor uses

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
            unused[stored.storage._cdata] = stored.nbytes - used  # torch's identity of a storage
    waste, total = sum(unused.values()), sum(stored.nbytes for stored in storages)
    if waste < _LITTLE or waste * 100 < _SHARE * total:
        return ""
    names = list(_names(obj, {data for data, nbytes in unused.items() if nbytes >= _LITTLE // 16}))
    which = f"views of larger storages ({join_names(names, _NAMED)})" if names else "views of larger storages"
    return (
        f"{waste / 1e6:,.0f} of {total / 1e6:,.0f} MB in the file are bytes that no saved tensor uses: "
        f"some tensors are {which}; compact=True leaves these bytes out"
    )


def _names(obj: Any, wanted: set[int]) -> Iterator[str]:
    """The places in an object where its tensors use one of the ``wanted`` storages."""
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
                if value.untyped_storage()._cdata in wanted:
                    yield place or "the tensor itself"
        elif isinstance(value, torch.nn.Module):
            stack.append((place, value.state_dict(keep_vars=True)))
        elif isinstance(value, dict):
            stack += [(f"{place}.{key}" if place else str(key), one) for key, one in reversed(value.items())]
        elif isinstance(value, (list, tuple)):
            stack += [(f"{place}[{index}]", one) for index, one in reversed(list(enumerate(value)))]
