"""Each answer of the driver on each kind of host: the cause that is named is the true one."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.diagnose.scenarios import World, diagnose, named, scenarios
from tests.elf_forge import LOADABLE

pytestmark = pytest.mark.skipif(not LOADABLE, reason="no driver can be forged for this machine")


@pytest.mark.parametrize(
    ("around", "world"),
    [pytest.param(around, world, id=f"{name}-{around}") for name, around, world in scenarios()],
)
def test_the_cause_is_the_true_one(around: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transload.diagnose.probe._DRIVER", 2.0)  # one of the drivers hangs
    diagnosis = diagnose(world, around, tmp_path)
    told = [(found.code, found.title, found.evidence) for found in diagnosis.findings]
    assert named(diagnosis) in world.truth.split("|"), told
    assert diagnosis.machine.problems == {}


def test_the_matrix_is_what_it_says() -> None:
    assert sum(1 for _ in scenarios()) > 90
