"""Lines on a stream: through rich where a terminal has colours and rich imports, else by a few codes of our own."""

from __future__ import annotations

from itertools import groupby, islice
from operator import itemgetter
from typing import TYPE_CHECKING, TextIO

from transload.render.lines import Block, Line, Span, layout, plain
from transload.render.style import Style, style_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["emit"]

_CHUNK = 256
_ANSI = {"strong": "1", "dim": "2", "good": "32", "trust": "33", "bad": "31"}
_RICH = {"strong": "bold", "dim": "dim", "good": "green", "trust": "yellow", "bad": "red"}


def emit(blocks: Iterable[Block], stream: TextIO, colour: str = "auto") -> None:
    """Write a report to a stream as that stream can show it."""
    style = style_of(stream, colour)
    lines = layout(blocks, style)
    paint = _rich_painter(stream, style) if style.colour and style.cut else None
    if paint is None:
        stream.writelines((_painted(line) if style.colour else plain(line)) + "\n" for line in lines)
        return
    while chunk := list(islice(lines, _CHUNK)):
        paint(chunk)


def _painted(line: Line) -> str:
    """The line with SGR codes around what has a role, and no trailing blanks."""
    out: list[str] = []
    for text, role in _trimmed(line):
        code = _ANSI.get(role)
        out.append(f"\x1b[{code}m{text}\x1b[0m" if code else text)
    return "".join(out)


def _trimmed(line: Line) -> Iterator[Span]:
    """The spans that show something, neighbours of one role joined, without trailing blanks."""
    rest = len(plain(line))
    for role, spans in groupby(line, key=itemgetter(1)):
        text = "".join(text for text, _ in spans)
        if rest > 0 and text:
            yield text[:rest], role
        rest -= len(text)


def _rich_painter(stream: TextIO, style: Style) -> Callable[[list[Line]], None] | None:
    """rich knows how many colours the terminal has, and the consoles of Windows that know no escape codes."""
    try:
        from rich.console import Console
        from rich.segment import Segment, Segments
        from rich.style import Style as RichStyle

        # The decision for colour is made: rich must not ask the environment again.
        console = Console(file=stream, width=style.width, force_terminal=True, no_color=False, highlight=False)
        styles = {role: RichStyle.parse(words) for role, words in _RICH.items()}
        end = Segment.line()
        if console.color_system is None:
            return None
    except Exception:  # noqa: BLE001  a broken or foreign rich may raise anything; we can do without
        return None

    def paint(lines: list[Line]) -> None:
        segments: list[Segment] = []
        for line in lines:
            segments += (Segment(text, styles.get(role)) for text, role in _trimmed(line))
            segments.append(end)
        console.print(Segments(segments), soft_wrap=True, end="")

    return paint
