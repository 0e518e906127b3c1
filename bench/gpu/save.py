"""How fast a checkpoint gets from a GPU to the disk: bench/save.py with tensors on the device, and what the parts take.

    python bench/gpu/save.py [--megabytes N] [--small N] [--repeat N] [--folder DIR] [--skip-bench]

First that it is right: files of tensors of the device, of views, of shared storages, of work that is still under way
on the current stream when the save begins, and of tensors that change right after ``save_async`` returns, are loaded
and compared. Then the limits of the machine: copies from the device into pinned memory, ``cp`` of the same bytes, and
plain writes, each with a flush. Then bench/save.py --device cuda. Exits 1 where something is wrong or a goal missed.
"""

from __future__ import annotations

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120
sys.path[:1] = [ROOT, f"{ROOT}/src"]

import argparse
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from transload.saving import save, save_async


def main() -> int:
    """Check, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=4000, help="size of the large case (default 4000)")
    parser.add_argument("--small", type=int, default=20_000, help="tensors of the small case (default 20000)")
    parser.add_argument("--repeat", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--folder", default=None, help="where to write (default: the directory for temporary files)")
    parser.add_argument("--skip-bench", action="store_true", help="only the checks")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        check_all(Path(folder, "checked.pt"))
        if options.skip_bench:
            return 0
        limits(Path(folder, "limits"), options.megabytes)
    command = [sys.executable, f"{ROOT}/bench/save.py", "--device", "cuda", "--megabytes", str(options.megabytes)]
    command += ["--small", str(options.small), "--repeat", str(options.repeat)]
    command += ["--folder", options.folder] if options.folder else []
    paths = os.pathsep.join([f"{ROOT}/src", os.environ.get("PYTHONPATH", "")])
    return subprocess.run(command, check=False, env={**os.environ, "PYTHONPATH": paths}).returncode


def check_all(path: Path) -> None:
    """Every check in turn."""
    for check in (plain, kept, shared, compacted, under_way, changing, mixed, many, failing, memory, moving):
        check(path)
        torch.cuda.synchronize()
        print(f"right: {check.__name__}", flush=True)


def loaded(path: Path, **options: Any) -> Any:
    """By torch, alone."""
    return torch.load(path, **options)


def plain(path: Path) -> None:
    """Sizes around those of pieces and slots; tags of the CPU; the tensors stay where they are."""
    sizes = [0, 1, 4096, 4097, (2 << 20) - 1, 2 << 20, (2 << 20) + 1, 50_000_001]
    value = {str(size): torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda") for size in sizes}
    save(value, path)
    found = loaded(path)
    for name, tensor in value.items():
        assert tensor.device.type == "cuda"
        assert found[name].device.type == "cpu"
        assert torch.equal(found[name], tensor.cpu()), name


def kept(path: Path) -> None:
    """With their own tags they come back to the device."""
    value = {"w": torch.rand(1000, 1000, device="cuda")}
    save(value, path, device="keep")
    found = loaded(path)
    assert found["w"].device == value["w"].device
    assert torch.equal(found["w"], value["w"])


def shared(path: Path) -> None:
    """Tied weights are written once; a model and its optimizer are not touched."""
    model = torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.Linear(1000, 1000)).cuda()
    model[1].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(4, 1000, device="cuda")).sum().backward()
    optimizer.step()
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    found = loaded(path)
    assert found["model"]["0.weight"].data_ptr() == found["model"]["1.weight"].data_ptr()
    assert all(each.device.type == "cuda" for each in model.parameters())
    exp_avg = optimizer.state[model[0].weight]["exp_avg"]
    assert torch.equal(found["optimizer"]["state"][0]["exp_avg"], exp_avg.cpu())
    model(torch.rand(4, 1000, device="cuda")).sum().backward()
    optimizer.step()


def compacted(path: Path) -> None:
    """Views cut out of what is on the device."""
    base = torch.arange(10_000_000.0, device="cuda")
    save({"a": base[5:9], "b": base[100_000:1_200_000], "c": base.view(1000, -1)[:, 3]}, path, compact=True)
    found = loaded(path)
    assert path.stat().st_size < 6_000_000 or found["a"].untyped_storage().nbytes() >= 4_000_000
    for name, view in (("a", base[5:9]), ("b", base[100_000:1_200_000]), ("c", base.view(1000, -1)[:, 3])):
        assert torch.equal(found[name], view.cpu()), name


def under_way(path: Path) -> None:
    """What the current stream was given before the call is in the file, on any stream."""
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            value = torch.zeros(30_000_000, device="cuda")
            torch.cuda._sleep(200_000_000)  # noqa: SLF001 - there is no other way to keep a stream busy
            value.fill_(7)
            save({"w": value}, path)
        assert bool((loaded(path)["w"] == 7).all())


def changing(path: Path) -> None:
    """What changes right after the call is not."""
    for number in range(3):
        value = {
            "large": torch.full((50_000_000,), float(number), device="cuda"),
            "host": torch.full((5_000_000,), number),
        }
        small = {str(index): torch.full((10,), float(number), device="cuda") for index in range(100)}
        torch.cuda._sleep(100_000_000)  # noqa: SLF001 - as above
        begun = time.perf_counter()
        future = save_async({**value, **small}, path)
        returned = time.perf_counter() - begun
        for tensor in (*value.values(), *small.values()):
            tensor.fill_(99)
        future.result()
        for name, tensor in loaded(path).items():
            assert bool((tensor == number).all()), name
        print(f"  returned after {returned:.3f} s, written after {time.perf_counter() - begun:.3f} s")


def mixed(path: Path) -> None:
    """Tensors of the host between those of the device; half precision; what requires a gradient."""
    value = [
        torch.rand(1_000_000, device=device, dtype=dtype, requires_grad=True)
        for device in ("cpu", "cuda", "cpu", "cuda")
        for dtype in (torch.float32, torch.bfloat16)
    ]
    save(value, path)
    for one, two in zip(value, loaded(path), strict=True):
        assert torch.equal(one.detach().cpu(), two.detach())
        assert two.requires_grad


def many(path: Path) -> None:
    """Small ones are fetched together."""
    value = [torch.full((number % 50,), float(number), device="cuda") for number in range(5000)]
    save(value, path)
    for one, two in zip(value, loaded(path), strict=True):
        assert torch.equal(one.cpu(), two)


def failing(path: Path) -> None:
    """A file object that fails in the middle leaves the device usable, and nothing under way."""

    class Failing:
        def __init__(self) -> None:
            self.left = 20_000_000

        def write(self, data: Any) -> int:
            self.left -= len(data)
            if self.left < 0:
                raise OSError(28, "No space left on device")
            return len(data)

    value = torch.rand(30_000_000, device="cuda")
    try:
        save(value, Failing())
    except OSError:
        pass
    else:
        raise AssertionError("it did not fail")
    save(value, path)
    assert torch.equal(loaded(path), value.cpu())


def memory(path: Path) -> None:
    """Memory of the host stays below a constant; that of the device as it was."""
    import resource

    value = torch.rand(400_000_000, device="cuda")
    save(value[:1000].clone(), path)
    torch.cuda.reset_peak_memory_stats()
    before, there = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, torch.cuda.memory_allocated()
    save(value, path)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000
    more = torch.cuda.max_memory_allocated() - there
    print(f"  1.6 GB saved: {grown:.0f} MB more at the peak of the host, {more} bytes more on the device")
    assert grown < 300


def moving(path: Path) -> None:
    """What ``model.cpu()`` does to a model in training, and saving its state as it is does not."""
    for way, place in (("model.cpu()", "cpu"), ("transload.save", "cuda")):
        model = torch.nn.Linear(1000, 1000).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.rand(4, 1000, device="cuda")).sum().backward()
        optimizer.step()
        if way == "model.cpu()":
            torch.save(model.cpu().state_dict(), path)
        else:
            save(model.state_dict(), path)
        assert {each.device.type for each in model.parameters()} == {place}
        assert loaded(path)["weight"].device.type == "cpu"
        try:
            optimizer.step()
            went_on = "the optimizer goes on"
        except RuntimeError as error:
            went_on = f"the optimizer fails: {str(error).splitlines()[0]}"
        assert (went_on == "the optimizer goes on") is (place == "cuda"), went_on
        print(f"  {way}: {went_on}")


def limits(path: Path, megabytes: int) -> None:
    """What the machine can do with the same bytes: from the device, and to the disk."""
    nbytes = megabytes * 1_000_000
    there = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
    pinned = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for start in range(0, nbytes, len(pinned)):
        part = there[start : start + len(pinned)]
        pinned[: len(part)].copy_(part, non_blocking=True)
    torch.cuda.synchronize()
    print(f"limit: device to pinned memory {nbytes / 1e9 / (time.perf_counter() - begun):.2f} GB/s")
    host = there.cpu()
    del there
    with path.open("wb") as file:
        begun = time.perf_counter()
        file.write(memoryview(host.numpy()))
        file.flush()
        os.fsync(file.fileno())
    print(f"limit: write + fsync {nbytes / 1e9 / (time.perf_counter() - begun):.2f} GB/s")
    begun = time.perf_counter()
    subprocess.run(["cp", str(path), f"{path}.copy"], check=True)  # noqa: S607 - the system's own
    os.sync()
    print(f"limit: cp + sync {nbytes / 1e9 / (time.perf_counter() - begun):.2f} GB/s", flush=True)
    path.unlink()
    Path(f"{path}.copy").unlink()


if __name__ == "__main__":
    sys.exit(main())
