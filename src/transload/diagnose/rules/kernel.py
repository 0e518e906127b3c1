"""NVIDIA's kernel driver: whether it supports the card, is installed and loaded, and works."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.case import UVM, Case, quoted
from transload.diagnose.rules.rule import Lines, Match, rule
from transload.diagnose.tables import chip_of, first_branch, generation
from transload.machine import Unknown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transload.diagnose.tables import Chip, Generation
    from transload.machine import PciDevice

_NOUVEAU = ("nouveau", "nova_core", "nova-core", "nova", "nova_drm")
_BLACKLIST = "/etc/modprobe.d/blacklist-nouveau.conf"
_REJECTED = r"Key was rejected by service|Loading of (?:unsigned module|module with unavailable key) is rejected"


def _needs_driver(m: Case) -> bool:
    """Whether a card on the bus needs NVIDIA's kernel driver; under WSL and on a Jetson none does."""
    return bool(m.hardware.gpus) and m.broken and not m.surroundings.wsl


def _branch(m: Case) -> int:
    """The branch of the installed driver: of the loaded module, else of its libraries; 0 if unknown."""
    lib = m.libcuda
    beside = lib.version if lib is not None and lib.kind == "driver" and not m.surroundings.container else ""
    found = re.match(r"[0-9]{3}(?![0-9])", m.kernel.version) or re.match(r"[0-9]{3}(?![0-9])", beside)
    return int(found[0]) if found else 0


def _rebuild_initramfs(m: Case) -> str:
    commands = {
        "apt": "update-initramfs -u",
        "dnf": "dracut --force",
        "zypper": "dracut --force",
        "pacman": "mkinitcpio -P",
    }
    command = commands.get(m.platform.package_manager)
    return fixes.sudo(m, command) if command else "Rebuild the initial RAM disk."


def _unsupported(m: Case) -> Iterator[tuple[PciDevice, Chip, Generation]]:
    """The cards that the driver does not handle, with what is known about them."""
    for card in m.unseen_cards:
        chip = chip_of(card.device)
        known = generation(chip.generation) if chip else None
        if chip and known and card.driver != "vfio-pci":
            yield card, chip, known


def _described(card: PciDevice, chip: Chip) -> str:
    sure = "judging by neighbouring ids " if chip.inferred else ""
    return f"{card.address} is 10de:{card.device:04x}, {sure}{chip.code} of the {chip.generation} generation"


# -- a driver that does not support the card: first, since it explains why none is loaded


@rule("K06", "kernel", "the driver is too new for this card and ignores it")
def driver_too_new(m: Case) -> Match | None:
    """The driver's branch is newer than the last one for the card's generation."""
    branch = _branch(m)
    for card, chip, known in _unsupported(m):
        if not (known.last_branch and branch > known.last_branch and (m.works or _needs_driver(m))):
            continue
        said = m.logged(r"installed in this system is supported through the NVIDIA \d+\.xx Legacy drivers")
        last = f"the last driver branch for {chip.generation} is {known.last_branch}, and branch {branch} is installed"
        want = fixes.wanted(m)
        if known.name in want.dropped:
            fix: Lines = (f"Leave it as it is: no driver supports both this card and {' and '.join(want.kept)}.",)
        else:
            kepler = (
                "only the K80 (3.7) is supported, by torch 2.0.1 from https://download.pytorch.org/whl/cu118 and older"
            )
            code = kepler if known.name == "Kepler" else "builds for CUDA 12.6 and older do"
            spared = "The other cards work. To use this one as well:" if m.works else ""
            fix = (spared, *fixes.install_driver(m), f"torch must support the card too: {code}.")
        inferred = chip.inferred and not said
        return Match(
            (_described(card, chip), last, said), fix, severity="note" if m.works else "error", likely=inferred
        )
    return None


@rule("K07", "kernel", "the open kernel module cannot drive this card")
def open_too_early(m: Case) -> Match | None:
    """The open flavour, and a card older than Turing."""
    said = r"not supported by open nvidia\.ko because it does not include the required GPU System Pro"
    return _wrong_flavour(m, "open", "impossible", said)


