"""Rounding: the slow way against Python's own and torch's, the fast way against the slow one."""

from __future__ import annotations

import random
import struct
from fractions import Fraction

import pytest
from tests.each import each

from transload.dtypes import ITEMSIZE
from transload.tensors.content import numpy_or_none
from transload.writing import transfer as casting
from transload.writing.transfer import FLOATING, cast, cast_dtype, cast_slowly

CODES = {"float64": "d", "float32": "f", "float16": "e"}
PAIRS = [(a, b) for a in sorted(FLOATING) for b in sorted(FLOATING) if a != b]
pairs = each(("dtype", "wanted"), PAIRS, ids=lambda name: name)


def samples(dtype: str) -> bytes:
    """All numbers of 16 bits; of wider dtypes, limits, values between two numbers of 16 bits, and random ones."""
    width = ITEMSIZE[dtype]
    if width == 2:
        return b"".join(bits.to_bytes(2, "little") for bits in range(0, 1 << 16, 3))
    chosen = random.Random(7)  # noqa: S311 - to have the same ones every time
    found = [chosen.getrandbits(8 * width) for _ in range(3000)]
    for _ in range(1500):  # near the middle between two float16 or bfloat16, near their ends, and around 1
        half = struct.unpack("<e", chosen.getrandbits(15).to_bytes(2, "little"))[0]
        brain = struct.unpack("<f", (chosen.getrandbits(15) << 16 | 0x8000).to_bytes(4, "little"))[0]
        for value in (half, half * (1 + 2**-11), half + 2.0**-25, brain, chosen.gauss(0, 1)):
            if value == value and abs(value) < 3e38:  # noqa: PLR0124 - not a number
                bits = int.from_bytes(struct.pack(f"<{CODES[dtype]}", value), "little")
                found += [bits, bits + 1, max(0, bits - 1)]
    sign = 1 << 8 * width - 1
    ends = [0, 1, casting._INFINITE[dtype], casting._INFINITE[dtype] - 1, casting._INFINITE[dtype] + 1, sign - 1]
    found += [*ends, *(sign | end for end in ends)]
    return b"".join(bits.to_bytes(width, "little") for bits in found)


def value_of(bits: int, dtype: str) -> float:
    if dtype == "bfloat16":
        bits, dtype = bits << 16, "float32"
    value: float = struct.unpack(f"<{CODES[dtype]}", bits.to_bytes(ITEMSIZE[dtype], "little"))[0]
    return value


@pytest.mark.parametrize("wanted", ["float32", "float16"])
def test_the_slow_way_is_pythons_own(wanted: str) -> None:
    data = samples("float64")
    made, infinite = cast_slowly(data, "float64", wanted)
    width, code, met = ITEMSIZE[wanted], CODES[wanted], 0
    for number in range(len(data) // 8):
        (value,) = struct.unpack_from("<d", data, 8 * number)
        mine = made[width * number : width * (number + 1)]
        try:
            theirs = struct.pack(f"<{code}", value)
        except OverflowError:
            met += 1
            assert struct.unpack(f"<{code}", mine)[0] == (float("inf") if value > 0 else float("-inf"))
            continue
        assert mine == theirs or value != value  # noqa: PLR0124 - not a number
    assert met == infinite > 100


def test_the_slow_way_to_bfloat16_is_the_nearest() -> None:
    """By definition: no other of its neighbours is nearer, and of two as near it is the even one."""
    data = samples("float64")
    made, _ = cast_slowly(data, "float64", "bfloat16")
    for number in range(0, len(data) // 8, 5):
        (value,) = struct.unpack_from("<d", data, 8 * number)
        bits = int.from_bytes(made[2 * number : 2 * number + 2], "little")
        if abs(value) > 3.3e38 or value != value:  # noqa: PLR0124 - not a number
            continue
        off = abs(Fraction(value_of(bits, "bfloat16")) - Fraction(value))
        for other in (bits - 1, bits + 1):
            if other & 0x7FFF < 0x7F80 and other >= 0 and other >> 15 == bits >> 15:
                distance = abs(Fraction(value_of(other, "bfloat16")) - Fraction(value))
                assert distance > off or (distance == off and not bits & 1)


@pairs
def test_both_ways_agree(dtype: str, wanted: str) -> None:
    pytest.importorskip("numpy")
    data = samples(dtype)
    made, infinite = cast(memoryview(data), dtype, wanted)
    assert numpy_or_none() is not None
    assert (bytes(made), infinite) == cast_slowly(data, dtype, wanted)


@pairs
def test_torch_rounds_as_we_do(dtype: str, wanted: str) -> None:
    torch = pytest.importorskip("torch")
    if dtype == "float64" and wanted != "float32":
        pytest.skip("torch itself rounds twice here")
    data = samples(dtype)
    made, _ = cast_slowly(data, dtype, wanted)
    given = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))
    mine = torch.frombuffer(bytearray(made), dtype=getattr(torch, wanted))
    theirs = given.to(getattr(torch, wanted))
    number = ~given.isnan()
    assert torch.equal(mine[number], theirs[number])
    assert bool(mine[~number].isnan().all())


def test_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    data = struct.pack("<3f", 1.0, 3e38, -65519.0)
    fast = cast(memoryview(data), "float32", "float16")
    monkeypatch.setattr(casting, "numpy_or_none", lambda: None)
    assert cast(memoryview(data), "float32", "float16") == fast
    assert fast[1] == 1


def test_only_floating_ones_are_cast() -> None:
    assert cast_dtype("float32", "bfloat16") == "bfloat16"
    assert cast_dtype("bfloat16", "bfloat16") == "bfloat16"
    assert cast_dtype("int64", "bfloat16") == "int64"
    assert cast_dtype("complex64", "float16") == "complex64"
    assert cast_dtype("float32", "") == "float32"
