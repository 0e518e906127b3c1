"""The code blocks of the manual, extracted from the pages and classified by how they can be tested."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")))
SHELLS = ("console", "bash", "sh")
PROGRAMS = (
    *("$", "cd", "docker", "export", "make", "pip", "python", "transload", "unset"),
    *("torchrun", "srun", "mpirun", "pdsh", "clush"),
)
FENCE = re.compile(r"```(\w*)")
NOTE = re.compile(r"<!-- (.+) -->")
SIGNATURE = re.compile(r"transload\.(\w+)\((.*\*,.*)\)", re.DOTALL)
COMMENT = re.compile(r" {2,}#.*")


class Block(NamedTuple):
    """A block of code; ``note`` is the HTML comment right before it, which readers of the page do not see."""

    page: Path
    line: int
    section: str
    language: str  # of its fence; "" if it is indented
    text: str
    note: str

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def kind(self) -> str:
        """``synopsis``, ``signature``, ``python``, ``shell`` or ``other``."""
        first = self.text.split(maxsplit=1)[0]
        if self.section.startswith("transload ") and first == "transload":
            return "synopsis"
        if SIGNATURE.fullmatch(self.text):
            return "signature"
        if self.language == "python" or (not self.language and (first == ">>>" or is_python(self.text))):
            return "python"
        return "shell" if self.language in SHELLS or (not self.language and first in PROGRAMS) else "other"


class Step(NamedTuple):
    """A command, and the output that the page shows, which is empty if it shows none."""

    command: str
    output: str


def is_python(text: str) -> bool:
    """Whether a text is a Python program, and not just a name or a value."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return False
    return any(not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call) for node in tree.body)


def blocks_of(page: Path) -> Iterator[Block]:
    """All blocks of a page, in order."""
    lines = [*page.read_text(encoding="utf-8").split("\n"), ""]
    section, note, at = "", "", 0
    while at < len(lines):
        line, begin = lines[at], at
        at += 1
        if fence := FENCE.fullmatch(line):
            at = lines.index("```", at) + 1
            yield Block(page, begin + 2, section, fence[1] or "text", "\n".join(lines[begin + 1 : at - 1]), note)
        elif line.startswith("    ") and not lines[begin - 1]:
            at = _end_of_indented(lines, begin)
            text = "\n".join(row[4:] for row in lines[begin:at]).rstrip("\n")
            yield Block(page, begin + 1, section, "", text, note)
        elif line.startswith("#"):
            section = line.lstrip("# ")
        if line:
            comment = NOTE.fullmatch(line)
            note = comment[1] if comment else ""


def _end_of_indented(lines: list[str], at: int) -> int:
    """The line after an indented block; empty lines between its lines belong to it, those after it do not."""
    end = at
    while at < len(lines) and (not lines[at] or lines[at].startswith("    ")):
        at += 1
        end = at if lines[at - 1] else end
    return end


def steps_of(block: Block) -> Iterator[Step]:
    """The commands of a block: the lines after a ``$``, each with its output, or all lines if there is no ``$``."""
    lines = block.text.replace("\\\n", " ").split("\n")
    if not any(line.startswith("$ ") for line in lines):
        yield from (Step(COMMENT.sub("", line), "") for line in lines if line and not line.startswith("#"))
        return
    for part in re.split(r"^\$ ", "\n".join(lines), flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield Step(COMMENT.sub("", command), output.rstrip("\n"))


def commands_in_text(page: Path) -> Iterator[str]:
    """Every transload command in backticks in the text of a page."""
    for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", page.read_text(encoding="utf-8")):
        command = " ".join(span.split())
        if re.match(r"transload [a-z]+(?= |$)", command):
            yield command
