"""The transfer engine: moves ranges of files into memory, of the host or of CUDA devices, by many threads.

``choose`` decides how many threads read the ``jobs`` and in which way; ``work`` runs them; ``bring`` puts it together.
A ``HostLane`` is one thread's work for memory of the host. For CUDA devices a ``RingLane`` reads into slots of pinned
memory, from which the device fetches. Lanes are kept between loads, since pinning memory takes longer than reading into
it. A ``MappedLane`` pins pages of the file itself, so that the device fetches from the page cache.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from transload.errors import CannotReadError
from transload.frozen import facts
from transload.io.cuda_driver import DriverError
from transload.io.memory import PAGE, Pages, huge_pages_pay, in_huge_pages, libc, view
from transload.io.sources import FileSource
from transload.loading.jobs import (
    CELL,
    LITTLE,
    SLOT_PAIR,
    File,
    HostLane,
    Job,
    Place,
    ReadRequest,
    Run,
    Settings,
    Sums,
    Take,
    Tell,
    jobs,
)

if TYPE_CHECKING:
    from transload.io.cuda_driver import Driver
    from transload.io.sources import Source

# -- the choice of a way

MOST_RING = 12
"""Lanes to a device. On an H200 at PCIe 5 eight bring 87 % of what the bus carries, twelve 94 %, sixteen no more."""
_MOST_HOST = 16
_MOST_DIRECT = 8  # readings past the page cache at the same time: they wait for the disk, not for a processor
_FEW_CORES = 2
"""With so few the device fetches bytes from the page cache itself: 18.8 GB/s with one core, against 7.6 by the ring;
20.9 with two, against 14.4; with four the ring is faster."""
_COLD = 0.5
_WARM = 0.95
_SAMPLES = 64


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
    """Whether huge pages are available."""


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
    nbytes = facts.host + facts.cuda
    cold = facts.cached is not None and facts.cached < _COLD
    warm = facts.cached is not None and facts.cached >= _WARM
    direct = facts.plain and (settings.direct if settings.direct is not None else cold and nbytes >= LITTLE)
    few = facts.cores <= _FEW_CORES and settings.threads is None and settings.pinned is None
    mapped = facts.mappable and warm and few and facts.cuda >= LITTLE and not direct
    lanes = 1
    if facts.plain and (settings.threads is not None or nbytes >= LITTLE):
        most = MOST_RING if facts.cuda else _MOST_HOST
        lanes = min(most, max(facts.cores, _MOST_DIRECT if direct else 1))
        lanes = lanes if settings.threads is None else settings.threads
        if facts.cuda and settings.pinned is not None:
            lanes = min(lanes, settings.pinned // SLOT_PAIR)
        lanes = max(1, min(lanes, -(-nbytes // CELL)))  # no more than there is work for
    made = Choice(lanes, facts.cuda > 0, mapped, direct, facts.huge and facts.host >= LITTLE)
    why = ["1 thread" if lanes == 1 else f"{lanes} threads"]
    if made.pinned:
        why.append(f"pinned {made.pinned >> 20} MiB")
    if mapped:
        why.append("the device fetches from the page cache")
    elif direct:
        why.append("past the page cache")
    elif warm:
        why.append("from the page cache")
    if facts.cached is not None and not warm:
        percent = f"{100 * facts.cached:.0f} %"
        why.append(f"which holds {percent} of it" if direct else f"{percent} cached")
    if made.huge:
        why.append("huge pages")
    return replace(made, why=", ".join(why))


def forecast(path: str, host: int, cuda: int) -> Choice:
    """The choice for so many bytes of a file; for a directory, as for a file whose place is not known yet."""
    if host + cuda < LITTLE:
        return choose(Facts(host, cuda, 1, None))
    from transload.io.pool import cores

    cached = None
    with suppress(CannotReadError), closing(FileSource(path)) as file:
        cached = cached_share(file.descriptor, 0, file.size)
    return choose(Facts(host, cuda, cores(), cached, huge=host >= LITTLE and huge_pages_pay(host)))


def cached_share(descriptor: int, begin: int, end: int) -> float | None:
    """The part of a range that is in memory, by samples, from 0 to 1; ``None`` where the system does not say.

    A read that is told not to wait fails on what would have to be fetched. Files that always lie in memory (tmpfs), and
    network file systems, do not know such reads.
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


