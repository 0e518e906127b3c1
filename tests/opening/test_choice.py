"""How the engine chooses to move bytes, as a table of cases."""

from __future__ import annotations

import pytest

from transload.frozen import replace
from transload.opening import engine
from transload.opening.engine import Choice, Facts, choose
from transload.opening.jobs import CELL, FEW_BYTES, SLOT_PAIR, Settings

GB = 1 << 30
DEFAULT = Settings()

TABLE = {
    # to the host
    "one core": (Facts(GB, 0, 1, 1.0), DEFAULT, Choice(4, first=1)),
    "two cores": (Facts(GB, 0, 2, 1.0), DEFAULT, Choice(8, first=2)),
    "four cores": (Facts(GB, 0, 4, 1.0), DEFAULT, Choice(4)),
    "sixteen cores": (Facts(GB, 0, 16, 1.0), DEFAULT, Choice(16)),
    "more cores than help": (Facts(GB, 0, 128, 1.0), DEFAULT, Choice(16)),
    "tiny": (Facts(1000, 0, 16, 1.0), DEFAULT, Choice(1)),
    "no bytes": (Facts(0, 0, 16, 1.0), DEFAULT, Choice(1)),
    "two cores, too little for more": (Facts(7 * CELL, 0, 2, 1.0), DEFAULT, Choice(2)),
    "two cores, threads": (Facts(GB, 0, 2, 1.0), Settings(threads=2), Choice(2)),
    "just below the threshold": (Facts(FEW_BYTES - 1, 0, 16, 0.0), DEFAULT, Choice(1)),
    "at the threshold": (Facts(FEW_BYTES, 0, 16, 1.0), DEFAULT, Choice(4)),
    "just above the threshold": (Facts(FEW_BYTES + 1, 0, 16, 1.0), DEFAULT, Choice(5)),
    "huge pages": (Facts(GB, 0, 2, 1.0, huge=True), DEFAULT, Choice(8, first=2, huge=True)),
    "huge pages for little": (Facts(1000, 0, 2, 1.0, huge=True), DEFAULT, Choice(1)),
    # the page cache
    "cold": (Facts(GB, 0, 2, 0.0), DEFAULT, Choice(8, direct=True)),
    "mostly cold": (Facts(GB, 0, 16, 0.3), DEFAULT, Choice(16, direct=True)),
    "half warm": (Facts(GB, 0, 2, 0.5), DEFAULT, Choice(8, first=2)),
    "cache state unknown": (Facts(GB, 0, 2, None), DEFAULT, Choice(8, first=2)),
    "cold and slow": (Facts(GB, 0, 2, 0.0, pace="waiting"), DEFAULT, Choice(2, ahead=True)),
    "cold and spinning": (Facts(GB, 0, 2, 0.0, pace="seeking"), DEFAULT, Choice(1)),
    "cold and spinning, with threads": (Facts(GB, 0, 2, 0.0, pace="seeking"), Settings(threads=3), Choice(3)),
    "spinning, to a device": (Facts(0, GB, 16, 0.0, pace="seeking"), DEFAULT, Choice(1, ring=True)),
    "partly cached and slow": (Facts(GB, 0, 2, 0.7, pace="waiting"), DEFAULT, Choice(2, ahead=True)),
    "slow, cache state unknown": (Facts(GB, 0, 1, None, pace="waiting"), DEFAULT, Choice(1, ahead=True)),
    "slow, but told to read directly": (
        Facts(GB, 0, 2, 0.0, pace="waiting"),
        Settings(direct=True),
        Choice(8, direct=True),
    ),
    "slow, to a device": (Facts(0, GB, 16, 0.0, pace="waiting"), DEFAULT, Choice(12, ring=True, ahead=True)),
    "tiny and cold": (Facts(1000, 0, 2, 0.0), DEFAULT, Choice(1)),
    "not on disk and cold": (Facts(GB, 0, 2, 0.0, on_disk=False, streams=1), DEFAULT, Choice(1)),
    # to a device
    "to a device": (Facts(0, GB, 16, 1.0), DEFAULT, Choice(12, ring=True)),
    "to a device with four cores": (Facts(0, GB, 4, 1.0), DEFAULT, Choice(4, ring=True)),
    "tiny to a device": (Facts(0, 1000, 16, 1.0), DEFAULT, Choice(1, ring=True)),
    "cold to a device": (Facts(0, GB, 2, 0.0), DEFAULT, Choice(8, ring=True, direct=True)),
    "not on disk, to a device": (Facts(0, GB, 16, None, on_disk=False, streams=1), DEFAULT, Choice(1, ring=True)),
    "host and device": (Facts(GB, GB, 16, 1.0, huge=True), DEFAULT, Choice(12, ring=True, huge=True)),
    "little to host and device": (Facts(1000, 1000, 16, 1.0), DEFAULT, Choice(1, ring=True)),
    # copied by the device from mapped pages
    "mapped, one core": (Facts(0, GB, 1, 1.0, mappable=True), DEFAULT, Choice(1, ring=True, mapped=True)),
    "mapped, two cores": (Facts(0, GB, 2, 1.0, mappable=True), DEFAULT, Choice(2, ring=True, mapped=True)),
    "enough cores to read": (Facts(0, GB, 4, 1.0, mappable=True), DEFAULT, Choice(4, ring=True)),
    "not warm enough to map": (Facts(0, GB, 2, 0.9, mappable=True), DEFAULT, Choice(2, ring=True)),
    "unknown cache state is not mapped": (Facts(0, GB, 2, None, mappable=True), DEFAULT, Choice(2, ring=True)),
    "cold is not mapped": (Facts(0, GB, 2, 0.1, mappable=True), DEFAULT, Choice(8, ring=True, direct=True)),
    "too little to map": (Facts(GB, 1000, 2, 1.0, mappable=True), DEFAULT, Choice(2, ring=True)),
    # over a network
    "a file elsewhere": (Facts(GB, 0, 2, None, False, far=256), DEFAULT, Choice(64, first=8)),
    "elsewhere, to a device": (Facts(0, GB, 2, None, False, far=256), DEFAULT, Choice(64, ring=True, first=8)),
    "elsewhere, not so large": (Facts(GB // 4, 0, 2, None, False, far=64), DEFAULT, Choice(16)),
    "elsewhere, few reads": (Facts(40 << 20, 0, 2, None, False, far=10), DEFAULT, Choice(10)),
    "elsewhere, 16 reads at once": (Facts(GB, 0, 2, None, False, streams=16, far=256), DEFAULT, Choice(16)),
    "elsewhere, one read at a time": (Facts(GB, 0, 2, None, False, streams=1, far=256), DEFAULT, Choice(1)),
    "elsewhere, threads": (Facts(GB, 0, 2, None, False, far=256), Settings(threads=20), Choice(20)),
    "elsewhere, pinned": (Facts(0, GB, 2, None, False, far=256), Settings(pinned=64 << 20), Choice(8, ring=True)),
    # with settings of the caller
    "three threads": (Facts(GB, 0, 16, 1.0), Settings(threads=3), Choice(3)),
    "more threads than cores": (Facts(GB, 0, 2, 1.0), Settings(threads=40), Choice(40)),
    "more threads than jobs": (Facts(9 << 20, 0, 2, 1.0), Settings(threads=40), Choice(3)),
    "zero threads": (Facts(GB, 0, 2, 1.0), Settings(threads=0), Choice(1)),
    "threads, not on disk": (Facts(GB, 0, 2, None, on_disk=False, streams=1), Settings(threads=8), Choice(1)),
    "threads, cold": (Facts(GB, 0, 2, 0.0), Settings(threads=3), Choice(3, direct=True)),
    "threads are set, not mapped": (
        Facts(0, GB, 2, 1.0, mappable=True),
        Settings(threads=2),
        Choice(2, ring=True),
    ),
    "direct though warm": (Facts(GB, 0, 2, 1.0), Settings(direct=True), Choice(8, direct=True)),
    "direct though tiny": (Facts(1000, 0, 2, None), Settings(direct=True), Choice(1, direct=True)),
    "direct, not on disk": (Facts(GB, 0, 2, None, on_disk=False, streams=1), Settings(direct=True), Choice(1)),
    "not direct though cold": (Facts(GB, 0, 2, 0.0), Settings(direct=False), Choice(8, first=2)),
    "direct is not mapped": (
        Facts(0, GB, 2, 1.0, mappable=True),
        Settings(direct=True),
        Choice(8, ring=True, direct=True),
    ),
    "pinned limit": (Facts(0, GB, 16, 1.0), Settings(pinned=32 << 20), Choice(4, ring=True)),
    "tiny pinned limit": (Facts(0, GB, 16, 1.0), Settings(pinned=1), Choice(1, ring=True)),
    "pinned limit does not affect the host": (Facts(GB, 0, 16, 1.0), Settings(pinned=1), Choice(16)),
    "pinned limit and threads": (Facts(0, GB, 16, 1.0), Settings(threads=9, pinned=16 << 20), Choice(2, ring=True)),
    "pinned limit is set, not mapped": (Facts(0, GB, 2, 1.0, mappable=True), Settings(pinned=GB), Choice(2, ring=True)),
}


@pytest.fixture(autouse=True)
def system_that_knows_how_long_threads_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_KNOWS_WORK", True)


def test_on_windows_threads_stay_as_many_as_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_KNOWS_WORK", False)
    assert choose(Facts(GB, 0, 2, 1.0)).lanes == 2


@pytest.mark.parametrize(("facts", "settings", "expected"), TABLE.values(), ids=TABLE.keys())
def test_choice_for_each_case(facts: Facts, settings: Settings, expected: Choice) -> None:
    choice = choose(facts, settings)
    assert choice.why
    assert replace(choice, why="") == expected


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (Facts(1000, 0, 2, None), "1 thread"),
        (Facts(GB, 0, 4, 1.0, huge=True), "4 threads, from the page cache, huge pages"),
        (Facts(GB, 0, 2, 1.0), "2 to 8 threads, from the page cache"),
        (Facts(GB, 0, 4, 0.7), "4 threads, 70 % cached"),
        (Facts(GB, 0, 4, 0.1, pace="waiting"), "4 threads, asked for ahead, 10 % cached"),
        (Facts(GB, 0, 4, 0.1, pace="seeking"), "1 thread, in order, 10 % cached"),
        (Facts(0, GB, 4, None, False, far=256), "8 to 64 threads, pinned 512 MiB, over the network"),
        (Facts(0, GB, 2, 0.0), "8 threads, pinned 64 MiB, past the page cache, which holds 0 % of it"),
        (
            Facts(0, GB, 2, 1.0, mappable=True),
            "2 threads, pinned 8 MiB, the device fetches from the page cache",
        ),
        (Facts(0, GB, 1, 1.0, mappable=True), "1 thread, the device fetches from the page cache"),
    ],
    ids=[
        "tiny",
        "warm",
        "few cores",
        "partly cached",
        "waiting",
        "seeking",
        "elsewhere",
        "cold",
        "partly mapped",
        "all mapped",
    ],
)
def test_choice_explains_why(facts: Facts, why: str) -> None:
    assert choose(facts).why == why


def test_pinned_memory_stays_within_the_limit() -> None:
    for limit in range(8 << 20, 200 << 20, 5 << 20):
        assert choose(Facts(0, GB, 16, 1.0), Settings(pinned=limit)).lanes * SLOT_PAIR <= limit
