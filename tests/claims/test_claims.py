"""Common claims about these errors, tested with the installed torch. docs/claims.md has a section for each.

Claims that need a GPU are tested by bench/gpu/claims.py; the page has the results, with the date and the versions.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.makers import saved
from torch import nn
from torch.utils import cpp_extension

import transload

ROOT = Path(__file__).parents[2]


@pytest.fixture
def h200(data: Path) -> Path:
    """Files saved from a real GPU, by torch 2.11.0 for CUDA 13.0."""
    return data / "h200"


def records(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


# -- a checkpoint embeds the CUDA version it was trained with


@pytest.mark.parametrize("name", ["state_dict_cuda0.pt", "state_dict_cuda0_legacy.pth", "mixed_cpu_cuda.pt"])
def test_embeds_the_cuda_version(h200: Path, name: str) -> None:
    raw = (h200 / name).read_bytes()
    for word in (b"2.11", b"13.0", b"cu13", b"H200", b"sm_", b"580."):
        assert word not in raw


def test_what_does_record_a_version(h200: Path, tmp_path: Path) -> None:
    exported = records(h200 / "export_cuda0.pt2")
    assert any(b"2.11.0+cu130" in data for name, data in exported.items() if name.endswith("models/model.json"))
    own = tmp_path / "own.pt"
    torch.save({"torch": torch.__version__}, own)
    assert str(torch.__version__).encode() in own.read_bytes()
    ours = tmp_path / "ours.pt"
    transload.save({}, ours)
    recorded = dict(transload.inspect(ours).written_by.recorded)
    assert recorded["torch"] == torch.__version__


# -- loading under another CUDA version fails


def test_another_cuda_version(data: Path, h200: Path) -> None:
    """The installed torch has another CUDA version than these files were saved with, or none: all load."""
    files = [*data.glob("torch-releases/*/state_dict_cuda0.pt"), h200 / "state_dict_cuda0.pt"]
    assert len(files) == 9
    for path in files:
        assert all(tensor.device.type == "cpu" for tensor in torch.load(path, map_location="cpu").values())


# -- CPU tensors mixed into a state dict break loading on a GPU


def test_state_dict_with_cpu_and_cuda_tensors(h200: Path) -> None:
    path = h200 / "mixed_cpu_cuda.pt"
    tags = {use.device for use in transload.inspect(path).devices}
    assert tags == {"cpu", "cuda:0"}
    assert torch.load(path, map_location="cpu")
    recorded = (h200 / "errors.txt").read_text(encoding="utf-8")
    assert "OK  mixed_cpu_cuda.pt {} dict" in recorded  # recorded on the GPU


def test_models_take_tensors_from_any_device() -> None:
    """``load_state_dict`` copies into the existing parameters; with ``assign=True`` it replaces them."""
    target = nn.Linear(2, 2, device="meta")
    source = nn.Linear(2, 2)
    target.load_state_dict(source.state_dict(), assign=True)
    assert target.weight.device.type == "cpu"
    assert torch.equal(target.weight, source.weight)


# -- model.cpu().state_dict() is the right way to save portably


def test_model_cpu_state_dict() -> None:
    """Moving the model to save it moves the model itself, but not the state of its optimizer."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(1, 2)).sum().backward()
    optimizer.step()
    before = model.weight
    assert model.to("meta") is model  # like .cpu() on a model on a GPU
    assert model.weight.device.type == "meta"
    assert before is not model.weight or before.device.type == "meta"
    assert all(state["exp_avg"].device.type == "cpu" for state in optimizer.state.values())


def test_saving_leaves_the_model_where_it_is(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    transload.save(model.state_dict(), tmp_path / "a.pt")
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers


def test_copies_by_name_write_tied_weights_twice() -> None:
    """``{name: tensor.cpu()}`` copies each tensor of another device; without a GPU, ``clone`` stands in for it."""
    tied = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))
    tied[1].weight = tied[0].weight

    def size(value: Any) -> int:
        return len(saved(value))

    copied = {name: tensor.clone() for name, tensor in tied.state_dict().items()}
    assert size(copied) > 1.9 * size(tied.state_dict())


