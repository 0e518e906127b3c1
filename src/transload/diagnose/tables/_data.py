"""The data files of this folder, and the few forms of text they hold."""

from __future__ import annotations

import re
from functools import cache, lru_cache
from typing import Any, Literal, cast

__all__ = [
    "INDEX",
    "Capability",
    "Sure",
    "System",
    "Version",
    "numbers_of",
    "parse_capability",
    "parse_version",
    "table",
]

Version = tuple[int, ...]
Capability = tuple[int, int]
Sure = Literal["seen", "stated", "guess"]
System = Literal["linux", "windows"]

INDEX = "https://download.pytorch.org/whl"
_VERSION = re.compile(r"\d+(?:\.\d+)*")


@cache
def table(name: str) -> dict[str, Any]:
    """One data file, read once, also from inside a zip.

    >>> table("drivers")["families"][-1]["cuda"]
    '13'
    """
    import json
    import pkgutil

    data = pkgutil.get_data(__package__, f"{name}.json")
    return cast(dict[str, Any], json.loads(data or b"{}"))


@lru_cache(maxsize=512)
def parse_version(text: str) -> Version:
    """The numbers of a version, to compare it by; what follows them is left out. ValueError if there are none.

    >>> parse_version("580.65.06"), parse_version("2.13.0+cu130")
    ((580, 65, 6), (2, 13, 0))
    """
    found = _VERSION.match(text.strip())
    if found is None:
        raise ValueError(f"not a version: {text!r}")
    return tuple(int(part) for part in found[0].split("."))


def numbers_of(text: str) -> Version:
    """As ``parse_version``, but empty for what is no version: text found on a machine may be anything.

    >>> numbers_of("12.8"), numbers_of("N/A")
    ((12, 8), ())
    """
    try:
        return parse_version(text)
    except ValueError:
        return ()


def parse_capability(text: str) -> Capability:
    """A compute capability as two numbers.

    >>> parse_capability("12.0")
    (12, 0)
    """
    major, minor = text.split(".")
    return int(major), int(minor)
