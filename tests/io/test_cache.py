"""How much of a file is in the page cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from transload.io import cache, sources
from transload.io.cache import Following, ReadAhead, ask_for, cached_fraction, pace
from transload.io.sources import FileSource

HAS_NOWAIT = hasattr(os, "RWF_NOWAIT")


def fake_preadv(answer: Callable[[int], int]) -> Callable[..., int]:
    return lambda _descriptor, _buffers, offset, _flags: answer(offset)


def cached_below(limit: int) -> Callable[[int], int]:
    """A file of which only the beginning is cached."""

    def answer(offset: int) -> int:
        if offset >= limit:
            raise BlockingIOError
        return 1

    return answer


@pytest.fixture
def file(tmp_path: Path) -> int:
    path = tmp_path / "x"
    path.write_bytes(bytes(100_000))
    return os.open(path, os.O_RDONLY)


@pytest.mark.skipif(not HAS_NOWAIT, reason="this system has no RWF_NOWAIT")
@pytest.mark.parametrize(
    ("limit", "fraction"), [(0, 0.0), (500_000, 0.5), (1_000_000, 1.0)], ids=["cold", "half", "warm"]
)
def test_cached_fraction_is_measured_by_samples(
    limit: int, fraction: float, file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", fake_preadv(cached_below(limit)), raising=False)
    assert cached_fraction(file, 0, 1_000_000) == pytest.approx(fraction, abs=1 / 32)
    os.close(file)


@pytest.mark.skipif(not HAS_NOWAIT, reason="this system has no RWF_NOWAIT")
def test_samples_are_taken_only_from_the_range(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled: list[int] = []

    def answer(offset: int) -> int:
        sampled.append(offset)
        return 1

    monkeypatch.setattr(os, "preadv", fake_preadv(answer))
    assert cached_fraction(file, 40_000, 90_000) == 1.0
    assert 40_000 <= min(sampled) < 45_000
    assert 80_000 < max(sampled) < 90_000
    assert len(sampled) <= 64
    os.close(file)


def test_file_just_written_is_cached_or_unknown(file: int) -> None:
    assert cached_fraction(file, 0, 100_000) in (None, 1.0)
    os.close(file)


@pytest.mark.parametrize(("begin", "end"), [(0, 0), (9, 3)])
def test_cached_fraction_of_an_empty_range_is_unknown(begin: int, end: int, file: int) -> None:
    assert cached_fraction(file, begin, end) is None
    os.close(file)


@pytest.mark.parametrize("begin", [2**62, 2**63, 2**70])
def test_offsets_beyond_any_file_are_not_cached(begin: int, file: int) -> None:
    assert not cached_fraction(file, begin, begin + 100_000)
    os.close(file)


def test_cached_fraction_is_unknown_without_system_support(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> int:
        raise OSError("operation not supported")

    monkeypatch.setattr(os, "preadv", refuses, raising=False)
    assert cached_fraction(file, 0, 100_000) is None
    monkeypatch.delattr(os, "RWF_NOWAIT", raising=False)
    assert cached_fraction(file, 0, 100_000) is None
    os.close(file)


@pytest.mark.skipif(not HAS_NOWAIT, reason="this system has no RWF_NOWAIT")
def test_a_cold_file_is_asked_for_few_bytes(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled: list[int] = []

    def answer(offset: int) -> int:
        sampled.append(offset)
        raise BlockingIOError

    monkeypatch.setattr(os, "preadv", fake_preadv(answer))
    assert cached_fraction(file, 0, 1 << 30) == 0.0
    assert len(sampled) == 4
    assert max(sampled) - min(sampled) > 1 << 29
    os.close(file)


# -- slow disks


class Clock:
    """A clock, and reads that each take as long as ``waits`` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, waits: list[float], known: bool | None) -> None:
        self.now, self.left = 0.0, list(waits)
        monkeypatch.setattr(cache, "perf_counter", lambda: self.now)
        monkeypatch.setattr(cache, "_is_cached", lambda *_: known)
        monkeypatch.setattr(os, "pread", self.pread)

    def pread(self, *_: object) -> bytes:
        self.now += self.left.pop(0)
        return b"x"


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="nothing can be asked for ahead here")
@pytest.mark.parametrize(
    ("known", "waits", "expected"),
    [
        (False, [0.008, 0.005, 0.004, *[0.0007] * 7], "seeking"),
        (False, [0.008, 0.005, 0.004, 0.0007, 0.02, 0.0007, 0.0007, 0.0007, 0.02, 0.02], "seeking"),  # some were late
        (False, [0.008, 0.0002], "quick"),  # the first was late for another reason
        (False, [0.0002], "quick"),
        (None, [0.0005, 0.0005, *[0.0004] * 8], "waiting"),
        (None, [0.02, 0.02, 0.02, 0.02, *[0.0, 0.02] * 3], "waiting"),  # two are always on the way
        (None, [0.05, 0.05, *[0.001] * 8], "seeking"),  # it streams
        (None, [0.00001] * 4, "quick"),  # it was cached
        (None, [0.00001, 0.02, 0.00001, 0.02, *[0.01] * 8], "waiting"),  # little of it was
        (True, [], "quick"),
    ],
    ids=[
        "disk",
        "busy disk",
        "busy",
        "solid-state",
        "network",
        "far network",
        "stream",
        "network, cached",
        "partly",
        "cached",
    ],
)
def test_pace_is_measured_by_reads_here_and_there_and_some_that_follow_one_another(
    known: bool | None, waits: list[float], expected: str, file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, waits, known)
    assert pace(file, 0, 1 << 30) == expected
    assert clock.left == []
    monkeypatch.undo()
    os.close(file)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="nothing can be asked for ahead here")
