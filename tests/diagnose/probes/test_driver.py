"""The driver probes, on forged drivers: every answer that a real driver can give, and some that none would."""

from __future__ import annotations

import os
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.each import each
from tests.elf_forge import LOADABLE, library
from tests.fake_driver import (
    Device,
    c_string,
    crashes,
    exits,
    fake_libcuda,
    fake_nvml,
    fills,
    hangs,
    numbers,
    returns,
    segfaults,
    switch,
    u32,
    u64,
)

from transload.diagnose import probes
from transload.diagnose.children import Child, Outcome
from transload.diagnose.host import Host
from transload.machine import ChildAnswer, Cuda, CudaGpu, Nvml, NvmlGpu

TIMEOUT = 300.0
CODES = (3, 34, 35, 46, 100, 101, 102, 214, 222, 304, 802, 803, 804, 805, 807, 999)

loadable = pytest.mark.skipif(not LOADABLE, reason="the forge cannot build libraries for this system")


class ForgedHost:
    """A host whose loader finds the libraries of the driver in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {"LD_LIBRARY_PATH": str(folder)}

    @property
    def host(self) -> Host:
        return Host(environ=self.environ, cwd=str(self.folder))

    def cuda(self, data: bytes, hangs_in: str = "") -> Cuda:
        (self.folder / "libcuda.so.1").write_bytes(data)
        with Child(probes.driver_question(self.host, "cuda"), TIMEOUT) as child:
            return probes.cuda_answer(finish(child, hangs_in))

    def nvml(self, data: bytes, hangs_in: str = "") -> Nvml:
        (self.folder / "libnvidia-ml.so.1").write_bytes(data)
        with Child(probes.driver_question(self.host, "nvml"), TIMEOUT) as child:
            return probes.nvml_answer(self.host, finish(child, hangs_in))


def finish(child: Child, step: str) -> Outcome:
    """The outcome of the child. With a step that hangs, the child is stopped once it has reached that step."""
    while step and not child.ended() and {"doing": step} not in child.records:
        time.sleep(0.01)
    child.end_by(time.monotonic() if step else child.deadline)
    return child.outcome()


@pytest.fixture
def forged(tmp_path: Path) -> ForgedHost:
    return ForgedHost(tmp_path)


# -- CUDA --------------------------------------------------------------------------------------------------------------


@loadable
def test_working_cuda_driver(forged: ForgedHost) -> None:
    mig = Device("NVIDIA A100-SXM4-40GB MIG 1g.5gb", (8, 0), "GPU-00112233-4455-6677-8899-aabbccddeeff", 5_000)
    orin = Device("Orin", (8, 7), memory=7, attributes={18: 1, 20: 3})
    cuda = forged.cuda(fake_libcuda(version=12040, devices=(mig, orin)))
    assert cuda.answer.state == "answered"
    assert cuda.answer.detail == ""
    assert cuda.works
    assert (cuda.library, cuda.init, cuda.version) == (str(forged.folder / "libcuda.so.1"), 0, 12040)
    assert (cuda.count, cuda.count_code) == (2, 0)
    assert cuda.gpus == (
        CudaGpu(0, mig.name, (8, 0), "MIG-00112233-4455-6677-8899-aabbccddeeff", 5_000),
        CudaGpu(1, "Orin", (8, 7), orin.uuid, 7, 3, integrated=True),
    )


@loadable
@each("code", CODES)
def test_cuinit_code_is_reported(forged: ForgedHost, code: int) -> None:
    cuda = forged.cuda(fake_libcuda(init=code, version=13020))
    assert cuda.answer.state == "answered"
    assert (cuda.init, cuda.version, cuda.count, cuda.count_code, cuda.gpus) == (code, 13020, -1, 3, ())
    assert not cuda.works


@loadable
def test_stub_has_no_version(forged: ForgedHost) -> None:
    cuda = forged.cuda(fake_libcuda(init=34, overrides={"cuDriverGetVersion": returns(34)}))
    assert (cuda.init, cuda.version) == (34, 0)


@loadable
def test_device_count_that_fails_or_is_zero(forged: ForgedHost) -> None:
    cuda = forged.cuda(fake_libcuda(count_code=3))
    assert (cuda.init, cuda.count, cuda.count_code, cuda.works) == (0, -1, 3, False)
    cuda = forged.cuda(fake_libcuda(devices=()))
    assert (cuda.init, cuda.count, cuda.count_code, cuda.works) == (0, 0, 0, False)


@loadable
def test_functions_missing_in_an_old_driver(forged: ForgedHost) -> None:
    missing = dict.fromkeys(("cuDeviceGetUuid_v2", "cuDeviceTotalMem_v2", "cuDeviceGetAttribute"))
    cuda = forged.cuda(fake_libcuda(devices=(Device("Tesla MIG 1"),), overrides=missing))
    assert cuda.gpus == (CudaGpu(0, "Tesla MIG 1", (), Device().uuid),)
    cuda = forged.cuda(fake_libcuda(overrides={**missing, "cuDeviceGetUuid": None, "cuDeviceGetName": None}))
    assert cuda.gpus == (CudaGpu(0),)


@loadable
def test_device_name_that_is_not_utf8(forged: ForgedHost) -> None:
    cuda = forged.cuda(fake_libcuda(overrides={"cuDeviceGetName": fills(0, b'G\xff"\0')}))
    assert cuda.gpus[0].name == 'G\ufffd"'


@loadable
@each(
    ("step", "crash", "detail"),
    [
        ("cuInit", segfaults(), "SIGSEGV in cuInit"),
        ("cuInit", crashes(), "SIGILL in cuInit"),
        ("cuInit", exits(7), "exit status 7 in cuInit"),
        ("cuDriverGetVersion", segfaults(), "SIGSEGV in cuDriverGetVersion"),
        ("cuDeviceGetCount", exits(0), "exit status 0 in cuDeviceGetCount"),
        ("cuDeviceGetName", segfaults(), "SIGSEGV in cuDeviceGetName"),
    ],
)
def test_crashing_driver(forged: ForgedHost, step: str, crash: object, detail: str) -> None:
    cuda = forged.cuda(fake_libcuda(overrides={step: crash}))  # type: ignore[dict-item]
    assert (cuda.answer.state, cuda.answer.detail) == ("crashed", detail)
    assert cuda.library == str(forged.folder / "libcuda.so.1")
    assert cuda.version == (0 if step == "cuDriverGetVersion" else 13000)
    assert not cuda.works or step == "cuDeviceGetName"


@loadable
def test_hanging_driver(forged: ForgedHost) -> None:
    cuda = forged.cuda(fake_libcuda(overrides={"cuInit": hangs()}), "cuInit")
    assert cuda.answer.state == "hung"
    assert cuda.answer.detail.startswith("hung in cuInit after ")
    assert (cuda.init, cuda.version) == (-1, 13000)


@loadable
def test_driver_that_hangs_while_loading(forged: ForgedHost) -> None:
    cuda = forged.cuda(library(soname="libcuda.so.1", functions={"boom": hangs()}, init="boom"), "loading libcuda.so.1")
    assert cuda.answer.state == "hung"
    assert cuda.answer.detail.startswith("hung in loading libcuda.so.1 after ")


@loadable
@each("function", ["cuInit", "cuDriverGetVersion", "cuDeviceGetCount"])
def test_driver_without_a_required_function(forged: ForgedHost, function: str) -> None:
    cuda = forged.cuda(fake_libcuda(overrides={function: None}))
    assert (cuda.answer.state, cuda.answer.detail) == ("no-symbol", f"it has no {function}")
    assert cuda.library == str(forged.folder / "libcuda.so.1")


def unloadable(folder: Path) -> list[tuple[bytes, str]]:
    return [
        (b"", f"{folder}/libcuda.so.1: file too short"),
        (b"not a library, but a text that is long enough to be read as a header of one\n" * 9, "invalid ELF header"),
        (library(needed=["libnowhere.so.7"]), "libnowhere.so.7: cannot open shared object file: No such file"),
        (library(undefined=["no_such_function"]), "undefined symbol: no_such_function"),
    ]


@loadable
@each("case", range(4))
def test_library_that_cannot_be_loaded(forged: ForgedHost, case: int) -> None:
    data, message = unloadable(forged.folder)[case]
    cuda = forged.cuda(data)
    assert cuda.answer.state == "not-loadable"
    assert message in cuda.answer.detail
    assert (cuda.library, cuda.init) == ("", -1)


@loadable
def test_truncated_driver(forged: ForgedHost) -> None:
    assert forged.cuda(fake_libcuda()[:700]).answer.detail == "SIGBUS in loading libcuda.so.1"


class WithoutDriver(Host):
    """This machine, but its children look for a driver only in the current directory."""

    def real(self, path: str) -> str:
        return path if "/" in path else f"{self.cwd}/{path}"


@pytest.mark.skipif(sys.platform != "linux", reason="tests the Linux loader")
def test_no_driver(tmp_path: Path) -> None:
    host = WithoutDriver(environ={}, cwd=str(tmp_path))
    with Child(probes.driver_question(host, "cuda"), TIMEOUT) as child:
        cuda = probes.cuda_answer(child.outcome())
    assert cuda.answer.state == "no-library"
    assert "libcuda.so.1" in cuda.answer.detail
    assert probes.experiments(host, cuda, TIMEOUT) == ()


@each(
    ("message", "state"),
    [
        ("libcuda.so.1: cannot open shared object file: No such file or directory", "no-library"),
        ("libcuda.so.1: cannot open shared object file: Permission denied", "not-loadable"),
        ("libnvidia-gpucomp.so.580: cannot open shared object file: No such file or directory", "not-loadable"),
        ("Error loading shared library libcuda.so.1: No such file or directory", "no-library"),
        (
            "Error loading shared library libdl.so.2: No such file or directory (needed by /x/libcuda.so.1)",
            "not-loadable",
        ),
        ("Could not find module 'nvcuda.dll' (or one of its dependencies). Try using the full path", "no-library"),
        ("[WinError 193] %1 is not a valid Win32 application", "not-loadable"),
        ("dlopen(libcuda.so.1, 0x0006): tried: 'libcuda.so.1' (no such file)", "no-library"),
    ],
)
def test_loader_messages(message: str, state: str) -> None:
    outcome = Outcome("answered", ({"doing": "loading"}, {"failed": message}, {"done": True}), seconds=0.5)
    assert probes.cuda_answer(outcome).answer == ChildAnswer(state, message, 0.5)  # type: ignore[arg-type]


def test_child_that_could_not_be_started() -> None:
    outcome = Outcome("unasked", end="could not be started: /x does not exist")
    assert probes.cuda_answer(outcome) == Cuda(ChildAnswer("unasked", "could not be started: /x does not exist"))
    assert probes.nvml_answer(Host(), outcome) == Nvml(
        ChildAnswer("unasked", "could not be started: /x does not exist")
    )


# -- NVML --------------------------------------------------------------------------------------------------------------


@loadable
def test_working_nvml(forged: ForgedHost) -> None:
    nvml = forged.nvml(fake_nvml(driver="570.86.15", cuda=12080))
    assert nvml.answer.state == "answered"
    assert (nvml.library, nvml.init) == (str(forged.folder / "libnvidia-ml.so.1"), 0)
    assert (nvml.driver, nvml.cuda, nvml.count, nvml.count_code) == ("570.86.15", 12080, 1, 0)
    assert nvml.confidential == ""
    assert nvml.gpus == (
        NvmlGpu(
            0,
            name="NVIDIA H200",
            uuid=Device().uuid,
            capability=(9, 0),
            address="0000:0f:00.0",
            memory=150_000_000_000,
            free=150_000_000_000,
            compute_mode="default",
            mig="disabled",
            fabric="not-supported",
            virtualization="none",
            ecc="enabled",
        ),
    )


@loadable
def test_nvml_on_cards_with_faults(forged: ForgedHost) -> None:
    first = Device(compute_mode=3, used=10_000, remapped_rows=(0, 0, 1, 0), fabric_state=1, fabric_status=9)
    second = Device(
        compute_mode=2, remapped_rows=(4, 2, 0, 1), fabric_state=3, bus="00010000:A1:00.0", virtualization=1
    )
    nvml = forged.nvml(
        fake_nvml(devices=(first, second), overrides={"nvmlDeviceGetRetiredPagesPendingStatus": numbers(1)})
    )
    one, other = nvml.gpus
    assert (one.compute_mode, one.memory - one.free) == ("exclusive-process", 10_000)
    assert (one.remap_pending, one.remap_failure, one.retired_pending) == (True, False, True)
    assert (one.fabric, one.fabric_status) == ("not-started", 9)
    assert (other.compute_mode, other.virtualization) == ("prohibited", "passthrough")
    assert (other.remap_pending, other.remap_failure) == (False, True)
    assert (other.fabric, other.address) == ("completed", "00010000:a1:00.0")


@loadable
def test_nvlinks_and_peers(forged: ForgedHost) -> None:
    nvml = forged.nvml(
        fake_nvml(devices=(Device(nvlinks=(1, 0, 1), peers=(6, 0, 5)), Device(ecc=(0, 1), peers=(0, 6, 0)), Device()))
    )
    assert [gpu.nvlinks for gpu in nvml.gpus] == [2, -1, -1]
    assert [gpu.peers for gpu in nvml.gpus] == [1, 2, -1]
    assert [gpu.ecc for gpu in nvml.gpus] == ["enabled", "disabled", "enabled"]


@loadable
def test_lost_card(forged: ForgedHost) -> None:
    handle = switch(0, {0: returns(15)}, fills(1, u64(0x7001)))
    nvml = forged.nvml(
        fake_nvml(devices=(Device(), Device("Other")), overrides={"nvmlDeviceGetHandleByIndex_v2": handle})
    )
    assert nvml.gpus[0] == NvmlGpu(0, 15)
    assert (nvml.gpus[1].code, nvml.gpus[1].name) == (0, "Other")


@loadable
@each("code", [4, 9, 12, 17, 18, 27, 999])
def test_nvml_init_code_is_reported(forged: ForgedHost, code: int) -> None:
    nvml = forged.nvml(fake_nvml(init=code))
    assert nvml.answer.state == "answered"
    assert (nvml.init, nvml.driver, nvml.count, nvml.count_code, nvml.gpus) == (code, "", -1, -1, ())


@loadable
def test_mig_mode_and_devices(forged: ForgedHost) -> None:
    functions = {
        "nvmlDeviceGetMaxMigDeviceCount": fills(1, u32(3)),
        "nvmlDeviceGetMigDeviceHandleByIndex": switch(1, {1: returns(6)}, fills(2, u64(0x9000))),
        "nvmlDeviceGetUUID": switch(0, {0x9000: fills(1, c_string("MIG-5"))}, fills(1, c_string("GPU-1"))),
    }
    (card,) = forged.nvml(fake_nvml(devices=(Device(mig=(1, 1)),), overrides=functions)).gpus
    assert (card.uuid, card.mig, card.mig_devices) == ("GPU-1", "enabled", ("MIG-5", "MIG-5"))
    (card,) = forged.nvml(fake_nvml(overrides={"nvmlDeviceGetMigMode": returns(3)})).gpus
    assert (card.mig, card.mig_devices) == ("", ())


@loadable
@each(("features", "licence"), [((1, 0), "unlicensed"), ((1, 1), "licensed"), ((0, 0), "")])
def test_vgpu_licence(forged: ForgedHost, features: tuple[int, int], licence: str) -> None:
    supported, licensed = features
    blob = struct.pack(
        "<iI" + "II128s128sI16s" * 2, supported, 2, *(1, 0, b"", b"", 1, b""), *(2, licensed, b"", b"", 1, b"")
    )
    functions = {"nvmlDeviceGetGridLicensableFeatures_v4": fills(1, blob)}
    (card,) = forged.nvml(fake_nvml(devices=(Device(virtualization=2),), overrides=functions)).gpus
    assert (card.virtualization, card.licence) == ("vgpu", licence)


@loadable
@each(("state", "ready", "expected"), [((2, 1, 0), 1, "ready"), ((2, 1, 0), 0, "not-ready"), ((2, 0, 0), 0, "")])
def test_confidential_computing_state(
    forged: ForgedHost, state: tuple[int, int, int], ready: int, expected: str
) -> None:
    assert forged.nvml(fake_nvml(confidential=state, ready=ready)).confidential == expected


@loadable
def test_fabric_state_from_an_old_driver(forged: ForgedHost) -> None:
    (card,) = forged.nvml(
        fake_nvml(devices=(Device(fabric_state=2),), overrides={"nvmlDeviceGetGpuFabricInfoV": None})
    ).gpus
    assert card.fabric == "in-progress"


@loadable
def test_processes_on_a_card(forged: ForgedHost, tmp_path: Path) -> None:
    running = ((os.getpid(), 3_200_000_000), (4_190_000, (1 << 64) - 1))
    (card,) = forged.nvml(fake_nvml(devices=(Device(processes=running),))).gpus
    name = (Path("/proc") / str(os.getpid()) / "comm").read_text().strip()
    assert card.processes == (f"{name} ({os.getpid()}), 3.2 GB", "process (4190000)")
    (tmp_path / "libnvidia-ml.so.1").write_bytes(fake_nvml(devices=(Device(processes=running),)))
    with Child(probes.driver_question(forged.host, "nvml"), TIMEOUT) as child:
        without_ours = probes.nvml_answer(forged.host, child.outcome(), {os.getpid()})
    assert without_ours.gpus[0].processes == ("process (4190000)",)


@loadable
def test_nvml_with_few_functions(forged: ForgedHost) -> None:
    minimal = library(
        soname="libnvidia-ml.so.1",
        functions={
            "nvmlInit": returns(0),
            "nvmlDeviceGetCount": fills(0, u32(1)),
            "nvmlDeviceGetHandleByIndex": fills(1, u64(1)),
        },
    )
    nvml = forged.nvml(minimal)
    assert nvml.answer.state == "answered"
    assert (nvml.init, nvml.count, nvml.gpus) == (0, 1, (NvmlGpu(0),))


@loadable
@each(
    ("data", "state", "detail"),
    [
        (lambda: fake_nvml(overrides={"nvmlInit_v2": None, "nvmlInit": None}), "no-symbol", "it has no nvmlInit_v2"),
        (lambda: fake_nvml(overrides={"nvmlInit_v2": segfaults()}), "crashed", "SIGSEGV in nvmlInit_v2"),
        (
            lambda: fake_nvml(overrides={"nvmlDeviceGetMigMode": exits(1)}),
            "crashed",
            "exit status 1 in nvmlDeviceGetMigMode",
        ),
        (lambda: b"", "not-loadable", "file too short"),
    ],
)
def test_broken_nvml(forged: ForgedHost, data: Callable[[], bytes], state: str, detail: str) -> None:
    nvml = forged.nvml(data())
    assert nvml.answer.state == state
    assert nvml.answer.detail.endswith(detail)


@loadable
def test_hanging_nvml(forged: ForgedHost) -> None:
    nvml = forged.nvml(fake_nvml(overrides={"nvmlDeviceGetCount_v2": hangs()}), "nvmlDeviceGetCount_v2")
    assert nvml.answer.state == "hung"
    assert nvml.answer.detail.startswith("hung in nvmlDeviceGetCount_v2 after ")
    assert nvml.driver == "580.65.06"


# -- experiments -------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_drivers(forged: ForgedHost) -> ForgedHost:
    """A search path with a folder for a broken driver, followed by that of a working one."""
    (forged.folder / "good").mkdir()
    (forged.folder / "good" / "libcuda.so.1").write_bytes(fake_libcuda())
    forged.environ["LD_LIBRARY_PATH"] = f"{forged.folder}:{forged.folder}/good"
    return forged


@loadable
def test_no_experiment_where_cuda_works_or_no_variable_is_set(forged: ForgedHost) -> None:
    assert probes.experiments(forged.host, forged.cuda(fake_libcuda()), TIMEOUT) == ()
    refused = forged.cuda(fake_libcuda(init=100))
    forged.environ.clear()
    assert probes.experiments(forged.host, refused, TIMEOUT) == ()


@loadable
def test_no_experiment_with_a_hung_driver(forged: ForgedHost) -> None:
    hung = Cuda(ChildAnswer("hung", "hung in cuInit after 8.0 s", 8.0))
    assert probes.experiments(forged.host, hung, TIMEOUT) == ()


@loadable
def test_experiments_unset_each_variable_and_all_of_them(two_drivers: ForgedHost) -> None:
    refused = two_drivers.cuda(fake_libcuda(init=34))
    two_drivers.environ |= {
        "CUDA_VISIBLE_DEVICES": "7",
        "CUDA_MPS_PIPE_DIRECTORY": "/x",
        "CUDA_MPS_LOG_DIRECTORY": "/y",
    }
    mps = ("CUDA_MPS_LOG_DIRECTORY", "CUDA_MPS_PIPE_DIRECTORY")
    results = {
        experiment.change: experiment.cuda for experiment in probes.experiments(two_drivers.host, refused, TIMEOUT)
    }
    assert list(results) == [
        ("CUDA_VISIBLE_DEVICES",),
        ("LD_LIBRARY_PATH",),
        mps,
        ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", *mps),
    ]
    assert results["CUDA_VISIBLE_DEVICES",].init == 34
    assert results[mps].init == 34
    assert results["LD_LIBRARY_PATH",].library != refused.library


@loadable
def test_experiment_shows_which_variable_to_unset(two_drivers: ForgedHost) -> None:
    """A stub is preloaded, and a working driver is on LD_LIBRARY_PATH."""
    (two_drivers.folder / "stub.so").write_bytes(fake_libcuda(init=34))
    two_drivers.environ["LD_LIBRARY_PATH"] = str(two_drivers.folder / "good")
    two_drivers.environ["LD_PRELOAD"] = str(two_drivers.folder / "stub.so")
    with Child(probes.driver_question(two_drivers.host, "cuda"), TIMEOUT) as child:
        refused = probes.cuda_answer(child.outcome())
    assert refused.init == 34
    results = {
        experiment.change: experiment.cuda for experiment in probes.experiments(two_drivers.host, refused, TIMEOUT)
    }
    assert results["LD_PRELOAD",].works
