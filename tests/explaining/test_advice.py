"""The advice about saving, loading and distributed models works: tested with one rank, on the CPU, with gloo."""

from __future__ import annotations

import functools
import io
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from tests.makers import saved
from tests.release import RELEASE
from torch import nn

import transload

if RELEASE < (2, 13):
    pytest.skip("the advice was tested with torch 2.13", allow_module_level=True)

import torch.distributed.checkpoint as dcp
import torch.distributed.pipelining as pp
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, loss_parallel, parallelize_module
from torch.utils import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset, random_split

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)  # Windows has no HashStore
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


Action = Callable[[], object]


class Advice(NamedTuple):
    """The code of an answer, what provokes its error, and what the answer advises instead."""

    code: str
    wrong: Action
    right: Action


@functools.cache
def mesh(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (1,) * len(names), mesh_dim_names=names)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape)


def linear(**options: Any) -> nn.Linear:
    return nn.Linear(4, 4, **options)


def split(placement: Any = None, *names: str) -> DTensor:
    return distribute_tensor(ones(4, 4), mesh(*(names or ("tp",))), [placement or Shard(0)] * (len(names) or 1))


# -- DTensor


def implicit() -> object:
    with implicit_replication():
        return torch.mm(split(), ones(4, 4))


def loss(placement: Any) -> object:
    with loss_parallel():
        return nn.functional.cross_entropy(split(placement), torch.zeros(4, dtype=torch.long))


def partial_sum() -> DTensor:
    return DTensor.from_local(ones(2), mesh("tp"), [Partial()])


def redistributed(placements: Any = None) -> DTensor:
    return split().redistribute(placements=placements or [Replicate()])


# -- FSDP


class Scale(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


sharded = functools.partial(FullyShardedDataParallel, device_id=torch.device("cpu"))


def shard(module: nn.Module, **options: Any) -> Any:
    return fully_shard(module, mesh=mesh("dp"), **options)


def run(module: Any) -> object:
    return module(ones(1, 4)).sum().backward()


def frozen(*, use_orig_params: bool) -> object:
    model = nn.Sequential(linear(), linear().requires_grad_(requires_grad=False))
    return run(sharded(model, use_orig_params=use_orig_params))


def from_meta(*, allocate: bool) -> object:
    model = shard(linear(device="meta"))
    if allocate:
        model.to_empty(device="cpu")
        model.reset_parameters()
    return run(model)


def sharded_below_root(*, root_first: bool) -> object:
    model = nn.Sequential(linear(), linear())
    shard(model[0])
    if not root_first:
        model[0](ones(1, 4))
    return run(shard(model))


def nested() -> Any:
    model = sharded(nn.Sequential(linear(), sharded(linear())))
    run(model)
    return model


def summoned(**options: bool) -> None:
    with FullyShardedDataParallel.summon_full_params(sharded(linear()), **options):
        pass


def two_dtypes(*, uniform: bool) -> object:
    model = nn.Sequential(linear(), linear(dtype=torch.bfloat16))
    return run(shard(model.float() if uniform else model))


def tied(*, together: bool) -> Any:
    model = nn.Sequential(linear(bias=False), linear(bias=False))
    model[1].weight = model[0].weight
    for modules in [[*model]] if together else [model[0], model[1]]:
        fully_shard(modules, mesh=mesh("dp"))
    return run(shard(model))


def state_dict_type(config: Any) -> object:
    return FullyShardedDataParallel.set_state_dict_type(sharded(linear()), fsdp.StateDictType.FULL_STATE_DICT, config)


# -- pipelines, optimizers, loaders


def pipeline(microbatches: int, *, grad: bool = True) -> object:
    stage = pp.PipelineStage(linear(), 0, 1, torch.device("cpu"))
    schedule = pp.ScheduleGPipe(stage, microbatches, loss_fn=nn.functional.mse_loss)
    with nullcontext() if grad else torch.no_grad():
        return schedule.step(ones(4, 4), target=ones(4, 4))


def evaluated() -> object:
    with torch.no_grad():
        return pp.ScheduleGPipe(pp.PipelineStage(linear(), 0, 1, torch.device("cpu")), 2).eval(ones(4, 4))


def zero(*, consolidated: bool) -> object:
    optimizer = ZeroRedundancyOptimizer(linear().parameters(), optimizer_class=torch.optim.Adam)
    if consolidated:
        optimizer.consolidate_state_dict(to=0)
    return optimizer.state_dict()


def scaled(dtype: torch.dtype) -> object:
    model, scaler = linear(dtype=dtype), torch.amp.GradScaler("cpu")
    model = model.float() if dtype == torch.float32 else model
    scaler.scale(model(ones(1, 4).to(dtype)).sum()).backward()
    return scaler.unscale_(torch.optim.SGD(model.parameters(), 0.1))


def recomputed(*, same: bool) -> object:
    calls: list[int] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.sin() if same or len(calls) == 1 else x + 1  # saves no tensor for backward

    x = ones(2).requires_grad_()
    return checkpoint.checkpoint(forward, x, use_reentrant=False).sum().backward()


class Early(nn.Module):
    def __init__(self, *, initialized: bool) -> None:
        if initialized:
            super().__init__()
        self.weight = nn.Parameter(ones(1))


class Rows(Dataset[int]):
    def __len__(self) -> int:
        return 2


class Numbers(Rows):
    def __getitem__(self, index: int) -> int:
        return index


# -- saving and loading


def reloaded(obj: object, **options: Any) -> Any:
    """What ``torch.load`` returns for an object that was saved."""
    buffer = io.BytesIO(saved(obj, **options))
    return torch.load(buffer)


weight_norm = nn.utils.parametrizations.weight_norm


def deep() -> list[Any]:
    nested: list[Any] = []
    for _ in range(900 if sys.version_info < (3, 12) else 100_000):  # from 3.12 on C code has a limit of its own
        nested = [nested]
    return nested


def saved_deep() -> None:
    if sys.version_info >= (3, 12):
        return saved_flat()
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        torch.save(deep(), io.BytesIO())
    finally:
        sys.setrecursionlimit(limit)


def saved_flat() -> None:
    torch.save(nn.Linear(1, 1).state_dict(), io.BytesIO())


class WithExtraState(nn.Linear):
    def __init__(self, extra: object) -> None:
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self) -> object:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = pickle.loads(state.numpy().tobytes())


