"""The command ``transload verify``: its options, exit codes and streams."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.schema import validate

from transload.cli.main import main
from transload.errors import ManifestError
from transload.judge import inspect

if TYPE_CHECKING:
    from tests.cli.conftest import Imported, Transload

SCHEMA = Path(__file__).parent.parent.parent / "docs" / "verify.schema.json"
NOT_FOR_IT = {"asyncio", "concurrent.futures", "importlib.metadata", "logging", "numpy", "torch", "urllib"}


@pytest.fixture
def path(data: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "model.pt"
    shutil.copyfile(data / "h200" / "mixed_cpu_cuda.pt", copy)
    return copy


def flip(path: Path, name: str) -> None:
    data = bytearray(path.read_bytes())
    data[inspect(path).tensor(name).file_offset or 0] ^= 4
    path.write_bytes(data)


def valid(text: str) -> Any:
    document = json.loads(text)
    for each in document if isinstance(document, list) else [document]:
        if "error" not in each:
            validate(each, SCHEMA)
    return document


def test_a_whole_file(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(path)]) == 0
    shown = capsys.readouterr()
    assert not shown.err
    assert shown.out.startswith(f"{path}\n  bytes       whole: ")
    assert "16 records compared, all agree" in shown.out


def test_force_replaces_nothing_but_a_manifest(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = path.read_bytes()
    assert main(["verify", str(path), "--write", str(path), "--force"]) == 2
    assert "is not a manifest" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_a_damaged_file_names_each_tensor(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(path, "conv.bias")
    flip(path, "fc.weight")
    assert main(["verify", str(path)]) == 1
    shown = capsys.readouterr().out
    lines = shown.split("\n")
    assert "damaged  3 tensors" in lines
    assert [line.split()[0] for line in lines if line.startswith("  ") and ": checksum " in line] == [
        "conv.bias",
        "fc.weight",
        "head.weight",
    ]
    assert main(["verify", str(path), "--json"]) == 1
    document = valid(capsys.readouterr().out)
    assert [damage["name"] for damage in document["damaged"]] == ["conv.bias", "fc.weight", "head.weight"]
    assert document["ok"] is False


def test_a_format_without_checksums_says_so(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(data / "h200" / "state_dict_cuda0_legacy.pth")]) == 0
    shown = capsys.readouterr().out
    assert "unchecked" in shown
    assert "none in this format" in shown


def test_hashes_and_values(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(path), "--hash", "--values"]) == 0
    shown = capsys.readouterr().out
    assert main(["verify", str(path), "--hash", "--values", "--json"]) == 0
    document = valid(capsys.readouterr().out)
    assert f"  sha256      {document['sha256']}\n" in shown
    for tensor in document["tensors"]:
        assert f"  {tensor['sha256']}  {tensor['name']}\n" in shown
    assert "NaN or infinite in 0 of 10 tensors" in shown


def test_a_manifest_written_and_compared(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = str(path.with_name("m.json"))
    assert main(["verify", str(path), "--write", manifest]) == 0
    assert main(["verify", str(path), "--write", manifest]) == 2
    assert "already" in capsys.readouterr().err
    assert main(["verify", str(path), "--write", manifest, "--force"]) == 0
    assert main(["verify", str(path), "--against", manifest]) == 0
    assert main(["verify", "--against", manifest]) == 0
    assert "all tensors match it" in " ".join(capsys.readouterr().out.split())
    flip(path, "auxiliary")
    assert main(["verify", str(path), "--against", manifest, "--json"]) == 1
    document = valid(capsys.readouterr().out)
    assert [(each["name"], each["what"]) for each in document["differences"]] == [("auxiliary", "changed")]
    assert main(["verify", str(path), "--against", manifest]) == 1
    assert "changed  auxiliary" in capsys.readouterr().out
    assert main(["verify", str(path), "--write", str(path.with_name("n.json"))]) == 1
    assert "not written" in capsys.readouterr().err
    assert main(["verify", str(path), "missing.pt", "--write", str(path.with_name("n.json"))]) == 2
    assert "n.json: not written" in capsys.readouterr().err
    assert not path.with_name("n.json").exists()


def test_several_files(path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(path, "conv.bias")
    others = [str(data / "h200" / "data_cuda0.pt"), str(data / "README.md")]
    assert main(["verify", str(path), *others]) == 1
    shown = capsys.readouterr().out
    assert "3 files, 2 with a problem" in shown
    assert "conv.bias" in shown
    assert main(["verify", str(path), *others, "absent.pt", "--json"]) == 2
    shown_too = capsys.readouterr()
    documents = valid(shown_too.out)
    assert [document["ok"] for document in documents] == [False, True, False, False]
    assert shown_too.err.startswith("transload: absent.pt: ")


def test_a_directory_of_checkpoints(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(data / "h200")]) == 0
    shown = capsys.readouterr().out
    assert "11 files, no problem" in shown


def test_eighty_columns(path: Path, program: Transload) -> None:
    flip(path, "conv.bias")
    done = program("verify", path.name, path.name, "--hash", COLUMNS="80", python=("-X", "utf8"))
    assert done.returncode == 2  # there is no such file here
    done = program("verify", str(path), COLUMNS="80")
    assert done.returncode == 1
    assert max(map(len, done.stdout.split("\n"))) < 120


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param([], "no file is named", id="nothing"),
        pytest.param(["absent.pt"], "absent.pt: No such file", id="no file"),
        pytest.param(["--against", "absent.json"], "absent.json: No such file", id="no manifest"),
    ],
)
def test_what_cannot_be_done(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *arguments]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert not shown.out


def test_it_runs_where_no_package_is_installed(program: Transload, path: Path) -> None:
    done = program("verify", str(path), "--hash", "--values", "--json", python=("-S",))
    assert done.returncode == 0, done.stderr
    assert valid(done.stdout)["integrity"] == "whole"


def test_it_imports_neither_torch_nor_what_it_does_not_need(imported: Imported, path: Path) -> None:
    modules = imported("verify", str(path), "--hash", "--values")
    assert "transload.verifying" in modules
    assert not modules & NOT_FOR_IT


def test_a_manifest_that_cannot_be_written_is_reported_before_anything_is_read(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("it was read")

    monkeypatch.setattr("transload.verifying.verify", never)
    there = tmp_path / "m.json"
    there.write_text("mine", encoding="ascii")
    assert main(["verify", str(path), "--write", str(there)]) == 2
    assert main(["verify", str(path), "--write", str(tmp_path / "no" / "m.json")]) == 2
    told = capsys.readouterr()
    assert not told.out
    assert "--force" in told.err
    assert "mkdir -p" in told.err
    assert there.read_text(encoding="ascii") == "mine"


def test_a_manifest_that_fails_at_the_end_adds_no_second_document(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise ManifestError("the disk is full")

    monkeypatch.setattr("transload.verifying.write_manifest", full)
    assert main(["verify", str(path), "--write", str(tmp_path / "m.json"), "--json"]) == 2
    shown = capsys.readouterr()
    assert valid(shown.out)["ok"]
    assert "the disk is full" in shown.err


def test_writing_a_manifest_is_reported_without_its_hashes(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "m.json"
    assert main(["verify", str(path), "--write", str(manifest)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"written {manifest}: the hashes of " in shown
    assert "sha256 of tensors" not in shown


def test_what_differs_is_shown_at_any_width(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "m.json"
    assert main(["verify", str(path), "--write", str(manifest)]) == 0
    name = inspect(path).tensors[0].name
    flip(path, name)
    monkeypatch.setenv("COLUMNS", "60")
    capsys.readouterr()
    assert main(["verify", str(path), "--against", str(manifest)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert f"changed {name} sha256 " in shown
    assert "…, was " in shown
