"""Repacked archives, formats that ``torch.load`` does not read, and programs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import pytest
import torch
from tests import forge
from tests.loading.equal import assert_same
from tests.loading.zoo import IGNORED_WARNINGS

from transload.converting import convert
from transload.errors import LandingWarning, LoadError, UnsafeError
from transload.loading import load
from transload.opening import inspect

DATA = Path(__file__).parents[1] / "data"
NEWEST = DATA / "torch-releases" / "torch-2.13.0-py3.11.7"
STATE_DICT = NEWEST / "state_dict_cpu.pt"

pytestmark = IGNORED_WARNINGS


# -- repacked archives and old forms


def rezipped(source: Path, to: Path, *, method: int = ZIP_STORED, root: str = "archive", drop: str = "") -> Path:
    with ZipFile(source) as old, ZipFile(to, "w", method) as new:
        for info in old.infolist():
            inner = info.filename.partition("/")[2]
            if inner != drop:
                new.writestr(f"{root}/{inner}", old.read(info))
    return to


@pytest.mark.parametrize(
    "changes",
    [{}, {"method": ZIP_DEFLATED}, {"root": "another name"}, {"drop": "version"}, {"drop": "byteorder"}],
    ids=["stored", "deflated", "renamed", "no version", "no byteorder"],
)
@pytest.mark.parametrize("options", [{}, {"mmap": True}, {"verify": True}], ids=["plain", "mapped", "verified"])
def test_rezipped_archive_loads_as_the_original(
    tmp_path: Path, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    """torch.load maps deflated bytes as if they were numbers, and refuses an archive without its version."""
    path = rezipped(NEWEST / "train_cuda0.ckpt", tmp_path / "again.pt", **changes)
    assert_same(torch.load(NEWEST / "train_cuda0.ckpt", map_location="cpu"), load(path, "cpu", **options))


def test_sparse_csr_tensor_of_torch_1_13_and_older_is_read(tmp_path: Path) -> None:
    """It was rebuilt by a separate function with the same arguments as the current one."""
    torch.save({"csr": torch.eye(3).to_sparse_csr()}, tmp_path / "new.pt")
    old = tmp_path / "old.pt"
    with ZipFile(tmp_path / "new.pt") as archive, ZipFile(old, "w") as renamed:
        for name in archive.namelist():
            data = archive.read(name).replace(b"_rebuild_sparse_tensor\n", b"_rebuild_sparse_csr_tensor\n")
            renamed.writestr(name, data)
    (tensor,) = inspect(old).tensors
    assert (tensor.kind, tensor.shape, len(tensor.parts)) == ("sparse_csr", (3, 3), 3)
    expected = torch.load(tmp_path / "new.pt")
    for weights_only in (True, False):
        assert_same(expected, load(old, weights_only=weights_only))
    convert(old, tmp_path / "again.pt")
    assert_same(expected, torch.load(tmp_path / "again.pt"))


def test_tensor_of_a_device_without_storages_loads_on_cpu() -> None:
    """torch saves it as a CPU tensor, with the name of its device and its dtype there."""
    function = forge.name("torch._utils", "_rebuild_device_tensor_from_cpu_tensor")
    body = forge.call(function, forge.tensor("0"), forge.name("torch", "float16"), "xla:0", True)
    loaded = load(forge.checkpoint(forge.pickled(forge.ordered({"w": body})), {"0": forge.FLOATS}), "cpu")["w"]
    assert (loaded.tolist(), loaded.dtype, loaded.requires_grad) == ([1, 2, 3, 4], torch.float16, True)


def test_torch_file_with_safetensors_extension_loads(tmp_path: Path) -> None:
    shutil.copy(STATE_DICT, tmp_path / "model.safetensors")
    assert_same(torch.load(STATE_DICT), load(tmp_path / "model.safetensors"))


def test_unpacked_archive_loads(tmp_path: Path) -> None:
    with ZipFile(STATE_DICT) as archive:
        archive.extractall(tmp_path)
    assert_same(torch.load(STATE_DICT), load(tmp_path))
    (inner,) = tmp_path.iterdir()
    assert_same(torch.load(STATE_DICT), load(inner))
    assert_same(torch.load(STATE_DICT), load(inner, weights_only=False))


def test_tar_archive_loads_without_trust() -> None:
    loaded = load(forge.tar())
    assert_same({"w0": torch.tensor([1.0, 2.0, 3.0, 4.0])}, loaded)


def test_tensor_referenced_twice_in_a_tar_archive_is_one_object() -> None:
    loaded = load(forge.tar({"pickle": forge.pickled(forge.list_of(b"P100\n", b"P100\n"))}))
    assert loaded[0] is loaded[1]


# -- formats that torch.load does not read


def safetensors(tensors: dict[str, torch.Tensor]) -> bytes:
    header, offset, names = (
        {},
        0,
        {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.bool: "BOOL"},
    )
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    body = b"".join(bytes(cast(Any, tensor.contiguous().untyped_storage())) for tensor in tensors.values())
    return len(text).to_bytes(8, "little") + text + body


TENSORS = {
    "z": torch.arange(6.0).reshape(2, 3),
    "a": torch.tensor([1, -1, 2**40]),
    "half": torch.randn(5).bfloat16(),
    "flag": torch.tensor(True),
    "none": torch.empty(0, 4),
}


@pytest.mark.parametrize("options", [{}, {"mmap": True}, {"weights_only": False}], ids=str)
def test_safetensors_file_loads_in_header_order(tmp_path: Path, options: dict[str, Any]) -> None:
    (tmp_path / "model.safetensors").write_bytes(safetensors(TENSORS))
    loaded = load(tmp_path / "model.safetensors", **options)
    assert list(loaded) == list(TENSORS)
    assert_same(TENSORS, loaded)


def sharded(folder: Path, suffix: str) -> Path:
    """Write two shards and their index; return the path of the index."""
    names = [f"model-{number:05d}-of-00002.{suffix}" for number in (1, 2)]
    halves = [{"z": TENSORS["z"], "a": TENSORS["a"]}, {"half": TENSORS["half"], "flag": TENSORS["flag"]}]
    for name, half in zip(names, halves, strict=True):
        if suffix == "bin":
            torch.save(half, folder / name)
        else:
            (folder / name).write_bytes(safetensors(half))
    weights = {key: name for name, half in zip(names, halves, strict=True) for key in half}
    index = folder / f"model.{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    return index


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("source", ["index", "folder", "no index"])
def test_shards_load_as_one_dictionary(tmp_path: Path, suffix: str, source: str) -> None:
    index = sharded(tmp_path, suffix)
    if source == "no index":
        index.unlink()
    (tmp_path / "optimizer.pt").write_bytes(b"garbage that is nobody's business here")
    loaded = load(index if source == "index" else tmp_path)
    assert list(loaded) == ["z", "a", "half", "flag"]
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in loaded.items())


def test_directory_with_one_weights_file_loads_it(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(safetensors(TENSORS))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "training_args.bin").write_bytes(forge.checkpoint(forge.pickled(forge.DANGEROUS)))
    assert_same(TENSORS, load(tmp_path))


# -- programs


def test_script_is_refused_unless_trusted() -> None:
    path = NEWEST / "traced_cpu.pt"
    with pytest.raises(UnsafeError) as raised:
        load(path)
    assert "torch.jit.load" in raised.value.fix
    assert "transload convert" in raised.value.fix
    assert isinstance(load(path, weights_only=False), torch.jit.ScriptModule)


def test_programs_of_an_absent_gpu_are_refused_or_load_on_cpu() -> None:
    with pytest.raises(UnsafeError, match=r"torch\.export"):
        load(DATA / "h200" / "export_cuda0.pt2")
    with pytest.raises(LoadError, match="AOTInductor"):
        load(DATA / "h200" / "aoti_cuda0.pt2", weights_only=False)
    with pytest.warns(LandingWarning):
        script = load(DATA / "h200" / "torchscript_cuda0.pt", weights_only=False)
    assert {tensor.device.type for tensor in script.state_dict().values()} == {"cpu"}
