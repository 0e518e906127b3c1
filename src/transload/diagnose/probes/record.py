"""RECORD, the list of an installed wheel's files, held against the disk: torch's libraries, by presence and size."""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING

from transload.machine import Unknown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transload.diagnose.host import Host

__all__ = ["altered", "damaged", "listed", "unlisted"]

_LIMIT = 1 << 26  # torch's own has two megabytes
_LINE = re.compile(rb"^torch/(lib/[^/,\n]+|_C\.[^/,\n]+|(?:__init__|version)\.py),[^,\n]*,(\d{0,19})", re.MULTILINE)
_HEAD = 4096  # holds the table of segments of any library as it leaves the linker
_MACH_O = (b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
_LIBRARY = re.compile(r".+\.(?:so(?:\.[\d.]+)?|dll|pyd|dylib)")


def listed(host: Host, dist_info: str) -> dict[str, int]:
    """Of the files that RECORD lists: those in ``torch/`` that an import cannot do without, with their sizes.

    The size is -1 where RECORD names none. Libraries for torch's own tests are left out.
    """
    data = host.data(f"{dist_info}/RECORD", _LIMIT)
    if isinstance(data, Unknown):
        return {}
    lines = ((line[1].decode("utf-8", "surrogateescape"), line[2]) for line in _LINE.finditer(data))
    return {name: int(size or -1) for name, size in lines if _wanted(name)}


def _wanted(name: str) -> bool:
    return name.endswith(".py") or (_LIBRARY.fullmatch(name) is not None and "_test" not in name)


def damaged(host: Host, folder: str, files: dict[str, int]) -> Iterator[str]:
    """Which of ``files`` in ``folder`` are no use: ``lib/libc10.so: absent``, ``…: cut off after 10 of 20 bytes``."""
    for name, expected in files.items():
        path = f"{folder}/{name}"
        status = host.status(path)
        if isinstance(status, Unknown):
            yield f"{name}: {status.reason if host.exists(path) else 'absent'}"
        elif status.st_size < expected and not name.endswith(".py") and not _loads(host, path, status.st_size):
            yield f"{name}: cut off after {status.st_size} of {expected} bytes"


def altered(host: Host, folder: str, files: dict[str, int]) -> Iterator[str]:
    """Libraries that are whole and yet of another size: ``lib/libc10.so: 18 bytes instead of 20``."""
    for name, expected in files.items():
        path = f"{folder}/{name}"
        status = host.status(path)
        if not status or name.endswith(".py") or status.st_size == expected or expected < 0:
            continue
        if status.st_size > expected or _loads(host, path, status.st_size):
            yield f"{name}: {status.st_size} bytes instead of {expected}"


def _loads(host: Host, path: str, size: int) -> bool:
    """Whether all that the loader maps of an ELF file lies within its ``size``. Files of other kinds are believed."""
    head = host.data(path, _HEAD) or b""
    if head[:2] == b"MZ" or head[:4] in _MACH_O:
        return True
    if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01":
        return False
    start, sections = struct.unpack_from("<QQ", head, 32)
    width, count, section, number = struct.unpack_from("<HHHH", head, 54)
    if width < 56 or start + width * count > len(head):  # a tool has moved the table; that of the sections comes last
        return bool(0 < sections + section * number <= size)
    segments = (struct.unpack_from("<IIQQQQ", head, start + width * index) for index in range(count))
    return all(offset + length <= size for kind, _, offset, _, _, length in segments if kind == 1)


def unlisted(host: Host, folder: str, files: dict[str, int]) -> tuple[str, ...]:
    """Libraries in ``torch/lib`` that RECORD does not list, where it lists any."""
    if not any(name.startswith("lib/") for name in files):
        return ()
    there = (f"lib/{name}" for name in host.names(f"{folder}/lib") or ())
    return tuple(name for name in there if name not in files and _wanted(name) and not name.endswith(".py"))
