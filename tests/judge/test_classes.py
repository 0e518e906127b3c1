"""User-defined classes saved beside the weights: each is listed by name, and the printed lines load the file."""

from __future__ import annotations

import dataclasses
import enum
import io
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.makers import saved
from tests.release import needs_torch

import transload

pytestmark = needs_torch(2, 6)


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntFlag):
    LOW = 1
    HIGH = 2


class Point(NamedTuple):
    x: int
    y: int


ORIGIN = Point(0, 0)


@dataclasses.dataclass
class Settings:
    rate: float = 0.1
    point: Point = ORIGIN


@dataclasses.dataclass(frozen=True)
class Frozen:
    rate: float = 0.1


class Attributes(dict[str, Any]):
    """A dict whose items are also attributes, as in easydict, addict and yacs."""

    def __init__(self, items: dict[str, Any] | None = None) -> None:
        super().__init__()
        for key, value in (items or {}).items():
            self[key] = value
            setattr(self, key, value)


CASES: dict[str, tuple[Any, set[str]]] = {
    "enum": (Colour.RED, {"Colour"}),
    "flags": (Level.LOW | Level.HIGH, {"Level"}),
    "namedtuple": (Point(1, 2), {"Point"}),
    "dataclass": (Settings(), {"Settings", "Point"}),
    "frozen dataclass": (Frozen(), {"Frozen"}),
    "attributes": (Attributes({"a": 1, "b": [2]}), {"Attributes"}),
}


@pytest.fixture(autouse=True)
def _restore_safe_globals() -> Iterator[None]:
    before = torch.serialization.get_safe_globals()
    yield
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(before)


@pytest.mark.parametrize("case", CASES)
def test_user_classes_are_listed_and_the_printed_lines_load_them(case: str) -> None:
    value, names = CASES[case]
    file = saved({"w": torch.ones(2), "value": value})
    checkpoint = transload.inspect(file)
    untrusted = {use.name for use in checkpoint.globals if use.verdict != "data"} - {"getattr"}  # for enums
    assert (checkpoint.safety, untrusted) == ("needs-trust", names)
    with pytest.raises(transload.UnsafeError, match=f"GLOBAL .*({'|'.join(names)}|getattr) was not"):
        transload.load(file)
    (fix,) = (finding.fix for finding in checkpoint.findings if finding.code == "needs-trust")
    if case == "attributes":  # torch sets no items on user classes
        assert fix[0].startswith("Allowing the names is not enough")
        torch.serialization.add_safe_globals([Attributes])
        assert transload.load(file)["value"] == value
        return
    lines = [line for line in fix if not line.startswith(("$", "This extracts"))]
    for load in (torch.load, transload.load):
        namespace: dict[str, Any] = {"load": load, "path": io.BytesIO(file)}
        exec("\n".join(lines).replace("torch.load", "load"), namespace)  # noqa: S102 - the lines we tell users to paste
        assert namespace["obj"]["value"] == value


def test_printed_lines_use_transload_for_a_protocol_torch_cannot_read() -> None:
    file = io.BytesIO()
    torch.save({"w": torch.ones(2), "value": Settings()}, file, pickle_protocol=4)
    lines = _printed_lines(file)
    namespace: dict[str, Any] = {"path": io.BytesIO(file.getvalue())}
    exec("\n".join(lines), namespace)  # noqa: S102 - the lines we tell users to paste
    assert namespace["obj"]["value"] == Settings()
    assert lines[:2] == ["import torch", "import transload"]
    file = io.BytesIO()
    torch.save(np.array([1, None], dtype=object), file, pickle_protocol=4)
    assert _printed_lines(file)[0].startswith("Allowing the names is not enough: it holds a numpy array of objects")


def _printed_lines(file: io.BytesIO) -> list[str]:
    findings = transload.inspect(file.getvalue()).findings
    return [
        line
        for finding in findings
        if finding.code == "needs-trust"
        for line in finding.fix
        if line[:2] not in ("$ ", "Th")
    ]
