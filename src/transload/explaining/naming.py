"""Which file a text speaks of: paths in it that exist here."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["files_in"]

_SUFFIXES = r"pt|pth|ckpt|bin|pt2|ptl|pkl|pickle|safetensors|tar|th|t7|model|distcp|npz|joblib|weights|mar"
_QUOTED = re.compile(r"""["'`]([^"'`\n]{1,1000})["'`]""")
_BARE = re.compile(rf"(?<![\w./\\~-])((?:[A-Za-z]:)?[\w./\\~+@%=-]{{1,1000}}\.(?:{_SUFFIXES}))(?![\w/])")
_LOOKS = re.compile(rf"\.(?:{_SUFFIXES})$", re.IGNORECASE)
_MOST = 200
"""Names that are looked up: a log may be full of them."""


def files_in(texts: Iterable[str]) -> Iterator[str]:
    """Files and directories named in some texts that exist here, each once, the likeliest first.

    A path of another machine's network (``//host/share``) is not touched: to look it up would be to call there.
    """
    seen: dict[str, None] = {}
    for text in texts:
        for name in (*_BARE.findall(text), *_QUOTED.findall(text)):
            seen.setdefault(name)
            if len(seen) >= _MOST:
                break
    for name in seen:
        if not name.startswith(("//", "\\\\")) and _is_checkpoint(name):
            yield str(Path(name).expanduser())


def _is_checkpoint(name: str) -> bool:
    try:
        path = Path(name).expanduser()
        if path.is_file():
            return _LOOKS.search(name) is not None
        return path.is_dir() and _is_folder(path)
    except (OSError, ValueError, RuntimeError):  # a name with a NUL, or too long; a home of nobody
        return False


def _is_folder(path: Path) -> bool:
    """A directory that holds what a checkpoint is made of."""
    with os.scandir(path) as entries:
        names = [entry.name for _, entry in zip(range(1000), entries, strict=False)]
    return ".metadata" in names or any(
        name.endswith((".distcp", ".index.json", "_optim_states.pt", "_model_states.pt", ".safetensors"))
        for name in names
    )
