"""Archives written in pieces: piece size, threads and sink do not change the file."""

from __future__ import annotations

import functools
import io
import os
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.each import each

from transload.formats import zip_writer as archive
from transload.formats.zip_writer import Chunk, NewRecord, write_archive
from transload.io.atomic import DescriptorFile, FileObject


class LoggedBuffer:
    """An object that a chunk keeps alive; it logs its creation, use and deletion."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        log.append("made")

    def ready(self) -> None:
        self._log.append("ready")

    def __del__(self) -> None:
        self._log.append("done")


class ChunkedBytes:
    """Yields bytes in chunks."""

    def __init__(self, data: bytes, step: int, log: list[str] | None = None) -> None:
        self._data, self._step, self._log = data, step, log

    def __call__(self) -> Iterator[Chunk]:
        for start in range(0, len(self._data), self._step):
            part = memoryview(self._data)[start : start + self._step]
            if self._log is None:
                yield Chunk(part)
            else:
                yield Chunk(part, LoggedBuffer(self._log).ready)


@functools.cache
def noise(count: int) -> bytes:
    return bytes(number * number % 251 for number in range(count))


SIZES = [0, 1, 63, 64, 65, 1000, 20_000, 0, 70_000, 5, 300_000, 3]


def contents() -> list[tuple[bytes, bytes]]:
    return [(b"data/%d" % number, noise(size)) for number, size in enumerate(SIZES)]


def write_records(sink: Any, step: int = 0, **options: Any) -> None:
    def records() -> Iterator[NewRecord]:
        for name, data in contents():
            yield (name, len(data), ChunkedBytes(data, step) if step and data else data)

    write_archive(sink, b"a", records(), lambda sums: [(b"count", 2, b"%2d" % len(sums))], **options)


def in_memory(**options: Any) -> bytes:
    buffer = io.BytesIO()
    write_records(FileObject(buffer), **options)
    return buffer.getvalue()


@each("threads", [0, 1, 3])
@each("step", [1000, 65536, 1 << 20])
@each("piece", [1, 100_000, 8 << 20])
def test_piece_size_and_threads_do_not_change_the_archive(
    threads: int, step: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = in_memory()
    monkeypatch.setattr(archive, "PIECE", piece)
    assert in_memory(step=step, threads=threads) == expected
    with zipfile.ZipFile(io.BytesIO(expected)) as opened:
        assert opened.testzip() is None
        assert [(info.filename, opened.read(info)) for info in opened.infolist()] == [
            *((f"a/{name.decode()}", data) for name, data in contents()),
            ("a/count", b"12"),
        ]


def test_descriptor_file_gets_the_same_bytes(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0))
    write_records(DescriptorFile(descriptor), step=7000, threads=2)
    os.close(descriptor)
    assert (tmp_path / "a").read_bytes() == in_memory()


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.writev
    monkeypatch.setattr(os, "writev", lambda file, buffers: real(file, [bytes(buffers[0])[:1013]]))
    descriptor = os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0))
    write_records(DescriptorFile(descriptor), step=50_000)
    os.close(descriptor)
    assert (tmp_path / "a").read_bytes() == in_memory()


def test_more_buffers_than_one_writev_takes_are_written(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT)
    DescriptorFile(descriptor).write([b"%d," % number for number in range(5000)])
    os.close(descriptor)
    assert (tmp_path / "a").read_bytes() == b"".join(b"%d," % number for number in range(5000))


@pytest.mark.parametrize("threads", [0, 2])
def test_written_chunks_are_freed(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most the chunks read ahead, the chunk being written and the chunk being created are alive."""
    monkeypatch.setattr(archive, "PIECE", 1000)
    log: list[str] = []
    data = noise(50_000)
    buffer = io.BytesIO()
    write_archive(
        FileObject(buffer), b"a", [(b"x", len(data), ChunkedBytes(data, 1000, log))], lambda _: [], threads=threads
    )
    alive = [log[:end].count("made") - log[:end].count("done") for end in range(len(log) + 1)]
    assert max(alive) <= archive.AHEAD + 2
    assert (log.count("made"), log.count("ready"), log.count("done")) == (50, 50, 50)
    with zipfile.ZipFile(buffer) as opened:
        assert opened.read("a/x") == data


@pytest.mark.parametrize("threads", [0, 2])
def test_error_in_a_chunk_is_raised(threads: int) -> None:
    def failing() -> Iterator[Chunk]:
        yield Chunk(b"x" * 10)
        yield Chunk(b"x" * 10, ready=lambda: 1 // 0)

    with pytest.raises(ZeroDivisionError):
        write_archive(FileObject(io.BytesIO()), b"a", [(b"x", 20, failing)], lambda _: [], threads=threads)


def test_record_shorter_than_declared_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="has 20 bytes, and 10 came"):
        write_archive(FileObject(io.BytesIO()), b"a", [(b"x", 20, ChunkedBytes(b"x" * 10, 5))], lambda _: [])


def test_reported_progress_adds_up_to_the_record_sizes() -> None:
    counts: list[int] = []
    write_records(FileObject(io.BytesIO()), step=1 << 20, report_progress=counts.append)
    assert sum(counts) == sum(SIZES)


def test_interrupted_writer_leaves_no_threads() -> None:
    import threading

    class Interrupted(FileObject):
        def write(self, buffers: Sequence[Any]) -> None:
            raise KeyboardInterrupt(len(buffers))

    before = threading.active_count()
    data = noise(3_000_000)
    with pytest.raises(KeyboardInterrupt):
        write_archive(
            Interrupted(None), b"a", [(b"x", len(data), ChunkedBytes(data, 100_000))], lambda _: [], threads=3
        )
    assert threading.active_count() == before


def test_sink_gets_few_large_buffers() -> None:
    class Counting(FileObject):
        writes = 0

        def write(self, buffers: Sequence[Any]) -> None:
            self.writes += len(buffers)

    sink = Counting(None)
    many = [(b"data/%d" % number, 256, b"x" * 256) for number in range(10_000)]
    write_archive(sink, b"a", many, lambda _: [])
    assert sink.writes <= 40, "buffers of about 100 kB each"
