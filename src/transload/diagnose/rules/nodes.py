"""The device nodes under /dev through which a process reaches the driver."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.rules.row import Seen, Table
from transload.diagnose.rules.signs import (
    CONTROL,
    UVM,
    absent,
    answer_line,
    broken,
    card_nodes,
    code,
    host_lines,
    nodes_absent,
    nvml_line,
)
from transload.diagnose.rules.withheld import withheld

if TYPE_CHECKING:
    from transload.machine import Machine, Node

__all__ = ["TABLE", "culprit"]

TABLE = Table("nodes")

Lines = tuple[str, ...]

NVIDIA_MAJOR = 195  # assigned for good; only nvidia-uvm's is given out anew at each boot
_MEM_MAJOR = 1  # /dev/null, /dev/zero …
_STUB = 34
_OURS = "/dev/nvidiactl /dev/nvidia-uvm /dev/nvidia[0-9]*"
_TOOLKIT = "https://github.com/NVIDIA/nvidia-container-toolkit/issues"


def culprit(machine: Machine) -> Node | None:
    """The node that keeps the driver from starting: one that is bad, and whose lack gives the answer that was seen.

    Seen on a live card: without /dev/nvidiactl or the card's node cuInit answers 100, without /dev/nvidia-uvm 999.
    """
    if not broken(machine) or code(machine) <= 0 or code(machine) == _STUB or not machine.nodes.found:
        return None
    if absent(machine) or withheld(machine):
        return None
    if machine.surroundings.wsl:
        dxg = machine.nodes.at("/dev/dxg")
        return dxg if dxg.exists and _bad(machine, dxg) else None
    if machine.hardware.tegra:
        return next((node for node in machine.nodes.found if _tegra(node) and node.error in ("EACCES", "EPERM")), None)
    return _of_nvidia(machine)


def _of_nvidia(machine: Machine) -> Node | None:
    control, uvm, cards = machine.nodes.at(CONTROL), machine.nodes.at(UVM), card_nodes(machine)
    if machine.kernel.loaded is False or (nodes_absent(machine) and machine.surroundings.container):
        return None
    if _bad(machine, control):
        return control
    if code(machine) == 999:
        return uvm if _bad(machine, uvm) else None
    if code(machine) == 100 and all(_bad(machine, node) for node in cards):
        return cards[0] if cards else _missing(machine, machine.nodes.at("/dev/nvidia0"))
    return None


def _tegra(node: Node) -> bool:
    return node.path == "/dev/nvmap" or node.path.startswith("/dev/nvhost")


def _bad(machine: Machine, node: Node) -> bool:
    if not node.exists:
        return _missing(machine, node) is not None
    return bool(node.error and node.error != "EIO") or _foreign(machine, node)


def _missing(machine: Machine, node: Node) -> Node | None:
    """A node that is not there, where the driver's library cannot make it: as root it does, outside a container."""
    if node.exists:
        return None
    module = "nvidia_uvm" in machine.kernel.modules or "nvidia-uvm" in machine.nodes.majors
    makes = machine.platform.root and not machine.surroundings.container
    return None if makes and (module or node.path != UVM) else node


def _foreign(machine: Machine, node: Node) -> bool:
    """Whether a node leads to something that is not NVIDIA's driver."""
    if not node.exists or not node.path.startswith("/dev/nvidia"):
        return False
    if node.kind != "char":
        return True
    if node.path == UVM:
        major = machine.nodes.majors.get("nvidia-uvm", 0)
        return node.major != major if major else node.major == _MEM_MAJOR
    return node.major != NVIDIA_MAJOR


def _node_line(node: Node) -> str:
    if not node.exists:
        return f"{node.path} is not there"
    owner = f"owner {node.uid}, group {node.group or node.gid}"
    state = f"opening it fails with {node.error}" if node.error else "it opens"
    return f"{node.path}: {state} (mode {node.mode:04o}, {owner}, device {node.major}:{node.minor})"


def _evidence(machine: Machine, node: Node, *more: str) -> Lines:
    return (_node_line(node), *more, answer_line(machine), nvml_line(machine))


@TABLE.row(
    "D02",
    "a device node leads to the wrong device",
    about="""/dev/nvidia-uvm gets its major number anew each time the module loads. A container that was set up with
an old number (a CDI file, an lxc rule) has a node that leads nowhere or elsewhere: cuInit answers 999, "CUDA
unknown error", while nvidia-smi works. The same happens where a node was replaced by /dev/null, a plain file or, by
a wrong -v of docker run, a directory.

It is told by the number of the node against the line in /proc/devices.""",
    fix="""In a container: generate the CDI file again (sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml)
or put the numbers of /proc/devices into the lxc rules, and start the container anew. On a host: remove the node and
let nvidia-modprobe make it.""",
    sources=(f"{_TOOLKIT}/1934",),
)
def wrong_device(machine: Machine) -> Seen | None:
    """The culprit is no device of the driver's, or nothing answers behind it."""
    node = culprit(machine)
    hollow = node is not None and node.error in ("ENXIO", "ENODEV")
    if node is None or not (_foreign(machine, node) or hollow):
        return None
    name = "nvidia-uvm" if node.path == UVM else "nvidia"
    major = machine.nodes.majors.get(name, 0 if node.path == UVM else NVIDIA_MAJOR)
    should = f"/proc/devices gives {name} the number {major}" if major else f"/proc/devices has no {name}"
    what = f"it is a {node.kind}, not a device" if node.kind != "char" else should
    sure = _foreign(machine, node)
    title = f"{node.path} leads to the wrong device"
    return Seen(_evidence(machine, node, what), _remake(machine, node), title, likely=not sure)