# -- threads

_TOLD_EVERY = 0.05
"""Seconds between two looks at how far the threads are."""


class Lane(Protocol):
    """One thread's work."""

    done: int
    """Bytes it has brought in so far."""

    def run(self, take: Take) -> None:
        """Take jobs, and work, until there are none. When this returns or raises, nothing is under way any more."""
        ...


def work(jobs: Iterable[Job], lanes: Sequence[Lane], tell: Tell | None = None) -> None:
    """Let lanes do all jobs at the same time; a single one does them here. Raises what a lane has raised first.

    ``jobs`` may be made one by one: the first are done while the last are prepared. ``tell`` is called here, in the
    thread of the caller, with numbers of bytes as they come.
    """
    if len(lanes) == 1:
        _work_alone(jobs, lanes[0], tell)
        return
    queue: SimpleQueue[Job | None] = SimpleQueue()
    news: SimpleQueue[None] = SimpleQueue()
    errors: list[BaseException] = []
    # Which lanes have begun and ended is noted here, since threads do not tell it reliably: after an interrupted
    # ``join`` Python before 3.13 takes a thread for dead that is still running.
    begun: list[Lane] = []
    ended: list[Lane] = []
    stopped = False

    def take() -> Job | None:
        job = queue.get()
        if job is None or stopped:
            queue.put(None)  # for the others, and those who ask again
            return None
        return job

    def run(lane: Lane) -> None:
        nonlocal stopped
        begun.append(lane)  # before the look at the sign to stop: who comes too late must not touch the lane
        try:
            if not stopped:
                lane.run(take)
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            errors.append(error)
            stopped = True
        finally:
            ended.append(lane)
            news.put(None)

    def sleep() -> None:
        """Wait until a thread ends, but not long: a signal must be seen on every system."""
        with suppress(Empty):
            news.get(timeout=_TOLD_EVERY)

    threads = [Thread(target=run, args=(lane,), daemon=True) for lane in lanes]
    started = told = 0
    try:
        with suppress(RuntimeError):  # a limit of the system, or Python is about to end
            for thread in threads:
                thread.start()
                started += 1
        if started:
            for job in jobs:
                if stopped:
                    break
                queue.put(job)
            queue.put(None)
        else:
            _work_alone(jobs, lanes[0], tell)
        while len(ended) < started or told < sum(lane.done for lane in lanes if started):
            if len(ended) < started:
                sleep()
            done = sum(lane.done for lane in lanes)
            if tell and done > told and not errors:
                tell(done - told)
            told = done
    finally:
        # Stop the threads that still run, and wait until they have ended, whoever interrupts.
        waits = True
        while waits:
            with suppress(KeyboardInterrupt):  # what has led here is raised when they have ended
                stopped = True
                while len(ended) < len(begun):
                    queue.put(None)
                    sleep()
                for thread in threads:
                    if thread.is_alive():
                        thread.join()
                waits = False
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()  # an error that held itself by its frames would hold the memory there, too


def _work_alone(jobs: Iterable[Job], lane: Lane, tell: Tell | None) -> None:
    waiting = iter(jobs)
    told = 0

    def take() -> Job | None:
        nonlocal told
        if tell and lane.done > told:
            tell(lane.done - told)
            told = lane.done
        return next(waiting, None)

    lane.run(take)


# -- all of it


