"""``transload.verify``: check that the bytes of a checkpoint are those that were saved, and hash its tensors.

``verify`` opens the checkpoint, lets ``tensors.damage`` read every byte and compare checksums, sizes and indices, and
combines the results into a verdict. ``hashing`` reads tensors one by one; ``manifest`` reads and compares manifests.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from transload._version import __version__
from transload.checkpoint import FORMATS
from transload.errors import ManifestError, UsageError
from transload.findings import Finding, Integrity, rescue_command
from transload.formats.verify import new_problems
from transload.frozen import Frozen, Reported
from transload.io.atomic import AtomicFile
from transload.io.pool import Progress
from transload.io.sources import SourceLike
from transload.judge import integrity_of, judge
from transload.judge.problems import RESCUED, rule_of
from transload.render.checkpoint import INTEGRITY, findings
from transload.render.lines import BLANK, Block, Prose, Table, Words, as_text, heading, note, row, tally
from transload.render.words import count, plural, printable, size
from transload.tensors.content import Content, open_content
from transload.tensors.damage import Damage, damages, misplaced, records_of, sum_records
from transload.verifying.hashing import plan_of, sum_tensors, tensor_count, with_aliases
from transload.verifying.manifest import (
    Difference,
    Manifest,
    TensorSum,
    compare,
    hash_of_all,
    read_manifest,
    refuse_target,
    to_json,
)

__all__ = ["Damage", "Difference", "TensorSum", "Verification", "verify", "write_manifest"]


class Verification(Frozen, Reported):
    """Whether the bytes of a checkpoint are those that were saved, as far as that can be known.

    ``integrity`` is the verdict: ``whole`` if every record has the checksum it was saved with, ``unchecked`` if there
    are none to compare and nothing else is wrong. ``damaged`` are the tensors whose bytes are not those that were
    saved. ``checksums`` counts the records that were compared, ``unsummed`` those without a checksum; ``nbytes_read``
    bytes were read in ``seconds``. ``sha256`` is the hash of all tensors; ``tensors`` is filled if hashes or values are
    requested. ``manifest`` is the path of the manifest, ``differences`` what differs from it.
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
        """Whether nothing is wrong with it and nothing differs from the manifest: the condition for exit code 0."""
        return self.integrity in ("whole", "unchecked") and not self.damaged and not self.differences

    def to_dict(self) -> dict[str, Any]:
        """The whole of it as plain data; this is what ``--json`` prints."""
        names = ("path", "format", "nbytes", "ok", "integrity", "tensor_count", "checksums", "unsummed", "nbytes_read")
        return {
            "schema": 1,
            **{name: getattr(self, name) for name in names},
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
        return as_text(report(self))


def verify(
    f: SourceLike,
    *,
    hashes: bool = False,
    values: bool = False,
    against: str | os.PathLike[str] | Manifest | None = None,
    progress: bool | Callable[[int, int], object] | None = None,
) -> Verification:
    """Read every byte of a checkpoint, compare all checksums, and name the tensors whose bytes have changed.

    ``f`` is a path (of a file or a directory), bytes, or a seekable binary file object; torch is not needed, and
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
    # Tensors are listed only if hashes or values are requested, or if something is wrong and they must be named.
    scan = result = None
    with open_content(f, tree=hashes or values) as content:
        number = tensor_count(content.checkpoint)
        if number is not None:
            scan = _Scan(content, progress, hashes=hashes, values=values)
            if not (content.checkpoint.counted and scan.bad):
                result = scan.verification(content, number)
    if result is None:
        with open_content(f) as content:
            scan = scan or _Scan(content, progress, hashes=hashes, values=values)
            result = scan.verification(content, len(content.checkpoint.tensors))
    if manifest is not None:
        differences = compare(manifest.of(result.path), result.tensors)
        result = replace(result, manifest=manifest.path, differences=differences)
    return replace(result, seconds=time.perf_counter() - start)


_REMARKS = frozenset({"no-checksums", "index-missing", "index-total-size", "shard-tensor-unlisted", "shard-stray"})


class _Scan:
    """Reads every byte of a checkpoint, and keeps the bad records, the tensors that failed, and the bytes read."""

    def __init__(
        self,
        content: Content,
        progress: bool | Callable[[int, int], object] | None,
        *,
        hashes: bool,
        values: bool,
    ) -> None:
        self._hashes = hashes
        self._records = records_of(content)
        self._entries, jobs = plan_of(content, self._records, hashes=hashes, values=values)
        total = sum(record.stored for records in self._records.values() for record in records)
        total += sum(job.tensor.nbytes for job in jobs if job.key is None)
        wanted = progress is True and sys.stderr is not None and sys.stderr.isatty()
        line = Progress(sys.stderr if wanted else None, "verifying", passing=True)
        show = line if progress is None or isinstance(progress, bool) else progress
        self._nbytes = 0

        def count_bytes(nbytes: int) -> None:
            self._nbytes += nbytes  # includes the gaps between records, which are not part of the total
            show(self._nbytes, total)

        try:
            with_tensors = {job.key for job in jobs if job.key is not None}
            self.bad = sum_records(content, self._records, with_tensors, count_bytes)
            bad, self._failed = sum_tensors(content, self._entries, jobs, count_bytes, hashes=hashes, values=values)
            self.bad.update(bad)
        finally:
            line.end()

    def verification(self, content: Content, number: int) -> Verification:
        """The verdict, with the tensors that are damaged."""
        every = [record for records in self._records.values() for record in records]
        compared = sum(record.crc32 is not None for record in every)
        unsummed = sum(record.crc32 is None and record.size > 0 for record in every)
        checkpoint = content.checkpoint
        bad = (problem.within(file) if file else problem for (file, _, _), problem in self.bad.items())
        new = tuple(new_problems(bad, checkpoint.problems))
        noted = any(problem.code == "crc-mismatch" for problem in checkpoint.problems)
        checksummed = bool(compared) and not unsummed and not self.bad and not noted
        judged = replace(checkpoint, problems=(*checkpoint.problems, *new), checksummed=checksummed)
        judged = judge(judged, describe=False) if new else replace(judged, integrity=integrity_of(judged))
        broken = {name: ("broken", why) for name, why in misplaced(content).items()}
        damaged = damages(content, self._records, self.bad, {**broken, **self._failed})
        entries = with_aliases(content, self._entries) if self._hashes else self._entries
        # A tensor that claims more bytes than the file has is not hashed; then there is no hash of all tensors.
        complete = all(entry.sha256 or entry.nbytes == 0 for entry in self._entries) and not self._failed
        hashed = self._hashes and complete and judged.integrity != "not-a-checkpoint"
        return Verification(
            path=judged.path,
            format=judged.format,
            nbytes=judged.nbytes,
            integrity=judged.integrity if not damaged or judged.integrity == "not-a-checkpoint" else "damaged",
            tensor_count=number,
            checksums=compared,
            unsummed=unsummed,
            nbytes_read=self._nbytes,
            seconds=0.0,
            damaged=damaged,
            findings=tuple(
                finding  # about the bytes: what loading would run does not matter here
                for finding in judged.findings
                if rule_of(finding.code).integrity != "whole" or finding.code in _REMARKS
            ),
            tensors=tuple(entries),
            sha256=hash_of_all(entries) if hashed else "",
        )


def write_manifest(path: str, verifications: Sequence[Verification], *, overwrite: bool = False) -> None:
    """Write the hashes of checkpoints atomically; ``ManifestError`` if one of them is damaged or has no hash."""
    for each in verifications:
        if not each.ok or not each.sha256:
            raise ManifestError("is not written: not every file is intact", where=path, fix=f"See {each.path}.")
    refuse_target(path, overwrite=overwrite)
    files = []
    for each in verifications:
        tensors = ",\n".join(
            to_json({"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "sha256": t.sha256})
            for t in each.tensors
        )
        head = json.dumps({"path": each.path, "format": each.format, "nbytes": each.nbytes, "sha256": each.sha256})
        files.append(f'{head[:-1]}, "tensors": [\n{tensors}\n]}}')
    head = json.dumps({"schema": 1, "transload": __version__})
    text = f'{head[:-1]}, "files": [\n' + ",\n".join(files) + "\n]}\n"
    with AtomicFile(path) as file, open(file.descriptor, "w", encoding="ascii", closefd=False) as out:
        out.write(text)


# -- the report

_HASH = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")
_UNSUMMED = "none in this format, so a changed bit cannot be detected; --write keeps hashes to compare with next time"


def report(verification: Verification, *, hashes: bool = True) -> Iterator[Block]:
    """Everything ``transload verify`` says of one file."""
    yield Prose(((printable(verification.path, None), "strong"),))
    yield from _summary(verification)
    yield from _details(verification, hashes=hashes)


def _details(verification: Verification, *, hashes: bool = True) -> Iterator[Block]:
    """The lists: damaged tensors, differences, findings, values, hashes."""
    if verification.damaged:
        yield from heading("damaged", plural(len(verification.damaged), "tensor"))
        for damage in verification.damaged:
            yield Prose(((printable(damage.detail, 400), "dim"),), lead=((f"  {_named(damage.name)}  ", "bad"),))
    if verification.differences:
        yield from heading("differs", f"from {printable(verification.manifest)}")
        for each in verification.differences:
            lead = ((f"  {each.what}  ", "bad"), (f"{_named(each.name)}  ", ""))
            yield Prose(((_HASH.sub(r"\1…", printable(each.detail, 200)), "dim"),), lead=lead)
    shown = {damage.detail for damage in verification.damaged}
    for finding in verification.findings:
        rest = tuple(line for line in finding.evidence if line not in shown)
        yield BLANK
        yield from next(findings([replace(finding, evidence=rest)]))
    # Suggest a rescue if it can help and no finding has suggested it.
    suggested = any(line.startswith("$ ") for finding in verification.findings for line in finding.fix)
    useless = verification.damaged and all(damage.kind == "broken" for damage in verification.damaged)
    rescuable = verification.integrity in ("damaged", "repairable") and verification.format in RESCUED
    if rescuable and not suggested and not useless:
        command = rescue_command(verification.path, ".safetensors" if verification.format == "safetensors" else ".pt")
        yield BLANK
        yield note("to save everything that is intact or provably repairable as a new file:")
        yield Prose(((printable(command, None), ""),), lead=(("    ", ""),), whole=True)
    odd = [tensor for tensor in verification.tensors if tensor.nan or tensor.inf]
    if odd:
        yield from heading("NaN or infinite", plural(len(odd), "tensor"))
        rows: list[tuple[Words, ...]] = []
        for tensor in odd:
            counts = (f"{tensor.nan:,} NaN" if tensor.nan else ""), (f"{tensor.inf:,} inf" if tensor.inf else "")
            rows.append((_named(tensor.name), printable(tensor.dtype), *(((text, "trust"),) for text in counts)))
        yield Table(rows, right=(2, 3), dim=(1,), drops=(1,))
    hashed = [tensor for tensor in verification.tensors if tensor.sha256]
    if hashes and hashed and not verification.manifest:
        yield from heading("sha256 of tensors", count(len(hashed)))
        yield Table([(tensor.sha256, _named(tensor.name)) for tensor in hashed], dim=(0,))
        left = len(verification.tensors) - len(hashed)
        if left:
            yield note(f"{plural(left, 'further entry').replace('entrys', 'entries')} without elements of their own")


def _summary(verification: Verification) -> Iterator[Block]:
    role, reason = INTEGRITY[verification.integrity]
    yield row("bytes", f"{verification.integrity}: {reason}", role)
    words = printable(FORMATS.get(verification.format, verification.format))
    yield row("file", f"{words}, {plural(verification.tensor_count, 'tensor')}, {size(verification.nbytes)}")
    if verification.integrity == "not-a-checkpoint":
        return
    if verification.checksums:
        bad = any(damage.kind == "checksum" for damage in verification.damaged)
        records = f"{plural(verification.checksums, 'record')} compared"
        if verification.unsummed:
            records += f", {count(verification.unsummed)} have none"
        if verification.integrity == "whole" or bad:
            records += ", see below" if bad else ", all agree"
        yield row("checksums", records, "bad" if bad else "")
    elif verification.manifest or verification.sha256:
        yield row("checksums", "none in this format")
    else:
        yield row("checksums", _UNSUMMED, "trust")
    read = size(verification.nbytes_read)
    if verification.seconds and verification.nbytes_read >= 1_000_000:
        read += f" in {verification.seconds:.2f} s, {size(round(verification.nbytes_read / verification.seconds))}/s"
    yield row("read", read)
    if verification.sha256:
        yield row("sha256", verification.sha256)
    counted = [tensor for tensor in verification.tensors if tensor.nan is not None]
    if counted:
        odd = sum(bool(tensor.nan or tensor.inf) for tensor in counted)
        words = f"NaN or infinite in {odd:,} of {plural(len(counted), 'tensor')}"
        yield row("values", words, "trust" if odd else "")
    if verification.manifest:
        outcome = "all tensors match it" if not verification.differences else "not all tensors match it"
        yield row("manifest", f"{printable(verification.manifest, None)}: {outcome}", "" if verification.ok else "bad")


def written(path: str, tensors: int) -> Block:
    """The line that says that a manifest was written."""
    return row("written", f"{printable(path, None)}: the hashes of {plural(tensors, 'tensor')}, for --against")


def _named(name: str) -> str:
    return printable(name, None) or "the tensor itself"


def several(results: Sequence[Verification], total: int, *, hashes: bool = True) -> Iterator[Block]:
    """A table of several files, then the details of those that have any."""
    rows: list[tuple[Words, ...]] = []
    for each in results:
        verdict = "differs" if each.differences and each.integrity in ("whole", "unchecked") else each.integrity
        role = "bad" if not each.ok else INTEGRITY[each.integrity][0]
        held = printable(FORMATS.get(each.format, each.format)), count(each.tensor_count), size(each.nbytes)
        checksums: Words = count(each.checksums) if each.checksums else (("none", "dim"),)
        rows.append((printable(each.path), *held, checksums, ((verdict, role),)))
    if results:
        titles = ("file", "format", "tensors", "size", "checksums", "bytes")
        yield Table(rows, right=(2, 3, 4), dim=(1,), titles=titles, drops=(1, 2), indent=0)
    for each in results:
        lists = list(_details(each, hashes=hashes))
        if lists:
            yield from heading(printable(each.path, None), each.sha256)
            yield from lists
    bad = sum(not each.ok for each in results)
    yield from tally(total, len(results), f"{bad:,} with a problem" if bad else "")
