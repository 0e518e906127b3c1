"""A source as a binary file, for what reads nothing else: unpicklers, zipfile, torch."""

from __future__ import annotations

import io
from typing import Any

from transload.io.sources import Source

__all__ = ["as_file"]

_BUFFER = 1 << 20


class _Stream(io.RawIOBase):
    """A source as a file, from its beginning."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._at = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As files do it."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._source.size}[whence]
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        """As files do it."""
        data = self._source.read(self._at, len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def as_file(source: Source) -> io.BufferedReader:
    """A binary file over a source; closing it leaves the source open.

    >>> from transload.io.sources import open_source
    >>> as_file(open_source(b"abc")).read(2)
    b'ab'
    """
    return io.BufferedReader(_Stream(source), _BUFFER)
