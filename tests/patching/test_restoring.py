from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

import transload

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("no_cards")


patched = pytest.mark.usefixtures("_patched")


def devices(state: Any) -> set[str]:
    return {str(tensor.device) for tensor in state.values()}


LOCATIONS: dict[str, Any] = {
    "none": None,
    "name": "cuda:1",
    "kind": "cuda",
    "device": torch.device("cuda:2"),
    "mapping": {"cuda:1": "cuda:0"},
    "mapping-of-others": {"cuda:0": "cpu"},
    "function-to-gpu": lambda storage, _: storage.cuda(1),
    "function-to-device": lambda storage, _: storage.to(device="cuda:1"),
    "function-returning-none": lambda *_: None,
}


@patched
@pytest.mark.parametrize("location", LOCATIONS.values(), ids=LOCATIONS)
@pytest.mark.parametrize("name", ["h200/state_dict_cuda1.pt", "h200/state_dict_cuda0_legacy.pth"])
def test_absent_device_loads_on_the_cpu_with_any_map_location(data: Path, name: str, location: Any) -> None:
    if not hasattr(torch.UntypedStorage, "to") and location is LOCATIONS["function-to-device"]:
        pytest.skip("this torch has no UntypedStorage.to")
    state = torch.load(data / name, map_location=location)
    assert devices(state) == {"cpu"}
    expected = torch.load(data / name, map_location="cpu")
    assert all(torch.equal(state[key], expected[key]) for key in expected)


@patched
@pytest.mark.parametrize("location", ["meta", "cpu"])
def test_map_location_that_exists_is_respected(data: Path, location: str) -> None:
    assert devices(torch.load(data / "h200" / "state_dict_cuda1.pt", map_location=location)) == {location}


@patched
@pytest.mark.parametrize("location", ["nonsense", "cuda:x"])
def test_invalid_map_location_is_still_an_error(data: Path, location: str) -> None:
    with pytest.raises((RuntimeError, ValueError, AssertionError)):
        torch.load(data / "h200" / "state_dict_cuda1.pt", map_location=location + "!")


@patched
def test_weights_only_is_respected(data: Path) -> None:
    path = data / "h200" / "whole_module_cuda0.pt"
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)
    assert isinstance(torch.load(path, weights_only=False), torch.nn.Sequential)


@patched
def test_other_arguments_reach_torch(data: Path) -> None:
    path = data / "h200" / "state_dict_cuda1.pt"
    assert devices(torch.load(str(path), mmap=True)) == {"cpu"}
    with path.open("rb") as file:
        assert devices(torch.load(file, weights_only=False, pickle_module=pickle)) == {"cpu"}
    with pytest.raises(TypeError):
        torch.load(path, weights_only=False, nonsense=1)


@patched
def test_shared_storage_stays_shared(data: Path) -> None:
    state = torch.load(data / "h200" / "state_dict_cuda1.pt")
    assert state["fc.weight"].data_ptr() == state["head.weight"].data_ptr()


@patched
def test_load_from_bytes_replaces_an_absent_device_by_the_cpu(data: Path) -> None:
    blob = (data / "h200" / "data_cuda0.pt").read_bytes()
    assert {str(tensor.device) for tensor in torch.storage._load_from_bytes(blob)} == {"cpu"}


not_before_torch_2_2 = pytest.mark.skipif(
    torch.__version__.startswith(("2.0.", "2.1.")), reason="this torch needs the hpu module for any tag"
)


@patched
@not_before_torch_2_2
def test_tag_of_an_uninstalled_device_package_loads_on_the_cpu(tmp_path: Path) -> None:
    path = tmp_path / "npu.pt"
    torch.save(OrderedDict(weight=torch.ones(2)), path)
    transload.retag(path, "npu:0")
    assert devices(torch.load(path)) == {"cpu"}
    transload.unpatch()
    with pytest.raises(RuntimeError, match="npu:0"):
        torch.load(path)


@patched
@not_before_torch_2_2
def test_registered_device_package_restores_its_tag(tmp_path: Path) -> None:
    path = tmp_path / "own.pt"
    torch.save(OrderedDict(weight=torch.ones(2)), path)
    transload.retag(path, "npu:0")
    locations = []

    def restore(storage: Any, location: str) -> Any:
        locations.append(location)
        return storage if location == "npu:0" else None

    registry = torch.serialization._package_registry
    before = list(registry)
    torch.serialization.register_package(77, lambda _: None, restore)
    try:
        torch.load(path)
    finally:
        registry[:] = before
    assert locations == ["npu:0"]


def test_storages_are_restored_to_their_tag_where_the_gpu_exists(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for torch's entry in the registry records the requested locations."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    locations = []
    real = torch.serialization.default_restore_location

    def restore(storage: Any, location: str) -> Any:
        locations.append(location)
        return storage if location.startswith("cuda") else None

    torch.serialization.register_package(-5, lambda _: None, restore)
    try:
        with transload.patch():
            torch.load(data / "h200" / "state_dict_cuda1.pt")
    finally:
        registry = torch.serialization._package_registry
        registry[:] = [entry for entry in registry if entry[2] is not restore]
    assert set(locations) == {"cuda:1"}
    assert torch.serialization.default_restore_location is real


def test_unpatch_restores_the_package_registry(data: Path) -> None:
    before = list(torch.serialization._package_registry)
    with transload.patch():
        assert len(torch.serialization._package_registry) == len(before) + 2
    assert torch.serialization._package_registry == before
    with pytest.raises(RuntimeError, match="Attempting to deserialize object on a CUDA device"):
        torch.load(data / "h200" / "state_dict_cuda1.pt")


@patched
def test_saved_tensors_are_tagged_with_their_real_device(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2).to("cuda:1")}, tmp_path / "x.pt")
    assert {storage.device for storage in transload.inspect(tmp_path / "x.pt").storages} == {"cpu"}
