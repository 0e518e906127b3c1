"""The card itself: whether there is one, and whether it works."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.case import Case
from transload.diagnose.rules.rule import Match, rule
from transload.diagnose.tables import nvml_result
from transload.machine import Unknown

if TYPE_CHECKING:
    from transload.findings import Severity

_VENDORS = {0x1002: "AMD", 0x8086: "Intel", 0x10DE: "NVIDIA"}
_LOST = (15, 16)  # GPU_IS_LOST, RESET_REQUIRED
_ECC = 214


def _bus(m: Case) -> str:
    """What is on the PCI bus, in one line."""
    pci = m.hardware.pci
    if isinstance(pci, Unknown):
        return f"the PCI bus could not be read: {pci.reason}"
    shown = [f"{each.address} {_VENDORS.get(each.vendor, f'{each.vendor:04x}')}" for each in pci if each.display]
    return f"display devices on the PCI bus: {', '.join(shown) or 'none'}"


@rule("N01", "hardware", "this notebook's runtime has no GPU")
def notebook(m: Case) -> Match | None:
    """A notebook service that provides GPUs on request, and no GPU."""
    where = m.surroundings.notebook
    steps = {
        "colab": "Choose Runtime › Change runtime type › a GPU, and connect again.",
        "kaggle": "Choose Settings › Accelerator › a GPU; the session restarts.",
    }
    if where not in steps or not m.no_gpu:
        return None
    return Match((f"this is {where.title()}", _bus(m)), (steps[where],), severity="note")


@rule("H06", "hardware", "the laptop's NVIDIA card is switched off")
def switched_off(m: Case) -> Match | None:
    """prime-select chose another card, and no NVIDIA driver is loaded although it is installed."""
    built = m.platform.kernel in (m.kernel.built_for or ())
    off = m.platform.prime in ("intel", "amd", "off") and m.kernel.loaded is False
    if not off or not (built or m.no_gpu) or m.works:
        return None
    first = m.torch.first
    fix = (fixes.sudo(m, "prime-select on-demand"), fixes.reboot(m))
    severity: Severity = "note" if first is None or first.cpu_only else "error"
    return Match((f"prime-select is set to {m.platform.prime}", _bus(m)), fix, severity=severity)


@rule("H02", "hardware", "a GPU has fallen off the bus")
def fallen_off_bus(m: Case) -> Match | None:
    """A card that reads all ones or that NVML calls lost; if CUDA fails, also a message in the kernel log."""
    dead = (f"the configuration space of {card.address} reads all ones" for card in m.hardware.gpus if card.dead)
    lost = (gpu for gpu in m.driver.nvml.gpus if gpu.code in _LOST)
    gone = (f"NVML returns {gpu.code} {nvml_result(gpu.code).name} for GPU {gpu.index}" for gpu in lost)
    evidence = (*dead, *gone, m.logged(r"GPU has fallen off the bus") if m.broken else "")
    if not any(evidence):
        return None
    again = "If it happens again: check the card's power cables, seat, temperature and riser."
    fix = (*fixes.on_host(m), fixes.reboot(m), again)
    return Match(evidence, fix, severity="warning" if m.works else "error")


def _unstarted(m: Case) -> bool:
    """Whether NVIDIA's module is loaded and supports the card, but NVML does not see it."""
    waits = m.broken and m.kernel.loaded is True and bool(m.unseen_cards) and not m.nvml_works
    return waits and not m.driver_misfit


@rule("H05", "hardware", "the firmware assigned no address space to the card")
def no_address_space(m: Case) -> Match | None:
    """A memory region of a card that the driver cannot initialize is not assigned."""
    if not _unstarted(m):
        return None
    said = m.logged(r"BAR\d is 0M")
    bare = [f"a memory region of {card.address} has no address assigned" for card in m.unseen_cards if 0 in card.bars]
    if not (said or bare):
        return None
    fix = (
        "Enable 'Above 4G Decoding' and 'Resizable BAR' in the firmware (BIOS) settings, and restart.",
        "In a virtual machine, the hypervisor must give the guest a large enough MMIO window.",
    )
    return Match((*bare, said, m.nvml_answer), (*fixes.on_host(m), *fix))


