"""The lanes of the transfer engine that lead to CUDA devices.

A ``RingLane`` reads into slots of pinned memory, from which the device fetches. Lanes are kept between loads, since
pinning memory takes longer than reading into it. A ``MappedLane`` pins pages of the file itself, so that the device
fetches from the page cache.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any

from transload.io.cuda_driver import DriverError
from transload.io.memory import PAGE, Pages
from transload.loading.engine import CELL, HostLane

if TYPE_CHECKING:
    from transload.io.cuda_driver import Driver
    from transload.loading.engine import Choice, File, Job, Run, Take, Transfer

__all__ = ["KEPT", "SLOTS", "MappedLane", "RingLane", "borrowed", "cuda_lanes", "returned"]


@contextmanager
def cuda_lanes(transfer: Transfer, choice: Choice) -> Iterator[list[RingLane]]:
    """Lanes for one transfer; kept for the next one afterwards."""
    from transload.io.cuda_driver import cuda_driver

    driver = cuda_driver()
    if driver is None:
        raise RuntimeError("there is no CUDA driver to speak to")
    mapped: list[RingLane] = [MappedLane(driver, transfer)] if choice.mapped else []
    ring = borrowed(driver, choice.lanes - len(mapped), transfer)
    try:
        yield [*ring, *mapped]
    finally:
        returned(ring)
        returned(mapped, keep=0)


SLOTS = 2
"""Slots of a lane: one is read into while the device fetches the other. Four were not faster."""

KEPT = 16
"""Lanes kept between loads at most: 128 MiB."""


class _Slot:
    """A cell's worth of pinned memory."""

    def __init__(self, address: int) -> None:
        self.address = address
        self.pinned = False
        self.busy = 0
        """The event that happens when the device has fetched what is in it; 0 if there is nothing."""


class RingLane:
    """One thread's slots, and its streams and events on each device it has spoken to."""

    def __init__(self, driver: Driver) -> None:
        self.done = 0
        self.sound = True
        self.transfer: Transfer
        self._driver = driver
        self._pages = Pages(SLOTS * CELL)
        self._slots = [_Slot(self._pages.address + index * CELL) for index in range(SLOTS)]
        self._streams: dict[int, int] = {}
        self._events: dict[tuple[int, int], int] = {}
        self._pins = True
        self._spoken: set[int] = set()
        self._device = -1
        self._before = 0
        self._fence = 0
        self._host: HostLane | None = None

    def run(self, take: Take) -> None:
        """Take jobs until there are none; then, or when something fails, wait for what the devices still fetch."""
        turn = 0
        with self._at_work():
            while (job := take()) is not None:
                self._bring(job, turn % SLOTS)
                self.done += job.wanted
                turn += 1

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """While jobs are done. Afterwards nothing is under way, and the thread speaks to the device it did before."""
        with ExitStack() as last:
            last.callback(self._back)
            last.callback(self._finish)
            yield

    def _bring(self, job: Job, turn: int) -> None:
        transfer, driver, slot = self.transfer, self._driver, self._slots[turn]
        if job.device == "cpu":
            self._host = self._host or HostLane(transfer.files, transfer.addresses, transfer.sums)
            self._host.read(job)
            return
        stream = self._enter(job.device)
        if slot.busy:
            driver.wait(slot.busy)
            slot.busy = 0
        if not slot.pinned and self._pins:
            try:
                driver.pin(slot.address, CELL)
                slot.pinned = True
            except DriverError:  # the driver then copies the memory once more: slower, and right all the same
                self._pins = False
        start = transfer.files[job.file].read_job(job, slot.address)
        if transfer.sums is not None:
            for run in job.runs:
                transfer.sums.add(run, start + run.offset)
        addresses = transfer.addresses
        driver.copy([(addresses[want] + at, start + offset, n) for offset, want, at, n in job.runs], stream)
        slot.busy = self._event(turn)
        driver.record(slot.busy, stream)

    def _enter(self, name: str) -> int:
        """The stream on a device, which waits for the memory there to be free."""
        device = int(name.partition(":")[2] or 0)
        if device != self._device:
            if self._device < 0:
                self._before = self._driver.current()
            self._driver.enter(device)
            self._device, self._fence = device, 0
            self._spoken.add(device)
        if device not in self._streams:
            self._streams[device] = self._driver.stream()
        stream = self._streams[device]
        fence = self.transfer.fences[name]
        if fence != self._fence:
            self._driver.follow(stream, fence)
            self._fence = fence
        return stream

    def _event(self, turn: int) -> int:
        key = (self._device, turn)
        if key not in self._events:
            self._events[key] = self._driver.event()
        return self._events[key]

    def _finish(self) -> None:
        """Wait for all devices, whatever one of them answers. A lane that does not know is not used again."""
        self.sound, self._host = False, None
        with ExitStack() as all_of_them:
            for device in self._spoken & self._streams.keys():
                all_of_them.callback(self._wait_for, device)
        for slot in self._slots:
            slot.busy = 0
        self.sound = True

    def _wait_for(self, device: int) -> None:
        with suppress(DriverError):  # a device that has failed says so again
            self._driver.enter(device)
        self._driver.finish(self._streams[device])

    def _back(self) -> None:
        """The caller may be the thread of the program, which has a device of its own."""
        if self._device >= 0:
            self._spoken.clear()
            self._device, self._fence = -1, 0
            self._driver.back(self._before)

    def close(self) -> None:
        """Give everything back, as far as the device does not refuse."""
        driver = self._driver
        with suppress(DriverError), ExitStack() as last:
            last.callback(driver.back, driver.current())
            for device, stream in self._streams.items():
                driver.enter(device)
                for slot in self._slots:
                    if slot.pinned:
                        slot.pinned = False
                        driver.unpin(slot.address)
                driver.discard([stream], [event for key, event in self._events.items() if key[0] == device])


class _Idle:
    """Lanes that nobody uses at the moment."""

    def __init__(self) -> None:
        self.lanes: list[RingLane] = []
        self.lock = Lock()

    def forget(self) -> None:
        """In a child process: it has its parent's memory, but not its place at the driver."""
        self.lanes = []
        self.lock = Lock()


_idle = _Idle()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.forget)


def borrowed(driver: Driver, count: int, transfer: Transfer) -> list[RingLane]:
    """Lanes for one load: kept ones first, then new ones."""
    with _idle.lock:
        lanes = [_idle.lanes.pop() for _ in range(min(count, len(_idle.lanes)))]
    try:
        lanes += [RingLane(driver) for _ in range(count - len(lanes))]
    except BaseException:
        with _idle.lock:
            _idle.lanes += lanes
        raise
    for lane in lanes:
        lane.done, lane.transfer = 0, transfer
    return lanes


def returned(lanes: Sequence[RingLane], keep: int = KEPT) -> None:
    """Keep lanes for the next load; those that are too many, or not sound, are given up."""
    for lane in lanes:
        del lane.transfer
    sound = [lane for lane in lanes if lane.sound]
    with _idle.lock:
        room = max(0, keep - len(_idle.lanes))
        _idle.lanes += sound[:room]
    for lane in sound[room:]:
        lane.close()


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

    def __init__(self, driver: Driver, transfer: Transfer) -> None:
        super().__init__(driver)
        self.transfer = transfer
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
        file = self.transfer.files[jobs[0].file]
        if file.plain < 0 or file.direct or self.transfer.sums is not None:
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
        addresses = self.transfer.addresses
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
