"""The search of the dynamic loader, without loading anything: where it finds a library, and what a process would map.

The order is that of glibc's ``elf/dl-load.c``: DT_RPATH of the requesting library, of the one that loaded it, and so on
up to the program, unless the requesting library has a DT_RUNPATH; LD_LIBRARY_PATH; its DT_RUNPATH;
the cache; the default folders. The loader skips a file for another machine, but stops at a broken one. The folders
``tls``, ``haswell`` and the like, which glibc searched until 2.36, are left out. musl's search is simpler.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from struct import Struct, unpack_from
from typing import Any, NamedTuple

from transload.machine import Unknown

from .elf import Elf, read_elf
from .host import Host
from .tables import table

_CACHE_LIMIT = 1 << 24
_LOADER_LIMIT = 1 << 22
_FOLDERS = re.compile(rb"\0((?:/[ -~]{0,254}/\0)+)")
_CACHE_NAME = re.compile(rb"\0(/[ -~]{0,254}/ld\.so\.cache)\0")
_TOKEN = re.compile(r"\$(?:\{(ORIGIN|LIB|PLATFORM)\}|(ORIGIN|LIB|PLATFORM))")
_MOST_NAMES = 10_000
"""Names looked up for one library: torch needs a hundred, and a malicious file could need them without end."""


def elements(value: str, separators: str = ":;") -> tuple[str, ...]:
    """The elements of a search path as written; an empty one is the current directory.

    >>> elements("/opt/lib::/usr/lib;")
    ('/opt/lib', '', '/usr/lib', '')
    """
    return tuple(re.split(f"[{separators}]", value)) if value else ()


@dataclass(frozen=True, slots=True, eq=False)
class SharedObject:
    """A library in a process, or the program itself."""

    path: str  # As the loader found it.
    elf: Elf
    via: str = ""
    parent: SharedObject | None = None  # What needed it: ``None`` for the program, and for what ``dlopen`` loaded.

    @property
    def chain(self) -> Iterator[SharedObject]:
        """Itself, its parent, and so on."""
        each: SharedObject | None = self
        while each is not None:
            yield each
            each = each.parent


class Missing(NamedTuple):
    """A library that is needed and cannot be loaded."""

    name: str
    needed_by: SharedObject | None = None
    path: str = ""  # The file at which the loader gives up; empty if it finds none.
    via: str = ""
    problem: str = ""  # Why that file cannot be loaded.


@dataclass(frozen=True)
class Loader:
    """The loader of a host. It caches what it reads, so one instance serves a whole run."""

    host: Host
    _seen: dict[str, Elf | Unknown | None] = field(default_factory=dict, init=False, repr=False)
    imports: dict[str, Process] = field(default_factory=dict, init=False, repr=False)
    """Folder of a torch → a process that has imported it, once that was simulated."""

    # -- what is built into it

    @cached_property
    def program(self) -> SharedObject | None:
        """The examined interpreter, if it is an ELF file."""
        path = self.host.target(self.host.python) if self.host.python else ""
        elf = read_elf(self.host.real(path)) if path else None
        return SharedObject(path, elf, "program") if isinstance(elf, Elf) else None

    @cached_property
    def machine(self) -> str:
        """The machine whose libraries it loads, as in ``uname -m``."""
        return self.program.elf.machine if self.program else self.host.uname[2]

    @property
    def _machine_facts(self) -> dict[str, Any]:
        """The row of that machine in ``machines.json``."""
        return table("machines")["machines"].get(self.machine) or {}

    @cached_property
    def path(self) -> str:
        """Its own path; empty if it was not found."""
        if self.program and self.program.elf.interpreter:
            return self.program.elf.interpreter
        usual = (*self.host.paths("/lib", "ld-musl-"), self._machine_facts.get("loader", ""))
        return next((path for path in usual if path and self.host.exists(path)), "")

    @cached_property
    def musl(self) -> bool:
        """Whether it is musl's."""
        return "ld-musl" in os.path.basename(self.path)

    @cached_property
    def _binary(self) -> bytes:
        """The loader's own file: distributions compile different folders into glibc's, and perhaps another cache."""
        return (self.host.data(self.path, _LOADER_LIMIT) if self.path else b"") or b""

    @cached_property
    def default_folders(self) -> tuple[str, ...]:
        """The system's library folders, without a trailing slash: those compiled into the loader, else the usual ones.

        In glibc's they are consecutive texts that end in a slash. musl reads them from a file that is named after the
        loader: ``/etc/ld-musl-x86_64.path``.
        """
        if self.musl:
            text = self.host.text(f"/etc/{os.path.basename(self.path).partition('.')[0]}.path") or ""
            return tuple(filter(None, re.split(r"[:\n]", text))) or ("/lib", "/usr/local/lib", "/usr/lib")
        runs = (run.decode().split("/\0") for run in _FOLDERS.findall(self._binary))
        longest = max(([text for text in run if "lib" in text] for run in runs), key=len, default=[])
        multiarch = self._machine_facts.get("multiarch", f"{self.machine}-linux-gnu")
        usual = (f"{start}/{name}" for name in (f"lib/{multiarch}", "lib64", "lib") for start in ("", "/usr"))
        return tuple(longest or usual)

    @cached_property
    def hwcaps(self) -> tuple[str, ...]:
        """Subfolders of ``glibc-hwcaps`` for this processor, best first."""
        if self.musl or self.machine != "x86_64" or (self._binary and b"glibc-hwcaps" not in self._binary):
            return ()
        flags = re.search(r"^flags\s*:(.*)", self.host.text("/proc/cpuinfo", 1 << 14) or "", re.MULTILINE)
        has = set(flags[1].split()) if flags else set()
        levels = takewhile(lambda level: has.issuperset(level[1].split()), table("machines")["hwcaps"].items())
        return tuple(name for name, _ in levels)[::-1]

    @cached_property
    def cache(self) -> dict[str, tuple[str, ...]]:
        """Name → paths, as written by ldconfig."""
        if self.musl:
            return {}
        named = _CACHE_NAME.search(self._binary)
        data = self.host.data(named[1].decode() if named else "/etc/ld.so.cache", _CACHE_LIMIT)
        return read_cache(data, self.machine, self.hwcaps) if isinstance(data, bytes) else {}

    # -- what the environment adds

    @cached_property
    def library_path(self) -> tuple[str, ...]:
        """The folders of LD_LIBRARY_PATH, absolute."""
        folders = elements(self.host.environ.get("LD_LIBRARY_PATH", ""), ":\n" if self.musl else ":;")
        return self._absolute_folders(folders, self.program)

    @cached_property
    def preload_file(self) -> tuple[str, ...]:
        """What /etc/ld.so.preload lists; musl does not read it."""
        lines = ("" if self.musl else self.host.text("/etc/ld.so.preload") or "").splitlines()
        return tuple(name for line in lines for name in re.split(r"[:\s]", line.partition("#")[0]) if name)

    def preloaded(self) -> Iterator[tuple[str, SharedObject]]:
        """Every preloaded library, after the name that lists it. The loader ignores those it cannot load."""
        variable = filter(None, re.split(r"[:\s]", self.host.environ.get("LD_PRELOAD", "")))
        for via, names in (("LD_PRELOAD", variable), ("ld.so.preload", self.preload_file)):
            for name in names:
                found = next(self.search(name), None)
                if isinstance(found, SharedObject):
                    yield name, replace(found, via=via)

    # -- the search

    def search(self, name: str, asker: SharedObject | None = None) -> Iterator[SharedObject | Missing]:
        """Every file for ``name``, in order. The loader takes the first, or gives up there if that is ``Missing``."""
        asker = asker or self.program
        for path, via in self.candidates(name, asker).items():
            elf = self.examine(path)
            if isinstance(elf, Elf):
                yield SharedObject(path, elf, via, asker)
            elif elf is not None:
                yield Missing(name, asker, path, via, elf.reason)

    def candidates(self, name: str, asker: SharedObject | None) -> dict[str, str]:
        """Every path at which the loader would look for ``name``, in order, and how it gets there."""
        if "/" in name:
            return {self._absolute(name, asker): "path"}
        chain = tuple(asker.chain) if asker else ()
        ways: list[tuple[str, tuple[str, ...]]] = [("LD_LIBRARY_PATH", self.library_path)]
        if self.musl:  # it treats both kinds of run path alike, and they are inherited
            ways += (("RUNPATH", self.run_path(each)) for each in chain)
        elif asker and asker.elf.has_runpath:
            ways.append(("RUNPATH", self.run_path(asker)))
        else:
            every = chain if self.program is None or self.program in chain else (*chain, self.program)
            ways[:0] = [("RPATH", self.run_path(each)) for each in every if not each.elf.has_runpath]
        found = [(via, f"{folder.rstrip('/')}/{name}") for via, folders in ways for folder in folders]
        found += (("ld.so.cache", path) for path in self.cache.get(name, ()))
        found += (("default folder", f"{folder}/{name}") for folder in self.default_folders)
        paths: dict[str, str] = {}
        for via, path in found:
            folder = path.rpartition("/")[0]
            hwcaps = self.hwcaps if self.hwcaps and self.host.is_dir(f"{folder}/glibc-hwcaps") else ()
            for each in (*(f"{folder}/glibc-hwcaps/{level}/{name}" for level in hwcaps), path):
                paths.setdefault(each, via)
        return paths

    def run_path(self, each: SharedObject) -> tuple[str, ...]:
        """The folders of its DT_RUNPATH, else of its DT_RPATH, absolute."""
        return self._absolute_folders(elements(each.elf.runpath if each.elf.has_runpath else each.elf.rpath, ":"), each)

    def _absolute_folders(self, folders: Sequence[str], asker: SharedObject | None) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._absolute(folder, asker) for folder in folders if folder or not self.musl))

    def _absolute(self, path: str, asker: SharedObject | None) -> str:
        """The path with ``$ORIGIN``, ``$LIB`` and ``$PLATFORM`` substituted, absolute."""
        if "$" in path and asker:
            lib = self.default_folders[0].strip("/").removeprefix("usr/")
            values = {"ORIGIN": os.path.dirname(asker.path), "LIB": lib, "PLATFORM": self.machine}
            path = _TOKEN.sub(lambda token: values[token[1] or token[2]], path)
        return path if path.startswith("/") else f"{self.host.cwd.rstrip('/')}/{path}".rstrip("/")

    def examine(self, path: str) -> Elf | Unknown | None:
        """Read the file at a path of the host; ``None`` if the loader skips it: absent, not readable, or foreign."""
        if path not in self._seen:
            real = self.host.real(path)
            elf = read_elf(real) if self.host.exists(path) and os.access(real, os.R_OK) else None
            self._seen[path] = None if isinstance(elf, Elf) and self.foreign(elf) else elf
        return self._seen[path]

    def foreign(self, elf: Elf) -> bool:
        """Whether it is for another machine than the program."""
        return elf.bits != 64 or elf.machine != self.machine


