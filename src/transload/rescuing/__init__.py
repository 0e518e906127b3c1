"""Save what is left of a damaged checkpoint into a new file: bits repaired, lost tensors left out or filled.

The source is never written. torch is not needed, nothing in the file is run, and no name in it becomes a path.

A rescue goes through these modules: `unwrap` takes off what is around the file, `recover` and, for archives,
`zip_recovery` make of it what the reader can read, `output` finds out which tensors are whole and makes the new file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack

from transload.checkpoint import FORMATS, Checkpoint
from transload.errors import CannotReadError, RescueError, UsageError
from transload.formats import no_collecting, read_source
from transload.io.sources import Source, SourceLike, open_source
from transload.judge import inspect
from transload.rescuing.assembly import Recovered
from transload.rescuing.output import Outcomes, completed, filled, is_program, rebuilt, refuse_growth, without_lost
from transload.rescuing.recover import recover
from transload.rescuing.result import Fill, LostRecord, Rescue, TensorOutcome
from transload.rescuing.unwrap import journal_undone, unwrapped
from transload.rescuing.zip_recovery import METADATA, recover_directory

__all__ = ["Rescue", "rescue"]

_PIECE = 4 << 20
_SHOWN = 8
_REPORT = b'{\n "schema": 1,\n "path":'
"""How every report begins."""


def rescue(
    src: SourceLike,
    dst: str | os.PathLike[str] | None = None,
    *,
    fill: Fill | None = None,
    dry_run: bool = False,
    member: str = "",
    overwrite: bool = False,
    progress: Callable[[int, int], object] | bool | None = None,
) -> Rescue:
    """Save what is whole, or can be repaired with proof, of a damaged checkpoint into a new file.

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
        _refuse_target(path, target, overwrite=overwrite)
    if _is_several_files(path):
        if fill or member:
            what = "several files become one new file without the lost tensors: there is nothing to fill or to extract"
            raise UsageError(what, where=path, fix="Omit --fill and --member.")
        from transload.rescuing.multi_file import rescue_files

        made = rescue_files(path, target, dry_run=dry_run, overwrite=overwrite, progress=progress)
        if made.done:
            _write_report(made)
        return made
    with ExitStack() as stack:
        notes: list[str] = []
        source, recovered = _recovered(src, path, member, stack, notes)
        with no_collecting():
            recovered, checkpoint = completed(recovered, fill=fill is not None)
            _refuse_format(checkpoint, target)
            outcomes = Outcomes(checkpoint, recovered)
            tensors = tuple(outcomes.of(tensor) for tensor in checkpoint.tensors)
            out, how = _output(recovered, checkpoint, outcomes, tensors, fill)
            if out is not None:
                refuse_growth(out.size, recovered)
        made = Rescue(
            path or source.name,
            target,
            f"{target}.rescue.json" if target else "",
            checkpoint.format,
            source.size,
            how,
            bool(out and target and not dry_run),
            tensors,
            _lost_records(checkpoint, recovered),
            recovered.repairs,
            fill or "",
            (*notes, *recovered.notes),
            tuple(_warnings(checkpoint, recovered, out)),
        )
        if made.done and out is not None:
            _write(out, target, progress)
            _write_report(made)
        return made


def _is_several_files(path: str) -> bool:
    if not (path.endswith(".index.json") or os.path.isdir(path)):  # noqa: PTH112 - texts throughout, as given
        return False
    from transload.judge.problems import SETS

    return inspect(path).format in SETS


def _refuse_target(src: str, target: str, *, overwrite: bool) -> None:
    """The source is never written, and nothing else is overwritten unasked, except for the report of another rescue."""
    if os.path.isdir(target):  # noqa: PTH112 - as above
        raise UsageError("this is a directory", where=target, fix="Add the name of a file.")
    for path in (target, f"{target}.rescue.json"):
        if not os.path.lexists(path):
            continue
        source, written = os.path.realpath(src), os.path.realpath(path)
        if src and (written == source or written.startswith(source + os.sep)):
            raise UsageError("the source of a rescue is never written", where=path, fix="Name another file.")
    for path in (target, f"{target}.rescue.json"):
        if not overwrite and os.path.lexists(path) and (path == target or not _is_report(path)):
            raise UsageError("the file exists already", where=path, fix="Name another file, or pass --force.")


