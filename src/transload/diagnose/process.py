"""A process as the dynamic loader would fill it: which file is mapped for which name, without mapping any."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from .elf import Elf
from .loader import Loader, Object

__all__ = ["Missing", "Opened", "Process"]

_MOST = 10_000
"""Names looked up for one library: torch needs a hundred, and files can be made to need others without end."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A library that is needed and cannot be had."""

    name: str
    needed_by: Object | None = None
    path: str = ""
    """The file at which the loader gives up; empty where it finds none."""
    via: str = ""
    problem: str = ""
    """Why that file cannot be loaded."""


@dataclass(frozen=True, slots=True)
class Opened:
    """What ``dlopen`` would do: bring in ``objects``; with anything missing, nothing at all."""

    objects: tuple[Object, ...]
    missing: tuple[Missing, ...] = ()


@dataclass
class Process:
    """A process of the examined interpreter."""

    loader: Loader
    names: dict[str, Object] = field(default_factory=dict)
    """Name → what stands for it: a library goes by its soname, and by every name it was asked for."""
    files: dict[tuple[int, int], Object] = field(default_factory=dict, repr=False)
    """(device, inode) → the library: no file is mapped twice, whatever its names."""

    def start(self) -> None:
        """Bring in what LD_PRELOAD and /etc/ld.so.preload list, and what the interpreter itself needs."""
        first = [self.loader.program] if self.loader.program else []
        for via, names in (("LD_PRELOAD", self.loader.preload), ("ld.so.preload", self.loader.preload_file)):
            for name in names:
                found = next(self.loader.search(name), None)
                if found and isinstance(found.elf, Elf):  # the loader leaves out what it cannot preload
                    first += self._admit(name, Object(found.path, found.elf, via, self.loader.program))
        self._fill(first)

    def open(self, path: str, *, anyway: bool = False) -> Opened:
        """What ``dlopen`` of a path does; ``anyway`` keeps what came in although something is missing."""
        elf = self.loader.examine(path)
        if not isinstance(elf, Elf):
            why = (path, "path", elf.reason) if elf is not None else ("", "", "")
            return Opened((), (Missing(os.path.basename(path), None, *why),))
        names, files = dict(self.names), dict(self.files)
        opened = self._fill(self._admit("", Object(path, elf, "path")))
        if opened.missing and not anyway:
            self.names, self.files = names, files
        return opened

    def _fill(self, objects: list[Object]) -> Opened:
        """Bring in what the objects need, what that needs, and so on: breadth first, as the loader does."""
        missing: list[Missing] = []
        left = _MOST
        for each in objects:
            for name in each.elf.needed:
                left -= 1
                if name not in self.names and left > 0:
                    found = next(self.loader.search(name, each), None)
                    if found is None:
                        missing.append(Missing(name, each))
                    elif isinstance(found.elf, Elf):
                        objects += self._admit(name, Object(found.path, found.elf, found.via, each))
                    else:
                        missing.append(Missing(name, each, found.path, found.via, found.elf.reason))
        return Opened(tuple(objects), tuple(missing))

    def _admit(self, name: str, new: Object) -> list[Object]:
        """The object in a list, unless its file is there already: then that one gets the name too."""
        known = self.files.setdefault(new.elf.identity, new)
        for each in filter(None, (name, known.elf.soname)):
            self.names.setdefault(each, known)
        return [new] if known is new else []
