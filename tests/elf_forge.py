"""Builders of ELF64 shared libraries, without a compiler. The real loader loads them, whatever they require of it.

``tests/fake_driver.py`` builds the machine code of their functions, and the libraries of a driver.
"""

from __future__ import annotations

import _ctypes
import ctypes
import platform
import struct
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, chain
from pathlib import Path
from types import MappingProxyType

MACHINES = {"x86_64": (62, 6), "aarch64": (183, 1025)}
"""The ELF number of a machine, and of its GLOB_DAT relocation, which makes the loader store the address of a symbol."""

NATIVE = {"AMD64": "x86_64", "ARM64": "aarch64"}.get(platform.machine(), platform.machine())
"""The machine that the tests run on: only libraries for it can be loaded."""
LOADABLE = sys.platform == "linux" and NATIVE in MACHINES
"""Whether the loader of this machine can load what ``library()`` builds."""

HEADER = struct.Struct("<4s5B7xHHIQQQIHHHHHH")
PROGRAM = struct.Struct("<IIQQQQQQ")
SECTION = struct.Struct("<IIQQQQIIQQ")
SYMBOL = struct.Struct("<IBBHQQ")
RELA = struct.Struct("<QQq")
VERNEED, VERNAUX = struct.Struct("<HHIII"), struct.Struct("<IHHII")
VERDEF = struct.Struct("<HHHHIII" + "II")  # with its only name

PAGE = 0x10000
"""The largest page size of these machines: a segment aligned to it can be mapped on any of them."""

GLOBAL, WEAK = 0x12, 0x20
TEXT = 1
"""The index of ``.text``, which is the first section."""


@dataclass(frozen=True)
class Function:
    """Position-independent code for every machine, so that bodies can be concatenated."""

    x86_64: bytes
    aarch64: bytes

    def __add__(self, then: Function) -> Function:
        return Function(self.x86_64 + then.x86_64, self.aarch64 + then.aarch64)


@dataclass(frozen=True)
class Symbol:
    """A dynamic symbol; ``file`` is the library that must provide the version, empty for a symbol defined here."""

    name: str
    version: str = ""
    file: str = ""
    hidden: bool = False
    info: int = GLOBAL
    code: bytes = b""

    @classmethod
    def export(cls, name: str, code: bytes) -> Symbol:
        bare_name, _, version = name.partition("@")
        hidden = bool(version) and not version.startswith("@")
        return cls(bare_name, version.removeprefix("@"), hidden=hidden, code=code)

    @classmethod
    def undefined(cls, name: str, info: int) -> Symbol:
        bare_name, version, file = (*name.split("@"), "", "")[:3]
        return cls(bare_name, version, file or version, info=info)


@dataclass(frozen=True)
class Section:
    name: str
    kind: int
    body: bytes
    link: str = ""
    info: int = 0
    entry: int = 0
    writable: bool = False


class Strings:
    """A string table: a call returns the offset of a text, which is added if it is not there yet."""

    def __init__(self) -> None:
        self.body = b"\0"

    def __call__(self, text: str) -> int:
        raw = text.encode() + b"\0"
        if raw not in self.body:
            self.body += raw
        return self.body.index(raw)


