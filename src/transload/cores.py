"""How many threads of this process can run at the same time."""

from __future__ import annotations

import os

__all__ = ["cores"]

_GROUP = "/sys/fs/cgroup"


def cores(root: str = "") -> int:
    """Processors this process may use: those it is bound to, and no more than the time its container is given."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(root)
    return max(1, min(bound, quota) if quota else bound)


def _quota(root: str) -> int:
    """Processors' worth of time the control group has, rounded up; 0 if it is not limited."""
    first = _words(f"{root}{_GROUP}/cpu.max")
    if len(first) != 2:
        first = _words(f"{root}{_GROUP}/cpu/cpu.cfs_quota_us") + _words(f"{root}{_GROUP}/cpu/cpu.cfs_period_us")
    if len(first) != 2 or not all(word.isdigit() for word in first):  # "max", or -1
        return 0
    time, period = map(int, first)
    return -(-time // period) if period else 0


def _words(path: str) -> list[str]:
    try:
        with open(path, encoding="ascii") as file:  # noqa: PTH123 - pathlib costs ten milliseconds
            return file.read().split()
    except (OSError, ValueError):
        return []
