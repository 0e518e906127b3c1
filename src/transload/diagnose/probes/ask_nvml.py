"""Asks NVML, the library of nvidia-smi: the driver's version, and each card with what may keep it from computing."""

from __future__ import annotations

import ctypes
import struct

from transload.diagnose.probes.ask import begin
from transload.diagnose.probes.ask_library import Driver, decoded

__all__ = ["ask_nvml"]

DEVICES = 256
"""No more are asked for, whatever count a driver gives."""
PROCESSES = 256
"""Room for so many."""

# What the library fills, of nvml.h. A field of 64 bits is aligned to 8 bytes.
PCI_INFO = struct.Struct("=16s5I32s")
"""Legacy address, domain, bus, device, ids, ids of the subsystem, address."""
PROCESS_INFO = struct.Struct("=I4xQII")
"""Process, memory, and of MIG the two instances."""
FABRIC_INFO = struct.Struct("=16sIII")
"""Cluster, status, clique, state."""
FABRIC_INFO_V = struct.Struct("=I16sIIII")
"""The version and size of itself, then the same, and a mask of its health."""
LICENCES, LICENCE = struct.Struct("=iI"), struct.Struct("=II128s128sI16s")
"""Whether licences are supported, how many follow; of each its code, whether it is licensed, texts, and more."""
VGPU = 2


def ask_nvml() -> None:
    """Tell it all."""
    driver = Driver(begin())
    tell = driver.report.say
    tell(library=driver.file("nvmlInit_v2"))
    driver.demand("nvmlInit_v2", "nvmlInit")
    started = driver.either("nvmlInit_v2", "nvmlInit")
    tell(init=started)
    if started == 0:
        tell(driver=driver.text("nvmlSystemGetDriverVersion"))
        tell(cuda=cuda(driver), confidential=confidential(driver))
        count = ctypes.c_uint()
        code = driver.either("nvmlDeviceGetCount_v2", "nvmlDeviceGetCount", ctypes.byref(count))
        tell(count=-1 if code else count.value, count_code=code)
        for index in range(0 if code else min(count.value, DEVICES)):
            tell(gpu=gpu(driver, index))
    driver.report.done()


def cuda(driver: Driver) -> int:
    """The CUDA version of the driver, 0 where it is not told."""
    version = ctypes.c_int()
    names = ("nvmlSystemGetCudaDriverVersion_v2", "nvmlSystemGetCudaDriverVersion")
    return 0 if driver.either(names[0], names[1], ctypes.byref(version)) else version.value


def confidential(driver: Driver) -> str:
    """Whether confidential computing is ready for work; empty where it is off."""
    state = (ctypes.c_uint * 3)()  # environment, feature, tools
    if driver.call("nvmlSystemGetConfComputeState", state) or not state[1]:
        return ""
    ready = driver.numbers("nvmlSystemGetConfComputeGpusReadyState")
    return {(): "", (0,): "not-ready"}.get(tuple(ready), "ready")


def gpu(driver: Driver, index: int) -> dict[str, object]:
    """One card; the code says whether there is more to tell."""
    handle = ctypes.c_void_p()
    names = ("nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex")
    code = driver.either(names[0], names[1], index, ctypes.byref(handle))
    return {"index": index, "code": code} if code else {"index": index, "code": code, **facts(driver, handle)}


def facts(driver: Driver, card: ctypes.c_void_p) -> dict[str, object]:
    """What is told of a card. Lists are empty where the function fails or is missing."""
    return {
        "name": driver.text("nvmlDeviceGetName", card),
        "uuid": driver.text("nvmlDeviceGetUUID", card),
        "capability": driver.numbers("nvmlDeviceGetCudaComputeCapability", card, count=2),
        "address": address(driver, card),
        "memory": memory(driver, card),
        "compute_mode": driver.numbers("nvmlDeviceGetComputeMode", card),
        "fabric": fabric(driver, card),
        "remapped": driver.numbers("nvmlDeviceGetRemappedRows", card, count=4),
        "retired": driver.numbers("nvmlDeviceGetRetiredPagesPendingStatus", card),
        "processes": processes(driver, card),
        **mig(driver, card),
        **virtualization(driver, card),
    }


