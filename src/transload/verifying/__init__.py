"""``transload.verify``: whether the bytes of a checkpoint are those that were saved; and hashes of its tensors.

``verify`` opens the checkpoint, lets ``records`` read every byte and compare checksums, sizes and indices, and puts the
verdict together. ``manifest`` reads, writes and compares files of hashes; ``values`` counts NaN and infinities.
"""

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
    from transload.tensors.content import Content
    from transload.verifying.manifest import Manifest
    from transload.verifying.records import Key, Options, Plan, Region, Sums

__all__ = ["Damage", "Difference", "Progress", "TensorSum", "Verification", "files_in", "verify"]


class Progress(progress.Progress):
    """A line on a terminal that is overwritten, and removed at the end: the report says everything.

    >>> Progress(None).text(3_000_000_000, 4_000_000_000, 1.5)
    'verifying 3.0 of 4.0 GB, 2.0 GB/s'
    """

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__(stream, "verifying")
        self._first = self._told

    def __call__(self, done: int, total: int) -> None:
        """Write the line, if it is time to. The bytes between records are read, too, but not part of the total."""
        super().__call__(min(done, total - 1), total)

    def end(self) -> None:
        """Remove the line, if there is one."""
        if self._stream is not None and self._told != self._first:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


class Damage(NamedTuple):
    """A tensor whose bytes are not those that were saved, and how that shows.

    ``kind`` is ``checksum`` (its record is not what was saved), ``unreadable`` (the disk does not give it), ``cut``
    (its bytes are not all there), ``missing`` (an index names it, and it is not there) or ``broken`` (what describes it
    makes no sense, or its indices point outside of it).
    """

    name: str
    kind: str
    detail: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return self._asdict()


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
        return {**self._asdict(), "shape": list(self.shape), "sha256": self.sha256 or None}


class Difference(NamedTuple):
    """A tensor that is not as a manifest has it: ``what`` is ``missing``, ``added``, ``changed`` or ``retyped``."""

    name: str
    what: str
    detail: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return self._asdict()


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
        from transload.verifying.report import as_text

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
    from transload.tensors.content import open_content
    from transload.verifying.records import Options, tensor_count

    begun = time.perf_counter()
    if against is not None:
        from transload.verifying.manifest import Manifest, compare, read_manifest

        if not isinstance(against, Manifest | str | os.PathLike):
            raise UsageError(f"expected the path of a manifest, not {type(against).__name__}")
        manifest = against if isinstance(against, Manifest) else read_manifest(os.fspath(against))
    options = Options(hashes or against is not None, values)
    # Tensors are listed only if they are asked for, or if something is wrong and they have to be named.
    result = read = None
    with open_content(f, tree=any(options)) as content:
        count = tensor_count(content.checkpoint)
        if count is not None:
            read = _read(content, options, progress)
            if not (content.checkpoint.counted and read.bad):
                result = _verification(content, options, read, count)
    if result is None:
        with open_content(f) as content:
            read = read or _read(content, options, progress)
            result = _verification(content, options, read, len(content.checkpoint.tensors))
    if against is not None:
        differences = compare(manifest.of(result.path), result.tensors)
        result = replace(result, manifest=manifest.path, differences=differences)
    return replace(result, seconds=time.perf_counter() - begun)


class _Read(NamedTuple):
    """What was found by reading every byte: bad records, tensors that failed, and the number of bytes."""

    every: list[Region]
    plan: Plan
    sums: Sums
    bad: dict[Key, Problem]
    failed: dict[str, tuple[str, str]]
    nbytes: int


def _read(content: Content, options: Options, progress: bool | Callable[[int, int], object] | None) -> _Read:
    from transload.verifying.records import plan_of, regions, sum_regions, sum_tensors

    every = regions(content)
    plan = plan_of(content, options, every)
    total = sum(record.stored for region in every for record in region.records)
    total += sum(job.nbytes for job in plan.jobs if job.key is None)
    tell = _Counter(progress, total)
    try:
        sums = sum_regions(content, every, {job.key for job in plan.jobs if job.key is not None}, tell)
        bad, failed = sum_tensors(content, plan, options, tell)
    finally:
        tell.line.end()
    return _Read(every, plan, sums, {**sums.bad, **bad}, failed, tell.done)


def _verification(content: Content, options: Options, read: _Read, count: int) -> Verification:
    """The verdict, and the tensors it concerns."""
    from transload.verifying.records import damages, misplaced, with_aliases

    entries, sums, hashes = read.plan.entries, read.sums, options.hashes
    judged = _judged(content.checkpoint, sums, read.bad)
    damaged = damages(content, read.every, read.bad, {**misplaced(content), **read.failed})
    tensors = with_aliases(content, entries) if hashes else entries
    sha256 = ""
    # A tensor that claims more than the file holds is not hashed; then there is no hash of the whole.
    complete = all(entry.sha256 or entry.nbytes == 0 for entry in entries) and not read.failed
    if hashes and complete and judged.integrity != "not-a-checkpoint":
        from transload.verifying.manifest import hash_of_all

        sha256 = hash_of_all(tensors)
    return Verification(
        path=judged.path,
        format=judged.format,
        nbytes=judged.nbytes,
        integrity=judged.integrity if not damaged or judged.integrity == "not-a-checkpoint" else "damaged",
        tensor_count=count,
        checksums=sums.compared,
        unsummed=sums.unsummed,
        nbytes_read=read.nbytes,
        seconds=0.0,
        damaged=damaged,
        findings=tuple(finding for finding in judged.findings if _concerns_bytes(finding.code)),
        tensors=tuple(tensors),
        sha256=sha256,
    )


def _judged(checkpoint: Checkpoint, sums: Sums, bad: dict[Key, Problem]) -> Checkpoint:
    """The checkpoint with its verdict, after what was found out about its records."""
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


_REMARKS = frozenset({"no-checksums", "index-missing", "index-total-size", "shard-tensor-unlisted", "shard-stray"})


def _concerns_bytes(code: str) -> bool:
    """Whether a finding is about the bytes: what a file would run does not matter here."""
    from transload.judge.problems import RULES, rule_of

    return code in RULES and (rule_of(code).integrity != "whole" or code in _REMARKS)


class _Counter:
    """Counts the bytes that were read, and reports them."""

    def __init__(self, progress: bool | Callable[[int, int], object] | None, total: int) -> None:
        wanted = progress is True and sys.stderr is not None and sys.stderr.isatty()
        self.line = Progress(sys.stderr if wanted else None)
        self._show = self.line if progress is None or isinstance(progress, bool) else progress
        self._total = total
        self.done = 0

    def __call__(self, count: int) -> None:
        self.done += count
        self._show(self.done, self._total)


def files_in(path: str) -> list[str]:
    """The checkpoints that a path stands for: itself; of a directory also other checkpoints in it.

    A directory that is not a checkpoint by itself stands for those that were found in it.
    """
    if not os.path.isdir(path):  # noqa: PTH112 - pathlib costs ten milliseconds
        return [path]
    from transload.judge import inspect

    try:
        parts = inspect(path).parts
    except CannotReadError:  # reported when it is verified
        return [path]
    found = [part.name for part in parts if part.kind == "looks like a checkpoint"]
    beside = [part.name for part in parts if part.kind == "beside the checkpoint"]
    below = [os.path.join(path, name) for name in found or beside]  # noqa: PTH118 - as above
    return below if found else [path, *below]
