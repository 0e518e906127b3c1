"""Where the dynamic loader would find a library: the search of glibc's ld.so, and musl's simpler one, without them.

The order is glibc's (``elf/dl-load.c``): DT_RPATH of who asks, of who brought that in, and so on, and of the program,
but only where who asks has no DT_RUNPATH; LD_LIBRARY_PATH; DT_RUNPATH of who asks; the cache; the system's own folders.
A file for another machine is passed over. One that is broken is not: the loader stops there.

The folders ``tls``, ``haswell`` and the like, which glibc searched until 2.36, are left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from transload.machine import Unknown

from .elf import Elf, read_elf
from .host import Host
from .ld_so import LdSo, ld_so

__all__ = ["Found", "Loader", "Object", "elements"]

_TOKEN = re.compile(r"\$(?:\{(ORIGIN|LIB|PLATFORM)\}|(ORIGIN|LIB|PLATFORM))")


@dataclass(frozen=True, slots=True, eq=False)
class Object:
    """A library in a process, or the program itself."""

    path: str
    """As the loader came to it."""
    elf: Elf
    via: str = ""
    parent: Object | None = None
    """Who brought it in: nobody for the program, and for what is opened while it runs."""

    @property
    def chain(self) -> Iterator[Object]:
        """Itself, who brought it in, and so on."""
        each: Object | None = self
        while each is not None:
            yield each
            each = each.parent


@dataclass(frozen=True, slots=True)
class Found:
    """A file the loader would take. Where ``elf`` is an ``Unknown`` it stops there, with an error."""

    path: str
    via: str
    elf: Elf | Unknown


def elements(value: str, separators: str = ":;") -> tuple[str, ...]:
    """The folders of a search path as they are written; an empty one is the current directory.

    >>> elements("/opt/lib::/usr/lib;")
    ('/opt/lib', '', '/usr/lib', '')
    """
    return tuple(re.split(f"[{separators}]", value)) if value else ()


def _possible(path: str) -> bool:
    """Whether a file can have that name."""
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False


@dataclass(frozen=True)
class Loader:
    """The search of a host's loader. What it read is kept, so one serves for all questions of a run."""

    host: Host
    _seen: dict[str, Elf | Unknown | None] = field(default_factory=dict, init=False, repr=False)
    _divided: dict[str, bool] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def system(self) -> LdSo:
        """What is built into it."""
        return ld_so(self.host)

    @cached_property
    def program(self) -> Object | None:
        """The interpreter that is examined, where it is an ELF file."""
        elf = self.system.program
        return Object(self.host.target(self.host.python), elf, "program") if isinstance(elf, Elf) else None

    @cached_property
    def library_path(self) -> tuple[str, ...]:
        """LD_LIBRARY_PATH, folder by folder, made absolute."""
        separators = ":\n" if self.system.musl else ":;"
        return self._expanded(elements(self.host.environ.get("LD_LIBRARY_PATH", ""), separators), self.program)

    @cached_property
    def preload(self) -> tuple[str, ...]:
        """What LD_PRELOAD lists."""
        return tuple(filter(None, re.split(r"[:\s]", self.host.environ.get("LD_PRELOAD", ""))))

    @cached_property
    def preload_file(self) -> tuple[str, ...]:
        """What /etc/ld.so.preload lists; musl has none."""
        text = "" if self.system.musl else self.host.text("/etc/ld.so.preload")
        lines = text.splitlines() if isinstance(text, str) else ()
        return tuple(name for line in lines for name in re.split(r"[:\s]", line.partition("#")[0]) if name)

    def search(self, name: str, asker: Object | None = None) -> Iterator[Found]:
        """Every file that could be taken for ``name``, in order: the first is the one that is."""
        for via, path in self.places(name, asker):
            elf = self.examine(path)
            if elf is not None:
                yield Found(path, via, elf)

    def places(self, name: str, asker: Object | None = None) -> Iterator[tuple[str, str]]:
        """How, and under which path, the loader would look for ``name``, each path once."""
        met: set[str] = set()
        for via, path in self._places(name, asker or self.program):
            for each in (*self._better(path), path):
                if each not in met:
                    met.add(each)
                    yield via, each

    def _places(self, name: str, asker: Object | None) -> Iterator[tuple[str, str]]:
        if "/" in name:
            yield "path", self._absolute(self._filled(name, asker))
            return
        for via, folders in self._musl(asker) if self.system.musl else self._glibc(asker):
            yield from ((via, f"{folder.rstrip('/')}/{name}") for folder in folders)
        yield from (("ld.so.cache", path) for path in self.system.cache.get(name, ()))
        if asker is None or not asker.elf.no_default:
            yield from (("default folder", f"{folder}/{name}") for folder in self.system.folders)

    def _glibc(self, asker: Object | None) -> Iterator[tuple[str, tuple[str, ...]]]:
        if asker is None or not asker.elf.has_runpath:
            chain = tuple(asker.chain) if asker else ()
            program = (self.program,) if self.program and self.program not in chain else ()
            for each in (*chain, *program):
                if not each.elf.has_runpath:
                    yield "RPATH", self.folders(each)
        yield "LD_LIBRARY_PATH", self.library_path
        if asker and asker.elf.has_runpath:
            yield "RUNPATH", self.folders(asker)

    def _musl(self, asker: Object | None) -> Iterator[tuple[str, tuple[str, ...]]]:
        """LD_LIBRARY_PATH comes first; there is one kind of run path, and it is inherited."""
        yield "LD_LIBRARY_PATH", self.library_path
        for each in asker.chain if asker else ():
            yield "RUNPATH", self.folders(each)

    def folders(self, each: Object) -> tuple[str, ...]:
        """The folders of its DT_RUNPATH, else of its DT_RPATH, made absolute."""
        return self._expanded(elements(each.elf.runpath if each.elf.has_runpath else each.elf.rpath, ":"), each)

    def _expanded(self, folders: Sequence[str], asker: Object | None) -> tuple[str, ...]:
        kept = [folder for folder in folders if folder or not self.system.musl]
        return tuple(dict.fromkeys(self._absolute(self._filled(folder, asker)) for folder in kept))

    def _filled(self, text: str, asker: Object | None) -> str:
        """The text with its ``$ORIGIN``, ``$LIB`` and ``$PLATFORM`` filled in."""
        if "$" not in text or asker is None:
            return text
        lib = self.system.folders[0].strip("/").removeprefix("usr/")
        values = {"ORIGIN": os.path.dirname(asker.path), "LIB": lib, "PLATFORM": self.system.machine}
        return _TOKEN.sub(lambda token: values[token[1] or token[2]], text)

    def _absolute(self, path: str) -> str:
        return path if path.startswith("/") else f"{self.host.cwd.rstrip('/')}/{path}".rstrip("/")

    def _better(self, path: str) -> Iterator[str]:
        """The same library in the subfolders for this processor, where the folder has any."""
        folder, _, name = path.rpartition("/")
        if folder not in self._divided:
            self._divided[folder] = bool(self.system.hwcaps) and self.host.folder(f"{folder}/glibc-hwcaps")
        if self._divided[folder]:
            yield from (f"{folder}/glibc-hwcaps/{level}/{name}" for level in self.system.hwcaps)

    def examine(self, path: str) -> Elf | Unknown | None:
        """The file at a path of the host; ``None`` for one that is passed over: absent, shut, or foreign."""
        if path not in self._seen:
            self._seen[path] = self._examined(path)
        return self._seen[path]

    def _examined(self, path: str) -> Elf | Unknown | None:
        real = self.host.real(path)
        if not _possible(real) or not os.access(real, os.R_OK):
            return None
        elf = read_elf(real)
        return None if isinstance(elf, Elf) and self.foreign(elf) else elf

    def foreign(self, elf: Elf) -> bool:
        """Whether it is for another machine than the program; never where that is not known."""
        return elf.bits != 64 or self.system.machine not in ("", elf.machine)
