"""Where storages are placed: each rule, and properties that hold for every machine and checkpoint."""

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
from tests.loading.placement_makers import GB, checkpoint, gpus

from transload.checkpoint import Checkpoint, Tensor
from transload.devices import Device, Devices
from transload.loading.placement import AUTO, UNDECIDED, Move, Plan, place, tags_of

CPU_ONLY = Devices((Device("cpu", 1000 * GB),), absent="torch is built without CUDA [B01]")
MAC = Devices((Device("cpu"), Device("mps")), "mps")


def placements(plan: Plan) -> dict[str, str]:
    return {move.tag: move.device for move in plan.moves}


# -- auto -------------------------------------------------------------------------------------------------------------


def test_storages_of_existing_devices_stay_there() -> None:
    plan = place(checkpoint(("cuda:1", 8), ("cpu", 8), ("meta", 0)), gpus(GB, GB))
    assert placements(plan) == {"cuda:1": "cuda:1", "cpu": "cpu", "meta": "meta"}
    assert (plan.ok, plan.surprising, plan.warning) == (True, False, "")


@pytest.mark.parametrize(
    "tag", ["cuda:3", "xpu:0", "npu:1", "mps", "hpu", "maia:0", "cuda:abc", "", "cuda:" + "9" * 5000]
)
def test_absent_device_is_replaced_by_the_current_gpu(tag: str) -> None:
    plan = place(checkpoint((tag, 8)), gpus(GB, GB, current=1))
    assert placements(plan) == {tag: "cuda:1"}
    assert plan.ok
    assert plan.moves[0].why.startswith("there is no ")


def test_absent_gpu_is_replaced_by_the_cpu_with_the_reason() -> None:
    plan = place(checkpoint(("cuda:0", 8), ("cuda:1", 4), ("cpu", 4)), CPU_ONLY)
    assert placements(plan) == {"cuda:0": "cpu", "cuda:1": "cpu", "cpu": "cpu"}
    assert plan.warning == (
        "2 tensors saved on cuda:0 and cuda:1 land on cpu: there is no cuda:0 or cuda:1 here; "
        "torch is built without CUDA [B01]"
    )


def test_warning_agrees_with_the_number_of_tensors() -> None:
    for count, words in ((1, "1 tensor saved on cuda:1 lands on cpu"), (0, "1.02 kB saved on cuda:1 lands on cpu")):
        plan = Plan((Move("cuda:1", "cpu", "absent", count, 1024),), surprising=True)
        assert plan.warning == f"{words}: there is no cuda:1 here"


def test_absent_cuda_is_replaced_by_another_accelerator() -> None:
    assert placements(place(checkpoint(("cuda:0", 8), ("mps", 8)), MAC)) == {"cuda:0": "mps", "mps": "mps"}
    intel = Devices((Device("cpu"), Device("xpu:0")), "xpu:0")
    assert placements(place(checkpoint(("cuda:0", 8), ("xpu", 8)), intel)) == {"cuda:0": "xpu:0", "xpu": "xpu:0"}


def test_float64_is_placed_on_the_cpu_instead_of_mps() -> None:
    plan = place(checkpoint(("cuda:0", 8), dtype="float64"), MAC)
    assert placements(plan) == {"cuda:0": "cpu"}
    assert plan.moves[0].why == "mps cannot hold float64"


def test_tag_without_an_index_is_the_current_device_without_a_warning() -> None:
    plan = place(checkpoint(("cuda", 8)), gpus(GB, GB, current=1))
    assert (placements(plan), plan.warning) == ({"cuda": "cuda:1"}, "")
    assert place(checkpoint(("mps:0", 8)), MAC).warning == ""


