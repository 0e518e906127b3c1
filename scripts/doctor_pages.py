"""Write what the manual takes from the code: the list of causes, the layer of each, docs/doctor.schema.json.

Usage: python scripts/doctor_pages.py [--check]
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from transload.diagnose.case import LAYERS, Rule
from transload.diagnose.report import Status
from transload.diagnose.rules import BY_CODE
from transload.findings import Severity
from transload.machine import Machine, Unknown

DOCS = Path(__file__).parent.parent / "docs"
WIDTH = 118
INDEX = """\
# Causes

Everything that [`transload doctor`](../doctor.md) can name as the reason why PyTorch does not see the GPU, by layer, in
the order in which to repair them. Codes are stable between releases. `transload doctor --explain CODE` prints a page in
the terminal. `scripts/doctor_pages.py` writes this list.

The doctor cannot detect the causes in *italics*: the facts of a machine do not show them.
"""
EMPTY = """\
What it is, which errors it causes (their exact texts), and how it is detected.

## Fix

What to do.

[All causes](README.md)
"""


def main() -> int:
    """Write the files that are out of date; with ``--check`` only return 1 if there are any."""
    stale = {path: text for path, text in files().items() if text_of(path) != text}
    if "--check" in sys.argv[1:]:
        return int(bool(stale))
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")
    return 0


def text_of(path: Path) -> str:
    """The text of a file; empty if it does not exist."""
    return path.read_text(encoding="utf-8") if path.exists() else ""


def files() -> dict[Path, str]:
    """Every file with its expected text: the second paragraph of a page comes from its rule, the rest is kept."""
    paths = {code: DOCS / "doctor" / f"{code}.md" for code in BY_CODE}
    pages = {code: with_head(rule, text_of(paths[code])) for code, rule in BY_CODE.items()}
    return {
        DOCS / "doctor" / "README.md": index(pages),
        DOCS / "doctor.schema.json": schema_text(),
        **{paths[code]: page for code, page in pages.items()},
    }


def index(pages: Mapping[str, str]) -> str:
    """The list of all causes by layer, with the titles of their pages."""
    lines = [INDEX]
    for name, layer in LAYERS.items():
        rules = sorted((rule for rule in BY_CODE.values() if rule.layer == name), key=lambda rule: rule.code)
        lines += [f"## {layer[0].upper()}{layer[1:]}", "", "| code | cause |", "|---|---|"]
        for rule in rules:
            mark = "" if rule.check is not None else "*"
            title = pages[rule.code].partition("\n")[0].partition(": ")[2]
            lines.append(f"| [{rule.code}]({rule.code}.md) | {mark}{title}{mark} |")
        lines.append("")
    return "\n".join(lines)


def with_head(rule: Rule, page: str) -> str:
    """A page with the layer and the certainty of its rule; for a new rule, a template."""
    title, _, body = page.split("\n\n", 2) if page else (f"# {rule.code}: what is wrong, in a few words", "", EMPTY)
    return f"{title}\n\n{certainty(rule)}\n\n{body}"


def certainty(rule: Rule) -> str:
    """The layer of a cause, and the certainty with which the doctor names it."""
    layer = f"Layer: {LAYERS[rule.layer]}."
    if rule.check is None:
        return f"{layer} The doctor cannot detect it: the facts of a machine do not show it."
    if rule.symptom:
        return f"{layer} A symptom: reported only if no cause is found."
    return f"{layer} Reported as probable: the facts fit but do not prove it." if rule.likely else layer


# -- schema ------------------------------------------------------------------------------------------------------------


def schema_text() -> str:
    """The JSON schema of ``transload doctor --json``, with the comment on each fact."""
    return _to_json(schema()) + "\n"


def _to_json(value: Any, indent: str = "") -> str:
    """JSON in which every value that fits on one line is on one line."""
    line = json.dumps(value, ensure_ascii=False)
    if len(indent) + len(line) <= WIDTH or not isinstance(value, dict):
        return line
    inside = f"{indent}  "
    rows = (f"{inside}{json.dumps(key)}: {_to_json(item, inside)}" for key, item in value.items())
    return "{\n" + ",\n".join(rows) + f"\n{indent}}}"


def schema() -> dict[str, Any]:
    """The schema as data."""
    definitions: dict[str, Any] = {}
    machine = _schema_of(Machine, definitions)
    finding = {
        "code": {"type": "string", "pattern": "^[A-Z][0-9]{2}$"},
        "severity": {"enum": list(get_args(Severity))},
        "title": {"type": "string"},
        "evidence": _texts("what shows it, one line each"),
        "fix": _texts("what to do, in order: a command begins with '$ ', what belongs in a file with '| '"),
        "doc": {"type": "string"},
    }
    definitions["Finding"] = _object(finding)
    definitions["Muted"] = _object({**finding, "because": {"type": "string", "description": "the code of its cause"}})
    result = {
        "schema": {"const": 1},
        "status": {"enum": list(get_args(Status))},
        "cuda_usable": {"type": "boolean"},
        "cause": {"anyOf": [{"$ref": "#/$defs/Finding"}, {"type": "null"}]},
        "findings": {"type": "array", "items": {"$ref": "#/$defs/Finding"}},
        "muted": {"type": "array", "items": {"$ref": "#/$defs/Muted"}},
        "machine": machine,
    }
    # What any command prints if there is no result.
    texts = {name: {"type": "string"} for name in ("what", "where", "fix")}
    why = "why there is no result: the exit code is 2, and ok is false"
    error = {**_object({**texts, "errno": {"type": ["integer", "null"]}}), "description": why}
    failure = {"schema": {"const": 1}, "path": {"type": "string"}, "ok": {"const": False}, "error": error}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "transload doctor --json, schema 1",
        "type": "object",
        "oneOf": [{"required": list(result)}, {"required": list(failure), "maxProperties": len(failure)}],
        "additionalProperties": False,
        "properties": {**result, **failure},
        "$defs": dict(sorted(definitions.items())),
    }


def _texts(description: str) -> dict[str, Any]:
    return {"type": "array", "items": {"type": "string"}, "description": description}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "required": list(properties),
        "additionalProperties": False,
        "properties": properties,
    }


_SIMPLE = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def _schema_of(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of a type of ``transload.machine``; classes go into ``definitions``."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in _SIMPLE:
        return {"type": _SIMPLE[kind]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, UnionType):
        return {"anyOf": [_schema_of(argument, definitions) for argument in arguments]}
    if origin is tuple:
        return {"type": "array", "items": _schema_of(arguments[0], definitions)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema_of(arguments[1], definitions)}
    if kind.__name__ not in definitions:
        definitions[kind.__name__] = {}  # a placeholder, in case the class refers to itself
        definitions[kind.__name__] = _class_schema(kind, definitions)
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _class_schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if kind is Unknown:
        reason = {"type": "string", "description": "why it could not be found out"}
        return {"description": _first_paragraph(kind.__doc__), **_object({"unknown": reason})}
    hints, comments = get_type_hints(kind), _comments(kind)
    properties = {}
    for field in fields(kind):
        comment = {"description": comments[field.name]} if field.name in comments else {}
        properties[field.name] = {**_schema_of(hints[field.name], definitions), **comment}
    return {"description": _first_paragraph(kind.__doc__), **_object(properties)}


def _comments(kind: Any) -> dict[str, str]:
    """The comments on the fields of a class: on the same line, or above it."""
    out: dict[str, str] = {}
    above: list[str] = []
    for line in inspect.getsource(kind).splitlines():
        code, _, comment = line.partition("# ")
        field = re.match(r"    (\w+): ", code)
        above = [*above, comment] if comment else above
        if field and above:
            out[field[1]] = _first_paragraph(" ".join(above))
        above = above if comment and not field else []
    return out


def _first_paragraph(text: object) -> str:
    """The first paragraph of a docstring on one line."""
    return " ".join(inspect.cleandoc(str(text)).split("\n\n")[0].replace("``", "`").split())


if __name__ == "__main__":
    sys.exit(main())
