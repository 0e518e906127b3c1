"""Measure the time and memory that it takes to convert a ``.pt`` to safetensors: each way in its own process.

    python bench/convert.py [--json] [--gigabytes N] [--tensors N] [--repeat N] [--folder DIR]

The other way is ``torch.load`` and ``safetensors.torch.save_file``. Each run begins in a new interpreter and ends with
the file on the disk: transload flushes by itself, and the other file is flushed afterwards. transload also compares the
checksums of the source and reads its target back, which the other way does not; ``no-verify`` skips that. The time is
that of the work, after the imports; the peak is the largest resident size of the process during it, minus the size
after the imports. Before anything is measured, the files that they write are compared. The disk needs free space for
twice the size. Needs torch and safetensors.
"""

from __future__ import annotations

import os
import sys

if sys.path[0] and sys.path[0] == __file__.rpartition(os.sep)[0]:
    del sys.path[0]  # or `import inspect` would find the file next to this one

import argparse
import json
import platform
import statistics
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

PROGRAM = """
import os, sys, threading, time
way, source, target = sys.argv[1:]

def resident():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def torch_and_safetensors(flushed=True):
    save_file(torch.load(source, weights_only=True), target)
    if flushed:
        descriptor = os.open(target, os.O_RDWR)
        os.fsync(descriptor)
        os.close(descriptor)

if way.startswith("torch"):
    import torch
    from safetensors.torch import save_file
    work = torch_and_safetensors
else:
    from transload.converting import convert
    verify = way == "transload"
    work = lambda: convert(source, target, verify=verify, overwrite=True)

before = peak = resident()
over = threading.Event()

def watch():
    global peak
    while not over.wait(0.005):
        peak = max(peak, resident())

thread = threading.Thread(target=watch, daemon=True)
thread.start()
begun, used = time.perf_counter(), time.process_time()
work()
seconds, cpu = time.perf_counter() - begun, time.process_time() - used
over.set()
thread.join()
print(seconds, cpu, peak - before, peak)
"""

MAKE = """
import sys, torch
count, numel, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
torch.save({f"layers.{number}.weight": torch.rand(numel) for number in range(count)}, path)
"""

DIGEST = """
import hashlib, sys
from safetensors import safe_open
digest = hashlib.sha256()
with safe_open(sys.argv[1], "pt") as opened:
    for name in sorted(opened.keys()):
        tensor = opened.get_tensor(name)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.numpy().data.cast("B"))
print(digest.hexdigest())
"""

WAYS = {
    "torch": "torch.load + safetensors.save_file + fsync",
    "transload": "transload.convert",
    "no-verify": "transload.convert(verify=False)",
}


@dataclass(frozen=True)
class Measured:
    """One way: the median of some runs, and the largest peak."""

    way: str
    seconds: float
    best: float
    cpu: float
    peak_bytes: int
    resident_bytes: int
    runs: int


def child(program: str, *arguments: str | Path) -> str:
    """Run a program, and return what it prints."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    process = subprocess.run(command, check=False, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(process.stderr)
    return process.stdout


def measure(source: Path, folder: Path, repeat: int) -> list[Measured]:
    """Run every way in turn. The first turn checks that all write the same, and puts the source into the page cache."""
    runs_by_way: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    digests = set()
    for turn in range(repeat + 1):
        for way, runs in runs_by_way.items():
            target = folder / f"{way}.safetensors"
            os.sync()
            numbers = [float(word) for word in child(PROGRAM, way, source, target).split()]
            if turn:
                runs.append(numbers)
            else:
                digests.add(child(DIGEST, target))
            target.unlink()
    if len(digests) != 1:
        raise SystemExit("the files do not have the same tensors")
    return [_summary(way, runs) for way, runs in runs_by_way.items()]


def _summary(way: str, runs: list[list[float]]) -> Measured:
    seconds, cpu, peak, resident = zip(*runs, strict=True)
    times = statistics.median(seconds), min(seconds), statistics.median(cpu)
    return Measured(way, *times, int(max(peak)), int(max(resident)), len(runs))


def main() -> None:
    """Write a file, measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--tensors", type=int, default=400)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--folder", help="where to write the files (default: the directory for temporary files)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        source = folder / "model.pt"
        numel = int(arguments.gigabytes * 1e9 / 4 / arguments.tensors)
        child(MAKE, str(arguments.tensors), str(numel), source)
        nbytes = source.stat().st_size
        measured = measure(source, folder, arguments.repeat)
    if arguments.json:
        facts = {"nbytes": nbytes, "python": platform.python_version(), "cores": os.cpu_count()}
        print(json.dumps({**facts, "measured": [asdict(row) for row in measured]}, indent=1))
        return
    base = measured[0]
    print(f"{nbytes / 1e9:.1f} GB in {arguments.tensors} tensors, {os.cpu_count()} cores, median of {base.runs}")
    for row in measured:
        print(
            f"  {WAYS[row.way]:<44} {row.seconds:7.2f} s {nbytes / 1e9 / row.seconds:6.2f} GB/s"
            f"  {base.seconds / row.seconds:5.2f} x  cpu {row.cpu:6.2f} s  peak {row.peak_bytes / 1e6:8.1f} MB"
        )


if __name__ == "__main__":
    main()
