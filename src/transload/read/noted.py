"""A bounded notebook for what a reader meets."""

from __future__ import annotations

from transload.findings import Problem

__all__ = ["Noted", "some"]

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

    def extend(self, problems: tuple[Problem, ...]) -> None:
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


def some(names: list[str] | tuple[str, ...], most: int = MOST_NAMES) -> str:
    """A few names and how many there are beside them.

    >>> some(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    shown = ", ".join(name if len(name) <= LONGEST_NAME else name[:LONGEST_NAME] + "…" for name in names[:most])
    return f"{shown} and {len(names) - most:,} more" if len(names) > most else shown
