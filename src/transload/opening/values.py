"""How many elements of a tensor are NaN or infinite, also without numpy."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

# Without its sign bit, a number is infinite if exactly the bits of its exponent are set, and NaN if all of them and
# further ones are set. So adding 1 at the end of the exponent of either carries into the sign bit, and adding one less
# carries for NaN alone. All elements together form one long integer; no carry reaches the next element.

# By dtype: bytes of a number, and bits of its mantissa.
_FORMS = {
    **dict.fromkeys(("float64", "complex128"), (8, 52)),
    **dict.fromkeys(("float32", "complex64"), (4, 23)),
    **dict.fromkeys(("float16", "complex32"), (2, 10)),
    **dict.fromkeys(("bfloat16", "bcomplex32"), (2, 7)),
    "float8_e5m2": (1, 2),
}

# One-byte dtypes that do not follow IEEE 754: no infinity, and few NaNs.
NANS: dict[str, bytes] = {
    "float8_e4m3fn": b"\x7f\xff",
    "float8_e4m3fnuz": b"\x80",
    "float8_e5m2fnuz": b"\x80",
    "float8_e8m0fnu": b"\xff",
    "float4_e2m1fn_x2": b"",
}

FLOATING = frozenset({*_FORMS, *NANS})
"""The dtypes that can have NaN or infinities."""


def count_special(data: bytes | memoryview, dtype: str, numpy: Any = None) -> tuple[int, int]:
    """How many numbers are NaN, and how many infinite; ``dtype`` is in ``FLOATING``, a complex element is two numbers.

    With ``numpy``, other threads can run while it finds out that there are none.

    >>> import struct
    >>> count_special(struct.pack("<3f", 1, float("nan"), float("-inf")), "float32")
    (1, 1)
    """
    if numpy is not None and dtype in _FORMS:
        width, fraction = _FORMS[dtype]
        exponent = (1 << 8 * width - 1) - (1 << fraction)
        codes = numpy.frombuffer(data, f"<u{width}")
        if not len(codes) or (codes & codes.dtype.type(exponent)).max() < exponent:
            return 0, 0
    data = bytes(data)
    if dtype in NANS:
        return sum(data.count(code) for code in NANS[dtype]), 0
    width, fraction = _FORMS[dtype]
    sign, count = 1 << 8 * width - 1, len(data) // width
    highest, least = data[width - 1 :: width], sign - (1 << fraction) >> 8 * (width - 1)
    if not any(code in highest or code | 128 in highest for code in range(least, 128)):  # true for nearly all data
        return 0, 0
    signs = _repeated(sign, width, count)
    numbers = int.from_bytes(data, "little")
    numbers ^= numbers & signs
    special = (numbers + _repeated(1 << fraction, width, count) & signs).bit_count()
    nan = (numbers + _repeated((1 << fraction) - 1, width, count) & signs).bit_count()
    return nan, special - nan


@lru_cache(8)
def _repeated(value: int, width: int, count: int) -> int:
    return int.from_bytes(value.to_bytes(width, "little") * count, "little")
