"""Read requests, the jobs they are split into, and the lane that reads jobs into host memory.

``jobs`` divides a file into cells of equal size; all that is requested of one cell is one job. So neighbouring small
storages are read together, a large storage is read by several jobs in parallel, and a job always fits the slot of
pinned memory that it may have to pass through. Cells begin at multiples of their size, so jobs can also be read with
``O_DIRECT``, which needs aligned positions, lengths and addresses. A ``HostLane`` reads jobs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from transload.frozen import NamedTuple
from transload.io.memory import PAGE, FreshPages, Pages, copy, memory_at
from transload.io.sources import Source

CELL = 4 << 20
"""Bytes of a cell. Of 2, 4, 8 and 16 MiB, measured on an H200 with 16 cores, 4 and 8 saturate the bus, and 4 takes less
pinned memory; with 2 the threads wait for one another."""

FEW_BYTES = 16 << 20
"""Fewer bytes than this are read by the calling thread: starting others takes longer."""

_SMALL = 32 << 10
"""Runs shorter than this on average are read together and copied out: a system call for each would take longer."""

_DIRECT = 1 << 20
"""Bytes of one read past the page cache. Eight threads read a disk at 3.6 to 4.2 GB/s; with 4 MiB at 2.8 to 3.2."""

SLOT_PAIR = 2 * CELL
_new = tuple.__new__  # a third of the time that calling the class takes, once per tensor

NextJob = Callable[[], "Job | None"]
ReportProgress = Callable[[int], None]
"""Gets the number of bytes that were read since the last call."""
AddressOf = Callable[[int], int]
"""Returns the address to read a request to; it gets the index of the request."""


class ReadRequest(NamedTuple):
    """Bytes of a file to read into memory on a device: those of a storage, or of a parameter."""

    file: int
    """Index of the open file."""
    offset: int
    nbytes: int
    device: str = "cpu"


class Run(NamedTuple):
    """The part of a job that belongs to one request."""

    offset: int
    """Where it begins in the file."""
    request: int
    begin: int
    """Where it begins in the memory of the request."""
    nbytes: int


class Job:
    """One read: a range of a file within one cell, and the requests it serves, all for one device."""

    __slots__ = ("begin", "device", "end", "file", "runs", "wanted")

    def __init__(self, file: int, device: str, runs: tuple[Run, ...]) -> None:
        self.file = file
        self.device = device
        self.runs = runs
        self.begin = runs[0].offset
        self.end = max([run[0] + run[3] for run in runs])
        self.wanted = sum([run[3] for run in runs])
        """The number of requested bytes."""


def jobs(requests: Sequence[ReadRequest], cell: int = CELL, gap: int = Source.gap) -> Iterator[Job]:
    """The jobs that serve all requests, in file order.

    >>> for job in jobs([ReadRequest(0, 2, 5), ReadRequest(0, 8, 12)], cell=16):
    ...     print(job.begin, job.end, [(run.request, run.begin, run.nbytes) for run in job.runs])
    2 16 [(0, 0, 5), (1, 0, 8)]
    16 20 [(1, 8, 4)]
    """
    together: list[Run] = []
    file, device, start, stop, reach = -1, "", 0, 0, 0
    for index in sorted(range(len(requests)), key=requests.__getitem__):
        in_file, offset, nbytes, on_device = requests[index]
        begin = 0
        while begin < nbytes:
            at = offset + begin
            if not start <= at < stop or at > reach + gap or in_file != file or on_device != device:
                if together:
                    yield Job(file, device, tuple(together))
                together = []
                file, device, reach = in_file, on_device, at
                start = at - at % cell
                stop = start + cell
            count = nbytes - begin if offset + nbytes <= stop else stop - at
            together.append(_new(Run, (at, index, begin, count)))
            begin += count
            reach = max(reach, at + count)
    if together:
        yield Job(file, device, tuple(together))


def file_ends(missing: int) -> str:
    """What to say of bytes that a file ends before."""
    return f"the file ends {missing:,} bytes before they do"


def can_read_to(kind: str) -> bool:
    """Whether bytes can be read into the memory of devices of a kind."""
    if kind != "cuda":
        return kind == "cpu"
    from transload.io.cuda_driver import cuda_driver

    return cuda_driver() is not None


class Settings(NamedTuple):
    """What the caller chose; ``None`` leaves the choice to ``choose``."""

    threads: int | None = None
    pinned: int | None = None
    """The most bytes of pinned memory to use."""
    direct: bool | None = None
    """Whether to bypass the page cache."""


# -- files


class ShortReadError(Exception):
    """A file ends before a request does: the index of the request, and how many of its bytes exist.

    The caller, which knows the name of the storage, turns it into an error for the user.
    """

    def __init__(self, request: int, received: int) -> None:
        super().__init__(request, received)
        self.request = request
        self.received = received


class File:
    """A source to read from; after ``go_direct``, through a second descriptor that bypasses the page cache.

    ``ahead`` is as for ``Source.readinto``: false if threads read all that is needed at the same time.
    """

    direct = False
    """Whether reads bypass the page cache."""
    _direct_descriptor = -1

    def __init__(self, source: Source, *, ahead: bool = False) -> None:
        self._source = source
        self._ahead = ahead
        self.far = source.far

    @property
    def descriptor(self) -> int:
        """The file descriptor; -1 for a source that is not a file on disk."""
        return getattr(self._source, "descriptor", -1)

    def go_direct(self) -> None:
        """Bypass the page cache from now on, if the file and the system support that."""
        flag = getattr(os, "O_DIRECT", 0)
        if flag and self.descriptor >= 0:
            with suppress(OSError):
                # Through its descriptor: the path may lead to another file by now.
                self._direct_descriptor = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | flag)
                self.direct = True

    def close(self) -> None:
        """Close the second descriptor."""
        if self.direct:
            os.close(self._direct_descriptor)
            self.direct = False

    def check(self, runs: Sequence[Run]) -> None:
        """``ShortReadError`` if a file on disk is, or has become, too short for some runs."""
        size = os.fstat(self.descriptor).st_size
        if size < max(run.offset + run.nbytes for run in runs):
            raise self.ended(runs, size)

    def read(self, run: Run, address: int) -> None:
        """Read a run to an address; ``ShortReadError`` if the file ends before."""
        received = self._source.readinto(run.offset, memory_at(address, run.nbytes), ahead=self._ahead)
        if received < run.nbytes:
            raise self.ended([run], run.offset + received)

    def read_job(self, job: Job, slot: int) -> int:
        """Read a job into a slot of a cell's size; return the difference between addresses there and file positions."""
        start = slot - job.begin // CELL * CELL
        begin, length = job.begin, job.end - job.begin
        if self.direct:  # read whole blocks
            position, end = begin // PAGE * PAGE, (job.end + PAGE - 1) // PAGE * PAGE
            with suppress(OSError, OverflowError):  # the file system refuses after all
                while position < job.end:
                    part = memory_at(start + position, min(_DIRECT, end - position))
                    count = os.preadv(self._direct_descriptor, [part], position)
                    position += count
                    if not count or position % PAGE:  # the file ends
                        break
            if position >= job.end:
                return start
        received = self._source.readinto(begin, memory_at(start + begin, length), ahead=self._ahead)
        if received < length:
            raise self.ended(job.runs, begin + received)
        return start

    def ended(self, runs: Sequence[Run], position: int) -> ShortReadError:
        """The error for the first run that reaches beyond ``position``, where the file ends."""
        run = next(run for run in runs if run.offset + run.nbytes > position)
        if self.descriptor >= 0:
            position = min(position, os.fstat(self.descriptor).st_size)
        return ShortReadError(run.request, max(0, run.begin + position - run.offset))


