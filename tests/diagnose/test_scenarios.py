"""The doctor names the right cause for each result of the driver on each kind of host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests import forks
from tests.diagnose.scenarios import scenarios_by_name
from tests.elf_forge import LOADABLE

SCENARIOS = scenarios_by_name()
# Each scenario queries its driver in about five forks, which are slow from a process that has imported torch.
PROGRAM = """
import json, sys
from pathlib import Path
from tests.diagnose.scenarios import wrong_diagnoses
from transload.diagnose import probes
from transload.diagnose.probes import system
# Forged nodes and drivers answer at once, but on a busy machine the children are slow.
system.PATIENCE, probes._DRIVER, probes._EXPERIMENTS = 20.0, 2.0 if "hangs" in sys.argv[1] else 60.0, 60.0
print(json.dumps(wrong_diagnoses(sys.argv[1], Path(sys.argv[2]))))
"""


@pytest.mark.skipif(not LOADABLE, reason="the forge cannot build a driver for this architecture")
@pytest.mark.parametrize("name", SCENARIOS)
def test_doctor_names_the_cause_on_every_host(name: str, tmp_path: Path) -> None:
    process = forks.run("-c", PROGRAM, name, tmp_path, imports=("tests.diagnose.scenarios",))
    assert (process.returncode, process.stderr) == (0, "")
    assert json.loads(process.stdout) == []


def test_there_are_more_than_90_scenarios() -> None:
    assert sum(map(len, SCENARIOS.values())) > 90
