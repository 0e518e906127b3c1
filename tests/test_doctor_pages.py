"""The manual of the doctor: its pages and its schema match the rules and the facts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
from tests.diagnose.machines import cuinit_fails, healthy, in_container, in_wsl, with_facts, without_gpu
from tests.each import each
from tests.schema import validate
from tests.test_docs import ROOT, load_script

from transload.diagnose.case import Rule
from transload.diagnose.report import judge_machine
from transload.diagnose.rules import BY_CODE
from transload.findings import Finding
from transload.machine import Experiment, Library, Machine, Variables

HINT = "run: python scripts/doctor_pages.py"


def test_generated_pages_and_schema_are_up_to_date() -> None:
    files: dict[Path, str] = load_script("doctor_pages").files()
    assert [path.name for path, text in files.items() if path.read_text(encoding="utf-8") != text] == [], HINT
    pages = {path.name for path in (ROOT / "docs" / "doctor").iterdir()}
    assert pages == {path.name for path in files} - {"doctor.schema.json"}


def test_every_finding_has_a_page() -> None:
    for code in BY_CODE:
        assert (ROOT / Finding(code, "note", "").doc).is_file()
    assert Finding("cuda-tags", "note", "").doc == "docs/findings.md#cuda-tags"


def test_new_rule_gets_a_page_to_fill_in(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("doctor_pages")
    rule = Rule("Z99", "run", lambda _: iter(()), likely=True)
    monkeypatch.setitem(BY_CODE, "Z99", rule)
    files = {path.name: text for path, text in script.files().items()}
    assert files["Z99.md"] == script.with_head(rule, "")
    assert "| [Z99](Z99.md) | what is wrong, in a few words |" in files["README.md"]
    page = script.with_head(rule, "")
    assert page.startswith("# Z99: what is wrong, in a few words\n\nLayer: running torch. Reported as probable")
    assert "\n## Fix\n" in page
    assert script.with_head(rule._replace(layer="fit"), page) == page.replace("running torch", "compatibility")


def test_links_in_the_doctor_pages_point_to_existing_files() -> None:
    for page in (ROOT / "docs" / "doctor").glob("*.md"):
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@each(
    "machine",
    [Machine(), healthy(), without_gpu(), in_container(healthy()), in_wsl(healthy()), cuinit_fails(healthy(), 999)],
)
def test_doctor_json_matches_its_schema_which_rejects_unknown_keys(machine: Machine) -> None:
    schema = ROOT / "docs" / "doctor.schema.json"
    report = json.loads(json.dumps(judge_machine(machine).to_dict()))
    validate(report, schema)
    with pytest.raises(jsonschema.ValidationError):
        validate({**report, "surprise": 1}, schema)
    with pytest.raises(jsonschema.ValidationError):
        validate({**report, "machine": {**report["machine"], "taken": 1}}, schema)


def test_manual_lists_every_option_of_the_doctor() -> None:
    from transload.cli.main import parser_of

    text = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    options = [name for action in parser_of("doctor")._actions for name in action.option_strings]
    assert [name for name in options if f"`{name}" not in text and name not in ("-h", "--help")] == []


STUBS = "/usr/local/cuda/lib64/stubs"
README_MACHINE = with_facts(
    cuinit_fails(healthy(), 34),
    driver__libraries__cuda=(Library("libcuda.so.1", f"{STUBS}/libcuda.so.1", via="LD_LIBRARY_PATH", kind="stub"),),
    driver__cuda__library=f"{STUBS}/libcuda.so.1",
    driver__experiments=(Experiment(("LD_LIBRARY_PATH",), healthy().driver.cuda),),
    variables=Variables(
        {"HOME": "/home/alice", "LD_LIBRARY_PATH": f"/opt/lib:{STUBS}"},
        {"LD_LIBRARY_PATH": ("/home/alice/.bashrc:12",)},
    ),
)


def test_readme_shows_the_report_of_the_doctor() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = readme.partition("$ transload doctor\n")[2].partition("  …\n")[0]
    assert shown.count("\n") > 10
    assert str(judge_machine(README_MACHINE)).startswith(shown.rstrip("\n"))
