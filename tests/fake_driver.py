"""Machine code assembled by hand, and drivers built from it: ``libcuda.so.1`` and ``libnvidia-ml.so.1`` without a GPU.

A function stores constants where its arguments point and returns a code. Arguments are counted from 0, and there are at
most six, so that all of them are in registers. The CUDA runtime of a real torch requests functions by name, and tables
of functions, from the driver; with both it gets as far as ``cuInit``, and reports the code of that in its own words.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from types import MappingProxyType
from uuid import UUID

from tests.elf_forge import NATIVE, Function, library

# -- machine code ------------------------------------------------------------------------------------------------------

RDI, RSI, RDX, RCX, R8, R9 = 7, 6, 2, 1, 8, 9
X86 = (RDI, RSI, RDX, RCX, R8, R9)
"""The registers of arguments on x86-64; aarch64 has them in x0 to x5. rax and x9 are free to use."""


def a64(*words: int) -> bytes:
    return struct.pack(f"<{len(words)}I", *words)


def a64_load(register: int, value: int) -> bytes:
    """One movz and three movk: 16 bits each."""
    parts = struct.unpack("<4H", struct.pack("<Q", value & (1 << 64) - 1))
    return a64(*((0xF2800000 if at else 0xD2800000) | at << 21 | part << 5 | register for at, part in enumerate(parts)))


def store(argument: int, blob: bytes) -> Function:
    """Copies ``blob``, of 4 KiB at most, to where the argument points, and falls through to the code that follows."""
    cut = len(blob) // 8 * 8
    words = [(at, *struct.unpack_from("<Q", blob, at)) for at in range(0, cut, 8)]
    wide, tail = X86[argument] >> 3, list(enumerate(blob))[cut:]
    rm = 0x80 | X86[argument] & 7
    x86_words = (struct.pack("<2sQ3Bi", b"\x48\xb8", word, 0x48 | wide, 0x89, rm, at) for at, word in words)
    x86_bytes = (struct.pack("<3BiB", 0x40 | wide, 0xC6, rm, at, byte) for at, byte in tail)
    a64_words = (a64_load(9, word) + a64(0xF9000009 | at // 8 << 10 | argument << 5) for at, word in words)
    a64_bytes = (a64_load(9, byte) + a64(0x39000009 | at << 10 | argument << 5) for at, byte in tail)
    return Function(b"".join((*x86_words, *x86_bytes)), b"".join((*a64_words, *a64_bytes)))


def returns(code: int) -> Function:
    code &= 0xFFFFFFFF
    return Function(struct.pack("<BIB", 0xB8, code, 0xC3), a64_load(0, code) + a64(0xD65F03C0))


def fills(argument: int, blob: bytes, *more: tuple[int, bytes], code: int = 0) -> Function:
    """Copies the blob, and any others, to where their arguments point, and returns ``code``."""
    return reduce(add, [*(store(*pair) for pair in ((argument, blob), *more)), returns(code)])


def passes(source: int, argument: int) -> Function:
    """Stores one argument where the other points: a handle that is only an index."""
    rex = 0x48 | X86[source] >> 3 << 2 | X86[argument] >> 3
    x86 = bytes((rex, 0x89, 0x80 | (X86[source] & 7) << 3 | X86[argument] & 7, 0, 0, 0, 0))
    return Function(x86, a64(0xF9000000 | argument << 5 | source)) + returns(0)


def switch(argument: int, cases: Mapping[int, Function], default: Function) -> Function:
    """Runs the case whose number equals the argument (its lower 32 bits), or the default."""
    return reduce(add, [*(only_if(argument, value, case) for value, case in cases.items()), default])


def only_if(argument: int, value: int, then: Function) -> Function:
    value &= 0xFFFFFFFF
    compare = struct.pack("<3BI", 0x40 | X86[argument] >> 3, 0x81, 0xF8 | X86[argument] & 7, value)
    skip = struct.pack("<2sI", b"\x0f\x85", len(then.x86_64))
    over = 0x54000001 | (len(then.aarch64) // 4 + 1) << 5
    return Function(compare + skip, a64_load(9, value) + a64(0x6B09001F | argument << 5, over)) + then


def only_if_named(argument: int, name: str, then: Function) -> Function:
    """Runs ``then`` if the argument points to that C string; reads no byte after the first that differs."""
    text = name.encode() + b"\0"
    rex, rm = 0x40 | X86[argument] >> 3, 0xB8 | X86[argument] & 7
    x86, over = b"", len(then.x86_64)
    aarch64, words = b"", len(then.aarch64) // 4
    for at, byte in reversed([*enumerate(text)]):
        x86 = struct.pack("<3BiB2si", rex, 0x80, rm, at, byte, b"\x0f\x85", over + len(x86)) + x86
        skip = 0x54000001 | (words + len(aarch64) // 4 + 1) << 5
        aarch64 = a64(0x39400009 | at << 10 | argument << 5, 0x7100013F | byte << 10, skip) + aarch64
    return Function(x86, aarch64) + then


def points(argument: int, body: Function) -> Function:
    """Stores the address of ``body``, which directly follows this code, where the argument points."""
    done = returns(0)
    rex, rm = 0x48 | X86[argument] >> 3, 0x80 | X86[argument] & 7
    x86 = struct.pack("<3si3Bi", b"\x48\x8d\x05", 7 + len(done.x86_64), rex, 0x89, rm, 0)
    adr = 0x10000009 | (8 + len(done.aarch64)) // 4 << 5
    return Function(x86, a64(adr, 0xF9000009 | argument << 5)) + done + body


def resolves(table: Mapping[str, Function], default: Function) -> Function:
    """``cuGetProcAddress(name, &function, …)``: the functions of the table, and the default for any other name."""
    cases = (only_if_named(0, name, points(1, body)) for name, body in table.items())
    return reduce(add, [*cases, points(1, default)])


def tabulates(body: Function, count: int = 128) -> Function:
    """``cuGetExportTable(&table, id)``: a new table that starts with its size; all its functions are ``body``."""
    return Function(x86_table(count), a64_table(count)) + body


def x86_table(count: int) -> bytes:
    """mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), then addresses of ``body``."""
    size, last = u32(8 * count).hex(), u32(count - 1).hex()
    mmap = f"57 31ff be{size} ba03000000 41ba22000000 49c7c0ffffffff 4531c9 b809000000 0f05 5f"
    store = f"488914c8 ffc9 75f8 48c700{size} 488907 31c0 c3"  # rax[rcx] = rdx down to 1; rax[0] = size; *rdi = rax
    behind = u32(len(bytes.fromhex(store))).hex()
    return bytes.fromhex(f"{mmap} b9{last} 488d15{behind} {store}")


def a64_table(count: int) -> bytes:
    """The same: x10 keeps the pointer argument, x9 counts, x11 is the value to store in the memory at x0."""
    size = 8 * count
    mmap = b"".join(a64_load(at, value) for at, value in enumerate((0, size, 3, 0x22, -1, 0)))
    mmap = a64(0xAA0003EA) + mmap + a64_load(8, 222) + a64(0xD4000001) + a64_load(9, count - 1)
    store = a64(0xF829780B, 0xF1000529, 0x54FFFFC1) + a64_load(11, size) + a64(0xF900000B, 0xF9000140)
    store += returns(0).aarch64
    return mmap + a64(0x1000000B | (4 + len(store)) // 4 << 5) + store


def fills_by(selector: int, argument: int, blobs: Sequence[bytes], codes: Sequence[int] = ()) -> Function:
    """Copies the blob whose number is in the selector, or the last one, and returns the code of that number."""
    codes = codes or [0] * len(blobs)
    *cases, default = (fills(argument, blob, code=code) for blob, code in zip(blobs, codes, strict=True))
    return switch(selector, dict(enumerate(cases)), default)


def hangs() -> Function:
    """Sleeps forever: pause on x86-64, ppoll without descriptors on aarch64, again after every signal."""
    x86 = b"\xb8\x22\0\0\0\x0f\x05\xeb\xf7"
    ppoll = b"".join(a64_load(register, 73 if register == 8 else 0) for register in (0, 1, 2, 3, 4, 8)) + a64(
        0xD4000001
    )
    return Function(x86, ppoll + a64(0x14000000 | -len(ppoll) // 4 & 0x3FFFFFF))


def exits(status: int) -> Function:
    """Ends the process at once, with exit_group, which Python code cannot prevent."""
    x86 = struct.pack("<BIBI2s", 0xBF, status, 0xB8, 231, b"\x0f\x05")
    return Function(x86, a64_load(0, status) + a64_load(8, 94) + a64(0xD4000001))


def crashes() -> Function:
    """SIGILL."""
    return Function(b"\x0f\x0b", a64(0))


def segfaults() -> Function:
    """SIGSEGV: writes to address 0."""
    return Function(b"\x31\xc0\x89\x00", a64_load(9, 0) + a64(0xF9000129))


# -- drivers -----------------------------------------------------------------------------------------------------------

HANDLE = 0x7000
"""NVML's handle of the first device; those of the others follow. Like a real one it is not null."""

