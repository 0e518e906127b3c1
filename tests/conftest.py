from __future__ import annotations

import atexit
import gc
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# No deadline, because a busy machine is not a bug. The same examples in every run, so that a new failure comes from a
# change of the code. To look for new examples: pytest --hypothesis-profile=explore.
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=2_000)
settings.load_profile("fixed")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell; children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # what test collection creates stays alive; to scan it again and again takes a third of its time


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # most objects of a test live until it ends, and few are in cycles
    gc.enable()


def _exit_at_once(worker: int = os.getpid()) -> None:
    if os.getpid() == worker:  # and not in a fork of it
        os._exit(0)


if "PYTEST_XDIST_WORKER" in os.environ:  # it has reported all; to tear down torch and all tests takes seconds
    atexit.register(_exit_at_once)


if sys.platform == "win32":

    def _skipping(make: Callable[..., None] | None, what: str) -> Callable[..., None]:
        """Make something, or skip the test if that is impossible."""

        def call(*arguments: Any, **options: Any) -> None:
            with suppress(OSError):
                if make:
                    make(*arguments, **options)
            path = str(arguments[1 if make else 0])
            # Wine claims to have made a link. pytest makes one to the current folder, if it can.
            if not os.path.lexists(path) and not path.endswith("current"):
                pytest.skip(f"needs {what}")

        return call

    _ABSENT = re.compile(
        r"module '(os|signal|socket|select)' has no attribute '\w+'|No module named '(fcntl|pty|resource)'"
    )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call() -> Generator[None, None, None]:
        """Skip a test that itself, not transload, uses what only POSIX has."""
        try:
            yield
        except (AttributeError, ModuleNotFoundError) as error:
            frames = [*traceback.walk_tb(error.__traceback__)]
            if "tests" in Path(frames[-1][0].f_code.co_filename).parts and (absent := _ABSENT.match(str(error))):
                pytest.skip(absent[0])
            raise

    os.mkfifo = _skipping(None, "named pipes")
    os.symlink = _skipping(os.symlink, "symbolic links")  # Windows allows them to some users


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Collect doctests from the sources only, not from the tests."""
    return [collector for collector in (yield) if type(collector).__name__ != "DoctestModule"]


_fsync = os.fsync
os.fsync = lambda _: None  # type: ignore[assignment]  # tests would wait for the disk thousands of times


@pytest.fixture
def disk_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The calls that make a file durable, in order: ``fsync``, which does reach the disk in this test, and ``rename``.

    Each has the inode of its file or folder. Tests of durability use this fixture.
    """
    calls: list[tuple[str, int]] = []

    def fsync(descriptor: int) -> None:
        _fsync(descriptor)
        calls.append(("fsync", os.fstat(descriptor).st_ino))

    def recorded(rename: Callable[[str, str], None]) -> Callable[[str, str], None]:
        def call(old: str, new: str) -> None:
            rename(old, new)
            calls.append(("rename", os.stat(new).st_ino))

        return call

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", recorded(os.rename))
    monkeypatch.setattr(os, "replace", recorded(os.replace))
    return calls


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="leave the GPUs visible, for the tests in tests/gpu")


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPUs before anything imports torch, also from children: tests must behave the same on every machine."""
    os.environ.pop("COLUMNS", None)  # the terminal may have any width
    if not config.getoption("--gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of binary fixtures; its README says how each was made."""
    return Path(__file__).parent / "data"
