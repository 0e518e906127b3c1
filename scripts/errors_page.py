"""Write docs/errors.md: every error text that ``transload explain`` knows, from the table it uses.

Usage: python scripts/errors_page.py [--check]
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from types import ModuleType

from transload.explaining import texts
from transload.explaining.known import Known, blanked

PAGE = Path(__file__).parent.parent / "docs" / "errors.md"
HEAD = """\
# Error texts

Every text that [`transload explain`](explain.md) knows, by subject, with its code, which is stable between releases;
`…` stands for what differs. This page is written by `scripts/errors_page.py` from the same table the program uses.
"""
_WORDINGS = 6
_WIDTH = 118


def main() -> int:
    """Write the page, or with ``--check`` say whether it is up to date."""
    text = page()
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.read_text(encoding="utf-8") == text else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(part for file in texts.FILES for part in subject(file))]).rstrip("\n") + "\n"


def subject(file: ModuleType) -> list[str]:
    """A file of the table: its heading and its rows."""
    title = (file.__doc__ or "").partition("\n")[0].removesuffix(".")
    rows: tuple[Known, ...] = file.TABLE
    told = [row for row in rows if row.role != "frame" or row.fix]
    return [f"## {title}\n", *(section(row) for row in told)] if told else []


def section(known: Known) -> str:
    """One row: what it says, what it means, what to do, what not to believe."""
    lines = [f"### {known.code}", ""]
    said = list(dict.fromkeys(" ".join(blanked(wording).split()) for wording in known.says))
    lines += [f"- {code(text)}" for text in said[:_WORDINGS]]
    if len(said) > _WORDINGS:
        lines.append(f"- and {len(said) - _WORDINGS} more wordings")
    if known.torch:
        lines += ["", f"torch {known.torch}."]
    cause = general(known.cause) or "What it means depends on the number or letter in it."
    lines += ["", filled(cause), ""]
    if known.wrong:
        lines += [filled(f"Not to be believed: {general(known.wrong)}"), ""]
    lines += [f"- {item}" for item in steps(known)]
    if known.causes:
        lines += ["", "May be behind it: " + ", ".join(f"[{code}](doctor/{code}.md)" for code in known.causes) + "."]
    return "\n".join(lines).rstrip("\n") + "\n"


def steps(known: Known) -> list[str]:
    """What to do, commands and code as such."""
    told = [(line[:2], general(line)) for line in known.fix]
    return [code(text[2:]) if sign in ("$ ", "| ") else escaped(text) for sign, text in told]


def general(text: str) -> str:
    """A sentence without the values of one text."""
    return re.sub(r"\{[a-z_]+\}", "…", text).replace("{{", "{").replace("}}", "}").replace("……", "…")


def code(text: str) -> str:
    """A text between as many backticks as it does not hold."""
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if len(fence) > 1 else f"`{text}`"


def filled(text: str) -> str:
    """A paragraph."""
    return textwrap.fill(escaped(text), _WIDTH, break_on_hyphens=False, break_long_words=False)


def escaped(text: str) -> str:
    """Without what Markdown would take for its own."""
    return text.replace("<", "\\<").replace("*", "\\*")


if __name__ == "__main__":
    sys.exit(main())