@rule("H04", "hardware", "the driver cannot initialize the card")
def not_initialized(m: Case) -> Match | None:
    """RmInitAdapter failed, EIO, or a card that the module lists and NVML does not."""
    if not _unstarted(m) or m.fires("H05"):
        return None
    said = m.logged(r"RmInitAdapter failed! \([^)]*\)|Cannot initialize GSP firmware RM")
    nodes, nvml = m.card_nodes, m.driver.nvml
    eio = [f"opening {node.path} fails with EIO" for node in nodes if node.error == "EIO"]
    sound = bool(nodes) and all(node.kind == "char" and node.major == 195 and not node.error for node in nodes)
    listed = sound and nvml.init == 0 and nvml.count == 0 and [g for g in m.kernel.gpus if not g.excluded]
    if not (said or eio or listed):
        return None
    known = (f"/proc/driver/nvidia/gpus lists {gpu.address} {gpu.model}".rstrip() for gpu in m.kernel.gpus)
    fix = (
        "Turn the machine off, wait, and turn it on again: a reboot does not cut the card's power.",
        "If that does not help, try another driver branch, newer firmware for mainboard and card, or another slot.",
    )
    evidence = (said, *eio, *known, m.nvml_answer, m.answer)
    return Match(evidence, (*fixes.on_host(m), *fix), likely=not (said or eio))


@rule("H03", "hardware", "the GPU's memory has uncorrectable errors")
def ecc(m: Case) -> Match | None:
    """A pending or failed remapping or retirement; an error if a program already failed because of it."""
    marked = [gpu for gpu in m.driver.nvml.gpus if gpu.remap_pending or gpu.remap_failure or gpu.retired_pending]
    died = any("uncorrectable ECC error" in step.error for step in m.torch_run.steps)
    if not (marked or died or m.code == _ECC):
        return None
    evidence = []
    for gpu in marked:
        states = {"remapping failed": gpu.remap_failure, "remapping pending": gpu.remap_pending}
        states["page retirement pending"] = gpu.retired_pending
        evidence.append(f"NVML reports for GPU {gpu.index}: {', '.join(word for word, so in states.items() if so)}")
    if died:
        evidence.append("torch reported an uncorrectable ECC error")
    which = ",".join(str(gpu.index) for gpu in marked)
    reset = m.on_host(f"nvidia-smi -r -i {which}" if which else "nvidia-smi -r")
    failed = any(gpu.remap_failure for gpu in marked)
    replace = "A card whose remapping failed should be replaced." if failed else ""
    fatal = died or (m.code == _ECC and not m.works)
    fix = ("While no program uses the card (or reboot instead):", *reset, replace)
    return Match(tuple(evidence) or (m.answer,), fix, severity="error" if fatal else "warning")


@rule("H01", "hardware", "there is no NVIDIA GPU in this machine")
def no_gpu(m: Case) -> Match | None:
    """No sign of a card; if the bus could not be read, a note that says so."""
    around = m.surroundings
    if around.wsl or m.platform.system == "Darwin" or m.works or m.fires("N01", "H06"):
        return None
    present = m.hardware.present or m.kernel.loaded or m.kernel.gpus or m.nvml_works or m.card_nodes
    if isinstance(m.hardware.pci, Unknown) and not present and m.code in (-1, 100):
        title = "could not determine whether this machine has an NVIDIA GPU"
        return Match((_bus(m), m.answer), (), title, "note")
    if not m.no_gpu:
        return None
    title = f"no NVIDIA GPU is visible from this {around.sandbox} sandbox" if around.sandbox else ""
    return Match((_bus(m),), fixes.give_gpu(m) if around.slurm else (), title, "note")
