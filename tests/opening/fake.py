"""A fake CUDA driver: device memory is host memory, streams are threads, and misuse is recorded.

Copies run later, in order within each stream, as on a device. ``faults`` records what must not happen: copying from
memory that is not pinned, into memory that its last owner may still use, or into memory of another device; changing,
unpinning or destroying what is still in use; calls without the right current device.
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

__all__ = ["CALLS", "FakeDriver", "Targets"]

CALLS = ("set_device", "create_stream", "create_event", "stream_wait_event", "copy", "record_event", "wait_event")
"""The calls of one transfer; any of them may fail."""

DEADLINE = 100.0  # seconds after which a wait gives up
SLOW_COPY = 100_000  # a copy of more bytes takes time
CONTEXT = 1000  # the context of a device has this handle plus its number


class _Stream:
    """A thread that runs tasks one after the other."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.pending = 0
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def start(self, task: Callable[[], object]) -> None:
        self.pending += 1
        self.queue.put(task)

    def _run(self) -> None:
        while (task := self.queue.get()) is not None:
            task()
            self.pending -= 1

    def stop(self) -> None:
        self.queue.put(None)
        self.thread.join(DEADLINE)


class FakeDriver:
    """``fails`` says which calls fail: {"copy": {3}} is the third copy, {"pin": range(1, 99)} the first 98 pins."""

    def __init__(self, *, slow: float = 0.0, read_only: bool = True) -> None:
        self.faults: list[str] = []
        self.calls: Counter[str] = Counter()
        self.fails: dict[str, Iterable[int]] = {}
        self.pins: dict[int, tuple[int, bool]] = {}
        self.contexts: set[int] = set()
        self._slow = slow
        self._read_only = read_only
        self._local = threading.local()
        self._lock = threading.RLock()
        self._number = 0
        self._streams: dict[int, _Stream] = {}
        self._events: dict[int, tuple[int, threading.Event]] = {}
        self._memory: dict[int, tuple[int, int]] = {}
        self._addresses: list[int] = []
        self._fences: dict[int, int] = {}
        self._awaited: dict[int, int] = {}
        self._pending: dict[int, tuple[int, int, int]] = {}
        self._owner: dict[int, _Stream] = {}

    # -- for the tests

    @property
    def streams(self) -> int:
        """The number of existing streams."""
        return len(self._streams)

    @property
    def events(self) -> int:
        return len(self._events)

    @property
    def pending(self) -> int:
        """The number of copies in progress."""
        return len(self._pending)

    def pending_to(self, address: int, nbytes: int) -> int:
        """The number of copies into this memory in progress."""
        with self._lock:
            return sum(address <= target < address + nbytes for _, _, target in self._pending.values())

    def add_memory(self, address: int, nbytes: int, device: int) -> None:
        """Treat this memory as the device's from now on; it may be written after the next fence."""
        with self._lock:
            index = bisect_left(self._addresses, address)
            while (
                index < len(self._addresses) and self._addresses[index] < address + nbytes
            ):  # memory of an earlier owner
                del self._memory[self._addresses.pop(index)]
            if index and sum((self._addresses[index - 1], self._memory[self._addresses[index - 1]][0])) > address:
                del self._memory[self._addresses.pop(index - 1)]
            insort(self._addresses, address)
            self._memory[address] = (nbytes, device)
            self._fences.pop(address, None)

    def fence(self, device: int) -> int:
        """Return an event for all memory added so far: it is set once the last owner has finished with it."""
        owner = self._owner.get(device) or self._owner.setdefault(device, _Stream(device))
        done = threading.Event()

        def finish() -> None:
            time.sleep(self._slow)
            done.set()

        owner.start(finish)
        with self._lock:
            handle = self._handle()
            self._events[handle] = (device, done)
            for address in [start for start in self._memory if start not in self._fences]:
                if self._memory[address][1] == device:
                    self._fences[address] = handle
            return handle

    def close(self) -> None:
        """Stop all threads."""
        for stream in (*self._streams.values(), *self._owner.values()):
            stream.stop()

    def enter_context(self, context: int) -> None:
        """Give this thread a current context."""
        self._local.context = context

    # -- the driver API

    def current_context(self) -> int:
        return getattr(self._local, "context", 0)

    def set_context(self, context: int) -> None:
        self._local.context = context

    def set_device(self, device: int) -> None:
        self._call("set_device")
        self._local.context = CONTEXT + device

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
                self.faults.append("a stream was destroyed that is not idle or belongs to another device")
            stream.stop()
        for handle in events:
            device, happened = self._events.pop(handle)
            if not happened.is_set() or device != self._entered():
                self.faults.append("an event was destroyed that is pending or belongs to another device")

    def pin(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        self._call("pin read-only" if read_only else "pin")
        self._entered()
        with self._lock:
            if any(address < start + count and start < address + nbytes for start, (count, _) in self.pins.items()):
                self.faults.append("memory was pinned twice")
            self.pins[address] = (nbytes, read_only)

    def unpin(self, address: int) -> None:
        self._call("unpin")
        self._entered()
        with self._lock:
            nbytes, _ = self.pins.pop(address, (0, False))
            if not nbytes:
                self.faults.append("memory was unpinned that is not pinned")
            if any(start < address + nbytes and address < start + count for start, count, _ in self._pending.values()):
                self.faults.append("memory was unpinned during a copy from it")

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

        def run() -> None:
            if nbytes > SLOW_COPY:
                time.sleep(self._slow)
            if bytes(memory_at(source, nbytes)) != before:
                self.faults.append("memory was changed during a copy from it")
            ctypes.memmove(target, source, nbytes)
            with self._lock:
                del self._pending[number]

        self._streams[stream].start(run)

    def _check(self, target: int, source: int, nbytes: int, stream: int) -> None:
        with self._lock:
            pinned = any(
                start <= source and source + nbytes <= start + count for start, (count, _) in self.pins.items()
            )
            address = self._addresses[bisect_right(self._addresses, target) - 1] if self._addresses else 0
            count, device = self._memory.get(address, (0, -1))
            fence = self._fences.get(address, 1 << 60)
        if not pinned and "pin" not in self.fails:
            self.faults.append("memory was copied that is not pinned")
        if not address <= target <= target + nbytes <= address + count or device != self._streams[stream].device:
            self.faults.append("memory was written that does not belong to the device")
        if self._awaited.get(stream, 0) < fence:
            self.faults.append("memory was written that its last owner may still use")
        if self._streams[stream].device != self._entered():
            self.faults.append("a copy was started on a device that is not current")

    def record_event(self, event: int, stream: int) -> None:
        self._call("record_event")
        happened = threading.Event()
        with self._lock:
            device, _ = self._events[event]
            if device != self._streams[stream].device:
                self.faults.append("an event was recorded on a stream of another device")
            self._events[event] = (device, happened)
        self._streams[stream].start(happened.set)

    def wait_event(self, event: int) -> None:
        self._call("wait_event")
        assert self._events[event][1].wait(DEADLINE)

    def stream_wait_event(self, stream: int, event: int) -> None:
        self._call("stream_wait_event")
        happened = self._events[event][1]
        self._awaited[stream] = max(event, self._awaited.get(stream, 0))
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
            self.faults.append("no device is current")
        return self.current_context() - CONTEXT

    def _handle(self) -> int:
        self._number += 1
        return self._number


class Targets:
    """Memory for read requests, allocated when the engine asks for it; checks the bytes that arrived."""

    def __init__(self, requests: Sequence[tuple[int, int, int, str]], driver: FakeDriver | None = None) -> None:
        self.placed: list[int] = []
        self._requests = requests
        self._driver = driver
        self._memory_of: dict[int, bytearray] = {}

    def place(self, index: int) -> int:
        self.placed.append(index)
        _, _, nbytes, device = self._requests[index]
        memory = self._memory_of[index] = bytearray(b"\xaa" * nbytes)
        address = _address(memory)
        if self._driver is not None and device != "cpu":
            self._driver.add_memory(address, nbytes, int(device.partition(":")[2]))
        return address

    def __getitem__(self, index: int) -> bytearray:
        return self._memory_of[index]

    @property
    def pending(self) -> int:
        """The number of copies into this memory in progress."""
        driver = self._driver
        if driver is None:
            return 0
        return sum(driver.pending_to(_address(memory), len(memory)) for memory in self._memory_of.values())

    def check(self, *files: bytes) -> None:
        """Every request was placed once, in file order, and has its bytes."""
        order = list(self.placed)
        assert order == sorted(order, key=lambda index: self._requests[index][:2])
        assert sorted(order) == [index for index, request in enumerate(self._requests) if request[2]]
        for index in order:
            file, offset, nbytes, _ = self._requests[index]
            assert self._memory_of[index] == files[file][offset : offset + nbytes], index


def _address(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
