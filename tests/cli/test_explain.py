from __future__ import annotations

import gzip
import io
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from tests import forge
from tests.each import for_each
from tests.schema import validate

from transload.cli.main import main
from transload.judge.problems import rules

if TYPE_CHECKING:
    from tests.cli.conftest import Imported, Transload

SCHEMA = Path(__file__).parent.parent.parent / "docs" / "explain.schema.json"
KNOWN = "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory\n"
UNKNOWN = "ZeroDivisionError: division by zero\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "train.log"
    path.write_text(KNOWN)
    return path


def feed(monkeypatch: pytest.MonkeyPatch, data: bytes, *, terminal: bool = False) -> None:
    stream = SimpleNamespace(buffer=io.BytesIO(data), isatty=lambda: terminal)
    monkeypatch.setattr(sys, "stdin", stream)


def test_a_file_is_explained(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(log), "--no-checks"]) == 0
    output = capsys.readouterr()
    assert output.out.startswith("✗ The file is cut off, or it is not an archive")
    assert "archive-cut-off" in output.out
    assert "line 1: RuntimeError: PytorchStreamReader" in output.out
    assert not output.err


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_stdin_is_explained(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    feed(monkeypatch, KNOWN.encode())
    assert main(["explain", *arguments]) == 0
    output = capsys.readouterr()
    assert "archive-cut-off" in output.out
    assert not output.err


def test_unknown_text_exits_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    feed(monkeypatch, UNKNOWN.encode())
    assert main(["explain"]) == 1
    assert " ".join(capsys.readouterr().out.split()) == (
        "? not known line 1 ZeroDivisionError: division by zero "
        "→ If it is about a file: transload check FILE. If it is about the GPU: transload doctor. "
        "→ To report it, include all of the text, from its first line on; transload doctor --json, which has the "
        "versions and no names; and, if it is about a file, transload inspect FILE --json. If the text is private, "
        'transload explain --json has it without paths and numbers, as "normalised".'
    )


@pytest.mark.parametrize("data", [b"", b" \n\t\n"])
def test_empty_text_is_a_usage_error(
    data: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    feed(monkeypatch, data)
    assert main(["explain"]) == 2
    assert "there is no text to explain" in capsys.readouterr().err


def test_closed_stdin_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["explain"]) == 2


def test_terminal_shows_a_prompt_to_paste(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    feed(monkeypatch, KNOWN.encode(), terminal=True)
    assert main(["explain", "--no-checks"]) == 0
    assert "paste the text" in capsys.readouterr().err


def test_missing_file_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(tmp_path / "absent.log")]) == 2
    output = capsys.readouterr().err
    assert "cannot be read: No such file" in output
    assert "pipe one in: python train.py 2>&1 | transload explain" in output
    assert main(["explain", "my absent.log"]) == 2


