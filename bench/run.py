"""Count how many programs written for a GPU run to their end under ``python``, and under ``transload run`` without one.

    python bench/run.py [--only NAME,…] [--jobs N]

Each program prints numbers on its last line. On a machine with a GPU, ``python`` computes them there, and what
``transload run`` prints with the GPU hidden must be close to them. Without a GPU most programs fail under ``python``,
and only ``transload run`` runs them to the end. Programs whose libraries are not installed are left out, with a note.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TOLERANCE = 0.02  # of a loss, between a GPU and a CPU
TIMEOUT = 120  # seconds for one program


class Program(NamedTuple):
    """A script, its arguments, and what it needs."""

    text: str
    arguments: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    """Options of ``transload run``."""
    ranks: int = 0
    """The number of processes that torchrun starts; 0 without torchrun."""


MODEL = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
x, y = torch.randn(64, 8), torch.randn(64, 1)
"""

TRAIN = """
for step in range(20):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
print(loss.item())
"""

PROGRAMS: dict[str, Program] = {
    "inference": Program(
        MODEL
        + """
torch.save(model.state_dict(), "weights.pt")
model.load_state_dict(torch.load("weights.pt", map_location="cuda:0"))
model = model.cuda().eval()
with torch.no_grad():
    print(model(x.to("cuda:0")).sum().item())
"""
    ),
    "inference on a missing GPU": Program(
        MODEL
        + """
device = torch.device("cuda:0")
print(torch.cuda.get_device_name(device).__class__.__name__, torch.cuda.current_device())
model.to(device)
print(model(x.to(device, non_blocking=True)).mean().item())
"""
    ),
    "argparse with --device": Program(
        MODEL
        + """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cuda:0")
device = parser.parse_args().device
model, x, y = model.to(device), x.to(device), y.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
        + TRAIN,
        arguments=("--device", "cuda:0"),
    ),
    "training": Program(
        MODEL
        + """
model, x, y = model.cuda(), x.cuda(), y.cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
"""
        + TRAIN
    ),
    "resume": Program(
        MODEL
        + """
model = model.cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
nn.functional.mse_loss(model(x.cuda()), y.cuda()).backward()
optimizer.step()
states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.cuda.get_rng_state_all()}
torch.save(states, "last.ckpt")
states = torch.load("last.ckpt", map_location=lambda storage, location: storage.cuda(0))
model.load_state_dict(states["model"])
optimizer.load_state_dict(states["optimizer"])
torch.cuda.set_rng_state_all([each.cpu() for each in states["rng"]])
x, y = x.cuda(), y.cuda()
"""
        + TRAIN
    ),
    "mixed precision": Program(
        MODEL
        + """
model, x, y = model.cuda(), x.cuda(), y.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.cuda.amp.GradScaler()
for step in range(20):
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
print(loss.item())
"""
    ),
    "bfloat16": Program(
        MODEL
        + """
kind = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
model, x, y = model.to("cuda", torch.float32), x.cuda(), y.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with torch.autocast(device_type="cuda", dtype=kind):
    print(model(x).float().mean().item())
"""
    ),
    "events and streams": Program(
        MODEL
        + """
model, x = model.cuda(), x.cuda()
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
start.record()
with torch.cuda.stream(side):
    out = model(x)
out.record_stream(torch.cuda.current_stream())
torch.cuda.current_stream().wait_stream(side)
end.record()
torch.cuda.synchronize()
assert start.elapsed_time(end) >= 0
print(out.mean().item())
"""
    ),
    "memory report": Program(
        MODEL
        + """
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
model = model.cuda()
free, total = torch.cuda.mem_get_info()
assert 0 < free <= total and torch.cuda.max_memory_allocated() >= 0
assert torch.cuda.get_device_properties(0).total_memory > 0
torch.cuda.memory_summary()
print(model(x.cuda()).mean().item())
"""
    ),
    "DataLoader with pinned memory": Program(
        MODEL
        + """
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(x, y), batch_size=16, pin_memory=True, num_workers=2)
model = model.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
total = 0.0
for a, b in loader:
    a, b = a.cuda(non_blocking=True), b.cuda(non_blocking=True)
    loss = nn.functional.mse_loss(model(a), b)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total += loss.item()
print(total)
"""
    ),
    "a prefetcher": Program(
        MODEL
        + """
