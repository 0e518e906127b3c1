"""A trusted file, loaded with the standard unpickler and our storages, equals what ``torch.load`` returns."""

from __future__ import annotations

import functools
import io
import itertools
import json
import pickle
import struct
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests import forge
from tests.each import for_each, parametrize_groups
from tests.forge import FLOATS, dictionary, name, number, pickled, tuple_of
from tests.loading.equal import assert_same
from tests.loading.zoo import BUILT_FROM_BYTES, FORMS, IGNORED_WARNINGS, ZOO, Net, Pair, saved
from torch import nn

from transload import MissingClassError, MissingModuleError
from transload.errors import BrokenFileError, LoadError, TransloadError, UsageError
from transload.formats import read_source
from transload.io.paths import open_source
from transload.loading.placement import DeviceMap, Plan
from transload.loading.trusted import load_trusted
from transload.opening import CheckpointFile

pytestmark = IGNORED_WARNINGS

RELEASES = Path(__file__).parents[1] / "data" / "torch-releases"
H200 = Path(__file__).parents[1] / "data" / "h200"
PICKLED_OBJECTS = sorted([*RELEASES.glob("*/whole_*.pt"), *H200.glob("whole_*.pt"), *RELEASES.glob("*/train_*.ckpt")])


def load(data: bytes, device_map: DeviceMap = DeviceMap(Plan(), "cpu", ""), **options: Any) -> Any:  # noqa: B008
    """Load a trusted file with its storages on the CPU."""
    source = open_source(data)
    checkpoint = read_source(source)
    storages: dict[str, torch.UntypedStorage] = {}
    for storage in checkpoint.storages:
        target = storages[storage.id] = torch.UntypedStorage(storage.nbytes)
        raw = bytearray(data[storage.offset : storage.offset + storage.nbytes]) if storage.offset is not None else b""
        if raw:
            target.copy_(torch.frombuffer(raw, dtype=torch.uint8).untyped_storage())
    return load_trusted(CheckpointFile(checkpoint, lambda _: source), storages, device_map, **options)


@functools.cache
def _built(name: str) -> Any:
    return ZOO[name].make()


def loaded_by_torch(data: bytes, **options: Any) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False, **{"map_location": "cpu", **options})


@parametrize_groups("names", ZOO)
def test_every_specimen_loads_as_with_torch_in_every_form(names: list[str]) -> None:
    def check(case: tuple[str, str]) -> None:
        name, form = case
        value = _built(name)
        data = saved(value, form)
        if form.startswith("legacy") and not torch_reads_stream(name, data):
            assert_same(loaded_by_torch(saved(value)), load(data))
        else:
            assert_same(loaded_by_torch(data), load(data))

    for_each(itertools.product(names, FORMS), check)


def torch_reads_stream(name: str, data: bytes) -> bool:
    """torch cannot read dtypes newer than the legacy form, nor objects that need their bytes when they are rebuilt."""
    if name in BUILT_FROM_BYTES:
        return False
    try:
        loaded_by_torch(data)
    except AttributeError:
        return False
    return True


