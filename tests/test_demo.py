"""``make demo``: its script with and without torch, and the record with which it compares the values."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from tests import forks

ROOT = Path(__file__).parent.parent
FILE = ROOT / "examples" / "model_cuda0.pt"
RECORD = ROOT / "examples" / "model_cuda0.json"


def demo(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the demo as ``make`` does: in the folder of the project, with its output not a terminal."""
    return subprocess.run(
        [sys.executable, "scripts/make.py", "demo"],
        cwd=folder,
        env={**os.environ, "PYTHONIOENCODING": "utf-8", "COLUMNS": "120", **env},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )


@pytest.fixture
def broken_torch(tmp_path: Path) -> str:
    """A folder for PYTHONPATH whose torch cannot be imported."""
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: no such file')\n", encoding="utf-8")
    return str(tmp_path)


def test_demo_with_torch_loads_the_file_with_the_right_values() -> None:
    torch = pytest.importorskip("torch")
    process = forks.run("examples/demo.py", cwd=ROOT, env={**os.environ, "COLUMNS": "120"})
    assert process.returncode == 0, process.stdout + process.stderr
    plain, ours, file, machine = sections(process.stdout)
    assert '>>> torch.load("examples/model_cuda0.pt")' in plain
    assert ("It loads: 10 tensors on cuda:0." if torch.cuda.is_available() else "Error: ") in plain
    assert "✓ 10 tensors on " in ours
    assert "their values match examples/model_cuda0.json" in ours
    assert "torch.save zip archive" in file
    assert "$ transload doctor --python " in machine


def test_demo_without_torch_reports_that_and_runs_the_other_steps(broken_torch: str) -> None:
    process = demo(ROOT, PYTHONPATH=broken_torch)
    assert process.returncode == 0, process.stdout + process.stderr
    plain, ours, file, machine = sections(process.stdout)
    assert "ImportError: libtorch.so: no such file" in plain
    assert "$ transload convert examples/model_cuda0.pt " in ours
    assert "examples/model_cuda0.json: all tensors match it" in ours
    assert "torch.save zip archive" in file
    assert "The doctor found a problem on this machine, and exits with 1." in machine


def test_demo_fails_if_values_differ_from_the_record(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    copy_project(tmp_path)
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    record["files"][0]["tensors"][0]["sha256"] = "0" * 64
    (tmp_path / "examples" / RECORD.name).write_text(json.dumps(record), encoding="utf-8")
    process = forks.run("examples/demo.py", cwd=tmp_path, env={**os.environ, "COLUMNS": "120"})
    assert process.returncode == 1
    assert "the values differ from examples/model_cuda0.json in conv.weight." in process.stdout


def test_demo_without_torch_fails_on_a_damaged_file(tmp_path: Path, broken_torch: str) -> None:
    copy_project(tmp_path)
    (tmp_path / "examples" / FILE.name).write_bytes(FILE.read_bytes()[:1000])
    process = demo(tmp_path, PYTHONPATH=broken_torch)
    assert process.returncode == 1
    assert "transload failed above" in process.stdout


def test_record_matches_what_torch_load_returns() -> None:
    torch = pytest.importorskip("torch")
    state = torch.load(FILE, map_location="cpu", weights_only=True)
    values = {name: bytes(tensor.reshape(-1).view(torch.uint8).tolist()) for name, tensor in state.items()}
    hashes = {name: sha256(value).hexdigest() for name, value in values.items()}
    tensors = json.loads(RECORD.read_text(encoding="utf-8"))["files"][0]["tensors"]
    assert {tensor["name"]: tensor["sha256"] for tensor in tensors} == hashes


def sections(text: str) -> list[str]:
    """The output of each of the four steps."""
    return re.split(r"^\d\. ", text, flags=re.MULTILINE)[1:]


def copy_project(folder: Path) -> None:
    """Copy what the demo needs of the project."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "docs", folder / "docs")
