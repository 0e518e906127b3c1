"""What surrounds the process and keeps the GPU from it: containers, after the schedulers and services of ``jobs``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.rules import jobs
from transload.diagnose.rules.jobs import sandboxed, slurm, without_nodes
from transload.diagnose.rules.row import Seen, Table
from transload.diagnose.rules.signs import (
    CONTROL,
    answer_line,
    broken,
    card_line,
    card_nodes,
    host_gpu,
    host_lines,
    mismatched,
    nodes_absent,
    nvml_line,
    unmet,
)

if TYPE_CHECKING:
    from transload.machine import Machine

__all__ = ["TABLE"]

TABLE = Table("surroundings")
TABLE.rows.extend(jobs.TABLE.rows)

Lines = tuple[str, ...]

_APPTAINER = ("apptainer", "singularity")
_SYSTEM_CONTAINERS = ("lxc", "nspawn")  # with an init and packages of their own: what is inside is theirs to update
_TOOLKIT = "https://github.com/NVIDIA/nvidia-container-toolkit/issues"
_DOCKER = "https://github.com/NVIDIA/nvidia-docker/issues"


def _inside(machine: Machine) -> str:
    around = machine.surroundings
    shown = f", concluded from: {'; '.join(around.evidence[:2])}" if around.evidence else ""
    return f"the process runs in a container ({around.container}){shown}"


def _host(machine: Machine) -> Lines:
    loaded = machine.kernel.loaded
    driver = (f"the host's kernel driver {machine.kernel.version} is loaded".replace("  ", " "),) if loaded else ()
    return (*card_line(machine), *driver)


@TABLE.row(
    "C08",
    "Apptainer was started without --nv",
    about="""Apptainer and Singularity show a container the host's /dev, but bring the driver's libraries in only
with --nv. Without it libcuda.so.1 is nowhere: "Found no NVIDIA driver on your system". With --nv on a host whose
driver is not found they say "Could not find any nv files on this host!".

It is told by the container's kind and the lack of /.singularity.d/libs/libcuda.so.1.""",
    fix="apptainer exec --nv image.sif …, or APPTAINER_NV=1 in the environment.",
    sources=(
        "https://github.com/apptainer/singularity/issues/5966",
        "https://github.com/sylabs/singularity/issues/2805",
    ),
)
def apptainer(machine: Machine) -> Seen | None:
    """An Apptainer container on a machine with a card, and no libcuda.so.1 in it."""
    none = machine.driver.cuda.answer.state == "no-library" and not machine.driver.libraries.cuda
    if machine.surroundings.container not in _APPTAINER or not none or not broken(machine) or not host_gpu(machine):
        return None
    return Seen(
        (_inside(machine), *_host(machine), answer_line(machine)), fixes.give_gpu(machine), severity=unmet(machine)
    )


@TABLE.row(
    "C05",
    "the pod asked for no GPU",
    about="""In Kubernetes a container gets a GPU only if it asks for one; without, neither nodes nor libraries are
there: "Found no NVIDIA driver on your system". Where torch is a build without CUDA, that is as it should be.
NVIDIA_VISIBLE_DEVICES tells nothing here: with CDI it is "void" in containers that have a GPU, too.

It is told by KUBERNETES_SERVICE_HOST or the service account, and a /dev without NVIDIA's nodes.""",
    fix="""Add resources: {limits: {nvidia.com/gpu: 1}} to the container, and runtimeClassName: nvidia where the
default runtime is not NVIDIA's. "kubectl describe node" shows whether the node offers any.""",
    sources=(
        "https://github.com/NVIDIA/k8s-device-plugin/issues/1376",
        "https://github.com/NVIDIA/k8s-device-plugin/issues/826",
    ),
)
def pod(machine: Machine) -> Seen | None:
    """A pod without nodes on a machine with a card."""
    if not machine.surroundings.kubernetes or not without_nodes(machine) or not host_gpu(machine):
        return None
    evidence = ("this is a Kubernetes pod", "no /dev/nvidia* is there", *_host(machine))
    return Seen(evidence, fixes.give_gpu(machine), severity=unmet(machine))


