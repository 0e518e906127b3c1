"""The report as data: pieces of text with a role, prose that folds, tables that align; and their layout in a width.

Whoever builds a report writes blocks in full Unicode and never thinks of the stream. ``layout`` makes lines of them for
one stream, and ``terminal`` paints those.
"""

from __future__ import annotations

from dataclasses import dataclass
from re import compile as regex
from typing import TYPE_CHECKING
from unicodedata import category, east_asian_width

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from transload.render.style import Style

__all__ = ["BLANK", "GLUE", "Block", "Line", "Prose", "Span", "Table", "cells", "heading", "layout", "note", "plain"]

Span = tuple[str, str]
"""Text and its role: ``""``, ``strong``, ``dim``, or a verdict: ``good``, ``trust``, ``bad``."""

GLUE = "\u00a0"
"""A blank at which no line is broken. It is ours: in names it is escaped."""

Line = tuple[Span, ...]
"""One line on the screen, or one cell of a table."""

_LEAST_NAME = 30  # rather than cut names shorter than this, a column is left out;
_LEAST = 10  # and when there is none left to leave out, names are cut down to this
_WORD = regex(r" +|[^ ]+ *")
_HANG = 6  # where words stand whose lead has a line of its own
_WIDEST = 96  # one very long name must not push the columns of all others off the screen


@dataclass(frozen=True, slots=True)
class Prose:
    """Words that fold at the width. ``lead`` stands before the first line; the others are indented as far.

    A lead that takes more than half of the width gets a line of its own. What is ``whole`` is one line, however long:
    it is there to be copied.
    """

    body: Line
    lead: Line = ()
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells in aligned columns, indented as a whole.

    ``right`` are the columns of numbers. Where eyes have too little width, cells of the columns ``shrinks`` are cut in
    the middle; before they get too short, the columns of ``drops`` are left out; both in the order given.
    """

    rows: Sequence[tuple[Line, ...]]
    right: frozenset[int] = frozenset()
    shrinks: tuple[int, ...] = (0,)
    drops: tuple[int, ...] = ()
    indent: int = 2


Block = Prose | Table

BLANK = Prose(())


def heading(text: str, note: str = "") -> tuple[Block, ...]:
    """A blank line and the title of a section."""
    return BLANK, Prose(((text, "strong"), (f"  {note}" if note else "", "dim")))


def note(text: str) -> Block:
    """A dim remark, indented."""
    return Prose(((text, "dim"),), lead=(("  ", ""),))


def layout(blocks: Iterable[Block], style: Style) -> Iterator[Line]:
    """The blocks as lines no wider than ``style.width``, in letters the stream can encode.

    >>> from transload.render.style import Style
    >>> [plain(line) for line in layout([Prose((("a b c", ""),), lead=(("> ", ""),))], Style(width=5))]
    ['> a b', '  c']
    """
    for block in blocks:
        if isinstance(block, Prose):
            yield from _folded(block, style)
        else:
            yield from _aligned(block, style)


def plain(line: Line) -> str:
    """The line's text without its roles or trailing blanks."""
    return "".join(text for text, _ in line).rstrip()


def cells(text: str) -> int:
    """Columns that ``text`` takes in a terminal: East Asian wide letters take two, combining marks none."""
    if text.isascii():
        return len(text)
    return sum(_cells(char) for char in text)


def _cells(char: str) -> int:
    if east_asian_width(char) in "WF":
        return 2
    return 0 if category(char) in ("Mn", "Me") else 1


def _encodable(line: Line, style: Style) -> Line:
    """The line in letters the stream has; a blank is one in every encoding, and is put in place of the glue later."""
    return tuple((GLUE.join(map(style.text, text.split(GLUE))), role) for text, role in line)


def _length(line: Line) -> int:
    return sum(cells(text) for text, _ in line)


def _folded(block: Prose, style: Style) -> Iterator[Line]:
    lead, body = _encodable(block.lead, style), _encodable(block.body, style)
    if block.whole:
        yield tuple((text.replace(GLUE, " "), role) for text, role in (*lead, *body))
        return
    if _length(lead) > style.width // 2:
        if plain(lead):
            yield lead
        lead = ((" " * _HANG, ""),)
    yield from _filled(lead, body, style)


