"""One rank's file: which part of each tensor it has, what is said of it, and what loads."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import forge
from tests.each import each, for_each
from tests.makers import codes
from tests.rank_files import CASES, dtensor, mesh, named, placement, whole

import transload
from transload import inspect
from transload.errors import BrokenFileError, ContentError, LoadError

FSDP1 = next(case for case in CASES if case.name == "fsdp1")
FSDP2 = next(case for case in CASES if case.name == "fsdp2")
LOCAL = forge.tensor("0", (2, 2), (2, 1))


def file_of(body: bytes) -> bytes:
    return forge.checkpoint(forge.pickled(forge.dictionary({"d": body})), {"0": bytes(range(16)), "1": b""})


def test_every_piece_is_the_part_of_the_whole_that_it_says() -> None:
    torch = pytest.importorskip("torch")
    compared = 0
    for case in (case for case in CASES if case.name != "fsdp1-local"):
        tensors = dict(named(whole(case)))
        for file in sorted(case.iterdir()):
            with transload.open(file) as handle:
                for tensor in handle.checkpoint.tensors:
                    assert tensors[tensor.name].shape == tensor.shape
                    for part in tensor.parts or (tensor,):
                        start = part.start or (0,) * len(part.shape)
                        index = tuple(slice(at, at + size) for at, size in zip(start, part.shape, strict=True))
                        piece = handle.slice(tensor.name)[index]
                        assert torch.equal(piece, tensors[tensor.name][index]), (file, tensor.name)
                        compared += 1
    assert compared >= 266


def test_a_rank_file_says_which_rank_it_is_and_what_it_has() -> None:
    checkpoint = inspect(FSDP1 / "st_rank1.pt")
    assert checkpoint.flavour == "rank 1 of 2"
    assert dict(checkpoint.facts) | {"rank": "1", "world size": "2"} == dict(checkpoint.facts)
    finding = next(finding for finding in checkpoint.findings if finding.code == "rank-file")
    assert "0.weight [5:10] of [10, 6]" in finding.evidence[0]
    assert checkpoint.integrity == "unchecked"
    tensor = checkpoint.tensor("0.weight")
    assert (tensor.kind, tensor.cls, tensor.shape, tensor.nbytes) == ("sharded", "ShardedTensor", (10, 6), 120)
    assert [(part.start, part.shape) for part in tensor.parts] == [((5, 0), (5, 6))]


def test_the_advice_for_a_rank_file_is_what_torch_needs() -> None:
    sharded, distributed = inspect(FSDP1 / "st_rank1.pt"), inspect(FSDP2 / "model_world_size_2_rank_1.pt")
    for checkpoint, advice, prediction in (
        (sharded, "process group", "only in a process group of as many ranks"),
        (distributed, "import torch.distributed.tensor first", "until you import torch.distributed.tensor"),
    ):
        assert [finding.code for finding in checkpoint.findings] == ["needs-trust", "rank-file"]
        assert advice in checkpoint.findings[0].fix[0]
        assert prediction in checkpoint.prediction
        assert not any("safe_globals" in line or "convert" in line for line in checkpoint.findings[0].fix)


def test_a_piece_is_not_loaded_as_the_whole(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(LoadError, match=r"one rank's share.*\[5:10\] of \[10, 6\]") as refusal:
        transload.load(FSDP1 / "st_rank1.pt")
    assert "all 2 ranks" in refusal.value.fix
    model = torch.nn.Module()  # of the shape of the piece, which would be advised to ignore shapes
    model.register_buffer("weight", torch.zeros(5, 6))
    for folder in (FSDP1, FSDP2, FSDP1.with_name("fsdp1-local")):
        with pytest.raises(LoadError, match="one rank's share") as refusal:
            transload.load_into(model, min(folder.glob("*0.p*")), strict=False)
        assert (
            f"Load the folder with the files of all 2 ranks: transload.load_into(model, {str(folder)!r})"
            in refusal.value.fix
        )
    with transload.open(FSDP1 / "st_rank1.pt") as handle:
        assert handle.slice("0.weight")[6:8].shape == (2, 6)
        with pytest.raises(BrokenFileError, match=r"this file does not have \[0:5\] of \[10") as error:
            handle["0.weight"]
        assert "other ranks" in error.value.fix
        with pytest.raises(BrokenFileError):
            handle.slice("0.weight")[4:6]
    with pytest.raises(ContentError, match="this file does not have"):
        transload.convert(FSDP1 / "st_rank1.pt", tmp_path / "new.pt")
    assert not (tmp_path / "new.pt").exists()
    assert transload.verify(FSDP1 / "st_rank1.pt").ok


@each(
    "placements, on, shape, starts",
    [
        ((placement("Shard", dim=0),), mesh((2,), (1,)), (4, 2), [((2, 0), (2, 2))]),
        ((placement("Shard", dim=1),), mesh((2,), (1,)), (2, 4), [((0, 2), (2, 2))]),
        ((placement("Shard", dim=0),), mesh((3,), (1,)), (5, 2), [((2, 0), (2, 2))]),
        ((placement("Replicate"),), mesh((9,), (1,)), (2, 2), []),
        ((placement("Replicate"), placement("Shard", dim=0)), mesh((2, 3), (1, 2)), (6, 2), [((4, 0), (2, 2))]),
        (
            (placement("_StridedShard", dim=0, split_factor=2),),
            mesh((2,), (0,)),
            (4, 2),
            [((0, 0), (1, 2)), ((2, 0), (1, 2))],
        ),
        (
            (placement("_StridedShard", dim=0, split_factor=2), placement("Shard", dim=0)),
            mesh((2, 2), (0, 1)),
            (8, 2),
            [((4, 0), (2, 2))],
        ),
        (  # as FSDP2 divides the 6 rows of the second of two tensor-parallel ranks among 3
            (placement("_StridedShard", dim=0, split_factor=2), placement("Shard", dim=0)),
            mesh((3, 2), (2, 1)),
            (13, 2),
            [((11, 0), (2, 2))],
        ),
    ],
)
def test_a_placement_says_where_the_local_part_belongs(
    placements: tuple[bytes, ...], on: bytes, shape: tuple[int, ...], starts: list[object]
) -> None:
    checkpoint = inspect(file_of(dtensor(LOCAL, shape, placements, on)))
    tensor = checkpoint.tensor("d")
    assert [(part.start, part.shape) for part in tensor.parts] == starts
    assert ("rank-file" in codes(checkpoint)) == bool(starts)
    assert tensor.kind == ("sharded" if starts else "strided")


ROWS = (placement("Shard", dim=0),)


@each(
    "body",
    [
        dtensor(LOCAL, (4, 2), (placement("Partial"),), mesh()),
        dtensor(LOCAL, (4, 2), (placement("Shard", dim=-1),), mesh()),
        dtensor(LOCAL, (4, 2), (placement("Shard", dim=2),), mesh()),
        dtensor(LOCAL, (4, 2), (placement("Shard"),), mesh()),
        dtensor(LOCAL, (4, 2), (placement("Somewhere"),), mesh()),
        dtensor(LOCAL, (4, 2), (placement("_StridedShard", dim=0, split_factor=1 << 40),), mesh()),
        dtensor(LOCAL, (4, 2), (placement("_StridedShard", dim=0, split_factor=0),), mesh()),
        dtensor(LOCAL, (4, 2), 7, mesh()),
        dtensor(LOCAL, (4, 2), (), mesh()),
        dtensor(LOCAL, (4, 2), (None,), mesh()),
        dtensor(LOCAL, (4, 2), ROWS, mesh((2,), (2,))),
        dtensor(LOCAL, (4, 2), ROWS, mesh((2,), (-1,))),
        dtensor(LOCAL, (4, 2), ROWS, mesh((1 << 60,), (0,))),
        dtensor(LOCAL, (4, 2), ROWS, mesh((2,), "00")),
        dtensor(LOCAL, (4, 2), ROWS, 5),
        dtensor(LOCAL, (6, 2), ROWS, mesh()),
        dtensor(LOCAL, (4, 2), ROWS, mesh(), shard_order=((0,),)),
        dtensor(LOCAL, (4, 2), (*ROWS, *ROWS), mesh(), shard_order=(forge.call(forge.name("a", "b"), 0, (0, 0)),)),
    ],
)
def test_a_description_that_is_not_clear_is_a_problem(body: bytes) -> None:
    checkpoint = inspect(file_of(body))
    assert "piece-unplaced" in codes(checkpoint)
    assert checkpoint.tensor("d").kind == "subclass"
    for_each(range(0, len(body), 7), lambda end: inspect(file_of(body[:end])))


def test_a_distributed_tensor_that_is_all_here_loads_as_a_plain_one() -> None:
    torch = pytest.importorskip("torch")
    data = file_of(dtensor(LOCAL, (2, 2), (placement("Replicate"),), mesh((4,), (3,))))
    loaded = transload.load(data)["d"]
    assert type(loaded) is torch.Tensor
    assert torch.equal(loaded, transload.open(data)["d"])
    assert loaded.shape == (2, 2)


def test_a_name_of_distributed_tensors_elsewhere_still_needs_trust() -> None:
    pytest.importorskip("torch")
    shard = placement("Shard", dim=0)
    body = forge.dictionary({"d": dtensor(LOCAL, (4, 2), (shard,), mesh()), "other": shard})
    checkpoint = inspect(forge.checkpoint(forge.pickled(body), {"0": bytes(16), "1": b""}))
    assert not any("needs no trust" in line for finding in checkpoint.findings for line in finding.evidence)


def test_a_whole_rank_file_is_verified_as_the_share_it_is() -> None:
    for path, count in ((FSDP1 / "st_rank1.pt", 10), (FSDP2 / "model_world_size_2_rank_1.pt", 31)):
        result = transload.verify(path, hashes=True)
        assert (result.ok, result.integrity, len(result.tensors)) == (True, "whole", count)
        assert result.sha256
        assert [finding.code for finding in result.findings] == ["rank-file"]
        assert any(tensor.name.endswith("0.weight [5:10] of [10, 6]") for tensor in result.tensors)
        evidence = result.findings[0].evidence[0]
        assert evidence.startswith("rank 1 of 2 has a piece of ")
        rescued = transload.rescue(path, dry_run=True)
        assert rescued.notes == (f"one rank's share: {evidence}",)


def test_the_folder_of_all_ranks_is_data() -> None:
    for case in CASES:
        assert inspect(case).safety == "data-only", case
