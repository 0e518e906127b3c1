"""Files that somebody has handled, formats that ``torch.load`` does not read, and programs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import pytest
import torch
from tests import forge
from tests.loading.equal import same
from tests.loading.zoo import QUIET

from transload.converting import convert
from transload.errors import LandingWarning, LoadError, UnsafeError
from transload.judge import inspect
from transload.loading import load

DATA = Path(__file__).parents[1] / "data"
NEWEST = DATA / "torch-releases" / "torch-2.13.0-py3.11.7"
STATE_DICT = NEWEST / "state_dict_cpu.pt"

pytestmark = QUIET


# -- archives that somebody has handled


def rezipped(source: Path, to: Path, *, method: int = ZIP_STORED, root: str = "archive", drop: str = "") -> Path:
    with ZipFile(source) as old, ZipFile(to, "w", method) as new:
        for info in old.infolist():
            inner = info.filename.partition("/")[2]
            if inner != drop:
                new.writestr(f"{root}/{inner}", old.read(info))
    return to


@pytest.mark.parametrize(
    "handled",
    [{}, {"method": ZIP_DEFLATED}, {"root": "another name"}, {"drop": "version"}, {"drop": "byteorder"}],
    ids=["stored", "deflated", "renamed", "no version", "no byteorder"],
)
@pytest.mark.parametrize("options", [{}, {"mmap": True}, {"verify": True}], ids=["plain", "mapped", "verified"])
def test_an_archive_that_was_zipped_again(tmp_path: Path, handled: dict[str, Any], options: dict[str, Any]) -> None:
    """torch.load maps deflated bytes as if they were numbers, and refuses an archive without its version."""
    path = rezipped(NEWEST / "train_cuda0.ckpt", tmp_path / "again.pt", **handled)
    same(torch.load(NEWEST / "train_cuda0.ckpt", map_location="cpu"), load(path, "cpu", **options))


def test_a_sparse_csr_tensor_as_torch_saved_it_up_to_1_13(tmp_path: Path) -> None:
    """By a function of its own, with the same arguments as that of today."""
    torch.save({"csr": torch.eye(3).to_sparse_csr()}, tmp_path / "new.pt")
    old = tmp_path / "old.pt"
    with ZipFile(tmp_path / "new.pt") as archive, ZipFile(old, "w") as renamed:
        for name in archive.namelist():
            data = archive.read(name).replace(b"_rebuild_sparse_tensor\n", b"_rebuild_sparse_csr_tensor\n")
            renamed.writestr(name, data)
    (found,) = inspect(old).tensors
    assert (found.kind, found.shape, len(found.parts)) == ("sparse_csr", (3, 3), 3)
    expected = torch.load(tmp_path / "new.pt")
    for weights_only in (True, False):
        same(expected, load(old, weights_only=weights_only))
    convert(old, tmp_path / "again.pt")
    same(expected, torch.load(tmp_path / "again.pt"))


def test_a_tensor_of_a_device_without_storages() -> None:
    """It is saved as a tensor on the CPU, with the name of its device and the dtype it had there."""
    function = forge.name("torch._utils", "_rebuild_device_tensor_from_cpu_tensor")
    made = forge.call(function, forge.tensor("0"), forge.name("torch", "float16"), "xla:0", True)
    loaded = load(forge.checkpoint(forge.pickled(forge.ordered({"w": made})), {"0": forge.FLOATS}), "cpu")["w"]
    assert (loaded.tolist(), loaded.dtype, loaded.requires_grad) == ([1, 2, 3, 4], torch.float16, True)


def test_an_extension_that_lies(tmp_path: Path) -> None:
    shutil.copy(STATE_DICT, tmp_path / "model.safetensors")
    same(torch.load(STATE_DICT), load(tmp_path / "model.safetensors"))


def test_an_archive_that_was_unpacked(tmp_path: Path) -> None:
    with ZipFile(STATE_DICT) as archive:
        archive.extractall(tmp_path)
    same(torch.load(STATE_DICT), load(tmp_path))
    (inner,) = tmp_path.iterdir()
    same(torch.load(STATE_DICT), load(inner))
    same(torch.load(STATE_DICT), load(inner, weights_only=False))


def test_a_tar_archive_is_data_like_any_other() -> None:
    made = load(forge.tar())
    same({"w0": torch.tensor([1.0, 2.0, 3.0, 4.0])}, made)


def test_a_tensor_named_twice_in_a_tar_archive_is_one() -> None:
    made = load(forge.tar({"pickle": forge.pickled(forge.listing(b"P100\n", b"P100\n"))}))
    assert made[0] is made[1]


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
def test_safetensors(tmp_path: Path, options: dict[str, Any]) -> None:
    (tmp_path / "model.safetensors").write_bytes(safetensors(TENSORS))
    made = load(tmp_path / "model.safetensors", **options)
    assert list(made) == list(TENSORS)
    same(TENSORS, made)


def sharded(folder: Path, suffix: str) -> Path:
    """Two shards and their index."""
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
@pytest.mark.parametrize("what", ["index", "folder", "no index"])
def test_shards_become_one_dictionary(tmp_path: Path, suffix: str, what: str) -> None:
    index = sharded(tmp_path, suffix)
    if what == "no index":
        index.unlink()
    (tmp_path / "optimizer.pt").write_bytes(b"garbage that is nobody's business here")
    made = load(index if what == "index" else tmp_path)
    assert list(made) == ["z", "a", "half", "flag"]
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in made.items())


def test_a_directory_around_one_file_of_weights(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(safetensors(TENSORS))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "training_args.bin").write_bytes(forge.checkpoint(forge.pickled(forge.DANGEROUS)))
    same(TENSORS, load(tmp_path))


# -- programs


def test_a_program_is_not_run_unless_it_is_trusted() -> None:
    path = NEWEST / "traced_cpu.pt"
    with pytest.raises(UnsafeError) as raised:
        load(path)
    assert "torch.jit.load" in raised.value.fix
    assert "transload convert" in raised.value.fix
    assert isinstance(load(path, weights_only=False), torch.jit.ScriptModule)


def test_a_program_of_an_absent_gpu_lands_here() -> None:
    with pytest.raises(UnsafeError, match=r"torch\.export"):
        load(DATA / "h200" / "export_cuda0.pt2")
    with pytest.raises(LoadError, match="AOTInductor"):
        load(DATA / "h200" / "aoti_cuda0.pt2", weights_only=False)
    with pytest.warns(LandingWarning):
        made = load(DATA / "h200" / "torchscript_cuda0.pt", weights_only=False)
    assert {tensor.device.type for tensor in made.state_dict().values()} == {"cpu"}
