"""The transfer plan: from storages that want bytes of a file to jobs of reading. Pure; nothing is opened or allocated.

A file is thought of as cut into cells of equal size. What is wanted of one cell is one job: small storages that lie
together are read at once, a large one is read in many jobs at the same time, and no job is larger than the slot of
memory it may have to pass through. As cells begin at multiples of their size, a job can also be read past the page
cache, which wants positions, lengths and addresses that are multiples of a block.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from transload.frozen import facts
from transload.io.memory import PAGE, huge_pages_pay
from transload.io.pool import cores

__all__ = [
    "CELL",
    "GAP",
    "Choice",
    "Facts",
    "Job",
    "Run",
    "Settings",
    "Want",
    "cached_share",
    "choose",
    "forecast",
    "jobs",
]


CELL = 4 << 20
"""Bytes of a cell. Measured on an H200 with 16 cores: of 2, 4, 8 and 16 MiB, 4 and 8 fill the bus, and four make the
smaller ring; with 2 the threads wait for one another."""

GAP = 64 << 10
"""Unwanted bytes that are read to save another call; a call costs about as much as copying these."""


class Want(NamedTuple):
    """Bytes of a file that shall be in memory: a storage, or what a parameter is filled with."""

    file: int
    """Which of the open files."""
    offset: int
    nbytes: int
    device: str = "cpu"


class Run(NamedTuple):
    """A part of a job that goes to one place."""

    offset: int
    """Where it begins in the file."""
    want: int
    """Index of the one who wants it."""
    begin: int
    """Where in the wanted memory it goes."""
    nbytes: int


class Job:
    """One reading: a range of a file no longer than a cell, and where its parts go, all on one device."""

    __slots__ = ("begin", "device", "end", "file", "runs", "wanted")

    def __init__(self, file: int, device: str, runs: tuple[Run, ...]) -> None:
        self.file = file
        self.device = device
        self.runs = runs
        self.begin = runs[0].offset
        """First byte that is wanted."""
        self.end = max([run[0] + run[3] for run in runs])
        """The byte after the last one that is wanted."""
        self.wanted = sum([run[3] for run in runs])
        """Bytes that go somewhere."""

    def __repr__(self) -> str:
        return f"Job({self.file}, {self.device!r}, {self.runs})"


def jobs(wants: Sequence[Want], cell: int = CELL, gap: int = GAP) -> Iterator[Job]:
    """The jobs that serve all wants, in the order of the files.

    >>> for job in jobs([Want(0, 2, 5), Want(0, 8, 12)], cell=16):
    ...     print(job.begin, job.end, [(run.want, run.begin, run.nbytes) for run in job.runs])
    2 16 [(0, 0, 5), (1, 0, 8)]
    16 20 [(1, 8, 4)]
    """
    together: list[Run] = []
    file, device, start, stop, reach = -1, "", 0, 0, 0
    for index in sorted(range(len(wants)), key=wants.__getitem__):
        own_file, offset, nbytes, own_device = wants[index]
        begin = 0
        while begin < nbytes:
            at = offset + begin
            if not start <= at < stop or at > reach + gap or own_file != file or own_device != device:
                if together:
                    yield Job(file, device, tuple(together))
                together = []
                file, device, reach = own_file, own_device, at
                start = at - at % cell
                stop = start + cell
            count = nbytes - begin if offset + nbytes <= stop else stop - at
            together.append(_new(Run, (at, index, begin, count)))
            begin += count
            reach = max(reach, at + count)
    if together:
        yield Job(file, device, tuple(together))


_new = tuple.__new__  # a third of what the class itself takes, and there are as many as tensors


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


LITTLE = 16 << 20
"""Fewer bytes are read by the thread that asks for them: starting others takes longer."""

MOST_RING = 12
"""Lanes to a device. On an H200 at PCIe 5 eight bring 87 % of what the bus carries, twelve 94 %, sixteen no more."""

MOST_HOST = 16
MOST_DIRECT = 8  # readings past the page cache at the same time: they wait for the disk, not for a processor
SLOT_PAIR = 2 * CELL
FEW_CORES = 2
"""With so few the device fetches bytes from the page cache itself: 18.8 GB/s with one core, against 7.6 by the ring;
20.9 with two, against 14.4; with four the ring is faster."""

COLD = 0.5
WARM = 0.95


class Settings(NamedTuple):
    """What the caller wants otherwise than it would be chosen; ``None`` leaves it to us."""

    threads: int | None = None
    pinned: int | None = None
    """Bytes of pinned memory at most."""
    direct: bool | None = None
    """Read past the page cache."""


class Facts(NamedTuple):
    """What the choice depends on."""

    host: int
    """Bytes that go to the memory of the host."""
    cuda: int
    """Bytes that go to CUDA devices."""
    cores: int
    cached: float | None
    """The part of the file that is in the page cache, if the system tells."""
    plain: bool = True
    """Whether it is a file of the system, which several threads can read at once."""
    mappable: bool = False
    """Whether the devices can fetch from the page cache."""
    huge: bool = False
    """Whether huge pages are to be had."""


@facts(frozen=True)
class Choice:
    """How bytes are moved."""

    lanes: int
    """Threads that read, in all; 1 is the caller's own."""
    ring: bool = False
    """They read into pinned slots, from which devices fetch."""
    mapped: bool = False
    """One of them lets the device fetch from the page cache instead."""
    direct: bool = False
    """They read past the page cache."""
    huge: bool = False
    """Fresh memory of the host is asked for in huge pages."""
    why: str = ""

    @property
    def pinned(self) -> int:
        """Bytes of pinned memory it takes."""
        return (self.lanes - self.mapped) * SLOT_PAIR if self.ring else 0


