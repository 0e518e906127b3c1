"""A CUDA driver without a device: its memory is the host's, its streams are threads, and it watches its users.

Copies are done later, each stream's in order, as a device would. What must not be done is noted in ``faults``: copying
from memory that is not pinned, into memory whose last owner is not done with it, or to another device's; changing,
letting go or giving back what is still under way; speaking to a device that was not entered.
"""

from __future__ import annotations

import ctypes
import threading
import time
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue

from transload.io.cuda_driver import DriverError
from transload.io.memory import memory_at

__all__ = ["CALLS", "FakeDriver", "Goal"]

CALLS = ("set_device", "create_stream", "create_event", "stream_wait_event", "copy", "record_event", "wait_event")
"""The calls that one transfer makes, each of which may fail."""

DEADLINE = 20.0  # seconds after which whoever waits gives up
LONG = 100_000  # bytes of a copy that takes its time
CONTEXT = 1000  # the handle of a device's context is this and its number


class _Stream:
    """A thread that does one thing after the other."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.pending = 0
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def start(self, does: Callable[[], object]) -> None:
        self.pending += 1
        self.queue.put(does)

    def _run(self) -> None:
        while (does := self.queue.get()) is not None:
            does()
            self.pending -= 1

    def stop(self) -> None:
        self.queue.put(None)
        self.thread.join(DEADLINE)


class FakeDriver:
    """``fails`` names the calls that are refused: {"copy": {3}} is the third one, {"pin": ALL} is every one."""

    def __init__(self, *, slow: float = 0.0, read_only: bool = True) -> None:
        self.faults: list[str] = []
        self.calls: Counter[str] = Counter()
        self.fails: dict[str, Iterable[int]] = {}
        self.pins: dict[int, tuple[int, bool]] = {}
        self.contexts: set[int] = set()
        self._slow = slow
        self._read_only = read_only
        self._here = threading.local()
        self._lock = threading.RLock()
        self._number = 0
        self._streams: dict[int, _Stream] = {}
        self._events: dict[int, tuple[int, threading.Event]] = {}
        self._memory: dict[int, tuple[int, int]] = {}
        self._addresses: list[int] = []
        self._fences: dict[int, int] = {}
        self._followed: dict[int, int] = {}
        self._pending: dict[int, tuple[int, int, int]] = {}
        self._owner: dict[int, _Stream] = {}

    # -- what a test asks

    @property
    def streams(self) -> int:
        """How many there are at the moment."""
        return len(self._streams)

    @property
    def events(self) -> int:
        return len(self._events)

    @property
    def pending(self) -> int:
        """Copies that are under way."""
        return len(self._pending)

    def pending_to(self, address: int, nbytes: int) -> int:
        """Copies into some memory that are under way."""
        with self._lock:
            return sum(address <= target < address + nbytes for _, _, target in self._pending.values())

    def serves(self, address: int, nbytes: int, device: int) -> None:
        """Some memory is the device's from now on; it may be written after the next fence."""
        with self._lock:
            at = bisect_left(self._addresses, address)
            while at < len(self._addresses) and self._addresses[at] < address + nbytes:  # somebody else's before
                del self._memory[self._addresses.pop(at)]
            if at and sum((self._addresses[at - 1], self._memory[self._addresses[at - 1]][0])) > address:
                del self._memory[self._addresses.pop(at - 1)]
            insort(self._addresses, address)
            self._memory[address] = (nbytes, device)
            self._fences.pop(address, None)

    def fence(self, device: int) -> int:
        """An event for all memory served so far: a while from now its last owner is done with it."""
        owner = self._owner.get(device) or self._owner.setdefault(device, _Stream(device))
        done = threading.Event()

        def last() -> None:
            time.sleep(self._slow)
            done.set()

        owner.start(last)
        with self._lock:
            handle = self._handle()
            self._events[handle] = (device, done)
            for address in [each for each in self._memory if each not in self._fences]:
                if self._memory[address][1] == device:
                    self._fences[address] = handle
            return handle

    def close(self) -> None:
        """Stop all threads."""
        for stream in (*self._streams.values(), *self._owner.values()):
            stream.stop()

    def at(self, context: int) -> None:
        """Let this thread speak to something from the beginning on."""
        self._here.context = context

    # -- the driver

    def current_context(self) -> int:
        return getattr(self._here, "context", 0)

    def set_context(self, context: int) -> None:
        self._here.context = context

    def set_device(self, device: int) -> None:
        self._call("set_device")
        self._here.context = CONTEXT + device

    def create_stream(self) -> int:
        self._call("create_stream")
        with self._lock:
            handle = self._handle()
            self._streams[handle] = _Stream(self._entered())
            return handle

    def create_event(self) -> int:
        self._call("create_event")
        with self._lock:
            handle = self._handle()
            happened = threading.Event()
            happened.set()
            self._events[handle] = (self._entered(), happened)
            return handle

    def destroy(self, streams: Iterable[int], events: Iterable[int]) -> None:
        self._call("destroy")
        for handle in streams:
            stream = self._streams.pop(handle)
            if stream.pending or stream.device != self._entered():
                self.faults.append("a stream is given back that is not idle, or another device's")
            stream.stop()
        for handle in events:
            device, happened = self._events.pop(handle)
            if not happened.is_set() or device != self._entered():
                self.faults.append("an event is given back that has not happened, or another device's")

    def pin(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        self._call("pin read-only" if read_only else "pin")
        self._entered()
        with self._lock:
            if any(address < at + count and at < address + nbytes for at, (count, _) in self.pins.items()):
                self.faults.append("memory is pinned twice")
            self.pins[address] = (nbytes, read_only)

    def unpin(self, address: int) -> None:
        self._call("unpin")
        self._entered()
        with self._lock:
            nbytes, _ = self.pins.pop(address, (0, False))
            if not nbytes:
                self.faults.append("memory is unpinned that was not pinned")
            if any(at < address + nbytes and address < at + count for at, count, _ in self._pending.values()):
                self.faults.append("memory is unpinned that is being fetched")

    def copy(self, copies: Sequence[tuple[int, int, int]], stream: int) -> None:
        for target, source, nbytes in copies:
            self._call("copy")
            self._check(target, source, nbytes, stream)
            with self._lock:
                number = self._handle()
                self._pending[number] = (source, nbytes, target)
            self._start_copy(number, stream)

    def _start_copy(self, number: int, stream: int) -> None:
        source, nbytes, target = self._pending[number]
        before = bytes(memory_at(source, nbytes))

        def does() -> None:
            if nbytes > LONG:
                time.sleep(self._slow)
            if bytes(memory_at(source, nbytes)) != before:
                self.faults.append("memory is changed that is being fetched")
            ctypes.memmove(target, source, nbytes)
            with self._lock:
                del self._pending[number]

        self._streams[stream].start(does)

    def _check(self, target: int, source: int, nbytes: int, stream: int) -> None:
        with self._lock:
            pinned = any(at <= source and source + nbytes <= at + count for at, (count, _) in self.pins.items())
            address = self._addresses[bisect_right(self._addresses, target) - 1] if self._addresses else 0
            count, device = self._memory.get(address, (0, -1))
            fence = self._fences.get(address, 1 << 60)
        if not pinned and "pin" not in self.fails:
            self.faults.append("memory is copied that is not pinned")
        if not address <= target <= target + nbytes <= address + count or device != self._streams[stream].device:
            self.faults.append("memory is written that is not the device's")
        if self._followed.get(stream, 0) < fence:
            self.faults.append("memory is written that its last owner may still use")
        if self._streams[stream].device != self._entered():
            self.faults.append("a copy is started on a device that was not entered")

    def record_event(self, event: int, stream: int) -> None:
        self._call("record_event")
        happened = threading.Event()
        with self._lock:
            device, _ = self._events[event]
            if device != self._streams[stream].device:
                self.faults.append("an event is recorded on another device's stream")
            self._events[event] = (device, happened)
        self._streams[stream].start(happened.set)

    def wait_event(self, event: int) -> None:
        self._call("wait_event")
        assert self._events[event][1].wait(DEADLINE)

    def stream_wait_event(self, stream: int, event: int) -> None:
        self._call("stream_wait_event")
        happened = self._events[event][1]
        self._followed[stream] = max(event, self._followed.get(stream, 0))
        self._streams[stream].start(lambda: happened.wait(DEADLINE))

    def wait_stream(self, stream: int) -> None:
        done = threading.Event()
        self._streams[stream].start(done.set)
        assert done.wait(DEADLINE)
        self._call("wait_stream")

    def can_pin_read_only(self, device: int) -> bool:
        del device
        return self._read_only

    def _call(self, name: str) -> None:
        with self._lock:
            self.calls[name] += 1
            number = self.calls[name]
        self.contexts.add(self.current_context())
        if number in self.fails.get(name, ()):
            raise DriverError(f"{name} was told to fail")

    def _entered(self) -> int:
        if self.current_context() < CONTEXT:
            self.faults.append("no device was entered")
        return self.current_context() - CONTEXT

    def _handle(self) -> int:
        self._number += 1
        return self._number


class Goal:
    """Memory for what is wanted, made when it is asked for; what the file should have brought there."""

    def __init__(self, requests: Sequence[tuple[int, int, int, str]], driver: FakeDriver | None = None) -> None:
        self.asked: list[int] = []
        self._requests = requests
        self._driver = driver
        self._held: dict[int, bytearray] = {}

    def place(self, index: int) -> int:
        self.asked.append(index)
        _, _, nbytes, device = self._requests[index]
        made = self._held[index] = bytearray(b"\xaa" * nbytes)
        address = _address(made)
        if self._driver is not None and device != "cpu":
            self._driver.serves(address, nbytes, int(device.partition(":")[2]))
        return address

    def __getitem__(self, index: int) -> bytearray:
        return self._held[index]

    @property
    def pending(self) -> int:
        """Copies that are still under way to here."""
        driver = self._driver
        if driver is None:
            return 0
        return sum(driver.pending_to(_address(held), len(held)) for held in self._held.values())

    def check(self, *files: bytes) -> None:
        """Every request was asked for once, in the order of the files, and has its bytes."""
        order = list(self.asked)
        assert order == sorted(order, key=lambda index: self._requests[index][:2])
        assert sorted(order) == [index for index, request in enumerate(self._requests) if request[2]]
        for index in order:
            file, offset, nbytes, _ = self._requests[index]
            assert self._held[index] == files[file][offset : offset + nbytes], index


def _address(held: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(held))
