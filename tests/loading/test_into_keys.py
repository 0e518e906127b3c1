"""Which part of a checkpoint is matched with a model, however many other parts there are."""

from __future__ import annotations

import pytest

from transload.checkpoint import Checkpoint, Key, Tensor
from transload.errors import UsageError
from transload.loading.into.keys import BranchMatch, branches, find


def checkpoint(*paths: tuple[Key, ...], shape: tuple[int, ...] = (2,)) -> Checkpoint:
    """A file with a tensor at each path, each with a separate storage."""
    tensors = tuple(
        Tensor(path, "/".join(map(str, path)), "float32", shape, (1,), "cpu", str(index))
        for index, path in enumerate(paths)
    )
    return Checkpoint("model.pt", "torch-zip", 0, tensors=tensors)


def model_shapes(*keys: str) -> dict[str, tuple[int, ...] | None]:
    return dict.fromkeys(keys, (2,))


def matched_names(match: BranchMatch) -> dict[str, str]:
    return {key: tensor.name for key, tensor in match.tensors.items()}


OPTIMIZER_STATES: list[tuple[Key, ...]] = [
    ("optimizer", "state", n, key) for n in range(50) for key in ("exp_avg", "step")
]


@pytest.mark.parametrize("first", [True, False], ids=["model first", "model last"])
def test_model_is_found_among_many_small_branches(*, first: bool) -> None:
    model: list[tuple[Key, ...]] = [("model", "a.weight"), ("model", "a.bias")]
    paths = [*model, *OPTIMIZER_STATES] if first else [*OPTIMIZER_STATES, *model]
    match = find(checkpoint(*paths), model_shapes("a.weight", "a.bias"))
    assert match.branch.path == ("model",)
    assert matched_names(match) == {"a.weight": "model/a.weight", "a.bias": "model/a.bias"}
    assert (match.rest, match.score, match.notes) == ({}, (2, 2), ())


def test_small_and_large_branch_that_fit_equally_well_are_ambiguous() -> None:
    contents = checkpoint(("large", "w"), *(("large", f"x{n}") for n in range(9)), ("small", "w"))
    with pytest.raises(UsageError, match="2 places of the file fit the model equally well: small, large"):
        find(contents, model_shapes("w"))


def test_branch_with_most_direct_tensors_is_compared_when_nothing_fits() -> None:
    match = find(checkpoint(*OPTIMIZER_STATES, ("model", "w"), ("model", "b"), ("model", "c")), model_shapes("none"))
    assert match.branch.path == ("model",)
    assert set(match.rest) == {"w", "b", "c"}


def test_every_branch_has_the_tensors_below_it() -> None:
    result = branches(checkpoint(("a", 0, "w"), ("a", 0, "b"), ("a", 1, "w"), ("c",)))
    assert {path: list(branch.tensors) for path, branch in result.items()} == {
        (): ["a.0.w", "a.0.b", "a.1.w", "c"],
        ("a",): ["0.w", "0.b", "1.w"],
        ("a", 0): ["w", "b"],
        ("a", 1): ["w"],
    }
    assert result[()].deep == {"a.0.w": "a", "a.0.b": "a", "a.1.w": "a"}
    assert result["a",].deep == {"0.w": 0, "0.b": 0, "1.w": 1}


def test_root_may_be_a_tensor() -> None:
    (branch,) = branches(checkpoint(())).values()
    assert (branch.path, list(branch.tensors), branch.deep) == ((), [""], {})


@pytest.mark.parametrize(
    ("path", "key"),
    [
        (("net", "_modules", "fc", "_parameters", "weight"), "fc.weight"),
        (("net", "_buffers", "mean"), "mean"),
    ],
    ids=["parameter", "buffer"],
)
def test_internal_attributes_of_a_module_are_left_out_of_keys(path: tuple[Key, ...], key: str) -> None:
    tensor = Tensor(path, f"net/{key}", "float32", (2,), (1,), "cpu", "0")
    result = branches(Checkpoint("model.pt", "torch-zip", 0, tensors=(tensor,)))
    assert list(result["net",].tensors) == [key]


@pytest.mark.parametrize(
    ("file_key", "model_key", "note"),
    [
        ("module.w", "w", "removed 'module.' from 1 keys"),
        ("w", "module.w", "put 'module.' before 1 keys"),
        ("module.w", "model.w", "replaced 'module.' by 'model.' in 1 keys"),
        ("a._orig_mod.w", "a.w", "removed the names of wrappers from 1 keys"),
        ("w", "w", ""),
    ],
    ids=["removed", "added", "replaced", "inner wrapper", "unchanged"],
)
def test_changes_to_keys_are_noted(file_key: str, model_key: str, note: str) -> None:
    match = find(checkpoint((file_key,)), model_shapes(model_key))
    assert matched_names(match) == {model_key: file_key}
    assert match.origins == {model_key: file_key}
    assert match.notes == ((note,) if note else ())


def test_slashes_in_names_are_places_where_a_file_has_no_others() -> None:
    paths: list[tuple[Key, ...]] = [("model/a.weight",), ("model/a.bias",), ("optimizer/state/a.weight/exp_avg",)]
    match = find(checkpoint(*paths), model_shapes("a.weight", "a.bias"))
    assert (match.branch.name, match.rest) == ("model", {})
    assert matched_names(match) == {"a.weight": "model/a.weight", "a.bias": "model/a.bias"}
    assert find(checkpoint(*paths), model_shapes("a.weight", "a.bias"), "model").branch.name == "model"
    assert find(checkpoint(("a/b",), ("/c",)), model_shapes("a/b", "/c")).branch.path == ()
