"""Save what is left of a damaged checkpoint into a new file: bits repaired, lost tensors left out or filled.

The source is never written. torch is not needed, nothing in the file is run, and no name in it becomes a path.

A rescue of one file goes through these modules: `recover` removes the layers around it and turns it into a file that
the reader can read, with the help of `archive` if it is an archive; `damaged_index` reads what is left of an index.
This module finds out which tensors are undamaged, and makes the new file: the recovered one, unchanged, with lost bytes
filled, or without the lost tensors. Checkpoints of several files list where each tensor is, so no layout has to be
guessed: damaged tensors are found as in `verify`, and the others are converted into one file.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from math import nan
from operator import attrgetter
from struct import pack
from typing import Any, Literal

from transload.checkpoint import Checkpoint, Record, Tensor
from transload.contents import byte_span, with_parts
from transload.dtypes import ITEMSIZE, itemsize
from transload.errors import CannotReadError, RescueError, UsageError
from transload.findings import join_names, quoted, rescue_command
from transload.format import FORMATS, format_of
from transload.formats import gc_paused, pickle_machine, read_source
from transload.formats.graph import Locate, StorageTable, Tree, declared_storages, find_tensors
from transload.formats.pickle_streams import run_at
from transload.formats.pickle_writer import CannotPickleGraphError, dumps
from transload.formats.plain_pickle import holds_tensors
from transload.formats.safetensors import FIELDS, PREFIX
from transload.frozen import Frozen, NamedTuple, Reported, replace
from transload.io.atomic import AtomicFile, refuse_missing_directory, refuse_name
from transload.io.packed import Assembly, SourceRange
from transload.io.pool import progress_counter
from transload.io.sources import Progress, Source, SourceLike, is_set, open_source
from transload.judge import judge
from transload.judge.problems import rule_of
from transload.nodes import REBUILDS, Call, Dict, called, walk_nodes
from transload.opening import OpenCheckpoint, inspect
from transload.opening.damage import Key, damages, key_of, records_of, sum_records
from transload.opening.elements import ElementReader
from transload.render.json import strict
from transload.render.lines import Block, Prose, Table, as_text, row
from transload.render.words import path_text, plural, printable, size
from transload.rescuing.archive import (
    METADATA,
    ArchiveRecord,
    Filler,
    LostRange,
    LostRecord,
    RebuiltArchive,
    Recovered,
    checksum,
    literal,
    name_below_root,
    recover_directory,
    repaired,
    replaced,
    stored_record,
    with_records,
)
from transload.rescuing.bitflips import Claim, Repair, check_records
from transload.rescuing.damaged_index import Unread, is_ordered, read_damaged_index
from transload.rescuing.recover import journal_undone, recover, unwrapped
from transload.writing.output import Bundle, begins_with, refuse_existing
from transload.writing.to_torch import TensorCalls

__all__ = ["Rescue", "report", "rescue"]

Fill = Literal["zeros", "nan"]
_PIECE = 4 << 20
_SHOWN = 8
_INDEX = "data.pkl"
_REPORT = b'{\n "schema": 1,\n "path":'
"""How every report begins."""


class TensorOutcome(NamedTuple):
    """What became of one tensor.

    ``checked`` is whether a checksum confirms its bytes. ``why`` is the reason it is lost.
    """

    name: str
    state: Literal["whole", "mended", "lost"]
    nbytes: int
    checked: bool
    why: str = ""


class Rescue(Frozen, Reported):
    """What became of a damaged file, by tensor.

    ``tensors`` are all tensors the file names, each ``whole``, ``mended`` (repaired) or ``lost``; ``records`` are other
    parts of it that are lost. ``mends`` are the bytes that were repaired. ``how`` is what was written, or would be:
    ``exact`` (as far as is known, byte for byte the file that was saved), ``rebuilt`` (everything, in a new layout),
    ``filled``, ``left-out``, ``weights`` (a program's tensors, as a dictionary), or ``nothing``. ``notes`` say what
    else was done, ``warnings`` what is uncertain.
    """

    path: str
    out: str
    report: str
    format: str
    nbytes: int
    how: str
    done: bool
    tensors: tuple[TensorOutcome, ...]
    records: tuple[LostRecord, ...] = ()
    mends: tuple[Repair, ...] = ()
    fill: str = ""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def whole(self) -> tuple[TensorOutcome, ...]:
        """Tensors whose bytes are those that were saved."""
        return tuple(outcome for outcome in self.tensors if outcome.state == "whole")

    @property
    def mended(self) -> tuple[TensorOutcome, ...]:
        """Tensors in which a flipped bit was repaired."""
        return tuple(outcome for outcome in self.tensors if outcome.state == "mended")

    @property
    def lost(self) -> tuple[TensorOutcome, ...]:
        """Tensors that are not in the new file, or only with some of their bytes filled."""
        return tuple(outcome for outcome in self.tensors if outcome.state == "lost")

    @property
    def complete(self) -> bool:
        """Whether everything was recovered, without doubt."""
        sure = all(repair.certainty == "proven" for repair in self.mends)
        return sure and self.how != "nothing" and not (self.lost or self.records or self.warnings)

    @property
    def exit_code(self) -> int:
        """0 if everything was recovered, 1 if part of it was or a repair is not proven, 2 if nothing."""
        if self.how == "nothing":
            return 2
        return 0 if self.complete else 1

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: what ``--json`` prints, and the report beside the new file."""
        names = ("path", "out", "report", "format", "nbytes", "how", "done", "complete", "fill")
        return {
            "schema": 1,
            **{name: getattr(self, name) for name in names},
            **{name: getattr(self, name) or None for name in ("out", "report", "fill")},
            "counts": {"whole": len(self.whole), "mended": len(self.mended), "lost": len(self.lost)},
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            "mends": [
                {**repair._asdict(), "bits": list(repair.bits), "record": repair.record or None}
                for repair in self.mends
            ],
            "records": [record._asdict() for record in self.records],
            "tensors": [{**outcome._asdict(), "why": outcome.why or None} for outcome in self.tensors],
        }

    def __str__(self) -> str:
        """The report as the command line prints it."""
        return as_text(report(self))


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
        refuse_name(target)
        refuse_missing_directory(target)
    if os.path.isdir(target):
        raise UsageError("this is a directory", where=target, fix="Add the name of a file.")
    existing = [each for each in (target, f"{target}.rescue.json") if target and os.path.lexists(each)]
    for each in existing:
        source, written = os.path.realpath(path), os.path.realpath(each)
        if path and (written == source or written.startswith(source + os.sep)):
            raise UsageError("a rescue never writes to its source", where=each, fix="Name another file.")
    for each in existing:  # only the report of another rescue is overwritten unasked
        if each == target or not begins_with(each, _REPORT):
            refuse_existing(each, overwrite=overwrite)
    if is_set(path) and inspect(path).traits.several:
        if fill or member:
            what = "several files become one new file without the lost tensors: there is nothing to fill or to extract"
            raise UsageError(what, where=path, fix="Omit fill and member.")
        result = _rescue_files(path, target, dry_run=dry_run, overwrite=overwrite, progress=progress)
    else:
        result = _rescue_file(src, path, target, member, fill, dry_run=dry_run, progress=progress)
    count = sum(repair.certainty != "proven" for repair in result.mends)
    if count:
        are = "1 repaired byte is" if count == 1 else f"{count:,} repaired bytes are"
        doubt = f"{are} not proven: other damage can look the same, so compare with another copy if there is one"
        result = replace(result, warnings=(*result.warnings, doubt))
    if result.done:
        text = json.dumps(strict(result.to_dict()), indent=1, ensure_ascii=True)
        with AtomicFile(result.report) as file:
            file.write([text.encode() + b"\n"])
    return result


# -- one file


def _rescue_file(
    src: SourceLike, path: str, target: str, member: str, fill: Fill | None, *, dry_run: bool, progress: Progress
) -> Rescue:
    with ExitStack() as stack:
        if path and os.path.isdir(path):
            recovered = recover_directory(path)
            source = recovered.source
        else:
            source, recovered = _recovered(src, path, member, stack)
        with gc_paused():
            recovered, checkpoint = completed(recovered, fill=fill is not None)
            # An archive of arrays may have no record left that shows what it was.
            known = checkpoint.format in FORMATS
            form = format_of(checkpoint.format if known else read_source(source).format)
            if form.named and not form.rescued:
                what = f"rescue does not accept files of this format ({form.words})"
                raise RescueError(what, where=checkpoint.path, fix="transload.open reads the tensors that are whole.")
            if not known:
                raise _nothing_to_rescue(checkpoint, checkpoint.path, recovered.lost_records)
            # The file keeps its format, and loaders rely on this suffix.
            if target and target.lower().endswith(".safetensors") != (form.suffix == ".safetensors"):
                what = f"the rescued file has the format {checkpoint.format}: rescue does not change the format"
                fix = "Choose a matching name, then convert it: transload convert RESCUED OTHER."
                raise UsageError(what, where=target, fix=fix)
            outcomes = Outcomes(checkpoint, recovered)
            tensors = [outcomes.of(tensor) for tensor in checkpoint.tensors]
            records = _lost_records(checkpoint, recovered)
            lost = any(outcome.state == "lost" for outcome in tensors)
            kept = any(outcome.nbytes for outcome in tensors if outcome.state != "lost")
            # A file without tensors is worth saving if its index is undamaged.
            main = [pickle for pickle in checkpoint.pickles if pickle.main]
            readable = any(not pickle.broken and pickle.end > pickle.start for pickle in main)
            # A program runs without the debug records, which map its lines to the original source.
            runs = all(record.name.endswith((".debug_pkl", "version")) for record in records)
            incomplete = kept and form.runs and not runs
            out: Source | None = None
            unfilled: list[str] = []
            if not kept and (lost or not (readable or form.named)):
                how = "nothing"
            elif incomplete or (lost and not fill):
                out = without_lost(recovered, checkpoint, outcomes)
                how = "weights" if is_program(checkpoint) else "left-out"
            elif lost and fill:
                out, how = filled(recovered, checkpoint, fill), "filled"
                unfilled = [outcome.name for outcome in tensors if outcome.why == _NO_PLACE]
            elif recovered.exact:
                out, how = recovered.source, "exact"
            else:
                out = rebuilt(recovered, recovered.records) if recovered.records else recovered.source
                how = "left-out" if recovered.index_rebuilt else "rebuilt"
            warnings = [*recovered.warnings]
            if unfilled:
                warnings.append(
                    f"{join_names(unfilled, _SHOWN)}: still broken in the new file, since there is nothing to fill"
                )
            if any(record.name == _INDEX for record in recovered.lost_records):
                warnings.append("the index does not match its checksum: names and shapes may be wrong")
            if recovered.all_unchecked and any(each.nbytes and not each.tensors for each in checkpoint.storages):
                what = "there are storages that no tensor uses: the part that names the tensors may be damaged"
                warnings.append(what)
            broken = [problem for problem in checkpoint.problems if problem.code == "tensor-broken"]
            warnings += [f"{problem.where}: {problem.detail}" for problem in broken[:_SHOWN]]
            if len(broken) > _SHOWN:
                warnings.append(f"and {len(broken) - _SHOWN:,} more broken tensors")
            if out is not None:
                refuse_growth(out.size, recovered)
                new = judge(checkpoint if out is recovered.source else read_source(out))
                written = {tensor.name for tensor in new.tensors}
                for index, each in enumerate(tensors):
                    if each.state != "lost" and each.name not in written:
                        tensors[index] = each._replace(state="lost", checked=False, why="the new file cannot hold it")
                if new.integrity in ("damaged", "not-a-checkpoint"):
                    warnings += [finding.title for finding in new.findings if finding.severity == "error"][:_SHOWN]
        report_path = f"{target}.rescue.json" if target else ""
        done = bool(out and target and not dry_run)
        file = (path or source.name, target, report_path, checkpoint.format, source.size, how, done)
        result = Rescue(*file, tuple(tensors), records, recovered.repairs, fill or "", recovered.notes, tuple(warnings))
        if result.done and out is not None:
            report_progress = progress_counter(progress, out.size, "writing")
            with Bundle(overwrite=True) as bundle:
                sink = bundle.add(target)
                for start in range(0, out.size, _PIECE):
                    count = min(_PIECE, out.size - start)
                    data = out.read(start, count)
                    if len(data) < count:
                        raise CannotReadError("the file became shorter while it was read", where=out.name)
                    sink.write([data])
                    if report_progress is not None:
                        report_progress(len(data))
        return result


def _recovered(src: SourceLike, path: str, member: str, stack: ExitStack) -> tuple[Source, Recovered]:
    """Open the source, and recover the file in it."""
    notes: list[str] = []
    folder, name = os.path.split(path)
    if name.endswith(".distcp") and os.path.exists(os.path.join(folder, ".metadata")):
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
        fix = f"If it is whole, this extracts its tensors: transload convert {quoted(inner.name)} NEW.pt"
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
    return source, recovered._replace(nbytes=inner.size, notes=(*notes, *recovered.notes))


def _nothing_to_rescue(checkpoint: Checkpoint, where: str, lost: Sequence[LostRecord] = ()) -> RescueError:
    what = "nothing can be recovered: the part of the file that names its tensors is lost"
    problem = next((problem for problem in checkpoint.problems if problem.code == "not-a-checkpoint"), None)
    if problem is not None and problem.title and all(record.name != "data.pkl" for record in lost):
        what = f"the file is not a checkpoint: it is {problem.title.removesuffix(', not a checkpoint')}"
    return RescueError(what, where=where, fix=next((fix for each in checkpoint.problems for fix in each.fix), ""))


def _lost_records(checkpoint: Checkpoint, recovered: Recovered) -> tuple[LostRecord, ...]:
    """The lost records that are not storages of tensors."""
    used = [storage for storage in checkpoint.storages if storage.tensors]
    ignored = METADATA | {name for s in used for name in (s.record, f"data/{s.key}", f"tensors/{s.key}")}
    lost = [record for record in recovered.lost_records if record.name not in ignored]
    if recovered.records and is_program(checkpoint):
        names = {record.name.partition(b"/")[2]: record for record in recovered.records}
        code = {b"constants.pkl", b"model.json", b"archive_format", b".data/extern_modules"}
        if not (names.keys() & code or any(name.startswith(b"data/aotinductor/") for name in names)):
            lost.append(LostRecord("code", "the program is not in the file, only its tensors are"))
        versions = [names.get(name) for name in (b"version", b".data/version", b"archive_version")]
        if all(record is None or record.added for record in versions):
            lost.append(LostRecord("version", "it defines what the operators of the program mean"))
    return tuple(lost)


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
"""Problems that are not damage, but prevented something from being read."""


def _rescue_files(path: str, target: str, *, dry_run: bool, overwrite: bool, progress: Progress) -> Rescue:
    """Rescue a checkpoint of several files, given its directory or index."""
    with OpenCheckpoint(path) as opened:
        reader, checkpoint = opened.elements, opened.checkpoint
        every = records_of(reader)
        bad = sum_records(reader, every)
        # Undo flipped bits that checksums identify.
        sources: dict[str, Source] = {}
        repairs: list[Repair] = []
        undone: set[Key] = set()
        for file, records in every.items():
            damaged = [record for record in records if key_of(file, record) in bad and record.crc32 is not None]
            claims = [Claim(r.offset or 0, r.stored, r.size, r.method, (r.crc32 or 0,)) for r in damaged]
            source = reader.open_file(file)
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
        overlay = ElementReader(checkpoint, lambda name: sources.get(name) or reader.open_file(name), reader.files)
        # The id of a storage begins with its file, or the archive within a file. If many pickles are damaged, only the
        # first are listed: then none can be trusted, and the empty prefix matches every id.
        unnamed = any(problem.code == "crc-mismatch" and not problem.where for problem in checkpoint.problems)
        distrusted = ("",) if unnamed else tuple(f"{name.partition(' › ')[0]}:" for name in indexes)
        # Records both by name and by offset: a compressed storage has no offset.
        keys = [key_of(file, record) for file, inside in every.items() for record in inside if record.crc32 is not None]
        summed = {place for key in keys for place in (key[:2], key[::2])}
        repaired_at = {place for key in undone for place in (key[:2], key[::2])}
        reasons = {damage.name: damage.detail for damage in damages(overlay, every, bad, {})}
        outcomes: list[TensorOutcome] = []
        for tensor in checkpoint.tensors:
            stored = (overlay.storage(part) for part in with_parts(tensor))
            storages = [storage for storage in stored if storage is not None and storage.nbytes]
            places = {(each.file, each.record if each.offset is None else each.offset) for each in storages}
            if tensor.name not in reasons and not any(each.id.startswith(distrusted) for each in storages):
                state: Literal["mended", "whole"] = "mended" if repaired_at & places else "whole"
                outcomes.append(TensorOutcome(tensor.name, state, tensor.nbytes, places <= summed))
            else:
                why = reasons.get(tensor.name, "the index that names it is damaged")
                outcomes.append(TensorOutcome(tensor.name, "lost", tensor.nbytes, checked=False, why=why))
        existing = {tensor.name for tensor in checkpoint.tensors}
        for name, why in reasons.items():
            if name not in existing:  # an index names it, and no file has it
                outcomes.append(TensorOutcome(name, "lost", 0, checked=False, why=why))
        lost = {outcome.name for outcome in outcomes if outcome.state == "lost"}
        kept = tuple(tensor for tensor in checkpoint.tensors if tensor.name not in lost)
        warnings: list[str] = []  # what is wrong with the files, apart from the tensors that are lost
        for problem in checkpoint.problems:
            rule = rule_of(problem.code)
            if problem.code in _SHOWN_BY_TENSORS or problem.where in lost:
                continue
            if rule.integrity == "whole" and problem.code not in _UNREAD:
                continue
            words = f"{rule.title} ({problem.detail})" if problem.detail else rule.title
            warnings.append(f"{problem.where}: {words}" if problem.where else words)
            if problem.code == "index-invalid":
                warnings.append("numbered shards need no index: move it away, and rescue them again")
        how = ("left-out" if lost or warnings else "rebuilt") if any(tensor.nbytes for tensor in kept) else "nothing"
        advice = "; rescue that file by itself first"  # which is not possible for a sequence of archives
        unread = tuple(LostRecord(name, f"this index is damaged{'' if '@' in name else advice}") for name in indexes)
        report_path = f"{target}.rescue.json" if target else ""
        done = bool(target and how != "nothing" and not dry_run)
        files = (path, target, report_path, checkpoint.format, checkpoint.nbytes, how, done)
        result = Rescue(*files, tuple(outcomes), unread, tuple(repairs), warnings=tuple(warnings))
        if not result.done:
            return result
        from transload.writing import write_content
        from transload.writing.plan import Options, target_format

        overlay.checkpoint = replace(checkpoint, tensors=kept)
        kind = target_format(target)
        new = write_content(overlay, target, kind, Options(), verify=True, overwrite=overwrite, progress=progress)
        beside = (f"everything that is not a tensor, as plain data: {new.leftovers}",) if new.leftovers else ()
        others = tuple(LostRecord(each.name, each.why) for each in (*new.left, *new.listed) if each.name not in lost)
        return replace(result, notes=(*new.notes, *beside), records=(*result.records, *others))


# -- what became of each tensor

_NOT_IN_FILE = "its bytes are not in the file"
_NO_PLACE = "the file does not say where its bytes are"
_MAX_STORAGE = 1 << 45
"""The largest size of a missing storage that is believed: 32 TB."""

_MAX_INDEX = 64 << 20
"""The largest damaged index that is read: enough for half a million tensors."""

_MAX_GROWTH = 1000
_MIN_GROWTH_LIMIT = 1 << 30
"""Filling may make the file ``_MAX_GROWTH`` times larger, or this large: a file of a kilobyte can claim petabytes."""

_NAN = {
    **dict.fromkeys(("float64", "complex128"), pack("<d", nan)),
    **dict.fromkeys(("float32", "complex64"), pack("<f", nan)),
    **dict.fromkeys(("float16", "complex32"), pack("<e", nan)),
    **dict.fromkeys(("bfloat16", "bcomplex32"), pack("<f", nan)[2:]),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), b"\x7f"),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz"), b"\x80"),
    "float8_e8m0fnu": b"\xff",
}


