"""The result of ``transload verify``, and what it says about it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from transload.findings import Finding, Integrity, rescue_command
from transload.format import format_of
from transload.frozen import Frozen, replace
from transload.opening.damage import Damage
from transload.opening.digests import Difference, TensorSum
from transload.render import Reported
from transload.render.checkpoint import INTEGRITY, findings
from transload.render.lines import BLANK, Block, Prose, Table, Words, heading, note, row, tally
from transload.render.words import count, path_text, plural, printable, size
from transload.steps import has_command

_HASH = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")
_UNSUMMED = "none in this format, so a changed bit cannot be detected; --write keeps hashes to compare with next time"


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
        """Plain data for JSON: what ``--json`` prints."""
        names = ("path", "format", "nbytes", "ok", "integrity", "tensor_count", "checksums", "unsummed", "nbytes_read")
        return {
            "schema": 1,
            **{name: getattr(self, name) for name in names},
            "seconds": round(self.seconds, 6),
            "damaged": [damage.to_dict() for damage in self.damaged],
            "findings": [finding.to_dict() for finding in self.findings],
            "sha256": self.sha256 or None,
            "tensors": [tensor.to_dict() for tensor in self.tensors],
            "manifest": self.manifest or None,
            "differences": [difference.to_dict() for difference in self.differences],
        }

    def _blocks(self) -> Iterator[Block]:
        return report(self)


def report(verification: Verification, *, hashes: bool = True) -> Iterator[Block]:
    """Everything ``transload verify`` says about one file."""
    yield Prose(((path_text(verification.path, None), "strong"),))
    role, reason = INTEGRITY[verification.integrity]
    yield row("bytes", f"{verification.integrity}: {reason}", role)
    words = printable(format_of(verification.format).words)
    yield row("file", f"{words}, {plural(verification.tensor_count, 'tensor')}, {size(verification.nbytes)}")
    if verification.integrity != "not-a-checkpoint":
        yield from _summary(verification)
    yield from _details(verification, hashes=hashes)


def _details(verification: Verification, *, hashes: bool = True) -> Iterator[Block]:
    """The lists: damaged tensors, differences, findings, values, hashes."""
    if verification.damaged:
        yield from heading("damaged", plural(len(verification.damaged), "tensor"))
        for damage in verification.damaged:
            yield Prose(((printable(damage.detail, 400), "dim"),), lead=((f"  {_named(damage.name)}  ", "bad"),))
    if verification.differences:
        yield from heading("differs", f"from {path_text(verification.manifest)}")
        for difference in verification.differences:
            lead = ((f"  {difference.what}  ", "bad"), (f"{_named(difference.name)}  ", ""))
            yield Prose(((_HASH.sub(r"\1…", printable(difference.detail, 200)), "dim"),), lead=lead)
    shown = {damage.detail for damage in verification.damaged}
    for finding in verification.findings:
        rest = tuple(line for line in finding.evidence if line not in shown)
        yield BLANK
        yield from findings([replace(finding, evidence=rest)])
    # Suggest a rescue if it can help and no finding has suggested it.
    suggested = any(has_command(finding.fix) for finding in verification.findings)
    useless = verification.damaged and all(damage.kind == "broken" for damage in verification.damaged)
    form = format_of(verification.format)
    # Without an index of several files, no tensor is found in them.
    useless = useless or (form.several and not verification.tensor_count)
    useless = useless or [finding.code for finding in verification.findings] == ["legacy-more-objects"]
    rescuable = verification.integrity in ("damaged", "repairable") and form.rescued
    if rescuable and not suggested and not useless:
        command = rescue_command(verification.path, form.suffix)
        yield BLANK
        yield note("to save everything that is intact or provably repairable as a new file:")
        yield Prose(((printable(command, None), ""),), lead=(("    ", ""),), whole=True)
    special = [tensor for tensor in verification.tensors if tensor.nan or tensor.inf]
    if special:
        yield from heading("NaN or infinite", plural(len(special), "tensor"))
        rows: list[tuple[Words, ...]] = []
        for tensor in special:
            counts = (f"{tensor.nan:,} NaN" if tensor.nan else ""), (f"{tensor.inf:,} inf" if tensor.inf else "")
            rows.append((_named(tensor.name), printable(tensor.dtype), *(((text, "trust"),) for text in counts)))
        yield Table(rows, right=(2, 3), dim=(1,), drops=(1,))
    hashed = [tensor for tensor in verification.tensors if tensor.sha256]
    if hashes and hashed and not verification.manifest:
        yield from heading("sha256 of tensors", count(len(hashed)))
        yield Table([(tensor.sha256, _named(tensor.name)) for tensor in hashed], dim=(0,), shrinks=(0, 1))
        left = len(verification.tensors) - len(hashed)
        if left:
            one = "1 further entry without elements of its own"
            yield note(one if left == 1 else f"{count(left)} further entries without elements of their own")


def _summary(verification: Verification) -> Iterator[Block]:
    if verification.checksums:
        bad = any(damage.kind == "checksum" for damage in verification.damaged)
        records = f"{plural(verification.checksums, 'record')} compared"
        if verification.unsummed:
            records += f", {count(verification.unsummed)} {'has' if verification.unsummed == 1 else 'have'} none"
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
        special = sum(bool(tensor.nan or tensor.inf) for tensor in counted)
        words = f"NaN or infinite in {special:,} of {plural(len(counted), 'tensor')}"
        yield row("values", words, "trust" if special else "")
    if verification.manifest:
        outcome = "all tensors match it" if not verification.differences else "not all tensors match it"
        yield row("manifest", f"{path_text(verification.manifest, None)}: {outcome}", "" if verification.ok else "bad")


def written(path: str, tensors: int) -> Block:
    """The line that says that a manifest was written."""
    return row("written", f"{path_text(path, None)}: the hashes of {plural(tensors, 'tensor')}, for --against")


def _named(name: str) -> str:
    return printable(name, None) or "the tensor itself"


def several(results: Sequence[Verification], total: int, *, hashes: bool = True) -> Iterator[Block]:
    """A table of several files, then the details of those that have any."""
    rows: list[tuple[Words, ...]] = []
    for result in results:
        verdict = "differs" if result.differences and result.integrity in ("whole", "unchecked") else result.integrity
        role = "bad" if not result.ok else INTEGRITY[result.integrity][0]
        columns = printable(format_of(result.format).words), count(result.tensor_count), size(result.nbytes)
        checksums: Words = count(result.checksums) if result.checksums else (("none", "dim"),)
        rows.append((path_text(result.path), *columns, checksums, ((verdict, role),)))
    if results:
        titles = ("file", "format", "tensors", "size", "checksums", "bytes")
        yield Table(rows, right=(2, 3, 4), dim=(1,), titles=titles, drops=(1, 2), indent=0)
    for result in results:
        lists = list(_details(result, hashes=hashes))
        if lists:
            yield from heading(path_text(result.path, None), result.sha256)
            yield from lists
    yield from tally(total, len(results), sum(not result.ok for result in results))
