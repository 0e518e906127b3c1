"""ELF files as the dynamic loader sees them, the symbols they import and export, and the GPU code inside them.

Only the needed parts of a file are read, and it is never mapped: libraries have hundreds of megabytes, and a mapped
file that shrinks kills its reader. Every offset is checked against the file before it is used, and every loop is
bounded. What cannot be read is an ``Unknown``; nothing here raises for the contents of a file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, wraps
from itertools import islice, takewhile
from struct import Struct, iter_unpack, unpack
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

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

# A file may claim any count. These limits are far above what linkers write, and cheap to reach.
_MOST_PROGRAMS = 512
_MOST_DYNAMIC = 4096
_LONGEST_NAME = 4096
_MOST_READS = 1 << 18  # take half a second; the fatbins of libtorch_cuda need four thousand


class _MalformedError(Exception):
    """A file contradicts itself. This never leaves the module."""


class _File:
    """A regular file that is read at offsets."""

    def __init__(self, path: str) -> None:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe or a device could block
            raise _MalformedError("not a regular file")
        self.stream = open(path, "rb", buffering=0)  # noqa: SIM115  _with_file closes it
        status = os.fstat(self.stream.fileno())
        self.size, self.identity = status.st_size, (status.st_dev, status.st_ino)
        self.reads = 0
        with suppress(AttributeError, OSError):  # or read-ahead fetches half of libtorch_cuda for its headers
            os.posix_fadvise(self.stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)

    def read(self, offset: int, size: int) -> bytes:
        """At most ``size`` bytes: fewer at the end of the file, none outside of it."""
        if not 0 <= offset < self.size:
            return b""
        self.reads += 1
        if self.reads > _MOST_READS:
            raise _MalformedError("it has too many parts")
        self.stream.seek(offset)
        return self.stream.read(min(size, self.size - offset))

    def read_exactly(self, offset: int, size: int) -> bytes:
        """Exactly ``size`` bytes; raises ``_MalformedError`` if the file has fewer."""
        data = self.read(offset, size)
        if len(data) != size:
            raise _MalformedError(f"cut off: {size} bytes should be at {offset}, and the file has {self.size}")
        return data

    def c_string(self, offset: int) -> str:
        """The text up to the next NUL."""
        for size in (128, _LONGEST_NAME):
            text, end, _ = self.read(offset, size).partition(b"\0")
            if end:
                return text.decode("utf-8", "surrogateescape")
        raise _MalformedError(f"a name at {offset} has no end")


def _with_file(
    question: Callable[Concatenate[_Subject, _File, _P], _T],
) -> Callable[Concatenate[_Subject, _P], _T | Unknown]:
    """Pass the opened file to a function of a path or an ``Elf``; the result is an ``Unknown`` if reading fails."""

    @wraps(question)
    def asked(subject: _Subject, /, *arguments: _P.args, **options: _P.kwargs) -> _T | Unknown:
        path = str(getattr(subject, "path", subject))
        try:
            file = _File(path)
            with file.stream:
                return question(subject, file, *arguments, **options)
        except _MalformedError as error:
            return Unknown(str(error))
        except (OSError, ValueError) as error:
            return Unknown(reason(path, error))

    return asked


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
    rpath: str = ""  # DT_RPATH, a list of folders for this file and for everything it loads.
    runpath: str = ""  # DT_RUNPATH, a list of folders for this file only.
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


@_with_file
def read_elf(path: str, file: _File) -> Elf:
    """Read the ELF file at a real path, or say why it cannot be read, such as ``not an ELF file``."""
    head = file.read(0, _HEADER.size)
    if head[:4] != b"\x7fELF" or len(head) < _HEADER.size:
        why = "cut off within the header" if head[:4] == b"\x7fELF" else "not an ELF file" if head else "empty"
        raise _MalformedError(why)
    bits, little = {1: 32, 2: 64}.get(head[4], 0), head[5] == 1
    number = int.from_bytes(head[18:20], "little" if little else "big")
    known = (name for name, row in table("machines")["machines"].items() if row["elf"] == number)
    machine = next(known, f"ELF machine {number}")
    if bits != 64 or not little:
        return Elf(path, machine, bits, identity=file.identity)
    _, _, _, _, programs, sections, _, _, size, count, entry, many, names = _HEADER.unpack(head)
    if size != _PROGRAM.size or not 0 < count <= _MOST_PROGRAMS:
        raise _MalformedError("it has no program headers")
    kinds = [
        (each[0], each[2], each[3], each[5]) for each in _PROGRAM.iter_unpack(file.read_exactly(programs, size * count))
    ]
    pairs: list[tuple[int, int]] = []
    for kind, offset, _, length in kinds:
        if kind == _DYNAMIC_SEGMENT:
            data = file.read(offset, min(length, _MOST_DYNAMIC * _DYNAMIC.size))
            whole = _DYNAMIC.iter_unpack(data[: len(data) // _DYNAMIC.size * _DYNAMIC.size])
            pairs += takewhile(lambda pair: pair[0] != 0, whole)
    segments = tuple((address, offset, length) for kind, offset, address, length in kinds if kind == _LOAD)
    end = max((offset + length for _, offset, length in segments), default=0)
    if end > file.size:  # the loader maps it anyway, and touching the missing pages raises SIGBUS
        raise _MalformedError(f"cut off after {file.size} of {end} bytes")
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

    soname, rpath, runpath = ("".join(texts(tag)[:1]) for tag in (_SONAME, _RPATH, _RUNPATH))
    return replace(elf, soname=soname, needed=texts(_NEEDED), rpath=rpath, runpath=runpath)


def _sections(elf: Elf, file: _File, names: Iterable[str]) -> Iterator[tuple[int, int]]:
    """(offset, size) of the sections with these names that have bytes in the file."""
    offset, count, index = elf.section_table
    if not offset or index >= count:
        raise _MalformedError("it has no section headers")
    headers = list(_SECTION.iter_unpack(file.read_exactly(offset, count * _SECTION.size)))
    strings, size = headers[index][4:6]
    table = file.read_exactly(strings, min(size, count * 256))
    wanted = [each.encode() + b"\0" for each in names]
    for name, kind, _, _, start, length, *_ in headers:
        if kind != _NOBITS and any(table.startswith(each, name) for each in wanted):
            yield start, min(length, max(file.size - start, 0))


@_with_file
def section_bytes(elf: Elf, file: _File, name: str, limit: int) -> bytes:
    """The bytes of a section, at most ``limit`` of them."""
    for start, size in _sections(elf, file, [name]):
        return file.read(start, min(size, limit))
    raise _MalformedError(f"it has no section {name}")


# -- symbols -----------------------------------------------------------------------------------------------------------

_SYMBOL = Struct("<IBxH16x")
_NEED, _NEED_VERSION = Struct("<HHIII"), Struct("<IHHII")
_DEFINITION = Struct("<HHHHIII")
_STRINGS_SIZE, _GNU_HASH, _VERSIONS, _DEFINITIONS, _NEEDS = 10, 0x6FFFFEF5, 0x6FFFFFF0, 0x6FFFFFFC, 0x6FFFFFFE
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


def _symbols(
    elf: Elf, file: _File, *, defined: bool, names: Iterable[bytes] = (), versions: Container[int] | None = None
) -> Iterator[tuple[bytes, bool, int]]:
    """The defined or undefined symbols, of all or some ``versions``: name, whether it is weak, number of its version.

    With ``names``, it may leave out those with other names.
    """
    start, size = next(_sections(elf, file, [".dynsym"]), (0, 0))
    if not start:
        raise _MalformedError("it has no table of symbols")
    count = min(size // _SYMBOL.size, _MOST_SYMBOLS)
    # The loader's hash table ends with the hash of each symbol from ``first`` on, except for the lowest bit; an empty
    # table has 1 there. A library has its undefined symbols before, a program may have them anywhere. Without it, a
    # check takes 10 % longer.
    table = elf.offset(_GNU_HASH)
    buckets, first, words, _ = unpack("<4I", file.read_exactly(table, 16)) if table >= 0 else (0, 0, 0, 0)
    if not defined and first > 1 and not elf.interpreter:
        count = min(count, first)
    at = elf.offset(_VERSIONS)
    numbers = unpack(f"<{count}H", file.read_exactly(at, 2 * count)) if at >= 0 else (_ANY,) * count
    strings = file.read(elf.offset(_STRINGS), min(elf.dynamic.get(_STRINGS_SIZE, 0), _LONGEST_STRINGS))
    symbols = file.read_exactly(start, count * _SYMBOL.size)
    chosen: Iterable[tuple[Any, int]] = zip(_SYMBOL.iter_unpack(symbols), numbers, strict=True)
    if names and table >= 0:
        wanted = {_gnu_hash(name) ^ bit for name in names for bit in (0, 1)}
        hashes = file.read(table + 16 + 8 * words + 4 * buckets, 4 * max(count - first, 0))
        every = enumerate(iter_unpack("<I", hashes[: len(hashes) // 4 * 4]), first)
        found = [index for index, (value,) in every if value in wanted]
        chosen = ((_SYMBOL.unpack_from(symbols, index * _SYMBOL.size), numbers[index]) for index in found)
    for (place, info, section), number in chosen:
        if (section != 0) == defined and (versions is None or number & 0x7FFF in versions):
            end = strings.find(b"\0", place, place + _LONGEST_NAME)
            if end > place:
                yield strings[place:end], info >> 4 == _WEAK, number & 0x7FFF


@lru_cache(maxsize=1 << 14)
def _gnu_hash(name: bytes) -> int:
    """The hash of a name in ``DT_GNU_HASH``."""
    value = 5381
    for byte in name:
        value = value * 33 + byte & 0xFFFFFFFF
    return value


@_with_file
def undefined(elf: Elf, file: _File, of: Collection[str] | None = None) -> tuple[UndefinedSymbol, ...]:
    """The symbols and versions that it needs from others, without weak ones; with ``of``, the symbols of these files.

    A version is a symbol without a name: ``GLIBC_2.28`` of ``libc.so.6``.
    """
    needs = list(_needs(elf, file))
    versions = {number: (version, source) for source, number, version, _ in needs if of is None or source in of}
    chosen = None if of is None else versions
    symbols = _symbols(elf, file, defined=False, versions=chosen) if versions or of is None else ()
    found = [
        UndefinedSymbol(name.decode("utf-8", "surrogateescape"), *versions.get(number, ("", "")))
        for name, weak, number in symbols
        if not weak
    ]
    return (*found, *(UndefinedSymbol("", version, source) for source, _, version, weak in needs if not weak))


@_with_file
def not_defined(elf: Elf, file: _File, wanted: Collection[UndefinedSymbol]) -> tuple[UndefinedSymbol, ...]:
    """Those of ``wanted`` that it does not define, in the needed version. Without versions it satisfies every need."""
    names = {each.name.encode("utf-8", "surrogateescape"): each.name for each in wanted if each.name}
    definitions = {}  # the name of each version that it defines, by number
    for start, (_, _, index, _, _, aux, _) in _linked(file, elf.offset(_DEFINITIONS), _DEFINITION):
        place = int.from_bytes(file.read_exactly(start + aux, 4), "little")
        definitions[index & 0x7FFF] = file.c_string(elf.offset(_STRINGS) + place)
    found: dict[str, set[str | None]] = {"": {*definitions.values()} or {""}}
    for name, _, number in _symbols(elf, file, defined=True, names=names) if names else ():
        if name in names:
            found.setdefault(names[name], set()).add(definitions.get(number) if number > _ANY else "")
    given = ((each, found.get(each.name)) for each in wanted)
    return tuple(each for each, has in given if not has or (each.version and has.isdisjoint((each.version, ""))))


def _needs(elf: Elf, file: _File) -> Iterator[tuple[str, int, str, bool]]:
    """File, index and name of every version that it needs, and whether the need is weak."""
    strings = elf.offset(_STRINGS)
    for start, (_, count, name, aux, _) in _linked(file, elf.offset(_NEEDS), _NEED):
        source = file.c_string(strings + name)
        for _, (_, flags, index, version, _) in islice(_linked(file, start + aux, _NEED_VERSION), count):
            yield source, index & 0x7FFF, file.c_string(strings + version), bool(flags & 2)


def _linked(file: _File, at: int, layout: Struct) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The offset and the fields of each entry of a linked list; the last field is the distance to the next."""
    for _ in range(_MOST_VERSIONS if at >= 0 else 0):
        entry = layout.unpack(file.read_exactly(at, layout.size))
        yield at, entry
        if not entry[-1]:
            break
        at += entry[-1]