def _anew(machine: Machine) -> Lines:
    return ("Then start the container anew.",) if machine.surroundings.container else ()


def _remake(machine: Machine, node: Node) -> Lines:
    container = machine.surroundings.container
    if container in ("lxc", "nspawn"):
        majors = sorted({NVIDIA_MAJOR, machine.nodes.majors.get("nvidia-uvm", 0)} - {0})
        rules = tuple(f"| lxc.cgroup2.devices.allow: c {major}:* rwm" for major in majors)
        return (*fixes.on_host(machine), "In the container's configuration, and bind the nodes anew:", *rules)
    if container:
        return (*host_lines(machine, "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"), *_anew(machine))
    made = "nvidia-modprobe -u -c=0" if node.path == UVM else "nvidia-modprobe -c 0"
    return (fixes.sudo(machine, f"rm -r {node.path}"), fixes.sudo(machine, made))


@TABLE.row(
    "D04",
    "the container is not allowed to open the device nodes",
    about="""The nodes are there and their mode allows everybody, but the container's device cgroup does not:
opening them fails with EPERM. It comes over containers that worked minutes ago, when systemd reloads its units on
the host: "Failed to initialize NVML: Unknown Error" inside, everything fine outside. It also follows from
bind-mounting /dev into a container without the right to use it.

It is told by EPERM (not EACCES) on a node whose mode is 0666.""",
    fix="""Start the container anew. To prevent it, on the host: sudo nvidia-ctk system create-dev-char-symlinks
--create-all, or give the GPU by CDI, or pass the nodes with --device.""",
    sources=(
        f"{_TOOLKIT}/48",
        f"{_TOOLKIT}/251",
        f"{_TOOLKIT}/1227",
        "https://github.com/NVIDIA/gpu-operator/issues/485",
    ),
)
def forbidden(machine: Machine) -> Seen | None:
    """EPERM."""
    node = culprit(machine)
    if node is None or node.error != "EPERM" or _foreign(machine, node):
        return None
    rules = machine.nodes.cgroup
    listed = (f"the devices cgroup allows: {', '.join(rules[:4])}",) if rules else ()
    if not machine.surroundings.container:
        fix = ("The device cgroup of this login or unit forbids it: start the program from another one.",)
        return Seen(_evidence(machine, node, *listed), fix, "the device cgroup forbids the device nodes")
    prevent = host_lines(machine, "nvidia-ctk system create-dev-char-symlinks --create-all")
    anew = ("Start the container anew; a restart of the process inside is not enough.", "To prevent it:")
    by_name = f"Or pass the nodes by name: --device {CONTROL} --device {UVM} --device /dev/nvidia0"
    return Seen(_evidence(machine, node, *listed), (*anew, *prevent, by_name))


def _mode_allows(machine: Machine, node: Node) -> bool:
    """Whether mode and groups let this process read and write."""
    ours = node.group and node.group in machine.platform.groups and node.mode & 0o060 == 0o060
    return machine.platform.root or node.mode & 0o006 == 0o006 or bool(ours)


@TABLE.row(
    "D06",
    "SELinux keeps the process from the device nodes",
    about="""Opening a node fails with EACCES although its mode allows everybody, and SELinux is enforcing: its
policy does not let this process use the device. Containers on Fedora and RHEL meet it.

It is likely, not certain: the audit log (ausearch -m avc -ts recent) has the proof.""",
    fix="""Let containers use devices: sudo setsebool -P container_use_devices on. Or give the one container a label
of its own (--security-opt label=disable) to see whether that is the reason.""",
    avoid="Turning SELinux off for the whole machine.",
    likely=True,
)
def selinux(machine: Machine) -> Seen | None:
    """EACCES against the mode, SELinux enforcing."""
    node = culprit(machine)
    enforcing = machine.surroundings.selinux == "enforcing"
    if node is None or node.error != "EACCES" or node.nodev or not enforcing or not _mode_allows(machine, node):
        return None
    fix = (
        "See whether SELinux denied it, then allow it:",
        *host_lines(machine, "ausearch -m avc -ts recent", "setsebool -P container_use_devices on"),
    )
    return Seen(_evidence(machine, node, "SELinux is enforcing"), fix)


