"""The CUDA driver: which libcuda.so.1 a process gets, and what prevents it from starting."""

from __future__ import annotations

import re
from shlex import quote
from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.case import CONTROL, CVD, UVM, Case, Lines, Match, page_only, rule, rules
from transload.diagnose.tables import cu_result, is_data_centre, is_nvswitch, numbers_of, nvml_result
from transload.machine import NVIDIA, Unknown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transload.machine import Library, Node

_VERSION_MISMATCH = 18  # of NVML
_NO_JIT = 221
_UPDATE_WSL = ("$ wsl --update", "$ wsl --shutdown")


def _folder(lib: Library) -> str:
    return lib.path.rpartition("/")[0]


def _library_line(lib: Library | None) -> str:
    """Which libcuda.so.1 a process gets, and how the loader finds it."""
    if lib is None:
        return ""
    leads = f" → {lib.target}" if lib.target and lib.target != lib.path else ""
    return f"libcuda.so.1 is {lib.path}{leads}, found through {lib.via or 'the loader'}"


def _drop_library(m: Case, lib: Library) -> Lines:
    """Prevent the loader from using a library."""
    folder = _folder(lib)
    systems = re.fullmatch(r"(?:/usr)?/lib(?:32|64|x32)?(?:/[\w-]+-linux-gnu\w*)?", folder)  # every program needs it
    if drop := fixes.drop_library(m, lib.path, lib.via):
        return drop
    if lib.via == "ld.so.preload":
        return (f"Remove {lib.path} from /etc/ld.so.preload, and keep the other lines (needs root).",)
    if lib.via == "ld.so.cache" and not systems:
        return (
            f"Remove {folder} from the loader's configuration; this finds it:",
            f"$ grep -rn {quote(folder)} /etc/ld.so.conf /etc/ld.so.conf.d",
            fixes.sudo(m, "ldconfig"),
        )
    return (fixes.sudo(m, f"rm {quote(lib.path)}"), fixes.sudo(m, "ldconfig"))


def _better(m: Case, lib: Library) -> str:
    """Where the driver's own library is, as evidence that dropping the other one leaves a good one."""
    others = (each for each in m.driver.libraries.cuda or () if each != lib and each.kind in ("driver", "wsl"))
    return next((f"the driver's own is {each.path}" for each in others if not each.problem), "")


def _search(m: Case, folder: str, file: str) -> Lines:
    """Let the loader look into a folder; for this shell only on NixOS, which has no file for it."""
    value = ":".join(filter(None, (folder, m.env("LD_LIBRARY_PATH"))))
    shell = fixes.set_variable(m, "LD_LIBRARY_PATH", value)
    if m.platform.distribution == "nixos":
        return shell
    write = fixes.write_line(m, folder, file=f"/etc/ld.so.conf.d/{file}")
    return (write, fixes.sudo(m, "ldconfig"), "Or, for this shell only:", *shell)


# -- the Windows Subsystem for Linux: the driver is Windows', and only its libraries are visible


@rule("U11", "libraries", "WSL 1 does not support GPUs")
def first_wsl(m: Case) -> Match | None:
    """WSL 1: a note, since whether Windows has a card cannot be seen."""
    if m.surroundings.wsl != 1 or m.works:
        return None
    fix = ("If Windows has an NVIDIA card, in PowerShell:", "$ wsl -l -v", "$ wsl --set-version DISTRIBUTION 2")
    return Match((f"the kernel is {m.platform.kernel}, which is WSL 1",), fix, severity="note")


@rule("U09", "libraries", "a Linux driver inside WSL hides the Windows driver")
def second_driver(m: Case) -> Match | None:
    """WSL 2, and the libcuda.so.1 in use is that of a Linux driver."""
    lib = m.libcuda
    if m.surroundings.wsl != 2 or not m.fails or lib is None or lib.kind != "driver":
        return None
    own = (f"the Windows driver's own is {each.path}" for each in m.driver.libraries.cuda or () if each.kind == "wsl")
    purge = {
        "apt": "apt purge '^(lib)?nvidia-(compute|cfg1|gl|driver|dkms|kernel|utils).*|^libcuda1$'",
        "dnf": "dnf remove '*nvidia*'",
    }
    command = purge.get(m.platform.package_manager, f"rm {lib.path}")
    fix: Lines = (fixes.sudo(m, command), fixes.sudo(m, "ldconfig"))
    if lib.via == "LD_LIBRARY_PATH":
        fix = fixes.drop_folder(m, "LD_LIBRARY_PATH", _folder(lib))
    return Match(
        (f"libcuda.so.1 → {lib.target or lib.path}, found through {lib.via}", next(own, ""), m.answer, m.relief), fix
    )