# -- code for GPUs -----------------------------------------------------------------------------------------------------
# A fatbin is a container with one entry for each architecture. Only the payload of an entry is compressed, so reading
# the headers, some dozens of bytes each among megabytes, is enough.

_CONTAINER = Struct("<4s2HQ")  # magic, version, size of this header, size of what follows
_ENTRY = Struct("<2HIQ12xI8xQ")  # kind, -, size of this header, size of the payload; SM number; flags
_FATBIN = b"\x50\xed\x55\xba"
_PREFIX = {1: "compute_", 2: "sm_"}  # PTX and cubins. Other kinds, such as code for the linker (8), are skipped.
_ONE_CHIP, _FAMILY = 1 << 20, 1 << 21
_GAP = 4096


@_with_file
def architectures(elf: Elf, file: _File) -> dict[str, int]:
    """Architecture (``sm_90``, ``sm_90a``, ``compute_90``) → the number of its cubins or PTX texts.

    The suffix ``a`` marks code for that chip only, ``f`` code for a family (``sm_103f``).
    """
    found: dict[tuple[str, int, str], int] = {}
    for start, size in _sections(elf, file, (".nv_fatbin", "__nv_relfatbin")):
        at, end = start, start + size
        while at + _CONTAINER.size <= end:
            magic, _, header, length = _CONTAINER.unpack(file.read_exactly(at, _CONTAINER.size))
            if magic != _FATBIN or header < _CONTAINER.size:  # padding between two containers
                distance = file.read(at + 1, min(_GAP, end - at)).find(_FATBIN)
                at += 1 + distance if distance >= 0 else _GAP - 4
                continue
            entry, at = at + header, at + header + length
            while entry + _ENTRY.size <= min(at, end):
                kind, _, skipped, payload, number, flags = _ENTRY.unpack(file.read_exactly(entry, _ENTRY.size))
                if skipped < _ENTRY.size or not kind:
                    break
                if kind in _PREFIX:
                    key = (_PREFIX[kind], number, "a" if flags & _ONE_CHIP else "f" if flags & _FAMILY else "")
                    found[key] = found.get(key, 0) + 1
                entry += skipped + payload
    order = sorted(found, key=lambda key: (key[0] != "sm_", *key[1:]))
    return {f"{prefix}{number}{suffix}": found[prefix, number, suffix] for prefix, number, suffix in order}
