"""What keeps a process from the card: a scheduler, a service, a container, the device nodes, environment variables."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.case import CONTROL, CVD, UVM, Case, Lines, Match, page_only, quoted, rule, rules
from transload.diagnose.tables import covers
from transload.diagnose.visible import Visible, visible_devices
from transload.machine import AMD

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transload.findings import Severity
    from transload.machine import Node

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
    regenerate = fixes.on_host(m, "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml")
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


# -- the device nodes under /dev through which a process reaches the driver

_NVIDIA_MAJOR = 195  # fixed; only nvidia-uvm gets a new one at each boot
_MEM_MAJOR = 1  # /dev/null, /dev/zero …
_STUB = 34
_OURS = "/dev/nvidiactl /dev/nvidia-uvm /dev/nvidia[0-9]*"


def _faulty_node(m: Case) -> Node | None:
    """The node that prevents the driver from starting: it is faulty, and that causes the error that was seen.

    Seen on a live card: without /dev/nvidiactl or the card's node cuInit answers 100, without /dev/nvidia-uvm 999.
    """
    if not m.broken or m.code <= 0 or m.code == _STUB or not m.nodes.found or m.no_gpu or m.withheld:
        return None
    if m.surroundings.wsl:
        dxg = m.nodes.at("/dev/dxg")
        return dxg if dxg.exists and _bad(m, dxg) else None
    if m.hardware.tegra:
        tegra = (node for node in m.nodes.found if node.path == "/dev/nvmap" or node.path.startswith("/dev/nvhost"))
        return next((node for node in tegra if node.error in ("EACCES", "EPERM")), None)
    if m.kernel.loaded is False or (m.nodes_absent and m.surroundings.container):
        return None
    control, uvm, cards = m.nodes.at(CONTROL), m.nodes.at(UVM), m.card_nodes
    if _bad(m, control):
        return control
    if m.code == 999:
        return uvm if _bad(m, uvm) else None
    if m.code == 100 and all(_bad(m, node) for node in cards):
        first = cards[0] if cards else m.nodes.at("/dev/nvidia0")
        return first if cards or _missing(m, first) else None
    return None


def _bad(m: Case, node: Node) -> bool:
    return _missing(m, node) or (node.exists and (node.error not in ("", "EIO") or _wrong_device(m, node)))


def _missing(m: Case, node: Node) -> bool:
    """Whether a node does not exist and the driver's library cannot create it, as it does for root on a host."""
    module = "nvidia_uvm" in m.kernel.modules or "nvidia-uvm" in m.nodes.majors
    makes = m.platform.root and not m.surroundings.container
    return not node.exists and not (makes and (module or node.path != UVM))


def _wrong_device(m: Case, node: Node) -> bool:
    """Whether a node points to something that is not NVIDIA's driver."""
    if not node.exists or not node.path.startswith("/dev/nvidia"):
        return False
    if node.kind != "char":
        return True
    if node.path == UVM:
        major = m.nodes.majors.get("nvidia-uvm", 0)
        return node.major != major if major else node.major == _MEM_MAJOR
    return node.major != _NVIDIA_MAJOR


def _mode_allows(m: Case, node: Node) -> bool:
    """Whether mode and groups let this process read and write."""
    ours = node.group and node.group in m.platform.groups and node.mode & 0o060 == 0o060
    return m.platform.root or node.mode & 0o006 == 0o006 or bool(ours)