@TABLE.row(
    "C04",
    "NVIDIA_VISIBLE_DEVICES keeps the GPUs out of the container",
    about="""NVIDIA's container runtime looks at NVIDIA_VISIBLE_DEVICES when the container starts: empty gives it
neither libraries nor nodes, "none" the libraries only. An image, a compose file or an env file that sets it so wins
over good intentions. "void" does the same in the older mode of the runtime; with CDI it stands in containers that
have their GPU, so that it is only likely to be the reason.

It is told by the value and the lack of a card's node; changing it inside a running container has no effect.""",
    fix="Set it when the container is started: -e NVIDIA_VISIBLE_DEVICES=all (or indices, or UUIDs), or pass --gpus.",
    sources=("https://github.com/dstackai/dstack/issues/4011",),
)
def void(machine: Machine) -> Seen | None:
    """A container without a card's node whose NVIDIA_VISIBLE_DEVICES is empty, void or none."""
    visible = machine.variables.get("NVIDIA_VISIBLE_DEVICES")
    kept = visible is not None and visible.strip().lower() in ("", "void", "none")
    around = machine.surroundings
    if not around.container or around.kubernetes or not kept or not broken(machine) or not host_gpu(machine):
        return None
    if card_nodes(machine) or not machine.nodes.found:
        return None
    fix = ("Start the container with another value, or without that one:", *fixes.give_gpu(machine))
    origins = machine.variables.origins.get("NVIDIA_VISIBLE_DEVICES", ())
    where = (f"It is set in: {', '.join(origins)}",) if origins else ("Look for it in the image's ENV and env files.",)
    evidence = (_inside(machine), f"NVIDIA_VISIBLE_DEVICES is {visible!r}", "no /dev/nvidia0 or other card is there")
    likely = visible is not None and visible.strip().lower() == "void"
    return Seen((*evidence, *_host(machine)), (*fix, *where), severity=unmet(machine), likely=likely)


@TABLE.row(
    "C03",
    "the container was given the GPU without its compute libraries",
    about="""NVIDIA_DRIVER_CAPABILITIES chooses which libraries of the driver go into the container. Without compute
there is no libcuda.so.1, while nvidia-smi (utility) works: "ImportError: libcuda.so.1: cannot open shared object
file", or torch's "Found no NVIDIA driver on your system".

It is told by that variable, the nodes, which are there, and libcuda.so.1, which is not.""",
    fix="""Start it with -e NVIDIA_DRIVER_CAPABILITIES=compute,utility; in compose capabilities: [gpu, compute,
utility].""",
    sources=("https://github.com/mudler/LocalAI/issues/11973",),
)
def no_compute(machine: Machine) -> Seen | None:
    """Nodes or NVML are there, libcuda.so.1 is not, and the variable names neither compute nor all."""
    value = machine.variables.get("NVIDIA_DRIVER_CAPABILITIES")
    named = {each.strip().lower() for each in (value or "").split(",")}
    none = machine.driver.cuda.answer.state == "no-library" and not machine.driver.libraries.cuda
    here = machine.nodes.at(CONTROL).exists or machine.driver.nvml.answer.answered
    if not machine.surroundings.container or not value or named & {"compute", "all"} or not none or not here:
        return None
    if not broken(machine):
        return None
    fix = ("Start the container with -e NVIDIA_DRIVER_CAPABILITIES=compute,utility.", *fixes.give_gpu(machine))
    evidence = (f"NVIDIA_DRIVER_CAPABILITIES is {value!r}", answer_line(machine), nvml_line(machine))
    return Seen((_inside(machine), *evidence), fix)


def _versions(machine: Machine) -> Lines:
    """The evidence of a library that is not of the host's release; empty where it is, or where CUDA works."""
    lib = mismatched(machine)
    if lib is None or not machine.surroundings.container or not broken(machine) or lib.via.startswith("LD_"):
        return ()
    return (
        f"{lib.target or lib.path} is of {lib.version}, the host's kernel driver of {machine.kernel.version}",
        answer_line(machine),
        nvml_line(machine),
    )


