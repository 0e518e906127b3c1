"""Progress of a long operation, reported to the caller's function or on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

__all__ = ["Progress", "telling"]


_EVERY = 0.1
"""Seconds between two lines on a terminal."""
_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


class Progress:
    """A line on a terminal that is overwritten: bytes done, bytes in all, and the speed.

    >>> Progress(None).text(3_000_000_000, 4_000_000_000, 1.5)
    'loading 3.0 of 4.0 GB, 2.0 GB/s'
    >>> Progress(None).text(560, 4500, 0.001)
    'loading 0.6 of 4.5 kB, 560.0 kB/s'
    """

    def __init__(self, stream: TextIO | None, verb: str = "loading") -> None:
        self._stream = stream
        self._verb = verb
        self._begun = self._told = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Write the line, if it is time to, and end it when all is done."""
        now = time.monotonic()
        if self._stream is None or (done < total and now - self._told < _EVERY):
            return
        self._told = now
        end = "\n" if done >= total else ""
        self._stream.write(f"\r{self.text(done, total, now - self._begun)}\x1b[K{end}")
        self._stream.flush()

    def text(self, done: int, total: int, seconds: float) -> str:
        """The line itself."""
        unit, size = next(((name, size) for name, size in _UNITS if total >= size), _UNITS[-1])
        speed = done / size / seconds if seconds > 0 else 0.0
        return f"{self._verb} {done / size:.1f} of {total / size:.1f} {unit}, {speed:.1f} {unit}/s"


def _terminal() -> TextIO | None:
    """The terminal, if there is one: a program without a console has no stderr, another may have closed it."""
    try:
        return sys.stderr if sys.stderr.isatty() else None
    except (AttributeError, ValueError):
        return None


def telling(
    progress: bool | Callable[[int, int], object] | None, total: int, verb: str = "loading"
) -> Callable[[int], None] | None:
    """A function to be called with each number of bytes that came; ``None`` where nobody wants to know.

    ``progress`` gets the sum so far, and the total; on a terminal, ``verb`` says what is done with them.
    """
    if progress is None or progress is False:
        return None
    stream = _terminal() if progress is True else None
    if progress is True and stream is None:
        return None
    show: Callable[[int, int], object] = Progress(stream, verb) if progress is True else progress
    done = 0

    def tell(count: int) -> None:
        nonlocal done
        done += count
        show(done, total)

    return tell
