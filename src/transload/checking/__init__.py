"""``transload.check``: will a file load here, where would it land, and what stands in the way. Nothing is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from transload.findings import Finding
from transload.loading.placement import AUTO, place

if TYPE_CHECKING:
    from transload.checking.compatibility import Compatibility
    from transload.checking.packages import Package
    from transload.checking.torch_says import Said
    from transload.checkpoint import Checkpoint
    from transload.diagnose.verdict import Diagnosis
    from transload.loading.placement import Devices, Plan
    from transload.machine import Machine

__all__ = ["Check", "check", "checked"]


@dataclass(frozen=True)
class Check:
    """What would come of ``transload.load(path, map_location=device)`` on a machine.

    ``ok`` is whether it would load and fit; where not, ``refusal`` says why in a sentence. ``plan`` is where everything
    lands. ``torch`` is what plain ``torch.load(path)`` would say instead, word for word where ``torch.exact``.
    ``packages`` are those the names in the file live in, ``cuda`` whether it depends on CUDA at all. ``findings`` are
    what is to be said of it here, errors first.
    """

    checkpoint: Checkpoint
    diagnosis: Diagnosis
    devices: Devices
    wish: Any
    plan: Plan
    torch: Said
    packages: tuple[Package, ...]
    cuda: Compatibility
    refusal: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether it would load as asked."""
        return not self.refusal

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, schema 1."""
        return {
            "schema": 1,
            "path": self.checkpoint.path,
            "ok": self.ok,
            "refusal": self.refusal,
            "format": self.checkpoint.format,
            "safety": self.checkpoint.safety,
            "integrity": self.checkpoint.integrity,
            "map_location": None if self.wish is None else str(self.wish),
            "devices": [
                {"name": device.name, "free": device.free, "total": device.total, "label": device.label}
                for device in self.devices.available
            ],
            "current": self.devices.current,
            "rank": self.devices.rank,
            "absent": self.devices.absent,
            "plan": self.plan.to_dict(),
            "torch": self.torch.to_dict(),
            "packages": [package.to_dict() for package in self.packages],
            "cuda": self.cuda.to_dict(),
            "findings": [finding.to_dict() for finding in self.findings],
        }

    def __str__(self) -> str:
        """The report as ``transload check`` prints it, without colour."""
        from transload.render.check import as_text

        return as_text(self)


def check(path: str | os.PathLike[str], device: Any = AUTO, *, machine: Machine | None = None) -> Check:
    """Whether and where a checkpoint would load here, or on another machine that was examined.

    ``device`` is what ``load`` takes as ``map_location``. torch is not imported and need not be there: the devices are
    those that the doctor's probes find.

    >>> transload.check("model.pt").plan.device_of("cuda:0")  # doctest: +SKIP
    'cpu'
    """
    from transload.diagnose import judge_machine
    from transload.judge import inspect

    checkpoint = _with_indices(inspect(path), path)
    here = machine is None
    if machine is None:
        from transload.diagnose.probe import probe

        machine = probe(torch=False)
    environ = dict(os.environ) if here else machine.variables.values
    made = checked(checkpoint, judge_machine(machine), device, environ, cwd=os.curdir if here else "")
    return replace(made, plan=replace(made.plan, how=_how(path, made.plan))) if here else made


def _with_indices(checkpoint: Checkpoint, path: str | os.PathLike[str]) -> Checkpoint:
    """With what is wrong with the indices of sparse tensors: the only bytes of tensors that ``load`` looks at."""
    if not any(tensor.kind.startswith("sparse") for tensor in checkpoint.tensors):
        return checkpoint
    from transload.findings import Problem
    from transload.judge import judge
    from transload.tensors import open_content
    from transload.verifying.records import misplaced

    with open_content(path) as content:
        found = tuple(Problem("sparse-outside", name, why) for name, (_, why) in misplaced(content).items())
    return judge(replace(checkpoint, problems=(*checkpoint.problems, *found))) if found else checkpoint


def _how(path: str | os.PathLike[str], plan: Plan) -> str:
    """How its bytes would be moved here: as ``load`` chooses, but for what only a working driver can tell."""
    from transload.loading.engine import forecast

    cuda = sum(move.nbytes for move in plan.moves if move.device.startswith("cuda"))
    host = sum(move.nbytes for move in plan.moves) - cuda
    return forecast(os.fspath(path), host, cuda).why if plan.ok and host + cuda else ""


def checked(
    checkpoint: Checkpoint, diagnosis: Diagnosis, wish: Any, environ: dict[str, str], *, cwd: str = ""
) -> Check:
    """The same of what was read and examined already. ``cwd`` is where programs are run from."""
    from transload.checking import advice
    from transload.checking.compatibility import compatibility
    from transload.checking.packages import installed, packages
    from transload.checking.torch_says import torch_says
    from transload.loading.placement import devices_of

    devices = devices_of(diagnosis, environ)
    plan = place(checkpoint, devices, wish)
    needed = packages(checkpoint, diagnosis.machine, cwd=cwd)
    absent = {package.missing for package in needed if package.missing}
    said = torch_says(checkpoint, installed(diagnosis, devices, environ, absent))
    cuda = compatibility(checkpoint, diagnosis.machine)
    made = Check(checkpoint, diagnosis, devices, wish, plan, said, needed, cuda, "", ())
    found = tuple(_findings(made))
    refusal = _refusal(checkpoint, found)
    if not refusal:
        found = (*found, *advice.of_tags(checkpoint, plan))
    order = sorted(found, key=lambda finding: ("error", "warning", "note").index(finding.severity))
    return replace(made, refusal=refusal, findings=tuple(order))


# -- what load itself would refuse, in its order


def _refusal(checkpoint: Checkpoint, found: tuple[Finding, ...]) -> str:
    """Why ``load`` would raise: for what the file is, for what it asks, for what the machine lacks."""
    from transload.errors import LoadError
    from transload.loading.refusal import refuse_broken

    try:
        refuse_broken(checkpoint)
    except LoadError as error:
        return error.what.partition("\n")[0]
    titles = {finding.code: finding.title for finding in found}
    if "needs-trust" in titles:
        titles["needs-trust"] = "it asks for names that nobody has allowed"
    order = ("is-a-program", "no-torch"), ("needs-trust", "no-such-device", "too-little-memory", "torch-too-old")
    before, after = ([titles[code] for code in codes if code in titles] for codes in order)
    return next(iter((*before, *_alarms(checkpoint), *after)), "")


def _alarms(checkpoint: Checkpoint) -> Iterator[str]:
    """What nobody can allow."""
    from transload.judge.problems import RULES

    for finding in checkpoint.findings:
        rule = RULES.get(finding.code)
        if finding.code in ("dangerous-globals", "dangerous-use") or (rule and rule.safety == "dangerous"):
            yield finding.title


# -- findings


def _findings(made: Check) -> Iterator[Finding]:
    """In the order in which they are told, among those of a severity: what is wrong with the file comes first."""
    from transload.checking import advice

    found = tuple(advice.of_file(made.checkpoint, made.devices))
    broken = made.checkpoint.integrity not in ("whole", "unchecked")
    yield from found if broken else ()
    yield from advice.of_program(made.checkpoint)
    yield from advice.of_torch(made.diagnosis)
    yield from advice.of_dtypes(made.checkpoint, made.diagnosis.machine)
    yield from advice.of_plan(made.plan)
    yield from () if broken else found
    if made.checkpoint.safety != "dangerous":  # nobody shall install anything for that
        yield from advice.of_packages(made.packages, made.diagnosis.machine, made.devices)
    yield from advice.of_quantized(made.checkpoint, made.devices)
    yield from advice.of_compiled(made.checkpoint, made.cuda)
    yield from advice.of_origin(made.checkpoint, made.diagnosis.machine, made.devices)
