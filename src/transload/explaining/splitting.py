"""A log as errors: exceptions with their chains, told apart, and the text between them."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from transload.explaining.cleaning import Line

__all__ = ["Chain", "Raised", "Text", "flat", "split"]

_HEADER = "Traceback (most recent call last)"
_HANDLING = "During handling of the above exception, another exception occurred"
_CAUSE = "The above exception was the direct cause of the following exception"
_NESTED = re.compile(
    r"Original Traceback|terminated with the following error|RemoteTraceback|_RemoteTraceback|RayTaskError|"
    r"CheckpointException|Caught \w+ in |\(RANK \d"
)
_EXCEPTION = re.compile(
    r"(?P<kind>(?:[A-Za-z_]\w*\.)*[A-Z_a-z]\w*)(?:\((?:[\w.]+)\))?(?::(?:\s|$)|$)(?P<message>.*)", re.ASCII
)
_CLASS = re.compile(r"(?:Error|Exception|Interrupt|Exit|Warning|Group|Timeout|Failure|Fault)$|\.|^[A-Z]\w*[a-z]\w*$")
_FRAME = re.compile(r"\s|File [\"~/<\w]|Cell In|<ipython-input|-+>|/\S+ in |$")
_MESSAGE = 400
"""Lines of a message that are kept: a state dict's may name thousands of tensors."""
_BEFORE = 12
"""Lines before a traceback that may say that it is inside of the message above."""
_FRAMES = 2_000
_CHAINS = 2_000
"""Chains of exceptions that are looked at, the last ones."""

_STREAMS = 1_000
"""Ranks that are told apart; the lines of more are read as one."""

Link = Literal["", "handling", "cause", "inside"]


class Text:
    """Lines as one, any white space as one blank; ``starts`` are the places where lines begin, with their numbers."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = lines
        self.starts: list[tuple[int, int]] = []
        pieces, at = [], 0
        for line in lines:
            text = flat(line.text)
            if text:
                self.starts.append((at, line.number))
                pieces.append(text)
                at += len(text) + 1
        self.flat = " ".join(pieces)

    def line_at(self, place: int) -> int:
        """The number of the line that a place in ``flat`` is in."""
        return self.starts[self._index(place)][1] if self.starts else 0

    def between(self, start: int, end: int) -> str:
        """The whole lines from one place in ``flat`` to another."""
        first, last = self._index(start), self._index(max(start, end - 1))
        beyond = self.starts[last + 1][0] - 1 if last + 1 < len(self.starts) else len(self.flat)
        return self.flat[self.starts[first][0] : beyond]

    def _index(self, place: int) -> int:
        return bisect_right(self.starts, (place, 1 << 60)) - 1


@dataclass
class Raised:
    """One exception of a log: its class, its words, and the frames it came through, all as they stood.

    ``link`` is what joins it to the one before in its chain: it arose while that was handled, was raised from it, or
    is inside its message.
    """

    kind: str = ""
    lines: list[Line] = field(default_factory=list)
    frames: list[Line] = field(default_factory=list)
    link: Link = ""

    @cached_property
    def text(self) -> Text:
        """Class and words, and what was printed below them."""
        return Text(self.lines)

    @property
    def first(self) -> str:
        """The first line of it."""
        return flat(self.lines[0].text)

    @property
    def words(self) -> str:
        """The first line; or all of it, where that only has the class."""
        return self.text.flat if self.first.endswith(":") else self.first


@dataclass
class Chain:
    """Exceptions that belong together, the innermost first."""

    raised: list[Raised]

    @cached_property
    def surroundings(self) -> str:
        """All that is said in it, for patterns of context."""
        return "\n".join(line.text for each in self.raised for line in (*each.frames, *each.lines))


def flat(text: str) -> str:
    """The text in one line, any white space as one blank."""
    return " ".join(text.split())


def split(lines: Iterable[Line]) -> tuple[list[Chain], list[Text]]:
    """The chains of exceptions in a log, and the rest of it, rank by rank."""
    streams: dict[str, list[Line]] = {}
    for line in lines:
        name = line.stream if line.stream in streams or len(streams) < _STREAMS else ""
        streams.setdefault(name, []).append(line)
    chains: list[Chain] = []
    loose: list[Text] = []
    for stream in streams.values():
        parser = _Parser()
        for line in stream:
            parser.feed(line)
        parser.end()
        chains += parser.chains()
        loose.append(Text(parser.loose))
    chains.sort(key=lambda chain: chain.raised[0].lines[0].number)
    return chains[-_CHAINS:], loose


class _Parser:
    def __init__(self) -> None:
        self.loose: list[Line] = []
        self.done: list[Raised] = []
        self.now: Raised | None = None
        self.pending: Link = ""

    def feed(self, line: Line) -> None:
        text = line.text
        if _HEADER in text:
            self.start(line)
        elif _HANDLING in text or _CAUSE in text:
            self.end()
            self.pending = "handling" if _HANDLING in text else "cause"
        elif self.now is None:
            self.outside(line)
        elif not self.now.lines:
            self.in_frames(self.now, line)
        else:
            self.in_message(self.now, line)

    def start(self, line: Line) -> None:
        """A traceback begins: of a new error, of one that followed, or inside of the message before it."""
        before = self.now.lines[-_BEFORE:] if self.now else []
        inside = before and _NESTED.search("\n".join(each.text for each in (*before, line)))
        self.end()
        link: Link = "inside" if inside else self.pending
        self.pending = ""
        self.now = Raised(link=link, frames=[line])

    def outside(self, line: Line) -> None:
        if line.text.startswith('  File "'):  # the head of it was cut off
            self.now = Raised(link=self.pending, frames=[line])
            self.pending = ""
        else:
            self.loose.append(line)

    def in_frames(self, now: Raised, line: Line) -> None:
        found = None if _FRAME.match(line.text) else _EXCEPTION.match(line.text)
        if found and _CLASS.search(found["kind"]) and not found["kind"].isupper():
            now.kind = found["kind"]
            now.lines.append(line)
        elif not _FRAME.match(line.text):
            self.loose.append(line)  # another one wrote in between, or the rest of it is missing
        elif len(now.frames) < _FRAMES:
            now.frames.append(line)

    def in_message(self, now: Raised, line: Line) -> None:
        indented = line.text[:1].isspace()
        if line.text and (line.stamped != now.lines[0].stamped or (len(now.lines) >= _MESSAGE and not indented)):
            self.end()  # the program has gone on to log other things
            self.loose.append(line)
        elif len(now.lines) < _MESSAGE:
            now.lines.append(line)

    def end(self) -> None:
        if self.now is not None and self.now.lines:
            self.done.append(self.now)
        elif self.now is not None:  # its end is missing, or stands inside a frame drawn around it
            self.loose += self.now.frames
        self.now = None

    def chains(self) -> Iterator[Chain]:
        chain: list[Raised] = []
        for raised in self.done:
            if not raised.link and chain:
                yield Chain(chain)
                chain = []
            if raised.link == "inside":
                chain.insert(0, raised)
            else:
                chain.append(raised)
        if chain:
            yield Chain(chain)