def choose(facts: Facts, settings: Settings = Settings()) -> Choice:  # noqa: B008 - a named tuple does not change
    """The way to move bytes.

    >>> choose(Facts(host=0, cuda=8 << 30, cores=16, cached=1.0)).why
    '12 threads, pinned 96 MiB, from the page cache'
    >>> choose(Facts(host=2 << 30, cuda=0, cores=2, cached=0.0)).why
    '8 threads, past the page cache, which holds 0 % of it'
    """
    direct = _is_direct(facts, settings)
    mapped = _is_mapped(facts, settings) and not direct
    lanes = _lanes(facts, settings, direct=direct)
    made = Choice(lanes, facts.cuda > 0, mapped, direct, facts.huge and facts.host >= LITTLE)
    return replace(made, why=", ".join(_words(made, facts)))


def _words(choice: Choice, facts: Facts) -> Iterator[str]:
    yield "1 thread" if choice.lanes == 1 else f"{choice.lanes} threads"
    if choice.pinned:
        yield f"pinned {choice.pinned >> 20} MiB"
    if choice.mapped:
        yield "the device fetches from the page cache"
    elif choice.direct:
        yield "past the page cache"
    elif facts.cached is not None and facts.cached >= WARM:
        yield "from the page cache"
    if facts.cached is not None and facts.cached < WARM:
        yield f"which holds {100 * facts.cached:.0f} % of it" if choice.direct else f"{100 * facts.cached:.0f} % cached"
    if choice.huge:
        yield "huge pages"


def _is_direct(facts: Facts, settings: Settings) -> bool:
    if settings.direct is not None or not facts.plain:
        return bool(settings.direct) and facts.plain
    return facts.cached is not None and facts.cached < COLD and facts.host + facts.cuda >= LITTLE


def _is_mapped(facts: Facts, settings: Settings) -> bool:
    asked = settings.threads is not None or settings.pinned is not None
    warm = facts.cached is not None and facts.cached >= WARM
    return facts.mappable and warm and facts.cores <= FEW_CORES and not asked and facts.cuda >= LITTLE


def _lanes(facts: Facts, settings: Settings, *, direct: bool) -> int:
    """No more than there is work for, nor than the pinned memory that is allowed is enough for."""
    nbytes = facts.host + facts.cuda
    if not facts.plain:
        return 1
    if settings.threads is not None:
        wanted = settings.threads
    elif nbytes < LITTLE:
        return 1
    else:
        most = MOST_RING if facts.cuda else MOST_HOST
        wanted = min(most, max(facts.cores, MOST_DIRECT if direct else 1))
    if facts.cuda and settings.pinned is not None:
        wanted = min(wanted, settings.pinned // SLOT_PAIR)
    return max(1, min(wanted, -(-nbytes // CELL)))


def forecast(path: str, host: int, cuda: int) -> Choice:
    """The choice for so many bytes of a file; of a directory, as for a file that lies nowhere yet."""
    if host + cuda < LITTLE:
        return choose(Facts(host, cuda, 1, None))
    return choose(Facts(host, cuda, cores(), _cached(path), huge=host >= LITTLE and huge_pages_pay(host)))


def _cached(path: str) -> float | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    except OSError:
        return None
    try:
        return cached_share(descriptor, 0, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)
