"""The card, NVIDIA's kernel driver and the CUDA driver: whether they exist, belong together, and start."""

from __future__ import annotations

import re
from posixpath import dirname
from shlex import quote

from transload.diagnose import fixes, tables
from transload.diagnose.case import CONTROL, CVD, UVM, Case, Lines, Match, Matches, rules
from transload.diagnose.fixes import command
from transload.diagnose.tables import chip_of, is_data_centre, is_listed, numbers_of, result
from transload.findings import Severity
from transload.machine import NVIDIA, Library, Node, Unknown
from transload.render.words import plural
from transload.steps import Steps

_VENDORS = {0x1002: "AMD", 0x8086: "Intel", 0x10DE: "NVIDIA"}
_LOST = (15, 16)  # GPU_IS_LOST, RESET_REQUIRED
_ECC = 214


def _bus_line(m: Case) -> str:
    pci = m.hardware.pci
    if isinstance(pci, Unknown):
        return f"the PCI bus could not be read: {pci.reason}"
    display = [card for card in pci if card.display]
    shown = [card.name or f"{card.address} {_VENDORS.get(card.vendor, f'{card.vendor:04x}')}" for card in display]
    return f"display devices on the PCI bus: {', '.join(shown) or 'none'}"


@rules("hardware", "N01", "H06")
def chosen_without_gpu(m: Case) -> Matches:
    """A note: a hosted notebook without a GPU (N01). Or prime-select chose another card, so that none is used (H06)."""
    notebook, prime, first = m.surroundings.notebook, m.platform.prime, m.torch.first
    if notebook in ("colab", "kaggle") and m.no_gpu:
        evidence = (f"this is {notebook.title()}", _bus_line(m))
        yield "N01", Match(evidence, m.steps(f"N01 {notebook}"), severity="note")
    # NVIDIA's driver is not loaded although it is installed
    built = m.platform.kernel in (m.kernel.built_for or ())
    if prime in ("intel", "amd") and m.kernel.loaded is False and (built or m.no_gpu) and not m.cuda_works:
        severity: Severity = "note" if first is None or first.cpu_only else "error"
        yield "H06", Match((f"prime-select is set to {prime}", _bus_line(m)), severity=severity)


@rules("hardware", "H02")
def lost_card(m: Case) -> Matches:
    """A card that no longer answers."""
    dead = (f"the configuration space of {card.address} reads all ones" for card in m.hardware.gpus if card.dead)
    lost = (gpu for gpu in m.driver.nvml.gpus if gpu.code in _LOST)
    gone = (f"NVML returns {gpu.code} {result('nvml', gpu.code).name} for GPU {gpu.index}" for gpu in lost)
    evidence = (*dead, *gone, m.logged(r"GPU has fallen off the bus") if m.driver_broken else "")
    if any(evidence):
        yield "H02", Match(evidence, severity="warning" if m.cuda_works else "error")


@rules("hardware", "H05", "H04")
def silent_card(m: Case) -> Matches:
    """NVIDIA's module is loaded and supports the card, but NVML does not see it: it has no memory (H05) or fails."""
    if not m.driver_broken or m.kernel.loaded is not True or not m.unseen_cards or m.nvml_works or m.driver_misfit:
        return
    nvml, no_memory = m.driver.nvml, m.logged(r"BAR\d is 0M")
    bare = [f"a memory region of {card.address} has no address assigned" for card in m.unseen_cards if 0 in card.bars]
    # RmInitAdapter failed, EIO, or a card that the module lists and NVML does not
    failure = m.logged(r"RmInitAdapter failed! \([^)]*\)|Cannot initialize GSP firmware RM")
    eio = [f"opening {node.path} fails with EIO" for node in m.card_nodes if node.error == "EIO"]
    sound = all(node.kind == "char" and node.major == 195 and not node.error for node in m.card_nodes)
    silent = m.card_nodes and sound and nvml.init == 0 and nvml.count == 0
    if no_memory or bare:
        yield "H05", Match((*bare, no_memory, m.nvml_result_line))
    elif failure or eio or (silent and not all(gpu.excluded for gpu in m.kernel.gpus)):
        listed = (f"/proc/driver/nvidia/gpus lists {gpu.address} {gpu.model}".rstrip() for gpu in m.kernel.gpus)
        evidence = (failure, *eio, *listed, m.nvml_result_line, m.driver_result_line)
        yield "H04", Match(evidence, likely=not (failure or eio))