def is_program(checkpoint: Checkpoint) -> bool:
    """Whether its tensors belong to a program, from which none can be removed, even if its code is lost."""
    pickles = [pickle for pickle in checkpoint.pickles if pickle.main]
    scripted = any(name.module.split(".")[0] == "__torch__" for pickle in pickles for name in pickle.globals.values())
    return checkpoint.traits.program or scripted


class Outcomes:
    """Compares the bytes of tensors with what is lost and what was repaired."""

    def __init__(self, checkpoint: Checkpoint, recovered: Recovered) -> None:
        self._storages = {storage.id: storage for storage in checkpoint.storages}
        self._lost = sorted(recovered.lost_ranges)
        self._repaired_at = sorted(recovered.repaired_at)
        self._unchecked = set(recovered.unchecked)
        if self._lost:  # there is no checksum for what is left of a storage
            self._unchecked |= {
                storage.record
                for storage in checkpoint.storages
                if storage.offset is not None and self._lost_in(storage.offset, storage.offset + storage.nbytes)
            }
        index_lost = any(record.name == "data.pkl" for record in recovered.lost_records)
        self._all_unchecked = recovered.all_unchecked or index_lost

    def of(self, tensor: Tensor) -> TensorOutcome:
        """What became of a tensor."""
        repaired, checked = False, not self._all_unchecked
        for part in with_parts(tensor):
            storage = self._storages.get(part.storage or "")
            if storage is None:
                if part.kind == "strided" and part.numel:  # its entry in the header is broken
                    return TensorOutcome(tensor.name, "lost", tensor.nbytes, checked=False, why=_NO_PLACE)
                continue
            checked = checked and storage.record not in self._unchecked
            if not part.numel:
                continue
            start, end = ((storage.offset or 0) + place for place in byte_span(part))
            lost, why = self._lost_in(start, end), ""
            if storage.offset is None or storage.compressed:
                why = _NOT_IN_FILE
            elif end > storage.offset + storage.stored:
                why = "the file ends before its last byte"
            elif lost is not None:
                why = lost.why
            if why and storage.device != "meta":
                return TensorOutcome(tensor.name, "lost", tensor.nbytes, checked=False, why=why)
            repaired |= bisect_left(self._repaired_at, start) < bisect_left(self._repaired_at, end)
        return TensorOutcome(tensor.name, "mended" if repaired else "whole", tensor.nbytes, checked)

    def _lost_in(self, start: int, end: int) -> LostRange | None:
        """The first lost range that overlaps an interval."""
        index = bisect_right(self._lost, start, key=attrgetter("end"))
        found = self._lost[index] if index < len(self._lost) else None
        return found if found is not None and found.start < end else None