# -- map_location='cpu' is enough unless there are custom CUDA kernels


def test_map_location_cpu_is_enough_for_tensors(h200: Path) -> None:
    for name in ("state_dict_cuda0.pt", "state_dict_cuda1.pt", "data_cuda0.pt"):
        assert torch.load(h200 / name, map_location="cpu")


def test_map_location_cpu_is_not_enough_for_missing_classes(h200: Path) -> None:
    with pytest.raises(AttributeError, match="Net"):
        torch.load(h200 / "whole_custom_module_cuda0.pt", map_location="cpu", weights_only=False)


def test_map_location_cpu_does_not_reach_devices_that_are_values() -> None:
    buffer = io.BytesIO(saved({"device": torch.device("cuda:3"), "name": "cuda:3"}))
    loaded = torch.load(buffer, map_location="cpu")
    assert loaded == {"device": torch.device("cuda:3"), "name": "cuda:3"}


def test_map_location_cpu_does_not_reach_devices_in_programs() -> None:
    def add_on_cuda(x: torch.Tensor) -> torch.Tensor:
        return x + torch.zeros(1, device=torch.device("cuda:0"))

    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(add_on_cuda), buffer)
    buffer.seek(0)
    program = torch.jit.load(buffer, map_location="cpu")
    with pytest.raises(RuntimeError):
        program(torch.zeros(1))


# -- torch.load needs the same device as at save


def test_load_needs_map_location_not_the_same_device(h200: Path) -> None:
    path = h200 / "state_dict_cuda1.pt"
    with pytest.raises(RuntimeError, match="Attempting to deserialize object on a CUDA device"):
        torch.load(path)
    assert torch.load(path, map_location="cpu")
    with pytest.warns(UserWarning, match="cuda:1"):
        loaded = transload.load(path)
    assert {tensor.device.type for tensor in loaded.values()} == {"cpu"}


# -- torch.load with map_location=device followed by .to(device) is needed


def test_to_after_map_location(h200: Path) -> None:
    loaded = torch.load(h200 / "state_dict_cuda0.pt", map_location="cpu")
    assert all(tensor.to("cpu") is tensor for tensor in loaded.values())


def test_a_model_keeps_its_own_device() -> None:
    """``load_state_dict`` copies, so the state dict may be on any device; only the model needs ``.to``, once."""
    model = nn.Linear(2, 2)
    pointer = model.weight.data_ptr()
    model.load_state_dict(nn.Linear(2, 2).state_dict())
    assert model.weight.data_ptr() == pointer


# -- the CUDA toolkit (nvcc) must match PyTorch's CUDA


