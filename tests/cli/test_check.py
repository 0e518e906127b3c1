"""The command ``transload check``: its options, exit codes and streams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from tests.each import each

from transload.cli.main import main

if TYPE_CHECKING:
    from tests.cli.conftest import Imported, Transload

SCHEMA = Path(__file__).parent.parent.parent / "docs" / "check.schema.json"
NOT_FOR_IT = {"asyncio", "importlib.metadata", "logging", "numpy", "torch", "urllib"}


def valid(text: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(text)
    jsonschema.validate(document, json.loads(SCHEMA.read_text(encoding="utf-8")))
    return document


@each(
    ("name", "code"),
    [
        ("torch-releases/torch-2.13.0-py3.11.7/state_dict_cpu.pt", 0),
        ("h200/train_cuda0.ckpt", 0),
        ("h200/whole_module_cuda0.pt", 1),
        ("h200/torchscript_cuda0.pt", 1),
        ("README.md", 1),
    ],
)
def test_the_exit_code_is_whether_it_loads(
    name: str, code: int, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(data / name)]) == code
    shown = capsys.readouterr()
    assert not shown.err
    assert ("it cannot be loaded: " in shown.out) == bool(code)
    assert main(["check", str(data / name), "--json"]) == code
    assert valid(capsys.readouterr().out)["ok"] == (code == 0)


@pytest.mark.parametrize(
    ("device", "code", "wish"), [("auto", 0, "auto"), ("cpu", 0, "cpu"), ("cuda:63", 1, "cuda:63"), ("none", 1, None)]
)
def test_the_device_is_the_wish(
    device: str, code: int, wish: str | None, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(data / "h200" / "state_dict_cuda1.pt")
    assert main(["check", path, "--device", device, "--json"]) == code
    document = valid(capsys.readouterr().out)
    assert document["map_location"] == wish
    assert bool(document["plan"]["refused"]) == bool(code)


def test_a_file_that_is_not_there_is_no_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "absent.pt")]) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert shown.err.startswith("transload: ")


def test_it_imports_neither_torch_nor_what_it_does_not_need(imported: Imported, data: Path) -> None:
    modules = imported("check", str(data / "h200" / "train_cuda0.ckpt"))
    assert "transload.checking" in modules
    assert not modules & NOT_FOR_IT


def test_it_runs_where_no_package_is_installed(program: Transload, data: Path) -> None:
    done = program("check", str(data / "h200" / "train_cuda0.ckpt"), "--json", python=("-S",))
    assert done.returncode in (0, 1), done.stderr
    document = valid(done.stdout)
    assert {move["tag"] for move in document["plan"]["moves"]} == {"cuda:0", "cpu"}


def test_a_rank_is_heard(program: Transload, data: Path) -> None:
    done = program("check", str(data / "h200" / "train_cuda0.ckpt"), "--json", LOCAL_RANK="2")
    assert valid(done.stdout)["rank"] == 2
