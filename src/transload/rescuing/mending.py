"""Whether the bytes of a record have the checksum they were saved with; if not, which flipped bit explains it."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from transload.checkpoint import Record
from transload.formats.verify import Lost, checksums
from transload.io.pool import each, threads
from transload.io.sources import Source
from transload.rescuing.bits import MOST_BITS, Bit, flipped_bits

__all__ = ["Certainty", "Claim", "Verdict", "certainty_of", "mended_bytes", "verdicts"]

Certainty = Literal["proven", "probable", "ambiguous"]
State = Literal["whole", "mended", "damaged", "cut", "unchecked"]

_CHUNK = 4 << 20
_SHOWN = 4
_PROVEN = 1 << 20
_PROBABLE = 100 << 20
"""Damage of any other kind looks like a flipped bit once in 2^32 / bits: 1 in 500 for a megabyte, 1 in 5 for these."""

_EMPTY_BLOCK = b"\0\0\xff\xff"
_MOST_BLOCKS = 64
_MOST_UNPACKED = 64 << 20
_MOST_TRIED = 4 << 30
"""Bytes unpacked in the search for flipped bits of compressed records: for one of 16 KB, all of its bits tried."""

_MOST_MENDED = 2000
"""Records in which a flipped bit is looked for: where there are more, something else has happened."""

_MOST_INFLATED = 4 << 30
_MOST_RATIO = 64
"""Compressed records are unpacked to so many bytes, or to so many times the size of the file, all together."""


class Claim(NamedTuple):
    """Where the bytes of a record lie, and what is said of them. ``checksums`` are those stored, one for each copy."""

    payload: int
    stored: int
    present: int
    size: int
    method: int
    checksums: tuple[int, ...]


class Verdict(NamedTuple):
    """What became of a record. ``crc32`` is of its bytes, unpacked and mended; ``bits`` are places in the source.

    ``maybe`` are bytes any of which, with one bit flipped, would explain its checksum, where there are several.
    """

    state: State
    crc32: int | None = None
    bits: tuple[Bit, ...] = ()
    certainty: Certainty = "proven"
    size: int = -1
    maybe: tuple[int, ...] = ()


def certainty_of(length: int) -> Certainty:
    """How sure it is that one bit was flipped, and not more was damaged that looks the same.

    >>> certainty_of(1000), certainty_of(50 << 20), certainty_of(1 << 30)
    ('proven', 'probable', 'ambiguous')
    """
    if length <= _PROVEN:
        return "proven"
    return "probable" if length <= _PROBABLE else "ambiguous"


def verdicts(source: Source, claims: Sequence[Claim]) -> list[Verdict]:
    """A verdict for each record; their checksums are computed by as many threads as there are cores."""
    sums = _all_sums(source, claims)
    effort = _Effort()
    return [_verdict(source, claim, *found, effort) for claim, found in zip(claims, sums, strict=True)]


class _Effort:
    """What may still be spent on mending, all records of a file together."""

    def __init__(self) -> None:
        self.records = _MOST_MENDED
        self.tried = _MOST_TRIED

    def spend(self, nbytes: int = 0) -> bool:
        """Whether one more record may be mended, with so many bytes unpacked on the way."""
        self.records -= 1
        self.tried -= nbytes
        return self.records >= 0 and self.tried >= 0


_Sum = tuple[int | None, int]
"""Checksum and size of what a record unpacks to; ``None`` where it does not, is not all there, or cannot be read."""

_NO_SUM: _Sum = (None, -1)


def _all_sums(source: Source, claims: Sequence[Claim]) -> list[_Sum]:
    there = [claim for claim in claims if claim.present >= claim.stored]
    packed = {claim: _NO_SUM for claim in there if claim.method == 8}
    if sum(claim.size for claim in packed) <= max(_MOST_INFLATED, _MOST_RATIO * source.size):
        packed = _packed_sums(source, list(packed))
    plain = _plain_sums(source, dict.fromkeys((claim.payload, claim.stored) for claim in there if not claim.method))
    return [
        packed.get(claim, _NO_SUM) if claim.method else plain.get((claim.payload, claim.stored), _NO_SUM)
        for claim in claims
    ]


def _plain_sums(source: Source, places: Iterable[tuple[int, int]]) -> dict[tuple[int, int], _Sum]:
    """Of runs of bytes, by offset and length. They may lie over one another: those left out are summed next."""
    found: dict[tuple[int, int], _Sum] = {}
    left = list(places)
    while left:
        records = [Record("", offset, length, length, 0) for offset, length in left]
        sums = {left[index]: value for index, value in checksums(source, records).items()}
        found |= {place: _NO_SUM if isinstance(value, Lost) else (value, place[1]) for place, value in sums.items()}
        left = [place for place in left if place not in sums] if sums else []
    return found


def _packed_sums(source: Source, claims: Sequence[Claim]) -> dict[Claim, _Sum]:
    found: dict[Claim, _Sum] = {}

    def do(claim: Claim) -> None:
        found[claim] = _unpacked_sum(source, claim)

    each(claims, lambda: do, threads() if sum(claim.present for claim in claims) >= 2 * _CHUNK else 1)
    return found


def _unpacked_sum(source: Source, claim: Claim) -> _Sum:
    unpack, value, size = zlib.decompressobj(-15), 0, 0
    try:
        for start in range(0, claim.stored, _CHUNK):
            data = source.read(claim.payload + start, min(_CHUNK, claim.stored - start))
            while data or not unpack.eof:
                piece = unpack.decompress(data, _CHUNK)
                value, size = zlib.crc32(piece, value), size + len(piece)
                data = unpack.unconsumed_tail
                if size > claim.size and claim.size >= 0:  # it declares less: a bomb, or damage
                    return _NO_SUM
                if not data and len(piece) < _CHUNK:
                    break
    except zlib.error:
        return _NO_SUM
    return (value, size) if unpack.eof else _NO_SUM


def _verdict(source: Source, claim: Claim, value: int | None, size: int, effort: _Effort) -> Verdict:
    if claim.present < claim.stored:
        return Verdict("cut")
    if claim.method not in (0, 8) or (value is None and not claim.checksums):
        return Verdict("damaged")
    if not claim.checksums:
        return Verdict("unchecked", value, size=size)
    if value in claim.checksums:
        return Verdict("whole", value, _idle_bits(source, claim) if claim.method == 8 else (), size=size)
    votes = [vote for vote, _ in Counter(claim.checksums).most_common()]
    if claim.method == 8:
        return _mend_packed(source, claim, votes, effort)
    return Verdict("damaged") if value is None else _mend(claim, votes, value, effort)


def _mend(claim: Claim, votes: list[int], value: int, effort: _Effort) -> Verdict:
    """Find the one bit that explains the checksum; by any of the copies of it, if they differ."""
    if not effort.spend():
        return Verdict("damaged", value, size=claim.stored)
    found = [(vote, bit) for vote in votes for bit in flipped_bits(value ^ vote, claim.stored, _SHOWN)]
    if len(found) != 1 or 8 * claim.stored >= MOST_BITS:
        maybe = tuple(claim.payload + bit.byte for _, bit in found)
        return Verdict("damaged", value, size=claim.stored, maybe=maybe)
    vote, bit = found[0]
    place = Bit(claim.payload + bit.byte, bit.bit)
    return Verdict("mended", vote, (place,), certainty_of(claim.stored), claim.stored)


def _idle_bits(source: Source, claim: Claim) -> tuple[Bit, ...]:
    """Bits of a compressed record that mean nothing, and are not zero as they are written.

    They fill up bytes: the last one, and those before blocks that are not compressed, of which writers make empty ones.
    """
    if claim.stored > _PROVEN:
        return ()
    data = source.read(claim.payload, claim.stored)
    places, at = [claim.stored - 1], data.find(_EMPTY_BLOCK)
    while at > 0 and len(places) < _MOST_BLOCKS:
        places.append(at - 1)
        at = data.find(_EMPTY_BLOCK, at + 1)
    plain, found = _unpacked(data), []
    for place in places:
        for bit in range(7, -1, -1):
            if data[place] >> bit & 1:
                if _unpacked(data[:place] + bytes([data[place] & ~(1 << bit)]) + data[place + 1 :]) != plain:
                    break
                found.append(Bit(claim.payload + place, bit))
    return tuple(found)


def _unpacked(data: bytes) -> bytes | None:
    """What some bytes unpack to, if all of them are needed for it."""
    unpack = zlib.decompressobj(-15)
    try:
        out = unpack.decompress(data, _MOST_UNPACKED)
    except zlib.error:
        return None
    return out if unpack.eof and not unpack.unused_data else None


def _mend_packed(source: Source, claim: Claim, votes: list[int], effort: _Effort) -> Verdict:
    """Try every bit of a compressed record: its checksum is that of what it unpacks to, so it does not tell which."""
    if not effort.spend(4 * claim.stored * (claim.stored + claim.size)):
        return Verdict("damaged")
    data = source.read(claim.payload, claim.stored)
    found = list(_single_bits(data, claim, votes))
    if not found:
        return Verdict("damaged")
    if len(found) > 1:  # they unpack to the same: there is one that a writer would have made
        found.sort(key=lambda each: _likeness(data, each[0]))
    bit, value = found[0]
    certainty: Certainty = "proven" if len(found) == 1 else "probable"
    return Verdict("mended", value, (Bit(claim.payload + bit.byte, bit.bit),), certainty, claim.size)


def _likeness(data: bytes, bit: Bit) -> tuple[int, int, tuple[int, ...]]:
    from transload.rescuing.deflate import style_of

    try:
        return style_of(_with_flipped(data, [bit]))
    except (ValueError, IndexError):
        return (1 << 62, 0, ())


def _single_bits(data: bytes, claim: Claim, votes: list[int]) -> Iterator[tuple[Bit, int]]:
    """The bits that, flipped, make a compressed record unpack to something of the right checksum."""
    prefix, value, size = zlib.decompressobj(-15), 0, 0
    for index, byte in enumerate(data):
        for bit in range(8):
            other = bytes([byte ^ 1 << bit]) + data[index + 1 :]
            found = _tried(prefix, value, size, other, claim)
            if found is not None and found in votes:
                yield Bit(index, bit), found
        try:
            piece = prefix.decompress(data[index : index + 1])
        except zlib.error:  # what is wrong lies before this byte
            return
        value, size = zlib.crc32(piece, value), size + len(piece)
        if size > claim.size or prefix.eof:
            return


def _tried(prefix: zlib._Decompress, value: int, size: int, rest: bytes, claim: Claim) -> int | None:
    """The checksum of what a beginning and this rest unpack to, if that is of the right size."""
    unpack = prefix.copy()
    try:
        piece = unpack.decompress(rest, claim.size - size + 1)
    except zlib.error:
        return None
    if not unpack.eof or unpack.unused_data or size + len(piece) != claim.size:
        return None
    return zlib.crc32(piece, value)


def mended_bytes(source: Source, payload: int, stored: int, checksum: int | None) -> bytes:
    """The bytes of a record, with a flipped bit undone if its checksum tells which it is."""
    data = source.read(payload, stored)
    if checksum is None or not checksum or zlib.crc32(data) == checksum:
        return data
    return _with_flipped(data, flipped_bits(zlib.crc32(data) ^ checksum, len(data), 2))


def _with_flipped(data: bytes, bits: Iterable[Bit]) -> bytes:
    out = bytearray(data)
    found = list(bits)
    if len(found) == 1:
        out[found[0].byte] ^= 1 << found[0].bit
    return bytes(out)
