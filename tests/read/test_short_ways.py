"""The short ways of reading what nearly all tensors are tell the same as the long ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from transload.formats import safetensors, tensors
from transload.formats import tensors as rebuild
from transload.formats.tensors import Budget, Place, StorageTable
from transload.io.sources import BytesSource
from transload.nodes import Call, Dict, Global, Persistent

V2 = Global("torch._utils", "_rebuild_tensor_v2", 0)
HALF = Global("torch", "HalfStorage", 0)
PACKED = Global("torch", "QUInt4x2Storage", 0)
FULL = (0, (2, 5), (5, 1), False)

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "plain": FULL,
    "scalar": (9, (), (), False),
    "empty": (10, (0, 3), (3, 1), False),
    "expanded": (1, (1 << 40,), (0,), False),
    "too many": (1, (1 << 62, 4), (0, 0), False),
    "one too far": (1, (2, 5), (5, 1), False),
    "exactly": (1, (3, 3), (3, 1), False),
    "offset below zero": (-1, (2,), (1,), False),
    "offset no number": ("0", (2,), (1,), False),
    "offset a flag": (True, (2,), (1,), False),
    "a size below zero": (0, (-2,), (1,), False),
    "a size that is a flag": (0, (True,), (1,), False),
    "a stride below zero": (0, (2,), (-1,), False),
    "an absurd stride": (0, (1,), (1 << 63,), False),
    "an absurd size": (0, (1 << 63,), (0,), False),
    "ranks differ": (0, (2, 5), (1,), False),
    "many dimensions": (0, (1,) * 9, (1,) * 9, False),
    "lists": (0, [2, 5], [5, 1], False),
    "torch.Size": (0, Call(Global("torch", "Size", 0), ((2, 5),), "reduce", 0), (5, 1), False),
    "gradients": (0, (2, 5), (5, 1), True),
    "an odd flag": (0, (2, 5), (5, 1), 1),
}
STORAGES: dict[str, Any] = {
    "half": ("storage", HALF, "0", "cpu", 10),
    "as bytes": (b"storage", HALF, "0", "cpu", 10),
    "packed": ("storage", PACKED, "0", "cuda:1", 10),
    "numbered": ("storage", HALF, 0, "cpu", 10),
    "a view": ("storage", HALF, "0", "cpu", 10, ("1", 2, 8)),
    "below zero": ("storage", HALF, "0", "cpu", -10),
    "absurd": ("storage", HALF, "0", "cpu", 1 << 70),
    "no class": ("storage", "HalfStorage", "0", "cpu", 10),
    "another class": ("storage", Global("torch", "Half", 0), "0", "cpu", 10),
    "no id": "storage",
}


def tree_of(pid: Any, args: tuple[Any, ...], times: int = 2) -> tensors.Tree:
    hooks = Call(Global("collections", "OrderedDict", 0), (), "reduce", 0)
    held = [Persistent(pid, 0), Persistent(pid, 9), Persistent(("storage", HALF, "0", "cpu", 11), 9)]
    calls = [Call(V2, (node, *args, hooks), "reduce", 0) for node in held]
    items: list[Any] = [part for index, call in enumerate(calls * times) for part in (f"name{index}", call)]
    table = StorageTable(lambda key, nbytes: Place(64, nbytes, f"data/{key}", 7))
    table.enter(held)
    return tensors.find_tensors(Dict([*items, "sub", Dict(items)]), table)


def the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def enter(table: StorageTable, nodes: list[Persistent]) -> None:
        for node in nodes:
            table.resolve(node)

    monkeypatch.setattr(tensors, "ordinary", lambda *_: None)
    monkeypatch.setattr(StorageTable, "enter", enter)


@pytest.mark.parametrize("storage", list(STORAGES))
@pytest.mark.parametrize("arguments", list(ARGUMENTS))
def test_tensors_are_the_same_the_short_way(monkeypatch: pytest.MonkeyPatch, storage: str, arguments: str) -> None:
    short = tree_of(STORAGES[storage], ARGUMENTS[arguments])
    the_long_way(monkeypatch)
    assert short == tree_of(STORAGES[storage], ARGUMENTS[arguments])


def test_the_short_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "apply", None)
    monkeypatch.setattr(rebuild, "apply", None)
    assert len(tree_of(STORAGES["half"], FULL).tensors) == 12


@pytest.mark.parametrize(("names", "repeats"), [(9, 50_000), (1 << 20, 3), (40, 3)])
def test_the_short_way_costs_the_same(monkeypatch: pytest.MonkeyPatch, names: int, repeats: int) -> None:
    monkeypatch.setattr(Budget, "MAX_NAMES", names)
    monkeypatch.setattr(Budget, "MAX_REPEATS", repeats)
    short = tree_of(STORAGES["half"], FULL)
    assert [problem.code for problem in short.problems if problem.code == "tree-too-large"]
    the_long_way(monkeypatch)
    assert short == tree_of(STORAGES["half"], FULL)


ENTRIES: dict[str, Any] = {
    "plain": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "scalar": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
    "empty": {"dtype": "F32", "shape": [0, 1 << 40], "data_offsets": [0, 0]},
    "an absurd size beside none": {"dtype": "F32", "shape": [0, 1 << 64], "data_offsets": [0, 0]},
    "overflow before none": {"dtype": "F32", "shape": [1 << 40, 1 << 40, 0], "data_offsets": [0, 0]},
    "half bytes": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]},
    "packed": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]},
    "not in torch": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]},
    "unknown": {"dtype": "F33", "shape": [4], "data_offsets": [0, 16]},
    "unknown and empty": {"dtype": "F33", "shape": [], "data_offsets": [0, 0]},
    "too short": {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]},
    "backwards": {"dtype": "F32", "shape": [1], "data_offsets": [8, 4]},
    "below zero": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]},
    "a flag": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
    "a flag for an offset": {"dtype": "BOOL", "shape": [1], "data_offsets": [False, True]},
    "a float": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]},
    "many dimensions": {"dtype": "F32", "shape": [1] * 9, "data_offsets": [0, 4]},
    "three offsets": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]},
    "a field too many": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], "x": 1},
    "a field too few": {"dtype": "F32", "shape": [1]},
    "a list": ["F32", [1], [0, 4]],
    "nothing": None,
}


@pytest.mark.parametrize("entry", list(ENTRIES))
def test_entries_of_safetensors_are_the_same_the_short_way(monkeypatch: pytest.MonkeyPatch, entry: str) -> None:
    table = {"first": ENTRIES[entry], "second": {"dtype": "I8", "shape": [3], "data_offsets": [16, 19]}}
    header = json.dumps(table).encode()
    source = BytesSource(len(header).to_bytes(8, "little") + header + bytes(18))
    short = safetensors.read_safetensors(source)
    monkeypatch.setattr(safetensors, "_ordinary", lambda *_: None)
    assert short == safetensors.read_safetensors(source)
