"""Bytes into the memory of the host: any requests, from any kind of source, in any number of threads."""

from __future__ import annotations

import io
import os
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

import pytest
from tests.loading.transfer.fake import Goal

from transload.errors import CannotReadError
from transload.io.sources import BytesSource, FileSource, ObjectSource, Source
from transload.loading.engine import read_ranges
from transload.loading.jobs import CELL, Checksums, HostLane, ReadRequest, Run, Settings, ShortReadError

SEEDS = range(4)


def requests_of(seed: int, nbytes: int, *, files: int = 1, devices: tuple[str, ...] = ("cpu",)) -> list[ReadRequest]:
    """Wants of all sizes, in any order, some of them overlapping, some of nothing."""
    dice = Random(seed)  # noqa: S311 - the same every time
    made = []
    for _ in range(dice.choice([1, 3, 20])):
        size = min(nbytes, dice.choice([0, 1, 100, 4096, 40_000, 1_000_001, CELL + 77]))
        offset = dice.randrange(nbytes - size + 1)
        made.append(ReadRequest(dice.randrange(files), offset, size, dice.choice(devices)))
    start = dice.randrange(nbytes // 2)
    made += [ReadRequest(0, start + 320 * index, 256, devices[0]) for index in range(dice.choice([0, 1, 500]))]
    dice.shuffle(made)
    return made


@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_requests_of_all_kinds(seed: int, threads: int, blob: bytes, blob_path: Path, *, direct: bool) -> None:
    requests = requests_of(seed, len(blob))
    goal, told, checksums = Goal(requests), list[int](), Checksums()
    source = FileSource(blob_path)
    settings = Settings(threads=threads, direct=direct)
    choice = read_ranges(
        [source], requests, goal.place, settings=settings, report_progress=told.append, checksums=checksums
    )
    source.close()
    assert (choice.lanes <= threads, choice.direct) == (True, direct)
    goal.check(blob)
    assert sum(told) == sum(request.nbytes for request in requests)
    assert checksums.whole(len(requests)) == [
        crc32(blob[request.offset : request.offset + request.nbytes]) for request in requests
    ]


@pytest.mark.parametrize("kind", ["bytes", "object", "file"])
@pytest.mark.parametrize("seed", SEEDS[:3])
def test_sources_of_all_kinds(seed: int, kind: str, blob: bytes, blob_path: Path) -> None:
    requests = requests_of(seed, len(blob))
    goal = Goal(requests)
    with blob_path.open("rb") as opened:
        source: Source = BytesSource(blob) if kind == "bytes" else ObjectSource(opened)
        if kind == "object":
            source = ObjectSource(io.BytesIO(blob))
        choice = read_ranges([source], requests, goal.place, settings=Settings(threads=4, direct=True))
    assert (choice.lanes, choice.direct) == (1, False)
    goal.check(blob)


@pytest.mark.parametrize("threads", [1, 3])
def test_several_files_at_once(threads: int, blob: bytes, blob_path: Path, tmp_path: Path) -> None:
    other = blob[::-1]
    (tmp_path / "other").write_bytes(other)
    sources = [FileSource(blob_path), FileSource(tmp_path / "other")]
    requests = [ReadRequest(1, 5, 3 * CELL), ReadRequest(0, 5, 3 * CELL), ReadRequest(1, 0, 9), ReadRequest(0, 0, 9)]
    goal = Goal(requests)
    read_ranges(sources, requests, goal.place, settings=Settings(threads=threads))
    goal.check(blob, other)
    for source in sources:
        source.close()


def test_nothing_is_wanted(blob_path: Path) -> None:
    source = FileSource(blob_path)
    goal, told = Goal([]), list[int]()
    read_ranges([source], [], goal.place, report_progress=told.append)
    read_ranges([], [], goal.place)
    read_ranges([source], [ReadRequest(0, 7, 0)], goal.place)
    assert (goal.asked, told) == ([], [])
    source.close()


def test_memory_outside_of_what_is_wanted_is_not_touched(blob: bytes, blob_path: Path) -> None:
    source = FileSource(blob_path)
    requests = [ReadRequest(0, CELL - 300, 100), ReadRequest(0, CELL - 100, 200), ReadRequest(0, CELL + 300, 5000)]
    goal = Goal([request._replace(nbytes=request.nbytes + 64) for request in requests])
    read_ranges([source], requests, goal.place)
    for index, request in enumerate(requests):
        assert goal[index] == blob[request.offset : request.offset + request.nbytes] + b"\xaa" * 64
    source.close()


# -- files that end too early


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
@pytest.mark.parametrize("cut", [0, 1, CELL - 1, CELL, 3 * CELL + 17, 5 * CELL - 1])
def test_a_file_that_was_cut(cut: int, threads: int, blob: bytes, tmp_path: Path, *, direct: bool) -> None:
    """The one that is not all there is named, and how much of it is, whichever thread finds out."""
    path = tmp_path / "cut"
    path.write_bytes(blob[: 5 * CELL])
    source = FileSource(path)
    os.truncate(path, cut)
    requests = [ReadRequest(0, 0, 5 * CELL)]
    with pytest.raises(ShortReadError) as raised:
        read_ranges([source], requests, Goal(requests).place, settings=Settings(threads=threads, direct=direct))
    assert (raised.value.request, raised.value.received) == (0, cut)
    source.close()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("offset", [5 * CELL, 2**62, 2**63, 2**64 + 5])
def test_what_lies_behind_the_end(offset: int, threads: int, blob: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(blob[: 5 * CELL])
    source = FileSource(path)
    requests = [ReadRequest(0, 0, 5 * CELL), ReadRequest(0, offset, 10)]
    with pytest.raises(ShortReadError) as raised:
        read_ranges([source], requests, Goal(requests).place, settings=Settings(threads=threads))
    assert (raised.value.request, raised.value.received) == (1, 0)
    source.close()


def test_a_file_that_cannot_be_read(blob_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FileSource(blob_path)

    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    requests = [ReadRequest(0, 0, 5 * CELL)]
    monkeypatch.setattr(os, "preadv", broken, raising=False)
    with pytest.raises(CannotReadError, match="Input/output error"):
        read_ranges([source], requests, Goal(requests).place, settings=Settings(threads=2, direct=True))
    source.close()


# -- what goes wrong elsewhere


@pytest.mark.parametrize("threads", [1, 3])
def test_there_is_no_place(threads: int, blob: bytes, blob_path: Path) -> None:
    source = FileSource(blob_path)
    requests = [ReadRequest(0, CELL * index, CELL) for index in range(8)]
    goal = Goal(requests)

    def place(index: int) -> int:
        if index == 5:
            raise MemoryError("full")
        return goal.place(index)

    with pytest.raises(MemoryError, match="full"):
        read_ranges([source], requests, place, settings=Settings(threads=threads))
    assert goal.asked == [0, 1, 2, 3, 4]
    held = [bytes(goal[index]) for index in goal.asked]
    assert all(made in (b"\xaa" * CELL, blob[CELL * index : CELL * index + CELL]) for index, made in enumerate(held))
    source.close()


@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
def test_every_descriptor_is_closed_again(blob_path: Path, *, direct: bool) -> None:
    if not Path("/proc/self/fd").exists():
        pytest.skip("this system does not report it")
    source = FileSource(blob_path)
    requests = [ReadRequest(0, 0, 5 * CELL), ReadRequest(0, 2**62, 10)]
    settings = Settings(threads=2, direct=direct)
    before = sorted(Path("/proc/self/fd").iterdir())
    read_ranges([source], requests[:1], Goal(requests).place, settings=settings)
    with pytest.raises(ShortReadError):
        read_ranges([source], requests, Goal(requests).place, settings=settings)
    assert sorted(Path("/proc/self/fd").iterdir()) == before
    source.close()


# -- checksums


def test_sums_come_in_any_order(blob: bytes) -> None:
    from ctypes import addressof, c_char

    held = bytearray(blob[: 3 * CELL])
    base = addressof(c_char.from_buffer(held))
    runs = [Run(at, 0, at, min(CELL, 3 * CELL - at)) for at in range(0, 3 * CELL, CELL)]
    runs += [Run(7, 2, 0, 1), Run(8, 2, 1, 4000)]
    for seed in range(5):
        checksums = Checksums()
        Random(seed).shuffle(runs)  # noqa: S311 - the same every time
        for run in runs:
            checksums.add(run, base + run.offset)
        assert checksums.whole(3) == [crc32(held), 0, crc32(held[7:4008])]


# -- the lane by itself


def test_a_lane_counts_what_it_has_brought(blob: bytes, blob_path: Path) -> None:
    from transload.loading.jobs import File, jobs

    requests = [ReadRequest(0, 100, CELL), ReadRequest(0, 3 * CELL, 10)]
    goal = Goal(requests)
    source = FileSource(blob_path)
    lane = HostLane([File(source)], {index: goal.place(index) for index in range(2)})
    waiting: Any = iter(jobs(requests))
    lane.run(lambda: next(waiting, None))
    assert lane.done == CELL + 10
    goal.check(blob)
    source.close()
