"""What joins or divides GPUs and must be ready before CUDA starts: NVSwitch, confidential computing, MPS, vGPU, MIG."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.rules.row import Seen, Table
from transload.diagnose.rules.signs import (
    answer_line,
    broken,
    code,
    fails,
    host_lines,
    nvml_line,
    nvml_ok,
    relief_line,
    works,
)
from transload.diagnose.tables import is_nvswitch, numbers_of
from transload.machine import NVIDIA

if TYPE_CHECKING:
    from transload.machine import Machine, Node

__all__ = ["TABLE"]

TABLE = Table("driver")

Lines = tuple[str, ...]

_NOT_READY = 802
_MPS = range(805, 811)
_TRUST = "https://github.com/NVIDIA/nvtrust/issues"
_CAP = re.compile(r"/dev/nvidia-caps/nvidia-cap(\d+)")


def _waits(machine: Machine) -> bool:
    return broken(machine) and code(machine) == _NOT_READY and not machine.surroundings.wsl


@TABLE.row(
    "S03",
    "the GPU was not released for confidential computing",
    about="""In a confidential virtual machine the GPU accepts no work until it was attested and set ready. Until
then cuInit answers 802, "system not yet initialized", on a machine with a single GPU and no NVSwitch.

It is told by NVML's ready state of confidential computing.""",
    fix="After attestation: sudo nvidia-smi conf-compute -srs 1. It must be done after each start.",
    sources=(f"{_TRUST}/37", f"{_TRUST}/39", f"{_TRUST}/56", f"{_TRUST}/87"),
)
def confidential(machine: Machine) -> Seen | None:
    """802, and confidential computing on and not ready."""
    if not _waits(machine) or machine.driver.nvml.confidential != "not-ready":
        return None
    fix = (
        "After the attestation of the GPU, and after each start:",
        *host_lines(machine, "nvidia-smi conf-compute -srs 1"),
    )
    return Seen((answer_line(machine), "NVML says: confidential computing is on, the GPUs are not ready"), fix)


def _service(machine: Machine, verb: str) -> Lines:
    return host_lines(machine, f"systemctl {verb} nvidia-fabricmanager")


@TABLE.row(
    "S02",
    "the fabric manager is of another version than the driver",
    about="""The fabric manager must be of exactly the driver's version. After an update of one of the two it stops
with a message in its log, the NVSwitch fabric stays down, and cuInit answers 802, "system not yet initialized".

It is told by the version of nv-fabricmanager against that of the loaded module.""",
    fix="Install the fabric manager in the driver's exact version, hold both, and restart it (or reboot).",
    sources=("https://github.com/hiyouga/LLaMA-Factory/issues/8968",),
)
def other_version(machine: Machine) -> Seen | None:
    """802, and an installed fabric manager of another version than the module."""
    kernel = machine.kernel
    differs = kernel.fabric_manager and kernel.version and kernel.fabric_manager != kernel.version
    if not _waits(machine) or not differs or confidential(machine):
        return None
    versions = f"the fabric manager is {kernel.fabric_manager}, the kernel driver {kernel.version}"
    return Seen((answer_line(machine), versions), (*_manager(machine), *_service(machine, "restart")))


def _manager(machine: Machine) -> Lines:
    version = machine.kernel.version
    branch = numbers_of(version)[:1]
    if machine.surroundings.container or not branch:
        return (
            *fixes.on_host(machine),
            f"Install nvidia-fabricmanager {version}, the driver's version.".replace("  ", " "),
        )
    name = f"nvidia-fabricmanager-{branch[0]}"
    return fixes.system_package(machine, apt=f"'{name}={version}*'", dnf=f"nvidia-fabric-manager-{version}")