# -- records that an archive lacks


def completed(recovered: Recovered, *, fill: bool) -> tuple[Recovered, Checkpoint]:
    """Add records for missing storages to a recovered file, and read its content.

    Without ``fill`` only empty storages get a record. The tensors of a program whose code is lost have the names that
    they would have in the program.
    """
    checkpoint = read_source(recovered.source)
    if not recovered.records or checkpoint.traits.container != "zip":
        return recovered, checkpoint
    if not is_program(checkpoint) and _is_index_damaged(recovered, checkpoint):
        recovered = _with_rebuilt_index(recovered)
        checkpoint = read_source(recovered.source)
    records, name = recovered.records, recovered.source.name
    root = records[0].name.partition(b"/")[0]
    order = 1 + max(record.order for record in records)
    if is_program(checkpoint):
        empty_tuple = stored_record(root + b"/constants.pkl", literal(b"\x80\x02)."), order=order)
        return recovered, read_source(RebuiltArchive([*records, empty_tuple], name))
    folder = b"/tensors/" if any(record.name.startswith(root + b"/tensors/") for record in records) else b"/data/"
    added: dict[bytes, ArchiveRecord] = {}
    for storage in checkpoint.storages:
        missing = not storage.record and storage.device != "meta" and storage.nbytes < _MAX_STORAGE
        if missing and (fill or not storage.nbytes):
            key = root + folder + storage.key.encode("utf-8", "backslashreplace")
            content = SourceRange(Filler(storage.nbytes), 0, storage.nbytes)
            made = stored_record(key, content, order=order + len(added), crc32=0)
            added[key] = made._replace(lost=(LostRange(0, storage.nbytes, _NOT_IN_FILE),) if storage.nbytes else ())
    if not added:
        return recovered, checkpoint
    lost = tuple(LostRecord(name_below_root(record.name), _NOT_IN_FILE) for record in added.values() if record.stored)
    other = with_records(recovered, (*records, *added.values()))
    other = other._replace(exact=False, lost_records=recovered.lost_records + lost)
    return other, read_source(other.source)


