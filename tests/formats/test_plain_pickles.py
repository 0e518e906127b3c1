"""Tensors written by ``pickle.dump``: each storage is a legacy checkpoint inside the pickle."""

from __future__ import annotations

import io
import pickle
import struct
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.each import each
from tests.forge import DANGEROUS, FLOATS, call, legacy, list_of, name, pickled, storage_id, text
from tests.loading.equal import assert_same
from tests.loading.zoo import save_with_tag
from tests.makers import codes

import transload
from transload.errors import BrokenFileError, RescueError, UnsafeError
from transload.opening import inspect

PROTOCOLS = (0, 1, 2, 3, 4, 5)
LOADER = name("torch.storage", "_load_from_bytes")
REBUILD = name("torch._utils", "_rebuild_tensor_v2")


def trained() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(5, 3)).sum().backward()
    adam.step()
    return {"model": model.state_dict(), "optimizer": adam.state_dict(), "epoch": 3}


def kinds_of_tensors() -> dict[str, Any]:
    tensors: dict[str, Any] = {
        str(dtype): torch.arange(6).to(dtype)
        for dtype in (torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64)
    }
    return {
        **tensors,
        "none": torch.zeros(0, 3),
        "number": torch.tensor(3.0),
        "turned": torch.arange(12.0).view(3, 4).t(),
        "part": torch.arange(100)[7:19:3],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "large": torch.arange(100_000.0),  # larger than a frame
        "sparse": torch.eye(3).to_sparse(),
    }


def dumped(value: object, protocol: int = 4, tag: str = "") -> bytes:
    with save_with_tag(tag), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pickle.dumps(value, protocol)


