"""What this process may use: its cores, by affinity and by the quotas of its control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from transload.io.limits import ReadText, cores, read_text

GROUPS = {
    "integer quota": ({"cpu.max": "300000 100000"}, 3),
    "fraction of a core": ({"cpu.max": "50000 100000"}, 1),
    "quota rounded up": ({"cpu.max": "250000 100000"}, 3),
    "no limit": ({"cpu.max": "max 100000"}, 8),
    "more cores than exist": ({"cpu.max": "9900000 100000"}, 8),
    "cgroup v1": ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
    "cgroup v1 without a limit": ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
    "cgroup v1 without a period": ({"cpu/cpu.cfs_quota_us": "200000"}, 8),
    "a service": ({"/proc/self/cgroup": "0::/a.slice/b.service\n", "a.slice/b.service/cpu.max": "150000 100000"}, 2),
    "the slice of a service": (
        {
            "/proc/self/cgroup": "0::/a.slice/b.service\n",
            "a.slice/cpu.max": "300000 100000",
            "a.slice/b.service/cpu.max": "max 100000",
        },
        3,
    ),
    "a batch job, cgroup v1": (
        {
            "/proc/self/cgroup": "5:memory:/other\n4:cpu,cpuacct:/slurm/job_7\n0::/\n",
            "cpu/slurm/job_7/cpu.cfs_quota_us": "400000",
            "cpu/slurm/job_7/cpu.cfs_period_us": "100000",
            "cpu/other/cpu.cfs_quota_us": "100000",
            "cpu/other/cpu.cfs_period_us": "100000",
        },
        4,
    ),
    "a group that the container does not show": (
        {"/proc/self/cgroup": "0::/docker/1\n", "cpu.max": "200000 100000"},
        2,
    ),
    "not a list of groups": ({"/proc/self/cgroup": "\xff\xfe a:b\n::"}, 8),
    "no cgroup files": ({}, 8),
    "not numbers": ({"cpu.max": "a lot"}, 8),
    "period of zero": ({"cpu.max": "100000 0"}, 8),
    "empty file": ({"cpu.max": ""}, 8),
    "binary content": ({"cpu.max": "\xff\xfe 1"}, 8),
}


@pytest.fixture
def _affinity_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


def below(folder: Path) -> ReadText:
    """The files of a folder, as if it were the root."""
    return lambda path: read_text(f"{folder}{path}")


@pytest.mark.usefixtures("_affinity_of_eight")
@pytest.mark.parametrize(("group", "expected"), GROUPS.values(), ids=GROUPS.keys())
def test_cgroup_quota_limits_the_cores(group: dict[str, str], expected: int, tmp_path: Path) -> None:
    for name, text in group.items():
        path = tmp_path / name[1:] if name[0] == "/" else tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="latin1")
    assert cores(below(tmp_path)) == expected


def test_without_affinity_the_cpu_count_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert cores(below(tmp_path)) == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores(below(tmp_path)) == 1


def test_cores_of_this_machine() -> None:
    assert 1 <= cores() <= (os.cpu_count() or 1)
