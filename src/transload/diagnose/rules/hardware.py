"""The card itself: whether there is one, and whether it is alive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.rules.kernel_card import misfit
from transload.diagnose.rules.row import Seen, Table
from transload.diagnose.rules.signs import (
    absent,
    answer_line,
    broken,
    card_nodes,
    code,
    host_lines,
    logged,
    nvml_line,
    nvml_ok,
    unseen,
    works,
)
from transload.diagnose.tables import nvml_result
from transload.machine import Unknown

if TYPE_CHECKING:
    from transload.machine import Machine, NvmlGpu

__all__ = ["TABLE"]

TABLE = Table("hardware")

Lines = tuple[str, ...]

_TREE = "https://github.com/NVIDIA/open-gpu-kernel-modules/issues"
_VENDORS = {0x1002: "AMD", 0x8086: "Intel", 0x10DE: "NVIDIA"}
_LOST = (15, 16)  # GPU_IS_LOST, RESET_REQUIRED
_ECC = 214


@TABLE.row(
    "N01",
    "this notebook's runtime has no GPU",
    about="""Colab, Kaggle and the like give a notebook a machine with or without a GPU, as its settings say. In one
without, torch.cuda.is_available() is False and nothing is broken.""",
    fix="""Colab: Runtime › Change runtime type › a GPU. Kaggle: Settings › Accelerator › a GPU. The session starts
anew, and what was in memory is lost.""",
    sources=("https://github.com/Kaggle/kaggle-cli/issues/1151",),
)
def notebook(machine: Machine) -> Seen | None:
    """A notebook service that gives GPUs on demand, and no GPU in sight."""
    where = machine.surroundings.notebook
    steps = {
        "colab": "Choose Runtime › Change runtime type › a GPU, and connect again.",
        "kaggle": "Choose Settings › Accelerator › a GPU; the session starts anew.",
    }
    if where not in steps or not absent(machine):
        return None
    return Seen((f"this is {where.title()}", _bus(machine)), (steps[where],), severity="note")


@TABLE.row(
    "H06",
    "the laptop's NVIDIA card is switched off",
    about="""A laptop with two graphics chips can switch the NVIDIA one off to save power: with "prime-select
intel", by its firmware's settings, or by a desktop's power profile. It is then not even on the PCI bus, or its
driver is kept from loading, and every tool says that there is no NVIDIA GPU.

It is told by the choice that prime-select keeps in /etc/prime-discrete.""",
    fix="Switch it on: sudo prime-select on-demand, and reboot. Where that fails, see the firmware's settings.",
    sources=("https://github.com/JackHack96/dell-xps-9570-ubuntu-respin/issues/125",),
)
def switched_off(machine: Machine) -> Seen | None:
    """prime-select chose another card, and no NVIDIA driver is loaded although nothing is missing."""
    built = machine.platform.kernel in (machine.kernel.built_for or ())
    off = machine.platform.prime in ("intel", "amd", "off") and machine.kernel.loaded is False
    if not off or not (built or absent(machine)) or works(machine):
        return None
    first = machine.torch.first
    evidence = (f"prime-select is set to {machine.platform.prime}", _bus(machine))
    fix = (fixes.sudo(machine, "prime-select on-demand"), fixes.reboot(machine))
    return Seen(evidence, fix, severity="note" if first is None or first.cpu_only else "error")


@TABLE.row(
    "H02",
    "a GPU has fallen off the bus",
    about="""The card stopped answering on the PCI bus: power, heat, a loose riser, a firmware fault. The kernel's
log says "NVRM: Xid (PCI:…): 79, GPU has fallen off the bus", nvidia-smi "Unable to determine the device handle for
GPU 0000:0B:00.0: Unknown Error", torch 999 "CUDA unknown error" or fewer devices than before.

It is told by the log, by NVML's code 15 (GPU_IS_LOST) for the card, or by its configuration space, which reads all
ones.""",
    fix="""Reboot; a lost card does not come back otherwise. If it happens again, look at its power cables, seat,
