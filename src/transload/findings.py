"""What a judgement says: one finding, and the scale of the two verdicts on a file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from transload.frozen import facts, replace

Severity = Literal["error", "warning", "note"]
Safety = Literal["data-only", "needs-trust", "code", "unknown", "dangerous"]
Integrity = Literal["whole", "unchecked", "repairable", "damaged", "not-a-checkpoint"]

# Both scales run from best to worst; a verdict is the worst thing seen on its scale.
SAFETY: tuple[Safety, ...] = ("data-only", "needs-trust", "code", "unknown", "dangerous")
INTEGRITY: tuple[Integrity, ...] = ("whole", "unchecked", "repairable", "damaged", "not-a-checkpoint")


def worst_safety(*verdicts: Safety) -> Safety:
    """The worst of some safety verdicts; ``data-only`` of none."""
    return max(verdicts, key=SAFETY.index, default="data-only")


def worst_integrity(*verdicts: Integrity) -> Integrity:
    """The worst of some integrity verdicts; ``whole`` of none."""
    return max(verdicts, key=INTEGRITY.index, default="whole")


@facts(frozen=True)
class Problem:
    """Something a reader met that is not as it should be. A fact: what it means is judged later.

    ``code`` is a section of docs/findings.md; ``where`` is a place inside the file, outermost first (``"data.pkl
    › byte 1234"``), empty for the file itself; ``detail`` is one plain sentence, or several lines of them. ``title``
    and ``fix`` stand in for those of the rule where the reader knows better what the thing is.
    """

    code: str
    where: str = ""
    detail: str = ""
    title: str = ""
    fix: tuple[str, ...] = ()

    def within(self, place: str) -> Problem:
        """The same problem of something larger, in which it is at ``place``."""
        return replace(self, where=f"{place} › {self.where}" if self.where else place)


class Problems(list[Problem]):
    """What a reader has met so far, in order."""

    def add(self, code: str, where: str = "", detail: str = "") -> None:
        """Note one problem."""
        self.append(Problem(code, where, detail))


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


# A hostile index can hold a million wrong entries; a person needs a few of each kind and the count.
MOST_OF_A_KIND = 20
MOST_NAMES = 5
LONGEST_NAME = 120
LONGEST_TEXT = 2000


class Noted:
    """Collects problems, at most ``MOST_OF_A_KIND`` of each code; the rest are only counted.

    >>> noted = Noted()
    >>> noted.add("shard-missing", "a.bin", "it is not here")
    >>> [problem.where for problem in noted.problems()]
    ['a.bin']
    """

    def __init__(self) -> None:
        self._kept: list[Problem] = []
        self._counts: dict[str, int] = {}

    def add(self, code: str, where: str = "", detail: str = "") -> None:
        """Note one problem."""
        self.extend((Problem(code, where, detail),))

    def extend(self, problems: Iterable[Problem]) -> None:
        """Note problems that somebody else found."""
        for problem in problems:
            count = self._counts[problem.code] = self._counts.get(problem.code, 0) + 1
            if count <= MOST_OF_A_KIND:
                where, detail = problem.where[:LONGEST_TEXT], problem.detail[:LONGEST_TEXT]
                self._kept.append(Problem(problem.code, where, detail, problem.title, problem.fix))

    def has(self, code: str) -> bool:
        """Whether that code was noted."""
        return code in self._counts

    def problems(self) -> tuple[Problem, ...]:
        """Everything kept, and one line for each code that had too many."""
        left = ((code, count - MOST_OF_A_KIND) for code, count in self._counts.items())
        return (*self._kept, *(Problem(code, "", f"{more:,} more like this") for code, more in left if more > 0))


def some(names: list[str] | tuple[str, ...], most: int = MOST_NAMES, longest: int = LONGEST_NAME) -> str:
    """A few names and how many there are beside them.

    >>> some(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    shown = ", ".join(name if len(name) <= longest else name[:longest] + "…" for name in names[:most])
    return f"{shown} and {len(names) - most:,} more" if len(names) > most else shown


def first_of(lines: list[str], most: int) -> tuple[str, ...]:
    """The first lines, and how many there are beside them."""
    more = len(lines) - most
    return (*lines[:most], f"… and {more} more") if more > 0 else tuple(lines)


def quoted(path: str) -> str:
    """A path as a shell takes it, and no command takes for an option.

    >>> quoted("my model.pt"), quoted("-x.pt")
    ("'my model.pt'", './-x.pt')
    """
    import shlex

    return shlex.quote(f"./{path}" if path.startswith("-") else path)


def is_named(name: str) -> bool:
    """Whether the name of a source is a path; bytes and streams have none."""
    return not name.startswith("<")


def rescue_command(path: str, ending: str = ".pt", member: str = "") -> str:
    """The command that saves a checkpoint out of what it lies in, or what is left of it.

    >>> rescue_command("my model.pt.gz")
    "$ transload rescue 'my model.pt.gz' NEW.pt"
    """
    file = quoted(path) if is_named(path) else "FILE"
    return f"$ transload rescue {file} NEW{ending}{f' --member {quoted(member)}' if member else ''}"


def manual_page(name: str) -> str:
    """A page of the manual that the program reads too: ``docs/NAME.md``, which a wheel and the zipapp carry along."""
    import pkgutil

    try:
        data = pkgutil.get_data("transload", f"manual/{name}.md")
    except OSError:  # not packed: this is a source tree
        import os

        docs = os.path.join(os.path.dirname(__file__), "..", "..", "docs")  # noqa: PTH118, PTH120 - pathlib is slow to import
        with open(os.path.join(docs, f"{name}.md"), "rb") as file:  # noqa: PTH118, PTH123 - as above
            data = file.read()
    return (data or b"").decode()
