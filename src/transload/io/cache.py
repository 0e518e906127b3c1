"""The page cache: how much of a file is in it."""

from __future__ import annotations

import os
from contextlib import suppress

WARM = 0.95
"""The fraction from which a file counts as cached."""
_SAMPLES = 64
_PAGE = 4096


def cached_fraction(descriptor: int, begin: int, end: int) -> float | None:
    """The fraction of a range that is in the page cache, estimated from samples; ``None`` if the system does not say.

    A read with ``RWF_NOWAIT`` fails if it would have to wait for the disk. tmpfs and network file systems do not
    support it.
    """
    flag = getattr(os, "RWF_NOWAIT", 0)
    if not flag or end <= begin:
        return None
    count = min(_SAMPLES, 1 + (end - begin) // _PAGE)
    byte, cached = bytearray(1), 0
    try:
        for index in range(count):
            with suppress(BlockingIOError):
                cached += os.preadv(descriptor, [byte], begin + (end - begin) * index // count, flag)
    except (OSError, OverflowError):  # OverflowError for positions that no file has
        return None
    return cached / count


def is_in_memory(descriptor: int) -> bool:
    """Whether the file system of a file has no disk under it, as far as Linux says."""
    device = os.fstat(descriptor).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            words = line.split()
            if words[2] == number and "-" in words:
                return words[words.index("-") + 1] in ("tmpfs", "ramfs")
    return False
