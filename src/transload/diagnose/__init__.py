"""Why PyTorch does not see the GPU: probes examine the host, and rules judge the facts and name one cause.

Each cause has a page, docs/doctor/CODE.md: it has the title, ``doctor --explain`` prints it, ``explain`` quotes it. The
package is not called ``doctor``, which is the name of the public function.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING

from transload.findings import manual_page

if TYPE_CHECKING:
    from transload.diagnose.report import Diagnosis


def doctor(
    python: str = "", *, torch: bool = True, timeout: float = 0.0, progress: Callable[[str], object] | None = None
) -> Diagnosis:
    """Examine this machine, and the environment of ``python`` (this interpreter unless another is named).

    Nothing is changed and torch is not imported into this process; with ``torch=False`` it is not run at all.
    ``timeout`` is the most seconds that torch may take in its child process; the default is 60, or less if it hangs
    without working. ``progress`` is called with a few words on the current step.

    >>> transload.doctor().status  # doctest: +SKIP
    'ok'
    """
    from transload.diagnose.probes import probe

    machine = probe(python, torch=torch, timeout=timeout, progress=progress or (lambda _: None))
    from transload.diagnose.rules import judge_machine  # which the probes import while they wait

    return judge_machine(machine)


# -- the pages, in Markdown

_MARKUP = r"`([^`]*)`|\\([\\*_<\[`])|&(lt);|\[([^\]]*)\]\([^)]*\)|<(https?://[^>]*)>"


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
    for_the_site = "[All causes](README.md)\n"
    for block in re.split(r"\n{2,}", markdown.removesuffix(for_the_site).strip("\n")):
        if block.startswith("    "):
            yield "code", block[4:].replace("\n    ", "\n")
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

    return re.sub(_MARKUP, shown, " ".join(text.split()))


def fix(code: str) -> str:
    """What a page says to do, as one line of text."""
    section = page(code).partition("\n## Fix\n")[2].partition("\n## ")[0]
    return " ".join(" ".join(text.split()) for _, text in parts(section))