@rule("U08", "libraries", "WSL does not get the GPU from Windows")
def not_given(m: Case) -> Match | None:
    """WSL 2 outside a container: a library the loader does not find, no /dev/dxg, or a driver without a device."""
    if m.surroundings.wsl != 2 or m.surroundings.container or not m.broken or m.fires("U09"):
        return None
    own = next((lib for lib in m.driver.libraries.cuda or () if lib.kind == "wsl"), None)
    update = "In Windows, update the NVIDIA driver (https://www.nvidia.com/drivers), then in PowerShell:"
    steps = (update, *_UPDATE_WSL)
    if m.no_libcuda and own:
        there = f"{own.path} exists, but the loader does not search {_folder(own)}"
        return Match((there,), _search(m, _folder(own), "ld.wsl.conf"))
    if m.no_libcuda:  # only an error if torch was installed to use one
        meant = m.torch.first is not None and not m.torch.first.cpu_only
        title = "Windows provides no CUDA driver to WSL: it has no NVIDIA card, or no driver for it"
        evidence = ("there is no libcuda.so.1 in /usr/lib/wsl/lib",)
        fix = ("If Windows has an NVIDIA card:", *steps)
        return Match(evidence, fix, title, "error" if meant else "note", likely=meant)
    if not m.hardware.dxg:
        return Match(("/dev/dxg does not exist", m.answer), steps)
    if m.code == 100:
        return Match(("/dev/dxg exists", m.answer), steps, likely=True)
    return None


# -- the wrong libcuda.so.1


@rules(
    "libraries",
    {
        "U04": "libcuda.so.1 is the toolkit's stub",
        "U02": "a CUDA compatibility library does not match the driver",
        "U03": "forward compatibility does not work on this card",
        "U01": "the driver's libraries and its kernel module have different versions",
    },
)
def wrong_library(m: Case) -> Iterator[tuple[str, Match]]:
    """The driver refuses to start with the libcuda.so.1 that the process gets."""
    if not m.refused:
        return
    lib, kernel = m.libcuda, m.kernel.version
    kind, line = lib.kind if lib else "", _library_line(lib)
    versions = (
        f"it is version {lib.version}, but the kernel driver is {kernel}" if lib and lib.version and kernel else ""
    )
    drop = _drop_library(m, lib) if lib else ("Remove every stubs directory from LD_LIBRARY_PATH.",)
    better = _better(m, lib) if lib else ""
    if m.code == 34 or kind == "stub":
        yield "U04", Match((line, m.answer, better, m.relief if lib else ""), drop)
    if kind == "compat" and (m.code == 803 or (m.code != 804 and "LD_LIBRARY_PATH" in m.works_without)):
        yield "U02", Match((line, versions, m.answer, better, m.relief), drop)

    # NVML 18, libraries of another release, or 803 without a compat library
    told = m.driver.nvml.init == _VERSION_MISMATCH or m.code == 803
    # only the version explains the error: no variable does, or it is the one that names the directory
    telling = not m.works_without or "LD_LIBRARY_PATH" in m.works_without
    mismatch = told or (m.mismatched is not None and telling)
    if mismatch and not m.surroundings.wsl and kind not in ("compat", "stub"):
        used = m.mismatched or lib
        module, library = numbers_of(kernel), numbers_of(used.version) if used else ()
        if used is not None and used.via.startswith("LD_"):
            fix = _drop_library(m, used)
        elif m.surroundings.container:
            fix = ("Recreate the container, so that it gets the host's libraries:", *fixes.give_gpu(m))
        elif module and library and library < module:
            older = f"The libraries are older than the loaded module {kernel}: install its version of them."
            fix = (older, *fixes.install_driver(m, exactly=module[0]))
        else:
            fix = (fixes.reboot(m), "Or, while no program and no desktop uses the GPU:", *fixes.reload_module(m))
        yield "U01", Match((line, versions, m.answer, m.nvml_answer, m.relief), fix)
    elif m.code == 804:
        names = [*(gpu.name for gpu in m.driver.nvml.gpus), *(gpu.model for gpu in m.kernel.gpus)]
        plain = next((f"{name} is not a data-center card" for name in names if name and not is_data_centre(name)), "")
        update = ("Or update the host's driver, so that no compat library is needed:", *fixes.install_driver(m))
        if kind == "compat":
            yield "U03", Match((line, versions, m.answer, plain, m.relief), (*drop, *update))
        else:
            yield "U03", Match((m.answer, line, plain, m.relief), (fixes.reboot(m), *update), likely=True)


