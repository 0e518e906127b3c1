"""Devices as the doctor found them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.diagnose.machines import bare, changed, cuda_gpu, healthy, install, no_torch_run, nvml_gpu, refused

from transload.checking import devices_of
from transload.devices import Device, Devices, local_rank
from transload.diagnose.report import judge_machine
from transload.machine import Accelerator, Machine, Torch


def devices(machine: Machine, **environ: str) -> Devices:
    return devices_of(judge_machine(no_torch_run(machine)), environ)


def test_a_healthy_machine_has_its_card_and_what_is_free_of_it() -> None:
    machine = changed(healthy(), platform__memory=64, platform__memory_free=32)
    found = devices(machine, LOCAL_RANK="0")
    assert found.available == (
        Device("cpu", 32, 64),
        Device("cuda:0", 150_000_000_000, 150_110_011_392, "NVIDIA H200"),
    )
    assert (found.current, found.own, found.rank, found.absent) == ("cuda:0", "cuda:0", 0, "")


def test_cards_are_told_apart_by_their_id_and_not_by_their_place() -> None:
    cards = (cuda_gpu(0), cuda_gpu(1))
    seen = (replace(nvml_gpu(1), free=11), replace(nvml_gpu(0), free=10), replace(nvml_gpu(7), free=17))
    machine = changed(healthy(), driver__cuda__gpus=cards, driver__cuda__count=2, driver__nvml__gpus=seen)
    assert [device.free for device in devices(machine).available[1:]] == [10, 11]


def test_without_a_gpu_there_is_the_cpu_and_the_reason() -> None:
    found = devices(bare())
    assert [device.name for device in found.available] == ["cpu"]
    assert (found.current, found.absent) == ("", "no GPU works here")


def test_a_gpu_that_does_not_work_is_not_there_and_its_cause_is_named() -> None:
    found = devices(refused(healthy(), 999))
    assert [device.name for device in found.available] == ["cpu"]
    assert found.absent.endswith("]")


def test_a_torch_without_cuda_cannot_use_the_card() -> None:
    machine = changed(healthy(), torch=Torch(installs=(install("2.13.0+cpu", ""),)))
    found = devices(machine)
    assert [device.name for device in found.available] == ["cpu"]
    assert "CUDA" in found.absent or "CPU" in found.absent


def test_where_no_torch_is_installed_the_driver_has_the_word() -> None:
    found = devices(changed(healthy(), torch=Torch(installs=())))
    assert [device.name for device in found.available] == ["cpu", "cuda:0"]


@pytest.mark.parametrize(
    ("kind", "build", "names"),
    [
        ("rocm", {"hip": "6.3"}, ["cpu", "cuda:0", "cuda:1"]),
        ("rocm", {}, ["cpu"]),
        ("xpu", {"xpu": "20250000"}, ["cpu", "xpu:0", "xpu:1"]),
        ("mps", {}, ["cpu", "mps"]),
        ("npu", {}, ["cpu"]),
    ],
)
def test_other_accelerators_count_where_torch_is_built_for_them(
    kind: str, build: dict[str, str], names: list[str]
) -> None:
    two = (Accelerator(kind, "one", usable=True), Accelerator(kind, "two", usable=True), Accelerator(kind, "dead"))
    torch = Torch(installs=(replace(install("2.13.0", ""), **build),))  # type: ignore[arg-type]
    found = devices(changed(bare(), accelerators=two, torch=torch))
    assert [device.name for device in found.available] == names
    assert bool(found.absent) == (names == ["cpu"])


@pytest.mark.parametrize(
    ("text", "rank"), [("0", 0), ("12", 12), ("", None), ("-1", None), ("one", None), ("9" * 5000, None), ("²", None)]
)
def test_a_rank_is_a_small_number(text: str, rank: int | None) -> None:
    assert local_rank({"LOCAL_RANK": text}) == rank
