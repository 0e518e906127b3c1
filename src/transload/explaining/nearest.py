"""The known texts that are most like an unknown one, by the words they share."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from math import log

from transload.explaining.known import Known, blanked, template
from transload.explaining.result import Near

__all__ = ["nearest"]

_WORD = re.compile(r"[A-Za-z_]{3,}")
_LEAST = 0.5
_FEWEST = 2
_LONGEST = 400
"""Letters of an unknown text that are compared: the longer it is, the more words are in it by chance."""


def nearest(text: str, table: Sequence[Known], most: int = 3) -> tuple[Near, ...]:
    """At most three rows whose words are in the text; rare words count more. Often there is none.

    Words that many programs print are named first, where only what must stand around them is missing.
    """
    elsewhere = [
        Near(known.code, blanked(wording), 1.0, "the same words, where a checkpoint is loaded")
        for known in table
        if known.context and known.role == "cause"
        for wording in known.says
        if template(wording).pattern.search(text)
    ]
    return tuple({near.code: near for near in (*elsewhere, *_alike(text[:_LONGEST], table))}.values())[:most]


def _alike(text: str, table: Sequence[Known]) -> list[Near]:
    rows = [(known, wording, _words(blanked(wording))) for known in table for wording in known.says]
    rarity = Counter(word for _, _, words in rows for word in words)
    there = _words(text)
    near: dict[str, Near] = {}
    for known, wording, words in rows:
        common = words & there
        weight = sum(_weight(rarity[word], len(rows)) for word in words)
        likeness = sum(_weight(rarity[word], len(rows)) for word in common) / weight if weight else 0.0
        before = near[known.code].likeness if known.code in near else _LEAST
        if len(common) > _FEWEST and likeness > before:
            near[known.code] = Near(known.code, blanked(wording), round(likeness, 2))
    return sorted(near.values(), key=lambda each: -each.likeness)


def _words(text: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(text)}


def _weight(count: int, total: int) -> float:
    return log(1 + total / count)
