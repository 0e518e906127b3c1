"""Accelerators that are no NVIDIA cards, each with the torch build it needs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from transload.diagnose.host import Host
from transload.machine import AMD, INTEL, Accelerator, Hardware, PciDevice

__all__ = ["accelerators"]

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


def accelerators(host: Host, hardware: Hardware) -> tuple[Accelerator, ...]:
    """What this machine has beside NVIDIA's cards, the usable ones first."""
    found = (*_mps(host), *_rocm(host, hardware), *_xpu(host, hardware), *_others(host, hardware))
    return tuple(sorted(found, key=lambda each: (not each.usable, each.integrated)))


def _mps(host: Host) -> Iterator[Accelerator]:
    if host.uname[0] == "Darwin" and host.uname[2] == "arm64":
        yield Accelerator("mps", "Apple GPU", usable=True, integrated=True)


def _rocm(host: Host, hardware: Hardware) -> Iterator[Accelerator]:
    """The GPUs of AMD's compute driver; then cards on the bus that it does not have."""
    ready, driven = host.exists("/dev/kfd"), set()
    for folder in host.paths(_KFD):
        told = {name: int(value) for name, value in _PROPERTY.findall(host.text(f"{folder}/properties", 1 << 14) or "")}
        if told.get("simd_count"):
            gfx, address = _gfx(told.get("gfx_target_version", 0)), _address(told)
            driven.add(address)
            name = host.line(f"/sys/bus/pci/devices/{address}/product_name") or "AMD GPU"
            yield Accelerator("rocm", name, gfx, usable=ready, integrated=bool(_APU.fullmatch(gfx)))
    for card in hardware.pci or ():
        if card.vendor == AMD and card.address not in driven:
            yield Accelerator("rocm", "AMD GPU", _ids(card))


def _gfx(version: int) -> str:
    """The name of an architecture, of the number the driver has for it.

    >>> _gfx(90402), _gfx(90010), _gfx(110000)
    ('gfx942', 'gfx90a', 'gfx1100')
    """
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}" if version else ""


def _address(told: dict[str, int]) -> str:
    place = told.get("location_id", 0)
    return f"{told.get('domain', 0):04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"


def _ids(card: PciDevice) -> str:
    return f"{card.vendor:04x}:{card.device:04x}"


def _xpu(host: Host, hardware: Hardware) -> Iterator[Accelerator]:
    """Usable only with both halves of the driver: the kernel's, and the Level Zero library."""
    cards = [card for card in hardware.pci or () if card.vendor == INTEL]
    folders = (folder.format(machine=host.uname[2]) for folder in _LEVEL_ZERO)
    library = bool(cards) and any(any(host.paths(folder, "libze_intel_gpu.so")) for folder in folders)
    for card in cards:
        usable = library and card.driver in ("xe", "i915")
        if _within(card.device, _ARC):
            yield Accelerator("xpu", "Intel GPU", _ids(card), usable=usable)
        elif _within(card.device, _CORE_ULTRA):
            yield Accelerator("xpu", "Intel Core Ultra graphics", _ids(card), usable=usable, integrated=True)


def _within(device: int, ranges: tuple[tuple[int, int], ...]) -> bool:
    return any(first <= device <= last for first, last in ranges)


def _others(host: Host, hardware: Hardware) -> Iterator[Accelerator]:
    """By the nodes their drivers make; by the bus where a maker builds nothing else."""
    names = host.names("/dev") or ()
    for pattern, kind, name in _DEVICES:
        if count := sum(bool(pattern.fullmatch(each)) for each in names):
            yield Accelerator(kind, name, f"{count} in /dev", usable=True)
    for card in hardware.pci or ():
        if card.vendor == _HABANA and not any(each.startswith("hl") for each in names):
            yield Accelerator("hpu", "Intel Gaudi", _ids(card), usable=card.driver == "habanalabs")
        elif card.vendor == _GOOGLE:
            yield Accelerator("tpu", "Google TPU", _ids(card), usable=any(each.startswith("accel") for each in names))
