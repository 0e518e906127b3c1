"""The sources of the scripts that children run."""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["source"]

_PACKAGE = "from transload.diagnose.probes."


@cache
def source(script: str) -> str:
    """A script of ``probes`` and what it imports from there, as one text for ``python -c``.

    So it needs nothing of ours on the other interpreter's path, and is also found inside a zip.
    """
    return "\n".join(("from __future__ import annotations", *_lines(script, [])))


def _lines(script: str, seen: list[str]) -> Iterator[str]:
    seen.append(script)
    for line in _text(script).splitlines():
        if line.startswith(_PACKAGE):
            name = line[len(_PACKAGE) :].partition(" ")[0]
            yield from () if name in seen else _lines(name, seen)
        elif not line.startswith("from __future__"):
            yield line


def _text(script: str) -> str:
    from transload.diagnose import probes

    loader = cast(Any, probes.__spec__).loader
    return cast(bytes, loader.get_data(f"{os.path.dirname(probes.__file__)}{os.sep}{script}.py")).decode()