class DirectFile(File):
    """A source to read from; after ``go_direct``, past the page cache, by a second descriptor of the same file."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._descriptor = -1

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
        self.direct = True
        return True

    def close(self) -> None:
        """Close what was opened here."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor, self.direct = -1, False

    def check(self, runs: Sequence[Run]) -> None:
        """``Ended`` if a file of the system is too short, or has become so, for some parts."""
        size = os.fstat(self.plain).st_size
        if size < max(run.offset + run.nbytes for run in runs):
            raise self.ended(runs, size)

    def read_job(self, job: Job, slot: int) -> int:
        """Read a whole job into a slot of a cell's size, as ``File`` does; directly if that was asked for."""
        start = slot - job.begin // CELL * CELL
        return start if self.direct and self._read_direct(job, start) else super().read_job(job, slot)

    def _read_direct(self, job: Job, start: int) -> bool:
        """Read whole blocks; false if the file system cannot do that after all, or the file ends."""
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


def bring(
    sources: Sequence[Source],
    wants: Sequence[ReadRequest],
    place: Place,
    *,
    settings: Settings = Settings(),  # noqa: B008 - a named tuple does not change
    fresh: bool = True,
    tell: Tell | None = None,
    sums: Sums | None = None,
) -> Choice:
    """Bring requested bytes into memory; how it was done.

    ``place`` gives the address for the request of an index; it is asked once for each, in the order of the file, and
    the memory must stay until this returns. ``fresh`` says that nobody has touched it yet. All devices but ``cpu`` must
    be CUDA devices, with an index. ``tell`` is called with numbers of bytes as they come; ``sums`` collects checksums.
    ``Ended`` names the request that a file is too short for. Whatever is raised, nothing is under way any more then.
    """
    files = [DirectFile(source) for source in sources]
    choice = choose(_facts(files, wants, fresh=fresh), settings)
    transfer = Transfer(files, wants, place, sums, choice.huge)
    try:
        if choice.direct:
            for file in files:
                file.go_direct()
        if choice.ring:
            with cuda_lanes(transfer, choice) as lanes:
                work(transfer.jobs(), lanes, tell)
        else:
            hosts = [HostLane(files, transfer.addresses, sums) for _ in range(choice.lanes)]
            work(transfer.jobs(), hosts, tell)
    finally:
        for file in files:
            file.close()
    return choice


@dataclass
class Transfer:
    """What the lanes of one transfer have in common; where everything goes is filled in while jobs are prepared."""

    files: Sequence[DirectFile]
    wants: Sequence[ReadRequest]
    place: Place
    sums: Sums | None
    huge: bool = False
    addresses: dict[int, int] = field(default_factory=dict)
    """Where each request goes, known when a job with it is taken."""
    fences: dict[str, int] = field(default_factory=dict)
    """For each device the event after which its memory may be written."""
    _events: list[Any] = field(default_factory=list)

    def jobs(self) -> Iterator[Job]:
        """The jobs, each when there is memory for it."""
        addresses, wants = self.addresses, self.wants
        for job in jobs(wants):
            known = len(addresses)
            for _, index, _, _ in job.runs:
                if index not in addresses:
                    addresses[index] = self.place(index)
                    if self.huge and job.device == "cpu":
                        in_huge_pages(addresses[index], wants[index].nbytes)
            if job.device != "cpu" and (len(addresses) > known or job.device not in self.fences):
                self._fence(job.device)
            yield job

    def _fence(self, device: str) -> None:
        """Memory may still be in use by what its last owner has started: let the copies wait for that."""
        import torch

        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(torch.device(device)))
        self._events.append(event)
        self.fences[device] = event.cuda_event


