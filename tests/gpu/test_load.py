"""``transload.load`` onto a GPU, against ``torch.load`` with the right ``map_location``."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.each import for_each, grouped
from tests.loading.equal import same
from tests.loading.zoo import QUIET, ZOO, saved

import transload
from transload.errors import LandingWarning, LoadError, NoDeviceError, UnsafeError

pytestmark = QUIET

H200 = Path(__file__).parents[1] / "data" / "h200"
FILES = [
    path
    for path in sorted(H200.iterdir())
    if path.suffix in (".pt", ".pth", ".ckpt") and not path.name.startswith(("torchscript", "whole_custom"))
]
one_gpu = pytest.mark.skipif("torch.cuda.device_count() > 1", reason="needs a machine without cuda:1")


def to_the_one(storage: Any, tag: str) -> Any:
    """What ``auto`` does on a machine with one GPU, as a function for torch."""
    return storage if tag == "cpu" else storage.cuda(0)


def landings(call: Any) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        made = call()
    return made, [str(each.message) for each in told if each.category is LandingWarning]


@one_gpu
@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_of_a_gpu(path: Path, mmap: bool) -> None:
    """Files of cuda:0 land there without a word; those of cuda:1 land on cuda:0, and one warning says so."""
    trusted = path.name.startswith("whole_")
    made, told = landings(lambda: transload.load(path, weights_only=not trusted, mmap=mmap))
    same(torch.load(path, map_location=to_the_one, weights_only=not trusted), made)
    absent = {use.device for use in transload.inspect(path).devices} - {"cpu", "cuda:0"}
    assert len(told) == bool(absent)
    assert all(tag in told[0] and "cuda:0" in told[0] for tag in absent)


WISHES: dict[str, Any] = {
    "cuda": "cuda",
    "cuda:0": "cuda:0",
    "device": torch.device("cuda"),
    "cpu": "cpu",
    "there and back": {"cuda:0": "cpu", "cpu": "cuda:0"},
    "function": lambda storage, tag: storage.cuda() if tag == "cpu" else storage,
    "meta": "meta",
}


@pytest.mark.parametrize("wish", WISHES)
def test_every_kind_of_map_location(wish: str) -> None:
    for name in ("mixed_cpu_cuda.pt", "train_cuda0.ckpt", "state_dict_cuda0_legacy.pth"):
        expected = torch.load(H200 / name, map_location=WISHES[wish])
        same(expected, transload.load(H200 / name, WISHES[wish]))


@one_gpu
@pytest.mark.parametrize("wish", [None, "cuda:1", {"cpu": "cuda:7"}], ids=str)
def test_a_gpu_that_is_not_here(wish: Any) -> None:
    path = H200 / ("mixed_cpu_cuda.pt" if isinstance(wish, dict) else "state_dict_cuda1.pt")
    with pytest.raises(NoDeviceError, match=r"there is no cuda:[17] here"):
        transload.load(path, wish)


# torch.load crashes where the sizes of a nested tensor, which are on the CPU in every real file, go to a GPU.
SAFE = [name for name in ZOO if ZOO[name].safe and not ZOO[name].classes and name != "nested"]


@one_gpu
@grouped("names", SAFE, 20)
@pytest.mark.parametrize("tag", ["cuda:0", "cuda:7"])
def test_the_zoo_lands_on_the_gpu(names: list[str], tag: str) -> None:
    def check(name: str) -> None:
        data = saved(ZOO[name].make(), tag=tag)
        try:
            expected = torch.load(io.BytesIO(data), map_location="cuda:0", weights_only=False)
        except (RuntimeError, NotImplementedError):
            pytest.skip("torch cannot load it onto a GPU")
        made, told = landings(lambda: transload.load(data))
        same(expected, made)
        assert len(told) <= (tag == "cuda:7")

    for_each(names, check)


def test_a_nested_tensor() -> None:
    """It is built on the GPU from sizes on the CPU, as torch saves it."""
    made = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)], device="cuda")
    held = io.BytesIO()
    torch.save(made, held)
    loaded = transload.load(held.getvalue())
    same(torch.load(io.BytesIO(held.getvalue()), weights_only=False), loaded)
    assert loaded.is_cuda


def test_safetensors(tmp_path: Path) -> None:
    files = pytest.importorskip("safetensors.torch")
    held = {"w": torch.randn(300, 200), "half": torch.randn(7).bfloat16(), "n": torch.arange(5), "none": torch.empty(0)}
    files.save_file({name: tensor.cuda() for name, tensor in held.items()}, tmp_path / "model.safetensors")
    for mmap in (False, True):
        made = transload.load(tmp_path / "model.safetensors", "cuda", mmap=mmap)
        same(files.load_file(tmp_path / "model.safetensors", device="cuda:0"), made)
        assert {str(tensor.device) for tensor in made.values()} == {"cuda:0"}


def test_a_program_lands_only_where_it_is_trusted() -> None:
    path = H200 / "torchscript_cuda0.pt"
    with pytest.raises(UnsafeError):
        transload.load(path)
    made, told = landings(lambda: transload.load(path, weights_only=False))
    assert {str(tensor.device) for tensor in made.state_dict().values()} == {"cuda:0"}
    assert told == []


def test_a_module_whose_class_is_gone_is_refused() -> None:
    with pytest.raises(LoadError):
        transload.load(H200 / "whole_custom_module_cuda0.pt", weights_only=False)
