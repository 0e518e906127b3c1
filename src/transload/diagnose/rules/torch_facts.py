"""What the rules about torch look at together: what the torch child met, and the cards that the build must serve."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.rules.signs import nvml_ok
from transload.diagnose.tables import chip_of, default_build, numbers_of, releases

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transload.machine import Machine, Step

__all__ = [
    "Card",
    "again",
    "build_cuda",
    "cards",
    "complaint",
    "computes",
    "failed",
    "has_nvidia",
    "import_error",
    "imported",
    "is_nvidia_library",
    "said",
    "unrun",
    "wheel_cuda",
]

_SHOWN = 300
_NVIDIA = re.compile(r"lib(?:cu(?!rl|ps)|nv(?!di)|nccl|caffe2_nvrtc)\w*\.so[.\d]*")


def unrun(machine: Machine) -> bool:
    """Whether torch was not run, so that only its files can tell."""
    return machine.torch_run.answer.state == "unasked"


def imported(machine: Machine) -> bool:
    """Whether torch was seen to be imported."""
    step = machine.torch_run.step("import")
    return step is not None and step.ok


def import_error(machine: Machine) -> str:
    """Why torch could not be imported; empty where it could, or was not tried."""
    step = machine.torch_run.step("import")
    return step.error if step and not step.ok else ""


def failed(machine: Machine, *names: str) -> Step | None:
    """The first step of the torch child that failed, of those named or of all."""
    return next((step for step in machine.torch_run.steps if not step.ok and (not names or step.name in names)), None)


def computes(machine: Machine) -> bool:
    """Whether torch was seen to do all its work on the GPU: then nothing about it is broken."""
    return machine.torch_run.cuda_works and failed(machine) is None


def complaint(machine: Machine, pattern: str) -> str:
    """The line in which torch said something, by error or by warning; empty where it did not."""
    for text in _texts(machine):
        for line in text.splitlines():
            if re.search(pattern, line):
                return line.strip()[:_SHOWN]
    return ""


def _texts(machine: Machine) -> Iterator[str]:
    for step in machine.torch_run.steps:
        if not step.ok:
            yield step.error
    yield from machine.torch_run.warnings


def said(text: str) -> tuple[str, ...]:
    """Evidence of an error's text: its first line with words; nothing of nothing."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return (f"torch says: {line[:_SHOWN]}",) if line else ()


def is_nvidia_library(name: str) -> bool:
    """Whether a file is one of the CUDA libraries; libcuda and libnvidia-*, the driver's own, are not.

    >>> is_nvidia_library("libcudnn.so.9"), is_nvidia_library("libcuda.so.1"), is_nvidia_library("libcurl.so.4")
    (True, False, False)
    """
    return bool(_NVIDIA.fullmatch(name)) and not name.startswith("libcuda.so")


def has_nvidia(machine: Machine) -> bool:
    """Whether there is surely an NVIDIA GPU; under WSL /dev/dxg alone may lead to any vendor's."""
    hardware, driver = machine.hardware, machine.driver
    in_wsl = hardware.dxg and any(lib.kind == "wsl" for lib in driver.libraries.cuda or ())
    return bool(hardware.gpus or hardware.tegra or in_wsl or driver.cuda.works or nvml_ok(machine))


def wheel_cuda(machine: Machine) -> str:
    """The CUDA that torch was built with; empty where with none, or not known."""
    first = machine.torch.first
    return machine.torch_run.cuda or (first.cuda if first else "")


def build_cuda(machine: Machine) -> tuple[int, int] | None:
    """The same as two numbers."""
    numbers = numbers_of(wheel_cuda(machine))
    return (numbers[0], numbers[1]) if len(numbers) > 1 else None


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU that torch is to run on; ``sure`` unless its capability is inferred from its neighbours' PCI ids."""

    name: str
    capability: tuple[int, int]
    sure: bool = True

    def __str__(self) -> str:
        return f"{self.name} has compute capability {self.capability[0]}.{self.capability[1]}"


def cards(machine: Machine) -> tuple[Card, ...]:
    """The cards that this process gets; where the driver did not say, all that NVML lists, or the PCI bus."""
    driver = machine.driver
    told = driver.cuda.gpus if driver.cuda.works else driver.nvml.gpus
    known = tuple(
        Card(gpu.name or "the GPU", (gpu.capability[0], gpu.capability[1])) for gpu in told if len(gpu.capability) == 2
    )
    return known or tuple(_by_id(machine))


def _by_id(machine: Machine) -> Iterator[Card]:
    for gpu in machine.hardware.gpus:
        chip = chip_of(gpu.device)
        if chip and chip.capability and gpu.driver != "vfio-pci":
            name = f"the card at {gpu.address} ({chip.code}, {chip.generation})"
            yield Card(name, chip.capability, sure=not chip.inferred)


def again(machine: Machine) -> tuple[str, ...]:
    """Install torch once more, with all that it needs: the same release, in the build that fits this machine."""
    first = machine.torch.first
    release, _, build = (first.version if first else "").partition("+")
    if release not in releases():
        return fixes.wheel(machine) if has_nvidia(machine) else fixes.install(machine, "torch", force=True)
    if has_nvidia(machine):
        return fixes.wheel(machine, release if fixes.wheel_choice(machine, release).torch_version else None)
    from transload.diagnose.tables.wheels import INDEX

    default = default_build(release, fixes.wheel_platform(machine))
    index = "" if (default and default.build == build) or not build else f"{INDEX}/{build}"
    return fixes.install(machine, f"torch=={release}", index=index, force=True)