def _is_report(path: str) -> bool:
    """Whether a file is the report of a rescue."""
    if not os.path.isfile(path):  # noqa: PTH113 - as above; a pipe would be waited for
        return False
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - pathlib costs ten milliseconds
            return file.read(len(_REPORT)) == _REPORT
    except OSError:
        return False


def _recovered(src: SourceLike, path: str, member: str, stack: ExitStack, notes: list[str]) -> tuple[Source, Recovered]:
    """The source, and the file it should be."""
    if path and os.path.isdir(path):  # noqa: PTH112 - as above
        recovered = recover_directory(path)
        if recovered is None:
            what = "this directory is neither a checkpoint of several files nor an unzipped archive"
            raise RescueError(what, where=path, fix="Rescue its files one by one.")
        return recovered.source, recovered._replace(nbytes=recovered.source.size)
    folder, name = os.path.split(path)
    if name.endswith(".distcp") and os.path.exists(os.path.join(folder, ".metadata")):  # noqa: PTH110, PTH118 - as above
        from transload.findings import rescue_command

        # A rank's file is a row of small archives; what they hold is in another file.
        what = "this is one of the files of a torch.distributed.checkpoint directory"
        raise RescueError(what, where=path, fix=f"Rescue the directory.\n{rescue_command(folder or '.')}")
    source = open_source(src)
    stack.callback(source.close)
    if not source.size:
        raise RescueError("the file is empty", where=source.name)
    inner = (journal_undone(path, source, notes) if path else None) or source
    inner = unwrapped(inner, member, stack, notes)
    recovered = recover(inner, stack)
    if recovered is None:  # of another format: what the reader makes of it is all there is
        checkpoint = read_source(inner)
        if checkpoint.format not in FORMATS or not checkpoint.tensors:
            raise _nothing_to_rescue(checkpoint, inner.name)
        recovered = Recovered(inner, exact=True, all_unchecked=True)
    if recovered.all_unchecked and not getattr(inner, "whole", True):
        broken = "the compressed data is damaged, and the file inside has no checksums"
        recovered = recovered._replace(warnings=(*recovered.warnings, broken))
    return source, recovered._replace(nbytes=inner.size)


def _nothing_to_rescue(checkpoint: Checkpoint, where: str) -> RescueError:
    what = "nothing can be recovered: the part of the file that names its tensors is lost"
    problem = next((problem for problem in checkpoint.problems if problem.code == "not-a-checkpoint"), None)
    if problem is not None and problem.title:
        what = f"the file is not a checkpoint: it is {problem.title}"
    return RescueError(what, where=where, fix=next((fix for each in checkpoint.problems for fix in each.fix), ""))


def _refuse_format(checkpoint: Checkpoint, target: str) -> None:
    """A file keeps its format, and loaders go by the name of this one."""
    if checkpoint.format not in FORMATS:
        raise _nothing_to_rescue(checkpoint, checkpoint.path)
    if target and target.lower().endswith(".safetensors") != (checkpoint.format == "safetensors"):
        what = f"the rescued file has the format {checkpoint.format}: rescue does not change the format"
        raise UsageError(
            what, where=target, fix="Choose a fitting name, then convert it: transload convert RESCUED OTHER."
        )


