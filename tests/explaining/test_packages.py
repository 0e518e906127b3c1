"""The advice about packages that use torch. They modify torch, so ``packages.py`` runs in a separate process."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


def test_advice_about_packages_works() -> None:
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
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr
