"""Containers, schedulers, services and virtual machines around the process."""

from __future__ import annotations

import re
from collections.abc import Iterator

from transload.diagnose.host import Host
from transload.diagnose.probes.mounts import Mount, mount_of, mounts
from transload.machine import Surroundings, Unknown

__all__ = ["executable", "service_of", "surroundings"]

_BINARIES = ("/usr/bin", "/usr/local/bin", "/bin", "/run/current-system/sw/bin", "/usr/local/nvidia/toolkit")

# What managers of containers call themselves in the variable "container" → what we call them.
_NAMES = {"systemd-nspawn": "nspawn", "lxc-libvirt": "lxc", "oci": "container", "buildah": "podman"}
_NO_CONTAINERS = frozenset({"", "wsl", "flatpak", "snap", "host"})

# Paths of cgroups and of layers of the root file system, as the engines on the other side name them.
_CGROUPS = (
    r"(?P<docker>/docker[-/][0-9a-f]{12})|(?P<podman>/libpod(?:-conmon)?-[0-9a-f]{12})|(?P<lxc>/lxc/|/lxc\.payload)"
    r"|(?P<containerd>cri-containerd[-:]|/kubepods)|(?P<container>/crio-[0-9a-f]{12})|(?P<nspawn>/systemd-nspawn@)"
)
_LAYERS = (
    r"(?P<docker>/docker/overlay2?/|/docker/rootfs/)|(?P<containerd>io\.containerd\.snapshotter|/containerd/)"
    r"|(?P<podman>/containers/storage/)"
)

# Kaggle comes first: its images are made of Colab's.
_NOTEBOOKS = (
    ("KAGGLE_KERNEL_RUN_TYPE", "kaggle"),
    ("KAGGLE_URL_BASE", "kaggle"),
    ("COLAB_RELEASE_TAG", "colab"),
    ("COLAB_GPU", "colab"),
    ("RUNPOD_POD_ID", "runpod"),
    ("VAST_CONTAINERLABEL", "vast"),
    ("MODAL_TASK_ID", "modal"),
    ("LIGHTNING_CLOUD_PROJECT_ID", "lightning"),
    ("DATABRICKS_RUNTIME_VERSION", "databricks"),
    ("SAGEMAKER_INTERNAL_IMAGE_URI", "sagemaker"),
    ("SM_CURRENT_HOST", "sagemaker"),
    ("PAPERSPACE_FQDN", "paperspace"),
    ("CODESPACES", "codespaces"),
)

_BARE = """
null zero full random urandom tty console ptmx pts shm mqueue hugepages log fd stdin stdout stderr core
termination-log initctl char block .lxc .lxd-mounts vsock
"""
_HARMLESS = frozenset(_BARE.split())
"""What every private /dev holds: nothing behind these is a device that was built in."""

_GVISOR = "Sun Jan 10 15:06:54 PST 2016"  # its made-up kernel was built then, every release of it
_CDI = re.compile(r"libcuda\.so\.(\d+\.\d+(?:\.\d+)?)")


def surroundings(host: Host) -> Surroundings:
    """What lies around the process, and what that was concluded from."""
    kubernetes, around = _kubernetes(host), mounts(host)
    container, wsl = _container(host, around, kubernetes=bool(kubernetes)), _wsl(host)
    service, notebook, sandbox = service_of(host), _notebook(host), _sandbox(host)
    slurm = next((name for name in ("SLURM_JOB_ID", "SLURM_JOBID") if host.environ.get(name)), "")
    evidence = (container[1], kubernetes, slurm and f"{slurm} is set", wsl[1], notebook[1], sandbox[1])
    return Surroundings(
        container=container[0],
        kubernetes=bool(kubernetes),
        slurm=bool(slurm),
        wsl=wsl[0],
        service=service,
        notebook=notebook[0],
        sandbox=sandbox[0],
        selinux={"1": "enforcing", "0": "permissive"}.get(host.line("/sys/fs/selinux/enforce"), ""),
        private_dev=_private_dev(host, around),
        cdi=_cdi(host),
        container_toolkit=_container_toolkit(host),
        docker=_docker(host),
        evidence=tuple(line for line in (*evidence, service and f"/proc/self/cgroup names {service}") if line),
    )


def executable(host: Host, name: str) -> str:
    """Where a program of that name lies, in the folders programs lie in; empty where nowhere."""
    return next((path for folder in _BINARIES if host.exists(path := f"{folder}/{name}")), "")


def service_of(host: Host) -> str:
    """The systemd unit this process belongs to, where it is a service of the system.

    What runs under ``user@1000.service`` is somebody's session: terminals of a desktop are services there.
    """
    for line in (host.text("/proc/self/cgroup", 1 << 14) or "").split("\n"):
        _, controllers, path = line.split(":", 2) if line.count(":") > 1 else ("", "-", "")
        steps = path.split("/")
        if controllers not in ("", "name=systemd") or any(step.startswith("user@") for step in steps):
            continue
        if unit := next((step for step in steps if step.endswith(".service")), ""):
            return unit
    return ""


