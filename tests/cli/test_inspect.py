from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from transload.checkpoint import Checkpoint, GlobalUse
from transload.cli.main import main
from transload.errors import CannotReadError
from transload.findings import Finding

if TYPE_CHECKING:
    from tests.cli.conftest import Transload

GOOD = Checkpoint("good.pt", "torch-zip", 100, safety="data-only")
DAMAGED = replace(
    GOOD, path="damaged.pt", integrity="damaged", findings=(Finding("truncated", "error", "it ends early"),)
)
TRUST = replace(
    GOOD, path="trust.pt", safety="needs-trust", globals=(GlobalUse("argparse", "Namespace", "harmless", "options"),)
)
FILES = {checkpoint.path: checkpoint for checkpoint in (GOOD, DAMAGED, TRUST)}


@pytest.fixture
def _pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading is tested elsewhere: here files contain what the test says."""

    def inspect(path: str, *, verify: bool = False) -> Checkpoint:
        if path == "bug.pt":
            raise ZeroDivisionError("oh")
        if path not in FILES:
            raise CannotReadError("No such file or directory", where=path, fix="Check the spelling.", errno=2)
        return replace(FILES[path], integrity="whole") if verify else FILES[path]

    monkeypatch.setattr("transload.judge.inspect", inspect)


@pytest.mark.usefixtures("_pretend")
@pytest.mark.parametrize("flags", [[], ["--json"], ["--tensors", "--globals", "--tree"]])
@pytest.mark.parametrize(
    ("paths", "code"),
    [
        (["good.pt"], 0),
        (["damaged.pt"], 1),
        (["trust.pt"], 1),
        (["none.pt"], 2),
        (["bug.pt"], 2),
        (["good.pt", "good.pt"], 0),
        (["good.pt", "trust.pt", "damaged.pt"], 1),
        (["none.pt", "damaged.pt", "good.pt"], 2),
    ],
)
def test_the_worst_file_makes_the_exit_code(paths: list[str], code: int, flags: list[str]) -> None:
    assert main(["inspect", *paths, *flags]) == code


@pytest.mark.usefixtures("_pretend")
def test_the_result_goes_to_stdout_and_the_rest_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspect", "none.pt"])
    shown = capsys.readouterr()
    assert shown == ("", "transload: none.pt: No such file or directory\n  Check the spelling.\n")
    main(["inspect", "good.pt"])
    shown = capsys.readouterr()
    assert shown.out.startswith("good.pt\n  format ")
    assert not shown.err


@pytest.mark.usefixtures("_pretend")
def test_a_file_that_cannot_be_read_does_not_hide_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "none.pt", "bug.pt", "damaged.pt", "good.pt"]) == 2
    shown = capsys.readouterr()
    assert "transload: none.pt: No such file" in shown.err
    assert "transload: bug.pt: this is a bug in transload: ZeroDivisionError: oh" in shown.err
    assert "damaged.pt" in shown.out
    assert "✗ it ends early  truncated" in shown.out
    assert "4 files, 1 with a problem, 2 not read" in shown.out


@pytest.mark.usefixtures("_pretend")
def test_json_of_one_is_an_object_and_of_several_an_array(capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspect", "good.pt", "--json"])
    assert json.loads(capsys.readouterr().out) == GOOD.to_dict()
    main(["inspect", "--json", "good.pt", "none.pt"])
    one, two = json.loads(capsys.readouterr().out)
    assert one == GOOD.to_dict()
    assert two["error"]["what"] == "No such file or directory"
    assert (two["schema"], two["path"], two["ok"]) == (1, "none.pt", False)


@pytest.mark.usefixtures("_pretend")
def test_verify_is_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspect", "good.pt", "--verify"])
    assert "whole: every byte is there" in capsys.readouterr().out


@pytest.mark.usefixtures("_pretend")
def test_lists_take_the_place_of_the_tree(capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspect", "trust.pt", "--globals", "--tensors", "--tree"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line and not line.startswith(" ")] == [
        "trust.pt",
        "globals  1",
        "tensors  0",
        "structure",
    ]


@pytest.mark.usefixtures("_pretend")
def test_colour_only_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspect", "good.pt"])
    assert "\x1b" not in capsys.readouterr().out
    main(["inspect", "good.pt", "--color=always"])
    assert "\x1b[32mdata-only\x1b[0m" in capsys.readouterr().out


# -- with real files, in a process of its own --------------------------------------------------------------------------


@pytest.fixture
def real(data: Path) -> str:
    return str(data / "h200" / "train_cuda0.ckpt")


def test_a_real_checkpoint(program: Transload, real: str) -> None:
    done = program("inspect", real)
    assert not done.stderr
    assert "cuda:0" in done.stdout
    assert "exp_avg" in done.stdout


@pytest.mark.parametrize("flags", [[], ["--tensors"], ["--globals"], ["--tree"], ["--json"]])
def test_streams_of_any_encoding(program: Transload, real: str, flags: list[str]) -> None:
    plain = program("inspect", real, *flags, PYTHONUTF8="0", PYTHONIOENCODING="ascii", LC_ALL="C")
    fancy = program("inspect", real, *flags)
    assert plain.returncode == fancy.returncode
    assert not plain.stderr
    assert plain.stdout.isascii()
    assert plain.stdout.count("\n") == fancy.stdout.count("\n")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_gets_colour(real: str) -> None:
    text = on_terminal(["inspect", real])
    assert "\x1b[" in text
    assert "cuda:0" in text
    assert "Traceback" not in text


def on_terminal(arguments: list[str]) -> str:
    """What the program writes when its stdout is a terminal."""
    import pty

    ours, theirs = pty.openpty()
    environ = {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TERM": "xterm",
        "COLUMNS": "80",
        "PYTHONUTF8": "1",
    }
    command = [sys.executable, "-m", "transload", *arguments]
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.STDOUT, env=environ) as process:
        os.close(theirs)
        out = b""
        try:
            while piece := os.read(ours, 65536):
                out += piece
        except OSError:  # how Linux says that the other end is closed
            pass
        finally:
            os.close(ours)
    assert process.returncode in (0, 1)
    return out.decode()


@pytest.mark.skipif(sys.platform == "win32", reason="closed pipes behave differently on Windows")
@pytest.mark.parametrize("flags", [["--tensors"], ["--json"]])
def test_a_closed_pipe_is_no_error(real: str, flags: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    environ = {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "transload", "inspect", real, *flags]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, env=environ, timeout=300, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(sys.platform == "win32", reason="file names on Windows are always text")
def test_a_file_name_that_is_no_text(program: Transload, tmp_path: Path) -> None:
    name = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\x1b[2J.pt")
    Path(name).write_bytes(b"<html>")
    done = program("inspect", name)
    assert done.returncode == 1
    assert "\\udcff\\x1b[2J.pt" in done.stdout
    document = json.loads(program("inspect", name, "--json").stdout)
    assert document["path"] == name


def test_standard_input_is_read_from_a_pipe_and_from_a_file(data: Path) -> None:
    path = data / "h200" / "state_dict_cuda1.pt"
    command = [sys.executable, "-m", "transload", "inspect", "--json", "-"]
    with path.open("rb") as file:
        redirected = subprocess.run(command, stdin=file, capture_output=True, check=True).stdout
    piped = subprocess.run(command, input=path.read_bytes(), capture_output=True, check=True).stdout
    named = subprocess.run([*command[:-1], path], capture_output=True, check=True).stdout
    assert piped == redirected
    assert json.loads(piped) == {**json.loads(named), "path": "<stdin>"}


def test_standard_input_may_be_closed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["inspect", "-"]) == 2
    assert capsys.readouterr().err == "transload: -: standard input is closed\n"