# -- a damaged index


def _is_index_damaged(recovered: Recovered, checkpoint: Checkpoint) -> bool:
    """Whether the index is so damaged that tensors are lost."""
    known = any(record.name == _INDEX for record in recovered.lost_records)
    if not (known or recovered.all_unchecked or _INDEX in recovered.unchecked):
        return False  # any problem was already there when it was saved
    if any(pickle.main and pickle.broken for pickle in checkpoint.pickles):
        return True
    if not known and all(problem.code != "tensor-broken" for problem in checkpoint.problems):
        return False
    sizes = {storage.key: storage.nbytes for storage in checkpoint.storages if storage.tensors}
    return any(sizes.get(key) != record.stored for key, record in _storage_records(recovered.records).items())


def _storage_records(records: Sequence[ArchiveRecord]) -> dict[str, ArchiveRecord]:
    """The uncompressed records of storages, by key."""
    found = {name_below_root(record.name): record for record in records if not record.method}
    return {name.partition("/")[2]: record for name, record in found.items() if name.startswith(("data/", "tensors/"))}


def _with_rebuilt_index(recovered: Recovered) -> Recovered:
    """The archive with a new index, made of what is left of the old one.

    It contains each tensor whose storage has a record of the right size. Storages without tensors become flat tensors,
    named ``storage-12`` after their key.
    """
    index = next((record for record in recovered.records if name_below_root(record.name) == _INDEX), None)
    if index is None or index.method or index.stored > _MAX_INDEX:
        return recovered
    found, persistent, broken = read_damaged_index(Assembly(index.content, "").read(0, index.stored))
    stored = _storage_records(recovered.records)

    def locate(key: str, nbytes: int) -> Record | None:
        fits = key in stored and stored[key].stored == nbytes
        return Record(key, 0, nbytes, nbytes) if fits else None

    _prune(found, locate, lambda tree: any(slot.nbytes and slot.offset is None for slot in tree.storages))
    root = found if type(found) is Dict or is_ordered(found) else Dict([])
    items = root.items = root.items or []
    if root is not found and found is not None:
        items += ("object", found)
    tree = find_tensors(root, StorageTable(locate))
    used = {storage.key for storage in tree.storages if storage.tensors}
    # Each id gets a new table, since some are misread and would conflict.
    slots = filter(None, (StorageTable(locate).resolve(node) for node in persistent))
    dtypes = {slot.key: slot.dtype for slot, _, _ in slots if slot.record}
    flat: list[str] = []
    calls = TensorCalls([], ())
    for key, record in stored.items():
        if key not in used and record.stored:
            dtype = dtypes.get(key, "uint8")
            flat.append(f"storage-{key}")
            size = record.stored // ITEMSIZE[dtype]
            items += (flat[-1], calls.strided(key, record.stored, dtype, 0, (size,), (1,)))
    try:
        data = dumps(root, expand=(Unread, lambda _: None))
    except CannotPickleGraphError:
        return recovered
    records = [_with_content(each, data) if each is index else _realigned(each) for each in recovered.records]
    names = {tensor.name for tensor in tree.tensors}
    ends = {name.rpartition("/")[2] for name in names}
    gone = [name for name in dict.fromkeys(broken) if name not in ends]
    notes = [f"the index is damaged: {plural(len(names), 'tensor')} could be read from what is left of it"]
    if flat:
        some = ", ".join(flat[:_SHOWN]) + (" …" if len(flat) > _SHOWN else "")
        notes.append(f"{plural(len(flat), 'storage')} without name and shape became flat tensors: {some}")
    return with_records(recovered, records)._replace(
        exact=False,
        index_rebuilt=True,
        notes=(*recovered.notes, *notes),
        lost_records=(
            *(record for record in recovered.lost_records if record.name != _INDEX),
            LostRecord(_INDEX, "its bytes are damaged"),
            *(LostRecord(name, "its entry in the index is damaged") for name in gone),
        ),
    )


