"""What surrounds the process and withholds the GPU: a scheduler, a service, a container."""

from __future__ import annotations

from transload.diagnose import fixes
from transload.diagnose.case import CONTROL, CVD, UVM, Case
from transload.diagnose.rules.rule import Lines, Match, page_only, rule

_APPTAINER = ("apptainer", "singularity")
_SYSTEM_CONTAINERS = ("lxc", "nspawn")  # with their own init and packages: their libraries must be updated inside


def _without_nodes(m: Case) -> bool:
    """Whether this process has no node of any card. A forbidden /dev/nvidiactl alone was created by the library."""
    made = m.nodes.at(CONTROL).error == "EPERM" and not (m.card_nodes or m.nodes.at(UVM).exists)
    return m.broken and (m.nodes_absent or made)


def _forbidden(m: Case) -> str:
    """The node that a device cgroup forbids, if there is one."""
    nodes = (m.nodes.at(CONTROL), *m.card_nodes)
    return next((node.path for node in nodes if node.exists and node.error == "EPERM"), "")


def _inside(m: Case) -> str:
    around = m.surroundings
    shown = f", detected by: {'; '.join(around.evidence[:2])}" if around.evidence else ""
    return f"the process runs in a container ({around.container}){shown}"


def _host(m: Case) -> Lines:
    driver = f"the host's kernel driver {m.kernel.version} is loaded".replace("  ", " ")
    return (*m.card_lines, driver if m.kernel.loaded else "")


@rule("C09", "surroundings", "Slurm did not give this job a GPU")
def slurm(m: Case) -> Match | None:
    """A job whose nodes are forbidden, or that was given no GPU and has an empty CUDA_VISIBLE_DEVICES or no nodes."""
    if not m.surroundings.slurm or not m.fails or m.no_gpu:
        return None
    visible = m.env(CVD)
    hidden = visible is not None and visible.strip() in ("", "-1", "NoDevFiles")
    forbidden = _forbidden(m)
    bare = _without_nodes(m) and not m.surroundings.container
    if not ((forbidden and m.broken) or (not m.slurm_granted and (hidden or bare))):
        return None
    evidence = (
        f"this is Slurm job {m.env('SLURM_JOB_ID') or '?'}",
        "" if m.slurm_granted else "SLURM_JOB_GPUS and SLURM_GPUS_ON_NODE are not set",
        f"opening {forbidden} fails with EPERM: the job's device cgroup forbids it" if forbidden else "",
        f"{CVD} is {visible!r}" if hidden else "",
        m.answer,
    )
    return Match(evidence, fixes.give_slurm(m), severity=m.no_gpu_severity, likely=not forbidden)


@rule("D05", "surroundings", "the systemd service is not allowed to use the GPU")
def service(m: Case) -> Match | None:
    """A service with a private /dev without the nodes, or with nodes that its cgroup forbids."""
    around = m.surroundings
    if not around.service or around.container or around.slurm or not m.broken or m.no_gpu:
        return None
    dxg = around.wsl == 2 and not m.nodes.at("/dev/dxg").exists
    private = around.private_dev and (m.nodes_absent or dxg)
    forbidden = _forbidden(m)
    if not (private or forbidden):
        return None
    why = "its /dev contains no hardware devices (PrivateDevices=yes)" if private else f"opening {forbidden}: EPERM"
    names = ("dxg",) if around.wsl else ("nvidiactl", "nvidia0", "nvidia-uvm", "nvidia-uvm-tools")
    fix = (
        fixes.sudo(m, f"systemctl edit {around.service}"),
        "| [Service]",
        "| PrivateDevices=no",
        *(f"| DeviceAllow=/dev/{name} rw" for name in names),
        fixes.sudo(m, f"systemctl restart {around.service}"),
    )
    return Match((f"the process runs in the unit {around.service}", why, m.answer), fix)


