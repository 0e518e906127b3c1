"""The start of the CUDA driver: what must be ready before, what prevents it, and what remains unexplained."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.case import CONTROL, CVD, UVM, Case
from transload.diagnose.rules.libraries import drop_library, library_line
from transload.diagnose.rules.rule import Lines, Match, page_only, rule
from transload.diagnose.tables import cu_result, is_nvswitch, numbers_of, nvml_result
from transload.machine import NVIDIA, Unknown

if TYPE_CHECKING:
    from transload.machine import Node

_OUT_OF_MEMORY = 2
_NOT_READY = 802
_MPS = range(805, 811)
_ENOUGH = 64 << 30  # seen on a card of 140 GB: with 16 GB of address space cuInit works and the first kernel does not
_CAP = re.compile(r"/dev/nvidia-caps/nvidia-cap(\d+)")
_UPDATE_WSL = ("$ wsl --update", "$ wsl --shutdown")


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


def _not_ready(m: Case) -> bool:
    return m.broken and m.code == _NOT_READY and not m.surroundings.wsl


@rule("S03", "driver", "the GPU is not set ready for confidential computing")
def confidential(m: Case) -> Match | None:
    """802, and confidential computing on and not ready."""
    if not _not_ready(m) or m.driver.nvml.confidential != "not-ready":
        return None
    ready = m.on_host("nvidia-smi conf-compute -srs 1")
    evidence = (m.answer, "NVML reports that confidential computing is enabled and the GPUs are not ready")
    return Match(evidence, ("After the attestation of the GPU, and after each start:", *ready))


@rule("S02", "driver", "the fabric manager and the driver have different versions")
def other_version(m: Case) -> Match | None:
    """802, and an installed fabric manager of another version than the module."""
    manager, version = m.kernel.fabric_manager, m.kernel.version
    if not _not_ready(m) or not manager or not version or manager == version or m.fires("S03"):
        return None
    versions = f"the fabric manager is version {manager}, the kernel driver {version}"
    restart = m.on_host("systemctl restart nvidia-fabricmanager")
    return Match((m.answer, versions), (*_install_manager(m), *restart))


def _install_manager(m: Case) -> Lines:
    version = m.kernel.version
    branch = numbers_of(version)[:1]
    if m.surroundings.container or not branch:
        install = f"Install nvidia-fabricmanager {version}, the driver's version.".replace("  ", " ")
        return (*fixes.on_host(m), install)
    name = f"nvidia-fabricmanager-{branch[0]}"
    return fixes.system_package(m, apt=f"'{name}={version}*'", dnf=f"nvidia-fabric-manager-{version}")


@rule("S01", "driver", "the NVSwitch fabric is down: the fabric manager is not running")
def fabric(m: Case) -> Match | None:
    """802 without another reason; certain if a switch, the fabric's state or the stopped service shows it."""
    if not _not_ready(m) or m.fires("S03", "S02"):
        return None
    switches = [d.address for d in m.hardware.pci or () if d.vendor == NVIDIA and is_nvswitch(d.device)]
    states = {gpu.fabric for gpu in m.driver.nvml.gpus} & {"not-started", "in-progress"}
    runs, installed = "nv-fabricmanager" in m.kernel.daemons, bool(m.kernel.fabric_manager)
    stopped = installed and not runs and not m.surroundings.container
    evidence = (
        m.answer,
        f"{len(switches)} NVSwitches are on the PCI bus" if switches else "",
        f"NVML reports that the fabric is {' and '.join(sorted(states))}" if states else "",
        "nv-fabricmanager is installed but not running" if stopped else "",
        "nv-fabricmanager is running" if runs else "",
    )
    fix = (
        *(() if runs or installed else _install_manager(m)),
        *m.on_host(f"systemctl {'restart' if runs else 'enable --now'} nvidia-fabricmanager"),
        "If it does not start, its log says why:",
        *m.on_host("journalctl -u nvidia-fabricmanager"),
        "In a cloud VM the service runs on the provider's host: report it to the provider.",
    )
    title = "the NVSwitch fabric is down, although the fabric manager is running" if runs else ""
    return Match(evidence, fix, title, likely=not (switches or states or stopped))


