"""Measure how often the doctor is right, and how long it takes.

Usage: python bench/doctor.py

With a fake driver: every result of cuInit and every result of NVML that matters, on four kinds of host, every state of
a Windows machine, and Macs. Over the healthy matrix: every torch, every GPU that it has code for, the oldest driver
that works. Also the time of a run without torch, compared with the start of the interpreter, and of a run whose driver
hangs.
"""

from __future__ import annotations

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[0] = ROOT  # to import tests; and this folder has an `inspect`, like the standard library

import statistics
import subprocess
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.diagnose.macs import MACS, machine_of
from tests.diagnose.scenarios import diagnose, named, scenarios
from tests.diagnose.test_healthy_matrix import AROUND, combinations, windows_combinations
from tests.diagnose.windows_scenarios import WINDOWS_SCENARIOS, diagnose_windows
from tests.fake_driver import fake_libcuda, hangs

from transload.diagnose.report import judge_machine

GOAL_RIGHT = 0.95
GOAL_SECONDS = 0.3
GOAL_HANGING = 10.0
REPEATS = 15


def main() -> int:
    """Print the tables; return 1 if a goal is missed."""
    goals = [causes(), false_alarms(), run_time(), hanging()]
    return 0 if all(goals) else 1


def causes() -> bool:
    """Whether the right cause is named often enough."""
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for name, around, world in scenarios():
        with TemporaryDirectory() as folder:
            code = named(diagnose(world, around, Path(folder)))
        total[around] += 1
        right[around] += code in world.truth.split("|")
        if code not in world.truth.split("|"):
            print(f"  wrong: {name}, {around}: named {code or 'nothing'}, the cause is {world.truth or 'nothing'}")
    others = [("windows", name, scenario.truth) for name, scenario in WINDOWS_SCENARIOS.items()]
    others += [("macos", name, "+".join(mac.codes)) for name, mac in MACS.items()]
    by_cause: Counter[tuple[str, str]] = Counter()
    for around, name, truth in others:
        with TemporaryDirectory() as folder:
            if around == "windows":
                code = named(diagnose_windows(WINDOWS_SCENARIOS[name], Path(folder)))
            else:
                findings = judge_machine(machine_of(MACS[name], Path(folder))).findings
                code = "+".join(finding.code for finding in findings)
        total[around] += 1
        right[around] += code == truth
        by_cause[around, truth] += code == truth
        if code != truth:
            print(f"  wrong: {name}, {around}: named {code or 'nothing'}, the cause is {truth or 'nothing'}")
    for around in ("windows", "macos"):
        counts = (f"{truth or 'healthy'} {count}" for (at, truth), count in sorted(by_cause.items()) if at == around)
        print(f"  {around} by cause: {', '.join(counts)}")
    for around in total:
        print(f"cause named, {around:<8} {right[around]:3} of {total[around]}")
    share = right.total() / total.total()
    print(f"cause named, all      {right.total():3} of {total.total()}: {share:.1%} (goal {GOAL_RIGHT:.0%})")
    return share >= GOAL_RIGHT


def false_alarms() -> bool:
    """Whether no machine of the healthy matrix raises an alarm."""
    machines = combinations().values()
    judged = [judge_machine(change(machine)) for change in AROUND.values() for machine in machines]
    judged += map(judge_machine, windows_combinations().values())
    with TemporaryDirectory() as folder:
        for number, mac in enumerate(mac for mac in MACS.values() if mac.codes == ("T08",)):
            judged.append(judge_machine(machine_of(mac, Path(folder, str(number)))))
    alarms = sum(not diagnosis.ok for diagnosis in judged)
    print(f"false alarms         {alarms:4} of {len(judged)} healthy machines (goal 0)")
    return not alarms


def run_time() -> bool:
    """Whether a run without torch takes less than the goal, not counting the start of the interpreter."""
    bare = seconds([sys.executable, "-c", "pass"])
    run = seconds([sys.executable, "-m", "transload", "doctor", "--no-torch", "--json"])
    print(f"run without torch   {run:.3f} s, interpreter {bare:.3f} s: {run - bare:.3f} s beyond (goal {GOAL_SECONDS})")
    return run - bare < GOAL_SECONDS


def hanging() -> bool:
    """Whether a run with torch ends in time although the driver never answers."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "libcuda.so.1").write_bytes(fake_libcuda(overrides={"cuInit": hangs()}))
        run = once([sys.executable, "-m", "transload", "doctor", "--json"], {"LD_LIBRARY_PATH": folder})
    print(f"a driver that hangs  {run:.1f} s (goal {GOAL_HANGING:.0f})")
    return run < GOAL_HANGING


def seconds(command: list[str]) -> float:
    """The median time of some runs."""
    return statistics.median(once(command) for _ in range(REPEATS))


def once(command: list[str], environ: dict[str, str] | None = None) -> float:
    """The time of one run, whatever its exit code."""
    start = time.perf_counter()
    subprocess.run(command, env={**os.environ, **(environ or {})}, stdout=subprocess.DEVNULL, check=False)
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
