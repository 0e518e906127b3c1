"""Which devices are missing on this machine, and which device is used instead."""

from __future__ import annotations

import os

from transload.patching import changes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any

    from transload.errors import TransloadError

requested = ""
"""The device to use instead of missing ones, or ``auto`` or ``spread``; empty while not patched."""

pretending = False
"""Whether ``torch.cuda.is_available()`` answers True without a GPU."""

asked: dict[tuple[CodeType, int], str] = {}
"""The lines where the program called ``torch.cuda.is_available()`` or the like, and the name of the function."""

refused = False
"""Whether the program ended because there was no GPU."""

refusal: TransloadError | None = None
"""The error of ``refuse_missing``, if it raised one."""

looking: list[str] = []
"""The devices that transload itself is looking for; while there are any, torch answers truthfully."""

_KINDS = frozenset({"cuda", "xpu", "hpu", "mtia", "mps"})
"""Kinds of devices that torch itself has. A kind that a package adds is present, or torch does not know its name."""
_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "LOCAL_RANK")

silent = False
"""Whether no warnings are given."""

warned: set[str] = set()
"""The warnings given so far: ``cuda to cpu``. Each is given once, in a process and its children."""

_counts: dict[tuple[str | None, ...], int] = {}
_final_counts: dict[str, int] = {}
substitutes: dict[tuple[str | None, ...], str] = {}


def substitute(device: Any) -> Any:
    """The ``torch.device`` to use instead of a missing device; anything else unchanged.

    Takes anything that torch takes as a device: a name, a ``torch.device``, an index.
    """
    import torch

    name = device
    if isinstance(device, int) and not isinstance(device, bool):
        name = "cuda" if device == -1 else f"cuda:{device}"  # -1 is Tensor.get_device() of a CPU tensor
    elif isinstance(device, torch.device):
        name = str(device)
    elif not isinstance(device, str):  # such as the dtype given to Tensor.to
        return device
    other = substitute_name(name) if is_missing(name) else ""
    return torch.device(other) if other else device


def is_missing(name: str) -> bool:
    """Whether this is the name of a device of torch's that this machine does not have."""
    from transload.devices import split

    kind, index = split(name)
    if not requested or kind not in _KINDS or (index is None and name != kind):
        return False
    count = _count(kind)
    return count >= 0 and (index or 0) >= count


def substitute_name(name: str) -> str:
    """The device to use instead of a missing one; warns the first time. Empty if that cannot be determined."""
    key = (name, requested, *map(os.environ.get, _HIDING))
    if key not in substitutes:
        from transload.devices import split
        from transload.loading.placement import devices_here

        try:
            looking.append(name)
            here = devices_here([name], 0)  # the same rules as transload.load
        except RuntimeError:  # CUDA cannot be initialised: torch will say why
            return ""
        finally:
            looking.pop()
        other = (here.own or "cpu") if requested in ("auto", "spread") else requested
        kind, index = split(name)
        if requested == "spread" and index is not None and _count(kind) > 0:
            other = f"{kind}:{index % _count(kind)}"
        substitutes[key] = other  # for good: a model and its inputs must be on the same device
        if (pair := f"{kind} to {other}") not in warned and not silent:
            from transload.errors import LandingWarning, warn

            warned.add(pair)
            absent = f"there is no {name} here{f'; {here.absent}' if here.absent else ''}"
            # as torch does: it raises an error that names the dtype or the operator
            lacks = "It has no float64. PYTORCH_ENABLE_MPS_FALLBACK=1 lets the CPU run what else it lacks"
            goes = f"Tensors saved on such a device or moved to it go to {other} instead"
            warn(f"{absent}. {goes}{f'. {lacks}' if other == 'mps' else ''}", LandingWarning)
    changes.note("device", name, substitutes[key])
    return substitutes[key]


def refuse_missing(name: str) -> None:
    """Raise ``NoDeviceError`` if the device to use instead of missing ones is missing, too."""
    global refusal  # noqa: PLW0603 - the command must recognise it among the errors of the program
    import torch

    from transload.devices import split

    kind, index = split(name)
    count: Any = getattr(getattr(torch, kind, None), "device_count", int)
    looking.append(name)
    try:
        if kind in _KINDS and count() <= (index or 0):  # counting initialises nothing, so the program may still fork
            from transload.errors import NoDeviceError
            from transload.loading.placement import devices_here, missing_here

            if (here := devices_here([name], 0)).get(name) is None:
                refusal = NoDeviceError(missing_here([name], here), fix="Choose a device that is here, or auto.")
                raise refusal
    finally:
        looking.pop()


def on_cpu() -> bool:
    """Whether the CPU is used instead of CUDA."""
    return is_missing("cuda") and substitute_name("cuda") == "cpu"


def _count(kind: str) -> int:
    """How many devices of a kind work here; -1 if torch cannot be asked now.

    Counted again when a variable that hides devices changes, which works until the first device is used.
    """
    if kind in _final_counts:
        return _final_counts[kind]
    key = (kind, *map(os.environ.get, _HIDING))
    if key not in _counts:
        import torch

        if kind == "cuda" and torch.cuda._is_in_bad_fork():  # torch raises an error for that
            return -1
        module: Any = getattr(torch, kind, None)
        functions = [getattr(module, name, bool) for name in ("is_available", "device_count")]
        if kind == "mps":
            functions = [torch.backends.mps.is_available] * 2
        # Without our patches.
        is_available, device_count = (getattr(function, "__wrapped__", function) for function in functions)
        looking.append(kind)  # one of these functions may call the other, which is patched
        try:
            _counts[key] = int(is_available() and device_count())
        finally:
            looking.pop()
        if _counts[key] and getattr(module, "is_initialized", bool)():
            _final_counts[kind] = _counts[key]
    return _counts[key]