# -- files with all tensors


def refuse_growth(nbytes: int, recovered: Recovered) -> None:
    """Refuse to write far more bytes than the damaged file has."""
    if nbytes > max(_MIN_GROWTH_LIMIT, _MAX_GROWTH * recovered.nbytes):
        what = f"the file claims to have {nbytes:,} bytes and has {recovered.nbytes:,}"
        fix = "The tensor sizes in it are wrong."
        raise RescueError(what, where=recovered.source.name, fix=fix)


def rebuilt(recovered: Recovered, records: Sequence[ArchiveRecord]) -> Source:
    """An archive of these records; checksums are computed for those that are filled, or have none."""
    refuse_growth(sum(record.stored for record in records), recovered)
    summed = [
        record if record.crc32 or record.method else record._replace(crc32=checksum(record.content))
        for record in records
    ]
    return RebuiltArchive(summed, recovered.source.name)


def filled(recovered: Recovered, checkpoint: Checkpoint, fill: Fill) -> Source:
    """The recovered file with a pattern in place of lost bytes; only whole elements are filled."""
    dtypes: dict[str | None, str] = {}  # of the first tensor in each storage: newer files have untyped storages
    for tensor in checkpoint.tensors:
        dtypes.setdefault(tensor.storage, tensor.dtype)
    ranges = sorted(recovered.lost_ranges)
    fills: list[tuple[int, SourceRange]] = []
    for storage in checkpoint.storages:
        if storage.offset is None:
            continue
        dtype = dtypes.get(storage.id, storage.dtype)
        zero = bytes(itemsize(dtype))
        pattern = _NAN.get(dtype, zero) if fill == "nan" else zero
        if storage.big_endian:
            pattern = pattern[::-1]
        begin, end = storage.offset, storage.offset + storage.nbytes
        index = bisect_right(ranges, begin, key=attrgetter("end"))
        for lost in ranges[index : bisect_left(ranges, end, key=attrgetter("start"))]:
            first = max(lost.start - begin, 0)
            last = min(lost.end, end) - begin
            if first < last:
                first -= first % len(pattern)
                filler = Filler(last - first, pattern)
                fills.append((begin + first, SourceRange(filler, 0, filler.size)))
    fills.sort(key=lambda each: each[0])
    source = recovered.source
    whole = Assembly(replaced(source, 0, source.size, fills), source.name)
    if not recovered.records:
        return whole
    starts = RebuiltArchive(recovered.records, "").starts
    records = [
        record._replace(content=(SourceRange(whole, starts[record.name], record.stored),), crc32=0)
        if record.lost
        else record
        for record in recovered.records
    ]
    return rebuilt(recovered, records)


