"""Measure the time and memory of reading a checkpoint without running it: ratios, each measured in one run.

    python bench/inspect.py [--json] [--repeat N]

Contenders take turns, the median of each counts, and every contender works in this process on a file in the page
cache. Tools that are not installed are left out, with a note. Needs torch to write the files; transload works without.
"""

from __future__ import annotations

import os
import sys

if sys.path[0] and sys.path[0] == __file__.rpartition(os.sep)[0]:
    del sys.path[0]  # or `import inspect` would find this file

import argparse
import json
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SMALL, LARGE = 10_000_000, 10_000_000_000
TENSORS, MANY = 300, 20_000


@dataclass
class Row:
    """One measured ratio and its goal."""

    what: str
    value: float
    goal: str
    met: bool
    detail: str


def main() -> int:
    """Write the files, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--repeat", type=int, default=7, help="turns for each contender (default 7)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            *by_size(Path(folder), options.repeat),
            *many_tensors(Path(folder), max(3, options.repeat // 2)),
            *whole_process(Path(folder), options.repeat),
        ]
    show(rows, as_json=options.json)
    return 0


def by_size(folder: Path, repeat: int) -> list[Row]:
    """The same tensors, a thousand times as large: the time must stay about the same."""
    small, large = folder / "small.pt", folder / "large.pt"
    sparse_checkpoint(small, SMALL)
    sparse_checkpoint(large, LARGE)
    from transload import inspect

    seconds = take_turns({"small": lambda: inspect(small), "large": lambda: inspect(large)}, repeat * 5)
    ratio = seconds["large"] / seconds["small"]
    peak = peak_memory([sys.executable, "-m", "transload", "inspect", "--json", str(large)])
    size = f"{large.stat().st_size / 1e9:.1f} GB, {large.stat().st_blocks * 512 / 1e6:.1f} MB on disk"
    detail = f"{seconds['large'] * 1e3:.1f} ms against {seconds['small'] * 1e3:.1f} ms, {TENSORS} tensors ({size})"
    return [
        Row("10 GB against 10 MB, time", ratio, "≤ 1.2", ratio <= 1.2, detail),
        Row("10 GB, peak memory in MB", peak / 1e6, "< 60", peak < 60e6, "the whole process, torch not loaded"),
    ]


def many_tensors(folder: Path, repeat: int) -> list[Row]:
    """A file with very many tensors, compared with other tools that read it."""
    import torch

    from transload import inspect

    path = folder / "many.pt"
    torch.save({f"layers.{i}.weight": torch.zeros(4, 4) for i in range(MANY)}, path)
    seconds = take_turns({"transload": lambda: inspect(path), "torch.load": lambda: torch.load(path)}, repeat)
    for name, tool in (("picklescan", picklescan(path)), ("fickling", fickling(path))):
        if tool is None:
            print(f"{name} is not installed: left out", file=sys.stderr)
        else:
            seconds.update(take_turns({name: tool}, 1))
    mine = seconds.pop("transload")
    return [
        Row(
            f"{name} against inspect, {MANY:,} tensors",
            other / mine,
            "≥ 3",
            other >= 3 * mine,
            f"{other:.2f} s to {mine:.2f} s",
        )
        for name, other in seconds.items()
    ]


def whole_process(folder: Path, repeat: int) -> list[Row]:
    """The complete process of ``inspect --json``, compared with importing torch."""
    import torch

    path = folder / "tiny.pt"
    torch.save({"weight": torch.zeros(4, 4)}, path)
    mine = [sys.executable, "-m", "transload", "inspect", "--json", str(path)]
    seconds = take_turns(
        {"mine": lambda: run(mine), "torch": lambda: run([sys.executable, "-c", "import torch"])}, repeat
    )
    ratio = seconds["mine"] / seconds["torch"]
    detail = f"{seconds['mine'] * 1e3:.0f} ms against {seconds['torch'] * 1e3:.0f} ms"
    return [Row("inspect --json against import torch", ratio, "< 0.1", ratio < 0.1, detail)]


def sparse_checkpoint(path: Path, nbytes: int) -> None:
    """Write a checkpoint with torch, with holes in the file for its storages."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        state = {f"layers.{i}.weight": torch.empty(nbytes // 4 // TENSORS) for i in range(TENSORS)}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(state, path)


def picklescan(path: Path) -> Callable[[], object] | None:
    """picklescan on the file, as in its command line."""
    try:
        from picklescan.scanner import scan_file_path
    except ImportError:
        return None
    return lambda: scan_file_path(str(path))


def fickling(path: Path) -> Callable[[], object] | None:
    """fickling on the pickle in the file."""
    try:
        from fickling.analysis import check_safety
        from fickling.fickle import Pickled
    except ImportError:
        return None
    import zipfile

    def judge() -> object:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            return check_safety(Pickled.load(archive.read(name)))

    return judge


def take_turns(contenders: dict[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """The median time of each contender in seconds; each has one turn in every round."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeat):
        for name, work in contenders.items():
            start = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def run(command: list[str]) -> None:
    """Run a command, and discard its output."""
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)


def peak_memory(command: list[str]) -> int:
    """The peak resident size in bytes of a command (which may exit with 1): that of the only child of a process."""
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=False);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    out = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, check=True)
    return int(out.stdout) * (1 if sys.platform == "darwin" else 1024)


def show(rows: list[Row], *, as_json: bool) -> None:
    """Print the table, or one JSON object with the machine."""
    import torch

    machine: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if as_json:
        print(json.dumps({"schema": 1, "machine": machine, "rows": [vars(row) for row in rows]}, indent=1))
        return
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    for row in rows:
        print(f"{'✓' if row.met else '✗'} {row.what:<46} {row.value:7.2f}  goal {row.goal:<6}  {row.detail}")


if __name__ == "__main__":
    sys.exit(main())
