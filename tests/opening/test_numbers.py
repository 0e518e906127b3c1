"""Statistics of tensors and differences between two, with numpy and without, compared with those of torch."""

from __future__ import annotations

from math import isclose
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import forge
from tests.each import each
from tests.makers import saved

import transload
from transload.opening import numbers
from transload.opening.numbers import NUMERIC, TARGETS, Comparison, Statistics, decoded

DTYPES = sorted(name for name in NUMERIC if hasattr(torch, name) and not name.startswith(("q", "float4")))
REAL = [name for name in DTYPES if not getattr(torch, name).is_complex]


@pytest.fixture(params=["numpy", "no numpy"])
def numpy_or_not(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "no numpy":
        monkeypatch.setattr(numbers, "numpy_or_none", lambda: None)


def sample(name: str, seed: int = 0, *, special: bool = True) -> torch.Tensor:
    """Numbers of many magnitudes, zeros, NaN and infinities, as far as the dtype has them."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(40, 70, generator=generator, dtype=torch.float64) * torch.logspace(
        -36, 6, 70, dtype=torch.float64
    )
    dtype = getattr(torch, name)
    if dtype == torch.bool:
        return wide > 0
    if not (dtype.is_floating_point or dtype.is_complex):
        info = torch.iinfo(dtype)
        return (torch.rand(40, 70, generator=generator) * 250 - (125 if info.min < 0 else 0)).to(dtype)
    if name == "float8_e8m0fnu":
        return wide.abs().to(torch.float32).to(dtype)
    wide[3] = 0
    wide[4, ::2] = -0.0
    if special:
        wide[5, :9], wide[6, :5], wide[7, 7] = torch.nan, torch.inf, -torch.inf
    return wide.to(dtype) if dtype.is_complex or name in ("float64", "float16") else wide.to(torch.float32).to(dtype)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor as float64; a complex element is two."""
    if tensor.dtype == torch.complex32:
        tensor = tensor.to(torch.complex64)
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).to(torch.float64).flatten()


def data_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(bytes(tensor.contiguous().flatten().view(torch.uint8).numpy()))


def lossy(values: torch.Tensor, name: str) -> torch.Tensor:
    """Rounded by torch, in one step."""
    return values.to(getattr(torch, name)).to(torch.float64)


@pytest.mark.filterwarnings("ignore:BComplex32 support:UserWarning")
@pytest.mark.usefixtures("numpy_or_not")
@pytest.mark.parametrize("name", DTYPES)
def test_statistics_equal_those_of_torch(name: str) -> None:
    tensor = sample(name)
    data, stats = data_of(tensor), Statistics(name)
    for start in range(0, len(data), 1600):
        stats.add(data[start : start + 1600])
    result, every = stats.result(), plain(tensor)
    finite = every[every.isfinite()]
    assert (result.numbers, result.nan, result.inf) == (len(every), int(every.isnan().sum()), int(every.isinf().sum()))
    assert (result.min, result.max) == (finite.min().item(), finite.max().item())
    assert result.zeros == int((finite == 0).sum())
    assert result.mean is not None
    assert isclose(result.mean, finite.mean().item(), rel_tol=1e-9, abs_tol=1e-12 * finite.abs().mean().item())
    assert result.std is not None
    assert isclose(result.std, finite.std().item(), rel_tol=1e-9)
    powers = torch.frexp(finite[finite != 0])[1] - 1
    assert dict(result.histogram) == {int(p): int(n) for p, n in zip(*powers.unique(return_counts=True), strict=True)}


