"""Which part of a checkpoint is taken for a model: the same however many other parts there are."""

from __future__ import annotations

import pytest

from transload.checkpoint import Checkpoint, Key, Tensor
from transload.errors import UsageError
from transload.loading.into import Match, branches, find


def checkpoint(*paths: tuple[Key, ...], shape: tuple[int, ...] = (2,)) -> Checkpoint:
    """A file with a tensor of two elements at each path, each with a storage of its own."""
    tensors = tuple(
        Tensor(path, "/".join(map(str, path)), "float32", shape, (1,), "cpu", str(place))
        for place, path in enumerate(paths)
    )
    return Checkpoint("model.pt", "torch-zip", 0, tensors=tensors)


def wanted(*keys: str) -> dict[str, tuple[int, ...] | None]:
    return dict.fromkeys(keys, (2,))


def taken(match: Match) -> dict[str, str]:
    return {key: tensor.name for key, tensor in match.tensors.items()}


STATES: list[tuple[Key, ...]] = [("optimizer", "state", n, key) for n in range(50) for key in ("exp_avg", "step")]


@pytest.mark.parametrize("first", [True, False], ids=["before", "behind"])
def test_a_model_among_many_small_places(*, first: bool) -> None:
    model: list[tuple[Key, ...]] = [("model", "a.weight"), ("model", "a.bias")]
    paths = [*model, *STATES] if first else [*STATES, *model]
    match = find(checkpoint(*paths), wanted("a.weight", "a.bias"))
    assert match.branch.path == ("model",)
    assert taken(match) == {"a.weight": "model/a.weight", "a.bias": "model/a.bias"}
    assert (match.rest, match.score, match.notes) == ({}, (2, 2), ())


def test_a_small_place_that_fits_as_well_as_a_large_one_is_a_rival() -> None:
    held = checkpoint(("large", "w"), *(("large", f"x{n}") for n in range(9)), ("small", "w"))
    with pytest.raises(UsageError, match="2 places of the file fit the model equally well: small, large"):
        find(held, wanted("w"))


def test_where_nothing_fits_the_place_with_most_tensors_is_compared() -> None:
    match = find(checkpoint(*STATES, ("model", "w"), ("model", "b"), ("model", "c")), wanted("none"))
    assert match.branch.path == ("model",)
    assert set(match.rest) == {"w", "b", "c"}


def test_every_place_has_what_is_below_it() -> None:
    found = branches(checkpoint(("a", 0, "w"), ("a", 0, "b"), ("a", 1, "w"), ("c",)))
    assert {path: list(branch.tensors) for path, branch in found.items()} == {
        (): ["a.0.w", "a.0.b", "a.1.w", "c"],
        ("a",): ["0.w", "0.b", "1.w"],
        ("a", 0): ["w", "b"],
        ("a", 1): ["w"],
    }
    assert found[()].deep == {"a.0.w": "a", "a.0.b": "a", "a.1.w": "a"}
    assert found["a",].deep == {"0.w": 0, "0.b": 0, "1.w": 1}


def test_the_root_itself_may_be_a_tensor() -> None:
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
def test_the_steps_of_a_module_are_left_out(path: tuple[Key, ...], key: str) -> None:
    tensor = Tensor(path, f"net/{key}", "float32", (2,), (1,), "cpu", "0")
    found = branches(Checkpoint("model.pt", "torch-zip", 0, tensors=(tensor,)))
    assert list(found["net",].tensors) == [key]


@pytest.mark.parametrize(
    ("theirs", "ours", "note"),
    [
        ("module.w", "w", "removed 'module.' from 1 keys"),
        ("w", "module.w", "put 'module.' before 1 keys"),
        ("module.w", "model.w", "replaced 'module.' by 'model.' in 1 keys"),
        ("a._orig_mod.w", "a.w", "removed the names of wrappers from 1 keys"),
        ("w", "w", ""),
    ],
    ids=["off", "before", "for", "inner", "none"],
)
def test_what_is_done_to_keys_is_told(theirs: str, ours: str, note: str) -> None:
    match = find(checkpoint((theirs,)), wanted(ours))
    assert taken(match) == {ours: theirs}
    assert match.origins == {ours: theirs}
    assert match.notes == ((note,) if note else ())