@rules(
    "nodes",
    {
        "D02": "a device node points to the wrong device",
        "D04": "the container is not allowed to open the device nodes",
        "D06": "SELinux denies access to the device nodes",
        "D03": "no permission to open the device nodes",
        "D01": "a device node of the driver is missing",
    },
    likely=("D06",),
)
def faulty_node(m: Case) -> Iterator[tuple[str, Match]]:
    """What is wrong with the node that prevents the driver from starting."""
    node = _faulty_node(m)
    if node is None:
        return
    container, uvm = m.surroundings.container, node.path == UVM
    line = f"{node.path} does not exist"
    if node.exists:
        owner = f"owner {node.uid}, group {node.group or node.gid}"
        state = f"opening it fails with {node.error}" if node.error else "it can be opened"
        line = f"{node.path}: {state} (mode {node.mode:04o}, {owner}, device {node.major}:{node.minor})"
    answers = (m.answer, m.nvml_answer)
    wrong = _wrong_device(m, node)
    recreate = "Then recreate the container." if container else ""

    if wrong or node.error in ("ENXIO", "ENODEV"):  # not the driver's device, or no device behind it
        name = "nvidia-uvm" if uvm else "nvidia"
        major = m.nodes.majors.get(name, 0 if uvm else _NVIDIA_MAJOR)
        should = f"/proc/devices gives {name} the number {major}" if major else f"/proc/devices has no {name}"
        what = f"it is a {node.kind}, not a device" if node.kind != "char" else should
        if container in ("lxc", "nspawn"):
            majors = sorted({_NVIDIA_MAJOR, m.nodes.majors.get("nvidia-uvm", 0)} - {0})
            allow = (f"| lxc.cgroup2.devices.allow: c {major}:* rwm" for major in majors)
            fix: Lines = (*fixes.on_host(m), "In the container's configuration; then bind the nodes again:", *allow)
        elif container:
            fix = (*fixes.on_host(m, "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"), recreate)
        else:
            made = "nvidia-modprobe -u -c=0" if uvm else "nvidia-modprobe -c 0"
            fix = (fixes.sudo(m, f"rm -r {node.path}"), fixes.sudo(m, made))
        yield "D02", Match((line, what, *answers), fix, f"{node.path} points to the wrong device", likely=not wrong)

    if node.error == "EPERM" and not wrong:
        allowed = f"the devices cgroup allows: {', '.join(m.nodes.cgroup[:4])}" if m.nodes.cgroup else ""
        title = "" if container else "the device cgroup forbids the device nodes"
        fix = ("The device cgroup of this login or unit forbids it: start the program from another one.",)
        if container:
            fix = (
                "Recreate the container; restarting the process inside is not enough.",
                "To prevent it:",
                *fixes.on_host(m, "nvidia-ctk system create-dev-char-symlinks --create-all"),
                f"Or pass the nodes by name: --device {CONTROL} --device {UVM} --device /dev/nvidia0",
            )
        yield "D04", Match((line, allowed, *answers), fix, title)

    allows = _mode_allows(m, node)
    if node.error == "EACCES" and allows and not node.nodev and m.surroundings.selinux == "enforcing":
        allow_it = fixes.on_host(m, "ausearch -m avc -ts recent", "setsebool -P container_use_devices on")
        fix = ("Check whether SELinux denied it, then allow it:", *allow_it)
        yield "D06", Match((line, "SELinux is enforcing", *answers), fix)
    elif node.error == "EACCES" and node.nodev:
        mounted = "its file system is mounted with nodev: devices cannot be opened there, even by root"
        title = f"{node.path} is on a file system mounted with nodev"
        fix = (fixes.sudo(m, f"mount -o remount,dev {node.path.rpartition('/')[0]}"),)
        if container:
            fix = ("Start the container with the nodes as devices, not as a volume:", *fixes.give_gpu(m))
        yield "D03", Match((line, mounted, *answers), fix, title)
    elif node.error == "EACCES":
        odd = "its mode would allow it: something else forbids it (AppArmor, a user namespace)" if allows else ""
        mode = m.kernel.parameters.get("DeviceFileMode", "")
        odd_mode = re.fullmatch(r"[0-9]{1,6}", mode) and int(mode) != 0o666
        asked = f"the module has DeviceFileMode={int(mode):04o}" if odd_mode else ""
        yield "D03", Match((line, odd, asked, *answers), _let_in(m, node), likely=allows)

    if not node.exists:  # and nothing creates it
        unloaded = uvm and m.kernel.modules and "nvidia_uvm" not in m.kernel.modules
        stay = "sh -c 'echo nvidia_uvm > /etc/modules-load.d/nvidia-uvm.conf'  # to have it after each start"
        make = ("nvidia-modprobe -u -c=0", stay) if uvm else ("nvidia-modprobe -c 0",)
        what = "the module nvidia_uvm is not loaded" if unloaded else ""
        yield "D01", Match((line, what, *answers), (*fixes.on_host(m, *make), recreate), f"{node.path} is missing")


