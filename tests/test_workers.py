"""What the workers tell is what pytest shows: of tests that pass, fail or are skipped, and of one that dies."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests import forks

pytestmark = pytest.mark.skipif(not forks.FORKS, reason="nothing forks here")

FIRST = """
import os, signal, pytest

@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return tmp_path_factory.mktemp("made")

@pytest.mark.parametrize("number", range(20))
def test_many(number, made):
    assert made.is_dir()

def test_fails():
    print("told before")
    os.write(1, b"and below Python")
    assert 1 == 2

def test_dies():
    os.kill(os.getpid(), signal.SIGKILL)

def test_comes_after():
    pass

def test_is_skipped():
    pytest.skip("for a reason")
"""
SECOND = """
def test_streams(capfd):
    print("mine")
    assert capfd.readouterr().out == "mine\\n"

def test_folder(tmp_path):
    assert not list(tmp_path.iterdir())
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text("from tests.workers import pytest_cmdline_main\n", encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    (folder / "test_first.py").write_text(FIRST, encoding="utf-8")
    (folder / "test_second.py").write_text(SECOND, encoding="utf-8")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-ra", "-p", "no:cacheprovider", "--basetemp", "tmp", "-n", "2", *options],
        cwd=folder,
        env={**kept, "PYTHONPATH": str(forks.SOURCE.parent)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_every_outcome_is_told_once(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 1, done.stderr
    assert "2 failed, 23 passed, 1 skipped" in done.stdout
    assert "FAILED test_first.py::test_fails - assert 1 == 2" in done.stdout
    assert "told before\nand below Python" in done.stdout
    assert "the worker that ran it ended with exit code -9" in done.stdout
    assert re.search(r"SKIPPED \[1\] test_first.py:\d+: for a reason", done.stdout)


def test_the_first_failure_may_be_the_last(tmp_path: Path) -> None:
    done = run(tmp_path, "-x", "-k", "fails or after or second")
    assert done.returncode == 1, done.stderr
    assert "stopping after 1 failures" in done.stdout
    assert "1 failed" in done.stdout


def test_what_cannot_be_imported_stops_all(tmp_path: Path) -> None:
    (tmp_path / "test_third.py").write_text("import nothing_of_this_name\n", encoding="utf-8")
    done = run(tmp_path)
    assert done.returncode == 2, done.stderr
    assert "1 error" in done.stdout
    assert "passed" not in done.stdout
