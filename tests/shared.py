"""Work that several tests share, done once even if they run in several processes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transload.opening import OpenCheckpoint

try:
    import fcntl
except ImportError:  # Windows, where one process runs all tests
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    import pytest

    from transload.opening.elements import ElementReader


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> tuple[Path, Any]:
    """A folder, and what ``make`` returned for it; both are the same in all pytest-xdist workers.

    The result must be plain data, because it is stored as JSON.
    """
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    answer = folder / "answer.json"
    with (folder / "lock").open("w") as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, also if the worker dies
        if not answer.exists():
            result = json.dumps(make(folder))
            answer.write_text(result, encoding="utf-8")
        return folder, json.loads(answer.read_text(encoding="utf-8"))


@contextmanager
def open_elements(f: Any) -> Iterator[ElementReader]:
    """The elements of the tensors of a checkpoint."""
    with OpenCheckpoint(f) as opened:
        yield opened.elements
