"""Problems and findings, the two scales of verdicts, and helpers for their texts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from transload.credentials import without_credentials
from transload.frozen import Frozen, Plain, replace

Severity = Literal["error", "warning", "note"]
Safety = Literal["data-only", "needs-trust", "code", "unknown", "dangerous"]
Integrity = Literal["whole", "unchecked", "repairable", "damaged", "not-a-checkpoint"]

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")  # findings are shown in this order
# Both scales run from best to worst; a verdict is the worst thing seen on its scale.
SAFETY: tuple[Safety, ...] = ("data-only", "needs-trust", "code", "unknown", "dangerous")
INTEGRITY: tuple[Integrity, ...] = ("whole", "unchecked", "repairable", "damaged", "not-a-checkpoint")


def worst_safety(*verdicts: Safety) -> Safety:
    """The worst of some safety verdicts; ``data-only`` if there are none."""
    return max(verdicts, key=SAFETY.index, default="data-only")


class Problem(Frozen):
    """Something that a reader found wrong. This is only a fact: what it means is judged later.

    ``code`` is a section of docs/findings.md; ``where`` is a place in the file, outermost first (``"data.pkl › byte
    1234"``), empty for the file itself; ``detail`` is a plain sentence, or several lines. ``title`` and ``fix`` replace
    those of the rule if the reader knows more about the problem.
    """

    code: str
    where: str = ""
    detail: str = ""
    title: str = ""
    fix: tuple[str, ...] = ()

    def within(self, place: str) -> Problem:
        """The same problem in a larger file that contains this one at ``place``."""
        return replace(self, where=f"{place} › {self.where}" if self.where else place)


class Problems(list[Problem]):
    """The problems a reader has found so far, in order."""

    def add(self, code: str, where: str = "", detail: str = "") -> None:
        """Add a problem."""
        self.append(Problem(code, where, detail))


class Finding(Plain):
    """Something worth reporting: what it is, the evidence, what to do, and where in a file it is.

    Commands in ``fix`` begin with ``$ ``, and lines to copy into a file or a program with ``| ``. Each of ``places`` is
    a record, a byte or a key, outermost first: ``"data.pkl › byte 1234"``.
    """

    code: str
    severity: Severity
    title: str
    evidence: tuple[str, ...] = ()
    fix: tuple[str, ...] = ()
    places: tuple[str, ...] = ()

    @property
    def doc(self) -> str:
        """Where the documentation explains this code; each cause such as ``U04`` has its own page."""
        if self.code[:1].isupper():
            return f"docs/doctor/{self.code}.md"
        return f"docs/findings.md#{self.code}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, where the evidence names the places."""
        fields = super().to_dict()
        del fields["places"]
        return {**fields, "doc": self.doc}


# A hostile index can have a million wrong entries; a person needs a few of each kind and the count.
MOST_OF_A_KIND = 20
LONGEST_TEXT = 2000


class LimitedProblems:
    """Collects problems, at most ``MOST_OF_A_KIND`` of each code; the rest are only counted."""

    def __init__(self) -> None:
        self._kept: list[Problem] = []
        self._counts: dict[str, int] = {}

    def add(self, code: str, where: str = "", detail: str = "") -> None:
        """Add a problem."""
        self.extend((Problem(code, where, detail),))

    def extend(self, problems: Iterable[Problem]) -> None:
        """Add some problems."""
        for problem in problems:
            count = self._counts[problem.code] = self._counts.get(problem.code, 0) + 1
            if count <= MOST_OF_A_KIND:
                where, detail = problem.where[:LONGEST_TEXT], problem.detail[:LONGEST_TEXT]
                self._kept.append(Problem(problem.code, where, detail, problem.title, problem.fix))

    def has(self, code: str) -> bool:
        """Whether there is a problem with that code."""
        return code in self._counts

    def problems(self) -> tuple[Problem, ...]:
        """The problems kept, and one with the count for each code that had too many."""
        left = ((code, count - MOST_OF_A_KIND) for code, count in self._counts.items())
        return (*self._kept, *(Problem(code, "", f"{more:,} more like this") for code, more in left if more > 0))


def join_names(names: Sequence[str], most: int = 5, longest: int = 120) -> str:
    """The first names, and how many more there are.

    >>> join_names(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    shown = ", ".join(name if len(name) <= longest else name[:longest] + "…" for name in names[:most])
    return f"{shown} and {len(names) - most:,} more" if len(names) > most else shown


def first_lines(lines: Sequence[str], most: int) -> tuple[str, ...]:
    """The first lines, and how many more there are; the last may say that of others.

    >>> first_lines(["a", "b", "c"], 1), first_lines(["a", "b", "… and 7 more"], 1)
    (('a', '… and 2 more'), ('a', '… and 8 more'))
    """
    more = len(lines) - most
    if more <= 0:
        return tuple(lines)
    others = lines[-1].removeprefix("… and ").removesuffix(" more")
    if others != lines[-1] and others.isdecimal():
        more += int(others) - 1
    return *lines[:most], f"… and {more} more"


def quoted(path: str) -> str:
    r"""A path quoted for a shell, in a form that no command mistakes for an option; a URL without its credentials.

    >>> quoted("my model.pt"), quoted("-x.pt"), quoted("a\nb.pt")
    ("'my model.pt'", './-x.pt', "$'a\\x0ab.pt'")
    """
    import shlex

    path = without_credentials(path)
    path = f"./{path}" if path.startswith("-") else path
    if os.name == "nt":  # cmd knows only double quotes, and PowerShell these, too
        plain = all(character.isalnum() or character in "\\/:._-~+" for character in path)
        return path if plain else f'"{path}"'
    try:
        data = b"" if path.isprintable() else os.fsencode(path)
    except UnicodeEncodeError:  # a name in an archive, which no file can have
        data = b""
    if not data:
        return shlex.quote(path)
    # Bytes, as bash and zsh read them: a report escapes what is not printable, and in other quotes that stays escaped.
    text = (chr(byte) if 32 <= byte < 127 and byte not in b"'\\" else f"\\x{byte:02x}" for byte in data)
    return f"$'{''.join(text)}'"


def is_named(name: str) -> bool:
    """Whether the name of a source is a path; bytes and streams have names such as ``<bytes>``."""
    return not name.startswith("<")


def rescue_command(path: str, ending: str = ".pt", member: str = "") -> str:
    """The command that extracts a checkpoint from the file around it, or recovers what is left of it.

    >>> rescue_command("my model.pt.gz")
    "$ transload rescue 'my model.pt.gz' NEW.pt"
    """
    file = quoted(path) if is_named(path) else "FILE"
    return f"$ transload rescue {file} NEW{ending}{f' --member {quoted(member)}' if member else ''}"


def packaged(package: str, name: str) -> str:
    """The text of a file in a package, which may be inside a zip."""
    module: Any = sys.modules[package]  # what pkgutil does, which imports too much
    data: bytes = module.__loader__.get_data(os.path.join(os.path.dirname(module.__file__), name))
    return data.decode()


def manual_page(name: str) -> str:
    """A page of the manual that the program also reads: ``docs/NAME.md``, which is part of wheels and the zipapp."""
    try:
        return packaged("transload", f"manual/{name}.md")
    except OSError:  # not a package but a source tree
        return packaged("transload", f"../../docs/{name}.md")
