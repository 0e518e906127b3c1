"""ELF files as the dynamic loader sees them, the symbols they exchange, and the GPU code inside them.

Files are read by place, never as a whole and never mapped: libraries have hundreds of megabytes, and a mapped file
that shrinks kills its reader. Every offset is checked against the file before it is used, and every loop is bounded.
What cannot be read is an ``Unknown``; nothing here raises for the contents of a file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import takewhile
from struct import Struct, unpack
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

from transload.machine import Unknown

from .host import reason
from .tables import table

_T = TypeVar("_T")
_P = ParamSpec("_P")
_Subject = TypeVar("_Subject", "Elf", str)

_HEADER = Struct("<16x2H I3Q I6H")
_PROGRAM = Struct("<2I6Q")
_SECTION = Struct("<2I4Q2I2Q")
_DYNAMIC = Struct("<qQ")

_LOAD, _DYNAMIC_SEGMENT, _INTERPRETER = 1, 2, 3
_NEEDED, _STRINGS, _SONAME, _RPATH, _RUNPATH = 1, 5, 14, 15, 29
_NOBITS = 8

# A file may claim any number of anything. These are far above what linkers write, and harmless to go through.
_MOST_PROGRAMS = 512
_MOST_DYNAMIC = 4096
_LONGEST_NAME = 4096
_MOST_READS = 1 << 18  # half a second of them; the fatbins of libtorch_cuda take four thousand


class _BrokenError(Exception):
    """What a file says does not fit the file. It never leaves this module."""


class _File:
    """A regular file to be read by place. What is asked for and is not there is a ``_BrokenError``."""

    def __init__(self, path: str) -> None:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe or a device could block
            raise _BrokenError("not a regular file")
        self.stream = open(path, "rb", buffering=0)  # noqa: SIM115  _opens closes it
        status = os.fstat(self.stream.fileno())
        self.size, self.identity = status.st_size, (status.st_dev, status.st_ino)
        self.reads = 0
        with suppress(AttributeError, OSError):  # else the system reads on ahead: half of libtorch_cuda for its headers
            os.posix_fadvise(self.stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)

    def some(self, offset: int, size: int) -> bytes:
        """At most ``size`` bytes: fewer at the end of the file, none outside it."""
        if not 0 <= offset < self.size:
            return b""
        self.reads += 1
        if self.reads > _MOST_READS:
            raise _BrokenError("it has too many parts")
        self.stream.seek(offset)
        return self.stream.read(min(size, self.size - offset))

    def at(self, offset: int, size: int) -> bytes:
        """Exactly ``size`` bytes."""
        data = self.some(offset, size)
        if len(data) != size:
            raise _BrokenError(f"cut off: {size} bytes should stand at {offset}, and the file has {self.size}")
        return data

    def number(self, offset: int, size: int = 4) -> int:
        """The unsigned number of ``size`` bytes."""
        return int.from_bytes(self.at(offset, size), "little")

    def text(self, offset: int) -> str:
        """The text up to the next NUL."""
        for size in (128, _LONGEST_NAME):
            text, end, _ = self.some(offset, size).partition(b"\0")
            if end:
                return text.decode("utf-8", "surrogateescape")
        raise _BrokenError(f"a name at {offset} has no end")


def _opens(
    question: Callable[Concatenate[_Subject, _File, _P], _T],
) -> Callable[Concatenate[_Subject, _P], _T | Unknown]:
    """Give a question about a path, or an ``Elf``, the opened file; its answer is an ``Unknown`` if that fails."""

    @wraps(question)
    def asked(subject: _Subject, /, *arguments: _P.args, **options: _P.kwargs) -> _T | Unknown:
        path = str(getattr(subject, "path", subject))
        try:
            file = _File(path)
            with file.stream:
                return question(subject, file, *arguments, **options)
        except _BrokenError as error:
            return Unknown(str(error))
        except (OSError, ValueError) as error:
            return Unknown(reason(path, error))

    return asked


@dataclass(frozen=True, slots=True)
class Elf:
    """What a library or program says to the loader. ``path`` is that of the real file.

    Of a file that has not 64 bits, or the other byte order, no more than ``machine`` and ``bits`` is read.
    """

    path: str
    machine: str  # As ``uname -m`` calls it.
    bits: int = 64
    little: bool = True
    soname: str = ""
    needed: tuple[str, ...] = ()
    rpath: str = ""  # The list of folders of DT_RPATH, which counts for this file and for those it brings in.
    runpath: str = ""  # The list of DT_RUNPATH, which counts for this file alone.
    interpreter: str = ""  # The loader that a program asks for.
    identity: tuple[int, int] = (0, 0)  # Device and inode: the same file under whatever name.
    dynamic: dict[int, int] = field(default_factory=dict, repr=False)  # Tag → value, the last where a tag is repeated.
    segments: tuple[tuple[int, int, int], ...] = field(default=(), repr=False)
    """(address, offset, size) of what is mapped from the file."""
    table: tuple[int, int, int] = field(default=(0, 0, 0), repr=False)
    """Offset, count, and index of the names of the section headers."""

    @property
    def has_runpath(self) -> bool:
        """Whether there is a DT_RUNPATH, even an empty one: it turns every DT_RPATH off."""
        return _RUNPATH in self.dynamic

    def offset(self, tag: int) -> int:
        """The place in the file of what the tag points to; -1 where it points to nothing."""
        address = self.dynamic.get(tag, -1)
        return next((at + address - start for start, at, size in self.segments if start <= address < start + size), -1)


@_opens
def read_elf(path: str, file: _File) -> Elf:
    """What the ELF file at the real path ``path`` states, or why it cannot be read: ``empty``, ``not an ELF file``."""
    head = file.some(0, _HEADER.size)
    if head[:4] != b"\x7fELF" or len(head) < _HEADER.size:
        why = "cut off within the header" if head[:4] == b"\x7fELF" else "not an ELF file" if head else "empty"
        raise _BrokenError(why)
    bits, little = {1: 32, 2: 64}.get(head[4], 0), head[5] == 1
    number = int.from_bytes(head[18:20], "little" if little else "big")
    known = (name for name, row in table("machines")["machines"].items() if row["elf"] == number)
    machine = next(known, f"ELF machine {number}")
    if bits != 64 or not little:
        return Elf(path, machine, bits, little, identity=file.identity)
    _, _, _, _, programs, sections, _, _, size, count, entry, many, names = _HEADER.unpack(head)
    if size != _PROGRAM.size or not 0 < count <= _MOST_PROGRAMS:
        raise _BrokenError("it has no program headers")
    kinds = [(each[0], each[2], each[3], each[5]) for each in _PROGRAM.iter_unpack(file.at(programs, size * count))]
    pairs: list[tuple[int, int]] = []
    for kind, offset, _, length in kinds:
        if kind == _DYNAMIC_SEGMENT:
            data = file.some(offset, min(length, _MOST_DYNAMIC * _DYNAMIC.size))
            whole = _DYNAMIC.iter_unpack(data[: len(data) // _DYNAMIC.size * _DYNAMIC.size])
            pairs += takewhile(lambda pair: pair[0] != 0, whole)
    segments = tuple((address, offset, length) for kind, offset, address, length in kinds if kind == _LOAD)
    end = max((offset + length for _, offset, length in segments), default=0)
    if end > file.size:  # the loader maps it all the same, and the first touch of what is not there is a SIGBUS
        raise _BrokenError(f"cut off after {file.size} of {end} bytes")
    elf = Elf(
        *(path, machine, bits, little),
        interpreter=next((file.text(offset) for kind, offset, *_ in kinds if kind == _INTERPRETER), ""),
        identity=file.identity,
        dynamic=dict(pairs),
        segments=segments,
        table=(sections, many if entry == _SECTION.size else 0, names),
    )
    strings = elf.offset(_STRINGS)

    def texts(wanted: int) -> tuple[str, ...]:
        return tuple(file.text(strings + value) for tag, value in pairs if tag == wanted and strings >= 0)

    soname, rpath, runpath = ("".join(texts(tag)[:1]) for tag in (_SONAME, _RPATH, _RUNPATH))
    return replace(elf, soname=soname, needed=texts(_NEEDED), rpath=rpath, runpath=runpath)


def _sections(elf: Elf, file: _File, names: Iterable[str]) -> Iterator[tuple[int, int]]:
    """(offset, size) of the sections of these names that have bytes in the file."""
    offset, count, index = elf.table
    if not offset or not count:
        raise _BrokenError("it has no section headers")
    if index >= count:
        raise _BrokenError("its sections have no names")
    headers = list(_SECTION.iter_unpack(file.at(offset, count * _SECTION.size)))
    strings, size = headers[index][4:6]
    table = file.at(strings, min(size, count * 256))
    wanted = [each.encode() + b"\0" for each in names]
    for name, kind, _, _, start, length, *_ in headers:
        if kind != _NOBITS and any(table.startswith(each, name) for each in wanted):
            yield start, min(length, max(file.size - start, 0))


@_opens
def contents(elf: Elf, file: _File, name: str, limit: int) -> bytes:
    """The bytes of a section, at most ``limit`` of them."""
    for start, size in _sections(elf, file, [name]):
        return file.some(start, min(size, limit))
    raise _BrokenError(f"it has no section {name}")


# -- symbols -----------------------------------------------------------------------------------------------------------

_SYMBOL = Struct("<IBxH16x")
_NEED, _NEED_VERSION = Struct("<HHIII"), Struct("<IHHII")
_DEFINITION = Struct("<HHHHIII")
_STRINGS_SIZE, _VERSIONS, _DEFINITIONS, _NEEDS = 10, 0x6FFFFFF0, 0x6FFFFFFC, 0x6FFFFFFE
_WEAK = 2
_ANY = 1  # The version of a symbol that has none.

_MOST_SYMBOLS = 1 << 20  # libtorch_cpu has fifty thousand,
_LONGEST_STRINGS = 1 << 26  # whose names take four megabytes
_MOST_VERSIONS = 4096


class Wanted(NamedTuple):
    """A symbol that must be found elsewhere; ``file`` is the library whose version is meant, where one is."""

    name: str
    version: str = ""
    file: str = ""


def _symbols(elf: Elf, file: _File, *, defined: bool) -> Iterator[tuple[bytes, bool, int]]:
    """Of the symbols that are defined, or not, the name, whether it is weak, and the number of its version."""
    start, size = next(_sections(elf, file, [".dynsym"]), (0, 0))
    if not start:
        raise _BrokenError("it has no table of symbols")
    count = min(size // _SYMBOL.size, _MOST_SYMBOLS)
    versions = elf.offset(_VERSIONS)
    numbers = unpack(f"<{count}H", file.at(versions, 2 * count)) if versions >= 0 else (_ANY,) * count
    names = file.some(elf.offset(_STRINGS), min(elf.dynamic.get(_STRINGS_SIZE, 0), _LONGEST_STRINGS))
    symbols = _SYMBOL.iter_unpack(file.at(start, count * _SYMBOL.size))
    for (place, info, section), number in zip(symbols, numbers, strict=True):
        if (section != 0) == defined:
            end = names.find(b"\0", place, place + _LONGEST_NAME)
            if end > place:
                yield names[place:end], info >> 4 == _WEAK, number & 0x7FFF


@_opens
def undefined(elf: Elf, file: _File, of: Collection[str] = ()) -> tuple[Wanted, ...]:
    """The symbols it takes from others, without weak ones; with ``of``, only those versioned by these files."""
    needs = {number: (version, source) for source, number, version, _ in _needs(elf, file)}
    found = []
    for name, weak, number in _symbols(elf, file, defined=False):
        need = needs.get(number, ("", ""))
        if not weak and (not of or need[1] in of):
            found.append(Wanted(name.decode("utf-8", "surrogateescape"), *need))
    return tuple(found)


@_opens
def lacking(elf: Elf, file: _File, wanted: Collection[Wanted]) -> tuple[Wanted, ...]:
    """Those of ``wanted`` that it does not define in the version they ask for."""
    names = {each.name.encode("utf-8", "surrogateescape"): each.name for each in wanted}
    definitions = _definitions(elf, file)
    found: dict[str, set[str | None]] = {}
    for name, _, number in _symbols(elf, file, defined=True):
        if name in names:
            found.setdefault(names[name], set()).add(definitions.get(number) if number > _ANY else "")
    given = ((each, found.get(each.name)) for each in wanted)
    return tuple(each for each, has in given if not has or (each.version and has.isdisjoint((each.version, ""))))


@_opens
def version_needs(elf: Elf, file: _File) -> tuple[tuple[str, str], ...]:
    """(file, version) that it asks for: ``("libc.so.6", "GLIBC_2.28")``; weak ones left out."""
    return tuple((name, version) for name, _, version, weak in _needs(elf, file) if not weak)


def _needs(elf: Elf, file: _File) -> Iterator[tuple[str, int, str, bool]]:
    """File, index and name of every version it asks for, and whether it can do without."""
    strings, at = elf.offset(_STRINGS), elf.offset(_NEEDS)
    left = _MOST_VERSIONS
    while at >= 0 and left:
        _, count, name, aux, following = _NEED.unpack(file.at(at, _NEED.size))
        source, entry = file.text(strings + name), at + aux
        for _ in range(min(count, left)):
            _, flags, index, version, step = _NEED_VERSION.unpack(file.at(entry, _NEED_VERSION.size))
            yield source, index & 0x7FFF, file.text(strings + version), bool(flags & 2)
            entry, left = entry + step, left - 1
            if not step:
                break
        at, left = (at + following, max(left - 1, 0)) if following else (-1, left)


@_opens
def version_definitions(elf: Elf, file: _File) -> frozenset[str]:
    """The versions it defines; none where it has no versions at all, which satisfies every need."""
    return frozenset(_definitions(elf, file).values())


def _definitions(elf: Elf, file: _File) -> dict[int, str]:
    strings, at = elf.offset(_STRINGS), elf.offset(_DEFINITIONS)
    found: dict[int, str] = {}
    for _ in range(_MOST_VERSIONS if at >= 0 else 0):
        _, _, index, _, _, aux, following = _DEFINITION.unpack(file.at(at, _DEFINITION.size))
        found[index & 0x7FFF] = file.text(strings + file.number(at + aux))
        if not following:
            break
        at += following
    return found


# -- code for GPUs -----------------------------------------------------------------------------------------------------
# A fatbin is a container with one entry for each architecture. Only the payload of an entry is compressed, so its
# headers, some dozens of bytes each among megabytes, tell everything.

_CONTAINER = Struct("<I2HQ")  # magic, version, size of this header, size of what follows
_ENTRY = Struct("<2HIQ12xI8xQ")  # kind, -, size of this header, size of the payload; SM number; flags
_FATBIN = 0xBA55ED50
_PREFIX = {1: "compute_", 2: "sm_"}  # PTX and cubins. Other kinds, such as code for the linker (8), are passed over.
_ONE_CHIP, _FAMILY = 1 << 20, 1 << 21
_GAP = 4096


@_opens
def architectures(elf: Elf, file: _File) -> dict[str, int]:
    """Architecture (``sm_90``, ``sm_90a``, ``compute_90``) → how many pieces of code are for it; none is empty.

    The letter ``a`` marks code for that chip alone, ``f`` code for a family (``sm_103f``).
    """
    found: dict[tuple[str, int, str], int] = {}
    for start, size in _sections(elf, file, (".nv_fatbin", "__nv_relfatbin")):
        at, end = start, start + size
        while at + _CONTAINER.size <= end:
            magic, _, header, length = _CONTAINER.unpack(file.at(at, _CONTAINER.size))
            if magic != _FATBIN or header < _CONTAINER.size:  # between two containers there may be padding
                at = _next_fatbin(file, at + 1, end)
                continue
            entry, at = at + header, at + header + length
            while entry + _ENTRY.size <= min(at, end):
                kind, _, skipped, payload, number, flags = _ENTRY.unpack(file.at(entry, _ENTRY.size))
                if skipped < _ENTRY.size or not kind:
                    break
                if kind in _PREFIX:
                    key = (_PREFIX[kind], number, "a" if flags & _ONE_CHIP else "f" if flags & _FAMILY else "")
                    found[key] = found.get(key, 0) + 1
                entry += skipped + payload
    order = sorted(found, key=lambda key: (key[0] != "sm_", *key[1:]))
    return {f"{prefix}{number}{suffix}": found[prefix, number, suffix] for prefix, number, suffix in order}


def _next_fatbin(file: _File, at: int, end: int) -> int:
    while at < end:
        found = file.some(at, min(_GAP, end - at)).find(_FATBIN.to_bytes(4, "little"))
        if found >= 0:
            return at + found
        at += _GAP - 4
    return end