@rules("hardware", "H03")
def bad_memory(m: Case) -> Matches:
    """A pending or failed remapping or retirement; an error if a program already failed because of it."""
    marked = [gpu for gpu in m.driver.nvml.gpus if gpu.remap_pending or gpu.remap_failure or gpu.retired_pending]
    died = any("uncorrectable ECC error" in step.error for step in m.torch_run.steps)
    if marked or died or m.driver_result == _ECC:
        damage = []
        for gpu in marked:
            states = {"remapping failed": gpu.remap_failure, "remapping pending": gpu.remap_pending}
            states["page retirement pending"] = gpu.retired_pending
            damage.append(f"NVML reports for GPU {gpu.index}: {', '.join(word for word, so in states.items() if so)}")
        torch = "torch reported an uncorrectable ECC error" if died else ""
        evidence = (*damage, torch, "" if marked or died else m.driver_result_line)
        which = f" -i {','.join(str(gpu.index) for gpu in marked)}" if marked else ""
        fatal = died or (m.driver_result == _ECC and not m.cuda_works)
        fix = m.steps("H03", which=which, failed=any(gpu.remap_failure for gpu in marked))
        yield "H03", Match(evidence, fix, severity="error" if fatal else "warning")


@rules("hardware", "H01")
def no_card(m: Case) -> Matches:
    """A note: there is no NVIDIA card, or it is unknown whether there is one."""
    if m.surroundings.wsl or m.platform.system == "Darwin" or m.cuda_works or m.matches("N01", "H06"):
        return
    present = m.hardware.present or m.kernel.loaded or m.kernel.gpus or m.nvml_works or m.card_nodes
    if isinstance(m.hardware.pci, Unknown) and not present and m.driver_result in (-1, 100):
        yield "H01", Match((_bus_line(m), m.driver_result_line), m.steps("H01 unknown"), "note")
    elif m.no_gpu:
        yield "H01", Match((_bus_line(m),), severity="note")


# -- the kernel driver: first one that does not support the card, since that explains why none is loaded

_NOUVEAU = ("nouveau", "nova_core", "nova-core", "nova", "nova_drm")
_BLACKLIST = "/etc/modprobe.d/blacklist-nouveau.conf"
_REJECTED = r"Key was rejected by service|Loading of (?:unsigned module|module with unavailable key) is rejected"
_NO_GSP = r"not supported by open nvidia\.ko because it does not include the required GPU System Pro"


@rules("kernel", "K06", "K07", "K08", "K09", "K12")
def unsupported(m: Case) -> Matches:
    """A driver of the wrong branch or flavour for a card, or without the card's firmware."""
    kernel, lib = m.kernel, m.libcuda
    # the branch of the loaded module, else of the driver's libraries
    installed = lib.version if lib is not None and lib.kind == "driver" and not m.surroundings.container else ""
    number = re.match(r"[0-9]{3}(?![0-9])", kernel.version) or re.match(r"[0-9]{3}(?![0-9])", installed)
    branch = int(number[0]) if number else 0
    if m.platform.system == "Windows" and branch:  # 581.80 is of branch 580
        branch = tables.branch_of(str(branch))
    cards = []
    for gpu in m.unseen_cards:
        chip = chip_of(gpu.device)
        if chip and gpu.driver != "vfio-pci":
            which = f"{'judging by neighbouring ids ' if chip.inferred else ''}{chip.code}"
            words = f"{gpu.address} is 10de:{gpu.device:04x}, {which} of the {chip.generation} generation"
            cards.append((words, chip, tables.generation(chip.generation)))
    for card, chip, generation in cards:
        if generation.last_branch and branch > generation.last_branch and (m.cuda_works or m.needs_driver):
            log_line = m.logged(r"installed in this system is supported through the NVIDIA \d+\.xx Legacy drivers")
            last = f"the last driver branch for {chip.generation} is {generation.last_branch}"
            evidence = (card, f"{last}, but branch {branch} is installed", log_line)
            (*_, kept, dropped), kepler = fixes.driver_for_cards(m), generation.name == "Kepler"
            fix = m.steps("K06", kepler=kepler, newer=not kepler)
            if generation.name in dropped:
                fix = m.steps("K06 mixed", kept=" and ".join(kept))
            severity: Severity = "note" if m.cuda_works else "error"
            yield "K06", Match(evidence, fix, severity, likely=chip.inferred and not log_line)
            break
    if not m.needs_driver:
        return

    # the open module and a card older than Turing; the proprietary one and a card of Blackwell or later
    for code, flavour, open_module, message in (
        ("K07", "open", "impossible", _NO_GSP),
        ("K08", "proprietary", "required", r"requires use of the NVIDIA open kernel modules"),
    ):
        log_line = m.logged(message)
        wrong = [(card, chip) for card, chip, generation in cards if generation.open_module == open_module]
        if wrong and (kernel.flavour == flavour or log_line):
            card, chip = wrong[0]
            fix = fixes.install_driver(m, at_least=branch if open_module == "required" else 0)
            yield code, Match((card, m.kernel_line, log_line), fix, likely=chip.inferred and not log_line)

    firsts = ((card, chip, tables.branches(chip.capability)[0]) for card, chip, _ in cards)
    older = next(((card, chip, first) for card, chip, first in firsts if 0 < branch < first), None)
    log_line = m.logged(r"not supported by the NVIDIA [\d.]+ driver release")
    if older:
        card, chip, first = older
        since = f"its first driver branch is {first}, but branch {branch} is installed"
        yield "K09", Match((card, since), likely=chip.inferred)
    elif log_line:
        yield "K09", Match((*m.card_lines, log_line))

    # the kernel log names the firmware's file; or its directory does not exist and the card is not initialized
    log_line = m.logged(r"(?<!\S)\S{0,200}?gsp_\w{1,40}\.bin\)? failed with error -?\d+")
    gone = kernel.firmware is False and kernel.flavour == "open" and not m.surroundings.container
    loaded = any(card.firmware == kernel.version for card in kernel.gpus)
    if (log_line or (gone and not loaded)) and kernel.loaded and not m.nvml_works:
        missing = f"/lib/firmware/nvidia/{kernel.version} does not exist" if gone else ""
        apt = f"nvidia-firmware-{branch}-{kernel.version}"
        firmware = fixes.install_package(m, again=True, apt=apt, pacman="nvidia-utils", dnf="nvidia-kmod-common")
        fix = m.steps("K12 container" if m.surroundings.container else "K12", firmware=firmware)
        yield "K12", Match((m.kernel_line, missing, log_line, m.nvml_result_line), fix, likely=not log_line)


