from __future__ import annotations

import errno
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest
from jsonschema import ValidationError
from tests.each import each
from tests.schema import validate

import transload
from transload import findings, verifying
from transload.cli import commands
from transload.cli.main import COMMANDS, main
from transload.cli.output import print_error
from transload.diagnose.probes.python import own_facts
from transload.errors import TransloadError
from transload.render.words import printable

if TYPE_CHECKING:
    from tests.cli.conftest import Transload


DOCS = Path(__file__).parent.parent.parent / "docs"
Command = Callable[[BaseException], None]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    """Adds the command ``try``, which raises the given error."""

    def raising(error: BaseException) -> None:
        def run(_: object) -> NoReturn:
            raise error

        monkeypatch.setattr(commands, "run_try", run, raising=False)

    monkeypatch.setitem(COMMANDS, "try", "try something")
    return raising


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_bare_command_and_help_show_every_command_and_an_example_of_each(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    output = capsys.readouterr()
    assert output.out.startswith("usage: transload")
    assert all(f"  {name}  " in output.out for name in COMMANDS)
    assert output.out.count("\n  transload ") == len(COMMANDS)
    assert max(map(len, output.out.splitlines())) <= 80
    assert not output.err


@each("name", COMMANDS)
def test_every_command_has_help_with_examples(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for arguments in ([name, "--help"], ["help", name]):
        assert main(arguments) == 0
        output = capsys.readouterr().out
        assert output.startswith(f"usage: transload {name}")
        assert "examples:" in output
        assert max(map(len, output.splitlines())) <= 80
        assert output.isascii()


@each("arguments", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_is_folded_at_words_on_a_narrow_terminal(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(arguments) == 0
    wide = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(arguments) == 0
    narrow = capsys.readouterr().out
    assert narrow.split() == wide.split()
    examples = wide.partition("examples:\n")[2].partition("\n\n")[0].splitlines()
    commands = [line.strip().partition("  ")[0] for line in examples]
    folded = [line for line in narrow.splitlines() if line.strip() not in commands]
    assert all(len(line) <= 40 or " " not in line.strip() for line in folded)


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"transload {transload.__version__}\n"


@each("arguments", [["inspct"], ["--frobnicate"], ["inspect"], ["inspect", "--frob", "x"], ["\x1b[2J"]])
def test_bad_usage_is_reported_on_stderr_with_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert not output.out
    assert output.err.startswith("usage: transload")
    assert "\x1b" not in output.err


def test_misspelled_command_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspct"])
    assert "did you mean 'transload inspect'?" in capsys.readouterr().err


def test_misspelled_option_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["inspect", "--tesnors", "x.pt"], ["inspect", "x.pt", "--tensor=1"]):
        assert main(arguments) == 2
        assert capsys.readouterr().err.endswith("; did you mean --tensors?\n")
    assert main(["inspect", "--frob", "x.pt"]) == 2
    assert capsys.readouterr().err.endswith("unrecognized arguments: --frob\n")


def test_file_whose_name_looks_like_an_option_is_named_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-x.pt").touch()
    assert main(["inspect", "-x.pt"]) == 2
    assert capsys.readouterr().err.endswith("; to name the file: ./-x.pt\n")


@each("arguments", [["check", "-"], ["verify", "-"], ["convert", "-", "x.pt"], ["rescue", "-", "x.pt"]])
def test_dash_is_said_to_be_a_file(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "only transload inspect reads a checkpoint from standard input" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="needs bash")
@each("name", ["a\nb.pt", "-\t.pt", "it's\x1b.pt", "\\\n", "\udcff é.pt", "é b.pt"])
def test_quoted_name_is_the_same_name_in_bash(name: str) -> None:
    command = f"printf %s {printable(findings.quoted(name), None)}"
    echoed = subprocess.run(["/usr/bin/env", "bash", "-c", command], capture_output=True, check=True).stdout
    assert os.fsdecode(echoed).removeprefix("./") == name


def test_error_is_folded_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    error = TransloadError("seven words that do not fit here", where="model.pt", fix="$ a command that\nA sentence")
    print_error(error)
    head = "transload: model.pt: seven words that do not fit here"
    assert capsys.readouterr().err == f"{head}\n    $ a command that\n  A sentence\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    print_error(error)
    assert capsys.readouterr().err == f"{head[:40]}\n{head[41:]}\n    $ a command that\n  A sentence\n"


def test_function_used_as_a_command_is_named_as_a_function(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["load", "model.pt"]) == 2
    assert "in Python it is transload.load(…), and 'transload check FILE'" in capsys.readouterr().err


def test_transload_error_is_a_message_without_traceback(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    command(TransloadError("it is\x1b[2J broken", where="a/b.pt", fix="Repair it."))
    assert main(["try"]) == 2
    assert capsys.readouterr().err == "transload: a/b.pt: it is\\x1b[2J broken\n  Repair it.\n"


def test_unexpected_exception_is_reported_as_a_bug(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command(KeyError("x\n"))
    monkeypatch.delenv("TRANSLOAD_DEBUG", raising=False)
    assert main(["try"]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("transload: this is a bug in transload: KeyError: ")
    assert "Traceback" not in stderr
    monkeypatch.setenv("TRANSLOAD_DEBUG", "1")
    assert main(["try"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_no_memory_is_no_bug(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    during_import = AttributeError("half of a module")
    during_import.__context__ = MemoryError()
    unmapped = ImportError("/lib/libffi.so.8: failed to map segment from shared object")
    no_room = MemoryError("Unable to allocate 2.00 MiB for an array")
    for error in (MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory"), during_import, unmapped, no_room):
        command(error)
        assert main(["try"]) == 2
        line = capsys.readouterr().err
        assert line.startswith("transload: there is not enough memory")
        assert line.count("\n") == 1
    for error in (
        OSError(errno.ENOSPC, "No space left on device"),
        ImportError(f"{unmapped}: Operation not permitted"),
    ):
        command(error)
        assert main(["try"]) == 2
        assert "memory" not in capsys.readouterr().err

    def fail(*_: object, **__: object) -> NoReturn:
        raise MemoryError

    monkeypatch.setattr(verifying, "verify", fail)
    monkeypatch.chdir(tmp_path)
    assert main(["verify", "a.pt", "--json"]) == 2
    output = capsys.readouterr()
    assert output.err == "transload: a.pt: there is not enough memory\n"
    assert json.loads(output.out)["error"]["what"] == "there is not enough memory"


def test_keyboard_interrupt_exits_quietly_with_130(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    command(KeyboardInterrupt())
    assert main(["try"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_full_disk_is_reported(program: Transload) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("/dev/full is Linux-only")
    with open("/dev/full", "w") as full:
        result = program("--help", stdout=full.fileno())
    assert result.returncode == 2
    assert result.stderr == "transload: cannot write the result: No space left on device\n"


def test_public_names_resolve_and_nothing_else_is_listed() -> None:
    importlib.import_module("transload.checking")  # a room, and much of what it imports
    assert {"load", "TransloadError", "KeysWarning", "__version__"} <= set(dir(transload))
    assert not {"checking", "io", "errors", "TYPE_CHECKING"} & set(dir(transload))
    namespace: dict[str, object] = {}
    exec("from transload import *", namespace)  # noqa: S102 - the statement is not allowed in a function
    for name in dir(transload):
        assert getattr(transload, name) is getattr(transload, name)
        assert namespace[name] is getattr(transload, name)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        transload.nonsense  # type: ignore[attr-defined]  # noqa: B018


@each(
    "arguments",
    [
        ["check", "nope.pt"],
        ["convert", "nope.pt", "out.safetensors"],
        ["doctor", "--from", "nope.json"],
        ["doctor", "--explain", "U99"],
        ["explain", "nope.log"],
        ["inspect", "nope.pt"],
        ["rescue", "nope.pt", "out.pt"],
        ["retag", "nope.pt", "--to", "cpu"],
        ["diff", "nope.pt", "nope.pt"],
        ["verify", "nope.pt"],
        ["verify", "nope.pt", "--against", "nope.json"],
        ["check", "nope.pt", "--device", "banana"],
        ["convert", "nope.pt"],
        ["retag", "nope.pt"],
        ["rescue", "nope.pt"],
        ["verify"],
        ["inspect"],
        ["inspect", "--color", "pink", "nope.pt"],
        ["diff", "nope.pt"],
        ["convert", "nope.pt", "--frob"],
        ["doctor", "--timeout", "soon"],
    ],
    ids=" ".join,
)
def test_errors_are_json_with_the_json_option(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*arguments, "--json"]) == 2
    output = capsys.readouterr()
    document = json.loads(output.out)
    assert document["error"]["what"]
    schema = DOCS / f"{arguments[0]}.schema.json"
    validate(document, schema)
    with pytest.raises(ValidationError):
        validate({**document, "tensors": []}, schema)
    assert output.err.startswith(("transload: ", f"usage: transload {arguments[0]} "))
    assert f"transload: {document['error']['what']}" in output.err or document["error"]["where"]
    assert list(tmp_path.iterdir()) == []


def test_unknown_command_is_json_with_the_json_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspct", "x.pt", "--json"]) == 2
    assert "did you mean" in json.loads(capsys.readouterr().out)["error"]["what"]
    for command in ("completion", "run"):  # whose output is not JSON
        assert main([command, "--frob", "--json"]) == 2
        assert not capsys.readouterr().out


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot delete the current folder")
def test_deleted_current_folder_is_handled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    deleted = tmp_path / "gone"
    deleted.mkdir()
    monkeypatch.chdir(deleted)
    deleted.rmdir()
    assert main(["inspect", "model.pt"]) == 2
    assert capsys.readouterr().err.startswith("transload: model.pt: No such file or directory\n")
    monkeypatch.setattr(sys, "path", ["", *sys.path[1:]])  # as with -m
    assert own_facts()["path"]
