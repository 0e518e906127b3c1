"""How bytes are moved on which machine: a table."""

from __future__ import annotations

import pytest

from transload.loading.engine import Choice, Facts, choose
from transload.loading.jobs import FEW_BYTES, SLOT_PAIR, Settings

GB = 1 << 30
NONE = Settings()

TABLE = {
    # to the host
    "one core": (Facts(GB, 0, 1, 1.0), NONE, Choice(1)),
    "two cores": (Facts(GB, 0, 2, 1.0), NONE, Choice(2)),
    "four cores": (Facts(GB, 0, 4, 1.0), NONE, Choice(4)),
    "sixteen cores": (Facts(GB, 0, 16, 1.0), NONE, Choice(16)),
    "more cores than help": (Facts(GB, 0, 128, 1.0), NONE, Choice(16)),
    "tiny": (Facts(1000, 0, 16, 1.0), NONE, Choice(1)),
    "nothing": (Facts(0, 0, 16, 1.0), NONE, Choice(1)),
    "just too little": (Facts(FEW_BYTES - 1, 0, 16, 0.0), NONE, Choice(1)),
    "just enough": (Facts(FEW_BYTES, 0, 16, 1.0), NONE, Choice(4)),
    "a bit more": (Facts(FEW_BYTES + 1, 0, 16, 1.0), NONE, Choice(5)),
    "huge pages": (Facts(GB, 0, 2, 1.0, huge=True), NONE, Choice(2, huge=True)),
    "huge pages for little": (Facts(1000, 0, 2, 1.0, huge=True), NONE, Choice(1)),
    # the page cache
    "cold": (Facts(GB, 0, 2, 0.0), NONE, Choice(8, direct=True)),
    "mostly cold": (Facts(GB, 0, 16, 0.3), NONE, Choice(16, direct=True)),
    "half warm": (Facts(GB, 0, 2, 0.5), NONE, Choice(2)),
    "nobody knows": (Facts(GB, 0, 2, None), NONE, Choice(2)),
    "tiny and cold": (Facts(1000, 0, 2, 0.0), NONE, Choice(1)),
    "no file, and cold": (Facts(GB, 0, 2, 0.0, on_disk=False), NONE, Choice(1)),
    # to a device
    "to a device": (Facts(0, GB, 16, 1.0), NONE, Choice(12, ring=True)),
    "to a device with four cores": (Facts(0, GB, 4, 1.0), NONE, Choice(4, ring=True)),
    "tiny to a device": (Facts(0, 1000, 16, 1.0), NONE, Choice(1, ring=True)),
    "cold to a device": (Facts(0, GB, 2, 0.0), NONE, Choice(8, ring=True, direct=True)),
    "no file, to a device": (Facts(0, GB, 16, None, on_disk=False), NONE, Choice(1, ring=True)),
    "both": (Facts(GB, GB, 16, 1.0, huge=True), NONE, Choice(12, ring=True, huge=True)),
    "both, a little each": (Facts(1000, 1000, 16, 1.0), NONE, Choice(1, ring=True)),
    # by the device itself
    "fetched, one core": (Facts(0, GB, 1, 1.0, mappable=True), NONE, Choice(1, ring=True, mapped=True)),
    "fetched, two cores": (Facts(0, GB, 2, 1.0, mappable=True), NONE, Choice(2, ring=True, mapped=True)),
    "enough cores to read": (Facts(0, GB, 4, 1.0, mappable=True), NONE, Choice(4, ring=True)),
    "not warm enough to fetch": (Facts(0, GB, 2, 0.9, mappable=True), NONE, Choice(2, ring=True)),
    "perhaps not warm": (Facts(0, GB, 2, None, mappable=True), NONE, Choice(2, ring=True)),
    "cold is not fetched": (Facts(0, GB, 2, 0.1, mappable=True), NONE, Choice(8, ring=True, direct=True)),
    "too little to fetch": (Facts(GB, 1000, 2, 1.0, mappable=True), NONE, Choice(2, ring=True)),
    # as the caller wishes
    "three threads": (Facts(GB, 0, 16, 1.0), Settings(threads=3), Choice(3)),
    "more threads than cores": (Facts(GB, 0, 2, 1.0), Settings(threads=40), Choice(40)),
    "more threads than run_lanes": (Facts(9 << 20, 0, 2, 1.0), Settings(threads=40), Choice(3)),
    "no threads at all": (Facts(GB, 0, 2, 1.0), Settings(threads=0), Choice(1)),
    "threads for no file": (Facts(GB, 0, 2, None, on_disk=False), Settings(threads=8), Choice(1)),
    "threads, cold": (Facts(GB, 0, 2, 0.0), Settings(threads=3), Choice(3, direct=True)),
    "threads are not fetched by": (
        Facts(0, GB, 2, 1.0, mappable=True),
        Settings(threads=2),
        Choice(2, ring=True),
    ),
    "direct though warm": (Facts(GB, 0, 2, 1.0), Settings(direct=True), Choice(8, direct=True)),
    "direct though tiny": (Facts(1000, 0, 2, None), Settings(direct=True), Choice(1, direct=True)),
    "direct of no file": (Facts(GB, 0, 2, None, on_disk=False), Settings(direct=True), Choice(1)),
    "not direct though cold": (Facts(GB, 0, 2, 0.0), Settings(direct=False), Choice(2)),
    "direct is not fetched": (
        Facts(0, GB, 2, 1.0, mappable=True),
        Settings(direct=True),
        Choice(8, ring=True, direct=True),
    ),
    "pinned": (Facts(0, GB, 16, 1.0), Settings(pinned=32 << 20), Choice(4, ring=True)),
    "hardly pinned": (Facts(0, GB, 16, 1.0), Settings(pinned=1), Choice(1, ring=True)),
    "pinned means nothing to the host": (Facts(GB, 0, 16, 1.0), Settings(pinned=1), Choice(16)),
    "pinned and threads": (Facts(0, GB, 16, 1.0), Settings(threads=9, pinned=16 << 20), Choice(2, ring=True)),
    "pinned is not fetched": (Facts(0, GB, 2, 1.0, mappable=True), Settings(pinned=GB), Choice(2, ring=True)),
}


@pytest.mark.parametrize(("facts", "settings", "wanted"), TABLE.values(), ids=TABLE.keys())
def test_the_table(facts: Facts, settings: Settings, wanted: Choice) -> None:
    found = choose(facts, settings)
    assert found.why
    assert Choice(found.lanes, found.ring, found.mapped, found.direct, found.huge) == wanted


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (Facts(1000, 0, 2, None), "1 thread"),
        (Facts(GB, 0, 4, 1.0, huge=True), "4 threads, from the page cache, huge pages"),
        (Facts(GB, 0, 4, 0.7), "4 threads, 70 % cached"),
        (Facts(0, GB, 2, 0.0), "8 threads, pinned 64 MiB, past the page cache, which holds 0 % of it"),
        (
            Facts(0, GB, 2, 1.0, mappable=True),
            "2 threads, pinned 8 MiB, the device fetches from the page cache",
        ),
        (Facts(0, GB, 1, 1.0, mappable=True), "1 thread, the device fetches from the page cache"),
    ],
    ids=["tiny", "warm", "partly", "cold", "fetched", "all fetched"],
)
def test_the_reason_is_said(facts: Facts, why: str) -> None:
    assert choose(facts).why == why


def test_pinned_memory_stays_within_what_is_allowed() -> None:
    for limit in range(8 << 20, 200 << 20, 5 << 20):
        assert choose(Facts(0, GB, 16, 1.0), Settings(pinned=limit)).lanes * SLOT_PAIR <= limit
