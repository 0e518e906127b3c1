"""Tensor arguments and storage ids, each with one odd value."""

from __future__ import annotations

from typing import Any

import pytest
from tests.each import each

from transload.checkpoint import Record
from transload.formats import graph
from transload.formats.tensors import Budget, StorageTable
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
    "too many elements": (1, (1 << 62, 4), (0, 0), False),
    "one element too far": (1, (2, 5), (5, 1), False),
    "exact fit": (1, (3, 3), (3, 1), False),
    "negative offset": (-1, (2,), (1,), False),
    "offset is not a number": ("0", (2,), (1,), False),
    "offset is a bool": (True, (2,), (1,), False),
    "negative size": (0, (-2,), (1,), False),
    "size is a bool": (0, (True,), (1,), False),
    "negative stride": (0, (2,), (-1,), False),
    "huge stride": (0, (1,), (1 << 63,), False),
    "huge size": (0, (1 << 63,), (0,), False),
    "ranks differ": (0, (2, 5), (1,), False),
    "many dimensions": (0, (1,) * 9, (1,) * 9, False),
    "lists": (0, [2, 5], [5, 1], False),
    "torch.Size": (0, Call(Global("torch", "Size", 0), ((2, 5),), "reduce", 0), (5, 1), False),
    "requires_grad": (0, (2, 5), (5, 1), True),
    "requires_grad is not a bool": (0, (2, 5), (5, 1), 1),
}
STORAGES: dict[str, Any] = {
    "half": ("storage", HALF, "0", "cpu", 10),
    "as bytes": (b"storage", HALF, "0", "cpu", 10),
    "packed": ("storage", PACKED, "0", "cuda:1", 10),
    "number as key": ("storage", HALF, 0, "cpu", 10),
    "a view": ("storage", HALF, "0", "cpu", 10, ("1", 2, 8)),
    "negative length": ("storage", HALF, "0", "cpu", -10),
    "huge length": ("storage", HALF, "0", "cpu", 1 << 70),
    "class is a string": ("storage", "HalfStorage", "0", "cpu", 10),
    "another class": ("storage", Global("torch", "Half", 0), "0", "cpu", 10),
    "not a tuple": "storage",
}


def tree_of(pid: Any, args: tuple[Any, ...], times: int = 2) -> graph.Tree:
    hooks = Call(Global("collections", "OrderedDict", 0), (), "reduce", 0)
    ids = [Persistent(pid, 0), Persistent(pid, 9), Persistent(("storage", HALF, "0", "cpu", 11), 9)]
    calls = [Call(V2, (node, *args, hooks), "reduce", 0) for node in ids]
    items: list[Any] = [part for index, call in enumerate(calls * times) for part in (f"name{index}", call)]
    table = StorageTable(lambda key, nbytes: Record(f"data/{key}", 64, nbytes, nbytes, 7))
    table.enter(ids)
    return graph.find_tensors(Dict([*items, "sub", Dict(items)]), table)


BROKEN = {
    "too many elements": "has more elements than torch can count",
    "one element too far": "it needs 22 bytes of a storage of 20",
    "negative offset": "its offset -1 is not a position",
    "offset is not a number": "its offset 0 is not a position",
    "offset is a bool": "its offset True is not a position",
    "negative size": "contains something that is not a size",
    "size is a bool": "contains something that is not a size",
    "negative stride": "contains something that is not a size",
    "huge stride": "contains something that is not a size",
    "huge size": "contains something that is not a size",
    "ranks differ": "it has 2 sizes and 1 strides",
    "lists": "its size is not a tuple of numbers",
}
"""The problem reported for these arguments. All others are valid."""

TENSORS_READ = {
    "half": 12,
    "as bytes": 12,
    "number as key": 12,
    "packed": 8,
    "a view": 4,
    "negative length": 0,
    "huge length": 0,
}
"""How many of the twelve tensors are read with a storage id. With an invalid id, those of the third id are."""


@each("arguments", list(ARGUMENTS))
def test_tensor_is_read_or_its_problem_reported(arguments: str) -> None:
    tree = tree_of(STORAGES["half"], ARGUMENTS[arguments])
    broken = [problem.detail for problem in tree.problems if problem.code == "tensor-broken"]
    if arguments in BROKEN:
        assert not tree.tensors
        assert broken
        assert all(BROKEN[arguments] in detail for detail in broken)
        return
    assert not broken
    assert len(tree.tensors) == 12
    offset, shape, stride, flag = ARGUMENTS[arguments]
    sizes = (2, 5) if arguments == "torch.Size" else shape
    for tensor in tree.tensors:
        assert (tensor.offset, tensor.shape, tensor.stride) == (offset, sizes, stride)
        assert tensor.requires_grad == (flag is True)
        assert (tensor.dtype, tensor.storage, tensor.file_offset) == ("float16", "0", 64 + 2 * offset)
    assert [problem.code for problem in tree.problems] == ["storage-conflict"]  # the third id


@each("storage", list(STORAGES))
def test_storage_lists_its_tensors(storage: str) -> None:
    tree = tree_of(STORAGES[storage], FULL)
    assert len(tree.tensors) == TENSORS_READ.get(storage, 4)
    (listed,) = tree.storages
    assert listed.tensors == tuple(tensor.name for tensor in tree.tensors)
    assert listed.device == ("cuda:1" if storage == "packed" else "cpu")
    expected = {"packed": 10, "negative length": 0, "huge length": 0}
    assert listed.nbytes == expected.get(storage, 20 if storage in TENSORS_READ else 22)


@pytest.mark.parametrize(("names", "repeats"), [(9, 50_000), (1 << 20, 3), (40, 3)])
def test_names_and_repeats_have_a_limit(monkeypatch: pytest.MonkeyPatch, names: int, repeats: int) -> None:
    monkeypatch.setattr(Budget, "MAX_NAMES", names)
    monkeypatch.setattr(Budget, "MAX_REPEATS", repeats)
    tree = tree_of(STORAGES["half"], FULL)
    assert "tree-too-large" in [problem.code for problem in tree.problems]
    assert len(tree.tensors) < 12
