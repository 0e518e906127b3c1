"""What the elements of tensors are as numbers: statistics of them, and the differences between two tensors.

With numpy at about the speed of memory; without it number by number, with the same results. Data comes in chunks, as
``ElementReader.chunks`` yields it. A complex element counts as two numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache
from math import frexp, fsum, inf, isfinite, isnan, ldexp, nan, nextafter, sqrt
from struct import pack, unpack
from typing import Any

from transload.contents import TensorStats
from transload.frozen import NamedTuple
from transload.opening.elements import component, numpy_or_none
from transload.opening.values import FLOATING, NANS

_BLOCK = 1 << 15  # numbers handled at once: as float64, a few such arrays fit a CPU's cache
_BLOCK_OF_SEVERAL = 1 << 18  # with several threads: they take turns between the calls of numpy, which must take longer
MOST_THREADS = 8
"""Threads that count as fast as any number of them: 1.1 GB/s of float32 with 8, 0.5 GB/s with one, as with 16."""
_FEW = 1 << 16  # for fewer numbers than there are codes of 16 bits, sorting beats a table of all codes

_CODES = {
    "float64": "d",
    "float32": "f",
    "float16": "e",
    "complex128": "d",
    "complex64": "f",
    "complex32": "e",
    "int64": "q",
    "int32": "i",
    "int16": "h",
    "int8": "b",
    "uint64": "Q",
    "uint32": "I",
    "uint16": "H",
    "uint8": "B",
    "bool": "B",
    "qint32": "i",
    "qint8": "b",
    "quint8": "B",
}
"""How ``struct`` and numpy (after ``_NUMPY``) call one number of a dtype."""

_NUMPY = dict(zip("dfeqihbQIHB", ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1"], strict=True))
_UPPER_HALVES = ("bfloat16", "bcomplex32")

# Bits of the exponent and the mantissa, and the bias, of the dtypes that are looked up; ``NANS`` has their NaNs.
_TABLED = {
    "float8_e4m3fn": (4, 3, 7),
    "float8_e4m3fnuz": (4, 3, 8),
    "float8_e5m2": (5, 2, 15),
    "float8_e5m2fnuz": (5, 2, 16),
    "float8_e8m0fnu": (8, 0, 127),
    "float4_e2m1fn_x2": (2, 1, 1),
}

NUMERIC = frozenset({*_CODES, *_UPPER_HALVES, *_TABLED})
"""The dtypes whose elements are numbers; others are only bytes here."""

_EXACT = {"int64", "uint64"}  # as float64, large ones would be rounded

# For each dtype: from which magnitude on finite numbers are rounded to infinity (to NaN, in float8_e4m3fn), and up to
# which one they are rounded to zero. Ties go to even: 464 is halfway between 448 and what would be 480, and stays.
TARGETS: dict[str, tuple[float, float]] = {
    "float16": (65520.0, 2.0**-25),
    "bfloat16": (2.0**128 - 2.0**119, 2.0**-134),
    "float8_e4m3fn": (nextafter(464.0, inf), 2.0**-10),
    "float8_e5m2": (61440.0, 2.0**-17),
}
_LEAST_HIGH = min(high for high, _ in TARGETS.values())
_MOST_LOW = max(low for _, low in TARGETS.values())
_BIAS, _MASK = 1023, 0x7FF  # of the exponent of a float64


@cache
def _table(dtype: str) -> tuple[float, ...]:
    """The number that each byte of a small dtype stands for; two numbers for each byte of a packed one.

    >>> _table("float8_e4m3fn")[0x7E], _table("float4_e2m1fn_x2")[:4]
    (448.0, (0.0, 0.0, 0.5, 0.0))
    """
    exponents, mantissa, bias = _TABLED[dtype]
    if dtype == "float8_e8m0fnu":
        return (*(ldexp(1.0, code - bias) for code in range(255)), nan)
    numbers = []
    for code in range(2 << exponents + mantissa):
        exponent, fraction = code >> mantissa & (1 << exponents) - 1, code & (1 << mantissa) - 1
        number = ldexp(fraction + (1 << mantissa if exponent else 0), max(exponent, 1) - bias - mantissa)
        if dtype == "float8_e5m2" and exponent == (1 << exponents) - 1:
            number = nan if fraction else inf
        numbers.append(nan if code in NANS.get(dtype, b"") else -number if code >> exponents + mantissa else number)
    if dtype.endswith("_x2"):
        return tuple(number for code in range(256) for number in (numbers[code & 15], numbers[code >> 4]))
    return tuple(numbers)


def decoded(data: memoryview, dtype: str) -> Any:
    """The numbers in some bytes: an array of numpy, or a tuple without it.

    >>> [float(number) for number in decoded(memoryview(bytes([0x80, 0x3F, 0, 0xC0])), "bfloat16")]
    [1.0, -2.0]
    """
    numpy = numpy_or_none()
    if dtype in _CODES:
        code = _CODES[dtype]
        if numpy is None:
            plain = unpack(f"<{len(data) // component(dtype)}{code}", data)
            return plain if dtype != "bool" else tuple([int(number != 0) for number in plain])
        numbers = numpy.frombuffer(data, f"<{_NUMPY[code]}")
        return numbers if dtype != "bool" else (numbers != 0).astype("u1")
    if dtype in _UPPER_HALVES:
        if numpy is not None:
            return (numpy.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
        wide = bytearray(2 * len(data))
        wide[2::4], wide[3::4] = data[::2], data[1::2]
        return unpack(f"<{len(data) // 2}f", wide)
    table, pair = _table(dtype), dtype.endswith("_x2")
    if numpy is not None:
        every = numpy.array(table, "f4")
        return every.reshape(256, -1)[numpy.frombuffer(data, "u1")].reshape(-1)
    return (
        tuple(table[2 * code + at] for code in data for at in (0, 1)) if pair else tuple(table[code] for code in data)
    )


# -- statistics


class Statistics:
    """The statistics of the numbers of one dtype: ``add`` chunks, then ask for the ``result``.

    ``threads`` is how many of these there are at once, each in a thread.
    Numbers of at most two bytes are counted by their codes first, so that each code is looked at once.
    """

    def __init__(self, dtype: str, threads: int = 1) -> None:
        self._dtype = dtype
        self._block = _BLOCK if threads == 1 else _BLOCK_OF_SEVERAL
        self._coded = component(dtype) <= 2 and not dtype.endswith("_x2")
        self._codes: Any = Counter[int]()  # or an array of numpy
        self._floating = dtype in FLOATING
        self._count = self._nan = self._inf = self._zeros = 0
        self._low: Any = None
        self._high: Any = None
        self._mean = self._squares = 0.0  # of the deviations from the mean
        self._powers: Counter[int] = Counter()
        self._over = dict.fromkeys(TARGETS, 0)
        self._under = dict.fromkeys(TARGETS, 0)

    def add(self, data: memoryview) -> None:
        """Add a chunk: whole elements."""
        numpy = numpy_or_none()
        if not self._coded:
            for numbers in _blocks(data, self._dtype, self._block):
                self._add(numbers, None)
        elif numpy is None:
            width = component(self._dtype)
            self._codes.update(unpack(f"<{len(data) // width}{'xBH'[width]}", data))
        else:
            codes = numpy.frombuffer(data, f"<u{component(self._dtype)}")
            if len(codes) < _FEW and component(self._dtype) == 2:
                found, counts = numpy.unique(codes, return_counts=True)
                self._codes.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))
            else:
                counts = numpy.bincount(codes, minlength=1 << 8 * component(self._dtype))
                self._table = counts + getattr(self, "_table", 0)

    def _add(self, numbers: Any, counts: Any) -> None:
        if len(numbers):
            (self._add_slowly if numpy_or_none() is None else self._add_array)(numbers, counts)

    def _add_array(self, numbers: Any, counts: Any) -> None:
        """Add an array of numbers, each as often as the array ``counts`` says."""
        numpy = numpy_or_none()
        values = numbers.astype("f8")
        powers = (values.view("i8") >> 52) & _MASK
        found = numpy.bincount(powers, counts, _MASK + 1)
        if found[_MASK]:
            is_nan, finite = numpy.isnan(values), numpy.isfinite(values)
            weights = counts if counts is not None else numpy.ones(len(values), "i8")
            self._nan += int(weights[is_nan].sum())
            self._inf += int(weights[~finite & ~is_nan].sum())
            numbers, values = numbers[finite], values[finite]
            counts = counts[finite] if counts is not None else None
        if not len(values):
            return
        zero = values == 0 if found[0] else None
        zeros = 0 if zero is None else int(zero.sum() if counts is None else counts[zero].sum())
        found[0] -= zeros  # what is left are subnormal numbers of float64
        self._zeros += zeros
        for power in numpy.flatnonzero(found[:_MASK]).tolist():
            self._powers[power - _BIAS] += int(found[power])
        low, high = numbers.min().item(), numbers.max().item()
        self._bound(low, high)
        with numpy.errstate(all="ignore"):
            count = len(values) if counts is None else int(counts.sum())
            mean = float(values.sum() if counts is None else (values * counts).sum()) / count
            deviations = values - mean
            weighted = deviations if counts is None else deviations * counts
            self._merge(count, mean, float(numpy.einsum("i,i->", deviations, weighted)))
        if not self._floating:
            return
        below = int(found[: frexp(_MOST_LOW)[1] + _BIAS].sum())
        if not below and max(abs(low), abs(high)) < _LEAST_HIGH:
            return
        magnitudes = numpy.abs(values)
        for target, (over, under) in TARGETS.items():
            chosen = magnitudes >= over if max(abs(low), abs(high)) >= over else None
            if chosen is not None:
                self._over[target] += int(chosen.sum() if counts is None else counts[chosen].sum())
            if found[: frexp(under)[1] + _BIAS].any():
                chosen = magnitudes <= under
                lost = int(chosen.sum() if counts is None else counts[chosen].sum())
                self._under[target] += lost - zeros

    def _add_slowly(self, numbers: Iterable[Any], counts: Iterable[int] | None) -> None:
        """The same without numpy, number by number."""
        finite: list[tuple[Any, int]] = []
        for number, count in (
            ((number, 1) for number in numbers) if counts is None else zip(numbers, counts, strict=True)
        ):
            if isfinite(number):
                finite.append((number, count))
                if not number:
                    self._zeros += count
                    continue
                magnitude = abs(number)
                power = frexp(magnitude)[1] - 1
                self._powers[max(power, -_BIAS)] += count
                if self._floating and (magnitude >= _LEAST_HIGH or magnitude <= _MOST_LOW):
                    for target, (over, under) in TARGETS.items():
                        self._over[target] += count if magnitude >= over else 0
                        self._under[target] += count if magnitude <= under else 0
            elif isnan(number):
                self._nan += count
            else:
                self._inf += count
        if finite:
            self._bound(min(finite)[0], max(finite)[0])
            count = sum(count for _, count in finite)
            mean = _sum(number * count for number, count in finite) / count
            self._merge(count, mean, _sum((number - mean) ** 2 * count for number, count in finite))

    def _bound(self, low: Any, high: Any) -> None:
        self._low = low if self._low is None else min(self._low, low)
        self._high = high if self._high is None else max(self._high, high)

    def _merge(self, count: int, mean: float, squares: float) -> None:
        """Merge means and squared deviations, which loses no digits (Chan et al. 1979)."""
        total, apart = self._count + count, mean - self._mean
        self._squares += squares + apart * apart * (self._count / total) * count
        self._mean += apart * count / total
        self._count = total

    def result(self) -> TensorStats:
        """The statistics of all that was added; of an empty tensor, most are ``None``."""
        numpy = numpy_or_none()
        table = getattr(self, "_table", None)
        if table is not None:
            chosen = numpy.flatnonzero(table)
            self._codes.update(dict(zip(chosen.tolist(), table[chosen].tolist(), strict=True)))
        if self._codes:
            width = component(self._dtype)
            codes = pack(f"<{len(self._codes)}{'xBH'[width]}", *self._codes)
            counts: Any = list(self._codes.values())
            numbers = decoded(memoryview(codes), self._dtype)
            self._add(numbers, counts if numpy is None else numpy.array(counts, "i8"))
            self._codes = Counter()
        spread = sqrt(self._squares / (self._count - 1)) if self._count > 1 and self._squares >= 0 else None
        return TensorStats(
            numbers=self._count + self._nan + self._inf,
            min=self._low,
            max=self._high,
            mean=_finite(self._mean) if self._count else None,
            std=_finite(spread),
            zeros=self._zeros,
            nan=self._nan,
            inf=self._inf,
            histogram=tuple(sorted(self._powers.items())),
            overflow=tuple(self._over.items()) if self._floating else (),
            underflow=tuple(self._under.items()) if self._floating else (),
        )


def _blocks(data: memoryview, dtype: str, block: int) -> Iterable[Any]:
    step = block * component(dtype)
    return (decoded(data[at : at + step], dtype) for at in range(0, len(data), step))


def _sum(numbers: Iterable[float]) -> float:
    try:
        return float(fsum(numbers))
    except (OverflowError, ValueError):
        return inf


def _finite(number: float | None) -> float | None:
    """``None`` for what float64 cannot hold."""
    return number if number is not None and isfinite(number) else None


# -- two tensors


class ValuesDiff(NamedTuple):
    """How the numbers of two tensors differ; a complex element counts as two numbers.

    ``different`` of the ``numbers`` differ; NaN equals NaN, and 0 equals -0. ``nonfinite`` of those are NaN or infinite
    in one of the two: they are in no difference below. ``max_abs`` and ``mean_abs`` are of ``|a - b|``; ``max_rel`` and
    ``mean_rel`` of ``|a - b| / max(|a|, |b|)``, which is at most 2. ``cosine`` is that of the angle between the two as
    vectors, ``None`` if one is zero. What float64 cannot hold is ``None``.
    """

    numbers: int
    different: int
    max_abs: float | None
    mean_abs: float | None
    max_rel: float | None
    mean_rel: float | None
    cosine: float | None
    nonfinite: int


class Comparison:
    """How the numbers of two tensors differ: ``add`` chunks of both, then ask for the ``result``.

    ``threads`` is how many of these there are at once, each in a thread. NaN equals NaN, and 0 equals -0. A number that
    is NaN or infinite in one of them, and another in the other, is counted in ``nonfinite``, and is in no difference.
    ``beyond`` counts numbers for which ``|a - b| > atol + rtol * |a|``, as in ``torch.testing.assert_close`` with ``a``
    expected.
    """

    def __init__(self, dtype: str, other: str, rtol: float = 0.0, atol: float = 0.0, threads: int = 1) -> None:
        self._dtypes = dtype, other
        self._block = _BLOCK if threads == 1 else _BLOCK_OF_SEVERAL
        self._exact = dtype == other and dtype in _EXACT
        self._rtol, self._atol = rtol, atol
        self._numbers = self._count = self._different = self._nonfinite = self._beyond = 0  # _count: finite in both
        self._most = self._total = self._most_relative = self._total_relative = 0.0
        self._dots = [0.0, 0.0, 0.0]  # a·b, a·a, b·b

    def add(self, data: memoryview, other: memoryview) -> None:
        """Add the same elements of both."""
        add = self._add_slowly if numpy_or_none() is None else self._add_arrays
        for a, b in zip(
            _blocks(data, self._dtypes[0], self._block), _blocks(other, self._dtypes[1], self._block), strict=True
        ):
            self._numbers += len(a)
            add(a, b)

    def _add_arrays(self, a: Any, b: Any) -> None:
        numpy = numpy_or_none()
        with numpy.errstate(all="ignore"):
            x, y = a.astype("f8"), b.astype("f8")
            if self._exact:
                apart = (numpy.maximum(a, b) - numpy.minimum(a, b)).view("u8").astype("f8")
            else:
                apart = numpy.subtract(x, y)
                numpy.abs(apart, out=apart)
            most = float(apart.max())
            if not isfinite(most):
                finite = numpy.isfinite(x) & numpy.isfinite(y)
                same = (x == y) | (numpy.isnan(x) & numpy.isnan(y))
                self._nonfinite += int((~finite & ~same).sum())
                x, y, apart = x[finite], y[finite], apart[finite]
                most = float(apart.max()) if len(apart) else 0.0
            self._count += len(x)
            dots = ((x, y), (x, x), (y, y))
            self._dots = [
                sum_ + float(numpy.einsum("i,i->", *pair)) for sum_, pair in zip(self._dots, dots, strict=True)
            ]
            if not most:
                return
            self._different += int(numpy.count_nonzero(apart))
            self._most = max(self._most, most)
            self._total += float(apart.sum())
            numpy.abs(x, out=x)
            numpy.abs(y, out=y)
            if self._rtol or self._atol:
                self._beyond += int(numpy.count_nonzero(apart > self._atol + self._rtol * x))
            numpy.maximum(x, y, out=x)
            numpy.maximum(x, 5e-324, out=x)  # where both are 0, their difference is, too
            apart /= x
            self._most_relative = max(self._most_relative, float(apart.max()))
            self._total_relative += float(apart.sum())

    def _add_slowly(self, a: Iterable[Any], b: Iterable[Any]) -> None:
        """The same without numpy, number by number."""
        pairs = []
        for x, y in zip(a, b, strict=True):
            if isfinite(x) and isfinite(y):
                pairs.append((x, y))
            else:
                self._nonfinite += not (x == y or (isnan(x) and isnan(y)))
        self._count += len(pairs)
        dots = (_sum(x * y for x, y in pairs), _sum(x * x for x, _ in pairs), _sum(y * y for _, y in pairs))
        self._dots = [sum_ + dot for sum_, dot in zip(self._dots, dots, strict=True)]
        differences = [(float(abs(x - y)), x, y) for x, y in pairs if x != y]
        if not differences:
            return
        relative = [apart / max(abs(x), abs(y)) for apart, x, y in differences]
        self._different += len(differences)
        self._most = max(self._most, *(apart for apart, _, _ in differences))
        self._total += _sum(apart for apart, _, _ in differences)
        self._most_relative = max(self._most_relative, *relative)
        self._total_relative += _sum(relative)
        if self._rtol or self._atol:
            self._beyond += sum(apart > self._atol + self._rtol * abs(x) for apart, x, _ in differences)

    @property
    def is_within(self) -> bool:
        """Whether they are equal, or no number differs by more than the tolerance."""
        return not self._nonfinite and not (self._beyond if self._rtol or self._atol else self._different)

    def result(self) -> ValuesDiff:
        """How they differ."""
        dot, a, b = self._dots
        length = sqrt(a) * sqrt(b)
        count = self._count or 1
        return ValuesDiff(
            numbers=self._numbers,
            different=self._different + self._nonfinite,
            max_abs=_finite(self._most),
            mean_abs=_finite(self._total / count),
            max_rel=_finite(self._most_relative),
            mean_rel=_finite(self._total_relative / count),
            cosine=max(-1.0, min(1.0, dot / length)) if 0 < length < inf and isfinite(dot) else None,
            nonfinite=self._nonfinite,
        )
