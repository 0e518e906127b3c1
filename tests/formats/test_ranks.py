"""Folders of rank files: put together, or said why not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests import forge
from tests.each import each
from tests.makers import codes
from tests.rank_files import CASES, dtensor, mesh, named, placement, rank_file, state, whole, write_ranks

import transload
from transload import inspect
from transload.errors import BrokenFileError, ContentError, LoadError

WHOLE = [case for case in CASES if case.name != "fsdp1-local"]


def values(value: Any, path: tuple[object, ...] = ()) -> dict[tuple[object, ...], object]:
    """What is in an object besides tensors."""
    if isinstance(value, dict | list | tuple):
        children = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: leaf for step, child in children for key, leaf in values(child, (*path, step)).items()}
    return {} if hasattr(value, "dtype") else {path: value}


def evidence(checkpoint: transload.Checkpoint, code: str) -> str:
    return "; ".join(line for finding in checkpoint.findings if finding.code == code for line in finding.evidence)


@each("case", WHOLE, ids=lambda case: f"{case.parent.name}/{case.name}")
def test_the_files_of_all_ranks_load_as_the_object_that_one_process_would_save(case: Path) -> None:
    torch = pytest.importorskip("torch")
    expected, loaded = whole(case), transload.load(case)
    assert [name for name, _ in named(loaded)] == [name for name, _ in named(expected)]
    for (name, ours), (_, theirs) in zip(named(loaded), named(expected), strict=True):
        assert type(ours) is torch.Tensor
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs), name
    assert values(loaded) == values(expected)
    checkpoint = inspect(case)
    assert checkpoint.format == "rank-files"
    assert checkpoint.integrity == "unchecked"
    assert not [finding for finding in checkpoint.findings if finding.severity != "note"]


def test_open_and_load_into_read_rank_files_of_any_world_size() -> None:
    torch = pytest.importorskip("torch")
    case = next(case for case in CASES if case.name == "fsdp2-tp" and "2.13" in case.parent.name)
    expected = whole(case)
    with transload.open(case) as handle:
        assert torch.equal(handle["0.weight"], expected["0.weight"])
        assert torch.equal(handle.slice("0.weight")[3:7, 1:], expected["0.weight"][3:7, 1:])
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 10), torch.nn.LayerNorm(10))
    transload.load_into(model, case)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert transload.verify(case).ok


def test_convert_writes_the_weights_and_everything_if_asked(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    case = next(case for case in CASES if case.name == "fsdp2")
    expected = whole(case)
    transload.convert(case, tmp_path / "weights.pt")
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert all(torch.equal(value, expected["model"][name]) for name, value in weights.items())
    transload.convert(case, tmp_path / "all.pt", optimizer=True)
    everything = torch.load(tmp_path / "all.pt", weights_only=True)
    assert [name for name, _ in named(everything)] == [name for name, _ in named(expected)]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(named(everything), named(expected), strict=True))
    assert values(everything) == values(expected)


@each(
    "name",
    ["rank{}.pt", "model_world_size_3_rank_{}.pt", "a.rank_{}.pth", "pytorch_model_fsdp_0_rank{}.bin", "m_{}.pt"],
)
def test_rank_files_are_known_by_their_names_and_content(name: str, tmp_path: Path) -> None:
    write_ranks(tmp_path, 3, name, rows=7)
    checkpoint = inspect(tmp_path)
    assert checkpoint.format == "rank-files"
    assert checkpoint.tensor("w").shape == (7, 2)
    assert [part.start for part in checkpoint.tensor("w").parts] == [(0, 0), (3, 0), (6, 0)]


def test_names_alone_make_no_rank_files(tmp_path: Path) -> None:
    for rank in (8, 16):
        (tmp_path / f"lora_rank_{rank}.pt").write_bytes(forge.checkpoint(forge.pickled(forge.state_dict())))
    for epoch in (0, 1):
        (tmp_path / f"epoch_{epoch}.pt").write_bytes(rank_file(0))
    assert codes(inspect(tmp_path))[0] == "directory-unknown"
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    assert inspect(tmp_path).format == "safetensors"


def test_families_of_files_are_a_dictionary(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    for family in ("model", "optim"):
        write_ranks(tmp_path, 2, family + "_world_size_2_rank_{}.pt", more={"lr": 3})
    loaded = transload.load(tmp_path)
    assert [*loaded] == ["model", "optim"]
    assert loaded["optim"]["w"].tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert loaded["optim"]["lr"] == 3


def test_findings_have_the_names_of_the_tensors(tmp_path: Path) -> None:
    """A second name for the same tensor would be a second loss."""
    for family in ("model", "optim"):
        write_ranks(tmp_path, 2, family + "_world_size_2_rank_{}.pt")
    (tmp_path / "model_world_size_2_rank_1.pt").unlink()
    checkpoint = inspect(tmp_path)
    assert "not complete: model/w" in evidence(checkpoint, "rank-missing")
    assert "model/w: no file has" in evidence(checkpoint, "dcp-piece-missing")
    assert [damage.name for damage in transload.verify(tmp_path).damaged] == ["model/w"]


def test_a_family_is_converted_if_another_one_is_damaged(tmp_path: Path) -> None:
    folder, out = tmp_path / "d", tmp_path / "out.safetensors"
    for family in ("model", "optim"):
        write_ranks(folder, 2, family + "_world_size_2_rank_{}.pt")
    file = folder / "optim_world_size_2_rank_1.pt"
    data = file.read_bytes()
    for cut in (1200, 0, None):
        file.unlink() if cut is None else file.write_bytes(data[:cut])
        assert "other parts of the source are damaged" in str(
            transload.convert(folder, out, key="model", overwrite=True)
        )
        assert [tensor.shape for tensor in inspect(out).tensors] == [(4, 2)]
        for key in ("optim", ""):
            with pytest.raises(BrokenFileError):
                transload.convert(folder, out, key=key, overwrite=True)
    for rank in range(2):  # of a single family, whose name is no key
        (folder / f"model_world_size_2_rank_{rank}.pt").unlink()
    with pytest.raises(BrokenFileError):
        transload.convert(folder, out, key="w", overwrite=True)


def test_nobody_is_sent_to_a_loader_that_refuses() -> None:
    (case,) = (case for case in CASES if case.name == "fsdp1-local")
    assert "transload.load refuses it" in inspect(case).prediction


def test_files_of_two_runs_are_rescued_without_their_pieces(tmp_path: Path) -> None:
    """Verify suggests a rescue: it saves what each file has as a whole, and names the rest."""
    for world, rank in ((2, 0), (3, 1)):
        plain: dict[str, Any] = {"more": {"plain": forge.tensor("2")}, "storages": {"2": bytes(16)}}
        (tmp_path / str(world)).mkdir()
        write_ranks(tmp_path / str(world), world, rows=6, **plain)
        (tmp_path / str(world) / f"model_rank_{rank}.pt").rename(tmp_path / f"model_rank_{rank}.pt")
        shutil.rmtree(tmp_path / str(world))
    assert "transload rescue" in str(transload.verify(tmp_path))
    assert not [finding for finding in inspect(tmp_path).findings if "Load it with" in " ".join(finding.fix)]
    result = transload.rescue(tmp_path, dry_run=True)
    states = {outcome.name: outcome.state for outcome in result.tensors}
    assert states == {
        "model_rank_0.pt/w": "lost",
        "model_rank_0.pt/plain": "whole",
        "model_rank_1.pt/w": "lost",
        "model_rank_1.pt/plain": "whole",
    }
    assert transload.rescue(tmp_path, tmp_path.with_suffix(".pt")).exit_code == 1


def test_a_missing_rank_is_named_with_the_rows_it_had(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    write_ranks(tmp_path, 3, rows=7, more={"plain": forge.tensor("2")}, storages={"2": bytes(16)})
    (tmp_path / "model_rank_1.pt").unlink()
    checkpoint = inspect(tmp_path)
    assert checkpoint.integrity == "damaged"
    assert "1 of 3 ranks: 1" in evidence(checkpoint, "rank-missing")
    assert "w: no file has [3:6] of [7" in evidence(checkpoint, "dcp-piece-missing")
    with pytest.raises(BrokenFileError, match="1 of 3 ranks: 1; 1 tensor not complete: w"):
        transload.load(tmp_path)
    with transload.open(tmp_path) as handle:
        assert handle.slice("w")[:3].tolist() == [[0, 0], [1, 1], [2, 2]]
        assert handle["plain"].shape == (4,)


def test_a_missing_replica_is_not_missed(tmp_path: Path) -> None:
    for rank in range(4):
        local = forge.tensor("0", (2, 2), (2, 1))
        grid = (placement("Replicate"), placement("Shard", dim=0))
        body = forge.dictionary({"w": dtensor(local, (4, 2), grid, mesh((2, 2), (rank // 2, rank % 2)))})
        (tmp_path / f"rank_{rank}.pt").write_bytes(forge.checkpoint(forge.pickled(body), {"0": bytes(16), "1": b""}))
    assert len(inspect(tmp_path).tensor("w").parts) == 2
    (tmp_path / "rank_3.pt").unlink()
    assert inspect(tmp_path).integrity == "unchecked"
    (tmp_path / "rank_1.pt").unlink()
    assert inspect(tmp_path).integrity == "damaged"


def test_replicas_that_differ_are_named(tmp_path: Path) -> None:
    for rank in range(4):
        local = forge.tensor("0", (2, 2), (2, 1))
        grid = (placement("Replicate"), placement("Shard", dim=0))
        body = forge.dictionary({"w": dtensor(local, (4, 2), grid, mesh((2, 2), (rank // 2, rank % 2)))})
        data = bytes([rank // 3]) + bytes(15)  # the last one is of another step
        (tmp_path / f"rank_{rank}.pt").write_bytes(forge.checkpoint(forge.pickled(body), {"0": data, "1": b""}))
    assert "1 value: w" in evidence(inspect(tmp_path), "rank-values")


def test_a_mesh_of_some_ranks_does_not_say_which_rank_it_is(tmp_path: Path) -> None:
    for rank in range(4):  # the mesh of ranks 2 and 3 is another one
        local = forge.tensor("0", (2, 2), (2, 1))
        body = forge.dictionary({"w": dtensor(local, (4, 2), (placement("Shard", dim=0),), mesh((2,), (rank % 2,)))})
        (tmp_path / f"rank_{rank}.pt").write_bytes(forge.checkpoint(forge.pickled(body), {"0": bytes(16), "1": b""}))
    checkpoint = inspect(tmp_path)
    assert checkpoint.integrity == "unchecked"
    assert len(checkpoint.tensor("w").parts) == 2
    assert inspect(tmp_path / "rank_3.pt").flavour == "one rank's share"
    assert "place 1 of 2 in its mesh" in evidence(inspect(tmp_path / "rank_3.pt"), "rank-file")


def of_fsdp1(rank: int) -> bytes:
    """The file of one of two ranks that has the rows of ``rank_file``, as a ShardedTensor."""
    place = state(
        "torch.distributed._shard.metadata", "ShardMetadata", {"shard_offsets": [2 * rank, 0], "shard_sizes": [2, 2]}
    )
    shard = state("a", "Shard", {"tensor": forge.tensor("0", (2, 2), (2, 1)), "metadata": place})
    group = state("a", "ProcessGroupState", {"global_rank": rank, "global_world_size": 2})
    kind = forge.name("torch.distributed._shard.sharded_tensor.api", "ShardedTensor")
    function = forge.name("torch._utils", "_rebuild_wrapper_subclass")
    layout = forge.call(forge.name("torch.serialization", "_get_layout"), "torch.strided")
    device = forge.call(forge.name("torch", "device"), "cpu")
    inner = forge.tuple_of(kind, forge.name("torch", "float32"), (4, 2), (2, 1), 0, layout, device, False)
    rebuild = forge.name("torch._tensor", "_rebuild_from_type_v2")
    whole = forge.call(rebuild, function, kind, inner, forge.tuple_of([shard], None, group))
    return forge.checkpoint(forge.pickled(forge.dictionary({"w": whole})), {"0": bytes(16)})


def test_very_many_missing_rows_are_no_overlap(tmp_path: Path) -> None:
    """Every second of 2,400 ranks is missing."""
    for rank in range(0, 2400, 2):
        local = forge.tensor("0", (1, 2), (2, 1))
        body = forge.dictionary({"w": dtensor(local, (2400, 2), (placement("Shard", dim=0),), mesh((2400,), (rank,)))})
        data = forge.checkpoint(forge.pickled(body), {"0": bytes(8), "1": b""})
        (tmp_path / f"rank_{rank}.pt").write_bytes(data)
    checkpoint = inspect(tmp_path)
    assert "ranks-differ" not in codes(checkpoint)
    assert "no file has very many parts of [2400, 2]" in evidence(checkpoint, "dcp-piece-missing")


def test_files_that_do_not_belong_together_are_not_merged(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for name, changes, expected in (
        ("two runs", {1: rank_file(1, 3, rows=4)}, "2 and 3 ranks"),
        ("another shape", {1: rank_file(1, rows=6)}, "w is float32 [4, 2] on rank 0, float32 [6, 2] on rank 1"),
        ("a rank twice", {1: rank_file(0)}, "was saved by rank 0"),
        ("fewer ranks", {0: rank_file(0, 3, rows=2), 1: rank_file(1, 2, rows=2)}, "2 and 3 ranks"),
        ("another class", {1: of_fsdp1(1)}, "w is a DTensor on rank 0, a ShardedTensor on rank 1"),
        ("another step", {0: rank_file(0, more={"step": 7}), 1: rank_file(1, more={"step": 8})}, "step differs"),
    ):
        folder = tmp_path / name
        write_ranks(folder)
        for rank, data in changes.items():
            (folder / f"model_rank_{rank}.pt").write_bytes(data)
        checkpoint = inspect(folder)
        assert expected in evidence(checkpoint, "ranks-differ"), name
        assert {tensor.path[0] for tensor in checkpoint.tensors} == {"model_rank_0.pt", "model_rank_1.pt"}
        with pytest.raises(BrokenFileError, match="do not belong together"):
            transload.load(folder)
        with pytest.raises(LoadError, match=expected.replace("[", r"\[")):
            transload.load_into(torch.nn.Linear(2, 2), folder)


def test_what_differs_between_ranks_is_said(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    for rank in range(2):
        more = {"rng": rank, "lr": 1, "own": forge.tensor("2", (1,), numel=1)}
        data = rank_file(rank, more=more, storages={"2": bytes([rank, 0, 0, 0])})
        (tmp_path / f"rank_{rank}.pt").write_bytes(data)
    assert "2 values: own, rng" in evidence(inspect(tmp_path), "rank-values")
    assert transload.load(tmp_path)["rng"] == 0
    for name, everything in ((".all.pt", True), (".weights.pt", False)):
        notes = transload.convert(tmp_path, tmp_path.with_suffix(name), optimizer=everything).notes
        assert notes[-1] == "where ranks differ, the value of the first counts: the ranks: 2 values: own, rng"


def test_a_rank_of_a_pipeline_adds_what_only_it_has(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for rank in range(2):
        inner = forge.ordered({f"layer{rank}": forge.tensor("0", (2,)), "both": forge.tensor("0", (1,))})
        (tmp_path / f"rank_{rank}.pt").write_bytes(rank_file(rank, more={"model": inner}))
    loaded = transload.load(tmp_path)
    assert [*loaded["model"]] == ["layer0", "both", "layer1"]
    assert torch.equal(loaded["model"]["layer1"], torch.tensor([2.0, 2.0]))
    transload.convert(tmp_path, tmp_path.with_suffix(".pt"), key="")
    assert [*torch.load(tmp_path.with_suffix(".pt"), weights_only=True)] == ["layer0", "both", "layer1"]


def test_what_cannot_be_put_together_is_refused_with_the_reason(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    flat = next(case for case in CASES if case.name == "fsdp1-local")
    with pytest.raises(LoadError, match="flat parameters"):
        transload.load(flat)
    assert not transload.verify(flat).damaged  # each file has all that its rank saved
    with pytest.raises(ContentError, match=r"this file does not have[^$]*the library that wrote it"):
        transload.convert(flat, tmp_path / "new.pt")
    for rank in range(2):
        body = dtensor(forge.tensor("0", (2, 2), (2, 1)), (2, 2), (placement("Partial"),), mesh((2,), (rank,)))
        data = forge.checkpoint(forge.pickled(forge.dictionary({"s": body})), {"0": bytes(16), "1": b""})
        (tmp_path / f"model_world_size_2_rank_{rank}.pt").write_bytes(data)
    assert "summand" in evidence(inspect(tmp_path), "piece-unplaced")
    with pytest.raises(LoadError, match="how s is divided among the ranks is not clear"):
        transload.load(tmp_path)


def test_a_truncated_rank_leaves_the_rows_of_the_others(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    write_ranks(tmp_path)
    cut = tmp_path / "model_rank_1.pt"
    for share in range(8):
        cut.write_bytes(rank_file(1)[: len(rank_file(1)) * share // 8])
        checkpoint = inspect(tmp_path)
        assert checkpoint.integrity in ("damaged", "repairable"), share
        with pytest.raises(BrokenFileError, match=r"model_rank_1\.pt"):
            transload.load(tmp_path)
    (tmp_path / "model_rank_1.pt").write_bytes(rank_file(1))
    (tmp_path / "model_rank_0.pt").write_bytes(b"")
    assert inspect(tmp_path).format == "rank-files"
