"""Calls that every tensor makes: each is counted, and an unusual one among them is reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.each import each, for_each

from transload.formats import read_source
from transload.io.sources import FileSource
from transload.judge import judge_ordinary
from transload.judge.safety import judge_pickles
from transload.nodes import Call, Dict, Global, Pickle

DATA = Path(__file__).parents[1] / "data"
Change = Callable[[Call, Call, Global], object]


def change_args(**places: object) -> Change:
    def change(call: Call, _: Call, __: Global) -> None:
        args = list(call.args)  # type: ignore[call-overload]
        for place, value in places.items():
            args[int(place[1:])] = value
        call.args = tuple(args)

    return change


# The change made to one of three tensors, and the codes of the findings it must cause.
CHANGES: dict[str, tuple[Change, list[str]]] = {
    "nothing": (lambda *_: None, []),
    "items in a tensor": (lambda call, *_: setattr(call, "items", [1, 2]), ["dangerous-use"]),
    "values in a tensor": (lambda call, *_: setattr(call, "appended", [1]), ["dangerous-use"]),
    "a state for a tensor": (lambda call, *_: setattr(call, "states", [Dict([])]), ["trusted-use"]),
    "keywords": (lambda call, *_: setattr(call, "kwargs", Dict(["a", 1])), ["trusted-use"]),
    "empty keywords": (lambda call, *_: setattr(call, "kwargs", Dict([])), []),
    "too many arguments": (lambda call, *_: setattr(call, "args", (*call.args, 1, 2)), ["odd-use"]),
    "arguments not in a tuple": (lambda call, *_: setattr(call, "args", [1]), ["odd-use"]),
    "requires_grad is a number": (change_args(_4=1), ["trusted-use"]),
    "hooks are None": (change_args(_5=None), []),
    "hooks are a number": (change_args(_5=3), ["trusted-use"]),
    "hooks with items": (lambda _, hooks, __: setattr(hooks, "items", [1, 2]), ["trusted-use"]),
    "hooks with a state": (lambda _, hooks, __: setattr(hooks, "states", [Dict(["a", 1])]), ["trusted-use"]),
    "hooks with values": (lambda _, hooks, __: setattr(hooks, "appended", [1]), ["odd-use", "trusted-use"]),
    "hooks with arguments": (lambda _, hooks, __: setattr(hooks, "args", ([[1, 2]],)), ["trusted-use"]),
    "hooks made by another callable": (lambda _, hooks, other: setattr(hooks, "callee", other), ["trusted-use"]),
    "a tensor made by another callable": (lambda call, _, other: setattr(call, "callee", other), []),
    "a tensor made by a computed callable": (
        lambda call, hooks, _: setattr(call, "callee", hooks),
        ["dangerous-use"],
    ),
}


def pickle_with(change: Change) -> Pickle:
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


@each("name", list(CHANGES))
def test_one_unusual_tensor_is_reported_and_all_calls_are_counted(name: str) -> None:
    change, expected = CHANGES[name]
    judgement = judge_pickles([pickle_with(change)])
    assert [finding.code for finding in judgement.findings if finding.code != "dangerous-globals"] == expected
    assert sum(use.called for use in judgement.globals) == (5 if "computed" in name else 6)


@each("name", list(CHANGES))
def test_judge_ordinary_declines_a_pickle_with_an_unusual_call(name: str) -> None:
    pickle = pickle_with(CHANGES[name][0])
    assert judge_ordinary([pickle]) is None  # it names os.system
    del pickle.globals["os", "system"]
    assert judge_ordinary([pickle]) == (judge_pickles([pickle]) if name == "nothing" else None)


def test_state_of_an_ordered_dict_is_ordinary_only_if_it_is_metadata() -> None:
    for state, expected in (
        (Dict(["_metadata", 1]), True),
        (Dict(["items", 1]), False),
        (Dict(["_metadata", 1, "items", 2]), False),
        (("_metadata", 1), False),
    ):
        pickle = Pickle("data.pkl")
        ordered = pickle.globals["collections", "OrderedDict"] = Global("collections", "OrderedDict", 0)
        call = Call(ordered, (), "reduce", 0)
        call.states = [state]
        pickle.calls.append(call)
        assert judge_ordinary([pickle]) == (judge_pickles([pickle]) if expected else None)


def test_judge_ordinary_agrees_with_judge_pickles_on_the_fixtures() -> None:
    ordinary_files = []

    def check_agreement(path: Path) -> None:
        pickles = read_source(FileSource(path)).pickles
        ordinary = judge_ordinary(pickles)
        if ordinary is not None and pickles:
            ordinary_files.append(path)
            assert ordinary == judge_pickles(pickles)

    for_each(sorted(DATA.rglob("*.pt")), check_agreement)
    assert len(ordinary_files) > 10