@pytest.mark.parametrize(
    ("first", "waits", "expected"),
    [
        ([0.008, 0.0001, 0.009], [0.004, *[0.0007] * 7], "seeking"),
        ([0.008, 0.009], [0.009] * 8, "waiting"),
        ([0.008, 0.0001], [0.0002], "quick"),
        ([0.008], [0.0002], "quick"),
    ],
    ids=["disk", "network", "one was late", "one"],
)
def test_slow_reads_that_were_necessary_anyway_are_not_repeated(
    first: list[float], waits: list[float], expected: str, file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, waits, known=False)
    assert pace(file, 0, 1 << 30, first) == expected
    assert clock.left == []
    monkeypatch.undo()
    os.close(file)


def test_a_source_times_its_first_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[float]] = []
    now = iter(range(100))
    monkeypatch.setattr(sources, "perf_counter", lambda: next(now) ** 2.0)

    def measured(_descriptor: int, _begin: int, _end: int, first: list[float]) -> str:
        asked.append(first)
        return "quick"

    monkeypatch.setattr(cache, "pace", measured)
    for size in (1 << 20, 17 << 20):
        (tmp_path / "x").write_bytes(bytes(size))
        source = FileSource(tmp_path / "x")
        for offset in range(5):
            source.read(offset, 10)
        assert source.pace == "quick"
        source.read(0, 10)
        assert source.pace == "quick"
        source.close()
    first = asked[0][0]
    assert asked == [[first, first + 4, first + 8, first + 12]], "of a large file, once, the first four"


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="nothing can be asked for ahead here")
def test_bytes_are_asked_for_in_order_and_no_further_than_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: asked.append(arguments[:3]))
    spans = [(5, 10, 300 << 20), (6, 0, 1000)]
    ahead = ReadAhead(spans)
    for done in (0, 0, 1 << 20, 200 << 20, 300 << 20):
        ahead.ask(done)
        assert sum(count for _, _, count in asked) < done + (64 << 20) + (128 << 10)
    assert ahead.done
    assert asked == sorted(asked)
    covered = {descriptor: sum(count for at, _, count in asked if at == descriptor) for descriptor in (5, 6)}
    assert covered == {5: (300 << 20) - 10, 6: 1000}


def test_a_refused_hint_does_no_harm() -> None:
    ask_for(-1, 0, 10)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="nothing can be asked for ahead here")
def test_reads_that_follow_one_another_ask_for_more_and_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, at, count, __: asked.append((at, at + count)))
    following, piece, size = Following(5, 1 << 30), 1 << 20, 1 << 30
    reach = 0
    for index in (0, 1, 3, 2, *range(4, 1024)):  # two threads take turns
        begin = index * piece
        following.read(begin, begin + piece)
        before, reach = reach, max(end for _, end in asked)
        assert min(begin + piece, size) <= reach <= min(size, begin + 2 * piece + (64 << 20))
        assert reach >= before
    assert asked == sorted(asked)  # and nothing was asked for twice
    assert sum(end - begin for begin, end in asked) == size == reach


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="nothing can be asked for ahead here")
def test_reads_here_and_there_ask_for_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, at, count, __: asked.append((at, at + count)))
    following = Following(5, 1 << 30)
    for begin in (700 << 20, 3 << 20, 90 << 20):
        following.read(begin, begin + 1000)
    assert asked == [(begin << 20, (begin << 20) + 1000) for begin in (700, 3, 90)]


@pytest.mark.parametrize("known", ["quick", "seeking", "waiting"])
def test_only_where_each_read_waits_a_file_asks_for_what_follows(
    known: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that seeks would go to and fro, and one that is quick would only cost the calls."""
    asked: list[int] = []
    monkeypatch.setattr(cache, "pace", lambda *_: known)
    monkeypatch.setattr(cache, "ask_for", lambda _, begin, __: asked.append(begin))
    path = tmp_path / "x"
    path.write_bytes(bytes(17 << 20))
    source = FileSource(path)
    for begin in (0, 1 << 20):
        source.readinto(begin, memoryview(bytearray(1 << 20)))
    assert bool(asked) == (known == "waiting")
    assert (source.hints != source.descriptor) == (known == "waiting" and os.path.exists("/proc/self/fd"))
    source.close()


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="nothing can be asked for ahead here")
def test_no_more_is_asked_for_at_once_than_the_system_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, at, count, __: asked.append((at, count)))
    ask_for(5, 1000, (300 << 10) + 1000)
    assert asked == [(1000, 128 << 10), (1000 + (128 << 10), 128 << 10), (1000 + (256 << 10), 44 << 10)]


def test_ranges_beyond_the_end_are_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory can name any place."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(cache, "pace", lambda *_: "waiting")
    monkeypatch.setattr(cache, "ask_for", lambda _, begin, end: asked.append((begin, end)))
    path = tmp_path / "x"
    path.write_bytes(bytes(17 << 20))
    source = FileSource(path)
    source.prepare([(1 << 64, 8), (10, 1 << 62), (0, 5)])
    source.close()
    assert asked == [(17 << 20, 17 << 20), (10, 17 << 20), (0, 5)]


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="nothing can be asked for ahead here")
def test_the_file_system_is_looked_up_once(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def name(descriptor: int) -> str:
        asked.append(descriptor)
        return "tmpfs"

    monkeypatch.setattr(cache, "file_system", name)
    Clock(monkeypatch, [0.00001] * 4, None)
    assert pace(file, 0, 1 << 30) == "quick"
    assert asked == [file]
    monkeypatch.undo()
    os.close(file)
