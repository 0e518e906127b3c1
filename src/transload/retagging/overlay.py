"""A file as it will be, before it is."""

from __future__ import annotations

from collections.abc import Iterator

from transload.io.sources import Source
from transload.retagging.changes import Changes

__all__ = ["Overlay"]


class Overlay:
    """A source as it will be once it is changed: what follows a run of another length moves with its end."""

    def __init__(self, base: Source, changes: Changes) -> None:
        self._base = base
        self._parts = list(_parts(changes))
        self.name = base.name
        self.size = changes.new_size

    def read(self, offset: int, count: int) -> bytes:
        """Up to ``count`` bytes from ``offset`` on."""
        found: list[bytes] = []
        for at, length, old, new in self._parts:
            first, last = max(at, offset), min(at + length, offset + count)
            if first < last:
                whole = new[first - at : last - at] if new else self._base.read(old + first - at, last - first)
                found.append(whole)
        return b"".join(found)

    def readinto(self, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from ``offset`` on; how many bytes there were."""
        data = self.read(offset, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Nothing to give back: the base is closed by its owner."""


def _parts(changes: Changes) -> Iterator[tuple[int, int, int, bytes]]:
    """The new file in order: where a part begins, its length, and where it was before, or what it is."""
    at = old = 0
    for run in changes.runs:
        yield at, run.offset - old, old, b""
        at += run.offset - old
        yield at, len(run.new), 0, run.new
        at, old = at + len(run.new), run.offset + len(run.old)
    yield at, changes.old_size - old, old, b""
