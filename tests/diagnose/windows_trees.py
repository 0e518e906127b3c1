"""Fake hosts that run Windows: a directory tree, a registry, and the devices that are present.

    host = windows_host(tmp_path)                                   # a PC with a working RTX 4090
    host = windows_host(tmp_path, cards=(Adapter(RTX_4090, service="BasicDisplay", provider="Microsoft"),))
    host = windows_host(tmp_path, more={"C:/Windows/System32/nvcuda.dll": None}, registry={"HKCU/Environment": {…}})

Paths in a tree have forward slashes, and ``C:/x`` is the file ``C/x`` below the root of the tree. Case does not matter,
neither in paths nor in the registry.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from tests.diagnose.trees import RTX_4090, Card, Content, Tree, TreeHost, _without, write
from tests.pe_forge import dll

from transload.diagnose.windows import Registry, WindowsDevice
from transload.io.limits import MemoryStatus
from transload.machine import Unknown

Value = str | int | bytes | tuple[str, ...]
Keys = Mapping[str, Mapping[str, Value]]

SYSTEM: Final = "C:/Windows/System32"
VENV: Final = "C:/Users/Jo Doe/project/.venv"
BASE: Final = "C:/Users/Jo Doe/AppData/Local/Programs/Python/Python313"
DISPLAY: Final = "{4d36e968-e325-11ce-bfc1-08002be10318}"
USER_VARIABLES: Final = "HKCU/Environment"
MACHINE_VARIABLES: Final = "HKLM/SYSTEM/CurrentControlSet/Control/Session Manager/Environment"
MEMORY: Final = MemoryStatus(32 << 30, 20 << 30, 48 << 30, 30 << 30)


@dataclass(frozen=True)
class WindowsTree(TreeHost):
    """A Windows host in the tree at ``root``, with the registry ``keys``: each key with its values.

    ``present`` are the devices that the configuration manager lists; ``Unknown`` if it cannot be asked.
    """

    keys: Keys = field(default_factory=dict)
    present: tuple[WindowsDevice, ...] | Unknown = ()
    status: MemoryStatus = MEMORY

    def at(self, path: str) -> str:
        """The path on this machine: each name as the tree has it, whatever its case."""
        real = self.root
        for name in path.replace(":", "", 1).strip("/").split("/"):
            folder = Path(real)
            found = os.name == "posix" and (folder / name).exists()
            alike = [] if found or not folder.is_dir() else [*folder.iterdir()]
            same = (entry.name for entry in alike if entry.name.lower() == name.lower())
            real = f"{real}/{next(same, name)}"
        return real

    def real(self, path: str) -> str:
        return self.at(path) if "/" in path else self.at(f"{SYSTEM}/{path}")

    def readlink(self, path: str) -> str:  # noqa: ARG002  there are no links
        return ""

    def target(self, path: str) -> str:
        below = self.at(path).removeprefix(f"{self.root}/")
        return f"{below[:1]}:{below[1:]}" if self.is_absolute(path) else path

    def registry(self, key: str) -> Registry | Unknown:
        wanted = f"{key.lower()}/"
        below = {name[len(wanted) :].partition("/")[0]: None for name in self.keys if name.lower().startswith(wanted)}
        values = next((values for name, values in self.keys.items() if f"{name.lower()}/" == wanted), None)
        return Unknown(f"{key} does not exist") if values is None and not below else Registry(values or {}, (*below,))

    def devices(self) -> tuple[WindowsDevice, ...] | Unknown:
        return self.present

    def memory_status(self) -> MemoryStatus:
        return self.status


@dataclass(frozen=True)
class Adapter:
    """A display adapter as Windows describes it. Without a driver it has no ``service`` and no ``provider``."""

    card: Card = RTX_4090
    vendor: int = 0x10DE
    service: str = "nvlddmkm"
    provider: str = "NVIDIA"
    version: str = "32.0.15.8180"
    problem: int = 0
    present: bool = True

    @property
    def id(self) -> str:
        ids = f"VEN_{self.vendor:04X}&DEV_{self.card.device:04X}&SUBSYS_16F110DE&REV_A1"
        return f"PCI/{ids}/4&1f7b4ef0&0&{self.card.address[5:7]}08"

    def keys(self, number: int = 0) -> dict[str, Mapping[str, Value]]:
        """What the registry has about it: below ``Enum``, and about its driver below ``Control/Class``."""
        bus, device = (int(part, 16) for part in self.card.address[5:10].split(":"))
        ids = f"PCI\\VEN_{self.vendor:04X}&DEV_{self.card.device:04X}"
        driver = f"{DISPLAY}\\{number:04d}"
        enumerated: dict[str, Value] = {
            "DeviceDesc": f"@oem7.inf,%nvidia_dev.{self.card.device:04x}%;{self.card.name}",
            "HardwareID": (f"{ids}&SUBSYS_16F110DE&REV_A1", f"{ids}&CC_{self.card.kind:06X}"),
            "CompatibleIDs": (f"{ids}&REV_A1", f"PCI\\CC_{self.card.kind:06X}"),
            "LocationInformation": (
                "@System32\\drivers\\pci.sys,#65536;PCI bus %1, device %2, function %3;" + f"({bus},{device},0)"
            ),
        }
        keys: dict[str, Mapping[str, Value]] = {f"HKLM/SYSTEM/CurrentControlSet/Enum/{self.id}": enumerated}
        if self.provider:
            enumerated |= {"ClassGUID": DISPLAY, "Driver": driver, "Service": self.service}
            keys[f"HKLM/SYSTEM/CurrentControlSet/Control/Class/{driver}".replace("\\", "/")] = {
                "DriverDesc": self.card.name,
                "DriverVersion": self.version,
                "ProviderName": self.provider,
            }
        return keys


def basic(card: Card = RTX_4090) -> Adapter:
    """A card that only Microsoft's driver drives."""
    unnamed = replace(card, name="Microsoft Basic Display Adapter")
    return Adapter(unnamed, service="BasicDisplay", provider="Microsoft", version="10.0.26100.1")