Overrides = Mapping[str, Function | None]
"""Functions that replace the usual ones; None: the library does not have the function."""

NOTHING: Overrides = MappingProxyType({})


@dataclass(frozen=True)
class Device:
    """A GPU; the driver knows no other attributes than ``attributes`` (CUDA_ERROR_INVALID_VALUE)."""

    name: str = "NVIDIA H200"
    capability: tuple[int, int] = (9, 0)
    uuid: str = "GPU-8f3a2c5e-0000-4000-8000-000000000000"
    memory: int = 150_000_000_000
    used: int = 0
    bus: str = "00000000:0F:00.0"
    pci_id: int = 0x233510DE
    minor: int = 0
    compute_mode: int = 0
    mig: tuple[int, int] = (0, 0)
    ecc: tuple[int, int] = (1, 1)
    nvlinks: tuple[int, ...] = ()
    """Whether each link is up; the driver knows no others (NVML_ERROR_INVALID_ARGUMENT)."""
    peers: tuple[int, ...] = ()
    """Whether it can access the GPUs with these numbers: 0, or the reason why not."""
    remapped_rows: tuple[int, int, int, int] = (0, 0, 0, 0)
    fabric_state: int = 0
    fabric_status: int = 0
    virtualization: int = 0
    processes: tuple[tuple[int, int], ...] = ()
    attributes: Mapping[int, int] = field(default_factory=dict)


