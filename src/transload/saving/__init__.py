"""``transload.save`` and ``transload.save_async``: ``torch.save``, with a file that loads anywhere, written atomically.

A ``_Save`` checks the options, pickles the object (``pickling``), collects the storages it refers to, and writes the
archive (``storages``) to a file or a file object. ``save_async`` copies the storages in between, and leaves the writing
to a thread (``background``).

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
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from datetime import datetime, timezone
from errno import EACCES, EBUSY, EPERM, EROFS
from itertools import groupby
from typing import TYPE_CHECKING, Any

from transload._version import __version__
from transload.errors import CannotWriteError, NotAFileError, NoTorchError, SaveError, SaveWarning, UsageError
from transload.formats import gc_paused
from transload.formats.torch_legacy import write_legacy
from transload.formats.zip import ALIGNMENT
from transload.formats.zip_writer import Record, Sink, opening_records, write_checkpoint
from transload.io.atomic import AtomicFile, FileObject, InPlaceFile, is_atomic
from transload.io.pool import progress_counter
from transload.saving.pickling import Stored, pickled
from transload.saving.storages import bloat_warning, fetchers_for, records_of

if TYPE_CHECKING:
    from concurrent.futures import Future

_MAX_ALIGNMENT = 1 << 16  # the length of the padding is a 16-bit number
_NO_NEW_FILES = (EACCES, EPERM, EBUSY, EROFS)  # errors of a directory that cannot have a new file

Origin = bool | Mapping[str, Any]
Progress = bool | Callable[[int, int], object] | None


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

    ``f`` is a path, or an object with ``write``. Every tensor is tagged as one of the CPU, wherever it is, and stays
    there; ``device="keep"`` writes the devices they are on, as torch does.

    A file is written under another name, flushed to the disk and renamed: even after a crash there is the old file or
    the new one. ``atomic=False`` writes straight into the file, as is always done with an object with ``write``.

    ``compact`` writes only bytes that a tensor uses, where torch writes the whole storage behind a view. ``origin``
    records in the file what it was saved with and on; a dict of plain values is recorded, too. With
    ``origin=False`` equal objects give equal files. ``progress`` is ``True`` for a line on the terminal, or a function
    that gets the bytes done and the total.

    The two arguments with an underscore are those of ``torch.save``: without the first, the file has the form of torch
    before 1.6, which has no room for ``origin``.

    >>> import transload
    >>> transload.save({"model": model.state_dict()}, "model.pt")  # doctest: +SKIP
    """
    from transload.saving.background import background

    path = _path(f)
    background.wait_for_target(path or f)
    form = not _use_new_zipfile_serialization, not _disable_byteorder_record
    prepared = _Save(obj, f, path, pickle_module, pickle_protocol, device, origin, compact, atomic, progress, *form)
    prepared.write()


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

    What changes afterwards does not reach the file. The future's ``result()`` waits until the file is in place, and
    raises what went wrong. An error that was not raised there is raised by the next save, or printed when the program
    ends, which waits for its saves. Saves are written one after the other, in the order of the calls; while two are
    pending, the next call waits.

    >>> future = transload.save_async(checkpoint, "step-1000.pt")  # doctest: +SKIP
    """
    from transload.io.checksums import fastest_crc32
    from transload.saving.background import background
    from transload.saving.storages import snapshot_of

    path = _path(f)
    background.raise_unseen()
    background.make_room()
    form = not _use_new_zipfile_serialization, not _disable_byteorder_record
    prepared = _Save(obj, f, path, pickle_module, pickle_protocol, device, origin, compact, atomic, progress, *form)
    if path is not None:
        # The working directory may change meanwhile. Path.absolute() would drop the slash at the end of a directory.
        prepared.path = os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH118 - see above
    prepared.copies, prepared.storages = snapshot_of(prepared.storages), []
    fastest_crc32()  # it imports a package, which a thread cannot do while the program ends
    return background.submit(prepared.path or f, prepared.write)


def _path(f: Any) -> str | None:
    """The path of a target; ``None`` for a file object."""
    if isinstance(f, (str, bytes, os.PathLike)):
        path = os.fsdecode(f)
        if "\0" in path:
            raise UsageError(f"no file can have the name {path!r:.80}", fix="Leave out the NUL.")
        return path
    if not callable(getattr(f, "write", None)):
        raise NotAFileError(f"cannot save to a {type(f).__name__}", fix="Give a path, or an object with write().")
    return None


class _Save:
    """Everything to write for an object, to a path or to the file object ``f``; ``write`` writes it.

    Warns of a file name that torch misinterprets, and of bytes that no tensor uses.
    """

    def __init__(
        self,
        obj: Any,
        f: Any,
        path: str | None,
        module: Any,
        protocol: int | None,
        device: str,
        origin: Origin,
        compact: bool,
        atomic: bool,
        progress: Progress,
        legacy: bool,
        byteorder: bool,
    ) -> None:
        if device not in ("cpu", "keep"):
            what = f"device={device!r}: a file is saved with tags of the CPU ('cpu') or of the devices in use ('keep')"
            raise UsageError(what, fix="`transload retag` writes other tags into a file.")
        if protocol is None or protocol == -1:  # as pickle interprets them
            protocol = pickle.DEFAULT_PROTOCOL if protocol is None else pickle.HIGHEST_PROTOCOL
        elif protocol not in range(2, pickle.HIGHEST_PROTOCOL + 1):  # 2 is the first with binary persistent ids
            what = f"pickle_protocol={protocol!r}: it is a number from 2 to {pickle.HIGHEST_PROTOCOL}"
            raise UsageError(what, fix="2 is what torch.load reads with weights_only=True.")
        if module is not None and not callable(getattr(module, "Pickler", None)):
            raise UsageError(f"pickle_module={module!r:.80} has no Pickler", fix="Give a module like pickle.")
        if progress is not None and not isinstance(progress, bool) and not callable(progress):
            raise UsageError(f"progress={progress!r:.80}: it is True, or a function of two numbers")
        try:
            import torch  # from here on it is needed
        except ImportError as error:
            raise NoTorchError(f"torch cannot be imported: {error}", fix="`transload doctor` says why.") from error
        if getattr(getattr(torch.serialization, "_serialization_tls", None), "skip_data", False):
            what = "torch.serialization.skip_data() is in force"
            raise SaveError(what, fix="Use torch.save for a file without contents.")
        self.file, self.path, self.atomic, self.progress = f, path, atomic, progress
        self.legacy_protocol = int(protocol) if legacy else None
        self.byteorder = byteorder  # whether to write the record of this name
        self.copies: list[Record] | None = None  # of the storages, to write instead of them
        with gc_paused(user_objects=True):
            self.data, self.storages = pickled(
                obj, module, int(protocol), portable=device == "cpu", compact=compact, legacy=legacy
            )
            bloat = "" if compact else bloat_warning(obj, self.storages)
            self.origin = b"" if legacy or origin in (False, None) else _origin_of(origin, self.storages)
            self.numels = [each.numel for each in self.storages]
            self.nbytes = sum(each.nbytes for each in self.storages)
            self.alignment = _alignment()
        if path and path.lower().endswith(".safetensors"):
            what = "torch from 2.13 on takes it for safetensors by its name, and does not load it. Name it .pt."
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
        whole = self.atomic and is_atomic(self.path)
        try:
            with (AtomicFile if whole else InPlaceFile)(self.path) as file:
                self._write_into(file)
        except CannotWriteError as error:
            if whole and error.errno in _NO_NEW_FILES and os.access(self.path, os.W_OK):
                error.fix = "The file cannot be replaced there; atomic=False writes into the file itself."
            raise

    def _write_into(self, sink: Sink) -> None:
        fetchers = fetchers_for(self.storages)
        with ExitStack() as last:
            if self.copies is None:  # the program is waiting, and creates no garbage meanwhile
                last.enter_context(gc_paused(user_objects=True))
            for fetcher in fetchers.values():
                last.callback(fetcher.finish)
            records = records_of(self.storages, fetchers) if self.copies is None else self.copies
            if self.legacy_protocol is not None:
                report_progress = progress_counter(self.progress, self.nbytes, "saving")
                write_legacy(sink, self.data, self.legacy_protocol, self.numels, records, report_progress)
                return
            opening = opening_records(self.data, self.alignment, sys.byteorder)
            if not self.byteorder:
                opening = [record for record in opening if record.name != b"byteorder"]
            total = self.nbytes + sum(record.size for record in opening)
            write_checkpoint(
                sink,
                opening,
                records,
                self.nbytes,
                origin=Record(_ORIGIN, len(self.origin), self.origin) if self.origin else None,
                alignment=self.alignment,
                report_progress=progress_counter(self.progress, total, "saving"),
            )


def _alignment() -> int:
    """The alignment of records that torch is configured to."""
    try:
        from torch.utils.serialization import config

        configured = config.save.storage_alignment
    except (ImportError, AttributeError):  # before torch 2.7
        return ALIGNMENT
    if configured not in range(1, _MAX_ALIGNMENT + 1):
        what = f"torch is set to a storage_alignment of {configured!r:.80}: it is a number from 1 to {_MAX_ALIGNMENT}"
        raise SaveError(what, fix=f"torch.utils.serialization.config.save.storage_alignment = {ALIGNMENT}")
    return int(configured)


# -- where the file comes from

_ORIGIN = b".transload/origin.json"
_MAX_ENTRIES = 64 << 10  # bytes of JSON that the caller may add: every inspection reads them
_MAX_DEPTH = 8
_MAX_BITS = 64  # of an integer: other JSON readers do not support longer ones
_FIX = "It takes names with plain values: texts, numbers, True, False, None, and lists and dicts of these."


def _origin_of(origin: Any, storages: list[Stored]) -> bytes:
    """The record; ``origin`` is ``True``, or entries of the caller."""
    import torch

    facts: dict[str, Any] = {"schema": 1, "transload": __version__}
    facts |= {"torch": str(torch.__version__), "python": platform.python_version()}
    facts |= {name: str(version) for name in ("cuda", "hip") if (version := getattr(torch.version, name, None))}
    facts |= {"system": platform.system().lower(), "machine": platform.machine().lower(), **_gpus()}
    facts["time"] = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    # The devices of the storages in order, run-length encoded: a device, and the number of storages in a row on it.
    cpu = torch.device("cpu")
    rows = groupby(each.storage.device for each in storages)
    facts["storages"] = [["cpu" if device == cpu else str(device), sum(1 for _ in row)] for device, row in rows]
    if origin is not True:
        if not isinstance(origin, Mapping):
            raise UsageError(f"origin is a {type(origin).__name__}; it is True, False or a dict", fix=_FIX)
        facts["entries"] = _plain(origin, "origin", 0)
        nbytes = len(json.dumps(facts["entries"], ensure_ascii=False).encode("utf-8", "surrogatepass"))
        if nbytes > _MAX_ENTRIES:
            what = f"the entries of origin take {nbytes} bytes; {_MAX_ENTRIES} is the limit"
            raise UsageError(what, fix="Leave some out.")
    return json.dumps(facts, ensure_ascii=False, allow_nan=False).encode()


def _gpus() -> dict[str, Any]:
    """The GPUs and their driver, if torch already uses them: saving CPU tensors must not initialise CUDA."""
    import torch

    try:
        if not torch.cuda.is_initialized():
            return {}
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        gpus = [
            {"name": str(each.name), "capability": f"{each.major}.{each.minor}", "memory": int(each.total_memory)}
            for each in devices
        ]
    except Exception:  # noqa: BLE001 - a device that fails must not stop a save
        return {}
    with suppress(OSError, ValueError), open("/sys/module/nvidia/version", encoding="ascii") as file:  # noqa: PTH123
        if driver := file.read(64).strip():
            return {"gpus": gpus, "driver": driver}
    return {"gpus": gpus}


def _plain(value: Any, place: str, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise UsageError(f"{place} is nested too deep: {_MAX_DEPTH} levels is the limit", fix=_FIX)
    if isinstance(value, Mapping):
        wrong = next((key for key in value if not isinstance(key, str)), None)
        if wrong is not None:
            raise UsageError(f"{place} has the name {wrong!r:.80}, which is not text", fix=_FIX)
        return {_text(key, place): _plain(each, f"{place}[{key!r:.80}]", depth + 1) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each, f"{place}[{index}]", depth + 1) for index, each in enumerate(value)]
    if isinstance(value, str):
        return _text(value, place)
    if type(value) is int and value.bit_length() > _MAX_BITS:
        raise UsageError(f"{place} is a number of more than {_MAX_BITS} bits", fix="Write it as text.")
    if value is None or type(value) in (bool, int) or (type(value) is float and math.isfinite(value)):
        return value
    raise UsageError(f"{place} is {value!r:.80}, a {type(value).__name__}, which JSON does not hold", fix=_FIX)


def _text(value: str, place: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{place} has text that is not Unicode", fix=_FIX) from error
    return str(value)
