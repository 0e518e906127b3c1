"""Text from a file, made fit to be shown. Keys of a checkpoint are a stranger's words: nothing of them is shown raw."""

from __future__ import annotations

from unicodedata import category

__all__ = ["cut", "printable"]

LIMIT = 160
"""Longest name shown whole, unless the caller asks otherwise. A pickle may carry a key of a gigabyte."""

_MARKS_IN_A_ROW = 4  # more than written languages need; towers of hundreds paint over the lines above and below

# Shown as nothing or as a blank, though str.isprintable() calls them printable: two names could look the same.
_INVISIBLE = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0") | frozenset(
    map(chr, (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)))
)


def printable(text: str, limit: int | None = LIMIT) -> str:
    r"""``text`` with everything that is not plainly visible escaped as Python would, cut in the middle at ``limit``.

    Control characters, terminal sequences, line ends, direction marks, invisible letters and lone surrogates all
    become backslash escapes; ``limit=None`` cuts nothing.

    >>> printable("a\x1b[31m\n")
    'a\\x1b[31m\\n'
    >>> printable("abcdefghij", limit=5)
    'ab…ij'
    """
    if limit is not None and len(text) > 2 * limit:  # escape only what may be seen
        text = text[:limit] + text[-limit:]
    if not (text.isascii() and text.isprintable()):
        text = _escaped(text)
    return text if limit is None else cut(text, limit)


def cut(text: str, limit: int) -> str:
    """At most ``limit`` characters: the beginning and the end, with ``…`` between. Both ends of a name tell most."""
    if len(text) <= limit:
        return text
    tail = max(0, limit - 1) // 2
    head = max(0, limit - 1 - tail)
    return f"{text[:head]}…{text[len(text) - tail :]}"


def _escaped(text: str) -> str:
    out: list[str] = []
    marks = 0
    for char in text:
        marks = marks + 1 if category(char).startswith("M") else 0
        hidden = not char.isprintable() or char in _INVISIBLE or marks > _MARKS_IN_A_ROW
        # repr() leaves the printable ones alone, so these are spelled from their code point.
        out.append(_spelled(char) if hidden else char)
    return "".join(out)


def _spelled(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")