@dataclass(frozen=True)
class Dynamic:
    """What the loader reads of a library: the dynamic section and the tables that it refers to."""

    relocation: int
    texts: Sequence[tuple[int, str]]
    imports: Sequence[Symbol]
    exports: Sequence[Symbol]
    extra: Sequence[Section]
    init: str
    versions: dict[tuple[str, str], int] = field(init=False, default_factory=dict)
    """The index of every (file, version)."""

    def __post_init__(self) -> None:
        for symbol in sorted((*self.exports, *self.imports), key=lambda symbol: symbol.file):
            if symbol.version:
                self.versions.setdefault((symbol.file, symbol.version), len(self.versions) + 2)

    def sections(self, at: Mapping[str, int]) -> list[Section]:
        """All sections, given the address of each; their sizes do not depend on it."""
        names = Strings()
        first = [
            Section(".text", 1, b"".join(symbol.code for symbol in self.exports)),
            Section(".hash", 5, self.hash(), ".dynsym", entry=4),
            Section(".dynsym", 11, b"".join(self.symbols(names, at)), ".dynstr", 1, SYMBOL.size),
            *self.version_sections(names),
            Section(".rela.dyn", 4, self.relocations(at), ".dynsym", entry=RELA.size),
            *self.extra,
        ]
        entries = self.entries(names, at)  # last, because it contains the size of the string table
        return [
            *first,
            Section(".dynstr", 3, names.body),
            Section(".dynamic", 6, entries, ".dynstr", entry=16, writable=True),
            Section(".got", 1, bytes(8 * len(self.imports)), entry=8, writable=True),
        ]

    def hash(self) -> bytes:
        """A hash table of one bucket, with every symbol in its chain."""
        count = len(self.imports) + len(self.exports) + 1
        links = [0, *range(2, count), 0][:count]
        return struct.pack(f"<3I{count}I", 1, count, int(count > 1), *links)

    def symbols(self, names: Strings, at: Mapping[str, int]) -> Iterator[bytes]:
        yield bytes(SYMBOL.size)
        for symbol in self.imports:
            yield SYMBOL.pack(names(symbol.name), symbol.info, 0, 0, 0, 0)
        for symbol, start in self.starts(at):
            yield SYMBOL.pack(names(symbol.name), symbol.info, 0, TEXT, start, len(symbol.code))

    def starts(self, at: Mapping[str, int]) -> Iterator[tuple[Symbol, int]]:
        """Every export with its address."""
        ends = accumulate((len(symbol.code) for symbol in self.exports), initial=at[".text"])
        return zip(self.exports, ends, strict=False)

    def relocations(self, at: Mapping[str, int]) -> bytes:
        """A relocation for every import: the loader looks up only symbols that are relocated."""
        slots = range(len(self.imports))
        return b"".join(RELA.pack(at[".got"] + 8 * slot, (slot + 1) << 32 | self.relocation, 0) for slot in slots)

    def entries(self, names: Strings, at: Mapping[str, int]) -> bytes:
        pairs = [(tag, names(text)) for tag, text in self.texts]
        pairs += [(4, at[".hash"]), (5, at[".dynstr"]), (6, at[".dynsym"]), (10, len(names.body)), (11, SYMBOL.size)]
        pairs += [(12, start) for symbol, start in self.starts(at) if symbol.name == self.init]
        if self.imports:
            pairs += [(7, at[".rela.dyn"]), (8, RELA.size * len(self.imports)), (9, RELA.size)]
        if self.versions:
            pairs += [(0x6FFFFFF0, at[".gnu.version"])]
        if required := len(self.required_versions()):
            pairs += [(0x6FFFFFFE, at[".gnu.version_r"]), (0x6FFFFFFF, required)]
        if defined := len(self.defined_versions()):
            pairs += [(0x6FFFFFFC, at[".gnu.version_d"]), (0x6FFFFFFD, defined)]
        return struct.pack(f"<{2 * len(pairs) + 2}Q", *chain(*pairs), 0, 0)

    # -- symbol versions

    def required_versions(self) -> dict[str, dict[str, int]]:
        """The versions required of each file, with their indexes."""
        files: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for (file, version), index in self.versions.items():
            if file:
                files[file][version] = index
        return dict(files)

    def defined_versions(self) -> list[tuple[str, int]]:
        """The versions defined here, with their indexes, after the name of the library, which counts as the first."""
        defined = [(version, index) for (file, version), index in self.versions.items() if not file]
        return [(dict(self.texts).get(14, ""), 1), *defined] if defined else []

    def version_sections(self, names: Strings) -> Iterator[Section]:
        if not self.versions:
            return
        indexes = [self.versions.get((s.file, s.version), 1) | s.hidden << 15 for s in (*self.imports, *self.exports)]
        yield Section(".gnu.version", 0x6FFFFFFF, struct.pack(f"<{len(indexes) + 1}H", 0, *indexes), ".dynsym", entry=2)
        if required := self.required_versions():
            yield Section(".gnu.version_r", 0x6FFFFFFE, verneed(required, names), ".dynstr", len(required))
        if defined := self.defined_versions():
            yield Section(".gnu.version_d", 0x6FFFFFFD, verdef(defined, names), ".dynstr", len(defined))