@rule("U13", "libraries", "libcuda.so.1 is not a usable library")
def unusable(m: Case) -> Match | None:
    """The library cannot be loaded or lacks its functions; or the driver works once its directory is not searched."""
    lib, answer = m.libcuda, m.driver.cuda.answer
    if not m.fails or m.no_gpu or m.withheld:
        return None
    if answer.state not in ("not-loadable", "no-symbol"):
        proven = "LD_LIBRARY_PATH" in m.works_without and lib is not None and lib.via == "LD_LIBRARY_PATH"
        if lib is None or not proven or m.fires("U04", "U02", "U03", "U01"):
            return None
        title = "another libcuda.so.1 is loaded instead of the driver's"
        return Match((_library_line(lib), m.answer, m.relief), _drop_library(m, lib), title)
    problem = f"{lib.path}: {lib.problem}" if lib and lib.problem else ""
    evidence = (_library_line(lib), problem, m.answer, m.relief)
    if lib is None:
        return Match(evidence, fixes.install_driver(m))
    if lib.kind == "driver" and lib.version and not lib.problem and not lib.via.startswith("LD_"):
        # the driver's own, and complete: something else is missing
        noexec = (
            "Its file system is mounted noexec, or a security policy (SELinux, AppArmor) forbids running code from it."
        )
        return Match(evidence, (noexec,) if "map segment" in answer.detail else _packages(m, again=True))
    left = _better(m, lib)
    own = m.kernel.loaded is True or m.surroundings.container
    inside = _packages(m, again=True) if own else fixes.install_driver(m)
    return Match((*evidence, left), (*_drop_library(m, lib), *(() if left else inside)))


# -- no libcuda.so.1


@rules(
    "libraries",
    {
        "U05": "libcuda.so.1 is installed where the loader does not look",
        "U06": "only part of the driver is installed",
    },
)
def not_found(m: Case) -> Iterator[tuple[str, Match]]:
    """The loader finds no libcuda.so.1; or CUDA works without libnvidia-ml.so.1, a note."""
    no_nvml = m.driver.nvml.answer.state == "no-library" and not m.driver.libraries.nvml
    if m.works and no_nvml and not (m.surroundings.wsl or m.hardware.tegra):
        missing = "libnvidia-ml.so.1 is not found: nvidia-smi and tools that use NVML do not work"
        title = "the driver's NVML library is not installed"
        yield "U06", Match((missing, "CUDA works"), _packages(m), title, "note")
    if not m.no_libcuda or not m.broken or m.no_gpu or m.surroundings.wsl or m.withheld:
        return
    for lib in m.driver.libraries.cuda or ():
        if lib.via == "disk" and lib.kind == "driver" and not lib.problem:
            there = f"{lib.path} exists, but the loader does not search {_folder(lib)}"
            # a torch of NixOS or conda may have that directory in its own RUNPATH
            yield "U05", Match((there, m.answer), _search(m, _folder(lib), "nvidia.conf"), likely=m.torch_not_run)
            return
    if m.kernel.loaded and (not m.surroundings.container or m.nodes.at(CONTROL).exists):
        title = "" if m.driver.libraries.nvml else "the driver's libraries are not installed"
        loaded = f"the kernel driver {m.kernel.version} is loaded"
        yield "U06", Match((loaded, "libcuda.so.1 is not found", m.nvml_answer), _packages(m), title)


def _packages(m: Case, *, again: bool = False) -> Lines:
    """Install the driver's libraries, or do so again where files of an installed package are missing."""
    if m.surroundings.container:
        return ("The container runtime provides the libraries:", *fixes.give_gpu(m))
    number = next(iter(numbers_of(m.kernel.version)), "BRANCH")
    debian = m.platform.distribution == "debian"
    names = "libcuda1 libnvidia-ml1" if debian else f"libnvidia-compute-{number} nvidia-utils-{number}"
    packages = fixes.system_package(
        m,
        apt=f"--reinstall {names}" if again else names,
        dnf="xorg-x11-drv-nvidia-cuda",
        pacman="nvidia-utils",
        zypper="nvidia-compute-utils-G06",
    )
    return (*packages, f"Install the version of the loaded module, {m.kernel.version}." if m.kernel.version else "")


