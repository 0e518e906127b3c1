"""Megatron directories with a folder for each rank: slices and stages, put together by the names of parameters.

Megatron needs a GPU to write them, so the ranks are made by hand: a whole model is cut as Megatron cuts it.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.each import for_each
from tests.release import RELEASE

from transload.converting import convert
from transload.errors import BrokenFileError, LoadError
from transload.loading import load
from transload.loading.handles import open as open_
from transload.opening import inspect

HIDDEN, HEADS, GROUPS, FFN, VOCAB, LAYERS, EXPERTS = 8, 4, 2, 6, 16, 4, 4
HEAD = HIDDEN // HEADS


def cut(tensor: torch.Tensor, dim: int, rank: int, ranks: int) -> torch.Tensor:
    return tensor.chunk(ranks, dim)[rank].clone()


def gated(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """A rank's rows of both matrices of a gated layer, one after the other."""
    return torch.cat([cut(half, 0, rank, ranks) for half in tensor.chunk(2)])


def layer_parameters(*, experts: int) -> Iterator[tuple[str, torch.Size]]:
    yield "input_layernorm.weight", torch.Size([HIDDEN])
    yield "self_attention.linear_qkv.layer_norm_weight", torch.Size([HIDDEN])
    yield "self_attention.linear_qkv.weight", torch.Size([(HEADS + 2 * GROUPS) * HEAD, HIDDEN])
    yield "self_attention.linear_qkv.bias", torch.Size([(HEADS + 2 * GROUPS) * HEAD])
    yield "self_attention.linear_proj.weight", torch.Size([HIDDEN, HIDDEN])
    yield "self_attention.linear_proj.bias", torch.Size([HIDDEN])
    mlps = [f"mlp.experts.local_experts.{number}" for number in range(experts)] or ["mlp"]
    for mlp in mlps:
        yield f"{mlp}.linear_fc1.weight", torch.Size([2 * FFN, HIDDEN])
        yield f"{mlp}.linear_fc2.weight", torch.Size([HIDDEN, FFN])
    if experts:
        yield "mlp.router.weight", torch.Size([experts, HIDDEN])


def whole_model(*, experts: int = 0) -> dict[str, torch.Tensor]:
    shapes = {"embedding.word_embeddings.weight": torch.Size([VOCAB, HIDDEN])}
    for layer in range(LAYERS):
        shapes |= {f"decoder.layers.{layer}.{name}": shape for name, shape in layer_parameters(experts=experts)}
    shapes["decoder.final_layernorm.weight"] = torch.Size([HIDDEN])
    shapes["output_layer.weight"] = torch.Size([VOCAB, HIDDEN])
    model, at = {}, 0
    for name, shape in shapes.items():
        model[name] = torch.arange(at, at + shape.numel(), dtype=torch.float32).view(shape)
        at += shape.numel()
    return model


def slice_of(name: str, tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    if "linear_fc1" in name:
        return gated(tensor, rank, ranks)
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return cut(tensor, 1, rank, ranks)
    if name.endswith(("qkv.weight", "qkv.bias", "word_embeddings.weight", "output_layer.weight")):
        return cut(tensor, 0, rank, ranks)
    return tensor.clone()


def save_ranks(
    folder: Path,
    model: dict[str, torch.Tensor],
    *,
    tp: int = 1,
    chunks: list[list[int]] | None = None,
    ep: int = 1,
    **args: Any,
) -> Path:
    """Save a model in folders; ``chunks`` are the layers of each stage, of which there may be several for each."""
    chunks = chunks or [[LAYERS]]
    stages = len(chunks[0])
    settings = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": stages,
        "expert_model_parallel_size": ep,
        "num_layers": LAYERS,
        "num_attention_heads": HEADS,
        "group_query_attention": True,
        "num_query_groups": GROUPS,
        "swiglu": True,
        "params_dtype": torch.bfloat16,
        **args,
    }
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("10")
    for t, stage, e in product(range(tp), range(stages), range(ep)):
        content: dict[str, Any] = {"args": Namespace(**settings), "checkpoint_version": 3.0, "iteration": 10}
        start = 0
        for number, counts in enumerate(chunks):
            key = "model" if len(chunks) == 1 else f"model{number}"
            first = start + sum(counts[:stage])
            start += sum(counts)
            inside: dict[str, Any] = {}
            for name, tensor in model.items():
                new = name
                if ".layers." in name:
                    layer = int(name.split(".")[2])
                    if not first <= layer < first + counts[stage]:
                        continue
                    new = name.replace(f".layers.{layer}.", f".layers.{layer - first}.")
                elif (number, stage) != ((0, 0) if "embedding" in name else (len(chunks) - 1, stages - 1)):
                    continue
                if ".local_experts." in name:
                    expert, local = int(name.split(".")[6]), EXPERTS // ep
                    if expert // local != e:
                        continue
                    new = new.replace(f"local_experts.{expert}.", f"local_experts.{expert % local}.")
                inside[new] = slice_of(name, tensor, t, tp)
            inside["decoder.layers.0.self_attention._extra_state"] = None
            content[key] = inside
        content["optimizer"] = {"step": 7, "rank": (t, stage, e)}
        name = f"mp_rank_{t:02d}" + (f"_{stage:03d}" if stages > 1 else "") + (f"_{e:03d}" if ep > 1 else "")
        (folder / name).mkdir(parents=True)
        torch.save(content, folder / name / "model_optim_rng.pt")
    return folder.parent


def assert_is(path: Path, model: dict[str, torch.Tensor]) -> None:
    loaded = load(path)["model"]
    assert loaded.keys() == model.keys()
    assert [name for name in model if not torch.equal(loaded[name], model[name])] == []