def _output(
    recovered: Recovered,
    checkpoint: Checkpoint,
    outcomes: Outcomes,
    tensors: tuple[TensorOutcome, ...],
    fill: Fill | None,
) -> tuple[Source | None, str]:
    """The file to write, and what it is."""
    lost = [outcome for outcome in tensors if outcome.state == "lost"]
    kept = any(outcome.nbytes for outcome in tensors if outcome.state != "lost")
    # A file without tensors still holds something if its index is whole.
    main = [pickle for pickle in checkpoint.pickles if pickle.main]
    readable = any(not pickle.broken and pickle.end > pickle.start for pickle in main)
    if not kept and (lost or not (readable or checkpoint.format == "safetensors")):
        return None, "nothing"
    if kept and checkpoint.format in ("torchscript", "torch-export"):
        # A program can do without the debug records, which tell where its lines come from.
        records = _lost_records(checkpoint, recovered)
        if not all(record.name.endswith((".debug_pkl", "version")) for record in records):
            return without_lost(recovered, checkpoint, outcomes, lost), "weights"
    if not lost and recovered.exact:
        return recovered.source, "exact"
    if not lost:
        return rebuilt(recovered, recovered.records) if recovered.records else recovered.source, "rebuilt"
    if fill is not None:
        return filled(recovered, checkpoint, fill), "filled"
    how = "weights" if is_program(checkpoint) else "left-out"
    return without_lost(recovered, checkpoint, outcomes, lost), how


def _lost_records(checkpoint: Checkpoint, recovered: Recovered) -> tuple[LostRecord, ...]:
    """What is lost beside tensors."""
    used = [storage for storage in checkpoint.storages if storage.tensors]
    held = METADATA | {name for s in used for name in (s.record, f"data/{s.key}", f"tensors/{s.key}")}
    lost = [record for record in recovered.lost_records if record.name not in held]
    if recovered.records and is_program(checkpoint):
        names = {record.name.partition(b"/")[2]: record for record in recovered.records}
        code = {b"constants.pkl", b"model.json", b"archive_format", b".data/extern_modules"}
        if not (names.keys() & code or any(name.startswith(b"data/aotinductor/") for name in names)):
            lost.append(LostRecord("code", "the program is not in the file, only its tensors are"))
        versions = [names.get(name) for name in (b"version", b".data/version", b"archive_version")]
        if not any(record is not None and record.origin for record in versions):  # or it was made here
            lost.append(LostRecord("version", "it defines what the operators of the program mean"))
    return tuple(lost)


def _warnings(checkpoint: Checkpoint, recovered: Recovered, out: Source | None) -> list[str]:
    """What is not sure, or not right, in the new file."""
    from transload.judge import judge

    found = [*recovered.warnings]
    if any(record.name == "data.pkl" for record in recovered.lost_records):
        found.append("the index does not match its checksum: names and shapes may be wrong")
    if recovered.all_unchecked and any(storage.nbytes and not storage.tensors for storage in checkpoint.storages):
        found.append("there are storages that no tensor uses: the part that names the tensors may be damaged")
    broken = [problem for problem in checkpoint.problems if problem.code == "tensor-broken"]
    found += [f"{problem.where}: {problem.detail}" for problem in broken[:_SHOWN]]
    if len(broken) > _SHOWN:
        found.append(f"and {len(broken) - _SHOWN:,} more broken tensors")
    if out is not None:
        judged = judge(checkpoint if out is recovered.source else read_source(out))
        if judged.integrity in ("damaged", "not-a-checkpoint"):
            found += [finding.title for finding in judged.findings if finding.severity == "error"][:_SHOWN]
    return found


# -- writing


def _write(out: Source, target: str, progress: Callable[[int, int], object] | bool | None) -> None:
    from transload.io.atomic import AtomicFile, SystemFile
    from transload.io.pool import telling

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


def _write_report(made: Rescue) -> None:
    from transload.io.atomic import AtomicFile, SystemFile

    text = json.dumps(made.to_dict(), indent=1, ensure_ascii=True)
    with AtomicFile(made.report) as file:
        SystemFile(file.descriptor, push=False).write([text.encode() + b"\n"])
