"""CRC-32 as fast as it can be had, and put together from parts: what was read in any order has the sum of the whole."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, lru_cache
from importlib import import_module
from typing import NamedTuple
from zlib import crc32

POLYNOMIAL = 0xEDB88320
ONE = 1 << 31
"""Polynomials over GF(2) have the constant term in the highest bit."""

Crc32 = Callable[[memoryview, int], int]
"""Of some bytes, and of what came before them."""

_PACKAGES = ("isal.isal_zlib", "zlib_ng.zlib_ng")
_LEAST = 4096  # bytes for which it is worth to leave zlib


@cache
def fastest_crc32() -> Crc32:
    """The function for large writable buffers, which lets other threads run meanwhile.

    That of a package with ``zlib``'s functions or of a library of the system, all of which multiply without carries
    where the processor can: eight times as fast as ``zlib``, which is what there is otherwise.
    """
    return next((found for found in _found() if _is_right(found)), crc32)


def _found() -> Iterator[Crc32]:
    for name in _PACKAGES:
        with suppress(Exception):  # not there, or broken
            yield import_module(name).crc32
    for library in _LIBRARIES if sys.platform.startswith("linux") else ():
        for folder in _folders():
            with suppress(Exception):
                yield _of_library(f"{folder}/{library.file}", library)


def _is_right(found: Crc32) -> bool:
    """Whether a function gives what ``zlib`` gives, wherever the bytes begin and end."""
    noise = memoryview(bytearray(range(251)) * 80)
    try:
        return all(found(noise[at:-at], at) == crc32(noise[at:-at], at) for at in (1, 16, 3333))
    except Exception:  # noqa: BLE001 - whatever it is, there is a next one
        return False


class _Library(NamedTuple):
    """A library, its function, and where that wants the value so far: before the bytes and their number, or behind."""

    file: str
    function: str
    before: bool
    version: str = ""
    least: int = 0


_LIBRARIES = (
    _Library("libdeflate.so.0", "libdeflate_crc32", before=True),  # it is where programs that read TIFF images are
    # On nearly every system, and in every conda environment; fast since 5.6, of which the first two were tampered with.
    _Library("liblzma.so.5", "lzma_crc32", before=False, version="lzma_version_number", least=50_060_022),
)


def _folders() -> list[str]:
    """Where libraries lie: conda's, then the system's.

    By whole paths alone, since the loader's own search may begin where we stand: an empty part of ``LD_LIBRARY_PATH``,
    as ``$LD_LIBRARY_PATH:/usr/local/cuda/lib64`` makes one, is the working directory, and files of strangers lie there.
    """
    multiarch = getattr(sys.implementation, "_multiarch", "")
    own = [f"{sys.base_prefix}/lib"] if sys.base_prefix.startswith("/") else []
    return list(dict.fromkeys((*own, f"/usr/lib/{multiarch}", "/usr/lib64", "/usr/lib", "/usr/local/lib")))


def _of_library(path: str, library: _Library) -> Crc32:
    """The function of a library, by way of ctypes. ``OSError`` and others if it is not there, or too old."""
    from ctypes import CDLL, addressof, c_char, c_size_t, c_uint32, c_void_p

    loaded = CDLL(path)
    if library.version and loaded[library.version]() < library.least:
        raise ImportError(path)
    function = loaded[library.function]
    data_and_size = (c_void_p, c_size_t)
    function.argtypes = (c_uint32, *data_and_size) if library.before else (*data_and_size, c_uint32)
    function.restype = c_uint32

    def fast(data: memoryview, value: int = 0) -> int:
        if len(data) < _LEAST or data.readonly:  # ctypes asks for memory that it may write
            return crc32(data, value)
        held = (addressof(c_char.from_buffer(data)), len(data))
        return int(function(value, *held) if library.before else function(*held, value))

    fast.__name__ = library.file.partition(".")[0]
    return fast


def combined(first: int, second: int, length: int) -> int:
    """The CRC-32 of two runs of bytes one after the other, from that of each and the length of the second.

    >>> from zlib import crc32
    >>> combined(crc32(b"trans"), crc32(b"load"), 4) == crc32(b"transload")
    True
    """
    return times(power(8 * length), first) ^ second


def times(left: int, right: int) -> int:
    """Two polynomials, multiplied modulo that of the CRC."""
    product = 0
    bit = ONE
    while left:
        if left & bit:
            product ^= right
            left ^= bit
        bit >>= 1
        right = right >> 1 ^ (POLYNOMIAL if right & 1 else 0)
    return product


@lru_cache(256)  # parts of a record have few different lengths
def power(exponent: int) -> int:
    """x to that power."""
    out, square = ONE, ONE >> 1
    while exponent:
        if exponent & 1:
            out = times(square, out)
        square = times(square, square)
        exponent >>= 1
    return out
