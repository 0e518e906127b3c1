"""Exported programs against torch: the current layout as torch writes it, and older layouts rebuilt by hand."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests import makers
from tests.each import each
from tests.makers import codes

from transload.checkpoint import Checkpoint, Tensor
from transload.dtypes import SCALAR_TYPES
from transload.formats.programs.export import graph_problems
from transload.opening import inspect as read

# torch warns about views that do not cover their storage, and saves them anyway.
pytestmark = pytest.mark.filterwarnings("ignore:No complete tensor found in the group:UserWarning")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(3, 2)
        self.tied = torch.nn.Linear(3, 2)
        self.tied.weight = self.fc.weight
        self.register_buffer("view", torch.arange(4.0)[1:3])
        self.register_buffer("narrow", torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("passing", torch.full((2,), 3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        constant = torch.zeros(2, device=torch.device("cpu")) + torch.tensor([1.0, 2.0])
        return self.fc(x) + self.tied(x) + self.view + self.narrow + self.passing + constant


def saved(program: Any, **more: Any) -> bytes:
    pytest.importorskip("torch.export.pt2_archive", reason="this torch writes an older format")
    buffer = io.BytesIO()
    torch.export.save(program, buffer, **more)
    return buffer.getvalue()


def content(blob: bytes, tensor: Tensor, checkpoint: Checkpoint) -> Any:
    storage = next(s for s in checkpoint.storages if s.id == tensor.storage)
    assert storage.offset is not None
    kind = getattr(torch, tensor.dtype)
    flat = torch.frombuffer(bytearray(blob[storage.offset : storage.offset + storage.nbytes]), dtype=kind)
    assert tensor.file_offset == storage.offset + tensor.offset * flat.element_size()
    return flat.as_strided(tensor.shape, tensor.stride, tensor.offset)


def assert_tensors_equal(blob: bytes, checkpoint: Checkpoint, expected: dict[str, Any]) -> None:
    """Names, dtypes, shapes, strides and bytes are those of ``expected``, and there are no other tensors."""
    assert {tensor.name for tensor in checkpoint.tensors} == set(expected)
    for tensor in checkpoint.tensors:
        expected_tensor = expected[tensor.name]
        assert (tensor.dtype, tensor.shape) == (
            str(expected_tensor.dtype).removeprefix("torch."),
            tuple(expected_tensor.shape),
        )
        assert (tensor.stride, tensor.offset) == (expected_tensor.stride(), expected_tensor.storage_offset())
        assert torch.equal(content(blob, tensor, checkpoint), expected_tensor)


def expected_tensors(program: Any) -> dict[str, Any]:
    return {**program.state_dict, **{f"constants/{name}": value for name, value in program.constants.items()}}


@pytest.fixture(scope="module")
def program() -> Any:
    return torch.export.export(Net(), (torch.ones(1, 3),))


@pytest.fixture(scope="module")
def blob(program: Any) -> bytes:
    return saved(program, extra_files={"notes.txt": "hello"})


# -- the current layout


def test_program_exported_on_a_gpu(data: Path) -> None:
    path = data / "h200" / "export_cuda0.pt2"
    checkpoint = read(path)
    assert checkpoint.format == "torch-export"
    assert checkpoint.written_by.recorded == (("torch", "2.11.0+cu130"),)
    facts = dict(checkpoint.facts)
    assert (facts["schema version"], facts["opset version"], facts["nodes"]) == ("8.17", "aten 10", "5")
    assert {tensor.device for tensor in checkpoint.tensors} == {"cuda:0"}
    assert len(checkpoint.tensors) == 10
    assert checkpoint.shared == (("fc.weight", "head.weight"),)
    assert [part.facts for part in checkpoint.parts if part.kind == "sample inputs"] == [
        (("tensors", "1"), ("devices", "cuda:0"))
    ]
    assert codes(checkpoint) == []


def test_exported_weights_match_the_saved_state_dict(data: Path) -> None:
    export, state = read(data / "h200" / "export_cuda0.pt2"), read(data / "h200" / "state_dict_cuda0.pt")
    assert {(t.name, t.dtype, t.shape, t.stride) for t in export.tensors} == {
        (t.name, t.dtype, t.shape, t.stride) for t in state.tensors
    }


def test_current_layout(program: Any, blob: bytes) -> None:
    checkpoint = read(blob)
    assert_tensors_equal(blob, checkpoint, expected_tensors(program))
    assert checkpoint.written_by.recorded == (("torch", torch.__version__),)
    assert {t.name for t in checkpoint.tensors if t.cls == "Parameter"} == {
        "fc.weight",
        "fc.bias",
        "tied.weight",
        "tied.bias",
    }
    assert ("fc.weight", "tied.weight") in checkpoint.shared
    assert ("extra/notes.txt", 5) in [(part.name, part.nbytes) for part in checkpoint.parts]
    assert [pickle_.name for pickle_ in checkpoint.pickles] == ["data/sample_inputs/model.pt › data.pkl"]


def test_devices_in_the_graph_are_reported(blob: bytes) -> None:
    checkpoint = read(blob)
    assert codes(checkpoint) == ["export-device"]
    assert "cpu in torch.ops.aten.zeros.default 1×" in checkpoint.problems[0].detail


def test_several_programs_in_one_archive(program: Any) -> None:
    _package = pytest.importorskip("torch.export.pt2_archive._package", reason="this torch writes an older format")
    buffer = io.BytesIO()
    _package.package_pt2(buffer, exported_programs={"one": program, "two": program})
    checkpoint = read(buffer.getvalue())
    expected = {
        f"{model}/{name}": value for model in ("one", "two") for name, value in expected_tensors(program).items()
    }
    assert_tensors_equal(buffer.getvalue(), checkpoint, expected)


def test_every_dtype_of_the_schema() -> None:
    from torch._export.serde.schema import ScalarType

    names = {SCALAR_TYPES[number] for number in ScalarType if number in SCALAR_TYPES}  # an older torch has fewer

    class Many(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in names:
                self.register_buffer(f"x_{name}", torch.ones(4).to(getattr(torch, name)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    checkpoint = read(saved(torch.export.export(Many(), (torch.ones(1),))))
    assert {(tensor.name, tensor.dtype) for tensor in checkpoint.tensors} == {(f"x_{name}", name) for name in names}
    assert {storage.dtype for storage in checkpoint.storages} == names
    assert codes(checkpoint) == []


# -- older layouts


def records(blob: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(blob)) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def zipped(content: dict[str, bytes], root: str = "m/") -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, record in content.items():
            archive.writestr(root + name, record)
    return out.getvalue()


@pytest.mark.parametrize("ending", ["pt", "json"])
def test_layout_up_to_torch_2_7(program: Any, blob: bytes, ending: str) -> None:
    old = zipped(
        {
            "serialized_exported_program.json": records(blob)["models/model.json"],
            f"serialized_state_dict.{ending}": makers.saved(dict(program.state_dict)),
            f"serialized_constants.{ending}": makers.saved(dict(program.constants)),
            "serialized_example_inputs.pt": makers.saved(((torch.ones(1, 3),), {})),
            "version": b"8.7",
            "extra_files/notes.txt": b"hello",
        },
        root="",
    )
    checkpoint = read(old)
    assert checkpoint.format == "torch-export"
    assert_tensors_equal(old, checkpoint, expected_tensors(program))
    assert set(codes(checkpoint)) == {"export-device"}
    assert "sample inputs" in [part.kind for part in checkpoint.parts]


def test_layout_of_torch_2_8(program: Any, blob: bytes) -> None:
    current = records(blob)
    kept = {name: current[name] for name in ("models/model.json", "data/sample_inputs/model.pt", "archive_format")}
    weights, constants = makers.saved(dict(program.state_dict)), makers.saved(dict(program.constants))
    old = zipped({**kept, "data/weights/model.pt": weights, "data/constants/model.pt": constants})
    checkpoint = read(old)
    assert_tensors_equal(old, checkpoint, expected_tensors(program))
    assert set(codes(checkpoint)) == {"export-device"}


# -- pickles


def test_pickled_tensors_and_objects_are_listed(blob: bytes) -> None:
    content = records(blob)
    table = {
        "config": {
            "sub": {"path_name": "tensor_9", "use_pickle": True, "is_param": False, "tensor_meta": None},
            "opaque": {"path_name": "opaque_obj_0", "use_pickle": True, "is_param": False, "tensor_meta": None},
        }
    }
    content["data/constants/model_constants_config.json"] = json.dumps(table).encode()
    content["data/constants/tensor_9"] = makers.saved(torch.arange(3))
    content["data/constants/opaque_obj_0"] = pickle.dumps(os.getcwd, protocol=2)
    new = zipped(content)
    checkpoint = read(new)
    inner = checkpoint.tensor("constants/sub")
    assert content_of(new, checkpoint, inner) == [0, 1, 2]
    assert any(name == "getcwd" for pickle_ in checkpoint.pickles for _, name in pickle_.globals)


def content_of(blob: bytes, checkpoint: Checkpoint, tensor: Tensor) -> Any:
    return content(blob, tensor, checkpoint).tolist()


def test_unreferenced_pickle_is_listed(blob: bytes) -> None:
    for name in ("data/weights/weight_99", "hidden.pkl"):
        new = zipped({**records(blob), name: pickle.dumps(os.getcwd, protocol=2)})
        assert any(name == "getcwd" for pickle_ in read(new).pickles for _, name in pickle_.globals)


# -- the graph


@each(
    "target",
    ["torch.os.system", "torch.ops.aten.save.default", "os.system", "_operator.methodcaller", "torch.hub.load"],
)
def test_dangerous_target_in_the_graph_is_reported(target: str) -> None:
    problems = graph_problems("g", {"graph_module": {"graph": {"nodes": [{"target": target, "inputs": []}]}}})
    assert [problem.code for problem in problems] == ["export-dangerous-op"]
    assert target in problems[0].detail


@pytest.mark.parametrize("key", ["expr_str", "guards_code"])
def test_python_code_in_an_expression_is_reported(key: str) -> None:
    evil = "__import__('os').getcwd()"
    assert [p.code for p in graph_problems("g", {key: [evil]})] == ["export-dangerous-op"]
    assert graph_problems("g", {key: ["Max(1, s0 + 2*s1)"]}) == []


def test_dynamic_program_has_no_problems() -> None:
    pytest.importorskip("torch.export.pt2_archive", reason="this torch writes an older format")

    class Dynamic(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda y: y + y.shape[0] * 2, lambda y: y - 1, (x,)).reshape(-1)

    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(Dynamic(), (torch.ones(3, 2),), dynamic_shapes={"x": {0: batch}})
    assert codes(read(saved(program))) == []


# -- damaged archives


def test_truncated_or_missing_weight_is_reported(blob: bytes) -> None:
    content = records(blob)
    content["data/weights/weight_0"] = content["data/weights/weight_0"][:-4]
    assert "tensor-broken" in codes(read(zipped(content)))
    del content["data/weights/weight_0"]
    assert "storage-missing" in codes(read(zipped(content)))


def test_weight_record_without_bytes_is_reported(blob: bytes) -> None:
    content = records(blob)
    content["data/weights/weight_0"] = b""
    checkpoint = read(zipped(content))
    assert "export-no-bytes" in codes(checkpoint)
    assert "fc.weight" in [tensor.name for tensor in checkpoint.tensors]


def test_program_without_weights_is_reported(blob: bytes) -> None:
    content = {name: record for name, record in records(blob).items() if not name.startswith("data/weights/")}
    assert "export-no-program" in codes(read(zipped(content)))
    assert "export-no-program" in codes(read(zipped({"archive_format": b"pt2"})))


_KEYS = (
    "config path_name use_pickle tensor_meta dtype sizes strides storage_offset device as_int type index "
    "as_device target schema_version opset_version torch_version graph_module graph nodes expr_str"
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYS.split()), inner, max_size=4),
    max_leaves=25,
)


@given(table=values, graph=values)
@example(table={"config": {"w": {"path_name": "w", "tensor_meta": {"sizes": [1 << 62] * 8}}}}, graph=[])
@example(table={"config": {"w": {"path_name": "../../data", "use_pickle": True}}}, graph={"torch_version": ["x"]})
def test_arbitrary_json_records_do_not_raise(table: object, graph: object) -> None:
    content = {
        "archive_format": b"pt2",
        "models/model.json": json.dumps(graph).encode(),
        "data/weights/model_weights_config.json": json.dumps(table).encode(),
        "data/constants/model_constants_config.json": json.dumps(table).encode(),
        "data/weights/w": bytes(64),
    }
    read(zipped(content))


@settings(max_examples=60)
@given(at=st.integers(0, 30_000), byte=st.integers(0, 255))
def test_damaged_byte_does_not_raise(data: Path, at: int, byte: int) -> None:
    blob = bytearray((data / "h200" / "export_cuda0.pt2").read_bytes())
    blob[at % len(blob)] = byte
    read(bytes(blob))


def test_deeply_nested_json_is_reported(blob: bytes) -> None:
    content = {**records(blob), "models/model.json": b'{"a":' * 200_000}
    assert "json-broken" in codes(read(zipped(content)))


def test_deeply_nested_archives_do_not_raise() -> None:
    inner = zipped({"data.pkl": b"\x80\x02N.", "version": b"3"})
    for _ in range(50):
        inner = zipped({"archive_format": b"pt2", "data/weights/model.pt": inner})
    assert read(inner).tensors == ()
