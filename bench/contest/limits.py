"""The limits of the hardware, measured with the same file in the same run: no loader can be faster."""

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
MAX_BYTES = 4 << 30  # bytes of a file that several threads read
MAX_BYTES_ALONE = 1 << 30  # bytes of a file that one thread reads
COPIED = 1 << 30
REPEATS = 3

PINNED_COPY = "copy from pinned memory to the device"
DIRECT, BUFFERED = "cold disk, O_DIRECT", "cold disk, buffered"
TO_PINNED, REUSED, FRESH = "file to pinned memory", "file to reused memory", "file to fresh memory"


class Limit(NamedTuple):
    """One measurement: what, with how many threads, and how fast."""

    what: str
    threads: int
    speed: float
    """Bytes per second."""


def limits(path: str, device: str, where: str) -> list[Limit]:
    """Every limit of a place that matters for loading to a device; ``path`` is a file there."""
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
    """The disk, through the page cache and bypassing it."""
    count, results = max(4, _cores()), []
    for what, flags in ((BUFFERED, 0), (DIRECT, getattr(os, "O_DIRECT", None))):
        try:
            speed = 0.0 if flags is None else _read(path, count, reused(count), flags, before=lambda: drop(path))
        except OSError:  # the file system does not support it
            continue
        results.append(Limit(what, count, speed))
    drop(path)
    return results


def _pinned(count: int) -> list[Any]:
    import torch

    return [torch.ones(SLOT, dtype=torch.uint8, pin_memory=True) for _ in range(count)]


def _copies() -> list[Limit]:
    """One large copy to the device, from pinned and from ordinary memory."""
    import torch

    target = torch.empty(COPIED, dtype=torch.uint8, device="cuda")
    results = []
    for what, pinned in ((PINNED_COPY, True), ("copy from ordinary memory to the device", False)):
        source = torch.ones(COPIED, dtype=torch.uint8, pin_memory=pinned)

        def copy(source: Any = source) -> None:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()

        copy()
        results.append(Limit(what, 1, COPIED / _median(copy)))
    return results


def reused(count: int) -> list[memoryview]:
    """A slot for each thread, page-aligned and already written to."""
    slots = [memoryview(mmap.mmap(-1, SLOT)) for _ in range(count)]
    for slot in slots:
        slot[:] = bytes(SLOT)
    return slots


def _median(work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    times = []
    for _ in range(REPEATS):
        before()
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _read(
    path: str, threads: int, slots: list[memoryview] | None, flags: int = 0, before: Callable[[], object] = lambda: None
) -> float:
    """Bytes per second of some threads, each reading into its slot, or all into newly allocated memory."""
    fd = os.open(path, os.O_RDONLY | flags)
    size = min(os.fstat(fd).st_size, MAX_BYTES_ALONE if threads == 1 else MAX_BYTES)
    try:
        return size / _median(lambda: _pass(fd, size, threads, slots), before)
    finally:
        os.close(fd)


def _pass(fd: int, size: int, threads: int, slots: list[memoryview] | None) -> None:
    """Read a file once, in pieces of the size of a slot; a free thread takes the next piece."""
    import torch

    fresh = memoryview(torch.empty(size, dtype=torch.uint8).numpy()) if slots is None else None
    starts, errors = itertools.count(0, SLOT), []

    def work(number: int) -> None:
        try:
            while (start := next(starts)) < size:
                target = slots[number] if slots is not None else fresh[start : start + SLOT]  # type: ignore[index]
                os.preadv(fd, [target], start)
        except OSError as error:
            errors.append(error)

    running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if errors:
        raise errors[0]
