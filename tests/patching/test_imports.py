from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from transload import patching


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that can be imported and is not imported yet."""
    (tmp_path / "invented_module.py").write_text("value = 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "invented_module"
    sys.modules.pop("invented_module", None)
    patching.undo()


def test_callback_runs_once_right_after_the_import(name: str) -> None:
    seen: list[int] = []
    patching.when_imported(name, lambda module: seen.append(module.value))
    assert seen == []
    module = import_module(name)
    assert seen == [1]
    import_module(name)
    assert seen == [1]
    assert module.__loader__ is not None
    assert "exec_module" not in vars(module.__loader__)
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__


def test_callback_runs_at_once_for_an_imported_module(name: str) -> None:
    import_module(name)
    seen: list[ModuleType] = []
    patching.when_imported(name, seen.append)
    assert [module.__name__ for module in seen] == [name]


def test_callback_runs_when_a_failed_import_is_retried(name: str, tmp_path: Path) -> None:
    seen: list[int] = []
    patching.when_imported(name, lambda module: seen.append(module.value))
    good = (tmp_path / f"{name}.py").read_text(encoding="utf-8")
    (tmp_path / f"{name}.py").write_text("raise RuntimeError('broken, and longer')\n", encoding="utf-8")
    with pytest.raises(RuntimeError, match="broken"):
        import_module(name)
    (tmp_path / f"{name}.py").write_text(good, encoding="utf-8")
    import_module(name)
    assert seen == [1]


def test_missing_module_is_still_an_error() -> None:
    patching.when_imported("no_such_module_at_all", lambda _: None)
    try:
        with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
            import_module("no_such_module_at_all")
    finally:
        patching.undo()


def test_callback_does_not_run_after_undo(name: str) -> None:
    seen: list[ModuleType] = []
    patching.when_imported(name, seen.append)
    patching.undo()
    import_module(name)
    assert seen == []
