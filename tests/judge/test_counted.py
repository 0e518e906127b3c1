"""Calls that every tensor makes are counted together, and judged as if one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from transload.judge.safety import _Judge, judge_pickles
from transload.nodes import Call, Dict, Global, Pickle

Change = Callable[[Call, Call, Global], object]


def change_args(**places: object) -> Change:
    def change(call: Call, _: Call, __: Global) -> None:
        args = list(call.args)  # type: ignore[call-overload]
        for place, value in places.items():
            args[int(place[1:])] = value
        call.args = tuple(args)

    return change


CHANGES: dict[str, Change] = {
    "nothing": lambda *_: None,
    "items in a tensor": lambda call, *_: setattr(call, "items", [1, 2]),
    "values in a tensor": lambda call, *_: setattr(call, "appended", [1]),
    "a state for a tensor": lambda call, *_: setattr(call, "states", [Dict([])]),
    "keywords": lambda call, *_: setattr(call, "kwargs", Dict(["a", 1])),
    "no keywords": lambda call, *_: setattr(call, "kwargs", Dict([])),
    "too many arguments": lambda call, *_: setattr(call, "args", (*call.args, 1, 2)),
    "no tuple": lambda call, *_: setattr(call, "args", [1]),
    "a flag that is none": change_args(_4=1),
    "hooks that are none": change_args(_5=None),
    "hooks that are odd": change_args(_5=3),
    "hooks with items": lambda _, hooks, __: setattr(hooks, "items", [1, 2]),
    "hooks with a state": lambda _, hooks, __: setattr(hooks, "states", [Dict(["a", 1])]),
    "hooks with values": lambda _, hooks, __: setattr(hooks, "appended", [1]),
    "hooks with arguments": lambda _, hooks, __: setattr(hooks, "args", ([[1, 2]],)),
    "hooks made by another": lambda _, hooks, other: setattr(hooks, "callee", other),
    "a tensor made by another": lambda call, _, other: setattr(call, "callee", other),
    "a tensor made by what was computed": lambda call, hooks, _: setattr(call, "callee", hooks),
}


def changed(change: Change) -> Pickle:
    pickle = Pickle("data.pkl")
    names = (("torch._utils", "_rebuild_tensor_v2"), ("collections", "OrderedDict"), ("os", "system"))
    tensor, ordered, other = (pickle.globals.setdefault(name, Global(*name, 0)) for name in names)
    for index in range(3):
        hooks = Call(ordered, (), "reduce", 10 * index)
        call = Call(tensor, (None, 0, (1,), (1,), False, hooks), "reduce", 10 * index + 5)
        if index == 1:
            change(call, hooks, other)
        pickle.calls += (hooks, call)
    return pickle


@pytest.mark.parametrize("name", list(CHANGES))
def test_the_judgement_is_that_of_calls_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pickle = changed(CHANGES[name])
    together = judge_pickles([pickle])
    monkeypatch.setattr(_Judge, "_count_ordinary", lambda _, pickle, __: pickle.calls)
    assert together == judge_pickles([pickle])


def test_ordinary_calls_are_counted_and_only_they() -> None:
    judge = _Judge()
    pickle = changed(CHANGES["a flag that is none"])
    keys = {id(node): judge._name(node, pickle) for node in pickle.globals.values()}
    assert judge._count_ordinary(pickle, keys) == [pickle.calls[3]]
