"""Print reports to a terminal or a pipe: folded prose, aligned tables, in the characters the stream can encode.

Code that builds a report yields blocks in full Unicode and does not care about the stream. ``layout`` turns them into
lines in the ``Style`` of a stream, and ``emit`` writes those, in colour if possible.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from re import compile as regex
from typing import Any, TextIO
from unicodedata import category, east_asian_width

from transload.frozen import NamedTuple
from transload.render.words import plural, printable
from transload.steps import Step

Span = tuple[str, str]
"""Text and its role: ``""``, ``strong``, ``dim``, or a verdict: ``good``, ``trust``, ``bad``."""

Line = tuple[Span, ...]
"""A line on the screen, or a cell of a table."""

Words = Line | str
"""A line, or a text without a role."""


class Plot(NamedTuple):
    """A cell with a histogram: how many numbers there are of each power of two. Text shows it as a line of bars."""

    histogram: Sequence[tuple[int, int]]

    def counts(self, columns: int) -> tuple[str, list[int], str]:
        """At most so many counts, each of one or several powers, and where the first begins and the last ends."""
        first, last = self.histogram[0][0], self.histogram[-1][0]
        step = -(-(last - first + 1) // columns)
        counts = [0] * ((last - first) // step + 1)
        for power, number in self.histogram:
            counts[(power - first) // step] += number
        return f"2^{first}", counts, f"2^{last + 1}"

    @property
    def words(self) -> Line:
        """The bars."""
        start, counts, end = self.counts(_COLUMNS)
        most = max(counts)
        bars = "".join(_BARS[number * (len(_BARS) - 1) // most] if number else GLUE for number in counts)
        return (f"{start} ", "dim"), (bars, ""), (f" {end}", "dim")


Cell = Words | Plot

GLUE = "\u00a0"
"""A non-breaking space. Only reports use it: in names it is escaped."""

PIPE_WIDTH = 100
"""The width of prose if the width of the reader is unknown. Names and tables are not truncated then."""

_BARS = "▁▂▃▄▅▆▇█"
_COLUMNS = 16  # bars of a plot
_LEAST_NAME = 30  # columns are dropped before names are truncated to less than this;
_LEAST = 10  # when there are none left to drop, names are truncated down to this
_WORD = regex(r" +|[^ ]+ *")
_HANG = 6  # the indentation of words whose lead has its own line
_WIDEST = 96  # one very long name must not push the columns of all rows off the screen
_CODES = {"strong": "1", "dim": "2", "good": "32", "trust": "33", "bad": "31"}

_GLYPHS = "…·×→›✓✗├─└│▁▂▃▄▅▆▇█▾"
# Replacements for a stream that cannot encode these characters.
_ASCII: dict[int, int | str] = {**str.maketrans("·×✗›├└│─—–’“”", '-xx>|`|---\'""')}
_ASCII.update(str.maketrans("▁▂▃▄▅▆▇█", "_.:-=+*#"))
_ASCII.update({ord("…"): "...", ord("→"): "->", ord("✓"): "ok"})


class Style(NamedTuple):
    """What a stream can show.

    ``cut``: names that are too long for ``width`` are truncated, which is right for a terminal and wrong for a pipe.
    """

    colour: bool = False
    width: int = PIPE_WIDTH
    cut: bool = False
    encoding: str = "utf-8"

    def text(self, text: str) -> str:
        r"""``text`` in characters that the stream can encode.

        >>> Style(encoding="ascii").text("a → ü")
        'a -> \\xfc'
        """
        if text.isascii():
            return text
        if self.encoding == "ascii":
            text = text.translate(_ASCII)
        return text.encode(self.encoding, "backslashreplace").decode(self.encoding)


def style_of(stream: TextIO, colour: str = "auto", environ: Mapping[str, str] | None = None) -> Style:
    """The style of a stream; ``colour`` is the user's flag: ``auto``, ``always`` or ``never``."""
    environ = os.environ if environ is None else environ
    terminal = False
    with suppress(AttributeError, ValueError):  # replaced or closed
        terminal = stream.isatty()
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        _GLYPHS.encode(encoding)
    except (UnicodeError, LookupError):
        encoding = "ascii"
    # COLUMNS if it is set, else the width of the terminal: like shutil, without the cost of importing it.
    columns = environ.get("COLUMNS", "")[:6]
    width = int(columns) if columns.isascii() and columns.isdigit() else 0
    if terminal and not width:
        with suppress(OSError, ValueError):
            width = os.get_terminal_size(stream.fileno()).columns
    if colour != "auto":
        coloured = colour == "always"
    elif environ.get("NO_COLOR"):  # https://no-color.org: set and not empty
        coloured = False
    elif environ.get("FORCE_COLOR"):  # https://force-color.org
        coloured = environ["FORCE_COLOR"] != "0"
    else:
        coloured = terminal and environ.get("TERM") != "dumb"
    if coloured and terminal and sys.platform == "win32":
        coloured = _enable_colours(stream)
    return Style(coloured, max(40, width or PIPE_WIDTH), terminal, encoding)


