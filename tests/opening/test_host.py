"""Reading into host memory: any requests, from any kind of source, with any number of threads."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

import pytest
from tests.opening.fake import Targets

from transload.errors import CannotReadError
from transload.io.sources import BytesSource, FileSource, ObjectSource, Source
from transload.opening.engine import read_ranges
from transload.opening.jobs import CELL, Checksums, HostLane, ReadRequest, Run, Settings, ShortReadError

SEEDS = range(4)


def random_requests(
    seed: int, nbytes: int, *, files: int = 1, devices: tuple[str, ...] = ("cpu",)
) -> list[ReadRequest]:
    """Requests of all sizes, in any order, some overlapping, some empty."""
    random = Random(seed)  # noqa: S311 - the same every time
    requests = []
    for _ in range(random.choice([1, 3, 20])):
        size = min(nbytes, random.choice([0, 1, 100, 4096, 40_000, 1_000_001, CELL + 77]))
        offset = random.randrange(nbytes - size + 1)
        requests.append(ReadRequest(random.randrange(files), offset, size, random.choice(devices)))
    start = random.randrange(nbytes // 2)
    requests += [ReadRequest(0, start + 320 * index, 256, devices[0]) for index in range(random.choice([0, 1, 500]))]
    random.shuffle(requests)
    return requests


@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_requests_are_read(seed: int, threads: int, blob: bytes, blob_path: Path, *, direct: bool) -> None:
    requests = random_requests(seed, len(blob))
    targets, reported, checksums = Targets(requests), list[int](), Checksums()
    source = FileSource(blob_path)
    settings = Settings(threads=threads, direct=direct)
    choice = read_ranges(
        [source], requests, targets.place, settings=settings, report_progress=reported.append, checksums=checksums
    )
    source.close()
    assert (choice.lanes <= threads, choice.direct) == (True, direct)
    targets.check(blob)
    assert sum(reported) == sum(request.nbytes for request in requests)
    assert checksums.whole(len(requests)) == [
        crc32(blob[request.offset : request.offset + request.nbytes]) for request in requests
    ]


@pytest.mark.parametrize("kind", ["bytes", "object", "file"])
@pytest.mark.parametrize("seed", SEEDS[:3])
def test_sources_without_a_path_are_read_in_one_lane(seed: int, kind: str, blob: bytes, blob_path: Path) -> None:
    requests = random_requests(seed, len(blob))
    targets = Targets(requests)
    with blob_path.open("rb") as opened:
        source: Source = BytesSource(blob) if kind == "bytes" else ObjectSource(opened)
        if kind == "object":
            source = ObjectSource(io.BytesIO(blob))
        choice = read_ranges([source], requests, targets.place, settings=Settings(threads=4, direct=True))
    assert (choice.lanes, choice.direct) == (1, False)
    targets.check(blob)


@pytest.mark.parametrize("threads", [1, 3])
def test_requests_of_several_files_are_read(threads: int, blob: bytes, blob_path: Path, tmp_path: Path) -> None:
    other = blob[::-1]
    (tmp_path / "other").write_bytes(other)
    sources = [FileSource(blob_path), FileSource(tmp_path / "other")]
    requests = [ReadRequest(1, 5, 3 * CELL), ReadRequest(0, 5, 3 * CELL), ReadRequest(1, 0, 9), ReadRequest(0, 0, 9)]
    targets = Targets(requests)
    read_ranges(sources, requests, targets.place, settings=Settings(threads=threads))
    targets.check(blob, other)
    for source in sources:
        source.close()


def test_empty_requests_place_and_report_nothing(blob_path: Path) -> None:
    source = FileSource(blob_path)
    targets, reported = Targets([]), list[int]()
    read_ranges([source], [], targets.place, report_progress=reported.append)
    read_ranges([], [], targets.place)
    read_ranges([source], [ReadRequest(0, 7, 0)], targets.place)
    assert (targets.placed, reported) == ([], [])
    source.close()


def test_memory_beyond_a_request_is_not_written(blob: bytes, blob_path: Path) -> None:
    source = FileSource(blob_path)
    requests = [ReadRequest(0, CELL - 300, 100), ReadRequest(0, CELL - 100, 200), ReadRequest(0, CELL + 300, 5000)]
    targets = Targets([request._replace(nbytes=request.nbytes + 64) for request in requests])
    read_ranges([source], requests, targets.place)
    for index, request in enumerate(requests):
        assert targets[index] == blob[request.offset : request.offset + request.nbytes] + b"\xaa" * 64
    source.close()


# -- truncated files


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
@pytest.mark.parametrize("cut", [0, 1, CELL - 1, CELL, 3 * CELL + 17, 5 * CELL - 1])
def test_truncated_file_is_a_short_read_error(
    cut: int, threads: int, blob: bytes, tmp_path: Path, *, direct: bool
) -> None:
    """The error has the incomplete request and its bytes received, whichever thread finds it."""
    path = tmp_path / "cut"
    path.write_bytes(blob[: 5 * CELL])
    source = FileSource(path)
    os.truncate(path, cut)
    requests = [ReadRequest(0, 0, 5 * CELL)]
    with pytest.raises(ShortReadError) as raised:
        read_ranges([source], requests, Targets(requests).place, settings=Settings(threads=threads, direct=direct))
    assert (raised.value.request, raised.value.received) == (0, cut)
    source.close()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("offset", [5 * CELL, 2**62, 2**63, 2**64 + 5])
def test_request_beyond_the_end_is_a_short_read_error(offset: int, threads: int, blob: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(blob[: 5 * CELL])
    source = FileSource(path)
    requests = [ReadRequest(0, 0, 5 * CELL), ReadRequest(0, offset, 10)]
    with pytest.raises(ShortReadError) as raised:
        read_ranges([source], requests, Targets(requests).place, settings=Settings(threads=threads))
    assert (raised.value.request, raised.value.received) == (1, 0)
    source.close()


def test_read_error_is_a_cannot_read_error(blob_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FileSource(blob_path)

    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    requests = [ReadRequest(0, 0, 5 * CELL)]
    monkeypatch.setattr(os, "preadv", broken, raising=False)
    with pytest.raises(CannotReadError, match="Input/output error"):
        read_ranges([source], requests, Targets(requests).place, settings=Settings(threads=2, direct=True))
    source.close()


# -- other errors


@pytest.mark.parametrize("threads", [1, 3])
def test_error_while_placing_a_request_is_raised(threads: int, blob: bytes, blob_path: Path) -> None:
    source = FileSource(blob_path)
    requests = [ReadRequest(0, CELL * index, CELL) for index in range(8)]
    targets = Targets(requests)

    def place(index: int) -> int:
        if index == 5:
            raise MemoryError("full")
        return targets.place(index)

    with pytest.raises(MemoryError, match="full"):
        read_ranges([source], requests, place, settings=Settings(threads=threads))
    assert targets.placed == [0, 1, 2, 3, 4]
    contents = [bytes(targets[index]) for index in targets.placed]
    assert all(
        content in (b"\xaa" * CELL, blob[CELL * index : CELL * index + CELL]) for index, content in enumerate(contents)
    )
    source.close()


@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
def test_all_descriptors_are_closed(blob_path: Path, *, direct: bool) -> None:
    if sys.platform != "linux":
        pytest.skip("this system has no /proc/self/fd")
    source = FileSource(blob_path)
    requests = [ReadRequest(0, 0, 5 * CELL), ReadRequest(0, 2**62, 10)]
    settings = Settings(threads=2, direct=direct)
    before = sorted(Path("/proc/self/fd").iterdir())
    read_ranges([source], requests[:1], Targets(requests).place, settings=settings)
    with pytest.raises(ShortReadError):
        read_ranges([source], requests, Targets(requests).place, settings=settings)
    assert sorted(Path("/proc/self/fd").iterdir()) == before
    source.close()


# -- checksums


def test_checksums_can_be_added_in_any_order(blob: bytes) -> None:
    from ctypes import addressof, c_char

    memory = bytearray(blob[: 3 * CELL])
    base = addressof(c_char.from_buffer(memory))
    runs = [Run(offset, 0, offset, min(CELL, 3 * CELL - offset)) for offset in range(0, 3 * CELL, CELL)]
    runs += [Run(7, 2, 0, 1), Run(8, 2, 1, 4000)]
    for seed in range(5):
        checksums = Checksums()
        Random(seed).shuffle(runs)  # noqa: S311 - the same every time
        for run in runs:
            checksums.add(run, base + run.offset)
        assert checksums.whole(3) == [crc32(memory), 0, crc32(memory[7:4008])]


# -- a lane alone


def test_host_lane_counts_the_bytes_it_has_read(blob: bytes, blob_path: Path) -> None:
    from transload.opening.jobs import File, jobs

    requests = [ReadRequest(0, 100, CELL), ReadRequest(0, 3 * CELL, 10)]
    targets = Targets(requests)
    source = FileSource(blob_path)
    lane = HostLane([File(source)], {index: targets.place(index) for index in range(2)})
    waiting: Any = iter(jobs(requests))
    lane.run(lambda: next(waiting, None))
    assert lane.done == CELL + 10
    targets.check(blob)
    source.close()