def elf_hash(name: str) -> int:
    """The hash function of the System V ABI, which entries of versions contain."""
    value = 0
    for byte in name.encode():
        value = (value << 4) + byte
        value = (value ^ (value & 0xF0000000) >> 24) & 0x0FFFFFFF
    return value


def verneed(required: Mapping[str, Mapping[str, int]], names: Strings) -> bytes:
    body = b""
    for file, versions in required.items():
        size = VERNEED.size + VERNAUX.size * len(versions)
        body += VERNEED.pack(1, len(versions), names(file), VERNEED.size, 0 if file == [*required][-1] else size)
        for version, index in versions.items():
            following = 0 if version == [*versions][-1] else VERNAUX.size
            body += VERNAUX.pack(elf_hash(version), 0, index, names(version), following)
    return body


def verdef(defined: Sequence[tuple[str, int]], names: Strings) -> bytes:
    return b"".join(
        VERDEF.pack(1, index == 1, index, 1, elf_hash(version), 20, VERDEF.size * (at != 1), names(version), 0)
        for at, (version, index) in zip(range(len(defined), 0, -1), defined, strict=True)
    )


# -- the ELF file ------------------------------------------------------------------------------------------------------


def library(
    *,
    soname: str = "",
    needed: Sequence[str] = (),
    rpath: str = "",
    runpath: str = "",
    functions: Mapping[str, Function] = MappingProxyType({}),
    undefined: Sequence[str] = (),
    weak: Sequence[str] = (),
    sections: Mapping[str, bytes] = MappingProxyType({}),
    init: str = "",
    machine: str = NATIVE,
    section_headers: bool = True,
) -> bytes:
    """A shared library.

    A function is exported as ``name``, as ``name@@VERSION``, or as ``name@VERSION`` if that is not the default version.
    An undefined symbol is ``name``, ``name@VERSION@FILE``, or ``name@VERSION`` if the version has the name of the file,
    as in NVIDIA's libraries. ``init`` names the function that runs when the library is loaded.
    """
    number, relocation = MACHINES[machine]
    texts = [*((1, name) for name in needed), (14, soname), (15, rpath), (29, runpath)]
    dynamic = Dynamic(
        relocation,
        [(tag, text) for tag, text in texts if text],
        [*(Symbol.undefined(name, GLOBAL) for name in undefined), *(Symbol.undefined(name, WEAK) for name in weak)],
        [Symbol.export(name, getattr(body, machine)) for name, body in functions.items()],
        [Section(name, 1, body) for name, body in sections.items()],
        init,
    )
    at = {section.name: address for section, _, address in placed(dynamic.sections(defaultdict(int)))}
    return image(number, list(placed(dynamic.sections(at))), section_headers=section_headers)


def placed(sections: Iterable[Section]) -> Iterator[tuple[Section, int, int]]:
    """Every section with its offset and its address; writable ones come last, and one page further in memory."""
    offset = HEADER.size + 4 * PROGRAM.size
    for section in sections:
        offset = aligned(offset)
        yield section, offset, offset + PAGE * section.writable
        offset += len(section.body)