def test_the_toolkit_must_match(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its major version must match to build extensions, as torch itself checks. Nothing else needs it."""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 10.2, V10.2.89'\n", encoding="ascii")
    nvcc.chmod(0o755)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(RuntimeError, match=r"detected CUDA version .*mismatches"):
        cpp_extension._check_cuda_version("g++", torch.torch_version.TorchVersion("11.0"))


def test_toolkit_of_another_version_is_not_run(tmp_path: Path) -> None:
    """Importing and using torch with a toolkit in CUDA_HOME and first on PATH does not run its nvcc."""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    marker = tmp_path / "asked"
    nvcc.write_text(f"#!/bin/sh\ntouch '{marker}'\n", encoding="ascii")
    nvcc.chmod(0o755)
    path = f"{nvcc.parent}{os.pathsep}{os.environ['PATH']}"
    code = "import torch; print(torch.cuda.is_available(), torch.rand(2, 2).matmul(torch.ones(2)).shape)"
    environ = {**os.environ, "CUDA_HOME": str(tmp_path), "CUDA_PATH": str(tmp_path), "PATH": path}
    result = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False torch.Size([2])"
    assert not marker.exists()


# -- torch.cuda.device_count() being 2 means cuda:1 is usable; reinstalling the driver fixes "unknown error"


def states(data: Path) -> dict[str, str]:
    text = (data / "doctor" / "h200-states.txt").read_text(encoding="utf-8")
    return {part.split("\n", 1)[0]: part for part in text.split("=== ")[1:]}


def test_device_count_is_not_usable(data: Path) -> None:
    """Recorded on a GPU: NVML counts a card that CUDA cannot use."""
    assert "avail True count 1" in states(data)["healthy"]
    assert "avail False count 1" in states(data)["no_uvm"]


def test_unknown_error_and_the_driver(data: Path) -> None:
    """Recorded on a GPU with a correct driver: one device node was inaccessible to one process."""
    assert "cuInit 999" in states(data)["no_uvm"]
    assert "EXC RuntimeError CUDA unknown error - this may be due to an incorrectly set up" in states(data)["no_uvm"]
    assert "cuInit 0" in states(data)["healthy"]


# -- weights_only=False is the fix for an unpickling error

PAGE = b"<!DOCTYPE html><html><title>404 Not Found</title></html>"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"


@pytest.mark.parametrize("content", [PAGE, POINTER, gzip.compress(PAGE)], ids=["web page", "Git LFS pointer", "gzip"])
def test_weights_only_false_is_the_fix(content: bytes, tmp_path: Path) -> None:
    """torch suggests it for files where it fixes nothing."""
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    with pytest.raises(Exception, match="set to `False` will likely succeed"):
        torch.load(path, weights_only=True)
    with pytest.raises(Exception, match="invalid load key"):
        torch.load(path, weights_only=False)
    assert transload.inspect(path).integrity == "not-a-checkpoint"


def test_weights_only_false_runs_what_is_in_the_file(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> Any:
            return os.getcwd, ()

    path = tmp_path / "model.pt"
    torch.save({"w": Payload()}, path)
    with pytest.raises(Exception, match="getcwd"):
        torch.load(path, weights_only=True)
    assert torch.load(path, weights_only=False)["w"] == str(Path.cwd())  # it was called
    assert transload.inspect(path).safety != "data-only"


def test_weights_only_false_is_not_needed_for_the_weights(h200: Path) -> None:
    """The tensors of a pickled module are listed without its class."""
    path = h200 / "whole_custom_module_cuda0.pt"
    with pytest.raises(Exception, match=r"Unsupported (global|class)"):
        torch.load(path, map_location="cpu", weights_only=True)
    assert len(transload.inspect(path).tensors) > 0


# -- safetensors files carry no device


def test_safetensors_carry_no_device(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(2)}, path)
    raw = path.read_bytes()
    header = raw[8 : 8 + int.from_bytes(raw[:8], "little")]
    assert re.findall(rb'"(\w+)":', header) == [b"w", b"dtype", b"shape", b"data_offsets"]
    assert load_file(path)["w"].device.type == "cpu"


# -- the page


def test_every_claim_on_the_page_names_its_tests() -> None:
    page = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    own_tests = set(re.findall(r"^def (test_\w+)", Path(__file__).read_text(encoding="utf-8"), re.MULTILINE))
    gpu_tests = set(
        re.findall(r"^def (\w+)", (ROOT / "bench" / "gpu" / "claims.py").read_text(encoding="utf-8"), re.MULTILINE)
    )
    sections = page.split("\n## ")[1:]
    assert len(sections) >= 15
    for section in sections:
        title = section.split("\n", 1)[0]
        verdict = re.search(r"^\*\*(True|False|It depends)\.?\*\*", section, re.MULTILINE)
        assert verdict, title
        assert "What to do" in section, title
        named = re.findall(r"`(?:tests/claims|bench/gpu/claims\.py): (\w+)`", section)
        assert named, title
        assert set(named) <= own_tests | gpu_tests, title
    used = set(re.findall(r"`tests/claims: (\w+)`", page))
    assert own_tests - used == {"test_every_claim_on_the_page_names_its_tests"}
