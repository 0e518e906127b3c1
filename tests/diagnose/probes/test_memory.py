from __future__ import annotations

from pathlib import Path

import pytest
from tests.diagnose.cases import cases
from tests.diagnose.trees import Tree, tree_host

from transload.diagnose.host import Host
from transload.diagnose.probes.system import memory

GB = 1 << 30
MEMINFO = (
    f"MemTotal:       {64 * GB // 1024} kB\nMemFree:        {1 * GB // 1024} kB\nMemAvailable:   {40 * GB // 1024} kB\n"
)
GROUP = "/sys/fs/cgroup/kubepods/pod1"


@cases(
    ("tree", "expected"),
    [
        ({}, (-1, -1)),
        ({"/proc/meminfo": b"\xff\xfe garbage: x\n"}, (-1, -1)),
        ({"/proc/meminfo": MEMINFO}, (64 * GB, 40 * GB)),
        ({"/proc/meminfo": MEMINFO, "/sys/fs/cgroup/memory.max": "max\n"}, (64 * GB, 40 * GB)),
        (
            {
                "/proc/meminfo": MEMINFO,
                "/proc/self/cgroup": "0::/kubepods/pod1\n",
                f"{GROUP}/memory.max": f"{8 * GB}\n",
                f"{GROUP}/memory.current": f"{6 * GB}\n",
                f"{GROUP}/memory.stat": f"anon 1\ninactive_file {1 * GB}\n",
            },
            (8 * GB, 3 * GB),
        ),
        (
            {
                "/proc/meminfo": MEMINFO,
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GB}\n",
                "/sys/fs/cgroup/memory/memory.usage_in_bytes": f"{5 * GB}\n",
            },
            (4 * GB, 0),
        ),
        (
            {"/proc/meminfo": MEMINFO, "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"},
            (64 * GB, 40 * GB),
        ),
    ],
)
def test_memory_is_the_machines_or_the_containers_where_that_is_less(
    tree: Tree, expected: tuple[int, int], tmp_path: Path
) -> None:
    assert memory(tree_host(tmp_path, tree)) == expected


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="there is no /proc")
def test_this_machine_has_some() -> None:
    total, free = memory(Host())
    assert 0 < free <= total
