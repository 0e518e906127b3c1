"""``doctor``, ``check``, ``explain`` and ``run`` on a machine with a working GPU."""

from __future__ import annotations

import io
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.loading.zoo import saved

import transload

H200 = Path(__file__).parents[1] / "data" / "h200"
SOURCE = Path(transload.__file__).parents[1]
one_gpu = pytest.mark.skipif("torch.cuda.device_count() > 1", reason="needs a machine without cuda:1")


def python(*arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "NO_COLOR": "1", **environ},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


# -- doctor


def run_doctor(**environ: str) -> tuple[int, str, list[str]]:
    """The exit code of ``doctor``, its status, and the codes of its errors."""
    process = python("-m", "transload", "doctor", "--json", **environ)
    report = json.loads(process.stdout or pytest.fail(process.stderr))
    return process.returncode, report["status"], [f["code"] for f in report["findings"] if f["severity"] == "error"]


def test_doctor_finds_no_errors_on_a_working_machine() -> None:
    code, status, errors = run_doctor()
    assert (code, errors) == (0, [])
    assert status in ("ok", "degraded")  # degraded: there are warnings, such as too little shared memory


@pytest.mark.parametrize(
    ("variable", "value", "cause"),
    [
        ("CUDA_VISIBLE_DEVICES", "", "E01"),
        ("CUDA_VISIBLE_DEVICES", "cuda:0", "E01"),
        ("CUDA_VISIBLE_DEVICES", "77", "E02"),
        ("CUDA_VISIBLE_DEVICES", "0,0", "E03"),
        ("CUDA_VISIBLE_DEVICES", "GPU-deadbeef", "E04"),
        ("CUDA_FORCE_PTX_JIT", "1", "A04"),
    ],
)
def test_doctor_finds_the_environment_variable_that_breaks_the_gpu(variable: str, value: str, cause: str) -> None:
    assert run_doctor(**{variable: value}) == (1, "broken", [cause])


# -- check


@one_gpu
def test_check_predicts_the_outcome_of_torch_load_and_load() -> None:
    for name, index in (("state_dict_cuda0.pt", 0), ("state_dict_cuda1.pt", 1)):
        result = transload.check(H200 / name)
        assert result.ok
        assert {move.device for move in result.plan.moves} == {"cuda:0"}
        error = error_text(partial(torch.load, H200 / name))
        assert (result.torch.text in error) if index else not error
    assert not transload.check(H200 / "state_dict_cuda1.pt", None).ok


def test_is_cuda_compatible_compares_compiled_code_with_the_gpu() -> None:
    answer = transload.is_cuda_compatible(H200 / "aoti_cuda0.pt2")
    fits = torch.cuda.get_device_capability() == (9, 0) and platform.machine() == "x86_64"
    assert bool(answer) == fits, answer


# -- explain


def error_text(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


KERNEL_ASSERT = """
import torch
torch.zeros(3, device="cuda")[torch.tensor([7], device="cuda")].cpu()
"""
CUDA_AFTER_FORK = """
import multiprocessing, torch
torch.zeros(1, device="cuda")
def work():
    torch.zeros(1, device="cuda")
child = multiprocessing.get_context("fork").Process(target=work)
child.start()
child.join()
"""
ERRORS: dict[str, Callable[[], str]] = {
    "device-ordinal": lambda: error_text(lambda: torch.zeros(1, device="cuda:99")),
    "gpu-memory-full": lambda: error_text(lambda: torch.empty(1 << 46, dtype=torch.uint8, device="cuda")),
    "device-index": lambda: error_text(lambda: torch.load(io.BytesIO(saved(torch.ones(1), tag="cuda:77")))),
    "index-out-of-range": lambda: python("-c", KERNEL_ASSERT).stderr,
    "forked-cuda": lambda: python("-c", CUDA_AFTER_FORK).stderr,
}


@pytest.mark.parametrize("code", ERRORS)
def test_cuda_errors_are_explained(code: str) -> None:
    text = ERRORS[code]()
    explanation = transload.explain(text, checks=False)
    assert [answer.code for answer in explanation.answers] == [code], text


# -- run

SECOND_GPU_SCRIPT = """
import sys
import torch

device = torch.device("cuda:1")
state = torch.load(sys.argv[1])
layer = torch.nn.Linear(4, 4).to(device)
made = layer(torch.ones(2, 4, device="cuda:1"))
torch.cuda.set_device(1)
print(made.device, torch.zeros(1).cuda(1).device, *sorted({str(value.device) for value in state.values()}))
"""


@one_gpu
def test_run_maps_a_script_for_a_second_gpu_to_the_first(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SECOND_GPU_SCRIPT, encoding="utf-8")
    plain = python(tmp_path / "script.py", H200 / "state_dict_cuda1.pt")
    assert plain.returncode == 1
    process = python("-m", "transload", "run", tmp_path / "script.py", H200 / "state_dict_cuda1.pt")
    assert process.returncode == 0, process.stderr
    assert process.stdout.split() == ["cuda:0"] * 3
    assert process.stderr.count("LandingWarning: there is no cuda:1 here") == 1
