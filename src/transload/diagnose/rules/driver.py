"""The CUDA driver: which libcuda.so.1 a process gets, and what prevents it from starting."""

from __future__ import annotations

import re
from posixpath import dirname
from shlex import quote

from transload.diagnose import fixes
from transload.diagnose.case import CONTROL, CVD, UVM, Case, Found, Lines, Match, rules
from transload.diagnose.tables import is_data_centre, is_listed, numbers_of, result
from transload.machine import NVIDIA, Library, Node, Unknown

_VERSION_MISMATCH = 18  # of NVML
_NO_JIT = 221


def _library_line(lib: Library | None) -> str:
    """Which libcuda.so.1 a process gets, and how the loader finds it."""
    if lib is None:
        return ""
    leads = f" → {lib.target}" if lib.target and lib.target != lib.path else ""
    return f"libcuda.so.1 is {lib.path}{leads}, found through {lib.via or 'the loader'}"


def _drop_library(m: Case, lib: Library) -> Lines:
    folder = dirname(lib.path)
    systems = re.fullmatch(r"(?:/usr)?/lib(?:32|64|x32)?(?:/[\w-]+-linux-gnu\w*)?", folder)  # every program needs it
    if drop := fixes.drop_library(m, lib.path, lib.via):
        return drop
    if lib.via == "ld.so.preload":
        return m.steps("Remove from ld.so.preload", listed=lib.path)
    if lib.via == "ld.so.cache" and not systems:
        return m.steps("Remove a folder", folder=folder, quoted=quote(folder))
    return m.steps("Remove a library", path=quote(lib.path))


def _search(m: Case, folder: str, file: str) -> Lines:
    """Let the loader search a folder; on NixOS, which has no file for that, in this shell only."""
    value = ":".join(filter(None, (folder, m.env("LD_LIBRARY_PATH"))))
    shell = fixes.set_variable(m, "LD_LIBRARY_PATH", value)
    if m.platform.distribution == "nixos":
        return shell
    write = fixes.write_line(m, folder, file=f"/etc/ld.so.conf.d/{file}")
    return (write, fixes.sudo(m, "ldconfig"), "Or, for this shell only:", *shell)


# -- the Windows Subsystem for Linux: the driver is Windows', and only its libraries are visible


@rules("libraries", "U11", "U09", "U08")
def under_wsl(m: Case) -> Found:
    """Why a process under WSL cannot use the Windows driver. Whether Windows has a card is unknown."""
    lib, found, wsl = m.libcuda, m.driver.libraries.cuda or (), m.surroundings.wsl
    own = next((each for each in found if each.kind == "wsl"), None)
    if wsl == 1 and not m.works:
        yield "U11", Match((f"the kernel is {m.platform.kernel}, which is WSL 1",), severity="note")
    if wsl != 2 or not m.fails:
        return
    if lib is not None and lib.kind == "driver":
        purge = {
            "apt": "apt purge '^(lib)?nvidia-(compute|cfg1|gl|driver|dkms|kernel|utils).*|^libcuda1$'",
            "dnf": "dnf remove '*nvidia*'",
        }
        command = purge.get(m.platform.package_manager, f"rm {lib.path}")
        remove = (fixes.sudo(m, command), fixes.sudo(m, "ldconfig"))
        used = f"libcuda.so.1 → {lib.target or lib.path}, found through {lib.via}"
        windows = f"the Windows driver's own is {own.path}" if own else ""
        fix = fixes.drop_library(m, lib.path, lib.via) or remove
        yield "U09", Match((used, windows, m.answer, m.works_without_line), fix)
    elif m.broken and not m.surroundings.container:
        if m.no_libcuda and own:
            there = f"{own.path} exists, but the loader does not search {dirname(own.path)}"
            yield "U08", Match((there,), _search(m, dirname(own.path), "ld.wsl.conf"))
        elif m.no_libcuda:  # only an error if torch was installed to use one
            meant = m.torch.first is not None and not m.torch.first.cpu_only
            evidence = ("there is no libcuda.so.1 in /usr/lib/wsl/lib",)
            yield "U08", Match(evidence, m.steps("U08", perhaps=True), "error" if meant else "note", likely=meant)
        elif not m.hardware.dxg or m.code == 100:
            node = f"/dev/dxg {'exists' if m.hardware.dxg else 'does not exist'}"
            yield "U08", Match((node, m.answer), m.steps("U08", perhaps=False), likely=m.hardware.dxg)


# -- the wrong libcuda.so.1


