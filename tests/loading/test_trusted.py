"""A trusted file, loaded by the standard unpickler over our storages, is what ``torch.load`` makes of it."""

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
from tests.each import for_each, grouped
from tests.forge import FLOATS, dictionary, name, number, pickled, tuple_of
from tests.loading.equal import same
from tests.loading.zoo import BUILT_FROM_BYTES, FORMS, QUIET, ZOO, Net, Pair, saved
from torch import nn

from transload import MissingClassError, MissingModuleError
from transload.errors import BrokenFileError, LoadError, TransloadError, UsageError
from transload.formats import read_source
from transload.io.sources import open_source
from transload.loading.placement import DeviceMap, Plan
from transload.loading.trusted import load_trusted
from transload.tensors import Piece

pytestmark = QUIET

RELEASES = Path(__file__).parents[1] / "data" / "torch-releases"
H200 = Path(__file__).parents[1] / "data" / "h200"
WHOLE = sorted([*RELEASES.glob("*/whole_*.pt"), *H200.glob("whole_*.pt"), *RELEASES.glob("*/train_*.ckpt")])


def load(data: bytes, device_map: DeviceMap = DeviceMap(Plan(), "cpu", ""), **options: Any) -> Any:  # noqa: B008
    """Load a file, with its storages on the CPU."""
    source = open_source(data)
    checkpoint = read_source(source)
    held: dict[str, torch.UntypedStorage] = {}
    for storage in checkpoint.storages:
        made = held[storage.id] = torch.UntypedStorage(storage.nbytes)
        raw = bytearray(data[storage.offset : storage.offset + storage.nbytes]) if storage.offset is not None else b""
        if raw:
            made.copy_(torch.frombuffer(raw, dtype=torch.uint8).untyped_storage())
    return load_trusted(Piece(checkpoint, lambda _: source), held, device_map, **options)


@functools.cache
def _made(name: str) -> Any:
    return ZOO[name].make()


def by_torch(data: bytes, **options: Any) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False, **{"map_location": "cpu", **options})


@grouped("names", ZOO)
def test_everything_in_the_zoo(names: list[str]) -> None:
    def check(case: tuple[str, str]) -> None:
        name, form = case
        made = _made(name)
        data = saved(made, form)
        if form.startswith("legacy") and not torch_reads_stream(name, data):
            same(by_torch(saved(made)), load(data))
        else:
            same(by_torch(data), load(data))

    for_each(itertools.product(names, FORMS), check)


def torch_reads_stream(name: str, data: bytes) -> bool:
    """Not newer dtypes than the format, though it writes them; nor what is built before its bytes are there."""
    if name in BUILT_FROM_BYTES:
        return False
    try:
        by_torch(data)
    except AttributeError:
        return False
    return True


