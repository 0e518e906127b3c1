"""Writes the fixtures: ``python make.py`` in an environment with torch 2.13 (CPU) and deepspeed 0.19.8.

Each is a zip archive of what some ranks wrote (CPU processes, gloo), ``expected.pt``, which is what DeepSpeed's
``zero_to_fp32`` makes of it, and ``universal/``, which is what its ``ds_to_universal`` makes of it (except with
``round_robin_gradients``, where that gives wrong weights).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import deepspeed.runtime.zero.muon.muon_optimizer  # before the processes are forked: it takes long to import
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from deepspeed.accelerator import get_accelerator
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn

CASES: dict[str, dict[str, Any]] = {
    "stage1-bf16": {"stage": 1, "bf16": True, "ranks": 2, "zero": {"parameter_alignment": True}},
    "stage2-fp16": {"stage": 2, "bf16": False, "ranks": 3, "zero": {"round_robin_gradients": True}},
    "stage3-bf16": {"stage": 3, "bf16": True, "ranks": 3, "zero": {"sub_group_size": 20}},
}


class Net(nn.Module):
    """Frozen and tied parameters, buffers of two dtypes, sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.a = nn.Linear(5, 6)
        self.b = nn.Linear(6, 5)
        self.c = nn.Linear(5, 3, bias=False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.a.weight.requires_grad_(False)
        self.b.bias.requires_grad_(False)
        self.register_buffer("scale", torch.tensor([0.5, 1.5]))
        self.register_buffer("ids", torch.tensor([2**40 + 1, 7]))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.b(torch.tanh(self.a(self.embed(ids))))
        return (self.head(x).float() ** 2).mean() + (self.c(x).float() ** 2).mean()


def train(rank: int, case: dict[str, Any], store: str, out: str) -> None:
    """What a rank does."""
    ranks = case["ranks"]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it would be compiled
    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    torch.manual_seed(0)
    net = Net()
    trained = [(name, parameter) for name, parameter in net.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for name, parameter in trained if name.endswith("weight")], "weight_decay": 0.1},
        {"params": [parameter for name, parameter in trained if name.endswith("bias")], "weight_decay": 0.0},
    ]
    config = {
        "train_batch_size": ranks,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": case["stage"], **case["zero"]},
        **({"bf16": {"enabled": True}} if case["bf16"] else {"fp16": {"enabled": True, "initial_scale_power": 4}}),
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(groups, lr=0.01), config=config)
    for step in range(2):
        engine.backward(engine(torch.tensor([[(rank + step) % 7, 1, 2]])))
        engine.step()
    engine.save_checkpoint(out, client_state={"epoch": 3, "note": {"x": torch.arange(3)}})
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    here = Path(__file__).parent
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as temporary:
            out = Path(temporary, name)
            arguments = (case, os.path.join(temporary, "store"), str(out))
            mp.start_processes(train, arguments, nprocs=case["ranks"], start_method="fork")
            torch.save(get_fp32_state_dict_from_zero_checkpoint(str(out)), out / "expected.pt")
            new = out / "universal" / "global_step2_universal"
            options = f"--input_folder {out}/global_step2 --output_folder {new} --inject_missing_state"
            workers = "--num_extract_workers 1 --num_merge_workers 1"
            command = f"{sys.executable} -m deepspeed.checkpoint.ds_to_universal {options} {workers}"
            if "round_robin_gradients" not in case["zero"]:
                subprocess.run(command.split(), check=True)
            with zipfile.ZipFile(here / f"{name}.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
                for path in sorted(out.rglob("*")):
                    if path.is_file() and path.suffix != ".py":  # DeepSpeed's scripts
                        info = zipfile.ZipInfo(str(path.relative_to(out)))
                        archive.writestr(info, path.read_bytes(), zipfile.ZIP_DEFLATED, 9)
            shutil.rmtree(out)


if __name__ == "__main__":
    main()
