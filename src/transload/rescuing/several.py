"""Rescue a checkpoint of several files, given its directory or index: it becomes one new file.

Such checkpoints list where each tensor is, so no layout has to be guessed: flipped bits that checksums identify are
undone, damaged tensors are found as in ``verify``, and the others are converted.
"""

from __future__ import annotations

from typing import Literal

from transload.checkpoint import Checkpoint, Storage, Tensor
from transload.contents import with_parts
from transload.dtypes import ITEMSIZE
from transload.frozen import replace
from transload.geometry import Box, box_words
from transload.io.packed import Assembly
from transload.io.sources import BytesSource, Progress, Source, shown
from transload.judge.problems import rule_of
from transload.opening import OpenCheckpoint
from transload.opening.damage import Key, bad_storages, damages, key_of, records_of, sum_records
from transload.opening.elements import ElementReader, gaps_of
from transload.rescuing.archive import LostRecord, repaired
from transload.rescuing.bitflips import Claim, Repair, check_records
from transload.rescuing.compose import filler
from transload.rescuing.report import Fill, Rescue, TensorOutcome, report_path
from transload.steps import tables


def rescue_files(
    path: str, target: str, fill: Fill | None, *, dry_run: bool, overwrite: bool, progress: Progress
) -> Rescue:
    """Rescue the checkpoint at ``path`` into the file ``target``; lost elements are filled, if ``fill`` says with what.

    Of a tensor in several files, only what one of them had is lost.
    """
    with OpenCheckpoint(path) as opened:
        reader, checkpoint = opened.elements, opened.checkpoint
        # 1. Compare all checksums, and undo the flipped bits that they identify.
        every = records_of(reader)
        bad = sum_records(reader, every)
        sources: dict[str, Source] = {}
        repairs: list[Repair] = []
        undone: set[Key] = set()
        for file, records in every.items():
            damaged = [record for record in records if key_of(file, record) in bad and record.crc32 is not None]
            claims = [Claim(r.offset or 0, r.stored, r.size, r.method, (r.crc32 or 0,)) for r in damaged]
            source = reader.open_file(file)
            in_file: list[Repair] = []
            for record, verdict in zip(damaged, check_records(source, claims), strict=True):
                if verdict.state == "repaired":
                    in_file += (repair._replace(record=f"{file} › {record.name}") for repair in verdict.repairs)
                    undone.add(key_of(file, record))
            if in_file:
                sources[file] = Assembly(repaired(source, 0, source.size, in_file), source.name)
                repairs += in_file
        # 2. Find out what became of each tensor.
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
        if overlay.has_pieces:  # which cannot be put together, and none of them is a tensor of its own
            for tensor in checkpoint.tensors:
                if tensor.is_sharded and (gaps := gaps_of(tensor, tensor.parts)):
                    reasons.setdefault(tensor.name, f"this file does not have {box_words(gaps, tensor.shape)}")
        damaged_storages = bad_storages(overlay, every, bad)
        filled: dict[str, Tensor] = {}
        partial = False
        outcomes: list[TensorOutcome] = []
        for tensor in checkpoint.tensors:
            parts = (overlay.storage(part) for part in with_parts(tensor))
            storages = [storage for storage in parts if storage is not None and storage.nbytes]
            places = {(s.file, s.record if s.offset is None else s.offset) for s in storages}
            if tensor.name not in reasons and not any(storage.id.startswith(distrusted) for storage in storages):
                state: Literal["repaired", "whole"] = "repaired" if repaired_at & places else "whole"
                outcomes.append(TensorOutcome(tensor.name, state, tensor.nbytes, places <= summed))
            else:
                why = reasons.get(tensor.name, "the index that names it is damaged")
                intact = [
                    part
                    for part in (tensor.parts if tensor.is_sharded else ())
                    if part.storage not in damaged_storages
                    and not (part.storage or "").startswith(distrusted or ("\0",))
                    and not overlay.missing(part)
                ]
                lost_boxes = gaps_of(tensor, intact)
                if any(box.shape == tensor.shape for box in lost_boxes):
                    intact = []
                partial = partial or bool(intact)
                if intact and not why.startswith(("no file has", "this file does not have")):
                    why = f"{box_words(lost_boxes, tensor.shape)}: {why}"
                if fill and tensor.is_dense and tensor.dtype in ITEMSIZE:
                    filled[tensor.name] = _filled(tensor, intact, lost_boxes)
                outcomes.append(TensorOutcome(tensor.name, "lost", tensor.nbytes, checked=False, why=why))
        existing = {tensor.name for tensor in checkpoint.tensors}
        for name, why in reasons.items():
            if name not in existing:  # an index names it, and no file has it
                outcomes.append(TensorOutcome(name, "lost", 0, checked=False, why=why))
        lost = {outcome.name for outcome in outcomes if outcome.state == "lost"}
        kept = tuple(
            filled.get(tensor.name, tensor)
            for tensor in checkpoint.tensors
            if tensor.name not in lost or tensor.name in filled
        )
        warnings = _warnings(checkpoint, lost)
        how = "nothing"
        if any(tensor.nbytes for tensor in kept):
            how = "filled" if filled else "left-out" if lost or warnings else "rebuilt"
        elif partial and not fill:
            warnings.append("no tensor is whole; --fill zeros or --fill nan keeps the rows that are left")
        advice = "; rescue that file by itself first"  # which is not possible for a sequence of archives
        unread = [LostRecord(name, f"this index is damaged{'' if '@' in name else advice}") for name in indexes]
        objects = [problem for problem in checkpoint.problems if problem.code == "dcp-object-missing"]
        unread += [LostRecord(problem.where or problem.detail, "no file has it") for problem in objects]
        done = bool(target and how != "nothing" and not dry_run)
        files = (shown(path), target, report_path(target), checkpoint.format, checkpoint.nbytes, how, done)
        result = Rescue(*files, tuple(outcomes), tuple(unread), tuple(repairs), fill or "", warnings=tuple(warnings))
        if not done:
            return result
        # 3. Convert the tensors that are left.
        from transload.writing import write_content
        from transload.writing.plan import Options, target_format

        fillers = {dtype: filler(dtype, fill) for dtype in {tensor.dtype for tensor in filled.values()}} if fill else {}
        storages_with = [*checkpoint.storages]
        for dtype, raw in fillers.items():
            name = _FILLER + dtype
            storages_with.append(Storage(name, dtype, "cpu", dtype, len(raw), len(raw), 0, file=name))
            sources[name] = BytesSource(raw)
        whole = replace(checkpoint, tensors=kept, storages=tuple(storages_with))
        overlay = ElementReader(whole, overlay.open_file, reader.files)
        kind = target_format(target)
        everything = Options(optimizer=True)
        new = write_content(overlay, target, kind, everything, verify=True, overwrite=overwrite, progress=progress)
        beside = (f"everything that is not a tensor, as plain data: {new.leftovers}",) if new.leftovers else ()
        omitted = (omission for omission in (*new.left, *new.listed) if omission.name not in lost)
        others = tuple(LostRecord(omission.name, omission.why) for omission in omitted)
        return replace(result, notes=(*new.notes, *beside), records=(*result.records, *others))


