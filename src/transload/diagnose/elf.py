"""ELF files as the loader sees them: for which processor they are, what they need, where they say to look for it.

Files are read by place, never as a whole and never mapped: libraries have hundreds of megabytes, and a mapped file
that shrinks kills its reader. Every offset is compared with the file before it is used, and every loop has an end of
its own. What cannot be read is an ``Unknown``; nothing here raises for what a file may hold.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from struct import Struct
from typing import TypeVar

from transload.machine import Unknown

from .host import reason

__all__ = ["BrokenError", "Elf", "File", "asked", "contents", "read_elf", "sections"]

_T = TypeVar("_T")

_MACHINES: dict[int, str] = {
    3: "i386",
    21: "ppc64le",
    22: "s390x",
    40: "arm",
    62: "x86_64",
    183: "aarch64",
    243: "riscv64",
    258: "loongarch64",
}

_HEADER = Struct("<16x2H I3Q I6H")
_PROGRAM = Struct("<2I6Q")
_SECTION = Struct("<2I4Q2I2Q")
_DYNAMIC = Struct("<qQ")

_LOAD, _DYNAMIC_SEGMENT, _INTERPRETER = 1, 2, 3
_NEEDED, _STRINGS, _SONAME, _RPATH, _RUNPATH, _FLAGS_1 = 1, 5, 14, 15, 29, 0x6FFFFFFB
_NODEFLIB = 0x800
_NOBITS = 8

# A file may claim any number of anything. These are far above what linkers write, and harmless to go through.
_MOST_PROGRAMS = 512
_MOST_DYNAMIC = 4096
_LONGEST_NAME = 4096
_MOST_READS = 1 << 18  # half a second of them; the fatbins of libtorch_cuda take four thousand


def _seek_and_read(descriptor: int, size: int, offset: int) -> bytes:
    os.lseek(descriptor, offset, os.SEEK_SET)
    return os.read(descriptor, size)


_pread: Callable[[int, int, int], bytes] = getattr(os, "pread", _seek_and_read)  # which Windows lacks


class BrokenError(Exception):
    """What a file says does not fit the file. It never leaves ``asked``."""


class File:
    """A regular file to be read by place. What is asked for and is not there is a ``BrokenError``."""

    def __init__(self, path: str) -> None:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe or a device could wait for ever
            raise BrokenError("not a regular file")
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
        status = os.fstat(self.descriptor)
        self.size, self.identity = status.st_size, (status.st_dev, status.st_ino)
        self.reads = 0
        with suppress(AttributeError, OSError):  # else the system reads on ahead: half of libtorch_cuda for its headers
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def close(self) -> None:
        """Give the file back."""
        os.close(self.descriptor)

    def some(self, offset: int, size: int) -> bytes:
        """At most ``size`` bytes: fewer at the end of the file, none outside it."""
        if not 0 <= offset < self.size:
            return b""
        self.reads += 1
        if self.reads > _MOST_READS:
            raise BrokenError("it has too many parts")
        return _pread(self.descriptor, min(size, self.size - offset), offset)

    def at(self, offset: int, size: int) -> bytes:
        """Exactly ``size`` bytes."""
        data = self.some(offset, size)
        if len(data) != size:
            raise BrokenError(f"cut off: {size} bytes should stand at {offset}, and the file has {self.size}")
        return data

    def text(self, offset: int) -> str:
        """The text up to the next NUL."""
        for size in (128, _LONGEST_NAME):
            text, end, _ = self.some(offset, size).partition(b"\0")
            if end:
                return text.decode("utf-8", "surrogateescape")
        raise BrokenError(f"a name at {offset} has no end")


def asked(path: str, question: Callable[[File], _T]) -> _T | Unknown:
    """The answer of ``question`` to the opened file, or why there is none."""
    try:
        file = File(path)
        try:
            return question(file)
        finally:
            file.close()
    except BrokenError as error:
        return Unknown(str(error))
    except (OSError, ValueError) as error:
        return Unknown(reason(path, error))


@dataclass(frozen=True, slots=True)
class Elf:
    """What a library or program says to the loader. ``path`` is that of the real file.

    Of a file that has not 64 bits, or the other byte order, no more than ``machine`` and ``bits`` is read.
    """

    path: str
    machine: str
    """As ``uname -m`` names it."""
    bits: int = 64
    little: bool = True
    soname: str = ""
    needed: tuple[str, ...] = ()
    rpath: str = ""
    """The list of folders of DT_RPATH, which counts for this file and for those it brings in."""
    runpath: str = ""
    """The list of DT_RUNPATH, which counts for this file alone."""
    interpreter: str = ""
    """The loader that a program asks for."""
    identity: tuple[int, int] = (0, 0)
    """Device and inode: the same file under whatever name."""
    dynamic: dict[int, int] = field(default_factory=dict, repr=False)
    """Tag → value, the last where a tag is repeated."""
    segments: tuple[tuple[int, int, int], ...] = field(default=(), repr=False)
    """(address, offset, size) of what is mapped from the file."""
    table: tuple[int, int, int] = field(default=(0, 0, 0), repr=False)
    """Offset, count, and index of the names of the section headers."""

    @property
    def has_runpath(self) -> bool:
        """Whether there is a DT_RUNPATH, be it empty: it switches every DT_RPATH off."""
        return _RUNPATH in self.dynamic

    @property
    def no_default(self) -> bool:
        """Whether the system's own folders are not searched for what it needs (``-z nodefaultlib``)."""
        return bool(self.dynamic.get(_FLAGS_1, 0) & _NODEFLIB)

    def offset(self, tag: int) -> int:
        """The place in the file of what the tag points to; -1 where it points to nothing."""
        return _place(self.segments, self.dynamic.get(tag, -1))


