"""Reading a library or program at offsets, without trusting it: what ``elf`` and ``pe`` share.

Only the needed parts of a file are read, and it is never mapped: libraries can be hundreds of megabytes long, and a
mapped file that shrinks kills its reader. Every offset is checked against the file before it is used, and the number
of reads is bounded. What cannot be read is an ``Unknown``; nothing here raises for the contents of a file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from transload.machine import Unknown

from .host import reason

_T = TypeVar("_T")
_P = ParamSpec("_P")
_Subject = TypeVar("_Subject")

LONGEST_NAME = 4096
_MOST_READS = 1 << 18  # take half a second; the fatbins of libtorch_cuda need four thousand


class MalformedError(Exception):
    """A file contradicts itself. ``with_file`` turns it into an ``Unknown``."""


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
