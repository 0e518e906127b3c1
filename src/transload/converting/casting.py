"""Floating-point numbers in another width, rounded once, to the nearest, ties to even; little-endian bytes throughout.

With numpy at the speed of memory; without it by ``rounded_slowly``, number by number, which is also what the fast one
is tested against. torch rounds a float64 to bfloat16 in two steps, by way of float32; here it is one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from transload.dtypes import ITEMSIZE

__all__ = ["FLOATING", "cast", "is_cast", "rounded_slowly"]

FLOATING = ("float64", "float32", "float16", "bfloat16")
_MANTISSA = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}
_EXPONENT = {"float64": 11, "float32": 8, "float16": 5, "bfloat16": 8}
_INFINITE = {"float64": 0x7FF << 52, "float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}


def is_cast(dtype: str, wanted: str) -> bool:
    """Whether a tensor of one dtype becomes another one where ``wanted`` is asked for: only floating ones do."""
    return bool(wanted) and dtype in FLOATING and dtype != wanted


def cast(data: memoryview, dtype: str, wanted: str) -> tuple[Any, int]:
    r"""The numbers in the other dtype, and how many finite ones became infinite.

    >>> from struct import pack
    >>> cast(memoryview(pack("<2f", 1.0, 65520.0)), "float32", "float16")
    (b'\x00<\x00|', 1)
    """
    numpy = _numpy()
    return rounded_slowly(bytes(data), dtype, wanted) if numpy is None else _rounded(numpy, data, dtype, wanted)


@cache
def _numpy() -> Any:
    """The module, if it is there and works."""
    try:
        import numpy as np
    except Exception:  # noqa: BLE001 - broken in whatever way: it goes without
        return None
    return np


def _sign(dtype: str) -> int:
    """The bit that is the sign."""
    return 1 << 8 * ITEMSIZE[dtype] - 1


def _nan(dtype: str) -> int:
    """The bits of what is no number, as every processor makes it; the sign is that of the number it came from."""
    return _INFINITE[dtype] | 1 << (_MANTISSA[dtype] - 1)


# -- by numpy


def _rounded(numpy: Any, data: memoryview, dtype: str, wanted: str) -> tuple[bytes, int]:
    with numpy.errstate(all="ignore"):
        if dtype == "bfloat16":
            values = (numpy.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
        else:
            values = numpy.frombuffer(data, f"<f{ITEMSIZE[dtype]}")
        if wanted == "bfloat16":
            bits = (_rounded_to_odd(numpy, values) if dtype == "float64" else values.astype("<f4")).view("<u4")
            # The upper half of each float32, after adding what makes the lower half round it.
            made = ((bits + ((bits >> 16) & 1) + numpy.uint32(0x7FFF)) >> 16).astype("<u2")
        else:
            made = values.astype(f"<f{ITEMSIZE[wanted]}").view(f"<u{ITEMSIZE[wanted]}")
        nans = numpy.isnan(values)
        if nans.any():
            bits = made.dtype.type  # numpy 1 would make floats of its largest integers and ours
            negative, positive = bits(_sign(wanted) | _nan(wanted)), bits(_nan(wanted))
            made[nans] = numpy.where(numpy.signbit(values[nans]), negative, positive)
        infinite = made & made.dtype.type(_sign(wanted) - 1) == _INFINITE[wanted]
        new = int(numpy.count_nonzero(infinite & numpy.isfinite(values))) if infinite.any() else 0
    return made.tobytes(), new


def _rounded_to_odd(numpy: Any, values: Any) -> Any:
    """float64 as float32, cut off, with the last bit set where that lost anything: rounding it again is then right."""
    near = values.astype("<f4")
    back = near.astype("<f8")
    inexact = (back != values) & ~numpy.isnan(values)
    bits = near.view("<u4") - (inexact & (numpy.abs(back) > numpy.abs(values))).astype("<u4")
    return (bits | inexact.astype("<u4")).view("<f4")


# -- number by number


def rounded_slowly(data: bytes, dtype: str, wanted: str) -> tuple[bytes, int]:
    """What ``cast`` gives, by integers alone."""
    width, out, new = ITEMSIZE[dtype], bytearray(), 0
    for at in range(0, len(data), width):
        bits = int.from_bytes(data[at : at + width], "little")
        made = _rounded_one(bits, dtype, wanted)
        is_new = made & (_sign(wanted) - 1) == _INFINITE[wanted] and bits & (_sign(dtype) - 1) != _INFINITE[dtype]
        new += is_new
        out += made.to_bytes(ITEMSIZE[wanted], "little")
    return bytes(out), new


def _rounded_one(bits: int, dtype: str, wanted: str) -> int:
    """The bits of one number in another dtype."""
    fraction, exponent = _MANTISSA[dtype], _EXPONENT[dtype]
    power = bits >> fraction & (1 << exponent) - 1
    digits = bits & (1 << fraction) - 1
    sign = (bits >> (fraction + exponent)) << (_MANTISSA[wanted] + _EXPONENT[wanted])
    if power == (1 << exponent) - 1:
        return sign | (_nan(wanted) if digits else _INFINITE[wanted])
    if power:
        digits |= 1 << fraction
    if not digits:
        return sign
    # The number is digits * 2**scale.
    scale = max(power, 1) - (1 << exponent - 1) + 1 - fraction
    fraction, bias = _MANTISSA[wanted], (1 << _EXPONENT[wanted] - 1) - 1
    # The exponent of the last digit: that of the smallest numbers at least.
    last = max(scale + digits.bit_length() - 1 - fraction, 1 - bias - fraction)
    shift = last - scale
    if shift > 0:
        half, lost = 1 << (shift - 1), digits & ((1 << shift) - 1)
        digits >>= shift
        digits += lost > half or (lost == half and digits & 1)
    else:
        digits <<= -shift
    # Rounding up may carry into the exponent, and so it should.
    made = digits + ((last + bias + fraction - 1) << fraction)
    return sign | min(made, _INFINITE[wanted])
