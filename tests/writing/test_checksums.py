"""Checksums computed by threads, and where there can be none."""

from __future__ import annotations

import subprocess
import sys
from threading import Thread
from zlib import crc32

import pytest

from transload.formats.zip_writer import Chunk, checksum_threads

PARTS = [b"trans", b"load" * 1000, b"", b"\0" * 70_000]


def computed(threads: int) -> list[int]:
    with checksum_threads(threads) as start:
        begun = [start([Chunk(memoryview(part))]) for part in PARTS]
        return [value for result in begun for value in result()]


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_they_are_those_of_zlib(threads: int) -> None:
    assert computed(threads) == [crc32(part) for part in PARTS]


def test_without_a_thread_to_be_had_they_are_computed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(Thread, "start", refused)
    assert computed(2) == [crc32(part) for part in PARTS]


LATE = """
import threading, time
from transload.formats.zip_writer import Chunk, checksum_threads
def late():
    while threading.main_thread().is_alive():
        time.sleep(0.001)
    with checksum_threads(2) as start:
        print(start([Chunk(b"x")])())
threading.Thread(target=late).start()
"""


def test_while_a_program_ends_they_are_computed_all_the_same() -> None:
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=True)
    assert done.stdout == f"[{crc32(b'x')}]\n"
