"""Whether the bytes of a record have the checksum they were saved with and, if not, which flipped bit explains it.

CRC-32 is linear: what a flipped bit does to the checksum depends only on how many bits follow it. It is a power of x
modulo the polynomial of the CRC, which is primitive: for 2^32 - 1 bits all these powers differ. Finding the power
is a discrete logarithm, which takes the square root of as many steps as there are bits.

The checksum of a deflated record is that of its inflated bytes and says nothing about its own bits. There every bit is
tried.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from math import isqrt
from typing import Literal, NamedTuple

from transload.checkpoint import Record
from transload.formats.pickle_machine import run
from transload.formats.verify import Lost, checksums
from transload.formats.zip import DEFLATED
from transload.io.checksums import ONE, POLYNOMIAL, times
from transload.io.checksums import power as power_of
from transload.io.sources import Source
from transload.rescuing.result import Certainty, Repair

MAX_RATIO = 1032
"""No deflated byte inflates to more."""

_PROVEN = 1 << 20
_PROBABLE = 100 << 20
"""Damage of any other kind looks like a flipped bit once in 2^32 / bits: 1 in 500 for a megabyte, 1 in 5 for these."""

_MAX_BITS = (1 << 32) - 1
"""In a record of more bits than these any damage at all looks like a flipped bit."""

_MAX_CANDIDATES = 4
_MAX_REPAIRED = 2000
"""Records in which a flipped bit is looked for: where there are more, something else has happened."""

_MAX_TRIED = 4 << 30
"""Bytes inflated in the search for flipped bits of deflated records: for one of 16 KB, all of its bits tried."""

_MAX_INFLATED = 4 << 30
_MAX_INFLATED_RATIO = 64
"""Deflated records are inflated to so many bytes, or so many times the size of the file, all together."""

_MAX_IN_MEMORY = 64 << 20
_EMPTY_BLOCK = b"\0\0\xff\xff"
_MAX_BLOCKS = 64


class Claim(NamedTuple):
    """Where the bytes of a record are, and what its headers say of them.

    ``present`` is how many of the ``stored`` bytes are in the file. ``size`` is what they inflate to. ``checksums`` are
    the stored ones, one for each copy.
    """

    payload: int
    stored: int
    present: int
    size: int
    method: int
    checksums: tuple[int, ...]


class Verdict(NamedTuple):
    """What became of a record.

    ``crc32`` is that of its bytes, inflated and repaired. ``repairs`` are what is to be changed in its source.
    ``candidates`` are bytes any of which, with one bit flipped, would explain the checksum, where there are several.
    """

    state: Literal["whole", "mended", "damaged", "cut", "unchecked"]
    crc32: int | None = None
    repairs: tuple[Repair, ...] = ()
    size: int = -1
    candidates: tuple[int, ...] = ()

    @property
    def usable(self) -> bool:
        """Whether the bytes are those that were saved, as far as can be known."""
        return self.state in ("whole", "mended", "unchecked")


def flipped_bits(syndrome: int, length: int, most: int = 8) -> list[tuple[int, int]]:
    """The bits of ``length`` bytes any of which alone, flipped, changes their CRC-32 by ``syndrome``.

    Each is its byte, and the value of the bit in it. Up to 512 MiB that is one, or none; of more than ``most`` the rest
    is left out.

    >>> from zlib import crc32
    >>> flipped_bits(crc32(b"transload") ^ crc32(b"transloae"), 9)
    [(8, 1)]
    """
    if not syndrome or not length:
        return []
    found: list[tuple[int, int]] = []
    power = _logarithm(times(power_of(_MAX_BITS - 32), syndrome), min(8 * length, _MAX_BITS))
    while power is not None and power < 8 * length and len(found) < most:
        found.append((length - 1 - power // 8, 128 >> power % 8))
        power += _MAX_BITS
    return found


def destroyed_bytes(syndrome: int, length: int) -> list[tuple[int, int]]:
    """The bytes of ``length`` any of which alone, destroyed, changes their CRC-32 by ``syndrome``, and by which bits.

    >>> from zlib import crc32
    >>> destroyed_bytes(crc32(b"transload") ^ crc32(b"tran?load"), 9) == [(4, ord("s") ^ ord("?"))]
    True
    """
    zero = zlib.crc32(b"\0")
    effects = [zlib.crc32(bytes([value])) ^ zero for value in range(256)]
    highest = {effect >> 24: value for value, effect in enumerate(effects)}
    found: list[tuple[int, int]] = []
    for position in range(length - 1, -1, -1):  # undo what each byte, from the last one on, has done to the change
        value = highest[syndrome >> 24]
        syndrome = (syndrome ^ effects[value]) << 8 | value
        if 0 < syndrome < 256:
            found.append((position, syndrome))
    return found


def _logarithm(value: int, most: int) -> int | None:
    """The power of x, below ``most``, that a value is: small steps from 1, large steps from the value."""
    stride = isqrt(most) + 1
    small: dict[int, int] = {}
    step = ONE
    for index in range(stride):
        small[step] = index
        step = step >> 1 ^ (POLYNOMIAL if step & 1 else 0)
    factor = power_of(_MAX_BITS - stride)
    tables: list[list[int]] = []  # the product of each byte of a value with the factor: the sum of those of its bits
    for shift in (0, 8, 16, 24):
        table = [0]
        for bit in range(8):
            product = times(1 << shift + bit, factor)
            table += [known ^ product for known in table]
        tables.append(table)
    low, second, third, high = tables
    for large in range(stride + 1):
        index = small.get(value, -1)
        if index >= 0:
            power = large * stride + index
            return power if power < most else None
        value = low[value & 255] ^ second[value >> 8 & 255] ^ third[value >> 16 & 255] ^ high[value >> 24]
    return None


def repaired_bytes(source: Source, offset: int, length: int, checksum: int | None) -> bytes:
    """Some bytes of a source, with a flipped bit undone if their checksum tells which it is."""
    data = source.read(offset, length)
    if not checksum or zlib.crc32(data) == checksum:
        return data
    flips = flipped_bits(zlib.crc32(data) ^ checksum, len(data), 2)
    return _flipped(data, *flips[0]) if len(flips) == 1 else data


def _flipped(data: bytes, byte: int, bits: int) -> bytes:
    return data[:byte] + bytes([data[byte] ^ bits]) + data[byte + 1 :]


# -- verdicts


def check_records(source: Source, claims: Sequence[Claim]) -> list[Verdict]:
    """A verdict on each record; their checksums are computed by as many threads as there are cores."""
    sums = _checksums(source, claims)
    records, tried = _MAX_REPAIRED, _MAX_TRIED  # what may still be spent on repairs, all records together
    verdicts: list[Verdict] = []
    for claim in claims:
        value = sums.get(claim)
        padding = _padding_repairs(source, claim) if claim.method == DEFLATED and value in claim.checksums else ()
        if claim.present < claim.stored:
            verdict = Verdict("cut")
        elif value is None and not (claim.method == DEFLATED and claim.checksums):
            verdict = Verdict("damaged")
        elif not claim.checksums:
            verdict = Verdict("unchecked", value, size=claim.size)
        elif value in claim.checksums and padding is not None:
            verdict = Verdict("whole", value, padding, size=claim.size)
        else:
            records -= 1
            tried -= 4 * claim.stored * (claim.stored + claim.size) if claim.method else 0
            if records < 0 or tried < 0:
                verdict = Verdict("damaged", value, size=claim.size)
            else:
                verdict = _repair_deflated(source, claim) if claim.method else _repair_stored(source, claim, value or 0)
        verdicts.append(verdict)
    return verdicts


def _checksums(source: Source, claims: Sequence[Claim]) -> dict[Claim, int]:
    """The checksum of what each record inflates to, unless it is cut or damaged."""
    left = [claim for claim in dict.fromkeys(claims) if claim.present >= claim.stored]
    inflated = sum(claim.size for claim in left if claim.method)
    allowed = (0, DEFLATED) if inflated <= max(_MAX_INFLATED, _MAX_INFLATED_RATIO * source.size) else (0,)
    left = [claim for claim in left if claim.method in allowed]
    sums: dict[Claim, int] = {}
    while left:  # records that overlap are left out by `checksums`, and summed in the next round
        found = checksums(source, [Record("", c.payload, c.size, c.stored, 0, c.method) for c in left])
        sums |= {left[index]: value for index, value in found.items() if not isinstance(value, Lost)}
        left = [claim for index, claim in enumerate(left) if index not in found] if found else []
    return sums


def _repair_stored(source: Source, claim: Claim, value: int) -> Verdict:
    """Find the one bit that explains the checksum; by any of the copies of it, if they differ."""
    votes = [vote for vote, _ in Counter(claim.checksums).most_common()]
    found = [(vote, *flip) for vote in votes for flip in flipped_bits(value ^ vote, claim.stored, _MAX_CANDIDATES)]
    if len(found) != 1 or 8 * claim.stored >= _MAX_BITS:
        candidates = tuple(claim.payload + byte for _, byte, _ in found)
        return Verdict("damaged", value, size=claim.stored, candidates=candidates)
    # How sure it is that one bit was flipped, and not more was damaged that looks the same.
    certainty: Certainty = "proven" if claim.stored <= _PROVEN else "probable"
    return _repaired(source, claim, *found[0], certainty if claim.stored <= _PROBABLE else "ambiguous")


def _repaired(source: Source, claim: Claim, vote: int, byte: int, bits: int, certainty: Certainty) -> Verdict:
    """The verdict on a record that has the checksum ``vote`` once these bits of a byte are flipped."""
    place = claim.payload + byte
    old = source.read(place, 1)[0]
    return Verdict("mended", vote, (Repair(place, old, old ^ bits, "", certainty),), claim.size)


_PROVEN_BYTE = 32 << 10
_PROBABLE_BYTE = 3 << 20
"""As for flipped bits: other damage looks like a destroyed byte once in 2^32 / (255 x bytes): 1 in 500, and 1 in 5."""


def repair_index(source: Source, claim: Claim, damaged: Verdict) -> Verdict:
    """Find the one destroyed byte that explains the checksum of an index, and that makes it a pickle again."""
    if claim.method or damaged.crc32 is None or claim.stored > _PROBABLE_BYTE:
        return damaged
    data = source.read(claim.payload, claim.stored)
    found = [
        (vote, byte, bits)
        for vote in dict.fromkeys(claim.checksums)
        for byte, bits in islice(destroyed_bytes(damaged.crc32 ^ vote, len(data)), _MAX_CANDIDATES)
        if not run(_flipped(data, byte, bits)).broken
    ]
    if len(found) != 1:
        return damaged
    return _repaired(source, claim, *found[0], "proven" if claim.stored <= _PROVEN_BYTE else "probable")


# -- deflated records


def _padding_repairs(source: Source, claim: Claim) -> tuple[Repair, ...] | None:
    """Set bits of a deflated record that mean nothing, and that writers leave zero; ``None`` if it does not end.

    They fill up bytes: the last one, and those before blocks that are not compressed, of which writers make empty ones.
    """
    if claim.stored > _PROVEN or claim.size >= _MAX_IN_MEMORY:
        return ()
    data = source.read(claim.payload, claim.stored)
    blocks = islice(re.finditer(_EMPTY_BLOCK, data[1:]), _MAX_BLOCKS)
    places = [claim.stored - 1, *(match.start() for match in blocks)]
    content = _inflate_all(data)
    if content is None:
        return None
    found: list[Repair] = []
    for place in places:
        new = old = data[place]
        for bit in (128, 64, 32, 16, 8, 4, 2, 1):
            if old & bit:
                if _inflate_all(_flipped(data, place, bit)) != content:
                    break
                new ^= bit
        if new != old:
            found.append(Repair(claim.payload + place, old, new, "", "proven"))
    return tuple(found)


def _inflate_all(data: bytes) -> bytes | None:
    """What some bytes inflate to, if all of them are needed for it."""
    unpack = zlib.decompressobj(-15)
    try:
        out = unpack.decompress(data, _MAX_IN_MEMORY)
    except zlib.error:
        return None
    return out if unpack.eof and not unpack.unused_data else None


def _repair_deflated(source: Source, claim: Claim) -> Verdict:
    """Try every bit: one that is flipped makes the record inflate to something of the right size and checksum."""
    data = source.read(claim.payload, claim.stored)
    found: list[tuple[int, int, int]] = []
    prefix, value, size = zlib.decompressobj(-15), 0, 0
    for index, byte in enumerate(data):
        for bit in range(8):
            unpack = prefix.copy()
            try:
                piece = unpack.decompress(bytes([byte ^ 1 << bit]) + data[index + 1 :], claim.size - size + 1)
            except zlib.error:
                continue
            if unpack.eof and not unpack.unused_data and size + len(piece) == claim.size:
                whole = zlib.crc32(piece, value)
                if whole in claim.checksums:
                    found.append((whole, index, 1 << bit))
        try:
            piece = prefix.decompress(data[index : index + 1])
        except zlib.error:  # the damage is before this byte
            break
        value, size = zlib.crc32(piece, value), size + len(piece)
        if size > claim.size or prefix.eof:
            break
    if not found:
        return Verdict("damaged")
    certainty: Certainty = "proven"
    if len(found) > 1:  # they inflate to the same: one of them may be what zlib makes of that
        certainty = "probable"
        content = _inflate_all(_flipped(data, *found[0][1:])) or b""
        packers = [zlib.compressobj(level, wbits=-15) for level in range(1, 10)]
        usual = [packer.compress(content) + packer.flush() for packer in packers]
        found.sort(key=lambda flip: _flipped(data, *flip[1:]) not in usual)
    return _repaired(source, claim, *found[0], certainty)