def test_tensor_rebuilt_on_its_device_counts_there() -> None:
    inner = Tensor(("t",), "t", "float32", (25,), (1,), "cpu", "0")
    contents = checkpoint(("cpu", 100))
    rebuilt = inner._replace(device="xla:0", kind="device", parts=(inner,), storage=None)
    plan = place(Checkpoint("m.pt", "torch-zip", 1, tensors=(rebuilt,), storages=contents.storages), gpus(GB))
    assert {move.tag: (move.device, move.nbytes) for move in plan.moves} == {
        "cpu": ("cpu", 100),
        "xla:0": ("cuda:0", 100),
    }


# -- several devices --------------------------------------------------------------------------------------------------


def test_spread_over_existing_devices_is_kept() -> None:
    spread = checkpoint(("cuda:0", 30), ("cuda:1", 20), ("cuda:2", 10))
    assert placements(place(spread, gpus(99, 99, 99))) == {"cuda:0": "cuda:0", "cuda:1": "cuda:1", "cuda:2": "cuda:2"}


def test_spread_over_fewer_devices_fills_free_memory_largest_first() -> None:
    spread = checkpoint(("cuda:0", 30), ("cuda:1", 20), ("cuda:2", 25), ("cuda:3", 15))
    plan = place(spread, gpus(100, 100))
    # 30 and 20 stay; 25 goes where 80 is left, 15 where then 70 is left and not 55
    assert placements(plan) == {"cuda:0": "cuda:0", "cuda:1": "cuda:1", "cuda:2": "cuda:1", "cuda:3": "cuda:0"}
    assert plan.ok


def test_absent_device_of_a_spread_goes_to_the_gpu_with_most_free_memory() -> None:
    assert placements(place(checkpoint(("cuda:0", 60), ("cuda:5", 40)), gpus(90, 90)))["cuda:5"] == "cuda:1"
    alone = place(checkpoint(("cuda:5", 40)), gpus(50, 90))
    assert placements(alone) == {"cuda:5": "cuda:0"}, "one device is not a spread: it goes to the current device"


def test_spread_is_balanced_when_free_memory_is_unknown() -> None:
    spread = checkpoint(*((f"cuda:{index}", 10) for index in range(2, 6)))
    assert sorted(placements(place(spread, gpus(-1, -1))).values()) == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]


# -- torchrun ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", range(4))
def test_every_rank_uses_its_own_gpu(rank: int) -> None:
    plan = place(checkpoint(("cuda:0", 16), ("cuda:7", 12), ("cpu", 8)), gpus(GB, GB, GB, GB, rank=rank))
    assert placements(plan) == {"cuda:0": f"cuda:{rank}", "cuda:7": f"cuda:{rank}", "cpu": "cpu"}
    assert f"local rank {rank}" in plan.moves[0].why


def test_rank_that_sees_one_gpu_uses_it() -> None:
    assert placements(place(checkpoint(("cuda:0", 8)), gpus(GB, rank=3))) == {"cuda:0": "cuda:0"}


def test_more_ranks_than_gpus_share_them() -> None:
    assert [gpus(1, 1, rank=rank).own for rank in range(4)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]


def test_current_device_takes_precedence_over_the_rank() -> None:
    assert gpus(GB, GB, GB, rank=0, current=2).own == "cuda:2"


def test_ranks_without_a_gpu_use_the_cpu() -> None:
    assert placements(place(checkpoint(("cuda:0", 8)), gpus(rank=1))) == {"cuda:0": "cpu"}


# -- map_location, which means the same as in torch -------------------------------------------------------------------

LOCATIONS: list[tuple[Any, dict[str, str]]] = [
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
    ("map_location", "expected"), LOCATIONS, ids=lambda value: getattr(value, "__name__", None) or str(value)[:30]
)
def test_map_location_is_honoured(map_location: Any, expected: dict[str, str]) -> None:
    plan = place(
        checkpoint(("cuda:0", 8), ("cuda:1", 8), ("cpu", 8), ("meta", 0)), gpus(GB, GB, current=1), map_location
    )
    assert placements(plan) == expected
    assert (plan.ok, plan.warning) == (True, ""), "a requested device needs no warning"


