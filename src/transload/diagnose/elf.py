"""Shared libraries without loading them: what ELF files contain, and which of them the dynamic loader would map.

Every loop is bounded. What cannot be read is an ``Unknown``; nothing here raises for the contents of a file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from operator import itemgetter
from struct import Struct, unpack, unpack_from

from transload.frozen import NamedTuple, replace
from transload.machine import Unknown

from .binary import LONGEST_NAME, BinaryFile, MalformedError, fatbins, with_file
from .host import Host
from .tables import table

_HEADER = Struct("<32x2Q6x5H")
_PROGRAM = Struct("<I4x2Q8xQ16x")
_SECTION = Struct("<2I16x2Q24x")
_DYNAMIC = Struct("<qQ")
_LOAD, _DYNAMIC_SEGMENT, _INTERPRETER = 1, 2, 3
_NEEDED, _STRINGS, _SONAME, _RPATH, _RUNPATH = 1, 5, 14, 15, 29
_NOBITS = 8

# A file may claim any count. These limits are far above what linkers write, and cheap to reach.
_MOST_PROGRAMS = 512
_MOST_DYNAMIC = 4096

_SYMBOL = Struct("<IBxH16x")
_NEED, _NEED_VERSION = Struct("<HHIII"), Struct("<IHHII")
_DEFINITION = Struct("<HHHHIII")
_STRINGS_SIZE, _VERSIONS, _DEFINITIONS, _NEEDS = 10, 0x6FFFFFF0, 0x6FFFFFFC, 0x6FFFFFFE
_WEAK = 2
_ANY = 1  # The version number of symbols without a version.

_MOST_SYMBOLS = 1 << 20  # libtorch_cpu has fifty thousand,
_LONGEST_STRINGS = 1 << 26  # with four megabytes of names
_MOST_VERSIONS = 4096


class UndefinedSymbol(NamedTuple):
    """A symbol that another library must define; ``file`` is the one whose version it needs, if it needs one."""

    name: str
    version: str = ""
    file: str = ""


@dataclass(frozen=True, slots=True)
class Elf:
    """What the loader reads from a library or program. ``path`` is that of the real file.

    Of a file that is not 64-bit and little-endian only ``machine`` and ``bits`` are read, and it has no ``segments``.
    """

    path: str
    machine: str  # As ``uname -m`` calls it.
    bits: int = 64
    soname: str = ""
    needed: tuple[str, ...] = ()
    run_path: str = ""  # A list of folders: DT_RUNPATH, for this file only, else DT_RPATH, also for what it loads.
    interpreter: str = ""  # The loader that a program requests.
    identity: tuple[int, int] = (0, 0)  # Device and inode: the same file under any name.
    dynamic: dict[int, int] = field(default_factory=dict, repr=False)  # Tag → value, the last one of a repeated tag.
    segments: tuple[tuple[int, int, int], ...] = field(default=(), repr=False)
    """(address, offset, size) of each part that is mapped from the file."""
    section_table: tuple[int, int, int] = field(default=(0, 0, 0), repr=False)
    """Offset and count of the section headers, and the index of the one with their names."""

    @property
    def has_runpath(self) -> bool:
        """Whether there is a DT_RUNPATH, even an empty one: it disables every DT_RPATH."""
        return _RUNPATH in self.dynamic

    def offset(self, tag: int) -> int:
        """The offset in the file of what the tag points to; -1 if it points to nothing."""
        address = self.dynamic.get(tag, -1)
        return next((at + address - start for start, at, size in self.segments if start <= address < start + size), -1)

    @with_file
    def section_bytes(self, file: BinaryFile, name: str, limit: int) -> bytes:
        """The bytes of a section, at most ``limit`` of them."""
        for start, size in self._sections(file, [name]):
            return file.read(start, min(size, limit))
        raise MalformedError(f"it has no section {name}")

    @with_file
    def undefined(self, file: BinaryFile, of: Collection[str] | None = None) -> tuple[UndefinedSymbol, ...]:
        """What it needs, except weakly: symbols, with ``of`` those of these files, and versions, which have no name."""
        needs = []  # file, number and name of every version that it needs, and whether the need is weak
        strings = self.offset(_STRINGS)
        for start, (_, count, name, aux, _) in _linked(file, self.offset(_NEEDS), _NEED):
            source = file.c_string(strings + name)
            for _, (_, flags, index, version, _) in islice(_linked(file, start + aux, _NEED_VERSION), count):
                needs.append((source, index & 0x7FFF, file.c_string(strings + version), bool(flags & 2)))
        versions = {number: (version, source) for source, number, version, _ in needs if of is None or source in of}
        chosen = None if of is None else versions
        symbols = self._symbols(file, defined=False, versions=chosen) if versions or of is None else ()
        undefined = [
            UndefinedSymbol(name.decode("utf-8", "surrogateescape"), *versions.get(number, ("", "")))
            for name, weak, number in symbols
            if not weak
        ]
        return (*undefined, *(UndefinedSymbol("", version, source) for source, _, version, weak in needs if not weak))

    @with_file
    def not_defined(self, file: BinaryFile, wanted: Collection[UndefinedSymbol]) -> tuple[UndefinedSymbol, ...]:
        """Those of ``wanted`` that it does not define in the needed version; a file without versions satisfies any."""
        names = {symbol.name.encode("utf-8", "surrogateescape"): symbol.name for symbol in wanted if symbol.name}
        definitions = {}  # the name of each version that it defines, by number
        for start, (_, _, index, _, _, aux, _) in _linked(file, self.offset(_DEFINITIONS), _DEFINITION):
            place = int.from_bytes(file.read_exactly(start + aux, 4), "little")
            definitions[index & 0x7FFF] = file.c_string(self.offset(_STRINGS) + place)
        versions: dict[str, set[str | None]] = {"": {*definitions.values()} or {""}}
        for name, _, number in self._symbols(file, defined=True) if names else ():
            if name in names:
                versions.setdefault(names[name], set()).add(definitions.get(number) if number > _ANY else "")
        given = ((need, versions.get(need.name)) for need in wanted)
        return tuple(need for need, has in given if not has or (need.version and has.isdisjoint((need.version, ""))))

    @with_file
    def architectures(self, file: BinaryFile) -> dict[str, int]:
        """The architectures of its code for NVIDIA cards, as ``fatbins`` returns them."""
        return fatbins(file, self._sections(file, (".nv_fatbin", "__nv_relfatbin")))

    def _sections(self, file: BinaryFile, names: Iterable[str]) -> Iterator[tuple[int, int]]:
        """(offset, size) of the sections with these names that have bytes in the file."""
        offset, count, index = self.section_table
        if not offset or index >= count:
            raise MalformedError("it has no section headers")
        headers = list(_SECTION.iter_unpack(file.read_exactly(offset, count * _SECTION.size)))
        strings, size = headers[index][2:]
        table = file.read_exactly(strings, min(size, count * 256))
        wanted = [section.encode() + b"\0" for section in names]
        for name, kind, start, length in headers:
            if kind != _NOBITS and any(table.startswith(section, name) for section in wanted):
                yield start, min(length, max(file.size - start, 0))

    def _symbols(
        self, file: BinaryFile, *, defined: bool, versions: Container[int] | None = None
    ) -> Iterator[tuple[bytes, bool, int]]:
        """The defined or undefined symbols, of all or some ``versions``: name, whether it is weak, and its version."""
        start, size = next(self._sections(file, [".dynsym"]), (0, 0))
        if not start:
            raise MalformedError("it has no table of symbols")
        count = min(size // _SYMBOL.size, _MOST_SYMBOLS)
        at = self.offset(_VERSIONS)
        numbers = unpack(f"<{count}H", file.read_exactly(at, 2 * count)) if at >= 0 else (_ANY,) * count
        strings = file.read(self.offset(_STRINGS), min(self.dynamic.get(_STRINGS_SIZE, 0), _LONGEST_STRINGS))
        symbols = _SYMBOL.iter_unpack(file.read_exactly(start, count * _SYMBOL.size))
        for (place, info, section), number in zip(symbols, numbers, strict=True):
            if (section != 0) == defined and (versions is None or number & 0x7FFF in versions):
                end = strings.find(b"\0", place, place + LONGEST_NAME)
                if end > place:
                    yield strings[place:end], info >> 4 == _WEAK, number & 0x7FFF


def _linked(file: BinaryFile, at: int, layout: Struct) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The offset and the fields of each entry of a linked list; the last field is the distance to the next."""
    for _ in range(_MOST_VERSIONS if at >= 0 else 0):
        entry = layout.unpack(file.read_exactly(at, layout.size))
        yield at, entry
        if not entry[-1]:
            break
        at += entry[-1]


