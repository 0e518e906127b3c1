from __future__ import annotations

import gzip
import json
import os
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.each import each
from tests.sarif import OFFICIAL, run_in, validate_officially

from transload.checkpoint import Checkpoint, Part
from transload.errors import CannotReadError
from transload.findings import Finding
from transload.judge.problems import rules
from transload.render import sarif

if TYPE_CHECKING:
    from pathlib import Path

BAD = Finding("dangerous-globals", "error", "it would run 1 function", ("os.system: a shell",), ("Do not load it.",))
CUT = Finding(
    "storage-cut", "error", "a storage is cut off", ("data/0",), ("$ transload rescue a.pt b.pt",), ("data/0",)
)


def checkpoint(*findings: Finding, path: str = "a.pt", **more: Any) -> Checkpoint:
    return Checkpoint(path, "torch-zip", 100, findings=findings, **more)


def text_of(*checkpoints: Checkpoint, **errors: CannotReadError) -> str:
    return "".join(sarif.document(checkpoints, errors, rules()))


def results(*checkpoints: Checkpoint) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run_in(text_of(*checkpoints))["results"]
    return found


def uris(result: dict[str, Any]) -> list[str]:
    return [place["physicalLocation"]["artifactLocation"]["uri"] for place in result["locations"]]


def prints(*checkpoints: Checkpoint) -> list[str]:
    return [result["partialFingerprints"]["primaryLocationLineHash"] for result in results(*checkpoints)]


def test_every_code_is_a_rule_with_its_page_and_its_danger() -> None:
    driver = run_in(text_of())["tool"]["driver"]
    shown = {rule["id"]: rule for rule in driver["rules"]}
    assert shown.keys() == rules().keys()
    danger = shown["dangerous-globals"]
    assert danger["properties"] == {"security-severity": "9.8", "tags": ["security", "external/cwe/cwe-502"]}
    assert danger["shortDescription"]["text"] == "loading it would run dangerous functions."
    assert "No checkpoint needs them." in danger["fullDescription"]["text"]
    assert "Effect: safety at best `dangerous`." in danger["help"]["markdown"]
    assert shown["needs-trust"]["properties"]["security-severity"] == "7.5"
    assert shown["pickle-broken"]["properties"]["security-severity"] == "5.0"
    assert not {"properties"} & {*shown["storage-cut"], *shown["not-a-checkpoint"], *shown["gpu-tags"]}
    assert "\ntransload rescue FILE NEW.pt" in shown["storage-cut"]["help"]["text"]


def test_finding_is_a_result_with_its_advice_and_its_place() -> None:
    (result,) = results(checkpoint(CUT))
    assert (result["ruleId"], result["level"], uris(result)) == ("storage-cut", "error", ["a.pt"])
    assert result["message"]["text"] == "a storage is cut off: data/0\ntransload rescue a.pt b.pt"
    assert result["locations"][0]["logicalLocations"] == [{"fullyQualifiedName": "data/0"}]


def test_finding_in_files_of_a_directory_is_at_these_files() -> None:
    places = ("b.pt › data/0", "b.pt › data/1", "c.pt", "missing.pt")
    parts = [
        Part("b.pt", "shard", 1, role="member"),
        Part("c.pt", "shard", 1, role="member"),
        Part("missing.pt", "", 0),
    ]
    (result,) = results(checkpoint(replace(CUT, places=places), path="model dir", parts=tuple(parts)))
    assert uris(result) == ["model%20dir/b.pt", "model%20dir/c.pt", "model%20dir"]
    assert [len(place.get("logicalLocations", ())) for place in result["locations"]] == [2, 0, 1]
    parts.append(Part("a.index.json", "index", 1, role="index"))
    for path in ("model dir", "model dir/a.index.json"):
        (result,) = results(checkpoint(replace(CUT, places=places), path=path, parts=tuple(parts)))
        assert uris(result) == ["model%20dir/b.pt", "model%20dir/c.pt", "model%20dir/a.index.json"]