def devices(state_dict: dict[str, Any]) -> object:
    return [state_dict[name].device for name in state_dict]


def as_tensor(extra: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(extra)), dtype=torch.uint8)


def taken(checkpoint: dict[str, Any], key: str = "") -> object:
    return linear().load_state_dict(checkpoint["state_dict"] if not key else checkpoint)


class Stream:
    """A stream that can only be read, such as the response to a download."""

    def __init__(self) -> None:
        self.data = saved(ones(1))

    def read(self) -> bytes:
        return self.data


labels, logits = torch.tensor([0, 255]), ones(2, 3)

ADVICE = [
    Advice("not-seekable", lambda: torch.load(Stream()), lambda: torch.load(io.BytesIO(Stream().read()))),
    Advice(
        "not-seekable",
        lambda: torch.load(linear().state_dict()),
        lambda: linear().load_state_dict(linear().state_dict()),
    ),
    Advice(
        "state-dict-kind",
        lambda: linear().load_state_dict("model.pt"),
        lambda: linear().load_state_dict(reloaded(linear().state_dict())),
    ),
    Advice(
        "state-dict-kind",
        lambda: linear().load_state_dict(linear()),
        lambda: linear().load_state_dict(linear().state_dict()),
    ),
    Advice(
        "state-dict-kind",
        lambda: linear().load_state_dict(linear().named_parameters()),
        lambda: linear().load_state_dict(dict(linear().named_parameters()), strict=False),
    ),
    Advice("checkpoint-key", lambda: taken(linear().state_dict()), lambda: taken(linear().state_dict(), "all")),
    Advice(
        "extra-state",
        lambda: devices(WithExtraState({"a": 1}).state_dict()),
        lambda: devices({k: v for k, v in WithExtraState({"a": 1}).state_dict().items() if torch.is_tensor(v)}),
    ),
    Advice(
        "extra-state",
        lambda: devices(WithExtraState({"a": 1}).state_dict()),
        lambda: (
            devices(WithExtraState(as_tensor({"a": 1})).state_dict()),
            WithExtraState(None).load_state_dict(WithExtraState(as_tensor({"a": 1})).state_dict()),
        ),
    ),
    Advice(
        "parametrized-module",
        lambda: torch.save(weight_norm(linear()), io.BytesIO()),
        lambda: weight_norm(linear()).load_state_dict(reloaded(weight_norm(linear()).state_dict())),
    ),
    Advice(
        "save-local-object",
        lambda: torch.save({"collate": lambda batch: batch}, io.BytesIO()),
        lambda: torch.save({"collate": functools.partial(sorted, reverse=True)}, io.BytesIO()),
    ),
    Advice(
        "save-unpicklable",
        lambda: torch.save({"model": linear(), "lock": threading.RLock()}, io.BytesIO()),
        lambda: reloaded({"model": linear().state_dict(), "optimizer": torch.optim.Adam([ones(1)]).state_dict()}),
    ),
    Advice("save-recursion", lambda: torch.save(deep(), io.BytesIO()), saved_deep),
    Advice("save-recursion", lambda: torch.save(deep(), io.BytesIO()), saved_flat),
    Advice(
        "load-no-file",
        lambda: torch.load("absent.pt"),
        lambda: (os.path.abspath("absent.pt"), os.listdir(os.path.dirname(os.path.abspath("absent.pt")))),
    ),
    Advice(
        "numpy-of-a-gpu-tensor",
        lambda: ones(1).requires_grad_().numpy(),
        lambda: ones(1).requires_grad_().detach().cpu().numpy(),
    ),
    Advice(
        "label-out-of-range",
        lambda: nn.functional.cross_entropy(logits, labels),
        lambda: nn.functional.cross_entropy(logits, labels, ignore_index=255),
    ),
    Advice(
        "index-out-of-range",
        lambda: nn.Embedding(3, 2)(torch.tensor([3])),
        lambda: nn.Embedding(int(torch.tensor([3]).max()) + 1, 2)(torch.tensor([3])),
    ),
    Advice(
        "loss-input-out-of-range",
        lambda: nn.functional.binary_cross_entropy(ones(2) * 3, ones(2)),
        lambda: nn.functional.binary_cross_entropy_with_logits(ones(2) * 3, ones(2)),
    ),
    Advice(
        "not-a-probability",
        lambda: torch.multinomial((ones(3).half() * 70_000).float().softmax(0), 1),
        lambda: torch.multinomial((ones(3).bfloat16() * 70_000).float().softmax(0), 1),
    ),
    Advice("dtensor-mixed", lambda: torch.mm(split(), ones(4, 4)), lambda: torch.mm(split(), split(Replicate()))),
    Advice("dtensor-mixed", lambda: torch.mm(split(), ones(4, 4)), implicit),
    Advice("dtensor-mixed", lambda: torch.mm(split(), ones(4, 4)), lambda: torch.mm(split().full_tensor(), ones(4, 4))),
    Advice(
        "dtensor-meshes",
        lambda: torch.mm(split(), split(Replicate(), "dp", "tp")),
        lambda: torch.mm(
            split(), distribute_tensor(split(Replicate(), "dp", "tp").full_tensor(), mesh("tp"), [Shard(0)])
        ),
    ),
    Advice(
        "dtensor-placements",
        lambda: distribute_tensor(ones(4), mesh("dp", "tp"), [Shard(0)]),
        lambda: distribute_tensor(ones(4), mesh("dp", "tp"), [Shard(0), Replicate()]),
    ),
    Advice("dtensor-placements", lambda: distribute_tensor(split(), mesh("tp"), [Replicate()]), redistributed),
    Advice("dtensor-needs-redistribute", lambda: torch.unbind(split()), lambda: torch.unbind(redistributed())),
    Advice("dtensor-propagation", lambda: split().long().view(-1).bincount(), lambda: split().full_tensor().histc()),
    Advice(
        "dtensor-operator", lambda: split().as_strided((2,), (1,)), lambda: split().to_local().as_strided((2,), (1,))
    ),
    Advice(
        "tensor-parallel-plan",
        lambda: parallelize_module(nn.LayerNorm(4), mesh("tp"), ColwiseParallel()),
        lambda: parallelize_module(nn.LayerNorm(4), mesh("tp"), SequenceParallel()),
    ),
    Advice(
        "dtensor-placements",
        lambda: parallelize_module(linear(), mesh("dp", "tp"), ColwiseParallel()),
        lambda: parallelize_module(linear(), mesh("dp", "tp")["tp"], ColwiseParallel()),
    ),
    Advice("loss-parallel", lambda: loss(Shard(0)), lambda: loss(Shard(-1))),
    Advice(
        "fsdp-container", lambda: shard(nn.ModuleList([linear()])), lambda: [shard(module) for module in [linear()]]
    ),
    Advice("fsdp-mesh", lambda: fully_shard(linear(), mesh=mesh("a", "b", "c")), lambda: shard(linear())),
    Advice("fsdp-twice", lambda: shard(shard(linear())), lambda: shard(nn.Sequential(shard(linear())))),
    Advice("fsdp-scalar-parameter", lambda: shard(Scale()), lambda: run(shard(Scale(1)))),
    Advice("fsdp-meta", lambda: from_meta(allocate=False), lambda: from_meta(allocate=True)),
    Advice("fsdp-root", lambda: sharded_below_root(root_first=False), lambda: sharded_below_root(root_first=True)),
    Advice("fsdp-root", lambda: nested()[1].clip_grad_norm_(1.0), lambda: nested().clip_grad_norm_(1.0)),
    Advice("fsdp-uniform-dtype", lambda: two_dtypes(uniform=False), lambda: two_dtypes(uniform=True)),
    Advice("fsdp-tied-parameters", lambda: tied(together=False), lambda: tied(together=True)),
    Advice("fsdp-requires-grad", lambda: frozen(use_orig_params=False), lambda: frozen(use_orig_params=True)),
    Advice("fsdp-no-accelerator", lambda: FullyShardedDataParallel(linear()), lambda: run(sharded(linear()))),
    Advice(
        "fsdp-summon",
        lambda: summoned(writeback=True, rank0_only=True),
        lambda: summoned(writeback=False, rank0_only=True),
    ),
    Advice(
        "fsdp-state-dict-type",
        lambda: state_dict_type(fsdp.ShardedStateDictConfig()),
        lambda: state_dict_type(fsdp.FullStateDictConfig()),
    ),
    Advice("pipeline-microbatches", lambda: pipeline(8), lambda: pipeline(4)),
    Advice("pipeline-no-grad", lambda: pipeline(2, grad=False), evaluated),
    Advice("zero-optimizer-state", lambda: zero(consolidated=False), lambda: zero(consolidated=True)),
    Advice("amp-fp16-gradients", lambda: scaled(torch.float16), lambda: scaled(torch.float32)),
    Advice("activation-checkpoint-differs", lambda: recomputed(same=False), lambda: recomputed(same=True)),
    Advice("module-init", lambda: Early(initialized=False), lambda: Early(initialized=True)),
    Advice(
        "optimizer-parameters",
        lambda: torch.optim.SGD([ones(1).requires_grad_() * 2], 0.1),
        lambda: torch.optim.SGD([(ones(1).requires_grad_() * 2).detach().requires_grad_()], 0.1),
    ),
    Advice(
        "dataloader-timeout",
        lambda: list(DataLoader(Numbers(), timeout=5)),
        lambda: list(DataLoader(Numbers())),
    ),
    Advice("dataset-methods", lambda: list(DataLoader(Rows())), lambda: list(DataLoader(Numbers()))),
    Advice("dataset-sizes", lambda: TensorDataset(ones(2), ones(3)), lambda: TensorDataset(ones(3), ones(3))),
    Advice("dataset-sizes", lambda: random_split(Numbers(), [1, 2]), lambda: random_split(Numbers(), [0.5, 0.5])),
    Advice(
        "distributed-sampler",
        lambda: DistributedSampler(Numbers(), num_replicas=1, rank=1),
        lambda: DistributedSampler(Numbers()),
    ),
]


