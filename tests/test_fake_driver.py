"""The fake drivers, called through ctypes, answer as the real ones do."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.each import each
from tests.elf_forge import LOADABLE, loaded
from tests.fake_driver import NVML_GETTERS, Device, fake_libcuda, fake_nvml, returns

pytestmark = pytest.mark.skipif(not LOADABLE, reason="needs the Linux loader on x86-64 or aarch64")

H200 = Device(memory=151_000_000_000, attributes={16: 132})
RTX = Device("NVIDIA GeForce RTX 5090", (12, 0), "GPU-12345678-9abc-def0-1234-56789abcdef0", memory=32 << 30)


@contextmanager
def driver(folder: Path, image: bytes) -> Iterator[ctypes.CDLL]:
    path = folder / "driver.so"
    path.write_bytes(image)
    with loaded(path) as handle:
        yield handle


def number(function: Any, *arguments: Any, kind: Any = ctypes.c_int) -> tuple[int, int]:
    """The code and the number that a getter with the pointer as its first argument returns."""
    value = kind(-7)
    return function(ctypes.byref(value), *arguments), value.value


def raw(function: Any, handle: ctypes.c_void_p, size: int) -> tuple[int, bytes]:
    """The code and the bytes that an NVML getter returns."""
    buffer = ctypes.create_string_buffer(size)
    return function(handle, buffer, size), buffer.raw


def numbers(function: Any, handle: ctypes.c_void_p, count: int) -> tuple[int, ...]:
    """The code and the numbers that an NVML getter with a pointer for each returns."""
    values = [ctypes.c_uint(77) for _ in range(count)]
    return (function(handle, *map(ctypes.byref, values)), *(value.value for value in values))


def device_handle(nvml: ctypes.CDLL, index: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    assert nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0
    return handle


def test_libcuda_reports_its_devices(tmp_path: Path) -> None:
    with driver(tmp_path, fake_libcuda(version=12080, devices=[H200, RTX])) as cuda:
        assert cuda.cuInit(0) == 0
        assert number(cuda.cuDriverGetVersion) == (0, 12080)
        assert number(cuda.cuDeviceGetCount) == (0, 2)
        assert [number(cuda.cuDeviceGet, index) for index in (0, 1, 2)] == [(0, 0), (0, 1), (101, -7)]
        assert [number(cuda.cuDeviceGetAttribute, 75, device) for device in (0, 1)] == [(0, 9), (0, 12)]
        assert [number(cuda.cuDeviceGetAttribute, 16, device) for device in (0, 1)] == [(0, 132), (1, -7)]
        assert number(cuda.cuDeviceTotalMem_v2, 1, kind=ctypes.c_size_t) == (0, 32 << 30)


def test_libcuda_reports_names_and_uuids(tmp_path: Path) -> None:
    buffer = ctypes.create_string_buffer(96)
    with driver(tmp_path, fake_libcuda(devices=[H200, RTX])) as cuda:
        assert cuda.cuDeviceGetName(buffer, 96, 1) == 0
        assert buffer.value.decode() == RTX.name
        assert cuda.cuDeviceGetUuid_v2(buffer, 1) == 0
        assert buffer.raw[:16].hex() == "123456789abcdef0123456789abcdef0"


def test_libcuda_reports_only_its_version_if_init_fails(tmp_path: Path) -> None:
    with driver(tmp_path, fake_libcuda(init=803)) as cuda:
        assert cuda.cuInit(0) == 803
        assert number(cuda.cuDriverGetVersion) == (0, 13000)
        assert number(cuda.cuDeviceGetCount) == (3, -7)
        assert number(cuda.cuDeviceGetAttribute, 75, 0) == (3, -7)


def test_functions_are_replaced_and_removed(tmp_path: Path) -> None:
    overrides = {"cuInit": returns(999), "cuDeviceGetUuid_v2": None, "cuGetProcAddress_v2": returns(500)}
    with driver(tmp_path, fake_libcuda(count_code=100, overrides=overrides)) as cuda:
        assert cuda.cuInit(0) == 999
        assert cuda.cuGetProcAddress_v2() == 500
        assert number(cuda.cuDeviceGetCount) == (100, -7)
        assert not hasattr(cuda, "cuDeviceGetUuid_v2")
        assert hasattr(cuda, "cuDeviceGetUuid")


def function_by_name(cuda: ctypes.CDLL, name: str, by: str = "cuGetProcAddress_v2") -> Any:
    """The function that the driver returns for a name."""
    address = ctypes.c_void_p()
    get_address = getattr(cuda, by)
    assert get_address(name.encode(), ctypes.byref(address), 13000, ctypes.c_uint64(0), None) == 0
    return ctypes.CFUNCTYPE(ctypes.c_int)(address.value or 0)


def test_libcuda_returns_its_functions_by_name(tmp_path: Path) -> None:
    overrides = {"cuDeviceGetName": returns(46)}
    with driver(tmp_path, fake_libcuda(init=803, version=12080, overrides=overrides)) as cuda:
        assert function_by_name(cuda, "cuInit")(0) == 803
        assert function_by_name(cuda, "cuInit", by="cuGetProcAddress")(0) == 803
        assert number(function_by_name(cuda, "cuDriverGetVersion")) == (0, 12080)
        assert function_by_name(cuda, "cuDeviceGetName")() == 46
        assert [function_by_name(cuda, name)() for name in ("", "c", "cuIni", "cuInitX", "cuGraphLaunch")] == [0] * 5


def test_libcuda_returns_the_lookup_function_itself_by_name(tmp_path: Path) -> None:
    address = ctypes.c_void_p()
    with driver(tmp_path, fake_libcuda(init=999)) as cuda:
        lookup = function_by_name(cuda, "cuGetProcAddress")
        assert lookup(b"cuInit", ctypes.byref(address), 2000, ctypes.c_uint64(0)) == 0
        assert ctypes.CFUNCTYPE(ctypes.c_int)(address.value or 0)() == 999


@each("by", ["symbol", "name"])
def test_libcuda_returns_export_tables_of_functions_that_do_nothing(tmp_path: Path, by: str) -> None:
    address = ctypes.c_void_p()
    with driver(tmp_path, fake_libcuda(init=999)) as cuda:
        get_table = cuda.cuGetExportTable if by == "symbol" else function_by_name(cuda, "cuGetExportTable")
        assert get_table(ctypes.byref(address), bytes(16)) == 0
        size, *table = (ctypes.c_uint64 * 128).from_address(address.value or 0)
        assert (size, len({*table})) == (1024, 1)
        assert ctypes.CFUNCTYPE(ctypes.c_int)(table[-1])() == 0


def test_nvml_reports_the_system(tmp_path: Path) -> None:
    buffer = ctypes.create_string_buffer(80)
    with driver(tmp_path, fake_nvml(driver="595.71.05", cuda=13020, confidential=(2, 1, 0), ready=0)) as nvml:
        assert [nvml.nvmlInit_v2(), nvml.nvmlInitWithFlags(0), nvml.nvmlShutdown()] == [0, 0, 0]
        assert nvml.nvmlSystemGetDriverVersion(buffer, 80) == 0
        assert buffer.value == b"595.71.05"
        assert number(nvml.nvmlSystemGetCudaDriverVersion_v2) == (0, 13020)
        assert nvml.nvmlSystemGetConfComputeState(buffer) == 0
        assert struct.unpack_from("<3I", buffer) == (2, 1, 0)
        assert number(nvml.nvmlSystemGetConfComputeGpusReadyState) == (0, 0)


def test_nvml_distinguishes_its_devices(tmp_path: Path) -> None:
    with driver(tmp_path, fake_nvml(devices=[H200, RTX])) as nvml:
        assert number(nvml.nvmlDeviceGetCount_v2) == (0, 2)
        first, second = device_handle(nvml, 0), device_handle(nvml, 1)
        assert nvml.nvmlDeviceGetHandleByIndex_v2(2, ctypes.byref(ctypes.c_void_p())) == 2
        assert raw(nvml.nvmlDeviceGetName, first, 96)[1].rstrip(b"\0").decode() == H200.name
        assert raw(nvml.nvmlDeviceGetUUID, second, 96)[1].rstrip(b"\0").decode() == RTX.uuid
        assert numbers(nvml.nvmlDeviceGetCudaComputeCapability, second, 2) == (0, 12, 0)
        assert numbers(nvml.nvmlDeviceGetComputeMode, ctypes.c_void_p(5), 1) == (2, 77)


def test_nvml_reports_the_state_of_a_device(tmp_path: Path) -> None:
    device = Device(minor=4, compute_mode=2, mig=(1, 0), ecc=(0, 1), remapped_rows=(1, 2, 3, 4), virtualization=2)
    with driver(tmp_path, fake_nvml(devices=[device])) as nvml:
        handle = device_handle(nvml, 0)
        assert numbers(nvml.nvmlDeviceGetMinorNumber, handle, 1) == (0, 4)
        assert numbers(nvml.nvmlDeviceGetComputeMode, handle, 1) == (0, 2)
        assert numbers(nvml.nvmlDeviceGetMigMode, handle, 2) == (0, 1, 0)
        assert numbers(nvml.nvmlDeviceGetEccMode, handle, 2) == (0, 0, 1)
        assert numbers(nvml.nvmlDeviceGetRemappedRows, handle, 4) == (0, 1, 2, 3, 4)
        assert numbers(nvml.nvmlDeviceGetVirtualizationMode, handle, 1) == (0, 2)


def test_nvml_fills_its_structures(tmp_path: Path) -> None:
    device = Device(memory=100, used=30, fabric_state=3, fabric_status=15)
    with driver(tmp_path, fake_nvml(devices=[device])) as nvml:
        handle = device_handle(nvml, 0)
        assert struct.unpack("<3Q", raw(nvml.nvmlDeviceGetMemoryInfo, handle, 24)[1]) == (100, 70, 30)
        code, pci = raw(nvml.nvmlDeviceGetPciInfo_v3, handle, 68)
        legacy, *ids, bus = struct.unpack("<16s5I32s", pci)
        assert (code, ids) == (0, [0, 15, 0, 0x233510DE, 0])
        assert (legacy.rstrip(b"\0"), bus.rstrip(b"\0")) == (b"0000:0F:00.0", b"00000000:0F:00.0")
        assert struct.unpack("<16sIIBxxx", raw(nvml.nvmlDeviceGetGpuFabricInfo, handle, 28)[1])[1:] == (15, 0, 3)
        version, _, *state = struct.unpack("<I16sIIBxxxI", raw(nvml.nvmlDeviceGetGpuFabricInfoV, handle, 36)[1])
        assert (version, state) == (0x02000024, [15, 0, 3, 0])


@each("processes", [(), ((4321, 7 << 30), (1, 2))])
def test_nvml_lists_processes_if_the_caller_has_a_buffer(
    tmp_path: Path, processes: tuple[tuple[int, int], ...]
) -> None:
    count = ctypes.c_uint(0)
    buffer = ctypes.create_string_buffer(24 * len(processes) + 1)
    with driver(tmp_path, fake_nvml(devices=[Device(processes=processes)])) as nvml:
        handle, query = device_handle(nvml, 0), nvml.nvmlDeviceGetComputeRunningProcesses_v3
        assert (query(handle, ctypes.byref(count), None), count.value) == (
            7 if processes else 0,
            len(processes),
        )
        assert query(handle, ctypes.byref(count), buffer) == 0
    assert [entry[:2] for entry in struct.iter_unpack("<IxxxxQII", buffer.raw[:-1])] == list(processes)


def test_nvml_reports_nothing_if_init_fails(tmp_path: Path) -> None:
    with driver(tmp_path, fake_nvml(init=18)) as nvml:
        assert [nvml.nvmlInit_v2(), nvml.nvmlInitWithFlags(0), nvml.nvmlShutdown()] == [18, 18, 1]
        assert number(nvml.nvmlDeviceGetCount_v2) == (1, -7)
        assert all(getattr(nvml, name)() == 1 for name in NVML_GETTERS)
