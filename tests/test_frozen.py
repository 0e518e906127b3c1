"""What stands in for frozen dataclasses behaves as they do."""

from __future__ import annotations

import pickle
import sys
from dataclasses import FrozenInstanceError, dataclass, field, fields, is_dataclass, replace
from types import FrameType
from typing import Any

import pytest

from transload.frozen import Frozen, NamedTuple


class Ours(Frozen):
    name: str
    sizes: tuple[int, ...] = ()
    table: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Theirs:
    name: str
    sizes: tuple[int, ...] = ()
    table: dict[str, int] = field(default_factory=dict)


@pytest.fixture(params=[Ours, Theirs])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_fields_defaults_and_replace(kind: Any) -> None:
    made = kind("a", table={"x": 1})
    assert [each.name for each in fields(kind)] == ["name", "sizes", "table"]
    assert replace(made, sizes=(2,)) == kind("a", (2,), {"x": 1})
    assert kind("a").table is not kind("a").table
    assert is_dataclass(kind)


def test_nothing_can_be_changed(kind: Any) -> None:
    made = kind("a")
    with pytest.raises(FrozenInstanceError, match="name"):
        made.name = "b"
    with pytest.raises(FrozenInstanceError, match="name"):
        del made.name
    assert made.name == "a"


def test_equality_is_by_value_and_class(kind: Any) -> None:
    assert kind("a") == kind("a")
    assert kind("a") != kind("b")
    assert kind("a") != "a"
    other: Any = Theirs("a")
    assert Ours("a") != other


def test_hash_goes_by_value_and_needs_hashable_fields(kind: Any) -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(kind("a"))
    assert hash(kind("a", table=frozenset())) == hash(kind("a", table=frozenset()))


def test_it_shows_itself(kind: Any) -> None:
    assert repr(kind("a", (1,))) == f"{kind.__name__}(name='a', sizes=(1,), table={{}})"


class Row(NamedTuple):
    """A row of a table."""

    name: str
    sizes: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        return len(self.sizes)


def test_named_tuples_have_defaults_methods_and_a_place() -> None:
    row = Row("a", sizes=(1, 2))
    assert (row.numel, Row("b").sizes, row._replace(name="c").name) == (2, (), "c")
    assert (Row.__doc__, Row._fields, Row.__annotations__["name"]) == ("A row of a table.", ("name", "sizes"), "str")
    assert pickle.loads(pickle.dumps(row)) == row == ("a", (1, 2))


def test_a_debugger_may_look_at_its_variables() -> None:
    def trace(frame: FrameType, *_: object) -> object:
        frame.f_locals  # noqa: B018 - what a debugger shows
        return trace

    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        made = Ours("a")
    finally:
        sys.settrace(before)
    assert vars(made) == {"name": "a", "sizes": (), "table": {}}
