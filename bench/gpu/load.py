"""Measure how fast a checkpoint is loaded onto a GPU: every loader in its own process, in turn, results compared.

    python bench/gpu/load.py [--case large,tiny] [--where cache,tmpfs,cold] [--peers FOLDER] [--seconds N] [--json]

Like bench/load.py, with CUDA initialised before the first call and synchronised before the clock is read. Loaders that
bypass the page cache by default are also measured with it. Freed device memory stays with torch's allocator between the
calls of a process. Pinned memory may not count as resident: the host's peak then excludes it. ``--peers`` is a folder
with unpacked wheels of fastsafetensors, InstantTensor and the run:ai streamer (which needs humanize). Needs a CUDA
build of torch and a GPU; ``--device cpu`` tests the benchmark itself without one.
"""

from __future__ import annotations

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path[:1] = [ROOT, f"{ROOT}/src"]

from bench.contest.cases import Case
from bench.contest.contenders import TORCH
from bench.contest.driver import main
from bench.contest.limits import BUFFERED, DIRECT, PINNED_COPY, TO_PINNED
from bench.contest.results import Goal, Place, Results

OURS = "transload.load"
MEMORY_BUDGET = (96 + 64) << 20  # host memory for a load: the ring of pinned memory, and 64 MiB more
CASES = {
    case.name: case
    for case in (
        Case("large", 300, 13_333_333),
        Case("many", 20_000, 25_000),
        Case("tiny", 100_000, 16, "float32"),
        Case("one", 1, 2_000_000_000),
        Case("training", 60, 2041 * 2041, "float32", training=True),
    )
}


def goals(results: Results) -> list[Goal]:
    """The goals of loading to a GPU."""
    cache, tmpfs, cold = (Place("large", where) for where in ("cache", "tmpfs", "cold"))
    tiny = Place("tiny", "cache")
    return [
        results.against(cache, OURS, TORCH, 7),
        results.against(cache, OURS, TORCH, 4, "first"),
        results.against_best(cache, OURS, 4),
        results.of_limit(cache, OURS, TO_PINNED, 0.9),
        results.peak_within(cache, OURS, MEMORY_BUDGET),
        results.against(tmpfs, OURS, "InstantTensor", 1),
        results.against(tmpfs, f"{OURS}, .safetensors", "InstantTensor", 1),
        results.of_limit(tmpfs, OURS, PINNED_COPY, 0.8),
        results.against(tiny, OURS, TORCH, 5),
        results.against(tiny, OURS, "safetensors", 1),
        results.against(tiny, f"{OURS}, .safetensors", "safetensors", 1),
        results.against(cold, OURS, TORCH, 1.5 if direct_is_faster(results, cold) else 1),
    ]


def direct_is_faster(results: Results, cold: Place) -> bool:
    """Whether this disk is at least 1.5 times as fast without the page cache."""
    direct, buffered = results.limit(cold, DIRECT), results.limit(cold, BUFFERED)
    return direct is not None and buffered is not None and direct.speed >= 1.5 * buffered.speed


if __name__ == "__main__":
    sys.exit(main(__doc__.splitlines()[0], CASES, "cuda", goals))
