"""Findings as SARIF 2.1.0, which GitHub code scanning and other services show.

Every code of docs/findings.md is a rule, so that an alert closes when its finding is gone. GitHub identifies an alert
by its rule, its file and ``primaryLocationLineHash``, which it makes of the text of a line. A checkpoint has no lines:
here that is a hash of what was found, so that another dangerous name in a file is another alert.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transload._version import __version__
from transload.contents import Contents
from transload.findings import SEVERITIES, Finding
from transload.render.json import strict
from transload.render.words import cut, printable
from transload.steps import step_of

if TYPE_CHECKING:
    from transload.errors import TransloadError
    from transload.judge.problems import ProblemRule

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
START = f'{{"$schema": "{_SCHEMA}", "version": "2.1.0", "runs": [{{"tool": {{"driver": {{"name": "transload", '
"""The first characters of every such file."""

# GitHub shows 5,000 results, 100 locations of each and 1,024 characters of a description, and refuses files of more
# than 10 MB, compressed: that many messages of this length cannot be larger.
MAX_RESULTS = 5_000
_MAX_PLACES = 100
_LONGEST = 700
_DESCRIPTION = 1_000

# What GitHub calls critical, high and medium, by the best verdict that is possible with a finding. CWE-502 is
# "Deserialization of Untrusted Data".
_SECURITY = {"dangerous": "9.8", "code": "7.5", "needs-trust": "7.5", "unknown": "5.0"}
_TAGS = ["security", "external/cwe/cwe-502"]


def is_sarif(start: bytes) -> bool:
    """Whether a file that starts with these bytes was written here."""
    return start.startswith(START.encode())


def document(
    checkpoints: Sequence[Contents], errors: Mapping[str, TransloadError], rules: Mapping[str, ProblemRule]
) -> Iterator[str]:
    """Pieces of the document about some checkpoints, and files that could not be read.

    A notification says if results are left out; errors come first.
    """
    found = [result for checkpoint in checkpoints for result in _results(checkpoint)]
    found.sort(key=lambda result: SEVERITIES.index(result["level"]))
    notes = [_notification(f"{error.what}{_advice(error.fix.split(chr(10)))}", path) for path, error in errors.items()]
    if text := left_out(checkpoints):
        notes.append(_notification(text))
    yield START
    yield f'"semanticVersion": "{__version__}", "rules": [\n'
    yield from _rows(_rule(code, rule) for code, rule in rules.items())
    yield "]}},\n"
    invocation = {"executionSuccessful": not errors, "toolExecutionNotifications": notes}
    yield f'"invocations": [{_text(invocation)}],\n"results": [\n'
    yield from _rows(_numbered(found[:MAX_RESULTS]))
    yield "]}]}\n"


def left_out(checkpoints: Sequence[Contents]) -> str:
    """How many results are left out; empty if none is."""
    more = sum(len(checkpoint.findings) for checkpoint in checkpoints) - MAX_RESULTS
    what = f"{more:,} results are left out: code scanning shows {MAX_RESULTS:,}. Examine fewer files at once."
    return what if more > 0 else ""


def _rows(items: Iterator[dict[str, Any]]) -> Iterator[str]:
    for number, item in enumerate(items):
        yield (",\n" if number else "") + _text(item)


def _text(value: object) -> str:
    return json.dumps(strict(value))


def _rule(code: str, rule: ProblemRule) -> dict[str, Any]:
    title = f"{rule.title}."
    security = _SECURITY.get(rule.safety, "") if rule.integrity != "not-a-checkpoint" else ""
    return {
        "id": code,
        "shortDescription": {"text": title},
        "fullDescription": {"text": cut(" ".join((title, *rule.about)), _DESCRIPTION)},
        "help": {"text": f"{title}{_advice(rule.fix)}", "markdown": rule.text},
        "defaultConfiguration": {"level": rule.severity},
        **({"properties": {"security-severity": security, "tags": _TAGS}} if security else {}),
    }


def _results(checkpoint: Contents) -> Iterator[dict[str, Any]]:
    # The files of a directory. What is in none of them is shown at the index, which is a file.
    parts = {part.name: part.role for part in checkpoint.parts if part.role}
    is_index = checkpoint.path.endswith(".index.json")
    folder = os.path.dirname(checkpoint.path) if is_index else checkpoint.path
    index = next((name for name, role in parts.items() if role == "index"), "")
    whole = _uri(os.path.join(folder, index) if index else checkpoint.path)
    for finding in checkpoint.findings:
        files: dict[str, list[str]] = {}
        for place in finding.places or ("",):
            file, _, inside = place.partition(" › ")
            known = file in parts
            uri = _uri(os.path.join(folder, file)) if known else whole
            files.setdefault(uri, []).append(inside if known else place)
        yield {
            "ruleId": finding.code,
            "level": finding.severity,
            "message": {"text": _message(finding)},
            "locations": [_location(uri, places) for uri, places in list(files.items())[:_MAX_PLACES]],
            "evidence": finding.evidence,
        }


def _numbered(results: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The results with a fingerprint in place of the evidence; a number tells equal ones apart."""
    from hashlib import sha256

    seen: Counter[str] = Counter()
    for result in results:
        evidence = result.pop("evidence")
        print_ = sha256(_text([result["ruleId"], result["locations"], evidence]).encode()).hexdigest()[:16]
        seen[print_] += 1
        yield {**result, "partialFingerprints": {"primaryLocationLineHash": f"{print_}:{seen[print_]}"}}


def _location(uri: str, places: Sequence[str] = ()) -> dict[str, Any]:
    names = [{"fullyQualifiedName": printable(place)} for place in places[:_MAX_PLACES] if place]
    file = {"uri": uri} if "://" in uri else {"uri": uri, "uriBaseId": "%SRCROOT%"}
    place = {"physicalLocation": {"artifactLocation": file, "region": {"startLine": 1}}}
    return {**place, "logicalLocations": names} if names else place


def _notification(text: str, path: str = "") -> dict[str, Any]:
    place = {"locations": [_location(_uri(path))]} if path else {}
    return {"level": "error" if path else "warning", "message": {"text": _plain(text)}, **place}


def _message(finding: Finding) -> str:
    """What was found, and what to do, in one text."""
    evidence = f": {'; '.join(finding.evidence)}" if finding.evidence else "."
    return _plain(f"{finding.title}{evidence}{_advice(finding.fix)}")


def _advice(fix: Sequence[str]) -> str:
    return "".join(f"\n{step_of(line).text}" for line in fix)


def _plain(text: str) -> str:
    """A text from a file, in which nothing is a link ``[text](address)`` or a placeholder ``{0}`` of SARIF."""
    lines = "\n".join(printable(line, None) for line in cut(text, _LONGEST).split("\n"))
    return cut(lines, _LONGEST).replace("](", "] (").replace("{", "{{").replace("}", "}}")


def _uri(path: str) -> str:
    """The path relative to the current folder; ``file:`` for a file outside of it, which no service can show."""
    from urllib.parse import quote

    if "://" in path:
        return quote(path, safe=":/@%&=+$,;~!*'()")
    whole = os.path.abspath(path)
    inside = os.path.relpath(whole) if whole.startswith(os.path.join(os.getcwd(), "")) else ""
    name = (inside or whole).replace(os.sep, "/")
    try:
        uri = quote(os.fsencode(name))
    except UnicodeEncodeError:  # a name in an archive, which no file can have
        uri = quote(printable(name))
    return uri if inside else f"file:///{uri.lstrip('/')}"
