"""The rows about torch, and short ways to ask them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.diagnose.machines import (
    ANSWERED,
    STEPS,
    bare,
    changed,
    healthy,
    in_container,
    in_slurm,
    in_wsl,
    no_torch_run,
)
from tests.diagnose.rules.machine_rows import finding_of as any_finding_of

from transload.findings import Finding
from transload.machine import Accelerator, Answer, Experiment, Machine, PciDevice, Step, Torch, TorchLibraries, TorchRun

FINE: dict[str, Machine] = {
    "healthy": healthy(),
    "healthy, torch not run": no_torch_run(healthy()),
    "container": in_container(healthy()),
    "slurm": in_slurm(healthy()),
    "wsl": in_wsl(healthy()),
    "no GPU, CPU build": bare(),
    "no GPU, torch not run": no_torch_run(bare()),
    "no GPU, CUDA build": changed(
        bare(),
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
    """What one rule finds on a machine on which it must match with that severity and a fix."""
    found = any_finding_of(code, machine)
    assert found.severity == severity
    assert found.fix
    return found


def variables(machine: Machine, **values: str) -> Machine:
    return changed(machine, variables__values={**machine.variables.values, **values})


def unimportable(machine: Machine, error: str) -> Machine:
    """The machine on which the import of torch raises."""
    run = TorchRun(ANSWERED, steps=(Step("import", ok=False, error=error),))
    return replace(machine, torch_run=run)


def failing(machine: Machine, name: str, error: str, **facts: Any) -> Machine:
    """The machine on which torch comes as far as one step, which raises."""
    steps = [Step(each, ok=True) for each in STEPS[: STEPS.index(name)]]
    run = replace(machine.torch_run, steps=(*steps, Step(name, ok=False, error=error)))
    return changed(replace(machine, torch_run=run), **facts)


def ended(machine: Machine, state: Any, detail: str, step: str = "import") -> Machine:
    """The machine on which torch does not come back."""
    steps = [Step(each, ok=True) for each in STEPS[: STEPS.index(step)]]
    run = TorchRun(Answer(state, detail), steps=(*steps, Step(step, ok=False, error=detail)))
    return replace(machine, torch_run=run)


def without_torch(machine: Machine) -> Machine:
    """The machine whose Python has no torch."""
    return changed(
        unimportable(machine, "ModuleNotFoundError: No module named 'torch'"),
        torch=Torch(installs=()),
        torch_libraries=TorchLibraries(),
    )


def tried(machine: Machine, *left_out: str) -> Machine:
    """The machine whose driver was seen to work without some variables."""
    return changed(machine, driver__experiments=(Experiment(left_out, healthy().driver.cuda),))


def amd(detail: str = "gfx1100", *, integrated: bool = False) -> Machine:
    """A machine with an AMD card, its compute driver, and a torch without a GPU."""
    gpu = Accelerator("rocm", "Radeon", detail, usable=True, integrated=integrated)
    card = PciDevice("0000:03:00.0", 0x1002, 0x744C, 0x030000, "amdgpu", "D0")
    return changed(bare(), accelerators=(gpu,), hardware__pci=(card,))