@pytest.mark.parametrize(
    ("map_location", "refused"),
    [
        (None, "there is no cuda:5 here, only cpu and cuda:0"),
        ("cuda:7", "there is no cuda:7 here, only cpu and cuda:0"),
        ("gpu", "there is no gpu here, only cpu and cuda:0"),
        ({"cuda:5": "cuda:6"}, "there is no cuda:6 here, only cpu and cuda:0"),
        (
            {torch.device("cuda:5"): "cpu"},
            "there is no cuda:5 here, only cpu and cuda:0",
        ),  # torch does not match it either
        (1, "map_location is of type int, which does not name a device"),
        (1.5, "map_location is of type float, which does not name a device"),
        (["cuda:7", "xpu:0"], "there is no cuda:7 or xpu:0 here, only cpu and cuda:0"),
        ([], "the list of devices is empty"),
        (["cuda:7", None], "the list of devices has NoneType in it, which does not name a device"),
    ],
)
def test_invalid_map_location_is_refused_with_a_fix(map_location: Any, refused: str) -> None:
    plan = place(checkpoint(("cuda:5", 8), ("cuda:0", 8)), gpus(GB), map_location)
    assert (plan.ok, plan.refused) == (False, refused)
    assert plan.fix


@pytest.mark.parametrize(("map_location", "suggestion"), [("gpu", "cuda"), ("cuda1", "cuda:1"), ("CUDA:0", "cuda:0")])
def test_misspelled_device_gets_a_suggestion(map_location: str, suggestion: str) -> None:
    plan = place(checkpoint(("cuda:5", 8)), gpus(GB), map_location)
    assert f"Did you mean map_location={suggestion!r}?" in plan.fix[0]


def test_number_as_map_location_gets_a_suggestion() -> None:
    assert place(checkpoint(("cuda:0", 8)), gpus(GB), 1).fix == ("Pass map_location='cuda:1'.",)


def test_float64_requested_on_mps_is_refused() -> None:
    plan = place(checkpoint(("cpu", 8), dtype="float64"), MAC, "mps")
    assert plan.refused == "it holds float64, which mps does not have"


def test_refusal_of_a_list_of_devices_names_every_reason() -> None:
    plan = place(checkpoint(("cpu", 8), dtype="float64"), MAC, ["cuda:1", "mps"])
    assert plan.refused == "there is no cuda:1 here, only cpu and mps; it holds float64, which mps does not have"


def test_refusal_names_the_reason_for_a_missing_gpu() -> None:
    plan = place(checkpoint(("cuda:0", 8)), CPU_ONLY, None)
    assert plan.refused == "there is no cuda:0 here, only cpu; torch is built without CUDA [B01]"


# -- memory -----------------------------------------------------------------------------------------------------------


def test_shortage_says_how_much_is_missing_and_what_would_fit() -> None:
    plan = place(checkpoint(("cuda:0", 14 * GB)), gpus(10 * GB, 20 * GB, cpu=64 * GB))
    (shortage,) = plan.shortages
    assert (shortage.device, shortage.needed, shortage.free, shortage.missing) == ("cuda:0", 14 * GB, 10 * GB, 4 * GB)
    assert shortage.instead == (
        "map_location='cuda:1', which has 20.0 GB free",
        "map_location='cpu', which has 64.0 GB free",
        "as bfloat16 it would take 7.00 GB",
    )
    assert not plan.ok
    assert not plan.refused


def test_mmap_is_offered_for_a_large_file_if_the_format_allows() -> None:
    mapped = "map_location='cpu' with mmap=True, which reads what is touched"
    for form, offered in (("torch-zip", True), ("torch-legacy", False)):
        plan = place(checkpoint(("cpu", 40 * GB), dtype="int64", format=form), gpus(cpu=16 * GB))
        assert (plan.shortages[0].instead == (mapped,)) == offered


