"""The transfer plan: from storages that want bytes of a file to jobs of reading. Pure; nothing is opened or allocated.

A file is thought of as cut into cells of equal size. What is wanted of one cell is one job: small storages that lie
together are read at once, a large one is read in many jobs at the same time, and no job is larger than the slot of
memory it may have to pass through. As cells begin at multiples of their size, a job can also be read past the page
cache, which wants positions, lengths and addresses that are multiples of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = ["CELL", "GAP", "Job", "Run", "Want", "jobs"]

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
