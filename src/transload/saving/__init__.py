"""``transload.save`` and ``transload.save_async``: ``torch.save``, with a file that loads anywhere, written atomically.

``_prepare`` checks the options, pickles the object (``pickling``) and collects the storages it refers to. ``_write``
writes the archive (``storages``) to a file or a file object. ``save_async`` copies the storages in between, and leaves
the writing to a thread (``background``). ``origin`` makes the record of where the file comes from.
"""

from __future__ import annotations

import os
import pickle
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from errno import EACCES, EBUSY, EPERM, EROFS
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from transload.errors import CannotWriteError, NoTorchError, SaveError, SaveWarning, UsageError
from transload.formats import no_collecting
from transload.formats.zip import ALIGNMENT
from transload.formats.zip_writer import Record, Sink, opening_records, write_checkpoint
from transload.io.atomic import AtomicFile, DirectFile, FileObject, SystemFile, is_atomic
from transload.io.progress import telling
from transload.saving.origin import ORIGIN, Origin, origin_of
from transload.saving.pickling import Stored, pickled
from transload.saving.storages import Snapshot, bloat_words, records_of, rings_for

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["save", "save_async"]

_MAX_ALIGNMENT = 1 << 16  # the length of the padding is a number of 16 bits
_NO_NEW_FILES = (EACCES, EPERM, EBUSY, EROFS)  # reasons of a directory to refuse a new file

Progress = bool | Callable[[int, int], object] | None


class _Options(NamedTuple):
    """The arguments of a save."""

    pickle_module: Any
    pickle_protocol: int | None
    device: str
    origin: Origin
    compact: bool
    atomic: bool
    progress: Progress


class _Prepared(NamedTuple):
    """What is written for an object, and the warning it deserves. ``total`` is the bytes of all storages."""

    data: bytes
    storages: list[Stored]
    origin: bytes
    alignment: int
    warning: str
    total: int
    snapshot: Snapshot | None = None
    """Copies of the storages, to be written instead."""


