"""The page cache: how much of a file is in it, how long the rest takes to come, and reading ahead."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from time import perf_counter

WARM = 0.95
"""The fraction from which a file counts as cached."""
_SAMPLES = 64
_ENOUGH = 4
"""If none of so many samples is cached, nothing is: to ask for one makes Linux read it, which is a seek of the disk."""
_GOLDEN = 0.6180339887498949  # its multiples modulo 1 are evenly spread, wherever one stops
_PAGE = 4096
_SLOW = 1e-3
"""Seconds. A solid-state disk takes less to find a byte that is not cached; a spinning one takes 4 to 15 ms."""
_SLOW_UNKNOWN = 1e-4
"""The same for a byte that may be cached; a network takes 0.2 to 100 ms."""
_PROBES = 2
_ASKED = 128 << 10
"""Bytes to ask for at once: Linux reads no more at a time of what a program will need, unless told otherwise."""
_WINDOW = 64 << 20
"""Bytes asked for ahead: what a file system 60 ms away can send meanwhile at 1 GB/s."""


def cached_fraction(descriptor: int, begin: int, end: int) -> float | None:
    """The fraction of a range that is in the page cache, estimated from samples; ``None`` if the system does not say.

    A read with ``RWF_NOWAIT`` fails if it would have to wait for the disk. tmpfs and network file systems do not
    support it.
    """
    count = cached = 0
    for position in _positions(begin, end):
        known = _is_cached(descriptor, position)
        if known is None:
            return None
        count, cached = count + 1, cached + known
        if count == _ENOUGH and not cached:
            break
    return cached / count if count else None


def _positions(begin: int, end: int, first: int = 0) -> Iterator[int]:
    """Some positions of a range, evenly spread."""
    for index in range(first, first + min(_SAMPLES, 1 + (end - begin) // _PAGE) if end > begin else 0):
        yield begin + int((end - begin) * (index * _GOLDEN % 1))


def _is_cached(descriptor: int, position: int) -> bool | None:
    """Whether a byte is in the page cache, and exists; ``None`` if the system does not say."""
    flag = getattr(os, "RWF_NOWAIT", 0)
    try:
        return bool(os.preadv(descriptor, [bytearray(1)], position, flag)) if flag else None
    except BlockingIOError:
        return False
    except (OSError, OverflowError):  # OverflowError for positions that no file has
        return None


def is_slow(descriptor: int, begin: int, end: int) -> bool:
    """Whether reads of bytes that are not cached begin with a long wait, as on a spinning disk or over a network.

    Two such reads are timed, since other work on the machine may delay one.
    """
    if not hasattr(os, "posix_fadvise"):  # nothing can be asked for ahead
        return False
    waits = 0
    for position in _positions(begin, end, _SAMPLES):  # ``cached_fraction`` may ask for others later
        known = _is_cached(descriptor, position)
        if known:
            continue
        start = perf_counter()
        with suppress(OSError, OverflowError):  # whoever needs these bytes gets the error
            os.pread(descriptor, 1, position)
        if perf_counter() - start < (_SLOW_UNKNOWN if known is None else _SLOW):
            return False
        waits += 1
        if waits == _PROBES:
            return True
    return False


def ask_for(descriptor: int, offset: int, count: int) -> None:
    """Ask the system for bytes that will be read. It is only a hint."""
    with suppress(OSError):
        os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_WILLNEED)


class ReadAhead:
    """Asks the system for what will be read, in file order, so that it waits for many reads at once.

    A spinning disk then need not seek, and a network's latency counts once for the whole window.
    """

    def __init__(self, spans: Iterable[tuple[int, int, int]]) -> None:
        """``spans`` are what is read: descriptors, each with where a range begins and ends."""
        self._pieces = self._split(spans)
        self._asked = 0
        self.done = False
        """Whether everything has been asked for."""

    @staticmethod
    def _split(spans: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
        for descriptor, begin, end in spans:
            for at in range(begin, end, _ASKED):
                yield descriptor, at, min(_ASKED, end - at)

    def ask(self, read: int) -> None:
        """Ask for the window that follows the first ``read`` bytes."""
        while self._asked < read + _WINDOW:
            piece = next(self._pieces, None)
            if piece is None:
                self.done = True
                return
            ask_for(*piece)
            self._asked += piece[2]


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
