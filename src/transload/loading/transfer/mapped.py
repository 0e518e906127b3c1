"""A lane that reads nothing: the device fetches from the page cache, where a file lies already.

Pages of a file are mapped and pinned for reading, some at a time, and let go when the device has them. One thread does
that as fast as two or three read through pinned slots, and no faster with more threads: it is for machines with few
processors.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING, Any

from transload.loading.transfer.driver import DriverError
from transload.loading.transfer.memory import PAGE
from transload.loading.transfer.ring import SLOTS, RingLane

if TYPE_CHECKING:
    from transload.loading.transfer.crew import Take
    from transload.loading.transfer.driver import Driver
    from transload.loading.transfer.files import File
    from transload.loading.transfer.plan import Job, Run
    from transload.loading.transfer.ring import Errand

__all__ = ["MappedLane"]

_TOGETHER = 8
"""Jobs pinned at once: 32 MiB."""

_UNDER_WAY = 2
"""Such parts at a time: the device fetches one while the next is pinned."""


class _Part:
    """Some pages of a file, mapped for reading."""

    def __init__(self, file: File, runs: Sequence[Run]) -> None:
        begin = runs[0].offset
        start = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        end = max(run.offset + run.nbytes for run in runs)
        self.file = file
        self.runs = runs
        self.nbytes = (end - start + PAGE - 1) // PAGE * PAGE
        self.address = _libc().mmap(None, self.nbytes, mmap.PROT_READ, mmap.MAP_SHARED, file.plain, start)
        if self.address in (None, ctypes.c_void_p(-1).value):
            raise MemoryError
        self.shift = self.address - start
        """To be added to a position in the file."""
        self.event = 0

    def close(self) -> None:
        _libc().munmap(self.address, self.nbytes)


class MappedLane(RingLane):
    """Goes over to pinned slots, as the others have, where pages cannot be pinned."""

    def __init__(self, driver: Driver, errand: Errand) -> None:
        super().__init__(driver)
        self.errand = errand
        self._parts: deque[_Part] = deque()
        self._made = 0

    def run(self, take: Take) -> None:
        """Take some jobs at a time until there are none."""
        turn = 0
        with self._at_work():
            while together := _some(take):
                for jobs in _by_place(together):
                    turn = self._together(jobs, turn)
                    self.done += sum(job.wanted for job in jobs)
            while self._parts:
                self._fetched()

    def _together(self, jobs: list[Job], turn: int) -> int:
        if jobs[0].device == "cpu" or not self._fetch(jobs):
            for job in jobs:
                self._bring(job, turn % len(self._slots))
                turn += 1
        return turn

    def _fetch(self, jobs: list[Job]) -> bool:
        """Let the device fetch; false if it cannot, or if the bytes are to be looked at here.

        Nobody here may touch mapped pages: where somebody else has just cut the file, that ends the process.
        """
        file = self.errand.files[jobs[0].file]
        if file.plain < 0 or file.direct or self.errand.sums is not None:
            return False
        stream = self._enter(jobs[0].device)
        if len(self._parts) == _UNDER_WAY:
            self._fetched()
        runs = [run for job in jobs for run in job.runs]
        file.check(runs)  # behind its end a page is full of zeros
        part = self._pinned(file, runs)
        if part is None:
            return False
        part.event = self._event(SLOTS + self._made % _UNDER_WAY)
        self._made += 1
        addresses = self.errand.addresses
        self._driver.copy([(addresses[want] + at, part.shift + offset, n) for offset, want, at, n in runs], stream)
        self._driver.record(part.event, stream)
        return True

    def _pinned(self, file: File, runs: Sequence[Run]) -> _Part | None:
        try:
            part = _Part(file, runs)
        except MemoryError:
            return None
        try:
            self._driver.pin(part.address, part.nbytes, read_only=True)
        except DriverError:
            part.close()
            return None
        self._parts.append(part)
        return part

    def _fetched(self) -> None:
        """Wait for the oldest part, and let it go."""
        part = self._parts[0]
        self._driver.wait(part.event)
        self._parts.popleft()
        self._let_go(part)
        part.file.check(part.runs)  # it may have been cut meanwhile

    def _let_go(self, part: _Part) -> None:
        self._driver.unpin(part.address)
        part.close()

    def _finish(self) -> None:
        super()._finish()
        with ExitStack() as all_of_them:
            while self._parts:
                all_of_them.callback(self._let_go, self._parts.popleft())


def _some(take: Take) -> list[Job]:
    """The next few jobs."""
    found: list[Job] = []
    while len(found) < _TOGETHER and (job := take()) is not None:
        found.append(job)
    return found


def _by_place(jobs: list[Job]) -> list[list[Job]]:
    """Jobs in groups of one file and one device that lie close together."""
    groups: list[list[Job]] = []
    for job in jobs:
        last = groups[-1][-1] if groups else None
        if (
            last is None
            or (job.file, job.device) != (last.file, last.device)
            or not 0 <= job.begin - last.end <= job.end - job.begin
        ):
            groups.append([])
        groups[-1].append(job)
    return groups


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    word, size = ctypes.c_int, ctypes.c_size_t
    libc.mmap.argtypes = (ctypes.c_void_p, size, word, word, word, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, size)
    return libc
