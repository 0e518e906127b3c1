"""How many threads can run at once: what the process is bound to, and what its container is given."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from transload.io.pool import cores

GROUPS = {
    "a whole number": ({"cpu.max": "300000 100000"}, 3),
    "a part": ({"cpu.max": "50000 100000"}, 1),
    "rounded up": ({"cpu.max": "250000 100000"}, 3),
    "no limit": ({"cpu.max": "max 100000"}, 8),
    "more than there are": ({"cpu.max": "9900000 100000"}, 8),
    "the older way": ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
    "the older way without a limit": ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
    "half of the older way": ({"cpu/cpu.cfs_quota_us": "200000"}, 8),
    "nothing": ({}, 8),
    "nonsense": ({"cpu.max": "a lot"}, 8),
    "no period": ({"cpu.max": "100000 0"}, 8),
    "empty": ({"cpu.max": ""}, 8),
    "not even text": ({"cpu.max": "\xff\xfe 1"}, 8),
}


@pytest.fixture
def _eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


@pytest.mark.usefixtures("_eight")
@pytest.mark.parametrize(("group", "wanted"), GROUPS.values(), ids=GROUPS.keys())
def test_what_a_container_is_given(group: dict[str, str], wanted: int, tmp_path: Path) -> None:
    for name, text in group.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="latin1")
    assert cores(str(tmp_path)) == wanted


def test_a_system_that_binds_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert cores(str(tmp_path)) == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores(str(tmp_path)) == 1


def test_here() -> None:
    assert 1 <= cores() <= (os.cpu_count() or 1)
