"""``transload.load``: loads any checkpoint onto the devices of this machine, with the result ``torch.load`` would give.

A load takes these steps: open and judge the file (``opening``), refuse what must not be loaded (``refusal``), plan
where everything goes (``placement``), read the storages (``read_storages`` below; few bytes by ``jobs``, many by
``engine``), and build the objects over them (``build``; ``trusted`` with ``weights_only=False``).
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from transload.checkpoint import Checkpoint, Storage
from transload.contents import with_parts
from transload.errors import (
    BrokenFileError,
    DoesNotFitError,
    FileWarning,
    LandingWarning,
    LoadError,
    Malformed,
    NoTorchError,
    UsageError,
)
from transload.findings import join_names
from transload.frozen import NamedTuple
from transload.io import gc_paused
from transload.io.memory import memory_at
from transload.io.sources import FileSource, Progress, Source, SourceLike
from transload.loading.build import build_object, is_fake_mode, plain_tensors
from transload.loading.placement import DeviceMap, plan_here
from transload.opening import CheckpointFile, OpenCheckpoint, fill
from transload.opening.jobs import (
    SLOT_PAIR,
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

__all__ = ["load"]

_PICKLE_ARGUMENTS = frozenset({"encoding", "errors", "fix_imports", "buffers"})


def load(
    f: SourceLike,
    map_location: Any = "auto",
    pickle_module: Any = None,
    *,
    weights_only: bool | None = None,
    mmap: bool | None = None,
    verify: bool = False,
    progress: Progress = None,
    threads: int | None = None,
    pinned_mb: int | None = None,
    direct: bool | None = None,
    **pickle_load_args: Any,
) -> Any:
    """Load a checkpoint onto the devices of this machine: ``torch.load`` for every file format.

    ``f`` is a path (of a file, a directory or the index of shards), a binary file object, or bytes. ``map_location``
    takes what ``torch.load`` takes; or ``"auto"``: each tensor goes to the device it was saved on if this machine has
    it, else to the GPU of this process, else to the CPU, and one ``LandingWarning`` says what was moved; or a list of
    devices, ``["cuda:1", "cpu"]``: everything goes to the first one that this machine has.

    A file object is read from its position on, and left where ``torch.load`` leaves it, so that objects saved one after
    the other can be read until ``EOFError``; if the load fails, its position does not change.

    With ``weights_only`` nothing in the file is run: it is read into a tree, from which tensors and plain objects are
    built through a fixed table. One error lists all other names, unless the program has allowed them with
    ``torch.serialization.add_safe_globals``. ``weights_only=False`` unpickles the file, which may run any code: use it
    only for files from people you trust. ``None`` means ``True`` unless a ``pickle_module`` is given. The environment
    variables ``TORCH_FORCE_WEIGHTS_ONLY_LOAD`` and ``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD`` work as in torch.

    ``mmap`` maps the file instead of reading it, where its bytes are the same as in memory. ``verify`` compares every
    checksum while reading, which torch never does. ``progress`` is ``True`` for a line on the terminal, or a function
    that gets the bytes done and the total. ``encoding`` is for text that Python 2 wrote.

    How bytes are read depends on this machine and on where the file is; ``transload check`` says how. ``threads`` sets
    how many threads read, ``pinned_mb`` how much pinned memory they may use for a GPU, ``direct`` whether they bypass
    the page cache.

    The classes of all errors are subclasses of those that torch users already catch: ``RuntimeError``,
    ``pickle.UnpicklingError``, ``OSError``.

    >>> import transload
    >>> transload.load("model.pt")                        # doctest: +SKIP
    """
    if isinstance(weights_only, str):  # "False" is true, and "" would trust the file
        raise UsageError(f"weights_only is a string: {weights_only!r}", fix="Pass True or False, without quotes.")
    # torch's rule, with its two environment variables.
    names = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    forced_on, forced_off = (os.environ.get(name, "0").lower() in ("1", "y", "yes", "true") for name in names)
    if forced_on and forced_off:
        raise LoadError(f"{' and '.join(names)} are both set", fix="Unset one of them.")
    if weights_only is None:
        weights_only = pickle_module is None and not forced_off
        if forced_off:
            warnings.warn("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD is set: the file may run code", stacklevel=2)
    trusted = not (weights_only or forced_on)
    encoding = _check_pickle_arguments(pickle_load_args, pickle_module, trusted=trusted)
    is_path = isinstance(f, str | os.PathLike)
    if mmap and not is_path:
        raise UsageError("mmap=True needs a path", fix="Pass the path of the file instead of a file object or bytes.")
    mapped = bool(mmap)
    if mmap is None and is_path:
        # torch.utils.serialization.config.load.mmap, from torch 2.5 on; it cannot have been set before it is imported.
        config = getattr(sys.modules.get("torch.utils.serialization"), "config", None)
        mapped = config is not None and bool(config.load.mmap)
    settings = check_settings(threads, pinned_mb, direct)
    # 1. Open and judge it. Ordinary tensors are only counted: they are named if something is wrong.
    with gc_paused(user_objects=trusted), OpenCheckpoint(f, tree=trusted) as opened:
        # 2. Refuse what must not be loaded, and leave out what torch cannot represent.
        _refuse(opened.checkpoint, trusted=trusted)
        if opened.checkpoint.findings:
            from transload.loading.refusal import leave_out

            leave_out(opened)
        checkpoint = opened.checkpoint
        # 3. Plan where everything goes.
        plan = plan_here(checkpoint, map_location, checkpoint.tensor_nbytes)
        short = [each for each in plan.shortages if not (mapped and each.device == "cpu")]
        if short:
            fix = "\n".join(f"Instead: {hint}" for each in short for hint in each.instead)
            raise DoesNotFitError("; ".join(map(str, short)), where=checkpoint.path, fix=fix)
        device_map = DeviceMap(plan, map_location, checkpoint.path)
        report_progress = None
        if progress is not None:
            from transload.io.pool import progress_counter

            report_progress = progress_counter(progress, checkpoint.tensor_nbytes)
        options = ReadOptions(verify, mapped, report_progress, settings)
        # 4. Read the storages, and build the objects over them.
        make = partial(build_object, encoding=encoding)
        if trusted:
            from transload.loading.trusted import load_program, load_trusted

            make = partial(load_trusted, pickle_module=pickle_module, **pickle_load_args)
        try:
            if trusted and checkpoint.traits.runs:
                loaded = load_program(opened.files[0], device_map.device)
            else:
                loaded = _each_file(opened, device_map, options, make)
        except Malformed:
            opened.list_tensors()
            _refuse(opened.checkpoint, trusted=trusted)  # which names the tensor, if it knows it
            raise
        opened.check_unchanged()
        opened.seek_past_content()
    if plan.warning:
        warnings.warn(f"{checkpoint.path}: {plan.warning}", LandingWarning, stacklevel=2)
    if checkpoint.findings:
        from transload.judge.problems import load_warning

        if wrong := load_warning(checkpoint):
            warnings.warn(f"{checkpoint.path}: {wrong}", FileWarning, stacklevel=2)
    return loaded


def _check_pickle_arguments(given: Mapping[str, Any], pickle_module: Any, *, trusted: bool) -> str:
    """Return the encoding; raise if an argument is unknown, or has no effect on a file that is not trusted."""
    for name in given:
        if name not in (_PICKLE_ARGUMENTS if trusted else {"encoding"}):
            hint = " with weights_only=True" if name in _PICKLE_ARGUMENTS else ""
            raise TypeError(f"load() got an unexpected keyword argument {name!r}{hint}")
    if not trusted and pickle_module is not None:
        fix = "Leave it out; or pass weights_only=False, if you trust the file."
        raise UsageError("a pickle_module is used only with weights_only=False", fix=fix)
    encoding: str = given.get("encoding", "utf-8")
    if encoding not in ("utf-8", "bytes"):
        try:
            bytes(4).decode(encoding)  # also fails for codecs such as hex, which do not make text
        except (LookupError, TypeError) as error:
            fix = "'utf-8', 'latin1' and 'bytes' are usual."
            raise UsageError(f"there is no encoding {encoding!r}", fix=fix) from error
    return encoding


def _refuse(checkpoint: Checkpoint, *, trusted: bool) -> None:
    """Raise if the file must not be loaded. Damage comes first: what is not a checkpoint is never called unsafe."""
    # A sound file with nothing but tensors needs no further checks.
    plain = checkpoint.counted or checkpoint.traits.named
    plain = plain and not checkpoint.problems and checkpoint.safety == "data-only"
    if not plain:
        from transload.judge.problems import refuse_broken
        from transload.loading.refusal import refuse_program, refuse_unsafe

        refuse_broken(checkpoint)
        refuse_program(checkpoint, trusted=trusted)
    try:
        import torch  # noqa: F401 - from here on it is needed
    except ImportError as error:
        what = f"torch cannot be imported: {error}"
        raise NoTorchError(what, where=checkpoint.path, fix="`transload doctor` says why.") from error
    if not (plain or trusted):
        refuse_unsafe(checkpoint)


def check_settings(threads: Any, pinned_mb: Any, direct: bool | None) -> Settings:
    """Check the caller's settings, and return them."""
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        raise UsageError(f"threads must be a positive integer, not {threads!r}", fix="Pass 1 or more, or leave it out.")
    least = SLOT_PAIR >> 20
    if pinned_mb is not None and (not isinstance(pinned_mb, int) or pinned_mb < least):
        what = f"pinned_mb={pinned_mb!r} is too small"
        raise UsageError(what, fix=f"Each thread takes {least} MiB: pass at least {least}, or leave it out.")
    return Settings(threads, None if pinned_mb is None else pinned_mb << 20, direct)