if sys.platform == "win32":

    def _enable_colours(stream: TextIO) -> bool:
        """Make a Windows console interpret escape codes; return false if it would print them instead."""
        import ctypes
        import msvcrt

        console, mode = ctypes.windll.kernel32, ctypes.c_ulong()
        try:
            handle = ctypes.c_void_p(msvcrt.get_osfhandle(stream.fileno()))
        except (OSError, ValueError):
            return True  # not a console, but something that claims to be a terminal
        if not console.GetConsoleMode(handle, ctypes.byref(mode)):
            return True
        return bool(console.SetConsoleMode(handle, mode.value | 4))  # ENABLE_VIRTUAL_TERMINAL_PROCESSING


class Prose(NamedTuple):
    """Text that is folded at the width. ``lead`` precedes the first line; further lines are indented by its width.

    A lead that takes more than half of the width gets its own line. ``whole`` text stays on one line, however long, so
    that it can be copied.
    """

    body: Words
    lead: Words = ()
    whole: bool = False


class Table(NamedTuple):
    """Rows of cells in aligned columns.

    Columns ``right`` are right-aligned; in columns ``dim``, and in ``titles``, text without a role is dim. On a narrow
    terminal, cells in columns ``shrinks`` are truncated in the middle; before they get too short, columns ``drops`` are
    left out; both in the order given. Text shows the ``most`` first rows, and says how many more there are.
    """

    rows: Sequence[Sequence[Cell]]
    right: Collection[int] = ()
    dim: Collection[int] = ()
    titles: Sequence[str] = ()
    shrinks: tuple[int, ...] = (0,)
    drops: tuple[int, ...] = ()
    indent: int = 2
    most: int | None = None


class Heading(NamedTuple):
    """The title of a section, which a blank line precedes."""

    text: str
    note: str = ""


class Item(NamedTuple):
    """Blocks about one thing, such as a finding, and its role."""

    role: str
    blocks: Sequence[Block]


class Link(NamedTuple):
    """A part of a chain: a sign for its state, its name, what is known about it, and lines below that."""

    sign: Span
    name: str
    words: Line
    below: Sequence[Line] = ()


class Chain(NamedTuple):
    """Parts that depend on each other, in groups with titles. The last group depends on all others."""

    groups: Sequence[tuple[str, Sequence[Link]]]
    width: int = 0  # of the names, in text


class Tiles(NamedTuple):
    """Many things of a kind, each with its role and a few words about it. A page shows them as coloured squares."""

    tiles: Sequence[tuple[str, str, str]]


Block = Prose | Table | Heading | Item | Chain | Tiles

BLANK = Prose(())


class Rows(Sequence[Sequence[Cell]]):
    """The rows of a table of many things, made when they are shown."""

    def __init__(self, things: Sequence[Any], cells: Callable[[Any], Sequence[Cell]]) -> None:
        self._things, self._cells = things, cells

    def __len__(self) -> int:
        return len(self._things)

    def __getitem__(self, place: Any) -> Any:
        things = self._things[place]
        return [*map(self._cells, things)] if isinstance(place, slice) else self._cells(things)


def heading(text: str, note: str = "") -> tuple[Block, ...]:
    """The title of a section."""
    return (Heading(text, note),)


