"""Measure loading on several ranks, and merging what they saved: bytes read, time and memory; needs torch 2.6 and gloo.

    python bench/ranks.py [--json] [--ranks N] [--megabytes N] [--repeat N] [--only PATTERN] [--folder DIR]

Each contender runs in new processes, in turn with the others, and the median counts. A rank's share is what it has of
the model, or of tensors that are split by columns. Bytes read are those of system calls (``rchar``), so a reader that
maps its file shows none. Peaks are beyond those of processes that only have the same imports and make the model. Files
are in the page cache. Contenders that are not installed are left out.
"""

from __future__ import annotations

import os
import sys

if sys.path[0] and sys.path[0] == __file__.rpartition(os.sep)[0]:
    del sys.path[0]  # or `import inspect` would find the file next to this one

import argparse
import importlib.util
import json
import platform
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

LAYERS = 16
DEADLINE = 600

RANK = f"""
import datetime, json, os, resource, sys, time, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
import transload
rank, ranks, width, out = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)
store = dist.FileStore(out + ".store", ranks)
dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=300))
mesh = init_device_mesh("cpu", (ranks,))
net = torch.nn.Sequential(*(torch.nn.Linear(width, width, device="meta") for _ in range({LAYERS})))
for layer in net:
    fully_shard(layer, mesh=mesh)
fully_shard(net, mesh=mesh)
net.to_empty(device="cpu")
def columns():
    names = [f"{{layer}}.weight" for layer in range({LAYERS})]
    piece = torch.empty(width, width // ranks)
    return {{name: DTensor.from_local(piece.clone(), mesh, [Shard(1)], run_check=False) for name in names}}
def read():
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])
"""

SAVE = """
state = net.state_dict()
for name, tensor in state.items():
    local = tensor.to_local()
    local.fill_(1) if "bias" in name else local.uniform_(-1, 1)
dcp.save(state, checkpoint_id="dir")
dcp.save({"model": state}, checkpoint_id="nested")  # as accelerate expects it
full = {name: tensor.full_tensor() for name, tensor in state.items()}
if rank == 0:
    from safetensors.torch import save_file
    torch.save(full, "model.pt")
    os.mkdir("safe")
    save_file(full, "safe/model.safetensors")
    # What DeepSpeed writes at stage 2: the flat weights, cut into one piece for each rank.
    flat = torch.cat([tensor.flatten() for tensor in full.values()])
    piece = -(-flat.numel() // (2 * ranks)) * 2
    flat = torch.cat([flat, torch.zeros(piece * ranks - flat.numel())])
    os.makedirs("zero/global_step1")
    open("zero/latest", "w").write("global_step1")
    shapes = [{name: tensor.shape for name, tensor in full.items()}]
    facts = {"param_shapes": shapes, "buffer_names": [], "shared_params": {}, "ds_version": "0.19.8"}
    facts |= {"frozen_param_shapes": None, "frozen_param_fragments": None, "dp_world_size": ranks, "mp_world_size": 1}
    module = {name: tensor.bfloat16() for name, tensor in full.items()}
    torch.save({"module": module, **facts}, "zero/global_step1/mp_rank_00_model_states.pt")
    for part in range(ranks):
        adam = {"state": {}, "param_groups": []}
        state = {"zero_stage": 2, "partition_count": ranks, "base_optimizer_state": adam}
        state["single_partition_of_fp32_groups"] = [flat[part * piece : (part + 1) * piece].clone()]
        name = f"zero/global_step1/bf16_zero_pp_rank_{part}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state, "ds_version": "0.19.8"}, name)
"""

MEASURED = """
before = read()
dist.barrier()
start = time.perf_counter()
{work}
dist.barrier()
seconds = time.perf_counter() - start
count = read() - before
if what != "nothing":
    assert all(float(p.to_local().sum()) == p.to_local().numel() for n, p in target.items() if "bias" in n), "wrong"
    assert all(float(p.to_local().abs().max()) <= 1 for p in target.values()), "wrong"
share = sum(tensor.to_local().nbytes for tensor in target.values())
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
with open(f"{out}.{rank}.json", "w") as file:
    json.dump({"seconds": seconds, "read": count / share, "peak": peak / share, "share": share}, file)
dist.barrier()
dist.destroy_process_group()
"""