def u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def u64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def c_string(text: str) -> bytes:
    return text.encode() + b"\0"


def by_device(argument: int, devices: Iterable[Function], first: int, missing: int) -> Function:
    """The function of the device whose number or handle is the argument, counted from ``first``."""
    return switch(argument, dict(enumerate(devices, first)), returns(missing))


def fake_libcuda(
    *,
    init: int = 0,
    version: int = 13000,
    devices: Sequence[Device] = (Device(),),
    count_code: int = 0,
    overrides: Overrides = NOTHING,
    machine: str = NATIVE,
) -> bytes:
    """A ``libcuda.so.1``. If ``cuInit`` fails, all functions but the version return CUDA_ERROR_NOT_INITIALIZED.

    torch reports the result of ``cuInit``. A working driver cannot be faked for it: the CUDA runtime rejects the tables
    and reports that the driver is too old, whatever its version is.
    """
    functions = dict.fromkeys(cuda_getters(()), returns(3)) if init else cuda_getters(devices)
    functions |= {"cuInit": returns(init), "cuDriverGetVersion": fills(0, u32(version))}
    functions["cuGetExportTable"] = tabulates(returns(0))
    if count_code:
        functions["cuDeviceGetCount"] = returns(count_code)
    functions = overridden(functions, overrides)
    return library(
        soname="libcuda.so.1",
        functions=overridden(functions | lookups(functions), overrides),
        machine=machine,
    )


def lookups(functions: Mapping[str, Function]) -> dict[str, Function]:
    """The functions by which the CUDA runtime looks up others. It looks up the first of them by name, too."""
    lookup = {"cuGetProcAddress": resolves(functions, returns(0))}
    return dict.fromkeys(("cuGetProcAddress", "cuGetProcAddress_v2"), resolves({**functions, **lookup}, returns(0)))


def overridden(functions: Mapping[str, Function], overrides: Overrides) -> dict[str, Function]:
    return {name: body for name, body in {**functions, **overrides}.items() if body}


def cuda_getters(devices: Sequence[Device]) -> dict[str, Function]:
    def per_device(argument: int, *blobs: bytes) -> Function:
        return by_device(argument, (fills(0, blob) for blob in blobs), first=0, missing=101)

    uuid = per_device(1, *(UUID(device.uuid.removeprefix("GPU-")).bytes for device in devices))
    return {
        "cuDeviceGetCount": fills(0, u32(len(devices))),
        "cuDeviceGet": per_device(1, *(u32(number) for number in range(len(devices)))),
        "cuDeviceGetAttribute": by_device(2, map(attribute_of, devices), first=0, missing=101),
        "cuDeviceGetName": per_device(2, *(c_string(device.name) for device in devices)),
        "cuDeviceGetUuid": uuid,
        "cuDeviceGetUuid_v2": uuid,
        "cuDeviceTotalMem_v2": per_device(1, *(u64(device.memory) for device in devices)),
    }


def attribute_of(device: Device) -> Function:
    known = {75: device.capability[0], 76: device.capability[1], **device.attributes}
    return switch(1, {number: fills(0, u32(value)) for number, value in known.items()}, returns(1))


