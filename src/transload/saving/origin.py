"""The record of where a file comes from: the software it was saved with, and the devices the tensors were on.

It does not say who saved it, on which host, or to which path. torch ignores a record of this name.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from itertools import groupby
from typing import Any

from transload._version import __version__
from transload.errors import UsageError
from transload.saving.pickling import Stored

__all__ = ["ORIGIN", "Origin", "origin_of"]

ORIGIN = b".transload/origin.json"

Origin = bool | Mapping[str, Any]

_MAX_ENTRIES = 64 << 10  # bytes of JSON the caller may add: they are read whenever the file is inspected
_MAX_DEPTH = 8
_MAX_BITS = 64  # of a number: other readers of JSON support no longer ones
_FIX = "It takes names with plain values: texts, numbers, True, False, None, and lists and dicts of these."


def origin_of(origin: Origin, storages: Sequence[Stored]) -> bytes:
    """The record; empty if none is wanted."""
    if origin is False or origin is None:
        return b""
    import torch

    facts: dict[str, Any] = {"schema": 1, "transload": __version__}
    facts |= {"torch": str(torch.__version__), "python": platform.python_version()}
    facts |= {name: str(version) for name in ("cuda", "hip") if (version := getattr(torch.version, name, None))}
    facts |= {"system": platform.system().lower(), "machine": platform.machine().lower(), **_gpus()}
    facts["time"] = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    # The device of each storage in the order of their keys: a device, and how many storages in a row were on it.
    cpu = torch.device("cpu")
    rows = groupby(each.storage.device for each in storages)
    facts["storages"] = [["cpu" if device == cpu else str(device), sum(1 for _ in row)] for device, row in rows]
    if origin is not True:
        facts["entries"] = _checked(origin)
    return json.dumps(facts, ensure_ascii=False, allow_nan=False).encode()


def _gpus() -> dict[str, Any]:
    """The GPUs and their driver, if torch already uses them: saving tensors of the CPU must not initialise CUDA."""
    import torch

    try:
        if not torch.cuda.is_initialized():
            return {}
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        gpus = [
            {"name": str(each.name), "capability": f"{each.major}.{each.minor}", "memory": int(each.total_memory)}
            for each in devices
        ]
    except Exception:  # noqa: BLE001 - a device that does not answer is no reason not to save
        return {}
    with suppress(OSError, ValueError), open("/sys/module/nvidia/version", encoding="ascii") as file:  # noqa: PTH123
        if driver := file.read(64).strip():
            return {"gpus": gpus, "driver": driver}
    return {"gpus": gpus}


def _checked(entries: Any) -> dict[str, Any]:
    """The caller's entries, if JSON holds them as they are."""
    if not isinstance(entries, Mapping):
        raise UsageError(f"origin is a {type(entries).__name__}; it is True, False or a dict", fix=_FIX)
    plain: dict[str, Any] = _plain(entries, "origin", 0)
    nbytes = len(json.dumps(plain, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    if nbytes > _MAX_ENTRIES:
        raise UsageError(
            f"the entries of origin take {nbytes} bytes; {_MAX_ENTRIES} is the limit", fix="Leave some out."
        )
    return plain


def _plain(value: Any, place: str, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise UsageError(f"{place} lies too deep: {_MAX_DEPTH} levels is the limit", fix=_FIX)
    if isinstance(value, Mapping):
        wrong = next((key for key in value if not isinstance(key, str)), None)
        if wrong is not None:
            raise UsageError(f"{place} has the name {wrong!r:.80}, which is no text", fix=_FIX)
        return {_text(key, place): _plain(each, f"{place}[{key!r:.80}]", depth + 1) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each, f"{place}[{index}]", depth + 1) for index, each in enumerate(value)]
    if isinstance(value, str):
        return _text(value, place)
    if type(value) is int and value.bit_length() > _MAX_BITS:
        raise UsageError(f"{place} is a number of more than {_MAX_BITS} bits", fix="Write it as a text.")
    if value is None or type(value) in (bool, int) or (type(value) is float and math.isfinite(value)):
        return value
    raise UsageError(f"{place} is {value!r:.80}, a {type(value).__name__}, which JSON does not hold", fix=_FIX)


def _text(value: str, place: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{place} has a text that is not Unicode", fix=_FIX) from error
    return str(value)
