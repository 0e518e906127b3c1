"""Asks the CUDA driver whether it starts, for which CUDA it is, and what devices it has for this process."""

from __future__ import annotations

import ctypes

from transload.diagnose.probes.ask import begin
from transload.diagnose.probes.ask_library import Driver, decoded

__all__ = ["ask_cuda"]

CAPABILITY, INTEGRATED, COMPUTE_MODE = (75, 76), 18, 20
"""Of ``CUdevice_attribute``."""
DEVICES = 256
"""No more are asked for, whatever count a driver gives."""


def ask_cuda() -> None:
    """Tell it all, the version first: it is known even where ``cuInit`` fails or hangs."""
    driver = Driver(begin())
    tell = driver.report.say
    tell(library=driver.file("cuInit"))
    for function in ("cuInit", "cuDriverGetVersion", "cuDeviceGetCount"):
        driver.demand(function)
    tell(version=sum(driver.numbers("cuDriverGetVersion")))
    started = driver.call("cuInit", 0)
    tell(init=started)
    count = ctypes.c_int(-1)
    code = driver.call("cuDeviceGetCount", ctypes.byref(count))
    tell(count=count.value, count_code=code)
    for ordinal in range(min(count.value, DEVICES) if started == code == 0 else 0):
        tell(gpu=gpu(driver, ordinal))
    driver.report.done()


def gpu(driver: Driver, ordinal: int) -> dict[str, object]:
    """One device."""
    device = ctypes.c_int(ordinal)
    driver.call("cuDeviceGet", ctypes.byref(device), ordinal)
    name = ctypes.create_string_buffer(256)
    driver.call("cuDeviceGetName", name, 256, device)
    memory = ctypes.c_size_t()
    code = driver.call("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    return {
        "ordinal": ordinal,
        "name": decoded(name.value),
        "capability": [value for number in CAPABILITY for value in attribute(driver, number, device)],
        "uuid": uuid(driver, device, b" MIG " in name.value),
        "memory": -1 if code else memory.value,
        "compute_mode": [*attribute(driver, COMPUTE_MODE, device), -1][0],
        "integrated": attribute(driver, INTEGRATED, device) == [1],
    }


def attribute(driver: Driver, number: int, device: ctypes.c_int) -> list[int]:
    """An attribute; empty where the driver does not know it."""
    value = ctypes.c_int()
    code = driver.call("cuDeviceGetAttribute", ctypes.byref(value), number, device)
    return [] if code else [value.value]


def uuid(driver: Driver, device: ctypes.c_int, mig: bool) -> str:
    """``GPU-...``, or of a MIG device ``MIG-...``, which only the newer function gives."""
    raw = ctypes.create_string_buffer(16)
    kind = "MIG-" if mig and driver.has("cuDeviceGetUuid_v2") else "GPU-"
    code = driver.either("cuDeviceGetUuid_v2", "cuDeviceGetUuid", raw, device)
    cuts = ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32))
    return "" if code else kind + "-".join(raw.raw.hex()[start:end] for start, end in cuts)


if __name__ == "__main__":
    ask_cuda()
