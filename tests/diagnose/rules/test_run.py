"""Torch at work, and what nothing explains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.diagnose.machines import LIB, SITE, bare, changed, dead, healthy, install, no_torch_run, refused
from tests.diagnose.rules.machine_rows import alarms, cause, seen
from tests.diagnose.rules.torch_rows import amd, ended, failing, finding_of, unimportable, variables
from tests.each import each

from transload.diagnose.report import judge_machine
from transload.machine import Machine, Step, Torch

BUSY = "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable"
MEMORY = "AcceleratorError: CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"


def gpu(machine: Machine, **facts: Any) -> Machine:
    """The machine with NVML's word on its card changed."""
    return changed(machine, driver__nvml__gpus=tuple(replace(each, **facts) for each in machine.driver.nvml.gpus))


# -- reserved, unlicensed, full


def test_a_card_that_another_process_has_for_itself() -> None:
    exclusive = gpu(healthy(), compute_mode="exclusive-process", processes=("python (4711), 3.2 GB",))
    machine = failing(exclusive, "kernel", BUSY)
    assert cause(machine) == "S05"
    found = finding_of("S05", machine)
    assert "in use by python (4711), 3.2 GB" in found.evidence
    assert "$ sudo nvidia-smi -c 0" in found.fix
    assert finding_of("S05", no_torch_run(exclusive)).title.startswith("probably: ")
    assert alarms(exclusive) == []  # it is ours


def test_a_card_that_is_closed() -> None:
    machine = gpu(no_torch_run(healthy()), compute_mode="prohibited")
    assert finding_of("S05", machine).title == "the card's compute mode excludes this process"
    assert seen("S05", gpu(no_torch_run(healthy()), compute_mode="exclusive-process")) is None
    by_cuda = changed(failing(healthy(), "kernel", BUSY), driver__nvml__gpus=())
    closed = tuple(replace(each, compute_mode=2) for each in by_cuda.driver.cuda.gpus)
    assert cause(changed(by_cuda, driver__cuda__gpus=closed)) == "S05"


def test_busy_without_a_reason_is_only_a_symptom() -> None:
    assert cause(failing(healthy(), "kernel", BUSY)) == "X12"


def test_a_virtual_gpu_without_a_licence() -> None:
    machine = gpu(healthy(), virtualization="vgpu", licence="unlicensed")
    assert alarms(machine) == ["S06"]
    finding_of("S06", machine, "warning")
    assert cause(failing(machine, "kernel", BUSY)) == "S06"
    assert alarms(gpu(healthy(), virtualization="vgpu", licence="licensed")) == []


def test_the_cards_memory_is_used_up() -> None:
    full = gpu(healthy(), free=100 << 20, processes=("python (4711), 139 GB",))
    machine = failing(full, "kernel", MEMORY)
    assert cause(machine) == "X06"
    assert "python (4711), 139 GB is using NVIDIA H200" in finding_of("X06", machine).evidence
    assert finding_of("X06", machine).title == "the GPU's memory is full"
    assert alarms(full) == []
    assert finding_of("X06", failing(healthy(), "kernel", MEMORY)).title.startswith("probably: ")


def test_no_room_for_addresses() -> None:
    machine = changed(failing(healthy(), "kernel", MEMORY), platform__address_space=16 << 30)
    assert finding_of("X06", machine).title == "a limit on the address space leaves CUDA no room"
    assert "$ ulimit -v unlimited" in finding_of("X06", machine).fix


@each("words", ["an illegal memory access was encountered", "unspecified launch failure"])
def test_a_small_kernel_dies(words: str) -> None:
    machine = failing(healthy(), "kernel", f"RuntimeError: CUDA error: {words}")
    assert cause(machine) == "X05"
    assert seen("X05", failing(healthy(), "kernel", "RuntimeError: boom")) is None


def test_two_versions_of_one_library() -> None:
    paths = (f"{SITE}/nvidia/cudnn/lib/libcudnn_ops.so.9", "/usr/lib/libcudnn_ops.so.9", f"{LIB}/libcuda.so.580")
    broken = failing(healthy(), "convolution", "RuntimeError: boom", torch_run__libraries=paths)
    assert cause(broken) == "X07"
    assert finding_of("X07", broken).title.startswith("probably: ")
    assert seen("X07", changed(healthy(), torch_run__libraries=paths)) is None
    assert cause(failing(healthy(), "convolution", "RuntimeError: boom", torch_run__libraries=paths[:1])) == "X12"