class Prefetcher:
    def __init__(self, batches):
        self.batches, self.stream = iter(batches), torch.cuda.Stream()
    def __iter__(self):
        for batch in self.batches:
            with torch.cuda.stream(self.stream):
                batch = batch.pin_memory().cuda(non_blocking=True)
            torch.cuda.current_stream().wait_stream(self.stream)
            batch.record_stream(torch.cuda.current_stream())
            yield batch
model = model.cuda()
print(sum(model(batch).mean().item() for batch in Prefetcher(x.split(16))))
"""
    ),
    "layers copied on a side stream": Program(
        MODEL
        + """
copy, x = torch.cuda.stream(torch.cuda.Stream(priority=-1)), x.cuda()
for layer in model:
    with copy:
        layer.cuda()
    torch.cuda.current_stream().wait_event(copy.stream.record_event())
    x = layer(x)
assert isinstance(copy, torch.cuda.StreamContext)
print(x.mean().item())
"""
    ),
    "ranges for Nsight": Program(
        MODEL
        + """
model, x = model.cuda(), x.cuda()
torch.cuda.cudart().cudaProfilerStart()
with torch.autograd.profiler.emit_nvtx(), torch.cuda.nvtx.range("forward"):
    out = model(x)
torch.cuda.cudart().cudaProfilerStop()
print(out.mean().item())
"""
    ),
    "a report of memory": Program(
        MODEL
        + """
torch.cuda.memory._record_memory_history(max_entries=1000)
torch.cuda.reset_peak_memory_stats()
out = model.cuda()(x.cuda())
free, total = torch.cuda.mem_get_info()
properties, stats = torch.cuda.get_device_properties(0), torch.cuda.memory_stats()
print(properties.L2_cache_size, torch.cuda.memory.max_memory_allocated(), torch.cuda.memory_summary(abbreviated=True))
assert free <= total and stats["allocated_bytes.all.peak"] >= 0 and stats["num_alloc_retries"] == 0
torch.cuda.memory._record_memory_history(enabled=None)
print(out.mean().item())
"""
    ),
    "old tensor types": Program(
        MODEL
        + """
Tensor = torch.cuda.FloatTensor
a = Tensor([1.0, 2.0, 3.0])
b = torch.arange(3).type(torch.cuda.FloatTensor)
c = torch.ones(3).type("torch.cuda.DoubleTensor")
assert isinstance(a, torch.cuda.FloatTensor)
print((a * b).sum().item() + c.sum().item())
"""
    ),
    "the default tensor type": Program(
        """
import torch
torch.set_default_tensor_type("torch.cuda.FloatTensor")
print(torch.ones(3).sum().item() + torch.zeros(2).cuda().sum().item())
"""
    ),
    "the default device": Program(
        """
import torch
torch.set_default_device("cuda")
layer = torch.nn.Linear(2, 2)
torch.nn.init.ones_(layer.weight)
torch.nn.init.zeros_(layer.bias)
print(layer(torch.ones(1, 2)).sum().item())
"""
    ),
    "a generator on the GPU": Program(
        """
import torch
generator = torch.Generator(device="cuda").manual_seed(7)
noise = torch.randn(1000, generator=generator, device="cuda")
assert isinstance(generator, torch.Generator) and abs(noise.mean().item()) < 0.2
print(noise.numel())
"""
    ),
    "seeds and deterministic settings": Program(
        MODEL
        + """
torch.cuda.manual_seed(1)
torch.cuda.manual_seed_all(1)
torch.backends.cudnn.benchmark = False
torch.backends.cudnn.deterministic = True
assert torch.cuda.initial_seed() is not None
state = torch.cuda.get_rng_state()
torch.cuda.set_rng_state(state)
print(model.cuda()(x.cuda()).mean().item())
"""
    ),
    "DataParallel": Program(
        MODEL
        + """