# -- files without the lost tensors


def without_lost(recovered: Recovered, checkpoint: Checkpoint, outcomes: Outcomes) -> Source:
    """The recovered file without the lost tensors. Of a program only a dictionary of the other tensors is left."""
    source = recovered.source
    lost = {tensor.name for tensor in checkpoint.tensors if outcomes.of(tensor).state == "lost"}
    kept = [tensor for tensor in checkpoint.tensors if tensor.name not in lost]
    form = checkpoint.traits
    if form.named:
        return _safetensors_of(source, checkpoint, kept)
    if is_program(checkpoint):
        return _weights_of(source, checkpoint, kept)
    pickle = next((pickle for pickle in checkpoint.pickles if pickle.main), None)
    if pickle is None or form.container not in ("zip", "stream"):
        what = "tensors cannot be left out of a file of this format"
        raise RescueError(what, where=source.name, fix="Fill them: --fill zeros (fill='zeros' in Python).")
    by_key = {storage.key: storage for storage in checkpoint.storages}

    def locate(key: str, _: int) -> Record | None:
        storage = by_key.get(key)
        return None if storage is None else Record(storage.record, storage.offset, storage.stored, storage.stored)

    try:
        _prune(pickle.root, locate, lambda tree: any(outcomes.of(each).state == "lost" for each in tree.tensors))
        index = dumps(pickle.root, pickle.protocol, expand=(Unread, lambda _: None))
    except CannotPickleGraphError as error:
        what = f"the index cannot be written without them ({error.what})"
        raise RescueError(what, where=source.name, fix="Fill them: --fill zeros (fill='zeros' in Python).") from error
    needed = declared_storages(pickle_machine.run(index, name="data.pkl"))
    if form.container == "stream":  # the first three pickles, the new object, and the storages it needs
        position = 0
        for _ in range(3):
            _, position = run_at(source, position, "")
        places = sorted((s.offset, s.key, s.nbytes) for s in checkpoint.storages if s.key in needed and s.offset)
        parts = [SourceRange(source, 0, position), literal(index + dumps([key for _, key, _ in places]))]
        parts += [SourceRange(source, offset - 8, nbytes + 8) for offset, _, nbytes in places]
        return Assembly(parts, source.name)
    gone = {record.name for record in recovered.lost_records}
    records: list[ArchiveRecord] = []
    for record in recovered.records:
        key = name_below_root(record.name)
        unused = key.startswith(("data/", "tensors/")) and key.partition("/")[2] not in needed
        if key == "data.pkl":
            records.append(_with_content(record, index))
        elif not (key in gone and unused):
            records.append(_realigned(record))
    return rebuilt(recovered, records)


