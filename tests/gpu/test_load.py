"""``transload.load`` onto a GPU, against ``torch.load`` with the right ``map_location``."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import makers
from tests.each import for_each, parametrize_groups
from tests.loading.equal import assert_same
from tests.loading.zoo import IGNORED_WARNINGS, ZOO, saved

import transload
from transload.errors import LandingWarning, LoadError, NoDeviceError, UnsafeError

pytestmark = IGNORED_WARNINGS

H200 = Path(__file__).parents[1] / "data" / "h200"
FILES = [
    path
    for path in sorted(H200.iterdir())
    if path.suffix in (".pt", ".pth", ".ckpt") and not path.name.startswith(("torchscript", "whole_custom"))
]
one_gpu = pytest.mark.skipif("torch.cuda.device_count() > 1", reason="needs a machine without cuda:1")


def to_first_gpu(storage: Any, tag: str) -> Any:
    """A map_location function for torch that does what ``auto`` does on a machine with one GPU."""
    return storage if tag == "cpu" else storage.cuda(0)


def with_landing_warnings(call: Any) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = call()
    return loaded, [str(warning.message) for warning in caught if warning.category is LandingWarning]


@one_gpu
@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_gpu_file_loads_on_the_first_gpu_with_a_warning_for_other_tags(path: Path, mmap: bool) -> None:
    """Files of cuda:0 load there without a warning; those of cuda:1 load on cuda:0 with one warning."""
    trusted = path.name.startswith("whole_")
    loaded, messages = with_landing_warnings(lambda: transload.load(path, weights_only=not trusted, mmap=mmap))
    assert_same(torch.load(path, map_location=to_first_gpu, weights_only=not trusted), loaded)
    absent = {use.device for use in transload.inspect(path).devices} - {"cpu", "cuda:0"}
    assert len(messages) == bool(absent)
    assert all(tag in messages[0] and "cuda:0" in messages[0] for tag in absent)


LOCATIONS: dict[str, Any] = {
    "cuda": "cuda",
    "cuda:0": "cuda:0",
    "device": torch.device("cuda"),
    "cpu": "cpu",
    "swapped": {"cuda:0": "cpu", "cpu": "cuda:0"},
    "function": lambda storage, tag: storage.cuda() if tag == "cpu" else storage,
    "meta": "meta",
}


@pytest.mark.parametrize("location", LOCATIONS)
def test_every_kind_of_map_location_works_as_with_torch(location: str) -> None:
    for name in ("mixed_cpu_cuda.pt", "train_cuda0.ckpt", "state_dict_cuda0_legacy.pth"):
        expected = torch.load(H200 / name, map_location=LOCATIONS[location])
        assert_same(expected, transload.load(H200 / name, LOCATIONS[location]))


@one_gpu
@pytest.mark.parametrize("location", [None, "cuda:1", {"cpu": "cuda:7"}], ids=str)
def test_absent_gpu_is_an_error(location: Any) -> None:
    path = H200 / ("mixed_cpu_cuda.pt" if isinstance(location, dict) else "state_dict_cuda1.pt")
    with pytest.raises(NoDeviceError, match=r"there is no cuda:[17] here"):
        transload.load(path, location)


# torch.load crashes if the sizes of a nested tensor, which are on the CPU in every real file, are moved to a GPU.
SAFE = [name for name in ZOO if ZOO[name].safe and not ZOO[name].classes and name != "nested"]


@one_gpu
@parametrize_groups("names", SAFE, 20)
@pytest.mark.parametrize("tag", ["cuda:0", "cuda:7"])
def test_specimens_load_on_the_gpu(names: list[str], tag: str) -> None:
    def check(name: str) -> None:
        data = saved(ZOO[name].make(), tag=tag)
        try:
            expected = torch.load(io.BytesIO(data), map_location="cuda:0", weights_only=False)
        except (RuntimeError, NotImplementedError):
            pytest.skip("torch cannot load this onto a GPU")
        loaded, messages = with_landing_warnings(lambda: transload.load(data))
        assert_same(expected, loaded)
        assert len(messages) <= (tag == "cuda:7")

    for_each(names, check)


def test_nested_tensor_loads_on_the_gpu() -> None:
    """It is rebuilt on the GPU from sizes on the CPU, as torch saves them."""
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)], device="cuda")
    data = makers.saved(nested)
    loaded = transload.load(data)
    assert_same(torch.load(io.BytesIO(data), weights_only=False), loaded)
    assert loaded.is_cuda


def test_safetensors_file_loads_on_the_gpu(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {
        "w": torch.randn(300, 200),
        "half": torch.randn(7).bfloat16(),
        "n": torch.arange(5),
        "none": torch.empty(0),
    }
    safetensors.save_file({name: tensor.cuda() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    for mmap in (False, True):
        loaded = transload.load(tmp_path / "model.safetensors", "cuda", mmap=mmap)
        assert_same(safetensors.load_file(tmp_path / "model.safetensors", device="cuda:0"), loaded)
        assert {str(tensor.device) for tensor in loaded.values()} == {"cuda:0"}


def test_script_loads_on_its_gpu_only_if_trusted() -> None:
    path = H200 / "torchscript_cuda0.pt"
    with pytest.raises(UnsafeError):
        transload.load(path)
    script, messages = with_landing_warnings(lambda: transload.load(path, weights_only=False))
    assert {str(tensor.device) for tensor in script.state_dict().values()} == {"cuda:0"}
    assert messages == []


def test_module_whose_class_is_missing_is_a_load_error() -> None:
    with pytest.raises(LoadError):
        transload.load(H200 / "whole_custom_module_cuda0.pt", weights_only=False)
