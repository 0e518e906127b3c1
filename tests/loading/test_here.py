"""The devices torch tells of, asked only where a file calls for them. Its modules are stand-ins: no GPU is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.place.makers import checkpoint

from transload.devices import Device
from transload.errors import LoadError, NoDeviceError
from transload.loading.placement import DeviceMap, Move, Plan, devices_here, plan_here, wanted_devices

GIB = 1 << 30


class Cards:
    """Stands for ``torch.cuda`` on a machine with some cards; notes those whose memory was asked for."""

    def __init__(self, free: list[int], current: int = 0) -> None:
        self.free = free
        self.current = current
        self.asked: list[int] = []
        self.woken = False

    def is_available(self) -> bool:
        self.woken = True
        return bool(self.free)

    def device_count(self) -> int:
        return len(self.free)

    def current_device(self) -> int:
        return self.current

    def get_device_name(self, index: int) -> str:
        return f"Card {index}"

    def mem_get_info(self, index: int) -> tuple[int, int]:
        self.asked.append(index)
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
    monkeypatch.setattr("transload.diagnose.host.memory", lambda _: (16 * GIB, 10 * GIB))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return monkeypatch


def with_cards(patch: pytest.MonkeyPatch, *free: int, current: int = 0) -> Cards:
    cards = Cards(list(free), current)
    patch.setattr(torch, "cuda", cards)
    return cards


@pytest.mark.parametrize("names", [[], ["cpu"], ["cpu", "meta"]])
def test_no_accelerator_is_woken_for_the_cpu(bare: pytest.MonkeyPatch, names: list[str]) -> None:
    cards = with_cards(bare, GIB)
    found = devices_here(names)
    assert [device.name for device in found.available] == ["cpu"]
    assert found.available[0].free == 10 * GIB
    assert not cards.woken


def test_only_the_memory_of_the_devices_that_may_be_used_is_asked_for(bare: pytest.MonkeyPatch) -> None:
    cards = with_cards(bare, *([20 * GIB] * 8))
    found = devices_here(["cuda:2", "cpu"])
    assert sorted(cards.asked) == [0, 2]
    assert found.get("cuda:2") == Device("cuda:2", 22 * GIB, 80 * GIB, "Card 2")
    assert found.get("cuda:3") == Device("cuda:3")
    assert found.current == "cuda:0"


def test_all_are_asked_where_absent_ones_are_laid_out(bare: pytest.MonkeyPatch) -> None:
    cards = with_cards(bare, GIB, GIB)
    devices_here(["cuda:1", "cuda:5"])
    assert sorted(cards.asked) == [0, 1]


def test_a_rank_asks_for_its_own(bare: pytest.MonkeyPatch) -> None:
    cards = with_cards(bare, *([GIB] * 4))
    bare.setenv("LOCAL_RANK", "3")
    found = devices_here(["cuda:0"])
    assert found.rank == 3
    assert found.own == "cuda:3"
    assert 3 in cards.asked


def test_memory_that_cannot_be_asked_for_is_not_known(bare: pytest.MonkeyPatch) -> None:
    cards = with_cards(bare, GIB)
    bare.setattr(cards, "mem_get_info", _fails, raising=False)
    assert devices_here(["cuda:0"]).get("cuda:0") == Device("cuda:0", -1, -1, "Card 0")


def _fails(_: int) -> tuple[int, int]:
    raise RuntimeError("CUDA error")


def test_an_apple_chip_is_an_accelerator(bare: pytest.MonkeyPatch) -> None:
    bare.setattr(torch.backends.mps, "is_available", lambda: True)
    bare.setattr(torch.mps, "recommended_max_memory", lambda: 12 * GIB, raising=False)
    bare.setattr(torch.mps, "driver_allocated_memory", lambda: 2 * GIB)
    found = devices_here(["cuda:0"])
    assert found.current == "mps"
    assert found.get("mps") == Device("mps", 10 * GIB, 12 * GIB)


@pytest.mark.parametrize(
    ("cuda", "hip", "said"), [(None, None, "without CUDA"), ("13.0", None, "transload doctor"), (None, "6", "doctor")]
)
def test_why_there_is_no_gpu(bare: pytest.MonkeyPatch, cuda: str | None, hip: str | None, said: str) -> None:
    bare.setattr(torch, "version", SimpleNamespace(cuda=cuda, hip=hip))
    found = devices_here(["cuda:0"])
    assert found.current == ""
    assert said in found.absent


def test_the_host_tells_its_memory() -> None:
    (host,) = devices_here([]).available
    assert host.name == "cpu"


# -- what is wanted, and where it goes


@pytest.mark.parametrize(
    ("wish", "wanted"),
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
def test_the_devices_a_wish_may_use(wish: Any, wanted: list[str]) -> None:
    assert wanted_devices(["cuda:1", "cpu"], wish) == wanted


def test_of_a_list_nothing_is_woken_behind_the_first_that_is_here(bare: pytest.MonkeyPatch) -> None:
    cards, held = with_cards(bare, 4 * GIB, 4 * GIB), checkpoint(("cuda:1", 8))
    assert plan_here(held, ["cpu", "cuda:0"], 8).device_of("cuda:1") == "cpu"
    assert not cards.woken
    assert plan_here(held, ("cuda:5", "cuda:0", "cpu"), 8).device_of("cuda:1") == "cuda:0"
    assert set(cards.asked) == {0}
    with pytest.raises(NoDeviceError, match="there is no cuda:5 or xpu:0 here, only cpu, cuda:0 and cuda:1"):
        plan_here(held, ["cuda:5", "xpu:0"], 8)


def arriving(wish: Any = "auto", **moves: str) -> DeviceMap:
    made = tuple(Move(tag.replace("_", ":"), device, "here", 1, 1) for tag, device in moves.items())
    return DeviceMap(Plan(made), wish, "model.pt")


def test_storages_go_where_the_plan_says() -> None:
    arrival = arriving(cuda_0="cpu", cuda_1="meta", cpu="cpu")
    storage = torch.UntypedStorage(4)
    assert arrival.put(storage, "cuda:0") is storage
    assert arrival.planned_device("cuda:1") == "meta"
    assert arrival.planned_device("cpu") == "cpu"
    assert arrival.put(storage, "cuda:1").device.type == "meta"


def test_devices_of_the_same_kind_go_the_same_way() -> None:
    arrival = arriving(cuda_0="cpu")
    assert arrival.device("cuda") == "cpu"
    assert arrival.device("cuda:7") == "cpu"
    assert arrival.device("mps") == "mps"


def test_a_function_decides_for_tensors_that_have_no_storage() -> None:
    assert arriving(lambda *_: torch.UntypedStorage(0, device="meta")).device("xla:0") == "meta"
    assert arriving(lambda *_: None).device("xla:0") == "xla:0"
    with pytest.raises(LoadError, match="not a storage"):
        arriving(lambda *_: "cpu").device("xla:0")
    assert arriving(lambda *_: None).planned_device("meta") == ""