_FILLER = "\0filler "
"""Begins the id of a storage of one element, of which every filled part is an expanded view: no file has this name."""


def _filled(tensor: Tensor, intact: list[Tensor], places: list[Box]) -> Tensor:
    """A tensor of which only some parts are intact, with fillers in the other places."""
    fillers = [
        Tensor(
            tensor.path,
            tensor.name,
            tensor.dtype,
            box.shape,
            (0,) * len(box.shape),
            "cpu",
            _FILLER + tensor.dtype,
            start=box.start,
        )
        for box in places
    ]
    return tensor._replace(
        kind="sharded", storage=None, offset=0, parts=(*intact, *fillers), file_offset=None, flags=()
    )


def _warnings(checkpoint: Checkpoint, lost: set[str]) -> list[str]:
    """What is wrong with the files, apart from the tensors that are lost."""
    names, warnings = tables(__package__, "names"), list[str]()
    for problem in checkpoint.problems:
        rule = rule_of(problem.code)
        if problem.code in names["problems of tensors"] or problem.where in lost:
            continue
        if rule.integrity == "whole" and problem.code not in names["unread"]:
            continue
        words = f"{rule.title} ({problem.detail})" if problem.detail else rule.title
        warnings.append(f"{problem.where}: {words}" if problem.where else words)
        if problem.code == "index-invalid":
            warnings.append("numbered shards need no index: move it away, and rescue them again")
    return warnings
