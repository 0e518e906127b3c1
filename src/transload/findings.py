"""What a judgement says: one finding, and the scale of the two verdicts on a file."""

from __future__ import annotations

from typing import Any, Literal

from transload.frozen import facts

__all__ = [
    "INTEGRITY",
    "SAFETY",
    "Finding",
    "Integrity",
    "Problem",
    "Safety",
    "Severity",
    "worst_integrity",
    "worst_safety",
]

Severity = Literal["error", "warning", "note"]
Safety = Literal["data-only", "needs-trust", "code", "unknown", "dangerous"]
Integrity = Literal["whole", "unchecked", "repairable", "damaged", "not-a-checkpoint"]

# Both scales run from best to worst; a verdict is the worst thing seen on its scale.
SAFETY: tuple[Safety, ...] = ("data-only", "needs-trust", "code", "unknown", "dangerous")
INTEGRITY: tuple[Integrity, ...] = (
    "whole",
    "unchecked",
    "repairable",
    "damaged",
    "not-a-checkpoint",
)


def worst_safety(*verdicts: Safety) -> Safety:
    """The worst of some safety verdicts; ``data-only`` of none."""
    return max(verdicts, key=SAFETY.index, default="data-only")


def worst_integrity(*verdicts: Integrity) -> Integrity:
    """The worst of some integrity verdicts; ``whole`` of none."""
    return max(verdicts, key=INTEGRITY.index, default="whole")


@facts(frozen=True)
class Problem:
    """Something a reader met that is not as it should be. A fact: what it means is judged later.

    ``code`` is a key of ``judge.problems.RULES``; ``where`` is a place inside the file, outermost first (``"data.pkl
    › byte 1234"``), empty for the file itself; ``detail`` is one plain sentence, or several lines of them. ``title``
    and ``fix`` stand in for those of the rule where the reader knows better what the thing is.
    """

    code: str
    where: str = ""
    detail: str = ""
    title: str = ""
    fix: tuple[str, ...] = ()


@facts(frozen=True)
class Finding:
    """One thing worth telling: what it is, what shows it, and what to do.

    >>> Finding("cuda-tags", "note", "tensors are tagged cuda:0", fix=("pass map_location",)).code
    'cuda-tags'
    """

    code: str
    severity: Severity
    title: str
    evidence: tuple[str, ...] = ()
    fix: tuple[str, ...] = ()

    @property
    def doc(self) -> str:
        """Where the documentation explains this code: causes such as ``U04`` have a page each."""
        if self.code[:1].isupper():
            return f"docs/doctor/{self.code}.md"
        return f"docs/findings.md#{self.code}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "code": self.code,
            "severity": self.severity,
            "title": self.title,
            "evidence": list(self.evidence),
            "fix": list(self.fix),
            "doc": self.doc,
        }
