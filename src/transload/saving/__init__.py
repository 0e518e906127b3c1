"""``transload.save``: ``torch.save``, with a file that loads anywhere, and is there whole or not at all."""

from __future__ import annotations

import os
from contextlib import ExitStack
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from transload.loading.errors import NoTorchError
from transload.loading.progress import telling
from transload.read import no_collecting
from transload.saving.arguments import (
    Progressing,
    alignment,
    check_device,
    check_protocol,
    check_skip,
    path_of,
)
from transload.saving.errors import SaveWarning
from transload.saving.origin import ORIGIN, Origin, origin_of

if TYPE_CHECKING:
    from concurrent.futures import Future

    from transload.saving.desk import Stored
    from transload.saving.snapshot import Snapshot

__all__ = ["save", "save_async"]


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
    from transload.saving.background import settle

    path = path_of(f)
    settle(path)
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
    from transload.saving.background import background
    from transload.saving.snapshot import snapshot_of

    path = path_of(f)
    place = None if path is None else os.path.abspath(path)  # noqa: PTH100 - a text; the directory may change meanwhile
    background.settle(None)
    background.make_room()
    wish = Wish(pickle_module, pickle_protocol, device, origin, compact, atomic, progress)
    prepared = prepare(obj, wish)
    _warn(prepared, path)
    snapshot = snapshot_of(prepared.storages)
    prepared = prepared._replace(storages=[], snapshot=snapshot)
    return background.submit(place, lambda: write(prepared, f, place, wish))


def _warn(prepared: Prepared, path: str | None) -> None:
    import warnings

    if prepared.warning:
        warnings.warn(f"{path}: {prepared.warning}" if path else prepared.warning, SaveWarning, stacklevel=3)


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
    try:
        import torch  # noqa: F401 - from here on it is needed
    except ImportError as error:
        raise NoTorchError(f"torch cannot be imported: {error}", fix="`transload doctor` says why.") from error
    from transload.saving.bloat import bloat_words
    from transload.saving.pickled import pickled

    check_skip()
    with no_collecting():
        data, storages = pickled(obj, wish.pickle_module, protocol, portable=portable, compact=wish.compact)
        warning = "" if wish.compact else bloat_words(obj, storages)
        record = origin_of(wish.origin, storages)
        return Prepared(data, storages, record, alignment(), warning, sum(each.nbytes for each in storages))


def write(prepared: Prepared, f: Any, path: str | None, wish: Wish) -> None:
    """Write what was prepared."""
    from transload.writing.atomic import Beside, Straight, is_atomic
    from transload.writing.sinks import FileObject, SystemFile

    if path is None:
        _write_archive(prepared, FileObject(f), wish)
        if callable(getattr(f, "flush", None)):
            f.flush()
        return
    whole = wish.atomic and is_atomic(path)
    with (Beside if whole else Straight)(path) as file:
        _write_archive(prepared, SystemFile(file.descriptor, push=whole), wish)


def _write_archive(prepared: Prepared, sink: Any, wish: Wish) -> None:
    from transload.saving.archive import ROOT, closing_records, opening_records, threads_for
    from transload.saving.contents import records_of
    from transload.saving.cuda import rings_for
    from transload.writing.archive import write_archive

    rings = rings_for(prepared.storages)
    with ExitStack() as last:
        if prepared.snapshot is None:  # the program is waiting: nothing else makes garbage meanwhile
            last.enter_context(no_collecting())
        for ring in rings.values():
            last.callback(ring.fetcher.finish)
        opening = opening_records(prepared.data, prepared.alignment)
        storages = prepared.snapshot.records() if prepared.snapshot else records_of(prepared.storages, rings)
        write_archive(
            sink,
            ROOT,
            chain(opening, storages),
            lambda checksums: closing_records(checksums, (ORIGIN, prepared.origin)),
            threads=threads_for(prepared.total),
            alignment=prepared.alignment,
            tell=telling(wish.progress, prepared.total, "saving"),
        )
