"""The plugin for pytest, in runs of pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import forks

import transload
from transload.patching import changes, devices

pytest_plugins = ["pytester"]

# As in a project that has installed transload: also where it is not installed, and only once where it is.
PLUGIN = ("-p", "no:transload", "-p", "transload.integrations.pytest", "-p", "no:cacheprovider")
NAMES_A_GPU = """
    import torch

    def make():
        return torch.zeros(2, device="cuda:5").device.type
"""


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """A run leaves nothing behind in this process."""

    def state() -> tuple[Any, ...]:
        functions = (torch.zeros, torch.Tensor.to, torch.cuda.is_available, torch.Generator, sys.excepthook)
        entries = len(torch.serialization._package_registry)
        return (*functions, entries, *sys.meta_path, devices.requested, devices.pretending, devices.silent)

    before, warned = state(), {*devices.warned}
    substitutes, asked = {**devices.substitutes}, {**devices.asked}
    yield
    assert state() == before
    assert (devices.warned, devices.substitutes, devices.asked) == (warned, substitutes, asked)
    changes.noted.clear()


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """An empty project with a module that names a device."""
    pytester.makepyfile(naming=NAMES_A_GPU)
    pytester.syspathinsert()
    return pytester


def test_the_fixture_patches_one_test(project: pytest.Pytester) -> None:
    project.makepyfile("""
        import pytest
        from naming import make

        def test_patched(transload_patch):
            assert transload_patch.device == "auto"
            assert make() == "cpu"

        def test_plain():
            with pytest.raises((AssertionError, RuntimeError)):
                make()
    """)
    result = project.runpytest_inprocess(*PLUGIN, "-W", "error")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["transload changed for 1 test: cuda:5 * cpu (1)"])


def test_the_marker_patches_fixtures_too_and_names_a_device(project: pytest.Pytester) -> None:
    project.makepyfile("""
        import pytest, torch
        from naming import make

        @pytest.fixture(scope="module")
        def shared():
            yield make()
            assert make() == "cpu"

        @pytest.mark.transload
        def test_marked(shared):
            assert shared == make() == "cpu"

        @pytest.mark.transload("cpu", pretend_cuda=True)
        class TestMarked:
            def test_it(self, transload_patch):
                assert transload_patch.device == "cpu"
                assert torch.cuda.is_available()

            @pytest.mark.skipif("not __import__('torch').cuda.is_available()")
            def test_again(self):
                assert make() == "cpu"

        @pytest.mark.transload
        def test_last():
            assert not torch.cuda.is_available()
    """)
    result = project.runpytest_inprocess(*PLUGIN, "--strict-markers", "-W", "error")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(
        ["transload changed for 4 tests: cuda:5 * cpu (3)*is_available() pretended that there is a GPU (2)*"]
    )


def test_the_option_patches_a_suite_while_it_is_imported(project: pytest.Pytester) -> None:
    project.makeconftest("from naming import make\nFIRST = make()\n")
    project.makepyfile("""
        import pytest, torch, unittest
        from naming import make

        KIND = make()

        @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
        def test_cuda():
            assert make() == KIND == "cpu"

        class TestCase(unittest.TestCase):
            def test_it(self):
                assert make() == "cpu"

        def test_without():
            pass
    """)
    result = project.runpytest_inprocess(*PLUGIN, "--transload-device", "auto")
    result.assert_outcomes(passed=2, skipped=1)
    result.stdout.fnmatch_lines(["transload changed for 1 test: cuda:5 * cpu (1)"])
    for name in ("naming", "conftest"):
        sys.modules.pop(name, None)
    result = project.runpytest_inprocess(*PLUGIN, "--transload-pretend-cuda", "--junit-xml=out.xml", "-W", "error")
    result.assert_outcomes(passed=3)
    assert project.path.joinpath("out.xml").read_text(encoding="utf-8").count("cuda:5 → cpu") == 2


def test_a_failed_test_leaves_nothing_behind_and_is_reported(project: pytest.Pytester) -> None:
    project.makepyfile("""
        import pytest, transload
        from naming import make

        @pytest.mark.transload
        def test_fails():
            make()
            transload.unpatch()
            assert False

        @pytest.mark.transload
        def test_patches():
            transload.patch("cpu")
            assert make() == "cpu"
            raise ValueError

        def test_fails_too(transload_patch):
            assert make() == "cpu"
            raise KeyError

        def test_plain():
            with pytest.raises((AssertionError, RuntimeError)):
                make()
    """)
    result = project.runpytest_inprocess(*PLUGIN)
    result.assert_outcomes(passed=1, failed=3)
    result.stdout.fnmatch_lines(["transload changed for 3 tests: cuda:5 * cpu (3)"])


@pytest.mark.parametrize(
    ("marker", "options"),
    [
        ("", ["--transload-device", "gpu"]),
        ("", ["--transload-device", "cuda:7"]),
        ("@pytest.mark.transload('gpu')", []),
        ("@pytest.mark.transload(devices='cpu')", []),
    ],
)
def test_what_is_no_device_is_refused(marker: str, options: list[str], project: pytest.Pytester) -> None:
    project.makepyfile(f"import pytest\n{marker}\ndef test_it(): pass")
    result = project.runpytest_inprocess(*PLUGIN, *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: *transload*"])
    assert "Traceback" not in result.stderr.str()


def test_workers_report_what_they_changed(project: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    project.makepyfile("import naming\n" + "\n".join(f"def test_{n}(): naming.make()" for n in range(4)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, (project.path, source()))])}
    command = [sys.executable, "-m", "pytest", *PLUGIN, "-n", "1", "--transload-device=cpu", "-p", "no:randomly"]
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=300, check=False)
    assert "4 passed" in done.stdout, done.stdout + done.stderr
    assert "transload changed for 4 tests: cuda:5 → cpu (4)" in done.stdout


def test_under_transload_run_strict_the_suite_fails_if_anything_was_changed(project: pytest.Pytester) -> None:
    project.makepyfile("import naming\ndef test_it(transload_patch): naming.make()")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, (project.path, source()))])}
    command = ["-m", "transload", "run", "--strict", "-m", "pytest", *PLUGIN]
    done = forks.run(*command, cwd=project.path, env=environment)
    assert done.returncode == 1
    assert "1 passed" in done.stdout
    assert "naming.py:4: cuda:5 → cpu" in done.stderr


def source() -> Path:
    return Path(transload.__file__).parent.parent


IMPORTED = """
import sys
before = set(sys.modules)
import pytest, itertools, contextlib, collections.abc, typing
between = set(sys.modules)
import transload.integrations.pytest
print(*sorted(set(sys.modules) - between))
"""


def test_the_plugin_imports_nothing_until_it_is_used() -> None:
    environment = {**os.environ, "PYTHONPATH": str(source())}
    out = subprocess.run([sys.executable, "-c", IMPORTED], env=environment, capture_output=True, check=True).stdout
    assert out.decode().split() == ["transload", "transload.integrations", "transload.integrations.pytest"]


def test_pytest_finds_the_plugin() -> None:
    try:
        distribution = metadata.distribution("transload")
    except metadata.PackageNotFoundError:
        pytest.skip("needs an installed transload")
    (entry,) = distribution.entry_points.select(group="pytest11")
    assert (entry.name, entry.value) == ("transload", "transload.integrations.pytest")