def undriven(card: Card = RTX_4090) -> Adapter:
    """A card without any driver."""
    return Adapter(replace(card, name="Video Controller (VGA Compatible)"), service="", provider="", problem=28)


def windows_host(
    root: Path,
    *,
    cards: Sequence[Adapter] = (Adapter(),),
    environ: Mapping[str, str] | None = None,
    more: Tree | None = None,
    without: Sequence[str] = (),
    registry: Keys | None = None,
    confirmed: bool = True,
    machine: str = "AMD64",
    python: str = f"{VENV}/Scripts/python.exe",
) -> WindowsTree:
    """A PC with Windows 11. The driver's libraries are there if a card has NVIDIA's driver.

    Without ``confirmed`` the configuration manager cannot be asked which devices are present.
    """
    tree: dict[str, Content | None] = {
        f"{SYSTEM}/kernel32.dll": b"",
        f"{VENV}/pyvenv.cfg": f"home = {BASE}\nversion = 3.13.2\n".replace("/", "\\"),
        f"{VENV}/Scripts/python.exe": b"",
        f"{BASE}/python.exe": b"",
    }
    if any(adapter.provider == "NVIDIA" for adapter in cards):
        names = ("nvcuda.dll", "nvml.dll", "nvidia-smi.exe")
        tree |= {f"{SYSTEM}/{name}": dll(name, version=cards[-1].version) for name in names}
    variables = {
        "PATH": f"{BASE};C:/Windows/system32;C:/Windows".replace("/", "\\"),
        "SYSTEMROOT": "C:\\Windows",
        "USERPROFILE": "C:\\Users\\Jo Doe",
        **(environ or {}),
    }
    keys: dict[str, Mapping[str, Value]] = {
        "HKLM/SYSTEM/CurrentControlSet/Control/FileSystem": {"LongPathsEnabled": 0},
        USER_VARIABLES: {"TEMP": "%USERPROFILE%\\AppData\\Local\\Temp"},
        MACHINE_VARIABLES: {"Path": "%SystemRoot%\\system32;%SystemRoot%"},
        "HKLM/SYSTEM/CurrentControlSet/Enum/PCI/VEN_8086&DEV_A0EF&SUBSYS_0A541028&REV_20/3&11583659&0&A2": {
            "DeviceDesc": "@oem2.inf,%pci\\ven_8086&dev_a0ef.devicedesc%;Intel(R) Shared SRAM",
            "CompatibleIDs": ("PCI\\VEN_8086&DEV_A0EF", "PCI\\CC_050000"),
        },
    }
    for number, adapter in enumerate(cards):
        keys |= adapter.keys(number)
    keys |= registry or {}
    root.mkdir(parents=True, exist_ok=True)
    everything = _without({**tree, **(more or {})}, without)
    write(root, {path.replace(":", "", 1): content for path, content in everything.items()})
    present = tuple(WindowsDevice(adapter.id, adapter.problem) for adapter in cards if adapter.present)
    unknown = Unknown("cfgmgr32 returned 29")
    return WindowsTree(
        variables,
        python,
        "C:/Users/Jo Doe/project",
        ("Windows", "11", machine),
        root=str(root),
        keys=keys,
        present=present if confirmed else unknown,
    )
