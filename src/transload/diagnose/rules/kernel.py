"""NVIDIA's kernel driver: whether it is there, loaded, fit for the card, and healthy."""

from __future__ import annotations

import re

from transload.diagnose import fixes
from transload.diagnose.rules import kernel_card
from transload.diagnose.rules.kernel_card import applies, initramfs_lines, loaded_line, misfit
from transload.diagnose.rules.row import Seen, Table
from transload.diagnose.rules.signs import (
    UVM,
    answer_line,
    broken,
    card_line,
    code,
    host_lines,
    logged,
    nvml_line,
    nvml_ok,
    unmet,
)
from transload.machine import Machine, Unknown

__all__ = ["TABLE"]

TABLE = Table("kernel")
TABLE.rows.extend(kernel_card.TABLE.rows)  # first: a driver that cannot drive the card explains why it is not loaded

_NOUVEAU = ("nouveau", "nova_core", "nova-core", "nova", "nova_drm")
_BLACKLIST = "/etc/modprobe.d/blacklist-nouveau.conf"
_REJECTED = r"Key was rejected by service|Loading of (?:unsigned module|module with unavailable key) is rejected"
_TREE = "https://github.com/NVIDIA/open-gpu-kernel-modules/issues"


@TABLE.row(
    "K04",
    "nouveau holds the card, not NVIDIA's driver",
    about="""The card is bound to nouveau (or its successor nova), the free driver that comes with Linux. CUDA works
only with NVIDIA's own kernel module, which cannot take a card that another driver holds. nvidia-smi then says
"NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver", and torch "Found no NVIDIA driver on
your system".

It is told by the link /sys/bus/pci/devices/<card>/driver.""",
    fix="""Install NVIDIA's driver, keep nouveau from loading (a line "blacklist nouveau" in /etc/modprobe.d),
rebuild the initial RAM disk, and reboot. The driver packages of most distributions do all of that.""",
    avoid="Unloading nouveau by hand on a running desktop: the screen goes with it.",
    sources=("https://github.com/NVIDIA/gpu-driver-container/issues/44",),
)
def nouveau(machine: Machine) -> Seen | None:
    """No card is bound to nvidia, and one to nouveau or nova."""
    drivers = {card.driver for card in machine.hardware.gpus}
    held = drivers.intersection(_NOUVEAU)
    if not applies(machine) or not held or "nvidia" in drivers:
        return None
    if machine.surroundings.container:
        return Seen(card_line(machine), fixes.install_driver(machine))
    installed = machine.platform.kernel in (machine.kernel.built_for or ())
    blacklist = (
        "NVIDIA's module is installed; keep the other one from loading (needs root and a reboot):",
        fixes.write_line(machine, *(f"blacklist {name}" for name in sorted(held)), file=_BLACKLIST),
        *initramfs_lines(machine),
        fixes.reboot(machine),
    )
    return Seen(card_line(machine), blacklist if installed else fixes.install_driver(machine))


@TABLE.row(
    "K05",
    "the card is set aside for virtual machines (vfio-pci)",
    about="""The card is bound to vfio-pci: the host gives it away to virtual machines, and no program on the host
itself can use it. nvidia-smi on the host lists nothing; inside the virtual machine the card works.""",
    fix="""Run inside the virtual machine that gets the card; or stop it, take the card's ids out of the vfio-pci
options (kernel command line, /etc/modprobe.d), rebuild the initial RAM disk and reboot.""",
    sources=("https://github.com/NVIDIA/gpu-operator",),
)
def vfio(machine: Machine) -> Seen | None:
    """Every NVIDIA card is bound to vfio-pci."""
    if not applies(machine) or {card.driver for card in machine.hardware.gpus} != {"vfio-pci"}:
        return None
    ids = ",".join(sorted({f"10de:{card.device:04x}" for card in machine.hardware.gpus}))
    fix = (
        "Run torch inside the virtual machine that gets the card. Or, to have it back on the host:",
        f"Take {ids} out of vfio-pci's ids: on the kernel command line (vfio-pci.ids=) and in /etc/modprobe.d.",
        "$ grep -rn 'vfio' /etc/modprobe.d /proc/cmdline",
        "Then rebuild the initial RAM disk and reboot (needs root).",
    )
    return Seen(card_line(machine), (*fixes.on_host(machine), *fix), severity=unmet(machine))


