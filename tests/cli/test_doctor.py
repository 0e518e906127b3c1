"""The command ``transload doctor``: its options, exit codes and streams. Machines are read from files, not examined."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.diagnose.machines import cuinit_fails, healthy, no_torch_run, with_facts, without_gpu
from tests.each import each
from tests.schema import validate

import transload
from transload.cli import doctor as command
from transload.cli.main import main
from transload.diagnose.report import judge_machine
from transload.machine import Library, Machine, Variables

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cli.conftest import Imported, Transload

    Saved = Callable[[Machine], str]

SCHEMA = Path(__file__).parent.parent.parent / "docs" / "doctor.schema.json"
STUB = Library("libcuda.so.1", "/usr/local/cuda/lib64/stubs/libcuda.so.1", via="LD_LIBRARY_PATH", kind="stub")
STUBBED = with_facts(
    cuinit_fails(healthy(), 34),
    driver__libraries__cuda=(STUB, *(healthy().driver.libraries.cuda or ())),
    driver__cuda__library=STUB.path,
    variables=Variables(
        {"LD_LIBRARY_PATH": "/home/alice/lib:/usr/local/cuda/lib64/stubs", "HOME": "/home/alice"},
        {"LD_LIBRARY_PATH": ("/home/alice/.bashrc:12",)},
    ),
)


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    def save(machine: Machine) -> str:
        path = tmp_path / "machine.json"
        path.write_text(json.dumps(judge_machine(machine).to_dict()), encoding="utf-8")
        return str(path)

    return save


def validated(text: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(text)
    validate(document, SCHEMA)
    return document


# -- verdicts and exit codes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "status", "expected"),
    [
        (healthy(), "ok", "CUDA works: torch 2.13.0+cu130 computed on NVIDIA H200"),
        (without_gpu(), "no-gpu", "No GPU in this machine; torch 2.13.0+cpu works on the CPU. Nothing to repair."),
        (STUBBED, "broken", "CUDA does not work: "),
        (cuinit_fails(healthy(), 999), "broken", "CUDA does not work: "),
    ],
)
def test_exit_code_follows_the_verdict(
    machine: Machine, status: str, expected: str, saved: Saved, capsys: pytest.CaptureFixture[str]
) -> None:
    path, code = saved(machine), int(status == "broken")
    assert main(["doctor", "--from", path]) == code
    output = capsys.readouterr()
    assert output.out.startswith(expected)
    assert not output.err
    assert main(["doctor", "--from", path, "--json"]) == code
    document = validated(capsys.readouterr().out)
    assert document["status"] == status
    assert (document["cause"] is None) == (code == 0)


def test_cause_is_shown_with_code_fix_and_page(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--from", saved(STUBBED)])
    text = capsys.readouterr().out
    assert "[U04]" in text.splitlines()[0]
    assert "\n  $ export LD_LIBRARY_PATH=$HOME/lib\n" in text
    main(["doctor", "--from", saved(STUBBED), "--json"])
    cause = validated(capsys.readouterr().out)["cause"]
    assert (cause["code"], cause["doc"]) == ("U04", "docs/doctor/U04.md")


@pytest.mark.parametrize(
    ("machine", "code"),
    [(healthy(), 0), (no_torch_run(healthy()), 0), (without_gpu(), 1), (STUBBED, 1)],
)
def test_require_cuda_fails_unless_cuda_is_usable(
    machine: Machine, code: int, saved: Saved, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--from", saved(machine), "--require", "cuda", "--json"]) == code
    output = capsys.readouterr()
    assert validated(output.out)["cuda_usable"] == (code == 0)
    assert output.err == ("transload: CUDA is required but not usable here\n" if code else "")


# -- reports of other machines ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", [healthy(), without_gpu(), STUBBED, cuinit_fails(healthy(), 803)])
def test_report_read_from_json_gives_the_same_json(
    machine: Machine, saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["doctor", "--from", saved(machine), "--json"])
    first = capsys.readouterr().out
    again = tmp_path / "again.json"
    again.write_text(first, encoding="utf-8")
    main(["doctor", "--from", str(again), "--json"])
    assert json.loads(capsys.readouterr().out) == json.loads(first)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_report_is_read_in_the_encodings_that_shells_write(
    encoding: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(judge_machine(without_gpu()).to_dict()), encoding=encoding)
    assert main(["doctor", "--from", str(path)]) == 0
    assert capsys.readouterr().out.startswith("No GPU in this machine")


def test_report_is_read_from_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = json.dumps(judge_machine(without_gpu()).to_dict()).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert main(["doctor", "--from", "-"]) == 0
    assert capsys.readouterr().out.startswith("No GPU in this machine")


def test_unknown_fields_of_a_newer_release_are_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = judge_machine(without_gpu()).to_dict()
    document["mood"] = document["machine"]["mood"] = "good"
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    assert main(["doctor", "--from", str(path), "--json"]) == 0
    assert validated(capsys.readouterr().out)["status"] == "no-gpu"


@each(
    ("content", "expected"),
    [
        (b"", "it is not JSON"),
        (b"\xff\xff\x00", "it is not JSON"),
        (b"\xff\xfe\x00", "it is not JSON"),
        (b"<html>", "it is not JSON"),
        (b"[]", "it is not a report of transload doctor"),
        (b'{"schema": 2, "machine": {}}', "its schema is 2"),
        (b'{"schema": 1, "machine": {"kernel": 3}}', "machine.kernel cannot be 3"),
    ],
)
def test_file_that_is_not_a_report_is_rejected(
    content: bytes, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(content)
    assert main(["doctor", "--from", str(path)]) == 2
    output = capsys.readouterr()
    assert not output.out
    assert expected in output.err
    assert output.err.startswith(f"transload: {path}: ")


@pytest.mark.parametrize("path", ["no-such-file.json", ".", "a\0b"])
def test_unreadable_file_is_an_error(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--from", path]) == 2
    output = capsys.readouterr()
    assert not output.out
    assert output.err.startswith("transload: ")
    assert "bug" not in output.err


def test_control_characters_in_a_report_are_escaped(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = with_facts(STUBBED, python__prefix="/x\x1b[2J\n", kernel__version="\u202e")
    main(["doctor", "--from", saved(hostile), "--verbose"])
    assert all(char.isprintable() or char == "\n" for char in capsys.readouterr().out)


# -- redaction --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [[], ["--verbose"], ["--json"]])
def test_names_are_redacted_unless_no_redact(
    flags: list[str], saved: Saved, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(STUBBED)
    main(["doctor", "--from", path, *flags])
    assert "alice" not in capsys.readouterr().out
    main(["doctor", "--from", path, *flags, "--no-redact"])
    assert "/home/alice" in capsys.readouterr().out


def test_commands_are_exact_in_text_and_redacted_in_json(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    values = {"HOME": "/home/alice", "LD_LIBRARY_PATH": "/usr/local/cuda/lib64/stubs:/gpfs/alice/mpi/lib"}
    path = saved(with_facts(STUBBED, variables__values=values))
    main(["doctor", "--from", path])
    assert "$ export LD_LIBRARY_PATH=/gpfs/alice/mpi/lib\n" in capsys.readouterr().out
    main(["doctor", "--from", path, "--json"])
    assert "/gpfs/user/mpi/lib" in (out := capsys.readouterr().out)
    assert "alice" not in out


# -- options ----------------------------------------------------------------------------------------------------------


def test_verbose_adds_the_facts(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--from", saved(healthy())])
    short = capsys.readouterr().out
    main(["doctor", "--from", saved(healthy()), "--verbose"])
    long = capsys.readouterr().out
    assert long.startswith(short)
    assert re.search(r"\n    gpus\[0\] +address 0000:17:00.0; model NVIDIA H200;", long)


@pytest.mark.parametrize("code", ["U04", "u04", " u04 "])
def test_explain_prints_the_page(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--explain", code]) == 0
    text = capsys.readouterr().out
    assert text.startswith("U04  ")
    assert "\nFix\n" in text


@each(
    ("code", "suggestion"),
    [
        ("U4", "U04"),
        ("u44", "U04"),
        ("K", "K01"),
        ("stub", "S01"),
        ("ZZ9", "README"),
        ("", "README"),
        ("\x1b", "README"),
    ],
)
def test_an_unknown_code_suggests_similar_ones(code: str, suggestion: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--explain", code]) == 2
    output = capsys.readouterr()
    assert not output.out
    assert "there is no cause" in output.err
    assert suggestion in output.err
    assert "\x1b" not in output.err


@each(
    "arguments",
    [
        ["--explain"],
        ["--timeout", "0"],
        ["--timeout", "-1"],
        ["--timeout", "nan"],
        ["--timeout", "inf"],
        ["--timeout", "soon"],
        ["--require", "rocm"],
        ["--frobnicate"],
        ["extra"],
        ["--from"],
    ],
)
def test_bad_usage_shows_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 2
    output = capsys.readouterr()
    assert not output.out
    assert output.err.startswith("usage: transload doctor")


@each(
    "arguments",
    [
        ["--from", "x", "--python", "y"],
        ["--from", "x", "--no-torch"],
        ["--from", "x", "--timeout", "3"],
        ["--explain", "U04", "--json"],
        ["--explain", "U04", "--from", "x"],
        ["--no-torch", "--timeout", "3"],
        ["--json", "--verbose"],
        ["--python", "/no/such/python"],
        ["--python", ""],
    ],
)
def test_contradictory_or_invalid_options_are_rejected(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *arguments]) == 2
    output = capsys.readouterr()
    assert "--json" in arguments or not output.out
    assert output.err.startswith("transload: ")
    assert "bug" not in output.err


class Recorder:
    """Stands in for ``transload.doctor`` and records its arguments."""

    def __init__(self) -> None:
        self.steps: tuple[str, ...] = ()
        self.arguments: tuple[Any, ...] = ()

    def __call__(
        self, python: str = "", *, torch: bool = True, timeout: float = 0.0, progress: Callable[[str], object] = print
    ) -> transload.Diagnosis:
        self.arguments = (python, torch, timeout)
        for step in ("running torch", *self.steps):
            progress(step)
        return judge_machine(without_gpu())


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    stand_in = Recorder()
    monkeypatch.setattr(transload, "doctor", stand_in)  # the package caches the attribute
    monkeypatch.setattr("transload.diagnose.doctor", stand_in)
    return stand_in


def test_options_are_passed_to_doctor(recorder: Recorder, tmp_path: Path) -> None:
    assert main(["doctor"]) == 0
    assert recorder.arguments == ("", True, 0.0)
    main(["doctor", "--timeout", "2.5"])
    assert recorder.arguments == ("", True, 2.5)
    main(["doctor", "--no-torch"])
    assert recorder.arguments == ("", False, 0.0)
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    for value in (str(python), str(tmp_path / "env")):
        main(["doctor", "--python", value])
        assert recorder.arguments == (str(python), True, 0.0)


def test_python_option_is_looked_up_on_path(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python9").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    main(["doctor", "--python", "python9"])
    assert recorder.arguments[0] == str(tmp_path / "python9")


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_erased_on_a_terminal_and_one_line_elsewhere(
    terminal: bool, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stream(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return terminal

    stream = Stream()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", "80")
    recorder.steps = ("running torch: import, at /home/mary/torch.py:2", f"running torch: import, at /{'x' * 99}.py:2")
    assert main(["doctor"]) == 0
    assert stream.getvalue() == ""  # it finished before the delay
    monkeypatch.setattr(command, "_PATIENCE", 0.0)
    monkeypatch.setattr(command, "_LONG_PATIENCE", 0.0)
    assert main(["doctor"]) == 0
    if not terminal:
        assert stream.getvalue() == "transload: still running torch\n"
        return
    first, second, third, blank, end = stream.getvalue().split("\r")[1:]
    assert (first, second) == ("running torch …", "running torch: import, at ~user2/torch.py:2 …")
    assert (third, len(third)) == (f"…{'x' * 71}.py:2 …", 79)
    assert (blank.strip(), end) == ("", "")
    assert len(blank) >= len(third)


# -- this machine, streams and imports --------------------------------------------------------------------------------


def test_doctor_examines_this_machine(program: Transload) -> None:
    result = program("doctor", "--no-torch", "--json")
    assert result.returncode in (0, 1), result.stderr
    document = validated(result.stdout)
    assert document["machine"]["torch_run"]["answer"]["state"] == "unasked"
    assert document["machine"]["python"]["version"] == ".".join(map(str, sys.version_info[:3]))
    assert (result.returncode == 0) == (document["status"] in ("ok", "no-gpu"))


@pytest.mark.parametrize("flags", [[], ["--verbose"], ["--json"]])
def test_ascii_stream_gets_ascii(program: Transload, saved: Saved, flags: list[str]) -> None:
    path = saved(STUBBED)
    plain = program("doctor", "--from", path, *flags, PYTHONUTF8="0", PYTHONIOENCODING="ascii", LC_ALL="C")
    assert (plain.returncode, plain.stderr) == (1, "")
    assert plain.stdout.isascii()


def test_doctor_imports_neither_torch_nor_checkpoint_readers(imported: Imported, saved: Saved) -> None:
    modules = imported("doctor", "--from", saved(healthy()))
    assert "transload.diagnose.report" in modules
    unwanted = {
        "torch",
        "numpy",
        "asyncio",
        "importlib.metadata",
        "logging",
        "urllib.request",
        "transload.formats",
    }
    assert not modules & unwanted


def test_diagnosis_has_public_types_and_prints_its_report(recorder: Recorder) -> None:
    diagnosis = recorder()
    assert isinstance(diagnosis, transload.Diagnosis)
    assert isinstance(diagnosis.machine, transload.Machine)
    assert diagnosis.to_dict()["machine"] == without_gpu().to_dict()
    assert str(diagnosis).startswith("No GPU in this machine")
