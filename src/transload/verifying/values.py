"""How many elements are NaN or infinite, without numpy: bit by bit, but for many elements at once.

Of each element the bytes that hold the exponent are looked at first; where no exponent is full, which is nearly
everywhere, that is all. Else each byte of all elements becomes a byte 0 or 1, those become one long integer, and
``&`` finds the elements where all conditions hold.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["FLOATING", "Values", "counted"]


class Values(NamedTuple):
    """How many of the numbers of a tensor are NaN, and how many are infinite; a complex element is two numbers."""

    nan: int = 0
    inf: int = 0


class _Form(NamedTuple):
    """Bits of the exponent and of the fraction, by the bytes of a number, the lowest first."""

    exponent: tuple[int, ...]
    fraction: tuple[int, ...]


def _form(width: int, exponent: int, fraction: int) -> _Form:
    return _Form(tuple(exponent.to_bytes(width, "little")), tuple(fraction.to_bytes(width, "little")))


_DOUBLE = _form(8, 0x7FF0 << 48, (1 << 52) - 1)
_SINGLE = _form(4, 0x7F800000, 0x7FFFFF)
_HALF = _form(2, 0x7C00, 0x3FF)
_FORMS: dict[str, _Form] = {
    "float64": _DOUBLE,
    "complex128": _DOUBLE,
    "float32": _SINGLE,
    "complex64": _SINGLE,
    "float16": _HALF,
    "complex32": _HALF,
    "bfloat16": _form(2, 0x7F80, 0x7F),
    "bcomplex32": _form(2, 0x7F80, 0x7F),
    "float8_e5m2": _form(1, 0x7C, 0x03),
}

# Those of one byte that are not as IEEE 754 has it: no infinity, and few NaNs.
_NANS: dict[str, bytes] = {
    "float8_e4m3fn": b"\x7f\xff",
    "float8_e4m3fnuz": b"\x80",
    "float8_e5m2fnuz": b"\x80",
    "float8_e8m0fnu": b"\xff",
    "float4_e2m1fn_x2": b"",
}

FLOATING = frozenset({*_FORMS, *_NANS})
"""The dtypes that have such numbers, or could."""


def counted(data: bytes, dtype: str) -> Values:
    """The numbers in some whole elements, little-endian.

    >>> import struct
    >>> counted(struct.pack("<3f", 1, float("nan"), float("-inf")), "float32")
    Values(nan=1, inf=1)
    """
    if dtype in _NANS:
        return Values(sum(data.count(code) for code in _NANS[dtype]))
    form = _FORMS.get(dtype)
    return Values() if form is None else _counted(data, form)


def _counted(data: bytes, form: _Form) -> Values:
    width = len(form.exponent)
    highest = data[width - 1 :: width]
    if not any(code in highest for code in _CODES[form.exponent[-1]]):
        return Values()
    special = -1
    for place, mask in enumerate(form.exponent):
        if mask:
            special &= _flags(data[place::width], _FULL[mask])
    if not special:
        return Values()
    whole = special
    for place, mask in enumerate(form.fraction):
        if mask:
            whole &= _flags(data[place::width], _EMPTY[mask])
    infinite = whole.bit_count()
    return Values(special.bit_count() - infinite, infinite)


def _flags(column: bytes, table: bytes) -> int:
    return int.from_bytes(column.translate(table), "little")


_MASKS = {mask for form in _FORMS.values() for mask in (*form.exponent, *form.fraction) if mask}
_FULL = {mask: bytes(code & mask == mask for code in range(256)) for mask in _MASKS}
_EMPTY = {mask: bytes(code & mask == 0 for code in range(256)) for mask in _MASKS}
_CODES = {mask: [code for code in range(256) if table[code]] for mask, table in _FULL.items()}
