"""Measure how fast a checkpoint is loaded into memory: every loader in its own process, in turn, results compared.

    python bench/load.py [--case large,small] [--where cache,tmpfs,cold] [--repeat N] [--json]

The first call in a process and later ones are reported separately, each as a median, next to the limits of the
hardware with the same file. Memory that a call freed goes back to the system before the next. "only mapped" has read
nothing yet, "touched" has read one byte of every page; only "cloned" has its own memory, as after torch.load and
transload.load. GB/s count the tensors' bytes; × is how many times as fast as torch.load, or, for contenders that fill a
model, as torch.load with load_state_dict. The host's peak is the resident memory in addition to that before the call;
pages of a mapped file count. Loaders that are not installed are left out, with a note. Needs torch, and Linux for some
measurements.
"""

from __future__ import annotations

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:1] = [ROOT, f"{ROOT}/src"]  # not this folder: its `inspect` would hide the standard library's

from bench.contest.cases import Case
from bench.contest.contenders import INTO, TORCH
from bench.contest.driver import main
from bench.contest.results import Goal, Place, Results

CASES = {
    case.name: case
    for case in (
        Case("large", 300, 3_333_333),
        Case("small", 20_000, 64, "float32"),
        Case("many", 20_000, 25_000),
        Case("tiny", 100_000, 16, "float32"),
        Case("training", 60, 2041 * 2041, "float32", training=True),
        Case("one", 1, 2_000_000_000),
    )
}


def goals(results: Results) -> list[Goal]:
    """The goals of loading to the CPU, on two cores."""
    large, small = Place("large", "cache"), Place("small", "cache")
    return [
        results.against(large, "transload.load", TORCH, 2),
        results.against(large, "transload.load", TORCH, 2, "first"),
        results.against(large, "transload.load_into", INTO, 4),
        results.against(small, "transload.load", TORCH, 5),
        results.against(small, "transload.load", TORCH, 5, "first"),
        results.against(small, "transload.load", "safetensors, only mapped", 1),
        results.against(small, "transload.load, .safetensors", "safetensors, only mapped", 1),
    ]


if __name__ == "__main__":
    sys.exit(main(__doc__.splitlines()[0], CASES, "cpu", goals))