def test_name_of_a_log_with_spaces_is_taken_as_a_path(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("logs of my run.txt", "/my own logs/of today/run.log", "the last run.err", "the last run.out"):
        assert main(["explain", name]) == 2
        assert f"{name}: cannot be read: No such file" in capsys.readouterr().err
    assert main(["explain", "--no-checks", "no such file: train.txt"]) == 1


@pytest.mark.parametrize("text", [KNOWN.strip(), KNOWN * 100], ids=["one line", "longer than a path can be"])
def test_argument_may_be_the_text_itself(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--no-checks", text]) == 0
    assert "The file is cut off" in capsys.readouterr().out


CODES = {
    "CUDNN_STATUS_NOT_INITIALIZED": "cuda-library-start",
    "CUBLAS_STATUS_ALLOC_FAILED": "cuda-library-start",
    "OutOfMemoryError": "gpu-memory-full",
    "torch.cuda.OutOfMemoryError": "gpu-memory-full",
    "cudaErrorNoKernelImageForDevice": "no-kernel-image",
    "CUDA_ERROR_NO_DEVICE": "no-gpus",
    "cudaErrorAssert": "kernel-died",
    "900": "cuda-graph-capture",
    "804": "forward-compatibility",
    "137": "killed",
    "U04": "U04",
    "u04": "U04",
    "[kernel-died]": "kernel-died",
    **{f"[{code}]": code for code in rules()},  # as inspect prints it
}


def test_argument_of_one_word_is_a_code_unless_it_is_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(word: str) -> None:
        assert main(["explain", "--no-checks", "--json", word]) == 0
        document = json.loads(capsys.readouterr().out)
        assert [answer["code"] for answer in document["answers"]] == [CODES[word]]
        validate(document, SCHEMA)
        if CODES[word] in rules():
            assert document["answers"][0]["doc"] == f"docs/findings.md#{CODES[word]}"

    for_each(CODES, check)
    monkeypatch.chdir(tmp_path)
    Path("804").write_text(KNOWN)
    assert main(["explain", "--no-checks", "804"]) == 0
    assert "archive-cut-off" in capsys.readouterr().out


def test_unknown_word_is_not_known_and_a_missing_path_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("12345", "RuntimeError", "U99", "libtorch.so.9"):
        assert main(["explain", "--no-checks", word]) == 1
        assert "not known" in capsys.readouterr().out
    for path in ("train.log", "runs/train", "./804", "model.pt", "TRAIN.LOG"):
        assert main(["explain", path]) == 2
        assert f"{path}: cannot be read: No such file" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", " "])
def test_empty_argument_is_a_usage_error(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", text]) == 2
    assert "TEXT is empty" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["KeyError: 'model_state_dict'", "NCCL timeout"])
def test_argument_with_a_space_is_the_text_itself(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--no-checks", text]) == 1
    assert text in capsys.readouterr().out


@pytest.mark.skipif(sys.platform == "win32", reason="Windows only reports that permission is denied")
def test_folder_is_an_error_that_suggests_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(tmp_path)]) == 2
    output = capsys.readouterr().err
    assert "cannot be read: Is a directory" in output
    assert f"transload inspect {tmp_path}" in output


@pytest.mark.parametrize(
    ("data", "what", "fix"),
    [
        (forge.checkpoint(), "not text but a checkpoint (torch.save zip archive)", "transload inspect {}"),
        (gzip.compress(KNOWN.encode()), "not text: gzip around", "gzip -dc {} | transload explain"),
        (random.Random(1).randbytes(5_000), "not text: a binary file", "2>&1 | transload explain"),  # noqa: S311
        (b"a" + bytes(5_000) + b"b", "this is not text", "2>&1 | transload explain"),
    ],
    ids=["checkpoint", "gzip", "random bytes", "zeros"],
)
def test_input_that_is_not_text_is_identified(
    data: bytes, what: str, fix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "given"
    path.write_bytes(data)
    assert main(["explain", str(path)]) == 2
    output = capsys.readouterr()
    assert not output.out
    assert what in output.err
    assert fix.format(path) in output.err


def test_binary_stdin_is_identified_without_a_file_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    feed(monkeypatch, forge.checkpoint())
    assert main(["explain"]) == 2
    assert "transload inspect FILE" in capsys.readouterr().err


@pytest.mark.parametrize("data", [f"{KNOWN}\0\0\0".encode(), bytes(9_000) + KNOWN.encode(), KNOWN.encode("utf-16-le")])
def test_text_with_null_bytes_is_accepted(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(data)
    assert main(["explain", str(path), "--no-checks"]) == 0


def test_json_conforms_to_the_schema(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--json", str(log)]) == 0
    document = json.loads(capsys.readouterr().out)
    validate(document, SCHEMA)
    assert [answer["code"] for answer in document["answers"]] == ["archive-cut-off"]


def test_terminal_codes_in_a_log_are_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(b"\x1b[2J\x1b]0;owned\x07" + KNOWN.encode() + b"KeyError: '\xe2\x80\xaeevil'\n")
    assert main(["explain", str(path), "--no-checks"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_color_always_prints_colour(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["explain", str(log), "--no-checks", "--color", "always"])
    assert "\x1b[31m" in capsys.readouterr().out


def test_explain_imports_neither_torch_nor_heavy_modules(imported: Imported, log: Path) -> None:
    modules = imported("explain", "--no-checks", str(log))
    assert "transload.explaining.matching" in modules
    assert not modules & {"torch", "numpy", "asyncio", "logging", "transload.diagnose", "transload.formats"}


def test_lines_stay_within_100_columns(program: Transload, log: Path) -> None:
    result = program("explain", "--no-checks", str(log), COLUMNS="80")
    assert result.returncode == 0
    assert max(map(len, result.stdout.splitlines())) <= 100
