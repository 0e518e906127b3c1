from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Protocol

import pytest

import transload

SOURCE = Path(transload.__file__).parent.parent


class Transload(Protocol):
    """Runs the command line in a process of its own, with nothing of ours in the environment but what is given."""

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
            timeout=60,
            check=False,
        )

    return run
