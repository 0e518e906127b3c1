"""NaN and infinities counted bit by bit, against torch's own count."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.each import each

from transload.verifying import FLOATING, counted

KNOWN = sorted(name for name in FLOATING if hasattr(torch, name) and not name.startswith("float4"))


def by_torch(data: bytes, name: str) -> tuple[int, int]:
    numbers = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(getattr(torch, name))
    if numbers.dtype.is_complex:
        numbers = torch.view_as_real(numbers)
    wide = numbers.to(torch.float64)
    return (int(wide.isnan().sum()), int(wide.isinf().sum()))


@pytest.mark.parametrize("name", KNOWN)
@given(data=st.binary(min_size=16, max_size=800), special=st.binary(min_size=1, max_size=8))
def test_noise(name: str, data: bytes, special: bytes) -> None:
    """Of any bits, many of them set: exponents are full in some elements, and fractions empty."""
    full = bytes(byte | special[place % len(special)] for place, byte in enumerate(data))
    for held in (data, full):
        whole = held[: len(held) // 16 * 16]
        assert counted(whole, name) == by_torch(whole, name)


@each("name", [name for name in KNOWN if not getattr(torch, name).is_complex])
def test_every_kind_of_number(name: str) -> None:
    numbers = torch.tensor([0.0, -0.0, 1.0, float("inf"), float("-inf"), float("nan"), 3e38, -3e38, 1e-45] * 7)
    data = bytes(numbers.to(getattr(torch, name)).view(torch.uint8).numpy())
    assert counted(data, name) == by_torch(data, name)


def test_nans_that_only_their_last_bit_tells() -> None:
    assert counted(struct.pack("<2I", 0x7F800001, 0xFF800000), "float32") == (1, 1)
    assert counted(struct.pack("<2Q", 0x7FF0000000000001, 0xFFF0000000000000), "float64") == (1, 1)
    assert counted(struct.pack("<2H", 0x7C01, 0xFC00), "float16") == (1, 1)


def test_what_has_no_such_numbers() -> None:
    assert counted(b"\xff" * 64, "float4_e2m1fn_x2") == (0, 0)


def test_nothing_at_all() -> None:
    assert counted(b"", "float32") == (0, 0)
