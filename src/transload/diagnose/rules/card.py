"""The card and NVIDIA's kernel driver: whether they exist, are compatible, and work."""

from __future__ import annotations

import re

from transload.diagnose import fixes
from transload.diagnose.case import UVM, Case, Found, Match, rules, torch_says
from transload.diagnose.tables import branches, chip_of, generation, result
from transload.findings import Severity
from transload.machine import Unknown
from transload.render.words import plural

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


@rules("hardware", "N01", "H06", "H02")
def absent(m: Case) -> Found:
    """A card that this container, VM or job does not have, that is switched off, or that was lost."""
    notebook, prime, first = m.surroundings.notebook, m.platform.prime, m.torch.first
    if notebook in ("colab", "kaggle") and m.no_gpu:
        yield "N01", Match((f"this is {notebook.title()}", _bus(m)), m.steps(f"N01 {notebook}"), severity="note")

    # prime-select chose another card, and no NVIDIA driver is loaded although it is installed
    built = m.platform.kernel in (m.kernel.built_for or ())
    off = prime in ("intel", "amd", "off") and m.kernel.loaded is False
    if off and (built or m.no_gpu) and not m.works:
        severity: Severity = "note" if first is None or first.cpu_only else "error"
        yield "H06", Match((f"prime-select is set to {prime}", _bus(m)), severity=severity)

    dead = (f"the configuration space of {card.address} reads all ones" for card in m.hardware.gpus if card.dead)
    lost = (gpu for gpu in m.driver.nvml.gpus if gpu.code in _LOST)
    gone = (f"NVML returns {gpu.code} {result('nvml', gpu.code).name} for GPU {gpu.index}" for gpu in lost)
    evidence = (*dead, *gone, m.logged(r"GPU has fallen off the bus") if m.broken else "")
    if any(evidence):
        yield "H02", Match(evidence, severity="warning" if m.works else "error")


@rules("hardware", "H05", "H04")
def not_started(m: Case) -> Found:
    """NVIDIA's module is loaded and supports the card, but NVML does not see it."""
    waits = m.broken and m.kernel.loaded is True and m.unseen_cards and not m.nvml_works
    if not waits or m.driver_misfit:
        return
    said = m.logged(r"BAR\d is 0M")
    bare = [f"a memory region of {card.address} has no address assigned" for card in m.unseen_cards if 0 in card.bars]
    if said or bare:
        yield "H05", Match((*bare, said, m.nvml_answer))
        return
    # RmInitAdapter failed, EIO, or a card that the module lists and NVML does not
    said = m.logged(r"RmInitAdapter failed! \([^)]*\)|Cannot initialize GSP firmware RM")
    nodes, nvml = m.card_nodes, m.driver.nvml
    eio = [f"opening {node.path} fails with EIO" for node in nodes if node.error == "EIO"]
    sound = bool(nodes) and all(node.kind == "char" and node.major == 195 and not node.error for node in nodes)
    listed = sound and nvml.init == 0 and nvml.count == 0 and [g for g in m.kernel.gpus if not g.excluded]
    if said or eio or listed:
        known = (f"/proc/driver/nvidia/gpus lists {gpu.address} {gpu.model}".rstrip() for gpu in m.kernel.gpus)
        yield "H04", Match((said, *eio, *known, m.nvml_answer, m.answer), likely=not (said or eio))


@rules("hardware", "H03", "H01")
def broken_or_none(m: Case) -> Found:
    """A card with bad memory, or no card at all."""
    # a pending or failed remapping or retirement; an error if a program already failed because of it
    marked = [gpu for gpu in m.driver.nvml.gpus if gpu.remap_pending or gpu.remap_failure or gpu.retired_pending]
    died = any("uncorrectable ECC error" in step.error for step in m.torch_run.steps)
    if marked or died or m.code == _ECC:
        evidence = []
        for gpu in marked:
            states = {"remapping failed": gpu.remap_failure, "remapping pending": gpu.remap_pending}
            states["page retirement pending"] = gpu.retired_pending
            evidence.append(f"NVML reports for GPU {gpu.index}: {', '.join(word for word, so in states.items() if so)}")
        if died:
            evidence.append("torch reported an uncorrectable ECC error")
        which = f" -i {','.join(str(gpu.index) for gpu in marked)}" if marked else ""
        fatal = died or (m.code == _ECC and not m.works)
        fix = m.steps("H03", which=which, failed=any(gpu.remap_failure for gpu in marked))
        yield "H03", Match(tuple(evidence) or (m.answer,), fix, severity="error" if fatal else "warning")

    around = m.surroundings
    if around.wsl or m.platform.system == "Darwin" or m.works or m.matches("N01", "H06"):
        return
    present = m.hardware.present or m.kernel.loaded or m.kernel.gpus or m.nvml_works or m.card_nodes
    if isinstance(m.hardware.pci, Unknown) and not present and m.code in (-1, 100):
        yield "H01", Match((_bus(m), m.answer), m.steps("H01 unknown"), "note")
    elif m.no_gpu:
        yield "H01", Match((_bus(m),), severity="note")


