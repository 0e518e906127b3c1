"""Rescue one file: recover it, find out what became of each tensor, and write what is left into a new file."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import ExitStack
from operator import attrgetter

from transload.checkpoint import Checkpoint, Tensor
from transload.contents import byte_span, with_parts
from transload.errors import CannotReadError, RescueError, UsageError
from transload.findings import join_names, quoted, rescue_command
from transload.format import FORMATS, format_of
from transload.formats import plain_pickle, read_source
from transload.formats.sets.dcp import folder_of_rank
from transload.formats.torch_legacy import looks_like_legacy
from transload.io import gc_paused
from transload.io.paths import folder_of, is_folder, open_source
from transload.io.pool import progress_counter
from transload.io.sources import Progress, Source, SourceLike, shown
from transload.judge import judge
from transload.rescuing import compose
from transload.rescuing.archive import (
    FEW,
    INDEX,
    METADATA,
    NOT_IN_FILE,
    LostRange,
    LostRecord,
    Recovered,
    recover_directory,
)
from transload.rescuing.recover import journal_undone, recover, unwrapped
from transload.rescuing.report import Fill, Rescue, TensorOutcome, report_path
from transload.writing.output import Bundle

_PIECE = 4 << 20
_NO_PLACE = "the file does not say where its bytes are"


def rescue_file(
    src: SourceLike, path: str, target: str, member: str, fill: Fill | None, *, dry_run: bool, progress: Progress
) -> Rescue:
    """Rescue ``src``, a file or the directory an archive was unzipped into, into the file ``target``."""
    with ExitStack() as stack:
        with gc_paused():
            # 1. Recover the file that was saved, or as much of it as is left, and read that.
            source, recovered = _recovered(src, path, member, stack)
            recovered, checkpoint = compose.completed(recovered, fill=fill is not None)
            # An archive of arrays may have no record left that shows what it was.
            identified = checkpoint.format in FORMATS
            form = format_of(checkpoint.format if identified else read_source(source).format)
            if form.named and not form.rescued:
                what = f"rescue does not accept files of this format ({form.words})"
                raise RescueError(what, where=checkpoint.path, fix="transload.open reads the tensors that are whole.")
            if not identified:
                raise _nothing_to_rescue(checkpoint, checkpoint.path, recovered.lost_records)
            # The file keeps its format, and loaders rely on this suffix.
            if target and target.lower().endswith(".safetensors") != (form.suffix == ".safetensors"):
                what = f"the rescued file has the format {checkpoint.format}: rescue does not change the format"
                fix = "Choose a matching name, then convert it: transload convert RESCUED OTHER."
                raise UsageError(what, where=target, fix=fix)
            # 2. Find out what became of each tensor, and of the other records.
            outcomes = Outcomes(checkpoint, recovered)
            tensors = [outcomes.of(tensor) for tensor in checkpoint.tensors]
            records = _lost_records(checkpoint, recovered)
            # 3. Choose what to write, and lay it out.
            lost = any(outcome.state == "lost" for outcome in tensors)
            kept = any(outcome.nbytes for outcome in tensors if outcome.state != "lost")
            # A file without tensors is worth saving if its index is undamaged.
            main = [pickle for pickle in checkpoint.pickles if pickle.main]
            readable = any(not pickle.broken and pickle.end > pickle.start for pickle in main)
            # A program runs without the debug records, which map its lines to the original source.
            runs = all(record.name.endswith((".debug_pkl", "version")) for record in records)
            incomplete = kept and form.runs and not runs
            out: Source | None = None
            warnings = [*recovered.warnings]
            if not kept and (lost or not (readable or form.named)):
                how = "nothing"
            elif incomplete or (lost and not fill):
                out = compose.without_lost(recovered, checkpoint, lambda tensor: outcomes.of(tensor).state == "lost")
                how = "weights" if compose.is_program(checkpoint) else "left-out"
            elif lost and fill:
                out, how = compose.filled(recovered, checkpoint, fill), "filled"
                unfilled = [outcome.name for outcome in tensors if outcome.why == _NO_PLACE]
                if unfilled:
                    what = "still broken in the new file, since there is nothing to fill"
                    warnings.append(f"{join_names(unfilled, FEW)}: {what}")
            elif recovered.exact:
                out, how = recovered.source, "exact"
            else:
                out = compose.rebuilt(recovered, recovered.records) if recovered.records else recovered.source
                how = "left-out" if recovered.index_rebuilt else "rebuilt"
            if recovered.following and how in ("exact", "rebuilt"):
                how = "left-out"
            warnings += _warnings(checkpoint, recovered)
            shares = (problem.detail for problem in checkpoint.problems if problem.code == "rank-file")
            found = (*recovered.notes, *(f"one rank's share: {detail}" for detail in shares))
            # 4. Read the new file: it must have every tensor that is not lost.
            if out is not None:
                compose.refuse_growth(out.size, recovered)
                new = judge(checkpoint if out is recovered.source else read_source(out))
                names = {tensor.name for tensor in new.tensors}
                for index, outcome in enumerate(tensors):
                    if outcome.state != "lost" and outcome.name not in names:
                        tensors[index] = outcome._replace(
                            state="lost", checked=False, why="the new file cannot hold it"
                        )
                if new.integrity in ("damaged", "not-a-checkpoint"):
                    warnings += [finding.title for finding in new.findings if finding.severity == "error"][:FEW]
        # 5. Write it.
        done = out is not None and bool(target) and not dry_run
        if done and out is not None:
            report_progress = progress_counter(progress, out.size, "writing")
            with Bundle(overwrite=True) as bundle:
                new_file = bundle.add(target)
                for start in range(0, out.size, _PIECE):
                    count = min(_PIECE, out.size - start)
                    data = out.read(start, count)
                    if len(data) < count:
                        raise CannotReadError("the file became shorter while it was read", where=out.name)
                    new_file.write([data])
                    if report_progress is not None:
                        report_progress(count)
        file = (shown(path) or source.name, target, report_path(target), checkpoint.format, source.size, how, done)
        return Rescue(*file, tuple(tensors), records, recovered.repairs, fill or "", found, tuple(warnings))


def _recovered(src: SourceLike, path: str, member: str, stack: ExitStack) -> tuple[Source, Recovered]:
    """Open the source, and recover the file in it."""
    if path and is_folder(path):
        unzipped = recover_directory(folder_of(path)[0])
        return unzipped.source, unzipped
    if directory := folder_of_rank(path):
        what = "this is one of the files of a torch.distributed.checkpoint directory"
        raise RescueError(what, where=path, fix=f"Rescue the directory.\n{rescue_command(directory)}")
    notes: list[str] = []
    source = open_source(src)
    stack.callback(source.close)
    if not source.size:
        raise RescueError("the file is empty", where=source.name)
    inner = (journal_undone(path, source, notes) if path else None) or source
    inner, whole = unwrapped(inner, member, stack, notes)
    plain = None if looks_like_legacy(inner) else plain_pickle.read(inner)
    if plain is not None and plain.pickles[0].data:  # recover would find the legacy stream of its first tensor
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
    if problem is not None and problem.title and all(record.name != INDEX for record in lost):
        what = f"the file is not a checkpoint: it is {problem.title.removesuffix(', not a checkpoint')}"
    return RescueError(what, where=where, fix=next((fix for problem in checkpoint.problems for fix in problem.fix), ""))


def _lost_records(checkpoint: Checkpoint, recovered: Recovered) -> tuple[LostRecord, ...]:
    """The lost records that are not storages of tensors."""
    used = [storage for storage in checkpoint.storages if storage.tensors]
    ignored = METADATA | {name for s in used for name in (s.record, f"data/{s.key}", f"tensors/{s.key}")}
    lost = [record for record in recovered.lost_records if record.name not in ignored]
    if recovered.records and compose.is_program(checkpoint):
        names = {record.name.partition(b"/")[2]: record for record in recovered.records}
        code = {b"constants.pkl", b"model.json", b"archive_format", b".data/extern_modules"}
        if not (names.keys() & code or any(name.startswith(b"data/aotinductor/") for name in names)):
            lost.append(LostRecord("code", "the program is not in the file, only its tensors are"))
        versions = [names.get(name) for name in (b"version", b".data/version", b"archive_version")]
        if all(record is None or record.added for record in versions):
            lost.append(LostRecord("version", "it defines what the operators of the program mean"))
    if recovered.following:
        why = f"it begins at byte {recovered.following:,}: from an open file, transload.load reads it there"
        lost.append(LostRecord("another checkpoint", why))
    return tuple(lost)


def _warnings(checkpoint: Checkpoint, recovered: Recovered) -> list[str]:
    """What is uncertain about the content of a recovered file."""
    warnings: list[str] = []
    if any(record.name == INDEX for record in recovered.lost_records):
        warnings.append("the index does not match its checksum: names and shapes may be wrong")
    if recovered.all_unchecked and any(storage.nbytes and not storage.tensors for storage in checkpoint.storages):
        warnings.append("there are storages that no tensor uses: the part that names the tensors may be damaged")
    broken = [problem for problem in checkpoint.problems if problem.code == "tensor-broken"]
    warnings += [f"{problem.where}: {problem.detail}" for problem in broken[:FEW]]
    if len(broken) > FEW:
        warnings.append(f"and {len(broken) - FEW:,} more broken tensors")
    return warnings


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
        index_lost = any(record.name == INDEX for record in recovered.lost_records)
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
                why = NOT_IN_FILE
            elif end > storage.offset + storage.stored:
                why = "the file ends before its last byte"
            elif lost is not None:
                why = lost.why
            if why and storage.device != "meta":
                return TensorOutcome(tensor.name, "lost", tensor.nbytes, checked=False, why=why)
            repaired |= bisect_left(self._repaired_at, start) < bisect_left(self._repaired_at, end)
        return TensorOutcome(tensor.name, "repaired" if repaired else "whole", tensor.nbytes, checked)

    def _lost_in(self, start: int, end: int) -> LostRange | None:
        """The first lost range that overlaps an interval."""
        index = bisect_right(self._lost, start, key=attrgetter("end"))
        overlaps = index < len(self._lost) and self._lost[index].start < end
        return self._lost[index] if overlaps else None