# -- into host memory


class Checksums:
    """Collects the CRC-32 of each run, in any order, and combines them by request."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, int, int, int]] = []
        """Each run: its request, where it begins there, its length, its checksum."""

    def add(self, run: Run, address: int) -> None:
        """Compute the checksum of a run at an address."""
        from zlib import crc32

        self.parts.append((run.request, run.begin, run.nbytes, crc32(memory_at(address, run.nbytes))))

    def whole(self, count: int) -> list[int]:
        """The checksum of each of ``count`` requests, after all their runs were added."""
        from transload.io.checksums import combined

        by_request = combined(self.parts)
        return [by_request.get(request, 0) for request in range(count)]


class HostLane:
    """Reads jobs into host memory. ``addresses`` has the address of each request before a job with it is taken."""

    def __init__(
        self,
        files: Sequence[File],
        addresses: Mapping[int, int],
        checksums: Checksums | None = None,
        fresh: FreshPages | None = None,
    ) -> None:
        self.done = 0
        self._files = files
        self._addresses = addresses
        self._sums = checksums
        self._fresh = fresh or FreshPages()
        self._buffer: Pages | None = None

    def run(self, next_job: NextJob) -> None:
        """Read jobs until there are no more."""
        while (job := next_job()) is not None:
            self.read(job)
            self.done += job.wanted

    def read(self, job: Job) -> None:
        """Read one job: run by run, or through a buffer if each read would cost more than a copy."""
        file, addresses, checksums = self._files[job.file], self._addresses, self._sums
        apart = len(job.runs) == 1 or (job.wanted >= len(job.runs) * _SMALL and not file.far)
        if apart and not file.direct:
            for run in job.runs:
                address = addresses[run.request] + run.begin
                self._fresh.populate(address, run.nbytes)
                file.read(run, address)
                if checksums is not None:
                    checksums.add(run, address)
            return
        if self._buffer is None:
            self._buffer = Pages(CELL, huge=job.end - job.begin > CELL // 2)  # for few bytes, small pages are faster
        start = file.read_job(job, self._buffer.address)
        for offset, request, begin, nbytes in job.runs:
            copy(addresses[request] + begin, start + offset, nbytes)
        if checksums is not None:
            for run in job.runs:
                checksums.add(run, start + run.offset)
