"""What a file says of its own origin: the record that ``transload.save`` writes, read without trusting it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

__all__ = ["MAX_RECORD", "RECORD", "Recorded", "read_recorded"]

RECORD = ".transload/origin.json"

MAX_RECORD = 1 << 20
"""Ours are below 100 kB. What is longer was not written by us, and is not parsed."""

_MAX_TEXT = 200  # characters of a value that are shown
_MAX_ITEMS = 64  # GPUs, rows of storages, entries
_PLAIN = ("transload", "torch", "cuda", "hip", "python", "system", "machine", "driver", "time")


class Recorded(NamedTuple):
    """Where a file comes from, as it tells. Anybody can write anything into it: it is a hint, not a proof."""

    facts: tuple[tuple[str, str], ...]
    """Names of software and what is known of the machine, with their versions or values."""
    gpus: tuple[tuple[str, str], ...]
    """Each GPU's name and compute capability."""
    devices: tuple[tuple[str, int], ...]
    """The devices of the storages, and how many storages each had, in the order of their first."""
    entries: tuple[tuple[str, str], ...]
    """What the user has added: names, and values as JSON."""

    def pairs(self) -> tuple[tuple[str, str], ...]:
        """All of it as names and short texts, to be shown."""
        gpus = [f"{name} ({capability})" if capability else name for name, capability in self.gpus]
        counts = {each: gpus.count(each) for each in gpus}
        many = [f"{count} × {name}" if count > 1 else name for name, count in counts.items()]
        devices = [f"{name} ({count} storages)" for name, count in self.devices]
        named = (("gpus", ", ".join(many)), ("saved from", ", ".join(devices)))
        return (*self.facts, *(pair for pair in named if pair[1]), *self.entries)


def read_recorded(data: bytes) -> Recorded | None:
    """The origin in the bytes of the record; ``None`` if it is not one of ours. Never raises.

    >>> read_recorded(b'{"schema": 1, "torch": "2.13.0", "storages": [["cuda:1", 3], ["cpu", 1]]}').pairs()
    (('torch', '2.13.0'), ('saved from', 'cuda:1 (3 storages), cpu (1 storages)'))
    """
    found = _parsed(data)
    if not isinstance(found, dict) or not isinstance(found.get("schema"), int):
        return None
    facts = tuple((name, _short(found[name])) for name in _PLAIN if isinstance(found.get(name), str) and found[name])
    return Recorded(
        facts, tuple(_gpus(found.get("gpus"))), tuple(_devices(found.get("storages")).items()), _entries(found)
    )


def _parsed(data: bytes) -> Any:
    if len(data) > MAX_RECORD:
        return None
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"


def _gpus(found: Any) -> list[tuple[str, str]]:
    listed = [each for each in found[:_MAX_ITEMS] if isinstance(each, dict)] if isinstance(found, list) else []
    return [
        (_short(each["name"]), _short(each["capability"]) if isinstance(each.get("capability"), str) else "")
        for each in listed
        if isinstance(each.get("name"), str)
    ]


def _devices(found: Any) -> dict[str, int]:
    out: dict[str, int] = {}
    for row in found if isinstance(found, list) else ():
        if not isinstance(row, list) or len(row) != 2 or not isinstance(row[0], str) or type(row[1]) is not int:
            continue
        if row[0] in out or len(out) < _MAX_ITEMS:
            out[_short(row[0])] = out.get(_short(row[0]), 0) + max(0, row[1])
    return out


def _entries(found: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    held = found.get("entries")
    if not isinstance(held, dict):
        return ()
    return tuple((_short(name), _short(_text(value))) for name, value in list(held.items())[:_MAX_ITEMS])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
