"""Which bit of a run of bytes was flipped, from its checksum alone.

CRC-32 is linear: what a flipped bit does to the checksum depends on how many bits follow it and on nothing else. It is
a power of x modulo the polynomial of the CRC, which is primitive: for 2^32 - 1 bits all those powers differ. Which
power it is, is a discrete logarithm, found in the square root of as many steps as there are bits.
"""

from __future__ import annotations

from math import isqrt
from typing import NamedTuple

from transload.io.checksums import ONE, POLYNOMIAL, times
from transload.io.checksums import power as power_of

__all__ = ["MOST_BITS", "Bit", "flipped_bits"]

MOST_BITS = (1 << 32) - 1
"""In a record of more bits than these any damage at all looks like a flipped bit."""


class Bit(NamedTuple):
    """A bit by the byte it is in, and its number there: 0 is the lowest."""

    byte: int
    bit: int


def flipped_bits(syndrome: int, length: int, most: int = 8) -> list[Bit]:
    """The bits of ``length`` bytes any of which alone, flipped, changes their CRC-32 by ``syndrome``.

    Up to 512 MiB that is one, or none; of more than ``most`` the rest is left out.

    >>> from zlib import crc32
    >>> flipped_bits(crc32(b"transload") ^ crc32(b"transloae"), 9)
    [Bit(byte=8, bit=0)]
    """
    if not syndrome or not length:
        return []
    found: list[Bit] = []
    power = _logarithm(times(power_of(MOST_BITS - 32), syndrome), min(8 * length, MOST_BITS))
    while power is not None and power < 8 * length and len(found) < most:
        found.append(Bit(length - 1 - power // 8, 7 - power % 8))
        power += MOST_BITS
    return found


def _logarithm(value: int, most: int) -> int | None:
    """The power of x, below ``most``, that a value is: small steps from 1, large steps from the value."""
    stride = isqrt(most) + 1
    small: dict[int, int] = {}
    step = ONE
    for index in range(stride):
        small[step] = index
        step = step >> 1 ^ (POLYNOMIAL if step & 1 else 0)
    low, second, third, high = _tables(power_of(MOST_BITS - stride))
    for large in range(stride + 1):
        index = small.get(value, -1)
        if index >= 0:
            power = large * stride + index
            return power if power < most else None
        value = low[value & 255] ^ second[value >> 8 & 255] ^ third[value >> 16 & 255] ^ high[value >> 24]
    return None


def _tables(factor: int) -> list[list[int]]:
    """What multiplying each byte of a value by a factor gives: sums of what its bits give."""
    tables: list[list[int]] = []
    for shift in (0, 8, 16, 24):
        table = [0]
        for bit in range(8):
            product = times(1 << shift + bit, factor)
            table += [known ^ product for known in table]
        tables.append(table)
    return tables