def _each_file(opened: OpenCheckpoint, device_map: DeviceMap, options: ReadOptions, make: Callable[..., Any]) -> Any:
    """The object of the only piece, or the dictionaries of all shards merged."""
    import torch

    objects = []
    # Rebuild functions, of torch and of programs, ask torch for the map_location of the load in progress.
    state: Any = getattr(torch.serialization, "_serialization_tls", None)
    has_state = hasattr(state, "map_location")
    before = state.map_location if has_state else None
    try:
        if has_state:
            state.map_location = device_map.locations or None
        for file in opened.files:
            storages = read_storages(file, device_map, options)
            plain = file.checkpoint.traits.named
            objects.append(plain_tensors(file, storages, device_map) if plain else make(file, storages, device_map))
    finally:
        if has_state:
            state.map_location = before
    path, form = opened.checkpoint.path, opened.checkpoint.traits
    if not form.several:
        if not objects:
            raise LoadError("there is nothing in it to load", where=path)
        return objects[0][""] if form.nameless else objects[0]
    joined: dict[Any, Any] = {}
    for shard in objects:
        if not isinstance(shard, Mapping):
            what = f"a shard holds {type(shard).__name__}, not a dictionary of tensors"
            raise LoadError(what, where=path, fix="Load the shards one by one.")
        joined.update(shard)
    return joined


