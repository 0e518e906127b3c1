"""Hashes of the tensors of an open checkpoint, the same in every container, and how two lists of them differ.

``TensorSums`` reads every tensor once; ``compare`` names those that are missing, added, changed or retyped.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from threading import Lock
from typing import Any

from transload.checkpoint import Record, Tensor
from transload.errors import CannotReadError, ContentError, TransloadError
from transload.findings import Problem
from transload.formats.record_checksums import Lost, mismatch
from transload.frozen import NamedTuple
from transload.geometry import Box, box_words
from transload.io import pool
from transload.io.checksums import fastest_crc32
from transload.opening.damage import Key, Records, key_of
from transload.opening.elements import Allowance, ElementReader, FileRange, gaps_of
from transload.opening.values import FLOATING, count_special

_PIECE = 1 << 20


class TensorSum(NamedTuple):
    """A tensor, with the hash of its elements, which docs/verify.md defines.

    ``sha256`` is empty if it was not requested, or if there are no elements to hash: ``note`` says why. ``nan`` and
    ``inf`` are ``None`` if they were not counted.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    sha256: str = ""
    nan: int | None = None
    inf: int | None = None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**self._asdict(), "shape": list(self.shape), "sha256": self.sha256 or None}


class Difference(NamedTuple):
    """A tensor that differs from the manifest: ``what`` is ``missing``, ``added``, ``changed`` or ``retyped``."""

    name: str
    what: str
    detail: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return self._asdict()


def hash_of_all(tensors: Iterable[TensorSum]) -> str:
    """One sha256 for all tensors: of their names, dtypes, shapes and hashes, sorted by name.

    >>> hash_of_all([])
    'e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855'
    """
    whole = sha256()
    for line in sorted([tensor.name, tensor.dtype, list(tensor.shape), tensor.sha256] for tensor in tensors):
        whole.update(json.dumps(line, separators=(",", ":")).encode("ascii") + b"\n")
    return whole.hexdigest()


def compare(tensors: Iterable[TensorSum], others: Iterable[TensorSum]) -> tuple[Difference, ...]:
    """What differs in the other tensors, by name."""

    def by_name(tensors: Iterable[TensorSum]) -> dict[str, list[TensorSum]]:
        """Two tensors may have the same name: a key may contain the slash that joins keys."""
        out: dict[str, list[TensorSum]] = {}
        for tensor in tensors:
            out.setdefault(tensor.name, []).append(tensor)
        return out

    def shown(tensors: list[TensorSum]) -> str:
        return ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in tensors[:2])

    before, now = by_name(tensors), by_name(others)
    out = [Difference(name, "missing") for name in before if name not in now]
    out += [Difference(name, "added") for name in now if name not in before]
    for name in before.keys() & now.keys():
        old, new = before[name], now[name]
        if Counter((t.dtype, t.shape) for t in old) != Counter((t.dtype, t.shape) for t in new):
            out.append(Difference(name, "retyped", f"{shown(new)}, was {shown(old)}"))
        elif sorted(t.sha256 for t in old) != sorted(t.sha256 for t in new):
            out.append(Difference(name, "changed", f"sha256 {new[0].sha256 or 'unknown'}, was {old[0].sha256}"))
    return tuple(sorted(out))


class _Job(NamedTuple):
    """A tensor to read, and the record that consists of it alone, if there is one.

    ``places`` are the indices of all its names in the list of tensors.
    """

    tensor: Tensor
    places: list[int]
    key: Key | None = None
    record: Record | None = None


