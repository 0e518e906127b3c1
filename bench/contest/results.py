"""The results: medians, the goals that they are compared with, and how both are printed."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.contest.cases import Case, size
from bench.contest.contenders import CONTENDERS

if TYPE_CHECKING:
    from bench.contest.limits import Limit

PLACES = {"cache": "page cache", "tmpfs": "tmpfs", "cold": "cold disk"}
OURS = "transload"


class Place(NamedTuple):
    """A case and the place of its file."""

    case: str
    where: str


class Goal(NamedTuple):
    """A ratio and its goal; the value is None if something that it needs was not measured."""

    what: str
    value: float | None
    least: float
    detail: str

    @property
    def met(self) -> bool | None:
        """Whether it is met; None if it was not measured."""
        return None if self.value is None else self.value >= self.least


@dataclass
class Measured:
    """All runs of one contender at one place."""

    contender: str
    first: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)
    cpu_first: list[float] = field(default_factory=list)
    cpu_later: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    cached: list[float] = field(default_factory=list)
    trouble: str = ""
    """Why there is no result."""

    def add(self, answer: dict[str, Any]) -> None:
        """Add one run, or the reason why there was none."""
        if "calls" not in answer:
            self.trouble = f"failed: {answer['failed']}" if "failed" in answer else answer["skipped"]
            return
        first, *later = answer["calls"]
        self.first.append(first["seconds"])
        self.cpu_first.append(first["cpu"])
        self.later += [call["seconds"] for call in later]
        self.cpu_later += [call["cpu"] for call in later]
        self.peaks += [call["peak"] for call in answer["calls"]]
        self.cached += [part for part in answer["cached"] if part is not None]

    def seconds(self, call: str) -> float | None:
        """The median of the first or of the later calls; None if there was none."""
        times = self.first if call == "first" else self.later
        return statistics.median(times) if times and not self.trouble else None


@dataclass
class Results:
    """All measurements of one run of a benchmark."""

    device: str
    cases: dict[str, Case]
    rows: dict[Place, dict[str, Measured]] = field(default_factory=dict)
    limits: dict[Place, list[Limit]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def seconds(self, place: Place, contender: str, call: str = "later") -> float | None:
        """The median of a contender at a place; that of the first call if there was no later one."""
        row = self.rows.get(place, {}).get(contender)
        return None if row is None else row.seconds(call) or row.seconds("first")

    def speed(self, place: Place, contender: str, call: str = "later") -> float | None:
        """Bytes of tensors per second."""
        seconds = self.seconds(place, contender, call)
        return seconds and size(self.cases[place.case]) / seconds

    def limit(self, place: Place, what: str) -> Limit | None:
        """The highest speed of a limit at a place, over all numbers of threads."""
        return max((limit for limit in self.limits.get(place, []) if limit.what == what), key=_speed, default=None)

    def against(self, place: Place, ours: str, theirs: str, least: float, call: str = "later") -> Goal:
        """How many times as fast as another contender."""
        mine, other = self.seconds(place, ours, call), self.seconds(place, theirs, call)
        what = f"{_label(place)}, {call}: {ours} against {theirs}"
        if mine is None or other is None:
            return Goal(what, None, least, "")
        return Goal(what, other / mine, least, f"{mine:.3f} s to {other:.3f} s")

    def against_best(self, place: Place, ours: str, least: float) -> Goal:
        """How many times as fast as the best of all others that load the same tensors."""
        others = [name for name in self.rows.get(place, {}) if self._is_rival(place, name)]
        best = min(others, key=lambda name: self.seconds(place, name) or 0, default="every other")
        return self.against(place, ours, best, least)

    def _is_rival(self, place: Place, name: str) -> bool:
        other = CONTENDERS[name]
        loads = not other.lazy and other.base == CONTENDERS["transload.load"].base
        return not name.startswith(OURS) and loads and self.seconds(place, name) is not None

    def peak_within(self, place: Place, ours: str, budget: int) -> Goal:
        """How many times the largest host peak of a contender fits into its budget."""
        row = self.rows.get(place, {}).get(ours)
        what = f"{_label(place)}: {ours}, {budget >> 20} MiB over the host's peak"
        if row is None or row.trouble or not row.peaks:
            return Goal(what, None, 1, "")
        peak = max(row.peaks)
        return Goal(what, budget / max(1, peak), 1, f"{peak / 2**20:.0f} MiB")

    def of_limit(self, place: Place, ours: str, limit: str, least: float) -> Goal:
        """The fraction of a limit that a contender reaches."""
        mine, most = self.speed(place, ours), self.limit(place, limit)
        what = f"{_label(place)}, later: {ours}, part of: {limit}"
        if mine is None or most is None:
            return Goal(what, None, least, "")
        return Goal(what, mine / most.speed, least, f"{mine / 1e9:.1f} of {most.speed / 1e9:.1f} GB/s")


def _speed(limit: Limit) -> float:
    return limit.speed


def _label(place: Place) -> str:
    return f"{place.case}, {PLACES[place.where]}"


Judge = Callable[[Results], list[Goal]]


def show(results: Results, goals: list[Goal], machine: dict[str, Any]) -> None:
    """Print the tables and the goals."""
    print(", ".join(f"{key} {value}" for key, value in machine.items() if value))
    for place, rows in results.rows.items():
        _print_table(results, place, rows)
    for goal in goals:
        sign = {True: "✓", False: "✗", None: "·"}[goal.met]
        value = "not measured" if goal.value is None else f"{goal.value:7.2f}"
        print(f"{sign} {goal.what:<86} {value}  goal ≥ {goal.least:g}  {goal.detail}")
    for note in results.notes:
        print(note)


def _print_table(results: Results, place: Place, rows: dict[str, Measured]) -> None:
    print(f"\n{results.cases[place.case]}; {PLACES[place.where]}")
    for limit in results.limits.get(place, []):
        threads = f"{limit.threads} thread{'s' if limit.threads > 1 else ''}"
        print(f"  limit: {limit.what}, {threads:<12} {limit.speed / 1e9:6.1f} GB/s")
    print(f"  {'':<42}{'first call':^25}{'later calls':^25}{'host peak':>10}")
    print(f"  {'':<42}{'GB/s':>6} {'s':>7}   {'×':>5}   {'GB/s':>6} {'s':>7}   {'×':>5}")
    for name, row in rows.items():
        if row.trouble:
            print(f"  {name:<42}left out: {row.trouble}")
        elif row.first:
            cells = "".join(_cell(results, place, name, call) for call in ("first", "later"))
            print(f"  {name:<42}{cells}{max(row.peaks) / 1e6:7.0f} MB")
    print()


def _cell(results: Results, place: Place, name: str, call: str) -> str:
    seconds = results.rows[place][name].seconds(call)
    if seconds is None:
        return f"{'':<25}"
    base = results.rows[place].get(CONTENDERS[name].base)
    other = base and base.seconds(call)
    ratio = f"{other / seconds:5.2f} ×" if other else f"{'':<7}"
    return f"{size(results.cases[place.case]) / seconds / 1e9:6.2f} {seconds:7.3f} s {ratio}  "


def as_json(results: Results, goals: list[Goal], machine: dict[str, Any]) -> str:
    """All measurements as one JSON object."""
    out = {
        "schema": 1,
        "machine": machine,
        "device": results.device,
        "cases": {name: {**vars(case), "bytes": size(case)} for name, case in results.cases.items()},
        "limits": [
            {**place._asdict(), **limit._asdict()} for place, limits in results.limits.items() for limit in limits
        ],
        "rows": [
            {
                **place._asdict(),
                **vars(row),
                **{f"{call}_median": row.seconds(call) for call in ("first", "later")},
                "base": CONTENDERS[row.contender].base,
            }
            for place, rows in results.rows.items()
            for row in rows.values()
        ],
        "goals": [{**goal._asdict(), "met": goal.met} for goal in goals],
        "notes": results.notes,
    }
    return json.dumps(out, indent=1)
