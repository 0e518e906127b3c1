"""Machines for the rules about torch: some without a fault, and helpers that break one part of a machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.diagnose.machines import (
    ANSWERED,
    STEPS,
    healthy,
    in_container,
    in_slurm,
    in_wsl,
    no_torch_run,
    with_facts,
    without_gpu,
)
from tests.diagnose.rules.rule_helpers import finding_of as any_finding_of

from transload.findings import Finding
from transload.machine import (
    Accelerator,
    ChildAnswer,
    Experiment,
    Machine,
    PciDevice,
    Step,
    Torch,
    TorchLibraries,
    TorchRun,
)

FAULTLESS: dict[str, Machine] = {
    "healthy": healthy(),
    "healthy, torch not run": no_torch_run(healthy()),
    "container": in_container(healthy()),
    "slurm": in_slurm(healthy()),
    "wsl": in_wsl(healthy()),
    "no GPU, CPU build": without_gpu(),
    "no GPU, torch not run": no_torch_run(without_gpu()),
    "no GPU, CUDA build": with_facts(
        without_gpu(),
        torch=healthy().torch,
        torch_libraries=healthy().torch_libraries,
        torch_run=TorchRun(
            ANSWERED,
            "2.13.0+cu130",
            cuda="13.0",
            available=False,
            count=0,
            steps=(
                Step("import", ok=True),
                Step("available", ok=True),
                Step("init", ok=False, error="RuntimeError: Found no NVIDIA driver on your system."),
                Step("cpu", ok=True),
            ),
        ),
    ),
}


def finding_of(code: str, machine: Machine, severity: str = "error") -> Finding:
    """The finding of one rule on a machine on which it must match, with that severity and a fix."""
    finding = any_finding_of(code, machine)
    assert finding.severity == severity
    assert finding.fix
    return finding


def with_variables(machine: Machine, **values: str) -> Machine:
    return with_facts(machine, variables__values={**machine.variables.values, **values})


def unimportable(machine: Machine, error: str) -> Machine:
    """The machine on which importing torch raises."""
    run = TorchRun(ANSWERED, steps=(Step("import", ok=False, error=error),))
    return replace(machine, torch_run=run)


def failing(machine: Machine, name: str, error: str, **facts: Any) -> Machine:
    """The machine on which torch passes all steps before ``name``, which raises."""
    steps = [Step(passed, ok=True) for passed in STEPS[: STEPS.index(name)]]
    run = replace(machine.torch_run, steps=(*steps, Step(name, ok=False, error=error)))
    return with_facts(replace(machine, torch_run=run), **facts)


def crashed_or_hung(machine: Machine, state: Any, detail: str, step: str = "import") -> Machine:
    """The machine on which torch crashes or hangs in a step."""
    steps = [Step(passed, ok=True) for passed in STEPS[: STEPS.index(step)]]
    run = TorchRun(ChildAnswer(state, detail), steps=(*steps, Step(step, ok=False, error=detail)))
    return replace(machine, torch_run=run)


def without_torch(machine: Machine) -> Machine:
    """The machine whose Python has no torch."""
    return with_facts(
        unimportable(machine, "ModuleNotFoundError: No module named 'torch'"),
        torch=Torch(installs=()),
        torch_libraries=TorchLibraries(),
    )


def works_without(machine: Machine, *variables: str) -> Machine:
    """The machine on which an experiment showed that the driver works without some variables."""
    return with_facts(machine, driver__experiments=(Experiment(variables, healthy().driver.cuda),))


def amd(detail: str = "gfx1100", *, integrated: bool = False) -> Machine:
    """A machine with an AMD card, its compute driver, and a CPU build of torch."""
    gpu = Accelerator("rocm", "Radeon", detail, usable=True, integrated=integrated)
    card = PciDevice("0000:03:00.0", 0x1002, 0x744C, 0x030000, "amdgpu", "D0")
    return with_facts(without_gpu(), accelerators=(gpu,), hardware__pci=(card,))
