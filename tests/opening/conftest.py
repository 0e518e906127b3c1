from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from tests.opening.fake import FakeDriver

from transload.io import cuda_driver as driver
from transload.opening import engine

NBYTES = (40 << 20) + 12_345


@pytest.fixture(scope="session")
def blob() -> bytes:
    """Random bytes, a little more than ten cells."""
    return Random(5).randbytes(NBYTES)  # noqa: S311 - the same every time


@pytest.fixture(scope="session")
def blob_path(blob: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the bytes of ``blob``."""
    path = tmp_path_factory.mktemp("transfer") / "blob"
    path.write_bytes(blob)
    return path


@pytest.fixture
def set_cores(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Pretend to have this many CPU cores."""

    def pretend(count: int) -> None:
        monkeypatch.setattr("transload.io.limits.cores", lambda: count)

    return pretend


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """The fake driver. After the test it must have recorded no fault, and no copy may be in progress."""
    fake = FakeDriver(slow=0.0005)

    def fence(transfer: engine.Transfer, device: str) -> None:
        transfer.fences[device] = fake.fence(int(device.partition(":")[2]))

    monkeypatch.setattr(driver, "cuda_driver", lambda: fake)
    monkeypatch.setattr(engine.Transfer, "_fence", fence)
    monkeypatch.setattr(engine, "_idle", [])
    yield fake
    pending = fake.pending
    fake.close()
    assert fake.faults == []
    assert pending == 0
