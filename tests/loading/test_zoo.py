"""``transload.load`` against ``torch.load``: every specimen, in every form, from every kind of source, with every
``map_location`` that needs no GPU."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.each import for_each, parametrize_groups
from tests.loading.equal import assert_same
from tests.loading.zoo import (
    BUILT_FROM_BYTES,
    DATA_TORCH_REFUSES,
    DTYPES,
    FORMS,
    IGNORED_WARNINGS,
    ZOO,
    registered_as_safe,
    saved,
)

from transload.errors import LandingWarning, LoadError, NoDeviceError, UnsafeError
from transload.loading import load

pytestmark = IGNORED_WARNINGS

RICH = ("training checkpoint", "views of one storage", "sparse", "storages")
"""Enough of the zoo to test every combination of source, form and option."""

TAGS = ("cuda:0", "cuda:1", "cuda:7", "mps", "xpu:0", "hpu:1", "npu:3")
SOURCES = ("path", "text path", "file", "buffer", "bytes", "bytearray")


def file_of(name: str, form: str = "zip", tag: str = "") -> bytes:
    """A specimen as a file. Cached: uninitialized memory and hook numbers would differ between two saves."""
    return _file_of(name, form, tag)


@functools.cache
def _file_of(name: str, form: str, tag: str) -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return saved(_built(name), form, tag)


@functools.cache
def _built(name: str) -> Any:
    return ZOO[name].make()


def loaded_by_torch(name: str, form: str = "zip", tag: str = "", **options: Any) -> Any:
    """Load with torch, trusting the file. If torch cannot read the legacy stream it wrote, load the zip instead."""
    stream = form.startswith("legacy")
    if not (stream and name in BUILT_FROM_BYTES):
        try:
            return torch.load(io.BytesIO(file_of(name, form, tag)), weights_only=False, **options)
        except AttributeError:  # dtypes newer than the legacy form, which torch writes but cannot read
            assert stream
    return torch.load(io.BytesIO(file_of(name, "zip", tag)), weights_only=False, **options)


@parametrize_groups("names", ZOO, 20)
def test_trusted_file_loads_as_with_torch(names: list[str]) -> None:
    def check(case: tuple[str, str]) -> None:
        assert_same(loaded_by_torch(*case), load(file_of(*case), weights_only=False))

    for_each(itertools.product(names, ["zip", "legacy"]), check)  # test_trusted.py tests the other forms


@parametrize_groups("names", [name for name in ZOO if ZOO[name].safe])
def test_safe_file_loads_as_with_torch(names: list[str]) -> None:
    """The result equals what torch loads from the trusted file, even if torch refuses it with ``weights_only``."""
    for_each(itertools.product(names, ["zip", "legacy", "zip, protocol 4"]), lambda case: check_without_trust(*case))


def check_without_trust(name: str, form: str) -> None:
    data = file_of(name, form)
    with registered_as_safe(ZOO[name]):
        by_torch = None if form == "legacy" and name in BUILT_FROM_BYTES else loaded_with_weights_only(data)
        try:
            ours = load(data)
        except UnsafeError:
            assert by_torch is None, "torch loads this with weights_only"
            return
    assert_same(loaded_by_torch(name, form), ours)
    if by_torch is not None:
        assert_same(by_torch[0], ours)


def loaded_with_weights_only(data: bytes) -> tuple[Any] | None:
    try:
        return (torch.load(io.BytesIO(data), weights_only=True),)
    except Exception:  # noqa: BLE001 - it fails in many ways, which do not matter here
        return None


@pytest.mark.parametrize("name", [name for name in ZOO if not ZOO[name].safe and name not in DATA_TORCH_REFUSES])
def test_unsafe_file_is_refused(name: str) -> None:
    for form in ("zip", "legacy", "zip, protocol 4"):
        with pytest.raises(UnsafeError):
            load(file_of(name, form))


def test_plain_data_loads_in_every_form() -> None:
    """These must never be refused: harmless values, also in the newer protocols, some of which torch refuses."""
    for name in ("state dict", "training checkpoint", "plain values", "views of one storage", "keys", "deep"):
        for form in FORMS:
            assert_same(loaded_by_torch(name, form), load(file_of(name, form)))


def test_zoo_contains_the_usual_dtypes() -> None:
    usual = {"float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool"}
    assert usual | {"complex64", "complex128"} <= set(DTYPES)
    newer = {"float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64", "complex32"}
    if hasattr(torch._utils, "_rebuild_tensor_v3"):
        assert newer <= set(DTYPES)


# -- sources -----------------------------------------------------------------------------------------------------------


def source(kind: str, data: bytes, folder: Path) -> Any:
    """The argument to pass to ``load``."""
    path = folder / "file.pt"
    path.write_bytes(data)
    sources: dict[str, Callable[[], Any]] = {
        "path": lambda: path,
        "text path": lambda: str(path),
        "file": lambda: path.open("rb"),
        "buffer": lambda: io.BytesIO(data),
        "bytes": lambda: data,
        "bytearray": lambda: bytearray(data),
    }
    return sources[kind]()


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("form", ["zip", "legacy"])
@pytest.mark.parametrize("kind", SOURCES)
def test_every_kind_of_source_loads_as_with_torch(kind: str, form: str, trusted: bool, tmp_path: Path) -> None:
    for name in RICH:
        f = source(kind, file_of(name, form), tmp_path)
        with f if kind == "file" else contextlib.nullcontext():
            assert_same(loaded_by_torch(name, form), load(f, weights_only=not trusted))
            assert not getattr(f, "closed", False)


@pytest.mark.parametrize("trusted", [False, True])
def test_mmap_loads_as_with_torch(trusted: bool, tmp_path: Path) -> None:
    for number, name in enumerate((*RICH, "dtypes in one file")):
        (folder := tmp_path / str(number)).mkdir()  # Windows does not write a file that is mapped
        path = source("text path", file_of(name), folder)
        expected = torch.load(path, weights_only=False, mmap=True)
        assert_same(expected, load(path, weights_only=not trusted, mmap=True))


def test_two_loads_share_nothing() -> None:
    first, second = (load(file_of("views of one storage")) for _ in range(2))
    first["all"].zero_()
    assert second["all"].abs().sum() > 0


def test_loaded_tensors_are_writable_and_share_their_storage() -> None:
    views = load(file_of("views of one storage"))
    views["all"].fill_(5)
    assert views["head"].eq(5).all()


def test_several_objects_in_one_file_load_in_order(tmp_path: Path) -> None:
    path = tmp_path / "several.pt"
    path.write_bytes(file_of("data set", "legacy") + file_of("state dict", "legacy"))
    with path.open("rb") as ours, path.open("rb") as theirs:
        for _ in range(2):
            assert_same(torch.load(theirs), load(ours))


# -- map_location ------------------------------------------------------------------------------------------------------

ON_CPU: dict[str, Any] = {
    "cpu": "cpu",
    "device": torch.device("cpu"),
    "function": lambda storage, tag: storage,  # noqa: ARG005 - torch passes both
}


COMBINATIONS = [(tag, "zip", False) for tag in ("", *TAGS)]
COMBINATIONS += [
    (tag, form, trusted) for tag in ("", "cuda:1") for form in ("zip", "legacy") for trusted in (True, False)
]


@pytest.mark.parametrize(("tag", "form", "trusted"), dict.fromkeys(COMBINATIONS))
def test_map_location_to_cpu_works_as_with_torch(tag: str, form: str, trusted: bool) -> None:
    locations = {**ON_CPU, "mapping": {tag: "cpu"}}
    for name in RICH:
        data = file_of(name, form, tag)
        for location in locations.values():
            expected = loaded_by_torch(name, form, tag, map_location=location)
            assert_same(expected, load(data, location, weights_only=not trusted))


@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_map_location_function_gets_the_same_tags_as_with_torch(form: str) -> None:
    def tags_seen_by(function: Callable[..., Any]) -> list[str]:
        tags: list[str] = []

        def record(storage: Any, tag: str) -> Any:
            tags.append(tag)
            return storage

        function(io.BytesIO(file_of("state dict", form, "cuda:1")), record)
        return tags

    ours = tags_seen_by(load)
    assert ours == tags_seen_by(torch.load)
    assert set(ours) == {"cuda:1"}


def test_map_location_function_returning_none_falls_back_to_the_tag() -> None:
    assert_same(loaded_by_torch("state dict"), load(file_of("state dict"), lambda *_: None))


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("name", ["training checkpoint", "storages", "conjugate", "meta parameter"])
def test_map_location_meta_works_as_with_torch(name: str, trusted: bool) -> None:
    expected = loaded_by_torch(name, map_location="meta")
    assert_same(expected, load(file_of(name), "meta", weights_only=not trusted))


@pytest.mark.parametrize("trusted", [False, True])
def test_views_on_meta_have_the_same_shapes_and_strides_as_with_torch(trusted: bool) -> None:
    """torch gives each view a separate storage, up to 2.1 even a smaller one, so only the metadata is compared."""
    expected, result = (
        {key: (tensor.shape, tensor.stride(), tensor.device) for key, tensor in loaded.items()}
        for loaded in (
            loaded_by_torch("views of one storage", map_location="meta"),
            load(file_of("views of one storage"), "meta", weights_only=not trusted),
        )
    )
    assert result == expected


no_accelerator = pytest.mark.skipif(torch.backends.mps.is_available(), reason="an accelerator is available")


@no_accelerator
@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("tag", TAGS)
def test_tensors_of_an_absent_device_load_on_cpu_with_one_warning(tag: str, trusted: bool) -> None:
    for name in RICH:
        for form in ("zip", "legacy"):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", LandingWarning)
                loaded = load(file_of(name, form, tag), weights_only=not trusted)
            assert_same(loaded_by_torch(name, form, tag, map_location="cpu"), loaded)
            landing = [warning for warning in caught if warning.category is LandingWarning]
            assert len(landing) == 1
            assert tag in str(landing[0].message)
            assert landing[0].filename == __file__


@no_accelerator
@pytest.mark.parametrize("tag", TAGS)
def test_map_location_none_with_an_absent_device_is_an_error_that_names_it(tag: str) -> None:
    for trusted in (False, True):
        with pytest.raises(NoDeviceError, match=tag) as caught:
            load(file_of("state dict", tag=tag), None, weights_only=not trusted)
        assert isinstance(caught.value, RuntimeError)
        assert "map_location" in caught.value.fix


def test_cpu_tensors_load_on_cpu_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", LandingWarning)
        assert_same(loaded_by_torch("training checkpoint"), load(file_of("training checkpoint")))


# -- usual code --------------------------------------------------------------------------------------------------------


def test_loaded_data_set_works_with_data_loader() -> None:
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(*load(file_of("data set"))), batch_size=5)
    assert [len(batch[0]) for batch in loader] == [5, 5]


def test_training_resumes_as_with_torch() -> None:
    from tests.loading.zoo import trained

    ours, theirs = load(file_of("training checkpoint")), loaded_by_torch("training checkpoint")
    states = []
    for checkpoint in (ours, theirs):
        net, optimizer = trained("Adam")
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        net.load_state_dict(checkpoint["state_dict"])
        optimizer.zero_grad()
        optimizer.load_state_dict(checkpoint["optimizer_states"][0])
        scheduler.load_state_dict(checkpoint["lr_schedulers"][0])
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(checkpoint["rng"])
            net(torch.randint(0, 7, (3,))).sum().backward()
        optimizer.step()
        scheduler.step()
        states.append([net.state_dict(), optimizer.state_dict(), scheduler.state_dict()])
    assert_same(*states)


def test_damaged_file_raises_runtime_error_and_html_raises_load_error() -> None:
    data = file_of("state dict")
    with pytest.raises(RuntimeError):
        load(data[: len(data) // 2])
    with pytest.raises(LoadError):
        load(b"<html></html>")
