"""Installing the patches and removing them: into torch, ``sys.excepthook`` and children of ``multiprocessing``.

``install`` waits until a module is imported, so that a program that never imports torch pays nothing.
"""

from __future__ import annotations

import os
import sys
from functools import wraps

from transload.patching import devices, uncaught

TYPE_CHECKING = False  # importing typing costs more than the rest of this module
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_ABSENT = object()
_undo: list[Callable[[], None]] = []
_waiting: dict[str, Callable[[ModuleType], None]] = {}


def install(device: str, *, explain: bool = True) -> None:
    """Use ``device`` instead of missing devices; remove the patches if it is empty."""
    before, devices.requested = devices.requested, device
    if device and not before:
        when_imported("torch", _patch_torch)
        when_imported("multiprocessing.spawn", _patch_spawn)
        if explain:
            replace(sys, "excepthook", uncaught.explained(sys.excepthook))
    elif before and not device:
        undo()


def replace(owner: object, name: str, value: object) -> None:
    """Set an attribute of a module or class that is not ours, until ``undo``; an inherited one is shadowed.

    >>> class Theirs:
    ...     size = 1
    >>> replace(Theirs, "size", 2)
    >>> replace(Theirs, "colour", "red")
    >>> undo()
    >>> Theirs.size, hasattr(Theirs, "colour")
    (1, False)
    """
    before = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)

    def restore() -> None:
        if vars(owner).get(name) is not value:
            return  # somebody has replaced it since then, perhaps by a wrapper around ours, which now does nothing
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    _undo.append(restore)


def undo() -> None:
    """Restore everything that was replaced, in reverse order, and stop waiting for imports."""
    _waiting.clear()
    if _Watch in sys.meta_path:
        sys.meta_path.remove(_Watch)
    while _undo:
        _undo.pop()()


def _patch_torch(torch: Any) -> None:
    from transload.patching.torch_patches import patch_torch

    patch_torch(torch, replace, _undo.append, when_imported)


# -- children of multiprocessing


def _patch_spawn(spawn: Any) -> None:
    """Patch children of ``multiprocessing``, through the data that it prepares for them.

    A forked child inherits the patches. One that is spawned, or forked from the server, first unpickles the data of its
    parent and only then imports the main module, so an entry that patches when it is unpickled is in time. The server
    itself, which imports the main module since Python 3.14, gets the module's path in its command line.
    """
    real = spawn.get_preparation_data

    @wraps(real)
    def get_preparation_data(*args: Any, **kwargs: Any) -> Any:
        data = real(*args, **kwargs)
        if devices.requested:
            data = {**data, "transload": _PatchInChild()}
            if "init_main_from_path" in data:
                data["init_main_from_path"] = _PatchInServer(data["init_main_from_path"])
        return data

    replace(spawn, "get_preparation_data", get_preparation_data)


class _PatchInChild:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (_child_code(), {})


class _PatchInServer(str):
    """A path that patches when its ``repr`` is evaluated; it unpickles as a plain ``str``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"[exec({_child_code()!r}, {{}}), {str(self)!r}][1]"

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)


def _child_code() -> str:
    home = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))  # noqa: PTH120
    state = {"device": devices.requested, "warned": sorted(devices.warned), "pretending": devices.pretending}
    return _CHILD_CODE.format(home=home, state=state)


# The child may not have transload on its path yet, and must not fail if it never has.
_CHILD_CODE = """
import sys
sys.path.append({home!r})
try:
    from transload.patching.install import install_in_child
    install_in_child(**{state!r})
except ImportError:
    pass
finally:
    if {home!r} in sys.path:
        sys.path.pop(len(sys.path) - 1 - sys.path[::-1].index({home!r}))
"""


def install_in_child(device: str, warned: list[str], pretending: bool) -> None:
    """Patch as the parent did, without repeating its warnings."""
    devices.warned.update(warned)
    devices.pretending = pretending
    install(device, explain=False)


# -- modules that are not imported yet


class _Watch:
    """A meta path finder that delegates to the others, and calls a function when a module has been executed."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _waiting:
            return None
        others = (finder for finder in sys.meta_path if finder is not _Watch and hasattr(finder, "find_spec"))
        spec = next((spec for finder in others if (spec := finder.find_spec(name, path, target)) is not None), None)
        loader = None if spec is None else spec.loader
        if loader is not None and hasattr(loader, "exec_module"):
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                vars(loader).pop("exec_module", None)
                execute(module)
                if name in _waiting:
                    _waiting.pop(name)(module)

            # On this one loader, and only until it has run: the module keeps its usual loader.
            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def when_imported(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call ``action`` with the module, now or right after it has been imported."""
    module = sys.modules.get(name)
    if module is not None:
        action(module)
        return
    _waiting[name] = action
    if _Watch not in sys.meta_path:
        sys.meta_path.insert(0, _Watch)
