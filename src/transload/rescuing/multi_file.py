"""What is left of a checkpoint of several files: its whole tensors, in one new file.

Shards, ``torch.distributed.checkpoint`` directories and rank files have a table of what is where, so no
layout has to be guessed. Damaged tensors are found as ``verify`` finds them, a flipped bit is repaired if a checksum
tells which one it is, and what is whole is converted into the format that the new file is named for.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from transload.io.sources import Source
from transload.rescuing.assembly import Assembly, repaired
from transload.rescuing.bitflips import Claim, check_records, repairs_of
from transload.rescuing.result import LostRecord, Repair, Rescue, TensorOutcome
from transload.tensors.content import Content, open_content
from transload.verifying.records import Key, Region, damages, key_of, regions, sum_regions

if TYPE_CHECKING:
    from transload.checkpoint import Storage, Tensor
    from transload.findings import Problem

__all__ = ["rescue_files"]

_SHOWN_BY_TENSORS = frozenset(
    {
        "crc-mismatch",
        "dcp-piece-missing",
        "safetensors-truncated",
        "shard-tensor-missing",
        "storage-cut",
        "storage-missing",
        "tensor-broken",
        "zeros-at-end",
        "zip-compressed",
        "zip-directory-broken",
        "zip-misplaced",
        "zip-no-descriptor",
        "zip-no-directory",
        "zip-no-version",
        "zip-one-reader",
        "zip-record-cut",
        "zip-shifted",
        "zip-trailing-bytes",
    }
)
"""Problems that show in the tensors they cost: for all others a checksum vouches, or their place."""

_UNREAD = frozenset({"dcp-items-unread", "dcp-transformed", "directory-too-long", "link-dangling"})
"""Problems that are not in the bytes, and leave something out."""


class _Repaired(NamedTuple):
    """The files with flipped bits undone: every record, those that are damaged, and those that were repaired."""

    content: Content
    every: list[Region]
    bad: dict[Key, Problem]
    repairs: tuple[Repair, ...]
    repaired: frozenset[Key]


def rescue_files(
    path: str, target: str, *, dry_run: bool, overwrite: bool, progress: Callable[[int, int], object] | bool | None
) -> Rescue:
    """Rescue files that belong together, by their directory or index."""
    with open_content(path) as content:
        checkpoint = content.checkpoint
        files = _repaired(content)
        outcomes = tuple(_outcomes(files))
        lost = {outcome.name for outcome in outcomes if outcome.state == "lost"}
        kept = tuple(tensor for tensor in checkpoint.tensors if tensor.name not in lost)
        warnings = tuple(_warnings(files, lost))
        how = ("left-out" if lost or warnings else "rebuilt") if any(tensor.nbytes for tensor in kept) else "nothing"
        made = Rescue(
            path,
            target,
            f"{target}.rescue.json" if target else "",
            checkpoint.format,
            checkpoint.nbytes,
            how,
            bool(target and how != "nothing" and not dry_run),
            outcomes,
            tuple(_damaged_indexes(files)),
            files.repairs,
            warnings=warnings,
        )
        if not made.done:
            return made
        from transload.converting import convert_content
        from transload.converting.selection import Options, format_of

        files.content.checkpoint = replace(checkpoint, tensors=kept)
        done = convert_content(
            files.content, target, format_of(target), Options(), verify=True, overwrite=overwrite, progress=progress
        )
        beside = (f"everything that is not a tensor, as plain data: {done.leftovers}",) if done.leftovers else ()
        others = tuple(LostRecord(each.name, each.why) for each in (*done.left, *done.listed) if each.name not in lost)
        return replace(made, notes=(*made.notes, *done.notes, *beside), records=(*made.records, *others))


def _repaired(content: Content) -> _Repaired:
    every = regions(content)
    bad = dict(sum_regions(content, every, ()).bad)
    sources: dict[str, Source] = {}
    repairs: list[Repair] = []
    done: set[Key] = set()
    for file, records in every:
        damaged = [record for record in records if key_of(file, record) in bad and record.crc32 is not None]
        claims = [Claim(r.offset or 0, r.stored, r.stored, r.size, r.method, (r.crc32 or 0,)) for r in damaged]
        source = content.open_file(file)
        found: list[Repair] = []
        for record, verdict in zip(damaged, check_records(source, claims), strict=True):
            if verdict.state == "mended":
                found += repairs_of(source, verdict, f"{file} › {record.name}")
                done.add(key_of(file, record))
        if found:
            sources[file] = Assembly(repaired(source, 0, source.size, found), source.name)
            repairs += found
    bad = {key: problem for key, problem in bad.items() if key not in done}
    over = Content(content.checkpoint, lambda name: sources.get(name) or content.open_file(name), parts=content.parts)
    return _Repaired(over, every, bad, tuple(repairs), frozenset(done))


def _outcomes(files: _Repaired) -> Iterator[TensorOutcome]:
    """What became of each tensor, and of those that a table names and no file has."""
    checkpoint = files.content.checkpoint
    damaged = {damage.name: damage for damage in damages(files.content, files.every, files.bad, {})}
    # Storages are called after the file, or the archive within a file, whose pickle names them. Of many damaged pickles
    # only the first are named; then none is to be believed, and every name begins with an empty one.
    unnamed = any(problem.code == "crc-mismatch" and not problem.where for problem in checkpoint.problems)
    distrusted = ("",) if unnamed else tuple(f"{each.name.partition(' › ')[0]}:" for each in _damaged_indexes(files))
    # A record by its name and by its place: a compressed storage does not know where it is.
    summed = {
        place
        for file, records in files.every
        for record in records
        if record.crc32 is not None
        for place in (key_of(file, record)[:2], key_of(file, record)[::2])
    }
    repaired = {place for key in files.repaired for place in (key[:2], key[::2])}
    for tensor in checkpoint.tensors:
        damage = damaged.get(tensor.name)
        held = list(_storages(files.content, tensor))
        places = {(each.file, each.record if each.offset is None else each.offset) for each in held}
        if damage is None and not any(each.id.startswith(distrusted) for each in held):
            state: Literal["mended", "whole"] = "mended" if repaired & places else "whole"
            yield TensorOutcome(tensor.name, state, tensor.nbytes, places <= summed)
        else:
            why = damage.detail if damage is not None else "the index that names it is damaged"
            yield TensorOutcome(tensor.name, "lost", tensor.nbytes, checked=False, why=why)
    there = {tensor.name for tensor in checkpoint.tensors}
    for name, damage in damaged.items():
        if name not in there:
            yield TensorOutcome(name, "lost", 0, checked=False, why=damage.detail)


def _storages(content: Content, tensor: Tensor) -> Iterator[Storage]:
    for part in tensor.parts:
        yield from _storages(content, part)
    storage = content.storage(tensor)
    if storage is not None and storage.nbytes:
        yield storage


def _damaged_indexes(files: _Repaired) -> Iterator[LostRecord]:
    """Pickles that were not as they were saved when names and shapes were read from them."""
    names = [f"{file} › {name}" for file, name, _ in {**files.bad, **dict.fromkeys(files.repaired)}]
    names += [problem.where for problem in files.content.checkpoint.problems if problem.code == "crc-mismatch"]
    for name in dict.fromkeys(names):
        if name.endswith(".pkl"):
            advice = "" if "@" in name else "; rescue that file by itself first"  # a row of archives cannot be
            yield LostRecord(name, f"this index is damaged{advice}")


def _warnings(files: _Repaired, lost: Container[str]) -> Iterator[str]:
    """What is wrong with the files and does not show in the tensors that are lost."""
    from transload.judge.problems import rule_of

    for problem in files.content.checkpoint.problems:
        rule = rule_of(problem.code)
        if problem.code in _SHOWN_BY_TENSORS or problem.where in lost:
            continue
        if rule.integrity == "whole" and problem.code not in _UNREAD:
            continue
        words = f"{rule.title} ({problem.detail})" if problem.detail else rule.title
        yield f"{problem.where}: {words}" if problem.where else words
        if problem.code == "index-invalid":
            yield "numbered shards need no index: move it away, and rescue them again"
