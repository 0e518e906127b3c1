"""What is left of a damaged checkpoint, as a new file: flipped bits undone, lost tensors left out or filled.

The source is never written. torch is not needed, nothing in the file is run, and no name in it becomes a path.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

from transload.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from transload.io.sources import SourceLike
    from transload.rescuing.filling import Fill
    from transload.rescuing.result import Rescue

__all__ = ["rescue"]

_REPORT = b'{\n "schema": 1,\n "path":'
"""How every report begins."""


def rescue(  # noqa: PLR0913 - what a user may ask for
    src: SourceLike,
    dst: str | os.PathLike[str] | None = None,
    *,
    fill: Fill | None = None,
    dry_run: bool = False,
    member: str = "",
    overwrite: bool = False,
    progress: Callable[[int, int], object] | bool | None = None,
) -> Rescue:
    """Save what is whole, or can be mended with proof, of a damaged checkpoint into a new file.

    ``src`` is a file, bytes, a file object, the directory an archive was unpacked into, or a checkpoint of several
    files (shards by their directory or index, ``torch.distributed.checkpoint``), which becomes one. Lost tensors are
    left out, or filled if ``fill`` is ``zeros`` or ``nan``. ``dry_run`` only plans; ``dst`` may then be omitted.
    ``member`` names one of several checkpoints in an archive. Beside ``dst`` a report is written, ``dst`` with
    ``.rescue.json``, that says what is original, mended or lost. If nothing can be saved, nothing is written. Raises
    ``RescueError`` if the file is no checkpoint at all.

    >>> transload.rescue("broken.pt", "mended.pt").exit_code  # doctest: +SKIP
    0
    """
    from transload.rescuing.saving import saved, write_report

    target = "" if dst is None else os.fspath(dst)
    if fill not in (None, "zeros", "nan"):
        raise UsageError(f"fill is zeros or nan, not {fill!r}")
    if not target and not dry_run:
        raise UsageError("no file is named to write to", fix="Name one, or ask for a plan: dry_run=True.")
    if target:
        _refuse(src, target, overwrite=overwrite)
    with ExitStack() as stack:
        several = _several_files(src)
        if several:
            from transload.rescuing.sets import saved_set

            _refuse_options(several, fill, member)
            made = saved_set(several, target, stack, dry_run=dry_run, overwrite=overwrite, progress=progress)
        else:
            made = saved(src, target, stack, fill=fill, dry_run=dry_run, member=member, progress=progress)
        if made.done:
            write_report(made)
        return made


def _several_files(src: SourceLike) -> str:
    """The path of a checkpoint of several files; empty if it is none."""
    path = os.fspath(src) if isinstance(src, str | os.PathLike) else ""
    if not (path.endswith(".index.json") or os.path.isdir(path)):  # noqa: PTH112 - texts throughout, as given
        return ""
    from transload.judge import inspect
    from transload.judge.problems import SETS

    return path if inspect(path).format in SETS else ""


def _refuse_options(path: str, fill: Fill | None, member: str) -> None:
    if fill or member:
        what = "several files become a new one, without what is lost; that is not filled, and no archive is opened"
        raise UsageError(what, where=path, fix="Leave --fill and --member out.")


def _refuse(src: SourceLike, target: str, *, overwrite: bool) -> None:
    """The source is never written, and nothing else is written over unasked."""
    if os.path.isdir(target):  # noqa: PTH112 - texts throughout, as given
        raise UsageError("it is a directory", where=target, fix="Add the name of a file.")
    report = f"{target}.rescue.json"
    for path in (target, report):
        if isinstance(src, str | os.PathLike) and os.path.lexists(path) and _is_of(os.fspath(src), path):
            raise UsageError("the source of a rescue is never written", where=path, fix="Name another file.")
    for path in (target, *(() if _is_report(report) else (report,))):
        if os.path.lexists(path) and not overwrite:
            raise UsageError("it exists already", where=path, fix="Name another file, or pass --force.")


def _is_of(src: str, path: str) -> bool:
    """Whether a path is a source, or a file in the directory that is one."""
    whole, part = os.path.realpath(src), os.path.realpath(path)
    return part == whole or part.startswith(whole + os.sep)


def _is_report(path: str) -> bool:
    """Whether a rescue has written a file: its next one may write it anew."""
    if not os.path.isfile(path):  # noqa: PTH113 - as above; a pipe would be waited for
        return False
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - pathlib costs ten milliseconds
            return file.read(len(_REPORT)) == _REPORT
    except OSError:
        return False
