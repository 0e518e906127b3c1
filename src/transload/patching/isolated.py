"""A patch that leaves nothing behind, not even what it remembers: for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transload.patching import changes, devices, install


@contextmanager
def patched(device: str, *, pretend_cuda: bool) -> Iterator[dict[changes.Change, str]]:
    """Patch for a while, without warnings; yields the changes, as they are noted."""
    before, pretending, silent = devices.requested, devices.pretending, devices.silent
    asked, noted, substitutes = {**devices.asked}, {**changes.noted}, {**devices.substitutes}
    changes.noted.clear()
    try:
        install(device, explain=False)
        devices.pretending, devices.silent = pretend_cuda, True
        yield changes.noted
    finally:
        install(before)
        devices.pretending, devices.silent = pretending, silent
        devices.asked.clear()
        devices.asked.update(asked)
        if not silent:  # outside, the first use of each substitute warns
            devices.substitutes.clear()
            devices.substitutes.update(substitutes)
        meanwhile = {**changes.noted}
        changes.noted.clear()
        changes.noted.update({**noted, **meanwhile})  # for transload run -m pytest
