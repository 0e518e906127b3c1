"""One answer out of many findings: which of them are causes, in which order to fix them, and what merely follows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from transload.diagnose.rules.row import LAYERS
from transload.findings import Finding
from transload.machine import Machine, to_dict

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from transload.diagnose.rules.row import Row

__all__ = ["Diagnosis", "Muted", "Status", "decide"]

Status = Literal["ok", "broken", "degraded", "no-gpu"]

_WORDS = 200  # of an error of ours
_ORDER = {layer.name: place for place, layer in enumerate(LAYERS)}
_CHAIN = {layer.name: layer.chain for layer in LAYERS}
_MACHINE = frozenset(layer.name for layer in LAYERS if layer.chain == "machine")
# A fault in one of these layers leaves nothing to be said of whether the driver fits the build.
_BEFORE_FIT = frozenset({"hardware", "kernel", "surroundings", "nodes", "libraries"})


@dataclass(frozen=True, slots=True)
class Muted:
    """A finding that follows from another, which ``because`` names."""

    finding: Finding
    because: str


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """What is wrong with a machine, if anything, and what to do about it.

    ``cause`` is the first thing to fix; ``findings`` are all that stand for themselves, the cause first, in the order
    to fix them; ``muted`` are those that will go away by themselves. ``status`` is ``ok``, ``broken`` (CUDA or torch
    does not work), ``degraded`` (it works, and something is wrong) or ``no-gpu`` (there is no accelerator, and torch
    works without: no fault).
    """

    status: Status
    cause: Finding | None
    findings: tuple[Finding, ...]
    muted: tuple[Muted, ...]
    machine: Machine

    @property
    def ok(self) -> bool:
        """Whether there is nothing to repair."""
        return self.status in ("ok", "no-gpu")

    @property
    def cuda_usable(self) -> bool:
        """Whether CUDA works: seen in torch itself, or without torch by the driver's word and no error against it."""
        if self.machine.torch_run.answer.state != "unasked":
            return self.machine.torch_run.cuda_works
        return self.machine.driver.cuda.works and self.status != "broken"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, schema 1."""
        return {
            "schema": 1,
            "status": self.status,
            "cuda_usable": self.cuda_usable,
            "cause": self.cause.to_dict() if self.cause else None,
            "findings": [finding.to_dict() for finding in self.findings],
            "muted": [{**muted.finding.to_dict(), "because": muted.because} for muted in self.muted],
            "machine": to_dict(self.machine),
        }

    def __repr__(self) -> str:
        cause = f", cause={self.cause.code}" if self.cause else ""
        return f"<Diagnosis {self.status}{cause}, {len(self.findings)} findings>"

    def __str__(self) -> str:
        """The report as ``transload doctor`` prints it, without colour."""
        from transload.render.doctor import as_text

        return as_text(self)


def decide(machine: Machine, rows: Sequence[Row]) -> Diagnosis:
    """Judge a machine by all rows. One that raises is named in the machine's problems: the others shall be heard."""
    heard, raised = _heard(machine, rows)
    met = [(row, _heeding(machine, row, found)) for row, found in heard]
    machine = replace(machine, problems={**machine.problems, **raised}) if raised else machine
    met.sort(key=lambda pair: _ORDER[pair[0].layer])  # stable: in a layer, the order of the table
    faults = [(row, found) for row, found in met if found.severity == "error"]
    faults.sort(key=lambda pair: pair[0].symptom)  # stable: a symptom is a cause only where no fault of any layer is
    causes: list[tuple[Row, Finding]] = []
    muted: list[Muted] = []
    for row, found in faults:
        because = _because(row, causes)
        if because:
            muted.append(Muted(found, because))
        else:
            causes.append((row, found))
    others = [found for _, found in met if found.severity != "error"]
    findings = (*(found for _, found in causes), *sorted(others, key=lambda found: found.severity != "warning"))
    status = _status(machine, findings)
    return Diagnosis(status, findings[0] if status in ("broken", "degraded") else None, findings, tuple(muted), machine)


def _heard(machine: Machine, rows: Sequence[Row]) -> tuple[list[tuple[Row, Finding]], dict[str, str]]:
    """What the rows find, and what became of those that met a machine we did not think of."""
    told = [(row, _found(row, machine)) for row in rows]
    heard = [(row, found) for row, found in told if isinstance(found, Finding)]
    return heard, {f"rule {row.code}": found for row, found in told if isinstance(found, str)}


def _found(row: Row, machine: Machine) -> Finding | str | None:
    try:
        return row.finding(machine)
    except Exception as error:  # noqa: BLE001  said in the report, as a bug of ours
        return f"{type(error).__name__}: {error}"[:_WORDS]


def _heeding(machine: Machine, row: Row, found: Finding) -> Finding:
    """No rule overrules an observation: what works is not broken, whatever else is odd about it."""
    run = machine.torch_run
    died = any(not step.ok for step in run.steps)  # of something the driver's word does not settle
    seen_at_work = row.layer in _MACHINE and machine.driver.cuda.works and not died
    computes = row.layer != "extensions" and run.cuda_works and not died
    return replace(found, severity="note") if found.severity == "error" and (seen_at_work or computes) else found


def _because(row: Row, causes: Iterable[tuple[Row, Finding]]) -> str:
    """The code of the cause that already explains a fault, or nothing."""
    chain = _CHAIN[row.layer]
    for cause, _ in sorted(causes, key=lambda pair: _distance(_CHAIN[pair[0].layer], chain)):
        earlier = _CHAIN[cause.layer]
        same = earlier == chain and chain != "extensions"
        unjudgeable = chain == "fit" and (cause.layer in _BEFORE_FIT or earlier == "torch")
        if same or unjudgeable or ((row.symptom or chain == "run") and earlier != "extensions"):
            return cause.code
    return ""


def _distance(earlier: str, chain: str) -> int:
    """How likely a cause of one chain explains a fault of another: its own first, then what hides the cards."""
    return 0 if earlier == chain else 1 if earlier == "variables" else 2


def _status(machine: Machine, findings: Sequence[Finding]) -> Status:
    severities = {finding.severity for finding in findings}
    if "error" in severities:
        return "broken"
    if "warning" in severities:
        return "degraded"
    from transload.diagnose.rules.withheld import withheld  # it knows the rules, which know this module's neighbours

    present = machine.hardware.present and not withheld(machine)
    accelerated = present or any(other.usable for other in machine.accelerators)
    return "ok" if accelerated or machine.torch_run.cuda_works else "no-gpu"
