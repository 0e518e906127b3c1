"""Measure loads from a spinning disk and over a network, which a file system on this machine stands in for.

    python bench/slow.py [--case spinning,network,objects] [--tensors N] [--repeat N] [--json]

tests/slow_disk.py makes readers wait: a spinning disk for each seek and for its rate, a network file system and an
object store for the latency of each request. Nothing is cached before a run. Each run is a new process; contenders
take turns, and the median time counts. "import" is the time of `import torch`, which a prefetch can overlap. Needs
Linux, /dev/fuse, root and torch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:1] = [ROOT, f"{ROOT}/src"]  # not this folder: its `inspect` would hide the standard library's

from tests.slow_disk import CAN_MOUNT, NETWORK, OBJECTS, SPINNING, mounted

CASES = {"spinning": SPINNING, "network": NETWORK, "objects": OBJECTS}
PROGRAM = """
import sys, time
path = sys.argv[1]
sys.path[:0] = sys.argv[2:]
begin = time.perf_counter()
{first}
import torch
imported = time.perf_counter()
{load}
print(time.perf_counter() - imported, time.perf_counter() - begin)
"""
CONTENDERS = {
    "torch.load": ("", "torch.load(path)", "a.pt"),
    "torch.load(mmap=True), cloned": (
        "",
        "{name: tensor.clone() for name, tensor in torch.load(path, mmap=True).items()}",
        "a.pt",
    ),
    "transload.load": ("", "import transload; transload.load(path)", "a.pt"),
    "transload.prefetch, transload.load": (
        "import transload; transload.prefetch(path)",
        "transload.load(path)",
        "a.pt",
    ),
    "safetensors, cloned": (
        "from safetensors.torch import load_file",
        "{name: tensor.clone() for name, tensor in load_file(path).items()}",
        "a.safetensors",
    ),
    "transload.load, .safetensors": ("", "import transload; transload.load(path)", "a.safetensors"),
}


def main() -> int:
    """Write the files, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", default=",".join(CASES), help="which of them (default all)")
    parser.add_argument("--tensors", type=int, default=64, help="of 4 MiB each (default 64)")
    parser.add_argument("--repeat", type=int, default=3, help="turns for each contender (default 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if not CAN_MOUNT:
        print("bench/slow.py: needs Linux, /dev/fuse and root", file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        write_files(Path(name), options.tensors)
        for case in options.case.split(","):
            runs: dict[str, list[tuple[float, float, dict[str, int]]]] = {who: [] for who in CONTENDERS}
            for _ in range(options.repeat):
                for who, run in runs.items():
                    run.append(measure(Path(name), case, who))
            base = statistics.median(seconds for seconds, _, _ in runs["torch.load"])
            for who, run in runs.items():
                load = statistics.median(seconds for seconds, _, _ in run)
                whole = statistics.median(seconds for _, seconds, _ in run)
                rows.append({"case": case, "who": who, "load": load, "whole": whole, "times": base / load, **run[0][2]})
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    for row in rows:
        print(
            f"{row['case']:10} {row['who']:36} {row['load']:7.2f} s  {row['times']:5.1f} x  with import torch "
            f"{row['whole']:6.2f} s  {row['reads']:5} reads, {row['most at once']:3} at once, {row['seeks']:4} seeks"
        )
    return 0


def write_files(folder: Path, count: int) -> None:
    """A state dict as a ``.pt`` and as a safetensors file."""
    import torch

    import transload

    torch.save({f"model.layers.{index}.weight": torch.randn(1024, 1024) for index in range(count)}, folder / "a.pt")
    transload.convert(folder / "a.pt", folder / "a.safetensors")


def measure(folder: Path, case: str, who: str) -> tuple[float, float, dict[str, int]]:
    """The time of a load after ``import torch``, the time with it, and what the file system counted."""
    first, load, file = CONTENDERS[who]
    code = PROGRAM.format(first=first, load=load)
    with mounted(folder, CASES[case]) as (mount, end):
        command = [sys.executable, "-c", code, str(mount / file), f"{ROOT}/src"]
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        answer = subprocess.run(command, check=True, capture_output=True, text=True, env=environ).stdout
        load_seconds, whole = map(float, answer.split())
        return load_seconds, whole, end()


if __name__ == "__main__":
    sys.exit(main())