model = nn.DataParallel(model).cuda()
x, y = x.cuda(), y.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
        + TRAIN
    ),
    "NCCL with one rank": Program(
        MODEL
        + """
import os
import torch.distributed as dist
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", RANK="0", WORLD_SIZE="1")
torch.cuda.set_device(0)
dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
model = nn.parallel.DistributedDataParallel(model.cuda(), device_ids=[0], output_device=0)
x, y = x.cuda(), y.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
        + TRAIN.replace("print(", "dist.destroy_process_group()\nprint(")
    ),
    "DDP under torchrun": Program(
        MODEL
        + """
import os
import torch.distributed as dist
local = int(os.environ["LOCAL_RANK"])
dist.init_process_group(backend="nccl")
torch.cuda.set_device(local)
model = nn.SyncBatchNorm.convert_sync_batchnorm(model).to(f"cuda:{local}")
model = nn.parallel.DistributedDataParallel(model, device_ids=[local])
x, y = (each.chunk(dist.get_world_size())[dist.get_rank()].to(f"cuda:{local}") for each in (x, y))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
dist.all_reduce(loss)
dist.barrier()
if dist.get_rank() == 0:
    print(loss.item())
dist.destroy_process_group()
""",
        ranks=2,
    ),
    "a program that insists on CUDA": Program(
        MODEL
        + """
assert torch.cuda.is_available(), "this needs a GPU"
devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
print(model.to(devices[0])(x.to(devices[0])).mean().item())
""",
        options=("--pretend-cuda",),
    ),
    "DataParallel that counts its GPUs": Program(
        MODEL
        + """
if not torch.cuda.is_available():
    raise SystemExit("no GPU")
model = nn.DataParallel(model.cuda(), device_ids=list(range(torch.cuda.device_count())))
print(model(x.cuda()).mean().item(), torch.cuda.get_device_capability()[0] >= 0)
""",
        options=("--pretend-cuda",),
    ),
    "profiling ranges": Program(
        MODEL
        + """
torch.cuda.nvtx.range_push("step")
with torch.cuda.nvtx.range("forward"):
    out = model.cuda()(x.cuda())
torch.cuda.nvtx.range_pop()
print(out.mean().item())
"""
    ),
    "a convolutional network in half": Program(
        """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
image = torch.rand(2, 3, 16, 16)
net = net.cuda().half().eval().to(memory_format=torch.channels_last)
with torch.inference_mode():
    print(net(image.cuda().half()).float().mean().item())
"""
    ),
    "a transformer layer with an EMA": Program(
        """
import copy, torch
from torch import nn
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
data = torch.randn(4, 5, 16).to("cuda")
layer = layer.to("cuda")
ema = copy.deepcopy(layer).requires_grad_(False)
optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3, fused=False)
for step in range(5):
    loss = layer(data).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for old, new in zip(ema.parameters(), layer.parameters()):
        old.lerp_(new, 0.1)
print(ema(data).pow(2).mean().item())
"""
    ),
    "worker processes": Program(
        """
import torch, torch.multiprocessing as mp
def work(rank, queue):
    device = torch.device("cuda", 0)
    queue.put(torch.full((2,), float(rank + 1), device=device).sum().item())
if __name__ == "__main__":
    mp.set_start_method("spawn")
    queue = mp.Queue()
    mp.spawn(work, (queue,), nprocs=2)
    print(queue.get() + queue.get())
"""
    ),
    "a timm-like training loop": Program(
        MODEL
        + """
import time
from collections import OrderedDict
device = torch.device("cuda:0")
torch.cuda.set_device(device)
model = model.to(device=device, memory_format=torch.contiguous_format)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
loss_scaler = torch.amp.GradScaler(device=device.type)
meter = OrderedDict()
for step in range(10):
    began = time.time()
    with torch.amp.autocast(device_type=device.type, dtype=torch.float16):
        loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
    optimizer.zero_grad()
    loss_scaler.scale(loss).backward()
    loss_scaler.step(optimizer)
    loss_scaler.update()
    if device.type == "cuda":
        torch.cuda.synchronize()
    meter["time"] = time.time() - began
print(loss.item())
"""
    ),
    "a GPT with fused AdamW": Program(
        """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(1337)
torch.backends.cuda.matmul.allow_tf32 = True
device, kind = "cuda", torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
    def forward(self, x):
        q, k, v = (part.view(*x.shape[:2], 2, 8).transpose(1, 2) for part in self.qkv(self.norm(x)).split(16, 2))
        with torch.backends.cuda.sdp_kernel(enable_flash=False, enable_math=False, enable_mem_efficient=True):
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))
model = nn.Sequential(nn.Embedding(50, 16), Block(), Block(), nn.Linear(16, 50))
data = torch.randint(0, 50, (4, 9))
x, y = data[:, :-1].pin_memory().to(device, non_blocking=True), data[:, 1:].reshape(-1).to(device)
model = model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
scaler = torch.cuda.amp.GradScaler(enabled=kind == torch.float16)
for step in range(5):
    with torch.autocast(device_type=device, dtype=kind):
        loss = F.cross_entropy(model(x).view(-1, 50), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
print(loss.item())
"""
    ),
    "an optimizer for CUDA graphs": Program(
        MODEL
        + """
model, x, y = model.cuda(), x.cuda(), y.cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, capturable=True)
nn.functional.mse_loss(model(x), y).backward()
optimizer.step()
torch.save(optimizer.state_dict(), "optimizer.pt")
optimizer.load_state_dict(torch.load("optimizer.pt", map_location="cuda:0"))
"""
        + TRAIN
    ),
    "replicas": Program(
        MODEL
        + """
