"""The report of ``transload rescue``: what is whole, repaired and lost, and what was written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transload.render.lines import Block, Line, Prose, Table, layout, plain
from transload.render.words import plural, printable, size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transload.rescuing.result import Repair, Rescue, TensorOutcome

__all__ = ["as_text", "report"]


_LABEL = 12
_SHOWN = 32
_HOW = {
    "exact": "the file as it was saved, byte for byte as far as can be told",
    "rebuilt": "everything, in a new layout",
    "filled": "everything, with {fill} in place of what is lost",
    "left-out": "without what is lost",
    "weights": "a dictionary of its tensors: the program is incomplete",
    "nothing": "nothing: there is nothing to save",
}
_CERTAINTY = {"proven": ("proven", "good"), "probable": ("probable", "trust"), "ambiguous": ("ambiguous", "bad")}


def as_text(rescue: Rescue) -> str:
    """The report without colour, as a pipe gets it."""
    from transload.render.lines import Style

    return "\n".join(plain(line) for line in layout(report(rescue), Style()))


def report(rescue: Rescue) -> Iterator[Block]:
    """Everything ``transload rescue`` prints."""
    yield Prose(((printable(rescue.path, None), "strong"),))
    for note in rescue.notes:
        yield _row("found", printable(note, None))
    yield _row("whole", _counted(rescue.whole), "good" if rescue.whole else "")
    if rescue.mends:
        yield _row("repaired", _repairs(rescue), "trust")
        yield Table([_repair(each) for each in rescue.mends[:_SHOWN]], right=frozenset({0, 1}), shrinks=(3,), indent=14)
        yield from _more(len(rescue.mends), "bytes")
    if rescue.lost:
        yield _row("lost", _counted(rescue.lost), "bad")
        yield Table([_lost(outcome) for outcome in rescue.lost[:_SHOWN]], right=frozenset({1}), indent=14)
        yield from _more(len(rescue.lost), "tensors")
    for record in rescue.records[:_SHOWN]:
        yield _row("lost", f"{printable(record.name)}: {printable(record.why, None)}", "bad")
    yield from _more(len(rescue.records), "records")
    yield from _written(rescue)
    for warning in rescue.warnings:
        yield Prose(((printable(warning, None), ""),), lead=(("! ", "trust"),))


def _row(label: str, words: str, role: str = "") -> Block:
    return Prose(((words, role),), lead=((f"  {label:<{_LABEL}}", "dim"),))


def _more(count: int, what: str) -> Iterator[Block]:
    if count > _SHOWN:
        yield _row("", f"… and {count - _SHOWN:,} more {what}; --json and the report have all of them", "dim")


def _counted(outcomes: tuple[TensorOutcome, ...]) -> str:
    if not outcomes:
        return "no tensors"
    words = f"{plural(len(outcomes), 'tensor')}, {size(sum(outcome.nbytes for outcome in outcomes))}"
    checked = sum(outcome.checked for outcome in outcomes)
    if outcomes[0].state == "lost" or checked == len(outcomes):
        return words
    return words + (f", {checked} of them confirmed by checksums" if checked else "; the file has no checksums")


def _repairs(rescue: Rescue) -> str:
    bits = sum(len(repair.bits) for repair in rescue.mends)
    held = f", {plural(len(rescue.mended), 'tensor')}" if rescue.mended else ""
    return f"{plural(bits, 'bit')} in {plural(len(rescue.mends), 'byte')}{held}"


def _repair(repair: Repair) -> tuple[Line, ...]:
    place = printable(repair.record) if repair.record else "headers and directory"
    return (
        ((f"byte {repair.position:,}", ""),),
        ((f"{repair.old:#04x} → {repair.new:#04x}", "dim"),),
        (_CERTAINTY[repair.certainty],),
        ((place, "dim"),),
    )


def _lost(outcome: TensorOutcome) -> tuple[Line, ...]:
    return (((printable(outcome.name) or "the root", ""),), ((size(outcome.nbytes), "dim"),), ((outcome.why, "dim"),))


def _written(rescue: Rescue) -> Iterator[Block]:
    words = _HOW[rescue.how].format(fill=rescue.fill)
    if rescue.how == "nothing":
        yield _row("written", words, "bad")
        return
    yield _row("written" if rescue.done else "would write", words, "" if rescue.done else "trust")
    if rescue.done:
        yield _row("", printable(rescue.out, None))
        yield _row("report", printable(rescue.report, None))
