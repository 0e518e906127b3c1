"""The transfer engine: reads ranges of files into host memory or onto CUDA devices, with many threads.

``read_ranges`` is the entry point. ``choose`` decides how many threads read the ``jobs``, and how; ``run_lanes`` runs a
thread for each lane. A ``HostLane`` reads into host memory. For CUDA devices a ``RingLane`` reads into slots of pinned
memory, from which the device copies; these lanes are kept between loads, since pinning memory takes longer than reading
into it. A ``MappedLane`` pins pages of the file itself, so that the device copies straight from the page cache.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from queue import SimpleQueue
from time import perf_counter, thread_time
from typing import Any, Protocol

from transload.errors import CannotReadError
from transload.frozen import Frozen, NamedTuple
from transload.io.cache import WARM, Pace, ReadAhead, cached_fraction
from transload.io.cuda_driver import CudaDriver, DriverError, event_now
from transload.io.memory import PAGE, FreshPages, Pages, huge_pages_pay, libc
from transload.io.sources import FileSource, Source, is_url
from transload.opening.jobs import (
    CELL,
    FEW_BYTES,
    SLOT_PAIR,
    AddressOf,
    Checksums,
    File,
    HostLane,
    Job,
    NextJob,
    ReadRequest,
    ReportProgress,
    Run,
    Settings,
    jobs,
)

MOST_RING = 12
"""The most lanes to a device. On an H200 with PCIe 5, 8 reach 87 % of the bus's bandwidth, 12 94 %, 16 no more."""
_MOST_HOST = 16
_MOST_FAR = 64
"""Over a network, as long as more are faster: a connection to a storage service gives 50 to 100 MB/s."""
_FIRST_FAR = 8
"""Where lanes may be added. 16 decrypt TLS more slowly, since Python does it 16 KiB at a time: they wait for one
another."""
_FASTER = 1.25
"""How much faster twice as many lanes must be."""
_MANY = 16
"""Jobs of a lane while another does not do two: that hangs, perhaps on a connection that is dead."""
_CROWDED = 4
"""How many times as many lanes read on few cores, if other programs work on them. On four cores that was no faster."""
_KNOWS_WORK = sys.platform != "win32"  # whose clocks of threads tick every 16 ms, too seldom to tell work from waiting
_WORKING = 0.75
"""Lanes that work for so much of their time do not wait: more would not help."""
_MOST_DIRECT = 8  # reads that bypass the page cache wait for the disk, not for a core: more of them than cores pay
_FEW_CORES = 2
"""With at most this many, the device copies from the page cache itself: 18.8 GB/s with one core, against 7.6 through
the ring; 20.9 with two, against 14.4. With four cores the ring is faster."""
_COLD = 0.5
_POLL = 0.05
"""Seconds between two checks of the progress of the threads."""
_POLL_GROWTH = 0.01
"""The same while lanes may be added."""
_POLL_OFTEN = 0.002
"""The same while reads are asked for ahead."""
SLOTS = 2
"""Slots per lane: one is read into while the device copies from the other. Four were not faster."""
KEPT = 16
"""The most lanes kept between loads: 128 MiB."""
_GROUP = 8
"""Jobs whose pages are pinned together: 32 MiB."""
_AHEAD = 64
"""Jobs whose host memory is allocated together, 256 MiB, so that huge pages may span neighbouring tensors."""
_IN_FLIGHT = 2
"""Pinned groups at a time: the device copies from one while the next is pinned."""

# -- how to read


class Facts(NamedTuple):
    """What the choice depends on."""

    host: int
    """Bytes to read into host memory."""
    cuda: int
    """Bytes to read onto CUDA devices."""
    cores: int
    cached: float | None
    """The fraction of the file that is in the page cache; ``None`` if the system does not say."""
    on_disk: bool = True
    """Whether all sources are files with a descriptor, which can be read past the page cache."""
    mappable: bool = False
    """Whether the devices can copy from the page cache."""
    pace: Pace = "quick"
    """How bytes come that are not cached."""
    huge: bool = False
    """Whether huge pages are available."""
    streams: int = 64
    """How many reads at once the sources can serve."""
    far: int = 0
    """How many reads, at most, wait for a network rather than for a core."""


