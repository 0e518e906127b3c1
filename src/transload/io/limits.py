"""What this process may use of the machine: cores and memory, on Linux as its control groups limit them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator

from transload.frozen import NamedTuple

_GROUPS = "/sys/fs/cgroup"
_LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""What a group reports in versions 2 and 1: its limit, what it uses, and how much of that can be reclaimed."""
_NO_LIMIT = 1 << 60  # without a limit, version 1 reports a little less than 2**63


class MemoryStatus(NamedTuple):
    """Bytes of memory of a Windows machine; the commit limit is memory and page file together. -1: unknown."""

    total: int = -1
    free: int = -1
    commit_limit: int = -1
    commit_free: int = -1


ReadText = Callable[[str], str]
"""Returns the text of a file; empty if it cannot be read."""


def read_text(path: str) -> str:
    """The text of a file of this machine; empty if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def cores(read: ReadText = read_text) -> int:
    """The cores this process may use: its CPU affinity, limited by the CPU quotas of its control groups."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _groups(read, "cpu"):
        version_1 = f"{group}/cpu.cfs_quota_us", f"{group}/cpu.cfs_period_us"
        words = (read(f"{group}/cpu.max") or " ".join(map(read, version_1))).split()
        if len(words) == 2 and all(map(str.isdecimal, words)) and int(words[1]):  # not "max", or -1
            bound = min(bound, -(-int(words[0]) // int(words[1])))  # quota divided by period, rounded up
    return max(1, bound)


def memory(read: ReadText | None = None) -> tuple[int, int]:
    """Total and available bytes, -1 if unknown, limited by control groups. ``read`` is for the files of Linux."""
    if read is None and sys.platform == "win32":
        return memory_status()[:2]
    if read is None and sys.platform == "darwin":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), -1
    read = read or read_text
    sizes = {
        name: int(kib) << 10 for name, kib in re.findall(r"^(\w+):\s*(\d{1,19})\b", read("/proc/meminfo"), re.MULTILINE)
    }
    total, free = sizes.get("MemTotal", -1), sizes.get("MemAvailable", sizes.get("MemFree", -1))
    for group in _groups(read, "memory"):
        for most, used, inactive in _LIMITS:
            limit = _number(read(f"{group}/{most}"))
            if 0 <= limit < _NO_LIMIT:
                reclaimable = max(0, _number(read(f"{group}/memory.stat"), inactive))
                left = max(0, limit - max(0, _number(read(f"{group}/{used}")) - reclaimable))
                total = min(total, limit) if total >= 0 else limit
                free = min(free, left) if free >= 0 else left
    return total, free


def memory_status() -> MemoryStatus:
    """What ``GlobalMemoryStatusEx`` of Windows returns; nothing is known elsewhere."""
    import ctypes

    fields = (ctypes.c_uint64 * 8)(64)  # the size of the structure and the load, 32 bits each, then seven amounts
    load = getattr(ctypes, "WinDLL", None)
    if load is None or not load("kernel32.dll").GlobalMemoryStatusEx(ctypes.byref(fields)):
        return MemoryStatus()
    return MemoryStatus(*fields[1:5])


def _groups(read: ReadText, controller: str) -> Iterator[str]:
    """The folders of the process's control groups, and of those around them, in both versions of Linux's interface.

    In a container its own group is usually the root; otherwise the limit may be that of a service or a batch job.
    """
    yield from (_GROUPS, f"{_GROUPS}/{controller}")
    for line in read("/proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" or controller in controllers.split(","):
            folder = _GROUPS if number == "0" else f"{_GROUPS}/{controller}"
            for name in path.split("/"):
                if name not in ("", ".."):
                    folder = f"{folder}/{name}"
                    yield folder


def _number(text: str, name: str = "") -> int:
    """The number at the beginning of a text, or of its line with that name; -1 if there is none."""
    found = re.search(rf"^{name}\s*(\d{{1,19}})\b", text, re.MULTILINE)
    return int(found[1]) if found else -1