@rule("K08", "kernel", "this card needs the open kernel module")
def open_required(m: Case) -> Match | None:
    """The proprietary flavour, and a card of Blackwell or later."""
    return _wrong_flavour(m, "proprietary", "required", r"requires use of the NVIDIA open kernel modules")


def _wrong_flavour(m: Case, flavour: str, open_module: str, message: str) -> Match | None:
    said = m.logged(message)
    for card, chip, known in _unsupported(m):
        if known.open_module == open_module and _needs_driver(m) and (m.kernel.flavour == flavour or said):
            fix = fixes.install_driver(m, at_least=_branch(m) if open_module == "required" else 0)
            return Match((_described(card, chip), m.kernel_line, said), fix, likely=chip.inferred and not said)
    return None


@rule("K09", "kernel", "the driver is too old for this card")
def driver_too_old(m: Case) -> Match | None:
    """The driver's branch is older than the first one for the card, or the kernel log says so."""
    if not _needs_driver(m):
        return None
    branch = _branch(m)
    for card, chip, _ in _unsupported(m):
        first = first_branch(chip.capability) if chip.capability else 0
        if 0 < branch < first:
            since = f"its first driver branch is {first}, and branch {branch} is installed"
            return Match((_described(card, chip), since), fixes.install_driver(m), likely=chip.inferred)
    said = m.logged(r"not supported by the NVIDIA [\d.]+ driver release")
    return Match((*m.card_lines, said), fixes.install_driver(m)) if said else None


@rule("K12", "kernel", "the driver's firmware file is missing")
def firmware(m: Case) -> Match | None:
    """The kernel log names the file; or its directory does not exist and the card is not initialized."""
    said = m.logged(r"(?<!\S)\S{0,200}?gsp_\w{1,40}\.bin\)? failed with error -?\d+")
    kernel = m.kernel
    gone = kernel.firmware is False and kernel.flavour == "open" and not m.surroundings.container
    loaded = any(card.firmware == kernel.version for card in kernel.gpus)
    if not _needs_driver(m) or not (said or (gone and not loaded)) or m.nvml_works or not kernel.loaded:
        return None
    missing = f"/lib/firmware/nvidia/{kernel.version} does not exist" if gone else ""
    evidence = (m.kernel_line, missing, said, m.nvml_answer)
    if m.surroundings.container:
        return Match(evidence, fixes.install_driver(m), likely=not said)
    package = f"nvidia-firmware-{_branch(m)}-{kernel.version}"
    again = fixes.system_package(m, apt=f"--reinstall {package}", pacman="nvidia-utils", dnf="nvidia-kmod-common")
    return Match(evidence, (*again, _rebuild_initramfs(m), fixes.reboot(m)), likely=not said)


# -- a driver that is not installed, or not loaded


@rule("K04", "kernel", "the card is bound to nouveau, not to NVIDIA's driver")
def nouveau(m: Case) -> Match | None:
    """No card is bound to nvidia, but one to nouveau or nova."""
    drivers = {card.driver for card in m.hardware.gpus}
    held = drivers.intersection(_NOUVEAU)
    if not _needs_driver(m) or not held or "nvidia" in drivers:
        return None
    if m.surroundings.container or m.platform.kernel not in (m.kernel.built_for or ()):
        return Match(m.card_lines, fixes.install_driver(m))
    blacklist = (
        "NVIDIA's module is installed. Prevent the other one from loading (needs root and a reboot):",
        fixes.write_line(m, *(f"blacklist {name}" for name in sorted(held)), file=_BLACKLIST),
        _rebuild_initramfs(m),
        fixes.reboot(m),
    )
    return Match(m.card_lines, blacklist)


