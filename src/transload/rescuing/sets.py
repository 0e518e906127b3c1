"""What is left of a checkpoint of several files: its whole tensors, in one new file.

Shards, ``torch.distributed.checkpoint`` directories and ranks have a table of what is where. So here nothing is laid
out anew: damaged tensors are found as ``verify`` finds them, a flipped bit is undone where a checksum tells which, and
what is whole is converted into the format that the new file is named for.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from transload.io.sources import Source
from transload.rescuing.fates import Fate
from transload.rescuing.mended import Lost, Mend
from transload.rescuing.mending import Claim, Verdict, verdicts
from transload.rescuing.parts import Assembly, patched
from transload.rescuing.result import Rescue
from transload.tensors import Content, open_content
from transload.verifying.records import Key, Region, damages, key_of, regions, sum_regions

if TYPE_CHECKING:
    from transload.checkpoint import Record, Storage, Tensor
    from transload.findings import Problem

__all__ = ["saved_set"]

_TOLD = frozenset(
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
"""Problems that are told by the tensors they cost: for each of the others a checksum vouches, or its place."""

_UNREAD = frozenset({"dcp-items-unread", "dcp-transformed", "directory-too-long", "link-dangling"})
"""Problems that are none of the bytes, and leave something out."""


class _Read(NamedTuple):
    """What is known of the bytes: records that are not as they were saved, and those that were and are put right."""

    content: Content
    every: list[Region]
    bad: dict[Key, Problem]
    mends: tuple[Mend, ...]
    touched: frozenset[Key]


def saved_set(  # noqa: PLR0913 - what a user may ask for
    path: str,
    target: str,
    stack: ExitStack,
    *,
    dry_run: bool,
    overwrite: bool,
    progress: Callable[[int, int], object] | bool | None,
) -> Rescue:
    """Rescue files that belong together, by their directory or index; what came of it."""
    content = stack.enter_context(open_content(path))
    checkpoint = content.checkpoint
    read = _mended(content)
    fates = tuple(_fates(read))
    lost = {fate.name for fate in fates if fate.state == "lost"}
    kept = [tensor for tensor in checkpoint.tensors if tensor.name not in lost]
    warnings = tuple(_warnings(read, lost))
    how = ("left-out" if lost or warnings else "rebuilt") if any(tensor.nbytes for tensor in kept) else "nothing"
    made = Rescue(
        path,
        target,
        f"{target}.rescue.json" if target else "",
        checkpoint.format,
        checkpoint.nbytes,
        how,
        bool(target and how != "nothing" and not dry_run),
        fates,
        tuple(_indexes(read)),
        read.mends,
        warnings=warnings,
    )
    return _written(made, read.content, kept, overwrite=overwrite, progress=progress) if made.done else made


# -- what is damaged, and what can be undone


def _mended(content: Content) -> _Read:
    every = regions(content)
    bad = dict(sum_regions(content, every, ()).bad)
    sources: dict[str, Source] = {}
    mends: list[Mend] = []
    touched: set[Key] = set()
    for file, records in every:
        hurt = [record for record in records if key_of(file, record) in bad and record.crc32 is not None]
        source = content.open_file(file)
        changes: list[tuple[int, int]] = []
        for record, verdict in zip(hurt, verdicts(source, [_claim(record) for record in hurt]), strict=True):
            if verdict.state == "mended":
                found = list(_undone(source, f"{file} › {record.name}", verdict))
                changes += ((mend.position, mend.new) for mend in found)
                mends += found
                touched.add(key_of(file, record))
        if changes:
            sources[file] = Assembly(patched(source, 0, source.size, changes), source.name)
    bad = {key: problem for key, problem in bad.items() if key not in touched}
    over = Content(content.checkpoint, lambda name: sources.get(name) or content.open_file(name), parts=content.parts)
    return _Read(over, every, bad, tuple(mends), frozenset(touched))


def _claim(record: Record) -> Claim:
    checksums = () if record.crc32 is None else (record.crc32,)
    return Claim(record.offset or 0, record.stored, record.stored, record.size, record.method, checksums)


def _undone(source: Source, where: str, verdict: Verdict) -> Iterator[Mend]:
    for bit in verdict.bits:
        old = source.read(bit.byte, 1)[0]
        yield Mend(bit.byte, old, old ^ 1 << bit.bit, where, verdict.certainty)


# -- what became of each tensor


def _fates(read: _Read) -> Iterator[Fate]:
    damaged = {damage.name: damage for damage in damages(read.content, read.every, read.bad, {})}
    hurt = tuple(_hurt(read))
    summed = {place for file, records in read.every for each in records for place in _either(key_of(file, each), each)}
    touched = {place for key in read.touched for place in (key[:2], key[::2])}
    for tensor in read.content.checkpoint.tensors:
        damage = damaged.get(tensor.name)
        held = list(_storages(read.content, tensor))
        places = {(each.file, each.record if each.offset is None else each.offset) for each in held}
        if damage is None and not any(each.id.startswith(hurt) for each in held):
            yield Fate(tensor.name, "mended" if touched & places else "whole", tensor.nbytes, places <= summed)
        else:
            why = damage.detail if damage is not None else "what names it in its file is damaged"
            yield Fate(tensor.name, "lost", tensor.nbytes, checked=False, why=why)
    there = {tensor.name for tensor in read.content.checkpoint.tensors}
    yield from (
        Fate(name, "lost", 0, checked=False, why=each.detail) for name, each in damaged.items() if name not in there
    )


def _either(key: Key, record: Record) -> tuple[tuple[str, int | str], ...]:
    """A record that has a checksum, by its name and by its place: a packed storage does not know where it lies."""
    return () if record.crc32 is None else (key[:2], key[::2])


def _storages(content: Content, tensor: Tensor) -> Iterator[Storage]:
    for part in tensor.parts:
        yield from _storages(content, part)
    storage = content.storage(tensor)
    if storage is not None and storage.nbytes:
        yield storage


def _hurt(read: _Read) -> set[str]:
    """The files, and the archives within files, whose pickles are damaged: what storages are called after.

    Of many only the first are named; then none is to be believed, and all storages begin with an empty name.
    """
    problems = read.content.checkpoint.problems
    unnamed = any(problem.code == "crc-mismatch" and not problem.where for problem in problems)
    return {""} if unnamed else {f"{lost.name.partition(' › ')[0]}:" for lost in _indexes(read)}


def _indexes(read: _Read) -> Iterator[Lost]:
    """Pickles that were not as they were saved when names and shapes were read from them."""
    names = [f"{file} › {name}" for file, name, _ in {**read.bad, **dict.fromkeys(read.touched)}]
    names += [problem.where for problem in read.content.checkpoint.problems if problem.code == "crc-mismatch"]
    for name in dict.fromkeys(names):
        if name.endswith(".pkl"):
            advice = "" if "@" in name else "; rescue that file by itself first"  # a row of archives cannot be
            yield Lost(name, f"it says what there is, and is damaged{advice}")


def _warnings(read: _Read, lost: Container[str]) -> Iterator[str]:
    """What is wrong with the files and is not told by the tensors that are lost."""
    from transload.judge.problems import rule_of

    for problem in read.content.checkpoint.problems:
        rule = rule_of(problem.code)
        if problem.code in _TOLD or problem.where in lost:
            continue
        if rule.integrity == "whole" and problem.code not in _UNREAD:
            continue
        words = f"{rule.title} ({problem.detail})" if problem.detail else rule.title
        yield f"{problem.where}: {words}" if problem.where else words
        if problem.code == "index-invalid":
            yield "numbered shards need no index: move it away, and rescue them again"


# -- the new file


def _written(
    made: Rescue,
    content: Content,
    kept: list[Tensor],
    *,
    overwrite: bool,
    progress: Callable[[int, int], object] | bool | None,
) -> Rescue:
    from transload.converting import convert_content
    from transload.converting.selection import Options, format_of

    content.checkpoint = replace(content.checkpoint, tensors=tuple(kept))
    target = format_of(made.out)
    done = convert_content(content, made.out, target, Options(), verify=True, overwrite=overwrite, progress=progress)
    beside = (f"what is no tensor, as plain data: {done.leftovers}",) if done.leftovers else ()
    told = {fate.name for fate in made.lost}
    others = tuple(Lost(each.name, each.why) for each in (*done.left, *done.listed) if each.name not in told)
    return replace(made, notes=(*made.notes, *done.notes, *beside), records=(*made.records, *others))