@rules("libraries", "U04", "U02", "U03", "U01", "U13")
def wrong_library(m: Case) -> Found:
    """The driver does not start with the libcuda.so.1 that the process loads, or that file cannot be used at all."""
    if not m.fails or m.no_gpu or m.withheld:
        return
    lib, kernel, answer = m.libcuda, m.kernel.version, m.driver.cuda.answer
    kind, line = lib.kind if lib else "", _library_line(lib)
    # evidence that dropping this library leaves a good one
    others = (each for each in m.driver.libraries.cuda or () if each != lib and each.kind in ("driver", "wsl"))
    better = next((f"the driver's own is {each.path}" for each in others if lib and not each.problem), "")
    both = lib and lib.version and kernel
    versions = f"it is version {lib.version}, but the kernel driver is {kernel}" if lib and both else ""
    drop = _drop_library(m, lib) if lib else ("Remove every stubs directory from LD_LIBRARY_PATH.",)
    # NVML 18, libraries of another release, or 803 without a compat library
    reported = m.driver.nvml.init == _VERSION_MISMATCH or m.code == 803
    # only the version explains the error: no variable does, or it is the one that names the directory
    freed = "LD_LIBRARY_PATH" in m.works_without
    mismatch = reported or (m.mismatched is not None and (not m.works_without or freed))

    stub = answer.answered and (m.code == 34 or kind == "stub")
    compat = answer.answered and kind == "compat" and (m.code == 803 or (m.code != 804 and freed))
    if stub:
        yield "U04", Match((line, m.answer, better, m.works_without_line if lib else ""), drop)
    if compat:
        yield "U02", Match((line, versions, m.answer, better, m.works_without_line), drop)
    if answer.answered and mismatch and not m.surroundings.wsl and kind not in ("compat", "stub"):
        used = m.mismatched or lib
        module, library = numbers_of(kernel), numbers_of(used.version) if used else ()
        if used is not None and used.via.startswith("LD_"):
            fix = _drop_library(m, used)
        elif m.surroundings.container:
            fix = m.steps("U01 container")
        elif module and library and library < module:
            fix = m.steps("U01 older", same=fixes.install_driver(m, exactly=module[0]))
        else:
            fix = m.steps("U01", reload=fixes.reload_module(m))
        yield "U01", Match((line, versions, m.answer, m.nvml_answer, m.works_without_line), fix)
    elif m.code == 804:
        names = [*(gpu.name for gpu in m.driver.nvml.gpus), *(gpu.model for gpu in m.kernel.gpus)]
        plain = next((f"{name} is not a data-center card" for name in names if name and not is_data_centre(name)), "")
        if kind == "compat":
            yield "U03", Match((line, versions, m.answer, plain, m.works_without_line), m.steps("U03", drop=drop))
        else:
            fix = m.steps("U03", drop=fixes.reboot(m))
            yield "U03", Match((m.answer, line, plain, m.works_without_line), fix, likely=True)
    elif answer.state in ("not-loadable", "no-symbol"):
        problem = f"{lib.path}: {lib.problem}" if lib and lib.problem else ""
        own = m.kernel.loaded is True or m.surroundings.container
        if lib and kind == "driver" and lib.version and not lib.problem and not lib.via.startswith("LD_"):
            # the driver's own, and complete: something else is missing
            policy = "or a security policy (SELinux, AppArmor) forbids running code from it."
            noexec = f"Its file system is mounted noexec, {policy}"
            better, fix = "", (noexec,) if "map segment" in answer.detail else _packages(m, again=True)
        elif lib and better:
            fix = drop
        else:
            fix = _packages(m, again=True) if lib and own else fixes.install_driver(m)
            fix = (*drop, *fix) if lib else fix
        yield "U13", Match((line, problem, m.answer, m.works_without_line, better), fix)
    elif lib and freed and lib.via == "LD_LIBRARY_PATH" and not (stub or compat):
        title = "= another libcuda.so.1 is loaded instead of the driver's"
        yield "U13", Match((line, m.answer, m.works_without_line), (title, *drop))


# -- no libcuda.so.1


