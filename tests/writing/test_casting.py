"""Rounding: the pure-Python cast against ``struct`` and torch, the numpy cast against the pure-Python one."""

from __future__ import annotations

import random
import struct
from fractions import Fraction

import pytest
from tests.each import each

from transload.dtypes import ITEMSIZE
from transload.opening.elements import numpy_or_none
from transload.writing import transfer as casting
from transload.writing.transfer import CASTABLE, cast, cast_dtype, cast_slowly

CODES = {"float64": "d", "float32": "f", "float16": "e"}
PAIRS = [(a, b) for a in sorted(CASTABLE) for b in sorted(CASTABLE) if a != b]
pairs = each(("dtype", "target"), PAIRS, ids=lambda name: name)


def samples(dtype: str) -> bytes:
    """A third of all 16-bit patterns; for wider dtypes: limits, values between two 16-bit floats, random ones."""
    width = ITEMSIZE[dtype]
    if width == 2:
        return b"".join(bits.to_bytes(2, "little") for bits in range(0, 1 << 16, 3))
    generator = random.Random(7)  # noqa: S311 - the same samples every time
    patterns = [generator.getrandbits(8 * width) for _ in range(3000)]
    for _ in range(1500):  # near the middle between two float16 or bfloat16 values, near their limits, and around 1
        half = struct.unpack("<e", generator.getrandbits(15).to_bytes(2, "little"))[0]
        bfloat = struct.unpack("<f", (generator.getrandbits(15) << 16 | 0x8000).to_bytes(4, "little"))[0]
        for value in (half, half * (1 + 2**-11), half + 2.0**-25, bfloat, generator.gauss(0, 1)):
            if value == value and abs(value) < 3e38:  # noqa: PLR0124 - NaN
                bits = int.from_bytes(struct.pack(f"<{CODES[dtype]}", value), "little")
                patterns += [bits, bits + 1, max(0, bits - 1)]
    sign = 1 << 8 * width - 1
    limits = [0, 1, casting._INFINITE[dtype], casting._INFINITE[dtype] - 1, casting._INFINITE[dtype] + 1, sign - 1]
    patterns += [*limits, *(sign | limit for limit in limits)]
    return b"".join(bits.to_bytes(width, "little") for bits in patterns)


def value_of(bits: int, dtype: str) -> float:
    if dtype == "bfloat16":
        bits, dtype = bits << 16, "float32"
    value: float = struct.unpack(f"<{CODES[dtype]}", bits.to_bytes(ITEMSIZE[dtype], "little"))[0]
    return value


@pytest.mark.parametrize("target", ["float32", "float16"])
def test_cast_slowly_agrees_with_struct_pack(target: str) -> None:
    data = samples("float64")
    result, infinite = cast_slowly(data, "float64", target)
    width, code, overflows = ITEMSIZE[target], CODES[target], 0
    for number in range(len(data) // 8):
        (value,) = struct.unpack_from("<d", data, 8 * number)
        actual = result[width * number : width * (number + 1)]
        try:
            expected = struct.pack(f"<{code}", value)
        except OverflowError:
            overflows += 1
            assert struct.unpack(f"<{code}", actual)[0] == (float("inf") if value > 0 else float("-inf"))
            continue
        assert actual == expected or value != value  # noqa: PLR0124 - NaN
    assert overflows == infinite > 100


def test_cast_slowly_rounds_to_the_nearest_bfloat16() -> None:
    """No neighbour is nearer, and ties go to the even value."""
    data = samples("float64")
    result, _ = cast_slowly(data, "float64", "bfloat16")
    for number in range(0, len(data) // 8, 5):
        (value,) = struct.unpack_from("<d", data, 8 * number)
        bits = int.from_bytes(result[2 * number : 2 * number + 2], "little")
        if abs(value) > 3.3e38 or value != value:  # noqa: PLR0124 - NaN
            continue
        error = abs(Fraction(value_of(bits, "bfloat16")) - Fraction(value))
        for neighbour in (bits - 1, bits + 1):
            if neighbour & 0x7FFF < 0x7F80 and neighbour >= 0 and neighbour >> 15 == bits >> 15:
                distance = abs(Fraction(value_of(neighbour, "bfloat16")) - Fraction(value))
                assert distance > error or (distance == error and not bits & 1)


@pairs
def test_cast_with_numpy_agrees_with_cast_slowly(dtype: str, target: str) -> None:
    pytest.importorskip("numpy")
    data = samples(dtype)
    result, infinite = cast(memoryview(data), dtype, target)
    assert numpy_or_none() is not None
    assert (bytes(result), infinite) == cast_slowly(data, dtype, target)


@pairs
def test_cast_slowly_agrees_with_torch(dtype: str, target: str) -> None:
    torch = pytest.importorskip("torch")
    if dtype == "float64" and target != "float32":
        pytest.skip("torch itself rounds twice for this pair")
    data = samples(dtype)
    result, _ = cast_slowly(data, dtype, target)
    source = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))
    actual = torch.frombuffer(bytearray(result), dtype=getattr(torch, target))
    expected = source.to(getattr(torch, target))
    not_nan = ~source.isnan()
    assert torch.equal(actual[not_nan], expected[not_nan])
    assert bool(actual[~not_nan].isnan().all())


def test_cast_without_numpy_gives_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    data = struct.pack("<3f", 1.0, 3e38, -65519.0)
    fast = cast(memoryview(data), "float32", "float16")
    monkeypatch.setattr(casting, "numpy_or_none", lambda: None)
    assert cast(memoryview(data), "float32", "float16") == fast
    assert fast[1] == 1


def test_only_real_floating_dtypes_are_cast() -> None:
    assert cast_dtype("float32", "bfloat16") == "bfloat16"
    assert cast_dtype("bfloat16", "bfloat16") == "bfloat16"
    assert cast_dtype("int64", "bfloat16") == "int64"
    assert cast_dtype("complex64", "float16") == "complex64"
    assert cast_dtype("float32", "") == "float32"
