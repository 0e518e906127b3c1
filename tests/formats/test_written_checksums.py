"""Checksums of an archive being written: computed by threads, or without threads where none can start."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from threading import Thread
from typing import Any
from zlib import crc32

import pytest

from transload.formats.zip_writer import Chunk, NewRecord, write_archive
from transload.io.atomic import FileObject

PARTS = [b"trans", b"load" * 1000, b"", b"\0" * 70_000]


class NullSink(FileObject):
    def write(self, buffers: Sequence[Any]) -> None:
        pass


def checksums_of_parts(threads: int) -> list[int]:
    result: list[int] = []

    def closing(checksums: list[int]) -> list[NewRecord]:
        result.extend(checksums)
        return []

    records = [(b"%d" % len(part), len(part), partial(iter, [Chunk(memoryview(part))])) for part in PARTS]
    write_archive(NullSink(None), b"a", records, closing, threads=threads)
    return result


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_checksums_equal_zlib_crc32(threads: int) -> None:
    assert checksums_of_parts(threads) == [crc32(part) for part in PARTS]


def test_checksums_are_computed_when_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(Thread, "start", refused)
    assert checksums_of_parts(2) == [crc32(part) for part in PARTS]


LATE = """
import threading, time
from transload.formats.zip_writer import Chunk, NewRecord, write_archive
class Nowhere:
    def write(self, buffers): pass
def late():
    while threading.main_thread().is_alive():
        time.sleep(0.001)
    records = [(b"x", 1, lambda: iter([Chunk(b"x")]))]
    write_archive(Nowhere(), b"a", records, lambda checksums: print(checksums) or [], threads=2)
threading.Thread(target=late).start()
"""


def test_checksums_are_computed_during_interpreter_shutdown() -> None:
    process = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=True)
    assert process.stdout == f"[{crc32(b'x')}]\n"