# -- /etc/ld.so.cache --------------------------------------------------------------------------------------------------

_MAGIC = b"glibc-ld.so.cache1.1"
"""Caches from before glibc 2.32 begin with an older format, followed by this one."""
_HEADER = Struct("<20sII4xI12x")
_ENTRY = Struct("<iIIIQ")
_EXTENSION = Struct("<4I")
_EXTENSION_MAGIC, _HWCAPS = b"\x74\x21\xa4\xea", 1
_BY_HWCAPS = 1 << 62
_LONGEST_NAME = 4096


def read_cache(cache: bytes, machine: str, hwcaps: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
    """Name → paths, in the order in which the loader prefers them; empty if the bytes are not a cache.

    ``hwcaps`` are the subfolders of ``glibc-hwcaps`` that the processor can use, best first.
    """
    start = cache.find(_MAGIC)
    if start < 0 or len(cache) < start + _HEADER.size:
        return {}
    cache = cache[start:]

    def text(at: int) -> str:
        end = cache.find(b"\0", at, at + _LONGEST_NAME)
        return cache[at : max(end, at)].decode("utf-8", "surrogateescape")

    _, count, _, at = _HEADER.unpack_from(cache)
    levels = {0: ""}  # ``hwcap`` of an entry, as used since glibc 2.33 → its name; 0 is any processor
    extensions = b""
    if cache[at : at + 4] == _EXTENSION_MAGIC:
        number = min(int.from_bytes(cache[at + 4 : at + 8], "little"), 16)
        extensions = cache[at + 8 : at + 8 + number * _EXTENSION.size]
    for tag, _, offset, size in _EXTENSION.iter_unpack(extensions[: len(extensions) // 16 * 16]):
        if tag == _HWCAPS and offset + size <= len(cache):
            keys = unpack_from(f"<{size // 4}I", cache, offset)
            levels.update({_BY_HWCAPS | number: text(key) for number, key in enumerate(keys)})

    rank = {each: place for place, each in enumerate((*hwcaps, ""))}
    marked = table("machines")["machines"].get(machine, {}).get("cache")
    flags = int(marked, 16) if marked else None
    size = min(count, (len(cache) - _HEADER.size) // _ENTRY.size) * _ENTRY.size
    found: dict[str, list[tuple[int, str]]] = {}
    for kind, key, value, _, hwcap in _ENTRY.iter_unpack(cache[_HEADER.size : _HEADER.size + size]):
        if flags in (kind, None) and levels.get(hwcap) in rank:
            found.setdefault(text(key), []).append((rank[levels[hwcap]], text(value)))
    return {name: tuple(path for _, path in sorted(paths, key=lambda each: each[0])) for name, paths in found.items()}


# -- a process ---------------------------------------------------------------------------------------------------------


class Process:
    """A simulated process of the examined interpreter: which file it would map for which name.

    At its start are what LD_PRELOAD and /etc/ld.so.preload list, and what the interpreter needs.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        # Name → library: a library is known by its soname, and by every name under which it was requested.
        self.names: dict[str, SharedObject] = {}
        self.files: dict[tuple[int, int], SharedObject] = {}  # (device, inode): no file is mapped twice.
        self.opened: list[SharedObject] = []  # Everything that ``open`` has mapped, even if something was then missing.
        first = [loader.program] if loader.program else []
        for name, found in loader.preloaded():
            first += self._add(name, found)
        self._add_needed(first)

    def open(self, path: str, *, anyway: bool = False) -> list[Missing]:
        """Do what ``dlopen`` of a path does, and return what is missing; ``anyway`` keeps the rest mapped."""
        elf = self.loader.examine(path)
        if not isinstance(elf, Elf):
            why = (path, "path", elf.reason) if elf is not None else ("", "", "")
            return [Missing(os.path.basename(path), None, *why)]
        names, files = dict(self.names), dict(self.files)
        objects = self._add("", SharedObject(path, elf, "path"))
        missing = self._add_needed(objects)
        self.opened += objects
        if missing and not anyway:
            self.names, self.files = names, files
        return missing

    def _add_needed(self, objects: list[SharedObject]) -> list[Missing]:
        """Map what the objects need, what that needs, and so on: breadth first, as the loader does."""
        missing: list[Missing] = []
        left = _MOST_NAMES
        for each in objects:
            for name in each.elf.needed:
                left -= 1
                if name in self.names or left <= 0:
                    continue
                found = next(self.loader.search(name, each), Missing(name, each))
                if isinstance(found, SharedObject):
                    objects += self._add(name, found)
                else:
                    missing.append(found)
        return missing

    def _add(self, name: str, new: SharedObject) -> list[SharedObject]:
        """Map an object, unless its file is already mapped, which then gets the name too; what is new, in a list."""
        known = self.files.setdefault(new.elf.identity, new)
        for each in filter(None, (name, known.elf.soname)):
            self.names.setdefault(each, known)
        return [new] if known is new else []
