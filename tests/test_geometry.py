"""Which elements of a tensor a rank has; torch says what is right."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch

from transload import geometry
from transload.geometry import Box, Split, cover, hull, shards

SHAPES = [(8, 8), (7, 5), (3, 9), (1, 2), (16, 3)]


def chunk(tensor: torch.Tensor, split: Split) -> torch.Tensor:
    parts = torch.chunk(tensor, split.ranks, split.dim)
    return parts[split.rank] if split.rank < len(parts) else tensor.narrow(split.dim, 0, 0)


def local_of(whole: torch.Tensor, splits: list[Split]) -> torch.Tensor:
    """What a rank has, put together from its boxes."""
    pairs = shards(tuple(whole.shape), splits)
    local = whole.new_full(hull(inner for _, inner in pairs), -1)
    for box, inner in pairs:
        local[inner.slices] = whole[box.slices]
    return local


def test_a_rank_has_the_box_that_chunks_give_it() -> None:
    for shape, mesh in product(SHAPES, [(2,), (3,), (2, 3), (4, 2)]):
        whole = torch.arange(prod(shape)).view(shape)
        for dims, coordinate in product(product((0, 1), repeat=len(mesh)), product(*map(range, mesh))):
            splits = [Split(*each) for each in zip(dims, mesh, coordinate, strict=True)]
            local = whole
            for split in splits:
                local = chunk(local, split)
            assert local_of(whole, splits).tolist() == local.tolist() or not local.numel(), (shape, splits)


def test_a_strided_shard_is_split_after_the_dimensions_of_the_mesh_that_follow_it() -> None:
    for shape, (dp, tp) in product(SHAPES, [(2, 2), (3, 2), (2, 3)]):
        whole = torch.arange(prod(shape)).view(shape)
        for row, column in product(range(dp), range(tp)):
            local = chunk(chunk(whole, Split(0, tp, column)), Split(0, dp, row))
            splits = [Split(0, dp, row, factor=tp), Split(0, tp, column)]
            assert local_of(whole, splits).tolist() == local.tolist(), (shape, row, column)


def test_a_factor_that_no_split_explains_scatters_the_rows_over_so_many_parts() -> None:
    whole = torch.arange(16)
    for factor, ranks in product((2, 4), (2, 4)):
        for rank in range(ranks):
            parts = [chunk(part, Split(0, ranks, rank)) for part in torch.chunk(whole, factor)]
            assert torch.equal(local_of(whole, [Split(0, ranks, rank, factor)]), torch.cat(parts))
    with pytest.raises(LookupError):
        shards((1024, 1024), [Split(0, 2, 0, factor=32), Split(1, 2, 0, factor=32)])


def test_gaps_between_very_many_boxes_are_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = [Box((0, 2 * column), (4, 1)) for column in range(100)]
    assert cover((4, 200), columns).lost[0] == Box((0, 1), (4, 1))
    monkeypatch.setattr(geometry, "_MAX_COMPARED", 1000)
    assert cover((4, 200), columns) == ([Box((0, 0), (4, 200))], [], True)


def test_boxes_that_overlap_or_lead_outside_are_named() -> None:
    left, right, low = Box((0, 0), (4, 3)), Box((0, 2), (4, 2)), Box((3, 0), (2, 4))
    assert cover((4, 4), [left, right])[:2] == ([], [right])
    assert cover((4, 4), [low])[:2] == ([Box((0, 0), (3, 4))], [low])
    assert cover((4, 4), [Box((0, 0), (2, 4)), Box((2, 0), (2, 4)), Box((2, 0), (0, 4))])[:2] == ([], [])
    assert cover((), [Box((), ())])[:2] == ([], [])
    assert cover((), [Box((), ()), Box((), ())]).twice
