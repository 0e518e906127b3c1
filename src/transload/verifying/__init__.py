"""Whether the bytes of a checkpoint are those that were saved: every checksum, every size, every index; and hashes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from transload.errors import CannotReadError, UsageError
from transload.frozen import facts
from transload.io import progress

if TYPE_CHECKING:
    from transload.checkpoint import Checkpoint
    from transload.findings import Finding, Integrity, Problem
    from transload.io.sources import SourceLike
    from transload.tensors import Content
    from transload.verifying.manifest import Manifest
    from transload.verifying.records import Key, Plan, Region, Sums, Wish

__all__ = ["Damage", "Difference", "Progress", "TensorSum", "Verification", "files_in", "verify"]


class Progress(progress.Progress):
    """A line on a terminal that is written over, and taken away at the end: the report says it all.

    >>> Progress(None).text(3_000_000_000, 4_000_000_000, 1.5)
    'verifying 3.0 of 4.0 GB, 2.0 GB/s'
    """

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__(stream, "verifying")
        self._first = self._told

    def __call__(self, done: int, total: int) -> None:
        """Write the line, if it is time to. What lies between records is read with them, and not in the total."""
        super().__call__(min(done, total - 1), total)

    def end(self) -> None:
        """Take the line away, if there is one."""
        if self._stream is not None and self._told != self._first:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


class Damage(NamedTuple):
    """A tensor whose bytes are not what they were, by its name, and how that shows.

    ``kind`` is ``checksum`` (its record is not what was saved), ``unreadable`` (the disk does not give it), ``cut``
    (its bytes are not all there), ``missing`` (an index names it, and it is not there) or ``broken`` (what describes it
    makes no sense, or its indices point outside of it).
    """

    name: str
    kind: str
    detail: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"name": self.name, "kind": self.kind, "detail": self.detail}


class TensorSum(NamedTuple):
    """A tensor, and what was made of its elements; docs/verify.md defines the hash.

    ``sha256`` is empty where it was not asked for, or there are no elements to hash: ``note`` says why. ``nan`` and
    ``inf`` are ``None`` where they were not counted.
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
        return {
            "name": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "nbytes": self.nbytes,
            "sha256": self.sha256 or None,
            "nan": self.nan,
            "inf": self.inf,
            "note": self.note,
        }


class Difference(NamedTuple):
    """A tensor that is not as a manifest has it: ``what`` is ``missing``, ``added``, ``changed`` or ``retyped``."""

    name: str
    what: str
    detail: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"name": self.name, "what": self.what, "detail": self.detail}


@facts(frozen=True)
class Verification:
    """Whether the bytes of a checkpoint are those that were saved, as far as that can be known.

    ``integrity`` is the verdict: ``whole`` if every record has the checksum it was saved with, ``unchecked`` if there
    are none to compare and nothing else is wrong. ``damaged`` are the tensors that are not what they were.
    ``checksums`` counts the records that were compared, ``unsummed`` those that have none; ``nbytes_read`` is how much
    was read, in ``seconds``. ``sha256`` is that of all tensors; ``tensors`` is filled where hashes or values were asked
    for. ``manifest`` is what it was compared with, ``differences`` what came of that.
    """

    path: str
    format: str
    nbytes: int
    integrity: Integrity
    tensor_count: int
    checksums: int
    unsummed: int
    nbytes_read: int
    seconds: float
    damaged: tuple[Damage, ...] = ()
    findings: tuple[Finding, ...] = ()
    tensors: tuple[TensorSum, ...] = ()
    sha256: str = ""
    manifest: str = ""
    differences: tuple[Difference, ...] = ()

    @property
    def ok(self) -> bool:
        """Nothing is wrong with it, and nothing differs from the manifest: the condition of exit code 0."""
        return self.integrity in ("whole", "unchecked") and not self.damaged and not self.differences

    def to_dict(self) -> dict[str, Any]:
        """The whole of it as plain data; this is what ``--json`` prints."""
        return {
            "schema": 1,
            "path": self.path,
            "format": self.format,
            "nbytes": self.nbytes,
            "ok": self.ok,
            "integrity": self.integrity,
            "tensor_count": self.tensor_count,
            "checksums": self.checksums,
            "unsummed": self.unsummed,
            "nbytes_read": self.nbytes_read,
            "seconds": round(self.seconds, 6),
            "damaged": [each.to_dict() for each in self.damaged],
            "findings": [finding.to_dict() for finding in self.findings],
            "sha256": self.sha256 or None,
            "tensors": [tensor.to_dict() for tensor in self.tensors],
            "manifest": self.manifest or None,
            "differences": [each.to_dict() for each in self.differences],
        }

    def __str__(self) -> str:
        """The report as the command line gives it."""
        from transload.render.verify import as_text

        return as_text(self)


