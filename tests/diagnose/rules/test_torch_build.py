"""Rules about the installed torch: built with CUDA or without, and complete or not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.diagnose.machines import (
    ANSWERED,
    SITE,
    healthy,
    in_container,
    in_wsl,
    install,
    no_torch_run,
    pci_gpu,
    with_facts,
    without_gpu,
)
from tests.diagnose.rules.rule_helpers import alarms, cause, find
from tests.diagnose.rules.torch_machines import finding_of, unimportable, with_variables
from tests.each import each

from transload.machine import Driver, Hardware, Machine, Step, Torch, TorchRun

ORIN = "NVIDIA Jetson AGX Orin Developer Kit, R36 (release), REVISION: 4.3"


def with_cpu_build(machine: Machine, version: str = "2.13.0+cpu", **facts: Any) -> Machine:
    """The machine with a CPU build of torch."""
    installed = replace(install(version, ""), dist_version=version.partition("+")[0], **facts)
    run = TorchRun(ANSWERED, version, available=False, count=0, steps=(Step("import", ok=True), Step("cpu", ok=True)))
    return with_facts(
        machine, torch=Torch(installs=(installed,)), torch_libraries=without_gpu().torch_libraries, torch_run=run
    )


def test_torch_was_built_without_cuda() -> None:
    machine = with_cpu_build(healthy())
    assert cause(machine) == "T01"
    finding = finding_of("T01", machine)
    assert finding.evidence[0] == f"{SITE}/torch/version.py says 2.13.0+cpu: built without CUDA"
    assert "NVIDIA H200 has compute capability 9.0" in finding.evidence
    assert any("pip install torch==" in line for line in finding.fix)
    assert alarms(no_torch_run(machine)) == ["T01"]


@each(
    "machine",
    [
        without_gpu(),
        with_facts(in_wsl(without_gpu()), driver=without_gpu().driver),  # a GPU of another vendor
        with_facts(with_cpu_build(healthy()), platform__system="Darwin"),
    ],
)
def test_cpu_build_without_an_nvidia_gpu_raises_no_alarm(machine: Machine) -> None:
    assert alarms(machine) == []


def test_cpu_build_is_the_cause_in_a_vm_wsl_or_a_container() -> None:
    in_vm = with_facts(with_cpu_build(healthy()), hardware=Hardware(pci=()))
    assert cause(in_vm) == "T01"
    assert cause(with_cpu_build(in_wsl(healthy()))) == "T01"
    assert cause(with_cpu_build(in_container(healthy()))) == "T01"


@each(("device", "code"), [(0x1B80, "T01"), (0x0FC6, ""), (0x06C0, "")])
def test_cpu_build_is_right_for_a_card_that_no_build_ever_supported(device: int, code: str) -> None:
    machine = with_facts(with_cpu_build(healthy()), hardware__pci=(pci_gpu(device, ""),), driver=Driver())
    assert cause(machine) == code
    if not code:
        assert finding_of("T01", machine, "note").title == "torch has no CUDA, and no build ever supported this card"


def test_cpu_build_is_only_a_probable_cause_for_an_unknown_chip() -> None:
    machine = with_facts(with_cpu_build(healthy()), hardware__pci=(pci_gpu(0x0391, ""),), driver=Driver())
    assert finding_of("T01", machine).title.startswith("probably: ")


def test_pip_installs_a_cpu_build_on_windows() -> None:
    machine = with_facts(with_cpu_build(healthy()), platform__system="Windows")
    assert cause(machine) == "T02"
    assert any("--index-url https://download.pytorch.org/whl/cu" in line for line in finding_of("T02", machine).fix)
    assert find("T01", machine) is None


@each(("version", "code"), [("2.10.0+cpu", "T03"), ("2.9.1+cpu", "T03"), ("2.11.0+cpu", "T01")])
def test_pip_installed_a_cpu_build_on_arm_servers_until_2_10(version: str, code: str) -> None:
    assert cause(with_facts(with_cpu_build(healthy(), version), platform__machine="aarch64")) == code


def test_conda_installed_a_cpu_build() -> None:
    machine = with_cpu_build(healthy(), conda_build="cpu_generic_py312_0", installer="conda")
    assert cause(machine) == "T05"
    assert finding_of("T05", machine).title.startswith("probably: ")
    assert find("T01", machine) is None


def test_another_package_brought_in_a_cpu_build() -> None:
    machine = with_cpu_build(healthy(), replaced_by=("ultralytics 8.3.0",))
    assert cause(machine) == "T04"
    finding = finding_of("T04", machine)
    assert "it was installed together with ultralytics 8.3.0" in finding.evidence
    assert any("constraints" in line for line in finding.fix)
    assert find("T01", machine) is None
    assert find("T04", with_facts(machine, platform__system="Windows")) is None  # where pip has only CPU builds


def test_jetson_needs_jetson_wheels() -> None:
    machine = with_facts(
        with_cpu_build(healthy(), "2.9.1+cpu"), platform__machine="aarch64", hardware=Hardware((), tegra=ORIN)
    )
    assert cause(machine) == "J01"
    assert any("jetson-ai-lab.io/jp6/cu126" in line for line in finding_of("J01", machine).fix)
    older = with_facts(machine, hardware__tegra="NVIDIA Jetson Nano, R32 (release), REVISION: 7.1")
    assert not any("--index-url" in line for line in finding_of("J01", older).fix)


# -- complete or not


def test_missing_files_of_torch() -> None:
    incomplete = (replace(install(), missing=("lib/libtorch_cuda.so: absent",)),)
    error = "ImportError: libtorch_cuda.so: cannot open shared object file: No such file or directory"
    machine = with_facts(unimportable(healthy(), error), torch__installs=incomplete)
    assert cause(machine) == "T09"
    assert "lib/libtorch_cuda.so: absent" in finding_of("T09", machine).evidence
    assert cause(with_facts(no_torch_run(healthy()), torch__installs=incomplete)) == "T09"
    assert (
        find("T09", with_facts(healthy(), torch__installs=incomplete)) is None
    )  # torch computes, so the list is wrong


def test_fix_removes_an_incomplete_torch_from_pythonpath() -> None:
    incomplete = replace(install(), location="/srv/lib/torch", missing=("lib/libtorch_cuda.so: absent",))
    machine = with_variables(
        with_facts(no_torch_run(healthy()), torch__installs=(incomplete,)), PYTHONPATH="/a:/srv/lib"
    )
    assert finding_of("T09", machine).fix[1] == "$ export PYTHONPATH=/a"
    assert any("pip install torch" in line for line in finding_of("T09", machine).fix)
    hidden = with_facts(machine, torch__installs=(incomplete, install()))
    assert not any("pip install" in line for line in finding_of("T09", hidden).fix)
    absent = with_facts(machine, torch__installs=(), torch__dangling=("/srv/torch-2.8.0.dist-info",))
    assert not any("PYTHONPATH" in line for line in finding_of("T09", with_variables(absent, PYTHONPATH=".")).fix)


def test_only_the_metadata_is_left() -> None:
    dist_info = f"{SITE}/torch-2.13.0.dist-info"
    machine = with_facts(no_torch_run(healthy()), torch=Torch(installs=(), dangling=(dist_info,)))
    assert cause(machine) == "T09"
    assert dist_info in finding_of("T09", machine).evidence[0]
    assert finding_of("T09", machine).fix[0] == f"$ rm -r {dist_info}"  # pip removes nothing without a RECORD


def test_fix_for_an_incomplete_torch_without_a_gpu_is_the_cpu_build() -> None:
    incomplete = (replace(install(), missing=("lib/libtorch_cuda.so: absent",)),)
    machine = with_facts(
        no_torch_run(without_gpu()), torch__installs=incomplete, python__packages={"torchvision": "0.28.0"}
    )
    packages = "torch==2.13.0 torchvision --index-url https://download.pytorch.org/whl/cpu"
    assert finding_of("T09", machine).fix == (f"$ /opt/venv/bin/python -m pip install --force-reinstall {packages}",)


def test_libraries_of_another_size_alone_raise_no_alarm() -> None:
    patched = (replace(install(), altered=("lib/libc10.so: 18 bytes instead of 20",)),)
    assert alarms(with_facts(no_torch_run(healthy()), torch__installs=patched)) == []
    assert find("T09", with_facts(healthy(), torch__installs=patched)) is None


def test_unreadable_version_file_is_an_error_only_where_the_import_fails() -> None:
    garbage = (replace(install(), known=False, version="", cuda="", problem="binary data"),)
    error = "SyntaxError: source code cannot contain null bytes"
    assert cause(with_facts(unimportable(healthy(), error), torch__installs=garbage)) == "T09"
    assert alarms(with_facts(no_torch_run(healthy()), torch__installs=garbage)) == []
