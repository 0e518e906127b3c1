"""Sparse tensors whose indices are out of range, compared with what torch says when it checks them."""

from __future__ import annotations

import io
import random
import warnings
from typing import Any

import torch
from tests.each import each
from tests.loading.zoo import QUIET, ZOO

from transload.verifying import verify

pytestmark = QUIET
LAYOUTS = {name: getattr(torch, f"sparse_{name}") for name in ("coo", "csr", "csc", "bsr", "bsc")}
SIZE = (4, 6)


def saved(value: object) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def parts(layout: str, dice: random.Random) -> tuple[Any, ...]:
    """The parts of a tensor that makes sense, mostly."""
    dense = torch.tensor([[dice.randint(0, 1) for _ in range(SIZE[1])] for _ in range(SIZE[0])], dtype=torch.float32)
    dense[0, 0] = 1
    if layout == "coo":
        made = dense.to_sparse()
        return made.indices(), made.values()
    made = getattr(dense, f"to_sparse_{layout}")(*([(2, 2)] if layout in ("bsr", "bsc") else []))
    rows = layout in ("csr", "bsr")
    indices = (made.crow_indices(), made.col_indices()) if rows else (made.ccol_indices(), made.row_indices())
    return tuple(part.to(dice.choice([torch.int32, torch.int64])) for part in indices), made.values()


def spoiled(indices: torch.Tensor, dice: random.Random) -> torch.Tensor:
    out = indices.clone()
    out.view(-1)[dice.randrange(out.numel())] += dice.choice([-2, -1, 1, 2, 7, 1 << 20])
    return out


def made_of(layout: str, dice: random.Random) -> torch.Tensor:
    indices, values = parts(layout, dice)
    if layout == "coo":
        spoilt = spoiled(indices, dice) if dice.random() < 0.7 else indices
        return torch.sparse_coo_tensor(spoilt, values, SIZE, check_invariants=False)
    indices = list(indices)
    if dice.random() < 0.7:
        which = dice.randrange(2)
        indices[which] = spoiled(indices[which], dice)
    indices = [part.to(indices[0].dtype) for part in indices]
    return torch.sparse_compressed_tensor(*indices, values, SIZE, layout=LAYOUTS[layout], check_invariants=False)


def torch_takes(made: torch.Tensor) -> bool:
    try:
        if made.layout == torch.sparse_coo:
            torch._validate_sparse_coo_tensor_args(made._indices(), made._values(), made.size())
        else:
            rows = made.layout in (torch.sparse_csr, torch.sparse_bsr)
            held = (made.crow_indices(), made.col_indices()) if rows else (made.ccol_indices(), made.row_indices())
            torch._validate_sparse_compressed_tensor_args(*held, made.values(), made.size(), made.layout)
    except RuntimeError:
        return False
    return True


@each("layout", LAYOUTS)
def test_as_torch_judges_where_it_looks(layout: str) -> None:
    dice, verdicts = random.Random(7), []  # noqa: S311 - the same each time
    for _ in range(60):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = made_of(layout, dice)
        found = verify(saved({"beside": torch.ones(2), "s": made}))
        assert [(each.name, each.kind) for each in found.damaged] == ([] if torch_takes(made) else [("s", "broken")])
        assert found.integrity == ("damaged" if found.damaged else "whole")
        verdicts.append(bool(found.damaged))
    assert 10 < sum(verdicts) < 50


@each("name", [name for name in ZOO if "sparse" in name])
def test_sound_ones(name: str) -> None:
    assert not verify(saved(ZOO[name].make())).damaged


def test_batches() -> None:
    batch = torch.eye(3).expand(4, 3, 3).to_sparse_csr()
    assert not verify(saved(batch)).damaged
    columns = batch.col_indices().clone()
    columns[2, 1] = 3
    odd = torch.sparse_csr_tensor(batch.crow_indices(), columns, batch.values(), (4, 3, 3), check_invariants=False)
    (damage,) = verify(saved({"s": odd})).damaged
    assert damage.detail == "an index is 3, after -1, in a row of 3"


def test_it_says_which() -> None:
    odd = torch.sparse_coo_tensor(torch.tensor([[1], [65537]]), torch.ones(1), (3, 3), check_invariants=False)
    (damage,) = verify(saved({"s": odd})).damaged
    assert damage == ("s", "broken", "an index is 65537, but the size of axis 1 is 3")


class Forged:
    """Pickled as a call that makes a sparse tensor of any parts."""

    def __init__(self, layout: str, *parts: torch.Tensor) -> None:
        self.args = LAYOUTS[layout], (*parts, torch.Size(SIZE))

    def __reduce__(self) -> tuple[Any, ...]:
        return torch._utils._rebuild_sparse_tensor, self.args


def ones(*size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.int64)


@each(
    ("forged", "words"),
    [
        (Forged("coo", torch.ones(2, 3), torch.ones(3)), "its indices are not integers"),
        (Forged("coo", ones(3), torch.ones(3)), "its indices have the shape (3,), but its own shape is (4, 6)"),
        (Forged("coo", ones(2, 3), torch.ones(2)), "it has 3 indices, but values of the shape (2,)"),
        (Forged("csr", ones(5), ones(3), torch.ones(2)), "its parts do not fit together"),
        (Forged("csr", ones(3), ones(2), torch.ones(2)), "it has 4 rows, but its row pointers have the shape (3,)"),
    ],
)
def test_parts_that_do_not_fit_together(forged: Forged, words: str) -> None:
    (damage,) = verify(saved({"s": forged})).damaged
    assert damage == ("s", "broken", words)


def test_a_claim_of_endless_indices_is_not_followed() -> None:
    indices = torch.zeros(1, 1, dtype=torch.int64).expand(1, 1 << 40)
    huge = torch.sparse_coo_tensor(indices, torch.ones(1).expand(1 << 40), (1,), check_invariants=False)
    assert verify(saved(huge)).integrity  # and ends
