"""What a true torch says of drivers that fail, and what the doctor says of it and of its files.

Rules and pages quote these texts. Needs a torch built with CUDA and no driver: ``make test-cuda-build``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.diagnose.scenarios import STUBS, World, cuda_worlds, host_of, named, probed
from tests.diagnose.true_torch import (
    CUDA,
    MAJOR,
    NUMBER,
    SITE,
    Told,
    TrueTorch,
    environment,
    true_torch,
    why_not,
)
from tests.elf_forge import NATIVE, library
from tests.fake_driver import fake_libcuda, fake_nvml, fills, returns, u32

from transload.diagnose.children import Child
from transload.diagnose.host import Host
from transload.diagnose.probes import probe
from transload.diagnose.probes.python import question, torch_run
from transload.diagnose.report import judge_machine
from transload.machine import Machine, TorchInstall

if why_not():
    pytest.skip(why_not(), allow_module_level=True)

DOWNLOAD = "http://www.nvidia.com/Download/index.aspx"
NO_DRIVER = (
    "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from "
    f"{DOWNLOAD}"
)
NO_CARD = "No CUDA GPUs are available"
NOT_STARTED = "CUDA driver initialization failed, you might not have a CUDA gpu."
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
"""A driver for the CUDA before."""


def too_old(found: int) -> str:
    return (
        f"The NVIDIA driver on your system is too old (found version {found}). Please update your GPU driver by "
        f"downloading and installing a new version from the URL: {DOWNLOAD} Alternatively, go to: https://pytorch.org "
        "to install a PyTorch version that has been compiled with your version of the CUDA driver."
    )


def unexpected(code: int) -> str:
    return f"{UNEXPECTED}{code}: {NAMES[code]}"


@pytest.fixture(scope="module")
def torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrueTorch]:
    with true_torch(tmp_path_factory.mktemp("driver")) as process:
        yield process


def assert_says(told: Told, text: str) -> None:
    """It warns where it is asked whether there is CUDA, and fails where CUDA is used, both times in these words."""
    assert not told.available
    assert told.error == f"RuntimeError: {text}"
    assert [warning.partition(" (Triggered internally at ")[0] for warning in told.warnings] == [
        f"CUDA initialization: {text}"
    ]


# -- what cuInit answers


@pytest.mark.parametrize("code", [2, 34, 46, 101, 222, 304, 800, 802, 803, 804, 805, 807])
def test_most_codes_are_told_with_their_number_and_name(torch: TrueTorch, code: int) -> None:
    assert_says(torch.ask(libcuda=fake_libcuda(init=code, version=NUMBER)), unexpected(code))


@pytest.mark.parametrize(("code", "text"), [(3, NOT_STARTED), (35, too_old(NUMBER)), (999, UNKNOWN_ERROR)])
def test_some_codes_have_words_without_a_number(torch: TrueTorch, code: int, text: str) -> None:
    assert_says(torch.ask(libcuda=fake_libcuda(init=code, version=NUMBER)), text)


@pytest.mark.parametrize(
    ("libcuda", "error"),
    [
        pytest.param(b"", NO_DRIVER, id="no libcuda"),
        pytest.param(b"this is no library\n", NO_DRIVER, id="no library"),
        pytest.param(library(soname="libcuda.so.1"), NO_DRIVER, id="no symbols"),
        pytest.param(library(soname="libcuda.so.1", needed=["libnone.so"]), NO_DRIVER, id="needs what does not exist"),
        pytest.param(fake_libcuda(init=999, version=0), NO_DRIVER, id="version 0"),
        pytest.param(fake_libcuda(init=100, version=NUMBER), NO_CARD, id="cuInit 100"),
    ],
)
def test_without_a_driver_or_a_card_nothing_is_said_until_cuda_is_used(
    torch: TrueTorch, libcuda: bytes, error: str
) -> None:
    assert torch.ask(libcuda=libcuda) == Told(available=False, count=0, error=f"RuntimeError: {error}")


# -- versions


def test_a_driver_for_the_cuda_before_is_too_old(torch: TrueTorch) -> None:
    assert_says(torch.ask(libcuda=fake_libcuda(version=OLD)), too_old(OLD))


@pytest.mark.parametrize("code", [100, 802, 803, 999])
def test_an_old_driver_is_the_only_fault(torch: TrueTorch, code: int) -> None:
    assert_says(torch.ask(libcuda=fake_libcuda(init=code, version=OLD)), too_old(OLD))


@pytest.mark.parametrize("version", [1000 * MAJOR, NUMBER, NUMBER + 30])
def test_a_shim_is_called_too_old_whatever_its_version(torch: TrueTorch, version: int) -> None:
    every_attribute = {"cuDeviceGetAttribute": fills(0, u32(1))}
    assert_says(torch.ask(libcuda=fake_libcuda(version=version, overrides=every_attribute)), too_old(version))


def test_a_driver_of_the_same_major_is_new_enough_to_be_started(torch: TrueTorch) -> None:
    assert_says(torch.ask(libcuda=fake_libcuda(init=803, version=1000 * MAJOR)), unexpected(803))


def test_other_shims_fail_as_the_driver_would(torch: TrueTorch) -> None:
    no_attribute, no_table = fake_libcuda(version=NUMBER), {"cuGetExportTable": returns(1)}
    assert_says(torch.ask(libcuda=no_attribute), NOT_STARTED)
    assert_says(torch.ask(libcuda=fake_libcuda(version=NUMBER, overrides=no_table)), unexpected(1))


# -- NVML


def test_the_count_comes_from_nvml_and_contradicts(torch: TrueTorch) -> None:
    told = torch.ask(libcuda=fake_libcuda(init=802, version=NUMBER), nvml=fake_nvml())
    assert told.count == 1
    assert_says(told, unexpected(802))


def test_checked_by_nvml_cuda_is_available_and_dead(torch: TrueTorch) -> None:
    libcuda = fake_libcuda(init=802, version=NUMBER)
    told = torch.ask(libcuda=libcuda, nvml=fake_nvml(), PYTORCH_NVML_BASED_CUDA_CHECK="1")
    assert told == Told(available=True, count=1, error=f"RuntimeError: {unexpected(802)}")


# -- what the doctor makes of it


@pytest.fixture(scope="module")
def installed() -> Machine:
    """This machine, with nothing in the environment to disturb it."""
    return probe(sys.executable, host=Host(environ={"PATH": os.environ.get("PATH", ""), "HOME": "/nonexistent"}))


def first(machine: Machine) -> TorchInstall:
    assert machine.torch.first
    return machine.torch.first


def error_of(machine: Machine, step: str) -> str:
    taken = machine.torch_run.step(step)
    assert taken, machine.torch_run
    return taken.error


SAID = {
    "no libcuda": NO_DRIVER,
    "a libcuda that is a text": NO_DRIVER,
    "driver older than the build": too_old(12080),
    "cuInit 3": NOT_STARTED,
    "cuInit 35": too_old(12080),
    "cuInit 46, exclusive": unexpected(46),
    "cuInit 100, hidden": NO_CARD,
    "cuInit 100, no card given": NO_CARD,
    "cuInit 101, twice the same": unexpected(101),
    "cuInit 222": unexpected(222),
    "cuInit 304": unexpected(304),
    "cuInit 802": unexpected(802),
    "cuInit 803": unexpected(803),
    "cuInit 804": too_old(12020),
    "cuInit 805": unexpected(805),
    "cuInit 807": unexpected(807),
    "cuInit 999, no uvm": UNKNOWN_ERROR,
}
"""World → what torch says there. A driver that is too old as well hides what else is wrong with it."""


@pytest.mark.parametrize("name", SAID)
def test_the_cause_is_named_whatever_torch_says(installed: Machine, tmp_path: Path, name: str) -> None:
    diagnosed_as(cuda_worlds()[name]["host"], SAID[name], installed, tmp_path)


def test_a_stub_is_named(installed: Machine, tmp_path: Path) -> None:
    stub = fake_libcuda(init=34, overrides={"cuDriverGetVersion": returns(34)})
    world = World("U04", environ={"LD_LIBRARY_PATH": STUBS}, more={f"{STUBS}/libcuda.so.1": stub})
    diagnosed_as(world, unexpected(34), installed, tmp_path)


def test_a_shim_is_not_called_an_old_driver(installed: Machine, tmp_path: Path) -> None:
    every_attribute = fake_libcuda(version=NUMBER, overrides={"cuDeviceGetAttribute": fills(0, u32(1))})
    diagnosed_as(World("V05", cuda=every_attribute), too_old(NUMBER), installed, tmp_path)


def diagnosed_as(world: World, text: str, installed: Machine, root: Path) -> None:
    """Assert that torch says ``text`` in a world, and that the doctor names its cause."""
    host = host_of(world, "host", root, NATIVE)
    inside = replace(host, environ={**host.environ, "LD_LIBRARY_PATH": ":".join(host.folders)})
    with Child(replace(question(inside), python=sys.executable), seconds=60) as child:
        machine = replace(probed(host), torch_run=torch_run(child.outcome()))
    assert error_of(machine, "init") == f"RuntimeError: {text}"
    own = {each: getattr(installed, each) for each in ("python", "torch", "torch_libraries", "extensions")}
    diagnosis = judge_machine(replace(machine, **own))
    told = [(found.code, found.title, found.evidence) for found in diagnosis.findings]
    assert named(diagnosis) in world.truth.split("|"), told


def test_without_a_card_a_torch_for_cuda_is_no_fault(installed: Machine) -> None:
    if installed.hardware.present:
        pytest.skip("this machine has an NVIDIA GPU")
    diagnosis = judge_machine(installed)
    assert (diagnosis.status, diagnosis.cause, installed.problems) == ("no-gpu", None, {})
    assert error_of(installed, "init") == f"RuntimeError: {NO_DRIVER}"


# -- the files of the wheel


def test_the_build_is_read_from_its_file(installed: Machine, torch: TrueTorch) -> None:
    install = first(installed)
    assert (install.version, install.cuda) == (torch.build.version, CUDA)
    assert install.location == str(Path(torch.build.file).parent)
    assert install.dist_version == install.version.partition("+")[0]
    assert (install.missing, install.unlisted, install.known) == ((), (), True)


def test_the_architectures_are_read_from_the_binary(installed: Machine, torch: TrueTorch) -> None:
    libraries = installed.torch_libraries
    assert libraries.architectures == tuple(torch.build.architectures)
    assert isinstance(libraries.cubins, dict)
    assert {*torch.build.architectures} <= {*libraries.cubins}


def test_the_libraries_are_the_ones_that_the_loader_takes(installed: Machine) -> None:
    mapped = {Path(path).name: os.path.realpath(path) for path in installed.torch_run.libraries}
    needed = {each.name: os.path.realpath(each.path) for each in installed.torch_libraries.needed}
    assert len(needed) > 8
    assert {name: path for name, path in needed.items() if path != mapped.get(name)} == {}


def test_the_wheel_is_found_whole(installed: Machine) -> None:
    libraries = installed.torch_libraries
    assert [each for each in libraries.needed if each.path != each.expected] == []
    assert (libraries.unresolved, libraries.overlaps, libraries.split_cudnn) == ((), (), ())


@pytest.mark.parametrize("pattern", ["libcudnn.so.*", "libnccl.so.*"])
def test_a_library_that_is_missing_is_named(tmp_path: Path, pattern: str) -> None:
    library = next(iter(SITE.glob(f"nvidia/*/lib/{pattern}")))
    machine = probe(str(environment(tmp_path, without=library)), host=Host(environ={"HOME": str(tmp_path)}))
    if not (error := error_of(machine, "import")):
        pytest.skip(f"the system has a {library.name} of its own")
    assert error == f"ImportError: {library.name}: cannot open shared object file: No such file or directory"
    diagnosis = judge_machine(machine)
    assert diagnosis.cause
    assert diagnosis.cause.code == "L04"
    assert library.name in " ".join((diagnosis.cause.title, *diagnosis.cause.evidence))


@pytest.fixture
def other_cudnn(tmp_path: Path) -> Path:
    """A library of cuDNN's name that has next to nothing in it."""
    name = next(iter(SITE.glob("nvidia/*/lib/libcudnn.so.*"))).name
    (tmp_path / name).write_bytes(library(soname=name, functions={f"cudnnGetVersion@@{name}": returns(90000)}))
    return tmp_path / name


