from __future__ import annotations

import json
import os
import shutil
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
def _fake_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace ``inspect``, which is tested elsewhere: the files are those in ``FILES``."""

    def inspect(path: str, *, verify: bool = False, stats: bool = False) -> Checkpoint:
        assert not stats
        if path == "bug.pt":
            raise ZeroDivisionError("oh")
        if path not in FILES:
            raise CannotReadError("No such file or directory", where=path, fix="Check the spelling.", errno=2)
        return replace(FILES[path], integrity="whole") if verify else FILES[path]

    monkeypatch.setattr("transload.opening.inspect", inspect)


@pytest.mark.usefixtures("_fake_files")
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
def test_worst_file_sets_the_exit_code(paths: list[str], code: int, flags: list[str]) -> None:
    assert main(["inspect", *paths, *flags]) == code


@pytest.mark.usefixtures("_fake_files")
def test_results_go_to_stdout_and_errors_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspect", "none.pt"])
    output = capsys.readouterr()
    assert output == ("", "transload: none.pt: No such file or directory\n  Check the spelling.\n")
    main(["inspect", "good.pt"])
    output = capsys.readouterr()
    assert output.out.startswith("good.pt\n  format ")
    assert not output.err


@pytest.mark.usefixtures("_fake_files")
def test_pattern_that_no_shell_expands_is_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in FILES:
        (tmp_path / name).touch()
    assert main(["inspect", "*d.pt", "none*.pt"]) == 2
    output = capsys.readouterr()
    assert [line.split()[0] for line in output.out.splitlines()[1:3]] == ["damaged.pt", "good.pt"]
    assert "3 files: 1 fine, 1 with a problem, 1 could not be read" in output.out
    assert output.err.startswith("transload: none*.pt: No such file")


@pytest.mark.usefixtures("_fake_files")
def test_unreadable_file_does_not_hide_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "none.pt", "bug.pt", "damaged.pt", "good.pt"]) == 2
    output = capsys.readouterr()
    assert "transload: none.pt: No such file" in output.err
    assert "transload: bug.pt: this is a bug in transload: ZeroDivisionError: oh" in output.err
    assert "damaged.pt" in output.out
    assert "✗ it ends early  [truncated]" in output.out
    assert "4 files: 1 fine, 1 with a problem, 2 could not be read" in output.out


@pytest.mark.usefixtures("_fake_files")
def test_json_is_an_object_for_one_file_and_an_array_for_several(capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspect", "good.pt", "--json"])
    assert json.loads(capsys.readouterr().out) == GOOD.to_dict()
    main(["inspect", "--json", "good.pt", "none.pt"])
    one, two = json.loads(capsys.readouterr().out)
    assert one == GOOD.to_dict()
    assert two["error"]["what"] == "No such file or directory"
    assert (two["schema"], two["path"], two["ok"]) == (1, "none.pt", False)


@pytest.mark.usefixtures("_fake_files")
def test_verify_option_is_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspect", "good.pt", "--verify"])
    assert "whole: every byte is there" in capsys.readouterr().out


@pytest.mark.usefixtures("_fake_files")
def test_lists_replace_the_tree_of_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspect", "trust.pt", "--globals", "--tensors", "--tree"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line and not line.startswith(" ")] == [
        "trust.pt",
        "globals  1",
        "tensors  0",
        "structure",
    ]


@pytest.mark.usefixtures("_fake_files")
def test_colour_only_with_color_always(capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspect", "good.pt"])
    assert "\x1b" not in capsys.readouterr().out
    main(["inspect", "good.pt", "--color=always"])
    assert "\x1b[32mdata-only\x1b[0m" in capsys.readouterr().out


# -- real files, in a separate process ---------------------------------------------------------------------------------


@pytest.fixture
def checkpoint_path(data: Path) -> str:
    return str(data / "h200" / "train_cuda0.ckpt")


def test_a_real_checkpoint(program: Transload, checkpoint_path: str) -> None:
    result = program("inspect", checkpoint_path)
    assert not result.stderr
    assert "cuda:0" in result.stdout
    assert "exp_avg" in result.stdout


@pytest.mark.parametrize("flags", [[], ["--tensors"], ["--globals"], ["--tree"], ["--json"]])
def test_ascii_stream_gets_ascii(program: Transload, checkpoint_path: str, flags: list[str]) -> None:
    ascii_result = program("inspect", checkpoint_path, *flags, PYTHONUTF8="0", PYTHONIOENCODING="ascii", LC_ALL="C")
    utf8_result = program("inspect", checkpoint_path, *flags)
    assert ascii_result.returncode == utf8_result.returncode
    assert not ascii_result.stderr
    assert ascii_result.stdout.isascii()
    assert ascii_result.stdout.count("\n") == utf8_result.stdout.count("\n")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_gets_colour(checkpoint_path: str) -> None:
    text = on_terminal(["inspect", checkpoint_path])
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
def test_closed_pipe_exits_quietly_with_141(checkpoint_path: str, flags: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    environ = {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "transload", "inspect", checkpoint_path, *flags]
    result = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, env=environ, timeout=300, check=False)
    os.close(writing)
    assert (result.returncode, result.stderr) == (141, b"")


def test_indices_of_a_sparse_tensor_are_not_counted_as_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"s": torch.eye(4).to_sparse()}, tmp_path / "a.pt")
    assert main(["inspect", str(tmp_path / "a.pt")]) == 0
    assert "int64 64 B · float32 1 tensor, 16 B" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform == "win32", reason="file names on Windows are always text")
def test_undecodable_file_name_is_escaped(program: Transload, tmp_path: Path) -> None:
    name = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\x1b[2J.pt")
    Path(name).write_bytes(b"<html>")
    result = program("inspect", name)
    assert result.returncode == 1
    shown = result.stdout.splitlines()[0]
    assert shown.endswith("/\\xff\\x1b[2J.pt'")
    assert json.loads(program("inspect", name, "--json").stdout)["path"].endswith("/\\xff\x1b[2J.pt")
    if bash := shutil.which("bash"):  # which reads the name that is shown
        command = [bash, "-c", f"cat {shown}"]
        assert subprocess.run(command, capture_output=True, check=True).stdout == b"<html>"
        name = f"{name}/none"
        error = program("inspect", name).stderr.splitlines()[0]
        assert error.startswith("transload: $'/")


def test_standard_input_is_read_from_a_pipe_and_from_a_file(data: Path) -> None:
    path = data / "h200" / "state_dict_cuda1.pt"
    command = [sys.executable, "-m", "transload", "inspect", "--json", "-"]
    with path.open("rb") as file:
        redirected = subprocess.run(command, stdin=file, capture_output=True, check=True).stdout
    piped = subprocess.run(command, input=path.read_bytes(), capture_output=True, check=True).stdout
    named = subprocess.run([*command[:-1], path], capture_output=True, check=True).stdout
    assert piped == redirected
    assert json.loads(piped) == {**json.loads(named), "path": "<stdin>"}


@pytest.mark.skipif(os.name == "nt" or not os.path.exists("/dev/fd"), reason="no /dev/fd")
def test_process_substitution_is_read_like_standard_input(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = data / "h200" / "state_dict_cuda1.pt"
    read, write = os.pipe()
    with open(read, "rb"), open(write, "wb") as file:
        file.write(path.read_bytes())  # smaller than a pipe
        file.close()
        assert main(["inspect", f"/dev/fd/{read}"]) == 0
        assert capsys.readouterr().out.startswith("<pipe>\n  format      torch.save zip archive\n")
        assert main(["inspect", "/dev/fd/987654"]) == 2
    assert "No such file" in capsys.readouterr().err


def test_link_to_a_missing_file_is_an_error_that_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.pt").symlink_to("blobs/0123")
    assert main(["inspect", str(tmp_path / "a.pt")]) == 2
    assert "a link to blobs/0123, which does not exist" in capsys.readouterr().err


def test_closed_standard_input_is_an_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["inspect", "-"]) == 2
    assert capsys.readouterr().err == "transload: -: standard input is closed\n"


@pytest.mark.usefixtures("_fake_files")
def test_html_writes_a_report_about_the_files_that_could_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.html"
    assert main(["inspect", "good.pt", "--html", str(path)]) == 0
    assert "written: " in capsys.readouterr().out
    assert "good.pt" in path.read_text(encoding="utf-8")
    assert main(["inspect", "--html", str(path), "--force", "good.pt", "trust.pt", "none.pt"]) == 2
    assert "1 file of 3 could not be read" in path.read_text(encoding="utf-8")
    capsys.readouterr()
    assert main(["inspect", "damaged.pt", "--html", str(path), "--force", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["integrity"] == "damaged"
    assert "it ends early" in path.read_text(encoding="utf-8")
    assert main(["inspect", "none.pt", "--html", str(tmp_path / "none.html")]) == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.html"]


@pytest.mark.usefixtures("_fake_files")
def test_html_replaces_nothing_unasked_and_only_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.html"
    assert main(["inspect", "good.pt", "--html", str(path)]) == 0
    before = path.read_bytes()
    assert main(["inspect", "damaged.pt", "--html", str(path)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert path.read_bytes() == before
    model = tmp_path / "model.pt"
    for content in (b"", b"PK\x03\x04", b"<!doctype html>\n<html>my page</html>"):
        model.write_bytes(content)
        assert main(["inspect", "good.pt", "--html", str(model), "--force"]) == 2
        assert "only reports" in capsys.readouterr().err
        assert model.read_bytes() == content
    for refused in (str(tmp_path), str(tmp_path / "none" / "out.html"), "", "-"):
        assert main(["inspect", "good.pt", "--force", "--html", refused]) == 2