@rule("K05", "kernel", "the card is reserved for virtual machines (vfio-pci)")
def vfio(m: Case) -> Match | None:
    """Every NVIDIA card is bound to vfio-pci."""
    if not _needs_driver(m) or {card.driver for card in m.hardware.gpus} != {"vfio-pci"}:
        return None
    ids = ",".join(sorted({f"10de:{card.device:04x}" for card in m.hardware.gpus}))
    fix = (
        "Run torch inside the virtual machine that gets the card. Or, to use it on the host again:",
        f"Remove {ids} from vfio-pci's ids: on the kernel command line (vfio-pci.ids=) and in /etc/modprobe.d.",
        "$ grep -rn 'vfio' /etc/modprobe.d /proc/cmdline",
        "Then rebuild the initial RAM disk and reboot (needs root).",
    )
    return Match(m.card_lines, (*fixes.on_host(m), *fix), severity=m.no_gpu_severity)


def _module_missing(m: Case) -> bool:
    """Whether the module is not loaded, without a reason that an earlier rule reports."""
    held = any(card.driver in (*_NOUVEAU, "vfio-pci") for card in m.hardware.gpus)
    return _needs_driver(m) and m.kernel.loaded is False and not held and not m.driver_misfit


def _there(m: Case) -> str:
    return f"nvidia.ko exists for the running kernel {m.platform.kernel}"


@rule("K02", "kernel", "the NVIDIA module is built for another kernel, not the running one")
def other_kernel(m: Case) -> Match | None:
    """nvidia.ko exists, but not for the running kernel."""
    built, running = m.kernel.built_for, m.platform.kernel
    if not _module_missing(m) or not built or not running or running in built:
        return None
    others = f"the running kernel is {running}, but nvidia.ko exists for {', '.join(built[:3])}"
    newer = [version for version in built if _numbers(version) > _numbers(running)]
    if newer:
        title = "the kernel was updated, and the old one that is still running has no NVIDIA module"
        now = (f"Reboot into the new kernel {newer[0]}, which has the module:", fixes.reboot(m))
        return Match((m.kernel_line, others), now, title)
    return Match((m.kernel_line, others), (*_build_module(m), f"Or reboot into the kernel {built[0]} for now."))


def _numbers(kernel: str) -> tuple[int, ...]:
    """The numbers of a kernel's version, for comparing: ``6.8.0-45-generic`` is before ``6.12.4``."""
    return tuple(int(number) for number in re.findall(r"[0-9]{1,9}", kernel.partition("+")[0]))


def _build_module(m: Case) -> Lines:
    """Build the module for the running kernel, with the distribution's tools."""
    like = (m.platform.distribution, *m.platform.distribution_like)
    headers = fixes.system_package(
        m,
        apt="linux-headers-$(uname -r)",
        dnf="kernel-devel-$(uname -r)",
        zypper="kernel-default-devel",
        pacman="linux-headers",
    )
    build = fixes.sudo(m, "akmods --force" if like[0] == "fedora" else "dkms autoinstall")
    steps = (*headers, build, fixes.sudo(m, "modprobe nvidia"))
    if "ubuntu" not in like:
        return steps
    return (
        "If the module is built on this machine (package nvidia-dkms-…):",
        *steps,
        "If Ubuntu's prebuilt module is used (linux-modules-nvidia-…), install it for this kernel. Its name:",
        "$ apt search --names-only linux-modules-nvidia | grep $(uname -r)",
    )


@rule("K03", "kernel", "Secure Boot rejects NVIDIA's module")
def secure_boot(m: Case) -> Match | None:
    """Secure Boot is on, the module is built for this kernel, and it is not loaded."""
    said = m.logged(_REJECTED)
    here = m.platform.kernel in (m.kernel.built_for or ())
    if not _module_missing(m) or not m.kernel.secure_boot or not (here or said):
        return None
    keys = {"ubuntu": "/var/lib/shim-signed/mok/MOK.der", "fedora": "/etc/pki/akmods/certs/public_key.der"}
    key = keys.get(m.platform.distribution, "/var/lib/dkms/mok.pub")
    fix = (
        "Look at what the kernel says; 'Key was rejected by service' confirms it:",
        *m.on_host("modprobe nvidia"),
        "Enrol the key (needs root; choose a password, reboot, and confirm it in the blue MOK screen):",
        *m.on_host(f"mokutil --import {key}"),
        fixes.reboot(m),
        "Or disable Secure Boot in the firmware settings.",
    )
    return Match(("Secure Boot is on", m.kernel_line, _there(m) if here else "", said), fix, likely=not said)


