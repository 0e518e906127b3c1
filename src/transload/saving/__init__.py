"""``transload.save``: ``torch.save``, with a file that loads anywhere, and is there whole or not at all."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from transload.saving.arguments import path_of
from transload.saving.errors import SaveWarning

if TYPE_CHECKING:
    from concurrent.futures import Future

    from transload.saving.arguments import Progressing
    from transload.saving.job import Prepared
    from transload.saving.origin import Origin

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
    from transload.saving.background import background
    from transload.saving.job import Wish, prepare, write

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
    from transload.saving.job import Wish, prepare, write
    from transload.saving.snapshot import snapshot_of

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
