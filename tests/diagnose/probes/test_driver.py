"""The driver's answers, from drivers forged for each: all that a true one can answer, and some that none would."""

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
from transload.machine import Answer, Cuda, CudaGpu, Nvml, NvmlGpu

LONG = 60.0
CODES = (3, 34, 35, 46, 100, 101, 102, 214, 222, 304, 802, 803, 804, 805, 807, 999)

loadable = pytest.mark.skipif(not LOADABLE, reason="the forge cannot build libraries for this architecture")


class World:
    """A host whose loader finds the libraries in a folder, and in the folder ``other`` where that is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {"LD_LIBRARY_PATH": str(folder)}

    @property
    def host(self) -> Host:
        return Host(environ=self.environ, cwd=str(self.folder))

    def cuda(self, data: bytes, hangs_in: str = "") -> Cuda:
        (self.folder / "libcuda.so.1").write_bytes(data)
        with Child(probes.driver_question(self.host, "cuda"), LONG) as child:
            return probes.cuda_answer(ended(child, hangs_in))

    def nvml(self, data: bytes, hangs_in: str = "") -> Nvml:
        (self.folder / "libnvidia-ml.so.1").write_bytes(data)
        with Child(probes.driver_question(self.host, "nvml"), LONG) as child:
            return probes.nvml_answer(self.host, ended(child, hangs_in))


def ended(child: Child, step: str) -> Outcome:
    """The outcome; where there is a step that hangs, once the child is there."""
    while step and not child.ended() and {"doing": step} not in child.records:
        time.sleep(0.01)
    child.end_by(time.monotonic() if step else child.deadline)
    return child.outcome()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


# -- CUDA --------------------------------------------------------------------------------------------------------------


@loadable
def test_a_cuda_driver_at_work(world: World) -> None:
    mig = Device("NVIDIA A100-SXM4-40GB MIG 1g.5gb", (8, 0), "GPU-00112233-4455-6677-8899-aabbccddeeff", 5_000)
    orin = Device("Orin", (8, 7), memory=7, attributes={18: 1, 20: 3})
    told = world.cuda(fake_libcuda(version=12040, devices=(mig, orin)))
    assert told.answer.state == "answered"
    assert told.answer.detail == ""
    assert told.works
    assert (told.library, told.init, told.version) == (str(world.folder / "libcuda.so.1"), 0, 12040)
    assert (told.count, told.count_code) == (2, 0)
    assert told.gpus == (
        CudaGpu(0, mig.name, (8, 0), "MIG-00112233-4455-6677-8899-aabbccddeeff", 5_000),
        CudaGpu(1, "Orin", (8, 7), orin.uuid, 7, 3, integrated=True),
    )


@loadable
@each("code", CODES)
def test_a_code_of_cuinit(world: World, code: int) -> None:
    told = world.cuda(fake_libcuda(init=code, version=13020))
    assert told.answer.state == "answered"
    assert (told.init, told.version, told.count, told.count_code, told.gpus) == (code, 13020, -1, 3, ())
    assert not told.works


@loadable
def test_a_stub_has_no_version_either(world: World) -> None:
    told = world.cuda(fake_libcuda(init=34, overrides={"cuDriverGetVersion": returns(34)}))
    assert (told.init, told.version) == (34, 0)


@loadable
def test_a_count_that_fails_and_one_of_nothing(world: World) -> None:
    told = world.cuda(fake_libcuda(count_code=3))
    assert (told.init, told.count, told.count_code, told.works) == (0, -1, 3, False)
    told = world.cuda(fake_libcuda(devices=()))
    assert (told.init, told.count, told.count_code, told.works) == (0, 0, 0, False)


@loadable
def test_functions_that_an_old_driver_lacks(world: World) -> None:
    missing = dict.fromkeys(("cuDeviceGetUuid_v2", "cuDeviceTotalMem_v2", "cuDeviceGetAttribute"))
    told = world.cuda(fake_libcuda(devices=(Device("Tesla MIG 1"),), overrides=missing))
    assert told.gpus == (CudaGpu(0, "Tesla MIG 1", (), Device().uuid),)
    told = world.cuda(fake_libcuda(overrides={**missing, "cuDeviceGetUuid": None, "cuDeviceGetName": None}))
    assert told.gpus == (CudaGpu(0),)


@loadable
def test_a_name_that_is_no_text(world: World) -> None:
    told = world.cuda(fake_libcuda(overrides={"cuDeviceGetName": fills(0, b'G\xff"\0')}))
    assert told.gpus[0].name == 'G\ufffd"'


@loadable
@each(
    ("step", "end", "words"),
    [
        ("cuInit", segfaults(), "SIGSEGV in cuInit"),
        ("cuInit", crashes(), "SIGILL in cuInit"),
        ("cuInit", exits(7), "exit status 7 in cuInit"),
        ("cuDriverGetVersion", segfaults(), "SIGSEGV in cuDriverGetVersion"),
        ("cuDeviceGetCount", exits(0), "exit status 0 in cuDeviceGetCount"),
        ("cuDeviceGetName", segfaults(), "SIGSEGV in cuDeviceGetName"),
    ],
)
def test_a_driver_that_crashes(world: World, step: str, end: object, words: str) -> None:
    told = world.cuda(fake_libcuda(overrides={step: end}))  # type: ignore[dict-item]
    assert (told.answer.state, told.answer.detail) == ("crashed", words)
    assert told.library == str(world.folder / "libcuda.so.1")
    assert told.version == (0 if step == "cuDriverGetVersion" else 13000)
    assert not told.works or step == "cuDeviceGetName"


@loadable
def test_a_driver_that_hangs(world: World) -> None:
    told = world.cuda(fake_libcuda(overrides={"cuInit": hangs()}), "cuInit")
    assert told.answer.state == "hung"
    assert told.answer.detail.startswith("hung in cuInit after ")
    assert (told.init, told.version) == (-1, 13000)


@loadable
def test_a_driver_that_hangs_while_it_is_loaded(world: World) -> None:
    told = world.cuda(library(soname="libcuda.so.1", functions={"boom": hangs()}, init="boom"), "loading libcuda.so.1")
    assert told.answer.state == "hung"
    assert told.answer.detail.startswith("hung in loading libcuda.so.1 after ")


@loadable
@each("function", ["cuInit", "cuDriverGetVersion", "cuDeviceGetCount"])
def test_a_driver_without_what_every_driver_has(world: World, function: str) -> None:
    told = world.cuda(fake_libcuda(overrides={function: None}))
    assert (told.answer.state, told.answer.detail) == ("no-symbol", f"it has no {function}")
    assert told.library == str(world.folder / "libcuda.so.1")


def unloadable(folder: Path) -> list[tuple[bytes, str]]:
    return [
        (b"", f"{folder}/libcuda.so.1: file too short"),
        (b"not a library, but a text that is long enough to be read as a header of one\n" * 9, "invalid ELF header"),
        (library(needed=["libnowhere.so.7"]), "libnowhere.so.7: cannot open shared object file: No such file"),
        (library(undefined=["no_such_function"]), "undefined symbol: no_such_function"),
    ]


@loadable
@each("case", range(4))
def test_what_cannot_be_loaded(world: World, case: int) -> None:
    data, words = unloadable(world.folder)[case]
    told = world.cuda(data)
    assert told.answer.state == "not-loadable"
    assert words in told.answer.detail
    assert (told.library, told.init) == ("", -1)


@loadable
def test_a_driver_that_was_cut_off(world: World) -> None:
    assert world.cuda(fake_libcuda()[:700]).answer.detail == "SIGBUS in loading libcuda.so.1"


class WithoutDriver(Host):
    """This machine, but its children look for a driver in the current directory alone."""

    def real(self, path: str) -> str:
        return path if "/" in path else f"{self.cwd}/{path}"


@pytest.mark.skipif(sys.platform != "linux", reason="tests the Linux loader")
def test_no_driver(tmp_path: Path) -> None:
    host = WithoutDriver(environ={}, cwd=str(tmp_path))
    with Child(probes.driver_question(host, "cuda"), LONG) as child:
        told = probes.cuda_answer(child.outcome())
    assert told.answer.state == "no-library"
    assert "libcuda.so.1" in told.answer.detail
    assert probes.experiments(host, told, LONG) == ()


@each(
    ("words", "state"),
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
def test_the_words_of_a_loader(words: str, state: str) -> None:
    outcome = Outcome("answered", ({"doing": "loading"}, {"failed": words}, {"done": True}), seconds=0.5)
    assert probes.cuda_answer(outcome).answer == Answer(state, words, 0.5)  # type: ignore[arg-type]


def test_no_interpreter_to_ask_with() -> None:
    outcome = Outcome("unasked", end="could not be started: /x does not exist")
    assert probes.cuda_answer(outcome) == Cuda(Answer("unasked", "could not be started: /x does not exist"))
    assert probes.nvml_answer(Host(), outcome) == Nvml(Answer("unasked", "could not be started: /x does not exist"))


# -- NVML --------------------------------------------------------------------------------------------------------------


@loadable
def test_nvml_at_work(world: World) -> None:
    told = world.nvml(fake_nvml(driver="570.86.15", cuda=12080))
    assert told.answer.state == "answered"
    assert (told.library, told.init) == (str(world.folder / "libnvidia-ml.so.1"), 0)
    assert (told.driver, told.cuda, told.count, told.count_code) == ("570.86.15", 12080, 1, 0)
    assert told.confidential == ""
    assert told.gpus == (
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
def test_nvml_on_cards_in_trouble(world: World) -> None:
    first = Device(compute_mode=3, used=10_000, remapped_rows=(0, 0, 1, 0), fabric_state=1, fabric_status=9)
    second = Device(
        compute_mode=2, remapped_rows=(4, 2, 0, 1), fabric_state=3, bus="00010000:A1:00.0", virtualization=1
    )
    told = world.nvml(
        fake_nvml(devices=(first, second), overrides={"nvmlDeviceGetRetiredPagesPendingStatus": numbers(1)})
    )
    one, other = told.gpus
    assert (one.compute_mode, one.memory - one.free) == ("exclusive-process", 10_000)
    assert (one.remap_pending, one.remap_failure, one.retired_pending) == (True, False, True)
    assert (one.fabric, one.fabric_status) == ("not-started", 9)
    assert (other.compute_mode, other.virtualization) == ("prohibited", "passthrough")
    assert (other.remap_pending, other.remap_failure) == (False, True)
    assert (other.fabric, other.address) == ("completed", "00010000:a1:00.0")


@loadable
def test_nvlinks_and_peers(world: World) -> None:
    told = world.nvml(
        fake_nvml(devices=(Device(nvlinks=(1, 0, 1), peers=(6, 0, 5)), Device(ecc=(0, 1), peers=(0, 6, 0)), Device()))
    )
    assert [gpu.nvlinks for gpu in told.gpus] == [2, -1, -1]
    assert [gpu.peers for gpu in told.gpus] == [1, 2, -1]
    assert [gpu.ecc for gpu in told.gpus] == ["enabled", "disabled", "enabled"]


@loadable
def test_a_card_that_is_lost(world: World) -> None:
    handle = switch(0, {0: returns(15)}, fills(1, u64(0x7001)))
    told = world.nvml(
        fake_nvml(devices=(Device(), Device("Other")), overrides={"nvmlDeviceGetHandleByIndex_v2": handle})
    )
    assert told.gpus[0] == NvmlGpu(0, 15)
    assert (told.gpus[1].code, told.gpus[1].name) == (0, "Other")


@loadable
@each("code", [4, 9, 12, 17, 18, 27, 999])
def test_a_code_of_nvml(world: World, code: int) -> None:
    told = world.nvml(fake_nvml(init=code))
    assert told.answer.state == "answered"
    assert (told.init, told.driver, told.count, told.count_code, told.gpus) == (code, "", -1, -1, ())


@loadable
def test_mig(world: World) -> None:
    functions = {
        "nvmlDeviceGetMaxMigDeviceCount": fills(1, u32(3)),
        "nvmlDeviceGetMigDeviceHandleByIndex": switch(1, {1: returns(6)}, fills(2, u64(0x9000))),
        "nvmlDeviceGetUUID": switch(0, {0x9000: fills(1, c_string("MIG-5"))}, fills(1, c_string("GPU-1"))),
    }
    (card,) = world.nvml(fake_nvml(devices=(Device(mig=(1, 1)),), overrides=functions)).gpus
    assert (card.uuid, card.mig, card.mig_devices) == ("GPU-1", "enabled", ("MIG-5", "MIG-5"))
    (card,) = world.nvml(fake_nvml(overrides={"nvmlDeviceGetMigMode": returns(3)})).gpus
    assert (card.mig, card.mig_devices) == ("", ())


@loadable
@each(("features", "word"), [((1, 0), "unlicensed"), ((1, 1), "licensed"), ((0, 0), "")])
def test_the_licence_of_a_share_of_a_card(world: World, features: tuple[int, int], word: str) -> None:
    supported, licensed = features
    blob = struct.pack(
        "<iI" + "II128s128sI16s" * 2, supported, 2, *(1, 0, b"", b"", 1, b""), *(2, licensed, b"", b"", 1, b"")
    )
    functions = {"nvmlDeviceGetGridLicensableFeatures_v4": fills(1, blob)}
    (card,) = world.nvml(fake_nvml(devices=(Device(virtualization=2),), overrides=functions)).gpus
    assert (card.virtualization, card.licence) == ("vgpu", word)


@loadable
@each(("state", "ready", "word"), [((2, 1, 0), 1, "ready"), ((2, 1, 0), 0, "not-ready"), ((2, 0, 0), 0, "")])
def test_confidential_computing(world: World, state: tuple[int, int, int], ready: int, word: str) -> None:
    assert world.nvml(fake_nvml(confidential=state, ready=ready)).confidential == word


@loadable
def test_the_fabric_as_old_drivers_tell_it(world: World) -> None:
    (card,) = world.nvml(
        fake_nvml(devices=(Device(fabric_state=2),), overrides={"nvmlDeviceGetGpuFabricInfoV": None})
    ).gpus
    assert card.fabric == "in-progress"


@loadable
def test_processes_on_a_card(world: World, tmp_path: Path) -> None:
    running = ((os.getpid(), 3_200_000_000), (4_190_000, (1 << 64) - 1))
    (card,) = world.nvml(fake_nvml(devices=(Device(processes=running),))).gpus
    name = (Path("/proc") / str(os.getpid()) / "comm").read_text().strip()
    assert card.processes == (f"{name} ({os.getpid()}), 3.2 GB", "process (4190000)")
    (tmp_path / "libnvidia-ml.so.1").write_bytes(fake_nvml(devices=(Device(processes=running),)))
    with Child(probes.driver_question(world.host, "nvml"), LONG) as child:
        ours = probes.nvml_answer(world.host, child.outcome(), {os.getpid()})
    assert ours.gpus[0].processes == ("process (4190000)",)


@loadable
def test_an_nvml_that_has_little(world: World) -> None:
    bare = library(
        soname="libnvidia-ml.so.1",
        functions={
            "nvmlInit": returns(0),
            "nvmlDeviceGetCount": fills(0, u32(1)),
            "nvmlDeviceGetHandleByIndex": fills(1, u64(1)),
        },
    )
    told = world.nvml(bare)
    assert told.answer.state == "answered"
    assert (told.init, told.count, told.gpus) == (0, 1, (NvmlGpu(0),))


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
def test_an_nvml_in_trouble(world: World, data: Callable[[], bytes], state: str, detail: str) -> None:
    told = world.nvml(data())
    assert told.answer.state == state
    assert told.answer.detail.endswith(detail)


@loadable
def test_an_nvml_that_hangs(world: World) -> None:
    told = world.nvml(fake_nvml(overrides={"nvmlDeviceGetCount_v2": hangs()}), "nvmlDeviceGetCount_v2")
    assert told.answer.state == "hung"
    assert told.answer.detail.startswith("hung in nvmlDeviceGetCount_v2 after ")
    assert told.driver == "580.65.06"


# -- experiments -------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_drivers(world: World) -> World:
    """A broken driver in a folder put before that of one at work."""
    (world.folder / "good").mkdir()
    (world.folder / "good" / "libcuda.so.1").write_bytes(fake_libcuda())
    world.environ["LD_LIBRARY_PATH"] = f"{world.folder}:{world.folder}/good"
    return world


@loadable
def test_no_experiment_where_all_is_well_or_nothing_is_set(world: World) -> None:
    assert probes.experiments(world.host, world.cuda(fake_libcuda()), LONG) == ()
    refused = world.cuda(fake_libcuda(init=100))
    world.environ.clear()
    assert probes.experiments(world.host, refused, LONG) == ()


@loadable
def test_no_experiment_with_a_driver_that_hangs(world: World) -> None:
    hung = Cuda(Answer("hung", "hung in cuInit after 8.0 s", 8.0))
    assert probes.experiments(world.host, hung, LONG) == ()


@loadable
def test_each_variable_alone_and_all_of_them(two_drivers: World) -> None:
    refused = two_drivers.cuda(fake_libcuda(init=34))
    two_drivers.environ |= {
        "CUDA_VISIBLE_DEVICES": "7",
        "CUDA_MPS_PIPE_DIRECTORY": "/x",
        "CUDA_MPS_LOG_DIRECTORY": "/y",
    }
    mps = ("CUDA_MPS_LOG_DIRECTORY", "CUDA_MPS_PIPE_DIRECTORY")
    tried = {each.change: each.cuda for each in probes.experiments(two_drivers.host, refused, LONG)}
    assert list(tried) == [
        ("CUDA_VISIBLE_DEVICES",),
        ("LD_LIBRARY_PATH",),
        mps,
        ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", *mps),
    ]
    assert tried["CUDA_VISIBLE_DEVICES",].init == 34
    assert tried[mps].init == 34
    assert tried["LD_LIBRARY_PATH",].library != refused.library


@loadable
def test_an_experiment_finds_the_fix(two_drivers: World) -> None:
    """Where the stub is preloaded, and the driver is on the path."""
    (two_drivers.folder / "stub.so").write_bytes(fake_libcuda(init=34))
    two_drivers.environ["LD_LIBRARY_PATH"] = str(two_drivers.folder / "good")
    two_drivers.environ["LD_PRELOAD"] = str(two_drivers.folder / "stub.so")
    with Child(probes.driver_question(two_drivers.host, "cuda"), LONG) as child:
        refused = probes.cuda_answer(child.outcome())
    assert refused.init == 34
    tried = {each.change: each.cuda for each in probes.experiments(two_drivers.host, refused, LONG)}
    assert tried["LD_PRELOAD",].works