@rules("libraries", "U05", "U06", "U07")
def not_found(m: Case) -> Found:
    """The loader finds no libcuda.so.1; or, as a note, CUDA works without the driver's other libraries."""
    # no PTX compiler: an error if something failed without it
    errors = " ".join(step.error for step in m.torch_run.steps)
    failed = "PTX JIT compiler library not found" in errors or m.code == _NO_JIT
    gone = m.driver.libraries.ptx_compiler == () and m.driver.cuda.works and not m.hardware.tegra
    if failed or (gone and not m.surroundings.wsl):
        nowhere = "libnvidia-ptxjitcompiler.so.1 is not found" if gone else ""
        died = "CUDA returned 221: PTX JIT compiler library not found" if failed else ""
        yield "U07", Match((nowhere, died), _packages(m), severity="error" if failed else "note")
    no_nvml = m.driver.nvml.answer.state == "no-library" and not m.driver.libraries.nvml
    if m.works and no_nvml and not (m.surroundings.wsl or m.hardware.tegra):
        missing = "libnvidia-ml.so.1 is not found: nvidia-smi and tools that use NVML do not work"
        fix = ("= the driver's NVML library is not installed", *_packages(m))
        yield "U06", Match((missing, "CUDA works"), fix, "note")
    if not m.no_libcuda or not m.broken or m.no_gpu or m.surroundings.wsl or m.withheld:
        return
    for lib in m.driver.libraries.cuda or ():
        if lib.via == "disk" and lib.kind == "driver" and not lib.problem:
            there = f"{lib.path} exists, but the loader does not search {dirname(lib.path)}"
            # a torch of NixOS or conda may have that directory in its own RUNPATH
            yield "U05", Match((there, m.answer), _search(m, dirname(lib.path), "nvidia.conf"), likely=m.torch_not_run)
            return
    if m.kernel.loaded and (not m.surroundings.container or m.nodes.at(CONTROL).exists):
        title = "" if m.driver.libraries.nvml else "= the driver's libraries are not installed"
        loaded = f"the kernel driver {m.kernel.version} is loaded".replace("  ", " ")
        yield "U06", Match((loaded, "libcuda.so.1 is not found", m.nvml_answer), (title, *_packages(m)))


def _packages(m: Case, *, again: bool = False) -> Lines:
    """Install the driver's libraries, or reinstall them if files of an installed package are missing."""
    if m.surroundings.container:
        return ("The container runtime provides the libraries:", *fixes.start_with_gpu(m))
    branch = next(iter(numbers_of(m.kernel.version)), "BRANCH")
    debian = m.platform.distribution == "debian"
    apt = "libcuda1 libnvidia-ml1" if debian else f"libnvidia-compute-{branch} nvidia-utils-{branch}"
    packages = fixes.install_package(m, "driver", "libraries", apt=f"--reinstall {apt}" if again else apt)
    return (*packages, f"Install the version of the loaded module, {m.kernel.version}." if m.kernel.version else "")


# -- the start of the CUDA driver

_OUT_OF_MEMORY = 2
_ENOUGH = 64 << 30  # seen on a card of 140 GB: with 16 GB of address space cuInit works and the first kernel does not
_CAP = re.compile(r"/dev/nvidia-caps/nvidia-cap(\d+)")


@rules("driver", "C11", likely=("C11",))
def sandboxed(m: Case) -> Found:
    """A sandbox without a driver of its own, a visible GPU, and an error that sandboxes cause.

    It belongs to this layer, after the nodes: a faulty node explains the error better.
    """
    sandbox = m.surroundings.sandbox
    gvisor = sandbox == "gvisor"
    without_driver = sandbox and (gvisor or not m.kernel.loaded)
    if without_driver and m.broken and not m.no_gpu and m.code in (100, 304, 999):
        yield "C11", Match((f"the kernel is {sandbox}'s", m.answer), m.steps("C11 gvisor" if gvisor else "C11"))


# -- what connects or divides GPUs: NVSwitch, confidential computing, MPS, vGPU, MIG


@rules("driver", "S03", "S02", "S01")
def not_ready(m: Case) -> Found:
    """Error 802 of cuInit: certainly the fabric if a switch, the fabric's state or the stopped service shows it."""
    if not m.broken or m.code != 802 or m.surroundings.wsl:
        return
    if m.driver.nvml.confidential == "not-ready":
        yield "S03", Match((m.answer, "NVML reports that confidential computing is enabled and the GPUs are not ready"))
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
        yield "S02", Match((m.answer, versions), m.steps("S02", install=install))
        return
    switches = [d.address for d in m.hardware.pci or () if d.vendor == NVIDIA and is_listed(d.device, "nvswitches")]
    states = {gpu.fabric for gpu in m.driver.nvml.gpus} & {"not-started", "in-progress"}
    failed = [gpu for gpu in m.driver.nvml.gpus if gpu.fabric == "completed" and gpu.fabric_status]
    runs = "nv-fabricmanager" in m.kernel.daemons
    stopped = bool(manager) and not runs and not m.surroundings.container
    evidence = (
        m.answer,
        f"{len(switches)} NVSwitches are on the PCI bus" if switches else "",
        f"NVML reports that the fabric is {' and '.join(sorted(states))}" if states else "",
        *(f"registering {gpu.name} with it: {result('nvml', gpu.fabric_status).text}" for gpu in failed),
        "nv-fabricmanager is installed but not running" if stopped else "",
        "nv-fabricmanager is running" if runs else "",
    )
    start = "restart" if runs else "enable --now"
    fix = m.steps("S01", install=() if runs or manager else install, start=start, runs=runs)
    yield "S01", Match(evidence, fix, likely=not (switches or states or stopped))


