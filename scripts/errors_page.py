"""Write docs/errors.md: every error text that ``transload explain`` knows, from the pages that it uses.

Usage: python scripts/errors_page.py [--check]
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

from transload.explaining.matching import KnownError, known_errors

PAGE = Path(__file__).parent.parent / "docs" / "errors.md"
HEAD = """\
# Error texts

Every text that [`transload explain`](explain.md) knows, by subject, with its code, which is stable between releases;
`…` stands for what differs. This page is written by `scripts/errors_page.py` from the pages that the program uses, in
`src/transload/explaining/pages`.
"""
_WORDINGS = 6
_WIDTH = 118


def main() -> int:
    """Write the page; with ``--check`` only return 1 if it is out of date."""
    text = page()
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.read_text(encoding="utf-8") == text else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


def page() -> str:
    """The complete page."""
    subjects: dict[str, list[str]] = {}
    for subject, known in known_errors():
        subjects.setdefault(subject, []).append(section(known))
    parts = [HEAD, *(part for subject, sections in subjects.items() for part in (f"## {subject}\n", *sections))]
    return "\n".join(parts).rstrip("\n") + "\n"


def section(known: KnownError) -> str:
    """One error: its wordings, what it means, what to do, which advice is wrong."""
    wordings = list(dict.fromkeys(" ".join(wording.shown.split()) for wording in known.says))
    listed = [f"- {code(text)}" for text in wordings[:_WORDINGS]]
    if len(wordings) > _WORDINGS:
        listed.append(f"- and {len(wordings) - _WORDINGS} more wordings")
    steps = [general(line) for line in known.fix]
    pages = ", ".join(f"[{cause}](doctor/{cause}.md)" for cause in known.doctor)
    blocks = (
        f"### {known.code}",
        "\n".join(listed),
        f"torch {known.torch}." if known.torch else "",
        filled(general(known.cause) or "What it means depends on the number or letter in it."),
        filled(f"Correction: {general(known.wrong)}") if known.wrong else "",
        "\n".join(f"- {code(line[2:]) if line.startswith(('$ ', '| ')) else escaped(line)}" for line in steps),
        f"Possible causes: {pages}." if pages else "",
    )
    return "\n\n".join(filter(None, blocks)) + "\n"


def general(text: str) -> str:
    """A sentence with ``…`` for its placeholders."""
    return re.sub(r"\{[a-z_]+\}", "…", text).replace("{{", "{").replace("}}", "}").replace("……", "…")


def code(text: str) -> str:
    """A text as inline code, in more backticks than the longest run of them in it."""
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if len(fence) > 1 else f"`{text}`"


def filled(text: str) -> str:
    """A paragraph, wrapped."""
    return textwrap.fill(escaped(text), _WIDTH, break_on_hyphens=False, break_long_words=False)


def escaped(text: str) -> str:
    """Escape what Markdown would interpret."""
    return text.replace("<", "\\<").replace("*", "\\*")


if __name__ == "__main__":
    sys.exit(main())