# -- a kernel driver that does not support the card: first, since it explains why none is loaded

_NOUVEAU = ("nouveau", "nova_core", "nova-core", "nova", "nova_drm")
_BLACKLIST = "/etc/modprobe.d/blacklist-nouveau.conf"
_REJECTED = r"Key was rejected by service|Loading of (?:unsigned module|module with unavailable key) is rejected"


def _needs_driver(m: Case) -> bool:
    """Whether a card on the bus needs NVIDIA's kernel driver; under WSL and on a Jetson none does."""
    return bool(m.hardware.gpus) and m.broken and not m.surroundings.wsl


_NO_GSP = r"not supported by open nvidia\.ko because it does not include the required GPU System Pro"
_NEEDS_OPEN = r"requires use of the NVIDIA open kernel modules"


@rules("kernel", "K06", "K07", "K08", "K09", "K12")
def unsupported(m: Case) -> Found:
    """A driver of the wrong branch or flavour for a card, or without the card's firmware."""
    kernel, lib, needs_driver = m.kernel, m.libcuda, _needs_driver(m)
    # of the loaded module, else of the driver's libraries
    installed = lib.version if lib is not None and lib.kind == "driver" and not m.surroundings.container else ""
    found = re.match(r"[0-9]{3}(?![0-9])", kernel.version) or re.match(r"[0-9]{3}(?![0-9])", installed)
    branch = int(found[0]) if found else 0
    cards = []
    for gpu in m.unseen_cards:
        chip = chip_of(gpu.device)
        if chip and gpu.driver != "vfio-pci":
            which = f"{'judging by neighbouring ids ' if chip.inferred else ''}{chip.code}"
            words = f"{gpu.address} is 10de:{gpu.device:04x}, {which} of the {chip.generation} generation"
            cards.append((words, chip, generation(chip.generation)))
    for card, chip, known in cards:
        if known.last_branch and branch > known.last_branch and (m.works or needs_driver):
            said = m.logged(r"installed in this system is supported through the NVIDIA \d+\.xx Legacy drivers")
            last = f"the last driver branch for {chip.generation} is {known.last_branch}"
            evidence = (card, f"{last}, and branch {branch} is installed", said)
            (*_, kept, dropped), kepler = fixes.driver_for_cards(m), known.name == "Kepler"
            fix = m.steps("K06", kepler=kepler, newer=not kepler)
            if known.name in dropped:
                fix = m.steps("K06 mixed", kept=" and ".join(kept))
            severity: Severity = "note" if m.works else "error"
            yield "K06", Match(evidence, fix, severity, likely=chip.inferred and not said)
            break
    if not needs_driver:
        return

    # the open module and a card older than Turing; the proprietary one and a card of Blackwell or later
    for code, flavour, open_module, message in (
        ("K07", "open", "impossible", _NO_GSP),
        ("K08", "proprietary", "required", _NEEDS_OPEN),
    ):
        said = m.logged(message)
        wrong = [(card, chip) for card, chip, known in cards if known.open_module == open_module]
        if wrong and (kernel.flavour == flavour or said):
            card, chip = wrong[0]
            fix = fixes.install_driver(m, at_least=branch if open_module == "required" else 0)
            yield code, Match((card, m.kernel_line, said), fix, likely=chip.inferred and not said)

    firsts = ((card, chip, branches(chip.capability)[0]) for card, chip, _ in cards)
    older = next(((card, chip, first) for card, chip, first in firsts if 0 < branch < first), None)
    said = m.logged(r"not supported by the NVIDIA [\d.]+ driver release")
    if older:
        card, chip, first = older
        since = f"its first driver branch is {first}, and branch {branch} is installed"
        yield "K09", Match((card, since), likely=chip.inferred)
    elif said:
        yield "K09", Match((*m.card_lines, said))

    # the kernel log names the firmware's file; or its directory does not exist and the card is not initialized
    said = m.logged(r"(?<!\S)\S{0,200}?gsp_\w{1,40}\.bin\)? failed with error -?\d+")
    gone = kernel.firmware is False and kernel.flavour == "open" and not m.surroundings.container
    loaded = any(card.firmware == kernel.version for card in kernel.gpus)
    if (said or (gone and not loaded)) and kernel.loaded and not m.nvml_works:
        missing = f"/lib/firmware/nvidia/{kernel.version} does not exist" if gone else ""
        apt = f"--reinstall nvidia-firmware-{branch}-{kernel.version}"
        firmware = fixes.install_package(m, apt=apt, pacman="nvidia-utils", dnf="nvidia-kmod-common")
        fix = m.steps("K12 container" if m.surroundings.container else "K12", firmware=firmware)
        yield "K12", Match((m.kernel_line, missing, said, m.nvml_answer), fix, likely=not said)


# -- a kernel driver that is not installed, or not loaded