@rules("driver", "S04", "S07", "M01", "M02", likely=("S07",))
def divided_card(m: Case) -> Found:
    """MPS, a vGPU or MIG, which share a card, give this process nothing."""
    nvml = m.driver.nvml
    if m.fails and m.code in range(805, 811):
        variable, directory = "CUDA_MPS_PIPE_DIRECTORY", m.kernel.mps_directory
        value, runs = m.env(variable), "nvidia-cuda-mps-control" in m.kernel.daemons
        without: Lines = fixes.unset(m, variable) if value is not None else ()
        if value is None and directory:
            without = (fixes.sudo(m, f"rm -r {directory}"),)
        evidence: Lines = (
            m.answer,
            f"{variable} is {value!r}" if value is not None else "",
            f"{directory} exists" if directory else "",
            f"nvidia-cuda-mps-control is {'running' if runs else 'not visible here'}",
            m.works_without_line,
        )
        how = "S04 container" if m.surroundings.container else "S04 runs" if runs else "S04"
        yield "S04", Match(evidence, m.steps(how, without=without))

    virtual = [gpu for gpu in nvml.gpus if gpu.virtualization == "vgpu"]
    if m.broken and virtual and m.code in (35, 100):
        yield "S07", Match((f"NVML reports that {virtual[0].name or 'the card'} is a vGPU", m.answer))

    whole = _all_mig(m) and not any(gpu.mig_devices for gpu in nvml.gpus)
    if m.broken and m.code == 100 and whole and not _closed_caps(m):
        evidence = ("MIG is enabled on every card, and NVML sees no MIG device", m.answer)
        yield "M01", Match(evidence, likely=bool(m.surroundings.container))

    names = [each.strip() for each in (m.env(CVD) or "").split(",") if each.strip().startswith("MIG-")]
    count = m.driver.cuda.count
    if m.works and len(names) > 1 and 0 < count < len(names):  # a warning, since one works
        evidence = (f"{CVD} names {len(names)} MIG instances", f"CUDA sees {count}", m.nvml_answer)
        fix = ("Start one process per instance:", *(f"$ {CVD}={name} python …" for name in names[:3]))
        yield "M02", Match(evidence, fix, severity="warning")


def _all_mig(m: Case) -> bool:
    gpus = m.driver.nvml.gpus
    return m.nvml_works and bool(gpus) and all(gpu.mig == "enabled" for gpu in gpus)


def _closed_caps(m: Case) -> list[Node]:
    """The nodes of MIG instances that cannot be opened, without 1 and 2, which only administrators may open."""
    caps = ((node, _CAP.fullmatch(node.path)) for node in m.nodes.found)
    return [node for node, cap in caps if cap and int(cap[1]) > 2 and node.error in ("EACCES", "EPERM")]


@rules("variables", "M03")
def mig_unreachable(m: Case) -> Found:
    """An old name with a driver from 470 on, or an instance's node that cannot be opened."""
    if not m.fails or m.code != 100:
        return
    value, closed = m.env(CVD) or "", _closed_caps(m)
    branch = numbers_of(m.driver.nvml.driver or m.kernel.version)[:1]
    if value.strip().startswith("MIG-GPU-") and branch >= (470,):
        evidence: Lines = (f"{CVD} is {value!r}, a format of drivers before 470", m.answer, m.works_without_line)
        yield "M03", Match(evidence, m.steps("M03 name"))
    elif closed and _all_mig(m):
        nodes = (f"opening {node.path} fails with {node.error}" for node in closed[:3])
        yield "M03", Match((*nodes, m.answer))


# -- the start itself


