"""What the ranks of a run save with ``torch.save``, and the whole: ``python make.py FOLDER [CASE …]``.

Each case is a folder with one file per rank, and ``whole.pt`` beside it: the same object with the full tensors, which
rank 0 gathered. Needs only torch (2.1 or newer) on a CPU; cases that a release lacks are left out.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

try:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
except ImportError:
    from torch.distributed._tensor import DTensor, Replicate, Shard, distribute_tensor

warnings.filterwarnings("ignore")


def net(seed: int = 0) -> nn.Module:
    """A model with sizes that two and four ranks cannot share evenly."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 3), nn.Linear(3, 8, bias=False))


def full(value: Any) -> Any:
    """The value with full tensors; every rank must call it."""
    if isinstance(value, DTensor):
        return value.full_tensor().clone() if hasattr(value, "full_tensor") else value.redistribute(
            value.device_mesh, [Replicate()] * value.device_mesh.ndim).to_local().clone()
    if isinstance(value, dict):
        return {key: full(item) for key, item in value.items()}
    if isinstance(value, list):
        return [full(item) for item in value]
    return value


def mesh_of(*shape: int, names: tuple[str, ...] = ()) -> Any:
    """A mesh over all ranks."""
    ranks = torch.arange(dist.get_world_size()).view(*shape)
    try:
        from torch.distributed.device_mesh import DeviceMesh
    except ImportError:
        from torch.distributed._tensor import DeviceMesh
    return DeviceMesh("cpu", ranks, mesh_dim_names=names or None)


def fsdp1(strategy: str, **options: Any) -> tuple[Any, Any]:
    """FSDP1: its ShardedTensors (SHARDED) or its flat parameters (LOCAL), and the whole."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import FullStateDictConfig, StateDictType, ShardedStateDictConfig, LocalStateDictConfig

    model = FSDP(net(), device_id=torch.device("cpu"), use_orig_params=True, **options)
    configs = {"SHARDED": ShardedStateDictConfig, "LOCAL": LocalStateDictConfig}
    with FSDP.state_dict_type(model, getattr(StateDictType, f"{strategy}_STATE_DICT"), configs[strategy]()):
        piece = model.state_dict()
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=False)):
        whole = {key: value.clone() for key, value in model.state_dict().items()}
    return piece, whole


def sharded_tensors() -> tuple[Any, Any]:
    """ShardedTensors made by hand, for releases whose FSDP needs a GPU."""
    from torch.distributed._shard.sharded_tensor import Shard as LocalShard
    from torch.distributed._shard.sharded_tensor import init_from_local_shards

    torch.manual_seed(2)
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = {"rows": torch.randn(7, 3), "line": torch.arange(10)}
    pieces = {}
    for name, tensor in whole.items():
        chunks = list(tensor.chunk(world))
        start = sum(len(chunk) for chunk in chunks[:rank])
        shard = LocalShard.from_tensor_and_offsets(chunks[rank].clone(), [start] + [0] * (tensor.ndim - 1), rank)
        pieces[name] = init_from_local_shards([shard], tensor.shape)
    plain = {"scale": torch.tensor([1.5]), "step": 3}
    return {**pieces, **plain}, {**whole, **plain}


def fsdp2() -> tuple[Any, Any]:
    """FSDP2 with the optimizer's state and values beside them."""
    from torch.distributed.fsdp import fully_shard

    model = net()
    fully_shard(model[2])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    piece = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}
    return piece, full(piece)


def hsdp() -> tuple[Any, Any]:
    """FSDP2 that replicates over the first dimension of the mesh."""
    from torch.distributed.fsdp import fully_shard

    model = net()
    fully_shard(model, mesh=mesh_of(2, -1, names=("replicate", "shard")))
    piece = model.state_dict()
    return piece, full(piece)


def fsdp2_tp() -> tuple[Any, Any]:
    """FSDP2 over tensor parallelism: strided shards."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 10), nn.LayerNorm(10))
    mesh = mesh_of(2, -1, names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    piece = model.state_dict()
    return piece, full(piece)


def dtensors() -> tuple[Any, Any]:
    """Every placement that can be made by hand, with uneven sizes and ranks without rows."""
    torch.manual_seed(1)
    world = dist.get_world_size()
    line = mesh_of(world)
    tensors: dict[str, Any] = {
        "rows": distribute_tensor(torch.randn(10, 4), line, [Shard(0)]),
        "columns": distribute_tensor(torch.randn(3, 5), line, [Shard(1)]),
        "few rows": distribute_tensor(torch.arange(3), line, [Shard(0)]),
        "one": distribute_tensor(torch.randn(1, 2), line, [Shard(0)]),
        "equal": distribute_tensor(torch.ones(8), line, [Shard(0)]),
        "same": distribute_tensor(torch.randn(4), line, [Replicate()]),
        "scalar": distribute_tensor(torch.tensor(2.5), line, [Replicate()]),
        "long": distribute_tensor(torch.arange(7) * 3, line, [Shard(0)]),
        "plain": torch.arange(5),
    }
    if world % 2 == 0:
        grid = mesh_of(2, -1, names=("a", "b"))
        tensors["grid"] = distribute_tensor(torch.randn(5, 7), grid, [Shard(0), Shard(1)])
        tensors["twice"] = distribute_tensor(torch.randn(11, 2), grid, [Shard(0), Shard(0)])
        tensors["half same"] = distribute_tensor(torch.randn(6, 2), grid, [Replicate(), Shard(0)])
        cube = mesh_of(1, 2, -1, names=("a", "b", "c"))
        tensors["cube"] = distribute_tensor(torch.randn(3, 4, 5), cube, [Shard(0), Shard(2), Shard(1)])
    piece = {"tensors": tensors, "epoch": 3, "rank": dist.get_rank()}
    whole = full(piece)
    return piece, {**whole, "rank": 0}


CASES: dict[str, tuple[str, Callable[[], tuple[Any, Any]]]] = {
    "dtensor": ("rank{}.pt", dtensors),
    "fsdp1": ("st_rank{}.pt", lambda: fsdp1("SHARDED")),
    "fsdp1-local": ("model_final.rank_{}.pth", lambda: fsdp1("LOCAL")),
    "sharded": ("checkpoint_rank_{}.pt", sharded_tensors),
    "fsdp2": ("model_world_size_{world}_rank_{}.pt", fsdp2),
    "hsdp": ("pytorch_model_fsdp_rank{}.bin", hsdp),
    "fsdp2-tp": ("model_rank_{}.pt", fsdp2_tp),
}


def run(rank: int, world: int, store: str, folder: str, case: str) -> None:
    """One rank: make the objects of a case, and save them."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world,
                            timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    name, make = CASES[case]
    piece, whole = make()
    os.makedirs(os.path.join(folder, case), exist_ok=True)
    torch.save(piece, os.path.join(folder, case, name.format(rank, world=world)))
    if rank == 0:
        torch.save(whole, os.path.join(folder, f"{case}-whole.pt"))
    dist.barrier()
    dist.destroy_process_group()


def main(folder: str, world: int, cases: list[str]) -> None:
    """Run the cases one after the other."""
    for case in cases or CASES:
        with tempfile.TemporaryDirectory() as scratch:
            try:
                spawn(run, (world, os.path.join(scratch, "store"), folder, case), nprocs=world)
            except Exception as error:  # noqa: BLE001 - a release may lack it in any way
                print(case, "failed:", str(error).strip().splitlines()[-1])
            else:
                print(case, "made")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