@rule("U07", "libraries", "the driver's PTX compiler is missing")
def no_compiler(m: Case) -> Match | None:
    """There is no compiler: a note, or an error if something failed without it."""
    errors = " ".join(step.error for step in m.torch_run.steps)
    failed = "PTX JIT compiler library not found" in errors or m.code == _NO_JIT
    gone = m.driver.libraries.ptx_compiler == () and m.driver.cuda.works and not m.hardware.tegra
    if not failed and (not gone or m.surroundings.wsl):
        return None
    nowhere = "libnvidia-ptxjitcompiler.so.1 is not found" if gone else ""
    died = "CUDA returned 221: PTX JIT compiler library not found" if failed else ""
    return Match((nowhere, died), _packages(m), severity="error" if failed else "note")


# -- the start of the CUDA driver

_OUT_OF_MEMORY = 2
_ENOUGH = 64 << 30  # seen on a card of 140 GB: with 16 GB of address space cuInit works and the first kernel does not
_CAP = re.compile(r"/dev/nvidia-caps/nvidia-cap(\d+)")


@rule("C11", "driver", "the sandbox does not pass the GPU through", likely=True)
def sandboxed(m: Case) -> Match | None:
    """A sandbox without a driver of its own, a visible GPU, and an error that sandboxes cause.

    It belongs to this layer, after the nodes: if one of them is at fault, the sandbox is not.
    """
    sandbox = m.surroundings.sandbox
    if not sandbox or (m.kernel.loaded and sandbox != "gvisor"):
        return None
    if not m.broken or m.no_gpu or m.code not in (100, 304, 999):
        return None
    fix: Lines = ("Use a runtime class that passes the GPU on, or run without the sandbox.",)
    if sandbox == "gvisor":
        fix = (
            "Start it with GPU support, and a driver version from the list that this prints on the host:",
            "$ runsc nvproxy list-supported-drivers",
            "$ docker run --runtime=runsc --gpus all …   # runsc configured with --nvproxy",
        )
    return Match((f"the kernel is {sandbox}'s", m.answer), fix)


# -- what connects or divides GPUs: NVSwitch, confidential computing, MPS, vGPU, MIG


@rules(
    "driver",
    {
        "S03": "the GPU is not set ready for confidential computing",
        "S02": "the fabric manager and the driver have different versions",
        "S01": "the NVSwitch fabric is down: the fabric manager is not running",
    },
)
def not_ready(m: Case) -> Iterator[tuple[str, Match]]:
    """CuInit 802. For the fabric it is certain if a switch, the fabric's state or the stopped service shows it."""
    if not m.broken or m.code != 802 or m.surroundings.wsl:
        return
    if m.driver.nvml.confidential == "not-ready":
        ready = fixes.on_host(m, "nvidia-smi conf-compute -srs 1")
        evidence: Lines = (m.answer, "NVML reports that confidential computing is enabled and the GPUs are not ready")
        yield "S03", Match(evidence, ("After the attestation of the GPU, and after each start:", *ready))
        return
    manager, version = m.kernel.fabric_manager, m.kernel.version
    branch = numbers_of(version)[:1]
    if m.surroundings.container or not branch:
        by_hand = f"Install nvidia-fabricmanager {version}, the driver's version.".replace("  ", " ")
        install = (*fixes.on_host(m), by_hand)
    else:
        apt = f"'nvidia-fabricmanager-{branch[0]}={version}*'"
        install = fixes.system_package(m, apt=apt, dnf=f"nvidia-fabric-manager-{version}")
    if manager and version and manager != version:
        versions = f"the fabric manager is version {manager}, the kernel driver {version}"
        restart = fixes.on_host(m, "systemctl restart nvidia-fabricmanager")
        yield "S02", Match((m.answer, versions), (*install, *restart))
        return
    switches = [d.address for d in m.hardware.pci or () if d.vendor == NVIDIA and is_nvswitch(d.device)]
    states = {gpu.fabric for gpu in m.driver.nvml.gpus} & {"not-started", "in-progress"}
    runs = "nv-fabricmanager" in m.kernel.daemons
    stopped = bool(manager) and not runs and not m.surroundings.container
    evidence = (
        m.answer,
        f"{len(switches)} NVSwitches are on the PCI bus" if switches else "",
        f"NVML reports that the fabric is {' and '.join(sorted(states))}" if states else "",
        "nv-fabricmanager is installed but not running" if stopped else "",
        "nv-fabricmanager is running" if runs else "",
    )
    fix = (
        *(() if runs or manager else install),
        *fixes.on_host(m, f"systemctl {'restart' if runs else 'enable --now'} nvidia-fabricmanager"),
        "If it does not start, its log says why:",
        *fixes.on_host(m, "journalctl -u nvidia-fabricmanager"),
        "In a cloud VM the service runs on the provider's host: report it to the provider.",
    )
    title = "the NVSwitch fabric is down, although the fabric manager is running" if runs else ""
    yield "S01", Match(evidence, fix, title, likely=not (switches or states or stopped))


