"""Which devices are here, and where that lands which is meant for another."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

__all__ = ["land", "landing_of", "lands_elsewhere", "tell_no_more", "told", "wish"]

wish = ""
"""The device that the program's owner wants in place of what is absent; ``auto``, or nothing while not patched."""

_KINDS = frozenset({"cuda", "xpu", "hpu", "mtia", "mps"})
"""Devices that torch knows by itself. One that a package adds is there, or its name is no device at all."""
_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "LOCAL_RANK")

_counts: dict[tuple[str | None, ...], int] = {}
_settled: dict[str, int] = {}
_landings: dict[tuple[str | None, ...], str] = {}
_told: set[str] = set()


def land(device: Any) -> Any:
    """The device itself where it is here or is none; where it is not, the ``torch.device`` to use in its place.

    Takes whatever torch takes for a device: a name, a ``torch.device``, an index.
    """
    name = _name(device)
    if not name or not lands_elsewhere(name):
        return device
    import torch

    landing = landing_of(name)
    return torch.device(landing) if landing else device


def lands_elsewhere(name: str) -> bool:
    """Whether a device of that name is one torch knows of, and not here."""
    kind, colon, index = name.partition(":")
    if not wish or kind not in _KINDS or (colon and not index.isdecimal()):
        return False
    count = _count(kind)
    return count >= 0 and int(index or 0) >= count


def landing_of(name: str) -> str:
    """Where that lands which is meant for an absent device; at first a warning says so. Nothing if we cannot tell."""
    key = (name, wish, *map(os.environ.get, _HIDING))
    if key not in _landings:
        landing, why = _chosen(name)
        if not landing:
            return ""
        _landings[key] = landing  # and stays so: a model and its inputs shall meet
        _tell(name, landing, why)
    return _landings[key]


def _name(device: Any) -> str:
    """``cuda:1`` of whatever may mean it; nothing of what is no device, such as the dtype given to ``Tensor.to``."""
    if isinstance(device, str):
        return device
    if isinstance(device, int):
        return "" if isinstance(device, bool) or device < 0 else f"cuda:{device}"
    import torch

    return str(device) if isinstance(device, torch.device) else ""


def _count(kind: str) -> int:
    """How many of a kind work here; -1 if that cannot be asked now.

    It is asked again when the variables change that hide devices, as a program may until it has touched the first.
    """
    if kind in _settled:
        return _settled[kind]
    key = (kind, *map(os.environ.get, _HIDING))
    if key not in _counts:
        import torch

        if kind == "cuda" and torch.cuda._is_in_bad_fork():  # noqa: SLF001 - torch has its own words for that
            return -1
        module = getattr(torch, kind, None)
        _counts[key] = int(torch.backends.mps.is_available()) if kind == "mps" else _working(module)
        if _counts[key] and getattr(module, "is_initialized", bool)():
            _settled[kind] = _counts[key]
    return _counts[key]


def _working(module: Any) -> int:
    if not (hasattr(module, "is_available") and hasattr(module, "device_count")):
        return 0
    return int(module.device_count()) if module.is_available() else 0


def _chosen(name: str) -> tuple[str, str]:
    """The device and the reason, by the same rules as ``transload.load``."""
    from transload.loading.placement import devices_here

    try:
        devices = devices_here([name], 0)
    except RuntimeError:  # CUDA cannot be asked: torch will say why
        return "", ""
    return (devices.own or "cpu") if wish == "auto" else wish, devices.absent


def _tell(name: str, landing: str, why: str) -> None:
    import warnings

    from transload.errors import LandingWarning

    way = f"{name.partition(':')[0]} to {landing}"
    if way in _told:
        return
    _told.add(way)
    because = f"; {why}" if why else ""
    text = f"there is no {name} here{because}. What was saved on such a device, or is sent to it, lands on {landing}"
    warnings.warn(text, LandingWarning, stacklevel=_level())


def told() -> list[str]:
    """What was warned of."""
    return sorted(_told)


def tell_no_more(ways: list[str]) -> None:
    """Take it that somebody was warned of this."""
    _told.update(ways)


def _level() -> int:
    """How far up the program's own line is: beyond what is ours and torch's."""
    inside = tuple(f"{os.path.dirname(sys.modules[name].__file__ or '?')}{os.sep}" for name in ("torch", "transload"))  # noqa: PTH120
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    level = 1
    while frame is not None and frame.f_code.co_filename.startswith(inside):
        frame = frame.f_back
        level += 1
    return level
