"""``transload.convert``: a checkpoint of any format written as another, without torch, and read back to be sure.

``convert_content`` is the whole way: ``plan`` decides what is written; ``writers`` or ``to_torch`` write it into a
``Bundle`` (``output``), with the bytes that ``transfer`` moves and compares; ``leftovers`` keeps what else there was.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from transload.converting.leftovers import plain_data
from transload.converting.output import Bundle, Job, file_identity, refuse_existing, write_text
from transload.converting.plan import Plan, make_plan, notes
from transload.converting.selection import Candidate, Omission, Options, candidates, dtype_of, format_of, size_of
from transload.converting.to_torch import write_torch
from transload.converting.transfer import Data, Location, check_source, compare
from transload.converting.writers import write_npz, write_raw, write_safetensors
from transload.errors import UsageError
from transload.frozen import facts

if TYPE_CHECKING:
    from transload.checkpoint import Checkpoint
    from transload.io.sources import SourceLike
    from transload.tensors.content import Content

__all__ = ["Conversion", "convert", "convert_content", "parts"]


@facts(frozen=True)
class Conversion:
    """What was converted, and what was not.

    ``files`` were written, the first of them holds the weights (or is the directory). ``nbytes`` are those of all
    tensors, ``copied`` those of them that the kernel moved by itself. ``aliases`` are second names of tensors that are
    held once. ``left`` are tensors that are not in the target: those with ``lost`` because it cannot hold them.
    ``listed`` is what else it cannot hold and is not plain data, such as numpy arrays: it is written nowhere. Plain
    data are in the file ``leftovers``. ``others`` counts tensors outside of the key.
    """

    path: str
    out: str
    format: str
    to: str
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    copied: int = 0
    cast: int = 0
    infinite: int = 0
    aliases: tuple[tuple[str, str], ...] = ()
    left: tuple[Omission, ...] = ()
    listed: tuple[Omission, ...] = ()
    leftovers: str = ""
    others: int = 0
    renamed: tuple[tuple[str, str], ...] = ()
    verified: bool = False
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every tensor that was asked for is in the target."""
        return not any(each.lost for each in self.left)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "schema": 1,
            "path": self.path,
            "out": self.out,
            "format": self.format,
            "to": self.to,
            "complete": self.complete,
            "verified": self.verified,
            "files": list(self.files),
            "tensors": self.tensors,
            "nbytes": self.nbytes,
            "copied": self.copied,
            "cast": self.cast,
            "infinite": self.infinite,
            "others": self.others,
            "seconds": round(self.seconds, 3),
            "aliases": dict(self.aliases),
            "renamed": [{"old": old, "new": new} for old, new in self.renamed],
            "left": [each._asdict() for each in self.left],
            "leftovers": self.leftovers or None,
            "listed": [{"name": each.name, "what": each.why} for each in self.listed],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        """The report as the command line gives it."""
        from transload.converting.report import as_text

        return as_text(self)


def convert(
    src: SourceLike,
    dst: str | os.PathLike[str],
    *,
    to: str = "",
    key: str = "",
    strip: str | tuple[str, ...] | list[str] = (),
    dtype: str = "",
    allow_inf: bool = False,
    max_shard_size: str | int | None = None,
    verify: bool = True,
    overwrite: bool = False,
    progress: bool | Callable[[int, int], object] | None = None,
) -> Conversion:
    """Write the tensors of a checkpoint as another format; nothing of it is run, and torch is not needed.

    ``src`` is a path (of a file or a directory), bytes, or a file object. The format of ``dst`` follows from its name,
    or is ``to``: ``torch``, ``safetensors``, ``npz``, or ``raw`` (a directory). ``key`` chooses a part (``"model"``),
    ``strip`` removes prefixes from the names (``"module."``), ``dtype`` is for floating tensors, and a number that does
    not fit is an error unless ``allow_inf``. ``max_shard_size`` (``"5GB"``) splits safetensors into shards. ``verify``
    checks the source's own checksums and reads the target back, byte for byte, before it gets its name. ``progress``
    is a function of the bytes done and of all bytes, or ``True`` for a line on a terminal.

    >>> transload.convert("model.pt", "model.safetensors")  # doctest: +SKIP
    >>> transload.convert("train.ckpt", "out/", key="model", strip="module.", dtype="bfloat16")  # doctest: +SKIP
    """
    from transload.loading.refusal import refuse_broken
    from transload.tensors.content import open_content

    target = _path(dst)
    prefixes = (strip,) if isinstance(strip, str) else tuple(strip)
    options = Options(key, tuple(filter(None, prefixes)), dtype_of(dtype), allow_inf, size_of(max_shard_size))
    format_ = format_of(target, to)
    if options.max_shard_size and format_ != "safetensors":
        raise UsageError("only safetensors can be split into shards", fix="Leave out --max-shard-size.")
    if format_ != "raw" and (target.endswith(("/", os.sep)) or os.path.isdir(target)):
        usual = {"safetensors": "model.safetensors", "torch": "pytorch_model.bin", "npz": "model.npz"}[format_]
        target = os.path.join(target, usual)
    if isinstance(src, str | os.PathLike) and not file_identity(os.fspath(src)).isdisjoint(file_identity(target)):
        raise UsageError("the target is the source itself", where=target, fix="Choose another name.")
    with open_content(src) as content:
        refuse_broken(content.checkpoint)
        return convert_content(
            content, target, format_, options, src=src, verify=verify, overwrite=overwrite, progress=progress
        )


