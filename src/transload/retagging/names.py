"""The names of what may lie beside a file: every command looks for one of them, so this module imports nothing."""

from __future__ import annotations

import os
from typing import NamedTuple

__all__ = ["Names", "has_journal", "names_of"]

_LONGEST_NAME = 200  # file systems take names of 255 bytes


class Names(NamedTuple):
    """The files that may lie beside a file: its journal, one that is being written, and what undoes the last change."""

    path: str
    folder: str
    journal: str
    unfinished: str
    undo: str


def names_of(path: str) -> Names:
    """The names for a file, beside the file itself where ``path`` is a link to it."""
    real = os.path.realpath(path)
    folder, name = os.path.split(real)
    if len(os.fsencode(name)) > _LONGEST_NAME:
        from zlib import crc32

        name = f"{name[:40]}-{crc32(os.fsencode(name)):08x}"
    beside = os.path.join(folder, f".{name}.transload-")  # noqa: PTH118 - pathlib costs ten milliseconds to import
    return Names(real, folder, f"{beside}retag", f"{beside}retag-new", f"{beside}undo")


def has_journal(path: str | os.PathLike[str]) -> bool:
    """Whether a change of this file was left half done, or is being made right now. Cheap: a look at one name."""
    try:
        return os.path.lexists(names_of(os.fspath(path)).journal)
    except ValueError:  # no file can have such a name, which whoever reads it will say
        return False
