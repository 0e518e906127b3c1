"""Is this checkpoint compatible with this CUDA version?"""

from __future__ import annotations

import io
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from tests.diagnose.machines import bare, changed, cuda_gpu, healthy, refused

from transload.checking import Compatibility, compatibility, is_cuda_compatible
from transload.checkpoint import Origin
from transload.judge import inspect
from transload.machine import Machine

DATA = Path(__file__).parent.parent / "data"
PACKAGE = DATA / "h200" / "aoti_cuda0.pt2"
FOLDER = "data/aotinductor/model/"


def with_cards(*cards: tuple[str, tuple[int, int]], cuda: int = 13000) -> Machine:
    gpus = tuple(cuda_gpu(place, name, capability) for place, (name, capability) in enumerate(cards))
    return changed(healthy(), driver__cuda__gpus=gpus, driver__nvml__gpus=(), driver__cuda__version=cuda)


H200, A100, B200 = ("NVIDIA H200", (9, 0)), ("NVIDIA A100", (8, 0)), ("NVIDIA B200", (10, 0))


@pytest.mark.parametrize("machine", [healthy(), bare(), refused(healthy(), 999), with_cards(A100, cuda=11040)])
@pytest.mark.parametrize("name", ["state_dict_cuda0.pt", "train_cuda0.ckpt", "torchscript_cuda0.pt"])
def test_tensors_load_under_any_cuda(name: str, machine: Machine) -> None:
    answer = is_cuda_compatible(DATA / "h200" / name, machine=machine)
    assert answer
    assert answer.reason == "tensors carry no CUDA version: they load under any, and without CUDA"
    assert answer.evidence == ("no origin is recorded in the file",)


def test_kernels_run_on_their_architecture_only() -> None:
    assert is_cuda_compatible(PACKAGE, machine=with_cards(H200)).reason == (
        "it holds compiled code for sm_90, which runs on NVIDIA H200"
    )
    for card in (A100, B200):
        answer = is_cuda_compatible(PACKAGE, machine=with_cards(card))
        assert not answer
        assert answer.reason == f"it holds compiled code for sm_90, which does not run on {card[0]}"


def test_one_gpu_that_fits_is_enough_and_each_is_listed() -> None:
    answer = is_cuda_compatible(PACKAGE, machine=with_cards(A100, H200))
    assert answer
    assert answer.reason.endswith("runs on NVIDIA H200")
    told = "\n".join(answer.evidence)
    assert "NVIDIA A100, compute capability 8.0: does not run " in told
    assert "NVIDIA H200, compute capability 9.0: runs" in told


@pytest.mark.parametrize("machine", [bare(), refused(healthy(), 999)])
def test_without_a_working_gpu_no_kernel_runs(machine: Machine) -> None:
    answer = is_cuda_compatible(PACKAGE, machine=machine)
    assert not answer
    assert answer.reason.endswith("no NVIDIA GPU works here")


def test_a_library_for_another_processor() -> None:
    answer = is_cuda_compatible(PACKAGE, machine=changed(with_cards(H200), platform__machine="aarch64"))
    assert answer.reason.endswith("its library is for x86_64 processors, not aarch64")
    assert not answer


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
def test_ptx_runs_on_newer_cards_if_the_driver_can_compile_it(
    ptx: tuple[str, str], card: tuple[str, tuple[int, int]], cuda: int, runs: bool, tmp_path: Path
) -> None:
    source = "//\n.version {}\n.target {}\n".format(*ptx).encode()
    path = compiled(tmp_path, k_ptx=source)
    assert bool(is_cuda_compatible(path, machine=with_cards(card, cuda=cuda))) == runs


def test_a_recorded_origin_is_compared() -> None:
    answer = is_cuda_compatible(DATA / "h200" / "export_cuda0.pt2", machine=healthy())
    assert answer
    assert answer.origin == (("torch", "2.11.0+cu130"),)
    assert answer.evidence == ("made with torch 2.11.0+cu130; here 2.13.0+cu130",)


@pytest.mark.parametrize(("cuda", "runs"), [(13000, True), (13020, True), (12080, False)])
@pytest.mark.parametrize("recorded", [("torch", "2.13.0+cu130"), ("cuda", "13.0")])
def test_kernels_of_a_recorded_cuda_need_a_driver_of_its_generation(
    recorded: tuple[str, str], cuda: int, runs: bool
) -> None:
    package = replace(inspect(PACKAGE), written_by=Origin(recorded=(recorded,)))
    answer = compatibility(package, with_cards(H200, cuda=cuda))
    assert answer.origin == (recorded,)
    assert bool(answer) == runs
    assert ("made with CUDA 13.0, while this driver supports up to 12.8" in answer.reason) == (not runs)


def test_the_answer_is_data() -> None:
    answer = Compatibility(False, "because", ("seen",), (("torch", "2.0"),))
    assert not answer
    assert str(answer) == "no: because\n  seen"
    assert answer.to_dict() == {
        "compatible": False,
        "reason": "because",
        "evidence": ["seen"],
        "origin": {"torch": "2.0"},
    }


def test_this_machine_is_examined_where_none_is_given() -> None:
    assert is_cuda_compatible(DATA / "h200" / "state_dict_cuda0.pt")
