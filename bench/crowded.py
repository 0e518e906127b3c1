"""Measure loads with few cores, with other programs on them, and with a quota, against torch.load.

    python bench/crowded.py [--device cuda] [--cores 1,2,4] [--megabytes N] [--repeat N] [--json]

For each number of cores: idle, with one busy process on each core, and with a quota of half of them (by a control
group, which needs root). Each run is a new process, in turn, that has imported torch and made the device ready; the
file is in the page cache. The first load and the median of two later ones count, each as the median of all turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:1] = [ROOT, f"{ROOT}/src"]  # not this folder: its `inspect` would hide the standard library's

from bench.contest.cache import warm
from bench.contest.cases import Case, size, write

PROGRAM = """
import os, sys, time
path, device, cores, group, who, *more = sys.argv[1:]
sys.path[:0] = more
os.sched_setaffinity(0, map(int, cores.split(",")))
import torch
load = torch.load
if who == "transload":
    from transload import load
torch.ones(1, device=device)
if group:
    with open(f"{group}/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
for _ in range(3):
    begin = time.perf_counter()
    loaded = load(path, map_location=device)
    if device == "cuda":
        torch.cuda.synchronize()
    print(time.perf_counter() - begin, flush=True)
    del loaded
os._exit(0)
"""
BUSY = """
import os, sys
core, parent = map(int, sys.argv[1:])
os.sched_setaffinity(0, [core])
while os.getppid() == parent:
    sum(range(10**6))
"""
GROUPS = Path("/sys/fs/cgroup")


def main() -> int:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--cores", default="1,2,4", help="numbers of cores; those that are not there are left out")
    parser.add_argument("--megabytes", type=int, default=800, help="size of the file, in 200 tensors (default 800)")
    parser.add_argument("--repeat", type=int, default=3, help="turns for each program (default 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    case = Case("crowded", 200, options.megabytes * 2_500)  # numbers of two bytes
    allowed = sorted(os.sched_getaffinity(0))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        write(case, Path(name), [".pt"])
        path = next(Path(name).iterdir())
        warm(str(path))
        for count in [int(each) for each in options.cores.split(",") if int(each) <= len(allowed)]:
            for state in ("idle", "busy", "quota"):
                seconds = measure(path, allowed[:count], state, options)
                rows += [{"cores": count, "state": state, "who": who, **each} for who, each in seconds.items()]
    if options.json:
        print(json.dumps({"bytes": size(case), "rows": rows}, indent=1))
        return 0
    for ours, theirs in zip(rows[1::2], rows[::2], strict=True):
        times = [f"{theirs[call]:6.2f} s, {ours[call]:6.2f} s: {theirs[call] / ours[call]:4.1f} x" for call in CALLS]
        print(f"{ours['cores']:2} cores, {ours['state']:6} first {times[0]}   later {times[1]}")
    return 0


CALLS = ("first", "later")


def measure(path: Path, cores: list[int], state: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The seconds of first and later loads of both programs; none if a quota cannot be set here."""
    runs: dict[str, list[list[float]]] = {"torch": [], "transload": []}
    with ExitStack() as stack:
        group = ""
        if state == "busy":
            stack.enter_context(busy(cores))
        if state == "quota":
            try:
                group = stack.enter_context(quota(len(cores) / 2))
            except OSError as error:
                print(f"no quota can be set here: {error}", file=sys.stderr)
                return {}
        for _ in range(options.repeat):
            for who, run in runs.items():
                arguments = [str(path), options.device, ",".join(map(str, cores)), group, who, f"{ROOT}/src"]
                command = [sys.executable, "-c", PROGRAM, *arguments]
                answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
                run.append([float(line) for line in answer.split()])
    median = statistics.median
    return {
        who: {"first": median(each[0] for each in run), "later": median(median(each[1:]) for each in run)}
        for who, run in runs.items()
    }


@contextmanager
def busy(cores: list[int]) -> Iterator[None]:
    """A busy process on each core, which ends with this one."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY, str(core), str(os.getpid())]) for core in cores]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextmanager
def quota(cores: float) -> Iterator[str]:
    """A control group that may use so many cores."""
    first_version = GROUPS / "cpu"
    group = (first_version if first_version.exists() else GROUPS) / "transload-bench"
    if not first_version.exists():
        (GROUPS / "cgroup.subtree_control").write_text("+cpu", encoding="ascii")
    group.mkdir()
    try:
        microseconds = int(cores * 100_000)
        if first_version.exists():
            (group / "cpu.cfs_quota_us").write_text(f"{microseconds}", encoding="ascii")
        else:
            (group / "cpu.max").write_text(f"{microseconds} 100000", encoding="ascii")
        yield str(group)
    finally:
        group.rmdir()


if __name__ == "__main__":
    sys.exit(main())