def _facts(files: Sequence[File], wants: Sequence[ReadRequest], *, fresh: bool) -> Facts:
    cuda = sum(want.nbytes for want in wants if want.device != "cpu")
    host = sum(want.nbytes for want in wants) - cuda
    plain = all(file.plain >= 0 for file in files)
    if host + cuda < LITTLE:
        return Facts(host, cuda, 1, None, plain)
    from transload.io.pool import cores

    cached, mappable = None, False
    if plain:
        spans: dict[int, list[int]] = {}
        for want in wants:
            span = spans.setdefault(want.file, [want.offset, 0])
            span[0] = min(span[0], want.offset)
            span[1] = max(span[1], want.offset + want.nbytes)
        # Of the largest file: the others will be alike.
        largest, (begin, end) = max(spans.items(), key=lambda item: item[1][1] - item[1][0])
        cached = cached_share(files[largest].plain, begin, end)
    if cuda and plain:
        from transload.io.cuda_driver import cuda_driver

        driver = cuda_driver()
        devices = {want.device for want in wants} - {"cpu"}
        mappable = driver is not None and all(driver.can_pin_read_only(int(name.partition(":")[2])) for name in devices)
    return Facts(
        host, cuda, cores(), cached, plain, mappable=mappable, huge=fresh and host >= LITTLE and huge_pages_pay(host)
    )


# -- to CUDA devices


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
        self._turn = 0
        self._spoken: set[int] = set()
        self._device = -1
        self._before = 0
        self._fence = 0
        self._host: HostLane | None = None

    def run(self, take: Take) -> None:
        """Take jobs until there are none; then, or when something fails, wait for what the devices still fetch.

        Afterwards the thread speaks to the device it did before.
        """
        with ExitStack() as last:
            last.callback(self._back)
            last.callback(self._finish)
            self._work(take)

    def _work(self, take: Take) -> None:
        while (job := take()) is not None:
            self._bring(job)
            self.done += job.wanted

    def _bring(self, job: Job) -> None:
        transfer, driver = self.transfer, self._driver
        if job.device == "cpu":
            self._host = self._host or HostLane(transfer.files, transfer.addresses, transfer.sums)
            self._host.read(job)
            return
        stream = self._enter(job.device)
        turn = self._turn = (self._turn + 1) % SLOTS
        slot = self._slots[turn]
        if slot.busy:
            driver.wait_event(slot.busy)
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
        driver.record_event(slot.busy, stream)

    def _enter(self, name: str) -> int:
        """The stream on a device, which waits for the memory there to be free."""
        device = int(name.partition(":")[2] or 0)
        if device != self._device:
            if self._device < 0:
                self._before = self._driver.current_context()
            self._driver.set_device(device)
            self._device, self._fence = device, 0
            self._spoken.add(device)
        if device not in self._streams:
            self._streams[device] = self._driver.create_stream()
        stream = self._streams[device]
        fence = self.transfer.fences[name]
        if fence != self._fence:
            self._driver.stream_wait_event(stream, fence)
            self._fence = fence
        return stream

    def _event(self, turn: int) -> int:
        key = (self._device, turn)
        if key not in self._events:
            self._events[key] = self._driver.create_event()
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
            self._driver.set_device(device)
        self._driver.wait_stream(self._streams[device])

    def _back(self) -> None:
        """The caller may be the thread of the program, which has a device of its own."""
        if self._device >= 0:
            self._spoken.clear()
            self._device, self._fence = -1, 0
            self._driver.set_context(self._before)

    def close(self) -> None:
        """Give everything back, as far as the device does not refuse."""
        driver = self._driver
        with suppress(DriverError), ExitStack() as last:
            last.callback(driver.set_context, driver.current_context())
            for device, stream in self._streams.items():
                driver.set_device(device)
                for slot in self._slots:
                    if slot.pinned:
                        slot.pinned = False
                        driver.unpin(slot.address)
                driver.destroy([stream], [event for key, event in self._events.items() if key[0] == device])


class _Idle:
    """Lanes that nobody uses at the moment."""

    def __init__(self) -> None:
        self.lanes: list[RingLane] = []
        self.lock = Lock()


_idle = _Idle()
if hasattr(os, "register_at_fork"):  # a child process has its parent's memory, but not its place at the driver
    os.register_at_fork(after_in_child=_idle.__init__)  # type: ignore[misc] # the same object, since others refer to it