class Choice(Frozen):
    """How bytes are read."""

    lanes: int
    """The most threads that read; 1 is the calling thread."""
    ring: bool = False
    """Whether they read into pinned slots, from which devices copy."""
    mapped: bool = False
    """Whether one of them lets the device copy from the page cache instead."""
    direct: bool = False
    """Whether reads bypass the page cache."""
    huge: bool = False
    """Whether to ask for huge pages in fresh host memory."""
    ahead: bool = False
    """Whether the system is asked for bytes before they are read."""
    first: int = 0
    """With how many threads to begin, if not with all: the others follow if these wait."""
    why: str = ""


def choose(facts: Facts, settings: Settings = Settings()) -> Choice:  # noqa: B008 - a named tuple does not change
    """Choose how to read.

    >>> choose(Facts(host=0, cuda=8 << 30, cores=16, cached=1.0)).why
    '12 threads, pinned 96 MiB, from the page cache'
    >>> choose(Facts(host=2 << 30, cuda=0, cores=2, cached=0.0)).why
    '8 threads, past the page cache, which holds 0 % of it'
    """
    nbytes = facts.host + facts.cuda
    cold = facts.cached is not None and facts.cached < _COLD
    warm = facts.cached is not None and facts.cached >= WARM
    slow = facts.on_disk and not warm and facts.pace != "quick"
    usual = cold and nbytes >= FEW_BYTES and not slow
    direct = facts.on_disk and (usual if settings.direct is None else settings.direct)
    ahead = slow and not direct and facts.pace == "waiting"
    in_order = slow and not direct and facts.pace == "seeking" and settings.threads is None
    few = facts.cores <= _FEW_CORES and settings.threads is None and settings.pinned is None
    mapped = facts.mappable and warm and few and facts.cuda >= FEW_BYTES and not direct
    lanes = 1
    if facts.streams > 1 and (settings.threads is not None or nbytes >= FEW_BYTES or facts.far > 1):
        most = min(facts.streams, MOST_RING if facts.cuda else _MOST_HOST)
        lanes = min(most, max(facts.cores, _MOST_DIRECT if direct else 1, facts.far))
        lanes = 1 if in_order else lanes if settings.threads is None else settings.threads
        if facts.cuda and settings.pinned is not None:
            lanes = min(lanes, settings.pinned // SLOT_PAIR)
        lanes = max(1, min(lanes, max(facts.far, -(-nbytes // CELL))))  # no more than there are cells
    first = 0
    if facts.far > _MOST_FAR and facts.streams > _MOST_HOST and settings == Settings():
        first, lanes = _FIRST_FAR, min(facts.streams, _MOST_FAR)
    elif few and _KNOWS_WORK and not (facts.far or facts.cuda or direct or ahead or in_order):
        most = _CROWDED * lanes
        if facts.streams >= most and nbytes >= max(FEW_BYTES, most * CELL):
            first, lanes = lanes, most
    huge = facts.huge and facts.host >= FEW_BYTES
    pinned = (lanes - mapped) * SLOT_PAIR if facts.cuda else 0
    why = [f"{first} to {lanes} threads" if first else "1 thread" if lanes == 1 else f"{lanes} threads"]
    if pinned:
        why.append(f"pinned {pinned >> 20} MiB")
    if facts.far:
        why.append("over the network")
    if mapped:
        why.append("the device fetches from the page cache")
    elif direct:
        why.append("past the page cache")
    elif ahead:
        why.append("asked for ahead")
    elif in_order:
        why.append("in order")
    elif warm:
        why.append("from the page cache")
    if facts.cached is not None and not warm:
        percent = f"{100 * facts.cached:.0f} %"
        why.append(f"which holds {percent} of it" if direct else f"{percent} cached")
    if huge:
        why.append("huge pages")
    return Choice(lanes, facts.cuda > 0, mapped, direct, huge, ahead, first, ", ".join(why))


def forecast(path: str, host: int, cuda: int, sources: Sequence[Source] = ()) -> Choice:
    """The choice for this many bytes of a file. How much of a directory is cached counts as unknown.

    Of a URL, ``sources`` are the files that are read, if they are open: one that a server sent as a whole is in memory.
    """
    facts = Facts(host, cuda, 1, None)
    if is_url(path):
        here = sources and all(source.holds(0, source.size) for source in sources)
        far = 0 if here else (host + cuda) // CELL + 1
        streams = min([facts.streams, *(source.streams for source in sources)])
        facts = facts._replace(on_disk=False, streams=streams, far=far)
    if host + cuda < FEW_BYTES:
        return choose(facts)
    from transload.io.limits import cores

    facts = facts._replace(cores=cores(), huge=host >= FEW_BYTES and huge_pages_pay(host))
    if facts.on_disk:
        with suppress(CannotReadError), closing(FileSource(path)) as file:
            facts = facts._replace(**_facts_of(file, 0, file.size))
    return choose(facts)


def _facts_of(source: Source, begin: int, end: int) -> dict[str, Any]:
    """What is known of a range of a file: how much of it is cached, and how long the rest takes to come."""
    if source.pace != "quick":  # to find out how much is cached would take more seeks
        return {"pace": source.pace}
    return {"cached": cached_fraction(getattr(source, "descriptor", -1), begin, end)}


# -- threads


class Lane(Protocol):
    """What one thread does."""

    done: int
    """Bytes it has read so far."""

    def run(self, next_job: NextJob) -> None:
        """Do jobs until there are no more. When this returns or raises, none is in flight."""


def run_lanes(
    jobs: Iterable[Job],
    lanes: Sequence[Lane],
    report_progress: ReportProgress | None = None,
    ahead: ReadAhead | None = None,
    growth: Growth | None = None,
) -> None:
    """Do all jobs, each lane in a thread; a single lane runs in this one. Raises the first error of a lane.

    ``jobs`` may be a generator: the first jobs are done while the last are prepared. ``report_progress`` is called in
    this thread, which also asks for what is read next. ``growth`` says how many of the lanes work; the others wait.
    """
    if len(lanes) == 1 and ahead is None:
        _run_lane(jobs, lanes[0], report_progress)
        return
    from transload.io.pool import ThreadPool

    pool = ThreadPool()
    queue: SimpleQueue[Job | None] = SimpleQueue()
    gate: SimpleQueue[int | None] = SimpleQueue()
    growth = growth or Growth(len(lanes), len(lanes))

    def let_in(numbers: Iterable[int]) -> None:
        for number in numbers:
            gate.put(number)

    def end() -> None:
        queue.put(None)
        gate.put(None)

    def jobs_of() -> Iterator[Job]:
        number = gate.get()
        while number is not None and number < growth.lanes:
            job = queue.get()
            if job is None or pool.stopped:
                queue.put(None)  # for the other lanes
                break
            begun, worked = perf_counter(), thread_time()
            yield job
            growth.add(number, job.wanted, perf_counter() - begun, thread_time() - worked)
        gate.put(None)  # for those that wait: the number of lanes does not change any more

    def prepare() -> None:
        if not pool.started:
            _run_lane(jobs, lanes[0], report_progress)
            return
        if ahead is not None:
            ahead.ask(0)
        for job in jobs:
            if pool.stopped:
                return
            queue.put(job)
        queue.put(None)
        running, reported = True, 0
        while running:
            asking = ahead is not None and not ahead.done
            running = pool.wait(_POLL_OFTEN if asking else _POLL_GROWTH if growth.open else _POLL)
            if pool.stopped:
                return
            done = sum(lane.done for lane in lanes)
            if ahead is not None:
                ahead.ask(done)
            if growth.open:
                let_in(growth.update())
            if report_progress and done > reported:
                report_progress(done - reported)
            reported = done

    let_in(range(growth.lanes))
    # All threads start now, though some may only wait. One that started later could get the heap in which a thread of
    # the caller, which has ended, allocated the memory to read to; and its blocks would keep that from the system.
    pool.run([partial(lane.run, partial(next, jobs_of(), None)) for lane in lanes], prepare, end)


class Growth:
    """How many lanes run: more, if they wait, as long as that is faster.

    A connection gives only so much: a cell for each latency, or what a storage service allows. So ``far`` away, lanes
    double. Here they wait for a core that another program has, and each further lane gets its share. A lane's first job
    does not count: it includes making the connection, or it began when fewer lanes ran.
    """

    def __init__(self, lanes: int, most: int, *, far: bool = False) -> None:
        self.lanes = lanes
        self._most = most
        self._step, self._faster = (2, _FASTER) if far else (_CROWDED, 1.0)
        self.open = self._step * lanes <= most
        """Whether the number may still change."""
        self._speed = 0.0
        self._done: list[list[tuple[int, float, float]]] = [[] for _ in range(most)]

    def add(self, lane: int, nbytes: int, seconds: float, worked: float) -> None:
        """Count a job of a lane, and how long it worked rather than waited."""
        self._done[lane].append((nbytes, seconds, worked))

    def update(self) -> range:
        """Change the number, if all that run have done two jobs since the last change; return the lanes to add.

        A lane that hangs does not hold up the others for ever: it does not count when half of them have done many jobs.
        """
        before = self.lanes
        numbers = sorted(len(done) for done in self._done[: self.lanes])
        if numbers[0] < 2 and numbers[len(numbers) // 2] < _MANY:
            return range(0)
        counted = [done[1:] for done in self._done[: self.lanes] if len(done) > 1]
        nbytes, seconds, worked = map(sum, zip(*chain(*counted), strict=True))
        speed = len(counted) * nbytes / seconds
        if speed < self._faster * self._speed:
            self.lanes, self.open = self.lanes // self._step, False
        elif worked < _WORKING * seconds:
            self._speed = speed
            if self._step * self.lanes <= self._most:
                self.lanes *= self._step
            else:
                self.open = False
        self._done = [[] for _ in range(self._most)]
        return range(before, self.lanes)


def _run_lane(jobs: Iterable[Job], lane: Lane, report_progress: ReportProgress | None) -> None:
    waiting = iter(jobs)
    reported = 0

    def next_job() -> Job | None:
        nonlocal reported
        if report_progress and lane.done > reported:
            report_progress(lane.done - reported)
            reported = lane.done
        return next(waiting, None)

    lane.run(next_job)


def read_ranges(
    sources: Sequence[Source],
    requests: Sequence[ReadRequest],
    address_of: AddressOf,
    settings: Settings = Settings(),  # noqa: B008 - a named tuple does not change
    report_progress: ReportProgress | None = None,
    checksums: Checksums | None = None,
) -> Choice:
    """Read requested bytes into memory; return how it was done.

    ``address_of`` is called once for each request, in file order; the memory must stay valid until this returns. All
    devices but ``cpu`` must be CUDA devices, with an index. ``ShortReadError`` names a request that its file is too
    short for. Even if this raises, no read or copy is in flight afterwards.
    """
    files = [File(source) for source in sources]
    cuda = sum(request.nbytes for request in requests if request.device != "cpu")
    host = sum(request.nbytes for request in requests) - cuda
    gap = max((source.gap for source in sources), default=0)
    streams = min((source.streams for source in sources), default=1)
    facts = Facts(host, cuda, 1, None, all(file.descriptor >= 0 for file in files), streams=streams)
    if any(source.far for source in sources):
        wait = (not sources[job.file].holds(job.begin, job.end - job.begin) for job in jobs(requests, gap=gap))
        facts = facts._replace(far=sum(wait))
    if host + cuda >= FEW_BYTES:
        from transload.io.limits import cores

        facts = facts._replace(cores=cores(), huge=host >= FEW_BYTES and huge_pages_pay(host))
    if host + cuda >= FEW_BYTES and facts.on_disk:
        spans: dict[int, list[int]] = {}
        for request in requests:
            span = spans.setdefault(request.file, [request.offset, 0])
            span[0] = min(span[0], request.offset)
            span[1] = max(span[1], request.offset + request.nbytes)
        # Sample the largest file; the others are probably alike.
        largest, (begin, end) = max(spans.items(), key=lambda item: item[1][1] - item[1][0])
        running = sys.modules.get("transload.opening.prefetch")
        if running is None or not running.take_over(files[largest].descriptor):
            facts = facts._replace(**_facts_of(sources[largest], begin, end))
        if cuda:
            from transload.io.cuda_driver import cuda_driver

            driver = cuda_driver()
            numbers = [int(name.partition(":")[2]) for name in {request.device for request in requests} - {"cpu"}]
            mappable = driver is not None and all(map(driver.can_pin_read_only, numbers))
            facts = facts._replace(mappable=mappable)
    choice = choose(facts, settings)
    ahead = ReadAhead(_spans(sources, requests)) if choice.ahead else None
    transfer = Transfer(files, requests, address_of, checksums, gap, FreshPages(huge=choice.huge))
    try:
        if choice.direct:
            for file in files:
                file.go_direct()
        hosts = [transfer.host_lane() for _ in range(choice.lanes)]
        with cuda_lanes(transfer, choice) if choice.ring else nullcontext(hosts) as lanes:
            growth = Growth(choice.first or choice.lanes, choice.lanes, far=facts.far > 0)
            run_lanes(transfer.jobs(), lanes, report_progress, ahead, growth)
    finally:
        for file in files:
            file.close()
    return choice


def _spans(sources: Sequence[Source], requests: Sequence[ReadRequest]) -> Iterator[tuple[int, int, int]]:
    """What is read of each file, in order; what is between two requests may have the headers of records."""
    spans: list[list[int]] = []
    for file, offset, nbytes, _ in sorted(requests):
        if spans and spans[-1][0] == file and offset - spans[-1][2] <= CELL:
            spans[-1][2] = max(spans[-1][2], offset + nbytes)
        else:
            spans.append([file, offset, offset + nbytes])
    hints = [source.hints if isinstance(source, FileSource) else -1 for source in sources]
    return ((hints[file], begin, end) for file, begin, end in spans)


@dataclass
class Transfer:
    """What the lanes of one ``read_ranges`` share. ``addresses`` and ``fences`` grow while jobs are prepared."""

    files: Sequence[File]
    requests: Sequence[ReadRequest]
    address_of: AddressOf
    checksums: Checksums | None
    gap: int
    fresh: FreshPages
    addresses: dict[int, int] = field(default_factory=dict)
    """The address of each request, known before a lane takes a job with that request."""
    fences: dict[str, int] = field(default_factory=dict)
    """For each device, the event after which its memory may be written."""
    _events: list[Any] = field(default_factory=list)

    def host_lane(self) -> HostLane:
        """A lane that reads into host memory."""
        return HostLane(self.files, self.addresses, self.checksums, self.fresh)

    def jobs(self) -> Iterator[Job]:
        """The jobs, each after its memory is allocated."""
        waiting = jobs(self.requests, gap=self.gap)
        while together := list(islice(waiting, _AHEAD if self.fresh.huge else 1)):
            self._allocate(together)
            yield from together

    def _allocate(self, jobs: Sequence[Job]) -> None:
        """Get the memory that jobs are the first to need."""
        addresses, requests = self.addresses, self.requests
        fresh: list[int] = []
        devices = {job.device for job in jobs if job.device != "cpu" and job.device not in self.fences}
        for job in jobs:
            for _, index, _, _ in job.runs:
                if index not in addresses:
                    addresses[index] = self.address_of(index)
                    if job.device != "cpu":
                        devices.add(job.device)
                    else:
                        fresh.append(index)
        self.fresh.advise((addresses[index], requests[index].nbytes) for index in fresh)
        for device in devices:
            self._fence(device)

    def _fence(self, device: str) -> None:
        """Record an event that copies wait for: kernels of the memory's last owner may still be using it."""
        event = event_now(device)
        self._events.append(event)
        self.fences[device] = event.cuda_event


# -- to CUDA devices


@dataclass
class _PinnedSlot:
    """Pinned memory of a cell's size."""

    address: int
    pinned: bool = False
    busy: int = 0
    """The event recorded after the copy from this slot; 0 if no copy is in flight."""


class RingLane:
    """Reads jobs into pinned slots, from which devices copy; with a stream and events on each device it has used."""

    def __init__(self, driver: CudaDriver) -> None:
        self.done = 0
        self.reusable = True
        self.transfer: Transfer
        self._driver = driver
        self._pages = Pages(SLOTS * CELL)
        self._slots = [_PinnedSlot(self._pages.address + index * CELL) for index in range(SLOTS)]
        self._streams: dict[int, int] = {}
        self._events: dict[tuple[int, int], int] = {}
        self._pins = True
        self._turn = 0
        self._used: set[int] = set()
        self._device = -1
        self._previous_context = 0
        self._fence = 0
        self._host: HostLane | None = None

    def run(self, next_job: NextJob) -> None:
        """Do jobs until there are no more; then, or if something fails, wait for the copies in flight.

        Afterwards the thread's CUDA context is the one it was before.
        """
        try:
            try:
                self._do_jobs(next_job)
            finally:
                self._drain()
        finally:
            if self._device >= 0:  # it may be the program's main thread
                self._used.clear()
                self._device, self._fence = -1, 0
                self._driver.set_context(self._previous_context)

    def _do_jobs(self, next_job: NextJob) -> None:
        while (job := next_job()) is not None:
            self._read(job)
            self.done += job.wanted

    def _read(self, job: Job) -> None:
        transfer, driver = self.transfer, self._driver
        if job.device == "cpu":
            self._host = self._host or transfer.host_lane()
            self._host.read(job)
            return
        stream = self._stream_on(job.device)
        turn = self._turn = (self._turn + 1) % SLOTS
        slot = self._slots[turn]
        if slot.busy:
            driver.wait_event(slot.busy)
            slot.busy = 0
        start = transfer.files[job.file].read_job(job, slot.address)
        # Pinned after the first read: all threads get their pages at once. The driver would get them for one thread at
        # a time: 26 ms for 96 MiB instead of 5 ms.
        if not slot.pinned and self._pins:
            try:
                driver.pin(slot.address, CELL)
                slot.pinned = True
            except DriverError:  # copies from pageable memory are slower, and just as correct
                self._pins = False
        if transfer.checksums is not None:
            for run in job.runs:
                transfer.checksums.add(run, start + run.offset)
        addresses = transfer.addresses
        driver.copy([(addresses[request] + at, start + offset, n) for offset, request, at, n in job.runs], stream)
        slot.busy = self._event(turn)
        driver.record_event(slot.busy, stream)

    def _stream_on(self, name: str) -> int:
        """Make a device current; return the lane's stream there, which waits until the memory may be written."""
        device = int(name.partition(":")[2] or 0)
        if device != self._device:
            if self._device < 0:
                self._previous_context = self._driver.current_context()
            self._driver.set_device(device)
            self._device, self._fence = device, 0
            self._used.add(device)
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

    def _drain(self) -> None:
        """Wait for all devices, even if one of them fails; the lane is then not reused."""
        self.reusable, self._host = False, None
        with ExitStack() as waits:
            for device in self._used & self._streams.keys():
                waits.callback(self._wait_for, device)
        for slot in self._slots:
            slot.busy = 0
        self.reusable = True

    def _wait_for(self, device: int) -> None:
        with suppress(DriverError):  # a failed device fails again below
            self._driver.set_device(device)
        self._driver.wait_stream(self._streams[device])

    def close(self) -> None:
        """Release everything, as far as the devices allow."""
        driver = self._driver
        with suppress(DriverError), ExitStack() as cleanup:
            cleanup.callback(driver.set_context, driver.current_context())
            for device, stream in self._streams.items():
                driver.set_device(device)
                for slot in self._slots:
                    if slot.pinned:
                        slot.pinned = False
                        driver.unpin(slot.address)
                driver.destroy([stream], [event for key, event in self._events.items() if key[0] == device])


_idle: list[RingLane] = []
"""Lanes that no transfer uses at the moment."""
if hasattr(os, "register_at_fork"):  # a forked child cannot use its parent's CUDA context
    os.register_at_fork(after_in_child=_idle.clear)


@contextmanager
def cuda_lanes(transfer: Transfer, choice: Choice) -> Iterator[list[RingLane]]:
    """Lanes for one transfer: idle ones first, then new ones. Up to ``KEPT`` are kept for the next transfer."""
    from transload.io.cuda_driver import cuda_driver

    driver = cuda_driver()
    if driver is None:
        raise RuntimeError("there is no CUDA driver")
    lanes: list[RingLane] = [MappedLane(driver)] if choice.mapped else []
    try:
        while len(lanes) < choice.lanes:
            with suppress(IndexError):  # none is idle
                lanes.append(_idle.pop())
                continue
            lanes.append(RingLane(driver))
        for lane in lanes:
            lane.done, lane.transfer = 0, transfer
        yield lanes
    finally:
        for lane in lanes:
            vars(lane).pop("transfer", None)  # which refers to files and memory
            if lane.reusable and len(_idle) < KEPT and type(lane) is RingLane:
                _idle.append(lane)
            elif lane.reusable:
                lane.close()


class _Part:
    """Pages of a file, mapped read-only."""

    def __init__(self, file: File, runs: Sequence[Run]) -> None:
        begin = runs[0].offset
        start = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        end = max(run.offset + run.nbytes for run in runs)
        self.file = file
        self.runs = runs
        self.nbytes = (end - start + PAGE - 1) // PAGE * PAGE
        self.address = libc().mmap(None, self.nbytes, mmap.PROT_READ, mmap.MAP_SHARED, file.descriptor, start)
        if self.address in (None, ctypes.c_void_p(-1).value):
            raise MemoryError
        self.shift = self.address - start
        """The difference between an address here and its file position."""
        self.event = 0

    def close(self) -> None:
        libc().munmap(self.address, self.nbytes)


class MappedLane(RingLane):
    """Pins pages of the file, from which the device copies; where that fails, it uses slots as other lanes do."""

    def __init__(self, driver: CudaDriver) -> None:
        super().__init__(driver)
        self._parts: deque[_Part] = deque()
        self._part_count = 0

    def _do_jobs(self, next_job: NextJob) -> None:
        while taken := list(islice(iter(next_job, None), _GROUP)):
            groups: list[list[Job]] = []  # close together in one file, and for one device
            for job in taken:
                last = groups[-1][-1] if groups else job
                same = (job.file, job.device) == (last.file, last.device)
                if groups and same and 0 <= job.begin - last.end <= job.end - job.begin:
                    groups[-1].append(job)
                else:
                    groups.append([job])
            for group in groups:
                if group[0].device == "cpu" or not self._copy_from_file(group):
                    for job in group:
                        self._read(job)
                self.done += sum(job.wanted for job in group)
        while self._parts:
            self._finish_oldest()

    def _copy_from_file(self, jobs: list[Job]) -> bool:
        """Let the device copy from the file's pages; return false if it cannot, or if checksums are wanted.

        The host must not touch the mapped pages: if another process has just truncated the file, that is a SIGBUS.
        """
        file = self.transfer.files[jobs[0].file]
        if file.descriptor < 0 or file.direct or self.transfer.checksums is not None:
            return False
        stream = self._stream_on(jobs[0].device)
        if len(self._parts) == _IN_FLIGHT:
            self._finish_oldest()
        runs = [run for job in jobs for run in job.runs]
        file.check(runs)  # beyond its end a page is all zeros
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
        part.event = self._event(SLOTS + self._part_count % _IN_FLIGHT)
        self._part_count += 1
        addresses = self.transfer.addresses
        copies = [(addresses[request] + at, part.shift + offset, n) for offset, request, at, n in runs]
        self._driver.copy(copies, stream)
        self._driver.record_event(part.event, stream)
        return True

    def _finish_oldest(self) -> None:
        """Wait for the copies from the oldest part, and release it."""
        part = self._parts[0]
        self._driver.wait_event(part.event)
        self._parts.popleft()
        self._release(part)
        part.file.check(part.runs)  # the file may have been truncated meanwhile

    def _release(self, part: _Part) -> None:
        self._driver.unpin(part.address)
        part.close()

    def _drain(self) -> None:
        super()._drain()
        with ExitStack() as releases:
            while self._parts:
                releases.callback(self._release, self._parts.popleft())
