"""Rules about environment variables that hide a GPU or change how CUDA works."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.diagnose.machines import (
    UUID,
    cuda_gpu,
    cuinit_fails,
    healthy,
    in_slurm,
    install,
    no_torch_run,
    nvml_gpu,
    with_facts,
    without_gpu,
)
from tests.diagnose.rules.rule_helpers import alarms, cause, find
from tests.diagnose.rules.torch_machines import FAULTLESS, amd, failing, finding_of, with_variables, works_without
from tests.each import each

from transload.machine import Accelerator, Driver, Experiment, Machine, Torch

NO_KERNEL = "AcceleratorError: CUDA error: no kernel image is available for execution on the device"


def hidden_by(value: str, code: int = 100) -> Machine:
    """The machine whose cuInit returns ``code``, with CUDA_VISIBLE_DEVICES set."""
    return with_variables(cuinit_fails(healthy(), code), CUDA_VISIBLE_DEVICES=value)


def with_several_cards(machine: Machine, count: int = 2) -> Machine:
    """The machine on which NVML sees several cards of one kind."""
    return with_facts(
        machine,
        driver__nvml__count=count,
        driver__nvml__gpus=tuple(nvml_gpu(index) for index in range(count)),
    )


# -- CUDA_VISIBLE_DEVICES


@each("value", ["", "-1", "NoDevFiles", "all", '"0"', "cuda:0", "gpu0", ",0", "-1,0", " "])
def test_values_that_hide_every_gpu(value: str) -> None:
    machine = hidden_by(value)
    assert cause(machine) == "E01"
    finding = finding_of("E01", machine)
    assert finding.evidence[0] == f"CUDA_VISIBLE_DEVICES is {value!r}"
    assert "cuInit returned 100 CUDA_ERROR_NO_DEVICE" in finding.evidence
    assert finding.fix[0] == "$ unset CUDA_VISIBLE_DEVICES"
    assert cause(no_torch_run(machine)) == "E01"


@each(
    ("value", "code", "rule"),
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
def test_values_that_select_no_gpu(value: str, code: int, rule: str) -> None:
    assert cause(hidden_by(value, code)) == rule


def test_ambiguous_uuid() -> None:
    machine = with_several_cards(hidden_by("GPU-6e1b"))
    assert cause(machine) == "E04"
    assert "more than one UUID begins with 'GPU-6e1b'" in finding_of("E04", machine).evidence


def test_experiment_without_the_variable_is_evidence() -> None:
    line = "without CUDA_VISIBLE_DEVICES the driver finds 1 GPU"
    assert line in finding_of("E01", works_without(hidden_by("-1"), "CUDA_VISIBLE_DEVICES")).evidence
    still_failing = with_facts(
        hidden_by("-1"),
        driver__experiments=(Experiment(("CUDA_VISIBLE_DEVICES",), cuinit_fails(healthy(), 999).driver.cuda),),
    )
    assert "without CUDA_VISIBLE_DEVICES the driver does not work either" in finding_of("E01", still_failing).evidence


@each("value", ["0", "0,-1", "0 ", UUID[:-1] + "0", UUID[:7]])
def test_valid_values_raise_no_alarm(value: str) -> None:
    assert alarms(with_variables(healthy(), CUDA_VISIBLE_DEVICES=value)) == []


@each("value", ["-1", "7", "0,0", "GPU-dead", "all"])
def test_no_alarm_where_the_driver_accepts_the_value(value: str) -> None:
    """What the driver accepts is right, even if our parser disagrees."""
    assert alarms(with_variables(healthy(), CUDA_VISIBLE_DEVICES=value)) == []
    assert alarms(no_torch_run(with_variables(healthy(), CUDA_VISIBLE_DEVICES=value))) == []


@each("name", [name for name in FAULTLESS if name.startswith("no GPU")])
def test_no_alarm_without_a_gpu(name: str) -> None:
    assert alarms(with_variables(FAULTLESS[name], CUDA_VISIBLE_DEVICES="-1")) == []


def test_list_is_cut_off_at_the_first_invalid_entry() -> None:
    machine = with_several_cards(healthy())
    cut_off = with_variables(machine, CUDA_VISIBLE_DEVICES="0,7,1")
    assert finding_of("E02", cut_off, "warning").title == "CUDA_VISIBLE_DEVICES is cut off at '7'"
    assert "1 of 2 GPUs are visible" in finding_of("E02", cut_off, "warning").evidence
    assert alarms(with_variables(machine, CUDA_VISIBLE_DEVICES="0,1,2,3")) == []
    finding_of("E02", with_variables(machine, CUDA_VISIBLE_DEVICES="0,1,2,3"), "note")
    assert alarms(with_variables(machine, CUDA_VISIBLE_DEVICES="0,x,1")) == ["E01"]


def test_uuids_are_not_judged_where_nvml_lists_none() -> None:
    no_inventory = with_facts(
        hidden_by("GPU-1234"), driver__nvml__gpus=(), driver__nvml__count=-1, driver__nvml__init=999
    )
    assert alarms(no_inventory) == ["X08"]  # and no rule blames the variable
    assert find("E04", no_inventory) is None
    assert cause(with_variables(no_inventory, CUDA_VISIBLE_DEVICES="-1")) == "E01"  # clear without any inventory


def test_variable_is_not_blamed_in_a_slurm_job_without_a_gpu() -> None:
    machine = with_facts(hidden_by(""), surroundings__slurm=True)
    assert find("E01", machine) is None
    with_gpu = with_facts(in_slurm(cuinit_fails(healthy(), 100)))
    assert "Slurm" in finding_of("E01", with_variables(with_gpu, CUDA_VISIBLE_DEVICES="-1")).fix[0]


def test_file_that_sets_the_variable_is_named() -> None:
    machine = with_facts(hidden_by("-1"), variables__origins={"CUDA_VISIBLE_DEVICES": ("/etc/environment:3",)})
    assert finding_of("E07", machine, "note").evidence == ("CUDA_VISIBLE_DEVICES is set in /etc/environment:3",)
    assert any("/etc/environment:3" in line for line in finding_of("E01", machine).fix)
    fine = with_facts(with_variables(healthy(), CUDA_VISIBLE_DEVICES="0"), variables__origins=machine.variables.origins)
    assert find("E07", fine) is None


def test_torch_counts_no_gpu_although_cuda_has_one() -> None:
    machine = with_facts(with_variables(healthy(), CUDA_VISIBLE_DEVICES="0,7,0"), torch_run__count=0)
    assert "E13" in alarms(machine)
    finding_of("E13", machine, "warning")
    assert find("E13", with_facts(machine, torch_run__count=1)) is None
    assert find("E13", with_facts(hidden_by("-1"), torch_run__count=0)) is None


# -- other variables


@each("value", ["", "pci_bus_id", "PCI_BUS_ID ", "0"])
def test_invalid_device_order(value: str) -> None:
    machine = with_variables(cuinit_fails(healthy(), 101), CUDA_DEVICE_ORDER=value)
    assert cause(machine) == "E12"
    assert finding_of("E12", machine).fix[0] == "$ export CUDA_DEVICE_ORDER=PCI_BUS_ID"
    assert find("E12", with_variables(healthy(), CUDA_DEVICE_ORDER=value)) is None


@each("value", ["PCI_BUS_ID", "FASTEST_FIRST"])
def test_valid_device_order(value: str) -> None:
    assert find("E12", with_variables(cuinit_fails(healthy(), 999), CUDA_DEVICE_ORDER=value)) is None


def test_cuda_and_nvidia_smi_number_two_cards_differently() -> None:
    fast, slow = (0, "NVIDIA H200", (9, 0)), (1, "NVIDIA T4", (7, 5))
    machine = with_facts(
        healthy(),
        driver__cuda__count=2,
        driver__cuda__gpus=(cuda_gpu(*fast), cuda_gpu(*slow)),
        driver__nvml__gpus=(nvml_gpu(*slow), nvml_gpu(*fast)),
    )
    assert finding_of("E05", machine, "note").evidence == ("CUDA's device 0 is NVIDIA H200, nvidia-smi's is NVIDIA T4",)
    same = with_facts(machine, driver__nvml__gpus=(nvml_gpu(*fast), nvml_gpu(*slow)))
    assert find("E05", same) is None
    assert find("E05", healthy()) is None


def test_ptx_compilation_is_forced_but_torch_has_no_ptx() -> None:
    machine = with_variables(failing(healthy(), "kernel", NO_KERNEL), CUDA_FORCE_PTX_JIT="1")
    assert cause(machine) == "A04"
    assert cause(with_variables(no_torch_run(healthy()), CUDA_FORCE_PTX_JIT="1")) == "A04"
    finding_of("A04", with_variables(healthy(), CUDA_FORCE_PTX_JIT="1"), "note")
    ptx = with_facts(no_torch_run(healthy()), torch_libraries__cubins={"sm_80": 1, "compute_90": 1})
    assert alarms(with_variables(ptx, CUDA_FORCE_PTX_JIT="1")) == []


@each("values", [{"CUDA_DISABLE_PTX_JIT": "1"}, {"CUDA_FORCE_PTX_JIT": "0"}, {"CUDA_FORCE_PTX_JIT": ""}, {}])
def test_harmless_jit_variables(values: dict[str, str]) -> None:
    assert alarms(with_variables(no_torch_run(healthy()), **values)) == []


def test_ptx_compilation_is_disabled_but_the_card_needs_it() -> None:
    ptx = with_facts(no_torch_run(healthy()), torch_libraries__cubins={"sm_80": 1, "compute_80": 1})
    assert cause(with_variables(ptx, CUDA_DISABLE_PTX_JIT="1")) == "A04"


@each("name", ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"])
def test_variable_hides_the_amd_gpus(name: str) -> None:
    hip = replace(install("2.13.0+rocm7.2", ""), hip="7.2")
    machine = with_facts(amd(), torch=Torch(installs=(hip,)), torch_run__available=False, torch_run__hip="7.2")
    assert cause(with_variables(machine, **{name: "-1"})) == "E09"
    assert find("E09", with_variables(machine, **{name: "0"})) is None
    assert find("E09", with_facts(with_variables(machine, **{name: "-1"}), torch_run__available=True)) is None


def test_nvml_based_check_says_available_although_cuinit_fails() -> None:
    machine = with_variables(cuinit_fails(healthy(), 802), PYTORCH_NVML_BASED_CUDA_CHECK="1")
    finding_of("E10", with_facts(machine, torch_run__available=True), "note")
    assert find("E10", machine) is None
    assert find("E10", with_variables(healthy(), PYTORCH_NVML_BASED_CUDA_CHECK="1")) is None


def test_unwritable_compute_cache_is_a_note() -> None:
    machine = with_facts(healthy(), variables__cache_problem="/home/user/.nv/ComputeCache: EACCES")
    finding_of("E11", machine, "note")
    assert alarms(machine) == []
    assert find("E11", with_facts(without_gpu(), variables__cache_problem="HOME is not set")) is None


def test_no_alarm_where_the_driver_was_not_queried() -> None:
    unqueried: dict[str, Any] = {"driver": Driver(), "hardware__pci": ()}
    assert alarms(with_facts(hidden_by("-1"), accelerators=(Accelerator("mps", usable=True),), **unqueried)) == []
