"""Whether the installed driver was made for the card: too new, too old, of the wrong flavour, without its firmware."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.fixes.driver import wanted
from transload.diagnose.rules.row import Seen, Table
from transload.diagnose.rules.signs import broken, card_line, logged, nvml_line, nvml_ok, taken, unseen, works
from transload.diagnose.tables import chip_of, first_branch, generation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transload.diagnose.tables import Chip, Generation
    from transload.findings import Severity
    from transload.machine import Machine, PciDevice

__all__ = ["TABLE", "applies", "initramfs_lines", "loaded_line", "misfit"]

TABLE = Table("kernel")

Lines = tuple[str, ...]

_TREE = "https://github.com/NVIDIA/open-gpu-kernel-modules/issues"


def applies(machine: Machine) -> bool:
    """Whether a card on the bus waits for NVIDIA's kernel driver; under WSL and on a Jetson none does."""
    return bool(machine.hardware.gpus) and broken(machine) and not machine.surroundings.wsl


def _release(machine: Machine) -> int:
    """The branch of the installed driver: of the loaded module, else of its libraries; 0 where neither tells."""
    lib = taken(machine)
    beside = lib.version if lib is not None and lib.kind == "driver" and not machine.surroundings.container else ""
    for version in (machine.kernel.version, beside):
        if found := re.match(r"[0-9]{3}(?![0-9])", version):
            return int(found[0])
    return 0


def loaded_line(machine: Machine) -> str:
    """Which kernel driver is loaded, in a line."""
    kernel = machine.kernel
    if not kernel.loaded:
        return "the kernel module nvidia is not loaded"
    flavour = f", {kernel.flavour} flavour" if kernel.flavour else ""
    return f"the loaded kernel driver is {kernel.version or 'of unknown version'}{flavour}"


def initramfs_lines(machine: Machine) -> Lines:
    """Rebuild the initial RAM disk."""
    commands = {
        "apt": "update-initramfs -u",
        "dnf": "dracut --force",
        "zypper": "dracut --force",
        "pacman": "mkinitcpio -P",
    }
    command = commands.get(machine.platform.package_manager)
    return (fixes.sudo(machine, command),) if command else ("Rebuild the initial RAM disk.",)


def misfit(machine: Machine) -> bool:
    """Whether the driver was not made for the card, or lacks its firmware: its failing start has that reason."""
    return any(check(machine) for check in (legacy, open_too_early, open_required, too_new, firmware))


def _strangers(machine: Machine) -> Iterator[tuple[PciDevice, Chip, Generation]]:
    """The cards that the driver does not serve, with what is known of them."""
    for card in unseen(machine):
        chip = chip_of(card.device)
        known = generation(chip.generation) if chip else None
        if chip and known and card.driver != "vfio-pci":
            yield card, chip, known


def _is(card: PciDevice, chip: Chip) -> str:
    sure = "by its neighbours' ids " if chip.inferred else ""
    return f"{card.address} is 10de:{card.device:04x}, {sure}{chip.code} of the {chip.generation} generation"


@TABLE.row(
    "K06",
    "the driver is too new for this card and ignores it",
    about="""NVIDIA's driver drops old generations: 470 is the last branch for Kepler, 580 the last for Maxwell,
Pascal and Volta. A newer one loads (or refuses to), lists no such card, and nvidia-smi says "No devices were
found". The kernel's log has it: "The NVIDIA … GPU installed in this system is supported through the NVIDIA 580.xx
Legacy drivers … will ignore this GPU."

It is told by the card's PCI id and the driver's version.""",
    fix="""Install the last branch that knows the card (nvidia-driver-580 on Ubuntu, nvidia-580xx-dkms on Arch)
and keep it from being upgraded. torch must fit too: for Maxwell, Pascal and Volta that is a cu126 build, for the
K80 torch 2.0.1 with cu118; no torch has code for other Kepler cards. Beside a newer card, which works, leave it.""",
    avoid="Updating the driver again: every newer one ignores the card as well.",
    sources=(
        "https://github.com/NixOS/nixos-hardware/issues/1828",
        "https://github.com/NixOS/nixos-hardware/issues/1843",
        "https://github.com/NixOS/nixos-hardware/issues/1880",
    ),
)
def legacy(machine: Machine) -> Seen | None:
    """The branch of the driver is past the last one of the card's generation."""
    release = _release(machine)
    for card, chip, known in _strangers(machine):
        if known.last_branch and release > known.last_branch and (works(machine) or applies(machine)):
            said = logged(machine, r"installed in this system is supported through the NVIDIA \d+\.xx Legacy drivers")
            last = f"the last driver branch for {chip.generation} is {known.last_branch}, installed is {release}"
            evidence = tuple(filter(None, (_is(card, chip), last, said)))
            inferred = chip.inferred and not said
            severity: Severity = "note" if works(machine) else "error"
            return Seen(evidence, _legacy_lines(machine, known), severity=severity, likely=inferred)
    return None


def _legacy_lines(machine: Machine, known: Generation) -> Lines:
    """The last driver of a generation; nothing to install where that would take the driver from a newer card."""
    want = wanted(machine)
    if known.name in want.dropped:
        return (f"Leave it: no driver drives both this card and {' and '.join(want.kept)}.",)
    kepler = "only the K80's (3.7), in torch 2.0.1 from https://download.pytorch.org/whl/cu118 and older"
    code = kepler if known.name == "Kepler" else "builds for CUDA 12.6 and older have it"
    spared = ("The rest works as it is. To use this card too:",) if works(machine) else ()
    return (*spared, *fixes.install_driver(machine), f"torch needs code for the card too: {code}.")