import torch.cuda.comm
from torch.nn.parallel import gather, parallel_apply, replicate, scatter
model, x = model.cuda(), x.cuda()
ids = list(range(max(torch.cuda.device_count(), 1)))
out = gather(parallel_apply(replicate(model, ids), scatter(x, ids), devices=ids), 0)
out.pow(2).mean().backward()
copies = torch.cuda.comm.broadcast(x, ids)
total = torch.cuda.comm.reduce_add([each.to(copies[0].device) for each in copies], 0)
print(model[0].weight.grad.abs().sum().item(), total.sum().item() / len(ids))
"""
    ),
    "random states": Program(
        """
import torch
torch.cuda.manual_seed(5)
states, first = torch.cuda.get_rng_state_all(), torch.randn(3, device="cuda")
torch.cuda.set_rng_state_all(states)
assert torch.equal(torch.randn(3, device="cuda"), first)
with torch.random.fork_rng(devices=[0]):
    torch.cuda.manual_seed(5)
    assert torch.equal(torch.randn(3, device="cuda"), first)
torch.cuda.default_generators[0].manual_seed(5)
assert torch.equal(torch.randn(3, device="cuda"), first)
print(torch.cuda.initial_seed())
"""
    ),
    "streams of any accelerator": Program(
        MODEL
        + """
model, x = model.cuda(), x.cuda()
side = torch.Stream(device="cuda")
start, end = (torch.Event(device="cuda", enable_timing=True) for _ in range(2))
start.record(side)
with side:
    out = model(x)
side.record_event(end)
torch.accelerator.current_stream().wait_stream(side)
torch.accelerator.synchronize()
assert isinstance(torch.cuda.current_stream(), torch.Stream) and start.elapsed_time(end) >= 0
torch.cuda.synchronize(out.device)
print(out.mean().item())
"""
    ),
    "a profile of the GPU": Program(
        MODEL
        + """
from torch.profiler import ProfilerActivity, profile, schedule
model, x = model.to(0), x.to(0)
with profile(activities=[ProfilerActivity.CUDA], schedule=schedule(wait=1, warmup=1, active=1)) as profiler:
    for step in range(3):
        out = model(x)
        profiler.step()
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], profile_memory=True) as profiler:
    model(x)
assert profiler.key_averages().table(sort_by="cuda_time_total", row_limit=5)
print(out.mean().item())
"""
    ),
    "tensors that must be on the GPU": Program(
        MODEL
        + """
if not torch.cuda.is_available():
    raise SystemExit("no GPU")
model, x = model.cuda(), x.cuda()
assert x.is_cuda and all(each.is_cuda for each in model.parameters())
index = torch.arange(len(x), device=x.get_device())
Tensor = torch.cuda.FloatTensor if x.is_cuda else torch.FloatTensor
print((model(x[index]) + Tensor([1.0])).mean().item())
""",
        options=("--pretend-cuda",),
    ),
    "FSDP under torchrun": Program(
        MODEL
        + """
import os
import torch.distributed as dist
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = FullyShardedDataParallel(model, device_id=torch.cuda.current_device(), sync_module_states=True)
x, y = x.cuda(), y.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
    states = model.state_dict()
dist.barrier()
if dist.get_rank() == 0:
    print(loss.item(), len(states))
dist.destroy_process_group()
""",
        ranks=2,
    ),
    "safetensors onto the GPU": Program(
        MODEL
        + """
from safetensors.torch import load_file, save_file
save_file(model.state_dict(), "weights.safetensors")
model.load_state_dict(load_file("weights.safetensors", device="cuda:0"))
print(model.cuda()(x.cuda()).mean().item())
""",
        needs=("safetensors",),
    ),
    "accelerate": Program(
        MODEL
        + """
