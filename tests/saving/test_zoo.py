"""``transload.save`` against ``torch.save``: everything in the zoo, in every protocol, and by every way of loading."""

from __future__ import annotations

import functools
import io
import itertools
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.each import for_each, grouped
from tests.loading.equal import same
from tests.loading.zoo import BUILT_FROM_BYTES, FORMS, QUIET, ZOO, allowed

from transload.loading import load
from transload.saving import save

pytestmark = QUIET

ZIPS = [form for form in FORMS if form.startswith("zip")]


@functools.cache
def made(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ZOO[name].make()


def theirs(name: str, protocol: int = 2) -> bytes:
    return saved(torch.save, made(name), pickle_protocol=protocol)


def ours(name: str, protocol: int = 2, **options: Any) -> bytes:
    return saved(save, made(name), pickle_protocol=protocol, **options)


def saved(by: Any, value: Any, **options: Any) -> bytes:
    """A file. Some objects make tensors up while they are saved."""
    held = io.BytesIO()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        by(value, held, **options)
    return held.getvalue()


def records(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        return {info.filename.partition("/")[2]: archive.read(info) for info in archive.infolist()}


OWN = {".transload/origin.json", ".data/serialization_id", ".format_version", ".storage_alignment", "byteorder"}
"""Records that torch of some release does not write, or whose content is not determined."""


@grouped("names", ZOO)
def test_the_records_are_those_of_torch_to_the_byte(names: list[str]) -> None:
    def check(case: tuple[str, int]) -> None:
        mine, other = records(ours(*case)), records(theirs(*case))
        assert [each for each in mine if each not in OWN] == sorted(
            (each for each in other if each not in OWN), key=list(mine).index
        )
        assert {key: value for key, value in mine.items() if key not in OWN} == {
            key: value for key, value in other.items() if key not in OWN
        }

    for_each(itertools.product(names, [2, 3, 4, 5]), check)


@grouped("names", ZOO, 20)
def test_what_is_loaded_is_what_torch_saves(names: list[str]) -> None:
    def check(name: str) -> None:
        mine, other = ours(name), theirs(name)
        same(torch.load(io.BytesIO(other), weights_only=False), torch.load(io.BytesIO(mine), weights_only=False))
        same(torch.load(io.BytesIO(other), weights_only=False), load(mine, weights_only=False))

    for_each(names, check)


@grouped("names", [name for name in ZOO if name not in BUILT_FROM_BYTES], 20)
def test_the_legacy_form_is_loaded_as_that_of_torch(names: list[str]) -> None:
    def check(name: str) -> None:
        other = saved(torch.save, made(name), _use_new_zipfile_serialization=False)
        mine = saved(save, made(name), _use_new_zipfile_serialization=False)
        try:
            expected = torch.load(io.BytesIO(other), weights_only=False)
        except AttributeError:  # storages without a type, which torch writes and does not read
            with pytest.raises(AttributeError):
                torch.load(io.BytesIO(mine), weights_only=False)
        else:
            same(expected, torch.load(io.BytesIO(mine), weights_only=False))
            same(torch.load(io.BytesIO(other), weights_only=False), load(mine, weights_only=False))

    for_each(names, check)


@grouped("names", [name for name in ZOO if ZOO[name].safe], 20)
def test_data_is_loaded_as_data(names: list[str]) -> None:
    for_each(names, loads_as_data)


def loads_as_data(name: str) -> None:
    with allowed(ZOO[name]):
        try:
            other = torch.load(io.BytesIO(theirs(name)), weights_only=True)
        except Exception as error:  # noqa: BLE001 - whatever torch has against it, it has against ours
            with pytest.raises(type(error)):
                torch.load(io.BytesIO(ours(name)), weights_only=True)
        else:
            same(other, torch.load(io.BytesIO(ours(name)), weights_only=True))


@grouped("names", ZOO, 20)
def test_a_mapped_file_is_the_same(names: list[str], tmp_path: Path) -> None:
    for_each(names, lambda name: maps_alike(name, tmp_path / f"{names.index(name)}"))


def maps_alike(name: str, folder: Path) -> None:
    folder.mkdir()
    mine, other = folder / "mine.pt", folder / "other.pt"
    mine.write_bytes(ours(name))
    other.write_bytes(theirs(name))
    try:
        expected = torch.load(str(other), mmap=True, weights_only=False)
    except RuntimeError as error:
        with pytest.raises(type(error)):
            torch.load(str(mine), mmap=True, weights_only=False)
    else:
        same(expected, torch.load(str(mine), mmap=True, weights_only=False))


def sum_of(value: Any, seen: set[int]) -> list[torch.Tensor]:
    """All plain tensors in an object, by the way."""
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return [value]
    held = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    return [tensor for each in held for tensor in sum_of(each, seen)]


@grouped("names", [name for name in ZOO if name != "trusted: objects"], 20)  # whose numbers are others each time
def test_a_compact_file_has_the_same_numbers(names: list[str]) -> None:
    for_each(names, has_the_same_numbers_compact)


def has_the_same_numbers_compact(name: str) -> None:
    mine = torch.load(io.BytesIO(ours(name, compact=True)), weights_only=False)
    other = torch.load(io.BytesIO(theirs(name)), weights_only=False)
    assert len(ours(name, compact=True, origin=False)) <= len(ours(name, origin=False)) + 4096
    pairs = zip(sum_of(mine, set()), sum_of(other, set()), strict=True)
    for one, two in pairs:
        assert type(one) is type(two)
        assert (one.dtype, one.device, one.layout, one.requires_grad) == (
            two.dtype, two.device, two.layout, two.requires_grad,
        )  # fmt: skip
        if (
            one.layout is torch.strided
            and not one.is_nested
            and one.device.type != "meta"
            and type(one) is torch.Tensor
        ):
            assert one.shape == two.shape
            assert as_bytes(one) == as_bytes(two)


def as_bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.dequantize() if tensor.is_quantized else tensor.detach().resolve_conj().resolve_neg()
    held = io.BytesIO()
    torch.save(plain.clone(memory_format=torch.contiguous_format), held)
    return records(held.getvalue()).get("data/0", b"")
