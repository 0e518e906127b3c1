"""What to do: the doctor's pages in short, and the steps that are left beside those of this machine and file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transload.explaining.result import Answer

__all__ = ["beyond", "pages"]

_ALIKE = 0.75
"""Which part of the shorter sentence's words must be in the other one for both to ask for the same."""
_FEWEST = 3
_SMALL = frozenset(("the", "and", "with", "its", "for", "from", "that", "this", "are", "not", "where", "into", "then"))


def pages(causes: Sequence[str]) -> tuple[str, ...]:
    """What the doctor's pages say of each cause that may be behind an error."""
    from transload.diagnose.rules.catalogue import BY_CODE

    rows = [BY_CODE[code] for code in causes]
    if len(rows) == 1:
        return (_flat(rows[0].fix),)
    told = (f"If {_flat(row.title)} [{row.code}]: {_flat(row.fix)}" for row in rows)
    return ("Most often it is one of these; transload doctor tells which:", *told)


def _flat(text: str) -> str:
    return " ".join(text.split())


def beyond(answer: Answer) -> tuple[str, ...]:
    """The steps of an answer that are not asked for already by what was seen here.

    The doctor's pages are left out where this machine shows the cause: one of them is it, and tells more of itself.
    """
    machine = answer.machine.fix if answer.machine and answer.machine.fits else ()
    if machine and answer.causes and answer.fix == pages(answer.causes):
        return ()
    told = (*machine, *(answer.file.fix if answer.file and not answer.file.ok else ()))
    return tuple(line for group in _groups(answer.fix) if not _is_told(group, told) for line in group)


def _groups(fix: Iterable[str]) -> Iterator[list[str]]:
    """Each sentence with the commands and the Python below it."""
    group: list[str] = []
    for line in fix:
        if group and not line.startswith(("$ ", "| ")):
            yield group
            group = []
        group.append(line)
    if group:
        yield group


def _is_told(group: Sequence[str], told: Sequence[str]) -> bool:
    sentence, *commands = group
    return all(command in told for command in commands) and any(_alike(sentence, line) for line in told)


def _alike(one: str, other: str) -> bool:
    if one == other:
        return True
    first, second = _words(one), _words(other)
    common = len(first & second)
    return common >= _FEWEST and common >= _ALIKE * min(len(first), len(second))


def _words(line: str) -> set[str]:
    """The words that carry what it says, sizes as size."""
    return {word.removesuffix("s") for word in re.findall(r"[a-z_]{3,}", line.lower())} - _SMALL
