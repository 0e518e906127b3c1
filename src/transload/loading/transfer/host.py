"""The lane to the memory of the host: bytes of files straight into memory, or past the page cache through a buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from transload.loading.transfer.memory import Pages, copy, view
from transload.loading.transfer.plan import CELL

if TYPE_CHECKING:
    from transload.loading.transfer.crew import Take
    from transload.loading.transfer.files import File
    from transload.loading.transfer.plan import Job, Run

__all__ = ["HostLane", "Sums"]

_SMALL = 32 << 10
"""Parts shorter than this are read together and copied out: a call for each would take longer."""


class Sums:
    """Checksums of parts as they come by, in any order; ``None`` in the place of one is not to compute any."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, int, int, int]] = []
        """Who wants it, where it begins, its length, its checksum."""

    def add(self, run: Run, address: int) -> None:
        """Note the checksum of a part that lies at an address."""
        from zlib import crc32

        self.parts.append((run.want, run.begin, run.nbytes, crc32(view(address, run.nbytes))))

    def whole(self, count: int) -> list[int]:
        """The checksum of each of so many wants, all of whose parts came by."""
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
        """Read one job."""
        file = self._files[job.file]
        if file.direct or (len(job.runs) > 1 and job.wanted < len(job.runs) * _SMALL):
            self._through_buffer(file, job)
            return
        for run in job.runs:
            address = self._addresses[run.want] + run.begin
            file.read(run, address)
            if self._sums is not None:
                self._sums.add(run, address)

    def _through_buffer(self, file: File, job: Job) -> None:
        if self._buffer is None:
            self._buffer = Pages(CELL, huge=job.end - job.begin > CELL // 2)  # little is had faster in small ones
        start = file.read_job(job, self._buffer.address)
        addresses = self._addresses
        for offset, want, begin, nbytes in job.runs:
            copy(addresses[want] + begin, start + offset, nbytes)
        if self._sums is not None:
            for run in job.runs:
                self._sums.add(run, start + run.offset)
