"""The report of ``transload convert``: what was written, what was left out, and where everything else is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transload.render.lines import Block, Line, Prose, Table, layout, plain
from transload.render.words import plural, printable, size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transload.converting import Conversion
    from transload.converting.selection import Candidate, Omission

__all__ = ["as_text", "listing", "report"]


_LABEL = 12
_SHOWN = 16
_FORMATS = {"torch": "torch zip", "safetensors": "safetensors", "npz": "npz", "raw": "raw tensors"}


def as_text(conversion: Conversion) -> str:
    """The report as a pipe gets it, without colour."""
    from transload.render.lines import Style

    return "\n".join(plain(line) for line in layout(report(conversion), Style()))


def report(conversion: Conversion) -> Iterator[Block]:
    """Everything ``transload convert`` says."""
    yield Prose(((printable(conversion.out, None), "strong"),))
    yield _row("written", _written(conversion))
    if conversion.cast:
        infinite = f", {conversion.infinite:,} numbers became infinite" if conversion.infinite else ""
        rounded = f"{plural(conversion.cast, 'tensor')} to another dtype{infinite}"
        yield _row("rounded", rounded, "trust" if infinite else "")
    if conversion.aliases:
        yield _row("tied", _some([f"{printable(name)} is {printable(kept)}" for name, kept in conversion.aliases]))
    if conversion.renamed:
        renamed = [f"{printable(old) or 'the root'} → {printable(new)}" for old, new in conversion.renamed]
        yield _row("renamed", _some(renamed), "trust")
    if conversion.others:
        yield _row("not chosen", plural(conversion.others, "tensor") + " outside the key", "dim")
    yield from _omissions("lost", [each for each in conversion.left if each.lost], "bad")
    yield from _omissions("left out", [each for each in conversion.left if not each.lost], "")
    if conversion.leftovers:
        yield _row("leftovers", f"everything else, as plain data: {printable(conversion.leftovers, None)}")
    yield from _omissions("not kept", conversion.listed, "bad", "; --json names them")
    for note in conversion.notes:
        yield _row("note", printable(note, None), "dim")


def _written(conversion: Conversion) -> str:
    shards = sum(name.endswith(".safetensors") for name in conversion.files)
    files = f", {plural(shards, 'shard')} and an index" if shards > 1 else ""
    nbytes, seconds = conversion.nbytes, conversion.seconds
    speed = f", {nbytes / 1e9 / seconds:.1f} GB/s" if nbytes >= 1e8 and seconds else ""
    checked = "read back and compared" if conversion.verified else "not read back"
    tensors = f"{plural(conversion.tensors, 'tensor')}, {size(nbytes)}"
    return f"{_FORMATS[conversion.to]}: {tensors}{files}{speed}; {checked}"


def _omissions(label: str, omissions: Sequence[Omission], role: str, hint: str = "") -> Iterator[Block]:
    for name, why, _ in omissions[:_SHOWN]:
        yield _row(label, f"{printable(name) or 'the root'}: {printable(why)}", role)
        label = ""  # only before the first
    if len(omissions) > _SHOWN:
        yield _row("", f"… and {len(omissions) - _SHOWN:,} more{hint}", "dim")


def _some(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _SHOWN:,} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + more


def _row(label: str, words: str, role: str = "") -> Block:
    return Prose(((words, role),), lead=((f"  {label:<{_LABEL}}", "dim"),))


def listing(path: str, parts: Sequence[Candidate]) -> Iterator[Block]:
    """What ``--list`` says."""
    yield Prose(((printable(path, None), "strong"),))
    rows: list[tuple[Line, ...]] = [
        (
            ((f"--key {printable(part.key)}" if part.key else "all of it", ""),),
            ((part.kind, "dim"),),
            ((plural(part.tensors, "tensor"), ""),),
            ((size(part.nbytes), "dim"),),
        )
        for part in parts
    ]
    yield Table(rows, right=frozenset({2, 3}))