@pytest.mark.parametrize("advice", ADVICE, ids=lambda advice: advice.code)
def test_advice_works(advice: Advice) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011  the answer identifies it
        advice.wrong()
    explanation = transload.explain(caught.value, checks=False)
    assert [answer.code for answer in explanation.answers] == [advice.code]
    advice.right()


def test_protocol_4_is_loaded_by_transload_without_trust_and_by_torch_with_it() -> None:
    """The advice on values of more than 4 GiB, with a small one."""
    buffer = io.BytesIO()
    torch.save({"data": b"abc", "w": ones(1)}, buffer, pickle_protocol=4)
    for load in (transload.load, functools.partial(torch.load, weights_only=False)):
        buffer.seek(0)
        assert load(buffer)["data"] == b"abc"
    tensor = torch.frombuffer(bytearray(b"abc"), dtype=torch.uint8)
    assert reloaded({"data": tensor})["data"].numpy().tobytes() == b"abc"


def test_transload_save_says_where_the_object_is_that_cannot_be_pickled(tmp_path: Path) -> None:
    with pytest.raises(transload.TransloadError, match=r"obj\['a'\]\['lock'\]"):
        transload.save({"a": {"lock": threading.RLock()}}, tmp_path / "a.pt")


def test_partial_dtensor_can_be_saved_after_redistribute(tmp_path: Path) -> None:
    with pytest.raises(BaseException, match="partial placements") as caught:
        dcp.save({"w": partial_sum()}, checkpoint_id=tmp_path / "a")
    (answer,) = transload.explain(caught.value, checks=False).answers
    assert answer.code == "dtensor-partial-saved"
    dcp.save({"w": partial_sum().redistribute(placements=[Replicate()])}, checkpoint_id=tmp_path / "b")


def test_get_model_state_dict_has_the_names_of_the_wrapped_model() -> None:
    wrapped = nn.parallel.DistributedDataParallel(linear())
    assert {*wrapped.state_dict()} == {"module.weight", "module.bias"}
    assert {*get_model_state_dict(wrapped)} == {"weight", "bias"}
