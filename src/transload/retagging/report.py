"""The report of ``transload retag``: which tags became which, what was written, and what stays as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transload.render.lines import Block, Line, Prose, Table, layout, plain
from transload.render.words import plural, printable, size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transload.retagging import Retag
    from transload.retagging.plan import TagChange

__all__ = ["as_text", "report"]


_LABEL = 12
_TAGS = 32
_METHODS = {
    "none": "nothing: all tags are as asked",
    "patch": "over the old tags, in as many bytes",
    "append": "a new index at the end of the archive",
    "rewrite": "a copy with a new index",
    "undo": "what was there before the last retag",
}
_RECOVERED = {
    "restored": "an earlier retag was interrupted: the file was restored first",
    "finished": "an earlier retag was interrupted after its last byte: it is complete",
}


def as_text(retag: Retag) -> str:
    """The report as a pipe gets it, without colour."""
    from transload.render.lines import Style

    return "\n".join(plain(line) for line in layout(report(retag), Style()))


def report(retag: Retag) -> Iterator[Block]:
    """Everything ``transload retag`` says."""
    yield Prose(((printable(retag.out or retag.path, None), "strong"),))
    if retag.recovered:
        yield _row("before", _RECOVERED[retag.recovered], "trust")
    if retag.tags:
        yield Table([_tag(tag) for tag in retag.tags[:_TAGS]], right=frozenset({3, 4}))
    if len(retag.tags) > _TAGS:
        yield _row("", f"… and {len(retag.tags) - _TAGS:,} more tags", "dim")
    yield _row("written" if retag.done else "would write", _written(retag), "" if retag.done else "trust")
    if retag.out:
        yield _row("copy of", printable(retag.path, None) + (f", {retag.how}" if retag.how else ""))
    if retag.undo and retag.done:
        yield _row("undo", "transload retag FILE --undo takes it back")
    for warning in retag.warnings:
        yield Prose(((printable(warning, None), ""),), lead=(("! ", "trust"),))


def _row(label: str, words: str, role: str = "") -> Block:
    return Prose(((words, role),), lead=((f"  {label:<{_LABEL}}", "dim"),))


def _tag(tag: TagChange) -> tuple[Line, ...]:
    stays = tag.old == tag.new
    new = ("stays", "dim") if stays else (printable(tag.new), "good")
    return (
        ((printable(tag.old), "dim" if stays else ""),),
        (("" if stays else "→", "dim"),),
        (new,),
        ((plural(tag.storages, "storage"), "dim"),),
        ((size(tag.nbytes), "dim"),),
    )


def _written(retag: Retag) -> str:
    words = _METHODS[retag.method]
    if not retag.written:
        return words
    grown = (
        f", the file is {size(abs(retag.grown))} {'longer' if retag.grown > 0 else 'shorter'}" if retag.grown else ""
    )
    return f"{size(retag.written)}, {words}{grown}"
