"""Something to do when a module has been imported: at once, or the moment it is."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

__all__ = ["forget", "when_imported"]


class _Watch:
    """A finder that finds nothing by itself: it lets the others find, and looks on while the module is executed."""

    def __init__(self) -> None:
        self.waiting: dict[str, Callable[[ModuleType], None]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.waiting:
            return None
        spec = self._found(name, path, target)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            self._follow(name, spec)
        return spec

    def _found(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        return next((spec for finder in others if (spec := finder.find_spec(name, path, target)) is not None), None)

    def _follow(self, name: str, spec: ModuleSpec) -> None:
        loader = spec.loader
        assert loader is not None  # noqa: S101 - for the type checker
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            execute(module)
            action = self.waiting.pop(name, None)
            if action is not None:
                action(module)

        # On this one loader, and only until it has run: the module keeps the loader it would have without us.
        loader.exec_module = exec_module  # type: ignore[method-assign]


_watch = _Watch()


def when_imported(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call ``action`` with the module, now or right after it has been imported."""
    module = sys.modules.get(name)
    if module is not None:
        action(module)
        return
    _watch.waiting[name] = action
    if _watch not in sys.meta_path:
        sys.meta_path.insert(0, _watch)


def forget() -> None:
    """Wait for nothing any more."""
    _watch.waiting.clear()
    if _watch in sys.meta_path:
        sys.meta_path.remove(_watch)
