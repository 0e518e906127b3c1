"""A rescue from beginning to end: open, recover, read, plan, write."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from transload.errors import CannotReadError, RescueError, UsageError
from transload.formats import FORMATS, no_collecting, read_source
from transload.io.sources import Source, SourceLike, open_source
from transload.rescuing.archive import MINOR
from transload.rescuing.fates import Fate, Fates
from transload.rescuing.layers import peeled
from transload.rescuing.mended import Lost, Mended
from transload.rescuing.output import filled, is_program, laid, left_out, refuse_growth
from transload.rescuing.recovery import recovered
from transload.rescuing.result import Rescue
from transload.rescuing.undoing import journal_undone

if TYPE_CHECKING:
    from transload.checkpoint import Checkpoint
    from transload.rescuing.filling import Fill

__all__ = ["saved", "write_report"]

_PIECE = 4 << 20
_SHOWN = 8
_VERSIONS = (b"version", b".data/version", b"archive_version")


def saved(  # noqa: PLR0913 - what a user may ask for
    src: SourceLike,
    target: str,
    stack: ExitStack,
    *,
    fill: Fill | None,
    dry_run: bool,
    member: str,
    progress: Callable[[int, int], object] | bool | None,
) -> Rescue:
    """Rescue a file; what came of it."""
    notes: list[str] = []
    source, mended = _mended(src, member, stack, notes)
    with no_collecting():
        mended, checkpoint = _read(mended, fill=fill is not None)
        _refuse_name(target, checkpoint)
        judge = Fates(checkpoint, mended)
        fates = tuple(judge.of(tensor) for tensor in checkpoint.tensors)
        out, how = _output(mended, checkpoint, judge, fates, fill)
        if out is not None:
            refuse_growth(out.size, mended)
    path = os.fspath(src) if isinstance(src, str | os.PathLike) else source.name
    report = f"{target}.rescue.json" if target else ""
    writes = bool(out and target and not dry_run)
    made = Rescue(
        path,
        target,
        report,
        checkpoint.format,
        source.size,
        how,
        writes,
        fates,
        _records(checkpoint, mended),
        mended.mends,
        fill or "",
        (*notes, *mended.notes),
        tuple(_warnings(checkpoint, mended, out)),
    )
    if writes and out is not None:
        _written(out, target, progress)
    return made


def _read(mended: Mended, *, fill: bool) -> tuple[Mended, Checkpoint]:
    """What is in the mended file, and the file with the records it lacks and needs."""
    from transload.rescuing.completing import completed, with_program

    checkpoint = read_source(mended.source)
    _refuse_foreign(checkpoint)
    program = with_program(mended, checkpoint)
    if program is not None:
        return mended, read_source(program)
    other = completed(mended, checkpoint, fill=fill)
    if other is None:
        return mended, checkpoint
    return other, read_source(other.source)


def _mended(src: SourceLike, member: str, stack: ExitStack, notes: list[str]) -> tuple[Source, Mended]:
    """The source, and what it should be."""
    if isinstance(src, str | os.PathLike) and os.path.isdir(src):  # noqa: PTH112 - texts throughout, as given
        return _directory(os.fspath(src))
    if isinstance(src, str | os.PathLike):
        _refuse_rank(os.fspath(src))
    source = open_source(src)
    stack.callback(source.close)
    if not source.size:
        raise RescueError("it is empty: nothing was ever written", where=source.name)
    inner = source
    if isinstance(src, str | os.PathLike):
        inner = journal_undone(os.fspath(src), source, notes) or source
    inner = peeled(inner, member, stack, notes)
    mended = recovered(inner, stack)
    if mended is None:
        mended = _as_it_is(inner)
    if mended.all_unchecked and not getattr(inner, "whole", True):
        broken = "the packed data is damaged, and what it unpacks to has no checksums"
        mended = mended._replace(warnings=(*mended.warnings, broken))
    return source, mended._replace(nbytes=inner.size)


def _directory(path: str) -> tuple[Source, Mended]:
    from transload.rescuing.unzipped import recover_directory

    mended = recover_directory(path)
    if mended is None:
        what = "it is a directory, and neither a checkpoint of several files nor an archive that was unpacked"
        raise RescueError(what, where=path, fix="Rescue its files one by one.")
    return mended.source, mended._replace(nbytes=mended.source.size)


def _refuse_rank(path: str) -> None:
    """A rank's file is a row of small archives, and what they hold stands in another file."""
    folder, name = os.path.split(path)
    if name.endswith(".distcp") and os.path.exists(os.path.join(folder, ".metadata")):  # noqa: PTH110, PTH118 - as below
        from transload.findings import rescue_command

        what = "it is one of the files of a torch.distributed.checkpoint directory"
        raise RescueError(what, where=path, fix=f"Rescue the directory.\n{rescue_command(folder or '.')}")


def _as_it_is(source: Source) -> Mended:
    """A file of another format: what the reader makes of it is all there is."""
    checkpoint = read_source(source)
    if checkpoint.format not in FORMATS or not checkpoint.tensors:
        raise RescueError(_what(checkpoint), where=source.name, fix=_fix(checkpoint))
    return Mended(source, exact=True, all_unchecked=True)


def _what(checkpoint: Checkpoint) -> str:
    problem = next((p for p in checkpoint.problems if p.code == "not-a-checkpoint"), None)
    if problem is not None and problem.title:
        return f"there is no checkpoint in it: it is {problem.title}"
    return "nothing of it can be recovered: what tells which tensors it held is lost"


