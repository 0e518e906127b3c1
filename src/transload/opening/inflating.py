"""A deflated record as a source: unpacked as it is read, never more of it in memory than was asked for."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING

from transload.loading.errors import BrokenFileError

if TYPE_CHECKING:
    from zlib import _Decompress

    from transload.io.sources import Source

__all__ = ["Inflating"]

_STEP = 1 << 20


class Inflating:
    """The content of a deflated record. Reading on is cheap; going back begins again at the record's first byte."""

    def __init__(self, base: Source, offset: int, stored: int, size: int) -> None:
        self.name = base.name
        self.size = size
        self._base = base
        self._offset = offset
        self._stored = stored
        self._lock = Lock()
        self._rewind()

    def _rewind(self) -> None:
        from zlib import decompressobj

        self._machine: _Decompress = decompressobj(-15)
        self._taken = 0  # packed bytes given to it
        self._position = 0  # unpacked bytes it has given

    def read(self, offset: int, count: int) -> bytes:
        """Up to ``count`` bytes from ``offset`` on."""
        out = bytearray(max(0, min(count, self.size - offset)))
        got = self.readinto(offset, memoryview(out))
        return bytes(out[:got])

    def readinto(self, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from ``offset`` on; how many bytes there were."""
        with self._lock:
            try:
                return self._fill(offset, buffer[: max(0, self.size - offset)])
            except BaseException:  # an interrupt, perhaps between unpacking some bytes and counting them
                self._rewind()
                raise

    def _fill(self, offset: int, buffer: memoryview) -> int:
        done = 0
        if offset < self._position:
            self._rewind()
        while self._position < offset and self._next(min(_STEP, offset - self._position)):
            pass
        while done < len(buffer) and (part := self._next(min(_STEP, len(buffer) - done))):
            buffer[done : done + len(part)] = part
            done += len(part)
        return done

    def _next(self, most: int) -> bytes:
        """The next bytes, ``most`` at most; none at the end."""
        from zlib import error

        packed = self._machine.unconsumed_tail
        while True:
            if not packed and self._taken < self._stored:
                packed = self._base.read(self._offset + self._taken, min(_STEP, self._stored - self._taken))
                self._taken += len(packed)
            try:
                part = self._machine.decompress(packed, most)
            except error as reason:
                raise BrokenFileError(f"its compressed data is damaged ({reason})", where=self.name) from reason
            if part or self._machine.eof or (not packed and not self._machine.unconsumed_tail):
                self._position += len(part)
                return part
            packed = self._machine.unconsumed_tail

    def close(self) -> None:
        """Nothing to give back: the base is closed by its owner."""