def _with_content(record: ArchiveRecord, data: bytes) -> ArchiveRecord:
    return stored_record(record.name, literal(data), order=record.order)._replace(time=record.time, date=record.date)


def _realigned(record: ArchiveRecord) -> ArchiveRecord:
    """The record without the padding that fitted its old offset."""
    return record._replace(padding=None, before=())


def _prune(root: object, locate: Locate, is_lost: Callable[[Tree], bool]) -> None:
    """Replace lost tensors in a graph by ``Unread``, in place, and remove them from its dictionaries."""
    every = {id(node): node for node in walk_nodes([root]) if type(node) in (Call, Dict)}.values()
    for node in every:
        if type(node) is Call and called(node) in REBUILDS:
            tree = find_tensors(node, StorageTable(locate))
            if not tree.tensors or is_lost(tree):
                node.__class__ = Unread
    for node in every:
        items = node.items or []
        kept = [pair for pair in zip(items[::2], items[1::2], strict=False) if type(pair[1]) is not Unread]
        items[:] = [part for pair in kept for part in pair]
        pairs = node.args[0] if is_ordered(node) and type(node.args) is tuple and node.args else None
        if type(pairs) is list:  # how Python 2 writes an OrderedDict
            pairs[:] = [pair for pair in pairs if type(pair) not in (list, tuple) or Unread not in map(type, pair)]


