"""A few bytes of a file, as they lie there."""

from __future__ import annotations

from contextlib import closing

from transload.errors import TransloadError

__all__ = ["raw_bytes"]


def raw_bytes(path: str, start: int, count: int) -> bytes:
    """Up to ``count`` bytes from ``start`` on; none where the file cannot be read (any more)."""
    from transload.io.sources import open_source

    try:
        with closing(open_source(path)) as source:
            return source.read(start, count)
    except TransloadError:
        return b""
