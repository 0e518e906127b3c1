"""All rules, which are pure functions in a module for each part of the chain; and the verdict on a machine.

The verdict says which findings are causes, in which order to fix them, and which only follow from others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from transload.diagnose.case import BY_CODE, LAYERS, Case, Rule
from transload.diagnose.report import Diagnosis, Muted, Status
from transload.diagnose.rules import driver, process, torch
from transload.findings import Finding
from transload.machine import Machine

__all__ = ["BY_CODE", "driver", "judge_machine", "process", "torch"]  # importing the modules registers their rules

_WORDS = 200  # characters of an error in a rule
# Within a chain of layers the first broken one is the cause of faults in later ones. Every other layer is independent.
_OF_TORCH = ("python", "build", "torch-libraries")
_OF_MACHINE = ("hardware", "kernel", "surroundings", "nodes", "libraries", "driver")


def judge_machine(machine: Machine, rules: Iterable[Rule] = BY_CODE.values()) -> Diagnosis:
    """Judge a machine by all rules. A rule that raises is named in the machine's problems; the others still count."""
    case, run = Case(machine), machine.torch_run
    failed = any(not step.ok for step in run.steps)  # then a working driver proves nothing
    met: list[tuple[Rule, Finding]] = []
    raised: dict[str, str] = {}
    for rule in rules:
        try:
            found = rule.finding(case)
        except Exception as error:  # noqa: BLE001  reported as a bug in transload
            raised[f"rule {rule.code}"] = f"{type(error).__name__}: {error}"[:_WORDS]
            continue
        if found is None:
            continue
        # no rule overrides an observation: what works is not broken, however unusual it is
        driver_works = rule.layer in _OF_MACHINE and machine.driver.cuda.works
        computes = rule.layer != "extensions" and run.cuda_works
        if found.severity == "error" and (driver_works or computes) and not failed:
            found = replace(found, severity="note")
        met.append((rule, found))
    met.sort(key=lambda pair: [*LAYERS].index(pair[0].layer))  # stable: in a layer, the order of the rules
    faults = [(rule, found) for rule, found in met if found.severity == "error"]
    faults.sort(key=lambda pair: pair[0].symptom)  # stable: a symptom is a cause only if no layer has a fault
    causes: list[tuple[Rule, Finding]] = []
    muted: list[Muted] = []
    for rule, found in faults:
        # causes in the same chain come first, then environment variables
        near = sorted(causes, key=lambda pair: (_chain(pair[0]) != _chain(rule), pair[0].layer != "variables"))
        if because := next((cause.code for cause, _ in near if _explains(cause, rule)), ""):
            muted.append(Muted(found, because))
        else:
            causes.append((rule, found))
    others = [found for _, found in met if found.severity != "error"]
    findings = (*(found for _, found in causes), *sorted(others, key=lambda found: found.severity != "warning"))
    severities = {found.severity for found in findings}
    accelerated = machine.hardware.present and not case.withheld
    accelerated = accelerated or run.cuda_works or any(other.usable for other in machine.accelerators)
    status: Status = "ok" if accelerated else "no-gpu"
    if "error" in severities:
        status = "broken"
    elif "warning" in severities:
        status = "degraded"
    cause = findings[0] if status in ("broken", "degraded") else None
    judged = replace(machine, problems={**machine.problems, **raised}) if raised else machine
    return Diagnosis(status, cause, findings, tuple(muted), judged)


def _chain(rule: Rule) -> str:
    return "torch" if rule.layer in _OF_TORCH else "machine" if rule.layer in _OF_MACHINE else rule.layer


def _explains(cause: Rule, rule: Rule) -> bool:
    """Whether a fault explains another one, of a later layer."""
    earlier, chain = _chain(cause), _chain(rule)
    # before them, whether the driver fits the build cannot be judged
    unjudgeable = chain == "fit" and cause.layer in (*_OF_TORCH, *_OF_MACHINE[:-1])
    follows = (rule.symptom or chain == "run") and earlier != "extensions"
    return earlier == chain != "extensions" or unjudgeable or follows
