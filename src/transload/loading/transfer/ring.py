"""The lanes to a CUDA device: bytes of files into pinned slots, and from there by the device itself.

Each lane has two slots. While the device fetches one, the thread reads the next job into the other: all lanes together
are the ring. Lanes are kept between loads, since pinning memory takes as long as moving ten times as much of it; a
lane that is new pins its slots while the others are reading already.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from transload.loading.transfer.driver import DriverError
from transload.loading.transfer.host import HostLane
from transload.loading.transfer.memory import Pages
from transload.loading.transfer.plan import CELL

if TYPE_CHECKING:
    from transload.loading.transfer.crew import Take
    from transload.loading.transfer.driver import Driver
    from transload.loading.transfer.files import File
    from transload.loading.transfer.host import Sums
    from transload.loading.transfer.plan import Job

__all__ = ["SLOTS", "Errand", "RingLane", "borrowed", "returned"]

SLOTS = 2
"""Slots of a lane: one is read into while the device fetches the other. Four were not faster."""

KEPT = 16
"""Lanes kept between loads at most: 128 MiB."""


class Errand(NamedTuple):
    """What the lanes of one load have in common."""

    files: Sequence[File]
    addresses: Mapping[int, int]
    """Where each want goes, known when a job with it is taken."""
    fences: Mapping[str, int]
    """For each device the event after which its memory may be written."""
    sums: Sums | None = None


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
        self.errand: Errand
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
        errand, driver, slot = self.errand, self._driver, self._slots[turn]
        if job.device == "cpu":
            self._host = self._host or HostLane(errand.files, errand.addresses, errand.sums)
            self._host.read(job)
            return
        stream = self._enter(job.device)
        if slot.busy:
            driver.wait(slot.busy)
            slot.busy = 0
        if not slot.pinned and self._pins:
            self._pin(slot)
        start = errand.files[job.file].read_job(job, slot.address)
        if errand.sums is not None:
            for run in job.runs:
                errand.sums.add(run, start + run.offset)
        addresses = errand.addresses
        driver.copy([(addresses[want] + at, start + offset, n) for offset, want, at, n in job.runs], stream)
        slot.busy = self._event(turn)
        driver.record(slot.busy, stream)

    def _pin(self, slot: _Slot) -> None:
        """Where memory cannot be pinned, the driver copies it once more: slower, and right all the same."""
        try:
            self._driver.pin(slot.address, CELL)
            slot.pinned = True
        except DriverError:
            self._pins = False

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
        fence = self.errand.fences[name]
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


def borrowed(driver: Driver, count: int, errand: Errand) -> list[RingLane]:
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
        lane.done, lane.errand = 0, errand
    return lanes


def returned(lanes: Sequence[RingLane], keep: int = KEPT) -> None:
    """Keep lanes for the next load; those that are too many, or not sound, are given up."""
    for lane in lanes:
        del lane.errand
    sound = [lane for lane in lanes if lane.sound]
    with _idle.lock:
        room = max(0, keep - len(_idle.lanes))
        _idle.lanes += sound[:room]
    for lane in sound[room:]:
        lane.close()
