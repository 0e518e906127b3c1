"""Environment variables that hide a GPU, or change how CUDA works."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.diagnose.machines import (
    UUID,
    bare,
    changed,
    cuda_gpu,
    healthy,
    in_slurm,
    install,
    no_torch_run,
    nvml_gpu,
    refused,
)
from tests.diagnose.rules.machine_rows import alarms, cause, seen
from tests.diagnose.rules.torch_rows import FINE, amd, failing, finding_of, tried, variables
from tests.each import each

from transload.machine import Accelerator, Driver, Experiment, Machine, Torch

NO_KERNEL = "AcceleratorError: CUDA error: no kernel image is available for execution on the device"


def hiding(value: str, code: int = 100) -> Machine:
    """The machine whose driver gives nothing, with CUDA_VISIBLE_DEVICES set."""
    return variables(refused(healthy(), code), CUDA_VISIBLE_DEVICES=value)


def several(machine: Machine, count: int = 2) -> Machine:
    """The machine with more cards of one kind."""
    return changed(
        machine,
        driver__nvml__count=count,
        driver__nvml__gpus=tuple(nvml_gpu(index) for index in range(count)),
    )


# -- CUDA_VISIBLE_DEVICES


@each("value", ["", "-1", "NoDevFiles", "all", '"0"', "cuda:0", "gpu0", ",0", "-1,0", " "])
def test_values_that_hide_every_gpu(value: str) -> None:
    machine = hiding(value)
    assert cause(machine) == "E01"
    found = finding_of("E01", machine)
    assert found.evidence[0] == f"CUDA_VISIBLE_DEVICES is {value!r}"
    assert "cuInit returned 100 CUDA_ERROR_NO_DEVICE" in found.evidence
    assert found.fix[0] == "$ unset CUDA_VISIBLE_DEVICES"
    assert cause(no_torch_run(machine)) == "E01"


@each(
    ("value", "code", "row"),
    [
        ("7", 100, "E02"),
        ("1,0", 100, "E02"),
        ("0,0", 101, "E03"),
        ("0,00", 101, "E03"),
        (f"{UUID[:-1]}0,{UUID[:12]}", 101, "E03"),
        ("GPU-deadbeef", 100, "E04"),
        (f" {UUID}", 100, "E01"),
        (UUID[4:], 100, "E02"),  # 6e1b… is read as the number 6
    ],
)
def test_values_that_name_no_gpu(value: str, code: int, row: str) -> None:
    assert cause(hiding(value, code)) == row


def test_an_ambiguous_uuid() -> None:
    machine = several(hiding("GPU-6e1b"))
    assert cause(machine) == "E04"
    assert "more than one UUID begins with 'GPU-6e1b'" in finding_of("E04", machine).evidence


def test_what_the_driver_did_without_it_is_evidence() -> None:
    line = "without CUDA_VISIBLE_DEVICES the driver finds 1 GPU"
    assert line in finding_of("E01", tried(hiding("-1"), "CUDA_VISIBLE_DEVICES")).evidence
    still = changed(
        hiding("-1"), driver__experiments=(Experiment(("CUDA_VISIBLE_DEVICES",), refused(healthy(), 999).driver.cuda),)
    )
    assert "without CUDA_VISIBLE_DEVICES the driver does not work either" in finding_of("E01", still).evidence


@each("value", ["0", "0,-1", "0 ", UUID[:-1] + "0", UUID[:7]])
def test_values_that_are_right(value: str) -> None:
    assert alarms(variables(healthy(), CUDA_VISIBLE_DEVICES=value)) == []


@each("value", ["-1", "7", "0,0", "GPU-dead", "all"])
def test_what_works_is_not_called_hidden(value: str) -> None:
    """A driver with another grammar than ours is right."""
    assert alarms(variables(healthy(), CUDA_VISIBLE_DEVICES=value)) == []
    assert alarms(no_torch_run(variables(healthy(), CUDA_VISIBLE_DEVICES=value))) == []


@each("name", [name for name in FINE if name.startswith("no GPU")])
def test_without_a_gpu_nothing_is_hidden(name: str) -> None:
    assert alarms(variables(FINE[name], CUDA_VISIBLE_DEVICES="-1")) == []


def test_a_list_that_is_cut_off() -> None:
    machine = several(healthy())
    lost = variables(machine, CUDA_VISIBLE_DEVICES="0,7,1")
    assert finding_of("E02", lost, "warning").title == "CUDA_VISIBLE_DEVICES is cut off at '7'"
    assert "1 of 2 GPUs are visible" in finding_of("E02", lost, "warning").evidence
    assert alarms(variables(machine, CUDA_VISIBLE_DEVICES="0,1,2,3")) == []
    finding_of("E02", variables(machine, CUDA_VISIBLE_DEVICES="0,1,2,3"), "note")
    assert alarms(variables(machine, CUDA_VISIBLE_DEVICES="0,x,1")) == ["E01"]


def test_uuids_that_nobody_told_are_not_judged() -> None:
    blind = changed(hiding("GPU-1234"), driver__nvml__gpus=(), driver__nvml__count=-1, driver__nvml__init=999)
    assert alarms(blind) == ["X08"]  # and no rule blames the variable
    assert seen("E04", blind) is None
    assert cause(variables(blind, CUDA_VISIBLE_DEVICES="-1")) == "E01"  # that is plain without any inventory


def test_in_a_slurm_job_without_a_gpu_it_is_slurm_that_hides_them() -> None:
    machine = changed(hiding(""), surroundings__slurm=True)
    assert seen("E01", machine) is None
    given = changed(in_slurm(refused(healthy(), 100)))
    assert "Slurm" in finding_of("E01", variables(given, CUDA_VISIBLE_DEVICES="-1")).fix[0]


def test_a_file_that_sets_it_is_named() -> None:
    machine = changed(hiding("-1"), variables__origins={"CUDA_VISIBLE_DEVICES": ("/etc/environment:3",)})
    assert finding_of("E07", machine, "note").evidence == ("CUDA_VISIBLE_DEVICES is set in /etc/environment:3",)
    assert any("/etc/environment:3" in line for line in finding_of("E01", machine).fix)
    fine = changed(variables(healthy(), CUDA_VISIBLE_DEVICES="0"), variables__origins=machine.variables.origins)
    assert seen("E07", fine) is None


def test_torch_counts_none() -> None:
    machine = changed(variables(healthy(), CUDA_VISIBLE_DEVICES="0,7,0"), torch_run__count=0)
    assert "E13" in alarms(machine)
    finding_of("E13", machine, "warning")
    assert seen("E13", changed(machine, torch_run__count=1)) is None
    assert seen("E13", changed(hiding("-1"), torch_run__count=0)) is None


# -- the others


@each("value", ["", "pci_bus_id", "PCI_BUS_ID ", "0"])
def test_an_order_that_cuda_refuses(value: str) -> None:
    machine = variables(refused(healthy(), 101), CUDA_DEVICE_ORDER=value)
    assert cause(machine) == "E12"
    assert finding_of("E12", machine).fix[0] == "$ export CUDA_DEVICE_ORDER=PCI_BUS_ID"
    assert seen("E12", variables(healthy(), CUDA_DEVICE_ORDER=value)) is None


@each("value", ["PCI_BUS_ID", "FASTEST_FIRST"])
def test_an_order_that_cuda_knows(value: str) -> None:
    assert seen("E12", variables(refused(healthy(), 999), CUDA_DEVICE_ORDER=value)) is None


def test_two_cards_in_another_order() -> None:
    fast, slow = (0, "NVIDIA H200", (9, 0)), (1, "NVIDIA T4", (7, 5))
    machine = changed(
        healthy(),
        driver__cuda__count=2,
        driver__cuda__gpus=(cuda_gpu(*fast), cuda_gpu(*slow)),
        driver__nvml__gpus=(nvml_gpu(*slow), nvml_gpu(*fast)),
    )
    assert finding_of("E05", machine, "note").evidence == ("CUDA's device 0 is NVIDIA H200, nvidia-smi's is NVIDIA T4",)
    same = changed(machine, driver__nvml__gpus=(nvml_gpu(*fast), nvml_gpu(*slow)))
    assert seen("E05", same) is None
    assert seen("E05", healthy()) is None


def test_kernels_must_be_compiled_and_cannot() -> None:
    machine = variables(failing(healthy(), "kernel", NO_KERNEL), CUDA_FORCE_PTX_JIT="1")
    assert cause(machine) == "A04"
    assert cause(variables(no_torch_run(healthy()), CUDA_FORCE_PTX_JIT="1")) == "A04"
    finding_of("A04", variables(healthy(), CUDA_FORCE_PTX_JIT="1"), "note")
    ptx = changed(no_torch_run(healthy()), torch_libraries__cubins={"sm_80": 1, "compute_90": 1})
    assert alarms(variables(ptx, CUDA_FORCE_PTX_JIT="1")) == []


@each("values", [{"CUDA_DISABLE_PTX_JIT": "1"}, {"CUDA_FORCE_PTX_JIT": "0"}, {"CUDA_FORCE_PTX_JIT": ""}, {}])
def test_switches_that_do_no_harm(values: dict[str, str]) -> None:
    assert alarms(variables(no_torch_run(healthy()), **values)) == []


def test_only_ptx_and_no_leave_to_compile_it() -> None:
    ptx = changed(no_torch_run(healthy()), torch_libraries__cubins={"sm_80": 1, "compute_80": 1})
    assert cause(variables(ptx, CUDA_DISABLE_PTX_JIT="1")) == "A04"


@each("name", ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"])
def test_a_variable_hides_the_amd_gpus(name: str) -> None:
    hip = replace(install("2.13.0+rocm7.2", ""), hip="7.2")
    machine = changed(amd(), torch=Torch(installs=(hip,)), torch_run__available=False, torch_run__hip="7.2")
    assert cause(variables(machine, **{name: "-1"})) == "E09"
    assert seen("E09", variables(machine, **{name: "0"})) is None
    assert seen("E09", changed(variables(machine, **{name: "-1"}), torch_run__available=True)) is None


def test_a_check_that_asks_nvml() -> None:
    machine = variables(refused(healthy(), 802), PYTORCH_NVML_BASED_CUDA_CHECK="1")
    finding_of("E10", changed(machine, torch_run__available=True), "note")
    assert seen("E10", machine) is None
    assert seen("E10", variables(healthy(), PYTORCH_NVML_BASED_CUDA_CHECK="1")) is None


def test_a_cache_that_cannot_be_written() -> None:
    machine = changed(healthy(), variables__cache_problem="/home/user/.nv/ComputeCache: EACCES")
    finding_of("E11", machine, "note")
    assert alarms(machine) == []
    assert seen("E11", changed(bare(), variables__cache_problem="HOME is not set")) is None


def test_where_nobody_looked_nothing_is_concluded() -> None:
    unknown: dict[str, Any] = {"driver": Driver(), "hardware__pci": ()}
    assert alarms(changed(hiding("-1"), accelerators=(Accelerator("mps", usable=True),), **unknown)) == []
