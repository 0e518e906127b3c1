"""TorchScript archives against torch: the same tensors, byte for byte, and the code is scanned without running it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.each import each
from tests.makers import codes

from transload.checkpoint import Checkpoint, Tensor
from transload.formats.programs.torchscript import code_problems
from transload.opening import inspect as read

RELEASES = [
    "torch-1.0.0-py2.7.18",
    "torch-1.4.0-py3.7.16",
    "torch-1.6.0-py3.7.16",
    "torch-1.10.2-py3.7.16",
    "torch-1.12.1-py3.10.13",
    "torch-2.1.2-py3.10.13",
    "torch-2.6.0-py3.11.7",
    "torch-2.13.0-py3.11.7",
]


def tensor_from_bytes(blob: bytes, checkpoint: Checkpoint, tensor: Tensor) -> Any:
    """A torch tensor from the bytes that the checkpoint points at."""
    storage = next(s for s in checkpoint.storages if s.id == tensor.storage)
    assert storage.offset is not None
    flat = torch.frombuffer(bytearray(blob[storage.offset : storage.offset + storage.nbytes]), dtype=torch.uint8)
    typed = flat.view(getattr(torch, tensor.dtype))
    width = typed.element_size()
    assert tensor.file_offset == storage.offset + tensor.offset * width
    return typed.as_strided(tensor.shape, tensor.stride, tensor.offset)


def raw(tensor: Any) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy())


def script(module: Any, *, extra: dict[str, bytes] | None = None) -> bytes:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(module), buffer, _extra_files=extra)
    return buffer.getvalue()


def changed(blob: bytes, change: Callable[[str, bytes], bytes | None], more: dict[str, bytes] | None = None) -> bytes:
    """The archive with ``change`` applied to every record; records for which it returns ``None`` are left out."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(blob)) as source, zipfile.ZipFile(out, "w") as target:
        root = source.namelist()[0].partition("/")[0]
        for name in source.namelist():
            record = change(name.partition("/")[2], source.read(name))
            if record is not None:
                target.writestr(name, record)
        for name, record in (more or {}).items():
            target.writestr(f"{root}/{name}", record)
    return out.getvalue()


def with_code(blob: bytes, edit: Callable[[str], str]) -> bytes:
    def change(name: str, record: bytes) -> bytes | None:
        if name.endswith(".debug_pkl"):
            return None
        return edit(record.decode()).encode() if name.endswith(".py") else record

    return changed(blob, change)