@rules("kernel", "K04", "K05", "K02", "K03", "K01")
def not_loaded(m: Case) -> Matches:
    """NVIDIA's module is not loaded, or nouveau or nova is bound to a card, or vfio-pci to all of them."""
    drivers, built, running = {card.driver for card in m.hardware.gpus}, m.kernel.built_for, m.platform.kernel
    nouveau, here = drivers.intersection(_NOUVEAU), running in (built or ())
    if not m.needs_driver:
        return
    if nouveau and "nvidia" not in drivers:
        installed = here and not m.surroundings.container
        blacklist = fixes.write_line(m, *(f"blacklist {name}" for name in sorted(nouveau)), file=_BLACKLIST)
        yield "K04", Match(m.card_lines, m.steps("K04 installed" if installed else "K04", blacklist=blacklist))
    if drivers == {"vfio-pci"}:
        ids = ",".join(sorted({f"10de:{card.device:04x}" for card in m.hardware.gpus}))
        yield "K05", Match(m.card_lines, m.steps("K05", ids=ids), severity=m.no_gpu_severity)

    if m.kernel.loaded is not False or nouveau or "vfio-pci" in drivers or m.driver_misfit:
        return
    existing = f"nvidia.ko exists for the running kernel {running}"
    log_line = m.logged(_REJECTED)
    others = built or () if running and not here else ()
    rejected = bool(m.kernel.secure_boot and (here or log_line))
    if others:  # reboot into the kernel that has the module, or build it for the running one
        which = f"the running kernel is {running}, but nvidia.ko exists for {', '.join(others[:3])}"
        order = {at: [*map(int, re.findall(r"[0-9]{1,9}", at.partition("+")[0]))] for at in (running, *others)}
        newer = [release for release in others if order[release] > order[running]]  # 6.12.4 is after 6.8.0-45-generic
        system = fixes.family(m)
        build = "akmods --force" if system == "fedora" else "dkms autoinstall"
        fix = m.steps("K02", build=build, ubuntu=system == "ubuntu", kernel=others[0])
        yield "K02", Match((m.kernel_line, which), m.steps("K02 updated", kernel=newer[0]) if newer else fix)
    if rejected:
        keys = {"ubuntu": "/var/lib/shim-signed/mok/MOK.der", "fedora": "/etc/pki/akmods/certs/public_key.der"}
        fix = m.steps("K03", key=keys.get(fixes.family(m), "/var/lib/dkms/mok.pub"))
        evidence: Lines = ("Secure Boot is on", m.kernel_line, existing if here else "", log_line)
        yield "K03", Match(evidence, fix, likely=not log_line)
    if others or rejected:
        return
    evidence = (*m.card_lines, m.kernel_line)
    if m.surroundings.container:
        yield "K01", Match(evidence, m.steps("K01 container"))
    elif built == ():
        yield "K01", Match((*evidence, "there is no nvidia.ko under /lib/modules"))
    else:
        unclear = isinstance(built, Unknown) and f"could not determine whether it is installed: {built.reason}"
        fix = m.steps("K01 installed", unclear=unclear, sure=not unclear)
        yield "K01", Match((*evidence, unclear or existing), fix)


