from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

import transload
from transload.patching import changes, devices

SOURCE = Path(transload.__file__).parent.parent


@pytest.fixture(autouse=True)
def _unpatched() -> Iterator[None]:
    """Every test starts and ends unpatched, with no warnings, queries or device counts remembered."""

    def reset() -> None:
        transload.unpatch()
        for memory in (devices._counts, devices._final_counts, devices.substitutes, devices.warned, devices.asked):
            memory.clear()
        changes.noted.clear()

    reset()
    yield
    reset()


class Python(Protocol):
    """Runs Python in a separate process, with transload on its path."""

    def __call__(
        self, *arguments: str | Path, cwd: Path | None = ..., stdin: str = ..., **env: str
    ) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture
def python() -> Python:
    def run(
        *arguments: str | Path, cwd: Path | None = None, stdin: str = "", **env: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=cwd,
            input=stdin,
            capture_output=True,
            env={**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONUTF8": "1", "NO_COLOR": "1", **env},
            encoding="utf-8",
            timeout=300,
            check=False,
        )

    return run


class Cards:
    """Makes torch report this many GPUs, as far as it can be queried without touching one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    def __call__(self, count: int, current: int = 0) -> None:
        import torch

        answers = {
            "is_available": lambda: count > 0,
            "device_count": lambda: count,
            "current_device": lambda: current,
            "get_device_name": lambda _: "Card",
            "mem_get_info": lambda _: (1 << 30, 1 << 30),
            "memory_reserved": lambda _: 0,
            "memory_allocated": lambda _: 0,
        }
        for name, answer in answers.items():
            self.monkeypatch.setattr(torch.cuda, name, answer)
        for memory in (devices._counts, devices._final_counts, devices.substitutes):
            memory.clear()


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Cards:
    return Cards(monkeypatch)


@pytest.fixture
def no_cards(cards: Cards) -> None:
    cards(0)


@pytest.fixture
def _patched() -> Iterator[None]:
    with warnings.catch_warnings(), transload.patch():
        warnings.simplefilter("ignore", transload.LandingWarning)
        yield
