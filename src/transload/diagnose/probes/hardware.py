"""The cards on the buses, the device nodes that lead to them, and accelerators that are not NVIDIA's."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import replace

from transload.diagnose.children import in_fork
from transload.diagnose.host import Host
from transload.diagnose.probes.system import mount_of, mounts
from transload.machine import AMD, INTEL, NVIDIA, Accelerator, Hardware, Node, Nodes, PciDevice, Unknown

__all__ = ["accelerators", "hardware", "nodes"]

_BUS = "/sys/bus/pci/devices"
_DISPLAY, _ACCELERATOR = 0x03, 0x12
_MEMORY, _UNSET = 0x00000200, 0x20000000  # IORESOURCE_MEM, IORESOURCE_UNSET of the kernel
_TREE = "/proc/device-tree"


def hardware(host: Host) -> Hardware:
    """The cards on the bus, and the ways to a GPU that is on none."""
    compatible = host.text(f"{_TREE}/compatible", 4096) or ""
    release = host.line("/etc/nv_tegra_release").lstrip("# ").partition(", GCID")[0]
    tegra = ""
    if release or "nvidia,tegra" in compatible or host.uname[1].endswith("-tegra"):
        tegra = ", ".join(part for part in (host.line(f"{_TREE}/model"), release) if part) or "Tegra"
    return Hardware(pci=_pci(host), dxg=host.exists("/dev/dxg"), tegra=tegra)


def _pci(host: Host) -> tuple[PciDevice, ...] | Unknown:
    if host.uname[0] != "Linux":
        return Unknown(f"the PCI bus is not looked at on {host.uname[0]}")
    addresses = host.names(_BUS)
    if isinstance(addresses, Unknown):
        return addresses
    found = []
    for address in addresses:
        folder = f"{_BUS}/{address}"
        vendor, kind = _hex(host.line(f"{folder}/vendor")), _hex(host.line(f"{folder}/class"))
        if vendor == NVIDIA or kind >> 16 in (_DISPLAY, _ACCELERATOR):
            power = host.line(f"{folder}/power_state")
            device = PciDevice(
                address,
                vendor,
                _hex(host.line(f"{folder}/device")),
                kind,
                driver=host.link(f"{folder}/driver").rpartition("/")[2],
                power=power,
                bars=_bars(host.text(f"{folder}/resource", 4096) or ""),
                dead=vendor == NVIDIA and _dead(host, folder, power),
            )
            found.append(device)
    return tuple(found)


def _hex(text: str) -> int:
    """A number as sysfs writes it; 0 for anything else.

    >>> _hex("0x10de"), _hex("garbage")
    (4318, 0)
    """
    return int(text, 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,16}", text) else 0


def _bars(text: str) -> tuple[int, ...]:
    """Sizes of the memory regions in the first six lines of ``resource``: start, end, flags.

    >>> _bars("0x0000004000000000 0x000000400007ffff 0x0000000000140204")
    (524288,)
    """
    sizes = []
    for line in text.split("\n")[:6]:
        start, end, flags = (_hex(word) for word in line.split()) if line.count(" ") == 2 else (0, 0, 0)
        if flags & _MEMORY:
            sizes.append(max(0, end - start + 1) if start and not flags & _UNSET else 0)
    return tuple(sizes)


def _dead(host: Host, folder: str, power: str) -> bool:
    """Whether its configuration space reads all ones. Reading would wake a card that sleeps: those are left alone."""
    if power == "D3cold" or host.line(f"{folder}/power/runtime_status") == "suspended":
        return False
    try:
        # Not one byte more than these: each word is asked of the card, and a page of them takes 20 ms in a guest.
        with open(host.real(f"{folder}/config"), "rb", buffering=0) as stream:
            return stream.read(4) == b"\xff\xff\xff\xff"
    except OSError:
        return False


# -- device nodes ------------------------------------------------------------------------------------------------------

_ALWAYS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm")
_CARD = re.compile(r"/dev/nvidia\d+")
_NAMES = re.compile(r"nvidia\d+|nvidiactl|nvidia-(?:uvm|uvm-tools|modeset|nvswitchctl|nvlink)|dxg|nvmap|nvhost-.*|kfd")
_FOLDERS = (("/dev/nvidia-caps", "nvidia-cap"), ("/dev/dri", "renderD"), ("/dev/accel", "accel"))
_MAJORS = re.compile(r"^ *(\d{1,4}) (nvidia\S*|kfd|drm|accel)$", re.MULTILINE)
_MOST = 64  # of a folder: every slice of every card can have its nodes

PATIENCE = 0.25
"""Seconds. A refusal comes at once; an open that takes longer was admitted, and is starting a card."""


def nodes(host: Host) -> Nodes:
    """The nodes of NVIDIA's driver and of others for computing, and the numbers the kernel gave them."""
    if host.uname[0] != "Linux":
        return Nodes()
    lines = (line.split(":") for line in (host.text("/etc/group") or "").split("\n"))
    groups = {int(each[2]): each[0] for each in lines if len(each) > 2 and re.fullmatch(r"[0-9]{1,10}", each[2])}
    present = [f"/dev/{name}" for name in host.names("/dev") or () if _NAMES.fullmatch(name)]
    for folder, start in _FOLDERS:
        present += tuple(host.paths(folder, start))[:_MOST]
    found = [_node(host, path, groups) for path in dict.fromkeys((*_ALWAYS, *present))]
    # Cards are opened last: one that must be started first takes its time.
    there = sorted(
        (node for node in found if node.kind not in ("", "link")), key=lambda node: bool(_CARD.fullmatch(node.path))
    )
    answers = in_fork([lambda path=node.path: host.open_error(path) for node in there], PATIENCE)  # type: ignore[misc]
    errors = {node.path: _refusal(host, node, answer) for node, answer in zip(there, answers, strict=True)}
    around = mounts(host)
    opened = []
    for node in found:
        mount = mount_of(around, node.path)
        nodev = mount is not None and "nodev" in mount.options
        opened.append(replace(node, error=errors.get(node.path, node.error), nodev=nodev))
    characters = (host.text("/proc/devices", 1 << 16) or "").partition("Block devices")[0]
    majors = {name: int(number) for number, name in _MAJORS.findall(characters)}
    if "nvidia-frontend" in majors:  # as drivers before 550 called it
        majors = {"nvidia": majors["nvidia-frontend"], "nvidiactl": majors["nvidia-frontend"]} | majors
    return Nodes(tuple(opened), majors, _cgroup(host))


