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


def test_patch_lasts_until_unpatch() -> None:
    assert devices.requested == ""
    transload.patch()
    assert devices.requested == "auto"
    transload.patch()
    transload.unpatch()
    assert devices.requested == ""
    transload.unpatch()


def test_with_block_restores_the_previous_patch() -> None:
    with transload.patch() as outer:
        assert repr(outer) == "transload.patch(device='auto')"
        with transload.patch("cpu"):
            assert devices.requested == "cpu"
        assert devices.requested == "auto"
    assert devices.requested == ""


def test_with_block_is_undone_after_an_exception() -> None:
    with pytest.raises(ValueError, match="no"), transload.patch():
        fail()
    assert devices.requested == ""


def test_with_block_leaves_a_patched_program_patched() -> None:
    transload.patch()
    with transload.patch():
        pass
    assert devices.requested == "auto"


def test_excepthook_is_installed_and_restored() -> None:
    before = sys.excepthook
    with transload.patch():
        assert sys.excepthook is not before
    assert sys.excepthook is before


def test_meta_path_is_restored() -> None:
    before = list(sys.meta_path)
    with transload.patch():
        pass
    assert sys.meta_path == before


IMPORT_AFTER_PATCH = """
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


def test_torch_may_be_imported_after_the_patch(python: Python) -> None:
    """In the other tests, torch is imported before."""
    pytest.importorskip("torch")
    process = python("-W", "ignore", "-c", IMPORT_AFTER_PATCH)
    assert process.returncode == 0, process.stderr
    assert process.stdout.split() in (["cpu", "0"], ["cuda", "0"])


def test_patching_does_not_import_torch(python: Python) -> None:
    process = python("-c", "import sys, transload; transload.patch(); print('torch' in sys.modules)")
    assert (process.stdout, process.stderr) == ("False\n", "")
