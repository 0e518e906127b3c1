"""How a deflated run of bytes says what it says.

Two runs of bytes can unpack to the same: where a text stands twice before, a match may copy either, and of two matches
that follow one another the first or the second may be the longer. Writers take the nearer text and the longer match
first, and name no code they do not use; so of several runs that differ in a bit it can be told which was written.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Style", "style_of"]

_LENGTHS = (
    3,
    4,
    5,
    6,
    7,
    8,
    9,
    10,
    11,
    13,
    15,
    17,
    19,
    23,
    27,
    31,
    35,
    43,
    51,
    59,
    67,
    83,
    99,
    115,
    131,
    163,
    195,
    227,
    258,
)
_LENGTH_BITS = (0,) * 8 + (1,) * 4 + (2,) * 4 + (3,) * 4 + (4,) * 4 + (5,) * 4 + (0,)
_ORDER = (16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15)
_END = 256

_Codes = dict[tuple[int, int], int]


class _Bits:
    def __init__(self, data: bytes) -> None:
        self._value = int.from_bytes(data, "little")
        self._at = 0
        self.size = 8 * len(data)

    def take(self, count: int) -> int:
        value = self._value >> self._at & (1 << count) - 1
        self._at += count
        if self._at > self.size:
            raise ValueError("cut")
        return value

    def align(self) -> None:
        self._at += -self._at % 8

    def skip(self, count: int) -> None:
        self._at += count

    def symbol(self, codes: _Codes) -> int:
        code = 0
        for length in range(1, 16):
            code = code << 1 | self.take(1)
            found = codes.get((length, code), -1)
            if found >= 0:
                return found
        raise ValueError("no such code")


class Style(NamedTuple):
    """How far back all matches reach, how many codes are never used or none, and how long the matches are.

    The lengths are negative: of several styles the least is that of a writer.
    """

    reach: int
    idle: int
    lengths: tuple[int, ...]


def style_of(data: bytes) -> Style:
    """The style of bytes that unpack.

    >>> import zlib
    >>> pack = zlib.compressobj(wbits=-15)
    >>> style_of(pack.compress(b"abcdabcd") + pack.flush()).reach
    4
    """
    bits, total, idle = _Bits(data), 0, 0
    lengths: list[int] = []
    last = 0
    while not last:
        last, kind = bits.take(1), bits.take(2)
        if kind == 0:
            bits.align()
            length = bits.take(16)
            bits.skip(16 + 8 * length)
            continue
        literals, distances, slack = _fixed() if kind == 1 else _dynamic(bits)
        far, unused = _block(bits, literals, distances, lengths)
        total += far
        idle += unused + slack if kind == 2 else 0
    return Style(total, idle, tuple(lengths))


def _block(bits: _Bits, literals: _Codes, distances: _Codes, lengths: list[int]) -> tuple[int, int]:
    total = 0
    used: set[int] = set()
    while True:
        symbol = bits.symbol(literals)
        used.add(symbol)
        if symbol == _END:
            return total, len(set(literals.values()) - used)
        if symbol > _END:
            lengths.append(-_LENGTHS[symbol - 257] - bits.take(_LENGTH_BITS[symbol - 257]))
            place = bits.symbol(distances)
            extra = max(0, place // 2 - 1)
            base = place + 1 if place < 4 else (2 + place % 2 << extra) + 1
            total += base + bits.take(extra)


def _codes(lengths: list[int]) -> _Codes:
    """Codes in the order of their lengths, and of their symbols within a length."""
    codes: _Codes = {}
    code = 0
    for length in range(1, 16):
        for symbol, own in enumerate(lengths):
            if own == length:
                codes[length, code] = symbol
                code += 1
        code <<= 1
    return codes


def _fixed() -> tuple[_Codes, _Codes, int]:
    return _codes([8] * 144 + [9] * 112 + [7] * 24 + [8] * 8), _codes([5] * 30), 0


def _dynamic(bits: _Bits) -> tuple[_Codes, _Codes, int]:
    """The codes a block brings with it, and how many it names at the end of its lists that are none."""
    literals, distances, orders = bits.take(5) + 257, bits.take(5) + 1, bits.take(4) + 4
    own = [0] * 19
    for place in _ORDER[:orders]:
        own[place] = bits.take(3)
    codes, lengths = _codes(own), list[int]()
    while len(lengths) < literals + distances:
        symbol = bits.symbol(codes)
        if symbol < 16:
            lengths.append(symbol)
        elif symbol == 16:
            lengths += lengths[-1:] * (3 + bits.take(2))
        else:
            lengths += [0] * (3 + bits.take(3) if symbol == 17 else 11 + bits.take(7))
    slack = (literals > 257 and not lengths[literals - 1]) + (distances > 1 and not lengths[literals + distances - 1])
    return (
        _codes(lengths[:literals]),
        _codes(lengths[literals : literals + distances]),
        slack + (_own_slack(own, orders)),
    )


def _own_slack(own: list[int], orders: int) -> int:
    """Whether the list of the lengths of lengths ends in one that is none."""
    return int(orders > 4 and not own[_ORDER[orders - 1]])
