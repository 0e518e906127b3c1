"""Bytes into a file, from front to back: copied by the kernel where they lie in a file as they are, else written."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transload.tensors import ContentError

if TYPE_CHECKING:
    from transload.converting.entries import Data, Entry
    from transload.tensors import Run

__all__ = ["Descriptor", "Writer"]

_GATHERED = 1 << 20  # small writes are put together up to here
_LARGE = 256 << 10  # from here on bytes are copied by the kernel, below that a call costs more than the copy
_AT_ONCE = 64 << 20  # between two parts of this size progress is told, and a signal is seen

Tell = Callable[[int], None]


class Writer:
    """Writes a file by its descriptor; ``copied`` counts the bytes that the kernel copied by itself."""

    def __init__(self, descriptor: int, tell: Tell | None) -> None:
        from transload.io.atomic import SystemFile

        self._descriptor = descriptor
        self._sink = SystemFile(descriptor, push=True)
        self._tell = tell or _nobody
        self._held: list[bytes] = []
        self._nbytes = 0
        self._kernel = hasattr(os, "copy_file_range")
        self.copied = 0
        self.written = 0

    def write(self, data: Any) -> None:
        """Bytes that may change afterwards: small ones are kept for a while, as a copy."""
        if len(data) >= _GATHERED:
            self.flush()
            self._sink.write([data])
        else:
            self._held.append(bytes(data))
            self._nbytes += len(data)
            if self._nbytes >= _GATHERED:
                self.flush()
        self.written += len(data)
        self._tell(len(data))

    def flush(self) -> None:
        """Write what was kept."""
        if self._held:
            self._sink.write([b"".join(self._held)])
            self._held, self._nbytes = [], 0

    def whole(self, data: bytes) -> None:
        """All there is to write."""
        self.write(data)
        self.flush()

    def put(self, entry: Entry, data: Data) -> None:
        """The bytes of an entry."""
        before = self.written
        run = data.run(entry) if entry.nbytes >= _LARGE and self._kernel else None
        source = data.content.open_file(run.file) if run is not None else None
        if run is not None and hasattr(source, "descriptor"):
            self._copy(source, run)
            left = run.nbytes - (self.written - before)
            if not left:
                return
            self._read(source, run, run.nbytes - left)
            return
        for piece in data.pieces(entry):
            self.write(piece)
        if self.written - before != entry.nbytes:
            raise ContentError(f"{entry.name} has {self.written - before:,} bytes, not {entry.nbytes:,}")

    def _copy(self, source: Any, run: Run) -> None:
        """As much as the kernel copies."""
        self.flush()
        done = 0
        while done < run.nbytes:
            try:
                count = os.copy_file_range(
                    source.descriptor, self._descriptor, min(_AT_ONCE, run.nbytes - done), run.offset + done
                )
            except OSError:  # from one file system to another, on some network ones; or the disk is full, told below
                self._kernel = False
                return
            if not count:
                return
            done += count
            self.copied += count
            self.written += count
            self._tell(count)

    def _read(self, source: Any, run: Run, done: int) -> None:
        """The rest, through our own memory."""
        while done < run.nbytes:
            data = source.read(run.offset + done, min(_GATHERED, run.nbytes - done))
            if not data:
                raise ContentError(f"the file has become shorter while it was read: {source.name}")
            self.write(data)
            done += len(data)


def _nobody(_: int) -> None:
    return


class Descriptor:
    """A file that was just written, read by its descriptor: a ``Source``."""

    def __init__(self, descriptor: int, name: str) -> None:
        self.name = name
        self.size = os.fstat(descriptor).st_size
        self._descriptor = descriptor

    def read(self, offset: int, count: int) -> bytes:
        """Up to ``count`` bytes from ``offset`` on."""
        count = min(count, self.size - offset)
        out = b""
        while len(out) < count:
            more = self._pread(count - len(out), offset + len(out))
            if not more:
                break
            out += more
        return out

    def _pread(self, count: int, offset: int) -> bytes:
        if hasattr(os, "pread"):
            return os.pread(self._descriptor, count, offset)
        os.lseek(self._descriptor, offset, os.SEEK_SET)
        return os.read(self._descriptor, count)

    def readinto(self, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from ``offset`` on; how many bytes there were."""
        data = self.read(offset, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """It belongs to who has opened it."""
