"""What ``explain`` answers: the causes in a text, what to do about each, and what was seen of them here."""

from __future__ import annotations

from typing import Any

from transload.frozen import facts

__all__ = ["Answer", "Explanation", "FileHere", "MachineHere", "Near", "Unexplained"]


@facts(frozen=True)
class FileHere:
    """What a look at a file that the text names has shown. ``same`` is whether torch says of it what the text says."""

    path: str
    ok: bool
    verdict: str
    same: bool
    findings: tuple[str, ...] = ()
    fix: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "path": self.path,
            "ok": self.ok,
            "verdict": self.verdict,
            "same": self.same,
            "findings": list(self.findings),
            "fix": list(self.fix),
        }


@facts(frozen=True)
class MachineHere:
    """What the doctor says of this machine. ``fits`` is whether what it found can be the cause of the text."""

    status: str
    fits: bool
    code: str = ""
    title: str = ""
    evidence: tuple[str, ...] = ()
    fix: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "status": self.status,
            "fits": self.fits,
            "code": self.code,
            "title": self.title,
            "evidence": list(self.evidence),
            "fix": list(self.fix),
        }


@facts(frozen=True)
class Answer:
    """One error that is known. ``said`` is the line of the text, ``line`` its number, ``times`` how often it is there.

    ``cause`` is what it means, ``fix`` what to do; lines that begin with ``$ `` are commands, with ``| `` Python.
    ``wrong`` is what of the text's own advice is not true here. ``causes`` are the codes of the doctor's pages that
    may be behind it. ``values`` are the numbers and names taken out of the text.
    """

    code: str
    kind: str
    cause: str
    fix: tuple[str, ...] = ()
    wrong: str = ""
    said: str = ""
    line: int = 0
    times: int = 1
    torch: str = ""
    causes: tuple[str, ...] = ()
    values: tuple[tuple[str, str], ...] = ()
    machine: MachineHere | None = None
    file: FileHere | None = None

    @property
    def doc(self) -> str:
        """Where the documentation has this text."""
        return f"docs/errors.md#{self.code}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "code": self.code,
            "kind": self.kind,
            "cause": self.cause,
            "fix": list(self.fix),
            "wrong": self.wrong,
            "said": self.said,
            "line": self.line,
            "times": self.times,
            "torch": self.torch,
            "causes": list(self.causes),
            "values": dict(self.values),
            "machine": self.machine.to_dict() if self.machine else None,
            "file": self.file.to_dict() if self.file else None,
            "doc": self.doc,
        }


@facts(frozen=True)
class Near:
    """A known text that is like an unknown one; ``why`` says what is missing where the words agree."""

    code: str
    says: str
    likeness: float
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"code": self.code, "says": self.says, "likeness": self.likeness, "why": self.why}


@facts(frozen=True)
class Unexplained:
    """An error of the text that is not known, and the known ones that are most like it."""

    said: str
    line: int
    nearest: tuple[Near, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"said": self.said, "line": self.line, "nearest": [near.to_dict() for near in self.nearest]}


@facts(frozen=True)
class Explanation:
    """What a text means: ``answers`` to the errors that are known, and those that are not.

    ``shortened`` is whether only the end of the text was looked at.
    """

    answers: tuple[Answer, ...] = ()
    unknown: tuple[Unexplained, ...] = ()
    shortened: bool = False

    @property
    def known(self) -> bool:
        """Whether an error in it is known; a harmless remark counts only where there is nothing else."""
        return any(answer.kind != "remark" for answer in self.answers) or bool(self.answers and not self.unknown)

    def __bool__(self) -> bool:
        return self.known

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, schema 1."""
        return {
            "schema": 1,
            "known": self.known,
            "answers": [answer.to_dict() for answer in self.answers],
            "unknown": [each.to_dict() for each in self.unknown],
            "shortened": self.shortened,
        }

    def __str__(self) -> str:
        """The answer as ``transload explain`` prints it, without colour."""
        from transload.render.explain import as_text

        return as_text(self)
