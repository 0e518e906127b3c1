"""Measure how fast the statistics of a checkpoint are computed, and in how much memory, against torch.

    python bench/stats.py [--json] [--gb N] [--repeat N] [--folder DIR]

The file is in the page cache. Each contender is a process of its own, which is measured from its start to its end; they
take turns. ``torch`` loads the file with ``mmap=True``, and computes min, max, mean, std, zeros, NaN and infinities of
each tensor, but no histogram and nothing about smaller dtypes. ``torch import`` is the part of its time that only
starts it. Needs torch and numpy.
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
import time
from pathlib import Path

MAKE = """
import sys, torch
path, dtype, nbytes, seed = sys.argv[1], getattr(torch, sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
generator, state, left = torch.Generator().manual_seed(0), {}, nbytes
for index in range(64):
    numel = nbytes // dtype.itemsize // 64
    tensor = torch.randn(numel, generator=generator) * 0.02
    if seed:
        tensor += torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 1e-4
    state[f"layers.{index}.weight"] = tensor.to(dtype)
torch.save(state, path)
"""

TORCH = """
import sys, torch
out = {}
for name, tensor in torch.load(sys.argv[1], mmap=True, weights_only=True).items():
    numbers = tensor.float()
    finite = numbers[numbers.isfinite()] if not bool(numbers.isfinite().all()) else numbers
    std, mean = torch.std_mean(finite)
    out[name] = (finite.min().item(), finite.max().item(), mean.item(), std.item(), (finite == 0).sum().item(),
                 numbers.isnan().sum().item(), numbers.isinf().sum().item())
"""

PEAK = """
import resource, runpy, sys
path, *sys.argv = sys.argv[1:]
try:
    if path == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__")
    else:
        sys.argv.insert(0, path)
        runpy.run_path(path, run_name="__main__")
except SystemExit:
    pass
finally:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


def make(path: Path, dtype: str, nbytes: int, seed: int = 0) -> Path:
    """Write a checkpoint of 64 tensors of random weights; with another seed, slightly different ones."""
    subprocess.run([sys.executable, "-c", MAKE, str(path), dtype, str(nbytes), str(seed)], check=True)
    return path


def run(*arguments: str) -> tuple[float, int]:
    """The seconds that a program takes, and its peak memory in KiB: all pages it touched, mapped files included."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *arguments], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    return time.perf_counter() - start, int(done.stderr.split()[-1])


def measure(contenders: dict[str, tuple[str, ...]], repeat: int) -> dict[str, dict[str, float]]:
    """Run all contenders in turn: the median seconds, and the peak in MiB."""
    runs: dict[str, list[tuple[float, int]]] = {name: [] for name in contenders}
    for _ in range(repeat):
        for name, arguments in contenders.items():
            runs[name].append(run(*arguments))
    return {
        name: {
            "seconds": statistics.median(seconds for seconds, _ in each),
            "best": min(seconds for seconds, _ in each),
            "peak_mib": max(peak for _, peak in each) / 1024,
        }
        for name, each in runs.items()
    }


def show(results: dict[str, dict[str, dict[str, float]]], *, as_json: bool) -> None:
    """Print the tables, or one JSON object."""
    machine = {"python": platform.python_version(), "cores": os.cpu_count()}
    if as_json:
        print(json.dumps({"schema": 1, "machine": machine, "cases": results}))
        return
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    for case, rows in results.items():
        own, other = rows["transload"], rows["torch"]
        times, memory = other["seconds"] / own["seconds"], other["peak_mib"] / own["peak_mib"]
        print(f"{case}: torch takes {times:.2f} times the time and {memory:.1f} times the memory of transload")
        for name, row in rows.items():
            print(f"  {name:<14} {row['seconds']:8.2f} s  best {row['best']:8.2f} s  {row['peak_mib']:8.0f} MiB")


def options_of(text: str) -> argparse.Namespace:
    """The options of both benchmarks."""
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--gb", type=float, default=1.0, help="size of each file (default 1)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each contender (default 3)")
    parser.add_argument("--folder", help="where to write the files (default: the directory for temporary files)")
    return parser.parse_args()


def main() -> int:
    """Write the files, measure, print."""
    options = options_of(__doc__)
    results = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        script, empty = Path(folder, "with_torch.py"), Path(folder, "empty.py")
        script.write_text(TORCH, encoding="utf-8")
        empty.write_text("import torch", encoding="utf-8")
        for dtype in ("float32", "bfloat16"):
            path = str(make(Path(folder, f"{dtype}.pt"), dtype, int(options.gb * 1e9)))
            contenders: dict[str, tuple[str, ...]] = {
                "transload": ("-m", "transload", "inspect", path, "--stats", "--json"),
                "torch": (str(script), path),
                "torch import": (str(empty),),
            }
            results[f"{options.gb:g} GB of {dtype}"] = measure(contenders, options.repeat)
            Path(path).unlink()
    show(results, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
