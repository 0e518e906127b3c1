"""Two processes under torchrun, on the CPU: each loads the full file, and its shard of a distributed tensor."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import forks
from tests.loading.zoo import Net, saved

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="tested on Linux only"),
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available())
        if hasattr(torch.distributed, "is_gloo_available")
        else not torch.distributed.is_available(),
        reason="this torch was built without gloo",
    ),
]

PREAMBLE = """
import datetime, json, os, sys, warnings
import torch
import torch.distributed as dist
from pathlib import Path
from tests.loading.equal import assert_same
from transload.loading import load

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])

def tell(**facts):
    dist.barrier()
    Path(f"{rank}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()
"""


def run(folder: Path, script: str, ranks: int = 2) -> list[dict[str, Any]]:
    """Run a script on several ranks and return the facts each one wrote."""
    path = folder / "script.py"
    path.write_text(PREAMBLE + script, encoding="utf-8")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "TORCHELASTIC"))}
    environ |= {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environ["TMPDIR"] = str(folder)  # torchrun leaves folders behind
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    if forks.FORKS:  # the ranks too start with torch already imported
        launcher += ["--no-python", sys.executable, "-S", forks.__file__, "ask", forks.server("torch")]
    process = forks.run(*launcher, path, cwd=folder, env=environ)
    assert process.returncode == 0, process.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


FULL_FILE = """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    held = load("gpu.pt")
words = [str(each.message) for each in caught if each.category.__name__ == "LandingWarning"]
assert_same(torch.load("gpu.pt", map_location="cpu"), held)
assert_same(torch.load("cpu.pt"), load("cpu.pt"))
assert_same(torch.load("cpu.pt", mmap=True), load("cpu.pt", mmap=True))

total = torch.stack([value.double().sum() for value in held["model"].values()]).sum()
parts = [torch.zeros_like(total) for _ in range(2)]
dist.all_gather(parts, total)
facts = dict(local=local, words=words, total=float(total), parts=[float(part) for part in parts],
             devices=sorted({str(value.device) for value in held["model"].values()}))
"""
DISTRIBUTED_TENSOR = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

mesh = init_device_mesh("cpu", (2,))
whole = torch.arange(12.0).reshape(4, 3)
made = {"rows": distribute_tensor(whole, mesh, [Shard(0)]), "all": distribute_tensor(whole, mesh, [Replicate()])}
torch.save(made, f"dtensor-{rank}.pt")
expected = torch.load(f"dtensor-{rank}.pt", weights_only=False)
assert_same(expected, load(f"dtensor-{rank}.pt", weights_only=False))
held = load(f"dtensor-{rank}.pt")
assert_same(expected, held)
facts |= dict(rows=held["rows"].to_local().tolist(), full=held["rows"].full_tensor().tolist(),
              kind=type(held["all"]).__name__)
"""
LOADS_DISTRIBUTED = importlib.util.find_spec("torch.distributed.tensor") and hasattr(
    torch.serialization, "safe_globals"
)
"""Whether this torch loads distributed tensors with weights_only."""


def test_each_rank_loads_the_full_file_and_its_shard_of_a_distributed_tensor(tmp_path: Path) -> None:
    net = Net()
    (tmp_path / "cpu.pt").write_bytes(saved(net.state_dict()))
    (tmp_path / "gpu.pt").write_bytes(saved({"model": net.state_dict(), "epoch": 3}, tag="cuda:5"))
    reports = run(tmp_path, f"{FULL_FILE}{DISTRIBUTED_TENSOR if LOADS_DISTRIBUTED else ''}tell(**facts)")
    assert [report["local"] for report in reports] == [0, 1]
    for report in reports:
        assert report["parts"] == [report["total"]] * 2
        assert report["devices"] == ["cpu"]
        assert len(report["words"]) == 1
        assert "cuda:5" in report["words"][0]
    if not LOADS_DISTRIBUTED:
        return
    assert [report["rows"] for report in reports] == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]
    assert all(report["full"] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]] for report in reports)
    assert {report["kind"] for report in reports} == {"DTensor"}
