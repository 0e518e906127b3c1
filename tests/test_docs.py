"""The manual says what the program does: codes, commands and files it names exist."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import get_args

import jsonschema
import pytest
from tests.schema import validate
from tests.test_packaging import ROOMS

import transload
from transload.checkpoint import FORMATS
from transload.findings import INTEGRITY, SAFETY, Severity
from transload.judge import inspect
from transload.judge.problems import rules

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src" / "transload").rglob("*.py"))


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def literals(function: str) -> set[str]:
    """First arguments, given as text, of all calls of a function or method of that name."""
    return {first for name, first in calls() if name == function}


@functools.cache
def calls() -> frozenset[tuple[str, str]]:
    """All calls in the sources whose first argument is a text: the name of the function, and the text."""
    found = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                found.add((name, first.value))
    return frozenset(found)


def test_every_problem_has_a_rule() -> None:
    codes = {*literals("Problem"), *(code for code in literals("add") if "-" in code)}
    assert codes - rules().keys() == set()


def test_every_judged_finding_is_on_the_page() -> None:
    assert literals("Finding") - rules().keys() == set()


def test_every_rule_is_a_problem_somebody_meets() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
    assert [code for code in rules() if f'"{code}"' not in text] == []


def test_the_rules_are_ordered_and_complete() -> None:
    assert list(rules()) == sorted(rules())
    for rule in rules().values():
        assert rule.severity in get_args(Severity)
        assert rule.safety in SAFETY
        assert rule.integrity in INTEGRITY


def test_the_page_of_the_api_is_up_to_date() -> None:
    script = load_script("api_page")
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), "run: python scripts/api_page.py"


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    text = load_script("api_page").page()
    names = [name for name in vars(transload)["__all__"] if not name.startswith("__")]
    assert [name for name in names if f"### {name}\n" not in text and f"| `{name}` |" not in text] == []


def test_the_page_of_the_rooms_says_who_may_import_whom() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    shown: dict[str, set[str]] = {}
    for rooms, imports in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|[^|]*\| ([^|]*) \|$", text, re.MULTILINE):
        shown |= {room: set(re.findall(r"`(\w+)`", imports)) for room in re.findall(r"`(\w+)`", rooms)}
    assert {room: shown[room] for room in ROOMS} == ROOMS


def test_every_page_has_its_place_in_the_contents() -> None:
    script = load_script("docs_nav")
    docs = ROOT / "docs"
    listed = re.findall(r"[\w/-]+\.md", str(script.contents(docs)))
    assert sorted(listed) == sorted(path.relative_to(docs).as_posix() for path in docs.rglob("*.md"))


def test_links_in_the_manual_lead_somewhere() -> None:
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_readme_begins_with_two_commands_that_exist() -> None:
    targets = re.findall(r"^ {4}make (\w+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert targets[:2] == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


@pytest.mark.parametrize(
    "name", ["h200/train_cuda0.ckpt", "h200/aoti_cuda0.pt2", "h200/torchscript_cuda0.pt", "README.md"]
)
def test_json_is_what_the_schema_promises(data: Path, name: str) -> None:
    schema = ROOT / "docs" / "inspect.schema.json"
    validate(inspect(data / name).to_dict(), schema)


def test_the_schema_allows_nothing_more() -> None:
    schema = ROOT / "docs" / "inspect.schema.json"
    made = inspect(b"").to_dict()
    with pytest.raises(jsonschema.ValidationError):
        validate({**made, "surprise": 1}, schema)
    with pytest.raises(jsonschema.ValidationError):
        validate({**made, "safety": "fine"}, schema)


def test_every_format_is_in_the_manual() -> None:
    text = (ROOT / "docs" / "inspect.md").read_text(encoding="utf-8")
    assert [name for name in FORMATS if f"`{name}`" not in text] == []