def save(
    obj: Any,
    f: Any,
    pickle_module: Any = None,
    pickle_protocol: int = 2,
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

    A file is written beside its place, flushed to the disk and renamed: whatever happens, there is the old file or the
    new one. ``atomic=False`` writes straight into it, which objects with ``write`` are anyway.

    ``compact`` writes only bytes that a tensor uses, where torch writes the whole storage behind a view. ``origin``
    records in the file what it was saved with and on; a dict of plain values is recorded beside it. With
    ``origin=False`` equal objects give equal files. ``progress`` is ``True`` for a line on the terminal, or a function
    that gets the bytes done and the bytes in all.

    >>> import transload
    >>> transload.save({"model": model.state_dict()}, "model.pt")  # doctest: +SKIP
    """
    from transload.saving.background import background

    path = _path(f)
    background.settle(path or f)
    options = _Options(pickle_module, pickle_protocol, device, origin, compact, atomic, progress)
    prepared = _prepare(obj, options)
    _warn(prepared, path)
    _write(prepared, f, path, options)


def save_async(
    obj: Any,
    f: Any,
    pickle_module: Any = None,
    pickle_protocol: int = 2,
    *,
    device: str = "cpu",
    origin: Origin = True,
    compact: bool = False,
    atomic: bool = True,
    progress: Progress = None,
) -> Future[None]:
    """Save in the background: the object is copied now and written while the program goes on.

    What changes afterwards does not reach the file. The future's ``result()`` waits until the file is in place, and
    raises what went wrong. An error nobody has asked for is raised by the next save, or told when the program ends,
    which waits for its saves. Saves are written one after the other, in the order of the calls; when two are under
    way, the next call waits.

    >>> future = transload.save_async(checkpoint, "step-1000.pt")  # doctest: +SKIP
    """
    from transload.io.checksums import fastest_crc32
    from transload.saving.background import background
    from transload.saving.storages import snapshot_of

    path = _path(f)
    # The working directory may change meanwhile. Path.absolute() would drop the slash at the end of a directory's name.
    place = None if path is None else os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH118 - see above
    background.raise_unnoticed()
    background.make_room()
    options = _Options(pickle_module, pickle_protocol, device, origin, compact, atomic, progress)
    prepared = _prepare(obj, options)
    _warn(prepared, path)
    prepared = prepared._replace(storages=[], snapshot=snapshot_of(prepared.storages))
    fastest_crc32()  # it imports a package, which must not happen in a thread while the program ends
    return background.submit(place or f, partial(_write, prepared, f, place, options))


def _path(f: Any) -> str | None:
    """The path of a target; ``None`` for a file object."""
    if isinstance(f, (str, bytes, os.PathLike)):
        path = os.fsdecode(f)
        if "\0" in path:
            raise UsageError(f"no file can have the name {path!r:.80}", fix="Leave out the NUL.")
        return path
    if not callable(getattr(f, "write", None)):
        raise UsageError(f"cannot save to a {type(f).__name__}", fix="Give a path, or an object with write().")
    return None


def _prepare(obj: Any, options: _Options) -> _Prepared:
    """Check the options and pickle the object. Nothing is written yet."""
    device, protocol, progress = options.device, options.pickle_protocol, options.progress
    if device not in ("cpu", "keep"):
        what = f"device={device!r}: a file is saved with tags of the CPU ('cpu') or of the devices in use ('keep')"
        raise UsageError(what, fix="`transload retag` writes other tags into a file.")
    if protocol is None or protocol == -1:  # the two that pickle has names for
        protocol = pickle.DEFAULT_PROTOCOL if protocol is None else pickle.HIGHEST_PROTOCOL
    elif protocol not in range(2, pickle.HIGHEST_PROTOCOL + 1):  # protocol 2 is the first with binary persistent ids
        what = f"pickle_protocol={protocol!r}: it is a number from 2 to {pickle.HIGHEST_PROTOCOL}"
        raise UsageError(what, fix="2 is what torch.load reads with weights_only=True.")
    module = options.pickle_module
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
    with no_collecting(strangers=True):
        data, storages = pickled(obj, module, int(protocol), portable=device == "cpu", compact=options.compact)
        warning = "" if options.compact else bloat_words(obj, storages)
        record = origin_of(options.origin, storages)
        return _Prepared(data, storages, record, _alignment(), warning, sum(each.nbytes for each in storages))


def _alignment() -> int:
    """The multiple at which records begin, as torch is configured."""
    try:
        from torch.utils.serialization import config

        configured = config.save.storage_alignment
    except (ImportError, AttributeError):  # before torch 2.7
        return ALIGNMENT
    if configured not in range(1, _MAX_ALIGNMENT + 1):
        what = f"torch is set to a storage_alignment of {configured!r:.80}: it is a number from 1 to {_MAX_ALIGNMENT}"
        raise SaveError(what, fix=f"torch.utils.serialization.config.save.storage_alignment = {ALIGNMENT}")
    return int(configured)


def _warn(prepared: _Prepared, path: str | None) -> None:
    if path and path.lower().endswith(".safetensors"):
        what = f"{path}: torch from 2.13 on takes it for safetensors by its name, and does not load it. Name it .pt."
        warnings.warn(what, SaveWarning, stacklevel=3)
    if prepared.warning:
        warnings.warn(f"{path}: {prepared.warning}" if path else prepared.warning, SaveWarning, stacklevel=3)


def _write(prepared: _Prepared, f: Any, path: str | None, options: _Options) -> None:
    """Write what was prepared, to a path or to the file object ``f``."""
    if path is None:
        _write_archive(prepared, FileObject(f), options)
        if callable(getattr(f, "flush", None)):
            f.flush()
        return
    whole = options.atomic and is_atomic(path)
    try:
        with (AtomicFile if whole else DirectFile)(path) as file:
            _write_archive(prepared, SystemFile(file.descriptor, push=whole), options)
    except CannotWriteError as error:
        if whole and error.errno in _NO_NEW_FILES and os.access(path, os.W_OK):
            error.fix = "The file cannot be replaced there; atomic=False writes into the file itself."
        raise


def _write_archive(prepared: _Prepared, sink: Sink, options: _Options) -> None:
    rings = rings_for(prepared.storages)
    with ExitStack() as last:
        if prepared.snapshot is None:  # the program is waiting: nothing else makes garbage meanwhile
            last.enter_context(no_collecting(strangers=True))
        for ring in rings.values():
            last.callback(ring.fetcher.finish)
        opening = opening_records(prepared.data, prepared.alignment, sys.byteorder)
        write_checkpoint(
            sink,
            opening,
            prepared.snapshot.records() if prepared.snapshot else records_of(prepared.storages, rings),
            prepared.total,
            origin=Record(ORIGIN, len(prepared.origin), prepared.origin) if prepared.origin else None,
            alignment=prepared.alignment,
            tell=telling(options.progress, prepared.total + sum(record.size for record in opening), "saving"),
        )
