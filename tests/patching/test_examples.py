"""The scripts under ``examples/scripts``: each fails under ``python``, and works under ``transload run``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests import forks

import transload

pytest.importorskip("torch")

SCRIPTS = Path(__file__).parent.parent.parent / "examples" / "scripts"
EXPECTED = {
    "infer.py": (["--weights", "classifier.pt"], "image 3: class "),
    "resume.py": (["training.ckpt", "--epochs", "4"], "epoch 3: loss "),
    "lightning_like.py": (["regressor.ckpt"], "test loss "),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import runpy
    import sys
    from unittest import mock

    folder = tmp_path_factory.mktemp("checkpoints")
    with (
        mock.patch.object(sys, "argv", ["make.py", str(folder)]),
        mock.patch.object(sys, "path", [str(SCRIPTS), *sys.path]),
        pytest.raises(SystemExit) as raised,
    ):
        runpy.run_path(str(SCRIPTS / "make.py"), run_name="__main__")
    assert raised.value.code == 0
    return folder


def test_every_example_script_is_tested() -> None:
    assert {path.name for path in SCRIPTS.glob("*.py")} == {*EXPECTED, "make.py"}


def test_example_checkpoints_are_tagged_cuda_1(checkpoints: Path) -> None:
    for path in checkpoints.iterdir():
        assert {storage.device for storage in transload.inspect(path).storages} == {"cuda:1"}


@pytest.mark.parametrize("script", EXPECTED)
def test_script_fails_under_python_and_works_under_transload_run(checkpoints: Path, script: str) -> None:
    arguments, last = EXPECTED[script]
    under_python = forks.run(SCRIPTS / script, *arguments, cwd=checkpoints)
    assert under_python.returncode == 1
    assert "Error: " in under_python.stderr.splitlines()[-1]
    env = {**os.environ, "PYTHONPATH": str(forks.SOURCE)}
    under_transload = forks.run("-m", "transload", "run", SCRIPTS / script, *arguments, cwd=checkpoints, env=env)
    assert under_transload.returncode == 0, under_transload.stderr
    assert under_transload.stdout.splitlines()[-1].startswith(last)
    assert under_transload.stderr.count("LandingWarning: there is no cuda:1 here") == 1
