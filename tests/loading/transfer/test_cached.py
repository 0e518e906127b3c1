"""How much of a file is in memory already."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from transload.loading.engine import cached_fraction

KNOWS = hasattr(os, "RWF_NOWAIT")


def answering(answer: Callable[[int], int]) -> Callable[..., int]:
    return lambda _descriptor, _buffers, offset, _flags: answer(offset)


def held_below(limit: int) -> Callable[[int], int]:
    """A file of which only the beginning is in memory."""

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


@pytest.mark.skipif(not KNOWS, reason="this system does not report it")
@pytest.mark.parametrize(("limit", "share"), [(0, 0.0), (500_000, 0.5), (1_000_000, 1.0)], ids=["cold", "half", "warm"])
def test_it_is_found_by_samples(limit: int, share: float, file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", answering(held_below(limit)), raising=False)
    assert cached_fraction(file, 0, 1_000_000) == share
    os.close(file)


@pytest.mark.skipif(not KNOWS, reason="this system does not report it")
def test_only_the_range_counts(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def answer(offset: int) -> int:
        asked.append(offset)
        return 1

    monkeypatch.setattr(os, "preadv", answering(answer))
    assert cached_fraction(file, 40_000, 90_000) == 1.0
    assert 40_000 <= min(asked) < 45_000
    assert 80_000 < max(asked) < 90_000
    assert len(asked) <= 64
    os.close(file)


def test_a_file_just_written_is_in_memory(file: int) -> None:
    assert cached_fraction(file, 0, 100_000) in (None, 1.0)
    os.close(file)


@pytest.mark.parametrize(("begin", "end"), [(0, 0), (9, 3)])
def test_nothing_is_nowhere(begin: int, end: int, file: int) -> None:
    assert cached_fraction(file, begin, end) is None
    os.close(file)


@pytest.mark.parametrize("begin", [2**62, 2**63, 2**70])
def test_positions_that_no_file_has(begin: int, file: int) -> None:
    assert not cached_fraction(file, begin, begin + 100_000)
    os.close(file)


def test_a_system_that_does_not_say(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> int:
        raise OSError("operation not supported")

    monkeypatch.setattr(os, "preadv", refuses, raising=False)
    assert cached_fraction(file, 0, 100_000) is None
    monkeypatch.delattr(os, "RWF_NOWAIT", raising=False)
    assert cached_fraction(file, 0, 100_000) is None
    os.close(file)
