"""Write docs/codes.md: every code that a report can show, from the tables that the program uses.

Usage: python scripts/codes_page.py [--check]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from transload.diagnose.rules import BY_CODE
from transload.explaining.matching import known_errors
from transload.findings import manual_page
from transload.judge.problems import rules

PAGE = Path(__file__).parent.parent / "docs" / "codes.md"
HEAD = """\
# Codes

Every code that a report can show, and what it means in a line. Codes are stable between releases, and so are their
addresses on the site: `codes/U04/`. In a terminal, `transload doctor --explain U04` prints the page of a cause. This
page is written by `scripts/codes_page.py`.
"""
_LONGEST = 110

Row = tuple[str, str, str]


def main() -> int:
    """Write the page; with ``--check`` only return 1 if it is out of date."""
    text = page()
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.read_text(encoding="utf-8") == text else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


def page() -> str:
    """The complete page."""
    tables = (
        ("What `transload doctor` names as a cause", causes()),
        ("What `transload inspect` and the other commands find in a file", findings()),
        ("What `transload explain` knows", errors()),
    )
    parts = [HEAD]
    for title, rows in tables:
        lines = [f"| [`{code}`]({target}) | {text} |" for code, target, text in rows]
        parts.append("\n".join([f"## {title}\n", "| code | meaning |", "|---|---|", *lines, ""]))
    return "\n".join(parts)


def causes() -> Iterator[Row]:
    """The causes, with the titles of their pages."""
    for code in sorted(BY_CODE):
        title = manual_page(f"doctor/{code}").partition("\n")[0].partition(": ")[2]
        yield code, f"doctor/{code}.md", title


def findings() -> Iterator[Row]:
    """The findings, with their titles."""
    for code, rule in rules().items():
        yield code, f"findings.md#{code}", rule.title


def errors() -> Iterator[Row]:
    """The known errors, with the first of their wordings."""
    for _, known in sorted(known_errors(), key=lambda pair: pair[1].code):
        wording = " ".join(known.says[0].shown.split())
        text = wording if len(wording) <= _LONGEST else wording[: wording.rindex(" ", 0, _LONGEST)] + " …"
        yield known.code, f"errors.md#{known.code}", shown(text)


def shown(text: str) -> str:
    """A text as code; with a bar, which ends a cell of a table even there, as it is."""
    if "|" in text:
        return text.replace("<", "\\<").replace("*", "\\*").replace("|", "\\|")
    return f"`` {text} ``" if "`" in text else f"`{text}`"


if __name__ == "__main__":
    sys.exit(main())
