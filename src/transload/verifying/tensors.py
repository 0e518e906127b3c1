"""Tensors element by element: hashed, searched for NaN, and summed on the way where a record is just one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from transload.content import Allowance, ContentError
from transload.errors import CannotReadError, TransloadError
from transload.formats.verify import Lost, mismatch
from transload.io.checksums import fastest_crc32
from transload.io.pool import each, threads
from transload.verifying.records import Key, Region, key_of
from transload.verifying.result import TensorSum
from transload.verifying.values import FLOATING, counted

if TYPE_CHECKING:
    from transload.checkpoint import Record, Tensor
    from transload.content import Content
    from transload.findings import Problem

__all__ = ["Plan", "Wish", "plan_of", "sum_tensors"]

_PIECE = 1 << 20
_ALONE = 4 << 20  # fewer bytes are not worth starting threads
_TINY = 8 << 10  # nor are tensors of so few: they take longer to find than to hash, and one at a time does that
_View = tuple[object, ...]


class Wish(NamedTuple):
    """What is wanted of each tensor."""

    hashes: bool = False
    values: bool = False


class Job(NamedTuple):
    """Elements to be read, under all the names they have, and the record that is just them."""

    tensor: Tensor
    places: list[int]
    nbytes: int
    key: Key | None = None
    record: Record | None = None


class Plan(NamedTuple):
    """All entries of a list of tensors, and the jobs that fill some of them."""

    entries: list[TensorSum]
    jobs: list[Job]

    @property
    def nbytes(self) -> int:
        """How much the jobs read."""
        return sum(job.nbytes for job in self.jobs)

    @property
    def summed(self) -> set[Key]:
        """The records that are compared on the way."""
        return {job.key for job in self.jobs if job.key is not None}


def plan_of(content: Content, wish: Wish, every: Sequence[Region]) -> Plan:
    """Every tensor, and the parts of those that are made of others; each view of a storage is read once."""
    plan = Plan([], [])
    if not any(wish):
        return plan
    records = {(region.file, record.offset): record for region in every for record in region.records if record.size}
    seen: dict[_View, Job] = {}
    allowance = Allowance(content.checkpoint)
    for tensor, note in _leaves(content.checkpoint.tensors):
        place = len(plan.entries)
        plan.entries.append(_entry(tensor, note))
        view = (tensor.storage, tensor.dtype, tensor.shape, tensor.stride, tensor.offset, tensor.flags, tensor.parts)
        if note or not (wish.hashes or tensor.dtype in FLOATING):
            continue
        if view in seen:
            seen[view].places.append(place)
            continue
        try:
            allowance.spend(tensor)
        except ContentError as error:
            plan.entries[place] = plan.entries[place]._replace(note=error.what)
            continue
        seen[view] = _job(content, tensor, place, records)
    plan.jobs.extend(sorted(seen.values(), key=lambda job: _where(content, job.tensor)))
    return plan


def _leaves(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, str]]:
    """Tensors with elements of their own; and those without, with a word on why."""
    for tensor in tensors:
        if tensor.kind in ("strided", "sharded") or (tensor.kind == "device" and len(tensor.parts) == 1):
            yield tensor, ""
        elif tensor.kind == "quantized":
            yield tensor._replace(kind="strided"), ""
        else:
            yield tensor, f"it is made of {len(tensor.parts)} others" if tensor.parts else "it has no elements here"
            yield from _leaves(tensor.parts)


def _entry(tensor: Tensor, note: str) -> TensorSum:
    dtype = f"{tensor.dtype} {tensor.kind}" if note else tensor.dtype
    return TensorSum(tensor.name, dtype, tensor.shape, 0 if note else tensor.nbytes, note=note)


def _job(content: Content, tensor: Tensor, place: int, records: dict[tuple[str, int | None], Record]) -> Job:
    run, nbytes = content.run(tensor), tensor.nbytes
    record = records.get((run.file, run.offset)) if run is not None else None
    if run is None or record is None or record.method or record.stored != run.nbytes or record.crc32 is None:
        return Job(tensor, [place], nbytes)
    return Job(tensor, [place], nbytes, key_of(run.file, record), record)


def _where(content: Content, tensor: Tensor) -> tuple[str, int]:
    storage = content.storage(tensor)
    return (storage.file, tensor.file_offset or 0) if storage is not None else ("", 0)


class Found(NamedTuple):
    """What the jobs have found: records that are not what was saved, and tensors that could not be read, and why."""

    bad: dict[Key, Problem]
    failed: dict[str, tuple[str, str]]


def sum_tensors(content: Content, plan: Plan, wish: Wish, tell: Callable[[int], None] | None) -> Found:
    """Do all jobs of a plan, and enter in it what came out."""
    found, lock = Found({}, {}), Lock()

    def do(job: Job) -> None:
        try:
            made = _read(content, job, wish, found.bad, told)
        except TransloadError as error:
            kind = "unreadable" if isinstance(error, CannotReadError) else "cut"
            for place in job.places:
                plan.entries[place] = plan.entries[place]._replace(note=error.what)
                found.failed[plan.entries[place].name] = kind, error.what
            if job.key is not None and job.record is not None:
                found.bad[job.key] = mismatch(job.record, Lost(error.what, "record-unreadable"))
            return
        for place in job.places:
            known = plan.entries[place]
            plan.entries[place] = made._replace(name=known.name, note=known.note)

    def told(count: int) -> None:
        if tell is not None:
            with lock:
                tell(count)

    shared = sum(job.nbytes for job in plan.jobs if job.nbytes > _TINY)
    each(plan.jobs, lambda: do, threads() if shared >= _ALONE else 1)
    return found


def _read(content: Content, job: Job, wish: Wish, bad: dict[Key, Problem], tell: Callable[[int], None]) -> TensorSum:
    from hashlib import sha256

    tensor, record = job.tensor, job.record
    digest = sha256() if wish.hashes else None
    compute, value = fastest_crc32(), 0
    nan, inf = (0, 0) if wish.values and tensor.dtype in FLOATING else (None, None)
    for piece in content.pieces(tensor, _PIECE):
        if digest is not None:
            digest.update(piece)
        if nan is not None and inf is not None:
            more = counted(bytes(piece), tensor.dtype)
            nan, inf = nan + more.nan, inf + more.inf
        if record is not None:
            value = compute(piece, value)
        tell(len(piece))
    if job.key is not None and record is not None and value != record.crc32:
        bad[job.key] = mismatch(record, value)
    return _entry(tensor, "")._replace(sha256=digest.hexdigest() if digest else "", nan=nan, inf=inf)
