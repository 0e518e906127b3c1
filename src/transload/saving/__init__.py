"""``transload.save``: ``torch.save``, with a file that loads anywhere, and is there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from errno import EACCES, EBUSY, EPERM, EROFS
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from transload.errors import CannotWriteError, NoTorchError, SaveError, SaveWarning, UsageError
from transload.formats import no_collecting
from transload.formats.zip import ALIGNMENT
from transload.formats.zip_writer import Sink, write_archive
from transload.io.atomic import AtomicFile, DirectFile, FileObject, SystemFile, is_atomic
from transload.io.progress import telling
from transload.saving.origin import ORIGIN, Origin, origin_of
from transload.saving.pickled import Stored, pickled
from transload.saving.storages import (
    ROOT,
    Snapshot,
    bloat_words,
    closing_records,
    opening_records,
    records_of,
    rings_for,
    threads_for,
)

if TYPE_CHECKING:
    from concurrent.futures import Future

    from transload.saving.origin import Origin

__all__ = [
    "Prepared",
    "Progressing",
    "Wish",
    "alignment",
    "check_device",
    "check_module",
    "check_progress",
    "check_protocol",
    "check_skip",
    "path_of",
    "prepare",
    "save",
    "save_async",
    "write",
]


_MAX_ALIGNMENT = 1 << 16  # the padding that leads there has a length of 16 bits

Progressing = bool | Callable[[int, int], object] | None


def path_of(f: Any) -> str | None:
    """The path a target names; ``None`` for a file object."""
    if isinstance(f, (str, bytes, os.PathLike)):
        path = os.fsdecode(f)
        if "\0" in path:
            raise UsageError(f"no file can have the name {path!r:.80}", fix="Leave out the NUL.")
        return path
    if not callable(getattr(f, "write", None)):
        raise UsageError(f"cannot save to a {type(f).__name__}", fix="Give a path, or an object with write().")
    return None


def check_device(device: str) -> bool:
    """Whether every storage is to be tagged ``cpu``."""
    if device not in ("cpu", "keep"):
        what = f"device={device!r}: a file is saved with tags of the CPU ('cpu') or of the devices in use ('keep')"
        raise UsageError(what, fix="`transload retag` writes other tags into a file.")
    return device == "cpu"


def check_protocol(pickle_protocol: int | None) -> int:
    """A protocol with binary persistent ids, which storages need; ``None`` and -1 are those that ``pickle`` means."""
    import pickle

    if pickle_protocol is None or pickle_protocol == -1:
        return pickle.DEFAULT_PROTOCOL if pickle_protocol is None else pickle.HIGHEST_PROTOCOL
    if pickle_protocol not in range(2, pickle.HIGHEST_PROTOCOL + 1):
        what = f"pickle_protocol={pickle_protocol!r}: it is a number from 2 to {pickle.HIGHEST_PROTOCOL}"
        raise UsageError(what, fix="2 is what torch.load reads with weights_only=True.")
    return int(pickle_protocol)


def check_module(pickle_module: Any) -> None:
    """Raise for what cannot pickle."""
    if pickle_module is not None and not callable(getattr(pickle_module, "Pickler", None)):
        raise UsageError(f"pickle_module={pickle_module!r:.80} has no Pickler", fix="Give a module as pickle is one.")


def check_progress(progress: Progressing) -> None:
    """Raise for what cannot be told anything."""
    if progress is not None and not isinstance(progress, bool) and not callable(progress):
        raise UsageError(f"progress={progress!r:.80}: it is True, or a function of two numbers")


def check_skip() -> None:
    """Raise where torch was told to write files without contents."""
    import torch

    state = getattr(torch.serialization, "_serialization_tls", None)
    if getattr(state, "skip_data", False):
        raise SaveError(
            "torch.serialization.skip_data() is in force", fix="Use torch.save for a file without contents."
        )


def alignment() -> int:
    """Where records begin: at multiples of what torch is set to."""
    try:
        from torch.utils.serialization import config

        found = config.save.storage_alignment
    except (ImportError, AttributeError):  # before torch 2.7
        return ALIGNMENT
    if found not in range(1, _MAX_ALIGNMENT + 1):
        what = f"torch is set to a storage_alignment of {found!r:.80}: it is a number from 1 to {_MAX_ALIGNMENT}"
        raise SaveError(what, fix=f"torch.utils.serialization.config.save.storage_alignment = {ALIGNMENT}")
    return int(found)


_NOT_BESIDE = (EACCES, EPERM, EBUSY, EROFS)  # what a directory may have against a new file


class Wish(NamedTuple):
    """The arguments of a save."""

    pickle_module: Any
    pickle_protocol: int
    device: str
    origin: Origin
    compact: bool
    atomic: bool
    progress: Progressing


class Prepared(NamedTuple):
    """An object taken apart: what is written, and what there is to say about it."""

    data: bytes
    storages: list[Stored]
    origin: bytes
    alignment: int
    warning: str
    total: int
    """Bytes of all storages."""
    snapshot: Snapshot | None = None
    """Copies of the storages, to be written instead."""


def prepare(obj: Any, wish: Wish) -> Prepared:
    """Take an object apart. Nothing is written yet."""
    portable, protocol = check_device(wish.device), check_protocol(wish.pickle_protocol)
    check_module(wish.pickle_module)
    check_progress(wish.progress)
    try:
        import torch  # noqa: F401 - from here on it is needed
    except ImportError as error:
        raise NoTorchError(f"torch cannot be imported: {error}", fix="`transload doctor` says why.") from error
    check_skip()
    with no_collecting(strangers=True):
        data, storages = pickled(obj, wish.pickle_module, protocol, portable=portable, compact=wish.compact)
        warning = "" if wish.compact else bloat_words(obj, storages)
        record = origin_of(wish.origin, storages)
        return Prepared(data, storages, record, alignment(), warning, sum(each.nbytes for each in storages))


def write(prepared: Prepared, f: Any, path: str | None, wish: Wish) -> None:
    """Write what was prepared, to a path or to the file object ``f``."""
    if path is None:
        _write_archive(prepared, FileObject(f), wish)
        if callable(getattr(f, "flush", None)):
            f.flush()
        return
    whole = wish.atomic and is_atomic(path)
    try:
        with (AtomicFile if whole else DirectFile)(path) as file:
            _write_archive(prepared, SystemFile(file.descriptor, push=whole), wish)
    except CannotWriteError as error:
        if whole and error.errno in _NOT_BESIDE and os.access(path, os.W_OK):
            error.fix = "Nothing can be put in its place there; atomic=False writes into the file itself."
        raise


def _write_archive(prepared: Prepared, sink: Sink, wish: Wish) -> None:
    rings = rings_for(prepared.storages)
    with ExitStack() as last:
        if prepared.snapshot is None:  # the program is waiting: nothing else makes garbage meanwhile
            last.enter_context(no_collecting(strangers=True))
        for ring in rings.values():
            last.callback(ring.fetcher.finish)
        opening = list(opening_records(prepared.data, prepared.alignment))
        storages = prepared.snapshot.records() if prepared.snapshot else records_of(prepared.storages, rings)
        total = prepared.total + sum(record.size for record in opening)
        write_archive(
            sink,
            ROOT,
            chain(opening, storages),
            lambda checksums: closing_records(checksums, (ORIGIN, prepared.origin)),
            threads=threads_for(prepared.total),
            alignment=prepared.alignment,
            tell=telling(wish.progress, total, "saving"),
        )


def save(  # noqa: PLR0913 - torch.save's signature, and what it lacks
    obj: Any,
    f: Any,
    pickle_module: Any = None,
    pickle_protocol: int = 2,
    *,
    device: str = "cpu",
    origin: Origin = True,
    compact: bool = False,
    atomic: bool = True,
    progress: Progressing = None,
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

    path = path_of(f)
    background.settle(path or f)
    wish = Wish(pickle_module, pickle_protocol, device, origin, compact, atomic, progress)
    prepared = prepare(obj, wish)
    _warn(prepared, path)
    write(prepared, f, path, wish)


def save_async(  # noqa: PLR0913 - as above
    obj: Any,
    f: Any,
    pickle_module: Any = None,
    pickle_protocol: int = 2,
    *,
    device: str = "cpu",
    origin: Origin = True,
    compact: bool = False,
    atomic: bool = True,
    progress: Progressing = None,
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

    path = path_of(f)
    place = None if path is None else _absolute(path)
    background.raise_unnoticed()
    background.make_room()
    wish = Wish(pickle_module, pickle_protocol, device, origin, compact, atomic, progress)
    prepared = prepare(obj, wish)
    _warn(prepared, path)
    snapshot = snapshot_of(prepared.storages)
    prepared = prepared._replace(storages=[], snapshot=snapshot)
    fastest_crc32()  # it imports a package, which is not for a thread: see saving/job.py
    return background.submit(place or f, partial(write, prepared, f, place, wish))


def _absolute(path: str) -> str:
    """A path as it is meant now: the directory may change meanwhile. One that ends with a slash does so still."""
    return os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH118 - a text


def _warn(prepared: Prepared, path: str | None) -> None:
    import warnings

    if path and path.lower().endswith(".safetensors"):
        what = f"{path}: torch from 2.13 on takes it for safetensors by its name, and does not load it. Name it .pt."
        warnings.warn(what, SaveWarning, stacklevel=3)
    if prepared.warning:
        warnings.warn(f"{path}: {prepared.warning}" if path else prepared.warning, SaveWarning, stacklevel=3)