def _container(host: Host, around: tuple[Mount, ...], *, kubernetes: bool) -> tuple[str, str]:
    """The kind of container and the evidence for it: the first, from the surest to the weakest."""
    for kind, why in (*_by_files(host), *_by_name(host), *_by_paths(host, around)):
        if kind == "podman" and kubernetes:
            return "container", why  # CRI-O keeps its images where Podman does
        return kind, why
    return ("container", "Kubernetes runs containers") if kubernetes else ("", "")


def _by_files(host: Host) -> Iterator[tuple[str, str]]:
    for name, kind in (("APPTAINER_CONTAINER", "apptainer"), ("SINGULARITY_CONTAINER", "singularity")):
        if host.environ.get(name):
            yield kind, f"{name} is set"
    for path, kind in (("/.singularity.d", "apptainer"), ("/run/.containerenv", "podman"), ("/.dockerenv", "docker")):
        if host.exists(path):
            yield kind, f"{path} is there"


def _by_name(host: Host) -> Iterator[tuple[str, str]]:
    """What the manager itself has said, to us or to the first process of the container."""
    first = re.search(r"(?:^|\0)container=([^\0]*)", host.text("/proc/1/environ", 1 << 16) or "")
    told = (
        (host.environ.get("container", ""), "the variable container is {}"),
        (host.line("/run/systemd/container"), "/run/systemd/container says {}"),
        (first[1] if first else "", "process 1 was told that its container is {}"),
    )
    for name, why in told:
        if name not in _NO_CONTAINERS:
            yield _NAMES.get(name, name), why.format(name)


def _by_paths(host: Host, around: tuple[Mount, ...]) -> Iterator[tuple[str, str]]:
    for path in ("/proc/self/cgroup", "/proc/1/cgroup"):
        if found := re.search(_CGROUPS, host.text(path, 1 << 14) or ""):
            yield found.lastgroup or "", f"{path} names one of {found.lastgroup}"
    root = mount_of(around, "/") or Mount("/", "")
    if root.kind in ("overlay", "fuse-overlayfs", "aufs") and (found := re.search(_LAYERS, root.detail)):
        yield found.lastgroup or "", f"/ is a layer of {found.lastgroup}"


def _kubernetes(host: Host) -> str:
    if host.environ.get("KUBERNETES_SERVICE_HOST"):
        return "KUBERNETES_SERVICE_HOST is set"
    secrets = "/var/run/secrets/kubernetes.io"
    return f"{secrets} is there" if host.folder(secrets) else ""


def _wsl(host: Host) -> tuple[int, str]:
    words = f"{host.uname[1]} {host.line('/proc/version')}"
    if re.search(r"microsoft-standard|wsl2", words, re.IGNORECASE):
        return 2, "the kernel is that of WSL 2"
    if re.search(r"-Microsoft\b", words):
        return 1, "the kernel is that of WSL 1"
    if host.environ.get("WSL_DISTRO_NAME") and host.exists("/dev/dxg"):
        return 2, "WSL_DISTRO_NAME is set and /dev/dxg is there"  # with a kernel of one's own
    return 0, ""


def _notebook(host: Host) -> tuple[str, str]:
    found = ((kind, f"{name} is set") for name, kind in _NOTEBOOKS if name in host.environ)
    return next(found, ("", ""))


def _sandbox(host: Host) -> tuple[str, str]:
    version, line = host.line("/proc/version"), host.line("/proc/cmdline").split()
    if _GVISOR in version or "gvisor" in version.lower():
        return "gvisor", "/proc/version is gVisor's"
    if any("kata-containers" in word or word.startswith("agent.log=") for word in line):
        return "kata", "the kernel was started by Kata"
    if {"reboot=k", "panic=1"} <= set(line) and not host.folder("/sys/class/dmi/id"):
        return "firecracker", "the kernel was started as Firecracker does, on a board without a name"
    return "", ""


def _private_dev(host: Host, around: tuple[Mount, ...]) -> bool:
    mount = mount_of(around, "/dev/null")
    if mount is None or mount.point != "/dev" or mount.kind != "tmpfs":
        return False
    return not set(host.names("/dev") or ("unknown",)) - _HARMLESS


def _cdi(host: Host) -> tuple[str, ...]:
    versions: set[str] = set()
    for folder in ("/etc/cdi", "/var/run/cdi", "/run/cdi"):
        for path in (*host.paths(folder, end=".yaml"), *host.paths(folder, end=".json")):
            versions.update(_CDI.findall(host.text(path) or ""))
    return tuple(sorted(versions))


def _container_toolkit(host: Host) -> bool | Unknown:
    if isinstance(programs := host.names("/usr/bin"), Unknown):
        return programs
    return any(executable(host, name) for name in ("nvidia-ctk", "nvidia-container-runtime", "nvidia-container-cli"))


def _docker(host: Host) -> str:
    for path in ("/usr/bin/docker", "/usr/local/bin/docker"):
        begin = host.data(host.target(path), 256)
        if begin and b"podman" not in begin and not host.link(path).endswith("/snap"):  # podman-docker is a script
            return "installed"
    return "snap" if host.exists("/snap/bin/docker") else ""
