"""What only Windows answers: its registry, and which devices are present.

These functions raise if Windows does not answer, or is not there; ``Host`` turns that into facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from transload.frozen import NamedTuple

_ROOTS = {"HKLM": "HKEY_LOCAL_MACHINE", "HKCU": "HKEY_CURRENT_USER"}
_MOST = 4096  # the most values and keys that are read of one key

# Of cfgmgr32.h
_OF_ENUMERATOR, _PRESENT = 0x1, 0x100
_HAS_PROBLEM = 0x400
_CHARACTERS = 1 << 20  # of all device ids: some hundred have 50 each


class Registry(NamedTuple):
    """A key of the registry of Windows: its values by name, and the names of the keys below it."""

    values: Mapping[str, str | int | bytes | tuple[str, ...]]
    keys: tuple[str, ...] = ()

    def text(self, name: str) -> str:
        """A value that is a text, or the first of several; empty if there is none. Case does not matter."""
        value = {key.lower(): value for key, value in self.values.items()}.get(name.lower(), "")
        value = value[0] if isinstance(value, tuple) and value else value
        return value.rstrip("\0") if isinstance(value, str) else ""


class WindowsDevice(NamedTuple):
    """A device that Windows says is present: its id below ``HKLM/SYSTEM/CurrentControlSet/Enum``, and its problem.

    The problem is the code that the device manager shows; 0 for none.
    """

    id: str
    problem: int = 0


def registry(key: str) -> Registry:
    """A key of the registry, as a 64-bit program sees it."""
    root, _, below = key.partition("/")
    winreg: Any = import_module("winreg")
    access = winreg.KEY_READ | winreg.KEY_WOW64_64KEY
    values: dict[str, str | int | bytes | tuple[str, ...]] = {}
    with winreg.OpenKey(getattr(winreg, _ROOTS[root]), below.replace("/", "\\"), 0, access) as opened:
        keys, count, _ = winreg.QueryInfoKey(opened)
        for number in range(min(count, _MOST)):
            name, value, _ = winreg.EnumValue(opened, number)
            values[name] = tuple(value) if isinstance(value, list) else b"" if value is None else value
        return Registry(values, tuple(winreg.EnumKey(opened, number) for number in range(min(keys, _MOST))))


def devices() -> tuple[WindowsDevice, ...]:
    """The devices on the PCI bus that the configuration manager lists as present."""
    import ctypes

    manager = _library("cfgmgr32")
    of_pci, flags, length = ctypes.c_wchar_p("PCI"), _OF_ENUMERATOR | _PRESENT, ctypes.c_ulong()
    failed = manager.CM_Get_Device_ID_List_SizeW(ctypes.byref(length), of_pci, flags)
    buffer = ctypes.create_unicode_buffer(max(2, min(length.value, _CHARACTERS)))
    failed = failed or manager.CM_Get_Device_ID_ListW(of_pci, buffer, len(buffer), flags)
    if failed:
        raise OSError(f"it returned {failed}")
    listed = []
    for name in filter(None, "".join(buffer[:]).split("\0")):
        node, status, problem = ctypes.c_ulong(), ctypes.c_ulong(), ctypes.c_ulong()
        failed = manager.CM_Locate_DevNodeW(ctypes.byref(node), ctypes.c_wchar_p(name), 0)
        failed = failed or manager.CM_Get_DevNode_Status(ctypes.byref(status), ctypes.byref(problem), node, 0)
        has_problem = not failed and status.value & _HAS_PROBLEM
        listed.append(WindowsDevice(name.replace("\\", "/"), problem.value if has_problem else 0))
    return tuple(listed)


def _library(name: str) -> Any:
    import ctypes

    load: Any = getattr(ctypes, "WinDLL", ctypes.CDLL)
    return load(f"{name}.dll")