def _filled(lead: Line, body: Line, style: Style) -> Iterator[Line]:
    """Greedy filling, word by word. A word longer than a line stays whole, except for eyes."""
    room = max(1, style.width - _length(lead))
    indent: Line = ((" " * _length(lead), ""),)
    line: list[Span] = list(lead)
    used = 0
    for word in _words(body):
        for piece in _pieces(word, room) if style.cut else (word,):
            if used and used + _length(_stripped(piece)) > room:
                yield tuple(line)
                line, used = list(indent), 0
            line += ((text.replace(GLUE, " "), role) for text, role in piece)
            used += _length(piece)
    yield tuple(line)


def _words(body: Line) -> Iterator[Line]:
    """Words with the blanks that follow them; a word may run through several spans."""
    word: list[Span] = []
    for text, role in body:
        for piece in _WORD.findall(text):
            word.append((piece, role))
            if piece.endswith(" "):
                yield tuple(word)
                word = []
    if word:
        yield tuple(word)


def _stripped(word: Line) -> Line:
    *before, (text, role) = word
    return (*before, (text.rstrip(" "), role))


def _pieces(word: Line, room: int) -> Iterator[Line]:
    """A word in pieces that fit, so that the terminal does not break it across the indent."""
    if _length(_stripped(word)) <= room:
        yield word
        return
    for text, role in word:
        rest = text
        while rest:
            piece = _first(rest, room) or rest[0]
            yield ((piece, role),)
            rest = rest[len(piece) :]


def _aligned(table: Table, style: Style) -> Iterator[Line]:
    rows = [[_encodable(cell, style) for cell in row] for row in table.rows]
    columns = range(max(map(len, rows), default=0))
    widths = [min(_WIDEST, max(_length(row[c]) for row in rows if c < len(row))) for c in columns]
    shown = [c for c in columns if widths[c]]
    if style.cut and shown:
        shown = _fitted(table, widths, shown, style.width)
    for row in rows:
        yield _aligned_row(row, table, widths, shown, style)


def _fitted(table: Table, widths: list[int], shown: list[int], width: int) -> list[int]:
    """The columns that fit, some made narrower in ``widths``."""
    drops = [column for column in table.drops if column in shown]
    while True:
        over = table.indent + sum(widths[c] + 2 for c in shown) - 2 - width
        least = _LEAST if not drops else _LEAST_NAME
        spare = [max(0, widths[c] - least) for c in table.shrinks]
        if over <= sum(spare) or not drops:
            break
        dropped = drops.pop(0)
        shown = [c for c in shown if c != dropped]
    for column, room in zip(table.shrinks, spare, strict=True):
        narrower = max(0, min(over, room))
        widths[column] -= narrower
        over -= narrower
    return shown


def _aligned_row(row: list[Line], table: Table, widths: list[int], shown: list[int], style: Style) -> Line:
    out: list[Span] = [(" " * table.indent, "")]
    for place, column in enumerate(shown):
        cell = row[column] if column < len(row) else ()
        if style.cut and _length(cell) > widths[column]:
            cell = _shrunk(cell, widths[column], style)
        if place:
            out.append(("  ", ""))
        pad = (" " * (widths[column] - _length(cell)), "")
        out.extend((pad, *cell) if column in table.right else (*cell, pad))
    return tuple(out)


def _shrunk(cell: Line, width: int, style: Style) -> Line:
    """The cell with its longest span cut in the middle, so that all of it takes ``width``."""
    place = max(range(len(cell)), key=lambda index: cells(cell[index][0]))
    text, role = cell[place]
    room = max(1, width - _length(cell) + cells(text))
    dots = "…" if style.unicode else "..."
    tail = max(0, room - len(dots)) // 2
    head = max(0, room - len(dots) - tail)
    short = f"{_first(text, head)}{dots}{_first(text[::-1], tail)[::-1]}"
    return (*cell[:place], (short, role), *cell[place + 1 :])


def _first(text: str, width: int) -> str:
    """As much of the beginning as takes at most ``width`` columns."""
    if text.isascii():
        return text[:width]
    used = 0
    for index, char in enumerate(text):
        used += _cells(char)
        if used > width:
            return text[:index]
    return text