def address(driver: Driver, card: ctypes.c_void_p) -> str:
    """Its place on the bus, as NVML writes it: ``00000000:0F:00.0``."""
    raw = ctypes.create_string_buffer(PCI_INFO.size)
    names = ("nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetPciInfo_v2")
    if driver.either(names[0], names[1], card, raw):
        return ""
    legacy, *_, newer = PCI_INFO.unpack(raw.raw)
    return decoded((newer if driver.has(names[0]) else legacy).partition(b"\0")[0])


def memory(driver: Driver, card: ctypes.c_void_p) -> list[int]:
    """Bytes: all, free, used."""
    amounts = (ctypes.c_ulonglong * 3)()
    return [] if driver.call("nvmlDeviceGetMemoryInfo", card, amounts) else list(amounts)


def fabric(driver: Driver, card: ctypes.c_void_p) -> list[int]:
    """State and status of the card in the fabric of NVLink."""
    raw = ctypes.create_string_buffer(FABRIC_INFO_V.size)
    ctypes.cast(raw, ctypes.POINTER(ctypes.c_uint))[0] = FABRIC_INFO_V.size | 2 << 24
    if driver.call("nvmlDeviceGetGpuFabricInfoV", card, raw) == 0:
        _, _, status, _, state, _ = FABRIC_INFO_V.unpack(raw.raw)
        return [state, status]
    if driver.call("nvmlDeviceGetGpuFabricInfo", card, raw) == 0:
        _, status, _, state = FABRIC_INFO.unpack_from(raw.raw)
        return [state, status]
    return []


def processes(driver: Driver, card: ctypes.c_void_p) -> list[list[int]]:
    """Those that compute on it: process and bytes."""
    count = ctypes.c_uint(PROCESSES)
    raw = ctypes.create_string_buffer(PROCESS_INFO.size * PROCESSES)
    names = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2")
    if driver.either(names[0], names[1], card, ctypes.byref(count), raw):
        return []
    each = [PROCESS_INFO.unpack_from(raw.raw, PROCESS_INFO.size * at) for at in range(min(count.value, PROCESSES))]
    return [[process, used] for process, used, _, _ in each]


def mig(driver: Driver, card: ctypes.c_void_p) -> dict[str, object]:
    """Whether the card is cut into MIG devices now, and what these are called."""
    mode = driver.numbers("nvmlDeviceGetMigMode", card, count=2)[:1]
    room = driver.numbers("nvmlDeviceGetMaxMigDeviceCount", card) if mode == [1] else []
    uuids = []
    for index in range(min(sum(room), DEVICES)):
        device = ctypes.c_void_p()
        if driver.call("nvmlDeviceGetMigDeviceHandleByIndex", card, index, ctypes.byref(device)) == 0:
            uuids.append(driver.text("nvmlDeviceGetUUID", device))
    return {"mig": mode, "mig_devices": [each for each in uuids if each]}


def virtualization(driver: Driver, card: ctypes.c_void_p) -> dict[str, object]:
    """Whether it is the card itself or a share of one; the latter needs a licence."""
    mode = driver.numbers("nvmlDeviceGetVirtualizationMode", card)
    return {"virtualization": mode, "licence": licence(driver, card) if mode == [VGPU] else ""}


def licence(driver: Driver, card: ctypes.c_void_p) -> str:
    """``licensed`` where any feature is; empty where none needs to be, or it is not told."""
    raw = ctypes.create_string_buffer(LICENCES.size + 3 * LICENCE.size)
    if driver.call("nvmlDeviceGetGridLicensableFeatures_v4", card, raw):
        return ""
    supported, count = LICENCES.unpack_from(raw.raw)
    starts = [LICENCES.size + LICENCE.size * at for at in range(min(count, 3))]
    states = [LICENCE.unpack_from(raw.raw, start)[1] for start in starts]
    return ("licensed" if any(states) else "unlicensed") if supported and states else ""


if __name__ == "__main__":
    ask_nvml()
