"""The device nodes under /dev through which a process reaches the driver."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.case import CONTROL, UVM, Case, quoted
from transload.diagnose.rules.rule import Lines, Match, rule
from transload.machine import AMD

if TYPE_CHECKING:
    from transload.machine import Node

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


def _evidence(m: Case, node: Node, *more: str) -> Lines:
    line = f"{node.path} does not exist"
    if node.exists:
        owner = f"owner {node.uid}, group {node.group or node.gid}"
        state = f"opening it fails with {node.error}" if node.error else "it can be opened"
        line = f"{node.path}: {state} (mode {node.mode:04o}, {owner}, device {node.major}:{node.minor})"
    return (line, *more, m.answer, m.nvml_answer)


def _recreate(m: Case) -> str:
    return "Then recreate the container." if m.surroundings.container else ""


@rule("D02", "nodes", "a device node points to the wrong device")
def wrong_device(m: Case) -> Match | None:
    """The faulty node is not the driver's device, or there is no device behind it."""
    node = _faulty_node(m)
    if node is None or not (_wrong_device(m, node) or node.error in ("ENXIO", "ENODEV")):
        return None
    name = "nvidia-uvm" if node.path == UVM else "nvidia"
    major = m.nodes.majors.get(name, 0 if node.path == UVM else _NVIDIA_MAJOR)
    should = f"/proc/devices gives {name} the number {major}" if major else f"/proc/devices has no {name}"
    what = f"it is a {node.kind}, not a device" if node.kind != "char" else should
    title = f"{node.path} points to the wrong device"
    return Match(_evidence(m, node, what), _remake(m, node), title, likely=not _wrong_device(m, node))


def _remake(m: Case, node: Node) -> Lines:
    container = m.surroundings.container
    if container in ("lxc", "nspawn"):
        majors = sorted({_NVIDIA_MAJOR, m.nodes.majors.get("nvidia-uvm", 0)} - {0})
        rules = (f"| lxc.cgroup2.devices.allow: c {major}:* rwm" for major in majors)
        return (*fixes.on_host(m), "In the container's configuration; then bind the nodes again:", *rules)
    if container:
        return (*m.on_host("nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"), _recreate(m))
    made = "nvidia-modprobe -u -c=0" if node.path == UVM else "nvidia-modprobe -c 0"
    return (fixes.sudo(m, f"rm -r {node.path}"), fixes.sudo(m, made))


@rule("D04", "nodes", "the container is not allowed to open the device nodes")
def forbidden(m: Case) -> Match | None:
    """EPERM."""
    node = _faulty_node(m)
    if node is None or node.error != "EPERM" or _wrong_device(m, node):
        return None
    rules = m.nodes.cgroup
    evidence = _evidence(m, node, f"the devices cgroup allows: {', '.join(rules[:4])}" if rules else "")
    if not m.surroundings.container:
        other = "The device cgroup of this login or unit forbids it: start the program from another one."
        return Match(evidence, (other,), "the device cgroup forbids the device nodes")
    fix = (
        "Recreate the container; restarting the process inside is not enough.",
        "To prevent it:",
        *m.on_host("nvidia-ctk system create-dev-char-symlinks --create-all"),
        f"Or pass the nodes by name: --device {CONTROL} --device {UVM} --device /dev/nvidia0",
    )
    return Match(evidence, fix)


def _mode_allows(m: Case, node: Node) -> bool:
    """Whether mode and groups let this process read and write."""
    ours = node.group and node.group in m.platform.groups and node.mode & 0o060 == 0o060
    return m.platform.root or node.mode & 0o006 == 0o006 or bool(ours)


@rule("D06", "nodes", "SELinux denies access to the device nodes", likely=True)
def selinux(m: Case) -> Match | None:
    """EACCES although the mode allows it, and SELinux is enforcing."""
    node = _faulty_node(m)
    enforcing = m.surroundings.selinux == "enforcing"
    if node is None or node.error != "EACCES" or node.nodev or not enforcing or not _mode_allows(m, node):
        return None
    allow = m.on_host("ausearch -m avc -ts recent", "setsebool -P container_use_devices on")
    return Match(
        _evidence(m, node, "SELinux is enforcing"), ("Check whether SELinux denied it, then allow it:", *allow)
    )


@rule("D03", "nodes", "no permission to open the device nodes")
def denied(m: Case) -> Match | None:
    """EACCES because of the mode, a nodev mount, or an unknown reason."""
    node = _faulty_node(m)
    if node is None or node.error != "EACCES" or m.fires("D06"):
        return None
    if node.nodev:
        mounted = "its file system is mounted with nodev: devices cannot be opened there, even by root"
        title = f"{node.path} is on a file system mounted with nodev"
        as_devices = "Start the container with the nodes as devices, not as a volume:"
        remount = (fixes.sudo(m, f"mount -o remount,dev {node.path.rpartition('/')[0]}"),)
        fix = (as_devices, *fixes.give_gpu(m)) if m.surroundings.container else remount
        return Match(_evidence(m, node, mounted), fix, title)
    allowed = _mode_allows(m, node)
    odd = "its mode would allow it: something else forbids it (AppArmor, a user namespace)" if allowed else ""
    mode = m.kernel.parameters.get("DeviceFileMode", "")
    odd_mode = re.fullmatch(r"[0-9]{1,6}", mode) and int(mode) != 0o666
    asked = f"the module has DeviceFileMode={int(mode):04o}" if odd_mode else ""
    return Match(_evidence(m, node, odd, asked), _let_in(m, node), likely=allowed)


def _let_in(m: Case, node: Node) -> Lines:
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


@rule("D01", "nodes", "a device node of the driver is missing")
def missing(m: Case) -> Match | None:
    """ENOENT, and nothing creates the node."""
    node = _faulty_node(m)
    if node is None or node.exists:
        return None
    module = node.path == UVM and m.kernel.modules and "nvidia_uvm" not in m.kernel.modules
    stay = "sh -c 'echo nvidia_uvm > /etc/modules-load.d/nvidia-uvm.conf'  # to have it after each start"
    make = ("nvidia-modprobe -u -c=0", stay) if node.path == UVM else ("nvidia-modprobe -c 0",)
    evidence = _evidence(m, node, "the module nvidia_uvm is not loaded" if module else "")
    return Match(evidence, (*m.on_host(*make), _recreate(m)), f"{node.path} is missing")


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
