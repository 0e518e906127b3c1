"""Rules about AMD and Intel GPUs, macOS and Windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.diagnose.machines import healthy, in_container, install, no_torch_run, with_facts, without_gpu
from tests.diagnose.rules.rule_helpers import alarms, cause, find
from tests.diagnose.rules.torch_machines import amd, finding_of, with_variables, without_torch
from tests.each import each

from transload.machine import Accelerator, ChildAnswer, Cuda, Machine, Node, PciDevice, Torch, Unknown

AMD_CARD = PciDevice("0000:03:00.0", 0x1002, 0x744C, 0x030000, "amdgpu", "D0")


def with_rocm_build(machine: Machine, **facts: Any) -> Machine:
    """The machine with a ROCm build of torch that sees no GPU."""
    hip = replace(install("2.13.0+rocm7.2", ""), hip="7.2.0")
    return with_facts(
        machine, torch=Torch(installs=(hip,)), torch_run__hip="7.2.0", torch_run__available=False, **facts
    )


# -- the wrong build


def test_rocm_build_on_an_nvidia_machine() -> None:
    machine = with_rocm_build(healthy(), torch_run__steps=())
    assert cause(machine) == "T06"
    assert any("pip install torch==" in line for line in finding_of("T06", machine).fix)
    both = with_facts(machine, hardware__pci=(*(machine.hardware.pci or ()), AMD_CARD))
    assert find("T06", both) is None


def test_xpu_build_on_an_nvidia_machine() -> None:
    machine = with_facts(no_torch_run(healthy()), torch__installs=(replace(install("2.13.0+xpu", ""), xpu="2025.2"),))
    assert cause(machine) == "T06"
    assert "Intel's XPU" in finding_of("T06", machine).evidence[0]


@each("machine", [amd(), with_facts(amd(), torch=healthy().torch), no_torch_run(amd())])
def test_amd_card_needs_a_rocm_build(machine: Machine) -> None:
    assert cause(machine) == "T07"
    assert any("--index-url https://download.pytorch.org/whl/rocm" in line for line in finding_of("T07", machine).fix)


@each("machine", [amd("gfx1103", integrated=True), amd("gfx90c"), amd("gfx1036", integrated=True)])
def test_integrated_amd_graphics_are_a_note(machine: Machine) -> None:
    assert alarms(machine) == []
    finding_of("T07", machine, "note")


def test_other_gpus_beside_an_nvidia_card_are_ignored() -> None:
    other = (Accelerator("rocm", "Radeon", "gfx1100", usable=True), Accelerator("xpu", "Arc", usable=True))
    assert find("T07", with_facts(healthy(), accelerators=other)) is None


def test_intel_gpu_is_a_note() -> None:
    machine = with_facts(without_gpu(), accelerators=(Accelerator("xpu", "Intel GPU", "8086:56a0", usable=True),))
    assert any("whl/xpu" in line for line in finding_of("T07", machine, "note").fix)
    assert alarms(machine) == []
    assert find("T07", with_facts(machine, accelerators=(Accelerator("xpu", "Intel GPU"),))) is None


@each(("cpu", "word"), [("arm64", '"mps"'), ("x86_64", '"cpu"')])
def test_macos_has_no_cuda(cpu: str, word: str) -> None:
    mac = {"platform__system": "Darwin", "platform__machine": cpu, "platform__kernel": "24.1.0"}
    machine = with_facts(without_gpu(), **mac, hardware__pci=())
    assert word in finding_of("T08", machine, "note").fix[0]
    assert alarms(machine) == []
    assert find("T08", without_gpu()) is None


# -- ROCm


def with_kfd(machine: Machine, error: str) -> Machine:
    return with_facts(machine, nodes__found=(*machine.nodes.found, Node("/dev/kfd", mode=0o660, error=error)))


def test_dev_kfd_cannot_be_opened() -> None:
    machine = with_kfd(with_rocm_build(amd()), "EACCES")
    assert cause(machine) == "R01"
    assert finding_of("R01", machine).fix[0] == "$ sudo usermod -aG render,video $USER"
    assert any("--device=/dev/kfd" in line for line in finding_of("R01", in_container(machine)).fix)
    assert find("R01", with_kfd(with_rocm_build(amd()), "")) is None
    assert find("R01", with_kfd(amd(), "EACCES")) is None  # a build that does not use it
    assert find("R01", with_facts(machine, torch_run__available=True)) is None


def test_dev_kfd_does_not_exist() -> None:
    machine = with_facts(with_rocm_build(amd()), accelerators=(Accelerator("rocm", "AMD GPU", "1002:744c"),))
    assert cause(machine) == "R01"


def test_rocm_build_without_code_for_the_chip() -> None:
    listed = {"torch_libraries__architectures": ("gfx90a", "gfx1030", "gfx1100")}
    machine = with_rocm_build(with_kfd(amd("gfx1032"), ""), **listed)
    assert cause(machine) == "R02"
    assert "$ export HSA_OVERRIDE_GFX_VERSION=10.3.0" in finding_of("R02", machine).fix
    assert find("R02", with_variables(machine, HSA_OVERRIDE_GFX_VERSION="10.3.0")) is None
    assert find("R02", with_rocm_build(with_kfd(amd("gfx1030"), ""), **listed)) is None
    assert find("R02", with_rocm_build(with_kfd(amd("gfx1032"), ""))) is None


# -- Windows


def test_windows_whose_cards_cannot_be_listed_and_that_has_no_driver() -> None:
    windows = with_facts(
        healthy(),
        platform__system="Windows",
        driver__cuda=Cuda(ChildAnswer("no-library", "nvcuda.dll")),
        hardware__pci=Unknown("the registry cannot be read"),
    )
    machine = with_facts(no_torch_run(windows))
    assert finding_of("W01", machine).title.startswith("probably: ")
    finding_of("W01", with_facts(machine, driver__nvml=without_gpu().driver.nvml), "note")
    assert find("W01", with_facts(machine, platform__system="Linux")) is None


def test_windows_on_arm_without_torch() -> None:
    arm = {"platform__system": "Windows", "platform__machine": "ARM64"}
    finding_of("W02", with_facts(without_torch(without_gpu()), **arm))
    assert find("W02", with_facts(without_gpu(), **arm)) is None
    assert find("W02", without_torch(without_gpu())) is None
