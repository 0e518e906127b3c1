"""Which chip an NVIDIA PCI device id is."""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from transload.diagnose.tables._data import Capability, parse_capability, table

__all__ = ["Chip", "chip_of", "chips", "is_data_centre", "is_nvswitch"]

# A chip owns a block of this many ids: neighbours farther apart say nothing of what lies between them.
_BLOCK = 0x80


@dataclass(frozen=True, slots=True)
class Chip:
    """What a device id tells: code name, generation and capability (None where not published).

    ``inferred`` is true of an id that no list holds but whose neighbours on both sides agree; ``code`` then names both.
    ``data_centre`` is true of products for data centres, the only ones forward compatibility works on.
    """

    code: str
    generation: str
    capability: Capability | None
    inferred: bool = False
    data_centre: bool = False


def _ids(runs: str) -> Iterator[int]:
    for run in runs.split():
        first, _, last = run.partition("-")
        yield from range(int(first, 16), int(last or first, 16) + 1)


@cache
def chips() -> dict[int, Chip]:
    """Every device id in the table, ascending."""
    server = set(_ids(table("chips")["data_centre"]))
    found: dict[int, Chip] = {}
    for code, row in table("chips")["chips"].items():
        capability = parse_capability(row["capability"]) if row["capability"] else None
        for device in _ids(row["ids"]):
            found[device] = Chip(code, row["generation"], capability, data_centre=device in server)
    return dict(sorted(found.items()))


def chip_of(device_id: int) -> Chip | None:
    """The chip of a PCI device id of vendor 0x10de; nothing where it cannot be told.

    >>> chip_of(0x2204)
    Chip(code='GA102', generation='Ampere', capability=(8, 6), inferred=False, data_centre=False)
    >>> chip_of(0x2209).inferred, chip_of(0x22A0)
    (True, None)
    """
    known = chips()
    if device_id in known:
        return known[device_id]
    order = list(known)
    at = bisect(order, device_id)
    if not 0 < at < len(order) or order[at] - order[at - 1] > _BLOCK:
        return None
    return _between(known[order[at - 1]], known[order[at]])


def _between(below: Chip, above: Chip) -> Chip | None:
    if below.generation != above.generation:
        return None
    code = below.code if below.code == above.code else f"{below.code} or {above.code}"
    capability = below.capability if below.capability == above.capability else None
    return Chip(code, below.generation, capability, inferred=True, data_centre=below.data_centre and above.data_centre)


def is_data_centre(name: str) -> bool:
    """Whether the name NVML or ``/proc/driver/nvidia/gpus`` gives a card is that of a data-centre product.

    >>> is_data_centre("NVIDIA A100-SXM4-80GB"), is_data_centre("Tesla T4"), is_data_centre("NVIDIA GeForce RTX 4090")
    (True, True, False)
    """
    names = table("chips")["data_centre_names"]
    words = re.split(r"[\s/-]+", name.strip().removeprefix("NVIDIA").strip())
    if words[0] in names["first_words"] or words[0] in names["models"]:
        return True
    return any(name.strip().endswith(ending) for ending in names["endings"])


def is_nvswitch(device_id: int) -> bool:
    """Whether a PCI device id of vendor 0x10de is an NVSwitch: such a machine needs the fabric manager.

    >>> is_nvswitch(0x22A3), is_nvswitch(0x2330)
    (True, False)
    """
    return device_id in set(_ids(table("chips")["nvswitches"]))
