"""What ``torch_checkpointing`` saves, and what it loads again: ``python make.py FOLDER RANKS``.

Needs torch 2.11 or newer, torch_checkpointing 0.1.1 and safetensors, and no GPU: only the exchange of metadata between
ranks is replaced, because that of 0.1.1 needs one. ``FOLDER/CASE`` is the checkpoint, and ``FOLDER/CASE-whole.pt``
what its own reader loads into full tensors, in one process without a process group.
"""

from __future__ import annotations

import os
import sys
import tempfile
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.multiprocessing.spawn import spawn
from torch_checkpointing import CheckpointManager, CheckpointWriterConfig, ItemSpec, SyncCheckpointSaverConfig
from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

LAYOUTS = {"pt": None, "safetensors": LayoutInfo("ranks/model-{rank}.safetensors", SafetensorsSerialization())}


def gathered(_: Any, data: Any, group: Any = None) -> dict[int, Any]:
    out = [None] * dist.get_world_size()
    dist.all_gather_object(out, data)
    return dict(enumerate(out))


DefaultMetadataManager._all_gather_pickled_data = gathered


def manager(case: str) -> CheckpointManager:
    config = CheckpointManager.Config(save=SyncCheckpointSaverConfig(
        writer_config=CheckpointWriterConfig(barrier_config=None, write_to_temp_dir=False)))
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    config.items = {"model": ItemSpec(resharder=DefaultResharder(), layout=LAYOUTS[case])}
    if case == "pt":
        config.items["optimizer"] = ItemSpec(resharder=DefaultResharder())
    return config.build()


def whole(case: str) -> dict[str, Any]:
    """The object with full tensors."""
    model = {
        "rows": torch.arange(14.0).view(7, 2),
        "columns": torch.arange(12, dtype=torch.int64).view(3, 4),
        "copy": torch.arange(3, dtype=torch.bfloat16),
        "plain": torch.tensor([1.5, 2.5]),
        "layer": {"0": {"weight": torch.arange(10.0, 15.0)}},
    }
    if case == "safetensors":
        return {"model": model}
    state = {name: {"step": torch.tensor(3.0), "exp_avg": model[name] * 0.5} for name in ("rows", "copy")}
    groups = [{"lr": 0.1, "params": ["rows", "copy"], "scale": torch.ones(2)}]
    return {"model": model, "optimizer": {"state": state, "param_groups": groups}, "step": 7, "other": {"seen": [1, 2]}}


def sharded(value: Any, mesh: Any, name: str = "") -> Any:
    """The value as a rank has it."""
    if isinstance(value, dict):
        return {key: sharded(item, mesh, name if key == "exp_avg" else str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [sharded(item, mesh, name) for item in value]
    if not isinstance(value, torch.Tensor) or name in ("plain", "step", "scale"):
        return value
    placement = {"columns": Shard(1), "copy": Replicate()}.get(name, Shard(0))
    if mesh.ndim == 1:
        return distribute_tensor(value, mesh, [placement])
    if name in ("rows", "weight"):  # as FSDP2 divides what tensor parallelism has divided
        inner = distribute_tensor(value, mesh["tp"], [Shard(0)]).to_local()
        local = distribute_tensor(inner, mesh["dp"], [Shard(0)]).to_local()
        placements = [_StridedShard(0, split_factor=mesh["tp"].size()), Shard(0)]
        return DTensor.from_local(local, mesh, placements, shape=value.shape, stride=value.stride())
    return distribute_tensor(value, mesh, [Replicate(), placement])


def save(rank: int, world: int, folder: str, store: str) -> None:
    dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=60), world, rank)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (world,))
    if world > 2:
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    for case in LAYOUTS:
        value = whole(case)
        manager(case).save(os.path.join(folder, case), {key: sharded(value[key], mesh) for key in value})
        dist.barrier()
    dist.destroy_process_group()


def emptied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: emptied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [emptied(item) for item in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


if __name__ == "__main__":
    folder, world = sys.argv[1], int(sys.argv[2])
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        spawn(save, (world, folder, os.path.join(place, "store")), world)
    for case in LAYOUTS:
        loaded = manager(case).load(os.path.join(folder, case), emptied(whole(case)))
        torch.save({**loaded}, os.path.join(folder, f"{case}-whole.pt"))