@rules("kernel", "K10", "K11", likely=("K11",))
def not_working(m: Case) -> Matches:
    """The kernel driver is loaded, and only CUDA does not work."""
    kernel, times = m.kernel, m.platform.suspends
    only_cuda = m.driver_broken and m.nvml_works
    # the open module with HMM, and KASLR not known to be off
    with_hmm = kernel.uvm_disable_hmm == "N" and kernel.flavour == "open" and kernel.kaslr is not False
    if only_cuda and m.driver_result == 3 and with_hmm:
        log_line = m.logged(r"request_free_mem_region\(\) err -?\d+")
        parameter = "/sys/module/nvidia_uvm/parameters/uvm_disable_hmm is N"
        fix = fixes.modprobe_option(m, "options nvidia_uvm uvm_disable_hmm=1", "nvidia-uvm.conf")
        evidence: Lines = (m.driver_result_line, m.nvml_result_line, m.kernel_line, parameter, log_line)
        yield "K10", Match(evidence, fix, likely=not log_line)

    node = m.nodes.at(UVM)
    sound = node.exists and not node.error and node.major == m.nodes.majors.get("nvidia-uvm")
    if only_cuda and m.driver_result == 999 and sound and times:
        since = f"the machine was suspended {plural(times, 'time')} since it booted"
        yield "K11", Match((m.driver_result_line, m.nvml_result_line, f"{UVM} can be opened", since))


# -- which libcuda.so.1 a process gets

_VERSION_MISMATCH = 18  # of NVML
_NO_JIT = 221


def _library_line(m: Case, lib: Library | None) -> str:
    """Which CUDA library a process gets, and how the loader finds it."""
    if lib is None:
        return ""
    leads = f" → {lib.target}" if lib.target and lib.target != lib.path else ""
    return f"{m.cuda_name} is {lib.path}{leads}, found through {lib.via or 'the loader'}"


def _drop_library(m: Case, lib: Library) -> Steps:
    folder = fixes.folder_of(m, lib.path)
    if fixes.on_windows(m):
        if lib.via in ("System32", "SysWOW64"):  # the driver's own, which its installation replaces
            return ()
        by_path = fixes.drop_folder(m, "PATH", folder) if lib.via.startswith("PATH") else ()
        return by_path or m.steps("Remove a library", path=lib.path)
    essential = re.fullmatch(r"(?:/usr)?/lib(?:32|64|x32)?(?:/[\w-]+-linux-gnu\w*)?", folder)  # for every program
    if drop := fixes.drop_library(m, lib.path, lib.via):
        return drop
    if lib.via == "ld.so.preload":
        return m.steps("Remove from ld.so.preload", listed=lib.path)
    if lib.via == "ld.so.cache" and not essential:
        return m.steps("Remove a folder", folder=folder, quoted=quote(folder))
    return m.steps("Remove a library", path=quote(lib.path))


def _search(m: Case, folder: str, file: str) -> Steps:
    """Let the loader search a folder; on NixOS, which has no file for that, in this shell only."""
    value = ":".join(filter(None, (folder, m.env("LD_LIBRARY_PATH"))))
    shell = fixes.set_variable(m, "LD_LIBRARY_PATH", value)
    write = fixes.write_line(m, folder, file=f"/etc/ld.so.conf.d/{file}")
    return shell if m.platform.distribution == "nixos" else m.steps("Search a folder", write=write, shell=shell)


@rules("libraries", "U11", "U09", "U08")
def under_wsl(m: Case) -> Matches:
    """Why a process under WSL cannot use the Windows driver, of which it sees only libraries. The card is unknown."""
    lib, libraries, wsl = m.libcuda, m.driver.libraries.cuda or (), m.surroundings.wsl
    of_windows = next((library for library in libraries if library.kind == "wsl"), None)
    if wsl == 1 and not m.cuda_works:
        yield "U11", Match((f"the kernel is {m.platform.kernel}, which is WSL 1",), severity="note")
    if wsl != 2 or not m.driver_fails:
        return
    if lib is not None and lib.kind == "driver":
        manager, path = m.platform.package_manager, quote(lib.path)
        remove = m.steps(f"U09 {manager}" if manager in ("apt", "dnf") else "U09", path=path)
        used = f"libcuda.so.1 → {lib.target or lib.path}, found through {lib.via}"
        windows = f"the Windows driver's own is {of_windows.path}" if of_windows else ""
        fix = fixes.drop_library(m, lib.path, lib.via) or remove
        yield "U09", Match((used, windows, m.driver_result_line, m.works_without_line), fix)
    elif m.driver_broken and not m.surroundings.container:
        if m.no_libcuda and of_windows:
            unsearched = f"{of_windows.path} exists, but the loader does not search {dirname(of_windows.path)}"
            yield "U08", Match((unsearched,), _search(m, dirname(of_windows.path), "ld.wsl.conf"))
        elif m.no_libcuda:  # an error only if the installed torch needs a GPU
            needed = m.torch.first is not None and not m.torch.first.cpu_only
            evidence = ("there is no libcuda.so.1 in /usr/lib/wsl/lib",)
            yield "U08", Match(evidence, m.steps("U08", perhaps=True), "error" if needed else "note", likely=needed)
        elif not m.hardware.dxg or m.driver_result == 100:
            node = f"/dev/dxg {'exists' if m.hardware.dxg else 'does not exist'}"
            yield "U08", Match((node, m.driver_result_line), m.steps("U08", perhaps=False), likely=m.hardware.dxg)


