"""The page cache: how much of a file is in it, how long the rest takes to come, and reading ahead."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from operator import add
from time import perf_counter
from typing import Literal

Pace = Literal["quick", "seeking", "waiting"]
"""``seeking`` if only the first byte of a read takes long, unless it follows another: from a spinning disk, or from a
file system that streams a file from elsewhere, and begins again when it is read in another order. ``waiting`` if each
read takes long, whatever its order: over a network."""

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
_SEEK = 2e-3
"""The same for reads that were not meant to measure: on a busy machine, a read from a solid-state disk may be late."""
_PROBES = 2
_FOLLOWING = 8
STREAMING = ("fuse.rclone",)
"""File systems that stream. The reads below, each of which makes one begin again, can find that of rclone waiting."""
_ASKED = 128 << 10
"""Bytes to ask for at once: Linux reads no more at a time of what a program will need, unless told otherwise."""
_NEAR = 8 << 20
"""Bytes from one read to the next if threads take turns."""
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


def _positions(begin: int, end: int) -> Iterator[int]:
    """Some positions of a range, evenly spread; others each time, since those that were asked for before are cached."""
    first = int.from_bytes(os.urandom(2), "little")
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


def pace(descriptor: int, begin: int, end: int, first: Sequence[float] = ()) -> Pace:
    """How bytes of a range that are not cached come.

    Two reads here and there are timed, since other work on the machine may delay one; then some that follow each other.
    ``first`` are the times of reads that were necessary anyway: if two were slow, a spinning disk is spared two seeks.
    """
    if not hasattr(os, "posix_fadvise"):  # nothing can be asked for ahead
        return "quick"
    slow = [wait for wait in first if wait >= _SEEK]  # the others were near these
    if len(slow) >= _PROBES:
        return "seeking" if file_system(descriptor) in STREAMING else _pace_from(descriptor, begin, end, slow)
    waits: list[float] = []
    cached, is_streaming = 0, None
    for position in _positions(begin, end):
        known = _is_cached(descriptor, position)
        if known:
            continue
        if known is None and is_streaming is None:
            is_streaming = file_system(descriptor) in STREAMING
        if is_streaming:
            return "seeking"
        wait = _seconds(descriptor, position, 1)
        if wait < (_SLOW_UNKNOWN if known is None else _SLOW):
            cached += 1
            if known is False or cached == _ENOUGH:
                return "quick"
            continue
        waits.append(wait)
        if len(waits) == _PROBES:
            start = max(begin, min(position, end - 2 * _FOLLOWING * _ASKED))  # the end may be cached
            return _pace_from(descriptor, start, end, waits)
    return "quick"


def _pace_from(descriptor: int, begin: int, end: int, waits: Sequence[float]) -> Pace:
    """Whether reads that follow one another, from ``begin`` on, are as slow as those that took so long."""
    times = [_seconds(descriptor, at, _ASKED) for at in range(begin, end, _ASKED)[:_FOLLOWING]]
    # The first ones start the readahead. Of the others, every second may be there already, one may be cached, and some
    # may be late.
    pairs = sorted(map(add, times[2:], times[3:]))
    return "waiting" if pairs[1] > min(waits) / 2 else "seeking"


def _seconds(descriptor: int, position: int, count: int) -> float:
    """How long a read takes."""
    start = perf_counter()
    with suppress(OSError, OverflowError):  # whoever needs these bytes gets the error
        os.pread(descriptor, count, position)
    return perf_counter() - start


def ask_for(descriptor: int, begin: int, end: int) -> None:
    """Ask the system for bytes that will be read, so that it waits for many reads at once. It is only a hint."""
    if not hasattr(os, "posix_fadvise"):
        return
    with suppress(OSError):
        for _, at, count in _pieces([(descriptor, begin, end)]):
            os.posix_fadvise(descriptor, at, count, os.POSIX_FADV_WILLNEED)


def _pieces(spans: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Descriptors, each with where a range begins and ends, as ranges that are asked for at once, with their length."""
    for descriptor, begin, end in spans:
        for at in range(begin, end, _ASKED):
            yield descriptor, at, min(_ASKED, end - at)


class ReadAhead:
    """Asks the system for what will be read, in file order: a latency then counts once for the whole window."""

    def __init__(self, spans: Iterable[tuple[int, int, int]]) -> None:
        """``spans`` are what is read: descriptors, each with where a range begins and ends."""
        self._pieces = _pieces(spans)
        self._asked = 0
        self.done = False
        """Whether everything has been asked for."""

    def ask(self, read: int) -> None:
        """Ask for the window that follows the first ``read`` bytes."""
        while self._asked < read + _WINDOW:
            piece = next(self._pieces, None)
            if piece is None:
                self.done = True
                return
            descriptor, at, count = piece
            ask_for(descriptor, at, at + count)
            self._asked += count


class Following:
    """Asks the system for what follows, if reads of a file follow one another; several threads may take turns."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor, self._size = descriptor, size
        self._end = self._asked = 0  # where the last read ended, and up to where bytes have been asked for
        self._step = 0

    def read(self, begin: int, end: int) -> None:
        """Ask for bytes that are read now, and for more after them with each read that follows another."""
        follows = self._end - _NEAR <= begin <= self._asked + _NEAR
        self._step = min(max(2 * self._step, _ASKED), _WINDOW) if follows else 0
        first = self._asked if follows else begin
        self._end, self._asked = end, max(first, min(end + self._step, self._size))
        ask_for(self._descriptor, first, self._asked)


def file_system(descriptor: int) -> str:
    """The name of the file system of a file, as far as Linux says."""
    device = os.fstat(descriptor).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            words = line.split()
            if words[2] == number and "-" in words:
                return words[words.index("-") + 1]
    return ""
