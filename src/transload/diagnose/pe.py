"""Windows DLLs without loading them: what PE files contain, and which of them Windows would load with torch.

Every loop is bounded. What cannot be read is an ``Unknown``; nothing here raises for the contents of a file.
"""

from __future__ import annotations

import ntpath
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from struct import Struct, unpack

from transload.frozen import replace
from transload.machine import Unknown

from .binary import LONGEST_NAME, BinaryFile, MalformedError, fatbins, with_file
from .host import Host

_DOS = Struct("<2s58xI")  # magic, offset of the PE header
_COFF = Struct("<4s2H12xH2x")  # magic, machine, count of sections; size of the optional header
_OPTIONAL = Struct("<H2B104xI")  # magic, version of the linker; count of directories. The directories follow.
_DIRECTORY = Struct("<2I")
_SECTION = Struct("<8s4I12xI")  # name, size and address in memory, size and offset in the file; flags
_IMPORT, _DELAYED = Struct("<I8x2I"), Struct("<2I8xI12x")  # thunks, name, thunks after loading; flags, name, thunks
_EXPORTS = Struct("<16x6I")  # first ordinal, counts of functions and of names; addresses of functions, names, ordinals
_RESOURCES, _RESOURCE = Struct("<12x2H"), Struct("<2I")  # entries with a name, with a number; the entry: name, place

_MACHINES = {0x8664: "x64", 0x14C: "x86", 0xAA64: "ARM64", 0x1C4: "ARM"}
_PLUS = 0x20B  # PE32+, for 64 bits
_EXPORT_TABLE, _IMPORT_TABLE, _RESOURCE_TABLE, _DELAYED_TABLE = 0, 1, 2, 13
_WRITABLE = 1 << 31
_FATBINS = (b".nv_fatb", b"__nv_rel")  # .nv_fatbin and __nv_relfatbin, cut at the eight bytes of a name
_BY_ORDINAL = 1 << 63
_VERSION, _FIXED = 16, b"\xbd\x04\xef\xfe"  # the kind of resource, and how its fixed part begins

# A file may claim any count. These limits are far above what linkers write, and cheap to reach.
_MOST_SECTIONS = 96  # the limit of Windows
_MOST_IMPORTS = 4096
_MOST_FUNCTIONS = 1 << 16  # an export has a 16-bit ordinal, so no library has more
_MOST_RESOURCES = 4096
_LONGEST_NAMES = 1 << 25  # torch_cpu.dll has 10 MB of names
_LONGEST_VERSION = 1 << 16


