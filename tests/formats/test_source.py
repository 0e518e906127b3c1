"""Sources: the same bytes, whichever way they are read."""

from __future__ import annotations

import gzip
import io
import mmap
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.each import each
from tests.forge import deflated

import transload
from transload.io.sources import BytesSource, FileSource, ObjectSource, Slice, Source
from transload.tensors.content import Inflating


def source_of(kind: str, data: bytes, folder: Path) -> Source:
    (folder / "f").write_bytes(data)
    sources: dict[str, Callable[[], Source]] = {
        "file": lambda: FileSource(folder / "f"),
        "bytes": lambda: BytesSource(data),
        "object": lambda: ObjectSource(io.BytesIO(data)),
        "slice": lambda: Slice(BytesSource(b"xx" + data + b"yy"), 2, 6, "part"),
        "deflated": lambda: Inflating(BytesSource(deflated(data)), 0, len(deflated(data)), len(data)),
    }
    return sources[kind]()


KINDS = ["file", "bytes", "object", "slice", "deflated"]


@each("kind", KINDS)
@each(("offset", "room"), [(0, 3), (2, 4), (5, 9), (6, 4), (99, 4), (0, 0), (0, 6)])
def test_readinto_fills_as_much_as_there_is(kind: str, offset: int, room: int, tmp_path: Path) -> None:
    data = b"abcdef"
    source = source_of(kind, data, tmp_path)
    buffer = bytearray(b"." * room)
    count = source.readinto(offset, memoryview(buffer))
    assert count == len(data[offset : offset + room])
    assert bytes(buffer) == data[offset : offset + room].ljust(room, b".")
    source.close()


@each("kind", KINDS)
def test_there_is_nothing_before_the_beginning(kind: str, tmp_path: Path) -> None:
    source = source_of(kind, b"abcdef", tmp_path)
    buffer = bytearray(4)
    assert (source.read(-2, 4), source.readinto(-2, memoryview(buffer)), bytes(buffer)) == (b"", 0, bytes(4))
    source.close()


class Plain:
    """What torch asks of a file object, and no more; its ``seek`` returns nothing, as that of ``mmap`` did."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)
        self.read, self.tell, self.readline = self._file.read, self._file.tell, self._file.readline

    def seek(self, position: int, whence: int = 0) -> None:
        self._file.seek(position, whence)


def spooled(data: bytes) -> object:
    file = tempfile.SpooledTemporaryFile()  # noqa: SIM115 - closed with the test
    file.write(data)
    file.seek(0)
    return file


def mapped(path: Path) -> object:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


OBJECTS: dict[str, Callable[[Path], Any]] = {
    "BytesIO": lambda path: io.BytesIO(path.read_bytes()),
    "BufferedReader": lambda path: path.open("rb"),
    "FileIO": lambda path: path.open("rb", buffering=0),
    "gzip": lambda path: gzip.GzipFile(fileobj=io.BytesIO(gzip.compress(path.read_bytes()))),
    "mmap": mapped,
    "nothing more": lambda path: Plain(path.read_bytes()),
    "spooled": lambda path: spooled(path.read_bytes()),
}


@each("kind", OBJECTS)
def test_objects_that_torch_takes(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"w": torch.arange(3)}, path)
    for ask in (torch.load, transload.load):
        file = OBJECTS[kind](path)
        assert ask(file)["w"].tolist() == [0, 1, 2]
        getattr(file, "close", bool)()
    for look in (transload.inspect, transload.verify):
        file = OBJECTS[kind](path)
        assert look(file).ok
        getattr(file, "close", bool)()


class Unbuffered(io.RawIOBase):
    """Returns a few bytes at a time, as a raw stream may."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self.seek, self.tell = self._file.seek, self._file.tell  # type: ignore[method-assign]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._file.readinto(memoryview(buffer)[:1000])

    def close(self) -> None:
        self._file.close()


def test_an_object_that_returns_fewer_bytes_than_it_has(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"w": torch.arange(3000)}, path)
    with Unbuffered(path) as opened:
        file: Any = opened
        assert transload.inspect(file).problems == ()
        assert transload.load(file)["w"].tolist() == [*range(3000)]


@each("ask", ["inspect", "load", "open", "verify"])
def test_a_file_that_is_open_as_text(ask: str) -> None:
    with pytest.raises(transload.UsageError, match="returns text"):
        getattr(transload, ask)(io.StringIO("abc"))


@each("ask", ["inspect", "load", "open", "verify"])
@each("given", [7, None, []])
def test_what_is_not_a_file(ask: str, given: Any) -> None:
    with pytest.raises(AttributeError):
        torch.load(given)
    with pytest.raises(transload.NotAFileError, match=r"not (int|NoneType|list)") as caught:
        getattr(transload, ask)(given)
    assert isinstance(caught.value, AttributeError)


@each("ask", ["inspect", "load", "open", "verify"])
def test_bytes_with_gaps_between_them(ask: str) -> None:
    with pytest.raises(transload.NotAFileError, match="not a plain sequence of bytes") as caught:
        getattr(transload, ask)(memoryview(b"abcd")[::2])
    assert caught.value.fix == "Pass a copy: bytes(view)."


def test_a_handle_that_is_left_open_at_the_end_says_nothing(tmp_path: Path) -> None:
    """Modules may have lost their names when it is closed."""
    path = tmp_path / "a.pt"
    torch.save({"w": torch.arange(3)}, path)
    program = """
import sys
from transload.io.sources import FileSource
source = FileSource(sys.argv[1])
sys.modules["transload.io.sources"].os = None
del source
"""
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True)
    assert done.stderr == ""