# -- storages: each is read once, into freshly allocated memory, and put on its device
#
# Storages that have the same bytes in the file as in memory, and go to the host or to a CUDA device, are read together
# by the engine. The others are read one by one: those that are compressed, or in the other byte order, or go to a
# device that only torch, or the caller's map_location function, can copy to.

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


def read_storages(file: CheckpointFile, device_map: DeviceMap, options: ReadOptions) -> dict[str, torch.UntypedStorage]:
    """Read every storage of a checkpoint to its device; return them by id."""
    reader = _StorageReader(file, device_map, options)
    storages = file.checkpoint.storages
    together = reader.together(storages)
    if len(together) == len(storages):
        return together
    return {storage.id: together.get(storage.id) or reader.alone(storage) for storage in storages}


class _StorageReader:
    def __init__(self, file: CheckpointFile, device_map: DeviceMap, options: ReadOptions) -> None:
        import torch

        self._new = torch.UntypedStorage  # looked up once, not for each tensor
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

    def together(self, storages: Sequence[Storage]) -> dict[str, torch.UntypedStorage]:
        """Read all storages that have the same bytes in the file as in memory, in one call; return them by id."""
        if self._faked or self._skips or self._map is not None:
            return {}
        planned = {tag: self._device_map.planned_device(tag) for tag in {storage.device for storage in storages}}
        devices = {tag: device for tag, device in planned.items() if can_read_to(device.partition(":")[0])}
        big = sys.byteorder == "big"
        plain = [
            each
            for each in storages
            if each.device in devices
            and each.offset is not None
            and 0 < each.nbytes <= each.stored
            and (each.big_endian or self._big_endian) == big
            and not each.compressed
        ]
        return self._read(plain, devices) if plain else {}

    def _read(self, storages: Sequence[Storage], devices: Mapping[str, str]) -> dict[str, torch.UntypedStorage]:
        """Read storages, each to the device for its tag; ``BrokenFileError`` names one that is truncated or damaged."""
        sources: dict[str, Source] = {}
        for storage in storages:
            if storage.file not in sources:
                packed = self._content.unpacked(storage) if storage.compressed else None
                if storage.compressed and (packed is None or packed.size != storage.nbytes):
                    raise self._lost(storage, "they are compressed in a way torch does not read", "cannot be read")
                sources[storage.file] = packed or self._file.open(storage.file)
        ranges = [(sources[each.file], each.offset or 0, each.nbytes, devices[each.device]) for each in storages]
        targets: dict[int, torch.UntypedStorage] = {}

        def address_of(index: int) -> int:
            target = targets[index] = self._empty(storages[index], ranges[index][3])
            return target.data_ptr()  # type: ignore[no-any-return]

        options = self._options
        checksums = Checksums() if options.verify else None
        try:
            fill(ranges, address_of, options.settings, options.report_progress, checksums)
        except ShortReadError as end:
            storage = storages[end.request]
            raise self._lost(storage, file_ends(storage.nbytes - end.received)) from end
        except BrokenFileError as error:  # a compressed storage, which is read alone, is damaged
            raise self._lost(storages[0], error.what, "are damaged") from error
        if checksums is not None:
            for storage, value in zip(storages, checksums.whole(len(storages)), strict=True):
                self._check_sum(storage, value)
        return {storage.id: targets[index] for index, storage in enumerate(storages)}

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
            return self._device_map.put(self._empty(storage), storage.device)
        is_swapped = (storage.big_endian or self._big_endian) != (sys.byteorder == "big")
        # Where its bytes begin, if the file has all of them, and not compressed.
        start = None if storage.compressed or storage.stored < storage.nbytes else storage.offset
        if self._map is not None and start is not None and start % _ALIGNED == 0 and not is_swapped:
            loaded: torch.UntypedStorage = self._map[start : start + storage.nbytes]
            if self._options.verify:
                from zlib import crc32

                self._check_sum(storage, crc32(memory_at(loaded.data_ptr(), loaded.nbytes())))
            if self._options.report_progress is not None:
                self._options.report_progress(storage.nbytes)
        elif start is not None or storage.compressed:
            loaded = self._read([storage], {storage.device: "cpu"})[storage.id]
        else:
            raise self._lost(storage, f"{storage.stored:,} of {storage.nbytes:,} bytes are in the file")
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

    def _empty(self, storage: Storage, device: str = "cpu") -> torch.UntypedStorage:
        try:
            return self._new(storage.nbytes) if device == "cpu" else self._new(storage.nbytes, device=device)
        except RuntimeError as error:
            what = f"there is no memory for {_named(self._file, storage)}: {storage.nbytes:,} bytes"
            fix = "Try mmap=True." if device == "cpu" else f"{device} is full; map_location='cpu' leaves it alone."
            raise DoesNotFitError(what, where=self._file.checkpoint.path, fix=fix) from error

    def _check_sum(self, storage: Storage, value: int) -> None:
        if storage.crc32 is not None and value != storage.crc32:
            raise self._lost(storage, f"checksum {value:08x}, saved with {storage.crc32:08x}", "have changed")

    def _lost(self, storage: Storage, detail: str, how: str = "are incomplete") -> BrokenFileError:
        what = f"the bytes of {_named(self._file, storage)} {how}: {detail}"
        return BrokenFileError(what, where=self._file.checkpoint.path, fix=_AGAIN)


def _named(file: CheckpointFile, storage: Storage) -> str:
    names = storage.tensors
    for pickle in file.checkpoint.pickles if file.checkpoint.counted else ():  # its tensors were only counted
        from transload.formats.graph import StorageTable, find_tensors

        storages = find_tensors(pickle.root, StorageTable()).storages
        names = next((other.tensors for other in storages if other.key == storage.key), names)
    return join_names([name or "the root" for name in names], 4) or f"storage {storage.key}"
