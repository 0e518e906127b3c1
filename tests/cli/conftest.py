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
    """Runs the command line in a separate process, with the given variables and few others in its environment."""

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
        folders = [str(folder) for folder in (path, SOURCE) if folder]
        kept = {name: value for name, value in os.environ.items() if name in ("SYSTEMROOT", "TMPDIR", "TEMP")}
        return subprocess.run(
            [sys.executable, *python, "-m", "transload", *arguments],
            stdout=stdout,
            stderr=subprocess.PIPE,
            env={**kept, "PYTHONPATH": os.pathsep.join(folders), "PYTHONUTF8": "1", **env},
            encoding="utf-8",
            timeout=300,
            check=False,
        )

    return run


@pytest.fixture
def imported(program: Transload, tmp_path_factory: pytest.TempPathFactory) -> Imported:
    """The modules that a command imports.

    The command runs without site-packages, because .pth files there import other modules. Empty modules stand in for
    the packages that a command could import from there.
    """
    packages = tmp_path_factory.mktemp("packages")
    for name in ("numpy", "torch"):
        (packages / f"{name}.py").touch()

    def run(*arguments: str) -> set[str]:
        stderr = program(*arguments, path=packages, python=("-S", "-X", "importtime")).stderr
        return {line.rpartition("|")[2].strip() for line in stderr.splitlines() if line.startswith("import time:")}

    return run
