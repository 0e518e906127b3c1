"""The page of a cause, in Markdown: it has the title, ``doctor --explain`` prints it, ``explain`` quotes it.

The pages are docs/doctor/CODE.md, where a reader of the repository looks for them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from textwrap import dedent

from transload.findings import manual_page

_UP = "[All causes](README.md)\n"  # for readers of the site
_MARKUP = re.compile(r"`([^`]*)`|\\([\\*_<\[`])|&(lt);|\[([^\]]*)\]\([^)]*\)|<(https?://[^>]*)>")


def page(code: str) -> str:
    """The Markdown of a cause's page."""
    return manual_page(f"doctor/{code}")


@cache
def title(code: str) -> str:
    """What a cause is, in the words that follow its code in the first line of its page."""
    return page(code).partition("\n")[0].partition(": ")[2]


def parts(markdown: str) -> Iterator[tuple[str, str]]:
    r"""What a page is made of: its ``title``, a ``heading``, a ``prose`` paragraph, an ``item`` of a list, or ``code``.

    >>> list(parts("# U04: a `stub`\n\nTwo\nlines.\n\n- <https://a.b>\n\n    $ ls\n"))
    [('title', 'U04: a stub'), ('prose', 'Two lines.'), ('item', 'https://a.b'), ('code', '$ ls')]
    """
    for block in re.split(r"\n{2,}", markdown.removesuffix(_UP).strip("\n")):
        if block.startswith("    "):
            yield "code", dedent(block)
        elif block.startswith("- "):
            for item in re.split(r"\n?^- ", block, flags=re.MULTILINE)[1:]:
                yield "item", _plain(item)
        else:
            mark, _, text = block.partition(" ")
            kind = {"#": "title", "##": "heading"}.get(mark, "prose")
            yield kind, _plain(block if kind == "prose" else text)


def _plain(text: str) -> str:
    def shown(match: re.Match[str]) -> str:
        return "<" if match[3] else next(group for group in match.groups() if group is not None)

    return _MARKUP.sub(shown, " ".join(text.split()))


def fix(code: str) -> str:
    """What a page says to do, as one line of text."""
    section = page(code).partition("\n## Fix\n")[2].partition("\n## ")[0]
    return " ".join(" ".join(text.split()) for _, text in parts(section))