# -- symptoms


def test_torch_sees_no_gpu_and_nobody_knows_why() -> None:
    machine = dead(healthy(), warning="CUDA initialization: CUDA unknown error - this may be due to …")
    machine = changed(machine, torch_run__libraries=("/opt/other/libcuda.so.1",))
    assert cause(machine) == "X09"
    found = finding_of("X09", machine)
    assert found.evidence[0] == "the driver starts and finds 1 GPU"
    assert any(line.startswith("torch loaded /opt/other/libcuda.so.1") for line in found.evidence)
    with_path = finding_of("X09", variables(machine, LD_LIBRARY_PATH="/opt/other"))
    assert "$ unset LD_LIBRARY_PATH" in with_path.fix


@each("machine", [refused(healthy(), 999), healthy(), no_torch_run(healthy()), bare()])
def test_torch_is_not_blamed_for_the_driver(machine: Machine) -> None:
    assert seen("X09", machine) is None


def test_a_rocm_build_sees_no_gpu() -> None:
    hip = replace(install("2.13.0+rocm7.2", ""), hip="7.2")
    machine = changed(amd(), torch=Torch(installs=(hip,)), torch_run__hip="7.2", torch_run__available=False)
    assert cause(machine) == "X09"
    assert seen("X09", changed(machine, torch_run__available=True)) is None


@each(
    ("error", "fix"),
    [
        ("ModuleNotFoundError: No module named 'typing_extensions'", "pip install typing-extensions"),
        ("ModuleNotFoundError: No module named 'yaml'", "pip install pyyaml"),
        ("ModuleNotFoundError: No module named 'distutils'", "pip install setuptools"),
        ("ModuleNotFoundError: No module named 'sqlite3'", "Use another Python, or build this one again"),
        (
            "ModuleNotFoundError: No module named 'somebodys'",
            "Install the package that provides the Python module somebodys",
        ),
        ("ImportError: cannot import name 'x' from 'torch'", "pip install torch=="),
        ("ModuleNotFoundError: No module named '_ctypes'", "Use another Python, or build this one again"),
        ("FileNotFoundError: [Errno 2] No such file or directory", "$ cd"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/x'", "pip install torch=="),
    ],
)
def test_torch_cannot_be_imported_and_nobody_knows_why(error: str, fix: str) -> None:
    machine = unimportable(healthy(), error)
    assert cause(machine) == "X10"
    lines = finding_of("X10", machine).fix
    assert any(fix in line for line in lines)
    assert not any("install somebodys" in line for line in lines)  # anybody may have registered that name


def test_an_explanation_takes_the_place_of_a_symptom() -> None:
    error = "ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory"
    diagnosis = judge_machine(unimportable(healthy(), error))
    assert diagnosis.cause is not None
    assert diagnosis.cause.code == "L04"
    assert [(muted.finding.code, muted.because) for muted in diagnosis.muted] == [("X10", "L04")]


def test_torch_crashes_or_hangs() -> None:
    crashed = ended(healthy(), "crashed", "SIGILL in import")
    assert cause(crashed) == "X11"
    assert finding_of("X11", crashed).title == "torch crashes in import"
    hung = ended(healthy(), "hung", "hung in kernel after 30.0 s", "kernel")
    assert finding_of("X11", hung).title == "probably: torch hangs in kernel"
    assert seen("X10", crashed) is None
    assert seen("X12", hung) is None


@each("step", ["kernel", "matmul", "convolution", "available"])
def test_torch_fails_and_nobody_knows_why(step: str) -> None:
    assert cause(failing(healthy(), step, "RuntimeError: boom")) == "X12"


def test_wrong_results() -> None:
    machine = failing(healthy(), "matmul", "ArithmeticError: the result is 1.0, not 524288")
    assert finding_of("X12", machine).title == "the GPU computes wrong results"


def test_not_even_the_cpu() -> None:
    steps = (Step("import", ok=True), Step("cpu", ok=False, error="RuntimeError: could not create a primitive"))
    machine = changed(bare(), torch_run__steps=steps)
    assert cause(machine) == "X12"
    assert finding_of("X12", machine).title == "torch cannot compute even on the CPU"