def test_fingerprints_differ_by_file_code_and_evidence_only() -> None:
    first = prints(checkpoint(BAD))
    assert first == prints(checkpoint(replace(BAD, title="other words", fix=("Other advice.",))))
    other = replace(BAD, evidence=("os.popen: a shell",))
    for different in (checkpoint(BAD, path="b.pt"), checkpoint(other), checkpoint(replace(BAD, code="dangerous-use"))):
        assert prints(different) != first
    twice = prints(checkpoint(BAD, BAD))
    assert twice == [first[0], first[0].removesuffix(":1") + ":2"]


@each(
    "path, uri",
    [
        ("a b.pt", "a%20b.pt"),
        ("sub/../größe,%.pt", "gr%C3%B6%C3%9Fe%2C%25.pt"),
        ("<stdin>", "%3Cstdin%3E"),
        ("https://host/a b.pt", "https://host/a%20b.pt"),
        ("s3://bucket/a.pt", "s3://bucket/a.pt"),
    ],
)
def test_path_is_relative_and_quoted(path: str, uri: str) -> None:
    (result,) = results(checkpoint(BAD, path=path))
    assert uris(result) == [uri]


def test_file_outside_the_folder_has_a_whole_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    inside, outside = results(checkpoint(BAD, path=str(tmp_path / "here" / "a.pt")), checkpoint(BAD, path="../a.pt"))
    assert uris(inside) == ["a.pt"]
    assert uris(outside)[0].startswith("file:///")
    assert "uriBaseId" not in outside["locations"][0]["physicalLocation"]["artifactLocation"]


def test_hostile_text_is_text() -> None:
    names = "[click](https://evil) {0} \x1b[31m \ud800 </script>\u202e"
    (result,) = results(checkpoint(replace(BAD, evidence=(names,), places=(names,)), path="\ud800\udcff.pt"))
    text = result["message"]["text"]
    assert "](" not in text
    assert "{{0}}" in text
    assert text.isprintable() == ("\n" not in text)
    assert "\\x1b[31m \\ud800" in text


def test_file_that_could_not_be_read_is_a_notification() -> None:
    error = CannotReadError("No such file or directory", where="b.pt", fix="Check the spelling.", errno=2)
    run = run_in(text_of(checkpoint(BAD), **{"b.pt": error}))
    (invocation,) = run["invocations"]
    assert not invocation["executionSuccessful"]
    (note,) = invocation["toolExecutionNotifications"]
    assert (note["level"], uris(note)) == ("error", ["b.pt"])
    assert note["message"]["text"] == "No such file or directory\nCheck the spelling."


def test_no_more_than_code_scanning_shows_and_errors_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sarif, "MAX_RESULTS", sarif.MAX_RESULTS // 10)
    remark = Finding("record-foreign", "note", "it holds others")
    letters = "".join(map(chr, range(0x4E00, 0x9FFF)))
    found = (replace(BAD, evidence=("".join(random.choices(letters, k=1_000)),)) for _ in range(503))  # noqa: S311
    files = [checkpoint(remark, finding) for finding in found]
    text = text_of(*files)
    (run,) = json.loads(text)["runs"]
    assert [result["level"] for result in run["results"]] == ["error"] * 500
    (note,) = run["invocations"][0]["toolExecutionNotifications"]
    assert note["message"]["text"].startswith("506 results are left out: code scanning shows 500.")
    assert sarif.left_out(files) == note["message"]["text"]
    assert len(gzip.compress(text.encode(), 6)) < 1_000_000
    assert not sarif.left_out(files[:250])


def test_a_report_of_any_version_is_known() -> None:
    text = text_of(checkpoint(BAD))
    assert sarif.is_sarif(text.encode()[:256])
    assert sarif.is_sarif(json.dumps(json.loads(text)).encode())
    assert not sarif.is_sarif(b'{"version": "2.1.0"}')
    assert text.isascii()


@pytest.mark.skipif(not OFFICIAL, reason="SARIF_SCHEMA names no schema: see tests/sarif.py")
def test_document_matches_the_schema_of_the_standard() -> None:
    error = CannotReadError("No such file or directory", where="b.pt", errno=2)
    validate_officially(text_of(checkpoint(BAD, CUT), checkpoint(), **{os.path.join("x", "b.pt"): error}))
