"""``transload.verify``: check that the bytes of a checkpoint are those that were saved, and hash its tensors.

``verify`` opens the checkpoint, lets ``opening.damage`` read every byte and compare checksums, sizes and indices,
``opening.digests`` read tensors one by one if their hashes or values are requested, and combines the results into a
verdict (``report``). ``manifests`` keeps the hashes.
"""

from __future__ import annotations

import os
import time

from transload.errors import UsageError
from transload.formats.record_checksums import new_problems
from transload.formats.safetensors import aliases_in
from transload.frozen import replace
from transload.io import pool
from transload.io.sources import Progress, SourceLike
from transload.judge import integrity_of, judge
from transload.judge.problems import rule_of
from transload.opening import OpenCheckpoint
from transload.opening.damage import damages, misplaced, records_of, sum_records
from transload.opening.digests import TensorSums, compare, hash_of_all
from transload.verifying.manifests import Manifest, read_manifest, refuse_target, write_manifest
from transload.verifying.report import Verification, report, several, written

__all__ = ["Verification", "read_manifest", "refuse_target", "report", "several", "verify", "write_manifest", "written"]


_REMARKS = frozenset(
    {"no-checksums", "index-missing", "index-total-size", "rank-file", "shard-tensor-unlisted", "shard-stray"}
)


def verify(
    f: SourceLike,
    *,
    hashes: bool = False,
    values: bool = False,
    against: str | os.PathLike[str] | Manifest | None = None,
    progress: Progress = None,
) -> Verification:
    """Read every byte of a checkpoint, compare all checksums, and name the tensors whose bytes have changed.

    ``f`` is a path (of a file or a directory), a URL, bytes, or a seekable binary file object; torch is not needed, and
    nothing in the file is run. ``hashes`` computes a sha256 of each tensor and of all together, the same in every
    container; ``against`` compares them with a manifest. ``values`` counts NaN and infinities. ``progress`` is a
    function of the bytes done and the total, or True for a line on the terminal.

    >>> verify(b"<html>").integrity
    'not-a-checkpoint'

    Raises ``CannotReadError`` if it cannot be read at all; whatever else is wrong is in the result.
    """
    start = time.perf_counter()
    manifest = against if isinstance(against, Manifest) else None
    if against is not None and manifest is None:
        if not isinstance(against, str | os.PathLike):
            raise UsageError(f"expected the path of a manifest, not {type(against).__name__}")
        manifest = read_manifest(os.fspath(against))
    hashes = hashes or manifest is not None
    with OpenCheckpoint(f, headers=True) as opened:
        reader = opened.elements
        records = records_of(reader)
        sums = TensorSums(reader, records, hashes=hashes, values=values)
        every = [record for inside in records.values() for record in inside]
        total = sum(record.stored for record in every) + sums.nbytes
        line = pool.ProgressLine(pool.terminal() if progress is True else None, "verifying", passing=True)
        show = line if progress is None or isinstance(progress, bool) else progress
        nbytes_read = 0

        def count_bytes(nbytes: int) -> None:
            nonlocal nbytes_read
            nbytes_read += nbytes  # includes the gaps between records, which are not part of the total
            show(nbytes_read, total)

        try:
            bad = sum_records(reader, records, sums.records, count_bytes)
            bad |= sums.run(count_bytes)
            opened.check_unchanged()
        finally:
            line.end()
        compared = sum(record.crc32 is not None for record in every)
        unsummed = sum(record.crc32 is None and record.size > 0 for record in every)
        checkpoint = reader.checkpoint
        unsummed += sum(part.name.endswith(".metadata") for part in checkpoint.parts)  # torch.distributed.checkpoint
        located = (problem.within(file) if file else problem for (file, _, _), problem in bad.items())
        new = tuple(new_problems(located, checkpoint.problems))
        noted = any(problem.code == "crc-mismatch" for problem in checkpoint.problems)
        checksummed = bool(compared) and not unsummed and not bad and not noted
        judged = replace(checkpoint, problems=(*checkpoint.problems, *new), checksummed=checksummed)
        judged = judge(judged, describe=False) if new else replace(judged, integrity=integrity_of(judged))
        broken = {name: ("broken", why) for name, why in misplaced(reader).items()}
        damaged = damages(reader, records, bad, {**broken, **sums.failed})
        by_name = {entry.name: entry for entry in sums.entries}
        aliases = aliases_in(reader.header_metadata(), by_name) if hashes else {}
        entries = (*sums.entries, *(by_name[name]._replace(name=alias) for alias, name in aliases.items()))
        # A tensor that claims more bytes than the file has is not hashed; then there is no hash of all tensors.
        complete = all(entry.sha256 or entry.nbytes == 0 for entry in sums.entries) and not sums.failed
        hashed = hashes and complete and judged.integrity != "not-a-checkpoint"
    return Verification(
        path=judged.path,
        format=judged.format,
        nbytes=judged.nbytes,
        integrity=judged.integrity if not damaged or judged.integrity == "not-a-checkpoint" else "damaged",
        tensor_count=len(checkpoint.tensors),
        checksums=compared,
        unsummed=unsummed,
        nbytes_read=nbytes_read,
        seconds=time.perf_counter() - start,
        damaged=damaged,
        findings=tuple(
            finding  # about the bytes: what loading would run does not matter here
            for finding in judged.findings
            if rule_of(finding.code).integrity != "whole" or finding.code in _REMARKS
        ),
        tensors=entries,
        sha256=hash_of_all(entries) if hashed else "",
        manifest=manifest.path if manifest is not None else "",
        differences=compare(manifest.of(judged.path).tensors, entries) if manifest is not None else (),
    )