@rule("S04", "driver", "the MPS daemon does not serve this process")
def mps(m: Case) -> Match | None:
    """805 to 810."""
    if not m.fails or m.code not in _MPS:
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
        *m.on_host("nvidia-smi mig -lgip", "nvidia-smi mig -cgi 0 -C"),
        "Or disable MIG, while no program uses the cards:",
        *m.on_host("nvidia-smi -mig 0"),
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
        drop = (f"{lib.path} may not be the driver's library. Try without it:", *drop_library(m, lib))
        return Match((library_line(lib), *evidence), drop)
    persist = "nvidia-persistenced" not in m.kernel.daemons and not m.surroundings.container
    awake = ("If it is only slow, keep the driver loaded:", *m.on_host("systemctl enable --now nvidia-persistenced"))
    fix = (
        "Look for processes in state D; no signal can end them:",
        "$ ps -eo pid,stat,wchan:32,cmd | awk '$2 ~ /^D/'",
        "If there are any, or if it keeps hanging, only a reboot helps.",
        fixes.reboot(m),
        *(awake if persist else ()),
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
    state, lib = m.driver.cuda.answer.state, m.libcuda
    if not m.fails or state in ("hung", "unasked") or not _expected(m) or m.withheld:
        return None
    if m.no_libcuda and m.surroundings.wsl:
        return None
    told = cu_result(m.code).text
    title = {
        "crashed": "the CUDA driver's library crashes, for an unknown reason",
        "no-library": "libcuda.so.1 is not found, for an unknown reason",
    }.get(state, "")
    crashed = lib if state == "crashed" else None
    evidence = (
        library_line(crashed),
        m.answer,
        f"CUDA describes it as: {told}" if told else "",
        *_ruled_out(m),
        *_unknown(m),
        m.relief,
    )
    if crashed is not None and (crashed.via.startswith("LD_") or m.no_gpu):
        return Match(evidence, ("Try without it:", *drop_library(m, crashed)), title)
    if m.surroundings.wsl:
        return Match(evidence, ("Update the driver in Windows, then in PowerShell:", *_UPDATE_WSL), title)
    fix = (
        "Look at what the driver wrote to the kernel log:",
        *m.on_host("dmesg | grep -iE 'NVRM|nvidia|Xid' | tail -n 40"),
        "A reboot often helps:",
        fixes.reboot(m),
        "If the problem remains, report it with the output of: transload doctor --json",
    )
    return Match(evidence, fix, title)


def _expected(m: Case) -> bool:
    """Whether there is a GPU; if the bus could not be read, any error but "no device" indicates one."""
    if m.driver.cuda.answer.state == m.torch_run.answer.state == "crashed":
        return True  # whatever is loaded as the driver crashes torch too
    if m.no_gpu:
        return False
    nodes = bool(m.nodes.found) and not m.nodes_absent
    return bool(m.hardware.present or m.host_has_gpu or m.nvml_works or nodes or m.code not in (-1, 0, 100))


def _ruled_out(m: Case) -> Lines:
    """What was examined and is in order."""
    kernel, lib = m.kernel, m.libcuda
    nodes = (m.nodes.at(CONTROL), m.nodes.at(UVM), *m.card_nodes)
    sound = m.nodes.found and m.card_nodes and all(node.exists and not node.error for node in nodes)
    same = lib is not None and lib.version and lib.version == kernel.version
    return (
        f"the kernel driver is loaded ({kernel.version or 'version unknown'})" if kernel.loaded else "",
        "the device nodes exist and can be opened" if sound else "",
        "libcuda.so.1 has the kernel driver's version" if same else "",
        m.nvml_answer if m.driver.nvml.answer.state != "unasked" else "",
    )


def _unknown(m: Case) -> Lines:
    """What could not be examined and might have explained it."""
    unread = m.kernel.log.reason if isinstance(m.kernel.log, Unknown) else ""
    log = f"the kernel log could not be read: {unread}" if unread not in ("", "not asked") else ""
    return (log, *(f"could not determine {probe}: {why}" for probe, why in list(m.problems.items())[:3]))
