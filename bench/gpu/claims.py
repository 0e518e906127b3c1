"""Test common claims about CUDA and checkpoints on a real GPU: the evidence behind docs/claims.md.

    python bench/gpu/claims.py

Run it as root on a Linux machine with an NVIDIA GPU and a CUDA build of torch. Every state is set up for one process (a
variable, a mount namespace); nothing on the machine is changed. It prints a line for each observation, and exits with 1
if one of them is not what the page says.
"""

from __future__ import annotations

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path[:1] = [ROOT, f"{ROOT}/src"]

import ctypes
import io
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import transload

DATA = Path(ROOT, "tests", "data")
WORKS = (
    "import torch; x = torch.rand(64, 64, device='cuda'); print(torch.cuda.is_available(), float((x @ x).sum()) > 0)"
)
QUERIES = """
import torch, warnings
warnings.simplefilter("ignore")
print(torch.cuda.is_available(), torch.cuda.device_count())
try:
    torch.zeros(1, device="cuda")
except RuntimeError as error:
    print(str(error).splitlines()[0])
"""
CLAIMS: list[Callable[[], None]] = []


def claim(check: Callable[[], None]) -> Callable[[], None]:
    """Add a claim to the list."""
    CLAIMS.append(check)
    return check


def main() -> int:
    """Test all claims; return 1 if one differs from the page."""
    name, driver = torch.cuda.get_device_name(0), driver_version()
    day = datetime.now(timezone.utc).date()
    print(f"{day}, {name}, driver of CUDA {driver}, torch {torch.__version__}, Python {platform.python_version()}")
    wrong = sum(not holds(check) for check in CLAIMS)
    print(f"{len(CLAIMS) - wrong} of {len(CLAIMS)} as docs/claims.md says")
    return int(wrong > 0)


def holds(check: Callable[[], None]) -> bool:
    """Test one claim."""
    try:
        check()
    except AssertionError as error:
        say(check, f"DIFFERS FROM THE PAGE: {error}")
        return False
    return True


def say(check: Callable[[], None], text: str) -> None:
    """Print an observation."""
    print(f"{check.__name__}: {text}", flush=True)


def child(code: str, *before: str, **variables: str | None) -> str:
    """What a new interpreter prints, with environment variables set, or removed (None)."""
    environ = {name: value for name, value in {**os.environ, **variables}.items() if value is not None}
    command = [*before, sys.executable, "-c", code]
    process = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    return process.stdout.strip() or process.stderr.strip()[-300:]


def driver_version() -> str:
    """The newest CUDA that the driver supports, according to the driver."""
    number = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def linear() -> torch.nn.Linear:
    """A model on the GPU."""
    return torch.nn.Linear(100, 100).cuda()


@claim
def embeds_the_cuda_version() -> None:
    """A file saved from this GPU names neither torch nor CUDA; files of torch 1.0 to 2.13 load onto this GPU."""
    buffer = io.BytesIO()
    torch.save(linear().state_dict(), buffer)
    for word in (str(torch.__version__), str(torch.version.cuda), "cu130", torch.cuda.get_device_name(0), "sm_"):
        assert word.encode() not in buffer.getvalue(), word
    files = sorted(DATA.glob("torch-releases/*/state_dict_cuda0.pt"))
    loaded = [torch.load(path) for path in files]
    assert {tensor.device.type for state in loaded for tensor in state.values()} == {"cuda"}
    releases = ", ".join(path.parent.name.split("-")[1] for path in files)
    say(embeds_the_cuda_version, f"no version in a file saved here; files of torch {releases} load onto the GPU")


@claim
def cpu_tensors_in_between() -> None:
    """CPU and GPU tensors of one file return to their devices; load_state_dict copies in both directions."""
    mixed = torch.load(DATA / "h200" / "mixed_cpu_cuda.pt")
    kinds = {tensor.device.type for tensor in tensors_of(mixed)}
    assert kinds == {"cpu", "cuda"}, kinds
    model = linear()
    model.load_state_dict({name: tensor.cpu() for name, tensor in model.state_dict().items()})
    assert model.weight.is_cuda
    host = torch.nn.Linear(100, 100)
    host.load_state_dict(model.state_dict())
    assert not host.weight.is_cuda
    assert torch.equal(host.weight, model.weight.cpu())
    model.load_state_dict({name: tensor.cpu() for name, tensor in model.state_dict().items()}, assign=True)
    assert not model.weight.is_cuda
    say(cpu_tensors_in_between, "a mixed file loads; load_state_dict copies both ways; assign=True takes what it gets")


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in tensors_of(item)] if isinstance(value, (list, tuple)) else []


@claim
def model_cpu_state_dict() -> None:
    """model.cpu() breaks the optimizer, and copies of tensors double tied weights, unlike the state dict as it is."""
    model = linear()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(4, 100, device="cuda")).sum().backward()
    optimizer.step()
    model.cpu().state_dict()
    try:
        optimizer.step()
        raise AssertionError("the optimizer still works")
    except RuntimeError as error:
        message = str(error).splitlines()[0]
    tied = torch.nn.Sequential(linear(), linear())
    tied[1].weight = tied[0].weight
    sizes = []
    for value in ({name: tensor.cpu() for name, tensor in tied.state_dict().items()}, tied.state_dict()):
        buffer = io.BytesIO()
        transload.save(value, buffer)
        sizes.append(len(buffer.getvalue()))
    assert sizes[0] > 1.9 * sizes[1], sizes
    say(model_cpu_state_dict, f"the next step: {message}")
    say(model_cpu_state_dict, f"tied weights: {sizes[0]} bytes with copied tensors, {sizes[1]} without copies")


