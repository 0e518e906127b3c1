"""What the rules of the machine look at together: how the driver answered, its device nodes, the kernel's log."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.tables import chip_of, cu_result, nvml_result
from transload.machine import Library, Machine, Node, PciDevice

if TYPE_CHECKING:
    from transload.findings import Severity

__all__ = [
    "CONTROL",
    "UVM",
    "absent",
    "answer_line",
    "broken",
    "card_line",
    "card_nodes",
    "code",
    "fails",
    "granted",
    "host_gpu",
    "host_lines",
    "logged",
    "mismatched",
    "nodes_absent",
    "nvml_line",
    "nvml_ok",
    "relief_line",
    "relieved",
    "taken",
    "unheard",
    "unmet",
    "unseen",
    "works",
]

Lines = tuple[str, ...]

CONTROL, UVM = "/dev/nvidiactl", "/dev/nvidia-uvm"
NO_DEVICE = 100
_CARD = re.compile(r"/dev/nvidia\d+")
_RELEASE = re.compile(r"\d{3}\.\d+(?:\.\d+)*")
_LOG_NOISE = re.compile(r"\[\s*\d+\.\d+\]|\bNVRM:|\\x0a|\s+")
_MATCH_SHOWN = 160
_COUNTS = ("SLURM_GPUS_ON_NODE", "SLURM_GPUS")
_LISTS = ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "GPU_DEVICE_ORDINAL")


def works(machine: Machine) -> bool:
    """Whether somebody was seen to reach a GPU: no rule may say otherwise."""
    return machine.driver.cuda.works or machine.torch_run.cuda_works


def fails(machine: Machine) -> bool:
    """Whether the CUDA driver was asked and gave no GPU; or could not be asked, and files show that it cannot."""
    asked = machine.driver.cuda.answer.state != "unasked"
    return (asked or (unheard(machine) and _hopeless(machine))) and not works(machine)


def unheard(machine: Machine) -> bool:
    """Whether the CUDA driver was to be asked, and the child that asks could not be run."""
    answer = machine.driver.cuda.answer
    return answer.state == "unasked" and bool(answer.detail or "cuda" in machine.problems)


def _hopeless(machine: Machine) -> bool:
    """Whether a process cannot reach a GPU, by files alone: there is no module to reach it by, or no node."""
    elsewhere = machine.surroundings.wsl or machine.hardware.dxg or machine.hardware.tegra
    return not elsewhere and (machine.kernel.loaded is False or nodes_absent(machine))


def relieved(machine: Machine) -> Lines:
    """The variables without which the driver was seen to work; empty where no experiment succeeded."""
    return next((tried.change for tried in machine.driver.experiments if tried.cuda.works), ())


def broken(machine: Machine) -> bool:
    """Whether CUDA fails, and not because of a variable: something below the process is wrong."""
    return fails(machine) and not relieved(machine)


def code(machine: Machine) -> int:
    """What the driver answered: the first result that is not 0, 100 where it has no device, -1 without an answer."""
    cuda = machine.driver.cuda
    if not cuda.answer.answered:
        return -1
    if cuda.init:
        return cuda.init
    return cuda.count_code if cuda.count_code > 0 else NO_DEVICE if cuda.count == 0 else 0


def nvml_ok(machine: Machine) -> bool:
    """Whether NVML, and so the kernel driver, is at work and sees a card."""
    nvml = machine.driver.nvml
    return nvml.answer.answered and nvml.init == 0 and nvml.count > 0


def taken(machine: Machine) -> Library | None:
    """The libcuda.so.1 that a process gets: the file that was mapped, else what the loader should take."""
    libraries, mapped = machine.driver.libraries, machine.driver.cuda.library
    same = (lib for lib in libraries.cuda or () if mapped and mapped in (lib.path, lib.target))
    return next(same, libraries.libcuda)


def mismatched(machine: Machine) -> Library | None:
    """The libcuda.so.1 in use, where it is of another release than the kernel driver, and no compat library."""
    lib, kernel = taken(machine), machine.kernel.version
    if lib is None or lib.kind != "driver" or not kernel or not _RELEASE.fullmatch(lib.version):
        return None
    return lib if lib.version != kernel else None


def card_nodes(machine: Machine) -> tuple[Node, ...]:
    """The nodes of single cards, /dev/nvidia0 and so on, that exist."""
    return tuple(node for node in machine.nodes.found if node.exists and _CARD.fullmatch(node.path))


def nodes_absent(machine: Machine) -> bool:
    """Whether /dev was looked at and holds none of NVIDIA's nodes."""
    looked = bool(machine.nodes.found)
    at = machine.nodes.at
    return looked and not (card_nodes(machine) or at(CONTROL).exists or at(UVM).exists)