temperature and power supply; capping the clocks (sudo nvidia-smi -lgc 300,1500) shows whether power is the reason.""",
    sources=(f"{_TREE}/387", f"{_TREE}/507", "https://github.com/NVIDIA/dcgm-exporter/issues/604"),
)
def lost(machine: Machine) -> Seen | None:
    """A card that reads all ones or that NVML calls lost; where CUDA fails, also the log's word."""
    dead = tuple(f"{card.address} reads all ones" for card in machine.hardware.gpus if card.dead)
    gone = tuple(_lost_line(gpu) for gpu in machine.driver.nvml.gpus if gpu.code in _LOST)
    said = logged(machine, r"GPU has fallen off the bus") if broken(machine) else ""
    if not (dead or gone or said):
        return None
    evidence = (*dead, *gone, *filter(None, (said,)))
    fix = (fixes.reboot(machine), "If it happens again: check the card's power cables, seat, temperature and riser.")
    return Seen(evidence, (*fixes.on_host(machine), *fix), severity="warning" if works(machine) else "error")


def _lost_line(gpu: NvmlGpu) -> str:
    return f"NVML answers {gpu.code} {nvml_result(gpu.code).name} for GPU {gpu.index}"


def _unstarted(machine: Machine) -> bool:
    """Whether NVIDIA's module is loaded, a card is there, and NVML does not see it."""
    return broken(machine) and machine.kernel.loaded is True and bool(unseen(machine)) and not nvml_ok(machine)


@TABLE.row(
    "H05",
    "the firmware gave the card no address space",
    about="""A card with much memory needs a large window of addresses. A firmware (BIOS) without "Above 4G
Decoding" or "Resizable BAR" cannot place it: the region stays unassigned, the driver cannot start the card, and
nvidia-smi says "No devices were found". The kernel's log says "RmInitAdapter failed! (0x22:0x56:884)" or "BAR1 is
0M".

It is told by the size of the card's regions in /sys/bus/pci/devices/<card>/resource.""",
    fix="Switch on Above 4G Decoding and Resizable BAR in the firmware's settings; update one that has neither.",
    sources=(f"{_TREE}/862",),
)
def no_window(machine: Machine) -> Seen | None:
    """A region of a card that the driver cannot start was not assigned."""
    if not _unstarted(machine) or misfit(machine):
        return None
    said = logged(machine, r"BAR\d is 0M")
    bare = [f"a memory region of {card.address} has no addresses" for card in unseen(machine) if 0 in card.bars]
    if not (said or bare):
        return None
    fix = (
        "Switch on 'Above 4G Decoding' and 'Resizable BAR' in the firmware's (BIOS) settings, and start again.",
        "In a virtual machine it is the hypervisor that must give the guest a large enough MMIO window.",
    )
    return Seen((*bare, *filter(None, (said, nvml_line(machine)))), (*fixes.on_host(machine), *fix))


@TABLE.row(
    "H04",
    "the card does not start",
    about="""The kernel driver knows the card and cannot start it: "NVRM: GPU …: RmInitAdapter failed!", "Cannot
initialize GSP firmware RM", "unexpected WPR2 already up". nvidia-smi says "No devices were found"; opening
/dev/nvidia0 fails with EIO.

It is told by that text in the kernel's log, by EIO, or by a card that stands in /proc/driver/nvidia/gpus and that
NVML does not count.""",
    fix="""Switch the machine off and on again: a reboot does not cut the card's power. Then another driver branch,
an update of the mainboard's and the card's firmware, and another slot.""",
    avoid="Reinstalling CUDA or torch: the card is dead below both.",
    sources=(f"{_TREE}/1104", f"{_TREE}/789", f"{_TREE}/673", f"{_TREE}/543", f"{_TREE}/1230"),
)
def stillborn(machine: Machine) -> Seen | None:
    """RmInitAdapter failed, EIO, or a card that the module lists and NVML does not count."""
    if not _unstarted(machine) or misfit(machine) or no_window(machine):
        return None
    said = logged(machine, r"RmInitAdapter failed! \([^)]*\)|Cannot initialize GSP firmware RM")
    nodes = card_nodes(machine)
    eio = tuple(f"opening {node.path} fails with EIO" for node in nodes if node.error == "EIO")
    sound = bool(nodes) and all(node.kind == "char" and node.major == 195 and not node.error for node in nodes)
    nvml = machine.driver.nvml
    listed = sound and nvml.init == 0 and nvml.count == 0 and [g for g in machine.kernel.gpus if not g.excluded]
    if not (said or eio or listed):
        return None
    known = tuple(f"/proc/driver/nvidia/gpus lists {gpu.address} {gpu.model}".rstrip() for gpu in machine.kernel.gpus)
    fix = (
        "Switch the machine off, wait, and switch it on: a reboot does not cut the card's power.",
        "If it stays so: another driver branch, newer firmware for mainboard and card, another slot.",
    )
    evidence = (*filter(None, (said,)), *eio, *known, nvml_line(machine), answer_line(machine))
    return Seen(evidence, (*fixes.on_host(machine), *fix), likely=not (said or eio))


