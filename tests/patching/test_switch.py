from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

import pytest

import transload
from transload.patching import devices

if TYPE_CHECKING:
    from tests.patching.conftest import Python


def fail() -> NoReturn:
    raise ValueError("no")


def test_it_is_on_until_it_is_undone() -> None:
    assert devices.requested == ""
    transload.patch()
    assert devices.requested == "auto"
    transload.patch()
    transload.unpatch()
    assert devices.requested == ""
    transload.unpatch()


def test_a_block_puts_back_what_was_before() -> None:
    with transload.patch() as outer:
        assert repr(outer) == "transload.patch(device='auto')"
        with transload.patch("cpu"):
            assert devices.requested == "cpu"
        assert devices.requested == "auto"
    assert devices.requested == ""


def test_a_block_that_is_left_by_an_exception_is_undone() -> None:
    with pytest.raises(ValueError, match="no"), transload.patch():
        fail()
    assert devices.requested == ""


def test_a_block_inside_a_patched_program_leaves_it_patched() -> None:
    transload.patch()
    with transload.patch():
        pass
    assert devices.requested == "auto"


def test_the_hook_of_uncaught_exceptions_comes_and_goes() -> None:
    before = sys.excepthook
    with transload.patch():
        assert sys.excepthook is not before
    assert sys.excepthook is before


def test_nothing_of_ours_stays_on_the_path_of_imports() -> None:
    before = list(sys.meta_path)
    with transload.patch():
        pass
    assert sys.meta_path == before


AFTER = """
import sys, transload
transload.patch()
assert "torch" not in sys.modules
import torch
print(torch.ones(2).to("cuda:99").device.type)
assert type(torch.__spec__.loader).__name__ == "SourceFileLoader"
assert "exec_module" not in vars(torch.__spec__.loader)
transload.unpatch()
print(len([entry for entry in torch.serialization._package_registry if "transload" in entry[2].__module__]))
"""


def test_torch_may_be_imported_after(python: Python) -> None:
    """Before, it is in every other test here."""
    pytest.importorskip("torch")
    done = python("-W", "ignore", "-c", AFTER)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() in (["cpu", "0"], ["cuda", "0"])


def test_patching_does_not_import_torch(python: Python) -> None:
    done = python("-c", "import sys, transload; transload.patch(); print('torch' in sys.modules)")
    assert (done.stdout, done.stderr) == ("False\n", "")