@rules("kernel", "K04", "K05")
def held_card(m: Case) -> Found:
    """Another driver has the cards: nouveau or nova, with none bound to nvidia, or vfio-pci all of them."""
    drivers = {card.driver for card in m.hardware.gpus}
    held = drivers.intersection(_NOUVEAU)
    if not _needs_driver(m):
        return
    if held and "nvidia" not in drivers:
        installed = not m.surroundings.container and m.platform.kernel in (m.kernel.built_for or ())
        blacklist = fixes.write_line(m, *(f"blacklist {name}" for name in sorted(held)), file=_BLACKLIST)
        yield "K04", Match(m.card_lines, m.steps("K04 installed" if installed else "K04", blacklist=blacklist))
    if drivers == {"vfio-pci"}:
        ids = ",".join(sorted({f"10de:{card.device:04x}" for card in m.hardware.gpus}))
        yield "K05", Match(m.card_lines, m.steps("K05", ids=ids), severity=m.no_gpu_severity)


@rules("kernel", "K02", "K03", "K01")
def module_missing(m: Case) -> Found:
    """The module is not loaded, for a reason other than those above."""
    held = any(card.driver in (*_NOUVEAU, "vfio-pci") for card in m.hardware.gpus)
    if not _needs_driver(m) or m.kernel.loaded is not False or held or m.driver_misfit:
        return
    built, running = m.kernel.built_for, m.platform.kernel
    here = running in (built or ())
    there = f"nvidia.ko exists for the running kernel {running}"
    said = m.logged(_REJECTED)
    others = built or () if running and not here else ()
    rejected = bool(m.kernel.secure_boot and (here or said))
    if others:  # reboot into the kernel that has the module, or build it for the running one
        which = f"the running kernel is {running}, but nvidia.ko exists for {', '.join(others[:3])}"
        newer = [version for version in others if _numbers(version) > _numbers(running)]
        build = "akmods --force" if m.platform.distribution == "fedora" else "dkms autoinstall"
        ubuntu = "ubuntu" in (m.platform.distribution, *m.platform.distribution_like)
        fix = m.steps("K02", build=build, ubuntu=ubuntu, kernel=others[0])
        yield "K02", Match((m.kernel_line, which), m.steps("K02 updated", kernel=newer[0]) if newer else fix)
    if rejected:
        keys = {"ubuntu": "/var/lib/shim-signed/mok/MOK.der", "fedora": "/etc/pki/akmods/certs/public_key.der"}
        fix = m.steps("K03", key=keys.get(m.platform.distribution, "/var/lib/dkms/mok.pub"))
        yield "K03", Match(("Secure Boot is on", m.kernel_line, there if here else "", said), fix, likely=not said)
    if others or rejected:
        return
    evidence = (*m.card_lines, m.kernel_line)
    if m.surroundings.container:
        yield "K01", Match(evidence, m.steps("K01 container"))
    elif built == ():
        yield "K01", Match((*evidence, "there is no nvidia.ko under /lib/modules"))
    else:
        unclear = isinstance(built, Unknown) and f"could not determine whether it is installed: {built.reason}"
        fix = m.steps("K01 unclear" if unclear else "K01 installed")
        yield "K01", Match((*evidence, unclear or there), fix)


def _numbers(kernel: str) -> tuple[int, ...]:
    """The numbers of a kernel release, for comparing: ``6.8.0-45-generic`` is before ``6.12.4``."""
    return tuple(int(number) for number in re.findall(r"[0-9]{1,9}", kernel.partition("+")[0]))


# -- a kernel driver that is loaded, but does not work


@rules("kernel", "K10", "K11", "W01", likely=("K11", "W01"))
def not_working(m: Case) -> Found:
    """NVML works and the CUDA driver does not; or, on Windows, the driver's library is not found."""
    kernel, first, times = m.kernel, m.torch.first, m.platform.suspends
    only_cuda = m.broken and m.nvml_works
    # the open module with HMM, and KASLR not known to be off
    on = kernel.uvm_disable_hmm == "N" and kernel.flavour == "open" and kernel.kaslr is not False
    if only_cuda and m.code == 3 and on:
        said = m.logged(r"request_free_mem_region\(\) err -?\d+")
        parameter = "/sys/module/nvidia_uvm/parameters/uvm_disable_hmm is N"
        fix = fixes.modprobe_option(m, "options nvidia_uvm uvm_disable_hmm=1", "nvidia-uvm.conf")
        yield "K10", Match((m.answer, m.nvml_answer, m.kernel_line, parameter, said), fix, likely=not said)

    node = m.nodes.at(UVM)
    sound = node.exists and not node.error and node.major == m.nodes.majors.get("nvidia-uvm")
    if only_cuda and m.code == 999 and sound and times:
        since = f"the machine was suspended {plural(times, 'time')} since it booted"
        yield "K11", Match((m.answer, m.nvml_answer, f"{UVM} can be opened", since))

    if m.platform.system == "Windows" and m.no_libcuda and first and first.cuda:
        step = m.failed("init")
        evidence = ("nvcuda.dll is not found", torch_says(step.error if step else ""))
        yield "W01", Match(evidence, severity="error" if m.has_nvidia else "note")