def _pulled(machine: Machine) -> bool:
    """Whether the card was taken out under a driver that is still loaded, whose nodes outlive it."""
    bare = isinstance(machine.hardware.pci, tuple) and not (machine.hardware.present or machine.kernel.gpus)
    return bare and machine.kernel.loaded is True and not machine.surroundings.container


def host_gpu(machine: Machine) -> bool:
    """Whether the machine under a container surely has an NVIDIA card."""
    seen = machine.hardware.gpus or machine.kernel.loaded or machine.kernel.gpus
    return bool(seen) and not _pulled(machine)


def absent(machine: Machine) -> bool:
    """Whether no NVIDIA GPU is there, as far as was looked: nothing of a driver can be at fault then."""
    if not isinstance(machine.hardware.pci, tuple):
        return False
    node = machine.nodes.found and not nodes_absent(machine) and not _pulled(machine)
    here = machine.hardware.present or host_gpu(machine) or node or nvml_ok(machine)
    return not (here or works(machine) or machine.surroundings.wsl)


def unmet(machine: Machine) -> Severity:
    """How bad it is that a process was given no card: no fault where its torch is built for none."""
    first = machine.torch.first
    return "note" if first is not None and first.cpu_only and not machine.torch.shadow else "error"


def unseen(machine: Machine) -> tuple[PciDevice, ...]:
    """The cards on the bus that NVML does not list as usable."""
    nvml, cards = machine.driver.nvml, machine.hardware.gpus
    # NVML writes eight digits of the PCI domain, sysfs four
    seen = {gpu.address[-12:].lower() for gpu in nvml.gpus if gpu.code == 0 and gpu.address}
    if not seen and nvml_ok(machine) and nvml.count >= len(cards):
        return ()
    return tuple(card for card in cards if card.address[-12:].lower() not in seen)


def granted(machine: Machine) -> bool:
    """Whether Slurm gave this job a GPU. Lists of indices are grants where they are not empty: ``0`` is a card."""
    counted = any((machine.variables.get(name) or "0") != "0" for name in _COUNTS)
    return counted or any(machine.variables.get(name) for name in _LISTS)


def logged(machine: Machine, pattern: str) -> str:
    """What the kernel's log says that matches; the driver's messages run over several lines, which are joined."""
    if not machine.kernel.log:
        return ""
    text = _LOG_NOISE.sub(" ", " ".join(machine.kernel.log))
    found = re.search(pattern, re.sub(r" +", " ", text))
    return f"the kernel's log says: {found[0][:_MATCH_SHOWN].strip()}" if found else ""


def answer_line(machine: Machine) -> str:
    """How the CUDA driver answered, in a line."""
    cuda = machine.driver.cuda
    if cuda.answer.state == "no-library":
        return "the loader finds no libcuda.so.1"
    if cuda.answer.state in ("hung", "crashed"):
        went = "gave no answer" if cuda.answer.state == "hung" else "crashed"
        return f"the CUDA driver {went} within {cuda.answer.seconds:.0f} s: {cuda.answer.detail}".rstrip(": ")
    if not cuda.answer.answered:
        return f"libcuda.so.1 could not be used: {cuda.answer.detail or cuda.answer.state}"
    if cuda.init == 0:
        return f"cuInit answered 0, and cuDeviceGetCount {max(cuda.count, 0)} devices"
    return f"cuInit answered {cuda.init} {cu_result(cuda.init).name}".rstrip()


def nvml_line(machine: Machine) -> str:
    """How NVML answered, in a line."""
    nvml = machine.driver.nvml
    if not nvml.answer.answered:
        return f"NVML: {nvml.answer.detail or nvml.answer.state}"
    if nvml.init:
        return f"nvmlInit answered {nvml.init} {nvml_result(nvml.init).name}".rstrip()
    return f"NVML answers and sees {max(nvml.count, 0)} GPU{'' if nvml.count == 1 else 's'}"


def relief_line(machine: Machine) -> Lines:
    """What an experiment proved: the driver works without certain variables."""
    for tried in machine.driver.experiments:
        if tried.cuda.works:
            plural = "" if tried.cuda.count == 1 else "s"
            return (f"without {', '.join(tried.change)} the driver starts and finds {tried.cuda.count} GPU{plural}",)
    return ()


def card_line(machine: Machine) -> Lines:
    """The cards on the bus, a line each."""
    lines = []
    for card in machine.hardware.gpus:
        chip = chip_of(card.device)
        name = f" ({chip.code}, {chip.generation})" if chip else ""
        driver = f", bound to {card.driver}" if card.driver else ", bound to no driver"
        lines.append(f"{card.address} is an NVIDIA card, 10de:{card.device:04x}{name}{driver}")
    return tuple(lines)


def host_lines(machine: Machine, *commands: str) -> Lines:
    """Commands for root on the machine itself, which is outside where this is a container."""
    if machine.surroundings.container:
        return (*fixes.on_host(machine), *(f"$ sudo {command}" for command in commands))
    return tuple(fixes.sudo(machine, command) for command in commands)
