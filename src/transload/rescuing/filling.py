"""What stands in the place of bytes that are lost."""

from __future__ import annotations

from typing import Literal

from transload.checkpoint import Storage
from transload.dtypes import itemsize

__all__ = ["Fill", "pattern_of"]

Fill = Literal["zeros", "nan"]

_NAN = {
    "float16": b"\x00\x7e",
    "bfloat16": b"\xc0\x7f",
    "float32": b"\x00\x00\xc0\x7f",
    "float64": b"\x00\x00\x00\x00\x00\x00\xf8\x7f",
    "complex32": b"\x00\x7e",
    "complex64": b"\x00\x00\xc0\x7f",
    "complex128": b"\x00\x00\x00\x00\x00\x00\xf8\x7f",
    "float8_e4m3fn": b"\x7f",
    "float8_e5m2": b"\x7f",
    "float8_e4m3fnuz": b"\x80",
    "float8_e5m2fnuz": b"\x80",
    "float8_e8m0fnu": b"\xff",
    "bcomplex32": b"\xc0\x7f",
}


def pattern_of(storage: Storage, dtype: str, fill: Fill) -> bytes:
    """The bytes of one element: not a number where the dtype has such a thing, else zero.

    >>> from transload.checkpoint import Storage
    >>> pattern_of(Storage("0", "0", "cpu", "bfloat16", 2, 2, 0), "bfloat16", "nan").hex()
    'c07f'
    """
    zero = bytes(itemsize(dtype))
    pattern = _NAN.get(dtype, zero) if fill == "nan" else zero
    return pattern[::-1] if storage.big_endian else pattern