@TABLE.row(
    "C10",
    "the container's driver libraries are not of the host's version",
    about="""An LXC or Proxmox container shares the host's kernel, and so its kernel driver, but has libraries of
its own. They must be of exactly the host's version: otherwise nvidia-smi says "Driver/library version mismatch" and
torch 803 or 999. It comes after every driver update on the host.

It is told by the version in the library's file name against /proc/driver/nvidia/version.""",
    fix="""Inside, install the host's version without its kernel module (the .run file with --no-kernel-module), and
allow the majors 195 and nvidia-uvm's in the container's configuration.""",
    sources=("https://github.com/canonical/lxd/issues/5433", f"{_TOOLKIT}/290"),
)
def lxc_version(machine: Machine) -> Seen | None:
    """A system container, and a library of another release than the kernel driver."""
    seen = _versions(machine)
    if machine.surroundings.container not in _SYSTEM_CONTAINERS or not seen:
        return None
    version = machine.kernel.version
    fix = (
        f"Inside the container, install the libraries of {version}, the host's version, without the kernel module:",
        fixes.sudo(machine, f"sh NVIDIA-Linux-{machine.platform.machine}-{version}.run --no-kernel-module"),
        "It comes from https://www.nvidia.com/drivers; do the same after each driver update of the host.",
    )
    return Seen((_inside(machine), *seen), fix)


@TABLE.row(
    "C07",
    "the container has the libraries of an older host driver",
    about="""The driver's libraries come into a container from the host when it starts, by the NVIDIA runtime or a
CDI file. After a driver update on the host, a container that still runs, a CDI file that was not made anew, or an
image into which they were copied holds the old ones, and they do not work with the new kernel driver:
"Driver/library version mismatch", 803.

It is told by the version in the library's file name against /proc/driver/nvidia/version.""",
    fix="""Start the container anew; with CDI first sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml. Take
copies of libcuda out of the image.""",
    sources=("https://github.com/containers/podman/issues/26233", "https://github.com/containers/podman/issues/23935"),
)
def stale(machine: Machine) -> Seen | None:
    """A container with libraries of another release; on a host, a note that its CDI file is of one."""
    around, version = machine.surroundings, machine.kernel.version
    regenerate = host_lines(machine, "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml")
    if not around.container and around.cdi and version and version not in around.cdi:
        evidence = (f"CDI files name driver {', '.join(around.cdi)}", f"the loaded kernel driver is {version}")
        title = "containers will get the libraries of another driver version"
        return Seen(evidence, regenerate, title, "note")
    seen = _versions(machine)
    if not seen or around.container in (*_SYSTEM_CONTAINERS, *_APPTAINER):
        return None
    again = "Then start the container anew."
    copy = "If it stays so, libcuda was copied into the image: remove it there and build the image anew."
    return Seen((_inside(machine), *seen), (*regenerate, again, copy))


@TABLE.row(
    "C01",
    "the container was started without a GPU",
    about="""A container sees the host's GPU only if it is started with it. Without, there is no /dev/nvidia* and no
libcuda.so.1: torch says "Found no NVIDIA driver on your system", and nvidia-smi is not found. The host's PCI bus
and /sys/module/nvidia can still be seen from inside, which is how it is told apart from a machine without a GPU.""",
    fix="""docker run --gpus all …; podman run --device nvidia.com/gpu=all …; in compose a
deploy.resources.reservations.devices entry with capabilities: [gpu]. The host needs the driver and the
nvidia-container-toolkit.""",
    avoid="Installing a driver inside the container: the driver is the host's.",
    sources=("https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/docker-specialized.html",),
)
def no_devices(machine: Machine) -> Seen | None:
    """A container without nodes on a machine with a card; under WSL, where the card cannot be seen, a note."""
    around = machine.surroundings
    if not around.container or any(check(machine) for check in (sandboxed, slurm, apptainer, pod, void)):
        return None
    if around.wsl == 2 and not machine.hardware.dxg and broken(machine):
        return Seen((_inside(machine), "no /dev/dxg is there"), fixes.give_gpu(machine), severity="note", likely=True)
    jetson = bool(machine.hardware.tegra) and machine.driver.cuda.answer.state == "no-library" and broken(machine)
    if not jetson and not (without_nodes(machine) and host_gpu(machine)):
        return None
    nodes = (
        "no /dev/nvidia* is there" if nodes_absent(machine) else "no card's node is there, and the rest is forbidden"
    )
    visible = machine.variables.get("NVIDIA_VISIBLE_DEVICES")
    said = (f"NVIDIA_VISIBLE_DEVICES is {visible!r}, and no NVIDIA runtime acted on it",) if visible else ()
    evidence = (_inside(machine), nodes, *said, *_host(machine))
    return Seen(evidence, fixes.give_gpu(machine), severity=unmet(machine), likely=jetson)


