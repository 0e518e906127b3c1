"""The files a transfer reads from, buffered or past the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from transload.io.cuda_driver import DriverError
from transload.io.memory import PAGE, Pages, copy, huge_pages_pay, in_huge_pages, view
from transload.io.pool import cores
from transload.loading.choice import CELL, LITTLE, Choice, Facts, Job, Settings, Want, cached_share, choose, jobs

if TYPE_CHECKING:
    from transload.io.cuda_driver import Driver
    from transload.io.sources import Source
    from transload.loading.choice import Job, Run

__all__ = [
    "SLOTS",
    "Choice",
    "Ended",
    "Errand",
    "File",
    "HostLane",
    "Lane",
    "MappedLane",
    "RingLane",
    "Settings",
    "Sums",
    "Take",
    "Want",
    "borrowed",
    "bring",
    "returned",
    "work",
]


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


_TOLD_EVERY = 0.05
"""Seconds between two looks at how far the threads are."""

Take = Callable[[], "Job | None"]


class Lane(Protocol):
    """One thread's work."""

    done: int
    """Bytes it has brought in so far."""

    def run(self, take: Take) -> None:
        """Take jobs, and work, until there are none. When this returns or raises, nothing is under way any more."""
        ...


class _Crew:
    """The queue between the one who prepares jobs and the lanes.

    Who has come and who has left is written down here, since threads themselves do not tell it reliably: after an
    interrupted ``join`` Python before 3.13 takes a thread for dead that is still running.
    """

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = lanes
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._stopped = False
        self._errors: list[BaseException] = []
        self._came: list[Lane] = []
        self._left: list[Lane] = []
        self._news: SimpleQueue[None] = SimpleQueue()
        self._threads = [Thread(target=self._run, args=(lane,), daemon=True) for lane in lanes]

    def work(self, jobs: Iterable[Job], tell: Callable[[int], None] | None) -> None:
        """Let the lanes do all jobs."""
        try:
            begun = self._start()
            if begun:
                self._feed(jobs)
                self._watch(begun, tell)
            else:
                _alone(jobs, self._lanes[0], tell)
        finally:
            self._wait()
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

    def _feed(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            if self._stopped:
                break
            self._queue.put(job)
        self._dismiss()

    def _dismiss(self) -> None:
        self._queue.put(None)

    def _run(self, lane: Lane) -> None:
        self._came.append(lane)  # before the look at the sign to stop: who comes too late must not touch the lane
        try:
            if not self._stopped:
                lane.run(self._take)
        except BaseException as error:  # noqa: BLE001 - raised again by the one who waits
            self._errors.append(error)
            self._stopped = True
        finally:
            self._left.append(lane)
            self._news.put(None)

    def _take(self) -> Job | None:
        job = self._queue.get()
        if job is None or self._stopped:
            self._dismiss()  # the others, and those who ask again
            return None
        return job

    def _watch(self, begun: int, tell: Callable[[int], None] | None) -> None:
        """Wait for all threads that were started, telling how many bytes came."""
        told = 0
        while len(self._left) < begun:
            self._sleep()
            told = self._tell(tell, told)
        self._join()
        self._tell(tell, told)

    def _sleep(self) -> None:
        """Wait until a thread leaves, but not long: a signal is to be seen on every system."""
        with suppress(Empty):
            self._news.get(timeout=_TOLD_EVERY)

    def _tell(self, tell: Callable[[int], None] | None, told: int) -> int:
        done = sum(lane.done for lane in self._lanes)
        if tell and done > told and not self._errors:
            tell(done - told)
        return done

    def _wait(self) -> None:
        """Wait for the threads, whoever interrupts."""
        while True:
            try:
                self._last()
            except KeyboardInterrupt:  # what has led here is raised, when they have left
                continue
            return

    def _last(self) -> None:
        """Stop the threads that are still here, and wait until they have left."""
        self._stopped = True
        while len(self._left) < len(self._came):
            self._dismiss()
            self._sleep()
        self._join()

    def _join(self) -> None:
        for thread in self._threads:
            if thread.is_alive():
                thread.join()


def work(jobs: Iterable[Job], lanes: Sequence[Lane], tell: Callable[[int], None] | None = None) -> None:
    """Let lanes do all jobs at the same time; a single one does them here. Raises what a lane has raised first.

    ``jobs`` may be made one by one: the first are done while the last are prepared. ``tell`` is called here, in the
    thread of the caller, with numbers of bytes as they come.
    """
    if len(lanes) == 1:
        _alone(jobs, lanes[0], tell)
    else:
        _Crew(lanes).work(jobs, tell)


def _alone(jobs: Iterable[Job], lane: Lane, tell: Callable[[int], None] | None) -> None:
    waiting = iter(jobs)
    told = 0

    def take() -> Job | None:
        nonlocal told
        if tell and lane.done > told:
            tell(lane.done - told)
            told = lane.done
        return next(waiting, None)

    lane.run(take)


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


Place = Callable[[int], int]


def bring(  # noqa: PLR0913 - options by name
    sources: Sequence[Source],
    wants: Sequence[Want],
    place: Place,
    *,
    settings: Settings = Settings(),  # noqa: B008 - a named tuple does not change
    fresh: bool = True,
    tell: Callable[[int], None] | None = None,
    sums: Sums | None = None,
) -> Choice:
    """Bring wanted bytes into memory; how it was done.

    ``place`` gives the address for the want of an index; it is asked once for each, in the order of the file, and the
    memory must stay until this returns. ``fresh`` says that nobody has touched it yet. All devices but ``cpu`` must be
    CUDA devices, with an index. ``tell`` is called with numbers of bytes as they come; ``sums`` collects checksums.
    ``Ended`` names the want that a file is too short for. Whatever is raised, nothing is under way any more then.
    """
    files = [File(source) for source in sources]
    errand = _Errand(files, wants, place, sums)
    facts = _facts(files, wants, fresh=fresh)
    choice = choose(facts, settings)
    try:
        if choice.direct:
            for file in files:
                file.go_direct()
        errand.huge = choice.huge
        with_lanes = _through_ring if choice.ring else _to_host
        with_lanes(errand, choice, tell)
    finally:
        for file in files:
            file.close()
    return choice


class _Errand:
    """Where everything goes, filled while jobs are prepared."""

    def __init__(self, files: Sequence[File], wants: Sequence[Want], place: Place, sums: Sums | None) -> None:
        self.files = files
        self.sums = sums
        self.addresses: dict[int, int] = {}
        self.fences: dict[str, int] = {}
        self.huge = False
        self._wants = wants
        self._place = place
        self._events: list[Any] = []

    def jobs(self) -> Iterator[Job]:
        """The jobs, each when there is memory for it."""
        addresses, wants, place, huge = self.addresses, self._wants, self._place, self.huge
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


def _facts(files: Sequence[File], wants: Sequence[Want], *, fresh: bool) -> Facts:
    cuda = sum(want.nbytes for want in wants if want.device != "cpu")
    host = sum(want.nbytes for want in wants) - cuda
    plain = all(file.plain >= 0 for file in files)
    if host + cuda < LITTLE:
        return Facts(host, cuda, 1, None, plain)
    return Facts(
        host,
        cuda,
        cores(),
        _cached(files, wants) if plain else None,
        plain,
        mappable=cuda > 0 and plain and _can_map(wants),
        huge=fresh and host >= LITTLE and huge_pages_pay(host),
    )


def _cached(files: Sequence[File], wants: Sequence[Want]) -> float | None:
    """The part that is in the page cache: of the largest file, the others will be alike."""
    spans: dict[int, list[int]] = {}
    for want in wants:
        span = spans.setdefault(want.file, [want.offset, 0])
        span[0] = min(span[0], want.offset)
        span[1] = max(span[1], want.offset + want.nbytes)
    file, (begin, end) = max(spans.items(), key=lambda item: item[1][1] - item[1][0])
    return cached_share(files[file].plain, begin, end)


def _can_map(wants: Sequence[Want]) -> bool:
    from transload.io.cuda_driver import cuda_driver

    driver = cuda_driver()
    devices = {want.device for want in wants} - {"cpu"}
    return driver is not None and all(driver.can_pin_read_only(int(name.partition(":")[2])) for name in devices)


def _to_host(errand: _Errand, choice: Choice, tell: Callable[[int], None] | None) -> None:
    lanes = [HostLane(errand.files, errand.addresses, errand.sums) for _ in range(choice.lanes)]
    work(errand.jobs(), lanes, tell)


def _through_ring(errand: _Errand, choice: Choice, tell: Callable[[int], None] | None) -> None:
    from transload.io.cuda_driver import cuda_driver

    driver: Driver | None = cuda_driver()
    if driver is None:
        raise RuntimeError("there is no CUDA driver to speak to")
    common = Errand(errand.files, errand.addresses, errand.fences, errand.sums)
    mapped = [MappedLane(driver, common)] if choice.mapped else []
    ring = borrowed(driver, choice.lanes - len(mapped), common)
    try:
        work(errand.jobs(), [*ring, *mapped], tell)
    finally:
        returned(ring)
        returned(mapped, keep=0)
