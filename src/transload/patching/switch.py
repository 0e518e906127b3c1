"""On and off: what is put into torch and Python, and how it is taken out again."""

from __future__ import annotations

import sys

from transload.patching import imports, landing, uncaught
from transload.patching.changes import Changes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

__all__ = ["state", "turn"]

_changes = Changes()


def state() -> str:
    """The device that was wished for; nothing while not patched."""
    return landing.wish


def turn(wish: str, *, explaining: bool = True) -> None:
    """Make it so: landing on the wished device, or not at all."""
    before, landing.wish = landing.wish, wish
    if wish and not before:
        imports.when_imported("torch", _into_torch)
        imports.when_imported("multiprocessing.spawn", _into_children)
        if explaining:
            _changes.set(sys, "excepthook", uncaught.explained(sys.excepthook))
    elif before and not wish:
        imports.forget()
        _changes.undo()


def _into_torch(torch: Any) -> None:
    from transload.patching import functions, restoring

    restoring.begin(torch, _changes)
    functions.replace(torch, _changes)


def _into_children(spawn: ModuleType) -> None:
    from transload.patching import children

    children.prepare(spawn, _changes)