@with_file
def read_elf(path: str, file: BinaryFile) -> Elf:
    """Read the ELF file at a real path, or say why it cannot be read, such as ``not an ELF file``."""
    head = file.read(0, _HEADER.size)
    if head[:4] != b"\x7fELF" or len(head) < _HEADER.size:
        why = "cut off within the header" if head[:4] == b"\x7fELF" else "not an ELF file" if head else "empty"
        raise MalformedError(why)
    bits, little = {1: 32, 2: 64}.get(head[4], 0), head[5] == 1
    number = int.from_bytes(head[18:20], "little" if little else "big")
    matching = (name for name, row in table("machines")["machines"].items() if row["elf"] == number)
    machine = next(matching, f"ELF machine {number}")
    if bits != 64 or not little:
        return Elf(path, machine, bits, identity=file.identity)
    programs, sections, size, count, entry, many, names = _HEADER.unpack(head)
    if size != _PROGRAM.size or not 0 < count <= _MOST_PROGRAMS:
        raise MalformedError("it has no program headers")
    kinds = list(_PROGRAM.iter_unpack(file.read_exactly(programs, size * count)))
    pairs: list[tuple[int, int]] = []
    for kind, offset, _, length in kinds:
        if kind == _DYNAMIC_SEGMENT:
            data = file.read(offset, min(length, _MOST_DYNAMIC * _DYNAMIC.size))
            whole = _DYNAMIC.iter_unpack(data[: len(data) // _DYNAMIC.size * _DYNAMIC.size])
            pairs += takewhile(lambda pair: pair[0] != 0, whole)
    segments = tuple((address, offset, length) for kind, offset, address, length in kinds if kind == _LOAD)
    end = max((offset + length for _, offset, length in segments), default=0)
    if end > file.size:  # the loader maps it anyway, and touching the missing pages raises SIGBUS
        raise MalformedError(f"cut off after {file.size} of {end} bytes")
    elf = Elf(
        *(path, machine),
        interpreter=next((file.c_string(offset) for kind, offset, *_ in kinds if kind == _INTERPRETER), ""),
        identity=file.identity,
        dynamic=dict(pairs),
        segments=segments,
        section_table=(sections, many if entry == _SECTION.size else 0, names),
    )
    strings = elf.offset(_STRINGS)

    def texts(wanted: int) -> tuple[str, ...]:
        return tuple(file.c_string(strings + value) for tag, value in pairs if tag == wanted and strings >= 0)

    soname, run_path = ("".join(texts(tag)[:1]) for tag in (_SONAME, _RUNPATH if elf.has_runpath else _RPATH))
    return replace(elf, soname=soname, needed=texts(_NEEDED), run_path=run_path)


# -- the search of the dynamic loader ----------------------------------------------------------------------------------
# The order is that of glibc's elf/dl-load.c: DT_RPATH of the requesting library, of the one that loaded it, and so on
# up to the program, unless the requesting library has a DT_RUNPATH; LD_LIBRARY_PATH; its DT_RUNPATH; the cache; the
# default folders. The loader skips a file for another machine, but stops at a broken one. Folders such as tls and
# haswell, which glibc searched until 2.36, are left out. musl's search is simpler.

_CACHE_LIMIT = 1 << 24
_LOADER_LIMIT = 1 << 22
_FOLDERS = re.compile(rb"\0((?:/[ -~]{0,254}/\0)+)")
_CACHE_NAME = re.compile(rb"\0(/[ -~]{0,254}/ld\.so\.cache)\0")
_TOKEN = re.compile(r"\$(?:\{(ORIGIN|LIB|PLATFORM)\}|(ORIGIN|LIB|PLATFORM))")
_MOST_NAMES = 10_000
"""The most names looked up for one library: torch needs a hundred, and a malicious file could list any number."""


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


class Missing(NamedTuple):
    """A library that is needed and cannot be loaded."""

    name: str
    needed_by: SharedObject | None = None
    path: str = ""  # The file at which the loader gives up; empty if it finds none.
    via: str = ""
    problem: str = ""  # Why that file cannot be loaded.


class Loader:
    """The loader of a host. It caches what it reads, so one instance serves a whole run."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._seen: dict[str, Elf | Unknown | None] = {}
        self.imports: dict[str, Process] = {}
        """Folder of a torch → a process that has imported it, once that was simulated."""

        # The examined interpreter, if it is an ELF file, and the machine whose libraries it loads, as in ``uname -m``.
        target = host.target(host.python) if host.python else ""
        elf = read_elf(host.real(target)) if target else None
        self.program = SharedObject(target, elf, "program") if isinstance(elf, Elf) else None
        self.machine = self.program.elf.machine if self.program else host.uname[2]
        row = table("machines")["machines"].get(self.machine) or {}

        # The loader's own file: distributions compile their own folders, and some their own cache, into glibc's.
        usual = (*host.paths("/lib", "ld-musl-"), row.get("loader", ""))
        program = next((path for path in usual if path and host.exists(path)), "")
        self.path = (self.program.elf.interpreter if self.program else "") or program
        self.musl = "ld-musl" in os.path.basename(self.path)
        binary = (host.data(self.path, _LOADER_LIMIT) if self.path else b"") or b""

        # The system's library folders. glibc's loader contains them, as consecutive texts that end in a slash. musl's
        # reads them from a file that is named after it: /etc/ld-musl-x86_64.path.
        if self.musl:
            text = host.text(f"/etc/{os.path.basename(self.path).partition('.')[0]}.path") or ""
            folders = [*filter(None, re.split(r"[:\n]", text))] or ["/lib", "/usr/local/lib", "/usr/lib"]
        else:
            runs = (run.decode().split("/\0") for run in _FOLDERS.findall(binary))
            folders = max(([text for text in run if "lib" in text] for run in runs), key=len, default=[])
            names = (f"lib/{row.get('multiarch', f'{self.machine}-linux-gnu')}", "lib64", "lib")
            folders = folders or [f"{start}/{name}" for name in names for start in ("", "/usr")]
        self.default_folders = tuple(folders)

        # The subfolders of glibc-hwcaps for this processor, best first.
        self.hwcaps: tuple[str, ...] = ()
        if not self.musl and self.machine == "x86_64" and (not binary or b"glibc-hwcaps" in binary):
            flags = re.search(r"^flags\s*:(.*)", host.text("/proc/cpuinfo", 1 << 14) or "", re.MULTILINE)
            has = set(flags[1].split()) if flags else set()
            levels = takewhile(lambda level: has.issuperset(level[1].split()), table("machines")["hwcaps"].items())
            self.hwcaps = tuple(name for name, _ in levels)[::-1]

        # What ldconfig and /etc/ld.so.preload list, neither of which musl reads, and LD_LIBRARY_PATH.
        named = _CACHE_NAME.search(binary)
        data = host.data(named[1].decode() if named else "/etc/ld.so.cache", _CACHE_LIMIT) or b""
        self.cache = {} if self.musl else read_cache(data, self.machine, self.hwcaps)
        lines = ("" if self.musl else host.text("/etc/ld.so.preload") or "").splitlines()
        listed = (name for line in lines for name in re.split(r"[:\s]", line.partition("#")[0]))
        self.preload_file = tuple(filter(None, listed))
        variable = elements(host.environ.get("LD_LIBRARY_PATH", ""), ":\n" if self.musl else ":;")
        self.library_path = self._absolute_folders(variable, self.program)

    def preloaded(self) -> Iterator[tuple[str, SharedObject]]:
        """Every preloaded library, with the name under which it is listed. The loader ignores what it cannot load."""
        variable = filter(None, re.split(r"[:\s]", self.host.environ.get("LD_PRELOAD", "")))
        for via, names in (("LD_PRELOAD", variable), ("ld.so.preload", self.preload_file)):
            for name in names:
                library = next(self.search(name), None)
                if isinstance(library, SharedObject):
                    yield name, replace(library, via=via)

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
        """Every path at which the loader would look for ``name``, in order, each with how it gets there."""
        if "/" in name:
            return {self._absolute(name, asker): "path"}
        chain, above = [], asker  # what requests it, what loaded that, and so on
        while above is not None:
            chain.append(above)
            above = above.parent
        ways: list[tuple[str, tuple[str, ...]]] = [("LD_LIBRARY_PATH", self.library_path)]
        if self.musl:  # it treats both kinds of run path alike, and they are inherited
            ways += (("RUNPATH", self.run_path(library)) for library in chain)
        elif asker and asker.elf.has_runpath:
            ways.append(("RUNPATH", self.run_path(asker)))
        else:
            every = chain if self.program is None or self.program in chain else (*chain, self.program)
            ways[:0] = [("RPATH", self.run_path(library)) for library in every if not library.elf.has_runpath]
        ordered = [(via, f"{folder.rstrip('/')}/{name}") for via, folders in ways for folder in folders]
        ordered += (("ld.so.cache", path) for path in self.cache.get(name, ()))
        ordered += (("default folder", f"{folder}/{name}") for folder in self.default_folders)
        paths: dict[str, str] = {}
        for via, path in ordered:
            folder = path.rpartition("/")[0]
            hwcaps = self.hwcaps if self.hwcaps and self.host.is_dir(f"{folder}/glibc-hwcaps") else ()
            for file in (*(f"{folder}/glibc-hwcaps/{level}/{name}" for level in hwcaps), path):
                paths.setdefault(file, via)
        return paths

    def run_path(self, library: SharedObject) -> tuple[str, ...]:
        """The folders of its DT_RUNPATH, else of its DT_RPATH, absolute."""
        return self._absolute_folders(elements(library.elf.run_path, ":"), library)

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
        """Whether a file is for a different machine than the program is."""
        return elf.bits != 64 or elf.machine != self.machine


# -- /etc/ld.so.cache --------------------------------------------------------------------------------------------------

_MAGIC = b"glibc-ld.so.cache1.1"
"""Caches from before glibc 2.32 begin with an older format, followed by this one."""
_CACHE_HEADER = Struct("<20sII4xI12x")
_CACHE_ENTRY = Struct("<iIIIQ")
_EXTENSION = Struct("<4I")
_EXTENSION_MAGIC, _HWCAPS = b"\x74\x21\xa4\xea", 1
_BY_HWCAPS = 1 << 62


def read_cache(cache: bytes, machine: str, hwcaps: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
    """Name → paths, in the loader's order; empty without a cache. ``hwcaps`` are the usable subfolders, best first."""
    start = cache.find(_MAGIC)
    if start < 0 or len(cache) < start + _CACHE_HEADER.size:
        return {}
    cache = cache[start:]

    def text(at: int) -> str:
        end = cache.find(b"\0", at, at + LONGEST_NAME)
        return cache[at : max(end, at)].decode("utf-8", "surrogateescape")

    _, count, _, at = _CACHE_HEADER.unpack_from(cache)
    levels = {0: ""}  # ``hwcap`` of an entry, as used since glibc 2.33 → its name; 0 is any processor
    extensions = b""
    if cache[at : at + 4] == _EXTENSION_MAGIC:
        number = min(int.from_bytes(cache[at + 4 : at + 8], "little"), 16)
        extensions = cache[at + 8 : at + 8 + number * _EXTENSION.size]
    for tag, _, offset, size in _EXTENSION.iter_unpack(extensions[: len(extensions) // 16 * 16]):
        if tag == _HWCAPS and offset + size <= len(cache):
            keys = unpack_from(f"<{size // 4}I", cache, offset)
            levels.update({_BY_HWCAPS | number: text(key) for number, key in enumerate(keys)})

    rank = {level: place for place, level in enumerate((*hwcaps, ""))}
    marked = table("machines")["machines"].get(machine, {}).get("cache")
    flags = int(marked, 16) if marked else None
    size = min(count, (len(cache) - _CACHE_HEADER.size) // _CACHE_ENTRY.size) * _CACHE_ENTRY.size
    ranked: dict[str, list[tuple[int, str]]] = {}
    for kind, key, value, _, hwcap in _CACHE_ENTRY.iter_unpack(cache[_CACHE_HEADER.size : _CACHE_HEADER.size + size]):
        if flags in (kind, None) and levels.get(hwcap) in rank:
            ranked.setdefault(text(key), []).append((rank[levels[hwcap]], text(value)))
    return {name: tuple(path for _, path in sorted(paths, key=itemgetter(0))) for name, paths in ranked.items()}


# -- a process ---------------------------------------------------------------------------------------------------------


class Process:
    """A simulated process of the interpreter, with what is preloaded and needed: which file it maps for which name."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        # Name → library: a library is known by its soname, and by every name under which it was requested.
        self.names: dict[str, SharedObject] = {}
        self.files: dict[tuple[int, int], SharedObject] = {}  # (device, inode): no file is mapped twice.
        self.opened: list[SharedObject] = []  # Everything that ``open`` has mapped, even if something was then missing.
        first = [loader.program] if loader.program else []
        for name, library in loader.preloaded():
            first += self._add(name, library)
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
        for asker in objects:
            for name in asker.elf.needed:
                left -= 1
                if name in self.names or left <= 0:
                    continue
                dependency = next(self.loader.search(name, asker), Missing(name, asker))
                if isinstance(dependency, SharedObject):
                    objects += self._add(name, dependency)
                else:
                    missing.append(dependency)
        return missing

    def _add(self, name: str, new: SharedObject) -> list[SharedObject]:
        """Map an object and return it in a list; if its file is already mapped, add the name and return no object."""
        mapped = self.files.setdefault(new.elf.identity, new)
        for alias in filter(None, (name, mapped.elf.soname)):
            self.names.setdefault(alias, mapped)
        return [new] if mapped is new else []
