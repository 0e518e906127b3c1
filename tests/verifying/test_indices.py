"""Sparse tensors with indices out of range, compared with torch's own validation."""

from __future__ import annotations

import random
import warnings
from typing import Any

import torch
from tests.each import each
from tests.loading.zoo import IGNORED_WARNINGS, ZOO
from tests.makers import saved

from transload.verifying import verify

pytestmark = IGNORED_WARNINGS
LAYOUTS = {name: getattr(torch, f"sparse_{name}") for name in ("coo", "csr", "csc", "bsr", "bsc")}
SIZE = (4, 6)


def valid_parts(layout: str, rng: random.Random) -> tuple[Any, ...]:
    """Indices and values of a valid sparse tensor, except that the dtypes of the indices may differ."""
    dense = torch.tensor([[rng.randint(0, 1) for _ in range(SIZE[1])] for _ in range(SIZE[0])], dtype=torch.float32)
    dense[0, 0] = 1
    if layout == "coo":
        sparse = dense.to_sparse()
        return sparse.indices(), sparse.values()
    sparse = getattr(dense, f"to_sparse_{layout}")(*([(2, 2)] if layout in ("bsr", "bsc") else []))
    rows = layout in ("csr", "bsr")
    indices = (sparse.crow_indices(), sparse.col_indices()) if rows else (sparse.ccol_indices(), sparse.row_indices())
    return tuple(part.to(rng.choice([torch.int32, torch.int64])) for part in indices), sparse.values()


def with_a_wrong_index(indices: torch.Tensor, rng: random.Random) -> torch.Tensor:
    out = indices.clone()
    out.view(-1)[rng.randrange(out.numel())] += rng.choice([-2, -1, 1, 2, 7, 1 << 20])
    return out


def random_sparse_tensor(layout: str, rng: random.Random) -> torch.Tensor:
    indices, values = valid_parts(layout, rng)
    if layout == "coo":
        used = with_a_wrong_index(indices, rng) if rng.random() < 0.7 else indices
        return torch.sparse_coo_tensor(used, values, SIZE, check_invariants=False)
    indices = list(indices)
    if rng.random() < 0.7:
        position = rng.randrange(2)
        indices[position] = with_a_wrong_index(indices[position], rng)
    indices = [part.to(indices[0].dtype) for part in indices]
    return torch.sparse_compressed_tensor(*indices, values, SIZE, layout=LAYOUTS[layout], check_invariants=False)


def torch_accepts(tensor: torch.Tensor) -> bool:
    try:
        if tensor.layout == torch.sparse_coo:
            torch._validate_sparse_coo_tensor_args(tensor._indices(), tensor._values(), tensor.size())
        else:
            rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
            indices = (
                (tensor.crow_indices(), tensor.col_indices()) if rows else (tensor.ccol_indices(), tensor.row_indices())
            )
            torch._validate_sparse_compressed_tensor_args(*indices, tensor.values(), tensor.size(), tensor.layout)
    except RuntimeError:
        return False
    return True


@each("layout", LAYOUTS)
def test_damaged_sparse_tensors_are_those_that_torch_rejects(layout: str) -> None:
    rng, verdicts = random.Random(7), []  # noqa: S311 - reproducible
    for _ in range(60):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tensor = random_sparse_tensor(layout, rng)
        result = verify(saved({"beside": torch.ones(2), "s": tensor}))
        assert [(damage.name, damage.kind) for damage in result.damaged] == (
            [] if torch_accepts(tensor) else [("s", "broken")]
        )
        assert result.integrity == ("damaged" if result.damaged else "whole")
        verdicts.append(bool(result.damaged))
    assert 10 < sum(verdicts) < 50


@each("name", [name for name in ZOO if "sparse" in name])
def test_valid_sparse_tensors_are_not_damaged(name: str) -> None:
    assert not verify(saved(ZOO[name].make())).damaged


def test_wrong_index_in_a_batched_csr_tensor_is_reported() -> None:
    batch = torch.eye(3).expand(4, 3, 3).to_sparse_csr()
    assert not verify(saved(batch)).damaged
    columns = batch.col_indices().clone()
    columns[2, 1] = 3
    invalid = torch.sparse_csr_tensor(batch.crow_indices(), columns, batch.values(), (4, 3, 3), check_invariants=False)
    (damage,) = verify(saved({"s": invalid})).damaged
    assert damage.detail == "an index is 3, after -1, in a row of 3"


def test_damage_names_the_wrong_index() -> None:
    invalid = torch.sparse_coo_tensor(torch.tensor([[1], [65537]]), torch.ones(1), (3, 3), check_invariants=False)
    (damage,) = verify(saved({"s": invalid})).damaged
    assert damage == ("s", "broken", "an index is 65537, but the size of axis 1 is 3")


class Forged:
    """Pickles as a call that builds a sparse tensor from any parts."""

    def __init__(self, layout: str, *valid_parts: torch.Tensor) -> None:
        self.args = LAYOUTS[layout], (*valid_parts, torch.Size(SIZE))

    def __reduce__(self) -> tuple[Any, ...]:
        return torch._utils._rebuild_sparse_tensor, self.args


def ones(*size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.int64)


@each(
    ("forged", "detail"),
    [
        (Forged("coo", torch.ones(2, 3), torch.ones(3)), "its indices are not integers"),
        (Forged("coo", ones(3), torch.ones(3)), "its indices have the shape (3,), but its own shape is (4, 6)"),
        (Forged("coo", ones(2, 3), torch.ones(2)), "it has 3 indices, but values of the shape (2,)"),
        (Forged("csr", ones(5), ones(3), torch.ones(2)), "its parts do not fit together"),
        (Forged("csr", ones(3), ones(2), torch.ones(2)), "it has 4 rows, but its row pointers have the shape (3,)"),
    ],
)
def test_inconsistent_parts_are_reported(forged: Forged, detail: str) -> None:
    (damage,) = verify(saved({"s": forged})).damaged
    assert damage == ("s", "broken", detail)


def test_huge_number_of_indices_is_not_read() -> None:
    indices = torch.zeros(1, 1, dtype=torch.int64).expand(1, 1 << 40)
    huge = torch.sparse_coo_tensor(indices, torch.ones(1).expand(1 << 40), (1,), check_invariants=False)
    assert verify(saved(huge)).integrity  # it returns