def test_ranks_are_merged(tmp_path: Path) -> None:
    def is_merged(case: tuple[int, dict[str, Any]]) -> None:
        number, settings = case
        model = whole_model(experts=EXPERTS if settings.get("ep") else 0)
        assert_is(save_ranks(tmp_path / str(number) / "iter_0000010", model, **settings), model)

    cases: list[dict[str, Any]] = [
        {},
        {"tp": 2},
        {"chunks": [[2, 2]]},
        {"tp": 2, "chunks": [[1, 3]]},  # uneven stages
        {"tp": 2, "chunks": [[1, 1], [1, 1]]},  # virtual stages
        {"tp": 2, "ep": 2},
        {"ep": 4, "chunks": [[3, 1]]},
        {"tp": 2, "group_query_attention": False, "num_query_groups": 1},
    ]
    for number in range(len(cases)):
        (tmp_path / str(number)).mkdir()
    for_each(enumerate(cases), is_merged)


def test_everything_else_is_kept(tmp_path: Path) -> None:
    path = save_ranks(tmp_path / "iter_0000010", whole_model(), tp=2)
    torch.save({"buckets": torch.ones(3)}, tmp_path / "iter_0000010" / "mp_rank_01" / "distrib_optim.pt")
    loaded = load(path)
    assert (loaded["iteration"], loaded["args"]["num_layers"], loaded["args"]["params_dtype"]) == (
        10,
        4,
        torch.bfloat16,
    )
    assert loaded["optimizer"]["mp_rank_01"] == {"step": 7, "rank": (1, 0, 0)}
    assert loaded["distrib_optim.pt"]["mp_rank_01"]["buckets"].tolist() == [1, 1, 1]
    assert "_extra_state" in dict(inspect(path).facts)["left out"]
    convert(path, tmp_path.with_suffix(".pt"))
    written = torch.load(tmp_path.with_suffix(".pt"), weights_only=True)
    assert written.keys() == whole_model().keys()
    with open_(path) as handle:
        name = "decoder.layers.1.mlp.linear_fc1.weight"
        assert torch.equal(handle.slice(f"model/{name}")[2:9, ::3], whole_model()[name][2:9, ::3])


def test_what_no_rule_covers_is_not_merged(tmp_path: Path) -> None:
    def is_refused(case: tuple[int, tuple[str, dict[str, Any]]]) -> None:
        number, (why, settings) = case
        folder = tmp_path / str(number)
        folder.mkdir()
        model = whole_model() | settings.pop("more", {})
        path = save_ranks(folder / "iter_0000010", model, **settings)
        found = {problem.code: problem.detail for problem in inspect(path).problems}
        assert why in found["ranks-unmerged"]
        with pytest.raises(LoadError, match="cannot be put together"):
            load(path)

    cases: list[tuple[str, dict[str, Any]]] = [
        (
            "no rule says how the tensor-parallel ranks have adapter.weight",
            {"tp": 2, "more": {"adapter.weight": torch.ones(2)}},
        ),
        ("1 groups of queries are split over 2 ranks", {"tp": 2, "num_query_groups": 1}),
        (
            "the slices of output_layer.bias do not fit together",
            {"tp": 2, "more": {"output_layer.bias": torch.ones(2).to_sparse()}},
        ),
        ("the stages have 4 layers, args say 8", {"chunks": [[2, 2]], "num_layers": 8}),
        (
            "experts are split over another number",
            {
                "tp": 2,
                "expert_tensor_parallel_size": 1,
                "more": {"decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.weight": torch.ones(2, 2)},
            },
        ),
    ]
    for_each(enumerate(cases), is_refused)


def test_files_without_arguments_are_not_merged(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"mp_rank_{rank:02d}").mkdir()
        torch.save({"model": {"w": torch.ones(2)}}, tmp_path / f"mp_rank_{rank:02d}" / "model_optim_rng.pt")
    (problem,) = inspect(tmp_path).problems
    assert (problem.code, "args" in problem.detail) == ("ranks-unmerged", True)
    convert(tmp_path, tmp_path.with_suffix(".pt"))
    assert len(torch.load(tmp_path.with_suffix(".pt"))) == 2


def test_missing_rank_and_rank_of_another_iteration(tmp_path: Path) -> None:
    path = save_ranks(tmp_path / "iter_0000010", whole_model(), tp=2)
    file = tmp_path / "iter_0000010" / "mp_rank_01" / "model_optim_rng.pt"
    torch.save({**torch.load(file, weights_only=False), "iteration": 20}, file)
    assert {problem.code for problem in inspect(path).problems} == {"ranks-differ", "ranks-unmerged"}
    file.unlink()
    file.parent.rmdir()
    found = {problem.code: problem.detail for problem in inspect(path).problems}
    assert "there is no (1, 0, 0)" in found["rank-missing"]
    with pytest.raises(BrokenFileError, match="missing"):
        load(path)


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.skipif(RELEASE < (2, 3), reason="this torch cannot write DCP without a process group")
def test_distributed_form_is_one_object_with_the_common_file(tmp_path: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    folder = tmp_path / "iter_0000010"
    dcp.save({"decoder.layers.weight": torch.ones(2, 3)}, checkpoint_id=folder)
    torch.save({"args": Namespace(num_layers=2), "iteration": 10}, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    loaded = load(tmp_path)
    assert loaded["decoder.layers.weight"].tolist() == [[1, 1, 1]] * 2
    assert (loaded["args"], loaded["iteration"]) == ({"num_layers": 2}, 10)
