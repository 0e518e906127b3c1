"""Which known texts are in a log: in each chain of exceptions the innermost one that is a cause."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from transload.explaining.cleaning import Line
from transload.explaining.known import Known, Values, template
from transload.explaining.splitting import Chain, Raised, Text

__all__ = ["Found", "Hit", "Search", "found_in", "hits"]

_MOST = 50
"""Places where one wording is looked at: a loop may print it a million times."""
_AROUND = 1_000
"""Letters before and behind the fixed part of a wording in which the rest of it must be."""
_BESIDE = 400
"""Letters before and behind an error in a log in which the file that it is about is named."""


class Hit(NamedTuple):
    """A wording in a text: where, and what stands in its blanks. ``weight`` is how much of it is fixed."""

    known: Known
    start: int
    end: int
    values: Values
    weight: int


class Found(NamedTuple):
    """A known text in a log: the line it is in, the text from there on, and all that stands around it."""

    hit: Hit
    said: str
    line: int
    text: str
    surroundings: str
    near: tuple[str, ...] = ()
    """Where the file that it is about may be named: of a traceback all of it, in a log what stands beside it."""


def hits(text: str, surroundings: str, table: Sequence[Known]) -> list[Hit]:
    """Every known text in a text, in order; of two that overlap, the one with more fixed words."""
    fitting = (known for known in table if _mentions(text, known) and known.fits(surroundings))
    met = sorted((hit for known in fitting for hit in _met(text, known)), key=lambda hit: (-hit.weight, hit.start))
    kept: list[Hit] = []
    for hit in met:
        if all(hit.end <= other.start or other.end <= hit.start for other in kept):
            kept.append(hit)
    return sorted(kept, key=lambda hit: hit.start)


def _mentions(text: str, known: Known) -> bool:
    return any(template(wording).anchor in text for wording in known.says)


def _met(text: str, known: Known) -> Iterator[Hit]:
    """Where a row's wordings are. Only the neighbourhood of their longest fixed parts is searched, never all of it."""
    for wording in known.says:
        pattern, anchor, weight = template(wording)
        at = text.find(anchor)
        for _ in range(_MOST):
            if at < 0:
                break
            start = max(0, at - _AROUND)
            match = pattern.search(text, start, at + len(anchor) + _AROUND)
            if match:
                yield Hit(known, match.start(), match.end(), match.groupdict(""), weight)
            at = text.find(anchor, max(at + len(anchor), match.end() if match else 0))


class _Main(NamedTuple):
    raised: Raised
    hit: Hit | None
    others: tuple[Hit, ...]

    @property
    def role(self) -> str:
        return self.hit.known.role if self.hit else ""


class Search(NamedTuple):
    """What is known in a log; the chains in which nothing is; and those that only tell of another error."""

    found: list[Found]
    unknown: list[Chain]
    framed: list[Chain]


def found_in(chains: Iterable[Chain], loose: Iterable[Text], table: Sequence[Known]) -> Search:
    """Look for every known text in a log."""
    found: list[Found] = []
    unknown: list[Chain] = []
    framed: list[Chain] = []
    for chain in chains:
        mains = [_main(raised, chain.surroundings, table) for raised in chain.raised]
        chosen = _chosen(mains)
        if chosen is None or chosen.hit is None:
            (framed if all(main.role == "frame" for main in mains) else unknown).append(chain)
        else:
            found.append(_found(chosen.hit, chosen.raised.text, chain.surroundings))
        found += [_found(hit, main.raised.text, chain.surroundings) for main in mains for hit in main.others]
    for rest in loose:
        found += [_loose(hit, rest) for hit in hits(rest.flat, rest.flat, table)]
    return Search(found, unknown, framed)


def _main(raised: Raised, surroundings: str, table: Sequence[Known]) -> _Main:
    """What an exception says itself, and what else was printed below it before the next."""
    all_hits = hits(raised.text.flat, surroundings, table)
    head = [hit for hit in all_hits if hit.start < len(raised.first)]
    causes = [hit for hit in head if hit.known.role == "cause"]
    if causes:
        main = max(causes, key=lambda hit: hit.weight)
    elif head:
        later = (hit for hit in all_hits if hit.known.role == "cause")
        main = next(later, head[0])
    else:
        edge = len(Text(_paragraph(raised.lines)).flat)
        before = [hit for hit in all_hits if hit.start < edge]
        if not before:
            return _Main(raised, None, tuple(all_hits))
        main = before[0]
    below = (hit for hit in all_hits if hit.start >= max(main.end, len(raised.first)) and hit.known.role == "cause")
    return _Main(raised, main, tuple(hit for hit in below if hit.known.code != main.known.code))


def _paragraph(lines: Sequence[Line]) -> Sequence[Line]:
    """The lines up to the first empty one; the first line counts even where it ends with the class."""
    for index, line in enumerate(lines[1:], 1):
        if not line.text and index > 1:
            return lines[:index]
    return lines


def _chosen(mains: Sequence[_Main]) -> _Main | None:
    """The innermost cause.

    Words that many programs print give way to plainer ones: programs try one thing after another, and print what they
    tried before.
    """
    causes = [main for main in mains if main.role == "cause"]
    plain = [main for main in causes if main.hit and not main.hit.known.context]
    if causes:
        return (plain or causes)[0]
    return next((main for main in mains if main.hit and main.hit.known.fix), None)


def _found(hit: Hit, text: Text, surroundings: str) -> Found:
    said, rest = text.between(hit.start, hit.end), text.flat[hit.start :]
    return Found(hit, said, text.line_at(hit.start), rest, surroundings, (rest, surroundings))


def _loose(hit: Hit, text: Text) -> Found:
    """In a log the lines of other errors are near; what they name is not this one's."""
    beside = (text.flat[hit.start : hit.end + _BESIDE], text.flat[max(0, hit.start - _BESIDE) : hit.start])
    return _found(hit, text, text.flat)._replace(near=beside)
