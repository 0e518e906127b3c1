"""Requests to read, the jobs made of them, and one thread that does these for memory of the host.

``jobs`` turns read requests into jobs: a file is thought of as cut into cells of equal size, and what is wanted of one
cell is one job. Small storages that lie together are read at once, a large one in many jobs at the same time, and no
job is larger than the slot of pinned memory it may have to pass through. As cells begin at multiples of their size, a
job can also be read past the page cache, which needs positions, lengths and addresses that are multiples of a block.
``HostLane`` reads jobs; for little, ``read_here`` is all there is to it. More is left to ``engine``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from transload.frozen import NamedTuple
from transload.io.memory import Pages, copy, view

if TYPE_CHECKING:
    from transload.io.sources import Source

CELL = 4 << 20
"""Bytes of a cell. Measured on an H200 with 16 cores: of 2, 4, 8 and 16 MiB, 4 and 8 fill the bus, and four make the
smaller ring; with 2 the threads wait for one another."""

GAP = 64 << 10
"""Unwanted bytes that are read to save another call; a call costs about as much as copying these."""


class ReadRequest(NamedTuple):
    """Bytes of a file to be read into memory: a storage, or what a parameter is filled with."""

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


def jobs(wants: Sequence[ReadRequest], cell: int = CELL, gap: int = GAP) -> Iterator[Job]:
    """The jobs that serve all wants, in the order of the files.

    >>> for job in jobs([ReadRequest(0, 2, 5), ReadRequest(0, 8, 12)], cell=16):
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


LITTLE = 16 << 20
"""Fewer bytes are read by the thread that asks for them: starting others takes longer."""


def is_reached(kind: str) -> bool:
    """Whether bytes can be brought to devices of a kind."""
    if kind != "cuda":
        return kind == "cpu"
    from transload.io.cuda_driver import cuda_driver

    return cuda_driver() is not None


SLOT_PAIR = 2 * CELL

Take = Callable[[], "Job | None"]
Tell = Callable[[int], None]
Place = Callable[[int], int]


class Settings(NamedTuple):
    """What the caller has decided; ``None`` leaves it to ``choose``."""

    threads: int | None = None
    pinned: int | None = None
    """Bytes of pinned memory at most."""
    direct: bool | None = None
    """Read past the page cache."""


# -- files


class Ended(Exception):  # noqa: N818 - a signal to the caller, who knows the names of storages
    """A file ends before a request does: the index of the request, and how many bytes of it there are."""

    def __init__(self, want: int, came: int) -> None:
        super().__init__(want, came)
        self.want = want
        self.came = came


class File:
    """A source to read from. What ``engine`` reads may also be read past the page cache."""

    def __init__(self, source: Source) -> None:
        self._source = source

    direct = False
    """Whether it is read past the page cache."""

    @property
    def plain(self) -> int:
        """The descriptor, if this is a file of the system; else -1."""
        return getattr(self._source, "descriptor", -1)

    def read(self, run: Run, address: int) -> None:
        """Read a part to an address; ``Ended`` if there is less of it."""
        came = self._source.readinto(run.offset, view(address, run.nbytes))
        if came < run.nbytes:
            raise self.ended([run], run.offset + came)

    def read_job(self, job: Job, slot: int) -> int:
        """Read a whole job into a slot of a cell's size, by its address; what to add to a position to get there."""
        start = slot - job.begin // CELL * CELL
        begin, length = job.begin, job.end - job.begin
        came = self._source.readinto(begin, view(start + begin, length))
        if came < length:
            raise self.ended(job.runs, begin + came)
        return start

    def ended(self, runs: Sequence[Run], position: int) -> Ended:
        """For the first of some parts that reaches beyond a position, where a file ends or has ended before."""
        run = next(run for run in runs if run.offset + run.nbytes > position)
        if self.plain >= 0:
            position = min(position, os.fstat(self.plain).st_size)
        return Ended(run.want, max(0, run.begin + position - run.offset))


# -- into memory of the host

_SMALL = 32 << 10
"""Parts shorter than this are read together and copied out: a call for each would take longer."""


class Sums:
    """Checksums of parts as they come by, in any order; ``None`` in the place of one is not to compute any."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, int, int, int]] = []
        """Whose it is, where it begins, its length, its checksum."""

    def add(self, run: Run, address: int) -> None:
        """Note the checksum of a part that lies at an address."""
        from zlib import crc32

        self.parts.append((run.want, run.begin, run.nbytes, crc32(view(address, run.nbytes))))

    def whole(self, count: int) -> list[int]:
        """The checksum of each of so many requests, all of whose parts came by."""
        from transload.io.checksums import combined

        found = [0] * count
        for want, begin, nbytes, value in sorted(self.parts):
            found[want] = combined(found[want], value, nbytes) if begin else value
        return found


class HostLane:
    """Reads jobs into memory at ``addresses``, which are known when a job is taken."""

    def __init__(self, files: Sequence[File], addresses: Mapping[int, int], sums: Sums | None = None) -> None:
        self.done = 0
        self._files = files
        self._addresses = addresses
        self._sums = sums
        self._buffer: Pages | None = None

    def run(self, take: Take) -> None:
        """Take jobs, and read, until there are none."""
        while (job := take()) is not None:
            self.read(job)
            self.done += job.wanted

    def read(self, job: Job) -> None:
        """Read one job: part by part, or through a buffer where the parts are small or the reading is direct."""
        file, addresses, sums = self._files[job.file], self._addresses, self._sums
        if not file.direct and (len(job.runs) == 1 or job.wanted >= len(job.runs) * _SMALL):
            for run in job.runs:
                address = addresses[run.want] + run.begin
                file.read(run, address)
                if sums is not None:
                    sums.add(run, address)
            return
        if self._buffer is None:
            self._buffer = Pages(CELL, huge=job.end - job.begin > CELL // 2)  # little is had faster in small ones
        start = file.read_job(job, self._buffer.address)
        for offset, want, begin, nbytes in job.runs:
            copy(addresses[want] + begin, start + offset, nbytes)
        if sums is not None:
            for run in job.runs:
                sums.add(run, start + run.offset)


def read_here(
    sources: Sequence[Source], wants: Sequence[ReadRequest], place: Place, sums: Sums | None, tell: Tell | None
) -> None:
    """Read a little into memory of the host, in this thread; the arguments are those of ``engine.bring``."""
    addresses: dict[int, int] = {}
    lane = HostLane([File(source) for source in sources], addresses, sums)
    for job in jobs(wants):
        for _, index, _, _ in job.runs:
            if index not in addresses:
                addresses[index] = place(index)
        lane.read(job)
        if tell is not None:
            tell(job.wanted)