@TABLE.row(
    "K07",
    "the open kernel module cannot drive this card",
    about="""NVIDIA's driver comes with one of two kernel modules. The open one needs the GPU System Processor,
which cards before Turing do not have; since driver 560 it is what many installers take by default. nvidia-smi says
"No devices were found", and the kernel's log "installed in this system is not supported by open nvidia.ko because
it does not include the required GPU System Processor (GSP)".

It is told by "Open Kernel Module" in /proc/driver/nvidia/version and the card's PCI id.""",
    fix="Install the same branch with the proprietary module (nvidia-driver-580 instead of nvidia-driver-580-open).",
    sources=("https://github.com/zzzhouuu/truenas-nvidia-drivers/issues/20", f"{_TREE}/322"),
)
def open_too_early(machine: Machine) -> Seen | None:
    """The open flavour, and a card of before Turing."""
    said = logged(machine, r"not supported by open nvidia\.ko because it does not include the required GPU System Pro")
    for card, chip, known in _strangers(machine):
        if known.open_module == "impossible" and applies(machine) and (machine.kernel.flavour == "open" or said):
            evidence = tuple(filter(None, (_is(card, chip), loaded_line(machine), said)))
            return Seen(evidence, fixes.install_driver(machine), likely=chip.inferred and not said)
    return None


@TABLE.row(
    "K08",
    "this card needs the open kernel module",
    about="""From Blackwell on (RTX 50, B100, B200) NVIDIA's cards run only with the open kernel module. With the
proprietary one nvidia-smi says "No devices were found", and the kernel's log that the card "requires use of the
NVIDIA open kernel modules".

It is told by /proc/driver/nvidia/version, which lacks the words "Open Kernel Module", and the card's PCI id.""",
    fix="Install the open flavour: nvidia-driver-<branch>-open on Ubuntu, nvidia-open elsewhere. Then reboot.",
    sources=(f"{_TREE}/872", f"{_TREE}/862"),
)
def open_required(machine: Machine) -> Seen | None:
    """The proprietary flavour, and a card of Blackwell or later."""
    said = logged(machine, r"requires use of the NVIDIA open kernel modules")
    for card, chip, known in _strangers(machine):
        closed = machine.kernel.flavour == "proprietary"
        if known.open_module == "required" and applies(machine) and (closed or said):
            evidence = tuple(filter(None, (_is(card, chip), loaded_line(machine), said)))
            fix = fixes.install_driver(machine, at_least=_release(machine))
            return Seen(evidence, fix, likely=chip.inferred and not said)
    return None


@TABLE.row(
    "K09",
    "the driver is too old for this card",
    about="""The card came out after the driver. The module finds no card it knows, and the kernel's log says
"installed in this system is not supported by the NVIDIA 520.56.06 driver release".

It is told by the card's PCI id and the first branch that knows its generation: 570 for Blackwell, 520 for Ada and
Hopper, 450 for the A100.""",
    fix="Install a newer driver: the newest branch that your distribution or NVIDIA's repository offers.",
    sources=(f"{_TREE}/393",),
)
def too_new(machine: Machine) -> Seen | None:
    """The branch of the driver is before the first one of the card, or the log says so."""
    if not applies(machine):
        return None
    release = _release(machine)
    for card, chip, _ in _strangers(machine):
        first = first_branch(chip.capability) if chip.capability else 0
        if 0 < release < first:
            since = f"its first driver branch is {first}, installed is {release}"
            return Seen((_is(card, chip), since), fixes.install_driver(machine), likely=chip.inferred)
    said = logged(machine, r"not supported by the NVIDIA [\d.]+ driver release")
    return Seen((*card_line(machine), said), fixes.install_driver(machine)) if said else None


@TABLE.row(
    "K12",
    "the driver's firmware file is missing",
    about="""From Turing on the driver loads firmware (gsp_*.bin) for the card's own processor from
/lib/firmware/nvidia/<version>. Where that file is missing, often only in the initial RAM disk, the card does not
start: "loading /lib/firmware/nvidia/570.133.20/gsp_ga10x.bin failed with error -4", and nvidia-smi says "No devices
were found".""",
    fix="""Reinstall the package that holds the firmware in the driver's exact version (nvidia-firmware-…,
nvidia-kernel-common-…, linux-firmware-nvidia), rebuild the initial RAM disk, reboot.""",
    sources=(f"{_TREE}/943",),
)
def firmware(machine: Machine) -> Seen | None:
    """The log names the file; or its folder is not there and the card does not start."""
    said = logged(machine, r"(?<!\S)\S{0,200}?gsp_\w{1,40}\.bin\)? failed with error -?\d+")
    kernel = machine.kernel
    gone = kernel.firmware is False and kernel.flavour == "open" and not machine.surroundings.container
    loaded = any(card.firmware == kernel.version for card in kernel.gpus)
    if not applies(machine) or not (said or (gone and not loaded)) or nvml_ok(machine) or not kernel.loaded:
        return None
    missing = f"/lib/firmware/nvidia/{kernel.version} is not there" if gone else ""
    evidence = tuple(filter(None, (loaded_line(machine), missing, said, nvml_line(machine))))
    return Seen(evidence, _firmware_lines(machine), likely=not said)


def _firmware_lines(machine: Machine) -> Lines:
    if machine.surroundings.container:
        return fixes.install_driver(machine)
    package = f"nvidia-firmware-{_release(machine)}-{machine.kernel.version}"
    again = fixes.system_package(machine, apt=f"--reinstall {package}", pacman="nvidia-utils", dnf="nvidia-kmod-common")
    return (*again, *initramfs_lines(machine), fixes.reboot(machine))