class Inner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(3, 4).t())
        self.register_buffer("b", torch.arange(4, dtype=torch.int16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w


class Zoo(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = Inner()
        self.same = self.a
        self.seq = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        self.seq[2].weight = torch.nn.Parameter(self.seq[0].weight.detach()[:2])
        self.attribute = torch.zeros(5)[1:3]
        self.listed = [torch.ones(2), torch.zeros(3, dtype=torch.bfloat16)]
        self.named = {"k": torch.ones(1)}
        self.where = torch.device("cuda:1")
        for name in ("float16", "bfloat16", "float64", "uint8", "bool", "complex64", "float8_e4m3fn", "uint16"):
            if hasattr(torch, name):  # an older torch has fewer
                self.register_buffer(f"x_{name}", torch.ones(3).to(getattr(torch, name)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + torch.zeros(3, device="cuda:0")


# -- archives written by torch


@each("release", RELEASES)
def test_tensors_of_every_torch_release_match(data: Path, release: str) -> None:
    folder = data / "torch-releases" / release
    expected = json.loads((folder / "expected.json").read_text())["files"]["traced_cpu.pt"]["tensors"]
    blob = (folder / "traced_cpu.pt").read_bytes()
    checkpoint = read(blob)
    assert checkpoint.format == "torchscript"
    assert codes(checkpoint) == []
    actual = {
        f"/{tensor.name}": {
            "dtype": f"torch.{tensor.dtype}",
            "shape": list(tensor.shape),
            "sha256": hashlib.sha256(raw(tensor_from_bytes(blob, checkpoint, tensor))).hexdigest(),
        }
        for tensor in checkpoint.tensors
    }
    assert actual == expected


def test_device_tags_and_shared_weights(data: Path) -> None:
    checkpoint = read(data / "h200" / "torchscript_cuda0.pt")
    assert {tensor.device for tensor in checkpoint.tensors} == {"cuda:0"}
    assert checkpoint.shared == (("fc.weight", "head.weight"),)
    assert dict(checkpoint.facts)["operator version"] == "3"
    assert dict(checkpoint.facts)["class"] == "__torch__.Net"
    assert codes(checkpoint) == []
    assert "code/__torch__.py" in [part.name for part in checkpoint.parts if part.kind == "source"]


@pytest.fixture(scope="module")
def zoo() -> bytes:
    return script(Zoo(), extra={"notes.txt": b"hello"})


def test_tensors_match_the_state_dict(zoo: bytes) -> None:
    checkpoint = read(zoo)
    state = torch.jit.load(io.BytesIO(zoo)).state_dict()
    listed = {tensor.name: tensor for tensor in checkpoint.tensors}
    assert set(state) <= set(listed)
    for name, tensor in state.items():
        actual = listed[name]
        assert (actual.dtype, actual.shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        assert (actual.stride, actual.offset) == (tensor.stride(), tensor.storage_offset())
        assert raw(tensor_from_bytes(zoo, checkpoint, actual)) == raw(tensor.detach())
    assert {"attribute", "listed/0", "listed/1", "named/k"} == set(listed) - set(state)
    assert ("a.w", "same.w") in checkpoint.shared


def test_storage_has_the_dtype_of_its_tensors(zoo: bytes) -> None:
    checkpoint = read(zoo)
    assert {s.dtype for s in checkpoint.storages if "x_float8_e4m3fn" in s.tensors} == {"float8_e4m3fn"}
    assert all(storage.stored == storage.nbytes for storage in checkpoint.storages)


def test_extra_files_and_devices_are_reported(zoo: bytes) -> None:
    checkpoint = read(zoo)
    assert [(part.name, part.nbytes) for part in checkpoint.parts if part.kind == "extra file"] == [
        ("extra/notes.txt", 5)
    ]
    assert codes(checkpoint) == ["script-device"]
    problem = checkpoint.problems[0]
    assert problem.where in [part.name for part in checkpoint.parts]
    assert problem.detail == 'torch.device("cuda:0") 1×'
    assert ("where", "torch.device", "cuda:1") in [(leaf.name, leaf.kind, leaf.text) for leaf in checkpoint.leaves]


def test_sparse_and_quantized_attributes() -> None:
    module = torch.nn.Module()
    module.register_buffer("coo", torch.eye(3).to_sparse())
    module.register_buffer("csr", torch.eye(3).to_sparse_csr())
    module.register_buffer("q", torch.quantize_per_tensor(torch.ones(4), 0.1, 3, torch.qint8))
    checkpoint = read(script(module))
    assert [(t.name, t.kind, t.shape) for t in checkpoint.tensors] == [
        ("coo", "sparse_coo", (3, 3)),
        ("csr", "sparse_csr", (3, 3)),
        ("q", "quantized", (4,)),
    ]
    assert codes(checkpoint) == []


def test_constants_are_named_as_in_the_code() -> None:
    class Frozen(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x)

    module = Frozen().eval()
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.freeze(torch.jit.script(module)), buffer)
    checkpoint = read(buffer.getvalue())
    assert [tensor.name for tensor in checkpoint.tensors] == ["CONSTANTS.c0", "CONSTANTS.c1"]
    assert [storage.id for storage in checkpoint.storages] == ["constants/0", "constants/1"]
    weight = tensor_from_bytes(buffer.getvalue(), checkpoint, checkpoint.tensors[0])
    assert torch.equal(weight, module.fc.weight)
    assert codes(checkpoint) == []


def test_lite_interpreter_bytecode_is_scanned(tmp_path: Path) -> None:
    class Writes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.save(x, "never")
            return self.fc(x)

    path = tmp_path / "model.ptl"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated in newer releases
        torch.jit.freeze(torch.jit.script(Writes().eval()))._save_for_lite_interpreter(str(path))
    checkpoint = read(path)
    assert dict(checkpoint.facts)["lite interpreter"].startswith("bytecode version ")
    places = [p.where for p in checkpoint.problems if p.code == "script-dangerous-op"]
    assert "bytecode.pkl" in places
    assert len(places) == 2
    assert [tensor.shape for tensor in checkpoint.tensors] == [(2, 3), (2,)]
    assert set(codes(checkpoint)) == {"script-dangerous-op"}


# -- code

CALLS = {
    "plain": "torch.save(x, {0})",
    "spaced": "torch . save (x, {0})",
    "continued": "torch.\\\n  save(x, {0})",
    "by namespace": "ops.aten.save(x, {0})",
    "aliased": "t = torch\n  t.save(x, {0})",
    "namespace aliased": "o = ops.aten\n  o.save(x, {0})",
    "function aliased": "g = torch.save\n  g(x, {0})",
    "in brackets": "(torch).save(x, {0})",
    "over lines": "(torch\n  .save)(x, {0})",
    "by getattr": 'getattr(torch, "save")(x, {0})',
    "after a string": 's = """a " """\n  torch.save(x, {0})',
    "after a comment": "# it's\n  torch.save(x, {0})",
}


@each("call", CALLS.values(), ids=list(CALLS))
def test_every_spelling_of_a_dangerous_call_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.chdir(tmp_path)

    @torch.jit.script
    def write(x: torch.Tensor) -> torch.Tensor:
        torch.save(x, "FILE")
        return x

    class Calls(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return write(x)

    target = tmp_path / "written"
    blob = script(Calls())
    hidden = with_code(blob, lambda code: code.replace('torch.save(x, "FILE")', call.format(f'"{target.as_posix()}"')))
    torch.jit.load(io.BytesIO(hidden))(torch.ones(1))
    assert target.exists(), "torch must accept this spelling, or the test proves nothing"
    assert "script-dangerous-op" in codes(read(hidden))


@each(
    "code",
    [
        "return (m).save(x, )",
        "print('torch.save(x)')",
        'print("use \\"torch.save(x)\\"")',
        "# torch.save(x, 'f')",
        "x = self.torch.save",
        "return torch.add(x, torch.tensor([1.]), alpha=1)",
        "_0 = __torch__.torch.nn.functional.relu(x, )",
        "return ops.prim.unchecked_unwrap_optional(x)",
    ],
)
def test_harmless_code_has_no_problems(code: str) -> None:
    assert code_problems("a.py", code) == []


def test_unclosed_quote_does_not_hide_a_call() -> None:
    assert code_problems("a.py", 's = "a\n"; torch.save(x, "f")')


def test_code_with_many_quotes_has_no_problems() -> None:
    assert code_problems("a.py", "\"'" * 200_000 + '"""' + "\\" * 100_000) == []


# -- other pickles


def test_pickles_of_debug_information_are_listed(zoo: bytes) -> None:
    evil = b"\x80\x02cos\ngetcwd\n)R."
    blob = changed(zoo, lambda name, record: evil if name.endswith(".debug_pkl") else record)
    names = {name for pickle_ in read(blob).pickles for name in pickle_.globals}
    assert ("os", "getcwd") in names


def test_unknown_pickle_is_listed(zoo: bytes) -> None:
    blob = changed(zoo, lambda _, record: record, {"other.pkl": pickle.dumps(os.getcwd)})
    assert any(module in ("posix", "nt") for pickle_ in read(blob).pickles for module, _ in pickle_.globals)


def test_main_pickle_is_listed_unchanged(zoo: bytes) -> None:
    main = next(pickle_ for pickle_ in read(zoo).pickles if pickle_.main)
    assert main.name == "data.pkl"
    assert ("torch.jit._pickle", "build_tensorlist") in main.globals
    assert all(call.args for call in main.calls if getattr(call.callee, "name", "") == "build_tensorlist")


def test_state_dict_disguised_as_a_program(data: Path) -> None:
    plain = (data / "h200" / "state_dict_cuda0.pt").read_bytes()
    checkpoint = read(changed(plain, lambda _, record: record, {"constants.pkl": b"\x80\x02)."}))
    assert checkpoint.format == "torchscript"
    assert "script-no-code" in codes(checkpoint)
    assert [t.name for t in checkpoint.tensors] == [t.name for t in read(plain).tensors]


# -- torch 1.0 to 1.2


def old_archive(model: object, records: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, record in {"version": b"1\n", **records, "model.json": json.dumps(model).encode()}.items():
            archive.writestr(f"m/{name}", record)
    return out.getvalue()


def entry(key: str, dims: list[str], strides: list[str], offset: str = "0", kind: str = "FLOAT") -> dict[str, Any]:
    location = {"data": {"key": key}, "device": "cuda:0", "requiresGrad": kind == "FLOAT"}
    return {"dims": dims, "strides": strides, "offset": offset, "dataType": kind, **location}


# [build_tensor_from_id(1), build_tensorlist([build_tensor_from_id(2)]), "words"], as 1.2 writes it
ATTRIBUTES = (
    b"\x80\x02(ctorch.jit._pickle\nbuild_tensor_from_id\nq\x00(K\x01tR"
    b"ctorch.jit._pickle\nbuild_tensorlist\n(](h\x00(K\x02tRetRX\x05\x00\x00\x00wordst."
)


def test_attributes_of_torch_1_2_are_found_by_number() -> None:
    floats = struct.pack("<8f", *range(8))
    inner = {"name": "fc", "parameters": [{"name": "weight", "tensorId": "0", "isBuffer": False}]}
    attributes = [{"name": name, "id": str(i)} for i, name in enumerate(["buf", "list", "word"])]
    model = {
        "mainModule": {"name": "m", "submodules": [inner], "attributes": attributes},
        "tensors": [
            entry("tensors/0", ["2", "3"], ["3", "1"]),
            entry("tensors/1", ["2"], ["1"], "1", "INT64"),
            entry("tensors/0", ["2"], ["1"]),
        ],
    }
    blob = old_archive(model, {"tensors/0": floats, "tensors/1": bytes(32), "attributes.pkl": ATTRIBUTES})
    checkpoint = read(blob)
    assert codes(checkpoint) == []
    assert [(t.name, t.dtype, t.shape, t.offset, t.device) for t in checkpoint.tensors] == [
        ("buf", "int64", (2,), 1, "cuda:0"),
        ("list/0", "float32", (2,), 0, "cuda:0"),
        ("fc.weight", "float32", (2, 3), 0, "cuda:0"),
    ]
    assert tensor_from_bytes(blob, checkpoint, checkpoint.tensors[2]).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert checkpoint.shared == (("list/0", "fc.weight"),)
    assert ("word", "words") in [(leaf.name, leaf.text) for leaf in checkpoint.leaves]


def test_tensor_that_does_not_fit_its_storage_is_broken() -> None:
    model = {
        "mainModule": {"parameters": [{"name": "w", "tensorId": "0"}, {"name": "lost", "tensorId": "1"}]},
        "tensors": [entry("tensors/0", ["100"], ["1"]), entry("tensors/7", ["2"], ["1"])],
    }
    assert codes(read(old_archive(model, {"tensors/0": bytes(16)}))) == ["tensor-broken", "storage-missing"]


@each("model", [b"[", b"\xff", b"", b'{"mainModule":' + b'{"submodules":[' * 100_000, b"9" * 5000])
def test_unreadable_model_json_is_reported(model: bytes) -> None:
    blob = changed(old_archive({}, {}), lambda name, record: model if name == "model.json" else record)
    assert codes(read(blob)) == ["json-broken"]


_KEYS = (
    "mainModule tensors submodules parameters attributes name tensorId id dims strides offset data key device dataType"
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just("0"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYS.split()), inner, max_size=4),
    max_leaves=20,
)


@given(json_values)
@example({"mainModule": {"parameters": [{"tensorId": 0}]}, "tensors": [{"dims": [1 << 70], "strides": [1]}]})
def test_arbitrary_model_json_does_not_raise(model: object) -> None:
    read(old_archive(model, {"attributes.pkl": ATTRIBUTES}))


# -- damaged archives


@settings(max_examples=60)
@given(at=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_damaged_byte_does_not_raise(data: Path, at: int, byte: int) -> None:
    blob = bytearray((data / "torch-releases" / RELEASES[-1] / "traced_cpu.pt").read_bytes())
    blob[at % len(blob)] = byte
    read(bytes(blob))


@each("cut", range(0, 3000, 271))
def test_truncation_does_not_raise(data: Path, cut: int) -> None:
    read((data / "h200" / "torchscript_cuda0.pt").read_bytes()[: -cut or None])


def test_missing_storage_is_reported(zoo: bytes) -> None:
    checkpoint = read(changed(zoo, lambda name, record: None if name == "data/0" else record))
    assert "storage-missing" in codes(checkpoint)


def test_decompression_is_limited(zoo: bytes) -> None:
    out = io.BytesIO(zoo)
    with zipfile.ZipFile(out, "a", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        root = archive.namelist()[0].partition("/")[0]
        for number in range(9):
            archive.writestr(f"{root}/code/{number}.py", b"#" * (4 << 20))
            archive.writestr(f"{root}/code/{number}.debug_pkl", bytes(32 << 20))
    unseen = [problem.where for problem in read(out.getvalue()).problems if problem.code == "record-unseen"]
    assert unseen == ["code/8.debug_pkl", "code/7.py"]