@rules("libraries", "U04", "U02", "U03", "U01", "U13")
def wrong_library(m: Case) -> Matches:
    """The driver does not start with the libcuda.so.1 that the process loads, or that file cannot be used at all."""
    if not m.driver_fails or m.no_gpu or m.withheld:
        return
    lib, kernel, answer = m.libcuda, m.kernel.version, m.driver.cuda.answer
    kind, line = lib.kind if lib else "", _library_line(m, lib)
    # evidence that dropping this library leaves a good one
    others = (other for other in m.driver.libraries.cuda or () if other != lib and other.kind in ("driver", "wsl"))
    better = next((f"the driver's own is {library.path}" for library in others if lib and not library.problem), "")
    both = lib and lib.version and kernel
    versions = f"it is version {lib.version}, but the kernel driver is {kernel}" if lib and both else ""
    drop = _drop_library(m, lib) if lib else ("Remove every stubs directory from LD_LIBRARY_PATH.",)
    # NVML 18, libraries of another release, or 803 without a compat library
    reported = m.driver.nvml.init == _VERSION_MISMATCH or m.driver_result == 803
    # only the version explains the error: no variable does, or it is the one that names the directory
    freed = "LD_LIBRARY_PATH" in m.works_without
    mismatch = reported or (m.mismatched_libcuda is not None and (not m.works_without or freed))

    stub = answer.answered and (m.driver_result == 34 or kind == "stub")
    compat = answer.answered and kind == "compat" and (m.driver_result == 803 or (m.driver_result != 804 and freed))
    if stub:
        yield "U04", Match((line, m.driver_result_line, better, m.works_without_line if lib else ""), drop)
    if compat:
        yield "U02", Match((line, versions, m.driver_result_line, better, m.works_without_line), drop)
    if answer.answered and mismatch and not m.surroundings.wsl and kind not in ("compat", "stub"):
        used = m.mismatched_libcuda or lib
        module, library = numbers_of(kernel), numbers_of(used.version) if used else ()
        if used is not None and used.via.startswith("LD_"):
            fix = _drop_library(m, used)
        elif m.surroundings.container:
            fix = m.steps("U01 container")
        elif module and library and library < module:
            fix = m.steps("U01 older", same=fixes.install_driver(m, exactly=module[0]))
        else:
            fix = m.steps("U01", reload=fixes.reload_module(m))
        yield "U01", Match((line, versions, m.driver_result_line, m.nvml_result_line, m.works_without_line), fix)
    elif m.driver_result == 804:
        names = [*(gpu.name for gpu in m.driver.nvml.gpus), *(gpu.model for gpu in m.kernel.gpus)]
        plain = next((f"{name} is not a data-center card" for name in names if name and not is_data_centre(name)), "")
        if kind == "compat":
            evidence = (line, versions, m.driver_result_line, plain, m.works_without_line)
            yield "U03", Match(evidence, m.steps("U03", drop=drop))
        else:
            fix = m.steps("U03", drop=fixes.reboot(m))
            yield "U03", Match((m.driver_result_line, line, plain, m.works_without_line), fix, likely=True)
    elif answer.state in ("not-loadable", "no-symbol"):
        problem = f"{lib.path}: {lib.problem}" if lib and lib.problem else ""
        has_driver = m.kernel.loaded is True or m.surroundings.container
        if lib and kind == "driver" and lib.version and not lib.problem and not lib.via.startswith("LD_"):
            # the driver's own, and complete: something else is missing
            policy = "or a security policy (SELinux, AppArmor) forbids running code from it."
            noexec = f"Its file system is mounted noexec, {policy}"
            better, fix = "", (noexec,) if "map segment" in answer.detail else _packages(m, again=True)
        elif lib and better:
            fix = drop
        else:
            fix = _packages(m, again=True) if lib and has_driver else fixes.install_driver(m)
            fix = (*drop, *fix) if lib else fix
        evidence = (line, problem, m.driver_result_line, m.works_without_line, better)
        yield "U13", Match(evidence, fix)
    elif lib and freed and lib.via == "LD_LIBRARY_PATH" and not (stub or compat):
        yield "U13", Match((line, m.driver_result_line, m.works_without_line), m.steps("U13", drop=drop))


