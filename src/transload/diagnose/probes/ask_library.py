"""A library of the driver, called by ctypes. Part of the children; see ``ask``."""

from __future__ import annotations

import ctypes
import os
import sys

from transload.diagnose.probes.ask import Report, mapped

__all__ = ["ABSENT", "Driver", "decoded"]

ABSENT = -1
"""The result of a function that the library does not have."""


class Driver:
    """The library that the last argument names, loaded; before each call it reports what is called."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.name = name = sys.argv[-1]
        report.doing("loading " + name)
        try:
            self.library = ctypes.CDLL(name)
        except OSError as error:
            report.say(failed=str(error))
            report.done()

    def demand(self, *alternatives: str) -> None:
        """Give up where the library has none of these functions, which every release has in one form or another."""
        if not any(map(self.has, alternatives)):
            self.report.say(missing=alternatives[0])
            self.report.done()

    def has(self, function: str) -> bool:
        """Whether the library has it."""
        return hasattr(self.library, function)

    def call(self, function: str, *arguments: object) -> int:
        """The result of a function, 0 for success; ``ABSENT`` where the library does not have it."""
        if not self.has(function):
            return ABSENT
        self.report.doing(function)
        return int(getattr(self.library, function)(*arguments))

    def either(self, newer: str, older: str, *arguments: object) -> int:
        """The same of two functions that take the same arguments: the older where the newer is missing."""
        return self.call(newer if self.has(newer) else older, *arguments)

    def numbers(self, function: str, *arguments: object, count: int = 1) -> list[int]:
        """What it stores through its last ``count`` arguments, pointers to ``unsigned int``; empty where it fails."""
        values = [ctypes.c_uint() for _ in range(count)]
        code = self.call(function, *arguments, *map(ctypes.byref, values))
        return [] if code else [value.value for value in values]

    def text(self, function: str, *arguments: object) -> str:
        """What it writes into a buffer, which with its size are its last arguments; empty where it fails."""
        buffer = ctypes.create_string_buffer(256)
        return "" if self.call(function, *arguments, buffer, 256) else decoded(buffer.value)

    def file(self, function: str) -> str:
        """The file in memory that holds a function; by its name where the function is not there."""
        found = self.has(function) and ctypes.cast(getattr(self.library, function), ctypes.c_void_p).value
        stem = os.path.basename(self.name).split(".so")[0] + ".so"
        for start, end, path in mapped():
            if start <= found < end if found else os.path.basename(path).startswith(stem):
                return path
        return ""


def decoded(raw: bytes) -> str:
    """A name as the driver gives it, which should be ASCII."""
    return raw.decode("utf-8", "replace")
