from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import transload
from transload.patching import devices

if TYPE_CHECKING:
    from tests.patching.conftest import Python

KNOWN = "Torch not compiled with CUDA enabled"


class Shell:
    """The part of IPython's shell that is used."""

    def __init__(self) -> None:
        self.custom: tuple[Any, Any] = ((), None)
        self.shown: list[Any] = []

    def set_custom_exc(self, kinds: Any, handler: Any) -> None:
        self.custom = kinds, handler

    def showtraceback(self, exc_tuple: Any, tb_offset: Any = None) -> None:
        self.shown.append((*exc_tuple[:2], tb_offset))


def test_ipython_extension_patches_and_explains_errors(capsys: pytest.CaptureFixture[str]) -> None:
    shell = Shell()
    transload.load_ipython_extension(shell)
    assert devices.requested == "auto"
    kinds, handler = shell.custom
    error = AssertionError(KNOWN)
    assert issubclass(AssertionError, kinds)
    handler(shell, AssertionError, error, None, tb_offset=2)
    assert shell.shown == [(AssertionError, error, 2)]
    assert "CPU" in capsys.readouterr().err
    transload.unload_ipython_extension(shell)
    assert devices.requested == ""
    assert shell.custom == ((), None)


CELLS = """
from IPython.testing.globalipapp import start_ipython
shell = start_ipython()
shell.run_cell("%load_ext transload")
shell.run_cell("import torch; print(torch.ones(1).to('cuda:99').device)")
shell.run_cell("raise AssertionError('Torch not compiled with CUDA enabled')")
shell.run_cell("%unload_ext transload")
shell.run_cell("from transload.patching import devices; print(devices.requested == '')")
"""


def test_extension_in_real_ipython(python: Python) -> None:
    pytest.importorskip("IPython")
    pytest.importorskip("torch")
    process = python("-W", "ignore", "-c", CELLS)
    assert process.returncode == 0, process.stderr
    assert "cpu\n" in process.stdout or "cuda:0\n" in process.stdout
    assert "build for the CPU" in process.stderr + process.stdout
    assert process.stdout.rstrip().endswith("True")