def _idle(machine: Machine) -> bool:
    """Whether the module is not loaded, and for no reason that an earlier row knows."""
    held = any(card.driver in (*_NOUVEAU, "vfio-pci") for card in machine.hardware.gpus)
    return applies(machine) and machine.kernel.loaded is False and not held and not misfit(machine)


@TABLE.row(
    "K02",
    "the running kernel has no NVIDIA module, another one has",
    about="""NVIDIA's module is built for one kernel at a time. After a kernel update the running kernel has none,
because the headers were missing, the build failed, or the packages are out of step; or the update took away the
module of the old kernel, which runs until the next reboot. nvidia-smi says "NVIDIA-SMI has
failed because it couldn't communicate with the NVIDIA driver".

It is told by nvidia.ko, which is there for another kernel under /lib/modules and not for the running one.""",
    fix="""Where a newer kernel has the module: reboot. Otherwise install the headers of the running kernel and have
the module built (dkms autoinstall, Fedora: akmods --force), or boot the older kernel for now.""",
    avoid="Reinstalling CUDA or torch: neither holds a kernel module.",
    sources=(
        "https://github.com/NVIDIA/nvidia-docker/issues/291",
        "https://github.com/NVIDIA/nvidia-docker/issues/481",
    ),
)
def other_kernel(machine: Machine) -> Seen | None:
    """nvidia.ko exists, and not for the running kernel."""
    built, running = machine.kernel.built_for, machine.platform.kernel
    if not _idle(machine) or not built or not running or running in built:
        return None
    evidence = (
        loaded_line(machine),
        f"the running kernel is {running}, nvidia.ko is there for {', '.join(built[:3])}",
    )
    newer = [version for version in built if _numbers(version) > _numbers(running)]
    if newer:
        title = "the kernel was updated, and the old one that still runs has no NVIDIA module"
        now = (f"Reboot into the new kernel {newer[0]}, which has the module:", fixes.reboot(machine))
        return Seen(evidence, now, title)
    return Seen(evidence, (*_build_module(machine), f"Or reboot into the kernel {built[0]} for now."))


def _numbers(kernel: str) -> tuple[int, ...]:
    """The numbers of a kernel's version, for comparing: ``6.8.0-45-generic`` is before ``6.12.4``."""
    return tuple(int(number) for number in re.findall(r"[0-9]{1,9}", kernel.partition("+")[0]))


def _build_module(machine: Machine) -> tuple[str, ...]:
    """Have the module built for the running kernel, in the distribution's way."""
    like = (machine.platform.distribution, *machine.platform.distribution_like)
    headers = fixes.system_package(
        machine,
        apt="linux-headers-$(uname -r)",
        dnf="kernel-devel-$(uname -r)",
        zypper="kernel-default-devel",
        pacman="linux-headers",
    )
    fedora = like[0] == "fedora"
    steps = (
        fixes.sudo(machine, "akmods --force" if fedora else "dkms autoinstall"),
        fixes.sudo(machine, "modprobe nvidia"),
    )
    if "ubuntu" not in like:
        return (*headers, *steps)
    return (
        "Where the module is built here (package nvidia-dkms-…):",
        *headers,
        *steps,
        "Where Ubuntu's own is used (linux-modules-nvidia-…), install it for this kernel; this finds the name:",
        "$ apt search --names-only linux-modules-nvidia | grep $(uname -r)",
    )


