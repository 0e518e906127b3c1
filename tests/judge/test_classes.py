"""Values of a program's own classes beside the weights: each class is listed by its name, and the printed lines do."""

from __future__ import annotations

import dataclasses
import enum
import io
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
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
    """As easydict, addict and yacs have it: items that are attributes, too."""

    def __init__(self, held: dict[str, Any] | None = None) -> None:
        super().__init__()
        for key, value in (held or {}).items():
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
def _as_before() -> Iterator[None]:
    before = torch.serialization.get_safe_globals()
    yield
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(before)


@pytest.mark.parametrize("case", CASES)
def test_each_class_is_named_and_can_be_allowed(case: str) -> None:
    value, names = CASES[case]
    held = io.BytesIO()
    torch.save({"w": torch.ones(2), "value": value}, held)
    told = transload.inspect(held.getvalue())
    asked = {use.name for use in told.globals if use.verdict != "data"} - {"getattr"}  # which Python 3.11 needs
    assert (told.safety, asked) == ("needs-trust", names)
    with pytest.raises(transload.UnsafeError, match=f"GLOBAL .*({'|'.join(names)}|getattr) was not"):
        transload.load(held.getvalue())
    (fix,) = (finding.fix for finding in told.findings if finding.code == "needs-trust")
    if case == "attributes":  # torch puts items into no class of its own
        assert fix[0].startswith("Allowing the names is not enough")
        torch.serialization.add_safe_globals([Attributes])
        assert transload.load(held.getvalue())["value"] == value
        return
    lines = [line for line in fix if not line.startswith(("$", "This extracts"))]
    for load in (torch.load, transload.load):
        names_there: dict[str, Any] = {"load": load, "path": io.BytesIO(held.getvalue())}
        exec("\n".join(lines).replace("torch.load", "load"), names_there)  # noqa: S102 - what we print to paste
        assert names_there["obj"]["value"] == value


def test_the_lines_for_a_protocol_that_torch_does_not_know_use_transload() -> None:
    held = io.BytesIO()
    torch.save({"w": torch.ones(2), "value": Settings()}, held, pickle_protocol=4)
    lines = _lines(held)
    names_there: dict[str, Any] = {"path": io.BytesIO(held.getvalue())}
    exec("\n".join(lines), names_there)  # noqa: S102 - what we print to paste
    assert names_there["obj"]["value"] == Settings()
    assert lines[:2] == ["import torch", "import transload"]
    held = io.BytesIO()
    torch.save(np.array([1, None], dtype=object), held, pickle_protocol=4)
    assert _lines(held)[0].startswith("Allowing the names is not enough: it holds a numpy array of objects")


def _lines(held: io.BytesIO) -> list[str]:
    found = transload.inspect(held.getvalue()).findings
    return [line for each in found if each.code == "needs-trust" for line in each.fix if line[:2] not in ("$ ", "Th")]