def tally(total: int, read: int, bad: int, problem: str = "with a problem", hint: str = "") -> tuple[Block, ...]:
    """The heading below a table of files: how many are fine, have a problem, or could not be read."""
    counts = {"fine": read - bad, problem: bad, "could not be read": total - read}
    parts = ", ".join(f"{number:,} {words}" for words, number in counts.items() if number)
    return heading(f"{plural(total, 'file')}{', no problem' if read - bad == total else f': {parts}'}", hint)


def note(text: str) -> Prose:
    """A dim remark, indented."""
    return Prose(((text, "dim"),), lead="  ")


def row(label: str, words: str, role: str = "") -> Block:
    """A line of a report: a dim label, and the words."""
    return Prose(((words, role),), lead=((f"  {label:<12}", "dim"),))


def copied(step: Step, indent: str) -> Block:
    """A command, ``$ pip list``, or a line for a file, ``| a=b``. They are never folded, so that they can be copied."""
    text, mark = printable(step.text, None), step.lines[0][:2]
    return Prose(((text, "strong" if step.kind == "command" else ""),), lead=((indent, ""), (mark, "dim")), whole=True)


def emit(blocks: Iterable[Block], stream: TextIO, colour: str = "auto") -> None:
    """Write a report to a stream, in the style of that stream."""
    style = style_of(stream, colour)
    show = _coloured if style.colour else plain
    stream.writelines(show(line) + "\n" for line in layout(blocks, style))


def as_text(blocks: Iterable[Block]) -> str:
    """A report as text without colour, as in a pipe."""
    return "\n".join(plain(line) for line in layout(blocks, Style()))


def plain(line: Line) -> str:
    """The text of a line, without trailing spaces."""
    return "".join(text for text, _ in line).rstrip()


def text_of(words: Words) -> str:
    """The words without their roles."""
    return words if isinstance(words, str) else "".join(text for text, _ in words)


def _coloured(line: Line) -> str:
    """The text of a line with escape codes for the roles, without trailing spaces."""
    out: list[str] = []
    for role, spans in groupby(_part(line, 0, len(plain(line))), key=itemgetter(1)):
        text = "".join(text for text, _ in spans)
        code = _CODES.get(role)
        out.append(f"\x1b[{code}m{text}\x1b[0m" if text and code else text)
    return "".join(out)


def layout(blocks: Iterable[Block], style: Style) -> Iterator[Line]:
    """The blocks as lines no wider than ``style.width``, in characters the stream can encode.

    >>> [plain(line) for line in layout([Prose("a b c", lead="> ")], Style(width=5))]
    ['> a b', '  c']
    """
    for block in blocks:
        if isinstance(block, Prose):
            yield from _folded(block, style)
        elif isinstance(block, Table):
            yield from _aligned(block, style)
        elif isinstance(block, Item):
            yield from layout(block.blocks, style)
        else:
            yield from layout(_lines_of(block), style)


def _lines_of(block: Heading | Chain | Tiles) -> Iterator[Block]:
    """What a page draws, as lines of text."""
    if isinstance(block, Heading):
        yield BLANK
        yield Prose(((block.text, "strong"), (f"  {block.note}" if block.note else "", "dim")))
    elif isinstance(block, Chain):
        links = [link for _, group in block.groups for link in group]
        for (sign, role), name, words, below in links:
            dim = "dim" if sign == "–" else ""
            yield Prose(words, lead=(("  ", ""), (f"{sign} ", role), (f"{name:<{block.width}}  ", dim)))
            yield from (Prose(line, lead=" " * (block.width + 6)) for line in below)
    else:
        yield Prose(", ".join(name for name, _, _ in block.tiles))


def cells(text: str) -> int:
    """The columns that ``text`` takes in a terminal: wide East Asian characters take two, combining marks none."""
    return len(text) if text.isascii() else sum(map(_cells, text))


def _cells(char: str) -> int:
    if east_asian_width(char) in "WF":
        return 2
    return 0 if category(char) in ("Mn", "Me") else 1


def _first(text: str, width: int) -> str:
    """The longest prefix that takes at most ``width`` columns."""
    fitting = width if text.isascii() else sum(end <= width for end in accumulate(map(_cells, text)))
    return text[:fitting]


def _length(line: Line) -> int:
    return sum(cells(text) for text, _ in line)


