"""Measure how fast a checkpoint is saved from a GPU: bench/save.py with tensors on the device, and the limits.

    python bench/gpu/save.py [--megabytes N] [--small N] [--repeat N] [--folder DIR]

First the limits of the machine: copies from the device into pinned memory, ``cp`` of the same bytes, and plain writes,
each with a flush. Then bench/save.py --device cuda. Exits with 1 if a goal is missed. tests/gpu/test_save.py checks
that what is saved is correct.
"""

from __future__ import annotations

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path[:1] = [ROOT, f"{ROOT}/src"]

import argparse
import subprocess
import tempfile
import time
from pathlib import Path

import torch


def main() -> int:
    """Measure, print; return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=4000, help="size of the large case (default 4000)")
    parser.add_argument("--small", type=int, default=20_000, help="tensors of the small case (default 20000)")
    parser.add_argument("--repeat", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--folder", default=None, help="where to write (default: the directory for temporary files)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        limits(Path(folder, "limits"), options.megabytes)
    command = [sys.executable, f"{ROOT}/bench/save.py", "--device", "cuda", "--megabytes", str(options.megabytes)]
    command += ["--small", str(options.small), "--repeat", str(options.repeat)]
    command += ["--folder", options.folder] if options.folder else []
    paths = os.pathsep.join([f"{ROOT}/src", os.environ.get("PYTHONPATH", "")])
    return subprocess.run(command, check=False, env={**os.environ, "PYTHONPATH": paths}).returncode


def limits(path: Path, megabytes: int) -> None:
    """Print the speeds of the machine with the same number of bytes: from the device, and to the disk."""
    nbytes = megabytes * 1_000_000
    on_device = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
    pinned = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    torch.cuda.synchronize()
    start_time = time.perf_counter()
    for start in range(0, nbytes, len(pinned)):
        part = on_device[start : start + len(pinned)]
        pinned[: len(part)].copy_(part, non_blocking=True)
    torch.cuda.synchronize()
    print(f"limit: device to pinned memory {nbytes / 1e9 / (time.perf_counter() - start_time):.2f} GB/s")
    host = on_device.cpu()
    del on_device
    with path.open("wb") as file:
        start_time = time.perf_counter()
        file.write(memoryview(host.numpy()))
        file.flush()
        os.fsync(file.fileno())
    print(f"limit: write + fsync {nbytes / 1e9 / (time.perf_counter() - start_time):.2f} GB/s")
    start_time = time.perf_counter()
    subprocess.run(["cp", str(path), f"{path}.copy"], check=True)  # noqa: S607 - from the system
    os.sync()
    print(f"limit: cp + sync {nbytes / 1e9 / (time.perf_counter() - start_time):.2f} GB/s", flush=True)
    path.unlink()
    Path(f"{path}.copy").unlink()


if __name__ == "__main__":
    sys.exit(main())