class _MainNet(nn.Module):
    """Stands in for the class of the script that saved a fixture."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from numpy, for module names in older files
@pytest.mark.parametrize("path", PICKLED_OBJECTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_fixture_loads_as_with_torch(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "Net", _MainNet, raising=False)
    data = path.read_bytes()
    assert_same(loaded_by_torch(data), load(data))


def test_missing_class_of_the_saving_script_is_reported() -> None:
    with pytest.raises(MissingClassError, match="needs Net, which was defined in the script") as caught:
        load((H200 / "whole_custom_module_cuda0.pt").read_bytes())
    assert "Define or import Net" in caught.value.fix
    assert isinstance(caught.value, (AttributeError, RuntimeError))


def test_missing_module_is_reported_by_name() -> None:
    data = forge.checkpoint(pickled(forge.call(name("no_such_package.models", "Net"))), {})
    with pytest.raises(MissingModuleError, match="no_such_package") as caught:
        load(data)
    assert isinstance(caught.value, ModuleNotFoundError)
    assert caught.value.name == "no_such_package"
    assert caught.value.where


def test_class_missing_from_its_module_is_reported() -> None:
    with pytest.raises(MissingClassError, match=r"torch\.nn has no Gone here"):
        load(forge.checkpoint(pickled(forge.call(name("torch.nn", "Gone"))), {}))


def test_exception_raised_by_code_in_the_file_is_not_wrapped() -> None:
    with pytest.raises(ValueError, match="invalid literal") as caught:
        load(forge.checkpoint(pickled(forge.call(name("builtins", "int"), "no number")), {}))
    assert type(caught.value) is ValueError


def test_transload_errors_are_not_wrapped() -> None:
    class Refusing(DeviceMap):
        def device(self, tag: str) -> str:
            raise TransloadError(f"not {tag}")

    refusing = Refusing(Plan(), "cpu", "")
    with pytest.raises(TransloadError, match="not cpu") as caught:
        load(saved([Pair(torch.rand(3), torch.rand(3))]), refusing)
    assert type(caught.value) is TransloadError


def test_truncated_pickle_is_a_broken_file_error() -> None:
    data = forge.checkpoint(forge.state_dict()[:-20])
    with pytest.raises(BrokenFileError):
        load(data)


def test_archive_without_pickle_is_a_broken_file_error() -> None:
    records = [entry for entry in forge.entries() if not entry.name.endswith(b"data.pkl")]
    with pytest.raises(BrokenFileError, match=r"data\.pkl"):
        load(forge.archive(records))


@pytest.mark.parametrize("encoding", ["utf-8", "latin1", "bytes"])
def test_python_2_file_loads_as_with_torch(encoding: str) -> None:
    data = (RELEASES / "torch-1.0.0-py2.7.18" / "state_dict_cuda0.pt").read_bytes()
    assert_same(loaded_by_torch(data, encoding=encoding), load(data, encoding=encoding))


def python_2_file(raw: bytes) -> bytes:
    """A file with a Python 2 string, which is bytes."""
    body = b"}U\x01tU" + bytes([len(raw)]) + raw + b"s"
    return forge.legacy(object=pickled(body), keys=pickled(forge.list_of()), storages=())


def test_python_2_strings_that_are_not_utf8_need_an_encoding() -> None:
    data = python_2_file(b"na\xefve")
    with pytest.raises(LoadError, match="Python 2") as caught:
        load(data)
    assert "encoding='latin1'" in caught.value.fix
    assert load(data, encoding="latin1") == {"t": "naïve"}
    assert load(data, encoding="bytes") == {b"t": b"na\xefve"}
    assert load(data, errors="replace") == {"t": "na�ve"}


class CountingUnpickler(pickle.Unpickler):
    created = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        CountingUnpickler.created += 1
        super().__init__(*args, **options)


def test_custom_pickle_module_is_used() -> None:
    data = saved({"w": torch.rand(3)})
    module = SimpleNamespace(Unpickler=CountingUnpickler, load=pickle.load, __name__="counting")
    before = CountingUnpickler.created
    assert_same(loaded_by_torch(data), load(data, pickle_module=module))
    assert CountingUnpickler.created > before


def test_pickle_module_without_unpickler_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="no Unpickler"):
        load(saved(1), pickle_module=json)


def test_too_old_dill_is_a_usage_error() -> None:
    dill = SimpleNamespace(Unpickler=pickle.Unpickler, load=pickle.load, __name__="dill", __version__="0.2.0")
    with pytest.raises(UsageError, match="dill"):
        load(saved(1), pickle_module=dill)


def test_reference_to_a_missing_storage_is_a_broken_file_error() -> None:
    source = open_source(forge.checkpoint())
    piece = CheckpointFile(replace(read_source(source), storages=()), lambda _: source)
    with pytest.raises(BrokenFileError, match="storage '0'"):
        load_trusted(piece, {}, DeviceMap(Plan(), "cpu", ""))


def test_pure_python_unpickler_works() -> None:
    data = saved(ZOO["training checkpoint"].make())
    module = SimpleNamespace(Unpickler=pickle._Unpickler, load=pickle._load, __name__="slow")  # type: ignore[attr-defined]
    assert_same(loaded_by_torch(data), load(data, pickle_module=module))


# -- the tar format, which no recent release writes --------------------------------------------------------------------


unfiltered = pytest.mark.filterwarnings("ignore:Python 3.14 will, by default, filter:DeprecationWarning")  # from torch


def tar_loaded_by_torch(folder: Path, data: bytes) -> Any:
    path = folder / "old.pt"
    path.write_bytes(data)
    return torch.load(path, weights_only=False)


@unfiltered
def test_tar_archive_loads_as_with_torch(tmp_path: Path) -> None:
    data = forge.tar()
    assert_same(tar_loaded_by_torch(tmp_path, data), load(data))


@unfiltered
def test_tar_archive_with_storage_views_loads_as_with_torch(tmp_path: Path) -> None:
    stored = pickled(tuple_of(0, "cpu", name("torch", "FloatStorage"))) + struct.pack("<q", 4) + FLOATS
    storages = pickled(number(1)) + stored + pickled(forge.list_of(tuple_of(1, 0, 1, 3)))
    views = [(100, 0, 4, 0), (101, 1, 2, 1)]
    tensors = pickled(number(2)) + b"".join(
        pickled(tuple_of(key, storage, name("torch", "FloatTensor"))) + struct.pack("<i4x3q", 1, size, 1, offset)
        for key, storage, size, offset in views
    )
    root = pickled(dictionary({"all": b"P100\n", "some": b"P101\n", "storage": b"P0\n"}))
    data = forge.tar({"pickle": root, "tensors": tensors, "storages": storages})
    assert_same(tar_loaded_by_torch(tmp_path, data), load(data))


# -- the stream format -------------------------------------------------------------------------------------------------


def test_stream_with_storage_views_loads_as_with_torch() -> None:
    def tensor(view: tuple[object, ...] | None, size: int) -> bytes:
        return forge.tensor(
            shape=(size,), storage=forge.storage_id("0", 4, "FloatStorage", "cpu", tuple_of(*view) if view else None)
        )

    tensors = {"all": tensor(None, 4), "some": tensor(("v", 1, 2), 2), "again": tensor(("v", 1, 2), 2)}
    data = forge.legacy(
        object=pickled(dictionary(tensors)),
        keys=pickled(forge.list_of("0")),
        storages=(struct.pack("<q", 4) + FLOATS,),
    )
    assert_same(loaded_by_torch(data), load(data))


def module_in_a_stream(source: str) -> bytes:
    body = tuple_of("module", name("torch.nn", "ReLU"), "a.py", source) + b"Q"
    return forge.legacy(object=pickled(body), keys=pickled(forge.list_of()), storages=())


def test_changed_source_of_a_class_is_a_warning() -> None:
    with pytest.warns(torch.serialization.SourceChangeWarning, match="ReLU"):
        assert load(module_in_a_stream("class ReLU: pass")) is nn.ReLU
    assert load(module_in_a_stream("")) is nn.ReLU


def test_unknown_kind_of_persistent_id_is_a_broken_file_error() -> None:
    body = pickled(tuple_of("folder", "a") + b"Q")
    with pytest.raises(BrokenFileError, match="folder"):
        load(forge.checkpoint(body, {}))


# -- devices outside storages ------------------------------------------------------------------------------------------


def test_device_stored_outside_a_storage_is_mapped_too() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "device", property(lambda _: torch.device("cuda", 3)))
        data = saved([Pair(torch.rand(3), torch.rand(3))])
    queried: list[str] = []

    class Recording(DeviceMap):
        def device(self, tag: str) -> str:
            queried.append(tag)
            return "cpu"

    (pair,) = load(data, Recording(Plan(), "cpu", ""))
    assert queried == ["cuda:3"]
    assert pair.device == torch.device("cpu")


def test_failed_load_leaves_no_sparse_tensors_to_validate() -> None:
    data = saved({"a": torch.eye(2).to_sparse(), "b": Net})
    broken = data.replace(b"tests.loading.zoo", b"tests.loading.zap")
    with pytest.raises(MissingModuleError):
        load(broken)
    pending = getattr(torch._utils, "_get_sparse_tensors_to_validate", lambda: torch._utils._sparse_tensors_to_validate)
    assert not pending()
