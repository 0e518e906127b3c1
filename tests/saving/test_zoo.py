"""``transload.save`` compared with ``torch.save``: the whole zoo, in every protocol, and with every loader."""

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
from tests import makers
from tests.each import for_each, parametrize_groups
from tests.loading.equal import assert_same
from tests.loading.zoo import BUILT_FROM_BYTES, FORMS, IGNORED_WARNINGS, ZOO, registered_as_safe

from transload.loading import load
from transload.saving import save

pytestmark = IGNORED_WARNINGS

ZIPS = [form for form in FORMS if form.startswith("zip")]


@functools.cache
def specimen(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ZOO[name].make()


def saved_by_torch(name: str, protocol: int = 2) -> bytes:
    return saved(torch.save, specimen(name), pickle_protocol=protocol)


def saved_by_transload(name: str, protocol: int = 2, **options: Any) -> bytes:
    return saved(save, specimen(name), pickle_protocol=protocol, **options)


def saved(save_function: Any, value: Any, **options: Any) -> bytes:
    """A file. The seed is fixed because some objects create random tensors while they are saved."""
    file = io.BytesIO()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        save_function(value, file, **options)
    return file.getvalue()


def records(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        return {info.filename.partition("/")[2]: archive.read(info) for info in archive.infolist()}


VARYING = {".transload/origin.json", ".data/serialization_id", ".format_version", ".storage_alignment", "byteorder"}
"""Records that some releases of torch do not write, or whose content is not determined."""


@parametrize_groups("names", ZOO)
def test_records_equal_those_of_torch_to_the_byte(names: list[str]) -> None:
    def check(case: tuple[str, int]) -> None:
        actual, expected = records(saved_by_transload(*case)), records(saved_by_torch(*case))
        assert [name for name in actual if name not in VARYING] == sorted(
            (name for name in expected if name not in VARYING), key=list(actual).index
        )
        assert {key: value for key, value in actual.items() if key not in VARYING} == {
            key: value for key, value in expected.items() if key not in VARYING
        }

    for_each(itertools.product(names, [2, 3, 4, 5]), check)


@parametrize_groups("names", ZOO, 20)
def test_loaded_objects_equal_those_saved_by_torch(names: list[str]) -> None:
    def check(name: str) -> None:
        our_file, torch_file = saved_by_transload(name), saved_by_torch(name)
        assert_same(
            torch.load(io.BytesIO(torch_file), weights_only=False), torch.load(io.BytesIO(our_file), weights_only=False)
        )
        assert_same(torch.load(io.BytesIO(torch_file), weights_only=False), load(our_file, weights_only=False))

    for_each(names, check)


@parametrize_groups("names", [name for name in ZOO if name not in BUILT_FROM_BYTES], 20)
def test_legacy_files_load_like_those_of_torch(names: list[str]) -> None:
    def check(name: str) -> None:
        torch_file = saved(torch.save, specimen(name), _use_new_zipfile_serialization=False)
        our_file = saved(save, specimen(name), _use_new_zipfile_serialization=False)
        try:
            expected = torch.load(io.BytesIO(torch_file), weights_only=False)
        except AttributeError:  # storages without a type, which torch writes but cannot read
            with pytest.raises(AttributeError):
                torch.load(io.BytesIO(our_file), weights_only=False)
        else:
            assert_same(expected, torch.load(io.BytesIO(our_file), weights_only=False))
            assert_same(torch.load(io.BytesIO(torch_file), weights_only=False), load(our_file, weights_only=False))

    for_each(names, check)


@parametrize_groups("names", [name for name in ZOO if ZOO[name].safe], 20)
def test_safe_objects_load_with_weights_only(names: list[str]) -> None:
    for_each(names, check_weights_only)


def check_weights_only(name: str) -> None:
    with registered_as_safe(ZOO[name]):
        try:
            expected = torch.load(io.BytesIO(saved_by_torch(name)), weights_only=True)
        except Exception as error:  # noqa: BLE001 - our file must raise the same error
            with pytest.raises(type(error)):
                torch.load(io.BytesIO(saved_by_transload(name)), weights_only=True)
        else:
            assert_same(expected, torch.load(io.BytesIO(saved_by_transload(name)), weights_only=True))


@parametrize_groups("names", ZOO, 20)
def test_mapped_files_load_like_those_of_torch(names: list[str], tmp_path: Path) -> None:
    for_each(names, lambda name: check_mapped(name, tmp_path / f"{names.index(name)}"))


def check_mapped(name: str, folder: Path) -> None:
    folder.mkdir()
    our_file, torch_file = folder / "mine.pt", folder / "other.pt"
    our_file.write_bytes(saved_by_transload(name))
    torch_file.write_bytes(saved_by_torch(name))
    try:
        expected = torch.load(str(torch_file), mmap=True, weights_only=False)
    except RuntimeError as error:
        with pytest.raises(type(error)):
            torch.load(str(our_file), mmap=True, weights_only=False)
    else:
        assert_same(expected, torch.load(str(our_file), mmap=True, weights_only=False))


def tensors_in(value: Any, seen: set[int]) -> list[torch.Tensor]:
    """All tensors in nested dictionaries, lists and tuples."""
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return [value]
    children = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    return [tensor for child in children for tensor in tensors_in(child, seen)]


@parametrize_groups("names", [name for name in ZOO if name != "trusted: objects"], 20)  # its numbers differ each time
def test_compact_files_have_the_same_numbers(names: list[str]) -> None:
    for_each(names, check_compact)


def check_compact(name: str) -> None:
    actual = torch.load(io.BytesIO(saved_by_transload(name, compact=True)), weights_only=False)
    expected = torch.load(io.BytesIO(saved_by_torch(name)), weights_only=False)
    assert (
        len(saved_by_transload(name, compact=True, origin=False)) <= len(saved_by_transload(name, origin=False)) + 4096
    )
    pairs = zip(tensors_in(actual, set()), tensors_in(expected, set()), strict=True)
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
    return records(makers.saved(plain.clone(memory_format=torch.contiguous_format))).get("data/0", b"")
