"""Measure what each shortcut for ordinary tensors saves: CPU time with all of them, divided by that without one.

    python bench/shortcuts.py [--rounds N]

A training checkpoint has 1,500 parameters with Adam's two moments, 4,500 tensors of 8 KB and more; the other file
20,000 tensors of 256 bytes. A shortcut stays if it saves 15 % of a command on either. Rounds are interleaved and the
best of each is taken, since the machine may be busy. First calls are measured in fresh processes, with compiled code.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import process_time
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:1] = [ROOT, f"{ROOT}/src"]  # not this folder: its `inspect` would hide the standard library's

import torch

import transload
from transload import judge
from transload.formats import torch_zip
from transload.formats.tensor_pattern import TensorPattern
from transload.loading import build

Switch = tuple[Any, str, Any]
"""An object, the name of an attribute, and the value that turns a shortcut off."""


def _never(*_: Any, **__: Any) -> None:
    return None


def _makes_nothing(*_: Any) -> Callable[..., None]:
    return _never


SHORTCUTS: dict[str, Switch] = {
    "tensor_pattern": (TensorPattern, "read", lambda *_: 0),
    "_list_plain_storages": (torch_zip, "_list_plain_storages", _never),
    "build.ordinary": (build, "ordinary", _makes_nothing),
    "judge_ordinary": (judge, "judge_ordinary", _never),
}


@contextmanager
def switched_off(name: str) -> Iterator[None]:
    """Without one shortcut; with all for an empty name."""
    if not name:
        yield
        return
    owner, attribute, value = SHORTCUTS[name]
    before = getattr(owner, attribute)
    setattr(owner, attribute, value)
    try:
        yield
    finally:
        setattr(owner, attribute, before)


def training(path: Path) -> None:
    """A model with the state of Adam."""
    model = torch.nn.ModuleList(torch.nn.Linear(64 + index % 8, 32) for index in range(750))
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, path)


def small(path: Path) -> None:
    """Many small tensors."""
    torch.save({f"layers.{index}.weight": torch.ones(64) for index in range(20_000)}, path)


COMMANDS: dict[str, Callable[[Path], Any]] = {
    "load": transload.load,
    "verify": transload.verify,
    "inspect": transload.inspect,
}
_FIRST = """
import sys, time
import torch
start = time.process_time()
import transload
transload.load(sys.argv[1], "cpu")
print(time.process_time() - start)
"""


def main() -> None:
    """Print a table for each file, and the time of a first load."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        for make in (training, small):
            path = Path(folder, f"{make.__name__}.pt")
            make(path)
            for command, run in COMMANDS.items():
                run(path)
                best: dict[str, float] = {}
                for _ in range(rounds):
                    for name in ("", *SHORTCUTS):
                        with switched_off(name):
                            start = process_time()
                            run(path)
                            best[name] = min(best.get(name, 1e9), process_time() - start)
                shares = ", ".join(f"{name} {best[name] / best['']:.2f}" for name in SHORTCUTS)
                print(f"{make.__name__}, {command}: {best['']:.3f} s; without a shortcut × {shares}", flush=True)
        times = []
        for _ in range(rounds):
            child = [sys.executable, "-c", _FIRST, str(Path(ROOT, "examples", "model_cuda0.pt"))]
            environment = {**os.environ, "PYTHONPATH": f"{ROOT}/src", "PYTHONDONTWRITEBYTECODE": ""}
            done = subprocess.run(child, capture_output=True, text=True, check=True, env=environment)
            times.append(float(done.stdout))
        print(f"first load of a small file: {min(times) * 1000:.1f} ms")


if __name__ == "__main__":
    main()
