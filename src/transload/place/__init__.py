"""Where each storage of a checkpoint shall land, and why: pure, without torch, before a byte is read."""

from transload.place.devices import Device, Devices, devices_of, local_rank
from transload.place.placing import AUTO, place, tags_of
from transload.place.plan import UNDECIDED, Move, Plan, Shortage

__all__ = [
    "AUTO",
    "UNDECIDED",
    "Device",
    "Devices",
    "Move",
    "Plan",
    "Shortage",
    "devices_of",
    "local_rank",
    "place",
    "tags_of",
]