@TABLE.row(
    "H03",
    "the GPU's memory has errors it could not correct",
    about="""The card found memory that it could not correct (Xid 48, 63, 64, 94, 95). It sets the bad rows or pages
aside, which takes a reset; until then programs can die with "CUDA error: uncorrectable ECC error encountered"
(214). A failed remapping means that the spare rows are used up.

It is told by NVML's remapped rows and retired pages.""",
    fix="""Reset the card with no program on it (sudo nvidia-smi -r -i N), or reboot. A card whose remapping failed
should be replaced.""",
    sources=("https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/index.html",),
)
def ecc(machine: Machine) -> Seen | None:
    """A pending or failed remapping or retirement; an error where a program already died of it."""
    marked = [gpu for gpu in machine.driver.nvml.gpus if gpu.remap_pending or gpu.remap_failure or gpu.retired_pending]
    died = any("uncorrectable ECC error" in step.error for step in machine.torch_run.steps)
    if not (marked or died or code(machine) == _ECC):
        return None
    failed = any(gpu.remap_failure for gpu in marked)
    evidence = (*(_ecc_line(gpu) for gpu in marked), *(("torch met an uncorrectable ECC error",) if died else ()))
    which = ",".join(str(gpu.index) for gpu in marked)
    reset = (f"nvidia-smi -r -i {which}",) if which else ("nvidia-smi -r",)
    fix = ("With no program on the card (or reboot):", *host_lines(machine, *reset))
    replace = ("A card whose remapping failed should be replaced.",) if failed else ()
    fatal = died or (code(machine) == _ECC and not works(machine))
    return Seen(evidence or (answer_line(machine),), (*fix, *replace), severity="error" if fatal else "warning")


def _ecc_line(gpu: NvmlGpu) -> str:
    states = (("remapping failed", gpu.remap_failure), ("remapping pending", gpu.remap_pending))
    words = [word for word, is_so in (*states, ("page retirement pending", gpu.retired_pending)) if is_so]
    return f"NVML says of GPU {gpu.index}: {', '.join(words)}"


@TABLE.row(
    "H01",
    "there is no NVIDIA GPU in this machine",
    about="""No device of NVIDIA's with a display or compute class is on the PCI bus, and this is neither WSL nor a
Jetson. CUDA cannot work here, and that is no fault: torch computes on the CPU. It shows as "Found no NVIDIA driver
on your system" or "No CUDA GPUs are available".

In a virtual machine it means that no card was passed through; in a cluster, that this node has none.""",
    fix="""Nothing is broken. For an AMD or Intel card there are other builds of torch; a CPU-only build is a tenth
of the download.""",
)
def no_gpu(machine: Machine) -> Seen | None:
    """No card by any road we know; where the bus could not be read, a note that says so."""
    around = machine.surroundings
    other_row = around.wsl or machine.platform.system == "Darwin" or notebook(machine) or switched_off(machine)
    if other_row or works(machine):
        return None
    if isinstance(machine.hardware.pci, Unknown) and not _trace(machine):
        title = "whether there is an NVIDIA GPU in this machine could not be found out"
        return Seen((_bus(machine), answer_line(machine)), severity="note", title=title)
    if not absent(machine):
        return None
    title = f"no NVIDIA GPU is to be seen from this {around.sandbox} sandbox" if around.sandbox else ""
    job = fixes.give_gpu(machine) if around.slurm else ()
    return Seen((_bus(machine),), job, title, "note")


def _trace(machine: Machine) -> bool:
    """Whether anything but the bus speaks of an NVIDIA GPU."""
    present = machine.hardware.present or machine.kernel.loaded or machine.kernel.gpus or nvml_ok(machine)
    return bool(present or card_nodes(machine) or code(machine) not in (-1, 100))


def _bus(machine: Machine) -> str:
    """What the PCI bus holds, in a line."""
    pci = machine.hardware.pci
    if isinstance(pci, Unknown):
        return f"the PCI bus could not be read: {pci.reason}"
    shown = [f"{each.address} {_VENDORS.get(each.vendor, f'{each.vendor:04x}')}" for each in pci if each.display]
    return f"display devices on the PCI bus: {', '.join(shown) or 'none'}"
