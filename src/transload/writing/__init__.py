"""Write the tensors of an open checkpoint in another format, and read them back to be sure; torch is not needed.

``write_content`` does it all: a ``Plan`` decides what is written, with ``to_torch`` for a torch zip; ``writers`` write
it into a ``Bundle`` (``output``); ``transfer`` moves and compares the bytes; ``objects`` keeps everything that is not a
tensor, and ``arrays`` finds numpy arrays.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from transload.errors import UsageError
from transload.io.sources import SourceLike
from transload.tensors.content import Content
from transload.writing.objects import Leftovers
from transload.writing.output import Bundle, begins_with, file_identity, refuse_existing
from transload.writing.plan import Options, Plan, notes
from transload.writing.result import Conversion
from transload.writing.transfer import Job, check_source
from transload.writing.writers import WRITERS

_LEFTOVERS_START = b'{\n "from": '
"""How every file of leftovers begins; no other file is replaced."""


def write_content(
    content: Content,
    dst: str,
    format_: str,
    options: Options,
    *,
    src: SourceLike | None = None,
    verify: bool,
    overwrite: bool,
    progress: bool | Callable[[int, int], object] | None,
) -> Conversion:
    """Write an open checkpoint, damaged or not; ``src`` is what it was opened from, if not its path.

    If this raises, nothing is left behind.
    """
    from transload.formats import gc_paused
    from transload.io.pool import progress_counter

    start = time.monotonic()
    leftovers_path = f"{dst.rstrip('/' + os.sep)}.leftovers.json"
    refuse_existing(leftovers_path, overwrite=overwrite)
    if os.path.lexists(leftovers_path) and not begins_with(leftovers_path, _LEFTOVERS_START):
        what = "the existing file was not written by a conversion"
        raise UsageError(what, where=leftovers_path, fix="Choose another name.")
    if format_ != "raw":
        refuse_existing(dst, overwrite=overwrite)
    with gc_paused():
        plan = Plan(content, format_, options)
    checkpoint = content.checkpoint
    total = sum(entry.nbytes for entry in (plan.storages if format_ == "torch" else plan.entries))
    report_progress = progress_counter(progress, 2 * total if verify else total, "converting")
    sources = _source_files(checkpoint.path if src is None else src, content)
    with Bundle(overwrite=overwrite, sources=sources) as bundle:
        job = Job(plan.content, dst, bundle, options.allow_inf, verify, report_progress or (lambda _: None))
        WRITERS[format_](job, plan)
        if verify:
            check_source([*plan.entries, *plan.carried], job)
        leftovers = Leftovers(plan.dropped, frozenset(tensor.path for tensor in plan.checkpoint.tensors))
        table: dict[str, Any] = {}
        if leftovers.data not in (None, {}, []):
            table["data"] = leftovers.data
        if plan.metadata and format_ != "safetensors":
            table["metadata"] = plan.metadata
        if table:
            table = {"from": os.path.basename(checkpoint.path), **table}
            text = json.dumps(table, indent=1).encode() + b"\n"
            bundle.add(leftovers_path).write([text])
    written = Conversion(
        path=checkpoint.path,
        out=dst,
        format=checkpoint.format,
        to=format_,
        files=tuple(bundle.paths),
        tensors=len(plan.entries) + len(plan.aliases) + len(plan.carried),
        nbytes=plan.nbytes,
        cast=sum(entry.is_cast for entry in plan.entries),
        infinite=sum(entry.infinite for entry in plan.entries),
        aliases=tuple(plan.aliases),
        left=tuple(plan.omitted),
        listed=tuple(leftovers.listed),
        leftovers=leftovers_path if table else "",
        others=plan.others,
        renamed=tuple(plan.renamed),
        verified=verify,
        seconds=time.monotonic() - start,
        notes=tuple(notes(plan, job, leftovers)),
    )
    if overwrite and not table:
        with suppress(OSError):  # leftovers of an earlier conversion do not belong to this target
            if begins_with(leftovers_path, _LEFTOVERS_START):
                os.unlink(leftovers_path)
    return written


def _source_files(src: Any, content: Content) -> set[tuple[int, int]]:
    """The identities of all files that a checkpoint is read from."""
    if not isinstance(src, str | os.PathLike):
        with suppress(AttributeError, OSError, ValueError):
            return file_identity(src.fileno())
        return set()
    path = os.fsdecode(src)
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    checkpoint = content.checkpoint
    names = {*(name for name, _ in content.parts), *(storage.file for storage in checkpoint.storages)}
    names |= {part.name for part in checkpoint.parts if part.kind == "index"}
    return file_identity(path).union(*(file_identity(os.path.join(folder, name)) for name in names if name))
