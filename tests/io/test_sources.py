"""Sources: files, bytes, file objects, slices and deflated data all give the same bytes."""

from __future__ import annotations

import gzip
import io
import mmap
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.each import each
from tests.forge import deflated

import transload
from transload.io.packed import Inflating
from transload.io.sources import BytesSource, Claim, FileSource, ObjectSource, Slice, Source


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
@each(("offset", "length"), [(0, 3), (2, 4), (5, 9), (6, 4), (99, 4), (0, 0), (0, 6)])
def test_readinto_reads_no_more_than_is_available(kind: str, offset: int, length: int, tmp_path: Path) -> None:
    data = b"abcdef"
    source = source_of(kind, data, tmp_path)
    buffer = bytearray(b"." * length)
    count = source.readinto(offset, memoryview(buffer))
    assert count == len(data[offset : offset + length])
    assert bytes(buffer) == data[offset : offset + length].ljust(length, b".")
    source.close()


@each("kind", KINDS)
def test_negative_offset_reads_nothing(kind: str, tmp_path: Path) -> None:
    source = source_of(kind, b"abcdef", tmp_path)
    buffer = bytearray(4)
    assert (source.read(-2, 4), source.readinto(-2, memoryview(buffer)), bytes(buffer)) == (b"", 0, bytes(4))
    source.close()


def test_slice_asks_its_base_for_what_lies_in_it() -> None:
    base = Recorder(b"xx" + b"abcdef" + b"yy")
    part = Slice(base, 2, 6, "part")
    part.prepare([(0, 4), (4, 9)])
    assert part.read_all([(1, 2), (4, 9), (-1, 3)]) == [b"bc", b"ef", b""]
    assert [part.holds(3, 2), part.holds(0, 2)] == [True, False]
    part.expect([Claim(0, 2, 3, lambda raw: raw.decode())])
    assert base.prepared == [(2, 4), (6, 2)]
    assert [claim[:3] for claim in base.claims] == [(2, 4, 5)]


class Recorder(BytesSource):
    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.prepared: list[tuple[int, int]] = []
        self.claims: list[Claim] = []

    def prepare(self, ranges: Sequence[tuple[int, int]]) -> None:
        self.prepared += ranges

    def holds(self, offset: int, count: int) -> bool:
        return (offset, count) == (5, 2)

    def expect(self, claims: Sequence[Claim]) -> None:
        self.claims += claims


class MinimalFile:
    """Only the methods that torch needs of a file object; ``seek`` returns ``None``, as that of ``mmap`` once did."""

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
    "minimal": lambda path: MinimalFile(path.read_bytes()),
    "spooled": lambda path: spooled(path.read_bytes()),
}


@each("kind", OBJECTS)
def test_file_objects_that_torch_accepts(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"w": torch.arange(3)}, path)
    for load in (torch.load, transload.load):
        file = OBJECTS[kind](path)
        assert load(file)["w"].tolist() == [0, 1, 2]
        getattr(file, "close", bool)()
    for check in (transload.inspect, transload.verify):
        file = OBJECTS[kind](path)
        assert check(file).ok
        getattr(file, "close", bool)()


class ShortReads(io.RawIOBase):
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


def test_file_object_with_short_reads(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"w": torch.arange(3000)}, path)
    with ShortReads(path) as opened:
        file: Any = opened
        assert transload.inspect(file).problems == ()
        assert transload.load(file)["w"].tolist() == [*range(3000)]


@each("function", ["inspect", "load", "open", "verify"])
def test_file_opened_as_text_is_rejected(function: str) -> None:
    with pytest.raises(transload.UsageError, match="returns text"):
        getattr(transload, function)(io.StringIO("abc"))


@each("function", ["inspect", "load", "open", "verify"])
@each("argument", [7, None, []])
def test_argument_that_is_not_a_file_is_rejected(function: str, argument: Any) -> None:
    with pytest.raises(AttributeError):
        torch.load(argument)
    with pytest.raises(transload.NotAFileError, match=r"not (int|NoneType|list)") as caught:
        getattr(transload, function)(argument)
    assert isinstance(caught.value, AttributeError)


@each("function", ["inspect", "load", "open", "verify"])
def test_non_contiguous_memoryview_is_rejected(function: str) -> None:
    with pytest.raises(transload.NotAFileError, match="not a plain sequence of bytes") as caught:
        getattr(transload, function)(memoryview(b"abcd")[::2])
    assert caught.value.fix == "Pass a copy: bytes(view)."


def test_source_left_open_at_exit_prints_nothing(tmp_path: Path) -> None:
    """The globals of its module may already be ``None`` when it is closed."""
    path = tmp_path / "a.pt"
    torch.save({"w": torch.arange(3)}, path)
    program = """
import sys
from transload.io.sources import FileSource
source = FileSource(sys.argv[1])
sys.modules["transload.io.sources"].os = None
del source
"""
    process = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True)
    assert process.stderr == ""
