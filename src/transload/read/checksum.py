"""CRC-32 as fast as it can be had, and put together from parts: what was read in any order has the sum of the whole."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, lru_cache
from importlib import import_module
from zlib import crc32

__all__ = ["ONE", "POLYNOMIAL", "Crc32", "combined", "fastest_crc32", "power", "times"]

POLYNOMIAL = 0xEDB88320
ONE = 1 << 31
"""Polynomials over GF(2) have the constant term in the highest bit."""

Crc32 = Callable[[memoryview, int], int]
"""Of some bytes, and of what came before them."""

_PACKAGES = ("isal.isal_zlib", "zlib_ng.zlib_ng")
_LIBRARY = "libdeflate.so.0"
_LEAST = 4096  # bytes for which it is worth to leave zlib


@cache
def fastest_crc32() -> Crc32:
    """The function for large writable buffers, which lets other threads run meanwhile.

    That of a package with ``zlib``'s functions or of the system's libdeflate, all of which multiply without carries
    where the processor can: eight times as fast as ``zlib``, which is what there is otherwise.
    """
    for make in (*(lambda name=name: import_module(name).crc32 for name in _PACKAGES), _of_library):
        try:
            found: Crc32 = make()
            if found(memoryview(bytearray(b"load" * _LEAST)), crc32(b"trans")) == crc32(b"trans" + b"load" * _LEAST):
                return found
        except Exception:  # noqa: BLE001, S112, PERF203 - not there, or broken: the next one
            continue
    return crc32


def _of_library() -> Crc32:
    """libdeflate's, by way of ctypes: it is where programs that read TIFF images are."""
    if not sys.platform.startswith("linux"):
        raise ImportError(_LIBRARY)
    from ctypes import CDLL, addressof, c_char, c_size_t, c_uint32, c_void_p

    function = CDLL(_LIBRARY).libdeflate_crc32
    function.argtypes, function.restype = (c_uint32, c_void_p, c_size_t), c_uint32

    def fast(data: memoryview, value: int = 0) -> int:
        if len(data) < _LEAST or data.readonly:  # ctypes asks for memory that it may write
            return crc32(data, value)
        return int(function(value, addressof(c_char.from_buffer(data)), len(data)))

    return fast


def combined(first: int, second: int, length: int) -> int:
    """The CRC-32 of two runs of bytes one after the other, from that of each and the length of the second.

    >>> from zlib import crc32
    >>> combined(crc32(b"trans"), crc32(b"load"), 4) == crc32(b"transload")
    True
    """
    return times(_shift(length), first) ^ second


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


def power(exponent: int) -> int:
    """x to that power."""
    out, square = ONE, ONE >> 1
    while exponent:
        if exponent & 1:
            out = times(square, out)
        square = times(square, square)
        exponent >>= 1
    return out


@lru_cache(256)
def _shift(length: int) -> int:
    """What so many bytes that follow do to a checksum."""
    return power(8 * length)
