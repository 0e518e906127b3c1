"""Compare the bytes of records with their checksums, and find the flipped bit that explains a difference.

CRC-32 is linear: how a flipped bit changes the checksum depends only on the number of bits that follow it. The change
is a power of x modulo the polynomial of the CRC, which is primitive: for 2^32 - 1 bits all these powers differ. Finding
the power is a discrete logarithm, in as many steps as the square root of the number of bits.

The checksum of a deflated record is that of its inflated bytes, so there every bit is tried.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from math import isqrt
from typing import Literal

from transload.checkpoint import Record
from transload.formats.pickle_machine import run
from transload.formats.record_checksums import Lost, checksums
from transload.formats.zip import DEFLATED
from transload.frozen import NamedTuple
from transload.io.checksums import ONE, POLYNOMIAL, power, times
from transload.io.sources import Source

Certainty = Literal["proven", "probable", "ambiguous"]

# Damage of any other kind looks like a flipped bit once in 2^32 / bits: 1 in 500 for 1 MB, 1 in 5 for 100 MB.
_PROVEN = 1 << 20
_PROBABLE = 100 << 20
_MAX_BITS = (1 << 32) - 1  # in a record of more bits, any damage looks like a flipped bit
_MAX_CANDIDATES = 4
_MAX_REPAIRED = 2000  # records in which a flipped bit is searched for: if more are damaged, there is another cause
# Bytes inflated in the search for flipped bits of deflated records: enough to try all bits of one of 16 KB.
_MAX_TRIED = 4 << 30
# All deflated records together are inflated to at most this many bytes, or this many times the size of the file.
_MAX_INFLATED = 4 << 30
_MAX_INFLATED_RATIO = 64
_MAX_IN_MEMORY = 64 << 20
_EMPTY_BLOCK = b"\0\0\xff\xff"
_MAX_BLOCKS = 64


class Repair(NamedTuple):
    """A repaired byte: its offset in the damaged file, its old and new value, and its record.

    ``record`` is empty for a byte in a header, the directory or padding.
    """

    position: int
    old: int
    new: int
    record: str
    certainty: Certainty

    @property
    def bits(self) -> tuple[int, ...]:
        """The bits that differ; 0 is the lowest."""
        return tuple(bit for bit in range(8) if (self.old ^ self.new) >> bit & 1)


class Claim(NamedTuple):
    """What the headers say about the bytes of a record, which begin at ``payload``.

    ``stored`` is their number, and ``size`` what they inflate to. ``checksums`` are all copies of the stored checksum.
    """

    payload: int
    stored: int
    size: int
    method: int
    checksums: tuple[int, ...]


class Verdict(NamedTuple):
    """What became of a record.

    ``crc32`` is that of its bytes, inflated and repaired. ``repairs`` are changes of the source. ``candidates`` are the
    offsets of several bytes, if a flipped bit in any of them would explain the checksum.
    """

    state: Literal["whole", "repaired", "damaged", "cut", "unchecked"]
    crc32: int | None = None
    repairs: tuple[Repair, ...] = ()
    size: int = -1
    candidates: tuple[int, ...] = ()

    @property
    def usable(self) -> bool:
        """Whether the bytes are those that were saved, as far as is known."""
        return self.state in ("whole", "repaired", "unchecked")


def flipped_bits(syndrome: int, length: int, most: int = 8) -> list[tuple[int, int]]:
    """The bits in ``length`` bytes that change the CRC-32 by ``syndrome`` if one of them is flipped; at most ``most``.

    Each is the index of a byte, and the value of the bit in it. Up to 512 MiB there is at most one.
    """
    if not syndrome or not length:
        return []
    flips: list[tuple[int, int]] = []
    bit = _logarithm(times(power(_MAX_BITS - 32), syndrome), min(8 * length, _MAX_BITS))
    while bit is not None and bit < 8 * length and len(flips) < most:
        flips.append((length - 1 - bit // 8, 128 >> bit % 8))
        bit += _MAX_BITS
    return flips


def destroyed_bytes(syndrome: int, length: int) -> list[tuple[int, int]]:
    """The bytes out of ``length`` that change the CRC-32 by ``syndrome`` if one is changed, and the bits to change."""
    zero = zlib.crc32(b"\0")
    effects = [zlib.crc32(bytes([value])) ^ zero for value in range(256)]
    highest = {effect >> 24: value for value, effect in enumerate(effects)}
    changes: list[tuple[int, int]] = []
    for position in range(length - 1, -1, -1):  # undo the effect of each byte, from the last one on
        value = highest[syndrome >> 24]
        syndrome = (syndrome ^ effects[value]) << 8 | value
        if 0 < syndrome < 256:
            changes.append((position, syndrome))
    return changes


def _logarithm(value: int, most: int) -> int | None:
    """The exponent below ``most`` to which x must be raised to get ``value``, by baby steps and giant steps."""
    stride = isqrt(most) + 1
    small: dict[int, int] = {}
    step = ONE
    for index in range(stride):
        small[step] = index
        step = step >> 1 ^ (POLYNOMIAL if step & 1 else 0)
    factor = power(_MAX_BITS - stride)
    tables: list[list[int]] = []  # the product of the factor with every value of each byte
    for shift in (0, 8, 16, 24):
        table = [0]
        for bit in range(8):
            product = times(1 << shift + bit, factor)
            table += [entry ^ product for entry in table]
        tables.append(table)
    low, second, third, high = tables
    for large in range(stride + 1):
        index = small.get(value, -1)
        if index >= 0:
            exponent = large * stride + index
            return exponent if exponent < most else None
        value = low[value & 255] ^ second[value >> 8 & 255] ^ third[value >> 16 & 255] ^ high[value >> 24]
    return None


def repaired_bytes(source: Source, offset: int, length: int, checksum: int | None) -> bytes:
    """Some bytes of a source, with a flipped bit undone if the checksum identifies it."""
    data = source.read(offset, length)
    if not checksum or zlib.crc32(data) == checksum:
        return data
    flips = flipped_bits(zlib.crc32(data) ^ checksum, len(data), 2)
    return _flipped(data, *flips[0]) if len(flips) == 1 else data


def _flipped(data: bytes, byte: int, bits: int) -> bytes:
    return data[:byte] + bytes([data[byte] ^ bits]) + data[byte + 1 :]


# -- verdicts


def check_records(source: Source, claims: Sequence[Claim]) -> list[Verdict]:
    """A verdict on each record; checksums are computed by as many threads as there are cores."""
    pending = [claim for claim in dict.fromkeys(claims) if claim.payload + claim.stored <= source.size]
    inflated = sum(claim.size for claim in pending if claim.method)
    allowed = (0, DEFLATED) if inflated <= max(_MAX_INFLATED, _MAX_INFLATED_RATIO * source.size) else (0,)
    pending = [claim for claim in pending if claim.method in allowed]
    sums: dict[Claim, int] = {}  # of what each record inflates to, unless it is cut or damaged
    while pending:  # `checksums` leaves out records that overlap: they are summed in the next round
        computed = checksums(source, [Record("", c.payload, c.size, c.stored, 0, c.method) for c in pending])
        sums |= {pending[index]: value for index, value in computed.items() if not isinstance(value, Lost)}
        pending = [claim for index, claim in enumerate(pending) if index not in computed] if computed else []
    records, tried = _MAX_REPAIRED, _MAX_TRIED  # the budget for repairs of all records
    verdicts: list[Verdict] = []
    for claim in claims:
        value = sums.get(claim)
        padding = _padding_repairs(source, claim) if claim.method == DEFLATED and value in claim.checksums else ()
        if claim.payload + claim.stored > source.size:
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


def _repair_stored(source: Source, claim: Claim, value: int) -> Verdict:
    """Find the flipped bit that explains the checksum, or any of its copies if they differ."""
    votes = [vote for vote, _ in Counter(claim.checksums).most_common()]
    flips = [(vote, *flip) for vote in votes for flip in flipped_bits(value ^ vote, claim.stored, _MAX_CANDIDATES)]
    if len(flips) != 1 or 8 * claim.stored >= _MAX_BITS:
        candidates = tuple(claim.payload + byte for _, byte, _ in flips)
        return Verdict("damaged", value, size=claim.stored, candidates=candidates)
    # How certain it is that one bit was flipped, and that no other damage looks the same.
    certainty: Certainty = "proven" if claim.stored <= _PROVEN else "probable"
    return _repaired(source, claim, *flips[0], certainty if claim.stored <= _PROBABLE else "ambiguous")


def _repaired(source: Source, claim: Claim, vote: int, byte: int, bits: int, certainty: Certainty) -> Verdict:
    """The verdict on a record that has the checksum ``vote`` if these bits of a byte are flipped."""
    place = claim.payload + byte
    old = source.read(place, 1)[0]
    return Verdict("repaired", vote, (Repair(place, old, old ^ bits, "", certainty),), claim.size)


# As for flipped bits: other damage looks like a destroyed byte once in 2^32 / (255 x bytes): 1 in 500, and 1 in 5.
_PROVEN_BYTE = 32 << 10
_PROBABLE_BYTE = 3 << 20


def repair_index(source: Source, claim: Claim, damaged: Verdict) -> Verdict:
    """Find the one changed byte that explains the checksum of an index; undone, it must leave a valid pickle."""
    if claim.method or damaged.crc32 is None or claim.stored > _PROBABLE_BYTE:
        return damaged
    data = source.read(claim.payload, claim.stored)
    changes = [
        (vote, byte, bits)
        for vote in dict.fromkeys(claim.checksums)
        for byte, bits in islice(destroyed_bytes(damaged.crc32 ^ vote, len(data)), _MAX_CANDIDATES)
        if not run(_flipped(data, byte, bits)).broken
    ]
    if len(changes) != 1:
        return damaged
    return _repaired(source, claim, *changes[0], "proven" if claim.stored <= _PROVEN_BYTE else "probable")


# -- deflated records


def _padding_repairs(source: Source, claim: Claim) -> tuple[Repair, ...] | None:
    """Clear padding bits that writers leave zero in a deflated record; ``None`` if the deflate stream does not end.

    They pad the last byte, and those before uncompressed blocks, which are empty where a writer has flushed.
    """
    if claim.stored > _PROVEN or claim.size >= _MAX_IN_MEMORY:
        return ()
    data = source.read(claim.payload, claim.stored)
    blocks = islice(re.finditer(_EMPTY_BLOCK, data[1:]), _MAX_BLOCKS)
    places = [claim.stored - 1, *(match.start() for match in blocks)]
    content = _inflate_all(data)
    if content is None:
        return None
    repairs: list[Repair] = []
    for place in places:
        new = old = data[place]
        for bit in (128, 64, 32, 16, 8, 4, 2, 1):
            if old & bit:
                if _inflate_all(_flipped(data, place, bit)) != content:
                    break
                new ^= bit
        if new != old:
            repairs.append(Repair(claim.payload + place, old, new, "", "proven"))
    return tuple(repairs)


def _inflate_all(data: bytes) -> bytes | None:
    """What some bytes inflate to; ``None`` unless all of them are used."""
    unpack = zlib.decompressobj(-15)
    try:
        out = unpack.decompress(data, _MAX_IN_MEMORY)
    except zlib.error:
        return None
    return out if unpack.eof and not unpack.unused_data else None


def _repair_deflated(source: Source, claim: Claim) -> Verdict:
    """Try every bit: with the right one flipped, the record inflates to the right size and checksum."""
    data = source.read(claim.payload, claim.stored)
    flips: list[tuple[int, int, int]] = []
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
                    flips.append((whole, index, 1 << bit))
        try:
            piece = prefix.decompress(data[index : index + 1])
        except zlib.error:  # the damage is before this byte
            break
        value, size = zlib.crc32(piece, value), size + len(piece)
        if size > claim.size or prefix.eof:
            break
    if not flips:
        return Verdict("damaged")
    certainty: Certainty = "proven"
    if len(flips) > 1:  # all inflate to the same: prefer what zlib would have written
        certainty = "probable"
        content = _inflate_all(_flipped(data, *flips[0][1:])) or b""
        packers = [zlib.compressobj(level, wbits=-15) for level in range(1, 10)]
        usual = [packer.compress(content) + packer.flush() for packer in packers]
        flips.sort(key=lambda flip: _flipped(data, *flip[1:]) not in usual)
    return _repaired(source, claim, *flips[0], certainty)