def _let_in(m: Case, node: Node) -> Lines:
    """Give this user access to a node."""
    if m.surroundings.container:
        keep = "Rootless podman keeps your groups with: podman run --group-add keep-groups …"
        return (*fixes.on_host(m), "Check who may open it:", f"$ ls -l {node.path}", keep)
    if node.group and node.group != "root" and node.mode & 0o060 == 0o060:
        login = "Then log out and in again: groups are read at login."
        return (fixes.sudo(m, f"usermod -aG {node.group} $USER"), login)
    ours = node.path.startswith("/dev/nvidia")
    now = ("For now:", fixes.sudo(m, f"chmod 0666 {_OURS if ours else node.path}"))
    if not ours:
        return now
    option = "options nvidia NVreg_DeviceFileMode=0666"
    return (*now, "Permanently:", *fixes.modprobe_option(m, option, "nvidia-device-files.conf"))


@rule("R01", "nodes", "the AMD compute device cannot be opened")
def kfd(m: Case) -> Match | None:
    """A ROCm build, an AMD card, and a node that cannot be opened."""
    first, node = m.torch.first, m.nodes.at("/dev/kfd")
    amd = any(card.vendor == AMD for card in m.hardware.pci or ())
    if first is None or not first.hip or not amd or m.torch_run.available:
        return None
    usable = any(other.kind == "rocm" and other.usable for other in m.accelerators)
    if not node.error or not m.nodes.found or (usable and node.error == "ENOENT"):
        return None
    fix: Lines = (fixes.sudo(m, "usermod -aG render,video $USER"), "Then log in again.")
    if m.surroundings.container:
        fix = (
            "Start the container with the devices:",
            "$ docker run --device=/dev/kfd --device=/dev/dri …",
            "And with --group-add, the number of the host's group render.",
        )
    elif node.error == "ENOENT":
        fix = ("The kernel driver has no compute device: update the kernel, or install amdgpu-dkms.",)
    return Match((f"/dev/kfd: {node.error}", quoted(m.complaint("HIP"))), fix)


# -- environment variables that hide a GPU from a process, or change how CUDA works in it

_ORDER = "CUDA_DEVICE_ORDER"
_WHY = {
    "empty": ("E01", "an empty element ends the list"),
    "negative": ("E01", "a negative number ends the list"),
    "not-a-number": ("E01", "{token} is neither a number nor a UUID, and ends the list"),
    "no-such-index": ("E02", "{token} is not a valid index: they go from 0 to {last}"),
    "twice": ("E03", "{token} names a GPU that is already in the list; CUDA then rejects the whole list"),
    "no-such-uuid": ("E04", "no GPU's UUID begins with {token}"),
    "ambiguous": ("E04", "more than one UUID begins with {token}"),
    "mixed": ("E04", "{token} is of another kind than the first element: a list holds either numbers or UUIDs"),
}
"""Why ``visible_devices`` stopped reading, and the rule that reports it."""


