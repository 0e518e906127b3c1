"""Reading a checkpoint into the page cache in the background, while the program imports torch.

While one thread imports, another seldom gets its turn. So each read is one long system call, which needs none. Its
bytes go to a small buffer and are dropped: the copy that counts is the one in the page cache.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import takewhile
from threading import Lock, Thread

from transload.errors import LoadError
from transload.io.cache import STREAMING, WARM, cached_fraction, file_system
from transload.io.limits import memory
from transload.io.paths import folder_of, is_set
from transload.io.sources import FileSource, is_url, shown

__all__ = ["Prefetch", "prefetch", "take_over"]

_THREADS = 8
"""Reads at a time. 1, 2, 4 and 8 read a cold disk at 2.2, 3.1, 3.4 and 3.9 GB/s."""
_NETWORK_THREADS = 32
"""The same for a file system elsewhere, where each waits for an answer. A spinning disk would seek between them."""
_LEAST = 8 << 20
_PIECE = 128 << 20
"""The most bytes of a call, which ends before its thread can stop. With 32 MiB the threads wait too often for their
turn: a load of 4 GB began half a second after torch was ready, not at once."""
_SCRATCH = 1 << 20
_USELESS = ("tmpfs", "ramfs", *STREAMING)
"""File systems without a disk, and those whose files leave the page cache when they are opened again."""

_LONGEST = 10.0
"""Seconds that a fork waits at most."""

_running: dict[Prefetch, set[tuple[int, int]]] = {}
"""The files that each reads, as device and inode."""
_preparing = Lock()
"""Held while a thread finds out what to read, and imports modules for that. A child that is forked meanwhile would wait
for ever for the lock of such a module."""
_forking: list[bool] = []


def _before_fork() -> None:
    _forking.append(_preparing.acquire(timeout=_LONGEST))


def _after_fork() -> None:
    if _forking.pop():
        _preparing.release()


def _in_child() -> None:
    _running.clear()  # their threads are in the parent
    _after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)


def prefetch(path: str | os.PathLike[str]) -> Prefetch:
    """Start to read a checkpoint into the page cache, and return at once.

    Call it before you import torch: the disk is then read while Python imports, and ``load`` finds the bytes in memory.
    If it is not done by then, ``load`` reads the rest. ``path`` is a file, a directory, or the index of shards.

    It is a hint: it raises nothing, and does nothing where it cannot help, such as for a file that is cached already,
    for one on tmpfs, and on Windows. At most half of the memory that this process may use is filled, with clean pages
    that the system can drop at any time.

    >>> transload.prefetch("model.pt")      # doctest: +SKIP
    >>> import torch                        # doctest: +SKIP
    >>> transload.load("model.pt")          # doctest: +SKIP
    """
    return Prefetch(os.fsdecode(path))


class Prefetch:
    """A read in progress, which goes on whether this object is kept or not."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.nbytes = 0
        """Bytes read so far."""
        self._absolute = path
        self._stopped = False
        self._lock = Lock()
        self._thread = Thread(target=self._run, daemon=True)
        if hasattr(os, "preadv"):
            # The current directory may change, or be gone; and the system limits threads.
            with suppress(RuntimeError, OSError):
                self._absolute = path if is_url(path) else os.path.abspath(path)
                self._thread.start()

    def __repr__(self) -> str:
        state = "reading" if self._thread.is_alive() else "ended"
        return f"<Prefetch of {shown(self.path)!r}: {state}, {self.nbytes:,} bytes>"

    def cancel(self) -> None:
        """Stop after the calls in progress. What was read stays in the page cache."""
        self._stopped = True

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it has ended, at most so long; return whether it has."""
        if self._thread.is_alive():
            self._thread.join(seconds)
        return not self._thread.is_alive()

    # -- in the background

    def _run(self) -> None:
        def read(piece: tuple[FileSource, int, int]) -> None:
            source, begin, end = piece
            with suppress(OSError):
                while begin < end and (nbytes := _skim(source, begin, end, scratch)):
                    begin += nbytes
                    with self._lock:
                        self.nbytes += nbytes

        try:
            with suppress(LoadError, OSError, ValueError):  # if something is wrong, load says what
                with _preparing:
                    from transload.io.pool import each

                    paths = _files(self._absolute)
                    _running[self] = set(map(_identity, paths))
                    with closing(FileSource(max(paths, key=os.path.getsize))) as largest:
                        _helps(largest)  # which imports modules
                        count = _NETWORK_THREADS if _waits(largest) else _THREADS
                scratch = memoryview(mmap.mmap(-1, _SCRATCH))
                each(takewhile(lambda _: not self._stopped, _pieces(paths)), lambda: read, count)
        finally:
            _running.pop(self, None)


def take_over(descriptor: int) -> bool:
    """Stop reading the files of the checkpoint that this open file belongs to; return whether one was being read."""
    identity = _identity(descriptor)
    reading = [each for each, files in [*_running.items()] if identity in files]
    for each in reading:
        each.cancel()
    return bool(reading)


def _identity(file: str | int) -> tuple[int, int]:
    status = os.stat(file)
    return status.st_dev, status.st_ino


def _files(path: str) -> list[str]:
    """The files of a checkpoint; none of one elsewhere."""
    if is_url(path):
        return []
    if not is_set(path):
        return [path]
    from transload.opening import OpenCheckpoint

    folder, _ = folder_of(path)
    with OpenCheckpoint(path, tree=False, lazy=True) as opened:
        return [folder.path(part.name) for part in opened.checkpoint.parts if part.role == "member"]


def _helps(source: FileSource) -> bool:
    """Whether a load is faster if a file is read now."""
    cached = cached_fraction(source.descriptor, 0, source.size)
    return file_system(source.descriptor) not in _USELESS if cached is None else cached < WARM


def _waits(source: FileSource) -> bool:
    """Whether each read waits, so that many at once are faster."""
    return source.pace == "waiting"


def _pieces(paths: list[str]) -> Iterator[tuple[FileSource, int, int]]:
    """What to read, in order, as ranges of files, each of which is open only while it is read."""
    left = memory()[0] // 2
    for source in filter(_helps, map(FileSource, paths)):  # each closes itself when its last range is dropped
        piece = min(_PIECE, max(_LEAST, source.size // _NETWORK_THREADS)) if _waits(source) else _PIECE
        for begin in range(0, source.size, piece):
            end = min(begin + piece, source.size)
            left -= end - begin
            if left < 0:
                return
            yield source, begin, end


def _skim(source: FileSource, begin: int, end: int, scratch: memoryview) -> int:
    """Read a range in one call, all of it into the same memory; return the number of bytes."""
    whole, rest = divmod(end - begin, len(scratch))
    return os.preadv(source.descriptor, [scratch] * whole + [scratch[:rest]], begin)
