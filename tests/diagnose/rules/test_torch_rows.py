"""The rows about torch as a whole."""

from __future__ import annotations

import re

import pytest
from tests.diagnose.machines import bare, changed, cuda_gpu, healthy, install
from tests.diagnose.rules.torch_rows import BY_CODE, FINE, ROWS, alarms

from transload.diagnose.rules.row import LAYERS
from transload.diagnose.rules.torch_facts import again
from transload.machine import Machine, Torch

FAMILIES = {
    "P": range(1, 10),
    "T": range(1, 10),
    "J": range(1, 2),
    "L": range(1, 14),
    "E": range(1, 14),
    "A": range(1, 6),
    "V": range(1, 6),
    "R": range(1, 3),
    "W": range(1, 3),
}
SINGLE = ("S05", "S06", "S08", "S09", "X01", "X05", "X06", "X07", "X09", "X10", "X11", "X12", "X13", "N03")


@pytest.mark.parametrize("name", FINE)
def test_where_nothing_is_wrong_nothing_is_said(name: str) -> None:
    assert alarms(FINE[name]) == []


def test_an_empty_machine_is_not_judged() -> None:
    assert alarms(Machine()) == []


def test_every_row_exists_once() -> None:
    wanted = {f"{letter}{number:02}" for letter, numbers in FAMILIES.items() for number in numbers} | set(SINGLE)
    assert sorted(row.code for row in ROWS) == sorted(wanted)


@pytest.mark.parametrize("code", sorted(BY_CODE))
def test_every_row_has_a_page(code: str) -> None:
    row = BY_CODE[code]
    assert row.layer in {layer.name for layer in LAYERS}
    assert not row.title.endswith(".")
    assert len(row.about) > 60
    assert row.about.rstrip().endswith((".", '"'))
    assert row.fix
    assert all(source.startswith("https://") for source in row.sources)
    assert not re.search(r"\bplease\b|simply|just\b", row.about + row.fix, re.IGNORECASE)


@pytest.mark.parametrize(
    ("machine", "line"),
    [
        (healthy(), "install torch==2.13.0"),
        (bare(), "install --force-reinstall torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"),
        (FINE["no GPU, CUDA build"], "install --force-reinstall torch==2.13.0"),
        (changed(bare(), torch=Torch(installs=(install("2.99.0+cu999"),))), "install --force-reinstall torch"),
        (changed(bare(), torch=Torch(installs=())), "install --force-reinstall torch"),
        (changed(healthy(), torch=Torch(installs=(install("nonsense"),))), "install torch=="),
    ],
)
def test_the_same_release_is_installed_again(machine: Machine, line: str) -> None:
    assert any(f"$ /opt/venv/bin/python -m pip {line}" in each for each in again(machine))


def test_a_release_that_does_not_fit_gives_way_to_one_that_does() -> None:
    pascal = changed(healthy(), driver__cuda__gpus=(cuda_gpu(0, "P", (6, 1)),), driver__nvml__gpus=())
    assert any("torch==2.13.0 --index-url https://download.pytorch.org/whl/cu126" in line for line in again(pascal))


def test_symptoms_come_last_of_their_layer() -> None:
    symptoms = [row.symptom for row in ROWS if row.layer == "run" and row.check]
    assert symptoms == sorted(symptoms)
