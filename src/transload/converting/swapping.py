"""Directories that change places in one step, where the system can do that: no moment without either."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

__all__ = ["swapped"]

_HERE = -100  # AT_FDCWD: paths are taken as they are
_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2), in Linux since 3.15 and in glibc since 2.28


def swapped(first: str, second: str) -> bool:
    """Let two paths change their names; false if nothing was done, for the system or this file system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    with suppress(ImportError, OSError, AttributeError):  # no ctypes, no such function
        import ctypes

        rename = ctypes.CDLL(None).renameat2
        paths = [ctypes.c_char_p(os.fsencode(path)) for path in (first, second)]
        return not rename(_HERE, paths[0], _HERE, paths[1], ctypes.c_uint(_EXCHANGE))
    return False
