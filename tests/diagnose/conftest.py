from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time enough for a busy machine: forged nodes and drivers answer at once, and a forked child may not."""
    monkeypatch.setattr("transload.diagnose.probes.system.PATIENCE", 20.0)
    monkeypatch.setattr("transload.diagnose.probes.system.DRIVER_PATIENCE", 20.0)
