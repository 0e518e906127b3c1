"""Save what is left of a damaged checkpoint into a new file: bits repaired, lost tensors left out or filled.

The source is never written. torch is not needed, nothing in the file is run, and no name in it becomes a path.

A rescue of one file goes through these modules: `recover` removes layers around it and, for archives with `archive`,
turns it into a file that the reader can read; `damaged_index` reads what is left of an index; `output` finds out which
tensors are undamaged and makes the new file. Checkpoints of several files list where each tensor is, so no layout has
to be guessed: damaged tensors are found as by `verify`, and the others are converted into one file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack
from typing import Literal

from transload.checkpoint import FORMATS, Checkpoint
from transload.contents import with_parts
from transload.errors import CannotReadError, RescueError, UsageError
from transload.findings import Problem, quoted, rescue_command
from transload.formats import gc_paused, read_source
from transload.formats.plain_pickle import holds_tensors
from transload.frozen import replace
from transload.io.atomic import AtomicFile
from transload.io.pool import progress_counter
from transload.io.sources import Assembly, Source, SourceLike, open_source
from transload.judge import inspect, judge
from transload.judge.problems import SETS, rule_of
from transload.rescuing.archive import METADATA, Recovered, recover_directory, repaired
from transload.rescuing.bitflips import Claim, check_records
from transload.rescuing.output import Outcomes, completed, filled, is_program, rebuilt, refuse_growth, without_lost
from transload.rescuing.recover import journal_undone, recover, unwrapped
from transload.rescuing.result import Fill, LostRecord, Repair, Rescue, TensorOutcome, doubts
from transload.tensors.content import Content, open_content
from transload.tensors.damage import Key, Records, damages, key_of, records_of, sum_records
from transload.writing.output import Bundle, begins_with

__all__ = ["Rescue", "rescue"]

_Progress = Callable[[int, int], object] | bool | None
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
    if (path.endswith(".index.json") or os.path.isdir(path)) and inspect(path).format in SETS:  # noqa: PTH112 - texts, as given
        if fill or member:
            what = "several files become one new file without the lost tensors: there is nothing to fill or to extract"
            raise UsageError(what, where=path, fix="Omit --fill and --member.")
        made = _rescue_files(path, target, dry_run=dry_run, overwrite=overwrite, progress=progress)
    else:
        made = _rescue_file(src, path, target, member, fill, dry_run=dry_run, progress=progress)
    if made.done:
        text = json.dumps(made.to_dict(), indent=1, ensure_ascii=True)
        with AtomicFile(made.report) as file:
            file.write([text.encode() + b"\n"])
    return made


def _refuse_target(src: str, target: str, *, overwrite: bool) -> None:
    """Refuse to write the source, or to overwrite anything unasked except for the report of another rescue."""
    if os.path.isdir(target):  # noqa: PTH112 - as above
        raise UsageError("this is a directory", where=target, fix="Add the name of a file.")
    existing = [path for path in (target, f"{target}.rescue.json") if os.path.lexists(path)]
    for path in existing:
        source, written = os.path.realpath(src), os.path.realpath(path)
        if src and (written == source or written.startswith(source + os.sep)):
            raise UsageError("the source of a rescue is never written", where=path, fix="Name another file.")
    for path in existing:
        if not overwrite and (path == target or not begins_with(path, _REPORT)):
            raise UsageError("the file exists already", where=path, fix="Name another file, or pass --force.")


# -- one file


def _rescue_file(
    src: SourceLike, path: str, target: str, member: str, fill: Fill | None, *, dry_run: bool, progress: _Progress
) -> Rescue:
    with ExitStack() as stack:
        notes: list[str] = []
        if path and os.path.isdir(path):  # noqa: PTH112 - as above
            recovered = recover_directory(path)
            source = recovered.source
        else:
            source, recovered = _recovered(src, path, member, stack, notes)
        with gc_paused():
            recovered, checkpoint = completed(recovered, fill=fill is not None)
            if checkpoint.format not in FORMATS:
                raise _nothing_to_rescue(checkpoint, checkpoint.path, recovered.lost_records)
            if checkpoint.format in ("gguf", "npz", "npy"):
                what = f"a rescue does not take files of this format ({FORMATS[checkpoint.format]})"
                raise RescueError(what, where=checkpoint.path, fix="transload.open reads the tensors that are whole.")
            # The file keeps its format, and loaders rely on this suffix.
            if target and target.lower().endswith(".safetensors") != (checkpoint.format == "safetensors"):
                what = f"the rescued file has the format {checkpoint.format}: rescue does not change the format"
                fix = "Choose a fitting name, then convert it: transload convert RESCUED OTHER."
                raise UsageError(what, where=target, fix=fix)
            outcomes = Outcomes(checkpoint, recovered)
            tensors = tuple(outcomes.of(tensor) for tensor in checkpoint.tensors)
            records = _lost_records(checkpoint, recovered)
            lost = any(outcome.state == "lost" for outcome in tensors)
            kept = any(outcome.nbytes for outcome in tensors if outcome.state != "lost")
            # A file without tensors is worth saving if its index is undamaged.
            main = [pickle for pickle in checkpoint.pickles if pickle.main]
            readable = any(not pickle.broken and pickle.end > pickle.start for pickle in main)
            # A program runs without the debug records, which map its lines to the original source.
            runs = all(record.name.endswith((".debug_pkl", "version")) for record in records)
            incomplete = kept and checkpoint.format in ("torchscript", "torch-export") and not runs
            out: Source | None = None
            if not kept and (lost or not (readable or checkpoint.format == "safetensors")):
                how = "nothing"
            elif incomplete or (lost and not fill):
                out = without_lost(recovered, checkpoint, outcomes)
                how = "weights" if is_program(checkpoint) else "left-out"
            elif lost and fill:
                out, how = filled(recovered, checkpoint, fill), "filled"
            elif recovered.exact:
                out, how = recovered.source, "exact"
            else:
                out = rebuilt(recovered, recovered.records) if recovered.records else recovered.source
                how = "left-out" if recovered.index_rebuilt else "rebuilt"
            new = checkpoint
            if out is not None:
                refuse_growth(out.size, recovered)
                new = checkpoint if out is recovered.source else read_source(out)
                held = {tensor.name for tensor in new.tensors}
                why = "the new file cannot hold it"
                tensors = tuple(
                    each
                    if each.state == "lost" or each.name in held
                    else each._replace(state="lost", checked=False, why=why)
                    for each in tensors
                )
        made = Rescue(
            path or source.name,
            target,
            f"{target}.rescue.json" if target else "",
            checkpoint.format,
            source.size,
            how,
            bool(out and target and not dry_run),
            tensors,
            records,
            recovered.repairs,
            fill or "",
            (*notes, *recovered.notes),
            (*_warnings(checkpoint, recovered, new if out else None), *doubts(recovered.repairs)),
        )
        if made.done and out is not None:
            report_progress = progress_counter(progress, out.size, "writing")
            with Bundle(overwrite=True) as bundle:  # which also makes the directories that do not exist
                sink = bundle.add(target)
                for start in range(0, out.size, _PIECE):
                    count = min(_PIECE, out.size - start)
                    data = out.read(start, count)
                    if len(data) < count:
                        raise CannotReadError("the file became shorter while it was read", where=out.name)
                    sink.write([data])
                    if report_progress is not None:
                        report_progress(len(data))
        return made


def _recovered(src: SourceLike, path: str, member: str, stack: ExitStack, notes: list[str]) -> tuple[Source, Recovered]:
    """Open the source, and recover the file in it."""
    folder, name = os.path.split(path)
    if name.endswith(".distcp") and os.path.exists(os.path.join(folder, ".metadata")):  # noqa: PTH110, PTH118 - as above
        # A rank's file is a sequence of small archives, which ``.metadata`` describes.
        what = "this is one of the files of a torch.distributed.checkpoint directory"
        raise RescueError(what, where=path, fix=f"Rescue the directory.\n{rescue_command(folder or '.')}")
    source = open_source(src)
    stack.callback(source.close)
    if not source.size:
        raise RescueError("the file is empty", where=source.name)
    inner = (journal_undone(path, source, notes) if path else None) or source
    inner, whole = unwrapped(inner, member, stack, notes)
    if holds_tensors(inner):  # recover would find the legacy stream of its first tensor
        what = "it is a plain pickle: nothing in it shows what was lost, or could replace it"
        fix = f"If it is whole, this takes its tensors out: transload convert {quoted(inner.name)} NEW.pt"
        raise RescueError(what, where=inner.name, fix=fix)
    recovered = recover(inner, stack)
    if recovered is None:  # another format, which can only be read
        checkpoint = read_source(inner)
        if checkpoint.format not in FORMATS or not checkpoint.tensors:
            raise _nothing_to_rescue(checkpoint, inner.name)
        recovered = Recovered(inner, exact=True, all_unchecked=True)
    if recovered.all_unchecked and not whole:
        broken = "the compressed data is damaged, and the file inside has no checksums"
        recovered = recovered._replace(warnings=(*recovered.warnings, broken))
    return source, recovered._replace(nbytes=inner.size)


def _nothing_to_rescue(checkpoint: Checkpoint, where: str, lost: Sequence[LostRecord] = ()) -> RescueError:
    what = "nothing can be recovered: the part of the file that names its tensors is lost"
    problem = next((problem for problem in checkpoint.problems if problem.code == "not-a-checkpoint"), None)
    if problem is not None and problem.title and all(record.name != "data.pkl" for record in lost):
        what = f"the file is not a checkpoint: it is {problem.title}"
    return RescueError(what, where=where, fix=next((fix for each in checkpoint.problems for fix in each.fix), ""))


def _lost_records(checkpoint: Checkpoint, recovered: Recovered) -> tuple[LostRecord, ...]:
    """The lost records that are not storages of tensors."""
    used = [storage for storage in checkpoint.storages if storage.tensors]
    held = METADATA | {name for s in used for name in (s.record, f"data/{s.key}", f"tensors/{s.key}")}
    lost = [record for record in recovered.lost_records if record.name not in held]
    if recovered.records and is_program(checkpoint):
        names = {record.name.partition(b"/")[2]: record for record in recovered.records}
        code = {b"constants.pkl", b"model.json", b"archive_format", b".data/extern_modules"}
        if not (names.keys() & code or any(name.startswith(b"data/aotinductor/") for name in names)):
            lost.append(LostRecord("code", "the program is not in the file, only its tensors are"))
        versions = [names.get(name) for name in (b"version", b".data/version", b"archive_version")]
        if all(record is None or record.added for record in versions):
            lost.append(LostRecord("version", "it defines what the operators of the program mean"))
    return tuple(lost)


def _warnings(checkpoint: Checkpoint, recovered: Recovered, new: Checkpoint | None) -> list[str]:
    """What is uncertain, or wrong, in the new file."""
    found = [*recovered.warnings]
    if any(record.name == "data.pkl" for record in recovered.lost_records):
        found.append("the index does not match its checksum: names and shapes may be wrong")
    if recovered.all_unchecked and any(storage.nbytes and not storage.tensors for storage in checkpoint.storages):
        found.append("there are storages that no tensor uses: the part that names the tensors may be damaged")
    broken = [problem for problem in checkpoint.problems if problem.code == "tensor-broken"]
    found += [f"{problem.where}: {problem.detail}" for problem in broken[:_SHOWN]]
    if len(broken) > _SHOWN:
        found.append(f"and {len(broken) - _SHOWN:,} more broken tensors")
    if new is not None:
        judged = judge(new)
        if judged.integrity in ("damaged", "not-a-checkpoint"):
            found += [finding.title for finding in judged.findings if finding.severity == "error"][:_SHOWN]
    return found


# -- several files

_SHOWN_BY_TENSORS = frozenset(
    {
        *("crc-mismatch", "dcp-piece-missing", "safetensors-truncated", "shard-tensor-missing", "storage-cut"),
        *("storage-missing", "tensor-broken", "zeros-at-end", "zip-compressed", "zip-directory-broken"),
        *("zip-misplaced", "zip-no-descriptor", "zip-no-directory", "zip-no-version", "zip-one-reader"),
        *("zip-record-cut", "zip-shifted", "zip-trailing-bytes"),
    }
)
"""Problems that only concern the tensors that are lost: the others have a checksum, or are where they should be."""

_UNREAD = frozenset({"dcp-items-unread", "dcp-transformed", "directory-too-long", "link-dangling"})
"""Problems that do not mean damage, but because of which something was not read."""


def _rescue_files(path: str, target: str, *, dry_run: bool, overwrite: bool, progress: _Progress) -> Rescue:
    """Rescue a checkpoint of several files, given its directory or index."""
    with open_content(path) as content:
        checkpoint = content.checkpoint
        every = records_of(content)
        bad = sum_records(content, every)
        # Undo flipped bits that checksums identify.
        sources: dict[str, Source] = {}
        repairs: list[Repair] = []
        undone: set[Key] = set()
        for file, records in every.items():
            damaged = [record for record in records if key_of(file, record) in bad and record.crc32 is not None]
            claims = [Claim(r.offset or 0, r.stored, r.size, r.method, (r.crc32 or 0,)) for r in damaged]
            source = content.open_file(file)
            found: list[Repair] = []
            for record, verdict in zip(damaged, check_records(source, claims), strict=True):
                if verdict.state == "mended":
                    found += (repair._replace(record=f"{file} › {record.name}") for repair in verdict.repairs)
                    undone.add(key_of(file, record))
            if found:
                sources[file] = Assembly(repaired(source, 0, source.size, found), source.name)
                repairs += found
        bad = {key: problem for key, problem in bad.items() if key not in undone}
        names = [f"{file} › {name}" for file, name, _ in {**bad, **dict.fromkeys(undone)}]
        names += [problem.where for problem in checkpoint.problems if problem.code == "crc-mismatch"]
        # Damaged pickles, from which names and shapes were read.
        indexes = [name for name in dict.fromkeys(names) if name.endswith(".pkl")]
        over = Content(checkpoint, lambda name: sources.get(name) or content.open_file(name), content.parts)
        outcomes = tuple(_outcomes(over, every, bad, undone, indexes))
        lost = {outcome.name for outcome in outcomes if outcome.state == "lost"}
        kept = tuple(tensor for tensor in checkpoint.tensors if tensor.name not in lost)
        warnings = tuple(_file_warnings(checkpoint, lost))
        how = ("left-out" if lost or warnings else "rebuilt") if any(tensor.nbytes for tensor in kept) else "nothing"
        advice = "; rescue that file by itself first"  # which is not possible for a sequence of archives
        made = Rescue(
            path,
            target,
            f"{target}.rescue.json" if target else "",
            checkpoint.format,
            checkpoint.nbytes,
            how,
            bool(target and how != "nothing" and not dry_run),
            outcomes,
            tuple(LostRecord(name, f"this index is damaged{'' if '@' in name else advice}") for name in indexes),
            tuple(repairs),
            warnings=(*warnings, *doubts(repairs)),
        )
        if not made.done:
            return made
        from transload.writing import write_content
        from transload.writing.plan import Options, format_of

        over.checkpoint = replace(checkpoint, tensors=kept)
        done = write_content(
            over, target, format_of(target), Options(), verify=True, overwrite=overwrite, progress=progress
        )
        beside = (f"everything that is not a tensor, as plain data: {done.leftovers}",) if done.leftovers else ()
        others = tuple(LostRecord(each.name, each.why) for each in (*done.left, *done.listed) if each.name not in lost)
        return replace(made, notes=(*made.notes, *done.notes, *beside), records=(*made.records, *others))


def _outcomes(
    content: Content, every: Records, bad: dict[Key, Problem], undone: set[Key], indexes: list[str]
) -> Iterator[TensorOutcome]:
    """What became of each tensor, including those that an index names and no file has."""
    checkpoint = content.checkpoint
    damaged = {damage.name: damage for damage in damages(content, every, bad, {})}
    # The id of a storage begins with its file, or the archive within a file. Of many damaged pickles only the first are
    # listed. Then none can be trusted, and the empty prefix matches every id.
    unnamed = any(problem.code == "crc-mismatch" and not problem.where for problem in checkpoint.problems)
    distrusted = ("",) if unnamed else tuple(f"{name.partition(' › ')[0]}:" for name in indexes)
    # Records both by name and by offset: a compressed storage has no offset.
    keys = [key_of(file, record) for file, records in every.items() for record in records if record.crc32 is not None]
    summed = {place for key in keys for place in (key[:2], key[::2])}
    repaired_at = {place for key in undone for place in (key[:2], key[::2])}
    for tensor in checkpoint.tensors:
        damage = damaged.get(tensor.name)
        stored = (content.storage(part) for part in with_parts(tensor))
        held = [storage for storage in stored if storage is not None and storage.nbytes]
        places = {(each.file, each.record if each.offset is None else each.offset) for each in held}
        if damage is None and not any(each.id.startswith(distrusted) for each in held):
            state: Literal["mended", "whole"] = "mended" if repaired_at & places else "whole"
            yield TensorOutcome(tensor.name, state, tensor.nbytes, places <= summed)
        else:
            why = damage.detail if damage is not None else "the index that names it is damaged"
            yield TensorOutcome(tensor.name, "lost", tensor.nbytes, checked=False, why=why)
    there = {tensor.name for tensor in checkpoint.tensors}
    for name, damage in damaged.items():
        if name not in there:
            yield TensorOutcome(name, "lost", 0, checked=False, why=damage.detail)


def _file_warnings(checkpoint: Checkpoint, lost: Container[str]) -> Iterator[str]:
    """What is wrong with the files, apart from the tensors that are lost."""
    for problem in checkpoint.problems:
        rule = rule_of(problem.code)
        if problem.code in _SHOWN_BY_TENSORS or problem.where in lost:
            continue
        if rule.integrity == "whole" and problem.code not in _UNREAD:
            continue
        words = f"{rule.title} ({problem.detail})" if problem.detail else rule.title
        yield f"{problem.where}: {words}" if problem.where else words
        if problem.code == "index-invalid":
            yield "numbered shards need no index: move it away, and rescue them again"
