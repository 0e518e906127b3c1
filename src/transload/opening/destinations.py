"""Where the tensors of an open checkpoint land, one by one, and the one warning that tells of it."""

from __future__ import annotations

import sys
import warnings
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

from transload.loading.arrival import Arrival, wanted_devices
from transload.loading.errors import LandingWarning, NoDeviceError

if TYPE_CHECKING:
    from transload.checkpoint import Checkpoint
    from transload.place import Plan

__all__ = ["Destinations", "caller"]


class Destinations:
    """The device for each tag, by a plan that is made when it is first needed.

    A wish is what ``map_location`` is to ``transload.load``. Whether all of the checkpoint would fit is not asked:
    tensors are read one at a time, and perhaps not all of them.
    """

    def __init__(self, checkpoint: Checkpoint, wish: Any) -> None:
        self._checkpoint = checkpoint
        self._wish = wish
        self._known: dict[str, str] = {}
        self._told = False
        self._lock = Lock()

    def device(self, tag: str) -> str:
        """The device for what is tagged so; ``NoDeviceError`` if it is not here."""
        known = self._known.get(tag)
        if known is None:
            with self._lock:
                known = self._known[tag] = self.arrival.device(tag)
                self._tell(moved=known != tag)
        return known

    @cached_property
    def arrival(self) -> Arrival:
        """How storages get there."""
        return Arrival(self._plan, self._wish, self._checkpoint.path)

    @cached_property
    def _plan(self) -> Plan:
        from transload.loading.here import devices_here
        from transload.place import place

        checkpoint = self._checkpoint
        wanted = wanted_devices([use.device for use in checkpoint.devices], self._wish)
        plan = place(checkpoint, devices_here(wanted), self._wish)
        if plan.refused:
            fix = "\n".join(plan.fix).replace("map_location", "device")
            raise NoDeviceError(plan.refused, where=checkpoint.path, fix=fix)
        return plan

    def _tell(self, *, moved: bool) -> None:
        if moved and not self._told and self._plan.warning:
            self._told = True
            warnings.warn(f"{self._checkpoint.path}: {self._plan.warning}", LandingWarning, stacklevel=caller())


def caller() -> int:
    """How far above the one who asks the first frame is that is not ours: a warning shall name the user's line."""
    level = 1
    frame = sys._getframe(1)  # noqa: SLF001 - warnings has no other way before Python 3.12
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "transload":
        frame = frame.f_back
        level += 1
    return level
