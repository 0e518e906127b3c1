"""A file system that makes readers wait, as a spinning disk or a network does: a read-only view of a folder, by FUSE.

    python -m tests.slow_disk FOLDER MOUNTPOINT LATENCY RATE SEEK FORGETS

It runs in a process of its own until its input ends, and then prints what it counted as JSON. Reads go through the
page cache of the kernel, with its own readahead. Needs Linux, ``/dev/fuse`` and root.
"""

from __future__ import annotations

import ctypes
import heapq
import json
import os
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

CAN_MOUNT = sys.platform == "linux" and os.access("/dev/fuse", os.W_OK) and os.geteuid() == 0

# The protocol of the kernel: include/uapi/linux/fuse.h.
_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _STATFS, _RELEASE, _FLUSH = 1, 2, 3, 14, 15, 17, 18, 25
_INIT, _OPENDIR, _READDIR, _RELEASEDIR, _INTERRUPT, _BATCH_FORGET = 26, 27, 28, 29, 36, 42
_REQUEST = struct.Struct("<IIQQIIII")  # length, opcode, unique, node, and four that do not matter here
_REPLY = struct.Struct("<IiQ")  # length, error, unique
_ATTRIBUTES = struct.Struct("<6Q10I")
_ENTRY = struct.Struct("<QQII")  # of a directory: node, position of the next, length of the name, type
_NOT_FOUND, _NOT_BUILT = -2, -38
_FLAGS = 1 << 0 | 1 << 15 | 1 << 18 | 1 << 22  # reads at once, also direct ones; lookups at once; more than 128 kB
_MOST_READ = 1 << 20
_READ_ONLY, _KEEP_CACHE, _DETACH = 1, 2, 2
_MAY_LAG = 0.005  # seconds by which a disk may be late, since this is Python, and make up for it


class CannotMountError(Exception):
    """This process may not mount file systems."""


class Kind(NamedTuple):
    """How a file system makes readers wait."""

    latency: float = 0.0
    """Seconds until a read is answered, however many wait at once."""
    rate: float = 0.0
    """Bytes a second that all reads share; 0 for no limit."""
    seek: float = 0.0
    """Seconds for a read that does not begin where the one before it ended. A little ahead takes as long as reading."""
    forgets: int = 0
    """1 if the kernel is to drop what it holds of a file that is opened again."""


SPINNING = Kind(rate=180e6, seek=0.008)
NETWORK = Kind(latency=0.001, rate=1.2e9)
OBJECTS = Kind(latency=0.02, rate=1e9)


@contextmanager
def mounted(folder: str | os.PathLike[str], kind: Kind) -> Iterator[tuple[Path, Callable[[], dict[str, int]]]]:
    """Mount a view of a folder; yield where it is, and a function that ends it and returns what was counted."""
    with tempfile.TemporaryDirectory() as target:
        command = [sys.executable, "-m", "tests.slow_disk", os.fspath(folder), target, *map(str, kind)]
        root = Path(__file__).resolve().parent.parent
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": root}
        with subprocess.Popen(command, **pipes) as process:
            counted: dict[str, int] = {}

            def end() -> dict[str, int]:
                if not counted and process.poll() is None:
                    counted.update(json.loads(process.communicate(timeout=20)[0]))
                return counted

            try:
                assert process.stdout is not None
                if process.stdout.readline() != "ready\n":
                    raise CannotMountError
                yield Path(target), end
            finally:
                with suppress(ValueError):
                    end()


