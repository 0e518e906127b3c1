"""What is built in, as the buses tell."""

from __future__ import annotations

import re

from transload.diagnose.host import Host
from transload.machine import NVIDIA, Hardware, PciDevice, Unknown

__all__ = ["hardware"]

_BUS = "/sys/bus/pci/devices"
_DISPLAY, _ACCELERATOR = 0x03, 0x12
_MEMORY, _UNSET = 0x00000200, 0x20000000  # IORESOURCE_MEM, IORESOURCE_UNSET of the kernel
_TREE = "/proc/device-tree"


def hardware(host: Host) -> Hardware:
    """The cards on the bus, and the roads to a GPU that is on none."""
    return Hardware(pci=_pci(host), dxg=host.exists("/dev/dxg"), tegra=_tegra(host))


def _pci(host: Host) -> tuple[PciDevice, ...] | Unknown:
    if host.uname[0] != "Linux":
        return Unknown(f"the PCI bus is not looked at on {host.uname[0]}")
    addresses = host.names(_BUS)
    if isinstance(addresses, Unknown):
        return addresses
    devices = (_device(host, address) for address in addresses)
    return tuple(each for each in devices if each is not None)


def _device(host: Host, address: str) -> PciDevice | None:
    """The device at an address, where it is one of those that ``Hardware.pci`` lists."""
    folder = f"{_BUS}/{address}"
    vendor, kind = _hex(host.line(f"{folder}/vendor")), _hex(host.line(f"{folder}/class"))
    if vendor != NVIDIA and kind >> 16 not in (_DISPLAY, _ACCELERATOR):
        return None
    power = host.line(f"{folder}/power_state")
    return PciDevice(
        address,
        vendor,
        _hex(host.line(f"{folder}/device")),
        kind,
        driver=host.link(f"{folder}/driver").rpartition("/")[2],
        power=power,
        bars=_bars(host.text(f"{folder}/resource", 4096) or ""),
        dead=vendor == NVIDIA and _dead(host, folder, power),
    )


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
    """Whether its configuration space reads all ones. Reading would wake one that sleeps, so those are let sleep."""
    if power == "D3cold" or host.line(f"{folder}/power/runtime_status") == "suspended":
        return False
    try:
        # Not one byte more than these: each word is asked of the card, and a page of them takes 20 ms in a guest.
        with open(host.at(f"{folder}/config"), "rb", buffering=0) as stream:
            return stream.read(4) == b"\xff\xff\xff\xff"
    except OSError:
        return False


def _tegra(host: Host) -> str:
    """The board's name and the release of its software, where the chip is a Tegra."""
    compatible = host.text(f"{_TREE}/compatible", 4096) or ""
    release = host.line("/etc/nv_tegra_release").lstrip("# ").partition(", GCID")[0]
    if not (release or "nvidia,tegra" in compatible or host.uname[1].endswith("-tegra")):
        return ""
    return ", ".join(part for part in (host.line(f"{_TREE}/model"), release) if part) or "Tegra"