def _node(host: Host, path: str, groups: dict[int, str]) -> Node:
    status = host.status(path)
    if isinstance(status, Unknown):
        dangling = bool(host.link(path))
        return Node(path, exists=dangling, kind="link" if dangling else "", mode=0, error="ENOENT")
    device = getattr(status, "st_rdev", 0)
    return Node(
        path,
        kind="char" if stat.S_ISCHR(status.st_mode) else "directory" if stat.S_ISDIR(status.st_mode) else "file",
        mode=stat.S_IMODE(status.st_mode),
        uid=status.st_uid,
        gid=status.st_gid,
        group=groups.get(status.st_gid, ""),
        major=os.major(device),
        minor=os.minor(device),
    )


def _refusal(host: Host, node: Node, answer: str | Unknown) -> str:
    if isinstance(answer, Unknown):
        return "" if os.access(host.at(node.path), os.R_OK | os.W_OK) else "EACCES"
    if answer == "EACCES" and "/nvidia-caps/" in node.path and node.mode & stat.S_IROTH:
        return ""  # the driver opens these for reading only, and so they are made
    return answer


def _cgroup(host: Host) -> tuple[str, ...]:
    """Version 1 has a list; the rules of version 2 are a program in the kernel that only root can see."""
    own = re.search(
        r"^\d+:(?:\w+,)*devices(?:,\w+)*:(/.*)$", host.text("/proc/self/cgroup", 1 << 14) or "", re.MULTILINE
    )
    for folder in ((own[1].rstrip("/"),) if own else ()) + ("",):
        text = host.text(f"/sys/fs/cgroup/devices{folder}/devices.list", 1 << 14)
        if isinstance(text, str):
            return tuple(line.strip() for line in text.split("\n") if line.strip())
    return ()


# -- accelerators of other makers, each with the torch build it needs --------------------------------------------------

_KFD = "/sys/class/kfd/kfd/topology/nodes"
_PROPERTY = re.compile(r"^(simd_count|gfx_target_version|location_id|domain) (\d{1,12})$", re.MULTILINE)
# Graphics inside AMD's processors: Raven, Renoir, Van Gogh, Rembrandt, Raphael, Phoenix, Strix.
_APU = re.compile(r"gfx(?:90[29c]|103[3567]|1103|115\d)")