@rule("S04", "driver", "the MPS daemon does not serve this process")
def mps(m: Case) -> Match | None:
    """805 to 810."""
    if not m.fails or m.code not in range(805, 811):
        return None
    variable, directory = "CUDA_MPS_PIPE_DIRECTORY", m.kernel.mps_directory
    value = m.env(variable)
    runs = "nvidia-cuda-mps-control" in m.kernel.daemons
    evidence = (
        m.answer,
        f"{variable} is {value!r}" if value is not None else "",
        f"{directory} exists" if directory else "",
        "nvidia-cuda-mps-control is running" if runs else "nvidia-cuda-mps-control is not visible here",
        m.relief,
    )
    without: Lines = ()
    if value is not None:
        without = ("To work without MPS:", *fixes.unset(m, variable))
    elif directory:
        without = ("To work without MPS:", fixes.sudo(m, f"rm -r {directory}"))
    if m.surroundings.container:
        share = "$ docker run --gpus all --ipc=host -v /tmp/nvidia-mps:/tmp/nvidia-mps …"
        return Match(
            evidence, (*without, "To work with the host's MPS, start the container with its directory:", share)
        )
    start = "$ nvidia-cuda-mps-control -d"
    again = ("To restart MPS:", "$ echo quit | nvidia-cuda-mps-control", start)
    first = ("To start MPS, as the user who runs the program:", start)
    return Match(evidence, (*without, *(again if runs else first)))


@rule("S07", "driver", "the guest's driver does not match the vGPU", likely=True)
def vgpu(m: Case) -> Match | None:
    """A virtual card, and 35 or 100."""
    virtual = [gpu for gpu in m.driver.nvml.gpus if gpu.virtualization == "vgpu"]
    if not m.broken or not virtual or m.code not in (35, 100):
        return None
    fix = (
        "Install the vGPU guest driver of the host's branch; the host's administrator has it.",
        "Ask whether the profile supports CUDA: profiles of the A and B series do not.",
    )
    return Match((f"NVML reports that {virtual[0].name or 'the card'} is a vGPU", m.answer), fix)


def _all_mig(m: Case) -> bool:
    """Whether every card is in MIG mode."""
    gpus = m.driver.nvml.gpus
    return m.nvml_works and bool(gpus) and all(gpu.mig == "enabled" for gpu in gpus)


def _closed_caps(m: Case) -> list[Node]:
    """The nodes of MIG instances that cannot be opened. 1 and 2 are for administration, and closed to users."""
    caps = ((node, _CAP.fullmatch(node.path)) for node in m.nodes.found)
    return [node for node, cap in caps if cap and int(cap[1]) > 2 and node.error in ("EACCES", "EPERM")]


@rule("M01", "driver", "MIG is enabled but no instance exists")
def no_mig_instance(m: Case) -> Match | None:
    """MIG on every card, no MIG device, and no CUDA device."""
    whole = _all_mig(m) and not any(gpu.mig_devices for gpu in m.driver.nvml.gpus)
    if not m.broken or m.code != 100 or not whole or _closed_caps(m):
        return None
    contained = bool(m.surroundings.container)
    fix = (
        "Create an instance; first list the profiles:",
        *fixes.on_host(m, "nvidia-smi mig -lgip", "nvidia-smi mig -cgi 0 -C"),
        "Or disable MIG, while no program uses the cards:",
        *fixes.on_host(m, "nvidia-smi -mig 0"),
        "Or give the container an instance that already exists." if contained else "",
    )
    evidence = ("MIG is enabled on every card, and NVML sees no MIG device", m.answer)
    return Match(evidence, fix, likely=contained)


