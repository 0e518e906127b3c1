"""Counts of NaN and infinity from the bits, compared with those of torch."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.each import each

from transload.opening.values import FLOATING, count_special

DTYPES = sorted(name for name in FLOATING if hasattr(torch, name) and not name.startswith("float4"))


def counted_by_torch(data: bytes, name: str) -> tuple[int, int]:
    numbers = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(getattr(torch, name))
    if numbers.dtype.is_complex:
        numbers = torch.view_as_real(numbers)
    wide = numbers.to(torch.float64)
    return (int(wide.isnan().sum()), int(wide.isinf().sum()))


@pytest.mark.parametrize("name", DTYPES)
@given(data=st.binary(min_size=16, max_size=800), special=st.binary(min_size=1, max_size=8))
def test_counts_in_random_bytes_equal_those_of_torch(name: str, data: bytes, special: bytes) -> None:
    """Many set bits give some elements a full exponent; others have an empty fraction."""
    many_bits_set = bytes(byte | special[position % len(special)] for position, byte in enumerate(data))
    for raw in (data, many_bits_set):
        aligned = raw[: len(raw) // 16 * 16]
        assert count_special(aligned, name) == counted_by_torch(aligned, name)
        assert count_special(aligned, name, np) == counted_by_torch(aligned, name)


@each("name", [name for name in DTYPES if not getattr(torch, name).is_complex])
def test_counts_of_special_values_equal_those_of_torch(name: str) -> None:
    numbers = torch.tensor([0.0, -0.0, 1.0, float("inf"), float("-inf"), float("nan"), 3e38, -3e38, 1e-45] * 7)
    data = bytes(numbers.to(getattr(torch, name)).view(torch.uint8).numpy())
    assert count_special(data, name) == counted_by_torch(data, name)
    assert count_special(memoryview(data), name, np) == counted_by_torch(data, name)


def test_nan_with_only_the_last_fraction_bit_is_counted() -> None:
    assert count_special(struct.pack("<2I", 0x7F800001, 0xFF800000), "float32") == (1, 1)
    assert count_special(struct.pack("<2Q", 0x7FF0000000000001, 0xFFF0000000000000), "float64") == (1, 1)
    assert count_special(struct.pack("<2H", 0x7C01, 0xFC00), "float16") == (1, 1)


def test_float4_has_no_nan_or_infinity() -> None:
    assert count_special(b"\xff" * 64, "float4_e2m1fn_x2") == (0, 0)


def test_empty_data_has_no_nan_or_infinity() -> None:
    assert count_special(b"", "float32") == (0, 0)
