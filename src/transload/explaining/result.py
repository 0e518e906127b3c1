"""What ``explain`` returns: the causes in a text, what to do about each, and what was seen of them on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transload.frozen import facts

__all__ = ["Answer", "Explanation", "FileHere", "MachineHere", "Near", "Unexplained", "doctor_steps"]


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value.to_dict() if isinstance(value, _Result) else value


class _Result:
    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {name: _plain(value) for name, value in vars(self).items()}


@facts(frozen=True)
class FileHere(_Result):
    """A check of the file that the text names. ``same`` is whether torch.load of it gives the same error."""

    path: str
    ok: bool
    verdict: str
    same: bool
    findings: tuple[str, ...] = ()
    fix: tuple[str, ...] = ()


@facts(frozen=True)
class MachineHere(_Result):
    """The doctor's diagnosis of this machine. ``fits`` is whether it can be the cause of the error."""

    status: str
    fits: bool
    code: str = ""
    title: str = ""
    evidence: tuple[str, ...] = ()
    fix: tuple[str, ...] = ()


@facts(frozen=True)
class Answer(_Result):
    """One known error. ``said`` is its line of the text, ``line`` the number of that, ``times`` how often it occurs.

    ``cause`` is what it means, ``fix`` what to do; lines that begin with ``$ `` are commands, with ``| `` Python.
    ``wrong`` says which advice in the text itself is not true. ``causes`` are codes of the doctor's pages that may be
    behind it. ``values`` are the numbers and names in the text.
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
        return {**super().to_dict(), "values": dict(self.values), "doc": self.doc}


def doctor_steps(codes: Sequence[str]) -> tuple[str, ...]:
    """The ``fix`` of an answer that has none of its own: what the doctor's pages of its ``causes`` advise."""
    from transload.diagnose.rules import BY_CODE

    rows = [(code, " ".join(BY_CODE[code].title.split()), " ".join(BY_CODE[code].fix.split())) for code in codes]
    if len(rows) == 1:
        return (rows[0][2],)
    steps = (f"If {title} [{code}]: {fix}" for code, title, fix in rows)
    return ("Most often it is one of these; transload doctor shows which:", *steps)


@facts(frozen=True)
class Near(_Result):
    """A known text that is like an unknown one; ``why`` says what is missing where the words agree."""

    code: str
    says: str
    likeness: float
    why: str = ""


@facts(frozen=True)
class Unexplained(_Result):
    """An error of the text that is not known, and the known ones that are most like it."""

    said: str
    line: int
    nearest: tuple[Near, ...] = ()


@facts(frozen=True)
class Explanation(_Result):
    """What a text means: ``answers`` to the errors that are known, and the errors that are ``unknown``.

    ``shortened`` is whether only the end of the text was read.
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
        return {"schema": 1, "known": self.known, **super().to_dict()}

    def __str__(self) -> str:
        """The answer as ``transload explain`` prints it, without colour."""
        from transload.explaining.report import as_text

        return as_text(self)
