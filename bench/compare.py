"""Measure whether ``doctor --compare`` finds the machines that differ from the others, and how long that takes.

Usage: python bench/compare.py [--nodes 1000] [--rounds 20]

Each round generates reports of identical machines, changes 1 to 20 facts on some of them, and runs ``transload doctor
--compare DIR --json``. Every change must be found with the nodes that have it, and nothing else may be reported. Times
are CPU times.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[0] = ROOT  # to import tests; and this folder has an `inspect`, like the standard library

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.diagnose.fleet import ODDITIES, document, node

from transload.cli.main import main as transload

GOAL_SECONDS = 5.0


def main() -> int:
    """Print a line per round; return 1 if a difference was missed or invented, or it took too long."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    usual = json.dumps(document(node()))
    missed = invented = 0
    slowest = 0.0
    for seed in range(options.rounds):
        rng = random.Random(seed)  # noqa: S311  the same machines in every run
        names = [f"gpu{number:04}" for number in range(options.nodes)]
        chosen = rng.sample(list(ODDITIES), 1 + seed % 20)
        odd = {fact: set(rng.sample(names, rng.randint(1, 3))) for fact in chosen}
        with TemporaryDirectory() as folder:
            for name in names:
                facts = [fact for fact in chosen if name in odd[fact]]
                text = json.dumps(document(node(*facts))) if facts else usual
                Path(folder, f"{name}.json").write_text(text, encoding="utf-8")
            start = time.process_time()
            report = json_of("doctor", "--compare", folder, "--json")
            seconds = time.process_time() - start  # it has one thread: the same on an idle machine
        found = {item["fact"]: outliers(item) for item in report["differences"] if not item["follows"]}
        missed += (lost := sum(found.get(fact) != nodes for fact, nodes in odd.items()))
        invented += (more := len(found.keys() - odd.keys()))
        slowest = max(slowest, seconds)
        print(f"{len(odd):2} oddities among {options.nodes}: missed {lost}, invented {more}, {seconds:.2f} s")
    print(f"all: missed {missed}, invented {invented}, slowest {slowest:.2f} s (goal {GOAL_SECONDS:.0f})")
    return int(bool(missed or invented) or slowest > GOAL_SECONDS)


def outliers(difference: dict[str, Any]) -> set[str]:
    """The nodes that do not have the usual value."""
    return {name for group in difference["groups"] if group["value"] != difference["usual"] for name in group["nodes"]}


def json_of(*arguments: str) -> dict[str, Any]:
    """The JSON that a command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        transload([*arguments])
    answer: dict[str, Any] = json.loads(stdout.getvalue())
    return answer


if __name__ == "__main__":
    sys.exit(main())
