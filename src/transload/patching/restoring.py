"""What ``torch.load`` does with a storage whose device is not here.

torch asks a public registry how to restore a storage to the device that the file, or ``map_location``, names for it. An
entry at its head is asked before torch looks for a device that is absent, and one at its end instead of giving up. So
``torch.load`` itself stays torch's, with all its arguments and whoever imported it when.
"""

from __future__ import annotations

import re

from transload.patching import landing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from transload.patching.changes import Changes

__all__ = ["begin"]

_FIRST, _LAST = -1_000_003, 1_000_003  # no two entries of a registry may have the same
_DEVICE = re.compile(r"[a-z]\w{0,30}(:\d{1,3})?")


def begin(torch: Any, changes: Changes) -> None:
    """Add the two entries."""
    serialization = torch.serialization

    def restore_absent(storage: Any, location: Any) -> Any:
        tag = location.decode("ascii", "replace") if isinstance(location, bytes) else location
        if not isinstance(tag, str) or not landing.lands_elsewhere(tag):
            return None
        return landed(storage, tag)

    def restore_unknown(storage: Any, location: Any) -> Any:
        if not landing.wish or not isinstance(location, str) or not _DEVICE.fullmatch(location):
            return None
        return landed(storage, location)

    def landed(storage: Any, tag: str) -> Any:
        device = landing.landing_of(tag)
        return serialization.default_restore_location(storage, device) if device and device != tag else None

    for priority, restore in ((_FIRST, restore_absent), (_LAST, restore_unknown)):
        serialization.register_package(priority, _tag_nothing, restore)
    changes.then(lambda: _leave(serialization, {restore_absent, restore_unknown}))


def _tag_nothing(_: Any) -> None:
    """What is saved is tagged as ever."""


def _leave(serialization: Any, ours: set[Any]) -> None:
    registry = getattr(serialization, "_package_registry", [])  # there is no public way out; while off they do nothing
    registry[:] = [entry for entry in registry if entry[2] not in ours]
