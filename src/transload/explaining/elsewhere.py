"""Whether a text comes from the Python that was examined: torch printed it, so it is in that one, and works so far."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transload.findings import Finding
    from transload.machine import Machine

__all__ = ["other_torch", "possible", "words"]

_TORCH = re.compile(r"[/\\](?:site|dist)-packages[/\\]torch(?=[/\\])")
_LONGEST = 400
"""Letters of a path."""
_MOST = 50
"""Paths that are looked up: a log may be full of them."""

_NO_TORCH = frozenset({"P01", "P03", "P04", "P07", "P08", "P09", "T09", "W02", "L04", "L10", "L12", "L13", "X10"})
"""Causes by which there is no torch that could print anything."""
_OF_A_PYTHON = frozenset({"python", "build", "torch-libraries", "fit", "run", "extensions"})
"""Layers of the doctor's that another Python has of its own."""


def possible(faults: Sequence[Finding], causes: Sequence[str], other: str) -> list[Finding]:
    """The faults that can be behind a text with some causes; ``other`` is the torch it came from, if not the one here.

    A text of torch's own comes from no Python without it, unless its row says so.
    """
    from transload.diagnose.rules.catalogue import BY_CODE

    able = [found for found in faults if found.code in causes or found.code not in _NO_TORCH]
    return [found for found in able if not other or BY_CODE[found.code].layer not in _OF_A_PYTHON]


def other_torch(text: str, machine: Machine) -> str:
    """The folder of the torch that frames in a text are in, where it is here and is not the one examined; or nothing.

    >>> from transload.machine import Machine
    >>> other_torch('File "/not/here/site-packages/torch/serialization.py"', Machine())
    ''
    """
    examined = {os.path.realpath(install.location) for install in machine.torch.installs or ()}
    folders = [folder for folder in dict.fromkeys(_folders(text)) if Path(folder).is_dir()]
    return next((folder for folder in folders if os.path.realpath(folder) not in examined), "")


def _folders(text: str) -> Iterator[str]:
    """Absolute paths of folders named torch among installed packages; never those of another machine's network."""
    for _, found in zip(range(_MOST), _TORCH.finditer(text), strict=False):
        before = text[max(0, found.start() - _LONGEST) : found.start()]
        for start in (before.rpartition('"')[2].strip(), *before.split()[-1:]):
            if Path(start).is_absolute() and not start.startswith(("//", "\\\\")):
                yield start + found[0]
                break


def words(machine: Machine, other: str) -> str:
    """What is said of a machine on which another Python than that of the text was examined."""
    there = machine.hardware.present or machine.accelerators
    if other:
        card = "" if there else "there is no GPU in this machine; "
        return f"{card}the text comes from another Python: transload doctor --python {_environment(Path(other))}"
    card = "nothing else is broken on this machine" if there else "there is no GPU in this machine"
    examined = machine.python.executable or "the Python that was examined"
    return (
        f"{card}; torch does not work in {examined}, so what torch says comes from another Python: "
        "transload doctor --python PYTHON"
    )


def _environment(torch: Path) -> str:
    """The folder of the environment: ``<it>/lib/python3.12/site-packages/torch``; on Windows without the version."""
    import shlex

    at = 2 if torch.parent.parent.name.lower() == "lib" else 3
    return shlex.quote(str(torch.parents[min(at, len(torch.parents) - 1)]))
