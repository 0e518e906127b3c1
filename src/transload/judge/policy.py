"""What a repository does not accept: the exit code of ``inspect --refuse``, and the severity of each finding there."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from transload.checkpoint import Checkpoint
from transload.errors import UsageError
from transload.findings import Finding, is_named, quoted
from transload.frozen import replace
from transload.io.sources import is_url
from transload.judge.problems import rule_of
from transload.render.words import plural, size

KINDS = ("code", "damage", "other", "gpu")
"""What can be refused; ``other`` are files that are not checkpoints, such as Git LFS pointers."""

DEFAULT = KINDS[:3]
"""What ``Checkpoint.ok`` is false for."""

_ANYWHERE = ("", "cpu", "meta")  # torch.load needs no device for these tags


def kinds_in(text: str) -> tuple[str, ...]:
    """The kinds in a list that is separated by commas; ``UsageError`` if there is none, or an unknown one."""
    kinds = tuple(word.strip() for word in text.split(","))
    for kind in kinds:
        if kind not in KINDS:
            fix = f"Choose from {', '.join(KINDS)}, separated by commas."
            raise UsageError(f"--refuse does not know {kind!r}", fix=fix)
    return kinds


def judged_by(checkpoint: Checkpoint, refuse: Collection[str], max_size: int = 0) -> Checkpoint:
    """The checkpoint with ``refused``, the kinds that it is refused for, and a finding for each of them.

    A finding is an error if the file is refused for it; other errors become warnings. ``max_size`` 0 is no limit.
    """
    found = _kinds(checkpoint)
    refused = [kind for kind in KINDS if kind in found and kind in refuse]
    findings = []
    for finding in checkpoint.findings:
        severity = finding.severity
        if severity != "note":
            severity = "warning" if kinds_of(finding.code).isdisjoint(refused) else "error"
        findings.append(replace(finding, severity=severity))
    if "code" in refused and checkpoint.traits.program:
        findings.append(_finding("is-a-program", (checkpoint.traits.words,), (checkpoint.traits.instead,)))
    if "gpu" in refused and checkpoint.devices:
        tags = (f"{use.device}: {plural(use.tensors, 'tensor')}" for use in checkpoint.devices if _is_gpu(use.device))
        fix: tuple[str, ...] = checkpoint.traits.retag[1:] if checkpoint.traits.program else ()
        here = is_named(checkpoint.path) and not is_url(checkpoint.path)
        if checkpoint.traits.container in ("zip", "stream") and here:
            fix = (
                "This makes plain torch.load work anywhere:",
                f"$ transload retag {quoted(checkpoint.path)} --to cpu",
            )
        findings.append(_finding("gpu-tags", tags, fix))
    if 0 < max_size < checkpoint.nbytes:
        refused.append("size")
        evidence = f"{size(checkpoint.nbytes)}, and the limit is {size(max_size)}"
        findings.append(_finding("too-large", (evidence,), rule_of("too-large").fix))
    return replace(checkpoint, refused=tuple(refused), findings=tuple(findings))


def _finding(code: str, evidence: Iterable[str], fix: Iterable[str] = ()) -> Finding:
    return Finding(code, "error", rule_of(code).title, tuple(evidence), tuple(filter(None, fix)))


def kinds_of(code: str) -> set[str]:
    """The kinds of what a finding with this code says."""
    if code == "directory-unknown":  # nobody has looked at the files in it
        return {*KINDS}
    rule = rule_of(code)
    if rule.integrity == "not-a-checkpoint":
        return {"other"}
    kinds = {"code"} if rule.safety != "data-only" else set()
    return kinds | ({"damage"} if rule.integrity not in ("whole", "unchecked") else set())


def _kinds(checkpoint: Checkpoint) -> set[str]:
    """All kinds of a checkpoint. A bad verdict that no finding explains counts, too."""
    found: set[str] = set()
    for finding in checkpoint.findings:
        if finding.severity != "note":
            found |= kinds_of(finding.code)
    other = checkpoint.integrity == "not-a-checkpoint"
    if checkpoint.safety == "data-only":
        found.discard("code")
    elif checkpoint.safety != "unknown" or not other:  # what is no checkpoint was not judged
        found.add("code")
    if checkpoint.integrity in ("whole", "unchecked"):
        found -= {"damage", "other"}
    else:
        found.add("other" if other else "damage")
    if any(_is_gpu(use.device) for use in checkpoint.devices):
        found.add("gpu")
    return found


def _is_gpu(tag: str) -> bool:
    return tag.partition(":")[0] not in _ANYWHERE
