"""Which elements of a tensor a rank has; torch says what is right."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch

from transload import geometry
from transload.geometry import Box, Split, gaps, shard_box

SHAPES = [(8, 8), (7, 5), (3, 9), (1, 2), (16, 3)]


def chunk(tensor: torch.Tensor, split: Split) -> torch.Tensor:
    parts = torch.chunk(tensor, split.ranks, split.dim)
    return parts[split.rank] if split.rank < len(parts) else tensor.narrow(split.dim, 0, 0)


def test_a_rank_has_the_box_that_chunks_give_it() -> None:
    for shape, mesh in product(SHAPES, [(2,), (3,), (2, 3), (4, 2)]):
        whole = torch.arange(prod(shape)).view(shape)
        for dims, coordinate in product(product((0, 1), repeat=len(mesh)), product(*map(range, mesh))):
            splits = [Split(*each) for each in zip(dims, mesh, coordinate, strict=True)]
            local = whole
            for split in splits:
                local = chunk(local, split)
            box = shard_box(shape, splits)
            assert torch.equal(whole[box.slices], local), (shape, splits)


def test_a_strided_shard_is_split_after_the_dimensions_of_the_mesh_that_follow_it() -> None:
    for shape, (dp, tp) in product(SHAPES, [(2, 2), (3, 2), (2, 3)]):
        whole = torch.arange(prod(shape)).view(shape)
        for row, column in product(range(dp), range(tp)):
            local = chunk(chunk(whole, Split(0, tp, column)), Split(0, dp, row))
            box = shard_box(shape, [Split(0, dp, row, factor=tp), Split(0, tp, column)])
            assert torch.equal(whole[box.slices], local), (shape, row, column)


def test_a_factor_that_no_split_explains_is_refused() -> None:
    with pytest.raises(LookupError):
        shard_box((8,), [Split(0, 2, 0), Split(0, 2, 0, factor=2)])


def test_gaps_between_very_many_boxes_are_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = [Box((0, 2 * column), (4, 1)) for column in range(100)]
    assert gaps((4, 200), columns)[0] == Box((0, 1), (4, 1))
    monkeypatch.setattr(geometry, "_MAX_COMPARED", 1000)
    assert gaps((4, 200), columns) == [Box((0, 0), (4, 200))]
