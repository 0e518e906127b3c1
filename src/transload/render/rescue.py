"""The report of ``transload rescue``: what is whole, what was mended and where, what is lost, what was written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transload.render.escape import printable
from transload.render.lines import Block, Line, Prose, Table, layout, plain
from transload.render.sizes import plural, size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transload.rescuing.fates import Fate
    from transload.rescuing.mended import Mend
    from transload.rescuing.result import Rescue

__all__ = ["as_text", "report"]

_LABEL = 12
_SHOWN = 32
_HOW = {
    "exact": "the file as it was saved, byte for byte as far as can be told",
    "rebuilt": "all of it, laid out anew",
    "filled": "all of it, with {fill} in the place of what is lost",
    "left-out": "without what is lost",
    "weights": "a dictionary of its tensors: the program itself is not all there",
    "nothing": "nothing: there is nothing to save",
}
_CERTAINTY = {"proven": ("proven", "good"), "probable": ("probable", "trust"), "ambiguous": ("ambiguous", "bad")}


def as_text(rescue: Rescue) -> str:
    """The report as a pipe gets it, without colour."""
    from transload.render.style import Style

    return "\n".join(plain(line) for line in layout(report(rescue), Style()))


def report(rescue: Rescue) -> Iterator[Block]:
    """Everything ``transload rescue`` says."""
    yield Prose(((printable(rescue.path, None), "strong"),))
    for note in rescue.notes:
        yield _row("found", printable(note, None))
    yield _row("whole", _counted(rescue.whole), "good" if rescue.whole else "")
    if rescue.mends:
        yield _row("mended", _mended(rescue), "trust")
        yield Table([_mend(mend) for mend in rescue.mends[:_SHOWN]], right=frozenset({0, 1}), shrinks=(3,), indent=14)
        yield from _more(len(rescue.mends), "bytes")
    if rescue.lost:
        yield _row("lost", _counted(rescue.lost), "bad")
        yield Table([_lost(fate) for fate in rescue.lost[:_SHOWN]], right=frozenset({1}), indent=14)
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


def _counted(fates: tuple[Fate, ...]) -> str:
    if not fates:
        return "no tensor"
    words = f"{plural(len(fates), 'tensor')}, {size(sum(fate.nbytes for fate in fates))}"
    checked = sum(fate.checked for fate in fates)
    if fates[0].state == "lost" or checked == len(fates):
        return words
    return words + (f", {checked} of them by their checksums" if checked else "; there are no checksums to tell more")


def _mended(rescue: Rescue) -> str:
    bits = sum(len(mend.bits) for mend in rescue.mends)
    held = f", {plural(len(rescue.mended), 'tensor')}" if rescue.mended else ""
    return f"{plural(bits, 'bit')} in {plural(len(rescue.mends), 'byte')}{held}"


def _mend(mend: Mend) -> tuple[Line, ...]:
    place = printable(mend.record) if mend.record else "headers and directory"
    return (
        ((f"byte {mend.position:,}", ""),),
        ((f"{mend.old:#04x} → {mend.new:#04x}", "dim"),),
        (_CERTAINTY[mend.certainty],),
        ((place, "dim"),),
    )


def _lost(fate: Fate) -> tuple[Line, ...]:
    return (((printable(fate.name) or "the root", ""),), ((size(fate.nbytes), "dim"),), ((fate.why, "dim"),))


def _written(rescue: Rescue) -> Iterator[Block]:
    words = _HOW[rescue.how].format(fill=rescue.fill)
    if rescue.how == "nothing":
        yield _row("written", words, "bad")
        return
    yield _row("written" if rescue.done else "would write", words, "" if rescue.done else "trust")
    if rescue.done:
        yield _row("", printable(rescue.out, None))
        yield _row("report", printable(rescue.report, None))
