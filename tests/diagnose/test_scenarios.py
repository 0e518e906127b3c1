"""Each answer of the driver on each kind of host: the cause that is named is the true one."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.diagnose.scenarios import diagnose, named, worlds
from tests.elf_forge import LOADABLE

WORLDS = worlds()
MACHINES = {"host": ("x86_64", "aarch64"), "docker": ("x86_64",), "wsl": ("x86_64",), "slurm": ("aarch64",)}


@pytest.mark.skipif(not LOADABLE, reason="no driver can be forged for this machine")
@pytest.mark.parametrize("name", WORLDS)
def test_the_cause_is_the_true_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transload.diagnose.probes._DRIVER", 2.0)  # one of the drivers hangs
    wrong = []
    for around, world in WORLDS[name].items():
        for machine in MACHINES[around]:
            diagnosis = diagnose(world, around, tmp_path / around / machine, machine)
            told = [(found.code, found.title, found.evidence) for found in diagnosis.findings]
            if named(diagnosis) not in world.truth.split("|") or diagnosis.machine.problems:
                wrong.append((around, machine, world.truth, told, diagnosis.machine.problems))
    assert wrong == []


def test_the_matrix_is_what_it_says() -> None:
    assert sum(map(len, WORLDS.values())) > 90