@claim
def the_same_device_as_at_save() -> None:
    """A file of cuda:1 loads onto cuda:0, or the CPU, with map_location."""
    path = DATA / "h200" / "state_dict_cuda1.pt"
    for device in ("cuda:0", "cpu"):
        assert {str(tensor.device) for tensor in torch.load(path, map_location=device).values()} == {device}
    if torch.cuda.device_count() == 1:
        try:
            torch.load(path)
            raise AssertionError("it loaded without map_location")
        except RuntimeError as error:
            say(the_same_device_as_at_save, f"with map_location it loads; without: {error}")


@claim
def to_after_map_location() -> None:
    """After map_location, .to(device) returns the same tensor."""
    loaded = torch.load(DATA / "h200" / "state_dict_cuda1.pt", map_location="cuda")
    assert all(tensor.to("cuda") is tensor for tensor in loaded.values())
    model = torch.load(DATA / "h200" / "whole_module_cuda0.pt", map_location="cuda", weights_only=False)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    assert [parameter.data_ptr() for parameter in model.to("cuda").parameters()] == before
    say(to_after_map_location, "map_location='cuda' and .to('cuda'): the same tensors, nothing moved")


@claim
def the_toolkit_must_match() -> None:
    """torch computes without nvcc, and with a toolkit that reports CUDA 10.2: none of its libraries is loaded."""
    with tempfile.TemporaryDirectory() as folder:
        nvcc = Path(folder, "bin", "nvcc")
        nvcc.parent.mkdir()
        nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 10.2, V10.2.89'\n")
        nvcc.chmod(0o755)
        path = f"{folder}/bin:/usr/bin:/bin"
        for variables in ({"PATH": "/usr/bin:/bin", "CUDA_HOME": None}, {"PATH": path, "CUDA_HOME": folder}):
            assert child(WORKS, **variables) == "True True"
    torch.rand(8, 8, device="cuda") @ torch.rand(8, 8, device="cuda")
    mapped = Path("/proc/self/maps").read_text(encoding="ascii")
    loaded = sorted(set(re.findall(r"(/\S*/(?:libcudart|libcublas|libcudnn)\S*)", mapped)))
    assert loaded
    assert not [name for name in loaded if name.startswith("/usr/local/cuda")], loaded
    homes = sorted({re.sub(r".*/site-packages/", "site-packages/", str(Path(name).parent)) for name in loaded})
    say(
        the_toolkit_must_match,
        f"nvcc: {shutil.which('nvcc') or 'none'}; torch's own libraries: {', '.join(homes)}",
    )


@claim
def ld_library_path() -> None:
    """torch finds its libraries and the driver if the variable is unset, or names a folder that does not exist."""
    for value in (None, "/nonexistent", "/usr/local/cuda/lib64"):
        assert child(WORKS, LD_LIBRARY_PATH=value) == "True True", value
    say(ld_library_path, "unset, a missing folder, or /usr/local/cuda/lib64: torch computes")


@claim
def nvidia_smi_cuda_version() -> None:
    """nvidia-smi prints the CUDA version that the driver reports."""
    if not shutil.which("nvidia-smi"):
        say(nvidia_smi_cuda_version, "nvidia-smi is not installed")
        return
    command = ["nvidia-smi"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = re.search(r"CUDA Version:\s*([\d.]+)", output)
    assert match, output
    assert match[1] == driver_version(), (match[1], driver_version())
    say(
        nvidia_smi_cuda_version,
        f"it says {match[1]}, cuDriverGetVersion {driver_version()}, nvcc {shutil.which('nvcc') or 'is not installed'}",
    )


@claim
def device_count_and_unknown_error() -> None:
    """Without the device node of unified memory, devices are counted but none is usable: "unknown error"."""
    hide = (
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "sh",
        "-c",
        'mount --bind /dev/null /dev/nvidia-uvm; exec "$@"',
        "-",
    )
    available, message = child(QUERIES, *hide).split("\n", 1)
    assert available == f"False {torch.cuda.device_count()}", available
    assert message.startswith("CUDA unknown error"), message
    assert child(WORKS) == "True True"
    say(device_count_and_unknown_error, f"is_available() and device_count(): {available}; {message}")
    say(device_count_and_unknown_error, "with /dev/nvidia-uvm back it works: nothing was installed")


@claim
def safetensors_carry_no_device() -> None:
    """A file saved from the GPU does not mention it, and loads on the CPU."""
    try:
        from safetensors.torch import load_file, save_file
    except ImportError:
        say(safetensors_carry_no_device, "safetensors is not installed")
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.safetensors")
        save_file({"w": torch.rand(3, device="cuda")}, path)
        assert b"cuda" not in path.read_bytes()
        assert load_file(path)["w"].device.type == "cpu"
    say(safetensors_carry_no_device, "no 'cuda' in a file saved from the GPU; it loads on the CPU")


if __name__ == "__main__":
    sys.exit(main())
