"""What a row of the table of known texts is, and how a text with blanks becomes a pattern."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from string import Formatter
from typing import Any, Literal, NamedTuple

__all__ = ["Known", "Need", "Role", "Template", "Values", "Work", "blanked", "template"]

Values = dict[str, str]
"""What stood in the blanks of a text."""

Work = Callable[[Values, str], dict[str, Any]]
"""From the values, and the text from where it matched on: fields of the row that are better known now."""

Role = Literal["cause", "frame", "remark"]
Need = Literal["file", "machine"]

_BLANKS = {
    "": r".{1,400}?",
    "d": r"-?\d{1,20}",
    "w": r"[^\s'\"`,;()]{1,300}",
    "o": r"<[^<>]{1,300}>|torch\.Size\(\[[^\]]{0,200}\]\)|\([\d, ]{1,60}\)|[^\s,;]{1,300}",
    "rest": r".{1,400}",
}


class Known(NamedTuple):
    """A text that PyTorch, or what it stands on, is known to print: what it means and what to do.

    ``says`` are its wordings, today's first, with blanks: ``{index:d}`` a number, ``{name:w}`` a word, ``{kind:o}`` an
    object as Python prints it, ``{name}`` anything. ``cause`` and ``fix`` may use their values; lines of ``fix`` that
    begin with ``$ `` are commands, with ``| `` lines of Python. ``wrong`` says what of the text's own advice is not
    true. ``causes`` are codes of the doctor's; where there is no ``fix``, theirs stands in. ``needs`` is what is looked
    at here, if it is here, to say more. ``torch`` are the releases in words.

    A ``frame`` is put around another message, or follows from it: it is told only where nothing else is known, and
    never without a ``fix``. A ``remark`` is no fault. Words that many programs print count only where ``context``, a
    pattern, is found around them, and nowhere where ``unless`` is.
    """

    code: str
    says: tuple[str, ...]
    cause: str
    fix: tuple[str, ...] = ()
    wrong: str = ""
    torch: str = ""
    needs: tuple[Need, ...] = ()
    causes: tuple[str, ...] = ()
    context: str = ""
    unless: str = ""
    role: Role = "cause"
    work: Work | None = None

    def fits(self, surroundings: str) -> bool:
        """Whether the words mean this where they were found."""
        if self.unless and re.search(self.unless, surroundings):
            return False
        return not self.context or re.search(self.context, surroundings) is not None


class Template(NamedTuple):
    """A wording as a pattern. ``anchor`` is its longest fixed part: a text without it is not searched any further."""

    pattern: re.Pattern[str]
    anchor: str
    weight: int


@cache
def template(wording: str) -> Template:
    """The pattern of a wording; blanks and line ends in a text count as one blank.

    >>> found = template("device {index:d} but {count:d}").pattern.search("CUDA device 1 but 0")
    >>> found.groupdict()
    {'index': '1', 'count': '0'}
    """
    parts: list[str] = []
    fixed: list[str] = []
    seen: set[str] = set()
    for literal, name, kind, _ in Formatter().parse(wording):
        parts.append(re.escape(literal))
        fixed.append(literal)
        if name is not None:
            blank = _BLANKS[kind or ""]
            parts.append(f"(?:{blank})" if name in seen else f"(?P<{name}>{blank})")
            seen.add(name)
    edge = r"(?!\d)" if parts and parts[-1].endswith(r"\d{1,20})") else ""
    return Template(re.compile("".join(parts) + edge), max(fixed, key=len), sum(map(len, fixed)))


def blanked(wording: str) -> str:
    """A wording for eyes, and for search: its blanks as dots.

    >>> blanked("device {index:d} of {count:d}")
    'device … of …'
    """
    return "".join(literal + ("…" if name is not None else "") for literal, name, _, _ in Formatter().parse(wording))
