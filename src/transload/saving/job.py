"""A save in its two halves: an object taken apart, and a file written of it, which may be later and in another thread.

Everything is imported up here: a program that forks while a thread imports has a child that waits for it for ever.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from errno import EACCES, EBUSY, EPERM, EROFS
from itertools import chain
from typing import Any, NamedTuple

from transload.errors import CannotWriteError
from transload.formats import no_collecting
from transload.formats.zip_writer import Sink, write_archive
from transload.io.atomic import Beside, FileObject, Straight, SystemFile, is_atomic
from transload.loading.errors import NoTorchError
from transload.loading.progress import telling
from transload.saving.archive import ROOT, closing_records, opening_records, threads_for
from transload.saving.arguments import (
    Progressing,
    alignment,
    check_device,
    check_module,
    check_progress,
    check_protocol,
    check_skip,
)
from transload.saving.bloat import bloat_words
from transload.saving.contents import records_of
from transload.saving.cuda import rings_for
from transload.saving.desk import Stored
from transload.saving.origin import ORIGIN, Origin, origin_of
from transload.saving.pickled import pickled
from transload.saving.snapshot import Snapshot

__all__ = ["Prepared", "Wish", "prepare", "write"]

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
        with (Beside if whole else Straight)(path) as file:
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
