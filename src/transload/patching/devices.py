"""Which devices are missing on this machine, and which device is used instead."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, FrameType
    from typing import Any

requested = ""
"""The device to use instead of missing ones, or ``auto`` or ``spread``; empty while not patched."""

pretending = False
"""Whether ``torch.cuda.is_available()`` is to be True though it is not."""

asked: dict[tuple[CodeType, int], str] = {}
"""Where the program has asked ``torch.cuda.is_available()`` or the like, and was told that there is no GPU."""

refused = False
"""Whether the program ended because of that."""

noted: dict[str, None] = {}
"""What was changed for the program, in order, for the list at its end."""

answered: dict[str, None] = {}
"""The functions that were answered for the CPU, likewise."""

looking: list[str] = []
"""The device we are looking for ourselves, so that we hear the truth."""

_KINDS = frozenset({"cuda", "xpu", "hpu", "mtia", "mps"})
"""Devices that torch knows by itself. One that a package adds is present, or torch does not know its name."""
_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "LOCAL_RANK")

warned: set[str] = set()
"""The warnings given so far: ``cuda to cpu``. Each is given once, also by the children of a process."""

_counts: dict[tuple[str | None, ...], int] = {}
_settled: dict[str, int] = {}
_substitutes: dict[tuple[str | None, ...], str] = {}


def substitute(device: Any) -> Any:
    """The ``torch.device`` to use instead of a missing device; anything else unchanged.

    Takes whatever torch takes for a device: a name, a ``torch.device``, an index.
    """
    name = _name(device)
    if not name or not is_missing(name):
        return device
    import torch

    other = substitute_name(name)
    return torch.device(other) if other else device


def is_missing(name: str) -> bool:
    """Whether torch knows a device of this name and this machine does not have it."""
    kind, colon, index = name.partition(":")
    if not requested or kind not in _KINDS or (colon and not index.isdecimal()):
        return False
    count = _count(kind)
    return count >= 0 and int(index or 0) >= count


def substitute_name(name: str) -> str:
    """The device to use instead of a missing one; warns the first time. Empty if that cannot be determined."""
    key = (name, requested, *map(os.environ.get, _HIDING))
    if key not in _substitutes:
        from transload.loading.placement import devices_here

        try:
            looking.append(name)
            found = devices_here([name], 0)  # the same rules as transload.load
        except RuntimeError:  # CUDA cannot be asked: torch will say why
            return ""
        finally:
            looking.pop()
        other = (found.own or "cpu") if requested in ("auto", "spread") else requested
        kind, _, index = name.partition(":")
        if requested == "spread" and index and _count(kind) > 0:
            other = f"{kind}:{int(index) % _count(kind)}"
        _substitutes[key] = other  # for good: a model and its inputs must meet
        noted[f"{name} → {other}"] = None
        _warn(name, other, found.absent)
    return _substitutes[key]


def on_cpu() -> bool:
    """Whether what is meant for CUDA goes to the CPU."""
    return is_missing("cuda") and substitute_name("cuda") == "cpu"


def _name(device: Any) -> str:
    """The name of a device (``cuda:1``); empty for anything else, such as the dtype given to ``Tensor.to``."""
    if isinstance(device, str):
        return device
    if isinstance(device, int):
        if device == -1:  # where Tensor.get_device() says a tensor of the CPU is
            return "cuda"
        return "" if isinstance(device, bool) or device < 0 else f"cuda:{device}"
    import torch

    return str(device) if isinstance(device, torch.device) else ""


def _count(kind: str) -> int:
    """How many devices of a kind work here; -1 if torch cannot be asked now.

    Asked again when a variable that hides devices changes, as a program may do until it uses the first one.
    """
    if kind in _settled:
        return _settled[kind]
    key = (kind, *map(os.environ.get, _HIDING))
    if key not in _counts:
        import torch

        if kind == "cuda" and torch.cuda._is_in_bad_fork():  # noqa: SLF001 - torch has its own words for that
            return -1
        module: Any = getattr(torch, kind, None)
        looking.append(kind)  # torch may ask one by the other, which is ours
        try:
            if kind == "mps":
                _counts[key] = int(torch.backends.mps.is_available())
            else:
                known = hasattr(module, "is_available") and hasattr(module, "device_count")
                _counts[key] = int(_true(module.device_count)()) if known and _true(module.is_available)() else 0
        finally:
            looking.pop()
        if _counts[key] and getattr(module, "is_initialized", bool)():
            _settled[kind] = _counts[key]
    return _counts[key]


def _true(function: Any) -> Any:
    """A function of torch without our wrapper."""
    return getattr(function, "__wrapped__", function)


def _warn(name: str, other: str, why: str) -> None:
    """Warn once for each pair of devices, at the program's own line: above frames of torch and transload."""
    import warnings

    from transload.errors import LandingWarning

    pair = f"{name.partition(':')[0]} to {other}"
    if pair in warned:
        return
    warned.add(pair)
    because = f"; {why}" if why else ""
    text = f"there is no {name} here{because}. What was saved on such a device, or is sent to it, goes to {other}"
    inside = tuple(f"{os.path.dirname(sys.modules[name].__file__ or '?')}{os.sep}" for name in ("torch", "transload"))  # noqa: PTH120
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    level = 2
    while frame is not None and frame.f_code.co_filename.startswith(inside):
        frame = frame.f_back
        level += 1
    warnings.warn(text, LandingWarning, stacklevel=level)
