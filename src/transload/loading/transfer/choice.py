"""How bytes are moved on this machine, and why: chosen from facts, by what was measured (docs/performance.md). Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from transload.frozen import facts
from transload.loading.transfer.plan import CELL

__all__ = ["Choice", "Facts", "Settings", "choose"]

LITTLE = 16 << 20
"""Fewer bytes are read by the thread that asks for them: starting others takes longer."""

MOST_RING = 12
"""Lanes to a device. On an H200 at PCIe 5 eight bring 87 % of what the bus carries, twelve 94 %, sixteen no more."""

MOST_HOST = 16
MOST_DIRECT = 8  # readings past the page cache at the same time: they wait for the disk, not for a processor
SLOT_PAIR = 2 * CELL
FEW_CORES = 2
"""With so few the device fetches bytes from the page cache itself: 18.8 GB/s with one core, against 7.6 by the ring;
20.9 with two, against 14.4; with four the ring is faster."""

COLD = 0.5
WARM = 0.95


class Settings(NamedTuple):
    """What the caller wants otherwise than it would be chosen; ``None`` leaves it to us."""

    threads: int | None = None
    pinned: int | None = None
    """Bytes of pinned memory at most."""
    direct: bool | None = None
    """Read past the page cache."""


class Facts(NamedTuple):
    """What the choice depends on."""

    host: int
    """Bytes that go to the memory of the host."""
    cuda: int
    """Bytes that go to CUDA devices."""
    cores: int
    cached: float | None
    """The part of the file that is in the page cache, if the system tells."""
    plain: bool = True
    """Whether it is a file of the system, which several threads can read at once."""
    mappable: bool = False
    """Whether the devices can fetch from the page cache."""
    huge: bool = False
    """Whether huge pages are to be had."""


@facts(frozen=True)
class Choice:
    """How bytes are moved."""

    lanes: int
    """Threads that read, in all; 1 is the caller's own."""
    ring: bool = False
    """They read into pinned slots, from which devices fetch."""
    mapped: bool = False
    """One of them lets the device fetch from the page cache instead."""
    direct: bool = False
    """They read past the page cache."""
    huge: bool = False
    """Fresh memory of the host is asked for in huge pages."""
    why: str = ""

    @property
    def pinned(self) -> int:
        """Bytes of pinned memory it takes."""
        return (self.lanes - self.mapped) * SLOT_PAIR if self.ring else 0


def choose(facts: Facts, settings: Settings = Settings()) -> Choice:  # noqa: B008 - a named tuple does not change
    """The way to move bytes.

    >>> choose(Facts(host=0, cuda=8 << 30, cores=16, cached=1.0)).why
    '12 threads, pinned 96 MiB, from the page cache'
    >>> choose(Facts(host=2 << 30, cuda=0, cores=2, cached=0.0)).why
    '8 threads, past the page cache, which holds 0 % of it'
    """
    direct = _is_direct(facts, settings)
    mapped = _is_mapped(facts, settings) and not direct
    lanes = _lanes(facts, settings, direct=direct)
    made = Choice(lanes, facts.cuda > 0, mapped, direct, facts.huge and facts.host >= LITTLE)
    return replace(made, why=", ".join(_words(made, facts)))


def _words(choice: Choice, facts: Facts) -> Iterator[str]:
    yield "1 thread" if choice.lanes == 1 else f"{choice.lanes} threads"
    if choice.pinned:
        yield f"pinned {choice.pinned >> 20} MiB"
    if choice.mapped:
        yield "the device fetches from the page cache"
    elif choice.direct:
        yield "past the page cache"
    elif facts.cached is not None and facts.cached >= WARM:
        yield "from the page cache"
    if facts.cached is not None and facts.cached < WARM:
        yield f"which holds {100 * facts.cached:.0f} % of it" if choice.direct else f"{100 * facts.cached:.0f} % cached"
    if choice.huge:
        yield "huge pages"


def _is_direct(facts: Facts, settings: Settings) -> bool:
    if settings.direct is not None or not facts.plain:
        return bool(settings.direct) and facts.plain
    return facts.cached is not None and facts.cached < COLD and facts.host + facts.cuda >= LITTLE


def _is_mapped(facts: Facts, settings: Settings) -> bool:
    asked = settings.threads is not None or settings.pinned is not None
    warm = facts.cached is not None and facts.cached >= WARM
    return facts.mappable and warm and facts.cores <= FEW_CORES and not asked and facts.cuda >= LITTLE


def _lanes(facts: Facts, settings: Settings, *, direct: bool) -> int:
    """No more than there is work for, nor than the pinned memory that is allowed is enough for."""
    nbytes = facts.host + facts.cuda
    if not facts.plain:
        return 1
    if settings.threads is not None:
        wanted = settings.threads
    elif nbytes < LITTLE:
        return 1
    else:
        most = MOST_RING if facts.cuda else MOST_HOST
        wanted = min(most, max(facts.cores, MOST_DIRECT if direct else 1))
    if facts.cuda and settings.pinned is not None:
        wanted = min(wanted, settings.pinned // SLOT_PAIR)
    return max(1, min(wanted, -(-nbytes // CELL)))
