"""Where a storage of some tag goes, as torch storages: a plan, or the function the caller gave, put into practice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from transload.loading.errors import DoesNotFitError, LoadError, NoDeviceError

if TYPE_CHECKING:
    import torch

    from transload.place import Plan

__all__ = ["Arrival", "wanted_devices"]


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
