"""The progress line on a terminal: shown while reading, removed afterwards."""

from __future__ import annotations

import io
import sys

import pytest
from tests import forge

from transload.io import pool as io_pool
from transload.io.pool import ProgressLine
from transload.verifying import verify


@pytest.fixture
def without_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_pool, "_EVERY", -1.0)


@pytest.mark.usefixtures("without_delay")
def test_progress_line_is_overwritten_and_removed() -> None:
    stream = io.StringIO()
    line = ProgressLine(stream, "verifying", passing=True)
    line(1_000_000_000, 2_000_000_000)
    line(2_000_000_100, 2_000_000_000)
    assert stream.getvalue().count("\rverifying ") == 2
    assert "\n" not in stream.getvalue()
    line.end()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_quick_work_shows_no_progress_line() -> None:
    stream = io.StringIO()
    line = ProgressLine(stream, "verifying", passing=True)
    line(10, 10)
    line.end()
    assert stream.getvalue() == ""


def test_verify_works_with_a_closed_or_missing_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for stderr in (closed, None):
        monkeypatch.setattr(sys, "stderr", stderr)
        assert verify(forge.checkpoint(), progress=True).ok


def test_progress_without_a_stream_does_nothing() -> None:
    line = ProgressLine(None, "verifying", passing=True)
    line(1, 2)
    line.end()