def verify(
    f: SourceLike,
    *,
    hashes: bool = False,
    values: bool = False,
    against: str | os.PathLike[str] | Manifest | None = None,
    progress: bool | Callable[[int, int], object] | None = None,
) -> Verification:
    """Read every byte of a checkpoint, compare all checksums, and name the tensors that are not what they were.

    ``f`` is a path (of a file or a directory), bytes, or a seekable binary file object; torch is not needed, and
    nothing of the file is run. ``hashes`` makes a sha256 of each tensor and of all together, the same in every
    container; ``against`` compares them with a manifest. ``values`` counts NaN and infinities. ``progress`` is a
    function of bytes done and bytes in all, or True for a line on the terminal.

    >>> verify(b"<html>").integrity
    'not-a-checkpoint'

    Raises ``CannotReadError`` if there is nothing to read; what is wrong with it is in the result.
    """
    from transload.verifying.records import Wish

    begun = time.perf_counter()
    manifest = _manifest(against)
    wish = Wish(hashes or manifest is not None, values)
    made = _verified(f, wish, progress)
    if manifest is not None:
        from transload.verifying.manifest import compare

        held = manifest.of(made.path)
        made = replace(made, manifest=manifest.path, differences=compare(held, made.tensors))
    return replace(made, seconds=time.perf_counter() - begun)


def _manifest(against: str | os.PathLike[str] | Manifest | None) -> Manifest | None:
    if against is None:
        return None
    from transload.verifying.manifest import Manifest, read_manifest

    if isinstance(against, Manifest):
        return against
    if not isinstance(against, str | os.PathLike):
        raise UsageError(f"expected the path of a manifest, not {type(against).__name__}")
    return read_manifest(os.fspath(against))


def _verified(f: SourceLike, wish: Wish, progress: bool | Callable[[int, int], object] | None) -> Verification:
    """Tensors are listed only where they are asked for, or something is wrong and they have to be named."""
    from transload.tensors import open_content

    found = None
    with open_content(f, tree=any(wish)) as content:
        count = _tensor_count(content.checkpoint)
        if count is not None:
            found = _read(content, wish, progress)
            if not (content.checkpoint.counted and found.bad):
                return _told(content, wish, found, count)
    with open_content(f) as content:
        found = found or _read(content, wish, progress)
        return _told(content, wish, found, len(content.checkpoint.tensors))


def _tensor_count(checkpoint: Checkpoint) -> int | None:
    """How many there are; ``None`` if they were only counted, and that is not enough."""
    if checkpoint.tensors or checkpoint.format != "torch-zip" or not checkpoint.pickles:
        return len(checkpoint.tensors)
    from transload.verifying.records import tensor_count

    return tensor_count(checkpoint)


class _Found(NamedTuple):
    """What came of reading every byte: of records, of tensors, and how many bytes there were."""

    every: list[Region]
    plan: Plan
    sums: Sums
    bad: dict[Key, Problem]
    failed: dict[str, tuple[str, str]]
    nbytes: int


def _read(content: Content, wish: Wish, progress: bool | Callable[[int, int], object] | None) -> _Found:
    from transload.verifying.records import plan_of, regions, sum_regions, sum_tensors

    every = regions(content)
    plan = plan_of(content, wish, every)
    total = plan.nbytes + sum(r.stored for region in every for r in region.records)
    tell = _Telling(progress, total - sum(job.nbytes for job in plan.jobs if job.key is not None))
    try:
        sums = sum_regions(content, every, plan.summed, tell)
        found = sum_tensors(content, plan, wish, tell)
    finally:
        tell.end()
    return _Found(every, plan, sums, {**sums.bad, **found.bad}, found.failed, tell.done)


