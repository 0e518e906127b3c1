"""``Frozen`` behaves like a frozen dataclass, and ``NamedTuple`` like that of ``typing``."""

from __future__ import annotations

import dataclasses
import pickle
import sys
from dataclasses import FrozenInstanceError, dataclass, field, fields, is_dataclass
from types import FrameType
from typing import Any

import pytest

from transload.frozen import Frozen, NamedTuple, replace


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
    instance = kind("a", table={"x": 1})
    assert [item.name for item in fields(kind)] == ["name", "sizes", "table"]
    assert replace(instance, sizes=(2,)) == dataclasses.replace(instance, sizes=(2,)) == kind("a", (2,), {"x": 1})
    assert kind("a").table is not kind("a").table
    assert is_dataclass(kind)


def test_attributes_cannot_be_set_or_deleted(kind: Any) -> None:
    instance = kind("a")
    with pytest.raises(FrozenInstanceError, match="name"):
        instance.name = "b"
    with pytest.raises(FrozenInstanceError, match="name"):
        del instance.name
    assert instance.name == "a"


def test_equality_is_by_value_and_class(kind: Any) -> None:
    assert kind("a") == kind("a")
    assert kind("a") != kind("b")
    assert kind("a") != "a"
    other: Any = Theirs("a")
    assert Ours("a") != other


def test_hash_is_by_value_and_needs_hashable_fields(kind: Any) -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(kind("a"))
    assert hash(kind("a", table=frozenset())) == hash(kind("a", table=frozenset()))


def test_repr_shows_the_fields(kind: Any) -> None:
    assert repr(kind("a", (1,))) == f"{kind.__name__}(name='a', sizes=(1,), table={{}})"


class Row(NamedTuple):
    """A row of a table."""

    name: str
    sizes: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        return len(self.sizes)


def test_named_tuples_have_defaults_and_methods_and_can_be_pickled() -> None:
    row = Row("a", sizes=(1, 2))
    assert (row.numel, Row("b").sizes, row._replace(name="c").name) == (2, (), "c")
    assert (Row.__doc__, Row._fields, Row.__annotations__["name"]) == ("A row of a table.", ("name", "sizes"), "str")
    assert pickle.loads(pickle.dumps(row)) == row == ("a", (1, 2))


def test_constructor_works_when_a_debugger_reads_its_variables() -> None:
    def trace(frame: FrameType, *_: object) -> object:
        frame.f_locals  # noqa: B018 - what a debugger shows
        return trace

    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        instance = Ours("a")
    finally:
        sys.settrace(before)
    assert vars(instance) == {"name": "a", "sizes": (), "table": {}}
