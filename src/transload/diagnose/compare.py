"""Compares many machines: which differ, in what, and whether that explains why something fails.

Each fact groups the machines by its value. A value that more than half of them share is the usual one. What could not
be determined on a machine does not count as a difference.
"""

from __future__ import annotations

import re
from calendar import timegm
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from statistics import median
from time import strptime
from typing import Any, Literal

from transload.diagnose.report import Diagnosis, steps
from transload.diagnose.rules import BY_CODE
from transload.findings import Finding
from transload.frozen import NamedTuple, Plain, replace
from transload.machine import Machine, Unknown
from transload.render import Reported
from transload.render.lines import BLANK, Block, Item, Prose, Table, Tiles, Words, heading, note, row
from transload.render.words import plural, printable

Level = Literal["breaks", "matters", "note"]
"""``breaks``: a job on these machines hangs or fails. ``matters``: it may. ``note``: it rarely does."""

_MARKS = {"breaks": ("✗", "bad"), "matters": ("!", "trust"), "note": ("·", "dim")}
_SAME_TIME = 60.0  # the most seconds between reports that were taken at the same time
_VALUE = 100
_MOST = 8  # the most values, names, groups, and fixes of faults that are shown
_FACTS = 60


class Fact(NamedTuple):
    """One thing to compare: what to call it, how much it matters, and how to read it from a machine."""

    name: str
    level: Level
    read: Callable[[Machine], str]  # Its value; empty if it is unknown.
    layers: str = ""  # Layers of the doctor in which a difference may cause a fault.
    why: str = ""
    implied_by: tuple[str, ...] = ()  # If these facts differ on the same machines, only they are shown.
    same_cards: bool = False  # Compare it only between machines with the same GPUs.


def _torch(m: Machine) -> str:
    first, absent = m.torch.first, m.torch.installs == () and not m.python.problem
    version = m.torch_run.version or (first.version or first.dist_version if first else "")
    shown = version.partition("+")[0] or ("not installed" if absent else "")
    return "hidden by another file" if m.torch.shadow else shown


def _build(m: Machine) -> str:
    run, first = m.torch_run, m.torch.first
    if m.torch.shadow or not (run.version or (first and first.known)):
        return ""
    cuda, hip = run.cuda or (first.cuda if first else ""), run.hip or (first.hip if first else "")
    return f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "without CUDA"


def _nccl(m: Machine) -> str:
    needed = (library.version for library in m.torch_libraries.needed if library.name.startswith("libnccl.so"))
    owned = (version for name, version in m.python.packages.items() if name.startswith("nvidia-nccl-"))
    return m.torch_run.nccl or next(filter(None, (*needed, *owned)), "")


def _models(m: Machine) -> list[str]:
    named = [gpu.name for gpu in m.driver.nvml.gpus if gpu.name] or [gpu.model for gpu in m.kernel.gpus if gpu.model]
    return sorted(named or [gpu.name for gpu in m.driver.cuda.gpus])


def _model(m: Machine) -> str:
    return ", ".join(dict.fromkeys(_models(m))) or ("none" if _count(m) == "0" else "")


def _count(m: Machine) -> str:
    """How many GPUs the machine has, including lost ones, which NVML and the bus still list."""
    if m.driver.nvml.count >= 0:
        return str(m.driver.nvml.count)
    unread = isinstance(m.hardware.pci, Unknown) or m.hardware.dxg or m.hardware.tegra
    return "" if unread else str(len(m.kernel.gpus or m.hardware.gpus))


def _usable(m: Machine) -> str:
    cuda = m.driver.cuda
    if cuda.init or not cuda.answer.answered or cuda.count < 0 or _count(m) == "0":  # the doctor says why
        return ""
    return "all" if str(cuda.count) == _count(m) else f"{cuda.count} of {_count(m) or 'several'}"


def _driver(m: Machine) -> str:
    return m.driver.nvml.driver or _module(m).partition(" ")[0]


def _module(m: Machine) -> str:
    if m.kernel.loaded is False:
        return "" if _count(m) == "0" else "none"
    return f"{m.kernel.version} {m.kernel.flavour}".strip()


