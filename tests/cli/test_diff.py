"""``transload diff`` and ``transload inspect --stats``: exit codes, text, JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.schema import validate

from transload.cli.main import main

DOCS = Path(__file__).parent.parent.parent / "docs"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    state = {"w": torch.tensor([1.0, -2.0, 70_000.0, torch.nan]), "n": torch.arange(3)}
    torch.save({"model": state, "epoch": 1}, "a.pt")
    torch.save({"model": {**state, "w": state["w"] * 1.001}, "epoch": 1}, "b.pt")
    torch.save({"model": state, "epoch": 2}, "c.pt")
    Path("page.pt").write_text("<html>", encoding="utf-8")
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["a.pt", "a.pt"], 0),
        (["a.pt", "b.pt"], 1),
        (["a.pt", "c.pt"], 1),
        (["a.pt", "b.pt", "--rtol", "0.01"], 0),
        (["a.pt", "b.pt", "--atol", "0.01"], 1),
        (["a.pt", "page.pt"], 2),
        (["nope.pt", "a.pt"], 2),
        (["a.pt"], 2),
        (["a.pt", "b.pt", "--rtol", "-1"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_exit_code_says_whether_they_are_the_same(
    arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", *arguments]) == code
    text = capsys.readouterr()
    assert text.out.startswith({0: "same: ", 1: "different: ", 2: ""}[code])
    assert bool(text.err) == (code == 2)
    if len(arguments) == 2:
        assert main(["diff", *arguments, "--json"]) == code
        document = json.loads(capsys.readouterr().out)
        validate(document, DOCS / "diff.schema.json")
        assert document.get("same", False) == (code == 0)


@pytest.mark.usefixtures("folder")
def test_error_names_the_file_that_cannot_be_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "a.pt", "page.pt", "--json"]) == 2
    text = capsys.readouterr()
    assert json.loads(text.out)["error"]["where"] == "page.pt"
    assert text.err.startswith("transload: page.pt: ")


@pytest.mark.usefixtures("folder")
def test_statistics_are_shown_and_in_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "a.pt", "--stats"]) == 0
    text = capsys.readouterr().out
    (line,) = [line for line in text.splitlines() if "model/w" in line]
    assert line.split()[:6] == ["model/w", "float32", "-2", "7e+04", "2.33e+04", "4.04e+04"]
    assert line.endswith(" 2^17  1 NaN")
    assert "2^0 " in line
    assert [line.split() for line in text.splitlines() if line.startswith("  float16")] == [
        ["float16", "1", "in", "1", "tensor", "0"]
    ]
    assert main(["inspect", "a.pt", "b.pt", "--stats", "--json"]) == 0
    for document in json.loads(capsys.readouterr().out):
        validate(document, DOCS / "inspect.schema.json")
        assert [entry["overflow"].get("float16") for entry in document["stats"]] == [1, None]
