"""The graph of an exported program: versions, devices written into it, and targets that no exporter names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from transload.findings import Problem
from transload.read.described import device, entries, items, text
from transload.read.script_code import OPERATORS

__all__ = ["graph_facts", "graph_problems"]

# What torch.export writes as the target of a node: operators, and Python's arithmetic on sizes. torch.export.load finds
# any other text that begins with "torch" by walking attributes from the package torch: "torch.os.system" is a function.
_TARGETS = re.compile(
    r"torch\.ops\.\w+\.\w+(\.\w+)?|torch\._?sym_\w+|math\.(trunc|ceil|floor|sqrt|pow)|#[\w:.]+"
    r"|_operator\.(eq|ne|le|ge|lt|gt|neg|pos|mul|add|sub|floordiv|truediv|mod|pow|and_|or_|lshift|rshift|getitem)"
)
# Sizes are expressions that sympy evaluates as Python, and guards are compiled and run.
_ODD_TEXT = re.compile(r"__\w+__|\b(eval|exec|open|import|compile|getattr|lambda)\b")
_SHOWN = 8


def graph_facts(program: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Schema and operator versions, and the size of the graph.

    >>> graph_facts({"schema_version": {"major": 8, "minor": 17}, "opset_version": {"aten": 10}})
    (('schema version', '8.17'), ('opset version', 'aten 10'), ('nodes', '0'))
    """
    schema = program.get("schema_version")
    parts = [schema] if type(schema) is int else [value for _, value in items(schema)]
    opsets = [f"{text(name)} {value}" for name, value in items(program.get("opset_version")) if type(value) is int]
    graph = dict(items(dict(items(program.get("graph_module"))).get("graph")))
    facts = (
        ("schema version", ".".join(str(part) for part in parts if type(part) is int)),
        ("opset version", ", ".join(opsets[:_SHOWN])),
        ("nodes", str(len(entries(graph.get("nodes"))))),
    )
    return tuple(fact for fact in facts if fact[1])


def graph_problems(name: str, program: dict[str, Any]) -> list[Problem]:
    """Devices, far-reaching operators and odd targets in a program, with the nodes they stand in."""
    devices: Counter[str] = Counter()
    targets: Counter[str] = Counter()
    odd: Counter[str] = Counter()
    for key, value, target in _walk(program):
        if key == "as_device" and type(value) is dict:
            devices[f"{device(value)} in {target or 'the graph'}"] += 1
        elif key == "target" and type(value) is str:
            targets[value[:200]] += 1
        elif key in ("expr_str", "guards_code") and type(value) is str and _ODD_TEXT.search(value):
            odd[value[:200]] += 1
    out = [Problem("export-device", name, _lines(devices))] if devices else []
    reaching = Counter({target: count for target, count in targets.items() if _reason(target)})
    reaching.update({f"{target}, which is Python": count for target, count in odd.items()})
    return [*out, Problem("export-dangerous-op", name, _lines(reaching))] if reaching else out


def _reason(target: str) -> str:
    """Why a target is one to refuse; empty if it is not.

    >>> _reason("torch.ops.aten.add.Tensor"), _reason("torch.os.system"), _reason("torch.ops.aten.save.default")
    ('', 'no operator', 'writes a file')
    """
    if not _TARGETS.fullmatch(target):
        return "no operator"
    parts = target.split(".")
    return OPERATORS.get("::".join(parts[2:4]), "") if parts[:2] == ["torch", "ops"] else ""


def _walk(program: dict[str, Any]) -> Iterable[tuple[str, Any, str]]:
    """Every entry of every object in the program, with the target of the node it stands in; not by recursion."""
    stack: list[tuple[str, Any, str]] = [("", program, "")]
    while stack:
        key, value, target = stack.pop()
        if type(value) is dict:
            target = text(value.get("target"), 200) or target
            for inner, held in value.items():
                yield inner, held, target
                stack.append((inner, held, target))
        elif type(value) is list:
            for held in value:
                if type(held) is str:
                    yield key, held, target
                else:
                    stack.append((key, held, target))


def _lines(counts: Counter[str]) -> str:
    lines = [f"{what} {count}×" for what, count in counts.most_common(_SHOWN)]
    return "\n".join([*lines, f"… and {len(counts) - _SHOWN} more"] if len(counts) > _SHOWN else lines)
