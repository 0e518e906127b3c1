"""The page of a cause, from the rule's own text: what ``--explain`` prints and the manual holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transload.diagnose.rules.row import LAYERS
from transload.render.lines import BLANK, Block, Prose, heading

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transload.diagnose.rules.row import Row

__all__ = ["how_told", "page", "paragraphs"]

_WORDS = {layer.name: layer.words for layer in LAYERS}


def page(row: Row) -> Iterator[Block]:
    """Everything that is known of a cause."""
    yield Prose(((row.code, "dim"), (f"  {row.title}", "strong")))
    yield Prose(((how_told(row), "dim"),))
    yield BLANK
    yield from _text(row.about)
    for title, text in (("Fix", row.fix), ("What not to do", row.avoid)):
        if text:
            yield from heading(title)
            yield from _text(text)
    if row.sources:
        yield from heading("Sources")
        yield from (Prose(((source, ""),), whole=True) for source in row.sources)


def how_told(row: Row) -> str:
    """Where a cause belongs, and with what certainty the doctor names it."""
    layer = f"Layer: {_WORDS[row.layer]}."
    if row.check is None:
        return f"{layer} The doctor does not find it by itself: the facts of a machine do not show it."
    if row.symptom:
        return f"{layer} A symptom: told only where no cause is found for it."
    if row.likely:
        return f"{layer} Told as probable: the facts fit, and do not prove it."
    return layer


def paragraphs(text: str) -> Iterator[tuple[bool, tuple[str, ...]]]:
    r"""The parts of a text: whether it is to be copied, and its lines, of which prose has one.

    >>> list(paragraphs("Two\nwords.\n$ ls"))
    [(False, ('Two words.',)), (True, ('$ ls',))]
    """
    for block in text.strip().split("\n\n"):
        prose: list[str] = []
        code: list[str] = []
        for line in map(str.strip, block.splitlines()):
            copied = line.startswith(("$ ", "| "))
            if (code and not copied) or (prose and copied):
                yield (True, tuple(code)) if code else (False, (" ".join(prose),))
                prose, code = [], []
            (code if copied else prose).append(line)
        yield (True, tuple(code)) if code else (False, (" ".join(prose),))


def _text(text: str) -> Iterator[Block]:
    for place, (copied, lines) in enumerate(paragraphs(text)):
        if place:
            yield BLANK
        for line in lines:
            yield Prose(((line, ""),), lead=(("  ", ""),) if copied else (), whole=copied)
