"""Measure the time from the start of a process until the weights are on the device, with and without a prefetch.

    python bench/start.py [--device cuda] [--where cold,cache] [--size-scale X] [--repeat N] [--peers FOLDER] [--json]

Each run is a new interpreter, in turn, which imports torch, makes the device ready (for CUDA: creates its context) and
loads. "no load" ends there. "after start" is what the load adds: from when the device is ready until the weights are
there. Medians; for a cold run the file is dropped from the page cache before. Needs torch, and Linux for cold runs.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from pathlib import Path

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:1] = [ROOT, f"{ROOT}/src"]  # not this folder: its `inspect` would hide the standard library's

from bench.contest.cache import drop, warm
from bench.contest.cases import Case, size, write

CASE = Case("start", 150, 13_333_333)  # 4 GB of bfloat16
COMMON = """
import sys, time
path, device = sys.argv[1:3]
sys.path[:0] = sys.argv[3:]
{first}
import torch
imported = time.monotonic()
torch.ones(1, device=device)
if device == "cuda":
    torch.cuda.synchronize()
ready = time.monotonic()
{load}
if device == "cuda":
    torch.cuda.synchronize()
print(imported, ready, time.monotonic(), flush=True)
import os
os._exit(0)
"""
PREFETCH = "import transload; transload.prefetch(path)"
OURS = "import transload; loaded = transload.load(path, map_location=device)"
SAFETENSORS = """
from safetensors.torch import load_file
loaded = load_file(path, device=device)
"""
INSTANT = """
import instanttensor
with instanttensor.safe_open(path, framework="pt", device=0) as file:
    loaded = dict(file.tensors())
"""
PROGRAMS = {
    "no load": ("", "", ".pt"),
    "transload.prefetch, transload.load": (PREFETCH, OURS, ".pt"),
    "the same, .safetensors": (PREFETCH, OURS, ".safetensors"),
    "transload.load": ("", OURS, ".pt"),
    "torch.load": ("", "loaded = torch.load(path, map_location=device, weights_only=True)", ".pt"),
    "torch.load(mmap=True)": ("", "loaded = torch.load(path, map_location=device, mmap=True)", ".pt"),
    "safetensors": (
        "",
        "from safetensors.torch import load_file\nloaded = load_file(path, device=device)",
        ".safetensors",
    ),
    "InstantTensor": ("", INSTANT, ".safetensors"),
}
"""What each does before torch is imported, how it loads, and its file."""


def main() -> int:
    """Run every program in turn, and print the medians."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--where", default="cold,cache")
    parser.add_argument("--size-scale", type=float, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--program", default="", help="only programs whose names contain one of these, by commas")
    parser.add_argument("--peers", default="", help="a folder with unpacked wheels of other loaders")
    parser.add_argument("--folder", default=None, help="for the files, on the disk to measure")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    case = CASE.scaled(arguments.size_scale)
    parts = arguments.program.split(",")
    programs = {name: program for name, program in PROGRAMS.items() if any(part in name for part in parts)}
    results: dict[tuple[str, str], list[list[float]]] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        write(case, Path(folder), [".pt", ".safetensors"])
        for where in arguments.where.split(","):
            for _ in range(arguments.repeat):
                for name, (first, load, suffix) in programs.items():
                    path = f"{folder}/{case.name}{suffix}"
                    (drop if where == "cold" else warm)(path)
                    code = COMMON.format(first=first, load=load)
                    begin = time.monotonic()
                    command = [sys.executable, "-c", code, path, arguments.device, f"{ROOT}/src"]
                    command += [os.path.abspath(arguments.peers)] if arguments.peers else []
                    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
                    if not run.returncode:
                        times = [float(word) - begin for word in run.stdout.split()[-3:]]
                        results.setdefault((where, name), []).append([*times, times[2] - times[1]])
    medians = {key: [statistics.median(column) for column in zip(*rows, strict=True)] for key, rows in results.items()}
    if arguments.json:
        print(json.dumps({f"{where}, {name}": row for (where, name), row in medians.items()}, indent=1))
        return 0
    for where in arguments.where.split(","):
        print(f"\n{size(case) / 1e9:.1f} GB, {where}{'':<24}torch imported   ready   weights there   after start")
        for name in programs:
            row = medians.get((where, name))
            form = "{:>10.2f} s {:>8.2f} s {:>11.2f} s {:>11.2f} s"
            cells = form.format(*row) if row else "not installed, or failed"
            print(f"  {name:<36}{cells}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
