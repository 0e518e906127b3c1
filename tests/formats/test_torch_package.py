"""``torch.package`` archives against torch's own importer."""

from __future__ import annotations

import io
import platform
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import forge
from tests.makers import codes
from torch.package import PackageExporter, PackageImporter

from transload.checkpoint import Checkpoint, Tensor
from transload.opening import inspect as read

SOURCE = """
import torch

class Packaged(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(3, 2)
        self.tied = self.fc

    def forward(self, x):
        return self.fc(x)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A model whose class is defined in a separate module, as a user's would be."""
    (tmp_path / "packaged_model.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    import packaged_model  # type: ignore[import-not-found]

    yield packaged_model.Packaged()
    del sys.modules["packaged_model"]


def exported(fill: Callable[[Any], None]) -> bytes:
    buffer = io.BytesIO()
    with PackageExporter(buffer) as exporter:
        exporter.intern("packaged_model")
        exporter.extern(["torch.**", "builtins", "sys", "math", "collections"])
        fill(exporter)
    return buffer.getvalue()


def values(blob: bytes, checkpoint: Checkpoint, tensor: Tensor) -> Any:
    storage = next(s for s in checkpoint.storages if s.id == tensor.storage)
    assert storage.offset is not None
    raw = bytearray(blob[storage.offset : storage.offset + storage.nbytes])
    flat = torch.frombuffer(raw, dtype=getattr(torch, tensor.dtype))
    return flat.as_strided(tensor.shape, tensor.stride, tensor.offset)


def test_tensors_of_every_pickle_match_the_importer(module: Any) -> None:
    state = {"model": module.state_dict(), "step": torch.arange(6).view(2, 3).t()}

    def fill(exporter: Any) -> None:
        exporter.save_pickle("model", "model.pkl", module)
        exporter.save_pickle("model", "state", state)
        exporter.save_text("conf", "notes.txt", "hello")

    blob = exported(fill)
    checkpoint = read(blob)
    assert checkpoint.format == "torch-package"
    assert codes(checkpoint) == []
    importer = PackageImporter(io.BytesIO(blob))
    loaded = importer.load_pickle("model", "model.pkl").state_dict()
    loaded_state = importer.load_pickle("model", "state")
    expected = {f"model/model.pkl/{name}": value for name, value in loaded.items()}
    expected |= {f"model/state/model/{name}": value for name, value in loaded_state["model"].items()}
    expected["model/state/step"] = loaded_state["step"]
    assert {tensor.name for tensor in checkpoint.tensors} == set(expected)
    for tensor in checkpoint.tensors:
        assert tensor.stride == expected[tensor.name].stride()
        assert torch.equal(values(blob, checkpoint, tensor), expected[tensor.name])
    parts = {(part.name, part.kind) for part in checkpoint.parts}
    assert {("conf/notes.txt", "resource"), ("packaged_model.py", "source")} <= parts


def test_python_version_and_extern_modules_are_listed(module: Any) -> None:
    checkpoint = read(exported(lambda exporter: exporter.save_pickle("model", "model.pkl", module)))
    assert checkpoint.written_by.recorded == (("python", platform.python_version()),)
    assert "torch.nn.modules.linear" in dict(checkpoint.facts)["extern modules"]
    assert [pickle.name for pickle in checkpoint.pickles if pickle.main] == ["model/model.pkl"]
    assert ("packaged_model", "Packaged") in checkpoint.pickles[0].globals


def test_traced_module_is_found_through_its_package_call(module: Any) -> None:
    graph = torch.fx.symbolic_trace(module)
    blob = exported(lambda exporter: exporter.save_pickle("model", "model.pkl", graph))
    checkpoint = read(blob)
    assert [tensor.name for tensor in checkpoint.tensors] == ["model/model.pkl/fc.weight", "model/model.pkl/fc.bias"]
    assert codes(checkpoint) == []
    called = {getattr(call.callee, "name", "") for call in checkpoint.pickles[0].calls}
    assert "reduce_package_graph_module" in called


def test_package_call_inside_a_dictionary(module: Any) -> None:
    graph = torch.fx.symbolic_trace(module)
    blob = exported(lambda exporter: exporter.save_pickle("model", "all.pkl", {"net": graph}))
    names = [tensor.name for tensor in read(blob).tensors]
    assert names == ["model/all.pkl/reduce_package 0/fc.weight", "model/all.pkl/reduce_package 0/fc.bias"]


def test_torchscript_module_inside_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.package.package_exporter._gate_torchscript_serialization", False)
    scripted = torch.jit.script(torch.nn.Linear(2, 2))

    def fill(exporter: Any) -> None:
        exporter.save_pickle("model", "script.pkl", {"net": scripted})
        exporter.save_pickle("model", "shared.pkl", scripted.weight.detach())

    blob = exported(fill)
    checkpoint = read(blob)
    assert codes(checkpoint) == []
    weight = checkpoint.tensor(".data/ts_code/0/data.pkl/weight")
    assert torch.equal(values(blob, checkpoint, weight), scripted.weight)
    assert (".data/ts_code/0/data.pkl/weight", "model/shared.pkl") in checkpoint.shared
    assert any(part.name.startswith(".data/ts_code/code/") for part in checkpoint.parts)


def zipped(records: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, record in {".data/extern_modules": b"torch\n", ".data/version": b"6\n", **records}.items():
            archive.writestr(f"p/{name}", record)
    return out.getvalue()


def persistent(*fields: bytes) -> bytes:
    """A pickle whose root is a persistent id of these fields."""
    return b"\x80\x02(" + b"".join(fields) + b"tQ."


CALL = (forge.text("reduce_package"), b"K\x07", b"cos\ngetcwd\n", b")")


@pytest.mark.parametrize("fields", [CALL, (CALL[0], *CALL[2:])], ids=["with an id", "without an id"])
def test_call_in_a_persistent_id_is_listed(fields: tuple[bytes, ...]) -> None:
    checkpoint = read(zipped({"a/b.pkl": persistent(*fields)}))
    assert codes(checkpoint) == []
    assert [repr(call) for call in checkpoint.pickles[0].calls] == ["Call(Global(os.getcwd), reduce)"]


def test_unknown_persistent_id_is_reported() -> None:
    assert codes(read(zipped({"a/b.pkl": persistent(forge.text("thing"), b"K\x01")}))) == ["pickle-odd-id"]


def test_pickle_under_any_name_is_listed() -> None:
    checkpoint = read(zipped({"a/weights.bin": b"\x80\x04cos\ngetcwd\n."}))
    assert ("os", "getcwd") in checkpoint.pickles[0].globals


def test_missing_storage_is_reported(module: Any) -> None:
    blob = exported(lambda exporter: exporter.save_pickle("model", "model.pkl", module))
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(blob)) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            if not name.endswith("/0.storage"):
                new.writestr(name, old.read(name))
    assert codes(read(out.getvalue())) == ["storage-missing"]


@settings(max_examples=100)
@given(st.binary(max_size=60))
def test_arbitrary_pickles_do_not_raise(tail: bytes) -> None:
    read(
        zipped(
            {"a/b.pkl": persistent(forge.text("reduce_package"), tail), ".data/ts_code/0/data.pkl": b"\x80\x02" + tail}
        )
    )
