"""Save what is left of a damaged checkpoint into a new file: bits repaired, lost tensors left out or filled.

The source is never written. torch is not needed, nothing in the file is run, and no name in it becomes a path.

``single`` rescues one file: ``recover`` removes the layers around it and turns it into a file that the reader can read,
with the help of ``archive`` if it is an archive, and ``compose`` lays out the new file. ``several`` rescues checkpoints
of several files. ``report`` is the result, and what is said about it.
"""

from __future__ import annotations

import json
import os

from transload.errors import UsageError
from transload.frozen import replace
from transload.io.atomic import AtomicFile, refuse_missing_directory, target_path
from transload.io.paths import is_set
from transload.io.sources import Progress, SourceLike
from transload.opening import inspect
from transload.render.json import strict
from transload.rescuing.report import Fill, Rescue, report, report_path
from transload.rescuing.several import rescue_files
from transload.rescuing.single import rescue_file
from transload.writing.output import begins_with, refuse_existing, refuse_source

__all__ = ["Rescue", "report", "rescue"]

_REPORT = b'{\n "schema": 1,\n "path":'  # how every report begins


def rescue(
    src: SourceLike,
    dst: str | os.PathLike[str] | None = None,
    *,
    fill: Fill | None = None,
    dry_run: bool = False,
    member: str = "",
    overwrite: bool = False,
    progress: Progress = None,
) -> Rescue:
    """Save the parts of a damaged checkpoint that are whole, or provably repairable, into a new file.

    ``src`` is a file, bytes, a file object, the directory an archive was unzipped into, or a checkpoint of several
    files (shards by their directory or index, ``torch.distributed.checkpoint``), which becomes one file. Lost tensors
    are left out, or filled if ``fill`` is ``zeros`` or ``nan``. With ``dry_run`` nothing is written, and ``dst`` may be
    omitted. ``member`` names one of several checkpoints in an archive. A report beside ``dst``, named ``dst`` with
    ``.rescue.json`` appended, says which tensors are whole, repaired or lost. If nothing can be saved, nothing is
    written. Raises ``RescueError`` if the file is not a checkpoint at all.

    >>> transload.rescue("broken.pt", "repaired.pt").exit_code  # doctest: +SKIP
    0
    """
    path = os.fspath(src) if isinstance(src, str | os.PathLike) else ""
    target = "" if dst is None else os.fspath(dst)
    if fill not in (None, "zeros", "nan"):
        raise UsageError(f"fill must be 'zeros' or 'nan', not {fill!r}")
    if not target and not dry_run:
        raise UsageError("no output file is named", fix="Name one, or pass dry_run=True to see the plan.")
    if target:
        target = target_path(target)
        refuse_missing_directory(target)
    if os.path.isdir(target):
        raise UsageError("this is a directory", where=target, fix="Add the name of a file.")
    for name in (target, report_path(target)) if target else ():
        refuse_source(path, name)
        if name == target or not begins_with(name, _REPORT):  # only the report of another rescue is replaced unasked
            refuse_existing(name, overwrite=overwrite)
    if is_set(path) and inspect(path).traits.several:
        if member:
            raise UsageError("it is one checkpoint of several files", where=path, fix="Omit member.")
        result = rescue_files(path, target, fill, dry_run=dry_run, overwrite=overwrite, progress=progress)
    else:
        result = rescue_file(src, path, target, member, fill, dry_run=dry_run, progress=progress)
    count = sum(repair.certainty != "proven" for repair in result.repairs)
    if count:
        are = "1 repaired byte is" if count == 1 else f"{count:,} repaired bytes are"
        doubt = f"{are} not proven: other damage can look the same, so compare with another copy if there is one"
        result = replace(result, warnings=(*result.warnings, doubt))
    if result.done:
        text = json.dumps(strict(result.to_dict()), indent=1, ensure_ascii=True)
        with AtomicFile(result.report) as file:
            file.write([text.encode() + b"\n"])
    return result