@TABLE.row(
    "D03",
    "no permission to open the device nodes",
    about="""The node's mode and group do not let this user open it: EACCES. Root can use the GPU, the user cannot.
Without /dev/nvidiactl or /dev/nvidia0 torch says "No CUDA GPUs are available" (cuInit 100; NVML answers 4, or 0
with no card), without /dev/nvidia-uvm "CUDA unknown error" (999) while nvidia-smi works.

A file system mounted with nodev gives EACCES too, even to root and with mode 0666.""",
    fix="""Join the group that owns the nodes (sudo usermod -aG video,render $USER) and log in again; or let
everybody in with the module's option NVreg_DeviceFileMode=0666. A nodev mount must be mounted again with dev.""",
    avoid="chmod alone: it is gone after the next start.",
)
def denied(machine: Machine) -> Seen | None:
    """EACCES, by mode, by a nodev mount, or for a reason not seen."""
    node = culprit(machine)
    if node is None or node.error != "EACCES" or selinux(machine):
        return None
    if node.nodev:
        evidence = _evidence(
            machine, node, "its file system is mounted with nodev: no device opens there, even for root"
        )
        return Seen(evidence, _mount_dev(machine, node), f"{node.path} lies on a file system mounted with nodev")
    allowed = _mode_allows(machine, node)
    odd = ("its mode would allow it: something else forbids it (AppArmor, a user namespace)",) if allowed else ()
    mode = machine.kernel.parameters.get("DeviceFileMode", "")
    odd_mode = re.fullmatch(r"[0-9]{1,6}", mode) and int(mode) != 0o666
    asked = f"the module was told DeviceFileMode={int(mode):04o}" if odd_mode else ""
    fix = _let_in(machine, node)
    return Seen(_evidence(machine, node, *odd, *filter(None, (asked,))), fix, likely=allowed)


def _mount_dev(machine: Machine, node: Node) -> Lines:
    if machine.surroundings.container:
        return ("Start the container with the nodes as devices, not as a volume:", *fixes.give_gpu(machine))
    folder = node.path.rpartition("/")[0]
    return (fixes.sudo(machine, f"mount -o remount,dev {folder}"),)


def _let_in(machine: Machine, node: Node) -> Lines:
    if machine.surroundings.container:
        keep = "Rootless podman keeps your groups with: podman run --group-add keep-groups …"
        return (*fixes.on_host(machine), "See who may open it:", f"$ ls -l {node.path}", keep)
    if node.group and node.group != "root" and node.mode & 0o060 == 0o060:
        return (
            fixes.sudo(machine, f"usermod -aG {node.group} $USER"),
            "Then log out and in again: groups are read at login.",
        )
    ours = node.path.startswith("/dev/nvidia")
    now = ("For now:", fixes.sudo(machine, f"chmod 0666 {_OURS if ours else node.path}"))
    if not ours:
        return now
    option = "options nvidia NVreg_DeviceFileMode=0666"
    return (
        *now,
        "For good:",
        *fixes.modprobe_option(machine, option, "nvidia-device-files.conf"),
    )


@TABLE.row(
    "D01",
    "a device node of the driver is missing",
    about="""The kernel driver works and a node under /dev is not there. As root the driver's library makes it by
itself; for a user, or in a container, it stays missing. Without /dev/nvidia-uvm cuInit answers 999, "CUDA unknown
error - this may be due to an incorrectly set up environment, e.g. changing env variable CUDA_VISIBLE_DEVICES after
program start", while nvidia-smi works; without /dev/nvidiactl or a card's node it answers 100.

The text blames CUDA_VISIBLE_DEVICES, wrongly: look at ls -l /dev/nvidia*.""",
    fix="""On the host: sudo nvidia-modprobe -u -c=0 (or sudo modprobe nvidia_uvm), and have it done at each start:
nvidia-persistenced, or a line nvidia_uvm in /etc/modules-load.d. Then start containers anew.""",
    sources=(
        "https://github.com/NVIDIA/nvidia-docker/issues/1085",
        "https://github.com/NVIDIA/nvidia-docker/issues/431",
        "https://github.com/apptainer/singularity/issues/1441",
    ),
)
def missing(machine: Machine) -> Seen | None:
    """ENOENT, where nobody can make the node."""
    node = culprit(machine)
    if node is None or node.exists:
        return None
    module = node.path == UVM and "nvidia_uvm" not in machine.kernel.modules
    unloaded = ("the module nvidia_uvm is not loaded",) if module and machine.kernel.modules else ()
    stay = "sh -c 'echo nvidia_uvm > /etc/modules-load.d/nvidia-uvm.conf'  # to have it after each start"
    make = ("nvidia-modprobe -u -c=0", stay) if node.path == UVM else ("nvidia-modprobe -c 0",)
    fix = (*host_lines(machine, *make), *_anew(machine))
    return Seen(_evidence(machine, node, *unloaded), fix, f"{node.path} is missing")
