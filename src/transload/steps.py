"""Steps of advice, and the pages that they are read from.

Everywhere else a fix is a tuple of lines, as in JSON: a command begins with ``$ ``, a line to copy into a file or a
program with ``| ``, and any other is a sentence. Only this module reads these marks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from transload.frozen import NamedTuple

Kind = Literal["sentence", "command", "copy", "python", "title"]
_KINDS: dict[str, Kind] = {"$ ": "command", "| ": "copy", "= ": "title"}  # a title replaces that of a finding


class Step(NamedTuple):
    """A step of a fix. ``lines`` are those of the fix: several only for ``python``, a program to paste."""

    kind: Kind
    text: str
    lines: tuple[str, ...]

    @property
    def copied(self) -> bool:
        """Whether it is a line to copy, which a report does not fold."""
        return self.kind in ("command", "copy")


def step_of(line: str) -> Step:
    """The step in one line.

    >>> step_of("$ pip list")
    Step(kind='command', text='pip list', lines=('$ pip list',))
    """
    kind = _KINDS.get(line[:2], "sentence")
    return Step(kind, line if kind == "sentence" else line[2:], (line,))


def steps_of(fix: Iterable[str]) -> list[Step]:
    """The steps of a fix. Lines that follow an import and are neither sentences nor commands belong to its program.

    >>> [step.kind for step in steps_of(["Ask who made it.", "import torch", "torch.load(path)", "$ ls"])]
    ['sentence', 'python', 'command']
    """
    steps: list[Step] = []
    for line in fix:
        step = step_of(line)
        if steps and steps[-1].kind == "python" and step.kind == "sentence" and not line.endswith("."):
            steps[-1] = Step("python", f"{steps[-1].text}\n{line}", (*steps[-1].lines, line))
        elif step.kind == "sentence" and line.startswith("import "):
            steps.append(Step("python", line, (line,)))
        else:
            steps.append(step)
    return steps


def has_command(fix: Iterable[str]) -> bool:
    """Whether a fix contains a command."""
    return any(step_of(line).kind == "command" for line in fix)


# -- Markdown: sections with a heading, and lists of steps


def sections(page: str) -> Iterator[tuple[str, str]]:
    """The heading and the text of each section of a page."""
    return ((heading, text) for heading, _, text in (part.partition("\n") for part in page.split("\n## ")[1:]))


def listed(block: str) -> tuple[str, ...]:
    r"""The lines of a fix in a Markdown list, in which commands and code are in backquotes.

    >>> listed("- Look at them\n  first:\n- `$ ls`\n- `x = 1`")
    ('Look at them first:', '$ ls', '| x = 1')
    """
    items = block.removeprefix("- ").replace("\n  ", " ").split("\n- ")
    code = (item[1:-1] if item[0] == item[-1] == "`" else "" for item in items)
    return tuple(
        item if not text else text if text.startswith("$ ") else f"| {text}"
        for item, text in zip(items, code, strict=True)
    )
