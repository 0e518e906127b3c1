from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Generator

import pytest

from transload.diagnose.host import Host


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the timeout for busy machines: forged nodes and drivers answer at once, but a forked child may be slow."""
    monkeypatch.setattr("transload.diagnose.probes.system.PATIENCE", 20.0)


if sys.platform == "win32":
    _CALL = re.compile(r"module 'os' has no attribute '(fork|statvfs|O_NONBLOCK)'")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call() -> Generator[None, None, None]:
        """Skip a test that forges a Linux host, and there examines device nodes or mounts with a call of Linux.

        On Windows the doctor examines no Linux host: it reads the report of one.
        """
        try:
            yield
        except AttributeError as error:
            frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
            hosts = [value for frame in frames for value in frame.f_locals.values() if isinstance(value, Host)]
            absent = _CALL.fullmatch(str(error))
            if absent and hosts and not any(host.windows for host in hosts):
                pytest.skip(f"a forged Linux host needs os.{absent[1]}")
            raise
