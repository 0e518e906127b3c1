"""Devices derived from the doctor's diagnosis of a machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.diagnose.machines import (
    cuda_gpu,
    cuinit_fails,
    healthy,
    install,
    no_torch_run,
    nvml_gpu,
    with_facts,
    without_gpu,
)

from transload.checking import devices_of
from transload.devices import Device, Devices, local_rank
from transload.diagnose.report import judge_machine
from transload.machine import Accelerator, Machine, Torch


def devices(machine: Machine, **environ: str) -> Devices:
    return devices_of(judge_machine(no_torch_run(machine)), environ)


def test_healthy_machine_lists_its_gpu_with_free_memory() -> None:
    machine = with_facts(healthy(), platform__memory=64, platform__memory_free=32)
    result = devices(machine, LOCAL_RANK="0")
    assert result.available == (
        Device("cpu", 32, 64),
        Device("cuda:0", 150_000_000_000, 150_110_011_392, "NVIDIA H200"),
    )
    assert (result.current, result.own, result.rank, result.absent) == ("cuda:0", "cuda:0", 0, "")


def test_free_memory_is_matched_by_gpu_id_and_not_by_index() -> None:
    cards = (cuda_gpu(0), cuda_gpu(1))
    seen = (replace(nvml_gpu(1), free=11), replace(nvml_gpu(0), free=10), replace(nvml_gpu(7), free=17))
    machine = with_facts(healthy(), driver__cuda__gpus=cards, driver__cuda__count=2, driver__nvml__gpus=seen)
    assert [device.free for device in devices(machine).available[1:]] == [10, 11]


def test_machine_without_a_gpu_lists_the_cpu_and_the_reason() -> None:
    result = devices(without_gpu())
    assert [device.name for device in result.available] == ["cpu"]
    assert (result.current, result.absent) == ("", "no GPU works here")


def test_broken_gpu_is_not_listed_and_its_cause_is_named() -> None:
    result = devices(cuinit_fails(healthy(), 999))
    assert [device.name for device in result.available] == ["cpu"]
    assert result.absent.endswith("]")


def test_gpu_is_not_listed_for_a_torch_without_cuda() -> None:
    machine = with_facts(healthy(), torch=Torch(installs=(install("2.13.0+cpu", ""),)))
    result = devices(machine)
    assert [device.name for device in result.available] == ["cpu"]
    assert "CUDA" in result.absent or "CPU" in result.absent


def test_gpus_of_the_driver_are_listed_without_torch() -> None:
    result = devices(with_facts(healthy(), torch=Torch(installs=())))
    assert [device.name for device in result.available] == ["cpu", "cuda:0"]


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
def test_accelerators_are_listed_only_if_torch_is_built_for_them(
    kind: str, build: dict[str, str], names: list[str]
) -> None:
    accelerators = (
        Accelerator(kind, "one", usable=True),
        Accelerator(kind, "two", usable=True),
        Accelerator(kind, "dead"),
    )
    torch = Torch(installs=(replace(install("2.13.0", ""), **build),))  # type: ignore[arg-type]
    result = devices(with_facts(without_gpu(), accelerators=accelerators, torch=torch))
    assert [device.name for device in result.available] == names
    assert bool(result.absent) == (names == ["cpu"])


@pytest.mark.parametrize(
    ("text", "rank"), [("0", 0), ("12", 12), ("", None), ("-1", None), ("one", None), ("9" * 5000, None), ("²", None)]
)
def test_local_rank_must_be_a_small_number(text: str, rank: int | None) -> None:
    assert local_rank({"LOCAL_RANK": text}) == rank