def test_storages_on_one_device_are_added_up() -> None:
    contents = checkpoint(("cuda:0", 6), ("cuda:1", 6))
    assert place(contents, gpus(12)).ok
    assert [shortage.needed for shortage in place(contents, gpus(11)).shortages] == [12]


def test_equal_storages_are_each_counted() -> None:
    """Each odd size is rounded down when it is halved."""
    contents = checkpoint(*[("cpu", 5)] * 3, ("cuda:0", 7))
    (shortage,) = place(contents, Devices((Device("cpu", 6, 10), Device("cuda:0", 9)), "cuda:0")).shortages
    assert (shortage.needed, shortage.instead[-1]) == (15, "as bfloat16 it would take 6 B")
    assert [(move.tag, move.tensors, move.nbytes) for move in place(contents, Devices()).moves] == [
        ("cpu", 3, 15),
        ("cuda:0", 1, 7),
    ]


def test_tags_of_storages_and_tensors() -> None:
    contents = checkpoint(("cuda:1", 4), ("cpu", 4), ("cuda:1", 4))
    alone = Tensor(("m",), "m", "float32", (2,), (1,), "meta", None, kind="meta")
    assert tags_of(replace(contents, tensors=(*contents.tensors, alone))) == ["cuda:1", "cpu", "meta"]


def test_unknown_free_memory_is_not_a_shortage() -> None:
    assert place(checkpoint(("cuda:0", 10**15)), gpus(-1)).ok


# -- properties for every machine and checkpoint ----------------------------------------------------------------------

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
def test_every_storage_is_placed_once_on_an_existing_device(contents: Checkpoint, devices: Devices) -> None:
    plan = place(contents, devices)
    tags = Counter(move.tag for move in plan.moves)
    assert set(tags.values()) <= {1}
    assert {storage.device for storage in contents.storages} == set(tags)
    assert sum(move.nbytes for move in plan.moves) == contents.tensor_nbytes
    assert sum(move.tensors for move in plan.moves) == len(contents.tensors)
    existing = {device.name for device in devices.available} | {"meta"}
    assert {plan.device_of(storage.device) for storage in contents.storages} <= existing


@settings(max_examples=200 * FUZZ, deadline=None)
@given(CHECKPOINTS, MACHINES)
def test_auto_refuses_nothing_and_keeps_storages_on_the_cpu(contents: Checkpoint, devices: Devices) -> None:
    plan = place(contents, devices, AUTO)
    assert not plan.refused
    assert plan.device_of("cpu") == "cpu"
    assert bool(plan.warning) == plan.surprising == any(move.moved for move in plan.moves)
    if devices.rank is None:
        assert all(plan.device_of(device.name) == device.name for device in devices.available)


@settings(max_examples=200 * FUZZ, deadline=None)
@given(CHECKPOINTS, MACHINES, st.sampled_from([AUTO, None, "cpu", "cuda", "cuda:1", "meta"]))
def test_shortages_are_the_devices_with_too_little_free_memory(
    contents: Checkpoint, devices: Devices, map_location: str | None
) -> None:
    plan = place(contents, devices, map_location)
    used: Counter[str] = Counter()
    for storage in contents.storages:
        used[plan.device_of(storage.device)] += storage.nbytes
    overfull = {d.name for d in devices.available if 0 <= d.free < used[d.name]}
    if not plan.refused:
        assert {shortage.device for shortage in plan.shortages} == overfull
    assert plan.ok == (not plan.refused and not overfull)


@settings(max_examples=50 * FUZZ, deadline=None)
@given(CHECKPOINTS, MACHINES)
def test_plan_does_not_depend_on_order_and_is_json(contents: Checkpoint, devices: Devices) -> None:
    plan = place(contents, devices)
    shuffled = Checkpoint(
        contents.path, contents.format, 1, tensors=contents.tensors[::-1], storages=contents.storages[::-1]
    )
    assert place(shuffled, devices) == plan
    assert json.loads(json.dumps(plan.to_dict())) == plan.to_dict()
    assert str(plan)