@pytest.mark.usefixtures("numpy_or_not")
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float8_e5m2"])
def test_losses_in_smaller_dtypes_are_those_of_torch(name: str) -> None:
    tensor = sample(name)
    edges = [bound * factor for pair in TARGETS.values() for bound in pair for factor in (0.999, 1, -1, 1.001, 2)]
    tensor[0, : len(edges)] = torch.tensor([edge for edge in edges if abs(edge) < 3.4e38] + [1.0] * 9)[: len(edges)].to(
        tensor.dtype
    )
    stats = Statistics(name)
    stats.add(data_of(tensor))
    result = stats.result()
    values = tensor.to(torch.float32)
    finite = values[values.isfinite()]
    assert set(dict(result.overflow)) == set(TARGETS)
    for target, number in result.overflow:
        rounded = lossy(finite, target)
        # Whether torch makes NaN or 448 of numbers beyond the range of float8_e4m3fn depends on its release.
        lost = finite.abs() > 464 if target == "float8_e4m3fn" else ~rounded.isfinite()
        assert number == int(lost.sum()), target
        assert dict(result.underflow)[target] == int(((rounded == 0) & (finite != 0)).sum()), target


SMALL = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]


@pytest.mark.usefixtures("numpy_or_not")
@each("name", [name for name in SMALL if hasattr(torch, name)])
def test_every_code_of_a_small_dtype_is_decoded_as_by_torch(name: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(getattr(torch, name)).to(torch.float64)
    ours = torch.tensor([float(number) for number in decoded(memoryview(bytes(range(256))), name)], dtype=torch.float64)
    assert torch.equal(ours.nan_to_num(12345), expected.nan_to_num(12345))


@pytest.mark.usefixtures("numpy_or_not")
def test_statistics_of_extreme_numbers() -> None:
    huge = torch.tensor([1.7e308, 1.7e308, -1.7e308, 5e-324], dtype=torch.float64)
    stats = Statistics("float64")
    stats.add(data_of(huge))
    result = stats.result()
    assert (result.min, result.max, result.std) == (-1.7e308, 1.7e308, None)
    assert result.histogram == ((-1023, 1), (1023, 3))
    large = Statistics("int64")
    large.add(data_of(torch.tensor([2**63 - 1, -(2**63)])))
    assert (large.result().min, large.result().max) == (-(2**63), 2**63 - 1)
    assert Statistics("float32").result()[3:8] == (0, None, None, None, None)


@pytest.mark.usefixtures("numpy_or_not")
@pytest.mark.parametrize("name", DTYPES)
def test_differences_equal_those_of_torch(name: str) -> None:
    a, b = sample(name), sample(name, 1)
    b[10:20] = a[10:20]
    b[5, 4:20] = a[5, 4:20]  # NaN at the same place, and at another
    first, second, comparison = data_of(a), data_of(b), Comparison(name, name)
    for start in range(0, len(first), 1600):
        comparison.add(first[start : start + 1600], second[start : start + 1600])
    result, (x, y) = comparison.result(), (plain(a), plain(b))
    same = (x == y) | (x.isnan() & y.isnan())
    both = x.isfinite() & y.isfinite()
    assert (result.numbers, result.different) == (len(x), int((~same).sum()))
    assert result.nonfinite == int((~same & ~both).sum())
    x, y = x[both], y[both]
    apart = (x - y).abs()
    relative = (apart / torch.maximum(x.abs(), y.abs())).nan_to_num(0)
    assert (result.max_abs, result.max_rel) == (apart.max().item(), relative.max().item())
    assert isclose(result.mean_abs or 0.0, apart.mean().item(), rel_tol=1e-9)
    assert isclose(result.mean_rel or 0.0, relative.mean().item(), rel_tol=1e-9)
    assert isclose(result.cosine or 0.0, torch.cosine_similarity(x, y, dim=0).item(), rel_tol=1e-9, abs_tol=1e-12)
    assert not comparison.is_within


@pytest.mark.usefixtures("numpy_or_not")
def test_size_of_the_blocks_changes_nothing() -> None:
    """With several threads, more numbers are handled at once."""
    pytest.importorskip("numpy")
    a = torch.randn(300_001, generator=torch.Generator().manual_seed(0))
    b = a.clone()
    b[[5, 40_000, 299_999]] += 1
    data, other = (memoryview(bytes(tensor.untyped_storage())) for tensor in (a, b))
    results = []
    for threads in (1, 8):
        statistics, comparison = Statistics("float32", threads), Comparison("float32", "float32", threads=threads)
        statistics.add(data)
        comparison.add(data, other)
        results.append((statistics.result(), comparison.result()))
    (one, apart), (eight, same_apart) = results
    assert (one.numbers, one.min, one.max, one.histogram) == (eight.numbers, eight.min, eight.max, eight.histogram)
    assert isclose(one.std or 0, eight.std or 0, rel_tol=1e-12)
    assert (apart.different, apart.max_abs) == (same_apart.different, same_apart.max_abs)
    assert apart.different == 3


def test_tolerance_is_that_of_torch() -> None:
    a, b = torch.tensor([1.0, -2.0, 0.0, 1e-9]), torch.tensor([1.01, -2.0, 1e-4, 2e-9])
    for rtol, atol in ((0.02, 0.0), (0.0, 1e-3), (0.02, 1e-3), (0.009, 1e-3), (0.0, 0.5), (1.0, 0.0)):
        comparison = Comparison("float32", "float32", rtol, atol)
        comparison.add(data_of(a), data_of(b))
        assert comparison.is_within == torch.allclose(b, a, rtol=rtol, atol=atol), (rtol, atol)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf])
    comparison = Comparison("float32", "float32", 1.0, 1.0)
    comparison.add(data_of(special), data_of(special))
    assert comparison.is_within
    comparison.add(data_of(special), data_of(special.flip(0)))
    assert not comparison.is_within


