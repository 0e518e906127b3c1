"""/etc/ld.so.cache, in which glibc's loader looks up libraries by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct, unpack_from

__all__ = ["read_cache"]

_MAGIC = b"glibc-ld.so.cache1.1"
"""Caches of before glibc 2.32 begin with an older format, and have this one after it."""
_HEADER = Struct("<20sII4xI12x")
_ENTRY = Struct("<iIIIQ")
_EXTENSIONS = Struct("<II")
_EXTENSION = Struct("<4I")
_EXTENSION_MAGIC, _HWCAPS = 0xEAA42174, 1
_BY_HWCAPS = 1 << 62
_LONGEST = 4096

_FLAGS = {
    "x86_64": 0x0303,
    "aarch64": 0x0A03,
    "ppc64le": 0x0503,
    "s390x": 0x0403,
    "riscv64": 0x1003,
    "loongarch64": 0x1103,
}
"""What an entry of a library for that machine is marked with."""


def read_cache(cache: bytes, machine: str, hwcaps: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
    """Name → paths, in the order the loader prefers them; empty where the bytes are no cache.

    ``hwcaps`` are the subfolders of ``glibc-hwcaps`` that the processor may use, best first.
    """
    start = cache.find(_MAGIC)
    if start < 0 or len(cache) < start + _HEADER.size:
        return {}
    cache = cache[start:]
    names = _hwcaps(cache)
    rank = {each: place for place, each in enumerate((*hwcaps, ""))}
    found: dict[str, list[tuple[int, str]]] = {}
    for name, hwcap, path in _entries(cache, machine):
        if names.get(hwcap) in rank:
            found.setdefault(name, []).append((rank[names[hwcap]], path))
    return {name: tuple(path for _, path in sorted(paths, key=lambda each: each[0])) for name, paths in found.items()}


def _entries(cache: bytes, machine: str) -> Iterator[tuple[str, int, str]]:
    """(name, hwcap, path) of every entry for the machine."""
    _, count, _, _ = _HEADER.unpack_from(cache)
    flags = _FLAGS.get(machine)
    size = min(count, (len(cache) - _HEADER.size) // _ENTRY.size) * _ENTRY.size
    for kind, key, value, _, hwcap in _ENTRY.iter_unpack(cache[_HEADER.size : _HEADER.size + size]):
        if kind == flags or flags is None:
            yield _text(cache, key), hwcap, _text(cache, value)


def _text(cache: bytes, at: int) -> str:
    end = cache.find(b"\0", at, at + _LONGEST)
    return cache[at : max(end, at)].decode("utf-8", "surrogateescape")


def _hwcaps(cache: bytes) -> dict[int, str]:
    """What an entry's ``hwcap`` stands for, of those in use since glibc 2.33; 0 is any processor."""
    found = {0: ""}
    at = _HEADER.unpack_from(cache)[3]
    if not 0 < at <= len(cache) - _EXTENSIONS.size:
        return found
    magic, count = _EXTENSIONS.unpack_from(cache, at)
    for index in range(min(count, 16) if magic == _EXTENSION_MAGIC else 0):
        place = at + _EXTENSIONS.size + index * _EXTENSION.size
        tag, _, offset, size = _EXTENSION.unpack_from(cache, place) if place + 16 <= len(cache) else (0, 0, 0, 0)
        if tag == _HWCAPS and offset + size <= len(cache):
            for number, key in enumerate(unpack_from(f"<{size // 4}I", cache, offset)):
                found[_BY_HWCAPS | number] = _text(cache, key)
    return found
