"""What the dynamic loader of a host has built in: its folders, its cache, the levels of the processor it knows.

glibc's loader is itself read for that. Its folders stand in it as texts that end in a slash, one after the other;
distributions compile different ones into it, and some give it a cache of its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from transload.machine import Unknown

from .elf import Elf, read_elf
from .host import Host
from .ld_cache import read_cache

__all__ = ["LdSo", "ld_so"]

_CACHE = "/etc/ld.so.cache"
_CACHE_LIMIT = 1 << 24
_LOADER_LIMIT = 1 << 22
_LOADERS = {
    "x86_64": "/lib64/ld-linux-x86-64.so.2",
    "aarch64": "/lib/ld-linux-aarch64.so.1",
    "ppc64le": "/lib64/ld64.so.2",
    "riscv64": "/lib/ld-linux-riscv64-lp64d.so.1",
}
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
_MULTIARCH = {"ppc64le": "powerpc64le-linux-gnu"}

_CACHE_NAME = b"/ld.so.cache\0"
_LONGEST = 256
_MOST = 1000

_LEVELS: dict[str, frozenset[str]] = {
    "x86-64-v2": frozenset({"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"}),
    "x86-64-v3": frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}),
    "x86-64-v4": frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
}
"""Subfolders of ``glibc-hwcaps``, with what they ask of the processor beyond the one before."""


@dataclass(frozen=True)
class LdSo:
    """The loader of a host."""

    machine: str
    """Whose libraries it takes, as ``uname -m`` names it."""
    program: Elf | Unknown
    """The interpreter that is examined."""
    path: str = ""
    """Of the loader itself; empty where it was not found."""
    musl: bool = False
    folders: tuple[str, ...] = ()
    """The system's own, without a slash at the end."""
    hwcaps: tuple[str, ...] = ()
    """Subfolders of ``glibc-hwcaps`` for this processor, best first."""
    cache: dict[str, tuple[str, ...]] = field(default_factory=dict, repr=False)
    """Name → paths."""


def ld_so(host: Host) -> LdSo:
    """The loader that the interpreter of the host asks for."""
    program: Elf | Unknown = Unknown("no interpreter is named")
    if host.python:
        program = read_elf(host.at(host.target(host.python)))
    machine = program.machine if isinstance(program, Elf) else host.uname[2]
    machine = _MACHINES.get(machine.lower(), machine)
    if not machine:  # a tree that does not state it, nor has an interpreter: its loader tells
        machine = next((each for each, path in _LOADERS.items() if host.exists(path)), "")
    path = _loader(host, program, machine)
    if "ld-musl" in os.path.basename(path):
        return LdSo(machine, program, path, musl=True, folders=_musl_folders(host, path))
    data = host.data(host.target(path), _LOADER_LIMIT) if path else b""
    itself = data if isinstance(data, bytes) else b""
    hwcaps = _hwcaps(host) if machine == "x86_64" and (not itself or b"glibc-hwcaps" in itself) else ()
    cache = _cache(host, itself, machine, hwcaps)
    return LdSo(machine, program, path, folders=_folders(itself, machine), hwcaps=hwcaps, cache=cache)


def _loader(host: Host, program: Elf | Unknown, machine: str) -> str:
    if isinstance(program, Elf) and program.interpreter:
        return program.interpreter
    usual = (_LOADERS[machine],) if machine in _LOADERS else ()
    return next((path for path in (*host.paths("/lib", "ld-musl-"), *usual) if host.exists(path)), "")


def _folders(itself: bytes, machine: str) -> tuple[str, ...]:
    """Those compiled into the loader, else all that are usual."""
    groups: list[list[str]] = [[]]
    last = -1
    for start, text in _texts(itself, b"/\0"):
        if not text.startswith("/") or "lib" not in text or not text.isprintable():
            continue
        if start != last:
            groups.append([])
        groups[-1].append(text.rstrip("/"))
        last = start + len(text) + 1
    multiarch = _MULTIARCH.get(machine, f"{machine}-linux-gnu")
    usual = (f"{start}/{name}" for name in (f"lib/{multiarch}", "lib64", "lib") for start in ("", "/usr"))
    longest = max(groups, key=len)
    return tuple(longest or usual)


def _texts(data: bytes, end: bytes) -> Iterator[tuple[int, str]]:
    """Where and what the texts are that end so."""
    at = -1
    for _ in range(_MOST):
        at = data.find(end, at + 1)
        if at < 0:
            return
        start = data.rfind(b"\0", max(at - _LONGEST, 0), at) + 1 or max(at - _LONGEST, 0)
        yield start, data[start : at + len(end) - 1].decode("utf-8", "replace")


def _cache(host: Host, itself: bytes, machine: str, hwcaps: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    path = next((text for _, text in _texts(itself, _CACHE_NAME) if text.startswith("/")), _CACHE)
    data = host.data(host.target(path), _CACHE_LIMIT)
    return read_cache(data, machine, hwcaps) if isinstance(data, bytes) else {}


def _hwcaps(host: Host) -> tuple[str, ...]:
    text = host.text("/proc/cpuinfo", 1 << 14)
    flags = re.search(r"^flags\s*:(.*)", text, re.MULTILINE) if isinstance(text, str) else None
    has = set(flags[1].split()) if flags else set()
    reached: list[str] = []
    for level, asks in _LEVELS.items():
        if not asks <= has:
            break
        reached.insert(0, level)
    return tuple(reached)


def _musl_folders(host: Host, path: str) -> tuple[str, ...]:
    """musl reads them from a file that is called after the loader: ``/etc/ld-musl-x86_64.path``."""
    name = os.path.basename(path).partition(".")[0]
    text = host.text(f"/etc/{name}.path")
    folders = re.split(r"[:\n]", text) if isinstance(text, str) else ()
    return tuple(filter(None, folders)) or ("/lib", "/usr/local/lib", "/usr/lib")