def _safetensors_of(source: Source, checkpoint: Checkpoint, tensors: Sequence[Tensor]) -> Source:
    """A safetensors file with some of its tensors."""
    length = int.from_bytes(source.read(0, PREFIX), "little")
    table = json.loads(source.read(PREFIX, length))
    storages = {storage.id: storage for storage in checkpoint.storages}
    kept: dict[str, object] = {"__metadata__": table["__metadata__"]} if "__metadata__" in table else {}
    parts: list[SourceRange] = []
    at = 0
    for tensor in tensors:
        storage = storages.get(tensor.storage or "")
        if tensor.name in table and storage is not None and storage.offset is not None:
            entry = table[tensor.name]  # the reference also accepts a list of the fields
            fields = dict(zip(FIELDS, entry, strict=True)) if isinstance(entry, list) else entry
            kept[tensor.name] = {**fields, "data_offsets": [at, at + storage.nbytes]}
            parts.append(SourceRange(source, storage.offset, storage.nbytes))
            at += storage.nbytes
    header = json.dumps(kept, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    return Assembly([literal(len(header).to_bytes(PREFIX, "little") + header), *parts], source.name)


def _weights_of(source: Source, checkpoint: Checkpoint, tensors: Sequence[Tensor]) -> Source:
    """An archive with a dictionary of tensors by name, on the CPU, which share storages as before."""
    storages = {storage.id: storage for storage in checkpoint.storages}
    plain = [
        t for t in tensors if t.kind == "strided" and t.dtype in ITEMSIZE and not t.flags and t.storage in storages
    ]
    if not plain:
        what = "none of its tensors can be saved by itself"
        raise RescueError(what, where=source.name, fix="Fill them: --fill zeros (fill='zeros' in Python).")
    used = {ident: storages[ident] for ident in (tensor.storage or "" for tensor in plain)}
    keys = {ident: str(number) for number, ident in enumerate(used)}
    items: list[object] = []
    calls = TensorCalls([], ())
    for tensor in plain:
        storage = used[tensor.storage or ""]
        view = (tensor.dtype, tensor.offset, tensor.shape, tensor.stride)
        items += (tensor.name, calls.strided(keys[storage.id], storage.nbytes, *view))
    big_endian = any(storage.big_endian for storage in used.values())
    contents = {b"data.pkl": literal(dumps(Dict(items))), b"byteorder": literal(b"big" if big_endian else b"little")}
    for ident, storage in used.items():
        contents[b"data/" + keys[ident].encode()] = SourceRange(source, storage.offset or 0, storage.nbytes)
    contents[b"version"] = literal(b"3\n")
    return RebuiltArchive([stored_record(b"archive/" + name, part) for name, part in contents.items()], source.name)


# -- the report

_ROWS = 32
_HOW = {
    "exact": "the original file, byte for byte as far as can be determined",
    "rebuilt": "everything, in a new layout",
    "filled": "everything, with {fill} in place of what is lost",
    "left-out": "without what is lost",
    "weights": "a dictionary of its tensors: the program is incomplete",
    "nothing": "nothing: there is nothing to save",
}
_NOWHERE = "headers and directory"
_CERTAINTY = {"proven": "good", "probable": "trust", "ambiguous": "bad"}


def report(rescue: Rescue) -> Iterator[Block]:
    """Everything ``transload rescue`` prints."""
    yield Prose(((path_text(rescue.path, None), "strong"),))
    for note in rescue.notes:
        yield row("found", printable(note, None))
    yield row("whole", _counted(rescue.whole), "good" if rescue.whole else "")
    if rescue.mends:
        bits = sum(len(repair.bits) for repair in rescue.mends)
        tensors = f", {plural(len(rescue.mended), 'tensor')}" if rescue.mended else ""
        yield row("repaired", f"{plural(bits, 'bit')} in {plural(len(rescue.mends), 'byte')}{tensors}", "trust")
        repaired = [
            (f"byte {at:,}", f"{old:#04x} → {new:#04x}", ((sure, _CERTAINTY[sure]),), printable(record) or _NOWHERE)
            for at, old, new, record, sure in rescue.mends[:_ROWS]
        ]
        yield Table(repaired, right=(0, 1), dim=(1, 3), shrinks=(3,), indent=14)
        yield from _more(len(rescue.mends), "bytes")
    if rescue.lost:
        yield row("lost", _counted(rescue.lost), "bad")
        lost = [
            (printable(each.name) or '""', size(each.nbytes) if each.nbytes else "", each.why)
            for each in rescue.lost[:_ROWS]
        ]
        yield Table(lost, right=(1,), dim=(1, 2), shrinks=(0, 2), drops=(1,), indent=14)
        yield from _more(len(rescue.lost), "tensors")
    for each in rescue.records[:_ROWS]:
        yield row("lost", f"{printable(each.name)}: {printable(each.why, None)}", "bad")
    yield from _more(len(rescue.records), "records")
    words = _HOW[rescue.how].format(fill=rescue.fill)
    if rescue.how == "nothing":
        yield row("written", words, "bad")
    else:
        yield row("written" if rescue.done else "would write", words, "" if rescue.done else "trust")
    if rescue.done:
        yield row("", path_text(rescue.out, None))
        yield row("report", path_text(rescue.report, None))
    for warning in rescue.warnings:
        yield Prose(((printable(warning, None), ""),), lead=(("! ", "trust"),))


def _more(count: int, what: str) -> Iterator[Block]:
    if count > _ROWS:
        yield row("", f"… and {count - _ROWS:,} more {what}; --json and the report have all of them", "dim")


def _counted(outcomes: tuple[TensorOutcome, ...]) -> str:
    if not outcomes:
        return "no tensors"
    words = plural(len(outcomes), "tensor")
    if outcomes[0].state != "lost" or all(outcome.nbytes for outcome in outcomes):  # 0: in a shard that is missing
        words += f", {size(sum(outcome.nbytes for outcome in outcomes))}"
    checked = sum(outcome.checked for outcome in outcomes)
    if outcomes[0].state == "lost" or checked == len(outcomes):
        return words
    return words + (f", {checked} of them confirmed by checksums" if checked else "; the file has no checksums")