def _read(m: Case) -> tuple[Visible | None, Lines, Lines]:
    """What CUDA_VISIBLE_DEVICES leaves visible, and the UUIDs of all GPUs and MIG devices; an empty UUID is unknown.

    Nothing if Slurm set it for a job without a GPU, or if it cannot be judged.
    """
    nvml = [gpu for gpu in m.driver.nvml.gpus if gpu.code == 0]
    freed = next((tried.cuda for tried in m.driver.experiments if CVD in tried.change and tried.cuda.works), None)
    gpus: Lines = ("",) * max(len(m.hardware.gpus), len(m.kernel.gpus))
    if nvml:
        gpus = tuple(gpu.uuid for gpu in nvml)
    elif freed:
        gpus = tuple(gpu.uuid for gpu in freed.gpus) or ("",) * freed.count
    mig = tuple(uuid for gpu in nvml for uuid in gpu.mig_devices)
    value = m.env(CVD)
    if value is None or not gpus or not m.has_nvidia or (m.surroundings.slurm and not m.slurm_granted):
        return None, gpus, mig
    seen = visible_devices(value, gpus, mig)
    return seen if seen.known and seen.why else None, gpus, mig


@rules(
    "variables",
    {
        "E03": f"{CVD} names a GPU twice",
        "E01": f"{CVD} hides every GPU",
        "E02": f"{CVD} names a GPU that does not exist",
        "E04": f"{CVD} names a UUID that does not exist",
    },
)
def hidden_gpus(m: Case) -> Iterator[tuple[str, Match]]:
    """An error if the variable leaves no GPU visible; otherwise what it hides."""
    seen, gpus, mig = _read(m)
    if seen is None or (seen.error and m.works):
        return
    value = m.env(CVD)
    code, why = _WHY[seen.why]
    why = "an empty value hides every GPU" if value == "" else why.format(token=repr(seen.token), last=len(gpus) - 1)
    answer = m.answer if seen.error and m.driver.cuda.answer.state != "unasked" else ""
    found = ""
    if tried := next((tried.cuda for tried in m.driver.experiments if tried.change == (CVD,)), None):
        plural = "" if tried.count == 1 else "s"
        found = f"without {CVD} the driver "
        found += f"finds {tried.count} GPU{plural}" if tried.works else "does not work either"
    evidence = (f"{CVD} is {value!r}", why, answer, found)
    if seen.error:
        yield code, Match(evidence, _correct(m))
    elif seen.why != "negative":  # -1 at the end of a list is a known way to end it
        rest = visible_devices(",".join(seen.dropped[1:]), gpus, mig) if len(seen.dropped) > 1 else Visible()
        severity: Severity = "warning" if rest.count > 0 else "note"  # a warning if that hides a GPU
        left = f"{seen.count} of {len(gpus)} GPUs are visible"
        yield code, Match((*evidence, left), _correct(m), f"{CVD} is cut off at {seen.token!r}", severity)


def _correct(m: Case) -> Lines:
    if m.surroundings.slurm:
        return (
            "Do not set it in a Slurm job: Slurm sets it to the job's GPUs. Remove it from the batch script and the",
            "shell's startup files, and start the job again.",
        )
    return (*fixes.unset(m, CVD), "Or set it to indices starting at 0, as nvidia-smi -L lists them.")


@rule("E13", "variables", "torch counts no GPU although CUDA has one")
def miscounted(m: Case) -> Match | None:
    """torch computes on a GPU, and its own count of them is 0."""
    run, value = m.torch_run, m.env(CVD)
    if value is None or run.count != 0 or not run.cuda_works:
        return None
    evidence = (f"{CVD} is {value!r}", "torch.cuda.device_count() is 0, and a kernel ran on the GPU")
    return Match(evidence, _correct(m), severity="warning")


@rule("E07", "variables", "a file sets CUDA_VISIBLE_DEVICES", likely=True)
def from_file(m: Case) -> Match | None:
    """A note, where the value is wrong and a file was found that sets it."""
    places = m.variables.origins.get(CVD, ())
    if not places or m.works or _read(m)[0] is None:
        return None
    return Match(tuple(f"{CVD} is set in {place}" for place in places), ("Remove it there.",), severity="note")


page_only("E06", "variables", "CUDA_VISIBLE_DEVICES is set too late")
page_only("E08", "variables", "a program asks for a GPU index that does not exist")


