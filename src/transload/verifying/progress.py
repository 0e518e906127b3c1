"""How far verifying has come, on a terminal."""

from __future__ import annotations

from typing import TextIO

from transload.loading import progress

__all__ = ["Progress"]


class Progress(progress.Progress):
    """A line on a terminal that is written over, and taken away at the end: the report says it all.

    >>> Progress(None).text(3_000_000_000, 4_000_000_000, 1.5)
    'verifying 3.0 of 4.0 GB, 2.0 GB/s'
    """

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__(stream, "verifying")
        self._first = self._told

    def __call__(self, done: int, total: int) -> None:
        """Write the line, if it is time to. What lies between records is read with them, and not in the total."""
        super().__call__(min(done, total - 1), total)

    def end(self) -> None:
        """Take the line away, if there is one."""
        if self._stream is not None and self._told != self._first:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