@TABLE.row(
    "S01",
    "the NVSwitch fabric is not up: the fabric manager does not run",
    about="""On HGX and DGX machines (A100, H100, H200, B200 with NVSwitch) CUDA waits for the fabric that joins the
GPUs, which a service sets up: nvidia-fabricmanager. Without it cuInit answers 802, "Error 802: system not yet
initialized", while nvidia-smi looks healthy. A virtual machine with one GPU of such a board depends on the service
of its host.

It is told by the answer 802, NVSwitches on the PCI bus, NVML's fabric state, and the service, which is not running.""",
    fix="""Install nvidia-fabricmanager in the driver's exact version, and sudo systemctl enable --now
nvidia-fabricmanager. On NVLink 5 (B200) nvlsm most likely belongs to it. In a cloud's virtual machine it is the
provider's to do: report it.""",
    avoid="Reinstalling torch or the driver's libraries: both are fine.",
    sources=(
        "https://github.com/pytorch/pytorch/issues/35710",
        "https://github.com/pytorch/pytorch/issues/81549",
        "https://github.com/huggingface/huggingface_hub/issues/4128",
        "https://github.com/jax-ml/jax/issues/34113",
    ),
)
def fabric(machine: Machine) -> Seen | None:
    """802 for none of the other reasons; sure where a switch, the fabric's state or the stopped service shows it."""
    if not _waits(machine) or confidential(machine) or other_version(machine):
        return None
    kernel = machine.kernel
    switches = [d.address for d in machine.hardware.pci or () if d.vendor == NVIDIA and is_nvswitch(d.device)]
    states = {gpu.fabric for gpu in machine.driver.nvml.gpus} & {"not-started", "in-progress"}
    runs = "nv-fabricmanager" in kernel.daemons
    stopped = bool(kernel.fabric_manager) and not runs and not machine.surroundings.container
    facts = (
        f"{len(switches)} NVSwitches are on the PCI bus" if switches else "",
        f"NVML says the fabric is {' and '.join(sorted(states))}" if states else "",
        "nv-fabricmanager is installed and does not run" if stopped else "",
        "nv-fabricmanager runs" if runs else "",
    )
    likely = not (switches or states or stopped)
    title = "the NVSwitch fabric is not up, although the fabric manager runs" if runs else ""
    return Seen((answer_line(machine), *filter(None, facts)), _raise(machine, runs=runs), title, likely=likely)


def _raise(machine: Machine, *, runs: bool) -> Lines:
    log = ("If it does not come up, its log says why:", *host_lines(machine, "journalctl -u nvidia-fabricmanager"))
    cloud = "In a cloud's virtual machine the service runs on the provider's host: report it there."
    if runs:
        return (*_service(machine, "restart"), *log, cloud)
    install = () if machine.kernel.fabric_manager else _manager(machine)
    return (*install, *_service(machine, "enable --now"), *log, cloud)


@TABLE.row(
    "S04",
    "the MPS daemon does not serve this process",
    about="""With CUDA's Multi-Process Service every program connects to a daemon through a directory,
CUDA_MPS_PIPE_DIRECTORY or /tmp/nvidia-mps. cuInit answers 805 where the daemon cannot be reached (it died, or
belongs to another user, or runs outside the container), 807 while it is not ready, 808 and 809 where it is full,
806 and 810 where the connection broke.

It is told by those answers alone; they come only from MPS.""",
    fix="""Use no MPS: unset CUDA_MPS_PIPE_DIRECTORY and remove a left-over directory. Or start the daemon, as the
same user: nvidia-cuda-mps-control -d.""",
    sources=("https://github.com/NVIDIA/nvidia-container-toolkit/issues/277",),
)
def mps(machine: Machine) -> Seen | None:
    """805 to 810."""
    if not fails(machine) or code(machine) not in _MPS:
        return None
    kernel, variable = machine.kernel, "CUDA_MPS_PIPE_DIRECTORY"
    value = machine.variables.get(variable)
    runs = "nvidia-cuda-mps-control" in kernel.daemons
    facts = (
        f"{variable} is {value!r}" if value is not None else "",
        f"{kernel.mps_directory} is there" if kernel.mps_directory else "",
        "nvidia-cuda-mps-control runs" if runs else "no nvidia-cuda-mps-control is to be seen here",
    )
    evidence = (answer_line(machine), *filter(None, facts), *relief_line(machine))
    return Seen(evidence, (*_without_mps(machine, value), *_with_mps(machine, runs=runs)))