def _libcuda(m: Machine) -> str:
    library = m.driver.libraries.libcuda
    if library is None:
        return "" if isinstance(m.driver.libraries.cuda, Unknown) or _count(m) == "0" else "none"
    return library.version if library.kind == "driver" else f"{library.kind} {library.version}".strip()


def _nvml(field: str) -> Callable[[Machine], str]:
    """A fact of each card from NVML: one value if all have the same, empty if it is unknown for any."""

    def read(m: Machine) -> str:
        shown = Counter(str(getattr(gpu, field)) for gpu in m.driver.nvml.gpus if gpu.code == 0)
        if not shown or "" in shown or "-1" in shown:
            return ""
        several = (f"{value} on {plural(number, 'GPU')}" for value, number in shown.items())
        return next(iter(shown)) if len(shown) == 1 else ", ".join(several)

    return read


def _variable(name: str, m: Machine) -> str:
    if "variables" in m.problems:
        return ""
    value = m.variables.values.get(name)
    if name == "CUDA_VISIBLE_DEVICES" and value:  # each rank may well have its own
        return plural(value.count(",") + 1, "device")
    return "not set" if value is None else value or "empty"


def _package(name: str, m: Machine) -> str:
    return "" if m.python.problem else m.python.packages.get(name, "not installed")


_CODE = "python build torch-libraries fit run extensions"
_DRIVER = "kernel nodes libraries driver fit run"
_CARD = "hardware kernel driver run"
_ALONE = "A rank without a GPU of its own fails."
FACTS = (
    Fact("torch", "breaks", _torch, _CODE, "Ranks with different releases of torch may hang or disagree."),
    Fact("build of torch", "breaks", _build, _CODE, "It includes other CUDA libraries, NCCL among them."),
    Fact("NCCL", "breaks", _nccl, _CODE, "Ranks with different releases fail or hang when they connect."),
    Fact("GPU model", "breaks", _model, _CARD, "The slowest card sets the pace, and memory or kernels may not fit."),
    Fact("GPUs", "breaks", _count, f"{_CARD} nodes", _ALONE, ("GPU model",)),
    Fact("GPUs for CUDA", "breaks", _usable, "", _ALONE, ("GPU model", "GPUs")),
    Fact("driver", "matters", _driver, _DRIVER, "It decides which CUDA works, and what NCCL can use."),
    Fact("kernel module", "matters", _module, _DRIVER, "It must match the driver's libraries.", ("driver",)),
    Fact("libcuda", "matters", _libcuda, _DRIVER, "It must match the kernel module.", ("driver",)),
    Fact("MIG", "breaks", _nvml("mig"), _CARD, "A MIG device is a part of a card, without P2P.", (), True),
    Fact("NVLink", "matters", _nvml("nvlinks"), _CARD, "Fewer links make every collective slower.", ("MIG",), True),
    Fact("P2P", "matters", _nvml("peers"), _CARD, "Without it, NCCL copies through the host.", ("MIG", "NVLink"), True),
    Fact("NVLink fabric", "matters", _nvml("fabric"), _CARD, "CUDA does not start until it is up.", (), True),
    Fact("ECC", "matters", _nvml("ecc"), _CARD, "Without it, memory errors go unnoticed.", (), True),
    Fact("compute mode", "matters", _nvml("compute_mode"), _CARD, "It limits how processes share a card.", (), True),
    Fact("architecture", "matters", lambda m: m.platform.machine, _CODE, "Packages for one do not run on the other."),
    Fact("Python", "matters", lambda m: m.python.version.rpartition(".")[0], _CODE, "Ranks exchange pickled objects."),
    Fact("Python release", "note", lambda m: m.python.version, _CODE, "", ("Python",)),
    Fact("cuDNN", "note", lambda m: m.torch_run.cudnn, _CODE, "", ("torch", "build of torch")),
    Fact("kernel", "note", lambda m: m.platform.kernel, "kernel"),
    Fact("system", "note", lambda m: m.platform.distribution_name, _CODE),
    Fact("C library", "note", lambda m: m.platform.libc, _CODE, "", ("system",)),
    Fact("container", "note", lambda m: m.surroundings.container or "none", "surroundings nodes libraries"),
    Fact("transload", "note", lambda m: m.transload),
)