@rule("K01", "kernel", "NVIDIA's kernel driver is not installed")
def not_loaded(m: Case) -> Match | None:
    """The module is not loaded, without a reason that other rules report."""
    if not _module_missing(m) or m.fires("K02", "K03"):
        return None
    built = m.kernel.built_for
    evidence = (*m.card_lines, m.kernel_line)
    if m.surroundings.container:
        fix = ("Run transload doctor on the host, where it can find out why.", *fixes.install_driver(m))
        return Match(evidence, fix, "NVIDIA's kernel driver is not loaded on the host")
    if built == ():
        return Match((*evidence, "there is no nvidia.ko under /lib/modules"), fixes.install_driver(m))
    load = (
        "Load it, and read its messages (needs root):",
        fixes.sudo(m, "modprobe nvidia"),
        fixes.sudo(m, "dmesg | grep -iE 'nvidia|NVRM' | tail -n 20"),
        "If nothing happens, check whether it is blacklisted:",
        "$ grep -rn nvidia /etc/modprobe.d /usr/lib/modprobe.d",
    )
    if isinstance(built, Unknown):
        unclear = f"could not determine whether it is installed: {built.reason}"
        fix = (*load, "If there is no such module:", *fixes.install_driver(m))
        return Match((*evidence, unclear), fix, "NVIDIA's kernel driver is not loaded")
    return Match((*evidence, _there(m)), load, "NVIDIA's kernel driver is installed but not loaded")


# -- a driver that is loaded, but does not work


@rule("K10", "kernel", "heterogeneous memory management (HMM) prevents the CUDA driver from starting")
def hmm(m: Case) -> Match | None:
    """CuInit 3, a working NVML, the open module with HMM, and KASLR not known to be off."""
    kernel = m.kernel
    on = kernel.uvm_disable_hmm == "N" and kernel.flavour == "open" and kernel.kaslr is not False
    if not m.broken or m.code != 3 or not m.nvml_works or not on:
        return None
    said = m.logged(r"request_free_mem_region\(\) err -?\d+")
    parameter = "/sys/module/nvidia_uvm/parameters/uvm_disable_hmm is N"
    fix = fixes.modprobe_option(m, "options nvidia_uvm uvm_disable_hmm=1", "nvidia-uvm.conf")
    return Match((m.answer, m.nvml_answer, m.kernel_line, parameter, said), fix, likely=not said)


@rule("K11", "kernel", "the nvidia_uvm module is broken after a suspend", likely=True)
def suspended(m: Case) -> Match | None:
    """CuInit 999, a working NVML, a correct /dev/nvidia-uvm, and a suspend since boot."""
    node, times = m.nodes.at(UVM), m.platform.suspends
    sound = node.exists and not node.error and node.major == m.nodes.majors.get("nvidia-uvm")
    if not m.broken or m.code != 999 or not m.nvml_works or not sound or not times:
        return None
    since = f"the machine was suspended {times} time{'' if times == 1 else 's'} since it booted"
    fix = (
        "While no program uses the GPU:",
        *m.on_host("modprobe -r nvidia_uvm", "modprobe nvidia_uvm"),
        "To prevent it:",
        *m.on_host("systemctl enable nvidia-suspend.service nvidia-resume.service nvidia-hibernate.service"),
        "| options nvidia NVreg_PreserveVideoMemoryAllocations=1",
        "Put that line into /etc/modprobe.d/nvidia-power.conf on the host.",
    )
    return Match((m.answer, m.nvml_answer, f"{UVM} can be opened", since), fix)


@rule("W01", "kernel", "Windows has no NVIDIA driver", likely=True)
def windows_driver(m: Case) -> Match | None:
    """On Windows the driver's library is not found; only a note if no card is known."""
    first = m.torch.first
    if m.platform.system != "Windows" or not m.no_libcuda or first is None or not first.cuda:
        return None
    step = m.failed("init")
    evidence = ("nvcuda.dll is not found", quoted(step.error if step else ""))
    return Match(evidence, fixes.install_driver(m), severity="error" if m.has_nvidia else "note")
