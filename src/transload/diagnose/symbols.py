"""The dynamic symbols of a library: what it takes from others, with the versions it asks for, and what it gives.

A name is looked up by the hash table that the loader itself uses: libtorch_cpu defines more than a hundred thousand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from struct import Struct, unpack, unpack_from
from typing import NamedTuple

from transload.machine import Unknown

from .elf import BrokenError, Elf, File, asked

__all__ = ["Wanted", "lacking", "undefined", "version_definitions", "version_needs"]

_SYMBOL = Struct("<IBBHQQ")
_NEED, _NEED_VERSION = Struct("<HHIII"), Struct("<IHHII")
_DEFINITION = Struct("<HHHHIII")
_HASH, _STRINGS, _SYMBOLS, _GNU_HASH = 4, 5, 6, 0x6FFFFEF5
_VERSIONS, _DEFINITIONS, _NEEDS = 0x6FFFFFF0, 0x6FFFFFFC, 0x6FFFFFFE
_WEAK = 2
_ANY = 1
"""The version of a symbol that has none."""

_MOST_SYMBOLS = 1 << 17
_MOST_VERSIONS = 4096
_LONGEST_CHAIN = 4096


class Wanted(NamedTuple):
    """A symbol that must be found elsewhere; ``file`` is the library whose version is meant, where one is."""

    name: str
    version: str = ""
    file: str = ""


def undefined(elf: Elf, of: Iterable[str] = ()) -> tuple[Wanted, ...] | Unknown:
    """The symbols it takes from others, without weak ones; with ``of``, only those versioned by these files."""
    return asked(elf.path, lambda file: tuple(_undefined(elf, file, frozenset(of))))


def _undefined(elf: Elf, file: File, of: frozenset[str]) -> Iterator[Wanted]:
    needs = {index: (name, version) for name, index, version in _needs(elf, file) if not of or name in of}
    if of and not needs:
        return
    count = _count_undefined(elf, file)
    table = file.at(elf.offset(_SYMBOLS), count * _SYMBOL.size)
    versions = _versions(elf, file, count)
    strings = elf.offset(_STRINGS)
    for index in [at for at in range(1, len(versions)) if versions[at] in needs] if of else range(1, count):
        name, info, _, section = unpack_from("<IBBH", table, index * _SYMBOL.size)
        if section == 0 and info >> 4 != _WEAK:
            source, version = needs.get(versions[index] if versions else 0, ("", ""))
            yield Wanted(file.text(strings + name), version, source)


def _count_undefined(elf: Elf, file: File) -> int:
    """How many symbols to look at: the GNU table has those that are defined, and they come last."""
    at = elf.offset(_GNU_HASH)
    count = unpack("<4xI", file.at(at, 8))[0] if at >= 0 else _count(elf, file)
    return min(count, _MOST_SYMBOLS)


def _count(elf: Elf, file: File) -> int:
    at = elf.offset(_HASH)
    if at < 0 or elf.offset(_SYMBOLS) < 0:
        raise BrokenError("it has no table of symbols")
    (count,) = unpack("<4xI", file.at(at, 8))
    return min(int(count), _MOST_SYMBOLS)


def _versions(elf: Elf, file: File, count: int) -> tuple[int, ...]:
    at = elf.offset(_VERSIONS)
    return tuple(each & 0x7FFF for each in unpack(f"<{count}H", file.at(at, 2 * count))) if at >= 0 else ()


def version_needs(elf: Elf) -> tuple[tuple[str, str], ...] | Unknown:
    """(file, version) that it asks for: ``("libc.so.6", "GLIBC_2.28")``; weak ones left out."""
    return asked(elf.path, lambda file: tuple((name, version) for name, _, version in _needs(elf, file, weak=False)))


def _needs(elf: Elf, file: File, *, weak: bool = True) -> Iterator[tuple[str, int, str]]:
    """File, index and name of every version it asks for."""
    strings, at = elf.offset(_STRINGS), elf.offset(_NEEDS)
    left = _MOST_VERSIONS
    while at >= 0 and left:
        _, count, name, aux, following = _NEED.unpack(file.at(at, _NEED.size))
        source, entry = file.text(strings + name), at + aux
        for _ in range(min(count, left)):
            _, flags, index, version, step = _NEED_VERSION.unpack(file.at(entry, _NEED_VERSION.size))
            if weak or not flags & 2:
                yield source, index & 0x7FFF, file.text(strings + version)
            entry, left = entry + step, left - 1
            if not step:
                break
        at, left = (at + following, max(left - 1, 0)) if following else (-1, left)


def version_definitions(elf: Elf) -> frozenset[str] | Unknown:
    """The versions it defines; none where it has no versions at all, which satisfies every need."""
    return asked(elf.path, lambda file: frozenset(_definitions(elf, file).values()))


def _definitions(elf: Elf, file: File) -> dict[int, str]:
    strings, at = elf.offset(_STRINGS), elf.offset(_DEFINITIONS)
    found: dict[int, str] = {}
    for _ in range(_MOST_VERSIONS if at >= 0 else 0):
        _, _, index, _, _, aux, following = _DEFINITION.unpack(file.at(at, _DEFINITION.size))
        found[index & 0x7FFF] = file.text(strings + unpack("<I", file.at(at + aux, 4))[0])
        if not following:
            break
        at += following
    return found


def lacking(elf: Elf, wanted: Iterable[Wanted]) -> tuple[Wanted, ...] | Unknown:
    """Those of ``wanted`` that it does not define, in the version they ask for."""
    return asked(elf.path, lambda file: tuple(_lacking(elf, file, wanted)))


def _lacking(elf: Elf, file: File, wanted: Iterable[Wanted]) -> Iterator[Wanted]:
    table = _GnuTable(elf, file) if elf.offset(_GNU_HASH) >= 0 else _PlainTable(elf, file)
    definitions = _definitions(elf, file)
    for each in wanted:
        if not any(_fits(table.version(index), each.version, definitions) for index in table.defined(each.name)):
            yield each


def _fits(index: int, version: str, definitions: dict[int, str]) -> bool:
    return not version or index & 0x7FFF <= _ANY or definitions.get(index & 0x7FFF) == version


class _Table:
    """The symbols of an open library."""

    def __init__(self, elf: Elf, file: File) -> None:
        self.file = file
        self.symbols, self.strings = elf.offset(_SYMBOLS), elf.offset(_STRINGS)
        self.versions = elf.offset(_VERSIONS)

    def version(self, index: int) -> int:
        """The number of its version; any will do where the library has none."""
        if self.versions < 0:
            return _ANY
        number: int = unpack("<H", self.file.at(self.versions + 2 * index, 2))[0]
        return number

    def entry(self, index: int) -> tuple[int, int]:
        """Where its name is, and the section it is defined in; 0 for none."""
        name, _, _, section = unpack("<IBBH", self.file.at(self.symbols + index * _SYMBOL.size, 8))
        return self.strings + name, section

    def defined(self, name: str) -> Iterator[int]:
        """Indexes of the symbols of that name, one a version."""
        raise NotImplementedError


class _GnuTable(_Table):
    def __init__(self, elf: Elf, file: File) -> None:
        super().__init__(elf, file)
        at = elf.offset(_GNU_HASH)
        self.buckets, self.first, self.words, self.shift = unpack("<4I", file.at(at, 16))
        if not self.buckets or not self.words:
            raise BrokenError("its table of symbols is empty")
        self.bloom = at + 16
        self.starts = self.bloom + 8 * self.words
        self.chains = self.starts + 4 * self.buckets

    def defined(self, name: str) -> Iterator[int]:
        value = _gnu_hash(name)
        bits = 1 << value % 64 | 1 << (value >> self.shift) % 64
        (word,) = unpack("<Q", self.file.at(self.bloom + 8 * (value // 64 % self.words), 8))
        if word & bits != bits:
            return
        (index,) = unpack("<I", self.file.at(self.starts + 4 * (value % self.buckets), 4))
        raw = name.encode("utf-8", "surrogateescape") + b"\0"
        for at in range(index, index + _LONGEST_CHAIN if index >= self.first else index):
            (link,) = unpack("<I", self.file.at(self.chains + 4 * (at - self.first), 4))
            if link | 1 == value | 1 and self.named(at, raw):
                yield at
            if link & 1:
                return

    def named(self, index: int, raw: bytes) -> bool:
        place, section = self.entry(index)
        return section != 0 and self.file.some(place, len(raw)) == raw


class _PlainTable(_Table):
    def __init__(self, elf: Elf, file: File) -> None:
        super().__init__(elf, file)
        self.names: dict[str, list[int]] = {}
        for index in range(1, _count(elf, file)):
            place, section = self.entry(index)
            if section:
                self.names.setdefault(file.text(place), []).append(index)

    def defined(self, name: str) -> Iterator[int]:
        yield from self.names.get(name, ())


@lru_cache(maxsize=1 << 14)
def _gnu_hash(name: str) -> int:
    value = 5381
    for byte in name.encode("utf-8", "surrogateescape"):
        value = value * 33 + byte & 0xFFFFFFFF
    return value
