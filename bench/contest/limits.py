"""What the hardware can do, measured on the same file in the same run: nothing that reads it can be faster."""

from __future__ import annotations

import itertools
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from bench.contest.cache import drop, warm

SLOT = 16 << 20
MOST = 4 << 30  # bytes of a file that are read, one by several threads
ALONE = 1 << 30  # by one thread
COPIED = 1 << 30
TIMES = 3

PINNED_COPY = "copy from pinned memory to the device"
DIRECT, BUFFERED = "cold disk, O_DIRECT", "cold disk, buffered"
TO_PINNED, REUSED, FRESH = "file to pinned memory", "file to reused memory", "file to fresh memory"


class Limit(NamedTuple):
    """One thing measured: what, by how many threads, and how fast."""

    what: str
    threads: int
    speed: float
    """Bytes a second."""


def limits(path: str, device: str, where: str) -> list[Limit]:
    """Every limit of a place that bears on loading to a device; ``path`` is a file there."""
    if where == "cold":
        return _cold(path)
    warm(path)
    counts = sorted({1, 4, 8, 16, _cores()} if device == "cuda" else {1, _cores()})
    if device != "cuda":
        return [
            *(Limit(REUSED, n, _read(path, n, reused(n))) for n in counts),
            *(Limit(FRESH, n, _read(path, n, None)) for n in counts),
        ]
    slots = [memoryview(slot.numpy()) for slot in _pinned(max(counts))]
    return [
        *_copies(),
        *(Limit(TO_PINNED, n, _read(path, n, slots[:n])) for n in counts),
    ]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cold(path: str) -> list[Limit]:
    """The disk, through the page cache and around it."""
    count, found = max(4, _cores()), []
    for what, flags in ((BUFFERED, 0), (DIRECT, getattr(os, "O_DIRECT", None))):
        try:
            speed = 0.0 if flags is None else _read(path, count, reused(count), flags, before=lambda: drop(path))
        except OSError:  # the file system does not do it
            continue
        found.append(Limit(what, count, speed))
    drop(path)
    return found


def _pinned(count: int) -> list[Any]:
    import torch

    return [torch.ones(SLOT, dtype=torch.uint8, pin_memory=True) for _ in range(count)]


def _copies() -> list[Limit]:
    """One large copy to the device, from pinned memory and from ordinary."""
    import torch

    target = torch.empty(COPIED, dtype=torch.uint8, device="cuda")
    found = []
    for what, pinned in ((PINNED_COPY, True), ("copy from ordinary memory to the device", False)):
        source = torch.ones(COPIED, dtype=torch.uint8, pin_memory=pinned)

        def copy(source: Any = source) -> None:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()

        copy()
        found.append(Limit(what, 1, COPIED / _median(copy)))
    return found


def reused(count: int) -> list[memoryview]:
    """A slot for each thread, page-aligned and written once."""
    slots = [memoryview(mmap.mmap(-1, SLOT)) for _ in range(count)]
    for slot in slots:
        slot[:] = bytes(SLOT)
    return slots


def _median(work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    taken = []
    for _ in range(TIMES):
        before()
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _read(
    path: str, threads: int, slots: list[memoryview] | None, flags: int = 0, before: Callable[[], object] = lambda: None
) -> float:
    """Bytes a second by so many threads, each into its slot, or all into one memory that is new each time."""
    fd = os.open(path, os.O_RDONLY | flags)
    size = min(os.fstat(fd).st_size, ALONE if threads == 1 else MOST)
    try:
        return size / _median(lambda: _pass(fd, size, threads, slots), before)
    finally:
        os.close(fd)


def _pass(fd: int, size: int, threads: int, slots: list[memoryview] | None) -> None:
    """Read a file once, a slot's worth at a time, whichever thread is free taking the next."""
    import torch

    fresh = memoryview(torch.empty(size, dtype=torch.uint8).numpy()) if slots is None else None
    starts, failed = itertools.count(0, SLOT), []

    def work(number: int) -> None:
        try:
            while (start := next(starts)) < size:
                target = slots[number] if slots is not None else fresh[start : start + SLOT]  # type: ignore[index]
                os.preadv(fd, [target], start)
        except OSError as error:
            failed.append(error)

    running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if failed:
        raise failed[0]
