"""A compressed record as a source: unpacked as it is read, from front to back, without holding all of it."""

from __future__ import annotations

import zlib
from threading import Lock

from transload.io.sources import Source, copied

__all__ = ["Inflated"]

_CHUNK = 1 << 20


class Inflated:
    """The bytes a deflated source unpacks to. Going back begins again, so it is meant to be read in order."""

    def __init__(self, packed: Source, size: int, name: str) -> None:
        self._packed = packed
        self.size = size
        self.name = name
        self._lock = Lock()
        self._restart()

    def _restart(self) -> None:
        self._unpack = zlib.decompressobj(-15)
        self._taken = 0
        self._held = b""
        self._at = 0  # where in the unpacked bytes ``_held`` begins

    def read(self, offset: int, count: int) -> bytes:
        """Up to ``count`` bytes from ``offset`` on; none after a place where the compressed data is damaged."""
        count = min(count, self.size - offset)
        if count <= 0:
            return b""
        with self._lock:
            if offset < self._at:
                self._restart()
            out = bytearray()
            while len(out) < count:
                skip = offset + len(out) - self._at
                if skip < len(self._held):
                    out += self._held[skip : skip + count - len(out)]
                elif not self._more():
                    break
            return bytes(out)

    def _more(self) -> bool:
        """Unpack the next piece in place of the one that is held."""
        self._at += len(self._held)
        self._held = b""
        while not self._held and not self._unpack.eof:
            data = self._unpack.unconsumed_tail or self._packed.read(self._taken, _CHUNK)
            if not self._unpack.unconsumed_tail:
                self._taken += len(data)
            try:
                self._held = self._unpack.decompress(data, _CHUNK)
            except zlib.error:
                return False
            if not data and not self._held:
                return False
        return bool(self._held)

    def readinto(self, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from ``offset`` on; how many bytes there were."""
        return copied(self, offset, buffer)

    def close(self) -> None:
        """Nothing to give back."""
