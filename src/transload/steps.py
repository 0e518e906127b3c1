"""Steps of advice, and the pages that they are read from.

Everywhere else a fix is a tuple of lines, as in JSON: a command begins with ``$ ``, a line to copy into a file or a
program with ``| ``, and any other is a sentence. Only this module reads and writes these marks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Literal

from transload.findings import packaged
from transload.frozen import NamedTuple

Kind = Literal["sentence", "command", "root", "host", "copy", "python", "title"]
_MARKS: dict[str, Kind] = {"$ ": "command", "| ": "copy"}
_ITEM = r"(?:\[([\w.]+)\] )?(?:`(?:(\$|#|host#) )?([^`]*)`|(.*))"  # compiled when needed: not by a first load
_PROMPTS: dict[str | None, Kind] = {"$": "command", "#": "root", "host#": "host", None: "copy"}


class Step(NamedTuple):
    """A step of a fix, or the title of a finding. ``python`` is a program of several lines to paste.

    Only in pages: ``root`` is a command for root, ``host`` one for root on the host of a container, and a step with a
    ``condition`` counts only if that is true.
    """

    kind: Kind
    text: str
    condition: str = ""

    @property
    def copied(self) -> bool:
        """Whether it is a line to copy, which a report does not fold."""
        return self.kind in ("command", "copy")

    @property
    def lines(self) -> tuple[str, ...]:
        """Its lines in a fix."""
        mark = next((mark for mark, kind in _MARKS.items() if kind == self.kind), "")
        return tuple(self.text.split("\n")) if self.kind == "python" else (f"{mark}{self.text}",)


Steps = tuple["Step | str", ...]
"""A text alone is a sentence."""


def fix_of(steps: Steps) -> tuple[str, ...]:
    """The lines of a fix, without titles and empty texts.

    >>> fix_of((Step("title", "no GPU"), "Look at it:", Step("command", "lspci"), ""))
    ('Look at it:', '$ lspci')
    """
    stated = (Step("sentence", step) if isinstance(step, str) else step for step in steps if step)
    return tuple(line for step in stated if step.kind != "title" for line in step.lines)


_SETTINGS = r"(?:export )?((?:[A-Z]\w*=\S+ ?)+)(.*)"  # compiled when needed
_UNSET, _SHOWN, _FILTER = r"unset ((?:\w+ ?)+)", r'echo "\$(\w+)"', r"(.*)\| grep (?:-i )?(\w+)"


def for_windows(fix: Iterable[str]) -> Iterator[str]:
    """The lines of a fix for Windows: commands for a POSIX shell become those of PowerShell and cmd.

    >>> list(for_windows(["Again:", "$ CUDA_LAUNCH_BLOCKING=1 python a.py"]))[2:]
    ["$ $env:CUDA_LAUNCH_BLOCKING = '1'; python a.py", 'In cmd:', '$ set "CUDA_LAUNCH_BLOCKING=1" && python a.py']
    """
    for line in fix:
        text = step_of(line).text if line.startswith("$ ") else ""
        powershell, cmd = [], []
        if match := re.fullmatch(_SETTINGS, text):
            pairs = [setting.partition("=") for setting in match[1].split()]
            program = [match[2]] if match[2] else []
            powershell = [f"$env:{name} = '{value}'" for name, _, value in pairs] + program
            cmd = [f'set "{name}={value}"' for name, _, value in pairs] + program
        elif match := re.fullmatch(_UNSET, text):
            powershell = [f"Remove-Item Env:{name}" for name in match[1].split()]
            cmd = [f'set "{name}="' for name in match[1].split()]
        elif match := re.fullmatch(_SHOWN, text):
            powershell, cmd = [f"$env:{match[1]}"], [f"echo %{match[1]}%"]
        if powershell:
            yield from ("In PowerShell:", f"$ {'; '.join(powershell)}", "In cmd:", f"$ {' && '.join(cmd)}")
        elif match := re.fullmatch(_FILTER, text):
            yield f"$ {match[1].replace('ps aux', 'tasklist')}| findstr /i {match[2]}"
        else:  # Windows PowerShell has no &&
            yield from (f"$ {part}" for part in text.split(" && ")) if text else [line]


def step_of(line: str) -> Step:
    """The step in one line of a fix.

    >>> step_of("$ pip list")
    Step(kind='command', text='pip list', condition='')
    """
    kind = _MARKS.get(line[:2], "sentence")
    return Step(kind, line if kind == "sentence" else line[2:])


def steps_of(fix: Iterable[str]) -> list[Step]:
    """The steps of a fix. Lines that follow an import and are neither sentences nor commands belong to its program.

    >>> [step.kind for step in steps_of(["Ask who made it.", "import torch", "torch.load(path)", "$ ls"])]
    ['sentence', 'python', 'command']
    """
    steps: list[Step] = []
    for line in fix:
        step = step_of(line)
        if steps and steps[-1].kind == "python" and step.kind == "sentence" and not line.endswith("."):
            steps[-1] = Step("python", f"{steps[-1].text}\n{line}")
        elif step.kind == "sentence" and line.startswith("import "):
            steps.append(Step("python", line))
        else:
            steps.append(step)
    return steps


def has_command(fix: Iterable[str]) -> bool:
    """Whether a fix contains a command."""
    return any(step_of(line).kind == "command" for line in fix)


# -- Markdown: sections with a heading, rows about names, and lists of steps


def sections(page: str, mark: str = "## ") -> Iterator[tuple[str, str]]:
    """The heading and the text of each section of a page; ``mark`` is what a heading begins with."""
    return ((heading, text) for heading, _, text in (part.partition("\n") for part in page.split(f"\n{mark}")[1:]))


@cache
def tables(package: str, page: str) -> dict[str, dict[str, str]]:
    """The lists in the sections of a page of a package: for each name in them, what its row says about it."""
    out: dict[str, dict[str, str]] = {}
    for title, section in sections(packaged(package, f"{page}.md")):
        rows = (row.rpartition(":") for row in section.split("\n- ")[1:])
        out[title] = {name: text for text, _, names in rows for name in names.split()}
    return out


def listed(block: str) -> list[Step]:
    r"""The steps in a Markdown list, in which commands and code are in backquotes. A paragraph is a title.

    >>> [line for step in listed("- Look at them\n  first:\n- `$ ls`\n- `x = 1`") for line in step.lines]
    ['Look at them first:', '$ ls', '| x = 1']
    >>> listed("- [ubuntu] `# apt update`")
    [Step(kind='root', text='apt update', condition='ubuntu')]
    """
    steps = []
    is_list = block.startswith("- ")
    for item in block.removeprefix("- ").replace("\n  ", " ").split("\n- "):
        condition, prompt, code, text = re.fullmatch(_ITEM, item).groups()  # type: ignore[union-attr]  # it always matches
        kind: Kind = ("sentence" if is_list else "title") if code is None else _PROMPTS[prompt]
        steps.append(Step(kind, text if code is None else code, condition or ""))
    return steps
