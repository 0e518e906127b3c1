"""What a stream can show: colour, letters, width. Asked of each stream when something is written to it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Style", "style_of", "wants_colour"]

PIPE_WIDTH = 100
"""Where prose is folded when nobody knows the reader's width. Names and tables are never cut there."""

_NARROWEST = 40
_GLYPHS = "…·×→›✓✗├─└│▁█▾"
# The same signs for a stream that cannot encode them; names lose nothing else.
_ASCII = str.maketrans(
    {
        "…": "...",
        "·": "-",
        "×": "x",
        "→": "->",
        "›": ">",
        "✓": "ok",
        "✗": "x",
        "├": "|",
        "└": "`",
        "│": "|",
        "─": "-",
        "—": "-",
        "–": "-",
        "’": "'",
        "“": '"',
        "”": '"',
    }
)


@dataclass(frozen=True, slots=True)
class Style:
    """What may be written to a stream.

    ``cut`` says that names too long for ``width`` may be shortened, which is right for eyes and wrong for pipes.
    """

    colour: bool = False
    unicode: bool = True
    width: int = PIPE_WIDTH
    cut: bool = False
    encoding: str = "utf-8"

    def text(self, text: str) -> str:
        r"""``text`` as this stream can encode it.

        >>> Style(unicode=False, encoding="ascii").text("a → ü")
        'a -> \\xfc'
        """
        if text.isascii():
            return text
        if not self.unicode:
            text = text.translate(_ASCII)
        return text.encode(self.encoding, "backslashreplace").decode(self.encoding)


def style_of(stream: TextIO, colour: str = "auto", environ: Mapping[str, str] | None = None) -> Style:
    """The style of a stream; ``colour`` is the user's flag: ``auto``, ``always`` or ``never``."""
    environ = os.environ if environ is None else environ
    terminal = _is_terminal(stream)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    unicode = _encodes(encoding)
    return Style(
        colour=wants_colour(colour, environ, terminal=terminal),
        unicode=unicode,
        width=_width(stream, environ, terminal=terminal),
        cut=terminal,
        encoding=encoding if unicode else "ascii",
    )


def wants_colour(flag: str, environ: Mapping[str, str], *, terminal: bool) -> bool:
    """The flag rules, then NO_COLOR, then FORCE_COLOR, then whether it is a terminal that knows colours.

    >>> wants_colour("auto", {"NO_COLOR": "1", "FORCE_COLOR": "1"}, terminal=True)
    False
    """
    if flag != "auto":
        return flag == "always"
    if environ.get("NO_COLOR"):  # https://no-color.org: set and not empty
        return False
    if environ.get("FORCE_COLOR"):  # https://force-color.org
        return environ["FORCE_COLOR"] != "0"
    return terminal and environ.get("TERM") != "dumb"


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # replaced or closed by somebody
        return False


def _encodes(encoding: str) -> bool:
    try:
        _GLYPHS.encode(encoding)
    except (UnicodeError, LookupError):
        return False
    return True


def _width(stream: TextIO, environ: Mapping[str, str], *, terminal: bool) -> int:
    """COLUMNS where it is set, else what the terminal says; shutil's way without the cost of importing it."""
    columns = environ.get("COLUMNS", "")[:6]
    if columns.isascii() and columns.isdigit() and int(columns):
        return max(_NARROWEST, int(columns))
    if terminal:
        try:
            return max(_NARROWEST, os.get_terminal_size(stream.fileno()).columns or PIPE_WIDTH)
        except (OSError, ValueError):
            return PIPE_WIDTH
    return PIPE_WIDTH
