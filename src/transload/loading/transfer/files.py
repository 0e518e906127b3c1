"""The files a transfer reads from, buffered or past the page cache."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from transload.loading.transfer.memory import PAGE, view
from transload.loading.transfer.plan import CELL

if TYPE_CHECKING:
    from transload.io.sources import Source
    from transload.loading.transfer.plan import Job, Run

__all__ = ["Ended", "File"]


class Ended(Exception):  # noqa: N818 - a signal to the one who knows the names of storages
    """A file ends before what is wanted of it: the index of the want, and how many bytes of it there are."""

    def __init__(self, want: int, came: int) -> None:
        super().__init__(want, came)
        self.want = want
        self.came = came


class File:
    """A source to read from; with ``direct``, past the page cache, by a second descriptor of the same file."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._descriptor = -1

    @property
    def direct(self) -> bool:
        """Whether it is read past the page cache."""
        return self._descriptor >= 0

    @property
    def plain(self) -> int:
        """The descriptor, if this is a file of the system as it lies there; else -1."""
        return getattr(self._source, "descriptor", -1)

    def go_direct(self) -> bool:
        """Read past the page cache from now on; false where the file or the system cannot do that."""
        flag = getattr(os, "O_DIRECT", 0)
        if not flag or self.plain < 0:
            return False
        try:
            # By its descriptor: the path may lead to another file by now.
            self._descriptor = os.open(f"/proc/self/fd/{self.plain}", os.O_RDONLY | flag)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close what was opened here."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def read(self, run: Run, address: int) -> None:
        """Read a part to an address; ``Ended`` if there is less of it."""
        came = self._source.readinto(run.offset, view(address, run.nbytes))
        if came < run.nbytes:
            raise self._ended([run], run.offset + came)

    def check(self, runs: Sequence[Run]) -> None:
        """``Ended`` if a file of the system is too short, or has become so, for some parts."""
        size = os.fstat(self.plain).st_size
        if size < max(run.offset + run.nbytes for run in runs):
            raise self._ended(runs, size)

    def read_job(self, job: Job, slot: int) -> int:
        """Read a whole job into a slot of a cell's size, by its address; what to add to a position to get there."""
        start = slot - job.begin // CELL * CELL
        if self.direct and self._read_direct(job, start):
            return start
        begin, length = job.begin, job.end - job.begin
        came = self._source.readinto(begin, view(start + begin, length))
        if came < length:
            raise self._ended(job.runs, begin + came)
        return start

    def _read_direct(self, job: Job, start: int) -> bool:
        """Whole blocks; false if the file system did not mean it when it let us open the file so, or the file ends."""
        position = job.begin // PAGE * PAGE
        end = (job.end + PAGE - 1) // PAGE * PAGE
        while position < job.end:
            try:
                count = os.preadv(self._descriptor, [view(start + position, end - position)], position)
            except (OSError, OverflowError):
                return False
            position += count
            if position < job.end and (not count or position % PAGE):
                return False
        return True

    def _ended(self, runs: Sequence[Run], position: int) -> Ended:
        """The first of some parts that reaches beyond a position, where a file ends or has ended before."""
        run = next(run for run in runs if run.offset + run.nbytes > position)
        if self.plain >= 0:
            position = min(position, os.fstat(self.plain).st_size)
        return Ended(run.want, max(0, run.begin + position - run.offset))
