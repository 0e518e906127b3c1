"""Where storages land: the rules one by one, and what holds whatever the machine and the checkpoint."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.forge import FUZZ
from tests.place.makers import GB, checkpoint, gpus

from transload.checkpoint import Checkpoint, Tensor
from transload.devices import Device, Devices
from transload.loading.placement import AUTO, UNDECIDED, Plan, place, tags_of

CPU_ONLY = Devices((Device("cpu", 1000 * GB),), absent="torch is built without CUDA [B01]")
MAC = Devices((Device("cpu"), Device("mps")), "mps")


def landed(plan: Plan) -> dict[str, str]:
    return {move.tag: move.device for move in plan.moves}


# -- auto -------------------------------------------------------------------------------------------------------------


def test_what_is_here_stays_and_the_cpu_is_never_dragged_along() -> None:
    plan = place(checkpoint(("cuda:1", 8), ("cpu", 8), ("meta", 0)), gpus(GB, GB))
    assert landed(plan) == {"cuda:1": "cuda:1", "cpu": "cpu", "meta": "meta"}
    assert (plan.ok, plan.surprising, plan.warning) == (True, False, "")


@pytest.mark.parametrize(
    "tag", ["cuda:3", "xpu:0", "npu:1", "mps", "hpu", "maia:0", "cuda:abc", "", "cuda:" + "9" * 5000]
)
def test_what_is_not_here_goes_to_the_current_gpu(tag: str) -> None:
    plan = place(checkpoint((tag, 8)), gpus(GB, GB, current=1))
    assert landed(plan) == {tag: "cuda:1"}
    assert plan.ok
    assert plan.moves[0].why.startswith("there is no ")


def test_without_a_gpu_it_goes_to_the_cpu_and_says_why() -> None:
    plan = place(checkpoint(("cuda:0", 8), ("cuda:1", 4), ("cpu", 4)), CPU_ONLY)
    assert landed(plan) == {"cuda:0": "cpu", "cuda:1": "cpu", "cpu": "cpu"}
    assert plan.warning == (
        "2 tensors saved on cuda:0 and cuda:1 land on cpu: there is no cuda:0 or cuda:1 here; "
        "torch is built without CUDA [B01]"
    )


def test_without_cuda_another_accelerator_takes_it() -> None:
    assert landed(place(checkpoint(("cuda:0", 8), ("mps", 8)), MAC)) == {"cuda:0": "mps", "mps": "mps"}
    intel = Devices((Device("cpu"), Device("xpu:0")), "xpu:0")
    assert landed(place(checkpoint(("cuda:0", 8), ("xpu", 8)), intel)) == {"cuda:0": "xpu:0", "xpu": "xpu:0"}


def test_mps_has_no_float64_so_that_tag_lands_on_the_cpu_as_a_whole() -> None:
    plan = place(checkpoint(("cuda:0", 8), dtype="float64"), MAC)
    assert landed(plan) == {"cuda:0": "cpu"}
    assert plan.moves[0].why == "mps cannot hold float64"


def test_a_tag_without_an_index_is_the_current_device_and_has_not_moved() -> None:
    plan = place(checkpoint(("cuda", 8)), gpus(GB, GB, current=1))
    assert (landed(plan), plan.warning) == ({"cuda": "cuda:1"}, "")
    assert place(checkpoint(("mps:0", 8)), MAC).warning == ""


def test_a_tensor_that_is_rebuilt_on_its_device_takes_room_there() -> None:
    inner = Tensor(("t",), "t", "float32", (25,), (1,), "cpu", "0")
    held = checkpoint(("cpu", 100))
    rebuilt = inner._replace(device="xla:0", kind="device", parts=(inner,), storage=None)
    plan = place(Checkpoint("m.pt", "torch-zip", 1, tensors=(rebuilt,), storages=held.storages), gpus(GB))
    assert {move.tag: (move.device, move.nbytes) for move in plan.moves} == {
        "cpu": ("cpu", 100),
        "xla:0": ("cuda:0", 100),
    }


# -- several devices --------------------------------------------------------------------------------------------------


def test_a_spread_is_kept_where_its_devices_are() -> None:
    spread = checkpoint(("cuda:0", 30), ("cuda:1", 20), ("cuda:2", 10))
    assert landed(place(spread, gpus(99, 99, 99))) == {"cuda:0": "cuda:0", "cuda:1": "cuda:1", "cuda:2": "cuda:2"}


def test_a_spread_over_fewer_goes_where_room_is_left_the_largest_first() -> None:
    spread = checkpoint(("cuda:0", 30), ("cuda:1", 20), ("cuda:2", 25), ("cuda:3", 15))
    plan = place(spread, gpus(100, 100))
    # 30 and 20 stay; 25 goes where 80 is left, 15 where then 70 is left and not 55
    assert landed(plan) == {"cuda:0": "cuda:0", "cuda:1": "cuda:1", "cuda:2": "cuda:1", "cuda:3": "cuda:0"}
    assert plan.ok


def test_one_absent_device_of_a_spread_goes_to_the_roomier_card_not_to_the_first() -> None:
    assert landed(place(checkpoint(("cuda:0", 60), ("cuda:5", 40)), gpus(90, 90)))["cuda:5"] == "cuda:1"
    alone = place(checkpoint(("cuda:5", 40)), gpus(50, 90))
    assert landed(alone) == {"cuda:5": "cuda:0"}, "one device is no spread: it goes where programs compute"


def test_a_spread_is_balanced_where_free_memory_is_not_known() -> None:
    spread = checkpoint(*((f"cuda:{index}", 10) for index in range(2, 6)))
    assert sorted(landed(place(spread, gpus(-1, -1))).values()) == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]


# -- torchrun ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", range(4))
def test_every_rank_lands_on_its_own_device(rank: int) -> None:
    plan = place(checkpoint(("cuda:0", 16), ("cuda:7", 12), ("cpu", 8)), gpus(GB, GB, GB, GB, rank=rank))
    assert landed(plan) == {"cuda:0": f"cuda:{rank}", "cuda:7": f"cuda:{rank}", "cpu": "cpu"}
    assert f"local rank {rank}" in plan.moves[0].why


def test_a_rank_that_sees_only_its_own_card_takes_that() -> None:
    assert landed(place(checkpoint(("cuda:0", 8)), gpus(GB, rank=3))) == {"cuda:0": "cuda:0"}


def test_more_ranks_than_cards_share_them() -> None:
    assert [gpus(1, 1, rank=rank).own for rank in range(4)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]


def test_a_device_that_the_program_has_chosen_counts_more_than_its_rank() -> None:
    assert gpus(GB, GB, GB, rank=0, current=2).own == "cuda:2"


def test_ranks_without_a_gpu_land_on_the_cpu() -> None:
    assert landed(place(checkpoint(("cuda:0", 8)), gpus(rank=1))) == {"cuda:0": "cpu"}


# -- wishes, which mean what they mean to torch -----------------------------------------------------------------------

WISHES: list[tuple[Any, dict[str, str]]] = [
    (None, {"cuda:0": "cuda:0", "cuda:1": "cuda:1", "cpu": "cpu", "meta": "meta"}),
    ("cpu", {"cuda:0": "cpu", "cuda:1": "cpu", "cpu": "cpu", "meta": "meta"}),
    ("cuda", {"cuda:0": "cuda:1", "cuda:1": "cuda:1", "cpu": "cuda:1", "meta": "meta"}),
    ("cuda:0", {"cuda:0": "cuda:0", "cuda:1": "cuda:0", "cpu": "cuda:0", "meta": "meta"}),
    (b"cuda:0", {"cuda:0": "cuda:0", "cuda:1": "cuda:0", "cpu": "cuda:0", "meta": "meta"}),
    ("meta", {"cuda:0": "meta", "cuda:1": "meta", "cpu": "meta", "meta": "meta"}),
    (torch.device("cuda"), {"cuda:0": "cuda:1", "cuda:1": "cuda:1", "cpu": "cuda:1", "meta": "meta"}),
    (torch.device("cuda", 0), {"cuda:0": "cuda:0", "cuda:1": "cuda:0", "cpu": "cuda:0", "meta": "meta"}),
    ({}, {"cuda:0": "cuda:0", "cuda:1": "cuda:1", "cpu": "cpu", "meta": "meta"}),
    ({"cuda:0": "cpu", "cuda": "meta"}, {"cuda:0": "cpu", "cuda:1": "cuda:1", "cpu": "cpu", "meta": "meta"}),
    (
        MappingProxyType({"cuda:0": torch.device("cpu")}),
        {"cuda:0": "cpu", "cuda:1": "cuda:1", "cpu": "cpu", "meta": "meta"},
    ),
    (["cuda:7", "cuda:0", "cpu"], {"cuda:0": "cuda:0", "cuda:1": "cuda:0", "cpu": "cuda:0", "meta": "meta"}),
    ((torch.device("xpu"), "cpu"), {"cuda:0": "cpu", "cuda:1": "cpu", "cpu": "cpu", "meta": "meta"}),
    (lambda storage, _: storage, dict.fromkeys(("cuda:0", "cuda:1", "cpu", "meta"), UNDECIDED)),
]


@pytest.mark.parametrize(
    ("wish", "expected"), WISHES, ids=lambda value: getattr(value, "__name__", None) or str(value)[:30]
)
def test_a_wish_is_granted(wish: Any, expected: dict[str, str]) -> None:
    plan = place(checkpoint(("cuda:0", 8), ("cuda:1", 8), ("cpu", 8), ("meta", 0)), gpus(GB, GB, current=1), wish)
    assert landed(plan) == expected
    assert (plan.ok, plan.warning) == (True, ""), "what was asked for needs no warning"


@pytest.mark.parametrize(
    ("wish", "refused"),
    [
        (None, "there is no cuda:5 here, only cpu and cuda:0"),
        ("cuda:7", "there is no cuda:7 here, only cpu and cuda:0"),
        ("gpu", "there is no gpu here, only cpu and cuda:0"),
        ({"cuda:5": "cuda:6"}, "there is no cuda:6 here, only cpu and cuda:0"),
        ({torch.device("cuda:5"): "cpu"}, "there is no cuda:5 here, only cpu and cuda:0"),  # nor does torch find it
        (1, "map_location is of type int, which does not name a device"),
        (1.5, "map_location is of type float, which does not name a device"),
        (["cuda:7", "xpu:0"], "there is no cuda:7 or xpu:0 here, only cpu and cuda:0"),
        ([], "the list of devices is empty"),
        (["cuda:7", None], "the list of devices has NoneType in it, which does not name a device"),
    ],
)
def test_a_wish_that_cannot_be_granted_is_refused_with_a_fix(wish: Any, refused: str) -> None:
    plan = place(checkpoint(("cuda:5", 8), ("cuda:0", 8)), gpus(GB), wish)
    assert (plan.ok, plan.refused) == (False, refused)
    assert plan.fix


@pytest.mark.parametrize(("asked", "meant"), [("gpu", "cuda"), ("cuda1", "cuda:1"), ("CUDA:0", "cuda:0")])
def test_what_is_not_a_device_but_near_to_one(asked: str, meant: str) -> None:
    plan = place(checkpoint(("cuda:5", 8)), gpus(GB), asked)
    assert f"Did you mean map_location={meant!r}?" in plan.fix[0]


def test_a_number_is_told_the_name_it_means() -> None:
    assert place(checkpoint(("cuda:0", 8)), gpus(GB), 1).fix == ("Pass map_location='cuda:1'.",)


def test_float64_asked_onto_mps_is_refused() -> None:
    plan = place(checkpoint(("cpu", 8), dtype="float64"), MAC, "mps")
    assert plan.refused == "it holds float64, which mps does not have"


def test_none_of_a_list_takes_it_and_each_reason_is_named() -> None:
    plan = place(checkpoint(("cpu", 8), dtype="float64"), MAC, ["cuda:1", "mps"])
    assert plan.refused == "there is no cuda:1 here, only cpu and mps; it holds float64, which mps does not have"


def test_the_reason_for_a_missing_gpu_is_in_the_refusal() -> None:
    plan = place(checkpoint(("cuda:0", 8)), CPU_ONLY, None)
    assert plan.refused == "there is no cuda:0 here, only cpu; torch is built without CUDA [B01]"


# -- room -------------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_says_by_how_much_and_what_would() -> None:
    plan = place(checkpoint(("cuda:0", 14 * GB)), gpus(10 * GB, 20 * GB, cpu=64 * GB))
    (short,) = plan.shortages
    assert (short.device, short.needed, short.free, short.missing) == ("cuda:0", 14 * GB, 10 * GB, 4 * GB)
    assert short.instead == (
        "map_location='cuda:1', which has 20.0 GB free",
        "map_location='cpu', which has 64.0 GB free",
        "as bfloat16 it would take 7.00 GB",
    )
    assert not plan.ok
    assert not plan.refused


def test_a_file_larger_than_memory_can_be_mapped_if_its_format_allows() -> None:
    mapped = "map_location='cpu' with mmap=True, which reads what is touched"
    for form, offered in (("torch-zip", True), ("torch-legacy", False)):
        plan = place(checkpoint(("cpu", 40 * GB), dtype="int64", format=form), gpus(cpu=16 * GB))
        assert (plan.shortages[0].instead == (mapped,)) == offered


def test_everything_on_a_device_counts_together() -> None:
    held = checkpoint(("cuda:0", 6), ("cuda:1", 6))
    assert place(held, gpus(12)).ok
    assert [short.needed for short in place(held, gpus(11)).shortages] == [12]


def test_equal_storages_each_take_their_room() -> None:
    """An odd byte is lost in each of them when it is halved."""
    held = checkpoint(*[("cpu", 5)] * 3, ("cuda:0", 7))
    (shortage,) = place(held, Devices((Device("cpu", 6, 10), Device("cuda:0", 9)), "cuda:0")).shortages
    assert (shortage.needed, shortage.instead[-1]) == (15, "as bfloat16 it would take 6 B")
    assert [(move.tag, move.tensors, move.nbytes) for move in place(held, Devices()).moves] == [
        ("cpu", 3, 15),
        ("cuda:0", 1, 7),
    ]


def test_the_tags_of_storages_and_of_tensors() -> None:
    held = checkpoint(("cuda:1", 4), ("cpu", 4), ("cuda:1", 4))
    alone = Tensor(("m",), "m", "float32", (2,), (1,), "meta", None, kind="meta")
    assert tags_of(replace(held, tensors=(*held.tensors, alone))) == ["cuda:1", "cpu", "meta"]


def test_unknown_room_is_no_shortage() -> None:
    assert place(checkpoint(("cuda:0", 10**15)), gpus(-1)).ok


# -- whatever the machine and the checkpoint --------------------------------------------------------------------------

TAGS = st.sampled_from(["cpu", "meta", "cuda", "mps", "xpu:0", "npu:3", "weird", *(f"cuda:{n}" for n in range(10))])
CHECKPOINTS = st.lists(st.tuples(TAGS, st.integers(0, 200)), max_size=12).map(lambda tagged: checkpoint(*tagged))
MACHINES = st.builds(
    lambda free, rank, current: gpus(*free, rank=rank, current=current % len(free) if free else 0),
    st.lists(st.integers(-1, 300), max_size=4),
    st.none() | st.integers(0, 7),
    st.integers(0, 3),
)


@settings(max_examples=200 * FUZZ, deadline=None)
@given(CHECKPOINTS, MACHINES)
def test_every_storage_lands_once_where_it_can(held: Checkpoint, devices: Devices) -> None:
    plan = place(held, devices)
    tags = Counter(move.tag for move in plan.moves)
    assert set(tags.values()) <= {1}
    assert {storage.device for storage in held.storages} == set(tags)
    assert sum(move.nbytes for move in plan.moves) == held.tensor_nbytes
    assert sum(move.tensors for move in plan.moves) == len(held.tensors)
    here = {device.name for device in devices.available} | {"meta"}
    assert {plan.device_of(storage.device) for storage in held.storages} <= here


@settings(max_examples=200 * FUZZ, deadline=None)
@given(CHECKPOINTS, MACHINES)
def test_auto_refuses_nothing_and_leaves_the_cpu_alone(held: Checkpoint, devices: Devices) -> None:
    plan = place(held, devices, AUTO)
    assert not plan.refused
    assert plan.device_of("cpu") == "cpu"
    assert bool(plan.warning) == plan.surprising == any(move.moved for move in plan.moves)
    if devices.rank is None:
        assert all(plan.device_of(device.name) == device.name for device in devices.available)


@settings(max_examples=200 * FUZZ, deadline=None)
@given(CHECKPOINTS, MACHINES, st.sampled_from([AUTO, None, "cpu", "cuda", "cuda:1", "meta"]))
def test_a_plan_that_fits_takes_no_more_than_is_free(held: Checkpoint, devices: Devices, wish: str | None) -> None:
    plan = place(held, devices, wish)
    taken: Counter[str] = Counter()
    for storage in held.storages:
        taken[plan.device_of(storage.device)] += storage.nbytes
    over = {d.name for d in devices.available if 0 <= d.free < taken[d.name]}
    if not plan.refused:
        assert {short.device for short in plan.shortages} == over
    assert plan.ok == (not plan.refused and not over)


@settings(max_examples=50 * FUZZ, deadline=None)
@given(CHECKPOINTS, MACHINES)
def test_the_same_question_has_the_same_answer_and_it_is_json(held: Checkpoint, devices: Devices) -> None:
    plan = place(held, devices)
    shuffled = Checkpoint(held.path, held.format, 1, tensors=held.tensors[::-1], storages=held.storages[::-1])
    assert place(shuffled, devices) == plan
    assert json.loads(json.dumps(plan.to_dict())) == plan.to_dict()
    assert str(plan)
