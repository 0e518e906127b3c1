"""The report of ``transload verify``: the verdict, what it rests on, and every tensor that is not what it was."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from transload.checkpoint import FORMATS
from transload.render.checkpoint import INTEGRITY
from transload.render.lines import BLANK, Block, Line, Prose, Table, heading, layout, note, plain
from transload.render.words import count, plural, printable, size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transload.findings import Finding
    from transload.verifying import Verification

__all__ = ["as_text", "report", "several", "written"]


_LABEL = 12
_HASH = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")
_TITLES = ("file", "format", "tensors", "size", "checksums", "bytes")
_UNSUMMED = "none in this format: a changed bit cannot be seen; --write keeps hashes to compare with next time"


def as_text(verification: Verification) -> str:
    """The report as a pipe gets it, without colour."""
    from transload.render.lines import Style

    return "\n".join(plain(line) for line in layout(report(verification), Style()))


def report(verification: Verification, *, hashes: bool = True) -> Iterator[Block]:
    """Everything ``transload verify`` says of one file."""
    yield Prose(((printable(verification.path, None), "strong"),))
    for label, words, role in _summary(verification):
        yield Prose(((words, role),), lead=((f"  {label:<{_LABEL}}", "dim"),))
    yield from details(verification, hashes=hashes)


def details(verification: Verification, *, hashes: bool = True) -> Iterator[Block]:
    """Lists: what is damaged, what differs, what was found, values, hashes."""
    if verification.damaged:
        yield from heading("damaged", plural(len(verification.damaged), "tensor"))
        for damage in verification.damaged:
            yield Prose(((printable(damage.detail, 400), "dim"),), lead=((f"  {_named(damage.name)}  ", "bad"),))
    if verification.differences:
        yield from heading("differs", f"from {printable(verification.manifest)}")
        for each in verification.differences:
            lead = ((f"  {each.what}  ", "bad"), (f"{_named(each.name)}  ", ""))
            yield Prose(((_HASH.sub(r"\1…", printable(each.detail, 200)), "dim"),), lead=lead)
    told = {damage.detail for damage in verification.damaged}
    for finding in verification.findings:
        rest = tuple(line for line in finding.evidence if line not in told)
        yield BLANK
        yield from _finding(replace(finding, evidence=rest))
    if _can_be_rescued(verification):
        yield BLANK
        yield note("all that is whole, and what can be undone with proof, as a new file:")
        yield Prose(((printable(_rescue(verification), None), ""),), lead=(("    ", ""),), whole=True)
    yield from _values(verification)
    if hashes:
        yield from _hashes(verification)


def _can_be_rescued(verification: Verification) -> bool:
    """Whether a rescue has something to do that no finding has advised."""
    from transload.judge.problems import RESCUED

    advised = any(line.startswith("$ ") for finding in verification.findings for line in finding.fix)
    senseless = verification.damaged and all(damage.kind == "broken" for damage in verification.damaged)
    hurt = verification.integrity in ("damaged", "repairable") and verification.format in RESCUED
    return hurt and not advised and not senseless


def _finding(finding: Finding) -> Sequence[Block]:
    from transload.render.checkpoint import findings

    return next(findings([finding]))


def _rescue(verification: Verification) -> str:
    from transload.findings import rescue_command

    return rescue_command(verification.path, ".safetensors" if verification.format == "safetensors" else ".pt")


def _summary(verification: Verification) -> Iterator[tuple[str, str, str]]:
    role, reason = INTEGRITY[verification.integrity]
    yield "bytes", f"{verification.integrity}: {reason}", role
    words = printable(FORMATS.get(verification.format, verification.format))
    yield "file", f"{words}, {plural(verification.tensor_count, 'tensor')}, {size(verification.nbytes)}", ""
    if verification.integrity == "not-a-checkpoint":
        return
    yield "checksums", *_checksums(verification)
    yield "read", _speed(verification), ""
    if verification.sha256:
        yield "sha256", verification.sha256, ""
    looked = [tensor for tensor in verification.tensors if tensor.nan is not None]
    if looked:
        odd = sum(bool(tensor.nan or tensor.inf) for tensor in looked)
        yield "values", f"NaN or infinite in {odd:,} of {plural(len(looked), 'tensor')}", "trust" if odd else ""
    if verification.manifest:
        alike = "all tensors are as it has them" if not verification.differences else "not all is as it has it"
        yield "manifest", f"{printable(verification.manifest, None)}: {alike}", "" if verification.ok else "bad"


def _checksums(verification: Verification) -> tuple[str, str]:
    if not verification.checksums:
        told = verification.manifest or verification.sha256
        return ("none in this format" if told else _UNSUMMED), "" if told else "trust"
    bad = sum(damage.kind == "checksum" for damage in verification.damaged)
    records = f"{plural(verification.checksums, 'record')} compared"
    if verification.unsummed:
        records += f", {count(verification.unsummed)} have none"
    agree = "all agree" if verification.integrity == "whole" else "see below" if bad else ""
    return f"{records}, {agree}".removesuffix(", "), "bad" if bad else ""


def _speed(verification: Verification) -> str:
    if not verification.seconds or verification.nbytes_read < 1_000_000:
        return size(verification.nbytes_read)
    speed = verification.nbytes_read / verification.seconds / 1e9
    return f"{size(verification.nbytes_read)} in {verification.seconds:.2f} s, {speed:.1f} GB/s"


def written(path: str, tensors: int) -> Block:
    """That a manifest was written."""
    words = f"the hashes of {plural(tensors, 'tensor')}, for --against"
    return Prose(((f"{printable(path, None)}: {words}", ""),), lead=((f"  {'written':<{_LABEL}}", "dim"),))


def _named(name: str) -> str:
    return printable(name, None) or "the tensor itself"


def _values(verification: Verification) -> Iterator[Block]:
    odd = [tensor for tensor in verification.tensors if tensor.nan or tensor.inf]
    if odd:
        yield from heading("NaN or infinite", plural(len(odd), "tensor"))
        rows = [_value(tensor.name, tensor.dtype, tensor.nan or 0, tensor.inf or 0) for tensor in odd]
        yield Table(rows, right=frozenset({2, 3}), drops=(1,))


def _value(name: str, dtype: str, nan: int, inf: int) -> tuple[Line, ...]:
    return (
        ((_named(name), ""),),
        ((printable(dtype), "dim"),),
        ((f"{nan:,} NaN" if nan else "", "trust"),),
        ((f"{inf:,} inf" if inf else "", "trust"),),
    )


def _hashes(verification: Verification) -> Iterator[Block]:
    hashed = [tensor for tensor in verification.tensors if tensor.sha256]
    if not hashed or verification.manifest:
        return
    yield from heading("sha256 of tensors", count(len(hashed)))
    yield Table([(((tensor.sha256, "dim"),), ((_named(tensor.name), ""),)) for tensor in hashed])
    left = [tensor for tensor in verification.tensors if not tensor.sha256]
    if left:
        yield note(f"{plural(len(left), 'further entry').replace('entrys', 'entries')} without elements of their own")


def several(results: Sequence[Verification], total: int, *, hashes: bool = True) -> Iterator[Block]:
    """A table of several files, then what is to be said of those that have a problem, or were asked about."""
    if results:
        title: tuple[Line, ...] = tuple(((word, "dim"),) for word in _TITLES)
        yield Table([title, *map(_row, results)], right=frozenset({2, 3, 4}), drops=(1, 2), indent=0)
    for each in results:
        lists = list(details(each, hashes=hashes))
        if lists:
            yield from heading(printable(each.path, None), each.sha256)
            yield from lists
    bad = sum(not each.ok for each in results)
    words = [plural(total, "file"), f"{bad:,} with a problem" if bad else "no problem"]
    if len(results) < total:
        words.append(f"{total - len(results):,} not read")
    yield from heading(", ".join(words))


def _row(each: Verification) -> tuple[Line, ...]:
    words = "differs" if each.differences and each.integrity in ("whole", "unchecked") else each.integrity
    role = "bad" if not each.ok else INTEGRITY[each.integrity][0]
    return (
        ((printable(each.path), ""),),
        ((printable(FORMATS.get(each.format, each.format)), "dim"),),
        ((count(each.tensor_count), ""),),
        ((size(each.nbytes), ""),),
        ((count(each.checksums) if each.checksums else "none", "" if each.checksums else "dim"),),
        ((words, role),),
    )
