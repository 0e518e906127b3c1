"""What each problem that a reader notes means for safety and integrity, and what to do about it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import cache
from typing import Any

from transload.checkpoint import Checkpoint
from transload.errors import BrokenFileError, NotACheckpointDirectoryError, NotACheckpointError, TransloadError
from transload.findings import (
    SEVERITIES,
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
from transload.format import format_of
from transload.frozen import NamedTuple, replace

WITHOUT_CODE = "This extracts only the tensors; no code runs, so you need not trust the file."
"""Precedes the ``convert`` command."""


def with_commands(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """Put the path of the file into the commands of the findings, and leave out repeated advice.

    A command that would have nothing to do is left out, too, with the sentence before it.
    """
    findings = list(checkpoint.findings)
    given: set[str] = set()
    for index in sorted(range(len(findings)), key=lambda index: SEVERITIES.index(findings[index].severity)):
        finding = findings[index]
        fix = finding.fix
        if fix and finding.code == "needs-trust" and (command := convert_command(checkpoint)):
            fix = (*fix, WITHOUT_CODE, command)
        new: list[str] = []
        lines = iter(zip(fix, (*fix[1:], ""), strict=False))
        for line, following in lines:
            if template := _TEMPLATE.match(following):
                command = _COMMANDS[template[1]](checkpoint)
                next(lines)
                new += [line, command] if command and command not in given else []
                given.add(command)
            elif line not in given or not line.endswith("."):
                new.append(line)
                given.add(line)
        if tuple(new) != finding.fix:
            findings[index] = replace(finding, fix=tuple(new))
    return tuple(findings)


def command_lines(findings: tuple[Finding, ...]) -> tuple[str, ...]:
    """The first command in the findings, with the sentence before it."""
    from transload.steps import step_of

    for finding in findings:
        for at, line in enumerate(finding.fix):
            if step_of(line).kind == "command":
                return finding.fix[max(0, at - 1) : at + 1]
    return ()


def convert_command(checkpoint: Checkpoint) -> str:
    """The command that extracts the tensors from a pickle; empty for dangerous or damaged files, and for pieces."""
    sound = checkpoint.integrity not in ("damaged", "not-a-checkpoint") and checkpoint.safety != "dangerous"
    sound = sound and not any(problem.code == "rank-file" for problem in checkpoint.problems)
    return _convert(checkpoint) if sound and checkpoint.traits.extracted and checkpoint.storages else ""


def _rescue(checkpoint: Checkpoint) -> str:
    """The rescue command; empty for formats that it does not accept, for attacks, and where nothing can be saved."""
    if not checkpoint.traits.rescued or checkpoint.safety == "dangerous":
        return ""
    whole = any(storage.nbytes and storage.stored >= storage.nbytes for storage in checkpoint.storages)
    if not checkpoint.storages:  # the index of an archive may be damaged, and has a checksum to repair it with
        whole = any(record.name.endswith(".pkl") for record in checkpoint.records)
    names = (checkpoint.format, *(dict(part.facts).get("format", "") for part in checkpoint.parts))
    others = (format_of(name).suffix for name in names if format_of(name).suffix != ".pt")
    return rescue_command(checkpoint.path, next(others, ".pt")) if whole else ""


def _convert(checkpoint: Checkpoint) -> str:
    """The command that converts into a file of the same name, with another suffix."""
    if not is_named(checkpoint.path):
        return "$ transload convert FILE NEW.safetensors"
    stem, ending = os.path.splitext(checkpoint.path.rstrip("/"))
    new = "NEW.safetensors" if ending == ".safetensors" else f"{stem}.safetensors"
    return f"$ transload convert {quoted(checkpoint.path)} {quoted(new)}"


# The commands of docs/findings.md, and who fills in the name of the file.
_TEMPLATE = re.compile(r"\$ transload (rescue|convert) FILE ")
_COMMANDS: dict[str, Callable[[Checkpoint], str]] = {"rescue": _rescue, "convert": _convert}

# The sections of docs/findings.md.
_HEAD = re.compile(r"\n\*(?P<severity>\w+)\*: (?P<title>.+)\.\n")
_EFFECT = re.compile(r"(safety|integrity) at best `([\w-]+)`")
_SHOWN = 10


class ProblemRule(NamedTuple):
    """How a problem is judged: a title, its severity, and the best verdicts that are possible with it.

    ``text`` is the section of the page, ``about`` what it explains, in paragraphs.
    """

    title: str
    severity: Severity
    safety: Safety = "data-only"
    integrity: Integrity = "whole"
    fix: tuple[str, ...] = ()
    about: tuple[str, ...] = ()
    text: str = ""


@cache
def rules() -> dict[str, ProblemRule]:
    """Every rule by its code, from docs/findings.md.

    >>> rules()["zip-shifted"].safety, rules()["zip-shifted"].severity
    ('dangerous', 'error')
    """
    from transload.steps import listed, sections

    by_code: dict[str, ProblemRule] = {}
    for code, text in sections(manual_page("findings")):
        head = _HEAD.match(text)
        if head is None:
            raise ValueError(text)  # a mistake in the page
        blocks = text.strip().split("\n\n")[1:]
        fix = tuple(line for block in blocks if block[:2] == "- " for step in listed(block) for line in step.lines)
        about = tuple(block.replace("\n", " ") for block in blocks if not block.startswith(("- ", "Effect: ")))
        effects: dict[str, Any] = dict(_EFFECT.findall(text))
        severity: Any = head["severity"]
        by_code[code] = ProblemRule(head["title"], severity, fix=fix, about=about, text=text.strip(), **effects)
    return by_code


# Problems that the problem before the colon explains.
_EXPLAINS = {
    "zip-unreadable-entry": {
        *("crc-mismatch", "pickle-broken", "pickle-unreadable", "record-unreadable", "record-unseen"),
        *("record-unused", "zip-bad-byteorder", "zip-bad-note", "zip-bad-version", "zip-compressed", "zip-no-version"),
    },
    "zip-no-directory": {"zip-no-version", "zip-walked"},
    "not-a-checkpoint": {"zip-no-folder", "zip-two-folders"},
}


def judge_problems(problems: tuple[Problem, ...]) -> tuple[Safety, tuple[Finding, ...]]:
    """The best safety that is possible with these problems, and one finding for each kind of problem."""
    groups: dict[str, list[Problem]] = {}
    for problem in problems:
        groups.setdefault(problem.code, []).append(problem)
    rules = {code: rule_of(code) for code in groups}
    explained = {effect for cause, effects in _EXPLAINS.items() if cause in groups for effect in effects}
    findings = []
    for code, group in groups.items():
        if code in explained:
            continue
        evidence = []
        for problem in group[:_SHOWN]:
            where = f"{problem.where}: " if problem.where else ""
            evidence += [f"{where}{line}" for line in problem.detail.split("\n") if line]
        if len(group) > _SHOWN:
            evidence.append(f"… and {len(group) - _SHOWN} more")
        title, fix = group[0].title or rules[code].title, group[0].fix or rules[code].fix
        if code == UNMERGED and groups.keys() & UNMERGEABLE:
            fix = ()  # that of the cause
        places = tuple(dict.fromkeys(problem.where for problem in group if problem.where))
        findings.append(Finding(code, rules[code].severity, title, tuple(evidence), fix, places))
    return worst_safety(*(rule.safety for rule in rules.values())), tuple(findings)


def rule_of(code: str) -> ProblemRule:
    """The rule for a code; a strict one if the code is not known."""
    return rules().get(code) or ProblemRule(code.replace("-", " "), "error", "unknown", "damaged")


# -- whether a file is too damaged to be loaded or converted

UNMERGED = "ranks-unmerged"
"""The files of ranks do not form one object, so there is nothing to load."""
UNMERGEABLE = frozenset({"rank-missing", "ranks-differ"})
"""Causes of that: no library can load them then."""
# Damage that only gets a warning: torch.load does not detect it either, or some tensors are left out.
LEFT_OUT = frozenset({"gguf-quantized", "npy-not-numbers", "npy-objects", "npy-size"})
_WARNED = LEFT_OUT | {"dcp-objects-differ", "dcp-shape-inferred", "storage-skipped"}
_HARMLESS = frozenset({"link-outside"})
# Problems that can be repaired, but only by a rescue; and values that cannot be read here.
_NOT_WHOLE = frozenset({"dcp-transformed", "zip-no-directory", "zeros-at-end", "zip-bad-version"})


def refuse_broken(checkpoint: Checkpoint, key: str = "") -> None:
    """Raise if the file is not a checkpoint, or so damaged that tensors would be lost or wrong.

    ``key`` is the part of several files that is wanted; damage that cannot concern it does not count. Tensors that are
    listed, but not complete, are for the caller to find.
    """
    if key and checkpoint.traits.several:
        from transload.formats.sets import concerns

        problems = tuple(problem for problem in checkpoint.problems if concerns(problem, checkpoint, key))
        checkpoint = replace(checkpoint, problems=problems)
    codes = codes_of(checkpoint)
    if checkpoint.integrity == "not-a-checkpoint":
        folder = "directory-unknown" in codes
        kind = NotACheckpointDirectoryError if folder else NotACheckpointError
        raise _refusal(kind, checkpoint, {"not-a-checkpoint"})
    broken = set()
    for code in codes - _WARNED:
        rule = rule_of(code)
        damaged = rule.severity == "error" and rule.integrity in ("damaged", "not-a-checkpoint")
        if code in _NOT_WHOLE or (damaged and code not in _HARMLESS):
            broken.add(code)
    if broken:
        raise _refusal(BrokenFileError, checkpoint, broken)


def codes_of(checkpoint: Checkpoint) -> set[str]:
    """The codes of all problems, except for a magic number that is merely pickled in another protocol."""
    codes = {problem.code for problem in checkpoint.problems}
    first = checkpoint.pickles[0] if checkpoint.pickles else None
    if first and not (first.globals or first.calls or first.persistent or first.irregular or first.ambiguous):
        codes.discard("legacy-odd-magic")  # a number, without any calls
    return codes


def load_warning(checkpoint: Checkpoint) -> str:
    """The warning about damage that does not prevent loading; empty if there is none."""
    warned = [finding for finding in checkpoint.findings if finding.code in _WARNED]
    return "; ".join(sentence_of(finding) for finding in warned)


def _refusal(kind: type[TransloadError], checkpoint: Checkpoint, codes: set[str]) -> TransloadError:
    """The error for the first finding with one of these codes, or else for the first finding that is an error.

    Its advice includes the first command for the file, which may be in another finding.
    """
    from transload.steps import has_command

    errors = tuple(finding for finding in checkpoint.findings if finding.severity == "error")
    finding = [*(finding for finding in checkpoint.findings if finding.code in codes), *errors][0]
    fix = finding.fix
    if not has_command(fix):
        first = fix or next((error.fix for error in errors if error.fix), ())
        fix = tuple(dict.fromkeys((*first, *command_lines(errors))))
    return kind(sentence_of(finding), where=checkpoint.path, fix="\n".join(fix))


def sentence_of(finding: Finding) -> str:
    """A finding in one sentence."""
    return f"{finding.title}: {'; '.join(finding.evidence)}" if finding.evidence else finding.title
