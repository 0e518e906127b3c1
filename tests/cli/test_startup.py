"""Modules that commands must not import, so that they start fast."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.cli.conftest import Imported

UNWANTED_FOR_HELP = {
    "argparse",
    "asyncio",
    "dataclasses",
    "importlib.metadata",
    "inspect",
    "json",
    "logging",
    "torch",
    "typing",
    "urllib",
    "zipfile",
}
UNWANTED_FOR_INSPECT = {"asyncio", "importlib.metadata", "logging", "numpy", "torch", "urllib"}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], []])
def test_help_and_version_import_only_the_command_line(imported: Imported, arguments: list[str]) -> None:
    modules = imported(*arguments)
    assert "transload.cli.main" in modules
    assert not modules & UNWANTED_FOR_HELP
    assert {name for name in modules if name.startswith("transload")} <= {
        "transload",
        "transload.cli",
        "transload.cli.main",
        "transload._version",
    }


def test_inspect_json_imports_neither_numpy_nor_torch(imported: Imported, data: Path) -> None:
    modules = imported("inspect", "--json", str(data / "h200" / "train_cuda0.ckpt"))
    assert "transload.render.json" in modules
    assert not modules & UNWANTED_FOR_INSPECT
    assert "transload.render.html" not in modules


def test_inspect_text_imports_neither_numpy_nor_torch(imported: Imported, data: Path) -> None:
    modules = imported("inspect", str(data / "h200" / "train_cuda0.ckpt"))
    assert not modules & UNWANTED_FOR_INSPECT
