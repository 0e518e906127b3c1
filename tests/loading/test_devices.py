"""The devices torch reports, queried only if a file needs them. Fakes replace its device modules: no GPU is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.loading.placement_makers import checkpoint

from transload.devices import Device
from transload.errors import LoadError, NoDeviceError
from transload.loading.placement import DeviceMap, Move, Plan, devices_here, plan_here, wanted_devices

GIB = 1 << 30


class Cards:
    """Stands in for ``torch.cuda`` on a machine with GPUs; records those whose memory is queried."""

    def __init__(self, free: list[int], current: int = 0) -> None:
        self.free = free
        self.current = current
        self.queried: list[int] = []
        self.initialised = False

    def is_available(self) -> bool:
        self.initialised = True
        return bool(self.free)

    def device_count(self) -> int:
        return len(self.free)

    def current_device(self) -> int:
        return self.current

    def get_device_name(self, index: int) -> str:
        return f"Card {index}"

    def mem_get_info(self, index: int) -> tuple[int, int]:
        self.queried.append(index)
        return self.free[index], 80 * GIB

    def memory_reserved(self, _: int) -> int:
        return 3 * GIB

    def memory_allocated(self, _: int) -> int:
        return 1 * GIB


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A torch without any accelerator, and a host with 10 GiB."""
    monkeypatch.setattr(torch, "cuda", Cards([]))
    monkeypatch.setattr(torch, "xpu", Cards([]), raising=False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr("transload.io.limits.memory", lambda: (16 * GIB, 10 * GIB))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return monkeypatch


def with_cards(patch: pytest.MonkeyPatch, *free: int, current: int = 0) -> Cards:
    cards = Cards(list(free), current)
    patch.setattr(torch, "cuda", cards)
    return cards


@pytest.mark.parametrize("names", [[], ["cpu"], ["cpu", "meta"]])
def test_accelerators_are_not_initialised_for_the_cpu(bare: pytest.MonkeyPatch, names: list[str]) -> None:
    cards = with_cards(bare, GIB)
    devices = devices_here(names)
    assert [device.name for device in devices.available] == ["cpu"]
    assert devices.available[0].free == 10 * GIB
    assert not cards.initialised


def test_memory_is_queried_only_for_devices_that_may_be_used(bare: pytest.MonkeyPatch) -> None:
    cards = with_cards(bare, *([20 * GIB] * 8))
    devices = devices_here(["cuda:2", "cpu"])
    assert sorted(cards.queried) == [0, 2]
    assert devices.get("cuda:2") == Device("cuda:2", 22 * GIB, 80 * GIB, "Card 2")
    assert devices.get("cuda:3") == Device("cuda:3")
    assert devices.current == "cuda:0"


def test_memory_of_all_gpus_is_queried_if_a_wanted_one_is_absent(bare: pytest.MonkeyPatch) -> None:
    cards = with_cards(bare, GIB, GIB)
    devices_here(["cuda:1", "cuda:5"])
    assert sorted(cards.queried) == [0, 1]


def test_memory_of_the_gpu_of_the_local_rank_is_queried(bare: pytest.MonkeyPatch) -> None:
    cards = with_cards(bare, *([GIB] * 4))
    bare.setenv("LOCAL_RANK", "3")
    devices = devices_here(["cuda:0"])
    assert devices.rank == 3
    assert devices.own == "cuda:3"
    assert 3 in cards.queried


def test_memory_is_unknown_if_the_query_fails(bare: pytest.MonkeyPatch) -> None:
    cards = with_cards(bare, GIB)
    bare.setattr(cards, "mem_get_info", raise_cuda_error, raising=False)
    assert devices_here(["cuda:0"]).get("cuda:0") == Device("cuda:0", -1, -1, "Card 0")


def raise_cuda_error(_: int) -> tuple[int, int]:
    raise RuntimeError("CUDA error")


def test_a_mac_without_mps_is_told_that_there_is_no_cuda(bare: pytest.MonkeyPatch) -> None:
    bare.setattr("sys.platform", "darwin")
    assert devices_here(["cuda:0"]).absent == "there is no CUDA on a Mac, and this torch finds no mps"


def test_mps_is_an_accelerator(bare: pytest.MonkeyPatch) -> None:
    bare.setattr(torch.backends.mps, "is_available", lambda: True)
    bare.setattr(torch.mps, "recommended_max_memory", lambda: 12 * GIB, raising=False)
    bare.setattr(torch.mps, "driver_allocated_memory", lambda: 2 * GIB)
    devices = devices_here(["cuda:0"])
    assert devices.current == "mps"
    assert devices.get("mps") == Device("mps", 10 * GIB, 12 * GIB)


@pytest.mark.parametrize(
    ("cuda", "hip", "reason"), [(None, None, "without CUDA"), ("13.0", None, "transload doctor"), (None, "6", "doctor")]
)
def test_reason_for_the_absent_gpu_depends_on_the_torch_build(
    bare: pytest.MonkeyPatch, cuda: str | None, hip: str | None, reason: str
) -> None:
    bare.setattr(torch, "version", SimpleNamespace(cuda=cuda, hip=hip))
    devices = devices_here(["cuda:0"])
    assert devices.current == ""
    assert reason in devices.absent


def test_cpu_is_the_only_device_if_none_is_wanted() -> None:
    (host,) = devices_here([]).available
    assert host.name == "cpu"


# -- wanted devices and placement


@pytest.mark.parametrize(
    ("location", "wanted"),
    [
        ("auto", ["cuda:1", "cpu"]),
        (None, ["cuda:1", "cpu"]),
        ("cpu", ["cpu"]),
        (b"cpu", ["cpu"]),
        (torch.device("cuda", 3), ["cuda:3"]),
        ({"cuda:1": "cuda:0"}, ["cuda:0", "cpu"]),
        (lambda storage, _: storage, []),
    ],
    ids=["auto", "none", "text", "bytes", "device", "mapping", "function"],
)
def test_wanted_devices_for_each_kind_of_map_location(location: Any, wanted: list[str]) -> None:
    assert wanted_devices(["cuda:1", "cpu"], location) == wanted


def test_devices_after_the_first_present_one_of_a_list_are_not_queried(bare: pytest.MonkeyPatch) -> None:
    cards, file = with_cards(bare, 4 * GIB, 4 * GIB), checkpoint(("cuda:1", 8))
    assert plan_here(file, ["cpu", "cuda:0"], 8).device_of("cuda:1") == "cpu"
    assert not cards.initialised
    assert plan_here(file, ("cuda:5", "cuda:0", "cpu"), 8).device_of("cuda:1") == "cuda:0"
    assert set(cards.queried) == {0}
    with pytest.raises(NoDeviceError, match="there is no cuda:5 or xpu:0 here, only cpu, cuda:0 and cuda:1"):
        plan_here(file, ["cuda:5", "xpu:0"], 8)


def device_map(location: Any = "auto", **devices: str) -> DeviceMap:
    moves = tuple(Move(tag.replace("_", ":"), device, "here", 1, 1) for tag, device in devices.items())
    return DeviceMap(Plan(moves), location, "model.pt")


def test_storages_are_placed_as_planned() -> None:
    mapped = device_map(cuda_0="cpu", cuda_1="meta", cpu="cpu")
    storage = torch.UntypedStorage(4)
    assert mapped.put(storage, "cuda:0") is storage
    assert mapped.planned_device("cuda:1") == "meta"
    assert mapped.planned_device("cpu") == "cpu"
    assert mapped.put(storage, "cuda:1").device.type == "meta"


def test_unplanned_tags_follow_a_planned_tag_of_the_same_kind() -> None:
    mapped = device_map(cuda_0="cpu")
    assert mapped.device("cuda") == "cpu"
    assert mapped.device("cuda:7") == "cpu"
    assert mapped.device("mps") == "mps"


def test_map_location_function_decides_for_tensors_without_storage() -> None:
    assert device_map(lambda *_: torch.UntypedStorage(0, device="meta")).device("xla:0") == "meta"
    assert device_map(lambda *_: None).device("xla:0") == "xla:0"
    with pytest.raises(LoadError, match="not a storage"):
        device_map(lambda *_: "cpu").device("xla:0")
    assert device_map(lambda *_: None).planned_device("meta") == ""
