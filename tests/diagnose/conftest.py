from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the timeout for busy machines: forged nodes and drivers answer at once, but a forked child may be slow."""
    monkeypatch.setattr("transload.diagnose.probes.system.PATIENCE", 20.0)
