"""A builder of Windows DLLs for 64-bit machines, without a compiler. Windows loads them if their imports exist."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

MACHINES = {"x64": 0x8664, "ARM64": 0xAA64, "x86": 0x14C}
PAGE = 0x1000
CODE = b"\x31\xc0\xc3"  # xor eax, eax; ret


class Part:
    """A section in the making: a call appends bytes and returns their address."""

    def __init__(self, address: int) -> None:
        self.address, self.body = address, bytearray()

    def __call__(self, data: bytes, align: int = 8) -> int:
        self.body += bytes(-len(self.body) % align)
        start = self.address + len(self.body)
        self.body += data
        return start


def dll(
    name: str = "forged.dll",
    *,
    imports: Mapping[str, Sequence[str]] = MappingProxyType({}),
    delayed: Sequence[str] = (),
    exports: Sequence[str] = (),
    version: str = "",
    linker: tuple[int, int] = (14, 42),
    machine: str = "x64",
    writable: int = 0,
    fatbins: Mapping[str, bytes] = MappingProxyType({}),
) -> bytes:
    """A DLL. ``imports`` are functions by library, ``#12`` by number; ``writable`` is the size of its data.

    ``fatbins`` are sections with code for a GPU, by name.
    """
    part = Part(PAGE)
    code = part(CODE)
    tables = [(0, 0)] * 16
    if exports:
        tables[0] = exports_of(part, name, sorted(exports), code)
    if imports:
        tables[1] = imports_of(part, imports)
    if version:
        tables[2] = version_of(part, version)
    if delayed:
        rows = b"".join(struct.pack("<8I", 1, part(dep.encode() + b"\0"), *([0] * 6)) for dep in delayed)
        tables[13] = (part(rows + bytes(32)), len(rows) + 32)
    return image(name, part, tables, linker, MACHINES[machine], writable, fatbins)


def exports_of(part: Part, name: str, exports: Sequence[str], code: int) -> tuple[int, int]:
    start = part(bytes(40))
    count = len(exports)
    functions = part(struct.pack(f"<{count}I", *([code] * count)))
    names = part(struct.pack(f"<{count}I", *(part(export.encode() + b"\0", 1) for export in exports)))
    ordinals = part(struct.pack(f"<{count}H", *range(count)))
    own = part(name.encode() + b"\0")
    at = start - part.address
    struct.pack_into("<12x7I", part.body, at, own, 1, count, count, functions, names, ordinals)
    return start, part.address + len(part.body) - start


def imports_of(part: Part, imports: Mapping[str, Sequence[str]]) -> tuple[int, int]:
    rows = b""
    for library, functions in imports.items():
        thunks = [
            1 << 63 | int(function[1:]) if function.startswith("#") else part(b"\0\0" + function.encode() + b"\0", 2)
            for function in functions
        ]
        table = struct.pack(f"<{len(thunks) + 1}Q", *thunks, 0)
        rows += struct.pack("<5I", part(table), 0, 0, part(library.encode() + b"\0"), part(table))
    return part(rows + bytes(20)), len(rows) + 20


def version_of(part: Part, version: str) -> tuple[int, int]:
    major, minor, build, revision = map(int, version.split("."))
    key = "VS_VERSION_INFO\0".encode("utf-16-le")
    fixed = struct.pack("<2I4H36x", 0xFEEF04BD, 0x10000, minor, major, revision, build)
    info = struct.pack("<3H", 6 + len(key) + 2 + len(fixed), len(fixed), 0) + key + b"\0\0" + fixed
    place = part(info)
    # kind 16, name 1, language 1033, each a folder of one entry; then the place of the data
    folders = (
        struct.pack("<12x2H2I", 0, 1, number, at) for number, at in ((16, 24 | 1 << 31), (1, 48 | 1 << 31), (1033, 72))
    )
    body = b"".join(folders) + struct.pack("<4I", place, len(info), 0, 0)
    return part(body), len(body)


def image(
    name: str,
    part: Part,
    tables: Sequence[tuple[int, int]],
    linker: tuple[int, int],
    machine: int,
    writable: int,
    fatbins: Mapping[str, bytes],
) -> bytes:
    body = bytes(part.body) + bytes(-len(part.body) % 512)
    data = PAGE + len(body) + -len(body) % PAGE
    sections = [(b".rdata", len(part.body), PAGE, len(body), 512, 0xE0000020)]  # the loader writes the imports into it
    sections += [(b".data", writable, data, 0, 0, 0xC0000080)] if writable else []
    end = data + writable + -writable % PAGE
    for section, content in fatbins.items():
        padded = content + bytes(-len(content) % 512)
        sections.append((section.encode()[:8], len(content), end, len(padded), 512 + len(body), 0x40000040))
        body += padded
        end += len(padded) + -len(padded) % PAGE
    base = 0x180000000 + (zlib.crc32(name.lower().encode()) & 0x3FFF) * 0x1000000  # no two at one address
    if machine == MACHINES["x86"]:
        optional = struct.pack("<H2B220x", 0x10B, *linker)
    else:
        optional = struct.pack(
            "<H2B5IQ2I6H4I2H4Q2I",
            *(0x20B, *linker, len(body), 0, 0, 0, PAGE),
            *(base, PAGE, 512),
            *(6, 0, 0, 0, 6, 0),
            *(0, end, 512, 0),
            2,
            0x100,
            *(1 << 20, PAGE, 1 << 20, PAGE),
            0,
            16,
        )
        optional += b"".join(struct.pack("<2I", *table) for table in tables)
    head = struct.pack("<2s58xI", b"MZ", 64)
    head += struct.pack("<4s2H3I2H", b"PE\0\0", machine, len(sections), 0, 0, 0, len(optional), 0x2022)
    head += optional + b"".join(struct.pack("<8s4I12xI", *section) for section in sections)
    return head + bytes(512 - len(head)) + body