def _fix(checkpoint: Checkpoint) -> str:
    return next((fix for problem in checkpoint.problems for fix in problem.fix), "")


def _refuse_name(target: str, checkpoint: Checkpoint) -> None:
    """A file keeps its format, and loaders go by the name of this one."""
    named = target.lower().endswith(".safetensors")
    if target and named != (checkpoint.format == "safetensors"):
        what = f"it would be a file of the format {checkpoint.format}, which a rescue does not change"
        raise UsageError(what, where=target, fix="Name it so, and then: transload convert RESCUED OTHER.")


def _refuse_foreign(checkpoint: Checkpoint) -> None:
    if checkpoint.format not in FORMATS:
        raise RescueError(_what(checkpoint), where=checkpoint.path, fix=_fix(checkpoint))


def _output(
    mended: Mended, checkpoint: Checkpoint, judge: Fates, fates: tuple[Fate, ...], fill: Fill | None
) -> tuple[Source | None, str]:
    """The file to write, and what it is."""
    lost = [fate for fate in fates if fate.state == "lost"]
    kept = any(fate.nbytes for fate in fates if fate.state != "lost")
    if not kept and (lost or not _is_readable(checkpoint)):
        return None, "nothing"
    if kept and checkpoint.format in ("torchscript", "torch-export") and _lacks_code(checkpoint, mended):
        return left_out(mended, checkpoint, judge, lost), "weights"
    if not lost and mended.exact:
        return mended.source, "exact"
    if not lost:
        return laid(mended, mended.items) if mended.items else mended.source, "rebuilt"
    if fill is not None:
        return filled(mended, checkpoint, fill), "filled"
    return left_out(mended, checkpoint, judge, lost), "weights" if is_program(checkpoint) else "left-out"


def _lacks_code(checkpoint: Checkpoint, mended: Mended) -> bool:
    """Whether a program lacks something without which it is none: all but notes on where its lines come from."""
    lost = [each.name for each in _records(checkpoint, mended)]
    return not all(name.endswith((".debug_pkl", "version")) for name in lost)


def _has_code(mended: Mended) -> bool:
    """Whether a program has what makes it one."""
    names = {item.name.partition(b"/")[2] for item in mended.items}
    return bool(names & {b"constants.pkl", b"model.json", b"archive_format", b".data/extern_modules"}) or any(
        name.startswith(b"data/aotinductor/") for name in names
    )


def _is_readable(checkpoint: Checkpoint) -> bool:
    """Whether a file without tensors holds anything: its index is whole."""
    main = [pickle for pickle in checkpoint.pickles if pickle.main]
    if checkpoint.format == "safetensors":
        return True
    return any(not pickle.broken and pickle.end > pickle.start for pickle in main)


def _records(checkpoint: Checkpoint, mended: Mended) -> tuple[Lost, ...]:
    """What is lost beside tensors."""
    used = [storage for storage in checkpoint.storages if storage.tensors]
    held = {name for s in used for name in (s.record, f"data/{s.key}", f"tensors/{s.key}")}
    lost = [each for each in mended.lost if each.name not in held and each.name not in MINOR]
    if mended.items and is_program(checkpoint):
        if not _has_code(mended):
            lost.append(Lost("code", "the program itself is not in the file; its tensors are"))
        if not any(item.origin for item in mended.items if item.name.partition(b"/")[2] in _VERSIONS):
            lost.append(Lost("version", "it tells what the operators of the program mean"))
    return tuple(lost)


def _warnings(checkpoint: Checkpoint, mended: Mended, out: Source | None) -> list[str]:
    """What is not sure, or not right, in the new file."""
    from transload.judge import judge

    found = [*mended.warnings]
    if any(lost.name == "data.pkl" for lost in mended.lost):
        found.append("the index does not have the checksum it was saved with: names and shapes may be wrong")
    if mended.all_unchecked and any(storage.nbytes and not storage.tensors for storage in checkpoint.storages):
        found.append("there are storages that no tensor uses: what names the tensors may be damaged")
    broken = [problem for problem in checkpoint.problems if problem.code == "tensor-broken"]
    found += [f"{problem.where}: {problem.detail}" for problem in broken[:_SHOWN]]
    if len(broken) > _SHOWN:
        found.append(f"and {len(broken) - _SHOWN:,} more tensors that cannot be")
    if out is None:
        return found
    judged = judge(checkpoint if out is mended.source else read_source(out))
    if judged.integrity in ("damaged", "not-a-checkpoint"):
        found += [each.title for each in judged.findings if each.severity == "error"][:_SHOWN]
    return found


def _written(out: Source, target: str, progress: Callable[[int, int], object] | bool | None) -> None:
    from transload.io.atomic import AtomicFile, SystemFile
    from transload.io.progress import telling

    tell = telling(progress, out.size, "writing")
    with AtomicFile(target) as file:
        sink = SystemFile(file.descriptor, push=True)
        for start in range(0, out.size, _PIECE):
            count = min(_PIECE, out.size - start)
            data = out.read(start, count)
            if len(data) < count:
                raise CannotReadError("the file became shorter while it was read", where=out.name)
            sink.write([data])
            if tell is not None:
                tell(len(data))


def write_report(made: Rescue) -> None:
    """Write the report that lies beside a new file."""
    import json

    from transload.io.atomic import AtomicFile, SystemFile

    text = json.dumps(made.to_dict(), indent=1, ensure_ascii=True)
    with AtomicFile(made.report) as file:
        SystemFile(file.descriptor, push=False).write([text.encode() + b"\n"])
