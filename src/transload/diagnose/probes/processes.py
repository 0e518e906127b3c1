"""Other processes that matter to a GPU: its daemons, and whoever hangs in its driver."""

from __future__ import annotations

import re
from dataclasses import dataclass

from transload.diagnose.host import Host

__all__ = ["daemons_and_stuck"]

_DAEMONS = (
    "nv-fabricmanager",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia-gridd",
)
_SHORT = 15  # characters of a name that the kernel keeps: not enough to tell the two of MPS apart
_STAT = re.compile(r"\d+ \((.*)\) (\S)", re.DOTALL)
_WAITS = re.compile(r"_*(?:nv|uvm|rm_|os_acquire)")
_MOST = 4096
_FILES = 256


@dataclass(frozen=True, slots=True)
class _Process:
    number: str
    name: str
    state: str


def daemons_and_stuck(host: Host) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of the daemons those that run; and the processes in uninterruptible sleep that wait for an NVIDIA device."""
    numbers = [name for name in host.names("/proc") or () if name.isascii() and name.isdigit()]
    all_of_them = [_process(host, number) for number in numbers[:_MOST]]
    daemons = {_daemon(host, each) for each in all_of_them if each.state not in ("Z", "X")}
    asleep = [each for each in all_of_them if each.state == "D" and _process(host, each.number).state == "D"]
    stuck = tuple(f"{each.name} ({each.number})" for each in asleep if _for_nvidia(host, f"/proc/{each.number}"))
    return tuple(name for name in _DAEMONS if name in daemons), stuck


def _process(host: Host, number: str) -> _Process:
    found = _STAT.match(host.text(f"/proc/{number}/stat", 512) or "")
    return _Process(number, found[1], found[2]) if found else _Process(number, "", "")


def _daemon(host: Host, process: _Process) -> str:
    """Which daemon it is, if any. Only for those is the command line read, and not that of one which hangs."""
    alike = [name for name in _DAEMONS if process.name == name[:_SHORT]]
    if len(alike) < 2 or process.state == "D":
        return alike[0] if alike else ""
    program = (host.text(f"/proc/{process.number}/cmdline", 4096) or "").partition("\0")[0].rpartition("/")[2]
    return program if program in alike else alike[0]


def _for_nvidia(host: Host, folder: str) -> bool:
    """Whether it waits in the driver, as far as we may see; else whether it has a device of it open."""
    stack = host.text(f"{folder}/stack", 1 << 14)
    if stack:
        return "[nvidia" in stack
    if _WAITS.match(host.line(f"{folder}/wchan")):
        return True
    files = (host.names(f"{folder}/fd") or ())[:_FILES]
    return any(host.link(f"{folder}/fd/{number}").startswith("/dev/nvidia") for number in files)
