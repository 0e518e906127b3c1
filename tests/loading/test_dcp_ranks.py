"""``transload.CheckpointReader`` on two ranks: each reads its part only, and the error of one reaches both."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.loading import test_torchrun
from tests.loading.test_torchrun import run

RELEASE = tuple(int(number) for number in torch.__version__.split(".")[:2])

pytestmark = [
    *test_torchrun.pytestmark,
    pytest.mark.skipif(
        not importlib.util.find_spec("torch.distributed.tensor"), reason="torch 2.5 has torch.distributed.tensor"
    ),
]

SCRIPT = """
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transload import CheckpointReader

mesh = init_device_mesh("cpu", (2,))
whole = torch.load("whole.pt")
facts = {"shares": {}, "errors": {}, "equal": []}

def bytes_read():
    return int(Path("/proc/self/io").read_text().split()[1])

def state(placement):
    return {name: distribute_tensor(torch.zeros_like(tensor), mesh, [placement if tensor.dim() > 1 else Replicate()])
            for name, tensor in whole.items()}

saved = {name: distribute_tensor(tensor, mesh, [Shard(0) if tensor.dim() > 1 else Replicate()])
         for name, tensor in whole.items()}
dcp.save(saved, checkpoint_id="dir")
for path in ("whole.pt", "whole.safetensors", "dir"):
    for placement in (Shard(0), Shard(1), Replicate()):
        target = state(placement)
        before = bytes_read()
        dcp.load(target, storage_reader=CheckpointReader(path))
        count = bytes_read() - before
        for name, tensor in target.items():
            full = tensor.full_tensor()
            assert full.dtype == whole[name].dtype
            assert torch.equal(full, whole[name]), (path, placement, name)
        own = sum(tensor.to_local().nbytes for tensor in target.values())
        facts["shares"][f"{path} {placement}"] = (count - 500_000) / own  # the index is read by each rank
        facts["equal"].append(f"{path} {placement}")

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 5), torch.nn.Linear(5, 3)
        self.register_buffer("count", torch.tensor(2))

    def forward(self, x):
        return self.second(self.first(x))

from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
with torch.device("meta"):
    net = Net()
fully_shard(net.first), fully_shard(net.second), fully_shard(net)
net.to_empty(device="cpu")
optimizer = torch.optim.Adam(net.parameters())
for parameter in net.parameters():
    torch.nn.init.zeros_(parameter)
model_state, optimizer_state = get_state_dict(net, optimizer)
training = {"model": model_state, "optimizer": optimizer_state, "epoch": 0}
dcp.load(training, storage_reader=CheckpointReader("training.pt"))
set_state_dict(net, optimizer, model_state_dict=training["model"], optim_state_dict=training["optimizer"])
expected = torch.load("training.pt")
assert training["epoch"] == 7
for name, tensor in net.state_dict().items():
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    assert torch.equal(full, expected["model"][name]), name
for name, parameter in net.named_parameters():
    values = optimizer.state[parameter]
    assert torch.equal(values["exp_avg"].full_tensor(), expected["optimizer"]["state"][name]["exp_avg"]), name
    assert float(values["step"]) == 3
assert optimizer.param_groups[0]["lr"] == 0.25

def failures(reader, target):
    try:
        dcp.load(target, storage_reader=reader)
    except CheckpointException as error:
        return {str(rank): [type(each).__name__, str(each)] for rank, (each, _) in error.failures.items()}

rows = {"rows": whole["rows"].clone()}
facts["errors"]["missing"] = failures(CheckpointReader("whole.pt" if rank == 0 else "none.pt"), rows)
facts["errors"]["other"] = failures(CheckpointReader(["whole.pt", "other.pt"][rank]), rows)
facts["errors"]["unsafe"] = failures(CheckpointReader("unsafe.pt"), {"z": None} | rows)
cut = {"w": distribute_tensor(torch.zeros(64, 64), mesh, [Shard(0)])}
facts["errors"]["cut"] = failures(CheckpointReader("cut.pt"), cut)
tell(**facts)
"""


class Stranger:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.getcwd, ()


@pytest.mark.skipif(RELEASE < (2, 6), reason="fully_shard is public since torch 2.6")
def test_each_rank_reads_its_part_and_errors_reach_both(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = {
        "rows": torch.randn(257, 8192, generator=generator),  # not divisible by two
        "half": torch.randn(128, 16384, generator=generator).to(torch.bfloat16),
        "one": torch.randn(1, 7, generator=generator),  # the second rank has no rows
        "vector": torch.randn(9, generator=generator),
        "number": torch.tensor(5),
    }
    torch.save(whole, tmp_path / "whole.pt")
    save_file(whole, tmp_path / "whole.safetensors")
    torch.save({name: tensor + 1 for name, tensor in whole.items()}, tmp_path / "other.pt")
    torch.save({"rows": whole["rows"], "z": Stranger()}, tmp_path / "unsafe.pt")
    torch.save({"w": torch.ones(64, 64)}, tmp_path / "cut.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "cut.pt").write_bytes((tmp_path / "cut.pt").read_bytes()[:-100])
    shapes = {"first.weight": (5, 6), "first.bias": (5,), "second.weight": (3, 5), "second.bias": (3,)}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    moments = {
        name: {"step": torch.tensor(3.0), "exp_avg": tensor * 2, "exp_avg_sq": tensor * 3}
        for name, tensor in weights.items()
    }
    net = torch.nn.Sequential(torch.nn.Linear(2, 2))
    group = torch.optim.Adam(net.parameters(), lr=0.25).state_dict()["param_groups"][0]
    optimizer = {"state": moments, "param_groups": [group | {"params": [*weights]}]}
    training = {"model": weights | {"count": torch.tensor(4)}, "optimizer": optimizer, "epoch": 7}
    torch.save(training, tmp_path / "training.pt")
    reports = run(tmp_path, SCRIPT)
    for report in reports:
        assert len(report["equal"]) == 9
        assert {name: share for name, share in report["shares"].items() if share > 1.05} == {}
        errors = report["errors"]
        assert errors["missing"]["1"][0] == "MissingFileError"
        assert "none.pt" in errors["missing"]["1"][1]
        assert errors["other"]["0"][0] == "BrokenFileError"
        assert "rank 1 and rank 0 have opened different checkpoints" in errors["other"]["0"][1]
        assert errors["unsafe"]["0"][0] == errors["unsafe"]["1"][0] == "UnsafeError"
        assert errors["cut"]["1"][0] == "BrokenFileError"
        assert "cut.pt" in errors["cut"]["1"][1]
