"""The manual of ``explain``: the generated page of errors is up to date, and the examples are correct."""

from __future__ import annotations

import doctest
import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from tests.diagnose.machines import no_torch_run, without_gpu
from tests.each import for_each
from tests.explaining.wordings import WORDINGS
from tests.schema import validate

import transload
from transload.diagnose.report import judge_machine
from transload.steps import for_windows

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parent.parent.parent
LOG = """\
Traceback (most recent call last):
  File "/home/me/infer.py", line 3, in <module>
    state = torch.load("model_cuda0.pt")
            ^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/env/lib/python3.11/site-packages/torch/serialization.py", line 1597, in load
    return _load(
  File "/env/lib/python3.11/site-packages/torch/serialization.py", line 634, in _validate_device
    raise RuntimeError(
RuntimeError: Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False. If you are \
running on a CPU-only machine, please use torch.load with map_location=torch.device('cpu') to map your storages to the \
CPU.
"""


def test_page_of_errors_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("errors_page", ROOT / "scripts" / "errors_page.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), "run: python scripts/errors_page.py"


def test_every_answer_has_a_section() -> None:
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    for code in {wording.code for wording in WORDINGS}:
        assert f"\n### {code}\n" in page


def test_example_in_the_manual_matches_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "examples")
    with mock.patch("transload.diagnose.doctor", return_value=judge_machine(no_torch_run(without_gpu()))):
        shown = str(transload.explain(LOG))
    page = (ROOT / "docs" / "explain.md").read_text(encoding="utf-8")
    block = page.partition("| transload explain\n    ✗")[2].partition("\n\n| option")[0]
    assert f"✗{block}".replace("\n    ", "\n") == shown


def test_python_in_the_manual_runs() -> None:
    failed, attempted = doctest.testfile(str(ROOT / "docs" / "explain.md"), module_relative=False)
    assert (failed, attempted > 0) == (0, True)


def test_json_conforms_to_the_schema() -> None:
    schema = ROOT / "docs" / "explain.schema.json"
    texts = [*(wording.text for wording in WORDINGS[::7]), "ZeroDivisionError: division by zero"]
    with mock.patch("transload.diagnose.doctor", return_value=judge_machine(no_torch_run(without_gpu()))):
        for_each(texts, lambda text: validate(transload.explain(text).to_dict(), schema))


OF_POSIX = re.compile(r"export |unset |\w+=|.*(?:\"\$\w|&& |\| grep|python -c ')")
ELSEWHERE = re.compile(r"(?:sudo|dmesg|docker|env|ip|ibstat|ls|ulimit|nvidia-imex-ctl) |.*\bLD_LIBRARY_PATH|CC=gcc")
"""Commands for what Windows does not have."""


def test_commands_for_windows_are_none_of_a_posix_shell() -> None:
    pages = (ROOT / "src" / "transload" / "explaining" / "pages").glob("*.md")
    written = {command for page in pages for command in re.findall(r"`\$ ([^`]+)`", page.read_text("utf-8"))}
    commands = [f"$ {command}" for command in written if not ELSEWHERE.match(command)]
    assert len(commands) > 50
    label, wrong = "", []
    for line in for_windows(sorted(commands)):
        if not line.startswith("$ "):
            label = line
            continue
        if label == "In PowerShell:" or not label:
            wrong += [line] if OF_POSIX.match(line[2:]) else []
        label = ""
    assert wrong == []


def test_variables_are_set_shown_and_removed_in_both_shells_of_windows() -> None:
    lines = [
        "$ unset A B",
        '$ echo "$A"',
        "$ export A=1 B=x:y",
        "$ pip list | grep -i cudnn",
        "$ ps aux | grep python",
        "$ a b && c d",
        "text",
    ]
    assert [*for_windows(lines)] == [
        *("In PowerShell:", "$ Remove-Item Env:A; Remove-Item Env:B", "In cmd:", '$ set "A=" && set "B="'),
        *("In PowerShell:", "$ $env:A", "In cmd:", "$ echo %A%"),
        *("In PowerShell:", "$ $env:A = '1'; $env:B = 'x:y'", "In cmd:", '$ set "A=1" && set "B=x:y"'),
        *("$ pip list | findstr /i cudnn", "$ tasklist | findstr /i python", "$ a b", "$ c d", "text"),
    ]
