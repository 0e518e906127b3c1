"""The manual matches the program: the codes, commands and files that it names exist."""

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
from transload.findings import INTEGRITY, SAFETY, Severity
from transload.format import FORMATS
from transload.judge.problems import rules
from transload.opening import inspect

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
    """The first arguments, if they are strings, of all calls of a function or method with this name."""
    return {first for name, first in calls() if name == function}


@functools.cache
def calls() -> frozenset[tuple[str, str]]:
    """All calls in the sources whose first argument is a string: the name of the function, and the string."""
    results = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                results.add((name, first.value))
    return frozenset(results)


def test_every_problem_has_a_rule() -> None:
    codes = {*literals("Problem"), *(code for code in literals("add") if "-" in code)}
    assert codes - rules().keys() == set()


def test_every_finding_has_a_rule() -> None:
    assert literals("Finding") - rules().keys() == set()


def test_every_rule_is_used_in_the_sources() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
    assert [code for code in rules() if f'"{code}"' not in text] == []


def test_rules_are_sorted_and_their_values_valid() -> None:
    assert list(rules()) == sorted(rules())
    for rule in rules().values():
        assert rule.severity in get_args(Severity)
        assert rule.safety in SAFETY
        assert rule.integrity in INTEGRITY


def test_api_page_is_up_to_date() -> None:
    script = load_script("api_page")
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), "run: python scripts/api_page.py"


def test_every_public_name_is_on_the_api_page() -> None:
    text = load_script("api_page").page()
    names = [name for name in dir(transload) if not name.startswith("__")]
    assert [name for name in names if f"### {name}\n" not in text and f"| `{name}` |" not in text] == []


def test_architecture_page_lists_the_allowed_imports_of_every_room() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    shown: dict[str, set[str]] = {}
    for rooms, imports in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|[^|]*\| ([^|]*) \|$", text, re.MULTILINE):
        shown |= {room: set(re.findall(r"`(\w+)`", imports)) for room in re.findall(r"`(\w+)`", rooms)}
    assert {room: shown[room] for room in ROOMS} == ROOMS


def test_every_page_is_in_the_table_of_contents() -> None:
    script = load_script("docs_nav")
    docs = ROOT / "docs"
    listed = re.findall(r"[\w/-]+\.md", str(script.contents(docs)))
    assert sorted(listed) == sorted(path.relative_to(docs).as_posix() for path in docs.rglob("*.md"))


def test_links_in_the_manual_point_to_existing_files() -> None:
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_readme_starts_with_demo_and_test_and_all_its_make_targets_exist() -> None:
    targets = re.findall(r"^ {4}make (\w+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert targets[:2] == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


@pytest.mark.parametrize(
    "name", ["h200/train_cuda0.ckpt", "h200/aoti_cuda0.pt2", "h200/torchscript_cuda0.pt", "README.md"]
)
def test_inspect_json_matches_its_schema(data: Path, name: str) -> None:
    schema = ROOT / "docs" / "inspect.schema.json"
    validate(inspect(data / name).to_dict(), schema)


def test_inspect_schema_rejects_unknown_keys_and_values() -> None:
    schema = ROOT / "docs" / "inspect.schema.json"
    document = inspect(b"").to_dict()
    with pytest.raises(jsonschema.ValidationError):
        validate({**document, "surprise": 1}, schema)
    with pytest.raises(jsonschema.ValidationError):
        validate({**document, "safety": "fine"}, schema)


def test_every_format_is_in_the_manual() -> None:
    text = (ROOT / "docs" / "inspect.md").read_text(encoding="utf-8")
    assert [name for name in FORMATS if f"`{name}`" not in text] == []
