"""The table of contents of the site that `make docs` builds: commands and causes are detected, other pages listed here.

The title of the page of a command is ``transload COMMAND``; the causes are those of docs/doctor/README.md, by layer. A
page that is neither detected nor listed stops the build.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"

Entry = str | dict[str, Any]
PYTHON = ("api.md", "loading.md", "remote.md", "ranks.md", "save.md", "integrations.md")
TRUST = ("safety.md", "claims.md")
MESSAGES = ("codes.md", "errors.md", "findings.md")
INSIDE = ("formats.md", "performance.md", "dependencies.md", "architecture.md", "tested-on.md")


def on_config(config: Any) -> Any:
    """A hook that the builder calls first, with its settings."""
    config["nav"] = contents(DOCS)
    return config


def contents(docs: Path) -> list[Entry]:
    """The pages in reading order; a page without a name here is listed by its title."""
    return [
        {"Start here": "index.md"},
        {"Every command in a line": "overview.md"},
        {"Recipes": "recipes.md"},
        "ci.md",
        {"Commands": commands(docs)},
        {"In Python": list(PYTHON)},
        {"What to trust": list(TRUST)},
        {"Messages": list(MESSAGES)},
        {"Why torch sees no GPU": causes(docs)},
        {"Inside": list(INSIDE)},
    ]


def commands(docs: Path) -> list[Entry]:
    """The pages of commands, sorted by name."""
    return [path.name for path in sorted(docs.glob("*.md")) if title(path).startswith("transload ")]


def causes(docs: Path) -> list[Entry]:
    """The list of causes, then each layer with its pages."""
    layers: list[Entry] = [{"All causes": "doctor/README.md"}]
    text = (docs / "doctor" / "README.md").read_text(encoding="utf-8")
    for section in text.split("\n## ")[1:]:
        name, _, rows = section.partition("\n")
        layers.append({name: [f"doctor/{page}" for page in re.findall(r"^\| \[\w+\]\((.+?)\)", rows, re.MULTILINE)]})
    return layers


def title(page: Path) -> str:
    """The first heading of a page."""
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