@rule("C08", "surroundings", "Apptainer was started without --nv")
def apptainer(m: Case) -> Match | None:
    """An Apptainer container on a machine with a card, and no libcuda.so.1 in it."""
    none = m.no_libcuda and not m.driver.libraries.cuda
    if m.surroundings.container not in _APPTAINER or not none or not m.broken or not m.host_has_gpu:
        return None
    return Match((_inside(m), *_host(m), m.answer), fixes.give_gpu(m), severity=m.no_gpu_severity)


@rule("C05", "surroundings", "the pod did not request a GPU")
def pod(m: Case) -> Match | None:
    """A pod without nodes on a machine with a card."""
    if not m.surroundings.kubernetes or not _without_nodes(m) or not m.host_has_gpu:
        return None
    evidence = ("this is a Kubernetes pod", "there is no /dev/nvidia*", *_host(m))
    return Match(evidence, fixes.give_gpu(m), severity=m.no_gpu_severity)


@rule("C04", "surroundings", "NVIDIA_VISIBLE_DEVICES hides the GPUs from the container")
def hidden_by_variable(m: Case) -> Match | None:
    """A container without a card's node whose NVIDIA_VISIBLE_DEVICES is empty, void or none."""
    visible, around = m.env("NVIDIA_VISIBLE_DEVICES"), m.surroundings
    value = "all" if visible is None else visible.strip().lower()
    if not around.container or around.kubernetes or value not in ("", "void", "none"):
        return None
    if not m.broken or not m.host_has_gpu or m.card_nodes or not m.nodes.found:
        return None
    origins = m.variables.origins.get("NVIDIA_VISIBLE_DEVICES", ())
    where = f"It is set in: {', '.join(origins)}" if origins else "Look for it in the image's ENV and env files."
    fix = ("Start the container with another value, or without the variable:", *fixes.give_gpu(m), where)
    evidence = (_inside(m), f"NVIDIA_VISIBLE_DEVICES is {visible!r}", "there is no /dev/nvidia0 or other card node")
    return Match((*evidence, *_host(m)), fix, severity=m.no_gpu_severity, likely=value == "void")


@rule("C03", "surroundings", "the container has the GPU but not the compute libraries")
def no_compute(m: Case) -> Match | None:
    """Nodes or NVML are there, libcuda.so.1 is not, and the variable names neither compute nor all."""
    value = m.env("NVIDIA_DRIVER_CAPABILITIES")
    named = {each.strip().lower() for each in (value or "").split(",")}
    none = m.no_libcuda and not m.driver.libraries.cuda
    here = m.nodes.at(CONTROL).exists or m.driver.nvml.answer.answered
    if not m.surroundings.container or not value or named & {"compute", "all"} or not none or not here:
        return None
    if not m.broken:
        return None
    fix = ("Start the container with -e NVIDIA_DRIVER_CAPABILITIES=compute,utility.", *fixes.give_gpu(m))
    return Match((_inside(m), f"NVIDIA_DRIVER_CAPABILITIES is {value!r}", m.answer, m.nvml_answer), fix)


def _versions(m: Case) -> Lines:
    """Evidence that a library does not have the host driver's version; empty if it has, or if CUDA works."""
    lib = m.mismatched
    if lib is None or not m.surroundings.container or not m.broken or lib.via.startswith("LD_"):
        return ()
    which = f"{lib.target or lib.path} is version {lib.version}, but the host's kernel driver is {m.kernel.version}"
    return (_inside(m), which, m.answer, m.nvml_answer)


@rule("C10", "surroundings", "the container's driver libraries do not match the host's driver")
def lxc_version(m: Case) -> Match | None:
    """A system container, and a library of another release than the kernel driver."""
    evidence, version = _versions(m), m.kernel.version
    if m.surroundings.container not in _SYSTEM_CONTAINERS or not evidence:
        return None
    fix = (
        f"Inside the container, install the libraries of the host's version, {version}, without the kernel module:",
        fixes.sudo(m, f"sh NVIDIA-Linux-{m.platform.machine}-{version}.run --no-kernel-module"),
        "Download it from https://www.nvidia.com/drivers; repeat this after each driver update on the host.",
    )
    return Match(evidence, fix)