def parts(src: SourceLike) -> tuple[Candidate, ...]:
    """The parts of a checkpoint that ``key`` can choose, the whole first."""
    from transload.judge import inspect
    from transload.loading.refusal import refuse_broken

    checkpoint = inspect(src)
    refuse_broken(checkpoint)
    return candidates(checkpoint)


def _path(path: Any) -> str:
    if not isinstance(path, str | os.PathLike) or isinstance(name := os.fspath(path), bytes):
        raise UsageError(f"expected the path of a file, not {type(path).__name__}")
    if not name:
        raise UsageError("the target has no name")
    with suppress(UnicodeEncodeError):  # half of a surrogate pair
        if b"\0" not in os.fsencode(name):
            return name
    raise UsageError("the name of the target is not valid", where=name)


def convert_content(
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
    """Convert a checkpoint that is open, damaged or not; ``src`` is what it was opened by, if not its path.

    If this raises, nothing is there that was not before.
    """
    from transload.formats import no_collecting
    from transload.io.progress import telling

    begun = time.monotonic()
    leftovers_path = f"{dst.rstrip('/' + os.sep)}.leftovers.json"
    refuse_existing(leftovers_path, overwrite=overwrite)
    if os.path.lexists(leftovers_path) and not _is_leftovers(leftovers_path):
        what = "the existing file was not written by a conversion"
        raise UsageError(what, where=leftovers_path, fix="Choose another name.")
    if format_ != "raw":
        refuse_existing(dst, overwrite=overwrite)
    with no_collecting():
        plan = make_plan(content, format_, options)
    report = telling(progress, plan.nbytes * (2 if verify else 1), "converting")
    sources = _source_files(content.checkpoint.path if src is None else src, content)
    with Bundle(overwrite=overwrite, sources=sources) as bundle:
        job = Job(dst, bundle, report, verify=verify)
        data = Data(content, allow_inf=options.allow_inf)
        locations = _write(job, plan, data)
        if verify:
            carried = [slot.named.tensor for slot in plan.carried]
            check_source(plan.contents.entries, carried, data, job.checksums)
            compare(locations, data, dst, report)
        result = _result(content.checkpoint, plan, job, data, leftovers_path)
    if overwrite and not result.leftovers:
        with suppress(OSError):  # those of an earlier conversion are not those of this one
            if _is_leftovers(leftovers_path):
                os.unlink(leftovers_path)
    return replace(result, verified=verify, seconds=time.monotonic() - begun)


def _source_files(src: Any, content: Content) -> set[tuple[int, int]]:
    """The identities of the files that a checkpoint is read from, by whatever name."""
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


def _write(job: Job, plan: Plan, data: Data) -> list[Location]:
    """Write the target, and return where to find what is still to be compared."""
    if plan.structure is not None and plan.layout is not None:
        return write_torch(job, plan.structure, plan.layout, data)
    if plan.format == "npz":
        return write_npz(job, plan.contents, data)
    if plan.format == "raw":
        return write_raw(job, plan.contents, data)
    return write_safetensors(job, plan.contents, data, plan.metadata, plan.options.max_shard_size)


_LEFTOVERS_START = b'{\n "from": '


def _is_leftovers(path: str) -> bool:
    """Whether a conversion has written a file for its leftovers: only such a one is replaced."""
    with suppress(OSError), open(path, "rb") as file:
        return file.read(len(_LEFTOVERS_START)) == _LEFTOVERS_START
    return False


def _result(checkpoint: Checkpoint, plan: Plan, job: Job, data: Data, leftovers_path: str) -> Conversion:
    """Write what is left over beside the target, and report."""
    selection, contents = plan.selection, plan.contents
    leftovers = plain_data(plan.dropped, frozenset(tensor.path for tensor in checkpoint.tensors))
    table: dict[str, Any] = {}
    if leftovers.data not in (None, {}, []):
        table["data"] = leftovers.data
    if plan.metadata and plan.format != "safetensors":
        table["metadata"] = plan.metadata
    if table:
        table = {"from": os.path.basename(checkpoint.path), **table}
        write_text(job.bundle.add(leftovers_path).descriptor, json.dumps(table, indent=1).encode() + b"\n")
    return Conversion(
        path=checkpoint.path,
        out=job.dst,
        format=checkpoint.format,
        to=plan.format,
        files=tuple(job.bundle.paths),
        tensors=len(contents.entries) + len(contents.aliases) + len(plan.carried),
        nbytes=plan.nbytes,
        copied=job.copied,
        cast=sum(entry.dtype != entry.tensor.dtype for entry in contents.entries),
        infinite=sum(data.infinite.values()),
        aliases=contents.aliases,
        left=(*selection.omitted, *contents.omitted),
        listed=leftovers.listed,
        leftovers=leftovers_path if table else "",
        others=selection.others,
        renamed=(*selection.renamed, *contents.renamed),
        notes=tuple(notes(checkpoint, plan, job, leftovers)),
    )