@rules("libraries", "U05", "U06", "U07")
def not_found(m: Case) -> Matches:
    """The loader finds no libcuda.so.1; or, as a note, CUDA works without the driver's other libraries."""
    # no PTX compiler: an error if something failed without it
    errors = " ".join(step.error for step in m.torch_run.steps)
    failed = "PTX JIT compiler library not found" in errors or m.driver_result == _NO_JIT
    gone = m.driver.libraries.ptx_compiler == () and m.driver.cuda.works and not m.hardware.tegra
    gone = gone and not (m.surroundings.wsl or fixes.on_windows(m))  # there it is part of another library
    if failed or gone:
        nowhere = "libnvidia-ptxjitcompiler.so.1 is not found" if gone else ""
        died = "CUDA returned 221: PTX JIT compiler library not found" if failed else ""
        yield "U07", Match((nowhere, died), _packages(m), severity="error" if failed else "note")
    no_nvml = m.driver.nvml.answer.state == "no-library" and not m.driver.libraries.nvml
    if m.cuda_works and no_nvml and not (m.surroundings.wsl or m.hardware.tegra):
        missing = f"{m.nvml_name} is not found: nvidia-smi and tools that use NVML do not work"
        yield "U06", Match((missing, "CUDA works"), m.steps("U06 NVML", packages=_packages(m)), "note")
    if not m.no_libcuda or not m.driver_broken or m.no_gpu or m.surroundings.wsl or m.withheld:
        return
    on_disk = (lib for lib in m.driver.libraries.cuda or () if lib.via == "disk" and lib.kind == "driver")
    if lib := next((lib for lib in on_disk if not lib.problem), None):
        unsearched = f"{lib.path} exists, but the loader does not search {dirname(lib.path)}"
        # a torch of NixOS or conda may have that directory in its own RUNPATH
        fix = _search(m, dirname(lib.path), "nvidia.conf")
        yield "U05", Match((unsearched, m.driver_result_line), fix, likely=m.torch_not_run)
    elif m.kernel.loaded and (not m.surroundings.container or m.nodes.at(CONTROL).exists):
        fix = m.steps("U06", none=not m.driver.libraries.nvml, packages=_packages(m))
        loaded = f"the kernel driver {m.kernel.version} is loaded".replace("  ", " ")
        yield "U06", Match((loaded, f"{m.cuda_name} is not found", m.nvml_result_line), fix)


def _packages(m: Case, *, again: bool = False) -> Steps:
    """Install the driver's libraries, or reinstall them if files of an installed package are missing."""
    if m.surroundings.container:
        return ("The container runtime provides the libraries:", *fixes.start_with_gpu(m))
    if fixes.on_windows(m):
        return fixes.install_driver(m)
    branch = next(iter(numbers_of(m.kernel.version)), "BRANCH")
    debian = fixes.family(m) == "debian"
    apt = "libcuda1 libnvidia-ml1" if debian else f"libnvidia-compute-{branch} nvidia-utils-{branch}"
    packages = fixes.install_package(m, "driver", "libraries", again=again, apt=apt)
    return (*packages, f"Install the version of the loaded module, {m.kernel.version}." if m.kernel.version else "")


# -- the start of the CUDA driver

_OUT_OF_MEMORY = 2
_ENOUGH = 64 << 30  # seen on a card of 140 GB: with 16 GB of address space cuInit works and the first kernel does not
_CAP = re.compile(r"/dev/nvidia-caps/nvidia-cap(\d+)")


@rules("driver", "C11", "S03", "S02", "S01", likely=("C11",))
def not_ready(m: Case) -> Matches:
    """An error that sandboxes cause, or 802: NVSwitches or confidential computing are not ready."""
    # a sandbox without a driver of its own; in this layer, since a faulty node explains the error better
    sandbox = m.surroundings.sandbox
    gvisor = sandbox == "gvisor"
    without_driver = sandbox and (gvisor or not m.kernel.loaded)
    if without_driver and m.driver_broken and not m.no_gpu and m.driver_result in (100, 304, 999):
        fix = m.steps("C11 gvisor" if gvisor else "C11")
        yield "C11", Match((f"the kernel is {sandbox}'s", m.driver_result_line), fix)

    if not m.driver_broken or m.driver_result != 802 or m.surroundings.wsl:
        return
    if m.driver.nvml.confidential == "not-ready":
        state = "NVML reports that confidential computing is enabled and the GPUs are not ready"
        yield "S03", Match((m.driver_result_line, state))
        return
    manager, version = m.kernel.fabric_manager, m.kernel.version
    branch = numbers_of(version)[:1]
    if m.surroundings.container or not branch:
        install = m.steps("The fabric manager of the host", version=f" {version}" if version else "")
    else:
        apt = f"'nvidia-fabricmanager-{branch[0]}={version}*'"
        install = fixes.install_package(m, apt=apt, dnf=f"nvidia-fabric-manager-{version}")
    if manager and version and manager != version:
        versions = f"the fabric manager is version {manager}, the kernel driver {version}"
        yield "S02", Match((m.driver_result_line, versions), m.steps("S02", install=install))
        return
    # certainly the fabric if a switch, the fabric's state or the stopped service shows it
    switches = [d.address for d in m.hardware.pci or () if d.vendor == NVIDIA and is_listed(d.device, "nvswitches")]
    states = {gpu.fabric for gpu in m.driver.nvml.gpus} & {"not-started", "in-progress"}
    failed = [gpu for gpu in m.driver.nvml.gpus if gpu.fabric == "completed" and gpu.fabric_status]
    runs = "nv-fabricmanager" in m.kernel.daemons
    stopped = bool(manager) and not runs and not m.surroundings.container
    evidence = (
        m.driver_result_line,
        f"{len(switches)} NVSwitches are on the PCI bus" if switches else "",
        f"NVML reports that the fabric is {' and '.join(sorted(states))}" if states else "",
        *(f"registering {gpu.name} with the fabric: {result('nvml', gpu.fabric_status).text}" for gpu in failed),
        "nv-fabricmanager is installed but not running" if stopped else "",
        "nv-fabricmanager is running" if runs else "",
    )
    start = "restart" if runs else "enable --now"
    fix = m.steps("S01", install=() if runs or manager else install, start=start, runs=runs)
    yield "S01", Match(evidence, fix, likely=not (switches or states or stopped))


