"""How a real torch fails with broken drivers, and what the doctor reports about these failures and torch's files.

Rules and pages quote these messages. Needs a torch built with CUDA and no driver: ``make test-cuda-build``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.diagnose.real_torch import (
    CUDA,
    CUDA_NUMBER,
    MAJOR,
    SITE,
    CudaResult,
    TorchProcess,
    make_venv,
    skip_reason,
    start_torch,
)
from tests.diagnose.scenarios import STUBS, Scenario, cuda_scenarios, make_host, named, probe_host
from tests.elf_forge import NATIVE, library
from tests.fake_driver import fake_libcuda, fake_nvml, fills, returns, u32

from transload.diagnose.children import Child
from transload.diagnose.host import Host
from transload.diagnose.probes import probe
from transload.diagnose.probes.python import question, torch_run
from transload.diagnose.report import judge_machine
from transload.machine import Machine, TorchInstall

if skip_reason():
    pytest.skip(skip_reason(), allow_module_level=True)

DOWNLOAD = "http://www.nvidia.com/Download/index.aspx"
NO_DRIVER = (
    "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from "
    f"{DOWNLOAD}"
)
NO_GPU = "No CUDA GPUs are available"
NOT_INITIALIZED = "CUDA driver initialization failed, you might not have a CUDA gpu."
UNKNOWN_ERROR = (
    "CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env variable "
    "CUDA_VISIBLE_DEVICES after program start. Setting the available devices to be zero."
)
UNEXPECTED = (
    "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that "
    "might have already set an error? Error "
)
NAMES = {
    1: "invalid argument",
    2: "out of memory",
    34: "CUDA driver is a stub library",
    46: "CUDA-capable device(s) is/are busy or unavailable",
    101: "invalid device ordinal",
    222: "the provided PTX was compiled with an unsupported toolchain.",
    304: "OS call failed or operation not supported on this OS",
    800: "operation not permitted",
    802: "system not yet initialized",
    803: "system has unsupported display driver / cuda driver combination",
    804: "forward compatibility was attempted on non supported HW",
    805: "MPS client failed to connect to the MPS control daemon or the MPS server",
    807: "MPS server is not ready to accept new MPS client requests",
}
OLD = 1000 * (MAJOR - 1) + 80
"""The version of a driver for the previous major release of CUDA."""


def too_old(version: int) -> str:
    return (
        f"The NVIDIA driver on your system is too old (found version {version}). Please update your GPU driver by "
        f"downloading and installing a new version from the URL: {DOWNLOAD} Alternatively, go to: https://pytorch.org "
        "to install a PyTorch version that has been compiled with your version of the CUDA driver."
    )


def older(version: int) -> int:
    """A version of the driver that is older than CUDA 13, which scenarios assume, for the CUDA of this torch."""
    return version - 1000 * (13 - MAJOR)


def unexpected(code: int) -> str:
    return f"{UNEXPECTED}{code}: {NAMES[code]}"


@pytest.fixture(scope="module")
def torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchProcess]:
    with start_torch(tmp_path_factory.mktemp("driver")) as process:
        yield process


def assert_warns_and_fails(result: CudaResult, message: str) -> None:
    """Assert that ``is_available()`` warns, and that the use of CUDA fails, both with this message."""
    assert not result.available
    assert result.error == f"RuntimeError: {message}"
    assert [warning.partition(" (Triggered internally at ")[0] for warning in result.warnings] == [
        f"CUDA initialization: {message}"
    ]


# -- results of cuInit


@pytest.mark.parametrize("code", [2, 34, 46, 101, 222, 304, 800, 802, 803, 804, 805, 807])
def test_message_has_the_number_and_name_of_most_codes(torch: TorchProcess, code: int) -> None:
    assert_warns_and_fails(torch.query(libcuda=fake_libcuda(init=code, version=CUDA_NUMBER)), unexpected(code))


@pytest.mark.parametrize(("code", "text"), [(3, NOT_INITIALIZED), (35, too_old(CUDA_NUMBER)), (999, UNKNOWN_ERROR)])
def test_message_of_some_codes_has_no_number(torch: TorchProcess, code: int, text: str) -> None:
    assert_warns_and_fails(torch.query(libcuda=fake_libcuda(init=code, version=CUDA_NUMBER)), text)


@pytest.mark.parametrize(
    ("libcuda", "error"),
    [
        pytest.param(b"", NO_DRIVER, id="no libcuda"),
        pytest.param(b"this is no library\n", NO_DRIVER, id="not a library"),
        pytest.param(library(soname="libcuda.so.1"), NO_DRIVER, id="no symbols"),
        pytest.param(library(soname="libcuda.so.1", needed=["libnone.so"]), NO_DRIVER, id="missing dependency"),
        pytest.param(fake_libcuda(init=999, version=0), NO_DRIVER, id="version 0"),
        pytest.param(fake_libcuda(init=100, version=CUDA_NUMBER), NO_GPU, id="cuInit 100"),
    ],
)
def test_no_warning_without_driver_or_gpu_until_cuda_is_used(torch: TorchProcess, libcuda: bytes, error: str) -> None:
    assert torch.query(libcuda=libcuda) == CudaResult(available=False, count=0, error=f"RuntimeError: {error}")


# -- driver versions


def test_driver_for_the_previous_cuda_major_is_too_old(torch: TorchProcess) -> None:
    assert_warns_and_fails(torch.query(libcuda=fake_libcuda(version=OLD)), too_old(OLD))


@pytest.mark.parametrize("code", [100, 802, 803, 999])
def test_old_driver_is_reported_instead_of_other_errors(torch: TorchProcess, code: int) -> None:
    assert_warns_and_fails(torch.query(libcuda=fake_libcuda(init=code, version=OLD)), too_old(OLD))


@pytest.mark.parametrize("version", [1000 * MAJOR, CUDA_NUMBER, CUDA_NUMBER + 30])
def test_shim_is_reported_as_too_old_whatever_its_version(torch: TorchProcess, version: int) -> None:
    every_attribute = {"cuDeviceGetAttribute": fills(0, u32(1))}
    assert_warns_and_fails(
        torch.query(libcuda=fake_libcuda(version=version, overrides=every_attribute)), too_old(version)
    )


def test_driver_of_the_same_major_is_initialized(torch: TorchProcess) -> None:
    assert_warns_and_fails(torch.query(libcuda=fake_libcuda(init=803, version=1000 * MAJOR)), unexpected(803))


def test_incomplete_shims_fail_with_driver_errors(torch: TorchProcess) -> None:
    no_attribute, no_table = fake_libcuda(version=CUDA_NUMBER), {"cuGetExportTable": returns(1)}
    assert_warns_and_fails(torch.query(libcuda=no_attribute), NOT_INITIALIZED)
    assert_warns_and_fails(torch.query(libcuda=fake_libcuda(version=CUDA_NUMBER, overrides=no_table)), unexpected(1))


# -- NVML


def test_device_count_comes_from_nvml_even_if_cuinit_fails(torch: TorchProcess) -> None:
    result = torch.query(libcuda=fake_libcuda(init=802, version=CUDA_NUMBER), nvml=fake_nvml())
    assert result.count == 1
    assert_warns_and_fails(result, unexpected(802))


def test_nvml_based_check_reports_unusable_cuda_as_available(torch: TorchProcess) -> None:
    libcuda = fake_libcuda(init=802, version=CUDA_NUMBER)
    result = torch.query(libcuda=libcuda, nvml=fake_nvml(), PYTORCH_NVML_BASED_CUDA_CHECK="1")
    assert result == CudaResult(available=True, count=1, error=f"RuntimeError: {unexpected(802)}")


# -- diagnoses


@pytest.fixture(scope="module")
def installed() -> Machine:
    """This machine, probed with nothing but PATH and HOME in the environment."""
    return probe(sys.executable, host=Host(environ={"PATH": os.environ.get("PATH", ""), "HOME": "/nonexistent"}))


def first_install(machine: Machine) -> TorchInstall:
    assert machine.torch.first
    return machine.torch.first


def error_of(machine: Machine, step: str) -> str:
    result = machine.torch_run.step(step)
    assert result, machine.torch_run
    return result.error


MESSAGES = {
    "no libcuda": NO_DRIVER,
    "libcuda is a text file": NO_DRIVER,
    "driver older than the build": too_old(older(12080)),
    "cuInit 3": NOT_INITIALIZED,
    "cuInit 35": too_old(older(12080)),
    "cuInit 46, exclusive mode": unexpected(46),
    "cuInit 100, hidden by a variable": NO_GPU,
    "cuInit 100, no access to the GPU": NO_GPU,
    "cuInit 101, duplicate id": unexpected(101),
    "cuInit 222": unexpected(222),
    "cuInit 304": unexpected(304),
    "cuInit 802": unexpected(802),
    "cuInit 803": unexpected(803),
    "cuInit 804": too_old(12020) if MAJOR > 12 else unexpected(804),
    "cuInit 805": unexpected(805),
    "cuInit 807": unexpected(807),
    "cuInit 999, no uvm": UNKNOWN_ERROR,
}
"""Scenario → the error of torch. If the driver is also too old, torch reports only that."""


@pytest.mark.parametrize("name", MESSAGES)
def test_doctor_names_the_cause_behind_each_torch_message(installed: Machine, tmp_path: Path, name: str) -> None:
    scenario = cuda_scenarios()[name]["host"]
    if scenario.version < 13000:
        scenario = replace(scenario, version=older(scenario.version))
    assert_diagnosed(scenario, MESSAGES[name], installed, tmp_path)


def test_stub_library_is_named_as_the_cause(installed: Machine, tmp_path: Path) -> None:
    stub = fake_libcuda(init=34, overrides={"cuDriverGetVersion": returns(34)})
    scenario = Scenario("U04", environ={"LD_LIBRARY_PATH": STUBS}, more={f"{STUBS}/libcuda.so.1": stub})
    assert_diagnosed(scenario, unexpected(34), installed, tmp_path)


def test_shim_is_not_diagnosed_as_an_old_driver(installed: Machine, tmp_path: Path) -> None:
    every_attribute = fake_libcuda(version=CUDA_NUMBER, overrides={"cuDeviceGetAttribute": fills(0, u32(1))})
    assert_diagnosed(Scenario("V05", cuda=every_attribute), too_old(CUDA_NUMBER), installed, tmp_path)


def assert_diagnosed(scenario: Scenario, message: str, installed: Machine, root: Path) -> None:
    """Assert that torch fails with ``message`` in a scenario, and that the doctor names the cause."""
    host = make_host(scenario, "host", root, NATIVE)
    torch_host = replace(host, environ={**host.environ, "LD_LIBRARY_PATH": ":".join(host.folders)})
    with Child(replace(question(torch_host), python=sys.executable), seconds=60) as child:
        machine = replace(probe_host(host), torch_run=torch_run(child.outcome()))
    assert error_of(machine, "init") == f"RuntimeError: {message}"
    installed_facts = {name: getattr(installed, name) for name in ("python", "torch", "torch_libraries", "extensions")}
    diagnosis = judge_machine(replace(machine, **installed_facts))
    findings = [(finding.code, finding.title, finding.evidence) for finding in diagnosis.findings]
    assert named(diagnosis) in scenario.truth.split("|"), findings


def test_cuda_build_without_a_gpu_is_not_a_fault(installed: Machine) -> None:
    if installed.hardware.present:
        pytest.skip("this machine has an NVIDIA GPU")
    diagnosis = judge_machine(installed)
    assert (diagnosis.status, diagnosis.cause, installed.problems) == ("no-gpu", None, {})
    assert error_of(installed, "init") == f"RuntimeError: {NO_DRIVER}"


# -- files of the wheel


def test_version_and_cuda_are_read_from_the_wheel(installed: Machine, torch: TorchProcess) -> None:
    install = first_install(installed)
    assert (install.version, install.cuda) == (torch.build.version, CUDA)
    assert install.location == str(Path(torch.build.file).parent)
    assert install.dist_version == install.version.partition("+")[0]
    assert (install.missing, install.unlisted, install.known) == ((), (), True)


def test_architectures_are_read_from_the_binary(installed: Machine, torch: TorchProcess) -> None:
    libraries = installed.torch_libraries
    assert libraries.architectures == tuple(torch.build.architectures)
    assert isinstance(libraries.cubins, dict)
    assert {*torch.build.architectures} <= {*libraries.cubins}


def test_resolved_libraries_are_those_the_loader_mapped(installed: Machine) -> None:
    mapped = {Path(path).name: os.path.realpath(path) for path in installed.torch_run.libraries}
    needed = {library.name: os.path.realpath(library.path) for library in installed.torch_libraries.needed}
    imported = (
        needed.keys() & mapped.keys()
    )  # torch 2.1 loads libcusolver, which libtorch_cuda_linalg needs, at first use
    assert len(imported) > 8
    assert {name: needed[name] for name in imported if needed[name] != mapped[name]} == {}


def test_intact_wheel_has_no_library_problems(installed: Machine) -> None:
    libraries = installed.torch_libraries
    assert [library for library in libraries.needed if library.path != library.expected] == []
    assert (libraries.unresolved, libraries.overlaps, libraries.split_cudnn) == ((), (), ())


@pytest.mark.parametrize("pattern", ["libcudnn.so.*", "libnccl.so.*"])
def test_missing_library_is_named(tmp_path: Path, pattern: str) -> None:
    library = next(iter(SITE.glob(f"nvidia/*/lib/{pattern}")))
    machine = probe(str(make_venv(tmp_path, without=library)), host=Host(environ={"HOME": str(tmp_path)}))
    if not (error := error_of(machine, "import")):
        pytest.skip(f"the system has a {library.name} outside of torch")
    assert error == f"ImportError: {library.name}: cannot open shared object file: No such file or directory"
    diagnosis = judge_machine(machine)
    assert diagnosis.cause
    assert diagnosis.cause.code == "L04"
    assert library.name in " ".join((diagnosis.cause.title, *diagnosis.cause.evidence))


@pytest.fixture
def other_cudnn(tmp_path: Path) -> Path:
    """A library with the name of cuDNN that defines a single function."""
    name = next(iter(SITE.glob("nvidia/*/lib/libcudnn.so.*"))).name
    (tmp_path / name).write_bytes(library(soname=name, functions={f"cudnnGetVersion@@{name}": returns(90000)}))
    return tmp_path / name


def test_preloaded_library_that_shadows_the_wheels_own_is_named(other_cudnn: Path) -> None:
    machine = probe(sys.executable, host=Host(environ={"HOME": "/nonexistent", "LD_PRELOAD": str(other_cudnn)}))
    assert "libtorch_cuda.so: undefined symbol: cudnn" in error_of(machine, "import")
    diagnosis = judge_machine(machine)
    assert diagnosis.cause
    assert diagnosis.cause.code == "L01"
    assert any(str(other_cudnn) in line and "LD_PRELOAD" in line for line in diagnosis.cause.evidence)


def test_shadowing_library_is_reported_only_if_the_loader_uses_it(other_cudnn: Path) -> None:
    folder = str(other_cudnn.parent)
    machine = probe(sys.executable, host=Host(environ={"HOME": "/nonexistent", "LD_LIBRARY_PATH": folder}))
    used = error_of(machine, "import") != ""
    evidence = [line for finding in judge_machine(machine).findings for line in finding.evidence]
    assert used == any(str(other_cudnn) in line for line in evidence)
    assert used == any(library.path == str(other_cudnn) for library in machine.torch_libraries.needed)


def test_cwd_searched_is_set_if_torch_loads_libcuda_from_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_bytes(fake_libcuda(init=999, version=CUDA_NUMBER))
    machine = probe(sys.executable, host=Host(environ={"HOME": "/nonexistent"}, cwd=str(tmp_path)))
    loaded = str(tmp_path / "libcuda.so.1") in machine.torch_run.libraries
    assert loaded == bool(machine.torch_libraries.cwd_searched)
    assert error_of(machine, "init") == f"RuntimeError: {UNKNOWN_ERROR if loaded else NO_DRIVER}"