def _without_mps(machine: Machine, value: str | None) -> Lines:
    directory = machine.kernel.mps_directory
    unset = fixes.unset(machine, "CUDA_MPS_PIPE_DIRECTORY") if value is not None else ()
    remove = (fixes.sudo(machine, f"rm -r {directory}"),) if directory and value is None else ()
    return ("To work without MPS:", *unset, *remove) if unset or remove else ()


def _with_mps(machine: Machine, *, runs: bool) -> Lines:
    if machine.surroundings.container:
        return (
            "To work with the host's MPS, start the container with its directory:",
            "$ docker run --gpus all --ipc=host -v /tmp/nvidia-mps:/tmp/nvidia-mps …",
        )
    if runs:
        return ("To start MPS anew:", "$ echo quit | nvidia-cuda-mps-control", "$ nvidia-cuda-mps-control -d")
    return ("To start MPS, as the user who runs the program:", "$ nvidia-cuda-mps-control -d")


@TABLE.row(
    "S07",
    "the guest's driver does not fit the vGPU",
    about="""A virtual GPU needs the guest driver of NVIDIA's vGPU software, of a branch not newer than the host's;
the ordinary driver, or a newer branch, finds no device (100) or answers 35. Some vGPU profiles (A and B series)
have no CUDA at all.

It is likely where NVML says that the card is virtual and CUDA finds none.""",
    fix="Install the guest driver that the host's administrator provides, and ask for a profile with CUDA.",
    likely=True,
    sources=("https://github.com/DualCoder/vgpu_unlock/issues/51",),
)
def vgpu(machine: Machine) -> Seen | None:
    """A virtual card, and 35 or 100."""
    virtual = [gpu for gpu in machine.driver.nvml.gpus if gpu.virtualization == "vgpu"]
    if not broken(machine) or not virtual or code(machine) not in (35, 100):
        return None
    fix = (
        "Install the vGPU guest driver of the host's branch; the host's administrator has it.",
        "Ask whether the profile has CUDA: those of the A and B series have not.",
    )
    return Seen((f"NVML says that {virtual[0].name or 'the card'} is a vGPU", answer_line(machine)), fix)


def _divided(machine: Machine) -> bool:
    """Whether every card is in MIG mode."""
    gpus = machine.driver.nvml.gpus
    return nvml_ok(machine) and bool(gpus) and all(gpu.mig == "enabled" for gpu in gpus)


def _closed_caps(machine: Machine) -> tuple[Node, ...]:
    """The nodes of MIG instances that cannot be opened. 1 and 2 are for administration, and closed to users."""
    caps = ((node, _CAP.fullmatch(node.path)) for node in machine.nodes.found)
    return tuple(node for node, cap in caps if cap and int(cap[1]) > 2 and node.error in ("EACCES", "EPERM"))


@TABLE.row(
    "M01",
    "MIG is on and no instance was made",
    about="""A card in MIG mode gives CUDA nothing until it is divided into instances: torch says "No CUDA GPUs are
available", nvidia-smi shows "MIG M. Enabled" and "No MIG devices found".

It is told by NVML: MIG enabled on every card, and no MIG device.""",
    fix="Make an instance (sudo nvidia-smi mig -cgi 0 -C is the whole card; -lgip lists profiles), or MIG off: -mig 0.",
    sources=("https://github.com/NVIDIA/mig-parted/issues/6", "https://github.com/rapidsai/dask-cuda/issues/583"),
)
def undivided(machine: Machine) -> Seen | None:
    """MIG on every card, no MIG device, and no CUDA device."""
    whole = _divided(machine) and not any(gpu.mig_devices for gpu in machine.driver.nvml.gpus)
    if not broken(machine) or code(machine) != 100 or not whole or _closed_caps(machine):
        return None
    contained = bool(machine.surroundings.container)
    given = ("Or give the container an instance that is there already.",) if contained else ()
    fix = (
        "Divide the card; the list of profiles first:",
        *host_lines(machine, "nvidia-smi mig -lgip", "nvidia-smi mig -cgi 0 -C"),
        "Or switch MIG off on every card, with no program on any:",
        *host_lines(machine, "nvidia-smi -mig 0"),
        *given,
    )
    evidence = ("MIG is enabled on every card, and NVML sees no MIG device", answer_line(machine))
    return Seen(evidence, fix, likely=contained)


