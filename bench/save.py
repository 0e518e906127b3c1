"""Measure the time and memory that it takes to save: ratios, each saver in its own process, in turn.

    python bench/save.py [--json] [--megabytes N] [--small N] [--repeat N] [--folder DIR] [--device cuda]

Both sides end with the file on the disk: transload flushes by itself, and the file of torch.save is flushed afterwards.
Every run overwrites the file of the run before, as training does. The peak is the largest resident size during the
save, minus that right before it; or that of the first save of the process, if it is larger. torch loads what was saved
and compares it before anything is measured. ``limit`` is the disk alone: four threads write as many bytes, bypassing
the page cache if the file system allows it, into a new file whose space was allocated before. Needs torch.
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

WATCH = """
import os, threading

def resident():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

class Watch(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.before = self.peak = resident()
        self.over = threading.Event()
    def run(self):
        while not self.over.wait(0.005):
            self.peak = max(self.peak, resident())
"""
"""The start of a program that measures how much memory it takes."""

PROGRAM = """
import gc, mmap, os, resource, sys, threading, time
import torch
import transload.saving
case, count, numel, device, path, saver, runs = sys.argv[1:]
torch.manual_seed(0)
parts = torch.rand(int(count) * int(numel), device=device).split(int(numel))
value = {f"layers.{number}.weight": part.clone() for number, part in enumerate(parts)}
del parts
if device != "cpu":
    torch.cuda.synchronize()

def flush(path):
    descriptor = os.open(path, os.O_RDWR)
    os.fsync(descriptor)
    os.close(descriptor)

def by_torch():
    torch.save(value, path)
    flush(path)

def by_torch_pinned():
    from torch.utils.serialization import config
    config.save.use_pinned_memory_for_d2h = True
    by_torch()

def by_transload():
    transload.saving.save(value, path)

def by_transload_in_the_background():
    before = time.perf_counter()
    future = transload.saving.save_async(value, path)
    print("called", time.perf_counter() - before)
    future.result()

def limit():
    nbytes = sum(tensor.nbytes for tensor in value.values())
    block = mmap.mmap(-1, 4 << 20)
    block.write(os.urandom(len(block)))
    starts = iter(range(0, nbytes // len(block) * len(block), len(block)))
    if os.path.exists(path):
        os.unlink(path)
        os.sync()
    begun = time.perf_counter()
    direct = os.O_DIRECT if bypasses_cache else 0
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | direct, 0o666)
    os.posix_fallocate(descriptor, 0, nbytes)

    def write():
        for start in starts:
            os.pwrite(descriptor, block, start)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.fsync(descriptor)
    os.close(descriptor)
    return time.perf_counter() - begun

def supports_direct():
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o666))
        return True
    except (OSError, AttributeError):
        return False

bypasses_cache = supports_direct()
save = globals()[saver]
first = Watch()
first.start()
save()
first.over.set()
first.join()
if saver != "limit":
    loaded = torch.load(path, map_location=device)
    assert list(loaded) == list(value)
    assert all(torch.equal(loaded[name], value[name]) for name in value)
    del loaded
for _ in range(int(runs)):
    gc.collect()
    os.sync()
    watch = Watch()
    watch.start()
    begun, used = time.perf_counter(), time.process_time()
    measured = save()
    seconds, cpu = time.perf_counter() - begun, time.process_time() - used
    watch.over.set()
    watch.join()
    print("run", measured or seconds, cpu, max(watch.peak - watch.before, first.peak - first.before), flush=True)