@contextmanager
def cuda_lanes(transfer: Transfer, choice: Choice) -> Iterator[list[RingLane]]:
    """Lanes for one transfer: kept ones first, then new ones. Sound ones are kept for the next, ``KEPT`` at most."""
    from transload.io.cuda_driver import cuda_driver

    driver = cuda_driver()
    if driver is None:
        raise RuntimeError("there is no CUDA driver to speak to")
    mapped: list[RingLane] = [MappedLane(driver)] if choice.mapped else []
    count = choice.lanes - len(mapped)
    with _idle.lock:
        ring = [_idle.lanes.pop() for _ in range(min(count, len(_idle.lanes)))]
    try:
        while len(ring) < count:
            ring.append(RingLane(driver))
        for lane in (*ring, *mapped):
            lane.done, lane.transfer = 0, transfer
        yield [*ring, *mapped]
    finally:
        for lane in (*ring, *mapped):
            vars(lane).pop("transfer", None)  # which holds files and memory
        sound = [lane for lane in ring if lane.sound]
        with _idle.lock:
            room = max(0, KEPT - len(_idle.lanes))
            _idle.lanes += sound[:room]
        for lane in (*sound[room:], *(lane for lane in mapped if lane.sound)):
            lane.close()


_TOGETHER = 8
"""Jobs pinned at once: 32 MiB."""

_UNDER_WAY = 2
"""Such parts at a time: the device fetches one while the next is pinned."""


class _Part:
    """Some pages of a file, mapped for reading."""

    def __init__(self, file: DirectFile, runs: Sequence[Run]) -> None:
        begin = runs[0].offset
        start = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        end = max(run.offset + run.nbytes for run in runs)
        self.file = file
        self.runs = runs
        self.nbytes = (end - start + PAGE - 1) // PAGE * PAGE
        self.address = libc().mmap(None, self.nbytes, mmap.PROT_READ, mmap.MAP_SHARED, file.plain, start)
        if self.address in (None, ctypes.c_void_p(-1).value):
            raise MemoryError
        self.shift = self.address - start
        """To be added to a position in the file."""
        self.event = 0

    def close(self) -> None:
        libc().munmap(self.address, self.nbytes)


class MappedLane(RingLane):
    """Goes over to pinned slots, as the others have, where pages cannot be pinned."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self._parts: deque[_Part] = deque()
        self._made = 0

    def _work(self, take: Take) -> None:
        """Take some jobs at a time."""
        while together := list(islice(iter(take, None), _TOGETHER)):
            for group in _by_place(together):
                if group[0].device == "cpu" or not self._fetch(group):
                    for job in group:
                        self._bring(job)
                self.done += sum(job.wanted for job in group)
        while self._parts:
            self._fetched()

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
        try:
            part = _Part(file, runs)
        except MemoryError:
            return False
        try:
            self._driver.pin(part.address, part.nbytes, read_only=True)
        except DriverError:
            part.close()
            return False
        self._parts.append(part)
        part.event = self._event(SLOTS + self._made % _UNDER_WAY)
        self._made += 1
        addresses = self.transfer.addresses
        self._driver.copy([(addresses[want] + at, part.shift + offset, n) for offset, want, at, n in runs], stream)
        self._driver.record_event(part.event, stream)
        return True

    def _fetched(self) -> None:
        """Wait for the oldest part, and let it go."""
        part = self._parts[0]
        self._driver.wait_event(part.event)
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


def _by_place(jobs: list[Job]) -> list[list[Job]]:
    """Jobs in groups of one file and one device that lie close together."""
    groups: list[list[Job]] = []
    for job in jobs:
        last = groups[-1][-1] if groups else job
        same = (job.file, job.device) == (last.file, last.device)
        if groups and same and 0 <= job.begin - last.end <= job.end - job.begin:
            groups[-1].append(job)
        else:
            groups.append([job])
    return groups
