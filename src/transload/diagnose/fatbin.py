"""The code for GPUs inside a library: which architectures it was compiled for.

A fatbin is a container with an entry an architecture. Only the payload of an entry is compressed, so its headers, some
dozens of bytes each among megabytes, tell everything.
"""

from __future__ import annotations

from struct import Struct

from transload.machine import Unknown

from .elf import Elf, File, asked, sections

__all__ = ["architectures"]

_CONTAINER = Struct("<I2HQ")  # magic, version, size of this header, size of what follows
_ENTRY = Struct("<2HIQ12xI8xQ")  # kind, -, size of this header, size of the payload; SM number; flags
_MAGIC = 0xBA55ED50
_SECTIONS = (".nv_fatbin", "__nv_relfatbin")
_PREFIX = {1: "compute_", 2: "sm_"}
"""PTX and cubins. Other kinds, such as code for the linker (8), are passed over."""

_ONE_CHIP, _FAMILY = 1 << 20, 1 << 21
_GAP = 4096


def architectures(elf: Elf) -> dict[str, int] | Unknown:
    """Architecture (``sm_90``, ``sm_90a``, ``compute_90``) → how many pieces of code are for it; none is empty.

    The letter ``a`` means code for that chip alone. Code of a family (``sm_103f``) is named as such too.
    """
    places = sections(elf, *_SECTIONS)
    if isinstance(places, Unknown):
        return places
    return asked(elf.path, lambda file: _ordered(_Walk(file, places).found))


def _ordered(found: dict[tuple[str, int, str], int]) -> dict[str, int]:
    order = sorted(found, key=lambda key: (key[0] != "sm_", *key[1:]))
    return {f"{prefix}{number}{suffix}": found[prefix, number, suffix] for prefix, number, suffix in order}


class _Walk:
    """A walk from header to header through sections of a file."""

    def __init__(self, file: File, places: tuple[tuple[int, int], ...]) -> None:
        self.file = file
        self.found: dict[tuple[str, int, str], int] = {}
        for start, size in places:
            self.section(start, start + size)

    def section(self, at: int, end: int) -> None:
        while at + _CONTAINER.size <= end:
            magic, _, header, size = _CONTAINER.unpack(self.file.at(at, _CONTAINER.size))
            if magic == _MAGIC and header >= _CONTAINER.size:
                self.container(at + header, min(at + header + size, end))
                at += header + size
            else:
                at = self.next(at + 1, end)

    def next(self, at: int, end: int) -> int:
        """Where the next container begins: between two there may be padding."""
        while at < end:
            found = self.file.some(at, min(_GAP, end - at)).find(_MAGIC.to_bytes(4, "little"))
            if found >= 0:
                return at + found
            at += _GAP - 4
        return end

    def container(self, at: int, end: int) -> None:
        while at + _ENTRY.size <= end:
            kind, _, header, size, number, flags = _ENTRY.unpack(self.file.at(at, _ENTRY.size))
            if header < _ENTRY.size or not kind:
                return
            if kind in _PREFIX:
                suffix = "a" if flags & _ONE_CHIP else "f" if flags & _FAMILY else ""
                key = (_PREFIX[kind], number, suffix)
                self.found[key] = self.found.get(key, 0) + 1
            at += header + size
