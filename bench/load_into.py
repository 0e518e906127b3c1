"""Measure the memory and time that it takes to load a file into a model: ratios, each contender in its own process.

    python bench/load_into.py [--json] [--megabytes N] [--repeat N]

The peak is the largest resident size of a process, minus that of one that only has the same imports and creates a meta
model. A model alone takes as much as its file; the rest is what the contender needs in addition. Files are in the page
cache. Needs torch.
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
from dataclasses import dataclass
from pathlib import Path

LAYERS = 24

MODEL = f"""
import resource, sys, time
import torch
from transload import load_into
path, width = sys.argv[1], int(sys.argv[2])
def model(device):
    layers = torch.nn.Sequential(*(torch.nn.Linear(width, width, device="meta") for _ in range({LAYERS})))
    return layers.to_empty(device=device)
"""

SAVE = """
state = model("cpu").state_dict()
for name, tensor in state.items():
    tensor.fill_(1) if "bias" in name else tensor.uniform_(-1, 1)
torch.save({"epoch": 1, "state_dict": state}, path)
torch.save({name: tensor.half() for name, tensor in state.items()}, path + ".half")
"""

DONE = """
seconds = time.perf_counter() - start
assert net is None or float(net[-1].bias.detach().sum()) == width, "the values differ from those saved"
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(peak, seconds)
"""

NOTHING = "nothing"
CONTENDERS: dict[str, tuple[str, str]] = {  # the preparation, and the call that is measured
    NOTHING: ("model('meta'); net = None", ""),
    "load_into": ("net = model('cpu')", "load_into(net, path)"),
    "torch.load + load_state_dict": ("net = model('cpu')", "net.load_state_dict(torch.load(path)['state_dict'])"),
    "torch.load(mmap=True) + load_state_dict": (
        "net = model('cpu')",
        "net.load_state_dict(torch.load(path, mmap=True)['state_dict'])",
    ),
    "load_into, meta model": ("net = model('meta')", "load_into(net, path)"),
    "torch.load + assign, meta model": (
        "net = model('meta')",
        "net.load_state_dict(torch.load(path)['state_dict'], assign=True)",
    ),
    "load_into, cast from float16": ("net = model('cpu')", "load_into(net, path + '.half', cast=True)"),
    "torch.load + load_state_dict, from float16": (
        "net = model('cpu')",
        "net.load_state_dict(torch.load(path + '.half'))",
    ),
}


@dataclass
class Row:
    """One contender: its peak beyond that of the imports, as a multiple of the model's size, and its time."""

    what: str
    ratio: float
    megabytes: float
    seconds: float


def main() -> int:
    """Write the files, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--megabytes", type=int, default=600, help="size of the model (default 600)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each contender (default 3)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.pt")
        width = int((options.megabytes * 1e6 / 4 / LAYERS) ** 0.5)
        run(MODEL + SAVE, path, width)
        show(measure(path, width, options.repeat), path.stat().st_size, as_json=options.json)
    return 0


def run(code: str, path: Path, width: int) -> str:
    """Run a program in its own process, and return what it prints."""
    command = [sys.executable, "-c", code, str(path), str(width)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def measure(path: Path, width: int, repeat: int) -> list[Row]:
    """Run every contender in turn; the median of each."""
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTENDERS}
    for _ in range(repeat):
        for name, (before, work) in CONTENDERS.items():
            code = f"{MODEL}{before}\nstart = time.perf_counter()\n{work}\n{DONE}"
            peak, seconds = map(float, run(code, path, width).split())
            results[name].append((peak, seconds))
    medians = {
        name: tuple(statistics.median(values) for values in zip(*runs, strict=True)) for name, runs in results.items()
    }
    base = medians.pop(NOTHING)[0]
    size = path.stat().st_size
    return [Row(name, (peak - base) / size, (peak - base) / 1e6, time_) for name, (peak, time_) in medians.items()]


def show(rows: list[Row], size: int, *, as_json: bool) -> None:
    """Print the table, or one JSON object with the machine."""
    machine = {"python": platform.python_version(), "cores": os.cpu_count(), "system": platform.system()}
    if as_json:
        out = {"schema": 1, "machine": machine, "size": size, "rows": [vars(row) for row in rows]}
        print(json.dumps(out, indent=1))
        return
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    print(f"a model of {size / 1e6:.0f} MB; peak beyond the imports, as a multiple of that")
    for row in rows:
        print(f"  {row.what:<46} {row.ratio:5.2f} ×  {row.megabytes:6.0f} MB  {row.seconds:6.2f} s")


if __name__ == "__main__":
    sys.exit(main())