@dataclass(frozen=True, slots=True)
class Pe:
    """What Windows reads from a library or program. Of one with 32 bits only ``machine`` and ``bits`` are read."""

    path: str
    machine: str  # ``x64``, ``ARM64``, ``x86`` …
    bits: int = 64
    linker: str = ""  # Its version, which is that of Visual C++: ``14.44``.
    needed: tuple[str, ...] = ()  # The libraries that are loaded with it.
    delayed: tuple[str, ...] = ()  # The libraries that are loaded when they are first used.
    private: int = 0  # Bytes of its writable sections, which every process that loads it must be able to store.
    directories: tuple[tuple[int, int], ...] = field(default=(), repr=False)  # (address, size)
    sections: tuple[tuple[int, int, int], ...] = field(default=(), repr=False)
    """(address, offset, size) of each part that is mapped from the file."""
    fatbins: tuple[tuple[int, int], ...] = field(default=(), repr=False)
    """(offset, size) of each part with code for NVIDIA cards."""

    def offset(self, address: int) -> int:
        """The offset in the file of what is at an address; -1 if nothing is."""
        return next((at + address - start for start, at, size in self.sections if start <= address < start + size), -1)

    def directory(self, index: int) -> tuple[int, int]:
        """The address and size of a table; zeros if there is none."""
        return self.directories[index] if index < len(self.directories) else (0, 0)

    @with_file
    def functions(self, file: BinaryFile, of: str) -> tuple[str, ...]:
        """The functions that it needs of a library, by name, or as ``#12`` by number; not those that are delayed."""
        found: list[str] = []
        for thunks, name, loaded in self.rows(file, _IMPORT_TABLE, _IMPORT):
            if file.c_string(self.offset(name)).lower() == of.lower():
                entries = self._thunks(file, thunks or loaded)
                names = self._texts(file, [address + 2 for address in entries if not address & _BY_ORDINAL])
                found += (f"#{entry & 0xFFFF}" if entry & _BY_ORDINAL else next(names) for entry in entries)
        return tuple(found)

    @with_file
    def not_exported(self, file: BinaryFile, wanted: Collection[str]) -> tuple[str, ...]:
        """Those of ``wanted``, names or ``#12``, that it does not export."""
        address, size = self.directory(_EXPORT_TABLE)
        start = self.offset(address)
        if not address or start < 0:
            return tuple(wanted)
        base, functions, count, _, names, _ = _EXPORTS.unpack(file.read_exactly(start, _EXPORTS.size))
        numbers = range(base, base + min(functions, _MOST_FUNCTIONS))
        # Linkers put the names in one place, one after the other: a quick search finds nearly all.
        texts = {*file.read(start, min(size, _LONGEST_NAMES)).split(b"\0")}
        left = [
            name
            for name in wanted
            if (
                int(name[1:]) not in numbers if name[0] == "#" else name.encode("utf-8", "surrogateescape") not in texts
            )
        ]
        if any(not name.startswith("#") for name in left):
            length = 4 * min(count, _MOST_FUNCTIONS)
            places = unpack(f"<{length // 4}I", file.read_exactly(self.offset(names), length))
            every = {*self._texts(file, places)}
            left = [name for name in left if name not in every]
        return tuple(left)

    @with_file
    def version(self, file: BinaryFile) -> str:
        """The version in its resources: ``14.29.30133.0``; empty if it states none."""
        base, size = self.directory(_RESOURCE_TABLE)
        start, at = self.offset(base), 0
        if not base or start < 0:
            return ""
        for level in range(3):  # kind, name, language
            named, numbered = _RESOURCES.unpack(file.read_exactly(start + at, _RESOURCES.size))
            count = min(named + numbered, _MOST_RESOURCES)
            table = file.read_exactly(start + at + _RESOURCES.size, count * _RESOURCE.size)
            places = (place for name, place in _RESOURCE.iter_unpack(table) if level or name == _VERSION)
            place = next(places, -1)
            if place < 0:
                return ""
            at = place & 0x7FFFFFFF
        address, size = _DIRECTORY.unpack(file.read_exactly(start + at, _DIRECTORY.size))
        data = file.read(self.offset(address), min(size, _LONGEST_VERSION))
        fixed = data.find(_FIXED)
        if not 0 <= fixed <= len(data) - 16:
            return ""
        minor, major, revision, build = unpack("<4H", data[fixed + 8 : fixed + 16])
        return f"{major}.{minor}.{build}.{revision}"

    @with_file
    def architectures(self, file: BinaryFile) -> dict[str, int]:
        """The architectures of its code for NVIDIA cards, as ``binary.fatbins`` returns them."""
        return fatbins(file, self.fatbins)

    def rows(self, file: BinaryFile, index: int, layout: Struct) -> Iterator[tuple[int, ...]]:
        """The rows of a table of libraries, up to the one without a name."""
        address = self.directory(index)[0]
        at = self.offset(address) if address else -1
        data = file.read(at, layout.size * _MOST_IMPORTS) if at >= 0 else b""
        for row in layout.iter_unpack(data[: len(data) // layout.size * layout.size]):
            if not row[1]:
                return
            yield row

    def _thunks(self, file: BinaryFile, address: int) -> list[int]:
        data = file.read(self.offset(address), 8 * _MOST_FUNCTIONS)
        entries = unpack(f"<{len(data) // 8}Q", data[: len(data) // 8 * 8])
        return list(entries[: entries.index(0)] if 0 in entries else entries)

    def _texts(self, file: BinaryFile, addresses: Collection[int]) -> Iterator[str]:
        """The texts at some addresses, with one read if they are close together, as linkers place them."""
        if not addresses:
            return
        low, high = min(addresses), max(addresses)
        start = self.offset(low)
        block = file.read(start, high - low + LONGEST_NAME) if high - low < _LONGEST_NAMES else b""
        together = self.offset(high) == start + high - low
        for address in addresses:
            end = block.find(b"\0", address - low) if together else -1
            text = block[address - low : end].decode("utf-8", "surrogateescape") if end >= 0 else ""
            yield text or file.c_string(self.offset(address))


@with_file
def read_pe(path: str, file: BinaryFile) -> Pe:
    """Read the PE file at a real path, or say why it cannot be read, such as ``not a Windows library``."""
    head = file.read(0, _DOS.size)
    if head[:2] != b"MZ" or len(head) < _DOS.size:
        raise MalformedError("empty" if not head else "not a Windows library")
    start = _DOS.unpack(head)[1]
    coff = file.read(start, _COFF.size)
    if coff[:4] != b"PE\0\0" or len(coff) < _COFF.size:
        why = f"cut off after {file.size} bytes" if start + _COFF.size > file.size else "not a Windows library"
        raise MalformedError(why)
    _, number, count, size = _COFF.unpack(coff)
    machine = _MACHINES.get(number, f"PE machine {number:#x}")
    optional = file.read(start + _COFF.size, size)
    if int.from_bytes(optional[:2], "little") != _PLUS:
        return Pe(path, machine, 32)
    if len(optional) < _OPTIONAL.size or count > _MOST_SECTIONS:
        raise MalformedError("its header is damaged")
    _, major, minor, directories = _OPTIONAL.unpack_from(optional)
    rows = optional[_OPTIONAL.size : _OPTIONAL.size + min(directories, 16) * _DIRECTORY.size]
    parts = list(_SECTION.iter_unpack(file.read_exactly(start + _COFF.size + size, count * _SECTION.size)))
    end = max((offset + length for _, _, _, length, offset, _ in parts if length), default=0)
    if end > file.size:  # Windows refuses it
        raise MalformedError(f"cut off after {file.size} of {end} bytes")
    pe = Pe(
        *(path, machine, 64),
        linker=f"{major}.{minor:02}",
        private=sum(size for _, size, *_, flags in parts if flags & _WRITABLE),
        directories=tuple(_DIRECTORY.iter_unpack(rows[: len(rows) // _DIRECTORY.size * _DIRECTORY.size])),
        sections=tuple((address, offset, min(size, length) or length) for _, size, address, length, offset, _ in parts),
        fatbins=tuple((offset, min(size, length)) for name, size, _, length, offset, _ in parts if name in _FATBINS),
    )
    needed = (file.c_string(pe.offset(name)) for _, name, _ in pe.rows(file, _IMPORT_TABLE, _IMPORT))
    delayed = (file.c_string(pe.offset(name)) for _, name, _ in pe.rows(file, _DELAYED_TABLE, _DELAYED))
    return replace(pe, needed=tuple(needed), delayed=tuple(delayed))


def file_version(path: str) -> str:
    """The version in the resources of the file at a real path; empty if it states none, or cannot be read."""
    pe = read_pe(path)
    return (pe.version() or "") if isinstance(pe, Pe) else ""


# -- the search of Windows ---------------------------------------------------------------------------------------------
# Python and torch load a library with LOAD_LIBRARY_SEARCH_DEFAULT_DIRS and LOAD_LIBRARY_SEARCH_DLL_LOAD_DIR: what it
# needs is then looked for in its own folder, in that of the program, in those of os.add_dll_directory, whose order is
# not defined, and in System32, but not in PATH. Without these flags: in the folder of the program, in System32, in the
# folder of Windows, in the current directory and in PATH. Names that are loaded already are not looked for, those of
# KnownDLLs only in System32, and those of API sets, which are no files, nowhere. Windows skips a file for another
# machine, but stops at a broken one.

RUNTIME = re.compile(r"(?:vcruntime140|msvcp140|concrt140|vccorlib140|vcomp140)\w*\.dll")
"""The libraries of the Visual C++ runtime, in lower case."""
SYSTEM, TORCH_LIB = "System32", "torch\\lib"
PROGRAM = "the folder of python.exe"
_API_SETS = ("api-ms-win-", "ext-ms-")
_KNOWN_DLLS = "HKLM/SYSTEM/CurrentControlSet/Control/Session Manager/KnownDLLs"
_MACHINE_NAMES = {"AMD64": "x64", "x86_64": "x64"}
_MOST_NAMES = 10_000
"""The most names looked up for one library: torch needs a hundred, and a malicious file could list any number."""

Folder = tuple[str, str]
"""The step of the search, such as ``PATH: C:\\tools``, and the folder itself."""


@dataclass(frozen=True, slots=True)
class Dll:
    """A library that a process needs, and what Windows finds for it. What is part of Windows is not read."""

    name: str
    path: str = ""  # Empty if it is not found.
    via: str = ""
    needed_by: str = ""  # The name of the library that needs it.
    pe: Pe | None = None
    problem: str = ""  # Why the file cannot be loaded.


class DllProcess:
    """A simulated process of a program on Windows: which file it loads for which name."""

    def __init__(self, host: Host, program: str) -> None:
        self.host = host
        variables = {name.lower(): value for name, value in host.environ.items()}
        windows = host.slashed(variables.get("systemroot", "C:/Windows")).rstrip("/")
        self.system: Folder = (SYSTEM, f"{windows}/{SYSTEM}")
        self.program: Folder = (PROGRAM, program.rpartition("/")[0])
        local = [folder for folder in host.search_path() if not folder.startswith("//")]  # a server may not answer
        self.path = [(f"PATH: {ntpath.normpath(folder)}", folder) for folder in local]
        here = ("the current directory", host.cwd)
        self.without_flags: list[Folder] = [self.program, self.system, ("the folder of Windows", windows), here]
        known = host.registry(_KNOWN_DLLS)
        self.known = {str(name).lower() for name in known.values.values()} if known else set()
        self._listings: dict[str, dict[str, str]] = {}
        self.unread: list[str] = []  # Folders that may not be listed: what is not found may be there.
        self._read: dict[str, Pe | Unknown] = {}
        first = self.read(program)
        self.machine = first.machine if first else _MACHINE_NAMES.get(host.uname[2], host.uname[2])
        self.loaded: dict[str, Dll] = {}  # By name, in lower case.
        self.open(program, [*self.without_flags, *self.path])

    def read(self, path: str) -> Pe | Unknown:
        """The file at a path of the host."""
        if path not in self._read:
            self._read[path] = read_pe(self.host.real(path))
        return self._read[path]

    def files(self, folder: str) -> dict[str, str]:
        """The files in a folder: their names in lower case, and their paths."""
        if folder not in self._listings:
            names = self.host.listdir(folder)
            self._listings[folder] = {name.lower(): f"{folder}/{name}" for name in names or ()}
            if isinstance(names, Unknown) and self.host.is_dir(folder):
                self.unread.append(folder)
        return self._listings[folder]

    def find(self, name: str, folders: Sequence[Folder], needed_by: str = "") -> Dll:
        """What Windows finds for a name in these folders."""
        key, foreign = name.lower(), Dll(name, needed_by=needed_by)
        for via, folder in [self.system] if key in self.known else folders:
            path = self.files(folder).get(key, "")
            if path and via == SYSTEM and not RUNTIME.fullmatch(key):
                return Dll(name, path, via, needed_by)
            if path:
                dll = self._examined(Dll(name, path, via, needed_by))
                if not (dll.pe and dll.problem):
                    return dll
                foreign = foreign if foreign.path else dll
        return foreign

    def open(self, path: str, folders: Sequence[Folder], via: str = "path") -> list[Dll]:
        """Load a file and what it needs, breadth first, and return what cannot be loaded: then nothing is loaded."""
        loaded, failed = dict(self.loaded), []
        queue = [self._examined(Dll(path.rpartition("/")[2], path, via))]
        self.loaded.setdefault(queue[0].name.lower(), queue[0])
        for dll in queue:
            if dll.problem or not dll.path:
                failed.append(dll)
                continue
            for name in dll.pe.needed if dll.pe else ():
                key = name.lower()
                if key not in self.loaded and not key.startswith(_API_SETS) and len(queue) < _MOST_NAMES:
                    self.loaded[key] = self.find(name, folders, dll.name)
                    queue.append(self.loaded[key])
        if failed:
            self.loaded = loaded
        return failed

    def _examined(self, dll: Dll) -> Dll:
        pe = self.read(dll.path)
        if isinstance(pe, Unknown):
            return replace(dll, problem=pe.reason)
        return replace(dll, pe=pe, problem="" if pe.machine == self.machine else f"for another machine ({pe.machine})")