@TABLE.row(
    "K03",
    "Secure Boot rejects NVIDIA's module",
    about="""With Secure Boot the kernel loads only modules signed by a key it trusts. A module that was built on
this machine is signed by a key of its own, which the firmware must be told to trust: "modprobe: ERROR: could not
insert 'nvidia': Key was rejected by service".

It is told by the firmware's SecureBoot variable and an nvidia.ko that is there for the running kernel and not
loaded.""",
    fix="""Enrol the key that signed the module (mokutil --import) and confirm it at the next start; or take a
driver package that the distribution signs; or turn Secure Boot off in the firmware.""",
    sources=("https://github.com/lcp/mokutil/issues/61", "https://github.com/acidanthera/bugtracker/issues/2237"),
)
def secure_boot(machine: Machine) -> Seen | None:
    """Secure Boot is on, the module is built for this kernel, and it is not loaded."""
    said = logged(machine, _REJECTED)
    here = machine.platform.kernel in (machine.kernel.built_for or ())
    if not _idle(machine) or not machine.kernel.secure_boot or not (here or said):
        return None
    there = f"nvidia.ko is there for the running kernel {machine.platform.kernel}" if here else ""
    evidence = ("Secure Boot is on", *filter(None, (loaded_line(machine), there, said)))
    fix = (
        "See what the kernel says; 'Key was rejected by service' confirms it:",
        *host_lines(machine, "modprobe nvidia"),
        "Enrol the key (needs root; choose a password, reboot, and confirm it in the blue MOK screen):",
        *host_lines(machine, f"mokutil --import {_key(machine)}"),
        fixes.reboot(machine),
        "Or turn Secure Boot off in the firmware's settings.",
    )
    return Seen(evidence, fix, likely=not said)


def _key(machine: Machine) -> str:
    keys = {"ubuntu": "/var/lib/shim-signed/mok/MOK.der", "fedora": "/etc/pki/akmods/certs/public_key.der"}
    return keys.get(machine.platform.distribution, "/var/lib/dkms/mok.pub")


@TABLE.row(
    "K01",
    "NVIDIA's kernel driver is not installed",
    about="""The card is on the bus and no NVIDIA module is loaded: nothing can reach the card. nvidia-smi is
missing or says "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the
latest NVIDIA driver is installed and running."; torch says "Found no NVIDIA driver on your system."

It is told by /sys/module/nvidia and /proc/driver/nvidia/version, which are not there, and no nvidia.ko under
/lib/modules.""",
    fix="Install the driver with your distribution's packages and reboot.",
    avoid="""Installing the CUDA toolkit for it: a torch wheel brings its own CUDA libraries and needs only the
driver.""",
    sources=("https://github.com/vllm-project/vllm/issues/27268",),
)
def not_loaded(machine: Machine) -> Seen | None:
    """The module is not loaded, for none of the reasons that other rows know."""
    if not _idle(machine) or other_kernel(machine) or secure_boot(machine):
        return None
    built = machine.kernel.built_for
    evidence = (*card_line(machine), loaded_line(machine))
    if machine.surroundings.container:
        fix = ("Run transload doctor on the host: it can see there why.", *fixes.install_driver(machine))
        return Seen(evidence, fix, "NVIDIA's kernel driver is not loaded on the host")
    if built == ():
        return Seen((*evidence, "there is no nvidia.ko under /lib/modules"), fixes.install_driver(machine))
    if isinstance(built, Unknown):
        unclear = f"whether it is installed could not be found out: {built.reason}"
        fix = (*_load(machine), "If there is no such module:", *fixes.install_driver(machine))
        return Seen((*evidence, unclear), fix, "NVIDIA's kernel driver is not loaded")
    there = f"nvidia.ko is there for the running kernel {machine.platform.kernel}"
    return Seen((*evidence, there), _load(machine), "NVIDIA's kernel driver is installed and not loaded")


def _load(machine: Machine) -> tuple[str, ...]:
    return (
        "Load it, and read what it says (needs root):",
        fixes.sudo(machine, "modprobe nvidia"),
        fixes.sudo(machine, "dmesg | grep -iE 'nvidia|NVRM' | tail -n 20"),
        "If nothing happens, see whether it is blacklisted:",
        "$ grep -rn nvidia /etc/modprobe.d /usr/lib/modprobe.d",
    )