_VARIABLES: tuple[tuple[str, Level, str], ...] = (
    ("NCCL_DEBUG", "note", ""),
    ("NCCL_ GLOO_ FI_", "matters", "Ranks must agree on how they connect."),
    ("LD_", "matters", "Other libraries may be loaded."),
    ("CUDA_", "matters", "It changes what CUDA does."),
    ("PYTORCH_ TORCH TRITON_ NVIDIA_TF32 OMP_ PYTHON", "note", ""),
)
"""Prefixes of environment variables, how much they matter and why. Others, such as HOME, may well differ."""


def _facts(machines: Sequence[Machine], *, together: bool) -> Iterator[Fact]:
    """All facts, including those of the variables and packages of any machine."""
    yield from FACTS
    variables = {name for m in machines for name in m.variables.values}
    for starts, level, why in _VARIABLES:
        for name in sorted(name for name in variables if name.startswith(tuple(starts.split()))):
            variables.discard(name)
            yield Fact(name, level, partial(_variable, name), f"variables surroundings {_CODE} {_DRIVER}", why)
    prefixes = ("torch-", "nvidia-nccl-")
    for name in sorted({name for m in machines for name in m.python.packages if not f"{name}-".startswith(prefixes)}):
        yield Fact(f"package {name}", "note", partial(_package, name), _CODE, "", ("torch", "build of torch", "NCCL"))
    # how far the time of each report is from the median, unless many differ from it
    times: dict[str, float] = {}
    for m in machines:
        with suppress(ValueError):  # a report from another release
            times[m.taken] = timegm(strptime(m.taken, "%Y-%m-%dT%H:%M:%SZ"))
    known_times = [times[m.taken] for m in machines if m.taken in times]
    middle = median(known_times) if known_times else 0.0
    apart = sum(abs(time - middle) > _SAME_TIME for time in known_times)
    clocks: dict[str, str] = {}
    for taken, time in times.items() if apart <= max(1, len(known_times) // 10) and len(known_times) > 2 else ():
        minutes = plural(round(abs(time - middle) / 60), "minute")
        late = f"{minutes} {'behind' if time < middle else 'ahead'}"
        clocks[taken] = late if abs(time - middle) > _SAME_TIME else "in step"
    why = "Its clock is wrong, or its report was taken at another time."
    yield Fact("clock", "matters" if together else "note", lambda m: clocks.get(m.taken, ""), why=why)


# -- the comparison


class Group(Plain):
    """The machines, by name, that have the same value of a fact."""

    value: str
    nodes: tuple[str, ...]


class FactDifference(Plain):
    """A fact that is not the same everywhere. ``groups`` are its values with their machines, most first.

    ``usual`` is the value of more than half of the machines, ``None`` if there is none. ``follows`` is another
    difference that this one follows from; ``explains`` are codes of faults on the same machines that it may cause.
    """

    fact: str
    level: Level
    why: str
    usual: str | None
    groups: tuple[Group, ...]
    follows: str | None = None
    explains: tuple[str, ...] = ()

    @property
    def rare(self) -> list[Group]:
        """The machines of each unusual value."""
        return [group for group in self.groups if group.value != self.usual]


class Fault(Plain):
    """An error or a warning of the doctor, and the machines that have it; ``because`` are facts that differ there."""

    code: str
    severity: str
    title: str
    fix: tuple[str, ...]
    nodes: tuple[str, ...]
    because: tuple[str, ...] = ()


class Comparison(Plain, Reported):
    """What is alike (fact → value) and what differs between machines, by name.

    ``silent`` are the machines that never reported, ``unreadable`` those whose report cannot be read, and why.
    """

    nodes: tuple[str, ...]
    silent: tuple[str, ...]
    unreadable: dict[str, str]
    without_cuda: tuple[str, ...]
    differences: tuple[FactDifference, ...]
    faults: tuple[Fault, ...]
    alike: dict[str, str]

    @property
    def matters(self) -> tuple[FactDifference, ...]:
        """The differences that may break a job, without those that follow from others."""
        return tuple(one for one in self.differences if one.level != "note" and not one.follows)

    @property
    def ok(self) -> bool:
        """Whether all machines reported, are alike in what matters, and have nothing to repair."""
        return not (self.matters or self.faults or self.silent or self.unreadable)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, schema 1."""
        return {"schema": 1, "ok": self.ok, **super().to_dict()}

    def _blocks(self) -> Iterator[Block]:
        return report(self)

    def _page_blocks(self) -> Iterator[Block]:
        return drawn(self)


def compare(
    reports: Mapping[str, Diagnosis | str], *, silent: Iterable[str] = (), together: bool = False
) -> Comparison:
    """Compare machines, by name; a text instead of a diagnosis says why the report cannot be read.

    ``together`` means that one launcher examined them at the same time.
    """
    diagnoses = {name: report for name, report in reports.items() if not isinstance(report, str)}
    machines = {name: diagnosis.machine for name, diagnosis in diagnoses.items()}
    cards = {name: (_count(m), *_models(m)) for name, m in machines.items()}
    differences: list[FactDifference] = []
    layers: dict[str, str] = {}
    alike: dict[str, str] = {}
    for fact in _facts([*machines.values()], together=together):
        layers[fact.name] = fact.layers
        values = {name: value for name, m in machines.items() if (value := fact.read(m))}
        for kind in dict.fromkeys(cards.values()) if fact.same_cards else [()]:
            some = {name: value for name, value in values.items() if not kind or cards[name] == kind}
            if len({*some.values()}) > 1:
                differences.append(_difference(fact, some, differences))
        if len({*values.values()}) == 1 and len(values) == len(machines) and fact in FACTS:
            alike[fact.name] = next(iter(values.values()))

    findings: dict[str, dict[str, Finding]] = {}
    for name, diagnosis in diagnoses.items():
        for finding in diagnosis.findings:
            if finding.severity != "note":
                findings.setdefault(finding.code, {})[name] = finding
    faults = []
    for code, by_name in findings.items():
        because = []
        for place, difference in enumerate(differences):
            shares = {len(by_name.keys() & group.nodes) / len(group.nodes) for group in difference.groups}
            causes = BY_CODE[code].layer in layers[difference.fact].split() and not difference.follows
            if causes and shares == {0.0, 1.0}:
                differences[place] = replace(difference, explains=(*difference.explains, code))
                because.append(difference.fact)
        worst = min(by_name.values(), key=lambda finding: finding.severity != "error")
        faults.append(Fault(code, worst.severity, worst.title, worst.fix, tuple(by_name), tuple(because)))
    order = [*_MARKS]
    return Comparison(
        tuple(diagnoses),
        tuple(silent),
        {name: report for name, report in reports.items() if isinstance(report, str)},
        tuple(name for name, diagnosis in diagnoses.items() if not diagnosis.cuda_usable),
        tuple(sorted(differences, key=lambda difference: (not difference.explains, order.index(difference.level)))),
        tuple(sorted(faults, key=lambda fault: (fault.severity != "error", -len(fault.nodes)))),
        alike,
    )


def _difference(fact: Fact, values: Mapping[str, str], earlier: Sequence[FactDifference]) -> FactDifference:
    """The machines grouped by value, without groups that follow from ``earlier`` differences."""
    by_value: dict[str, list[str]] = {}
    for name, value in values.items():
        by_value.setdefault(value, []).append(name)
    groups = [Group(value, tuple(names)) for value, names in by_value.items()]
    groups.sort(key=lambda group: -len(group.nodes))
    usual = groups[0].value if 2 * len(groups[0].nodes) > len(values) else None
    # a value of its own on every machine must be on purpose
    level = "note" if len(groups) == len(values) > 2 and fact not in FACTS else fact.level
    implied = [difference for difference in earlier if difference.fact in fact.implied_by and not difference.follows]
    explained = {group.nodes for difference in implied for group in difference.rare}
    unexplained = tuple(group for group in groups if group.value == usual or group.nodes not in explained)
    if len(unexplained) > 1:  # something remains that does not follow from the others
        return FactDifference(fact.name, level, fact.why, usual, unexplained)
    nodes = {group.nodes for group in groups}
    follows = next(difference.fact for difference in implied if any(group.nodes in nodes for group in difference.rare))
    return FactDifference(fact.name, level, fact.why, usual, tuple(groups), follows)


# -- the report


def report(comparison: Comparison) -> Iterator[Block]:
    """Which machines differ, in what, what is wrong, and what is alike."""
    yield _verdict(comparison)
    shown = [difference for difference in comparison.differences if not difference.follows]
    if shown:
        yield from heading("What differs")
        yield from _differences(shown)
    unreadable = tuple(comparison.unreadable.items())
    if unreadable:
        yield from heading("What cannot be read")
    for name, error in unreadable[:_MOST]:
        yield Prose(printable(error), lead=((f"  {printable(name)}  ", "strong"),))
    if len(unreadable) > _MOST:
        yield Prose(f"{len(unreadable) - _MOST} more: {folded([name for name, _ in unreadable[_MOST:]])}", lead="  ")
    yield from _wrong(comparison)
    yield from _alike(comparison)
    yield BLANK
    yield Prose((("transload doctor --from FILE shows one report in full; --json names every node", "dim"),))


def drawn(comparison: Comparison) -> Iterator[Block]:
    """The same for a page: first those that did not report, then every node, and the facts of the groups as a table."""
    first, *others = _headlines(comparison)
    yield Prose(((first, _role(comparison)),))
    yield from (Prose(line, lead="  ") for line in others)
    for name, error in comparison.unreadable.items():
        yield Item("bad", [Prose(printable(error), lead=((f"{printable(name)}  ", "bad"),))])
    if folded(comparison.silent) != (names := folded(comparison.silent, None)):
        yield Item("bad", [Prose(names, lead=(("did not report  ", "bad"),))])
    yield from heading("Nodes", str(len(comparison.nodes) + len(comparison.silent) + len(comparison.unreadable)))
    yield Tiles([*_tiles(comparison)])
    shown = [difference for difference in comparison.differences if not difference.follows]
    if shown:
        yield from heading("What differs", "nodes with the same facts are a group")
        yield from _groups(comparison, shown)
    yield from _wrong(comparison)


def further(comparison: Comparison) -> Iterator[tuple[str, Iterator[Block]]]:
    """More for a page: each difference in words, and what is alike."""
    if shown := [difference for difference in comparison.differences if not difference.follows]:
        yield "Each difference", _differences(shown)
    if comparison.alike and len(comparison.nodes) > 1:
        yield "What is alike", (row(name, printable(value)) for name, value in comparison.alike.items())


def _verdict(comparison: Comparison) -> Block:
    return Prose((("; ".join(_headlines(comparison)), _role(comparison)),))


def _role(comparison: Comparison) -> str:
    return "good" if comparison.ok else "bad" if comparison.faults or comparison.silent else "trust"


def _differences(shown: Sequence[FactDifference]) -> Iterator[Block]:
    width = min(22, max((len(difference.fact) for difference in shown), default=0))
    why = ""
    for difference in shown:
        mark, colour = _MARKS[difference.level]
        lead = (("  ", ""), (f"{mark} ", colour), (f"{printable(difference.fact):<{width}}  ", ""))
        codes = "".join(f"  [{code}]" for code in difference.explains)
        # 2.21.5 on gpu[003,005]; 2.27.3 on the other 61
        rare = difference.rare
        words = [f"{printable(group.value, _VALUE)} on {folded(group.nodes)}" for group in rare[:_MOST]]
        if len(rare) > _MOST:
            words.append(f"{len(rare) - _MOST} other values on {sum(len(group.nodes) for group in rare[_MOST:])} nodes")
        usual = (group for group in difference.groups if group.value == difference.usual)
        words += [f"{printable(group.value, _VALUE)} on the other {len(group.nodes)}" for group in usual]
        yield Prose((("; ".join(words), ""), (codes, "dim")), lead=lead)
        if difference.why != why and difference.level != "note":
            yield Prose(((difference.why, "dim"),), lead=" " * (width + 6))
        why = difference.why


def _wrong(comparison: Comparison) -> Iterator[Block]:
    total = len(comparison.nodes)
    if comparison.faults:
        yield from heading("What is wrong")
    for place, fault in enumerate(comparison.faults):
        mark, colour = _MARKS["breaks" if fault.severity == "error" else "matters"]
        where = f"all {total} nodes" if len(fault.nodes) == total > 1 else folded(fault.nodes)
        why = f", explained by {_listed(fault.because)}" if fault.because else ""
        title = ((printable(fault.title, None), "strong"), (f"  [{fault.code}]", "dim"))
        blocks = [
            Prose(title, lead=(("  ", ""), (f"{mark} ", colour))),
            Prose(((f"on {where}{why}", ""),), lead="      "),
        ]
        yield Item(colour, [*blocks, *(steps(fault.fix, "      ") if place < _MOST else ())])


def _alike(comparison: Comparison) -> Iterator[Block]:
    if comparison.alike and len(comparison.nodes) > 1:
        yield from heading("What is alike")
        yield Prose("; ".join(f"{name} {printable(value)}" for name, value in comparison.alike.items()), lead="  ")


def _tiles(comparison: Comparison) -> Iterator[tuple[str, str, str]]:
    """Every node with what is unusual about it: first those without a report, then the others by name."""
    yield from ((name, "bad", "did not report") for name in comparison.silent)
    yield from ((name, "bad", f"cannot be read: {error}") for name, error in comparison.unreadable.items())
    notes: dict[str, list[str]] = {}
    for fault in comparison.faults:
        for name in fault.nodes:
            notes.setdefault(name, []).append(f"{fault.title} [{fault.code}]")
    broken = {name for fault in comparison.faults if fault.severity == "error" for name in fault.nodes}
    for difference in comparison.matters:
        for group in difference.rare if difference.usual else ():
            for name in group.nodes:
                notes.setdefault(name, []).append(f"{difference.fact} {group.value}, not {difference.usual}")
    for name in comparison.nodes:
        role = "bad" if name in broken else "trust" if name in notes else "good"
        yield name, role, "; ".join(notes.get(name, ["like most" if len(comparison.nodes) > 1 else "healthy"]))


def _groups(comparison: Comparison, shown: Sequence[FactDifference]) -> Iterator[Block]:
    """The differing facts, one in a row, of each group of nodes in which they are the same; the largest group first."""
    values = [{name: group.value for group in one.groups for name in group.nodes} for one in shown]
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in comparison.nodes:
        groups.setdefault(tuple(value.get(name, "") for value in values), []).append(name)
    order = sorted(groups.items(), key=lambda group: -len(group[1]))
    rows: list[tuple[Words, ...]] = []
    for place, difference in enumerate(shown[:_FACTS]):
        mark, colour = _MARKS[difference.level]
        cells: list[Words] = [((f"{mark} ", colour), (printable(difference.fact), ""))]
        for facts, _ in order[:_MOST]:
            value, role = facts[place], "" if difference.usual in (None, facts[place]) else colour
            cells.append(((printable(value, _VALUE) if value else "unknown", role if value else "dim"),))
        codes = "".join(f"  explains [{code}]" for code in difference.explains)
        rows.append((*cells, f"{difference.why if difference.level != 'note' else ''}{codes}"))
    groups_shown = [folded(names) for _, names in order[:_MOST]]
    yield Table(rows, titles=("fact", *groups_shown, "why it matters"), dim=(len(groups_shown) + 1,))
    if len(order) > _MOST:
        yield note(f"{len(order) - _MOST} smaller groups are not in the table")


def _headlines(c: Comparison) -> list[str]:
    """Whether all are alike, or which differ; and whether that explains what fails."""
    total, parts = len(c.nodes), []
    if c.silent:
        parts.append(f"{folded(c.silent)} did not report")
    if c.unreadable:
        parts.append(f"the report of {folded(tuple(c.unreadable))} cannot be read")
    same = "alike in what matters" if c.differences else "alike"
    everyone = f"{'the other' if parts else 'all'} {total} nodes" if total > 1 else folded(c.nodes)
    unusual = [difference for difference in c.matters if difference.usual]
    names = tuple(dict.fromkeys(name for difference in unusual for group in difference.rare for name in group.nodes))
    if usual := [difference.fact for difference in unusual]:
        others = f"differ{'s' if len(names) == 1 else ''} from the other {total - len(names)}"
        differ = f"{folded(names)} {others}" if len(names) < total else f"{everyone} differ"
        parts.append(f"{differ} in {_listed(usual)}")
    if split := [difference.fact for difference in c.matters if not difference.usual]:
        parts.append(f"the {total} nodes differ in {_listed(split)}")
    if c.faults:
        fault = next((fault for fault in c.faults if fault.because), c.faults[0])
        problem = f"{printable(fault.title, None)} [{fault.code}]"
        where = everyone if len(fault.nodes) == total else folded(fault.nodes)
        if fault.because:
            parts.append(f"the difference in {_listed(fault.because)} explains what is wrong on {where}: {problem}")
        elif len(fault.nodes) == total:
            alike = f"are {same}, and " if total > 1 and not c.matters else ""
            parts.append(f"{where} {alike}ha{'ve' if total > 1 else 's'} a problem: {problem}")
        else:
            parts.append(f"no difference explains what is wrong on {where}: {problem}")
    elif c.matters:
        parts.append("no failure was found that this explains")
    elif total:
        cards = f": {c.alike['GPUs']} × {c.alike.get('GPU model', 'GPU')}" if c.alike.get("GPUs", "0") != "0" else ""
        parts.append(f"{everyone} {f'are {same} and' if total > 1 else 'is'} healthy{cards}")
    if parts and parts[0].startswith(("all ", "the ", "no ")):
        parts[0] = parts[0][:1].upper() + parts[0][1:]
    return parts or [""]


def _listed(words: Sequence[str]) -> str:
    """``a, b and c``; the first three of many, and how many more there are."""
    shown = [*words[:3], *([f"{len(words) - 3} more"] if len(words) > 3 else [])]
    return f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else "".join(shown)


_NUMBERED = re.compile(r"(.*?)(?<!\d)(\d{1,15})(?!\d)(\D*(?:\..*)?)")  # the last number before a domain


def folded(names: Sequence[str], most: int | None = _MOST) -> str:
    """Names with their numbers folded, as schedulers write them; at most ``most``.

    >>> folded(["gpu003", "gpu004", "gpu005", "gpu017", "login"])
    'gpu[003-005,017], login'
    >>> folded(["rank 7"]), folded(["rank 2", "rank 3", "rank 7"])
    ('rank 7', 'ranks 2-3,7')
    """
    split = ((name, _NUMBERED.fullmatch(name)) for name in map(printable, names))
    parts = [match.groups() if match else (name, "", "") for name, match in split]
    padded = {(before, after) for before, number, after in parts if number.startswith("0") and len(number) > 1}
    groups: dict[tuple[str, str, int], list[int]] = {}
    for before, number, after in parts:
        width = len(number) if (before, after) in padded else 0
        groups.setdefault((before, after, width), []).append(int(number or -1))
    shown = []
    for (before, after, width), numbers in groups.items():
        ranges: list[tuple[int, int]] = []
        for value in sorted(numbers):
            start = ranges.pop()[0] if ranges and ranges[-1][1] == value - 1 else value
            ranges.append((start, value))
        texts = ["-".join(f"{end:0{width}}" for end in dict.fromkeys(ends)) for ends in ranges]
        inside = ",".join([*texts[:most], "…"] if most and len(texts) > most else texts)
        one = before if numbers == [-1] else f"{before}{inside}{after}"
        several = f"{before[:-1]}s {inside}{after}" if before.endswith(" ") else f"{before}[{inside}]{after}"
        shown.append(one if len(numbers) == 1 else several)
    more = len(shown) - most if most else 0
    return ", ".join(shown[:most]) + (f" and {more} more" if more > 0 else "")
