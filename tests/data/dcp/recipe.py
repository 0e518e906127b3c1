"""Writes ``step-1`` in the current folder, with two processes and gloo: python recipe.py

The folders here are what it wrote with the releases they are named after.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import multiprocessing

try:
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor
except ImportError:  # before torch 2.5
    from torch.distributed._tensor import DeviceMesh, Shard, distribute_tensor


def save(rank: int, store: str) -> None:
    """Save one rank's share."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = DeviceMesh("cpu", [0, 1])
    rows = distribute_tensor(torch.arange(15.0).view(5, 3), mesh, [Shard(0)])
    columns = distribute_tensor(torch.arange(8).view(2, 4), mesh, [Shard(1)])
    state: dict[str, Any] = {
        "model": {"rows": rows, "columns": columns, "scalar": torch.tensor(2.5)},
        "optim": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "epoch": 7,
    }
    if hasattr(dcp, "save"):
        dcp.save(state, checkpoint_id="step-1")
    else:  # before torch 2.2
        dcp.save_state_dict(state, dcp.FileSystemWriter("step-1"))
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(save, (f"{folder}/store",), nprocs=2)