class TensorSums:
    """The hashes, or the counts of NaN and infinities, of all tensors.

    ``entries`` are all tensors; ``run`` completes them. ``failed`` are those that could not be read, with kind and
    reason. ``nbytes`` are read, besides those of ``records``, each of which consists of one tensor: its checksum is
    compared while the tensor is read.
    """

    def __init__(self, reader: ElementReader, records: Records, *, hashes: bool, values: bool) -> None:
        self._reader, self._hashes, self._values = reader, hashes, values
        self.entries: list[TensorSum] = []
        self.failed: dict[str, tuple[str, str]] = {}
        self._jobs = self._plan(records) if hashes or values else []
        self.records = {job.key for job in self._jobs if job.key is not None}
        self.nbytes = sum(job.tensor.nbytes for job in self._jobs if job.key is None)

    def _plan(self, records: Records) -> list[_Job]:
        """What to read: each view of a storage once. Tensors that consist of others are listed with their parts."""
        reader = self._reader
        whole: dict[FileRange | None, tuple[Key | None, Record | None]] = {
            FileRange(file, record.offset or 0, record.stored): (key_of(file, record), record)
            for file, inside in records.items()
            for record in inside
            if record.size and record.crc32 is not None and not record.method
        }
        seen: dict[tuple[object, ...], _Job] = {}
        allowance = Allowance(reader.checkpoint)
        for tensor, why in leaves(reader.checkpoint.tensors, several=reader.checkpoint.traits.several):
            place = len(self.entries)
            dtype = f"{tensor.dtype} {tensor.kind}" if why else tensor.dtype
            self.entries.append(TensorSum(tensor.name, dtype, tensor.shape, 0 if why else tensor.nbytes, note=why))
            view = tensor.storage, tensor.dtype, tensor.shape, tensor.stride, tensor.offset, tensor.flags, tensor.parts
            if why or not (self._hashes or tensor.dtype in FLOATING):
                continue
            if view in seen:
                seen[view].places.append(place)
                continue
            try:
                allowance.spend(tensor)
            except ContentError as error:
                self.entries[place] = self.entries[place]._replace(note=error.what)
                continue
            seen[view] = _Job(tensor, [place], *whole.get(reader.file_range(tensor), (None, None)))

        def position(job: _Job) -> tuple[str, int]:
            storage = reader.storage(job.tensor)
            return (storage.file, job.tensor.file_offset or 0) if storage is not None else ("", 0)

        return sorted(seen.values(), key=position)

    def run(self, report_progress: Callable[[int], None]) -> dict[Key, Problem]:
        """Read all tensors; return those of ``records`` that are not what was saved."""
        entries = self.entries
        bad: dict[Key, Problem] = {}
        lock = Lock()

        def do(job: _Job) -> None:
            tensor, places, key, record = job
            digest = sha256() if self._hashes else None
            counts = (0, 0) if self._values and tensor.dtype in FLOATING else None
            compute, value = fastest_crc32(), 0
            try:
                for piece in self._reader.chunks(tensor, _PIECE):
                    if digest is not None:
                        digest.update(piece)
                    if counts is not None:
                        nan, inf = count_special(piece, tensor.dtype)
                        counts = counts[0] + nan, counts[1] + inf
                    if record is not None:
                        value = compute(piece, value)
                    with lock:
                        report_progress(len(piece))
            except TransloadError as error:
                self._reader.refuse_fault(error)
                kind = "unreadable" if isinstance(error, CannotReadError) else "cut"
                for place in places:
                    entries[place] = entries[place]._replace(note=error.what)
                    self.failed[entries[place].name] = kind, error.what
                if key is not None and record is not None:
                    bad[key] = mismatch(record, Lost(error.what, "record-unreadable"))
                return
            if key is not None and record is not None and value != record.crc32:
                bad[key] = mismatch(record, value)
            numbers = counts or (None, None)
            for place in places:
                hexdigest = digest.hexdigest() if digest else ""
                entries[place] = entries[place]._replace(sha256=hexdigest, nan=numbers[0], inf=numbers[1])

        sizes = (job.tensor.nbytes for job in self._jobs)
        pool.each(self._jobs, lambda: do, pool.threads_for(sizes, self._reader.sources()))
        return bad


def leaves(tensors: Sequence[Tensor], *, several: bool) -> Iterator[tuple[Tensor, str]]:
    """Tensors that have elements, with an empty note; and those that do not, with the reason.

    Unless it has ``several`` files, a checkpoint may be one rank's: then the pieces count that it has.
    """
    for tensor in tensors:
        if tensor.is_sharded and not several and gaps_of(tensor, tensor.parts):  # one rank's share
            for part in tensor.parts:
                box = Box(part.start or (0,) * len(part.shape), part.shape)
                yield part._replace(name=f"{tensor.name} {box_words([box], tensor.shape)}"), ""
        elif tensor.is_dense or (tensor.kind == "device" and len(tensor.parts) == 1):
            yield tensor, ""
        elif tensor.kind == "quantized":
            yield tensor._replace(kind="strided"), ""
        else:
            yield tensor, f"it is made of {len(tensor.parts)} others" if tensor.parts else "it has no elements here"
            yield from leaves(tensor.parts, several=several)
