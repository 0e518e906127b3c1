"""The transfer engine: moves ranges of files into memory, of the host or of CUDA devices.

Read it in this order. ``jobs`` turns read requests into jobs: a file is thought of as cut into cells of equal size, and
what is wanted of one cell is one job. Small storages that lie together are read at once, a large one in many jobs at
the same time, and no job is larger than the slot of pinned memory it may have to pass through. As cells begin at
multiples of their size, a job can also be read past the page cache, which needs positions, lengths and addresses that
are multiples of a block. ``choose`` decides how many threads read and in which way; ``work`` runs them; ``HostLane`` is
one thread's work for memory of the host (those for CUDA devices are in ``cuda_lanes``). ``bring`` puts it together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from transload.frozen import facts
from transload.io.memory import PAGE, Pages, copy, huge_pages_pay, in_huge_pages, view

if TYPE_CHECKING:
    from transload.io.sources import Source

__all__ = [
    "CELL",
    "GAP",
    "LITTLE",
    "MOST_RING",
    "SLOT_PAIR",
    "Choice",
    "Ended",
    "Facts",
    "File",
    "HostLane",
    "Job",
    "Lane",
    "ReadRequest",
    "Run",
    "Settings",
    "Sums",
    "Take",
    "Transfer",
    "bring",
    "cached_share",
    "choose",
    "forecast",
    "jobs",
    "work",
]

# -- requests and jobs: pure, nothing is opened or allocated


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

    def __repr__(self) -> str:
        return f"Job({self.file}, {self.device!r}, {self.runs})"


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

# -- the choice of a way

LITTLE = 16 << 20
"""Fewer bytes are read by the thread that asks for them: starting others takes longer."""

SLOT_PAIR = 2 * CELL
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


class Settings(NamedTuple):
    """What the caller has decided; ``None`` leaves it to ``choose``."""

    threads: int | None = None
    pinned: int | None = None
    """Bytes of pinned memory at most."""
    direct: bool | None = None
    """Read past the page cache."""


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
    lanes = _lanes(facts, settings, nbytes, direct=direct)
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


def _lanes(facts: Facts, settings: Settings, nbytes: int, *, direct: bool) -> int:
    """No more than there is work for, nor than the allowed pinned memory is enough for."""
    if not facts.plain:
        return 1
    if settings.threads is not None:
        wanted = settings.threads
    elif nbytes < LITTLE:
        return 1
    else:
        most = MOST_RING if facts.cuda else _MOST_HOST
        wanted = min(most, max(facts.cores, _MOST_DIRECT if direct else 1))
    if facts.cuda and settings.pinned is not None:
        wanted = min(wanted, settings.pinned // SLOT_PAIR)
    return max(1, min(wanted, -(-nbytes // CELL)))


def forecast(path: str, host: int, cuda: int) -> Choice:
    """The choice for so many bytes of a file; for a directory, as for a file whose place is not known yet."""
    if host + cuda < LITTLE:
        return choose(Facts(host, cuda, 1, None))
    from transload.io.pool import cores

    cached = None
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        try:
            cached = cached_share(descriptor, 0, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)
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


# -- files


class Ended(Exception):  # noqa: N818 - a signal to the caller, who knows the names of storages
    """A file ends before a request does: the index of the request, and how many bytes of it there are."""

    def __init__(self, want: int, came: int) -> None:
        super().__init__(want, came)
        self.want = want
        self.came = came


class File:
    """A source to read from; after ``go_direct``, past the page cache, by a second descriptor of the same file."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._descriptor = -1

    @property
    def plain(self) -> int:
        """The descriptor, if this is a file of the system; else -1."""
        return getattr(self._source, "descriptor", -1)

    @property
    def direct(self) -> bool:
        """Whether it is read past the page cache."""
        return self._descriptor >= 0

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

    def _ended(self, runs: Sequence[Run], position: int) -> Ended:
        """For the first of some parts that reaches beyond a position, where a file ends or has ended before."""
        run = next(run for run in runs if run.offset + run.nbytes > position)
        if self.plain >= 0:
            position = min(position, os.fstat(self.plain).st_size)
        return Ended(run.want, max(0, run.begin + position - run.offset))


# -- threads

_TOLD_EVERY = 0.05
"""Seconds between two looks at how far the threads are."""

Take = Callable[[], "Job | None"]
Tell = Callable[[int], None]


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
    else:
        _Pool(lanes).work(jobs, tell)


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


