"""``is_cuda_compatible``: whether a checkpoint works with the CUDA version and the GPUs of a machine."""

from __future__ import annotations

import io
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from tests.diagnose.machines import cuda_gpu, cuinit_fails, healthy, with_facts, without_gpu

from transload.checking import Compatibility, compatibility, is_cuda_compatible
from transload.checkpoint import Origin
from transload.machine import Machine
from transload.opening import inspect

DATA = Path(__file__).parent.parent / "data"
PACKAGE = DATA / "h200" / "aoti_cuda0.pt2"
FOLDER = "data/aotinductor/model/"


def with_gpus(*cards: tuple[str, tuple[int, int]], cuda: int = 13000) -> Machine:
    gpus = tuple(cuda_gpu(index, name, capability) for index, (name, capability) in enumerate(cards))
    return with_facts(healthy(), driver__cuda__gpus=gpus, driver__nvml__gpus=(), driver__cuda__version=cuda)


H200, A100, B200 = ("NVIDIA H200", (9, 0)), ("NVIDIA A100", (8, 0)), ("NVIDIA B200", (10, 0))


@pytest.mark.parametrize(
    "machine", [healthy(), without_gpu(), cuinit_fails(healthy(), 999), with_gpus(A100, cuda=11040)]
)
@pytest.mark.parametrize("name", ["state_dict_cuda0.pt", "train_cuda0.ckpt", "torchscript_cuda0.pt"])
def test_tensors_load_under_any_cuda(name: str, machine: Machine) -> None:
    result = is_cuda_compatible(DATA / "h200" / name, machine=machine)
    assert result
    assert result.reason == "tensors carry no CUDA version: they load under any, and without CUDA"
    assert result.evidence == ("no origin is recorded in the file",)


@pytest.mark.parametrize("data", [b"", b"<html>", bytes(1000)], ids=["empty", "a page", "zeros"])
def test_what_is_no_checkpoint_is_not_compatible(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(data)
    for path in (tmp_path / "model.pt", tmp_path):
        result = is_cuda_compatible(path, machine=healthy())
        assert (bool(result), result.reason) == (False, "it is not a checkpoint")


def test_kernels_run_on_their_architecture_only() -> None:
    assert is_cuda_compatible(PACKAGE, machine=with_gpus(H200)).reason == (
        "it holds compiled code for sm_90, which runs on NVIDIA H200"
    )
    for card in (A100, B200):
        result = is_cuda_compatible(PACKAGE, machine=with_gpus(card))
        assert not result
        assert result.reason == f"it holds compiled code for sm_90, which does not run on {card[0]}"


def test_one_suitable_gpu_is_enough_and_every_gpu_is_listed() -> None:
    result = is_cuda_compatible(PACKAGE, machine=with_gpus(A100, H200))
    assert result
    assert result.reason.endswith("runs on NVIDIA H200")
    evidence = "\n".join(result.evidence)
    assert "NVIDIA A100, compute capability 8.0: does not run " in evidence
    assert "NVIDIA H200, compute capability 9.0: runs" in evidence


@pytest.mark.parametrize("machine", [without_gpu(), cuinit_fails(healthy(), 999)])
def test_without_a_working_gpu_no_kernel_runs(machine: Machine) -> None:
    result = is_cuda_compatible(PACKAGE, machine=machine)
    assert not result
    assert result.reason.endswith("no NVIDIA GPU works here")


def test_library_for_another_processor_is_incompatible() -> None:
    result = is_cuda_compatible(PACKAGE, machine=with_facts(with_gpus(H200), platform__machine="aarch64"))
    assert result.reason.endswith("its library is for x86_64 processors, not aarch64")
    assert not result


def compiled(folder: Path, **files: bytes) -> Path:
    """A package of kernels; ``k_ptx`` makes ``k.ptx``."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in {"archive_format": b"pt2", "version": b"6", "byteorder": b"little"}.items():
            archive.writestr(f"m/{name}", content)
        for name, content in files.items():
            archive.writestr(f"m/{FOLDER}{name.replace('_', '.')}", content)
    path = folder / "m.pt2"
    path.write_bytes(buffer.getvalue())
    return path


@pytest.mark.parametrize(
    ("ptx", "card", "cuda", "runs"),
    [
        (("8.7", "sm_80"), A100, 12080, True),
        (("8.7", "sm_80"), H200, 12080, True),
        (("8.7", "sm_80"), H200, 12070, False),
        (("8.6", "sm_80"), H200, 12070, True),
        (("8.6", "sm_80"), H200, 12060, False),
        (("8.4", "sm_80"), H200, 12040, True),
        (("9.1", "sm_80"), H200, 13000, False),
        (("7.8", "sm_90"), A100, 13000, False),
        (("8.0", "sm_90a"), B200, 13000, False),
        (("?", "sm_80"), H200, 11000, True),
    ],
)
def test_ptx_runs_on_newer_gpus_if_the_driver_can_compile_it(
    ptx: tuple[str, str], card: tuple[str, tuple[int, int]], cuda: int, runs: bool, tmp_path: Path
) -> None:
    source = "//\n.version {}\n.target {}\n".format(*ptx).encode()
    path = compiled(tmp_path, k_ptx=source)
    assert bool(is_cuda_compatible(path, machine=with_gpus(card, cuda=cuda))) == runs


def test_recorded_origin_is_compared_with_the_machine() -> None:
    result = is_cuda_compatible(DATA / "h200" / "export_cuda0.pt2", machine=healthy())
    assert result
    assert result.origin == (("torch", "2.11.0+cu130"),)
    assert result.evidence == ("made with torch 2.11.0+cu130; here 2.13.0+cu130",)


@pytest.mark.parametrize(("cuda", "runs"), [(13000, True), (13020, True), (12080, False)])
@pytest.mark.parametrize("recorded", [("torch", "2.13.0+cu130"), ("cuda", "13.0")])
def test_kernels_need_a_driver_for_the_recorded_cuda_version(recorded: tuple[str, str], cuda: int, runs: bool) -> None:
    package = replace(inspect(PACKAGE), written_by=Origin(recorded=(recorded,)))
    result = compatibility(package, with_gpus(H200, cuda=cuda))
    assert result.origin == (recorded,)
    assert bool(result) == runs
    assert ("made with CUDA 13.0, while this driver supports up to 12.8" in result.reason) == (not runs)


def test_compatibility_as_bool_text_and_dict() -> None:
    result = Compatibility(False, "because", ("seen",), (("torch", "2.0"),))
    assert not result
    assert str(result) == "no: because\n  seen"
    assert result.to_dict() == {
        "compatible": False,
        "reason": "because",
        "evidence": ["seen"],
        "origin": {"torch": "2.0"},
    }


def test_this_machine_is_examined_by_default() -> None:
    assert is_cuda_compatible(DATA / "h200" / "state_dict_cuda0.pt")
