"""What is advised about packages that use torch. They change it, so ``packages.py`` has a process of its own."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


def test_the_advice_holds() -> None:
    absent = [name for name in ("transformers", "accelerate", "lightning", "safetensors") if find_spec(name) is None]
    if absent:
        pytest.skip(f"needs {', '.join(absent)}")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(Path(__file__).with_name("packages.py")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
