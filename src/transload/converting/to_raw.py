"""A directory of raw tensors: each the bytes of its numbers in a file with a number for a name, and an index in JSON.

The names of tensors stand in the index alone: a file's own words are never made paths.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from transload.converting.comparing import Back
from transload.converting.moving import Writer
from transload.dtypes import ITEMSIZE, QUANTIZED
from transload.errors import ConvertError

if TYPE_CHECKING:
    from transload.converting.entries import Data, Entry, Sorted
    from transload.converting.job import Job

__all__ = ["FORMAT", "INDEX", "holds", "write_raw"]

INDEX = "index.json"
FORMAT = "transload-raw"
_OPEN = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def holds(dtype: str) -> bool:
    """Whether the numbers of a dtype mean something by themselves."""
    return dtype in ITEMSIZE and dtype not in QUANTIZED


def write_raw(job: Job, found: Sorted, data: Data) -> list[Back]:
    """Write the files and the index; where everything is now."""
    from transload.io.sources import FileSource

    folder = job.bundle.add_folder(job.dst)
    for number, entry in enumerate(found.entries):
        descriptor = os.open(_join(folder.hidden, _file(number)), _OPEN, 0o666)
        try:
            writer = Writer(descriptor, job.tell)
            writer.put(entry, data)
            writer.flush()
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        job.copied += writer.copied
    index = _index(found)
    text = json.dumps(index, indent=1).encode() + b"\n"
    descriptor = os.open(_join(folder.hidden, INDEX), _OPEN, 0o666)
    try:
        Writer(descriptor, None).whole(text)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    places = []
    for number, entry in enumerate(found.entries):
        path = _join(folder.hidden, _file(number))
        if os.stat(path).st_size != entry.nbytes:  # noqa: PTH116 - texts throughout, as given
            raise ConvertError(f"{entry.name} is not read back as it was written", where=job.dst)
        places.append(Back(entry, _Later(path, FileSource), 0))
    return places


class _Later:
    """A file that is opened when it is read, and closed again: there may be more of them than can be open."""

    def __init__(self, path: str, opened: type) -> None:
        self.name = path
        self.size = os.stat(path).st_size  # noqa: PTH116 - as above
        self._opened = opened

    def read(self, offset: int, count: int) -> bytes:
        """Up to ``count`` bytes from ``offset`` on."""
        source = self._opened(self.name)
        try:
            data: bytes = source.read(offset, count)
        finally:
            source.close()
        return data

    def readinto(self, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from ``offset`` on; how many bytes there were."""
        data = self.read(offset, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Nothing is open."""


def _file(number: int) -> str:
    return f"{number:06d}.bin"


def _join(folder: str, name: str) -> str:
    return os.path.join(folder, name)  # noqa: PTH118 - as above


def _index(found: Sorted) -> dict[str, object]:
    return {
        "format": FORMAT,
        "version": 1,
        "byteorder": "little",
        "order": "row-major",
        "tensors": {entry.name: _described(number, entry) for number, entry in enumerate(found.entries)},
        "aliases": dict(found.aliases),
    }


def _described(number: int, entry: Entry) -> dict[str, object]:
    return {"file": _file(number), "dtype": entry.dtype, "shape": list(entry.shape), "nbytes": entry.nbytes}
