"""The devices that torch finds at work here. Nothing of an accelerator is touched that the file does not call for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from transload.devices import Device, Devices, local_rank, split
from transload.errors import DoesNotFitError, LoadError, NoDeviceError

if TYPE_CHECKING:
    from types import ModuleType

    import torch

    from transload.loading.placement import Plan

__all__ = ["Arrival", "devices_here", "wanted_devices"]


_PLAIN = frozenset({"cpu", "meta"})
_LITTLE = 16 << 20
_KINDS = ("cuda", "xpu", "hpu", "mtia")


def devices_here(wanted: Iterable[str], nbytes: int = _LITTLE) -> Devices:
    """The devices torch can use, as far as these names make it necessary to ask.

    Where only the CPU is wanted no accelerator is woken: a worker process that was forked could not do that, and the
    first use of a GPU costs half a second and half a gigabyte. Free memory is asked of the devices that may be used,
    and of the host only if ``nbytes``, which are to go somewhere, are not so few that the question takes longer.
    """
    names = [name for name in wanted if name not in _PLAIN]
    host = _host() if nbytes >= _LITTLE else Device("cpu")
    rank = local_rank(os.environ)
    if not names:
        return Devices((host,), rank=rank)
    import torch

    modules = _accelerators(torch)
    here = [f"{kind}:{index}" for kind, module in modules.items() for index in range(module.device_count())]
    alone = _mps(torch)
    if not here and not alone:
        return Devices((host,), rank=rank, absent=_absent(torch))
    current = next((f"{kind}:{module.current_device()}" for kind, module in modules.items()), "mps")
    silent = Devices((host, *map(Device, here), *alone), current, rank)
    asked = _asked(names, silent)
    cards = [_card(modules[split(name)[0]], name) if name in asked else Device(name) for name in here]
    return Devices((host, *cards, *alone), current, rank)


def _host() -> Device:
    from transload.diagnose.host import Host
    from transload.diagnose.probes.system import memory

    total, free = memory(Host())
    return Device("cpu", free, total)


def _accelerators(torch: ModuleType) -> dict[str, Any]:
    """``torch.cuda`` and its like, by the kind of device, those that work; the one a program computes on first."""
    kinds = [*_KINDS, _registered(torch)]
    modules = {kind: getattr(torch, kind, None) for kind in kinds if kind}
    return {kind: module for kind, module in modules.items() if _works(module)}


def _works(module: Any) -> bool:
    needed = ("is_available", "device_count", "current_device")
    return all(hasattr(module, name) for name in needed) and bool(module.is_available() and module.device_count())


def _registered(torch: ModuleType) -> str:
    """The kind that a package from outside has added to torch (``npu``, ``mlu`` …)."""
    name = str(torch._C._get_privateuse1_backend_name())  # noqa: SLF001 - torch has no public way to ask
    return "" if name == "privateuseone" else name


def _mps(torch: ModuleType) -> list[Device]:
    if not torch.backends.mps.is_available():
        return []
    most = getattr(torch.mps, "recommended_max_memory", None)
    total = int(most()) if most else -1
    return [Device("mps", total - int(torch.mps.driver_allocated_memory()) if most else -1, total)]


def _asked(names: list[str], devices: Devices) -> set[str]:
    """The devices whose free memory matters: all of them if what is not here may be laid out over them."""
    absent = any(devices.get(name) is None for name in names)
    if absent and len(set(names)) > 1 and devices.rank is None:
        return {device.name for device in devices.accelerators}
    found = (devices.get(name) for name in names)
    return {devices.own, *(device.name for device in found if device)}


def _card(module: Any, name: str) -> Device:
    index = split(name)[1]
    label = str(module.get_device_name(index)) if hasattr(module, "get_device_name") else ""
    return Device(name, *_memory(module, index), label)


def _memory(module: Any, index: int | None) -> tuple[int, int]:
    """Free and total bytes; what torch holds in reserve can be used, too."""
    if not hasattr(module, "mem_get_info"):
        return -1, -1
    try:
        free, total = module.mem_get_info(index)
        reserve = module.memory_reserved(index) - module.memory_allocated(index)
    except RuntimeError:  # some devices do not tell
        return -1, -1
    return int(free + max(0, reserve)), int(total)


def _absent(torch: ModuleType) -> str:
    if not torch.version.cuda and not torch.version.hip:
        return f"this torch ({torch.__version__}) is built without CUDA"
    return "CUDA does not work here, and `transload doctor` says why"


class Arrival:
    """Puts storages where a plan says, or where the function says that the caller gave as ``wish``."""

    def __init__(self, plan: Plan, wish: Any, where: str) -> None:
        self._devices = {move.tag: move.device for move in plan.moves}
        self._choose: Callable[[Any, str], Any] | None = wish if _is_function(wish) else None
        self._where = where

    def is_meta(self, tag: str) -> bool:
        """Whether storages of a tag keep no bytes, so that none need to be read."""
        return self._choose is None and self._devices.get(tag, tag) == "meta"

    def known(self, tag: str) -> str:
        """The device for a tag, with its index; empty where the caller's function is to be asked."""
        import torch

        if self._choose is not None:
            return ""
        device = self._devices.get(tag, tag)
        return f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device

    def put(self, storage: torch.UntypedStorage, tag: str) -> torch.UntypedStorage:
        """A storage of the CPU on its device."""
        if self._choose is None:
            return self._moved(storage, self._devices.get(tag, tag))
        chosen = self._choose(storage, tag)
        return self._moved(storage, tag) if chosen is None else self._checked(chosen)

    def _moved(self, storage: torch.UntypedStorage, device: str) -> torch.UntypedStorage:
        import torch

        if device == "cpu":
            return storage
        try:
            moved: torch.UntypedStorage = torch.serialization.default_restore_location(storage, device)
        except torch.cuda.OutOfMemoryError as error:
            raise DoesNotFitError(f"{device} has no room left: {error}", where=self._where) from error
        except RuntimeError as error:
            fix = "Leave map_location out (it is 'auto'), or pass map_location='cpu'."
            raise NoDeviceError(f"{device} does not take it: {error}", where=self._where, fix=fix) from error
        return moved

    def _checked(self, chosen: Any) -> torch.UntypedStorage:
        """What the caller's function gave, if it is a storage."""
        import torch

        if isinstance(chosen, torch.storage.TypedStorage):
            chosen = chosen._untyped_storage  # noqa: SLF001 - the public way warns
        if isinstance(chosen, torch.UntypedStorage):
            return chosen
        what = f"the function given as map_location returned {type(chosen).__name__}, which is no storage"
        fix = "Return the storage, moved or not, or None for the device it was saved on."
        raise LoadError(what, where=self._where, fix=fix)

    def device(self, tag: str) -> str:
        """Where a tensor goes that is no storage in the file, but is to be rebuilt on a device of that tag."""
        import torch

        if self._choose is None:
            return self._devices.get(tag) or self._alike(tag)
        chosen = self._choose(torch.UntypedStorage(0), tag)
        return tag if chosen is None else str(self._checked(chosen).device)

    def _alike(self, tag: str) -> str:
        """Where devices of the same kind go, for one that no storage has: a program names ``cuda`` for its own."""
        kind = tag.partition(":")[0]
        return next((device for known, device in self._devices.items() if known.partition(":")[0] == kind), tag)

    @property
    def locations(self) -> dict[str, str]:
        """The plan as torch would take it for map_location."""
        return {} if self._choose else dict(self._devices)


def _is_function(wish: Any) -> bool:
    return callable(wish) and not isinstance(wish, str | Mapping)


def wanted_devices(tags: list[str], wish: Any) -> list[str]:
    """The devices that storages of these tags may go to, by name, as far as a wish tells.

    >>> wanted_devices(["cuda:1", "cpu"], {"cuda:1": "cuda:0"})
    ['cuda:0', 'cpu']
    """
    if wish is None or (isinstance(wish, str) and wish == "auto"):
        return tags
    if isinstance(wish, Mapping):
        table = {str(tag): str(device) for tag, device in wish.items()}
        return [table.get(tag, tag) for tag in tags]
    return [] if _is_function(wish) else [str(wish)]
