"""How much of a file lies in the page cache: what is there is copied, what is not is better read past it."""

from __future__ import annotations

import os
from contextlib import suppress

from transload.loading.transfer.memory import PAGE

__all__ = ["cached_share"]

_SAMPLES = 64


def cached_share(descriptor: int, begin: int, end: int) -> float | None:
    """The part of a range that is in memory, by samples, from 0 to 1; ``None`` where the system does not say.

    A read that is told not to wait fails on what would have to be fetched. Files that always lie in memory (tmpfs), and
    file systems of the network, do not know such reads.
    """
    flag = getattr(os, "RWF_NOWAIT", 0)
    if not flag or end <= begin:
        return None
    count = min(_SAMPLES, 1 + (end - begin) // PAGE)
    byte, found = bytearray(1), 0
    try:
        for index in range(count):
            with suppress(BlockingIOError):
                found += os.preadv(descriptor, [byte], begin + (end - begin) * index // count, flag)
    except (OSError, OverflowError):  # the second for positions that no file has
        return None
    return found / count