@rules("driver", "S04", "S07", "M01", "M02", likely=("S07",))
def divided_card(m: Case) -> Matches:
    """MPS, a vGPU or MIG, which divide a card, give this process no part of it."""
    nvml = m.driver.nvml
    if m.driver_fails and m.driver_result in range(805, 811):
        variable, directory = "CUDA_MPS_PIPE_DIRECTORY", m.kernel.mps_directory
        value, runs = m.env(variable), "nvidia-cuda-mps-control" in m.kernel.daemons
        without: Steps = fixes.unset(m, variable) if value is not None else ()
        if value is None and directory:
            without = (fixes.sudo(m, f"rm -r {directory}"),)
        evidence: Lines = (
            m.driver_result_line,
            f"{variable} is {value!r}" if value is not None else "",
            f"{directory} exists" if directory else "",
            f"nvidia-cuda-mps-control is {'running' if runs else 'not visible here'}",
            m.works_without_line,
        )
        how = "S04 container" if m.surroundings.container else "S04 runs" if runs else "S04"
        yield "S04", Match(evidence, m.steps(how, without=without))

    virtual = [gpu for gpu in nvml.gpus if gpu.virtualization == "vgpu"]
    if m.driver_broken and virtual and m.driver_result in (35, 100):
        yield "S07", Match((f"NVML reports that {virtual[0].name or 'the card'} is a vGPU", m.driver_result_line))

    whole = _all_mig(m) and not any(gpu.mig_devices for gpu in nvml.gpus)
    if m.driver_broken and m.driver_result == 100 and whole and not _closed_caps(m):
        evidence = ("MIG is enabled on every card, but NVML sees no MIG device", m.driver_result_line)
        yield "M01", Match(evidence, likely=bool(m.surroundings.container))

    names = [name.strip() for name in (m.env(CVD) or "").split(",") if name.strip().startswith("MIG-")]
    count = m.driver.cuda.count
    if m.cuda_works and len(names) > 1 and 0 < count < len(names):  # a warning, since one works
        evidence = (f"{CVD} names {len(names)} MIG instances", f"CUDA sees {count}", m.nvml_result_line)
        starts = tuple(command(f"{CVD}={name} python …") for name in names[:3])
        yield "M02", Match(evidence, m.steps("M02", starts=starts), severity="warning")


def _all_mig(m: Case) -> bool:
    gpus = m.driver.nvml.gpus
    return m.nvml_works and bool(gpus) and all(gpu.mig == "enabled" for gpu in gpus)


def _closed_caps(m: Case) -> list[Node]:
    """The nodes of MIG instances that cannot be opened, without 1 and 2, which only administrators may open."""
    caps = ((node, _CAP.fullmatch(node.path)) for node in m.nodes.found)
    return [node for node, cap in caps if cap and int(cap[1]) > 2 and node.error in ("EACCES", "EPERM")]


@rules("variables", "M03")
def mig_unreachable(m: Case) -> Matches:
    """A MIG instance named in the format before driver 470, or whose node cannot be opened."""
    if not m.driver_fails or m.driver_result != 100:
        return
    value, closed = m.env(CVD) or "", _closed_caps(m)
    branch = numbers_of(m.driver.nvml.driver or m.kernel.version)[:1]
    if value.strip().startswith("MIG-GPU-") and branch >= (470,):
        name = f"{CVD} is {value!r}, a format of drivers before 470"
        yield "M03", Match((name, m.driver_result_line, m.works_without_line), m.steps("M03 name"))
    elif closed and _all_mig(m):
        nodes = (f"opening {node.path} fails with {node.error}" for node in closed[:3])
        yield "M03", Match((*nodes, m.driver_result_line))


