from __future__ import annotations

import atexit
import gc
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine is no bug, so no deadline; and the same examples every time, so that a change is judged by what it
# changed. To look for new ones: pytest --hypothesis-profile=explore.
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=2_000)
settings.load_profile("fixed")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell; children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # what the collection makes stays; to look through all of it again and again takes a third of its time


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # tests make much that stays until they end, and little garbage in cycles
    gc.enable()


def _leave(worker: int = os.getpid()) -> None:
    if os.getpid() == worker:  # and not a fork of it
        os._exit(0)


if "PYTEST_XDIST_WORKER" in os.environ:  # it has told everything; to tear down torch and all tests takes seconds
    atexit.register(_leave)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for examples in docstrings in the sources only."""
    return [made for made in (yield) if type(made).__name__ != "DoctestModule"]


os.fsync = lambda _: None  # type: ignore[assignment]  # the disk would be waited for thousands of times


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="leave the GPUs visible, for the tests in tests/gpu")


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPUs before anything imports torch, also from children: tests then do the same on every machine."""
    os.environ.pop("COLUMNS", None)  # whoever runs the tests may have a terminal of any width
    if not config.getoption("--gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of binary fixtures; its README tells how each was made."""
    return Path(__file__).parent / "data"
