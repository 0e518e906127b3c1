"""What the short checks of the judge accept, its full checks accept, too."""

from __future__ import annotations

from itertools import product
from typing import Any

from tests.each import for_each

from transload.judge.safety import _Judge, _Use, _usual_call, check_call
from transload.nodes import ORDINARY_CALLS, Call, Dict, Global, Set, is_ordinary_call

NAMES = [
    *ORDINARY_CALLS,
    ("torch", "Size"),
    ("torch", "device"),
    ("torch", "FloatStorage"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("builtins", "getattr"),
    ("builtins", "type"),
    ("builtins", "set"),
    ("_codecs", "encode"),
    ("argparse", "Namespace"),
    ("some.library", "Thing"),
    ("os", "system"),
]
ORDINARY = tuple(Global(*key, 0) for key in ORDINARY_CALLS)
ORDERED_DICT = ORDINARY[0]
HOOKS = Call(ORDERED_DICT, (), "reduce", 0)
WITH_ITEMS = Call(ORDERED_DICT, (), "reduce", 0)
WITH_ITEMS.items = ["a", 1]
ARGS: list[Any] = [
    *((), None, [], ((),), ((1, 2),), ((1, True),), ((1, "2"),), ((1,) * 100,), ((1,) * 101,), ([1],), (1,), ("a",)),
    *((ORDERED_DICT, "a"), (ORDERED_DICT, "__class__"), (Dict([]),), ([["a", 1]],), ((1,), (2,))),
    *(
        (HOOKS, 0, (1,), (1,), flag, hooks)
        for flag in (False, 1, None)
        for hooks in (HOOKS, WITH_ITEMS, None, Dict([]))
    ),
    *((HOOKS, flag, hooks) for flag in (True, 0) for hooks in (HOOKS, WITH_ITEMS, Set([]))),
    (HOOKS, 0, (1,), (1,), False, HOOKS, Dict(["conj", 1])),
]
STATES: list[Any] = [
    *(None, [], [Dict([])], [Dict(["fqn", "a", "index", 1])], [Dict(["__class__", 1])], [Dict(["_metadata", 1])]),
    *([Dict(["_metadata", 1, "items", 2])], [(None, Dict(["__class__", 1]))], [Dict([]), (None, Dict(["__a__", 1]))]),
    *([(1, 2)], [None], [Dict([]), Dict([])]),
]


def calls(callee: Global) -> list[Call]:
    """Calls with all kinds of arguments, attributes and items."""
    made = []
    more: list[Any] = [
        (None, None, None),
        (Dict([]), None, None),
        (None, ["a", 1], None),
        (None, None, [1]),
        (None, [], []),
    ]
    for args, states, (kwargs, items, appended) in product(ARGS, STATES, more):
        call = Call(callee, args, "reduce", 0)
        call.states, call.kwargs, call.items, call.appended = states, kwargs, items, appended
        made.append(call)
    return made


def test_full_checks_accept_what_the_short_ones_do() -> None:
    accepted: dict[str, int] = {}

    def check(key: tuple[str, str]) -> None:
        use = _Use(*key, "")
        full = ".".join(key)
        accepts = _usual_call(use)
        node = next((node for node in ORDINARY if (node.module, node.name) == key), None) or Global(*key, 0)
        for call in calls(node):
            if not (accepts(call) if accepts else is_ordinary_call(call, *ORDINARY)):
                continue
            accepted[full] = accepted.get(full, 0) + 1
            judge = _Judge(getattr_allowed=False)
            complaint = check_call(full, call) if use.verdict == "data" else judge.check_other(full, call)
            assert (complaint, judge.unloadable) == (None, ""), (call.args, call.states)
            assert use.verdict != "dangerous"

    for_each(NAMES, check)
    short = {"torch.Size", "argparse.Namespace", "some.library.Thing", *(".".join(key) for key in ORDINARY_CALLS)}
    short |= {f"torch.distributed.checkpoint.{name}" for name in ("metadata.MetadataIndex", "filesystem._StorageInfo")}
    assert accepted.keys() == short