@rules("driver", "U10", "X04", "X02", "U12", likely=("U10",))
def no_start(m: Case) -> Found:
    """The driver is out of memory, or does not answer; or, as a note, CUDA works and NVML does not."""
    driver, limit = m.driver, m.platform.address_space
    starves = m.code == _OUT_OF_MEMORY and not m.works
    if m.surroundings.wsl == 2 and m.fails and m.code == _OUT_OF_MEMORY and limit is None and driver.nvml.count != 1:
        yield "U10", Match((m.answer, m.nvml_answer, m.works_without_line))

    if limit is not None and not m.torch_run.cuda_works:
        first_kernel = any("out of memory" in step.error for step in m.torch_run.steps) and limit < _ENOUGH
        if first_kernel or starves:
            answer = "torch is out of memory at its first kernel" if m.works else m.answer
            evidence: Lines = (f"the address space of this process is limited to {limit >> 20} MB (ulimit -v)", answer)
            yield "X04", Match(evidence, likely=limit >= _ENOUGH)

    cuda, nvml = driver.cuda.answer.state == "hung", driver.nvml.answer.state == "hung"
    if (cuda or nvml) and not m.works_without and not (cuda and m.torch_run.cuda_works):
        too = "" if not nvml else "nvidia-smi and NVML hang too" if cuda else "NVML hangs, and so does nvidia-smi"
        stuck = (f"{process} is stuck in the driver, in state D" for process in m.kernel.stuck[:4])
        evidence = (m.answer if cuda else "", too, *stuck)
        if cuda and (lib := m.libcuda) and lib.via.startswith("LD_"):
            fix = m.steps("X02 library", path=lib.path, drop=_drop_library(m, lib))
            yield "X02", Match((_library_line(lib), *evidence), fix)
        else:
            sleeps = "nvidia-persistenced" not in m.kernel.daemons and not m.surroundings.container
            yield "X02", Match(evidence, m.steps("X02", sleeps=sleeps), "warning" if m.works else "error")

    nvml_answer, code = driver.nvml.answer, driver.nvml.init
    failed = nvml_answer.state in ("not-loadable", "no-symbol", "crashed") or (nvml_answer.answered and code > 0)
    if driver.cuda.works and failed:
        meaning = result("nvml", code).text if nvml_answer.answered else ""
        lines = (m.nvml_answer, meaning, f"CUDA works and has {driver.cuda.count} devices")
        yield "U12", Match(lines, severity="note")


@rules("driver", "X08", symptom=True)
def unexplained(m: Case) -> Found:
    """CUDA fails although there is a GPU; reported only if no other rule explains it."""
    state, lib, kernel = m.driver.cuda.answer.state, m.libcuda, m.kernel
    if not m.fails or state in ("hung", "unasked") or m.withheld or (m.no_libcuda and m.surroundings.wsl):
        return
    # if the bus could not be read, any error but "no device" indicates a GPU
    nodes = bool(m.nodes.found) and not m.nodes_absent
    gpu = m.hardware.present or m.host_has_gpu or m.nvml_works or nodes or m.code not in (-1, 0, 100)
    crashes_torch = state == m.torch_run.answer.state == "crashed"
    if not crashes_torch and (m.no_gpu or not gpu):
        return
    meaning = result("cuda", m.code).text
    title = {
        "crashed": "= the CUDA driver's library crashes, for an unknown reason",
        "no-library": "= libcuda.so.1 is not found, for an unknown reason",
    }.get(state, "")
    crashed = lib if state == "crashed" else None
    needed = (m.nodes.at(CONTROL), m.nodes.at(UVM), *m.card_nodes)
    sound = m.nodes.found and m.card_nodes and all(node.exists and not node.error for node in needed)
    unread = kernel.log.reason if isinstance(kernel.log, Unknown) else ""
    evidence = (
        _library_line(crashed),
        m.answer,
        f"CUDA describes it as: {meaning}" if meaning else "",
        # what was examined and is in order
        f"the kernel driver is loaded ({kernel.version or 'version unknown'})" if kernel.loaded else "",
        "the device nodes exist and can be opened" if sound else "",
        "libcuda.so.1 has the kernel driver's version" if lib and lib.version and lib.version == kernel.version else "",
        m.nvml_answer if m.driver.nvml.answer.state != "unasked" else "",
        # what could not be examined and might have explained it
        f"the kernel log could not be read: {unread}" if unread not in ("", "not asked") else "",
        *(f"could not determine {probe}: {why}" for probe, why in list(m.problems.items())[:3]),
        m.works_without_line,
    )
    if crashed is not None and (crashed.via.startswith("LD_") or m.no_gpu):
        fix = m.steps("X08 library", drop=_drop_library(m, crashed))
    else:
        fix = m.steps("X08 wsl" if m.surroundings.wsl else "X08")
    yield "X08", Match(evidence, (title, *fix))