class _Disk:
    def __init__(self, folder: str, device: int, kind: Kind) -> None:
        self._folder, self._device, self._kind = folder, device, kind
        self._names = ["", *sorted(os.listdir(folder))]
        self._files: dict[int, int] = {}
        self._turn = threading.Condition()
        self._queue: list[tuple[int, int, int, int]] = []  # for the head of a spinning disk
        self._due: list[tuple[float, int, int, int, int]] = []  # answers, by their time
        self._head = (0, 0)
        self._free = 0.0  # when the disk, or the network, has sent everything before
        self.counted = {"reads": 0, "seeks": 0, "most at once": 0}

    def serve(self) -> None:
        """Take requests, in their order, until it is unmounted."""
        while True:
            try:
                request = os.read(self._device, _MOST_READ + 4096)
            except OSError:
                return
            _, opcode, unique, node, *_ = _REQUEST.unpack_from(request)
            if opcode == _READ:
                _, offset, count = struct.unpack_from("<QQI", request, _REQUEST.size)
                self._take(unique, node, offset, count)
            elif opcode not in (_FORGET, _BATCH_FORGET, _INTERRUPT):
                self._reply(unique, self._answer(opcode, node, request[_REQUEST.size :]))

    def _take(self, unique: int, node: int, offset: int, count: int) -> None:
        with self._turn:
            if self._kind.seek:
                self._queue.append((node, offset, count, unique))
            else:
                self._free = max(self._free, time.monotonic()) + (count / self._kind.rate if self._kind.rate else 0)
                heapq.heappush(self._due, (self._free + self._kind.latency, node, offset, count, unique))
            self.counted["reads"] += 1
            self.counted["most at once"] = max(self.counted["most at once"], len(self._queue) + len(self._due))
            self._turn.notify_all()

    def spin(self) -> None:
        """Serve the nearest read ahead of the head, as elevators do, else the first."""
        while True:
            with self._turn:
                while not self._queue:
                    self._turn.wait()
                request = min([each for each in self._queue if each[:2] >= self._head] or self._queue)
                self._queue.remove(request)
                node, offset, count, _ = request
                before, at = self._head
                self.counted["seeks"] += self._head != (node, offset)
                ahead = (offset - at) / self._kind.rate if before == node and offset >= at else self._kind.seek
                self._head = (node, offset + count)
                start = max(self._free, time.monotonic() - _MAY_LAG)
                self._free = start + count / self._kind.rate + min(self._kind.seek, ahead)
                heapq.heappush(self._due, (self._free, *request))
                self._turn.notify_all()
                free = self._free
            time.sleep(max(0.0, free - time.monotonic()))

    def send(self) -> None:
        """Answer reads when it is time."""
        while True:
            with self._turn:
                while not self._due or self._due[0][0] > time.monotonic():
                    self._turn.wait(max(0.0, self._due[0][0] - time.monotonic()) if self._due else None)
                _, node, offset, count, unique = heapq.heappop(self._due)
            self._reply(unique, os.pread(self._files[node], count, offset))

    def _reply(self, unique: int, answer: int | bytes) -> None:
        error, data = (answer, b"") if isinstance(answer, int) else (0, answer)
        with suppress(OSError):  # whoever asked is gone
            os.writev(self._device, [_REPLY.pack(_REPLY.size + len(data), error, unique), data])

    def _answer(self, opcode: int, node: int, body: bytes) -> int | bytes:
        if opcode == _INIT:
            ahead, flags = struct.unpack_from("<8xII", body)
            return struct.pack("<4IHHIIHH24x", 7, 31, ahead, flags & _FLAGS, 64, 48, _MOST_READ, 1, 256, 0)
        if opcode == _LOOKUP:
            name = body.rstrip(b"\0").decode()
            child = self._names.index(name) + 1 if name in self._names else 0
            return struct.pack("<4Q8x", child, 0, 3600, 3600) + self._attributes(child) if child else _NOT_FOUND
        if opcode == _GETATTR:
            return struct.pack("<Q8x", 3600) + self._attributes(node)
        if opcode in (_OPEN, _OPENDIR):
            if opcode == _OPEN and node not in self._files:
                self._files[node] = os.open(self._path(node), os.O_RDONLY)
            return struct.pack("<QII", node, 0 if self._kind.forgets else _KEEP_CACHE, 0)
        if opcode == _READDIR:
            _, offset, size = struct.unpack_from("<QQI", body)
            return self._entries(offset)[:size]
        if opcode == _STATFS:
            return bytes(80)
        return b"" if opcode in (_RELEASE, _FLUSH, _RELEASEDIR) else _NOT_BUILT

    def _entries(self, first: int) -> bytes:
        out = b""
        for index, name in enumerate(self._names[first + 1 :], first + 1):
            entry = _ENTRY.pack(index + 1, index, len(name.encode()), stat.S_IFREG >> 12) + name.encode()
            out += entry.ljust(-(-len(entry) // 8) * 8, b"\0")
        return out

    def _path(self, node: int) -> str:
        return os.path.join(self._folder, self._names[node - 1])

    def _attributes(self, node: int) -> bytes:
        status = os.stat(self._path(node))
        times = int(status.st_atime), int(status.st_mtime), int(status.st_ctime)
        nanoseconds = 0, status.st_mtime_ns % 10**9, 0
        owner = status.st_mode, 1, 0, 0, 0  # also the number of links, and of a device
        return _ATTRIBUTES.pack(node, status.st_size, status.st_blocks, *times, *nanoseconds, *owner, 4096, 0)


def main(folder: str, target: str, latency: str, rate: str, seek: str, forgets: str) -> None:
    """Serve until the input ends."""
    device = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,max_read={_MOST_READ}"
    if libc.mount(b"slow", target.encode(), b"fuse", _READ_ONLY, options.encode()):
        sys.exit(os.strerror(ctypes.get_errno()))
    try:
        disk = _Disk(folder, device, Kind(float(latency), float(rate), float(seek), int(forgets)))
        for work in (disk.serve, disk.spin, *[disk.send] * 4):
            threading.Thread(target=work, daemon=True).start()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.read()
    finally:
        libc.umount2(target.encode(), _DETACH)
    sys.stdout.write(json.dumps(disk.counted))


if __name__ == "__main__":
    main(*sys.argv[1:])