class _Pool:
    """The queue between the one who prepares jobs and the lanes.

    Which lanes have begun and which have ended is noted here, since threads do not tell it reliably: after an
    interrupted ``join`` Python before 3.13 takes a thread for dead that is still running.
    """

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = lanes
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._stopped = False
        self._errors: list[BaseException] = []
        self._begun: list[Lane] = []
        self._ended: list[Lane] = []
        self._news: SimpleQueue[None] = SimpleQueue()
        self._threads = [Thread(target=self._run, args=(lane,), daemon=True) for lane in lanes]

    def work(self, jobs: Iterable[Job], tell: Tell | None) -> None:
        """Let the lanes do all jobs."""
        try:
            started = self._start()
            if started:
                for job in jobs:
                    if self._stopped:
                        break
                    self._queue.put(job)
                self._queue.put(None)
                self._watch(started, tell)
            else:
                _work_alone(jobs, self._lanes[0], tell)
        finally:
            self._stop()
        if self._errors:
            try:
                raise self._errors[0]
            finally:
                self._errors.clear()  # an error that held itself by its frames would hold the memory there, too

    def _start(self) -> int:
        """Start as many threads as the system gives; how many those are."""
        for count, thread in enumerate(self._threads):
            try:
                thread.start()
            except RuntimeError:  # noqa: PERF203 - a limit of the system, or Python is about to end
                return count
        return len(self._threads)

    def _run(self, lane: Lane) -> None:
        self._begun.append(lane)  # before the look at the sign to stop: who comes too late must not touch the lane
        try:
            if not self._stopped:
                lane.run(self._take)
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            self._errors.append(error)
            self._stopped = True
        finally:
            self._ended.append(lane)
            self._news.put(None)

    def _take(self) -> Job | None:
        job = self._queue.get()
        if job is None or self._stopped:
            self._queue.put(None)  # for the others, and those who ask again
            return None
        return job

    def _watch(self, started: int, tell: Tell | None) -> None:
        """Wait for all threads that were started, telling how many bytes came."""
        told, running = 0, True
        while running:
            running = len(self._ended) < started
            if running:
                self._sleep()
            else:
                self._join()
            done = sum(lane.done for lane in self._lanes)
            if tell and done > told and not self._errors:
                tell(done - told)
            told = done

    def _sleep(self) -> None:
        """Wait until a thread ends, but not long: a signal must be seen on every system."""
        with suppress(Empty):
            self._news.get(timeout=_TOLD_EVERY)

    def _stop(self) -> None:
        """Stop the threads that still run, and wait until they have ended, whoever interrupts."""
        while True:
            try:
                self._stopped = True
                while len(self._ended) < len(self._begun):
                    self._queue.put(None)
                    self._sleep()
                self._join()
            except KeyboardInterrupt:  # what has led here is raised when they have ended
                continue
            return

    def _join(self) -> None:
        for thread in self._threads:
            if thread.is_alive():
                thread.join()


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


# -- all of it

Place = Callable[[int], int]


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
    files = [File(source) for source in sources]
    choice = choose(_facts(files, wants, fresh=fresh), settings)
    transfer = Transfer(files, wants, place, sums, huge=choice.huge)
    try:
        if choice.direct:
            for file in files:
                file.go_direct()
        if choice.ring:
            from transload.loading.cuda_lanes import cuda_lanes

            with cuda_lanes(transfer, choice) as lanes:
                work(transfer.jobs(), lanes, tell)
        else:
            hosts = [HostLane(files, transfer.addresses, sums) for _ in range(choice.lanes)]
            work(transfer.jobs(), hosts, tell)
    finally:
        for file in files:
            file.close()
    return choice


class Transfer:
    """What the lanes of one transfer have in common; where everything goes is filled in while jobs are prepared."""

    def __init__(
        self,
        files: Sequence[File],
        wants: Sequence[ReadRequest],
        place: Place,
        sums: Sums | None,
        *,
        huge: bool = False,
    ) -> None:
        self.files = files
        self.sums = sums
        self.addresses: dict[int, int] = {}
        """Where each request goes, known when a job with it is taken."""
        self.fences: dict[str, int] = {}
        """For each device the event after which its memory may be written."""
        self._wants = wants
        self._place = place
        self._huge = huge
        self._events: list[Any] = []

    def jobs(self) -> Iterator[Job]:
        """The jobs, each when there is memory for it."""
        addresses, wants, place, huge = self.addresses, self._wants, self._place, self._huge
        for job in jobs(wants):
            known = len(addresses)
            for _, index, _, _ in job.runs:
                if index not in addresses:
                    addresses[index] = place(index)
                    if huge and job.device == "cpu":
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
