"""The page of a cause as ``transload doctor --explain`` prints it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transload.diagnose.pages import parts
from transload.render.lines import BLANK, Block, Prose, heading

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["page"]


def page(markdown: str) -> Iterator[Block]:
    """A page on a terminal: prose folds, what is there to be copied does not."""
    before = ""
    for kind, text in parts(markdown):
        if kind == "heading":
            yield from heading(text)
        elif kind == "title":
            code, _, title = text.partition(": ")
            yield Prose(((code, "dim"), (f"  {title}", "strong")))
        else:
            if before not in ("title", "heading", "item"):
                yield BLANK
            copied = kind == "code"
            for line in text.split("\n"):
                role = "dim" if before == "title" else ""  # the layer
                yield Prose(((line, role),), lead=(("  ", ""),) if copied else (), whole=kind != "prose")
        before = kind
