"""The accelerators that torch can use here, their free memory, and how tensors are spread over several."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from transload.devices import Device, Devices, split

_KINDS = ("cuda", "xpu", "hpu", "mtia")


def with_accelerators(names: list[str], rank: int | None) -> Devices:
    """All devices of this machine, with the free memory of those that tensors saved on ``names`` may go to."""
    import torch

    host = Device("cpu")
    # The modules that work, such as torch.cuda. The last one is that of the backend that a third-party package has
    # registered (npu, mlu …). torch has no public function that names it.
    backend = str(torch._C._get_privateuse1_backend_name())  # noqa: SLF001
    modules: dict[str, Any] = {}
    for kind in (*_KINDS, *(() if backend == "privateuseone" else (backend,))):
        module: Any = getattr(torch, kind, None)
        complete = all(hasattr(module, name) for name in ("is_available", "device_count", "current_device"))
        if complete and module.is_available() and module.device_count():
            modules[kind] = module
    here = [f"{kind}:{index}" for kind, module in modules.items() for index in range(module.device_count())]
    mps = []
    if torch.backends.mps.is_available():
        recommended = getattr(torch.mps, "recommended_max_memory", None)
        total = int(recommended()) if recommended else -1
        mps = [Device("mps", total - int(torch.mps.driver_allocated_memory()) if recommended else -1, total)]
    if not here and not mps:
        why = "torch finds no GPU; if there is one, `transload doctor` says why"
        if not torch.version.cuda and not torch.version.hip:
            why = f"this torch ({torch.__version__}) is built without CUDA"
        if sys.platform == "darwin":
            why = "there is no CUDA on a Mac, and this torch finds no mps"
        return Devices((host,), rank=rank, absent=why)
    current = next((f"{kind}:{module.current_device()}" for kind, module in modules.items()), "mps")
    unmeasured = Devices((host, *map(Device, here), *mps), current, rank)
    # Measure the devices that may be used: all of them if tensors of absent devices may be spread over them.
    wanted = [unmeasured.get(name) for name in names]
    measured = {unmeasured.own, *(device.name for device in wanted if device)}
    if None in wanted and len(set(names)) > 1 and rank is None:
        measured = {device.name for device in unmeasured.accelerators}
    cards = [_card(modules[split(name)[0]], name) if name in measured else Device(name) for name in here]
    return Devices((host, *cards, *mps), current, rank)


def _card(module: Any, name: str) -> Device:
    index = split(name)[1]
    label = str(module.get_device_name(index)) if hasattr(module, "get_device_name") else ""
    try:
        free, total = module.mem_get_info(index)
        reserve = module.memory_reserved(index) - module.memory_allocated(index)  # torch's cache is free, too
    except (AttributeError, RuntimeError):  # some devices do not report their memory
        return Device(name, label=label)
    return Device(name, int(free + max(0, reserve)), int(total), label)


def spread_over(sizes: Mapping[str, int], devices: Devices) -> dict[str, str]:
    """Assign the absent devices of a checkpoint to those that are here: the largest to the one with the most room.

    ``sizes`` are the bytes of each tag, largest first. Tags whose device is here take their memory first. If free
    memory is unknown, all devices count as equal.
    """
    tags = [tag for tag in sizes if tag != "meta" and split(tag)[0] != "cpu"]
    cards = devices.accelerators
    if len(tags) < 2:
        return {}
    is_measured = all(card.free >= 0 for card in cards)
    room = {card.name: card.free if is_measured else 0 for card in cards}
    absent = []
    for tag in tags:
        here = devices.get(tag)
        if here is None:
            absent.append(tag)
        elif here.name in room:
            room[here.name] -= sizes[tag]
    placed: dict[str, str] = {}
    for tag in absent:
        placed[tag] = max(room, key=lambda name: (room[name], name == devices.own))
        room[placed[tag]] -= sizes[tag]
    return placed