@rule("C07", "surroundings", "the container has the libraries of another host driver version")
def other_host_version(m: Case) -> Match | None:
    """A container with libraries of another release; on a host, a note that its CDI file names another one."""
    around, version = m.surroundings, m.kernel.version
    regenerate = m.on_host("nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml")
    if not around.container and around.cdi and version and version not in around.cdi:
        evidence: Lines = (f"CDI files name driver {', '.join(around.cdi)}", f"the loaded kernel driver is {version}")
        title = "containers will get the libraries of another driver version"
        return Match(evidence, regenerate, title, "note")
    evidence = _versions(m)
    if not evidence or around.container in (*_SYSTEM_CONTAINERS, *_APPTAINER):
        return None
    again = "Then recreate the container."
    copy = "If that does not help, libcuda was copied into the image: remove it there and rebuild the image."
    return Match(evidence, (*regenerate, again, copy))


@rule("C01", "surroundings", "the container was started without a GPU")
def no_devices(m: Case) -> Match | None:
    """A container without nodes on a machine with a card; under WSL, where the card cannot be seen, a note."""
    around = m.surroundings
    if not around.container or m.fires("C11", "C09", "C08", "C05", "C04"):
        return None
    if around.wsl == 2 and not m.hardware.dxg and m.broken:
        return Match((_inside(m), "there is no /dev/dxg"), fixes.give_gpu(m), severity="note", likely=True)
    jetson = bool(m.hardware.tegra) and m.no_libcuda and m.broken
    if not jetson and not (_without_nodes(m) and m.host_has_gpu):
        return None
    nodes = (
        "there is no /dev/nvidia*" if m.nodes_absent else "there is no card node, and the other nodes cannot be opened"
    )
    visible = m.env("NVIDIA_VISIBLE_DEVICES")
    said = f"NVIDIA_VISIBLE_DEVICES is {visible!r}, but no NVIDIA container runtime applied it" if visible else ""
    return Match((_inside(m), nodes, said, *_host(m)), fixes.give_gpu(m), severity=m.no_gpu_severity, likely=jetson)


@rule("C02", "surroundings", "containers on this host cannot use the GPU")
def no_toolkit(m: Case) -> Match | None:
    """A host with a card and Docker, without the toolkit or with Docker as a snap: a note."""
    around = m.surroundings
    if around.container or around.wsl or not around.docker or not m.host_has_gpu:
        return None
    snap = around.docker == "snap"
    if not snap and around.container_toolkit is not False:
        return None
    evidence = "Docker is installed as a snap" if snap else "Docker is installed, nvidia-ctk is not"
    fix = (
        "To give containers a GPU, install it from NVIDIA's repository (docs.nvidia.com/datacenter/cloud-native):",
        *fixes.system_package(m, **dict.fromkeys(("apt", "dnf", "zypper", "pacman"), "nvidia-container-toolkit")),
        fixes.sudo(m, "nvidia-ctk runtime configure --runtime=docker"),
        fixes.sudo(m, "systemctl restart docker"),
    )
    return Match((evidence,), fix, severity="note")


page_only("C06", "surroundings", "Podman does not find the CDI device")


@rule("N02", "surroundings", "the image's torch was chosen while no GPU was visible", likely=True)
def cpu_image(m: Case) -> Match | None:
    """A CPU build that uv or conda chose, in a container where CUDA works: a note beside the CPU build itself."""
    first = m.torch.first
    if not m.surroundings.container or first is None or not first.cpu_only or not m.driver.cuda.works:
        return None
    if first.installer not in ("uv", "conda") and not first.conda_build:
        return None
    evidence = (f"torch {first.version} was installed by {first.installer or 'conda'}", "CUDA works in this container")
    fix = ("Name the CUDA build in the Dockerfile: what is installed inside a running container is lost with it.",)
    return Match(evidence, fix, severity="note")