NOTHING = "nothing"
STATE = "target = net.state_dict()"
COLUMNS = "target = columns()"
OURS = "dcp.load(target, storage_reader=transload.CheckpointReader({!r}))"
INTO = "transload.load_into(net, {!r})"
BROADCAST = """
options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
set_model_state_dict(net, torch.load("model.pt", mmap={mmap}) if rank == 0 else {{}}, options=options)
"""
FILES = ("model.pt", "safe/model.safetensors", "dir")

CONTENDERS: dict[str, tuple[str, str]] = {  # the preparation, and the call that is measured
    NOTHING: (STATE, ""),
    **{f"load_into, {path}": (STATE, INTO.format(path)) for path in FILES},
    **{f"CheckpointReader, {path}": (STATE, OURS.format(path)) for path in FILES},
    "torch: FileSystemReader, dir": (STATE, "dcp.load(target, checkpoint_id='dir')"),
    "torch: HuggingFaceStorageReader, safe": (
        STATE,
        "dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader('safe'))",
    ),
    "torch: rank 0 loads model.pt, broadcast": (STATE, BROADCAST.format(mmap=False)),
    "torch: rank 0 maps model.pt, broadcast": (STATE, BROADCAST.format(mmap=True)),
    "columns: nothing": (COLUMNS, ""),
    **{f"columns: CheckpointReader, {path}": (COLUMNS, OURS.format(path)) for path in FILES},
    "columns: torch: FileSystemReader, dir": (COLUMNS, "dcp.load(target, checkpoint_id='dir')"),
    "columns: torch: HuggingFaceStorageReader, safe": (
        COLUMNS,
        "dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader('safe'))",
    ),
}

TORCH = "from torch.distributed.checkpoint.format_utils import dcp_to_torch_save as merge; merge('dir', 'merged.pt')"
ACCELERATE = "from accelerate.utils import merge_fsdp_weights as merge; merge('nested', 'merged')"
DEEPSPEED = "from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as merge; "
DEEPSPEED += "merge('zero', 'merged', max_shard_size=None)"
CONVERT = ("-m", "transload", "convert")
MERGERS: dict[str, tuple[str, ...]] = {  # the package it needs, and the arguments of Python
    "transload convert dir merged.pt": ("transload", *CONVERT, "dir", "merged.pt"),
    "torch: dcp_to_torch_save dir": ("torch", "-c", TORCH),
    "transload convert dir merged.safetensors": ("transload", *CONVERT, "dir", "merged.safetensors"),
    "accelerate: merge_fsdp_weights nested": ("accelerate", "-c", ACCELERATE),
    "transload convert zero merged.pt": ("transload", *CONVERT, "zero", "merged.pt"),
    "deepspeed: zero_to_fp32 zero": ("deepspeed", "-c", DEEPSPEED),
}


