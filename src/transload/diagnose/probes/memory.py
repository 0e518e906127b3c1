"""How much memory there is, and how much of it this process can still have."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transload.diagnose.host import Host

__all__ = ["memory"]

_V1 = "/sys/fs/cgroup/memory/memory"
_DIGITS = 20  # a longer number is nonsense
_NO_LIMIT = 1 << 60  # what version 1 writes for none is a little less than 2**63


def memory(host: Host) -> tuple[int, int]:
    """Bytes in all and bytes free; -1 where they are not known. A container's limit counts where it is lower."""
    told = _meminfo(host)
    total, free = told.get("MemTotal", -1), told.get("MemAvailable", told.get("MemFree", -1))
    for limit, used in _limits(host):
        if 0 <= limit < _NO_LIMIT:
            total = min(total, limit) if total >= 0 else limit
            free = min(free, max(0, limit - used)) if free >= 0 else max(0, limit - used)
    return total, free


def _meminfo(host: Host) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    told = {}
    for line in (host.text("/proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()[:1]
        if number and number[0].isascii() and number[0].isdigit() and len(number[0]) < _DIGITS:
            told[name] = int(number[0]) * 1024
    return told


def _limits(host: Host) -> list[tuple[int, int]]:
    """Limit and use of each control group above this process that has one. The page cache can be given back."""
    limits = []
    for folder in _groups(host):
        limit = _number(host, f"{folder}/memory.max")
        cached = _statistic(host, f"{folder}/memory.stat", "inactive_file")
        limits.append((limit, max(0, _number(host, f"{folder}/memory.current") - cached)))
    cached = _statistic(host, f"{_V1}.stat", "total_inactive_file")
    limits.append((_number(host, f"{_V1}.limit_in_bytes"), max(0, _number(host, f"{_V1}.usage_in_bytes") - cached)))
    return limits


def _groups(host: Host) -> list[str]:
    """The folders of our control group (version 2) and those above it."""
    lines = (host.text("/proc/self/cgroup") or "").splitlines()
    path = next((line[3:] for line in lines if line.startswith("0::/")), "/")
    steps = [step for step in path.split("/") if step and step != ".."]
    return ["/".join(["/sys/fs/cgroup", *steps[:depth]]) for depth in range(len(steps) + 1)]


def _number(host: Host, path: str) -> int:
    text = host.line(path)
    return int(text) if text.isascii() and text.isdigit() and len(text) < _DIGITS else -1


def _statistic(host: Host, path: str, name: str) -> int:
    for line in (host.text(path) or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isascii() and value.isdigit() and len(value) < _DIGITS:
            return int(value)
    return 0
