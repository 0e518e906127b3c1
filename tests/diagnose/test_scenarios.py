"""The doctor names the right cause for each result of the driver on each kind of host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests import forks
from tests.diagnose.scenarios import scenarios_by_name
from tests.diagnose.windows_scenarios import WINDOWS_SCENARIOS
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


@pytest.mark.skipif(not LOADABLE, reason="the forge cannot build a driver for this system")
@pytest.mark.parametrize("name", SCENARIOS)
def test_doctor_names_the_cause_on_every_host(name: str, tmp_path: Path) -> None:
    process = forks.run("-c", PROGRAM, name, tmp_path, imports=("tests.diagnose.scenarios",))
    assert (process.returncode, process.stderr) == (0, "")
    assert json.loads(process.stdout) == []


WINDOWS = """
import json, sys
from pathlib import Path
from tests.diagnose.windows_scenarios import WINDOWS_SCENARIOS, wrong_windows_diagnosis
from transload.diagnose import probes
probes._DRIVER, probes._EXPERIMENTS = 2.0 if "hangs" in sys.argv[1] else 60.0, 60.0
names = [name for name in WINDOWS_SCENARIOS if ("hangs" in name) == bool(sys.argv[1])]
folder = Path(sys.argv[2])
print(json.dumps({name: wrong_windows_diagnosis(name, folder / str(at)) for at, name in enumerate(names)}))
"""


@pytest.mark.skipif(not LOADABLE, reason="the forge cannot build a driver for this system")
@pytest.mark.parametrize("which", ["", "hangs"])
def test_doctor_names_the_cause_on_windows(which: str, tmp_path: Path) -> None:
    process = forks.run("-c", WINDOWS, which, tmp_path, imports=("tests.diagnose.windows_scenarios",))
    assert (process.returncode, process.stderr) == (0, "")
    diagnosed = json.loads(process.stdout)
    assert [(name, wrong) for name, wrong in diagnosed.items() if wrong] == []
    assert len(diagnosed) == (1 if which else len(WINDOWS_SCENARIOS) - 1)


def test_there_are_more_than_90_scenarios() -> None:
    assert sum(map(len, SCENARIOS.values())) > 90
