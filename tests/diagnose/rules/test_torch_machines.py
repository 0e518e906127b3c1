"""All rules on machines without a fault, and the commands that reinstall torch."""

from __future__ import annotations

from tests.diagnose.machines import cuda_gpu, healthy, install, with_facts, without_gpu
from tests.diagnose.rules.rule_helpers import alarms
from tests.diagnose.rules.torch_machines import FAULTLESS
from tests.each import each

from transload.diagnose.case import Case
from transload.machine import Machine, Torch
from transload.steps import fix_of


@each("name", FAULTLESS)
def test_no_alarm_on_machines_without_a_fault(name: str) -> None:
    assert alarms(FAULTLESS[name]) == []


def test_no_alarm_on_an_empty_machine() -> None:
    assert alarms(Machine()) == []


CPU = "--index-url https://download.pytorch.org/whl/cpu"


@each(
    ("machine", "expected"),
    [
        (healthy(), "install torch==2.13.0"),
        (without_gpu(), "install --force-reinstall torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"),
        (FAULTLESS["no GPU, CUDA build"], "install --force-reinstall torch==2.13.0"),
        (
            with_facts(without_gpu(), torch=Torch(installs=(install("2.99.0+cu999"),))),
            f"install --force-reinstall torch {CPU}",
        ),
        (with_facts(without_gpu(), torch=Torch(installs=())), f"install --force-reinstall torch {CPU}"),
        (with_facts(healthy(), torch=Torch(installs=(install("nonsense"),))), "install torch=="),
    ],
)
def test_reinstall_keeps_a_known_release(machine: Machine, expected: str) -> None:
    assert any(f"$ /opt/venv/bin/python -m pip {expected}" in command for command in fix_of(Case(machine).reinstall))


def test_reinstall_chooses_a_build_that_supports_the_card() -> None:
    pascal = with_facts(healthy(), driver__cuda__gpus=(cuda_gpu(0, "P", (6, 1)),), driver__nvml__gpus=())
    index = "torch==2.13.0 --index-url https://download.pytorch.org/whl/cu126"
    assert any(index in line for line in fix_of(Case(pascal).reinstall))