def _told(content: Content, wish: Wish, found: _Found, count: int) -> Verification:
    """The verdict, and whom it concerns."""
    from transload.verifying.records import damages, with_aliases

    entries, sums = found.plan.entries, found.sums
    judged = _judged(content.checkpoint, sums, found.bad)
    damaged = damages(content, found.every, found.bad, {**_misplaced(content), **found.failed})
    tensors = with_aliases(content, entries) if wish.hashes else entries
    hashed = all(entry.sha256 or entry.nbytes == 0 for entry in entries)  # none claims more than is read
    whole = wish.hashes and hashed and not found.failed and judged.integrity != "not-a-checkpoint"
    return Verification(
        path=judged.path,
        format=judged.format,
        nbytes=judged.nbytes,
        integrity=judged.integrity if not damaged or judged.integrity == "not-a-checkpoint" else "damaged",
        tensor_count=count,
        checksums=sums.compared,
        unsummed=sums.unsummed,
        nbytes_read=found.nbytes,
        seconds=0.0,
        damaged=damaged,
        findings=tuple(finding for finding in judged.findings if _bears(finding.code)),
        tensors=tuple(tensors),
        sha256=_hash_of_all(tensors) if whole else "",
    )


def _misplaced(content: Content) -> dict[str, tuple[str, str]]:
    if not content.checkpoint.tensors:
        return {}
    from transload.verifying.records import misplaced

    return misplaced(content)


def _hash_of_all(tensors: list[TensorSum]) -> str:
    from transload.verifying.manifest import hash_of_all

    return hash_of_all(tensors)


def _judged(checkpoint: Checkpoint, sums: Sums, bad: dict[Key, Problem]) -> Checkpoint:
    """The verdict, with what was found out about the records."""
    from transload.judge import integrity_of, judge

    known = {problem.where for problem in checkpoint.problems if problem.code == "crc-mismatch"}
    new = tuple(
        replace(problem, where=f"{file} › {problem.where}" if file else problem.where)
        for (file, _, _), problem in bad.items()
        if problem.where not in known
    )
    checksummed = bool(sums.compared) and not sums.unsummed and not bad and not known
    judged = replace(checkpoint, problems=(*checkpoint.problems, *new), checksummed=checksummed)
    return judge(judged, told=False) if new else replace(judged, integrity=integrity_of(judged))


def _bears(code: str) -> bool:
    """Whether a finding says something on the bytes: what a file would run is not the question here."""
    from transload.judge.problems import RULES, rule_of

    return code in RULES and (rule_of(code).integrity != "whole" or code in _REMARKS)


_REMARKS = frozenset({"no-checksums", "index-missing", "index-total-size", "shard-tensor-unlisted", "shard-stray"})


class _Telling:
    """Counts the bytes that were read, and tells who wants to know."""

    def __init__(self, progress: bool | Callable[[int, int], object] | None, total: int) -> None:

        wanted = progress is True and sys.stderr is not None and sys.stderr.isatty()
        self._line = Progress(sys.stderr if wanted else None)
        self._show = self._line if progress is None or isinstance(progress, bool) else progress
        self._total = total
        self.done = 0

    def __call__(self, count: int) -> None:
        self.done += count
        self._show(self.done, self._total)

    def end(self) -> None:
        self._line.end()


def files_in(path: str) -> list[str]:
    """What is to be verified where a path is named: itself; of a directory also what else lies there to be loaded.

    A directory that is no checkpoint by itself stands for those that were found in it.
    """
    if not os.path.isdir(path):  # noqa: PTH112 - pathlib costs ten milliseconds
        return [path]
    from transload.judge import inspect

    try:
        parts = inspect(path).parts
    except CannotReadError:  # to be told when it is its turn
        return [path]
    found = [part.name for part in parts if part.kind == "looks like a checkpoint"]
    beside = [part.name for part in parts if part.kind == "beside the checkpoint"]
    below = [os.path.join(path, name) for name in found or beside]  # noqa: PTH118 - as above
    return below if found else [path, *below]
