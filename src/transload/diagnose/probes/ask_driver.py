"""Asks the CUDA driver or NVML, the library behind nvidia-smi. Runs in a child; see ``ask``.

The last two arguments are ``cuda`` or ``nvml``, and the library to load.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

from transload.diagnose.probes.ask import Report, mapped

PATH = 1 << 15  # The most characters of a path on Windows.
DEVICES = 256  # The most devices to ask about, whatever count the driver returns.


class DriverLibrary:
    """A loaded library. Each call is reported before it is made."""

    def __init__(self, report: Report, name: str) -> None:
        self.report = report
        self.name = name
        report.say(doing="loading " + name)
        try:
            self.library = ctypes.CDLL(name)
        except OSError as error:
            report.say(failed=str(error))
            report.done()

    def require(self, *alternatives: str) -> None:
        """Exit if the library has none of these functions, of which every release has at least one."""
        if not any(map(self.has, alternatives)):
            self.report.say(missing=alternatives[0])
            self.report.done()

    def has(self, function: str) -> bool:
        """Whether the library has this function."""
        return hasattr(self.library, function)

    def call(self, function: str, *arguments: object) -> int:
        """Call a function and return its result: 0 for success, -1 if the library does not have it."""
        if not self.has(function):
            return -1
        self.report.say(doing=function)
        return int(getattr(self.library, function)(*arguments))

    def call_newest(self, function: str, *arguments: object) -> int:
        """Call a function, or in an older library the version before it: ``f`` for ``f_v2``."""
        name, number = function[:-3], int(function[-1])
        older = name if number == 2 else f"{name}_v{number - 1}"
        return self.call(function if self.has(function) else older, *arguments)

    def numbers(self, function: str, *arguments: object, count: int = 1) -> list[int]:
        """What a function stores through its last ``count`` arguments, ``unsigned int *``; empty if it fails."""
        values = [ctypes.c_uint() for _ in range(count)]
        code = self.call(function, *arguments, *map(ctypes.byref, values))
        return [] if code else [value.value for value in values]

    def text(self, function: str, *arguments: object) -> str:
        """The text that a function writes into a buffer, passed last together with its size; empty if it fails."""
        buffer = ctypes.create_string_buffer(256)
        return "" if self.call(function, *arguments, buffer, 256) else buffer.value.decode("utf-8", "replace")

    def file(self, function: str) -> str:
        """The mapped file that contains a function; found by its name if the library lacks the function."""
        if hasattr(ctypes, "windll"):
            handle, buffer = ctypes.c_void_p(self.library._handle), ctypes.create_unicode_buffer(PATH)  # noqa: SLF001
            ctypes.windll.kernel32.GetModuleFileNameW(handle, buffer, PATH)
            return buffer.value
        address = self.has(function) and ctypes.cast(getattr(self.library, function), ctypes.c_void_p).value
        stem = os.path.basename(self.name).split(".so")[0] + ".so"
        for start, end, path in mapped():
            if start <= address < end if address else os.path.basename(path).startswith(stem):
                return path
        return ""


# -- CUDA: whether it starts, which version it supports, and which devices this process has ----------------------------

CAPABILITY, INTEGRATED, COMPUTE_MODE = (75, 76), 18, 20
"""Of ``CUdevice_attribute``."""


def ask_cuda(driver: DriverLibrary) -> None:
    """Report everything, the version first: it is known even if ``cuInit`` fails or hangs."""
    say = driver.report.say
    say(library=driver.file("cuInit"))
    for function in ("cuInit", "cuDriverGetVersion", "cuDeviceGetCount"):
        driver.require(function)
    say(version=sum(driver.numbers("cuDriverGetVersion")))
    started = driver.call("cuInit", 0)
    say(init=started)
    count = ctypes.c_int(-1)
    code = driver.call("cuDeviceGetCount", ctypes.byref(count))
    say(count=count.value, count_code=code)
    for ordinal in range(min(count.value, DEVICES) if started == code == 0 else 0):
        say(gpu=cuda_gpu(driver, ordinal))
    driver.report.done()


def cuda_gpu(driver: DriverLibrary, ordinal: int) -> dict[str, object]:
    """The fields of a ``CudaGpu``."""
    device = ctypes.c_int(ordinal)

    def attribute(number: int) -> list[int]:
        value = ctypes.c_int()
        code = driver.call("cuDeviceGetAttribute", ctypes.byref(value), number, device)
        return [] if code else [value.value]

    driver.call("cuDeviceGet", ctypes.byref(device), ordinal)
    name = ctypes.create_string_buffer(256)
    driver.call("cuDeviceGetName", name, 256, device)
    memory = ctypes.c_size_t()
    code = driver.call("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    raw = ctypes.create_string_buffer(16)
    no_uuid = driver.call_newest("cuDeviceGetUuid_v2", raw, device)
    mig = b" MIG " in name.value and driver.has("cuDeviceGetUuid_v2")  # only _v2 returns the UUID of a MIG device
    cuts = ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32))
    uuid = "-".join(("MIG" if mig else "GPU", *(raw.raw.hex()[start:end] for start, end in cuts)))
    return {
        "ordinal": ordinal,
        "name": name.value.decode("utf-8", "replace"),
        "capability": tuple(value for number in CAPABILITY for value in attribute(number)),
        "uuid": "" if no_uuid else uuid,
        "memory": -1 if code else memory.value,
        "compute_mode": [*attribute(COMPUTE_MODE), -1][0],
        "integrated": attribute(INTEGRATED) == [1],
    }


# -- NVML: the driver's version, and each card with what may keep it from computing ------------------------------------

PROCESSES = 256  # The most processes to list.

# Structures of nvml.h that the library fills. A field of 64 bits is aligned to 8 bytes.
PCI_INFO = struct.Struct("=16s20x32s")  # Legacy address, five numbers, address.
PROCESS_INFO = struct.Struct("=I4xQ8x")  # Process, memory, and the two MIG instances.
FABRIC_INFO = struct.Struct("=16xI4xI")  # Cluster, status, clique, state.
FABRIC_INFO_V = struct.Struct("=20xI4xI4x")  # Version and size of the structure, then the same, and a health mask.
LICENCES, LICENCE = struct.Struct("=iI"), struct.Struct("=4xI276x")
"""Whether licences are supported, and how many follow; each with a code, whether it is licensed, and texts."""
COMPUTE_MODES = ("default", "exclusive-thread", "prohibited", "exclusive-process")
MIG = ECC = ("disabled", "enabled")
NVLINKS = 18  # The most links that a card has.
P2P_READ = 0  # Of ``nvmlGpuP2PCapsIndex_t``: reading the other card's memory. The status is 0 if that works.
FABRIC = ("not-supported", "not-started", "in-progress", "completed")
DRIVER_MODELS = ("WDDM", "TCC", "MCDM")
VIRTUALIZATION = ("none", "passthrough", "vgpu", "host-vgpu", "host-vsga")


def ask_nvml(driver: DriverLibrary) -> None:
    """Report everything."""
    say = driver.report.say
    say(library=driver.file("nvmlInit_v2"))
    driver.require("nvmlInit_v2", "nvmlInit")
    started = driver.call_newest("nvmlInit_v2")
    say(init=started)
    if started == 0:
        say(driver=driver.text("nvmlSystemGetDriverVersion"))
        version = ctypes.c_int()
        code = driver.call_newest("nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(version))
        state = (ctypes.c_uint * 3)()  # of confidential computing: environment, feature, tools
        ready: list[int] = []
        if driver.call("nvmlSystemGetConfComputeState", state) == 0 and state[1]:
            ready = driver.numbers("nvmlSystemGetConfComputeGpusReadyState")
        say(cuda=0 if code else version.value, confidential={(): "", (0,): "not-ready"}.get(tuple(ready), "ready"))
        count = ctypes.c_uint()
        code = driver.call_newest("nvmlDeviceGetCount_v2", ctypes.byref(count))
        say(count=-1 if code else count.value, count_code=code)
        numbers = range(0 if code else min(count.value, DEVICES))
        for index in numbers:
            say(gpu=nvml_gpu(driver, index))
        cards = [nvml_card(driver, index)[0] for index in numbers]
        peers = []
        for card in cards:  # how many others it can read directly; -1 if NVML does not say
            others = [other for other in cards if other is not card and other.value and card.value]
            states = [driver.numbers("nvmlDeviceGetP2PStatus", card, other, P2P_READ) for other in others]
            peers.append(states.count([0]) if any(states) else -1)
        say(peers=tuple(peers))
    driver.report.done()


def nvml_card(driver: DriverLibrary, index: int) -> tuple[ctypes.c_void_p, int]:
    """The handle of a card, and the result of getting it."""
    card = ctypes.c_void_p()
    return card, driver.call_newest("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(card))


def nvml_gpu(driver: DriverLibrary, index: int) -> dict[str, object]:
    """The fields of an ``NvmlGpu``, or only the code if that is an error. Each process is a pair: pid and bytes."""
    card, code = nvml_card(driver, index)
    if code:
        return {"index": index, "code": code}

    raw = ctypes.create_string_buffer(PCI_INFO.size)
    address = ""
    if driver.call_newest("nvmlDeviceGetPciInfo_v3", card, raw) == 0:
        legacy, newer = PCI_INFO.unpack(raw.raw)
        text = newer if driver.has("nvmlDeviceGetPciInfo_v3") else legacy
        address = text.partition(b"\0")[0].decode("utf-8", "replace")
        if address.startswith("0000") and len(address) == 16:  # 00000000:0F:00.0, in sysfs 0000:0f:00.0
            address = address[4:]

    amounts = (ctypes.c_ulonglong * 3)()  # all, free, used
    memory = [-1, -1] if driver.call("nvmlDeviceGetMemoryInfo", card, amounts) else list(amounts)
    mode = driver.numbers("nvmlDeviceGetComputeMode", card)
    raw = ctypes.create_string_buffer(FABRIC_INFO_V.size)
    ctypes.cast(raw, ctypes.POINTER(ctypes.c_uint))[0] = FABRIC_INFO_V.size | 2 << 24
    status, state = 0, -1
    if driver.call("nvmlDeviceGetGpuFabricInfoV", card, raw) == 0:
        status, state = FABRIC_INFO_V.unpack(raw.raw)
    elif driver.call("nvmlDeviceGetGpuFabricInfo", card, raw) == 0:
        status, state = FABRIC_INFO.unpack_from(raw.raw)
    remapped = driver.numbers("nvmlDeviceGetRemappedRows", card, count=4) or [0] * 4
    retired = driver.numbers("nvmlDeviceGetRetiredPagesPendingStatus", card)
    count = ctypes.c_uint(PROCESSES)
    raw = ctypes.create_string_buffer(PROCESS_INFO.size * PROCESSES)
    code = driver.call_newest("nvmlDeviceGetComputeRunningProcesses_v3", card, ctypes.byref(count), raw)
    running = 0 if code else min(count.value, PROCESSES)
    processes = list(PROCESS_INFO.iter_unpack(raw.raw[: PROCESS_INFO.size * running]))

    mig = driver.numbers("nvmlDeviceGetMigMode", card, count=2)[:1]
    room = driver.numbers("nvmlDeviceGetMaxMigDeviceCount", card) if mig == [1] else []
    mig_devices = []
    for at in range(min(sum(room), DEVICES)):
        device = ctypes.c_void_p()
        if driver.call("nvmlDeviceGetMigDeviceHandleByIndex", card, at, ctypes.byref(device)) == 0:
            mig_devices.append(driver.text("nvmlDeviceGetUUID", device))
    links = [up for at in range(NVLINKS) for up in driver.numbers("nvmlDeviceGetNvLinkState", card, at)]

    # Of Windows; only the newer function knows MCDM.
    models = ("nvmlDeviceGetDriverModel_v2", "nvmlDeviceGetDriverModel")
    model = next(filter(None, (driver.numbers(function, card, count=2)[:1] for function in models)), [])

    # A vGPU, which is a share of a card, is licensed if any of its features is.
    virtualization = word(VIRTUALIZATION, driver.numbers("nvmlDeviceGetVirtualizationMode", card))
    raw, licence = ctypes.create_string_buffer(LICENCES.size + 3 * LICENCE.size), ""
    if virtualization == "vgpu" and driver.call("nvmlDeviceGetGridLicensableFeatures_v4", card, raw) == 0:
        supported, count = LICENCES.unpack_from(raw.raw)
        states = [LICENCE.unpack_from(raw.raw, LICENCES.size + LICENCE.size * at)[0] for at in range(min(count, 3))]
        if supported and states:
            licence = "licensed" if any(states) else "unlicensed"
    return {
        "index": index,
        "name": driver.text("nvmlDeviceGetName", card),
        "uuid": driver.text("nvmlDeviceGetUUID", card),
        "capability": tuple(driver.numbers("nvmlDeviceGetCudaComputeCapability", card, count=2)),
        "address": address.lower(),
        "memory": memory[0],
        "free": memory[1],
        "compute_mode": word(COMPUTE_MODES, mode),
        "mig": word(MIG, mig),
        "mig_devices": tuple(filter(None, mig_devices)),
        "fabric": word(FABRIC, [state]),
        "fabric_status": status,
        "retired_pending": retired == [1],
        "remap_pending": bool(remapped[2]),
        "remap_failure": bool(remapped[3]),
        "virtualization": virtualization,
        "licence": licence,
        "processes": processes,
        "ecc": word(ECC, driver.numbers("nvmlDeviceGetEccMode", card, count=2)[:1]),
        "nvlinks": sum(links) if links else -1,
        "driver_model": word(DRIVER_MODELS, model),
    }


def word(words: tuple[str, ...], numbers: list[int]) -> str:
    """The word for the first of the numbers; empty if there is none.

    >>> word(MIG, [1]), word(MIG, []), word(MIG, [7])
    ('enabled', '', '')
    """
    return dict(enumerate(words)).get(numbers[0], "") if numbers else ""


if __name__ == "__main__":
    {"cuda": ask_cuda, "nvml": ask_nvml}[sys.argv[-2]](DriverLibrary(Report(), sys.argv[-1]))
