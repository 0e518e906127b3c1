"""Each answer of the driver on each kind of host: the cause that is named is the true one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests import forks
from tests.diagnose.scenarios import worlds
from tests.elf_forge import LOADABLE

WORLDS = worlds()
# Each world asks its driver in some five forks: from a process that has imported torch these take most of the time.
PROGRAM = """
import json, sys
from pathlib import Path
from tests.diagnose.scenarios import mistakes
from transload.diagnose import probes
if "hangs" in sys.argv[1]:
    probes._DRIVER = 2.0
print(json.dumps(mistakes(sys.argv[1], Path(sys.argv[2]))))
"""


@pytest.mark.skipif(not LOADABLE, reason="the forge cannot build a driver for this architecture")
@pytest.mark.parametrize("name", WORLDS)
def test_the_cause_is_the_true_one(name: str, tmp_path: Path) -> None:
    done = forks.run("-c", PROGRAM, name, tmp_path, imports=("tests.diagnose.scenarios",))
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == []


def test_the_matrix_is_what_it_says() -> None:
    assert sum(map(len, WORLDS.values())) > 90
