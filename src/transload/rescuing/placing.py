"""Where the bytes of a record lie, by what most of what is known of it agrees on."""

from __future__ import annotations

from typing import NamedTuple

from transload.io.sources import Source
from transload.rescuing.headers import CENTRAL, LOCAL, Descriptor, Line, Local, describes, is_sign
from transload.rescuing.measure import Measure

__all__ = ["Clues", "Found", "Places"]

_ALIGNMENT = 64
_HEADER = 30
_FIELD = 4
_WIDE_OFFSET = 12  # bytes of a field with what does not fit into 32 bits: the offset,
_WIDE_SIZES = 20  # or both sizes
_FOLLOWS = 8  # the flag that says that checksum and sizes follow the bytes


class Found(NamedTuple):
    """A record: its headers as they are, where its bytes lie, and how many of them the file has.

    ``wide`` is whether its descriptor has sizes of eight bytes. A record that the directory does not know is ``dead``
    where the directory is whole. Of an ``endless`` one nothing tells where it ends.
    """

    header: int
    payload: int
    stored: int
    present: int
    local: Local | None
    line: Line | None
    described: Descriptor | None
    wide: bool
    dead: bool = False
    endless: bool = False

    @property
    def end(self) -> int:
        """Where the next one should begin."""
        return self.payload + self.stored + (self.described.length if self.described else 0)

    @property
    def names(self) -> list[bytes]:
        """Its name, or both of them if they differ in more than the length that is given for one."""
        found = [self.line.name] if self.line else []
        if self.local and self.local.name:
            here = self.local.name + self.local.extra
            if not found or here[: len(found[0])] != found[0]:
                found.append(self.local.name)
        return found


class Clues(NamedTuple):
    """All that is known of where a record lies: both its headers, if they are there, and where the next one begins."""

    header: int
    local: Local | None
    line: Line | None
    following: int | None

    @property
    def wide(self) -> bool:
        """Whether sizes behind its bytes take eight bytes."""
        return self.header >= 0xFFFFFFFF or (self.local is not None and self.local.wide)

    @property
    def least(self) -> set[int]:
        """Where its bytes would begin without filling; by either of its names."""
        names = [each.name for each in (self.local, self.line) if each is not None and each.name]
        wide = {0, _WIDE_OFFSET, _WIDE_SIZES} if self.wide else {0}
        return {self.header + _HEADER + _FIELD + len(name) + more for name in names for more in wide}


class Places:
    """Weighs what is known of the places of records against each other."""

    def __init__(self, source: Source, measure: Measure) -> None:
        self.source = source
        self.measure = measure

    def settled(self, clues: Clues) -> Found | None:
        """Where the bytes of a record lie, by what most of what is known agrees on."""
        quick = self._quick(clues)
        if quick is not None:
            return quick
        options = self._options(clues)
        if options:
            return max(options, key=lambda option: option[0])[1]
        if clues.local is None or clues.local.payload > self.source.size:  # the file ends within its header
            return None
        return self._cut(clues.header, clues.local, clues.line)

    def _quick(self, clues: Clues) -> Found | None:
        """The ordinary case: all agree."""
        header, local, line, following = clues
        if local is None or line is None or local.name != line.name or local.header != line.header:
            return None
        follows = bool(line.stored and local.flags & _FOLLOWS)
        end = local.payload + line.stored
        described = describes(self.source, end, wide=local.wide) if follows else None
        told = (described.crc32, described.stored, described.size) if described else ()
        if follows and told != (line.crc32, line.stored, line.size):
            return None
        if end + (described.length if described else 0) != following:
            return None
        return Found(header, local.payload, line.stored, line.stored, local, line, described, local.wide)

    def _options(self, clues: Clues) -> list[tuple[int, Found]]:
        """Each place and size the bytes may have, with how much speaks for it."""
        _, local, line, following = clues
        starts, sizes = self._starts(clues), self._sizes(clues)
        if following is not None:
            width = 24 if clues.wide else 16
            before = describes(self.source, following - width, wide=clues.wide)
            for size in {before.stored, before.size} if before else ():
                sizes.add(size)
                starts.add(following - width - size)
            sizes |= {following - less - start for start in starts for less in (0, width)}
        if line is None:
            sizes |= self.measure.sizes(local, following)
        out = [
            self._weighed(clues, start, size)
            for start in sorted(starts)
            for size in sorted(sizes)
            if size >= 0 and clues.header + _HEADER <= start <= self.source.size
        ]
        return [option for option in out if option[0] > 0]

    def _starts(self, clues: Clues) -> set[int]:
        """Where the bytes may begin: by the lengths in the header, by the name in the directory and the filling."""
        starts = {clues.local.payload} if clues.local is not None else set()
        return starts | self._filled(clues) | {each + -each % _ALIGNMENT for each in clues.least}

    def _filled(self, clues: Clues) -> set[int]:
        """Where the filling in a header ends that follows a name."""
        return {each + int.from_bytes(self.source.read(each - 2, 2), "little") for each in clues.least}

    @staticmethod
    def _sizes(clues: Clues) -> set[int]:
        """The sizes that are told: by the directory, and by a header that tells any."""
        _, local, line, _ = clues
        sizes = {line.stored} if line is not None else set()
        if line is not None and not line.method:
            sizes.add(line.size)
        if local is not None and local.stored and not local.flags & _FOLLOWS:
            sizes.add(local.stored)
        return sizes

    def _weighed(self, clues: Clues, start: int, size: int) -> tuple[int, Found]:
        """How much more speaks for a place and a size than against it, and the record that would be."""
        header, local, line, following = clues
        described = describes(self.source, start + size, wide=clues.wide) if size else None
        end = start + size + (described.length if described else 0)
        ended = described is None and end + 24 > self.source.size  # cut off within what follows the bytes
        signs = [start in self._filled(clues)]
        if following is not None:
            signs.append(end == following)
        if not ended and end < self.source.size:
            signs.append(self._is_sign(end))
        signs += _by_headers(local, line, start, size)
        if described is not None:
            signs += [True, size in (described.stored, described.size)]
            signs += [described.crc32 == line.crc32] if line is not None else []
        elif size and not ended:
            signs.append(local is not None and not local.flags & _FOLLOWS)
        present = max(0, min(size, self.source.size - start))
        found = Found(header, start, size, present, local, line, described, clues.wide)
        return 2 * sum(signs) - len(signs), found

    def _is_sign(self, offset: int) -> bool:
        """Whether a record begins there, or the directory."""
        sign = self.source.read(offset, 4)
        return is_sign(sign, LOCAL) or is_sign(sign, CENTRAL)

    def _cut(self, header: int, local: Local, line: Line | None) -> Found:
        """A record that the file ends within, or whose end nothing tells."""
        known = self.measure.known(local) if line is None else line.stored
        left = max(0, self.source.size - local.payload)
        if known is None:  # at least its descriptor is missing, and nobody knows how much of it
            return Found(header, local.payload, left + 1, left, local, line, None, local.wide, endless=True)
        return Found(header, local.payload, known, min(known, left), local, line, None, local.wide)


def _by_headers(local: Local | None, line: Line | None, start: int, size: int) -> list[bool]:
    """What the two headers say to a place and a size."""
    signs: list[bool] = []
    if local is not None:
        signs.append(local.payload == start)
        if local.stored or not local.flags & _FOLLOWS:
            signs += [local.stored == size] * 2
    if line is not None:
        signs.append(line.stored == size)
        if not line.method:
            signs.append(line.size == size)
    return signs
