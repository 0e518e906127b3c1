"""The line on a terminal: there while something is read, gone afterwards."""

from __future__ import annotations

import io
import sys

import pytest
from tests import forge

from transload.io import pool as loading
from transload.io.pool import Progress
from transload.verifying import verify


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_EVERY", -1.0)


@pytest.mark.usefixtures("at_once")
def test_it_is_written_over_and_taken_away() -> None:
    stream = io.StringIO()
    line = Progress(stream, "verifying", passing=True)
    line(1_000_000_000, 2_000_000_000)
    line(2_000_000_100, 2_000_000_000)
    assert stream.getvalue().count("\rverifying ") == 2
    assert "\n" not in stream.getvalue()
    line.end()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_what_is_done_at_once_shows_nothing() -> None:
    stream = io.StringIO()
    line = Progress(stream, "verifying", passing=True)
    line(10, 10)
    line.end()
    assert stream.getvalue() == ""


def test_a_closed_stderr_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for stderr in (closed, None):
        monkeypatch.setattr(sys, "stderr", stderr)
        assert verify(forge.checkpoint(), progress=True).ok


def test_nobody_looks() -> None:
    line = Progress(None, "verifying", passing=True)
    line(1, 2)
    line.end()