def test_a_preloaded_library_that_shadows_the_wheels_own_is_named(other_cudnn: Path) -> None:
    machine = probe(sys.executable, host=Host(environ={"HOME": "/nonexistent", "LD_PRELOAD": str(other_cudnn)}))
    assert "libtorch_cuda.so: undefined symbol: cudnn" in error_of(machine, "import")
    diagnosis = judge_machine(machine)
    assert diagnosis.cause
    assert diagnosis.cause.code == "L01"
    assert any(str(other_cudnn) in line and "LD_PRELOAD" in line for line in diagnosis.cause.evidence)


def test_a_library_that_the_loader_passes_over_is_no_fault(other_cudnn: Path) -> None:
    folder = str(other_cudnn.parent)
    machine = probe(sys.executable, host=Host(environ={"HOME": "/nonexistent", "LD_LIBRARY_PATH": folder}))
    taken = error_of(machine, "import") != ""
    told = [line for finding in judge_machine(machine).findings for line in finding.evidence]
    assert taken == any(str(other_cudnn) in line for line in told)
    assert taken == any(each.path == str(other_cudnn) for each in machine.torch_libraries.needed)


def test_the_current_folder_is_searched_where_we_say_so(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_bytes(fake_libcuda(init=999, version=NUMBER))
    machine = probe(sys.executable, host=Host(environ={"HOME": "/nonexistent"}, cwd=str(tmp_path)))
    taken = str(tmp_path / "libcuda.so.1") in machine.torch_run.libraries
    assert taken == bool(machine.torch_libraries.cwd_searched)
    assert error_of(machine, "init") == f"RuntimeError: {UNKNOWN_ERROR if taken else NO_DRIVER}"