@TABLE.row(
    "C02",
    "containers on this host cannot be given the GPU",
    about="""docker run --gpus needs NVIDIA's container toolkit on the host. Without it: "docker: Error response
from daemon: could not select device driver "" with capabilities: [[gpu]]". A Docker installed as a snap has its own
file system and often misses the host's driver.

It concerns containers only: CUDA on the host itself does not need it.""",
    fix="""Install nvidia-container-toolkit, then: sudo nvidia-ctk runtime configure --runtime=docker && sudo
systemctl restart docker. Replace a snap of Docker by the distribution's or Docker's own package.""",
    sources=(f"{_DOCKER}/1034", f"{_DOCKER}/1243", f"{_TOOLKIT}/871", f"{_TOOLKIT}/854"),
)
def no_toolkit(machine: Machine) -> Seen | None:
    """A host with a card and Docker, without the toolkit or with Docker as a snap: a note."""
    around = machine.surroundings
    if around.container or around.wsl or not around.docker or not host_gpu(machine):
        return None
    snap = around.docker == "snap"
    if not snap and around.container_toolkit is not False:
        return None
    evidence = "Docker is installed as a snap" if snap else "Docker is installed, nvidia-ctk is not"
    fix = (
        "For containers with a GPU, from NVIDIA's repository (docs.nvidia.com/datacenter/cloud-native):",
        *fixes.system_package(machine, **dict.fromkeys(("apt", "dnf", "zypper", "pacman"), "nvidia-container-toolkit")),
        fixes.sudo(machine, "nvidia-ctk runtime configure --runtime=docker"),
        fixes.sudo(machine, "systemctl restart docker"),
    )
    return Seen((evidence,), fix, severity="note")


TABLE.page(
    "C06",
    "Podman does not find the CDI device",
    about="""Podman gives GPUs by CDI files in /etc/cdi or /var/run/cdi. Where none names the device, or it cannot
be read, the container does not start: "Error: setting up CDI devices: unresolvable CDI devices nvidia.com/gpu=all".
It is seen on the host, before there is a container to look into.""",
    fix="""sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml, again after each driver update; then podman
run --device nvidia.com/gpu=all …. "nvidia-ctk cdi list" shows the names.""",
    sources=(f"{_TOOLKIT}/146", "https://github.com/NixOS/nixpkgs/issues/420638"),
)


@TABLE.row(
    "N02",
    "the image's torch was chosen while no GPU was in sight",
    about="""While an image is built no GPU can be seen. Installers that look for one (uv --torch-backend=auto,
conda's __cuda, scripts that call nvidia-smi) then choose the CPU build, and the container has it for ever, whatever
it is started with.

It is likely where torch in a container is a CPU build, the GPU works there, and uv or conda installed it.""",
    fix="""Name the build in the Dockerfile: pip install torch --index-url https://download.pytorch.org/whl/cu126,
or uv with --torch-backend=cu126, or CONDA_OVERRIDE_CUDA=12.6 for conda.""",
    likely=True,
    sources=("https://github.com/obss/sahi/issues/1446",),
)
def built_blind(machine: Machine) -> Seen | None:
    """A CPU build that uv or conda chose, in a container where CUDA works: a note beside the CPU build itself."""
    first = machine.torch.first
    if not machine.surroundings.container or first is None or not first.cpu_only or not machine.driver.cuda.works:
        return None
    if first.installer not in ("uv", "conda") and not first.conda_build:
        return None
    evidence = (f"torch {first.version} was installed by {first.installer or 'conda'}", "CUDA works in this container")
    fix = ("Name the CUDA build in the Dockerfile: what is installed inside a running container is lost with it.",)
    return Seen(evidence, fix, severity="note")