"""

TORCH, OURS, LIMIT = "by_torch", "by_transload", "limit"
NAMES = {
    TORCH: "torch.save + fsync",
    "by_torch_pinned": "torch.save, pinned + fsync",
    OURS: "transload.save",
    "by_transload_in_the_background": "transload.save_async().result()",
    LIMIT: "limit: the disk alone",
}


@dataclass
class Row:
    """One saver on one case: medians."""

    case: str
    saver: str
    seconds: float
    cpu: float
    peak: float
    called: float
    """Seconds until ``save_async`` returned; 0 for the others."""


def main() -> int:
    """Measure, print, and return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--megabytes", type=int, default=4000, help="size of the large case (default 4000)")
    parser.add_argument("--small", type=int, default=20_000, help="tensors of the small case (default 20000)")
    parser.add_argument("--repeat", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--folder", default=None, help="where to write (default: the directory for temporary files)")
    parser.add_argument("--device", default="cpu", help="where the tensors are (default cpu)")
    parser.add_argument("--case", choices=["large", "small"], help="only this one")
    options = parser.parse_args()
    cases = {
        "large": (100, options.megabytes * 10_000 // 4),
        "small": (options.small, 64),
    }
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = [
            row
            for case, (count, numel) in cases.items()
            if options.case in (None, case)
            for row in measure(case, count, numel, options, Path(folder, "a.pt"))
        ]
    return show(rows, options)


def measure(case: str, count: int, numel: int, options: argparse.Namespace, path: Path) -> list[Row]:
    """Run every saver in turn, for some rounds."""
    savers = [name for name in NAMES if options.device != "cpu" or name != "by_torch_pinned"]
    if case == "small":
        savers.remove(LIMIT)  # meaningless for so few bytes
    results: dict[str, list[tuple[float, ...]]] = {name: [] for name in savers}
    for _ in range(options.repeat):
        for saver in savers:
            runs = "2" if case == "large" else "5"
            command = [
                sys.executable,
                "-c",
                WATCH + PROGRAM,
                case,
                str(count),
                str(numel),
                options.device,
                str(path),
                saver,
                runs,
            ]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
            called = [float(line.split()[1]) for line in out if line.startswith("called")][1:]
            times = [tuple(map(float, line.split()[1:])) for line in out if line.startswith("run")]
            results[saver] += [(*values, called[number] if called else 0.0) for number, values in enumerate(times)]
    medians = {
        name: [statistics.median(column) for column in zip(*runs, strict=True)] for name, runs in results.items()
    }
    return [Row(case, name, *values) for name, values in medians.items()]


def goals(rows: list[Row], device: str) -> list[tuple[str, float, float]]:
    """The claims: what is compared, the ratio, and its lower bound."""
    by_name = {(row.case, row.saver): row for row in rows}

    def speedup(case: str) -> float:
        return by_name[case, TORCH].seconds / by_name[case, OURS].seconds

    bounds = {"large": 1.0 if device == "cpu" else 2.0, "small": 3.0}
    cases = sorted({row.case for row in rows})
    out = [(f"{case}: torch.save / transload.save", speedup(case), bounds[case]) for case in cases]
    if device != "cpu" and "large" in cases:
        limit = by_name["large", LIMIT].seconds
        out.append(("large: limit / transload.save", limit / by_name["large", OURS].seconds, 1 / 1.15))
    return out


def show(rows: list[Row], options: argparse.Namespace) -> int:
    """Print the table, or JSON; return 1 if a goal is missed."""
    claims = goals(rows, options.device)
    if options.json:
        as_dicts = [{"what": what, "ratio": ratio, "goal": goal} for what, ratio, goal in claims]
        print(json.dumps({"schema": 1, "rows": [asdict(row) for row in rows], "goals": as_dicts}))
    else:
        print(
            f"{platform.machine()}, {os.cpu_count()} processors, {options.megabytes} MB, {options.small} small tensors"
        )
        print(f"{'':6} {'':34} {'seconds':>8} {'GB/s':>6} {'CPU s':>7} {'peak MB':>8} {'returned after':>15}")
        for row in rows:
            speed = f"{options.megabytes / 1000 / row.seconds:6.2f}" if row.case == "large" else f"{'':6}"
            called = f"{row.called:13.3f} s" if row.called else ""
            numbers = f"{row.seconds:8.3f} {speed} {row.cpu:7.3f} {row.peak / 1e6:8.1f} {called}"
            print(f"{row.case:6} {NAMES[row.saver]:34} {numbers}")
        for what, ratio, goal in claims:
            print(f"{what}: {ratio:.2f} (goal {goal:.2f}{'' if ratio >= goal else ', missed'})")
    return int(any(ratio < goal for _, ratio, goal in claims))


if __name__ == "__main__":
    sys.exit(main())