def aligned(offset: int) -> int:
    return -(-offset // 16) * 16


def image(number: int, sections: Sequence[tuple[Section, int, int]], *, section_headers: bool) -> bytes:
    body = bytearray(HEADER.size) + b"".join(programs(sections))
    for section, offset, _ in sections:
        body += bytes(offset - len(body)) + section.body
    shoff, count = 0, 0
    if section_headers:
        names, headers = section_table(sections, len(body))
        shoff, count = aligned(len(body) + len(names)), len(headers)
        body += names + bytes(shoff - len(body) - len(names)) + b"".join(headers)
    identity = (b"\x7fELF", 2, 1, 1, 0, 0)
    sizes = (HEADER.size, PROGRAM.size, 4, SECTION.size, count, max(count - 1, 0))
    HEADER.pack_into(body, 0, *identity, 3, number, 1, 0, HEADER.size, shoff, 0, *sizes)
    return bytes(body)


def programs(sections: Sequence[tuple[Section, int, int]]) -> Iterator[bytes]:
    """Program headers: code and read-only data, writable data, the dynamic section, a stack that is not executable."""
    split, address = next((offset, address) for section, offset, address in sections if section.writable)
    last, offset, _ = sections[-1]
    size = offset + len(last.body) - split
    yield PROGRAM.pack(1, 5, 0, 0, 0, split, split, PAGE)
    yield PROGRAM.pack(1, 6, split, address, address, size, size, PAGE)
    size = next(len(section.body) for section, _, _ in sections if section.name == ".dynamic")
    yield PROGRAM.pack(2, 6, split, address, address, size, size, 8)
    yield PROGRAM.pack(0x6474E551, 6, 0, 0, 0, 0, 0, 16)


def section_table(sections: Sequence[tuple[Section, int, int]], end: int) -> tuple[bytes, list[bytes]]:
    """The names of the sections, to be placed at ``end``, and their headers."""
    names, headers = Strings(), [bytes(SECTION.size)]
    order = ["", *(section.name for section, _, _ in sections)]
    for section, offset, address in sections:
        flags = 2 | section.writable | 4 * (section.name == ".text")
        link = order.index(section.link)
        span = (names(section.name), section.kind, flags, address, offset, len(section.body))
        headers.append(SECTION.pack(*span, link, section.info, 16, section.entry))
    own_name = names(".shstrtab")
    headers.append(SECTION.pack(own_name, 3, 0, 0, end, len(names.body), 0, 0, 1, 0))
    return names.body, headers


@contextmanager
def loaded(path: Path) -> Iterator[ctypes.CDLL]:
    """Load the library into this process; close it at the end, or a later request for its soname would get this one."""
    handle = ctypes.CDLL(str(path))
    try:
        yield handle
    finally:
        _ctypes.dlclose(handle._handle)


# -- fatbins: the code for GPUs ----------------------------------------------------------------------------------------


PTX, CUBIN, LTO = 1, 2, 8
VARIANTS = {"": 0, "a": 1 << 20, "f": 1 << 21}
"""Flags of an entry whose code is for one architecture only (sm_90a), or for one family (sm_100f)."""


def fatbin(entries: Sequence[tuple[int, int | str, bytes]]) -> bytes:
    """A container of (kind, architecture, payload), as in ``.nv_fatbin`` and ``__nv_relfatbin``.

    The architecture is a number, or a string such as ``"90a"``.
    """
    body = b"".join(fatbin_entry(kind, str(sm), payload) for kind, sm, payload in entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def fatbin_entry(kind: int, sm: str, payload: bytes) -> bytes:
    number = sm.rstrip("af")
    flags = 0x11 | VARIANTS[sm[len(number) :]]
    payload += bytes(-len(payload) % 8)
    options = struct.pack("<QQ", 72, 0) if kind == PTX else b""
    minor, major = (0, 9) if kind == PTX else (8, 1)  # version of the PTX, or of the cubin format
    start = struct.pack("<HHIQ", kind, 0x101, 64 + len(options), len(payload))
    rest = struct.pack("<IIHHIQQQQ", 0, len(options) and 64, minor, major, int(number), 0, flags, 0, 0)
    return start + rest + options + payload
