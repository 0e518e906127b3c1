"""The rows about torch as a whole."""

from __future__ import annotations

from tests.diagnose.machines import bare, changed, cuda_gpu, healthy, install
from tests.diagnose.rules.machine_rows import alarms
from tests.diagnose.rules.torch_rows import FINE
from tests.each import each

from transload.diagnose.case import Case
from transload.machine import Machine, Torch


@each("name", FINE)
def test_where_nothing_is_wrong_nothing_is_said(name: str) -> None:
    assert alarms(FINE[name]) == []


def test_an_empty_machine_is_not_judged() -> None:
    assert alarms(Machine()) == []


CPU = "--index-url https://download.pytorch.org/whl/cpu"


@each(
    ("machine", "line"),
    [
        (healthy(), "install torch==2.13.0"),
        (bare(), "install --force-reinstall torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"),
        (FINE["no GPU, CUDA build"], "install --force-reinstall torch==2.13.0"),
        (changed(bare(), torch=Torch(installs=(install("2.99.0+cu999"),))), f"install --force-reinstall torch {CPU}"),
        (changed(bare(), torch=Torch(installs=())), f"install --force-reinstall torch {CPU}"),
        (changed(healthy(), torch=Torch(installs=(install("nonsense"),))), "install torch=="),
    ],
)
def test_the_same_release_is_installed_again(machine: Machine, line: str) -> None:
    assert any(f"$ /opt/venv/bin/python -m pip {line}" in each for each in Case(machine).reinstall)


def test_a_release_that_does_not_fit_gives_way_to_one_that_does() -> None:
    pascal = changed(healthy(), driver__cuda__gpus=(cuda_gpu(0, "P", (6, 1)),), driver__nvml__gpus=())
    assert any(
        "torch==2.13.0 --index-url https://download.pytorch.org/whl/cu126" in line for line in Case(pascal).reinstall
    )
