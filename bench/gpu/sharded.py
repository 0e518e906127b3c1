"""Measure how fast a model that FSDP2 has sharded over one rank is loaded onto a GPU, beside the same model unsharded.

    python bench/gpu/sharded.py [--gigabytes N] [--rounds N] [--folder DIR]

Each call is the first of its process, with CUDA, NCCL and the model in place before the clock starts. Contenders take
turns, and the file is in the page cache. The ratio is that of medians. Needs torch 2.6, CUDA and one GPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from statistics import median
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path[:1] = [ROOT, f"{ROOT}/src"]

WIDTH = 4096
PLAIN, SHARDED, READER, TORCH = "load_into, plain", "load_into, FSDP2", "dcp.load, CheckpointReader", "dcp.load, torch"


def build(layers: int) -> Any:
    """A stack of linear layers in bfloat16 on the meta device."""
    import torch

    with torch.device("meta"):
        return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(layers)))


def measure(contender: str, layers: int, file: str, folder: str, store: str) -> float:
    """The seconds of one load in this process; the result is compared with the file."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    import transload

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    model = build(layers)
    if contender != PLAIN:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    model.to_empty(device="cuda")
    dist.barrier()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    if contender in (PLAIN, SHARDED):
        transload.load_into(model, file)
    elif contender == READER:
        dcp.load(model.state_dict(), storage_reader=transload.CheckpointReader(file))
    else:
        dcp.load(model.state_dict(), checkpoint_id=folder)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    expected = torch.load(file, mmap=True)
    for name, tensor in model.state_dict().items():
        local = tensor if contender == PLAIN else tensor.to_local()
        assert torch.equal(local.cpu(), expected[name]), name
    dist.destroy_process_group()
    return seconds


def main() -> int:
    """Run the contenders in turn, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where the files are written")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        contender, layers, file, folder, store = options.child
        print(measure(contender, int(layers), file, folder, store))
        return 0
    import torch

    import transload

    layers = max(1, round(options.gigabytes * 1e9 / (2 * WIDTH * WIDTH)))
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        file, folder = f"{place}/model.pt", f"{place}/dcp"
        some = torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16)
        state = {}
        for number, (name, tensor) in enumerate(build(layers).state_dict().items()):
            state[name] = some[: tensor.numel() // WIDTH].roll(number, -1).view(tensor.shape)
        torch.save(state, file)
        nbytes = sum(tensor.nbytes for tensor in state.values())
        del state
        transload.convert(file, folder, to="dcp", verify=False)
        seconds: dict[str, list[float]] = {contender: [] for contender in (PLAIN, SHARDED, READER, TORCH)}
        for number in range(options.rounds):
            for contender, times in seconds.items():
                store = f"{place}/store-{number}-{len(times)}-{contender.replace(' ', '-')}"
                child = [sys.executable, __file__, "--child", contender, str(layers), file, folder, store]
                done = subprocess.run(child, check=True, capture_output=True, text=True, timeout=300)
                times.append(float(done.stdout.split()[-1]))
                print(f"{contender}: {times[-1]:.3f} s", file=sys.stderr)
        first = median(seconds[PLAIN])
        print(f"{nbytes / 1e9:.1f} GB, {layers} layers, {options.rounds} rounds, torch {torch.__version__}")
        for contender, times in seconds.items():
            middle = median(times)
            speed = f"{nbytes / middle / 1e9:6.1f} GB/s"
            print(f"  {contender:28} {middle:6.3f} s {speed}  {first / middle:4.2f} of plain  best {min(times):.3f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