@pytest.mark.usefixtures("numpy_or_not")
def test_large_integers_are_compared_exactly() -> None:
    a, b = torch.tensor([2**62, 2**63 - 1, 5]), torch.tensor([2**62 + 1, -(2**63), 5])
    comparison = Comparison("int64", "int64")
    comparison.add(data_of(a), data_of(b))
    result = comparison.result()
    assert (result.different, result.max_abs) == (2, float(2**64 - 1))


# -- of checkpoints


def test_inspect_counts_every_kind_of_tensor(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    values = {"a": base.T, "view": base[1:3, ::2], "empty": torch.empty(0, 3), "conj": torch.tensor([1 + 2j]).conj()}
    values["sparse"] = torch.eye(3).to_sparse()
    path = tmp_path / "model.pt"
    path.write_bytes(saved(values))
    checkpoint = transload.inspect(path, stats=True)
    stats = {entry.name: entry for entry in checkpoint.stats or ()}
    assert (stats["a"].max, stats["a"].shape, stats["view"].min, stats["view"].max) == (23, (6, 4), 6, 16)
    assert (stats["conj"].min, stats["conj"].numbers, stats["empty"].numbers) == (-2, 2, 0)
    assert stats["sparse"].note == "it is made of 2 others"
    assert stats["sparse/values"].numbers == 3
    assert transload.inspect(path).stats is None
    assert "stats" not in transload.inspect(path).to_dict()
    assert [entry["name"] for entry in checkpoint.to_dict()["stats"]] == list(stats)


def test_tensor_that_cannot_be_read_is_named() -> None:
    records = forge.entries()
    whole = forge.archive(records)
    name = transload.inspect(whole).tensors[0].name
    cut = forge.archive(forge.with_changes(records, "data/0", data=b"\0" * 3))
    stats = {entry.name: entry for entry in transload.inspect(cut, stats=True).stats or ()}
    assert "incomplete" in stats[name].note
    assert stats[name].numbers == 0
    assert sum(not entry.note for entry in stats.values()) == len(stats) - 1


def claims() -> dict[str, Any]:
    return {f"t{index}": torch.zeros(1).expand(1 << 40) for index in range(3)}


def test_expanded_tensor_of_a_trillion_elements_is_refused_quickly() -> None:
    stats = transload.inspect(saved(claims()), stats=True).stats or ()
    assert [entry.numbers for entry in stats] == [0, 0, 0]
    assert all("claims" in entry.note for entry in stats)
