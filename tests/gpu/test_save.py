"""``transload.save`` and ``save_async`` of tensors on a GPU, checked with ``torch.load``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from transload.saving import save, save_async


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "saved.pt"


def test_tensors_of_sizes_around_the_slot_size_are_saved_for_the_cpu(path: Path) -> None:
    """The file is tagged with the CPU; the tensors stay on the GPU."""
    sizes = [0, 1, 4096, 4097, (2 << 20) - 1, 2 << 20, (2 << 20) + 1, 50_000_001]
    value = {str(size): torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda") for size in sizes}
    save(value, path)
    loaded = torch.load(path)
    for name, tensor in value.items():
        assert tensor.device.type == "cuda"
        assert loaded[name].device.type == "cpu"
        assert torch.equal(loaded[name], tensor.cpu()), name


def test_device_keep_loads_back_on_the_gpu(path: Path) -> None:
    value = {"w": torch.rand(1000, 1000, device="cuda")}
    save(value, path, device="keep")
    loaded = torch.load(path)
    assert loaded["w"].device == value["w"].device
    assert torch.equal(loaded["w"], value["w"])


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with tied weights on the GPU, after a step."""
    model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1000)).cuda()
    model[1].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.rand(4, 1000, device="cuda")).sum().backward()
    optimizer.step()


def test_training_continues_after_save(path: Path) -> None:
    """Tied weights are written once; the model and its optimizer are not moved, as they would be by ``model.cpu()``."""
    model, optimizer = trained()
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    loaded = torch.load(path)
    assert loaded["model"]["0.weight"].data_ptr() == loaded["model"]["1.weight"].data_ptr()
    assert all(parameter.device.type == "cuda" for parameter in model.parameters())
    moments = optimizer.state[model[0].weight]["exp_avg"]
    assert torch.equal(loaded["optimizer"]["state"][0]["exp_avg"], moments.cpu())
    step(model, optimizer)
    model.cpu()
    with pytest.raises(RuntimeError):
        optimizer.step()


def test_compact_save_writes_only_the_viewed_part(path: Path) -> None:
    base = torch.arange(10_000_000.0, device="cuda")
    for views, limit in (
        ({"a": base[5:9], "b": base[100_000:1_200_000]}, 6_000_000),
        ({"all over it": base.view(1000, -1)[:, 3]}, 41_000_000),
    ):
        save(views, path, compact=True)
        assert path.stat().st_size < limit
        loaded = torch.load(path)
        assert all(torch.equal(loaded[name], view.cpu()) for name, view in views.items())


@pytest.mark.parametrize("side", [False, True], ids=["current stream", "side stream"])
def test_save_waits_for_pending_work_on_the_stream(side: bool, path: Path) -> None:
    with torch.cuda.stream(torch.cuda.Stream() if side else torch.cuda.current_stream()):
        value = torch.zeros(30_000_000, device="cuda")
        torch.cuda._sleep(200_000_000)  # torch has no public way to keep a stream busy
        value.fill_(7)
        save({"w": value}, path)
    assert bool((torch.load(path)["w"] == 7).all())


def test_changes_after_save_async_returns_are_not_saved(path: Path) -> None:
    for number in range(3):
        value = {
            "large": torch.full((50_000_000,), float(number), device="cuda"),
            "host": torch.full((5_000_000,), number),
        } | {str(index): torch.full((10,), float(number), device="cuda") for index in range(100)}
        torch.cuda._sleep(100_000_000)
        future = save_async(value, path)
        for tensor in value.values():
            tensor.fill_(99)
        future.result()
        assert all(bool((tensor == number).all()) for tensor in torch.load(path).values())


def test_host_and_gpu_tensors_are_saved_together(path: Path) -> None:
    value = [
        torch.rand(1_000_000, device=device, dtype=dtype, requires_grad=True)
        for device in ("cpu", "cuda", "cpu", "cuda")
        for dtype in (torch.float32, torch.bfloat16)
    ]
    save(value, path)
    for tensor, loaded in zip(value, torch.load(path), strict=True):
        assert torch.equal(tensor.detach().cpu(), loaded.detach())
        assert loaded.requires_grad


def test_many_small_tensors_are_saved(path: Path) -> None:
    value = [torch.full((number % 50,), float(number), device="cuda") for number in range(5000)]
    save(value, path)
    assert all(torch.equal(tensor.cpu(), loaded) for tensor, loaded in zip(value, torch.load(path), strict=True))


def test_save_works_after_a_failed_write(path: Path) -> None:
    class FullDisk:
        free = 20_000_000

        def write(self, data: Any) -> int:
            self.free -= len(data)
            if self.free < 0:
                raise OSError(28, "No space left on device")
            return len(data)

    value = torch.rand(30_000_000, device="cuda")
    with pytest.raises(OSError, match="No space left"):
        save(value, FullDisk())
    save(value, path)
    assert torch.equal(torch.load(path), value.cpu())


PEAK_MEMORY = """
import resource, sys, torch
from transload.saving import save

value = torch.rand(400_000_000, device="cuda")
save(value[:1000].clone(), sys.argv[1])
torch.cuda.reset_peak_memory_stats()
before, there = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, torch.cuda.memory_allocated()
save(value, sys.argv[1])
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
print(grown, torch.cuda.max_memory_allocated() - there)
"""


def test_peak_memory_of_save_is_small(path: Path) -> None:
    """Saving 1.6 GB takes less than 300 MB of host memory, and no GPU memory."""
    process = subprocess.run(
        [sys.executable, "-c", PEAK_MEMORY, path], capture_output=True, text=True, timeout=200, check=False
    )
    host, device = map(int, process.stdout.split() or pytest.fail(process.stderr))
    assert host < 300_000_000
    assert device == 0
