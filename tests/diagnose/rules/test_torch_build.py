"""The torch that is installed: with CUDA or without, and whole or not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.diagnose.machines import (
    ANSWERED,
    SITE,
    bare,
    card,
    changed,
    healthy,
    in_container,
    in_wsl,
    install,
    no_torch_run,
)
from tests.diagnose.rules.machine_rows import alarms, cause, seen
from tests.diagnose.rules.torch_rows import finding_of, unimportable, variables
from tests.each import each

from transload.machine import Driver, Hardware, Machine, Step, Torch, TorchRun

ORIN = "NVIDIA Jetson AGX Orin Developer Kit, R36 (release), REVISION: 4.3"


def cpu(machine: Machine, version: str = "2.13.0+cpu", **facts: Any) -> Machine:
    """The machine with a torch without CUDA."""
    made = replace(install(version, ""), dist_version=version.partition("+")[0], **facts)
    run = TorchRun(ANSWERED, version, available=False, count=0, steps=(Step("import", ok=True), Step("cpu", ok=True)))
    return changed(machine, torch=Torch(installs=(made,)), torch_libraries=bare().torch_libraries, torch_run=run)


def test_torch_was_built_without_cuda() -> None:
    machine = cpu(healthy())
    assert cause(machine) == "T01"
    found = finding_of("T01", machine)
    assert found.evidence[0] == f"{SITE}/torch/version.py says 2.13.0+cpu: built without CUDA"
    assert "NVIDIA H200 has compute capability 9.0" in found.evidence
    assert any("pip install torch==" in line for line in found.fix)
    assert alarms(no_torch_run(machine)) == ["T01"]


@each(
    "machine",
    [
        bare(),
        changed(in_wsl(bare()), driver=bare().driver),  # a GPU of another vendor
        changed(cpu(healthy()), platform__system="Darwin"),
    ],
)
def test_a_cpu_build_is_right_without_an_nvidia_gpu(machine: Machine) -> None:
    assert alarms(machine) == []


def test_a_gpu_that_is_known_by_its_driver_alone_counts() -> None:
    in_vm = changed(cpu(healthy()), hardware=Hardware(pci=()))
    assert cause(in_vm) == "T01"
    assert cause(cpu(in_wsl(healthy()))) == "T01"
    assert cause(cpu(in_container(healthy()))) == "T01"


@each(("device", "said"), [(0x1B80, "T01"), (0x0FC6, ""), (0x06C0, "")])
def test_a_card_for_which_no_torch_was_ever_made_makes_a_cpu_build_right(device: int, said: str) -> None:
    machine = changed(cpu(healthy()), hardware__pci=(card(device, ""),), driver=Driver())
    assert cause(machine) == said
    if not said:
        assert finding_of("T01", machine, "note").title == "torch has no CUDA, and no build ever supported this card"


def test_a_card_of_no_known_chip_is_judged_with_doubt() -> None:
    machine = changed(cpu(healthy()), hardware__pci=(card(0x0391, ""),), driver=Driver())
    assert finding_of("T01", machine).title.startswith("probably: ")


def test_on_windows_pip_gives_a_cpu_build() -> None:
    machine = changed(cpu(healthy()), platform__system="Windows")
    assert cause(machine) == "T02"
    assert any("--index-url https://download.pytorch.org/whl/cu" in line for line in finding_of("T02", machine).fix)
    assert seen("T01", machine) is None


@each(("version", "code"), [("2.10.0+cpu", "T03"), ("2.9.1+cpu", "T03"), ("2.11.0+cpu", "T01")])
def test_on_arm_servers_pip_gave_a_cpu_build_until_2_10(version: str, code: str) -> None:
    assert cause(changed(cpu(healthy(), version), platform__machine="aarch64")) == code


def test_conda_chose_a_cpu_build() -> None:
    machine = cpu(healthy(), conda_build="cpu_generic_py312_0", installer="conda")
    assert cause(machine) == "T05"
    assert finding_of("T05", machine).title.startswith("probably: ")
    assert seen("T01", machine) is None


def test_another_package_brought_it() -> None:
    machine = cpu(healthy(), replaced_by=("ultralytics 8.3.0",))
    assert cause(machine) == "T04"
    found = finding_of("T04", machine)
    assert "it was installed together with ultralytics 8.3.0" in found.evidence
    assert any("constraints" in line for line in found.fix)
    assert seen("T01", machine) is None
    assert seen("T04", changed(machine, platform__system="Windows")) is None  # there pip has no other


def test_a_jetson_needs_wheels_of_its_own() -> None:
    machine = changed(cpu(healthy(), "2.9.1+cpu"), platform__machine="aarch64", hardware=Hardware((), tegra=ORIN))
    assert cause(machine) == "J01"
    assert any("jetson-ai-lab.io/jp6/cu126" in line for line in finding_of("J01", machine).fix)
    older = changed(machine, hardware__tegra="NVIDIA Jetson Nano, R32 (release), REVISION: 7.1")
    assert not any("--index-url" in line for line in finding_of("J01", older).fix)


# -- whole


def test_files_of_torch_are_gone() -> None:
    gone = (replace(install(), missing=("lib/libtorch_cuda.so: absent",)),)
    error = "ImportError: libtorch_cuda.so: cannot open shared object file: No such file or directory"
    machine = changed(unimportable(healthy(), error), torch__installs=gone)
    assert cause(machine) == "T09"
    assert "lib/libtorch_cuda.so: absent" in finding_of("T09", machine).evidence
    assert cause(changed(no_torch_run(healthy()), torch__installs=gone)) == "T09"
    assert seen("T09", changed(healthy(), torch__installs=gone)) is None  # it computes: the list is wrong


def test_a_broken_torch_of_pythonpath_is_left_out_of_it() -> None:
    gone = replace(install(), location="/srv/lib/torch", missing=("lib/libtorch_cuda.so: absent",))
    machine = variables(changed(no_torch_run(healthy()), torch__installs=(gone,)), PYTHONPATH="/a:/srv/lib")
    assert finding_of("T09", machine).fix[1] == "$ export PYTHONPATH=/a"
    assert any("pip install torch" in line for line in finding_of("T09", machine).fix)
    hidden = changed(machine, torch__installs=(gone, install()))
    assert not any("pip install" in line for line in finding_of("T09", hidden).fix)
    absent = changed(machine, torch__installs=(), torch__dangling=("/srv/torch-2.8.0.dist-info",))
    assert not any("PYTHONPATH" in line for line in finding_of("T09", variables(absent, PYTHONPATH=".")).fix)


def test_only_the_metadata_is_left() -> None:
    dist_info = f"{SITE}/torch-2.13.0.dist-info"
    machine = changed(no_torch_run(healthy()), torch=Torch(installs=(), dangling=(dist_info,)))
    assert cause(machine) == "T09"
    assert dist_info in finding_of("T09", machine).evidence[0]
    assert finding_of("T09", machine).fix[0] == f"$ rm -r {dist_info}"  # pip removes nothing without a RECORD


def test_without_a_gpu_a_broken_torch_is_replaced_by_the_cpu_build() -> None:
    gone = (replace(install(), missing=("lib/libtorch_cuda.so: absent",)),)
    machine = changed(no_torch_run(bare()), torch__installs=gone, python__packages={"torchvision": "0.28.0"})
    cpu = "torch==2.13.0 torchvision --index-url https://download.pytorch.org/whl/cpu"
    assert finding_of("T09", machine).fix == (f"$ /opt/venv/bin/python -m pip install --force-reinstall {cpu}",)


def test_libraries_of_another_size_are_no_fault_by_themselves() -> None:
    patched = (replace(install(), altered=("lib/libc10.so: 18 bytes instead of 20",)),)
    assert alarms(changed(no_torch_run(healthy()), torch__installs=patched)) == []
    assert seen("T09", changed(healthy(), torch__installs=patched)) is None


def test_a_version_file_that_cannot_be_read() -> None:
    garbage = (replace(install(), known=False, version="", cuda="", problem="binary data"),)
    error = "SyntaxError: source code cannot contain null bytes"
    assert cause(changed(unimportable(healthy(), error), torch__installs=garbage)) == "T09"
    assert alarms(changed(no_torch_run(healthy()), torch__installs=garbage)) == []