@rule("M03", "variables", "the MIG instance is not accessible")
def mig_unreachable(m: Case) -> Match | None:
    """An old name with a driver from 470 on, or an instance's node that cannot be opened."""
    if not m.fails or m.code != 100:
        return None
    value = m.env(CVD) or ""
    branch = numbers_of(m.driver.nvml.driver or m.kernel.version)[:1]
    if value.strip().startswith("MIG-GPU-") and branch >= (470,):
        evidence = (f"{CVD} is {value!r}, a format of drivers before 470", m.answer, m.relief)
        return Match(evidence, ("Use the name that starts with MIG- and has no slash, from:", "$ nvidia-smi -L"))
    closed = _closed_caps(m)
    if not closed or not _all_mig(m):
        return None
    nodes = (f"opening {node.path} fails with {node.error}" for node in closed[:3])
    fix = (
        "Give the container the instance, and with it its nodes:",
        "$ docker run --gpus '\"device=MIG-UUID\"' …",
        "Outside a container, the nodes under /dev/nvidia-caps must be readable by this user:",
        "$ ls -l /dev/nvidia-caps",
    )
    return Match((*nodes, m.answer), fix)


@rule("M02", "driver", "a process can use only one MIG instance")
def one_instance(m: Case) -> Match | None:
    """Several MIG names in the variable and fewer devices: a warning, since one works."""
    names = [each.strip() for each in (m.env(CVD) or "").split(",") if each.strip().startswith("MIG-")]
    count = m.driver.cuda.count
    if len(names) < 2 or not m.works or not 0 < count < len(names):
        return None
    evidence = (f"{CVD} names {len(names)} MIG instances", f"CUDA sees {count}", m.nvml_answer)
    each = (f"$ {CVD}={name} python …" for name in names[:3])
    return Match(evidence, ("Start one process per instance:", *each), severity="warning")


# -- the start itself


@rule("U10", "driver", "several GPUs under WSL prevent CUDA from starting", likely=True)
def several_under_wsl(m: Case) -> Match | None:
    """WSL 2, answer 2, no limit on the address space, and not a single GPU."""
    if m.surroundings.wsl != 2 or not m.fails or m.code != _OUT_OF_MEMORY:
        return None
    if m.platform.address_space is not None or m.driver.nvml.count == 1:
        return None
    one = fixes.set_variable(m, CVD, "0")
    update = "And update the driver in Windows, then in PowerShell:"
    return Match((m.answer, m.nvml_answer, m.relief), ("Try it with one GPU:", *one, update, *_UPDATE_WSL))


@rule("X04", "driver", "the process has a limit on its address space")
def address_space(m: Case) -> Match | None:
    """A limit, and a driver or a first kernel that is out of memory."""
    limit = m.platform.address_space
    if limit is None or m.torch_run.cuda_works:
        return None
    starved = any("out of memory" in step.error for step in m.torch_run.steps) and limit < _ENOUGH
    if not starved and (m.code != _OUT_OF_MEMORY or m.works):
        return None
    answer = "torch is out of memory at its first kernel" if m.works else m.answer
    hard = "If that is refused, an administrator set it: in limits.conf, the unit's LimitAS= or the scheduler."
    evidence = (f"the address space of this process is limited to {limit >> 20} MB (ulimit -v)", answer)
    return Match(evidence, ("$ ulimit -v unlimited", hard), likely=limit >= _ENOUGH)


@rule("X02", "driver", "the driver hangs")
def hangs(m: Case) -> Match | None:
    """The driver or NVML gave no answer in time: an error, or a warning where CUDA works and NVML hangs."""
    cuda, nvml = m.driver.cuda.answer.state == "hung", m.driver.nvml.answer.state == "hung"
    if not (cuda or nvml) or m.works_without or (cuda and m.torch_run.cuda_works):
        return None
    too = "" if not nvml else "nvidia-smi and NVML hang too" if cuda else "NVML hangs, and so does nvidia-smi"
    stuck = (f"{process} is stuck in the driver, in state D" for process in m.kernel.stuck[:4])
    evidence = (m.answer if cuda else "", too, *stuck)
    lib = m.libcuda
    if cuda and lib is not None and lib.via.startswith("LD_"):
        drop = (f"{lib.path} may not be the driver's library. Try without it:", *_drop_library(m, lib))
        return Match((_library_line(lib), *evidence), drop)
    awake: Lines = ()
    if "nvidia-persistenced" not in m.kernel.daemons and not m.surroundings.container:
        keep = fixes.sudo(m, "systemctl enable --now nvidia-persistenced")
        awake = ("If it is only slow, keep the driver loaded:", keep)
    fix = (
        "Look for processes in state D; no signal can end them:",
        "$ ps -eo pid,stat,wchan:32,cmd | awk '$2 ~ /^D/'",
        "If there are any, or if it keeps hanging, only a reboot helps.",
        fixes.reboot(m),
        *awake,
    )
    return Match(evidence, fix, severity="warning" if m.works else "error")


