"""A file that is not there yet, put together from parts of another one and from bytes of our own."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from transload.io.sources import BytesSource, Source, copied

__all__ = ["Assembly", "Filler", "Part", "literal", "patched"]


class Part(NamedTuple):
    """So many bytes of a source from an offset on."""

    source: Source
    offset: int
    length: int


class Filler:
    """As many bytes as are asked for, all of one pattern: what stands for bytes that are lost."""

    name = "<filler>"

    def __init__(self, size: int, pattern: bytes = b"\0") -> None:
        self.size = size
        self._pattern = pattern

    def read(self, offset: int, count: int) -> bytes:
        """Up to ``count`` bytes from ``offset`` on."""
        count = min(count, self.size - offset)
        if count <= 0:
            return b""
        width = len(self._pattern)
        phase = offset % width
        return (self._pattern * ((count + phase) // width + 1))[phase : phase + count]

    def readinto(self, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from ``offset`` on; how many bytes there were."""
        return copied(self, offset, buffer)

    def close(self) -> None:
        """Nothing to give back."""


def literal(data: bytes) -> Part:
    """Bytes of our own."""
    return Part(BytesSource(data), 0, len(data))


def patched(source: Source, offset: int, length: int, changes: Iterable[tuple[int, int]]) -> Iterator[Part]:
    """A part of a source in which some bytes, by their places in the source, are others."""
    at, end = offset, offset + length
    for place, value in sorted(changes):
        if at <= place < end:
            yield Part(source, at, place - at)
            yield literal(bytes([value]))
            at = place + 1
    yield Part(source, at, end - at)


class Assembly:
    """Parts one after the other, as a source. Its parts belong to somebody else, who closes them."""

    def __init__(self, parts: Iterable[Part], name: str) -> None:
        self.parts = [part for part in parts if part.length]
        self._starts: list[int] = []
        self.name = name
        self.size = 0
        for part in self.parts:
            self._starts.append(self.size)
            self.size += part.length

    def read(self, offset: int, count: int) -> bytes:
        """Up to ``count`` bytes from ``offset`` on."""
        found: list[bytes] = []
        end = min(offset + count, self.size)
        index = bisect_right(self._starts, offset) - 1
        while offset < end:
            part = self.parts[index]
            inside = offset - self._starts[index]
            data = part.source.read(part.offset + inside, min(part.length - inside, end - offset))
            if not data:
                break
            found.append(data)
            offset += len(data)
            index += inside + len(data) == part.length
        return found[0] if len(found) == 1 else b"".join(found)

    def readinto(self, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from ``offset`` on; how many bytes there were."""
        return copied(self, offset, buffer)

    def close(self) -> None:
        """Nothing to give back."""

    def origin(self, offset: int, source: Source) -> int | None:
        """Where a byte lies in ``source``; ``None`` if it is not from there."""
        index = bisect_right(self._starts, offset) - 1
        if index < 0 or offset >= self.size or self.parts[index].source is not source:
            return None
        return self.parts[index].offset + offset - self._starts[index]