def loaded(data: bytes, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transload.load(io.BytesIO(data), **options)


def round_trip(value: object) -> Any:
    return pickle.loads(dumped(value))


@each("protocol", PROTOCOLS)
@each("make", [trained, kinds_of_tensors])
def test_pickle_of_tensors_is_inspected_and_loaded(make: Any, protocol: int) -> None:
    value = make()
    data = dumped(value, protocol)
    checkpoint = inspect(data)
    assert (checkpoint.format, checkpoint.safety, checkpoint.integrity, codes(checkpoint)) == (
        "pickle",
        "data-only",
        "unchecked",
        ["plain-pickle"],
    )
    assert [use.device for use in checkpoint.devices] == ["cpu"]
    loader = next(use for use in checkpoint.globals if use.full_name == "torch.storage._load_from_bytes")
    assert (loader.verdict, loader.called) == ("data", len(checkpoint.storages))
    assert all(storage.stored == storage.nbytes for storage in checkpoint.storages)
    for trusted in (False, True):
        assert_same(loaded(data, weights_only=not trusted), pickle.loads(data))


@each("protocol", PROTOCOLS)
def test_file_from_a_gpu_loads_without_a_gpu(protocol: int) -> None:
    value = trained()
    data = dumped(value, protocol, "cuda:0")
    checkpoint = inspect(data)
    assert {use.device for use in checkpoint.devices} == {"cuda:0"}
    with pytest.warns(transload.LandingWarning):
        transload.load(io.BytesIO(data))
    for options in ({}, {"map_location": "cpu"}, {"weights_only": False}):
        result = loaded(data, **options)
        assert_same(result, round_trip(value))


def test_file_offsets_of_tensors_are_right() -> None:
    value = kinds_of_tensors()
    data = dumped(value)
    checkpoint = inspect(data)
    for title in ("large", "torch.bfloat16", "parameter"):
        tensor = checkpoint.tensor(title)
        assert tensor.file_offset is not None
        raw = value[title].detach().contiguous().view(torch.uint8).numpy().tobytes()
        assert data[tensor.file_offset : tensor.file_offset + tensor.nbytes] == raw


@each("protocol", (2, 5))
def test_open_convert_and_verify(protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "old.pkl"
    value = {**trained(), "q": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)}
    path.write_bytes(dumped(value, protocol, "cuda:0"))
    with transload.open(path) as opened, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(opened["model/0.weight"][1:3], value["model"]["0.weight"][1:3])
    transload.convert(path, tmp_path / "new.pt")
    assert_same(dict(torch.load(tmp_path / "new.pt")["model"]), dict(round_trip(value["model"])))
    assert transload.verify(path).integrity == "unchecked"
    with pytest.raises(RescueError, match="plain pickle"):
        transload.rescue(path, tmp_path / "rescued.pkl")


def test_pickled_module_needs_trust() -> None:
    data = dumped(torch.nn.Linear(2, 3), 4, "cuda:0")
    checkpoint = inspect(data)
    assert (checkpoint.safety, checkpoint.integrity) == ("needs-trust", "unchecked")
    assert [tensor.name for tensor in checkpoint.tensors] == ["weight", "bias"]
    with pytest.raises(UnsafeError, match="Linear"):
        loaded(data)
    assert type(loaded(data, weights_only=False)) is torch.nn.Linear


def test_first_of_several_pickles_is_inspected() -> None:
    checkpoint = inspect(dumped(torch.ones(3)) + dumped({"b": torch.zeros(2)}))
    assert (checkpoint.safety, [tensor.name for tensor in checkpoint.tensors]) == ("data-only", [""])


# -- handwritten streams


def stream(**parts: Any) -> bytes:
    """The argument of ``_load_from_bytes`` for four floats."""
    defaults: dict[str, Any] = {
        "object": pickled(storage_id("7", 4, "FloatStorage", "cpu", None)),
        "keys": pickled(list_of("7")),
        "storages": (struct.pack("<q", 4) + FLOATS,),
    }
    return legacy(**{**defaults, **parts})


def as_bytes(data: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(data)) + data


def as_text(data: bytes) -> bytes:
    return call(name("_codecs", "encode"), text(data.decode("latin-1")), text("latin1"))


def tensor_of(storage: bytes) -> bytes:
    hooks = call(name("collections", "OrderedDict"))
    return call(REBUILD, storage, b"K\x00", b"K\x04\x85", b"K\x01\x85", b"\x89", hooks)


def plain(data: bytes, write: Any = as_bytes) -> bytes:
    return pickled(tensor_of(call(LOADER, write(data))), 3)


@each("write", [as_bytes, as_text])
def test_handwritten_stream_is_loaded(write: Any) -> None:
    checkpoint = inspect(plain(stream(), write))
    assert (checkpoint.safety, codes(checkpoint)) == ("data-only", ["plain-pickle"])
    assert loaded(plain(stream(), write)).numpy().tobytes() == FLOATS


HOSTILE = {
    "not a stream": pickled(DANGEROUS),
    "a call as the object": stream(object=pickled(DANGEROUS)),
    "a call beside the storage": stream(
        object=pickled(DANGEROUS + b"0" + storage_id("7", 4, "FloatStorage", "cpu", None))
    ),
    "a call in the list of keys": stream(keys=pickled(call(name("builtins", "print")))),
    "a call in the system facts": stream(facts=pickled(DANGEROUS)),
    "a call as the protocol": stream(protocol=pickled(DANGEROUS)),
    "a name beside the storage": stream(
        object=pickled(name("os", "getcwd") + b"0" + storage_id("7", 4, "FloatStorage", "cpu", None))
    ),
    "a class that is not a storage's": stream(object=pickled(storage_id("7", 4, "system", "cpu", None))),
    "two keys": stream(keys=pickled(list_of("7", "8"))),
    "another key": stream(keys=pickled(list_of("8"))),
    "another count": stream(storages=(struct.pack("<q", 5) + FLOATS,)),
    "trailing bytes": stream() + b"\0",
    "an archive": b"PK\x03\x04",
    "a dictionary": stream(object=pickled(b"}")),
    "nothing": b"",
    "truncated in the pickles": stream()[:40],
}


@each("write", [as_bytes, as_text])
@each("data", HOSTILE.values(), ids=list(HOSTILE))
def test_invalid_storage_bytes_are_dangerous(data: bytes, write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = inspect(plain(data, write))
    assert (checkpoint.safety, checkpoint.integrity) == ("dangerous", "not-a-checkpoint")
    with pytest.raises(transload.TransloadError):
        loaded(plain(data, write))
    assert capsys.readouterr().out == ""


GOOD = call(LOADER, as_bytes(stream()))
OTHER_USES = {
    "the function as a value": list_of(GOOD, LOADER),
    "the function as an argument": list_of(GOOD, call(name("functools", "partial"), LOADER)),
    "a second call with invalid bytes": list_of(GOOD, call(LOADER, as_bytes(b"x"))),
    "two arguments": call(LOADER, as_bytes(stream()), b"N"),
    "the same bytes again": LOADER + b"q\x01" + as_bytes(stream()) + b"q\x02\x85R0h\x01h\x02\x85R",
    "another codec": call(LOADER, call(name("_codecs", "encode"), text(stream().decode("latin-1")), text("utf-8"))),
    "a persistent id": list_of(GOOD, storage_id("0", 4, "FloatStorage", "cpu")),
    "attributes of the function": list_of(GOOD, LOADER + b"}" + text("a") + b"Nsb"),
    "a discarded call with invalid bytes": GOOD + b"0" + call(LOADER, as_bytes(b"x")) + b"0N",
}


@each("body", OTHER_USES.values(), ids=list(OTHER_USES))
def test_other_use_of_load_from_bytes_is_dangerous(body: bytes) -> None:
    assert inspect(pickled(body, 3)).safety == "dangerous"


def test_attributes_and_items_of_a_storage_are_rejected() -> None:
    for change in (b"}b", b"NNs", b"Na"):
        data = pickled(GOOD + change, 3)
        assert inspect(data).safety != "data-only"
        with pytest.raises(transload.TransloadError):
            loaded(data)


@each("write", [as_bytes, as_text])
def test_truncated_storage_is_damage(write: Any) -> None:
    complete = stream()
    for missing in (1, len(FLOATS) - 1, len(FLOATS) + 3):
        data = plain(complete[:-missing], write)
        checkpoint = inspect(data)
        assert (checkpoint.integrity, "storage-cut" in codes(checkpoint)) == ("damaged", True), missing
        with pytest.raises(BrokenFileError):
            loaded(data)


@each("protocol", PROTOCOLS[2:])
def test_truncated_file_is_damaged(protocol: int, tmp_path: Path) -> None:
    complete = dumped({"a": torch.ones(40), "b": torch.ones(3)}, protocol)
    begin = complete.index(b"_load_from_bytes") + 40
    for length in range(begin, len(complete), 7):
        checkpoint = inspect(complete[:length])
        assert (checkpoint.format, checkpoint.integrity) == ("pickle", "damaged"), length
        assert checkpoint.safety != "dangerous", length
        with pytest.raises(BrokenFileError):
            loaded(complete[:length])
    path = tmp_path / "cut.pkl"
    path.write_bytes(complete[:-50])
    with pytest.raises(RescueError):
        transload.rescue(path, tmp_path / "new.pt")


def test_large_file_is_loaded(tmp_path: Path) -> None:
    value = {"a": torch.arange(5_000_000), "b": torch.ones(3)}
    path = tmp_path / "large.pkl"
    path.write_bytes(dumped(value))
    assert_same(transload.load(path), round_trip(value))


def test_inspect_does_not_import_torch(tmp_path: Path) -> None:
    path = tmp_path / "a.pkl"
    path.write_bytes(dumped({"a": torch.ones(3)}))
    program = f"import sys, transload; print(len(transload.inspect({str(path)!r}).tensors), 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout.split() == [
        b"1",
        b"False",
    ]


@pytest.mark.filterwarnings("ignore::transload.LandingWarning")
@pytest.mark.parametrize("package", ["cloudpickle", "dill"])
def test_files_of_cloudpickle_and_dill(package: str, tmp_path: Path) -> None:
    module = pytest.importorskip(package)
    weights = torch.nn.Linear(3, 2).state_dict()
    path = tmp_path / "model.pkl"
    with save_with_tag("cuda:1"):
        path.write_bytes(module.dumps({"model": weights}))
    assert transload.inspect(path).safety == "data-only"
    loaded = transload.load(path)["model"]
    assert all(torch.equal(loaded[key], weights[key]) for key in weights)


def test_pickle_that_is_not_a_checkpoint_gets_no_advice_on_trust() -> None:
    """``transload.load`` does not read it either, with trust or without."""
    checkpoint = inspect(pickle.dumps({"array": np.arange(3.0)}, 4))
    assert [finding.code for finding in checkpoint.findings] == ["not-a-checkpoint"]


def test_advice_for_a_plain_pickle_names_transload_load() -> None:
    values = {"w": torch.ones(2), "anchors": np.arange(3, dtype=np.float32)}
    finding = {finding.code: finding for finding in inspect(pickle.dumps(values)).findings}["needs-trust"]
    assert finding.title.startswith("it asks for ")
    assert not finding.fix
    finding = {f.code: f for f in inspect(pickle.dumps({**values, "layer": torch.nn.ReLU()})).findings}["needs-trust"]
    assert finding.title.startswith("transload.load refuses ")
    assert "    obj = transload.load(path)" in finding.fix
