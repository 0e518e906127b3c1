"""The record in which ``transload.save`` describes the origin of a file: torch, the machine, its devices."""

from __future__ import annotations

from collections import Counter
from json import dumps, loads

from transload.render.words import plural

MAX_RECORD = 1 << 20  # ``transload.save`` writes less than 100 kB: something else wrote a longer one
_MAX_TEXT = 200  # characters of a value that are shown
_MAX_ITEMS = 64  # GPUs, rows of storages, entries
_PLAIN = ("transload", "torch", "cuda", "hip", "python", "system", "machine", "driver", "time")


def read_recorded(data: bytes) -> tuple[tuple[str, str], ...]:
    """The origin of a file according to the record, as names and short texts. Never raises.

    Empty if ``transload.save`` did not write it. Anybody can write anything into it: it is a hint, not a proof.

    >>> read_recorded(b'{"schema": 1, "torch": "2.13.0", "storages": [["cuda:1", 3], ["cpu", 1]]}')
    (('torch', '2.13.0'), ('saved from', 'cuda:1 (3 storages), cpu (1 storage)'))
    """
    try:
        origin = loads(data) if len(data) <= MAX_RECORD else None
    except (ValueError, RecursionError):
        origin = None
    if not isinstance(origin, dict) or not isinstance(origin.get("schema"), int):
        return ()
    out = [(name, _short(origin[name])) for name in _PLAIN if isinstance(origin.get(name), str) and origin[name]]
    gpus: Counter[str] = Counter()
    listed = origin.get("gpus")
    for gpu in listed[:_MAX_ITEMS] if isinstance(listed, list) else ():
        if isinstance(gpu, dict) and isinstance(gpu.get("name"), str):
            name, capability = _short(gpu["name"]), gpu.get("capability")
            gpus[f"{name} ({_short(capability)})" if isinstance(capability, str) and capability else name] += 1
    devices: dict[str, int] = {}
    listed = origin.get("storages")
    for row in listed if isinstance(listed, list) else ():
        if not isinstance(row, list) or len(row) != 2 or not isinstance(row[0], str) or type(row[1]) is not int:
            continue
        if row[0] in devices or len(devices) < _MAX_ITEMS:
            devices[_short(row[0])] = devices.get(_short(row[0]), 0) + max(0, row[1])
    counted = (
        ("gpus", ", ".join(f"{count} × {name}" if count > 1 else name for name, count in gpus.items())),
        ("saved from", ", ".join(f"{name} ({plural(count, 'storage')})" for name, count in devices.items())),
    )
    out += [pair for pair in counted if pair[1]]
    added = origin.get("entries")  # by the user
    for name, value in list(added.items())[:_MAX_ITEMS] if isinstance(added, dict) else ():
        out.append((_short(name), _short(value if isinstance(value, str) else dumps(value, ensure_ascii=False))))
    return tuple(out)


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"
