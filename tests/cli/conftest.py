from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest

import transload

SOURCE = Path(transload.__file__).parent.parent

Imported = Callable[..., set[str]]


class Transload(Protocol):
    """Runs the command line in a separate process, with only the given variables of ours in its environment."""

    def __call__(
        self, *arguments: str, stdout: int = ..., path: Path | None = ..., python: tuple[str, ...] = ..., **env: str
    ) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture
def program() -> Transload:
    def run(
        *arguments: str,
        stdout: int = subprocess.PIPE,
        path: Path | None = None,
        python: tuple[str, ...] = (),
        **env: str,
    ) -> subprocess.CompletedProcess[str]:
        places = [str(place) for place in (path, SOURCE) if place]
        kept = {name: value for name, value in os.environ.items() if name in ("SYSTEMROOT", "TMPDIR", "TEMP")}
        return subprocess.run(
            [sys.executable, *python, "-m", "transload", *arguments],
            stdout=stdout,
            stderr=subprocess.PIPE,
            env={**kept, "PYTHONPATH": os.pathsep.join(places), "PYTHONUTF8": "1", **env},
            encoding="utf-8",
            timeout=300,
            check=False,
        )

    return run


@pytest.fixture
def imported(program: Transload, tmp_path_factory: pytest.TempPathFactory) -> Imported:
    """The modules that a command imports.

    It runs without site-packages, where .pth files import what they like, so there is an empty module for each package
    that a command could want from there.
    """
    packages = tmp_path_factory.mktemp("packages")
    for name in ("numpy", "torch"):
        (packages / f"{name}.py").touch()

    def run(*arguments: str) -> set[str]:
        told = program(*arguments, path=packages, python=("-S", "-X", "importtime")).stderr
        return {line.rpartition("|")[2].strip() for line in told.splitlines() if line.startswith("import time:")}

    return run