def fake_nvml(
    *,
    init: int = 0,
    driver: str = "580.65.06",
    cuda: int = 13000,
    devices: Sequence[Device] = (Device(),),
    confidential: tuple[int, int, int] = (0, 0, 0),
    ready: int = 1,
    overrides: Overrides = NOTHING,
    machine: str = NATIVE,
) -> bytes:
    """A ``libnvidia-ml.so.1``. If ``nvmlInit`` fails, all other functions return NVML_ERROR_UNINITIALIZED."""
    system = {
        "nvmlShutdown": returns(0),
        "nvmlSystemGetDriverVersion": fills(0, c_string(driver)),
        "nvmlSystemGetCudaDriverVersion": fills(0, u32(cuda)),
        "nvmlSystemGetCudaDriverVersion_v2": fills(0, u32(cuda)),
        "nvmlSystemGetConfComputeState": fills(0, u32(*confidential)),
        "nvmlSystemGetConfComputeGpusReadyState": fills(0, u32(ready)),
        "nvmlDeviceGetCount_v2": fills(0, u32(len(devices))),
        "nvmlDeviceGetHandleByIndex_v2": by_device(0, map(handle_of, range(len(devices))), first=0, missing=2),
    }
    functions = system | {name: nvml_getter(name, devices) for name in NVML_GETTERS}
    functions = dict.fromkeys(functions, returns(1)) if init else functions
    functions |= dict.fromkeys(("nvmlInit", "nvmlInit_v2", "nvmlInitWithFlags"), returns(init))
    return library(soname="libnvidia-ml.so.1", functions=overridden(functions, overrides), machine=machine)


def handle_of(number: int) -> Function:
    return fills(1, u64(HANDLE + number))


def nvml_getter(name: str, devices: Sequence[Device]) -> Function:
    return by_device(0, map(NVML_GETTERS[name], devices), first=HANDLE, missing=2)


def numbers(*values: int) -> Function:
    """Stores each value in its own ``unsigned int *``; these arguments follow the handle."""
    first, *more = enumerate(map(u32, values), 1)
    return fills(*first, *more)


def pci_info(device: Device) -> Function:
    domain, bus, slot = (int(part, 16) for part in device.bus.partition(".")[0].split(":"))
    short = c_string(device.bus[4:])
    return fills(1, struct.pack("<16s5I32s", short, domain, bus, slot, device.pci_id, 0, c_string(device.bus)))


def fabric_info(device: Device, version: bytes = b"") -> Function:
    """``nvmlGpuFabricInfo_t``, or ``nvmlGpuFabricInfo_v2_t``, which begins with its version and ends with health."""
    health = u32(0) if version else b""
    return fills(1, version + bytes(16) + u32(device.fabric_status, 0, device.fabric_state) + health)


def compute_processes(device: Device) -> Function:
    """The count and the list of processes; for a null pointer only the count, and NVML_ERROR_INSUFFICIENT_SIZE."""
    count = (1, u32(len(device.processes)))
    infos = b"".join(struct.pack("<IxxxxQII", *process, 0xFFFFFFFF, 0xFFFFFFFF) for process in device.processes)
    return switch(2, {0: fills(*count, code=7 if infos else 0)}, fills(*count, (2, infos)))


NVML_GETTERS: dict[str, Callable[[Device], Function]] = {
    "nvmlDeviceGetName": lambda device: fills(1, c_string(device.name)),
    "nvmlDeviceGetUUID": lambda device: fills(1, c_string(device.uuid)),
    "nvmlDeviceGetCudaComputeCapability": lambda device: numbers(*device.capability),
    "nvmlDeviceGetMemoryInfo": lambda device: fills(1, u64(device.memory, device.memory - device.used, device.used)),
    "nvmlDeviceGetComputeMode": lambda device: numbers(device.compute_mode),
    "nvmlDeviceGetMigMode": lambda device: numbers(*device.mig),
    "nvmlDeviceGetEccMode": lambda device: numbers(*device.ecc),
    "nvmlDeviceGetNvLinkState": lambda device: switch(
        1, {at: fills(2, u32(state)) for at, state in enumerate(device.nvlinks)}, returns(2)
    ),
    "nvmlDeviceGetP2PStatus": lambda device: switch(
        1, {HANDLE + at: fills(3, u32(state)) for at, state in enumerate(device.peers)}, returns(2)
    ),
    "nvmlDeviceGetPciInfo_v3": pci_info,
    "nvmlDeviceGetMinorNumber": lambda device: numbers(device.minor),
    "nvmlDeviceGetRemappedRows": lambda device: numbers(*device.remapped_rows),
    "nvmlDeviceGetGpuFabricInfo": fabric_info,
    "nvmlDeviceGetGpuFabricInfoV": lambda device: fabric_info(device, version=u32(36 | 2 << 24)),
    "nvmlDeviceGetVirtualizationMode": lambda device: numbers(device.virtualization),
    "nvmlDeviceGetComputeRunningProcesses_v3": compute_processes,
}
