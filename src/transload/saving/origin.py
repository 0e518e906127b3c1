"""Where a file comes from, recorded in it: what it was saved with, and what the tensors were on.

Nothing in it tells who saved it, on which host, or where to. torch reads no record of this name.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from transload._version import __version__
from transload.errors import UsageError
from transload.saving.pickled import Stored

__all__ = ["ORIGIN", "Origin", "origin_of"]

ORIGIN = b".transload/origin.json"

Origin = bool | Mapping[str, Any]

_MAX_ENTRIES = 64 << 10  # bytes of JSON the caller may add: it is read whenever somebody looks at the file
_MAX_DEPTH = 8
_MAX_BITS = 64  # of a number: others who read JSON know no longer ones
_FIX = "It takes names with plain values: texts, numbers, True, False, None, and lists and dicts of these."


def origin_of(wish: Origin, storages: Sequence[Stored]) -> bytes:
    """The record; empty if there shall be none."""
    if wish is False or wish is None:
        return b""
    facts: dict[str, Any] = {"schema": 1, "transload": __version__, **_software(), **_machine(), "time": _now()}
    facts["storages"] = _devices(storages)
    if wish is not True:
        facts["entries"] = _checked(wish)
    return json.dumps(facts, ensure_ascii=False, allow_nan=False).encode()


def _software() -> dict[str, Any]:
    import torch

    facts = {"torch": str(torch.__version__), "python": platform.python_version()}
    for name in ("cuda", "hip"):
        version = getattr(torch.version, name, None)
        if version:
            facts[name] = str(version)
    return facts


def _machine() -> dict[str, Any]:
    """The system, and the GPUs if torch already uses them: a save on the CPU shall not start CUDA."""
    import torch

    facts: dict[str, Any] = {"system": platform.system().lower(), "machine": platform.machine().lower()}
    try:
        if not torch.cuda.is_initialized():
            return facts
        count = torch.cuda.device_count()
        facts["gpus"] = [_gpu(torch.cuda.get_device_properties(index)) for index in range(count)]
    except Exception:  # noqa: BLE001 - a device that does not answer is no reason not to save
        return facts
    driver = _driver()
    return {**facts, "driver": driver} if driver else facts


def _gpu(properties: Any) -> dict[str, Any]:
    return {
        "name": str(properties.name),
        "capability": f"{properties.major}.{properties.minor}",
        "memory": int(properties.total_memory),
    }


def _driver() -> str:
    try:
        with open("/sys/module/nvidia/version", encoding="ascii") as file:  # noqa: PTH123 - a file of the system
            return file.read(64).strip()
    except (OSError, ValueError):
        return ""


def _now() -> str:
    from datetime import datetime, timezone

    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _devices(storages: Sequence[Stored]) -> list[list[Any]]:
    """The device each storage had, in the order of their keys: a device, and how many in a row were on it."""
    import torch

    cpu = torch.device("cpu")
    found = groupby(each.storage.device for each in storages)
    return [["cpu" if device == cpu else str(device), sum(1 for _ in row)] for device, row in found]


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
