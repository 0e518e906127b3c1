"""CRC-32 put together from parts: what was read in pieces, in any order, has the checksum of the whole."""

from __future__ import annotations

from functools import lru_cache

__all__ = ["combined"]

_POLYNOMIAL = 0xEDB88320


def combined(first: int, second: int, length: int) -> int:
    """The CRC-32 of two runs of bytes one after the other, from that of each and the length of the second.

    >>> from zlib import crc32
    >>> combined(crc32(b"trans"), crc32(b"load"), 4) == crc32(b"transload")
    True
    """
    return _times(_shift(length), first) ^ second


def _times(left: int, right: int) -> int:
    """Two polynomials over GF(2), multiplied modulo that of the CRC; the highest bit is the constant term."""
    product = 0
    bit = 1 << 31
    while left:
        if left & bit:
            product ^= right
            left ^= bit
        bit >>= 1
        right = right >> 1 ^ (_POLYNOMIAL if right & 1 else 0)
    return product


@lru_cache(256)
def _shift(length: int) -> int:
    """x to the power of eight times a length: what so many bytes that follow do to a checksum."""
    power, square = 1 << 31, 1 << 23  # 1, and x to the eighth
    while length:
        if length & 1:
            power = _times(square, power)
        square = _times(square, square)
        length >>= 1
    return power
