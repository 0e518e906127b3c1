"""One conversion from beginning to end: read, choose, write beside, read back, rename."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from transload.converting import to_npz, to_raw, to_safetensors, to_torch
from transload.converting.bundle import Bundle, refuse_existing
from transload.converting.comparing import Back, compare, damaged_records, whole_checksum
from transload.converting.entries import Data
from transload.converting.job import Job
from transload.converting.planning import Plan, planned
from transload.converting.result import Conversion
from transload.errors import ConvertError, UsageError
from transload.io.progress import telling

if TYPE_CHECKING:
    from transload.checkpoint import Checkpoint
    from transload.converting.wish import Wish
    from transload.io.sources import SourceLike
    from transload.tensors import Content

__all__ = ["convert_content", "run"]


def run(  # noqa: PLR0913 - as asked for
    src: SourceLike,
    dst: str,
    format_: str,
    wish: Wish,
    *,
    verify: bool,
    overwrite: bool,
    progress: bool | Callable[[int, int], object] | None,
) -> Conversion:
    """Convert; ``TransloadError`` if that cannot be, and then nothing is there that was not before."""
    from transload.loading.refusal import refuse_broken
    from transload.tensors import open_content

    dst = _placed(dst, format_)
    _refuse_same(src, dst)
    with open_content(src) as content:
        refuse_broken(content.checkpoint)
        return convert_content(
            content, dst, format_, wish, src=src, verify=verify, overwrite=overwrite, progress=progress
        )


def convert_content(  # noqa: PLR0913 - as above
    content: Content,
    dst: str,
    format_: str,
    wish: Wish,
    *,
    src: SourceLike | None = None,
    verify: bool,
    overwrite: bool,
    progress: bool | Callable[[int, int], object] | None,
) -> Conversion:
    """Convert what was opened, and is taken as it is; ``src`` is what it was opened by, if not its path."""
    from transload.formats import no_collecting

    begun = time.monotonic()
    _refuse_there(dst, format_, overwrite=overwrite)
    sources = _Sources(content.checkpoint.path if src is None else src, content)
    with no_collecting():
        plan = planned(content, format_, wish)
    tell = telling(progress, plan.nbytes * (2 if verify else 1), "converting")
    with Bundle(overwrite=overwrite, is_source=sources) as bundle:
        job = Job(dst, wish, bundle, tell, verify=verify)
        data = Data(content, allow_inf=wish.allow_inf)
        places = _written(job, format_, plan, data)
        if verify:
            _check_source(job, plan, data)
            compare(places, data, dst, tell)
        made = _told(content.checkpoint, format_, plan, job, data)
    if overwrite and not made.leftovers:
        _remove_stale(_leftovers_name(dst))
    return replace(made, verified=verify, seconds=time.monotonic() - begun)


def _refuse_there(dst: str, format_: str, *, overwrite: bool) -> None:
    _refuse_leftovers(_leftovers_name(dst), overwrite=overwrite)
    if format_ != "raw":
        refuse_existing([dst], overwrite=overwrite)


def _remove_stale(leftovers: str) -> None:
    """What an earlier conversion to the same target had left over is not that of this one."""
    with suppress(OSError):
        if _is_leftovers(leftovers):
            os.unlink(leftovers)  # noqa: PTH108 - pathlib is slow


def _placed(dst: str, format_: str) -> str:
    """The file to write: in a directory that exists, one with the usual name."""
    if format_ != "raw" and (dst.endswith(("/", os.sep)) or os.path.isdir(dst)):  # noqa: PTH112 - pathlib is slow
        usual = {"safetensors": "model.safetensors", "torch": "pytorch_model.bin", "npz": "model.npz"}[format_]
        return os.path.join(dst, usual)  # noqa: PTH118 - as above
    return dst


def _refuse_same(src: SourceLike, dst: str) -> None:
    """A source is never written over."""
    try:
        same = isinstance(src, str | os.PathLike) and os.path.samefile(src, dst)  # noqa: PTH121 - as above
    except (OSError, ValueError):  # one of them is not there, or cannot be
        return
    if same:
        raise UsageError("the target would be the source itself", where=dst, fix="Choose another name.")


class _Sources:
    """Which files a checkpoint is read from, whatever they are called: found out when it is asked for."""

    def __init__(self, src: SourceLike, content: Content) -> None:
        self._src = src
        self._path = os.fsdecode(src) if isinstance(src, str | os.PathLike) else ""
        self._content = content
        self._known: set[tuple[int, int]] | None = None

    def __call__(self, path: str) -> bool:
        if self._known is None:
            self._known = _opened(self._src).union(*map(_identity, self._files()))
        return not self._known.isdisjoint(_identity(path))

    def _files(self) -> list[str]:
        if not self._path:
            return []
        folder = self._path if os.path.isdir(self._path) else os.path.dirname(self._path)  # noqa: PTH112, PTH120
        checkpoint = self._content.checkpoint
        names = {*(name for name, _ in self._content.parts), *(each.file for each in checkpoint.storages)}
        names |= {part.name for part in checkpoint.parts if part.kind == "index"}
        return [self._path, *(os.path.join(folder, name) for name in names if name)]  # noqa: PTH118


def _opened(src: Any) -> set[tuple[int, int]]:
    """The same of a file that was given open."""
    try:
        found = os.fstat(src.fileno())
    except (AttributeError, OSError, ValueError):
        return set()
    return {(found.st_dev, found.st_ino)}


def _identity(path: str) -> set[tuple[int, int]]:
    """What tells a file from all others, if it is there."""
    try:
        found = os.stat(path)  # noqa: PTH116
    except (OSError, ValueError):
        return set()
    return {(found.st_dev, found.st_ino)}


def _refuse_leftovers(path: str, *, overwrite: bool) -> None:
    """What lies where the rest shall go is only replaced if a conversion has written it."""
    refuse_existing([path], overwrite=overwrite)
    if os.path.lexists(path) and not _is_leftovers(path):
        raise UsageError("what is there was not left over by a conversion", where=path, fix="Choose another name.")


def _is_leftovers(path: str) -> bool:
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return file.read(len(_BEGINNING)) == _BEGINNING
    except OSError:
        return False


_BEGINNING = b'{\n "from": '


def _written(job: Job, format_: str, plan: Plan, data: Data) -> list[Back]:
    """Write the target; where what is still to be compared lies."""
    if plan.structure is not None and plan.layout is not None:
        return to_torch.write_torch(job, plan.structure, plan.layout, data)
    if format_ == "npz":
        return to_npz.write_npz(job, plan.found, data)
    if format_ == "raw":
        return to_raw.write_raw(job, plan.found, data)
    return to_safetensors.write_safetensors(job, plan.found, data, plan.metadata)


def _check_source(job: Job, plan: Plan, data: Data) -> None:
    """Compare the checksums that the source was saved with: those of what was summed on its way, then the others."""
    content = data.content
    tensors = [*(entry.tensor for entry in plan.found.entries), *(slot.named.tensor for slot in plan.carried)]
    storages = {each.storage for tensor in tensors for each in (tensor, *tensor.parts) if each.storage}
    damaged: list[str] = []
    for entry in plan.found.entries:
        known = whole_checksum(entry, data) if id(entry) in job.summed else None
        if known is not None:
            storages.discard(entry.tensor.storage or "")
            if known != job.summed[id(entry)]:
                damaged.append(f"checksum {job.summed[id(entry)]:08x}, saved with {known:08x}; holds {entry.name}")
    damaged += damaged_records(content, storages)
    if damaged:
        what = f"{len(damaged)} of its records are damaged: {damaged[0]}"
        raise ConvertError(what, where=content.checkpoint.path, fix="transload rescue saves what is whole.")


# -- what is told


def _told(checkpoint: Checkpoint, format_: str, plan: Plan, job: Job, data: Data) -> Conversion:
    from transload.converting.notes import notes_of
    from transload.converting.rest import rest_of

    paths = frozenset(tensor.path for tensor in checkpoint.tensors)
    rest = rest_of(plan.dropped, paths)
    leftovers = _leftovers(rest.data, plan, format_)
    name = _leftovers_name(job.dst)
    if leftovers:
        text = json.dumps({"from": os.path.basename(checkpoint.path), **leftovers}, indent=1)  # noqa: PTH119 - as above
        from transload.converting.moving import Writer

        file = job.bundle.add(name)
        Writer(file.descriptor, None).whole(text.encode() + b"\n")
    found = plan.found
    return Conversion(
        path=checkpoint.path,
        out=job.dst,
        format=checkpoint.format,
        to=format_,
        files=tuple(job.bundle.paths),
        tensors=len(found.entries) + len(found.aliases) + len(plan.carried),
        nbytes=plan.nbytes,
        copied=job.copied,
        cast=sum(entry.dtype != entry.tensor.dtype for entry in found.entries),
        infinite=sum(data.infinite.values()),
        aliases=found.aliases,
        left=(*plan.selection.left, *found.left),
        listed=rest.listed,
        leftovers=name if leftovers else "",
        others=plan.selection.others,
        renamed=(*plan.selection.renamed, *found.renamed),
        notes=tuple(notes_of(checkpoint, format_, plan, job, rest)),
    )


def _leftovers(data: Any, plan: Plan, format_: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if data not in (None, {}, []):
        out["data"] = data
    if plan.metadata and format_ != "safetensors":
        out["metadata"] = plan.metadata
    return out


def _leftovers_name(dst: str) -> str:
    return f"{dst.rstrip('/' + os.sep)}.leftovers.json"
