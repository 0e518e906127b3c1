"""These tests need a working GPU. Run them separately with ``pytest --gpu tests/gpu``; all other tests hide the GPU."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Iterator

import pytest
import torch

DEADLINE = 240  # seconds after which a hanging test ends the process, with all stacks on the terminal


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip before any fixture writes files and before a mark counts the GPUs, which must not happen at collection.

    torch refuses CUDA in a process whose parent has counted the GPUs, and tests run in forks.
    """
    if not item.config.getoption("--gpu"):
        pytest.skip("runs only with --gpu")
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")


@pytest.fixture(autouse=True)
def _deadline() -> Iterator[None]:
    faulthandler.dump_traceback_later(DEADLINE, exit=True, file=sys.__stderr__ or 2)
    yield
    faulthandler.cancel_dump_traceback_later()