@TABLE.row(
    "K10",
    "heterogeneous memory management keeps the CUDA driver from starting",
    about="""The open module's nvidia_uvm asks the kernel for a range of physical addresses as large as the card's
memory. With address randomisation (KASLR) on some machines none is left, and cuInit answers 3 while nvidia-smi
works: "CUDA driver initialization failed, you might not have a CUDA gpu." The kernel's log says "nvidia-uvm: …
request_free_mem_region() err -34".

It is told by cuInit 3 with NVML at work, the open module, and uvm_disable_hmm = N.""",
    fix="""Turn the feature off: options nvidia_uvm uvm_disable_hmm=1 in /etc/modprobe.d, and load nvidia_uvm again.
Booting with nokaslr also helps, and costs a protection.""",
    sources=(f"{_TREE}/947", f"{_TREE}/901", f"{_TREE}/797", "https://github.com/ollama/ollama/issues/11593"),
)
def hmm(machine: Machine) -> Seen | None:
    """CuInit 3, NVML at work, the open module with HMM on, and KASLR not known to be off."""
    kernel = machine.kernel
    on = kernel.uvm_disable_hmm == "N" and kernel.flavour == "open" and kernel.kaslr is not False
    if not broken(machine) or code(machine) != 3 or not nvml_ok(machine) or not on:
        return None
    said = logged(machine, r"request_free_mem_region\(\) err -?\d+")
    parameter = "/sys/module/nvidia_uvm/parameters/uvm_disable_hmm is N"
    evidence = tuple(filter(None, (answer_line(machine), nvml_line(machine), loaded_line(machine), parameter, said)))
    fix = fixes.modprobe_option(machine, "options nvidia_uvm uvm_disable_hmm=1", "nvidia-uvm.conf")
    return Seen(evidence, fix, likely=not said)


@TABLE.row(
    "K11",
    "nvidia_uvm did not survive a suspend",
    about="""After suspend and resume the module nvidia_uvm can be left in a state in which cuInit answers 999 while
nvidia-smi works and everything else looks right: "CUDA unknown error - this may be due to an incorrectly set up
environment". The text blames CUDA_VISIBLE_DEVICES, wrongly.

It is likely where the machine has been suspended since it booted and no other reason for 999 is seen; reloading the
module proves it.""",
    fix="""Reload the module with no program on the GPU: sudo modprobe -r nvidia_uvm && sudo modprobe nvidia_uvm. To
prevent it, enable nvidia-suspend.service and nvidia-resume.service and set NVreg_PreserveVideoMemoryAllocations=1.""",
    likely=True,
    sources=("https://github.com/pytorch/pytorch/issues/88639",),
)
def suspended(machine: Machine) -> Seen | None:
    """CuInit 999, NVML at work, a sound /dev/nvidia-uvm, and a suspend since boot."""
    node, times = machine.nodes.at(UVM), machine.platform.suspends
    sound = node.exists and not node.error and node.major == machine.nodes.majors.get("nvidia-uvm")
    if not broken(machine) or code(machine) != 999 or not nvml_ok(machine) or not sound or not times:
        return None
    since = f"the machine was suspended {times} time{'' if times == 1 else 's'} since it booted"
    evidence = (answer_line(machine), nvml_line(machine), f"{UVM} opens", since)
    fix = (
        "With no program using the GPU:",
        *host_lines(machine, "modprobe -r nvidia_uvm", "modprobe nvidia_uvm"),
        "To prevent it:",
        *host_lines(machine, "systemctl enable nvidia-suspend.service nvidia-resume.service nvidia-hibernate.service"),
        "| options nvidia NVreg_PreserveVideoMemoryAllocations=1",
        "That line belongs into /etc/modprobe.d/nvidia-power.conf on the machine itself.",
    )
    return Seen(evidence, fix)