_ARC = ((0x5690, 0x56BF), (0x56C0, 0x56C2), (0x0BD0, 0x0BDB), (0xE200, 0xE22F))
"""Device ids of Intel's cards that torch has a build for: Arc A, Flex, Data Center Max, Arc B."""
_CORE_ULTRA = (
    (0x7D51, 0x7D51),
    (0x7D55, 0x7D55),
    (0x7DD1, 0x7DD5),
    (0x6420, 0x6420),
    (0x64A0, 0x64B0),
    (0xB080, 0xB0BF),
)
"""And of the graphics inside its processors: Meteor, Arrow, Lunar and Panther Lake."""
_LEVEL_ZERO = ("/usr/lib/{machine}-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")

_HABANA, _GOOGLE = 0x1DA3, 0x1AE0
_DEVICES = (
    (re.compile(r"davinci\d+"), "npu", "Huawei Ascend"),
    (re.compile(r"hl\d+"), "hpu", "Intel Gaudi"),
    (re.compile(r"neuron\d+"), "neuron", "AWS Neuron"),
    (re.compile(r"cambricon_dev\d+"), "mlu", "Cambricon MLU"),
    (re.compile(r"mtgpu\.\d+"), "musa", "Moore Threads"),
)


def accelerators(host: Host, found: Hardware) -> tuple[Accelerator, ...]:
    """What this machine has beside NVIDIA's cards, the usable ones first."""
    apple = host.uname[0] == "Darwin" and host.uname[2] == "arm64"
    mps = [Accelerator("mps", "Apple GPU", usable=True, integrated=True)] if apple else []
    cards = tuple(found.pci or ())
    every = (*mps, *_rocm(host, cards), *_xpu(host, cards), *_others(host, cards))
    return tuple(sorted(every, key=lambda each: (not each.usable, each.integrated)))


def _rocm(host: Host, cards: tuple[PciDevice, ...]) -> Iterator[Accelerator]:
    """The GPUs of AMD's compute driver; then cards on the bus that it does not have."""
    ready, driven = host.exists("/dev/kfd"), set()
    for folder in host.paths(_KFD):
        told = {name: int(value) for name, value in _PROPERTY.findall(host.text(f"{folder}/properties", 1 << 14) or "")}
        if told.get("simd_count"):
            gfx, place = _gfx(told.get("gfx_target_version", 0)), told.get("location_id", 0)
            address = f"{told.get('domain', 0):04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"
            driven.add(address)
            name = host.line(f"{_BUS}/{address}/product_name") or "AMD GPU"
            yield Accelerator("rocm", name, gfx, usable=ready, integrated=bool(_APU.fullmatch(gfx)))
    for card in cards:
        if card.vendor == AMD and card.address not in driven:
            yield Accelerator("rocm", "AMD GPU", _ids(card))


def _gfx(version: int) -> str:
    """The name of an architecture, from the driver's number for it.

    >>> _gfx(90402), _gfx(90010), _gfx(110000)
    ('gfx942', 'gfx90a', 'gfx1100')
    """
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}" if version else ""


def _ids(card: PciDevice) -> str:
    return f"{card.vendor:04x}:{card.device:04x}"


def _xpu(host: Host, cards: tuple[PciDevice, ...]) -> Iterator[Accelerator]:
    """Usable only with both halves of the driver: the kernel's, and the Level Zero library."""
    intel = [card for card in cards if card.vendor == INTEL]
    folders = (folder.format(machine=host.uname[2]) for folder in _LEVEL_ZERO)
    library = bool(intel) and any(any(host.paths(folder, "libze_intel_gpu.so")) for folder in folders)
    for card in intel:
        usable = library and card.driver in ("xe", "i915")
        if any(first <= card.device <= last for first, last in _ARC):
            yield Accelerator("xpu", "Intel GPU", _ids(card), usable=usable)
        elif any(first <= card.device <= last for first, last in _CORE_ULTRA):
            yield Accelerator("xpu", "Intel Core Ultra graphics", _ids(card), usable=usable, integrated=True)


def _others(host: Host, cards: tuple[PciDevice, ...]) -> Iterator[Accelerator]:
    """By the nodes their drivers make; by the bus where a maker builds nothing else."""
    names = host.names("/dev") or ()
    for pattern, kind, name in _DEVICES:
        if count := sum(bool(pattern.fullmatch(each)) for each in names):
            yield Accelerator(kind, name, f"{count} in /dev", usable=True)
    for card in cards:
        if card.vendor == _HABANA and not any(each.startswith("hl") for each in names):
            yield Accelerator("hpu", "Intel Gaudi", _ids(card), usable=card.driver == "habanalabs")
        elif card.vendor == _GOOGLE:
            yield Accelerator("tpu", "Google TPU", _ids(card), usable=any(each.startswith("accel") for each in names))
