"""Rules about running torch, and failures that no other rule explains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.diagnose.machines import (
    LIB,
    SITE,
    cuda_fails,
    cuinit_fails,
    healthy,
    install,
    no_torch_run,
    with_facts,
    without_gpu,
)
from tests.diagnose.rules.rule_helpers import alarms, cause, find
from tests.diagnose.rules.torch_machines import amd, crashed_or_hung, failing, finding_of, unimportable, with_variables
from tests.each import each

from transload.diagnose.report import judge_machine
from transload.machine import Machine, Step, Torch

BUSY = "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable"
OUT_OF_MEMORY = "AcceleratorError: CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"


def with_gpu(machine: Machine, **facts: Any) -> Machine:
    """The machine with some of the facts changed that NVML reports about its GPUs."""
    return with_facts(machine, driver__nvml__gpus=tuple(replace(gpu, **facts) for gpu in machine.driver.nvml.gpus))


# -- reserved, unlicensed, full, crashing


def test_card_in_exclusive_use_by_another_process() -> None:
    exclusive = with_gpu(healthy(), compute_mode="exclusive-process", processes=("python (4711), 3.2 GB",))
    machine = failing(exclusive, "kernel", BUSY)
    assert cause(machine) == "S05"
    finding = finding_of("S05", machine)
    assert "in use by python (4711), 3.2 GB" in finding.evidence
    assert "$ sudo nvidia-smi -c 0" in finding.fix
    assert finding_of("S05", no_torch_run(exclusive)).title.startswith("probably: ")
    assert alarms(exclusive) == []  # torch ran, so this process has the card


def test_compute_mode_excludes_this_process() -> None:
    machine = with_gpu(no_torch_run(healthy()), compute_mode="prohibited")
    assert finding_of("S05", machine).title == "the card's compute mode excludes this process"
    assert find("S05", with_gpu(no_torch_run(healthy()), compute_mode="exclusive-process")) is None
    by_cuda = with_facts(failing(healthy(), "kernel", BUSY), driver__nvml__gpus=())
    prohibited = tuple(replace(gpu, compute_mode=2) for gpu in by_cuda.driver.cuda.gpus)
    assert cause(with_facts(by_cuda, driver__cuda__gpus=prohibited)) == "S05"


def test_busy_card_without_a_reason_is_only_a_symptom() -> None:
    assert cause(failing(healthy(), "kernel", BUSY)) == "X12"


def test_vgpu_without_a_licence() -> None:
    machine = with_gpu(healthy(), virtualization="vgpu", licence="unlicensed")
    assert alarms(machine) == ["S06"]
    finding_of("S06", machine, "warning")
    assert cause(failing(machine, "kernel", BUSY)) == "S06"
    assert alarms(with_gpu(healthy(), virtualization="vgpu", licence="licensed")) == []


def test_gpu_memory_is_full() -> None:
    full = with_gpu(healthy(), free=100 << 20, processes=("python (4711), 139 GB",))
    machine = failing(full, "kernel", OUT_OF_MEMORY)
    assert cause(machine) == "X06"
    assert "python (4711), 139 GB is using NVIDIA H200" in finding_of("X06", machine).evidence
    assert finding_of("X06", machine).title == "the GPU's memory is full"
    assert alarms(full) == []
    assert finding_of("X06", failing(healthy(), "kernel", OUT_OF_MEMORY)).title.startswith("probably: ")


def test_out_of_memory_by_a_limit_on_the_address_space() -> None:
    machine = with_facts(failing(healthy(), "kernel", OUT_OF_MEMORY), platform__address_space=16 << 30)
    assert finding_of("X06", machine).title == "a limit on the address space leaves CUDA no room"
    assert "$ ulimit -v unlimited" in finding_of("X06", machine).fix


@each("error", ["an illegal memory access was encountered", "unspecified launch failure"])
def test_small_kernel_crashes(error: str) -> None:
    machine = failing(healthy(), "kernel", f"RuntimeError: CUDA error: {error}")
    assert cause(machine) == "X05"
    assert find("X05", failing(healthy(), "kernel", "RuntimeError: boom")) is None


def test_two_copies_of_one_library_are_loaded() -> None:
    paths = (f"{SITE}/nvidia/cudnn/lib/libcudnn_ops.so.9", "/usr/lib/libcudnn_ops.so.9", f"{LIB}/libcuda.so.580")
    broken = failing(healthy(), "convolution", "RuntimeError: boom", torch_run__libraries=paths)
    assert cause(broken) == "X07"
    assert finding_of("X07", broken).title.startswith("probably: ")
    assert find("X07", with_facts(healthy(), torch_run__libraries=paths)) is None
    assert cause(failing(healthy(), "convolution", "RuntimeError: boom", torch_run__libraries=paths[:1])) == "X12"


# -- symptoms


def test_torch_sees_no_gpu_for_an_unknown_reason() -> None:
    machine = cuda_fails(healthy(), warning="CUDA initialization: CUDA unknown error - this may be due to …")
    machine = with_facts(machine, torch_run__libraries=("/opt/other/libcuda.so.1",))
    assert cause(machine) == "X09"
    finding = finding_of("X09", machine)
    assert finding.evidence[0] == "the driver starts and finds 1 GPU"
    assert any(line.startswith("torch loaded /opt/other/libcuda.so.1") for line in finding.evidence)
    with_path = finding_of("X09", with_variables(machine, LD_LIBRARY_PATH="/opt/other"))
    assert "$ unset LD_LIBRARY_PATH" in with_path.fix


@each("machine", [cuinit_fails(healthy(), 999), healthy(), no_torch_run(healthy()), without_gpu()])
def test_torch_is_not_blamed_for_the_driver(machine: Machine) -> None:
    assert find("X09", machine) is None


def test_rocm_build_sees_no_gpu() -> None:
    hip = replace(install("2.13.0+rocm7.2", ""), hip="7.2")
    machine = with_facts(amd(), torch=Torch(installs=(hip,)), torch_run__hip="7.2", torch_run__available=False)
    assert cause(machine) == "X09"
    assert find("X09", with_facts(machine, torch_run__available=True)) is None


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
def test_torch_cannot_be_imported_for_an_unknown_reason(error: str, fix: str) -> None:
    machine = unimportable(healthy(), error)
    assert cause(machine) == "X10"
    lines = finding_of("X10", machine).fix
    assert any(fix in line for line in lines)
    assert not any("install somebodys" in line for line in lines)  # anyone may have registered that name on PyPI


def test_cause_mutes_the_symptom() -> None:
    error = "ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory"
    diagnosis = judge_machine(unimportable(healthy(), error))
    assert diagnosis.cause is not None
    assert diagnosis.cause.code == "L04"
    assert [(muted.finding.code, muted.because) for muted in diagnosis.muted] == [("X10", "L04")]


def test_torch_crashes_or_hangs() -> None:
    crashed = crashed_or_hung(healthy(), "crashed", "SIGILL in import")
    assert cause(crashed) == "X11"
    assert finding_of("X11", crashed).title == "torch crashes in import"
    hung = crashed_or_hung(healthy(), "hung", "hung in kernel after 30.0 s", "kernel")
    assert finding_of("X11", hung).title == "probably: torch hangs in kernel"
    assert find("X10", crashed) is None
    assert find("X12", hung) is None


@each("step", ["kernel", "matmul", "convolution", "available"])
def test_torch_fails_for_an_unknown_reason(step: str) -> None:
    assert cause(failing(healthy(), step, "RuntimeError: boom")) == "X12"


def test_gpu_computes_wrong_results() -> None:
    machine = failing(healthy(), "matmul", "ArithmeticError: the result is 1.0, not 524288")
    assert finding_of("X12", machine).title == "the GPU computes wrong results"


def test_torch_fails_even_on_the_cpu() -> None:
    steps = (Step("import", ok=True), Step("cpu", ok=False, error="RuntimeError: could not create a primitive"))
    machine = with_facts(without_gpu(), torch_run__steps=steps)
    assert cause(machine) == "X12"
    assert finding_of("X12", machine).title == "torch cannot compute even on the CPU"
