"""What must not be imported: the difference between a tool that answers at once and one that does not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.cli.conftest import Transload

FOR_HELP = {
    "argparse",
    "asyncio",
    "dataclasses",
    "importlib.metadata",
    "inspect",
    "json",
    "logging",
    "rich",
    "torch",
    "typing",
    "urllib",
    "zipfile",
}
FOR_JSON = {"asyncio", "importlib.metadata", "logging", "numpy", "rich", "torch", "urllib"}


def imported(program: Transload, *arguments: str) -> set[str]:
    """Modules our program imports beyond those that the interpreter and its site come with."""
    ours, bare = (
        program(*arguments, python=("-X", "importtime", *options)).stderr for options in ((), ("-c", "import runpy"))
    )
    return _modules(ours) - _modules(bare)


def _modules(told: str) -> set[str]:
    return {line.rpartition("|")[2].strip() for line in told.splitlines() if line.startswith("import time:")}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], []])
def test_help_and_version_import_next_to_nothing(program: Transload, arguments: list[str]) -> None:
    modules = imported(program, *arguments)
    assert "transload.cli.main" in modules
    assert not modules & FOR_HELP
    assert {name for name in modules if name.startswith("transload")} <= {
        "transload",
        "transload.cli",
        "transload.cli.main",
        "transload._version",
    }


def test_json_imports_neither_rich_nor_torch(program: Transload, data: Path) -> None:
    modules = imported(program, "inspect", "--json", str(data / "h200" / "train_cuda0.ckpt"))
    assert "transload.render.json" in modules
    assert not modules & FOR_JSON
    assert "transload.render.html" not in modules


def test_a_pipe_does_not_import_rich(program: Transload, data: Path) -> None:
    modules = imported(program, "inspect", str(data / "h200" / "train_cuda0.ckpt"))
    assert not modules & FOR_JSON