@rules("driver", "U10", "X04", "X02", "U12", likely=("U10",))
def no_start(m: Case) -> Matches:
    """The driver is out of memory, or does not answer; or, as a note, CUDA works and NVML does not."""
    driver, limit = m.driver, m.platform.address_space
    starves = m.driver_result == _OUT_OF_MEMORY and not m.cuda_works
    if starves and m.driver_fails and m.surroundings.wsl == 2 and limit is None and driver.nvml.count != 1:
        yield "U10", Match((m.driver_result_line, m.nvml_result_line, m.works_without_line))

    if limit is not None and not m.torch_run.cuda_works:
        first_kernel = any("out of memory" in step.error for step in m.torch_run.steps) and limit < _ENOUGH
        if first_kernel or starves:
            answer = "torch is out of memory at its first kernel" if m.cuda_works else m.driver_result_line
            evidence: Lines = (f"the address space of this process is limited to {limit >> 20} MB (ulimit -v)", answer)
            yield "X04", Match(evidence, likely=limit >= _ENOUGH)

    cuda, nvml = driver.cuda.answer.state == "hung", driver.nvml.answer.state == "hung"
    if (cuda or nvml) and not m.works_without and not (cuda and m.torch_run.cuda_works):
        too = "" if not nvml else "nvidia-smi and NVML hang too" if cuda else "NVML hangs, and so does nvidia-smi"
        stuck = (f"{process} is stuck in the driver, in state D" for process in m.kernel.stuck[:4])
        evidence = (m.driver_result_line if cuda else "", too, *stuck)
        if cuda and (lib := m.libcuda) and lib.via.startswith("LD_"):
            fix = m.steps("X02 library", path=lib.path, drop=_drop_library(m, lib))
            yield "X02", Match((_library_line(m, lib), *evidence), fix)
        else:
            sleeps = "nvidia-persistenced" not in m.kernel.daemons and not m.surroundings.container
            yield "X02", Match(evidence, m.steps("X02", sleeps=sleeps), "warning" if m.cuda_works else "error")

    nvml_answer, code = driver.nvml.answer, driver.nvml.init
    failed = nvml_answer.state in ("not-loadable", "no-symbol", "crashed") or (nvml_answer.answered and code > 0)
    if driver.cuda.works and failed:
        meaning = result("nvml", code).text if nvml_answer.answered else ""
        lines = (m.nvml_result_line, meaning, f"CUDA works and has {plural(driver.cuda.count, 'device')}")
        yield "U12", Match(lines, severity="note")


@rules("driver", "X08", symptom=True)
def unexplained(m: Case) -> Matches:
    """CUDA fails although there is a GPU; reported only if no other rule explains it."""
    state, lib, kernel = m.driver.cuda.answer.state, m.libcuda, m.kernel
    if not m.driver_fails or state in ("hung", "unasked") or m.withheld or (m.no_libcuda and m.surroundings.wsl):
        return
    # if the bus could not be read, any error but "no device" indicates a GPU
    nodes = bool(m.nodes.found) and not m.nodes_absent
    gpu = m.hardware.present or m.host_has_gpu or m.nvml_works or nodes or m.driver_result not in (-1, 0, 100)
    crashes_torch = state == m.torch_run.answer.state == "crashed"
    if not crashes_torch and (m.no_gpu or not gpu):
        return
    meaning = result("cuda", m.driver_result).text
    crashed = lib if state == "crashed" else None
    needed = (m.nodes.at(CONTROL), m.nodes.at(UVM), *m.card_nodes)
    sound = m.nodes.found and m.card_nodes and all(node.exists and not node.error for node in needed)
    unread = kernel.log.reason if isinstance(kernel.log, Unknown) else ""
    evidence = (
        _library_line(m, crashed),
        m.driver_result_line,
        f"CUDA describes it as: {meaning}" if meaning else "",
        # what was examined and is in order
        f"the kernel driver is loaded ({kernel.version or 'version unknown'})" if kernel.loaded else "",
        "the device nodes exist and can be opened" if sound else "",
        f"{m.cuda_name} has the kernel driver's version"
        if lib and lib.version and lib.version == kernel.version
        else "",
        m.nvml_result_line if m.driver.nvml.answer.state != "unasked" else "",
        # what could not be examined and might have explained it
        f"the kernel log could not be read: {unread}" if unread not in ("", "not asked") else "",
        *(f"could not determine {probe}: {why}" for probe, why in list(m.problems.items())[:3]),
        m.works_without_line,
    )
    if crashed is not None and (crashed.via.startswith("LD_") or m.no_gpu):
        fix = m.steps("X08 library", drop=_drop_library(m, crashed))
    else:
        fix = m.steps("X08 wsl" if m.surroundings.wsl else "X08", crashed=state == "crashed")
    yield "X08", Match(evidence, fix)
