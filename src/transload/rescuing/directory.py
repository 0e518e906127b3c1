"""The directory of an archive, wherever it lies and whatever has happened to it."""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from transload.io.sources import Source
from transload.rescuing.headers import CENTRAL, END, END64, MAX_NAME, Line, is_sign, line_of

__all__ = ["Directory", "find_directory", "read_directory"]

_TAIL = 1 << 17
_MOST = 64 << 20
"""Bytes of a directory: one of half a million records."""

_END = Struct("<4s4H2LH")
_END64 = Struct("<4sQ2H2L4Q")
_LEAST = 47  # bytes of a line
_MOST_ENDS = 8  # places looked at: a file can have as many false end records as it likes


class Directory(NamedTuple):
    """The lines that were found, and where they begin and end; -1 where nothing tells.

    ``stated`` is where the end record says that the directory begins, ``told`` how many lines it says there are;
    ``complete`` is whether an end record follows.
    """

    lines: list[Line]
    start: int
    end: int
    stated: int = -1
    told: int = -1
    complete: bool = False


_NONE = Directory([], -1, -1)


def find_directory(source: Source) -> Directory:
    """The directory that the end of a file leads to; one without lines if nothing there leads to any."""
    base = max(0, source.size - _TAIL)
    tail = source.read(base, _TAIL)
    best = _NONE
    tried: set[int] = set()
    ends = _ends(tail, base)
    for position, size, start, count in ends:
        for place in (start, position - size):
            if place in tried or len(tried) >= _MOST_ENDS or not 0 <= place < position:
                continue
            if is_sign(source.read(place, 4), CENTRAL):
                tried.add(place)
                found = read_directory(source, place)._replace(stated=start, told=count)
                if found.complete and len(found.lines) == count:
                    return found
                best = max(best, found, key=lambda each: len(each.lines))
    if best.lines:
        return best
    found = _without_end(source, tail, base)  # or the end record is there, and the first line is not
    return found._replace(stated=ends[0][2], told=ends[0][3]) if ends and found.lines else found


def _without_end(source: Source, tail: bytes, base: int) -> Directory:
    """The lines themselves are looked for, and those before the first that is found."""
    at = tail.find(CENTRAL)
    for _ in range(_MOST_ENDS):
        if at < 0:
            break
        found = read_directory(source, base + at)
        if found.lines and (found.complete or found.end + _LEAST > source.size):
            return _extended(source, found)
        at = tail.find(CENTRAL, at + 1)
    return _NONE


def _ends(tail: bytes, base: int) -> list[tuple[int, int, int, int]]:
    """Where each end record lies, last first, and what it says: the size of the directory, its start, its lines."""
    found: list[tuple[int, int, int, int]] = []
    for sign, form, (size, start, count) in ((END, _END, (5, 6, 4)), (END64, _END64, (8, 9, 7))):
        at = tail.rfind(sign)
        for _ in range(_MOST_ENDS):
            if at < 0:
                break
            if at + form.size <= len(tail):
                fields = form.unpack_from(tail, at)
                found.append((base + at, fields[size], fields[start], fields[count]))
            at = tail.rfind(sign, 0, at)
    return found


def read_directory(source: Source, start: int) -> Directory:
    """The lines from a place on. One that is damaged is stepped over: it ends where the next one begins."""
    data = source.read(start, min(_MOST, source.size - start))
    lines: list[Line] = []
    at = 0
    while at + _LEAST <= len(data) and is_sign(data[at : at + 4], CENTRAL):
        line = line_of(data, at, start + at)
        if line is None or CENTRAL in data[at + 4 : at + line.length] or not _goes_on(data, at + line.length):
            length = _damaged(data, at)
            line = line_of(data, at, start + at, length) if length else line
        if line is None:
            break
        lines.append(line)
        at += line.length
    complete = is_sign(data[at : at + 4], END64) or is_sign(data[at : at + 4], END)
    return Directory(lines, start, start + at, complete=complete)


def _goes_on(data: bytes, at: int) -> bool:
    """Whether another line follows, or the end; or the file is cut there."""
    sign = data[at : at + 4]
    return not sign or any(is_sign(sign, other) for other in (CENTRAL, END64, END))


def _damaged(data: bytes, at: int) -> int:
    """The length of a line whose own lengths are wrong; 0 if nothing that can follow one is near."""
    ends = [data.find(sign, at + _LEAST, at + MAX_NAME) for sign in (CENTRAL, END64, END)]
    found = [end for end in ends if end > 0]
    return min(found) - at if found else 0


def _extended(source: Source, found: Directory) -> Directory:
    """The same directory with the lines before the first one, as far as lines go."""
    earlier: list[Line] = []
    start = found.start
    while start > 0:
        before = max(0, start - MAX_NAME)
        data = source.read(before, start - before)
        at = data.rfind(CENTRAL)
        line = line_of(data, at, before + at) if at >= 0 else None
        if line is None or line.position + line.length != start:
            break
        earlier.append(line)
        start = line.position
    return found._replace(lines=[*reversed(earlier), *found.lines], start=start)
