from __future__ import annotations

import io
import re

import pytest

from transload.checkpoint import Checkpoint
from transload.render.checkpoint import report
from transload.render.lines import emit

SGR = re.compile(r"\x1b\[[0-9;]*m")


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")


def output(checkpoint: Checkpoint, stream: io.StringIO, colour: str = "auto") -> str:
    emit(report(checkpoint), stream, colour)
    return stream.getvalue()


def test_colours_do_not_change_the_text(training: Checkpoint, hostile: Checkpoint) -> None:
    for checkpoint in (training, hostile):
        coloured = output(checkpoint, Terminal())
        assert SGR.search(coloured)
        assert SGR.sub("", coloured) == output(checkpoint, Terminal(), "never")


def test_pipe_gets_no_escape_codes_unless_colour_is_always(training: Checkpoint) -> None:
    assert "\x1b" not in output(training, io.StringIO())
    assert "\x1b[33mneeds-trust\x1b[0m" in output(training, io.StringIO(), "always")


def test_terminal_gets_no_escape_codes_with_never_or_no_color(
    training: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "\x1b" not in output(training, Terminal(), "never")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in output(training, Terminal())


def test_only_colour_codes_reach_the_terminal(hostile: Checkpoint) -> None:
    text = SGR.sub("", output(hostile, Terminal()))
    assert all(char.isprintable() or char == "\n" for char in text)


def test_ascii_stream_gets_ascii(training: Checkpoint) -> None:
    stream = Terminal()
    stream.encoding = "ascii"
    text = output(training, stream, "never")
    assert text.isascii()
    assert "|- exp_avg" in text
    assert "layers.0 ... 1  x2" in text