class _Main(nn.Module):
    """Stands for the class of the script that saved a fixture."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of numpy, for the names it had in older files
@pytest.mark.parametrize("path", WHOLE, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_files_of_real_releases(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "Net", _Main, raising=False)
    data = path.read_bytes()
    same(by_torch(data), load(data))


def test_the_class_of_a_script_that_is_not_here_is_named() -> None:
    with pytest.raises(MissingClassError, match="needs Net, which was defined in the script") as caught:
        load((H200 / "whole_custom_module_cuda0.pt").read_bytes())
    assert "Define or import Net" in caught.value.fix
    assert isinstance(caught.value, (AttributeError, RuntimeError))


def test_a_module_that_is_not_here_is_named() -> None:
    data = forge.checkpoint(pickled(forge.call(name("no_such_package.models", "Net"))), {})
    with pytest.raises(MissingModuleError, match="no_such_package") as caught:
        load(data)
    assert isinstance(caught.value, ModuleNotFoundError)
    assert caught.value.name == "no_such_package"
    assert caught.value.where


def test_a_class_that_its_module_has_no_longer_is_named() -> None:
    with pytest.raises(MissingClassError, match=r"torch\.nn has no Gone here"):
        load(forge.checkpoint(pickled(forge.call(name("torch.nn", "Gone"))), {}))


def test_what_the_code_of_a_file_raises_is_its_own() -> None:
    with pytest.raises(ValueError, match="invalid literal") as caught:
        load(forge.checkpoint(pickled(forge.call(name("builtins", "int"), "no number")), {}))
    assert type(caught.value) is ValueError


def test_our_own_errors_are_not_wrapped() -> None:
    class Refusing(DeviceMap):
        def device(self, tag: str) -> str:
            raise TransloadError(f"not {tag}")

    refusing = Refusing(Plan(), "cpu", "")
    with pytest.raises(TransloadError, match="not cpu") as caught:
        load(saved([Pair(torch.rand(3), torch.rand(3))]), refusing)
    assert type(caught.value) is TransloadError


def test_a_broken_pickle_is_a_broken_file() -> None:
    data = forge.checkpoint(forge.state_dict()[:-20])
    with pytest.raises(BrokenFileError):
        load(data)


def test_a_pickle_that_is_missing() -> None:
    records = [entry for entry in forge.entries() if not entry.name.endswith(b"data.pkl")]
    with pytest.raises(BrokenFileError, match=r"data\.pkl"):
        load(forge.archive(records))


@pytest.mark.parametrize("encoding", ["utf-8", "latin1", "bytes"])
def test_files_of_python_2(encoding: str) -> None:
    data = (RELEASES / "torch-1.0.0-py2.7.18" / "state_dict_cuda0.pt").read_bytes()
    same(by_torch(data, encoding=encoding), load(data, encoding=encoding))


def python2(raw: bytes) -> bytes:
    """A file with a text of Python 2, which is bytes."""
    held = b"}U\x01tU" + bytes([len(raw)]) + raw + b"s"
    return forge.legacy(object=pickled(held), keys=pickled(forge.listing()), storages=())


def test_texts_of_python_2_that_are_not_utf8() -> None:
    data = python2(b"na\xefve")
    with pytest.raises(LoadError, match="Python 2") as caught:
        load(data)
    assert "encoding='latin1'" in caught.value.fix
    assert load(data, encoding="latin1") == {"t": "naïve"}
    assert load(data, encoding="bytes") == {b"t": b"na\xefve"}
    assert load(data, errors="replace") == {"t": "na�ve"}


class Counting(pickle.Unpickler):
    made = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        Counting.made += 1
        super().__init__(*args, **options)


def test_a_pickle_module_of_ones_own_is_used() -> None:
    data = saved({"w": torch.rand(3)})
    module = SimpleNamespace(Unpickler=Counting, load=pickle.load, __name__="counting")
    before = Counting.made
    same(by_torch(data), load(data, pickle_module=module))
    assert Counting.made > before


def test_a_module_that_cannot_unpickle() -> None:
    with pytest.raises(UsageError, match="no Unpickler"):
        load(saved(1), pickle_module=json)


def test_a_dill_that_is_too_old() -> None:
    dill = SimpleNamespace(Unpickler=pickle.Unpickler, load=pickle.load, __name__="dill", __version__="0.2.0")
    with pytest.raises(UsageError, match="dill"):
        load(saved(1), pickle_module=dill)


def test_a_storage_that_the_file_does_not_hold() -> None:
    source = open_source(forge.checkpoint())
    piece = Piece(replace(read_source(source), storages=()), lambda _: source)
    with pytest.raises(BrokenFileError, match="storage '0'"):
        load_trusted(piece, {}, DeviceMap(Plan(), "cpu", ""))


def test_a_python_unpickler_will_do() -> None:
    data = saved(ZOO["training checkpoint"].make())
    module = SimpleNamespace(Unpickler=pickle._Unpickler, load=pickle._load, __name__="slow")  # type: ignore[attr-defined]
    same(by_torch(data), load(data, pickle_module=module))


# -- the tar format, which no release has written for years ------------------------------------------------------------


unfiltered = pytest.mark.filterwarnings("ignore:Python 3.14 will, by default, filter:DeprecationWarning")  # torch's


def old_tar(folder: Path, data: bytes) -> Any:
    path = folder / "old.pt"
    path.write_bytes(data)
    return torch.load(path, weights_only=False)


@unfiltered
def test_a_tar_archive(tmp_path: Path) -> None:
    data = forge.tar()
    same(old_tar(tmp_path, data), load(data))


@unfiltered
def test_a_tar_archive_with_views_of_storages(tmp_path: Path) -> None:
    one = pickled(tuple_of(0, "cpu", name("torch", "FloatStorage"))) + struct.pack("<q", 4) + FLOATS
    storages = pickled(number(1)) + one + pickled(forge.listing(tuple_of(1, 0, 1, 3)))
    held = [(100, 0, 4, 0), (101, 1, 2, 1)]
    tensors = pickled(number(2)) + b"".join(
        pickled(tuple_of(key, storage, name("torch", "FloatTensor"))) + struct.pack("<i4x3q", 1, size, 1, offset)
        for key, storage, size, offset in held
    )
    root = pickled(dictionary({"all": b"P100\n", "some": b"P101\n", "storage": b"P0\n"}))
    data = forge.tar({"pickle": root, "tensors": tensors, "storages": storages})
    same(old_tar(tmp_path, data), load(data))


# -- the stream format -------------------------------------------------------------------------------------------------


def test_views_of_storages_in_a_stream() -> None:
    def tensor(view: tuple[object, ...] | None, size: int) -> bytes:
        return forge.tensor(
            shape=(size,), storage=forge.storage_id("0", 4, "FloatStorage", "cpu", tuple_of(*view) if view else None)
        )

    held = {"all": tensor(None, 4), "some": tensor(("v", 1, 2), 2), "again": tensor(("v", 1, 2), 2)}
    data = forge.legacy(
        object=pickled(dictionary(held)),
        keys=pickled(forge.listing("0")),
        storages=(struct.pack("<q", 4) + FLOATS,),
    )
    same(by_torch(data), load(data))


def module_in_a_stream(source: str) -> bytes:
    cls = tuple_of("module", name("torch.nn", "ReLU"), "a.py", source) + b"Q"
    return forge.legacy(object=pickled(cls), keys=pickled(forge.listing()), storages=())


def test_a_class_whose_source_has_changed_is_told() -> None:
    with pytest.warns(torch.serialization.SourceChangeWarning, match="ReLU"):
        assert load(module_in_a_stream("class ReLU: pass")) is nn.ReLU
    assert load(module_in_a_stream("")) is nn.ReLU


def test_an_id_of_no_known_kind() -> None:
    body = pickled(tuple_of("folder", "a") + b"Q")
    with pytest.raises(BrokenFileError, match="folder"):
        load(forge.checkpoint(body, {}))


# -- devices beside storages -------------------------------------------------------------------------------------------


def test_a_device_that_is_named_apart_from_a_storage_lands_too() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "device", property(lambda _: torch.device("cuda", 3)))
        data = saved([Pair(torch.rand(3), torch.rand(3))])
    asked: list[str] = []

    class Landing(DeviceMap):
        def device(self, tag: str) -> str:
            asked.append(tag)
            return "cpu"

    (held,) = load(data, Landing(Plan(), "cpu", ""))
    assert asked == ["cuda:3"]
    assert held.device == torch.device("cpu")


def test_nothing_is_left_to_be_checked_by_the_next_load() -> None:
    data = saved({"a": torch.eye(2).to_sparse(), "b": Net})
    broken = data.replace(b"tests.loading.zoo", b"tests.loading.zap")
    with pytest.raises(MissingModuleError):
        load(broken)
    noted = getattr(torch._utils, "_get_sparse_tensors_to_validate", lambda: torch._utils._sparse_tensors_to_validate)
    assert not noted()
