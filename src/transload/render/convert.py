"""The report of ``transload convert``: what was written, what was left out, and where the rest is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transload.render.escape import printable
from transload.render.lines import Block, Line, Prose, Table, layout, plain
from transload.render.sizes import plural, size

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
    from transload.render.style import Style

    return "\n".join(plain(line) for line in layout(report(conversion), Style()))


def report(made: Conversion) -> Iterator[Block]:
    """Everything ``transload convert`` says."""
    yield Prose(((printable(made.out, None), "strong"),))
    yield _row("written", _written(made))
    if made.cast:
        infinite = f", {made.infinite:,} numbers became infinite" if made.infinite else ""
        yield _row("rounded", f"{plural(made.cast, 'tensor')} to another dtype{infinite}", "trust" if infinite else "")
    if made.aliases:
        shown = [f"{printable(name)} is {printable(kept)}" for name, kept in made.aliases]
        yield _row("tied", _some(shown))
    if made.renamed:
        yield _row(
            "renamed", _some([f"{printable(a) or 'the root'} → {printable(b)}" for a, b in made.renamed]), "trust"
        )
    if made.others:
        yield _row("not chosen", plural(made.others, "tensor") + " outside the key", "dim")
    yield from _left_out(made)
    for note in made.notes:
        yield _row("note", printable(note, None), "dim")


def _written(made: Conversion) -> str:
    files = f", {plural(_weights(made), 'shard')} and an index" if _weights(made) > 1 else ""
    speed = f", {made.nbytes / 1e9 / made.seconds:.1f} GB/s" if made.nbytes >= 1e8 and made.seconds else ""
    checked = "; read back and compared" if made.verified else "; not read back"
    held = f"{plural(made.tensors, 'tensor')}, {size(made.nbytes)}"
    return f"{_FORMATS[made.to]}: {held}{files}{speed}{checked}"


def _weights(made: Conversion) -> int:
    return sum(name.endswith(".safetensors") for name in made.files)


def _left_out(made: Conversion) -> Iterator[Block]:
    lost = [each for each in made.left if each.lost]
    others = [each for each in made.left if not each.lost]
    for label, found, role in (("lost", lost, "bad"), ("left out", others, "")):
        for each in found[:_SHOWN]:
            yield _row(label, _told(each), role)
            label = ""  # noqa: PLW2901 - only before the first
        if len(found) > _SHOWN:
            yield _row("", f"… and {len(found) - _SHOWN:,} more", "dim")
    if made.leftovers:
        yield _row("leftovers", f"everything else, as plain data: {printable(made.leftovers, None)}")
    for index, each in enumerate(made.listed[:_SHOWN]):
        yield _row("not kept" if not index else "", _told(each), "bad")
    if len(made.listed) > _SHOWN:
        yield _row("", f"… and {len(made.listed) - _SHOWN:,} more; --json names them", "dim")


def _told(left: Omission) -> str:
    return f"{printable(left.name) or 'the root'}: {printable(left.why)}"


def _some(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _SHOWN:,} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + more


def _row(label: str, words: str, role: str = "") -> Block:
    return Prose(((words, role),), lead=((f"  {label:<{_LABEL}}", "dim"),))


def listing(path: str, found: Sequence[Candidate]) -> Iterator[Block]:
    """What ``--list`` says."""
    yield Prose(((printable(path, None), "strong"),))
    yield Table([_part(part) for part in found], right=frozenset({2, 3}))


def _part(part: Candidate) -> tuple[Line, ...]:
    return (
        ((f"--key {printable(part.key)}" if part.key else "all of it", ""),),
        ((part.kind, "dim"),),
        ((plural(part.tensors, "tensor"), ""),),
        ((size(part.nbytes), "dim"),),
    )
