"""``torch/version.py``, read as text and never imported: the one place that says what a torch was built for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transload.machine import Unknown

if TYPE_CHECKING:
    from transload.diagnose.host import Host

__all__ = ["Build", "assigned", "build"]

_LIMIT = 1 << 16  # the real file has ten lines
_ASSIGNED = re.compile(
    r"^(__version__|cuda|hip|rocm|xpu)[ \t]*(?::[^=\n]*)?=[ \t]*(?:None\b|[bBrRuU]{0,2}(['\"])([\w.+!-]{0,100})\2)",
    re.ASCII | re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Build:
    """What it says; empty is what it was not built for. With a ``problem`` it could not be read."""

    version: str = ""
    cuda: str = ""
    hip: str = ""
    xpu: str = ""
    problem: str = ""


def assigned(text: str) -> dict[str, str]:
    r"""The names it gives a text or ``None``, which is empty here. The last one counts, as in Python.

    >>> assigned("__version__ = '2.8.0+cu128'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n")
    {'__version__': '2.8.0+cu128', 'cuda': '12.8', 'hip': ''}
    """
    return {found[1]: found[3] or "" for found in _ASSIGNED.finditer(text.removeprefix("\ufeff"))}


def build(host: Host, folder: str) -> Build:
    """What the torch in ``folder`` was built for."""
    path = f"{folder}/version.py"
    text = host.text(path, _LIMIT)
    if isinstance(text, Unknown):
        return Build(problem=text.reason)
    told = assigned(text)
    if not told.get("__version__"):
        return Build(problem=f"{path} names no version")
    if "cuda" not in told:
        return Build(told["__version__"], problem=f"{path} does not say what it was built for")
    return Build(told["__version__"], told["cuda"], told.get("hip") or told.get("rocm", ""), told.get("xpu", ""))
