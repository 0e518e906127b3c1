"""Reading a library or program at offsets, without trusting it: what ``elf`` and ``pe`` share.

Only the needed parts of a file are read, and it is never mapped: libraries can be hundreds of megabytes long, and a
mapped file that shrinks kills its reader. Every offset is checked against the file before it is used, and the number
of reads is bounded. What cannot be read is an ``Unknown``; nothing here raises for the contents of a file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import wraps
from struct import Struct
from typing import Concatenate, ParamSpec, TypeVar

from transload.frozen import NamedTuple
from transload.machine import Unknown

from .host import reason

_T = TypeVar("_T")
_P = ParamSpec("_P")
_Subject = TypeVar("_Subject")

LONGEST_NAME = 4096
_MOST_READS = 1 << 18  # take half a second; the fatbins of libtorch_cuda need four thousand

# A fatbin is a container with one entry for each architecture. Only the payload of an entry is compressed, so reading
# the headers, some dozens of bytes each among megabytes, is enough.
_CONTAINER = Struct("<4s2HQ")  # magic, version, size of this header, size of what follows
_ENTRY = Struct("<2HIQ12xI8xQ")  # kind, -, size of this header, size of the payload; SM number; flags
_FATBIN = b"\x50\xed\x55\xba"
_PREFIX = {1: "compute_", 2: "sm_"}  # PTX and cubins. Other kinds, such as code for the linker (8), are skipped.
_ONE_CHIP, _FAMILY = 1 << 20, 1 << 21
_GAP = 4096


class MalformedError(Exception):
    """A file contradicts itself. ``with_file`` turns it into an ``Unknown``."""


class Needs(NamedTuple):
    """What a library of a package contains and needs, in a process that has imported torch."""

    architectures: Sequence[str]  # Of its code for NVIDIA cards.
    undefined: Sequence[str]  # Symbols or functions of torch that torch does not define.
    missing: Sequence[str]  # Libraries that are not found.


class BinaryFile:
    """A regular file that is read at offsets."""

    def __init__(self, path: str) -> None:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe or a device could block
            raise MalformedError("not a regular file")
        self.stream = open(path, "rb", buffering=0)  # noqa: SIM115  with_file closes it
        status = os.fstat(self.stream.fileno())
        self.size, self.identity = status.st_size, (status.st_dev, status.st_ino)
        self.reads = 0
        with suppress(AttributeError, OSError):  # else read-ahead fetches half of libtorch_cuda for its headers
            os.posix_fadvise(self.stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)

    def read(self, offset: int, size: int) -> bytes:
        """At most ``size`` bytes: fewer at the end of the file, none outside of it."""
        if not 0 <= offset < self.size:
            return b""
        self.reads += 1
        if self.reads > _MOST_READS:
            raise MalformedError("it has too many parts")
        self.stream.seek(offset)
        return self.stream.read(min(size, self.size - offset))

    def read_exactly(self, offset: int, size: int) -> bytes:
        """Exactly ``size`` bytes; raises ``MalformedError`` if the file has fewer."""
        data = self.read(offset, size)
        if len(data) != size:
            raise MalformedError(f"cut off: {size} bytes should be at {offset}, but the file has {self.size}")
        return data

    def c_string(self, offset: int) -> str:
        """The text up to the next NUL."""
        for size in (128, LONGEST_NAME):
            text, end, _ = self.read(offset, size).partition(b"\0")
            if end:
                return text.decode("utf-8", "surrogateescape")
        raise MalformedError(f"a name at {offset} has no end")


def with_file(
    question: Callable[Concatenate[_Subject, BinaryFile, _P], _T],
) -> Callable[Concatenate[_Subject, _P], _T | Unknown]:
    """Pass the opened file to a function of a path, or of what has one; an ``Unknown`` results if reading fails."""

    @wraps(question)
    def asked(subject: _Subject, /, *arguments: _P.args, **options: _P.kwargs) -> _T | Unknown:
        path = str(getattr(subject, "path", subject))
        try:
            file = BinaryFile(path)
            with file.stream:
                return question(subject, file, *arguments, **options)
        except MalformedError as error:
            return Unknown(str(error))
        except (OSError, ValueError) as error:
            return Unknown(reason(path, error))

    return asked


def fatbins(file: BinaryFile, sections: Iterable[tuple[int, int]]) -> dict[str, int]:
    """Architecture (``sm_90``; ``sm_90a`` is one chip, ``sm_103f`` a family) → how many cubins or PTX texts.

    ``sections`` are the offsets and sizes of the fatbins in the file.
    """
    sizes: dict[tuple[str, int, str], int] = {}
    for start, size in sections:
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
                    sizes[key] = sizes.get(key, 0) + 1
                entry += skipped + payload
    order = sorted(sizes, key=lambda key: (key[0] != "sm_", *key[1:]))
    return {f"{prefix}{number}{suffix}": sizes[prefix, number, suffix] for prefix, number, suffix in order}
