"""What each problem a reader can meet means: for safety, for integrity, and for the person who has it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

from transload.checkpoint import Checkpoint
from transload.errors import BrokenFileError, NotACheckpointDirectoryError, NotACheckpointError
from transload.findings import (
    Finding,
    Integrity,
    Problem,
    Safety,
    Severity,
    is_named,
    manual_page,
    quoted,
    rescue_command,
    worst_safety,
)
from transload.frozen import replace

RESCUE = "$ transload rescue FILE NEW.pt"
CONVERT = "$ transload convert FILE NEW.safetensors"
WITHOUT_CODE = "This takes its tensors alone, without its code, so that no trust is needed."
"""What leads to the command that takes them out."""

_SEVERITIES = ("error", "warning", "note")
SETS = frozenset({"sharded", "dcp", "deepspeed", "megatron"})
"""The formats of several files."""

_ARCHIVES = frozenset({"torch-zip", "torchscript", "torch-export"})
RESCUED = SETS | _ARCHIVES | {"torch-legacy", "safetensors"}
"""The formats that a rescue takes."""

_CONVERTED = frozenset({"torch-zip", "torch-legacy", "torch-tar", "torch-directory", "torchscript", "pickle"})


def with_commands(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """The findings with real commands in their advice. What was advised once, in the order of reading, is not repeated.

    A command that would find nothing to do is left out, with the sentence before it.
    """
    found = list(checkpoint.findings)
    told: set[str] = set()
    for index in sorted(range(len(found)), key=lambda index: _SEVERITIES.index(found[index].severity)):
        finding = found[index]
        fix = finding.fix
        if fix and finding.code == "needs-trust" and (command := convert_command(checkpoint)):
            fix = (*fix, WITHOUT_CODE, command)  # the way that needs no trust
        fix = tuple(_advice(fix, checkpoint, told))
        if fix != finding.fix:
            found[index] = replace(finding, fix=fix)
    return tuple(found)


def _advice(fix: tuple[str, ...], checkpoint: Checkpoint, told: set[str]) -> Iterator[str]:
    lines = iter(zip(fix, (*fix[1:], ""), strict=False))
    for line, following in lines:
        if following in _COMMANDS:
            command = _COMMANDS[following](checkpoint)
            next(lines)
            if command and command not in told:
                told.add(command)
                yield from (line, command)
        elif line not in told or not line.endswith("."):
            told.add(line)
            yield line


def command_lines(findings: tuple[Finding, ...]) -> tuple[str, ...]:
    """The first command advised, with the sentence that leads to it."""
    for finding in findings:
        for at, line in enumerate(finding.fix):
            if line.startswith("$ "):
                return finding.fix[max(0, at - 1) : at + 1]
    return ()


def convert_command(checkpoint: Checkpoint) -> str:
    """The command that takes the tensors out of a pickle; empty for attacks, and where none is whole."""
    sound = checkpoint.integrity not in ("damaged", "not-a-checkpoint") and checkpoint.safety != "dangerous"
    return _convert(checkpoint) if sound and checkpoint.format in _CONVERTED and checkpoint.storages else ""


def _rescue(checkpoint: Checkpoint) -> str:
    """Empty for what a rescue does not take, for attacks, and where nothing is left to save."""
    if checkpoint.format not in RESCUED or checkpoint.safety == "dangerous":
        return ""
    whole = any(storage.nbytes and storage.stored >= storage.nbytes for storage in checkpoint.storages)
    if not checkpoint.storages:  # the index of an archive may be hurt, which has a checksum to repair it by
        whole = checkpoint.format in _ARCHIVES and any(record.name.endswith(".pkl") for record in checkpoint.records)
    formats = {checkpoint.format, *(dict(part.facts).get("format") for part in checkpoint.parts)}
    return rescue_command(checkpoint.path, ".safetensors" if "safetensors" in formats else ".pt") if whole else ""


def _convert(checkpoint: Checkpoint) -> str:
    """Into a file of the same name and the other ending."""
    if not is_named(checkpoint.path):
        return CONVERT
    stem, ending = os.path.splitext(checkpoint.path.rstrip("/"))  # noqa: PTH122 - pathlib is slow to import
    new = "NEW.safetensors" if ending == ".safetensors" else f"{stem}.safetensors"
    return f"$ transload convert {quoted(checkpoint.path)} {quoted(new)}"


_COMMANDS: dict[str, Callable[[Checkpoint], str]] = {RESCUE: _rescue, CONVERT: _convert}
_SHOWN = 10


class Rule(NamedTuple):
    """How a problem is judged: a title for a person, its severity, and the verdict it forces on each scale."""

    title: str
    severity: Severity
    safety: Safety = "data-only"
    integrity: Integrity = "whole"
    fix: tuple[str, ...] = ()


_HEAD = re.compile(r"(?P<code>.+)\n\n\*(?P<severity>\w+)\*: (?P<title>.+)\.\n")
_EFFECT = re.compile(r"(safety|integrity) at best `([\w-]+)`")
_STEP = re.compile(r"^- (.+)$", re.MULTILINE)


@cache
def rules() -> dict[str, Rule]:
    """Every rule by its code, from docs/findings.md; a file without any problem does not need them.

    >>> rules()["zip-shifted"].safety, rules()["zip-shifted"].severity
    ('dangerous', 'error')
    """
    found: dict[str, Rule] = {}
    for section in manual_page("findings").split("\n## ")[1:]:
        head = _HEAD.match(section)
        if head is None:
            raise ValueError(section)  # of our own page
        # The page shows a command as code. ``with_commands`` replaces FILE in it.
        steps = [f"$ {step[1:-1]}" if step.startswith("`transload ") else step for step in _STEP.findall(section)]
        effects: dict[str, Any] = dict(_EFFECT.findall(section))
        severity: Any = head["severity"]
        found[head["code"]] = Rule(head["title"], severity, fix=tuple(steps), **effects)
    return found


# Problems that say nothing once another is told.
_EXPLAINS = {
    "zip-unreadable-entry": frozenset(
        {
            *("crc-mismatch", "pickle-broken", "pickle-unreadable", "record-unreadable", "record-unseen"),
            *(
                "record-unused",
                "zip-bad-byteorder",
                "zip-bad-note",
                "zip-bad-version",
                "zip-compressed",
                "zip-no-version",
            ),
        }
    ),
    "zip-no-directory": frozenset({"zip-no-version", "zip-walked"}),
    "not-a-checkpoint": frozenset({"zip-no-folder", "zip-two-folders"}),
}


def judge_problems(problems: tuple[Problem, ...]) -> tuple[Safety, tuple[Finding, ...]]:
    """The worst safety that the problems force, and one finding for each kind of problem."""
    groups: dict[str, list[Problem]] = {}
    for problem in problems:
        groups.setdefault(problem.code, []).append(problem)
    rules = {code: rule_of(code) for code in groups}
    # One accident, one finding; the verdict counts all.
    told = {effect for cause, effects in _EXPLAINS.items() if cause in groups for effect in effects}
    findings = []
    for code, group in groups.items():
        if code in told:
            continue
        evidence = []
        for problem in group[:_SHOWN]:
            where = f"{problem.where}: " if problem.where else ""
            evidence += [f"{where}{line}" for line in problem.detail.split("\n") if line]
        if len(group) > _SHOWN:
            evidence.append(f"… and {len(group) - _SHOWN} more")
        title, fix = group[0].title or rules[code].title, group[0].fix or rules[code].fix
        findings.append(Finding(code, rules[code].severity, title, tuple(evidence), fix))
    return worst_safety(*(rule.safety for rule in rules.values())), tuple(findings)


def rule_of(code: str) -> Rule:
    """The rule for a code. A problem nobody has judged yet is never a good sign."""
    return rules().get(code) or Rule(code.replace("-", " "), "error", "unknown", "damaged")


# -- whether a file is too damaged to be loaded or converted

# Damage that torch.load does not notice either, and that leaves every tensor what it is, or is told in a warning.
LEFT_OUT = frozenset({"gguf-quantized", "npy-not-numbers", "npy-objects", "npy-size"})
_TOLD = LEFT_OUT | {"storage-skipped"}
_HARMLESS = frozenset({"link-outside"})
# What could be repaired and is not whole as it is.
_NOT_WHOLE = frozenset({"zip-no-directory", "zeros-at-end", "zip-bad-version"})


def refuse_broken(checkpoint: Checkpoint) -> None:
    """Raise if the file is not a checkpoint, or so damaged that tensors would be lost or wrong."""
    if checkpoint.integrity == "not-a-checkpoint":
        finding = _worst(checkpoint, {"not-a-checkpoint"})
        folder = os.path.isdir(checkpoint.path)  # noqa: PTH112 - pathlib costs ten milliseconds to import
        raise (NotACheckpointDirectoryError if folder else NotACheckpointError)(
            sentence_of(finding, "this is not a checkpoint"), where=checkpoint.path, fix=_fix(checkpoint, finding)
        )
    broken = set()
    for code in codes_of(checkpoint) - _TOLD:
        rule = rule_of(code)
        damaged = rule.severity == "error" and rule.integrity in ("damaged", "not-a-checkpoint")
        if code in _NOT_WHOLE or (damaged and code not in _HARMLESS):
            broken.add(code)
    if broken:
        finding = _worst(checkpoint, broken)
        raise BrokenFileError(
            sentence_of(finding, "it is damaged"), where=checkpoint.path, fix=_fix(checkpoint, finding)
        )


def codes_of(checkpoint: Checkpoint) -> set[str]:
    """The problems that count. torch writes the magic number in the protocol it was asked for."""
    codes = {problem.code for problem in checkpoint.problems}
    first = checkpoint.pickles[0] if checkpoint.pickles else None
    if first and not (first.globals or first.calls or first.persistent or first.irregular or first.ambiguous):
        codes.discard("legacy-odd-magic")  # a number, and nothing that is called
    return codes


def worth_a_warning(checkpoint: Checkpoint) -> str:
    """What is wrong with a file that is loaded all the same; empty if nothing is."""
    found = [finding for finding in checkpoint.findings if finding.code in _TOLD]
    return "; ".join(sentence_of(finding) for finding in found)


def _worst(checkpoint: Checkpoint, codes: set[str]) -> Finding | None:
    """The finding to tell: one of these codes, else the first error there is."""
    named = [finding for finding in checkpoint.findings if finding.code in codes]
    return next(iter([*named, *(f for f in checkpoint.findings if f.severity == "error")]), None)


def sentence_of(finding: Finding | None, otherwise: str = "") -> str:
    """A finding in one sentence."""
    if finding is None:
        return otherwise
    return f"{finding.title}: {'; '.join(finding.evidence)}" if finding.evidence else finding.title


def _fix(checkpoint: Checkpoint, finding: Finding | None) -> str:
    """What the finding advises, and the command for the file, which another one may have told already."""
    own = finding.fix if finding else ()
    if any(line.startswith("$ ") for line in own):
        return "\n".join(own)
    errors = tuple(f for f in checkpoint.findings if f.severity == "error")
    first = own or next((f.fix for f in errors if f.fix), ())
    return "\n".join(dict.fromkeys((*first, *command_lines(errors))))
