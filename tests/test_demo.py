"""``make demo``: the script it runs, with torch and without, and the record its values are compared with."""

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
    """The demo as ``make`` runs it: from the folder of the project, its output not a terminal."""
    return subprocess.run(
        [sys.executable, "examples/demo.py"],
        cwd=folder,
        env={**os.environ, "PYTHONIOENCODING": "utf-8", "COLUMNS": "120", **env},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )


@pytest.fixture
def torch_that_fails(tmp_path: Path) -> str:
    """A folder for PYTHONPATH whose torch cannot be imported."""
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: no such file')\n", encoding="utf-8")
    return str(tmp_path)


def test_with_torch_it_loads_and_the_values_are_right() -> None:
    torch = pytest.importorskip("torch")
    done = forks.run("examples/demo.py", cwd=ROOT, env={**os.environ, "COLUMNS": "120"})
    assert done.returncode == 0, done.stdout + done.stderr
    plain, ours, file, machine = sections(done.stdout)
    assert '>>> torch.load("examples/model_cuda0.pt")' in plain
    assert ("It loads: 10 tensors on cuda:0." if torch.cuda.is_available() else "Error: ") in plain
    assert "✓ 10 tensors on " in ours
    assert "their values match examples/model_cuda0.json" in ours
    assert "torch.save zip archive" in file
    assert "$ transload doctor --python " in machine


def test_without_torch_it_says_so_and_does_the_rest(torch_that_fails: str) -> None:
    done = demo(ROOT, PYTHONPATH=torch_that_fails)
    assert done.returncode == 0, done.stdout + done.stderr
    plain, ours, file, machine = sections(done.stdout)
    assert "ImportError: libtorch.so: no such file" in plain
    assert "$ transload convert examples/model_cuda0.pt " in ours
    assert "examples/model_cuda0.json: all tensors match it" in ours
    assert "torch.save zip archive" in file
    assert "The doctor found a problem on this machine, and exits with 1." in machine


def test_wrong_values_fail(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    copy(tmp_path)
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    record["files"][0]["tensors"][0]["sha256"] = "0" * 64
    (tmp_path / "examples" / RECORD.name).write_text(json.dumps(record), encoding="utf-8")
    done = forks.run("examples/demo.py", cwd=tmp_path, env={**os.environ, "COLUMNS": "120"})
    assert done.returncode == 1
    assert "the values differ from examples/model_cuda0.json in conv.weight." in done.stdout


def test_a_damaged_file_fails_without_torch(tmp_path: Path, torch_that_fails: str) -> None:
    copy(tmp_path)
    (tmp_path / "examples" / FILE.name).write_bytes(FILE.read_bytes()[:1000])
    done = demo(tmp_path, PYTHONPATH=torch_that_fails)
    assert done.returncode == 1
    assert "transload failed above" in done.stdout


def test_the_record_holds_what_torch_itself_loads() -> None:
    torch = pytest.importorskip("torch")
    state = torch.load(FILE, map_location="cpu", weights_only=True)
    values = {name: bytes(tensor.reshape(-1).view(torch.uint8).tolist()) for name, tensor in state.items()}
    hashes = {name: sha256(value).hexdigest() for name, value in values.items()}
    tensors = json.loads(RECORD.read_text(encoding="utf-8"))["files"][0]["tensors"]
    assert {tensor["name"]: tensor["sha256"] for tensor in tensors} == hashes


def sections(text: str) -> list[str]:
    """The text of each of the four steps."""
    return re.split(r"^\d\. ", text, flags=re.MULTILINE)[1:]


def copy(folder: Path) -> None:
    """The project as far as the demo needs it, with the sources as a link."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    (folder / "src").symlink_to(ROOT / "src")