@TABLE.row(
    "M03",
    "the MIG instance cannot be reached",
    about="""CUDA_VISIBLE_DEVICES names a MIG instance in the form of drivers before 470 (MIG-GPU-…/1/0), which
newer ones do not take; or the instance's node /dev/nvidia-caps/nvidia-capN cannot be opened, often because a
container was not given it. torch says "No CUDA GPUs are available".

It is told by the variable, or by opening the nodes.""",
    fix="Name it as nvidia-smi -L does, MIG-<uuid>; give containers instances by NVIDIA_VISIBLE_DEVICES or CDI.",
    layer="variables",
    sources=("https://docs.nvidia.com/datacenter/tesla/mig-user-guide/",),
)
def unreachable(machine: Machine) -> Seen | None:
    """An old name under a driver from 470 on, or a closed node of an instance where every card is divided."""
    if not fails(machine) or code(machine) != 100:
        return None
    value = machine.variables.get("CUDA_VISIBLE_DEVICES") or ""
    branch = numbers_of(machine.driver.nvml.driver or machine.kernel.version)[:1]
    if value.strip().startswith("MIG-GPU-") and branch >= (470,):
        evidence = (f"CUDA_VISIBLE_DEVICES is {value!r}, a name of drivers before 470", answer_line(machine))
        names = "Take the name that starts with MIG- and has no slash, from:"
        return Seen((*evidence, *relief_line(machine)), (names, "$ nvidia-smi -L"))
    closed = _closed_caps(machine)
    if not closed or not _divided(machine):
        return None
    nodes = tuple(f"opening {node.path} fails with {node.error}" for node in closed[:3])
    fix = (
        "Give the container the instance, and with it its nodes:",
        "$ docker run --gpus '\"device=MIG-UUID\"' …",
        "Outside a container, the nodes under /dev/nvidia-caps must be readable for this user:",
        "$ ls -l /dev/nvidia-caps",
    )
    return Seen((*nodes, answer_line(machine)), fix)


@TABLE.row(
    "M02",
    "only one MIG instance can be used at a time",
    about="""A process sees one MIG instance, whatever CUDA_VISIBLE_DEVICES lists: further ones are silently left
out. Programs that count on several die with "device >= 0 && device < num_gpus INTERNAL ASSERT FAILED" or "invalid
device ordinal".

It is told by the variable, which names several, and CUDA, which has one.""",
    fix="Start one process per instance, each with one MIG-<uuid> in CUDA_VISIBLE_DEVICES.",
    sources=("https://github.com/pytorch/pytorch/issues/130181", "https://github.com/vllm-project/vllm/issues/6582"),
)
def one_instance(machine: Machine) -> Seen | None:
    """Several MIG names in the variable and fewer devices: a warning, since one works."""
    value = machine.variables.get("CUDA_VISIBLE_DEVICES") or ""
    names = [each for each in value.split(",") if each.strip().startswith("MIG-")]
    count = machine.driver.cuda.count
    if len(names) < 2 or not works(machine) or not 0 < count < len(names):
        return None
    evidence = (f"CUDA_VISIBLE_DEVICES names {len(names)} MIG instances", f"CUDA has {count}", nvml_line(machine))
    fix = (
        "Start one process per instance:",
        *(f"$ CUDA_VISIBLE_DEVICES={name.strip()} python …" for name in names[:3]),
    )
    return Seen(evidence, fix, severity="warning")