def _encodable(cell: Cell, style: Style, role: str = "") -> Line:
    """The words in characters the stream can encode; glue is kept, since it becomes a space later."""
    words = cell.words if isinstance(cell, Plot) else cell
    line = ((words, role),) if isinstance(words, str) else words
    return tuple((GLUE.join(map(style.text, text.split(GLUE))), role) for text, role in line)


def _folded(block: Prose, style: Style) -> Iterator[Line]:
    """Fill lines word by word. A word that is longer than a line is broken only on a terminal."""
    lead, body = _encodable(block.lead, style), _encodable(block.body, style)
    if _length(lead) > style.width // 2 and not block.whole:
        if plain(lead):
            yield lead
        lead = ((" " * _HANG, ""),)
    indent = _length(lead)
    room = max(1, style.width - indent)
    text = "".join(text for text, _ in body)
    starts = [0]
    for word in () if block.whole else _WORD.finditer(text):
        line = text[starts[-1] : word.end()].rstrip(" ")
        if starts[-1] < word.start() and cells(line) > room:
            starts.append(word.start())
            line = word[0].rstrip(" ")
        while style.cut and cells(line) > room:  # else the terminal would wrap it without the indentation
            piece = _first(line, room) or line[0]
            starts.append(starts[-1] + len(piece))
            line = line[len(piece) :]
    for start, end in pairwise([*starts, len(text)]):
        yield (*lead, *((text.replace(GLUE, " "), role) for text, role in _part(body, start, end)))
        lead = ((" " * indent, ""),)


def _part(line: Line, start: int, end: int) -> Iterator[Span]:
    """The characters of a line from ``start`` to ``end``."""
    for text, role in line:
        if piece := text[max(0, start) : max(0, end)]:
            yield piece, role
        start, end = start - len(text), end - len(text)


def _aligned(table: Table, style: Style) -> Iterator[Line]:
    listed = table.rows[: table.most]
    roles = ["dim" if column in table.dim else "" for column in range(max(map(len, listed), default=0))]
    rows = [[_encodable(cell, style, "dim") for cell in table.titles]] if table.titles else []
    rows += ([_encodable(cell, style, role) for cell, role in zip(row, roles, strict=False)] for row in listed)
    columns = range(max(map(len, rows), default=0))
    widths = [min(_WIDEST, max(_length(row[c]) for row in rows if c < len(row))) for c in columns]
    shown = [c for c in columns if widths[c]]
    if style.cut and shown:  # drop columns until the others fit, some of them narrower
        drops = [column for column in table.drops if column in shown]
        while True:
            over = table.indent + sum(widths[c] + 2 for c in shown) - 2 - style.width
            least = _LEAST if not drops else _LEAST_NAME
            spare = [max(0, widths[c] - least) for c in table.shrinks]
            if over <= sum(spare) or not drops:
                break
            shown.remove(drops.pop(0))
        for column, room in zip(table.shrinks, spare, strict=True):
            narrower = max(0, min(over, room))
            widths[column] -= narrower
            over -= narrower
    for row in rows:
        out: list[Span] = [(" " * table.indent, "")]
        for place, column in enumerate(shown):
            cell = row[column] if column < len(row) else ()
            if style.cut and _length(cell) > widths[column]:
                cell = _shrunk(cell, widths[column], style.text("…"))
            pad = (" " * (widths[column] - _length(cell)), "")
            out.append(("  " if place else "", ""))
            out.extend((pad, *cell) if column in table.right else (*cell, pad))
        yield tuple(out)
    if more := len(table.rows) - len(listed):
        yield from _folded(note(f"… and {more:,} more; --json lists all of them"), style)


def _shrunk(cell: Line, width: int, dots: str) -> Line:
    """The cell with its longest span truncated in the middle, so that the cell takes ``width`` columns."""
    place = max(range(len(cell)), key=lambda index: cells(cell[index][0]))
    text, role = cell[place]
    room = max(1, width - _length(cell) + cells(text))
    tail = max(0, room - len(dots)) // 2
    head = max(0, room - len(dots) - tail)
    short = f"{_first(text, head)}{dots}{_first(text[::-1], tail)[::-1]}"
    return (*cell[:place], (short, role), *cell[place + 1 :])