def read_elf(path: str) -> Elf | Unknown:
    """What the ELF file at the real path ``path`` says, or why it cannot be read: ``empty``, ``not an ELF file``."""
    return asked(path, lambda file: _read(path, file))


def _read(path: str, file: File) -> Elf:
    head = file.some(0, _HEADER.size)
    if not head:
        raise BrokenError("empty")
    if head[:4] != b"\x7fELF":
        raise BrokenError("not an ELF file")
    if len(head) < _HEADER.size:
        raise BrokenError("cut off within the header")
    bits, little = {1: 32, 2: 64}.get(head[4], 0), head[5] == 1
    number = int.from_bytes(head[18:20], "little" if little else "big")
    machine = _MACHINES.get(number, f"ELF machine {number}")
    if bits != 64 or not little:
        return Elf(path, machine, bits, little, identity=file.identity)
    _, _, _, _, programs, table, _, _, size, count, entry, many, names = _HEADER.unpack(head)
    kinds = tuple(_programs(file, programs, size, count))
    pairs = [
        pair for kind, offset, _, length in kinds if kind == _DYNAMIC_SEGMENT for pair in _dynamic(file, offset, length)
    ]
    segments = tuple((address, offset, length) for kind, offset, address, length in kinds if kind == _LOAD)
    end = max((offset + length for _, offset, length in segments), default=0)
    if end > file.size:  # the loader maps it all the same, and the first touch of what is not there is a SIGBUS
        raise BrokenError(f"cut off after {file.size} of {end} bytes")
    texts = _texts(file, pairs, _place(segments, dict(pairs).get(_STRINGS, -1)))
    return Elf(
        *(path, machine, bits, little),
        soname="".join(texts[_SONAME][:1]),
        needed=tuple(texts[_NEEDED]),
        rpath="".join(texts[_RPATH][:1]),
        runpath="".join(texts[_RUNPATH][:1]),
        interpreter=next((file.text(offset) for kind, offset, *_ in kinds if kind == _INTERPRETER), ""),
        identity=file.identity,
        dynamic=dict(pairs),
        segments=segments,
        table=(table, many if entry == _SECTION.size else 0, names),
    )


def _programs(file: File, offset: int, size: int, count: int) -> Iterator[tuple[int, int, int, int]]:
    """(kind, offset, address, size in the file) of every segment."""
    if size != _PROGRAM.size or not 0 < count <= _MOST_PROGRAMS:
        raise BrokenError("it has no program headers")
    for entry in _PROGRAM.iter_unpack(file.at(offset, size * count)):
        yield entry[0], entry[2], entry[3], entry[5]


def _texts(file: File, pairs: list[tuple[int, int]], strings: int) -> dict[int, list[str]]:
    """Tag → its texts, of the tags whose value is a place among the strings."""
    texts: dict[int, list[str]] = {tag: [] for tag in (_NEEDED, _SONAME, _RPATH, _RUNPATH)}
    for tag, value in pairs if strings >= 0 else ():
        if tag in texts:
            texts[tag].append(file.text(strings + value))
    return texts


def _place(segments: tuple[tuple[int, int, int], ...], address: int) -> int:
    for start, offset, size in segments:
        if start <= address < start + size:
            return offset + address - start
    return -1


def _dynamic(file: File, offset: int, size: int) -> Iterator[tuple[int, int]]:
    data = file.some(offset, min(size, _MOST_DYNAMIC * _DYNAMIC.size))
    for tag, value in _DYNAMIC.iter_unpack(data[: len(data) // _DYNAMIC.size * _DYNAMIC.size]):
        if tag == 0:
            return
        yield tag, value


def sections(elf: Elf, *names: str) -> tuple[tuple[int, int], ...] | Unknown:
    """(offset, size) of the sections of these names that have bytes in the file."""
    return asked(elf.path, lambda file: tuple(_sections(elf, file, [name.encode() + b"\0" for name in names])))


def _sections(elf: Elf, file: File, wanted: list[bytes]) -> Iterator[tuple[int, int]]:
    offset, count, index = elf.table
    if not offset or not count:
        raise BrokenError("it has no section headers")
    if index >= count:
        raise BrokenError("its sections have no names")
    headers = list(_SECTION.iter_unpack(file.at(offset, count * _SECTION.size)))
    strings, size = headers[index][4:6]
    names = file.at(strings, min(size, count * 256))
    for name, kind, _, _, start, length, *_ in headers:
        if kind != _NOBITS and any(names.startswith(each, name) for each in wanted):
            yield start, min(length, max(file.size - start, 0))


def contents(elf: Elf, name: str, limit: int) -> bytes | Unknown:
    """The bytes of a section, at most ``limit`` of them."""

    def read(file: File) -> bytes:
        for start, size in _sections(elf, file, [name.encode() + b"\0"]):
            return file.some(start, min(size, limit))
        raise BrokenError(f"it has no section {name}")

    return asked(elf.path, read)