def main() -> int:
    """Save, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--megabytes", type=int, default=400, help="size of the model (default 400)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each contender (default 3)")
    parser.add_argument("--only", default="", help="contenders whose names match this pattern")
    parser.add_argument("--folder", help="where to put the files (default: that for temporary files)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        unit = 64 * options.ranks
        width = max(unit, int((options.megabytes * 1e6 / 4 / LAYERS) ** 0.5) // unit * unit)
        run_ranks(folder, RANK + SAVE + "dist.barrier()\ndist.destroy_process_group()", options.ranks, width)
        loads = load_rows(folder, options.ranks, width, options.repeat, options.only)
        merges = merge_rows(folder, options.repeat, options.only)
        size = (folder / "model.pt").stat().st_size
    machine = {"python": platform.python_version(), "cores": os.cpu_count(), "system": platform.system()}
    if options.json:
        print(json.dumps({"schema": 1, "machine": machine, "size": size, "loads": loads, "merges": merges}, indent=1))
        return 0
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    print(f"{options.ranks} ranks, a model of {size / 1e6:.0f} MB; bytes read and peak as multiples of a rank's share")
    for row in loads:
        print(f"  {row['what']:<50} {row['read']:6.3f} read  {row['peak']:6.2f} peak  {row['seconds']:7.2f} s")
    print("merging it into one file; the peak is that of the whole process")
    for row in merges:
        print(f"  {row['what']:<50} {row['megabytes']:8.0f} MB peak  {row['seconds']:7.2f} s")
    return 0


def run_ranks(folder: Path, code: str, ranks: int, width: int) -> None:
    """Run a program on several ranks; end them all if one fails, or after the deadline."""
    out = folder / "out"
    for path in folder.glob("out*"):
        path.unlink()
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(rank), str(ranks), str(width), str(out)], cwd=folder)
        for rank in range(ranks)
    ]
    deadline = time.monotonic() + DEADLINE
    try:
        while any(process.poll() is None for process in processes):
            failed = any(process.returncode for process in processes)
            if failed or time.monotonic() > deadline:
                raise SystemExit("a rank failed" if failed else "the ranks did not finish")
            time.sleep(0.05)
        if any(process.returncode for process in processes):
            raise SystemExit("a rank failed")
    finally:
        for process in processes:
            process.kill()
            process.wait()


def warm(path: Path) -> None:
    """Bring a file, or those of a folder, into the page cache."""
    for file in path.iterdir() if path.is_dir() else [path]:
        with file.open("rb", buffering=0) as source:
            while source.read(16 << 20):
                pass


def load_rows(folder: Path, ranks: int, width: int, repeat: int, only: str) -> list[dict[str, Any]]:
    """The medians of every contender, of the rank with the largest figure each."""
    chosen = {name: work for name, work in CONTENDERS.items() if NOTHING in name or re.search(only, name)}
    results: dict[str, list[dict[str, float]]] = {name: [] for name in chosen}
    for _ in range(repeat):
        for name, (before, work) in chosen.items():
            setup = f"what = {(NOTHING if NOTHING in name else name)!r}\n"
            for path in FILES:
                if path.partition("/")[0] in name:
                    warm(folder / path)
            run_ranks(folder, f"{RANK}{setup}{before}\n{MEASURED.replace('{work}', work)}", ranks, width)
            reports = [json.loads((folder / f"out.{rank}.json").read_text()) for rank in range(ranks)]
            results[name].append({key: max(report[key] for report in reports) for key in reports[0]})
    medians = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in results.items()
    }
    base = medians.pop(NOTHING)["peak"], medians.pop(f"columns: {NOTHING}")["peak"]
    return [
        {"what": name, **row, "peak": row["peak"] - base[name.startswith("columns")]} for name, row in medians.items()
    ]


def merge_rows(folder: Path, repeat: int, only: str) -> list[dict[str, Any]]:
    """The medians of every program that merges what the ranks saved."""
    results: dict[str, list[tuple[float, float]]] = {}
    for _ in range(repeat):
        for name, (package, *command) in MERGERS.items():
            if not re.search(only, name) or importlib.util.find_spec(package) is None:
                continue
            for path in folder.glob("merged*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            start = time.perf_counter()
            process = subprocess.Popen([sys.executable, *command], cwd=folder, stdout=subprocess.DEVNULL)
            _, status, usage = os.wait4(process.pid, 0)
            seconds = time.perf_counter() - start
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode:
                raise SystemExit(f"{name} failed")
            results.setdefault(name, []).append((usage.ru_maxrss / 1024, seconds))
    medians = {name: [statistics.median(each) for each in zip(*runs, strict=True)] for name, runs in results.items()}
    return [{"what": name, "megabytes": peak, "seconds": seconds} for name, (peak, seconds) in medians.items()]


if __name__ == "__main__":
    sys.exit(main())