@rule("E12", "variables", "CUDA_DEVICE_ORDER has an invalid value")
def bad_order(m: Case) -> Match | None:
    """The value is neither of the two, and the driver did not start with it."""
    value = m.env(_ORDER)
    if value in (None, "FASTEST_FIRST", "PCI_BUS_ID") or m.works or not m.has_nvidia:
        return None
    return Match((f"{_ORDER} is {value!r}", m.answer), fixes.set_variable(m, _ORDER, "PCI_BUS_ID"))


@rule("A04", "variables", "a variable forces or forbids PTX compilation")
def jit_switch(m: Case) -> Match | None:
    """It is set, and torch failed because of it or must fail; a note if it did no harm."""
    names = ("CUDA_FORCE_PTX_JIT", "CUDA_FORCE_JIT", "CUDA_DISABLE_PTX_JIT", "CUDA_DISABLE_JIT")
    name = next((name for name in names if (m.env(name) or "0").strip() not in ("", "0")), "")
    if not name or not m.has_nvidia:
        return None
    told = m.complaint(r"no kernel image is available|PTX JIT compil")
    # whether none of torch's own kernels can run on any of the cards
    codes = tuple(m.torch_libraries.cubins or ())
    usable = [code for code in codes if code.startswith("compute_") == ("FORCE" in name)]
    must_fail = bool(codes and m.cards) and not any(covers(usable, card.capability) for card in m.cards)
    severity: Severity = "error" if told or (m.torch_not_run and must_fail) else "note"
    return Match((f"{name} is {m.env(name)!r}", quoted(told)), fixes.unset(m, name), severity=severity)


@rule("E09", "variables", "a variable hides the AMD GPUs")
def hides_amd(m: Case) -> Match | None:
    """A ROCm build saw no GPU although there is one, and a variable that filters them is set."""
    first = m.torch.first
    gpus = [other for other in m.accelerators if other.kind == "rocm" and other.usable]
    if first is None or not first.hip or not gpus or m.torch_run.available is not False:
        return None
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", CVD):
        value = m.env(name)
        if value is not None and visible_devices(value, ("",) * len(gpus)).error:
            return Match((f"{name} is {value!r}", f"there are {len(gpus)} AMD GPUs"), fixes.unset(m, name))
    return None


@rule("E10", "variables", "is_available() asks NVML instead of CUDA")
def nvml_check(m: Case) -> Match | None:
    """A note, where CUDA does not work and the variable makes it seem to."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    dead = not m.works or m.failed("init")
    if m.env(name) != "1" or not dead or not m.torch_run.available:
        return None
    evidence = (f"{name} is '1'", "torch.cuda.is_available() is True, and CUDA does not work")
    return Match(evidence, fixes.unset(m, name), severity="note")


@rule("E05", "variables", "CUDA numbers the GPUs in a different order than nvidia-smi")
def other_order(m: Case) -> Match | None:
    """A note, where the two orders were seen to differ."""
    cuda = [gpu for gpu in m.driver.cuda.gpus if gpu.uuid]
    known = {gpu.uuid for gpu in cuda}
    nvml = [gpu for gpu in m.driver.nvml.gpus if gpu.uuid in known]
    same = [gpu.uuid for gpu in cuda] == [gpu.uuid for gpu in nvml]
    if len(cuda) < 2 or len(nvml) != len(cuda) or same or m.env(CVD) or m.env(_ORDER):
        return None
    evidence = (f"CUDA's device 0 is {cuda[0].name}, nvidia-smi's is {nvml[0].name}",)
    return Match(evidence, fixes.set_variable(m, _ORDER, "PCI_BUS_ID"), severity="note")


@rule("E11", "variables", "CUDA cannot write its cache of compiled kernels")
def no_cache(m: Case) -> Match | None:
    """A note."""
    problem = m.variables.cache_problem
    if not problem or not m.works:
        return None
    return Match((problem,), fixes.set_variable(m, "CUDA_CACHE_PATH", "/tmp/cuda-cache"), severity="note")  # noqa: S108