from accelerate import Accelerator
accelerator = Accelerator()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
x, y = x.cuda(), y.cuda()
for step in range(10):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
print(loss.item())
""",
        needs=("accelerate",),
    ),
    "transformers with device_map": Program(
        """
import torch
from transformers import BertConfig, BertModel
torch.manual_seed(0)
config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
BertModel(config).save_pretrained("bert")
model = BertModel.from_pretrained("bert", device_map="cuda").eval()
with torch.no_grad():
    print(model(torch.arange(10).view(1, 10).to("cuda")).last_hidden_state.abs().mean().item())
""",
        needs=("transformers", "accelerate"),
    ),
    "Lightning": Program(
        MODEL
        + """
import pytorch_lightning as lightning
from torch.utils.data import DataLoader, TensorDataset
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model
    def training_step(self, batch, _):
        a, b = batch
        return nn.functional.mse_loss(self.model(a), b)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
trainer = lightning.Trainer(accelerator="gpu", devices=1, max_epochs=2, logger=False, enable_checkpointing=False,
                            enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Module(), DataLoader(TensorDataset(x, y), batch_size=16))
print(nn.functional.mse_loss(model.cpu()(x), y).item())
""",
        needs=("pytorch_lightning",),
        options=("--pretend-cuda",),
    ),
}


def numbers(text: str) -> list[float]:
    """The numbers on the last line."""
    lines = text.strip().splitlines() or [""]
    return [float(number) for number in re.findall(r"-?\d+\.?\d*(?:e[-+]?\d+)?", lines[-1])]


def run(program: Program, script: Path, *, ours: bool) -> subprocess.CompletedProcess[str]:
    """Run a program in its folder, with or without transload. A timeout is a failure."""
    front = ["-m", "transload", "run", *program.options] if ours else []
    if program.ranks:
        front = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={program.ranks}", *front]
    # No downloads: without a network the libraries would try for minutes.
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": str(script.parent),  # torchrun and spawn leave files behind
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    if ours:
        env["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, *front, script.name, *program.arguments]
    try:
        return subprocess.run(
            command, cwd=script.parent, env=env, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"it did not end in {TIMEOUT} s")


def run_both(program: Program) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    """Run a program without transload, and with it."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "program.py"
        script.write_text(program.text, encoding="utf-8")
        return run(program, script, ours=False), run(program, script, ours=True)


def close(theirs: list[float], ours: list[float]) -> bool:
    """Whether both printed the same numbers, within the tolerance."""
    return len(theirs) == len(ours) and all(
        math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE / 10) for a, b in zip(theirs, ours, strict=True)
    )


def main() -> int:
    """Run all programs; return 1 if one fails under transload, or computes something else."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--jobs", type=int, default=1, help="how many programs run at the same time")
    arguments = parser.parse_args()
    only = [name for name in arguments.only.split(",") if name]
    tally = {"python": 0, "ours": 0, "compared": 0, "tried": 0}
    bad = False
    chosen = []
    for name, program in PROGRAMS.items():
        missing = [module for module in program.needs if find_spec(module) is None]
        if missing:
            print(f"{name:36} left out: {', '.join(missing)} is not installed")
        elif not only or name in only:
            chosen.append(name)
    pool = ThreadPoolExecutor(arguments.jobs)
    for name, (theirs, ours) in zip(chosen, pool.map(run_both, map(PROGRAMS.__getitem__, chosen)), strict=True):
        tally["tried"] += 1
        tally["python"] += theirs.returncode == 0
        tally["ours"] += ours.returncode == 0
        text = "runs" if ours.returncode == 0 else f"fails: {(ours.stderr.strip().splitlines() or [''])[-1][:120]}"
        bad |= ours.returncode != 0
        if theirs.returncode == 0 == ours.returncode:
            tally["compared"] += 1
            results = numbers(theirs.stdout), numbers(ours.stdout)
            bad |= not close(*results)
            text += f"; python {results[0]}, ours {results[1]}" + ("" if close(*results) else "  DIFFERENT")
        print(f"{name:36} python {'runs ' if theirs.returncode == 0 else 'fails'}  transload run {text}", flush=True)
    print(
        f"\n{tally['tried']} programs: {tally['python']} run under python, {tally['ours']} under transload run "
        f"without a GPU; numbers compared in {tally['compared']}"
    )
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