page_only("X03", "driver", "a second attempt to start CUDA hangs")


@rule("U12", "driver", "NVML does not work, but CUDA does")
def nvml_only(m: Case) -> Match | None:
    """CUDA works, and NVML returns an error or cannot be loaded: a note."""
    nvml = m.driver.nvml
    answered = nvml.answer.answered and nvml.init > 0
    if not m.driver.cuda.works or not (answered or nvml.answer.state in ("not-loadable", "no-symbol", "crashed")):
        return None
    meaning = nvml_result(nvml.init).text if answered else ""
    evidence = (m.nvml_answer, meaning, f"CUDA works and has {m.driver.cuda.count} devices")
    fix = ("CUDA and torch work. Update the program that uses NVML, or set CUDA_VISIBLE_DEVICES for it.",)
    return Match(evidence, fix, severity="note")


@rule("X08", "driver", "the CUDA driver does not start, for an unknown reason", symptom=True)
def unexplained(m: Case) -> Match | None:
    """CUDA fails although there is a GPU; reported only if no other rule explains it."""
    state, lib, kernel = m.driver.cuda.answer.state, m.libcuda, m.kernel
    if not m.fails or state in ("hung", "unasked") or m.withheld or (m.no_libcuda and m.surroundings.wsl):
        return None
    # where the bus could not be read, any error but "no device" indicates a GPU
    nodes = bool(m.nodes.found) and not m.nodes_absent
    gpu = m.hardware.present or m.host_has_gpu or m.nvml_works or nodes or m.code not in (-1, 0, 100)
    crashes_torch = state == m.torch_run.answer.state == "crashed"
    if not crashes_torch and (m.no_gpu or not gpu):
        return None
    told = cu_result(m.code).text
    title = {
        "crashed": "the CUDA driver's library crashes, for an unknown reason",
        "no-library": "libcuda.so.1 is not found, for an unknown reason",
    }.get(state, "")
    crashed = lib if state == "crashed" else None
    needed = (m.nodes.at(CONTROL), m.nodes.at(UVM), *m.card_nodes)
    sound = m.nodes.found and m.card_nodes and all(node.exists and not node.error for node in needed)
    unread = kernel.log.reason if isinstance(kernel.log, Unknown) else ""
    evidence = (
        _library_line(crashed),
        m.answer,
        f"CUDA describes it as: {told}" if told else "",
        # what was examined and is in order
        f"the kernel driver is loaded ({kernel.version or 'version unknown'})" if kernel.loaded else "",
        "the device nodes exist and can be opened" if sound else "",
        "libcuda.so.1 has the kernel driver's version" if lib and lib.version and lib.version == kernel.version else "",
        m.nvml_answer if m.driver.nvml.answer.state != "unasked" else "",
        # what could not be examined and might have explained it
        f"the kernel log could not be read: {unread}" if unread not in ("", "not asked") else "",
        *(f"could not determine {probe}: {why}" for probe, why in list(m.problems.items())[:3]),
        m.relief,
    )
    if crashed is not None and (crashed.via.startswith("LD_") or m.no_gpu):
        return Match(evidence, ("Try without it:", *_drop_library(m, crashed)), title)
    if m.surroundings.wsl:
        return Match(evidence, ("Update the driver in Windows, then in PowerShell:", *_UPDATE_WSL), title)
    fix = (
        "Look at what the driver wrote to the kernel log:",
        *fixes.on_host(m, "dmesg | grep -iE 'NVRM|nvidia|Xid' | tail -n 40"),
        "A reboot often helps:",
        fixes.reboot(m),
        "If the problem remains, report it with the output of: transload doctor --json",
    )
    return Match(evidence, fix, title)
