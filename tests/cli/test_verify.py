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
from transload.opening import inspect

if TYPE_CHECKING:
    from tests.cli.conftest import Imported, Transload

SCHEMA = Path(__file__).parent.parent.parent / "docs" / "verify.schema.json"
UNWANTED = {"asyncio", "concurrent.futures", "importlib.metadata", "logging", "numpy", "torch", "urllib"}


@pytest.fixture
def path(data: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "model.pt"
    shutil.copyfile(data / "h200" / "mixed_cpu_cuda.pt", copy)
    return copy


def flip(path: Path, name: str) -> None:
    data = bytearray(path.read_bytes())
    data[inspect(path).tensor(name).file_offset or 0] ^= 4
    path.write_bytes(data)


def validated(text: str) -> Any:
    document = json.loads(text)
    for item in document if isinstance(document, list) else [document]:
        if "error" not in item:
            validate(item, SCHEMA)
    return document


def test_intact_file_passes(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(path)]) == 0
    output = capsys.readouterr()
    assert not output.err
    assert output.out.startswith(f"{path}\n  bytes       whole: ")
    assert "16 records compared, all agree" in output.out


def test_force_replaces_only_a_manifest(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = path.read_bytes()
    assert main(["verify", str(path), "--write", str(path), "--force"]) == 2
    assert "is not a manifest" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_checkpoint_that_is_named_as_a_manifest_is_recognised(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(path), "--against", str(path)]) == 2
    error = capsys.readouterr().err
    assert "this is a checkpoint (torch.save zip archive), not a manifest" in error
    assert "UnicodeDecodeError" not in error
    (tmp_path / "m.json").write_text("{}", encoding="utf-8")
    assert main(["verify", str(path), "--against", str(tmp_path / "m.json")]) == 2
    assert "this is not a manifest: it has no 'schema'" in capsys.readouterr().err


def test_damaged_tensors_are_named(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(path, "conv.bias")
    flip(path, "fc.weight")
    assert main(["verify", str(path)]) == 1
    output = capsys.readouterr().out
    lines = output.split("\n")
    assert "damaged  3 tensors" in lines
    assert [line.split()[0] for line in lines if line.startswith("  ") and ": checksum " in line] == [
        "conv.bias",
        "fc.weight",
        "head.weight",
    ]
    assert main(["verify", str(path), "--json"]) == 1
    document = validated(capsys.readouterr().out)
    assert [damage["name"] for damage in document["damaged"]] == ["conv.bias", "fc.weight", "head.weight"]
    assert document["ok"] is False


def test_a_format_without_checksums_says_so(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(data / "h200" / "state_dict_cuda0_legacy.pth")]) == 0
    output = capsys.readouterr().out
    assert "unchecked" in output
    assert "none in this format" in output


def test_hashes_and_value_counts_are_shown(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(path), "--hash", "--values"]) == 0
    output = capsys.readouterr().out
    assert main(["verify", str(path), "--hash", "--values", "--json"]) == 0
    document = validated(capsys.readouterr().out)
    assert f"  sha256      {document['sha256']}\n" in output
    for tensor in document["tensors"]:
        assert f"  {tensor['sha256']}  {tensor['name']}\n" in output
    assert "NaN or infinite in 0 of 10 tensors" in output


def test_manifest_is_written_and_compared(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    document = validated(capsys.readouterr().out)
    assert [(difference["name"], difference["what"]) for difference in document["differences"]] == [
        ("auxiliary", "changed")
    ]
    assert main(["verify", str(path), "--against", manifest]) == 1
    assert "changed  auxiliary" in capsys.readouterr().out
    assert main(["verify", str(path), "--write", str(path.with_name("n.json"))]) == 1
    assert "not written" in capsys.readouterr().err
    assert main(["verify", str(path), "missing.pt", "--write", str(path.with_name("n.json"))]) == 2
    assert "n.json: not written" in capsys.readouterr().err
    assert not path.with_name("n.json").exists()


def test_several_files_are_summarized(path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(path, "conv.bias")
    others = [str(data / "h200" / "data_cuda0.pt"), str(data / "README.md")]
    assert main(["verify", str(path), *others]) == 1
    output = capsys.readouterr().out
    assert "3 files: 1 fine, 2 with a problem" in output
    assert "conv.bias" in output
    assert main(["verify", str(path), *others, "absent.pt", "--json"]) == 2
    json_output = capsys.readouterr()
    documents = validated(json_output.out)
    assert [document["ok"] for document in documents] == [False, True, False, False]
    assert json_output.err.startswith("transload: absent.pt: ")


def test_directory_of_checkpoints_is_verified(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(data / "h200")]) == 0
    output = capsys.readouterr().out
    assert "11 files, no problem" in output


def test_lines_stay_below_120_columns(path: Path, program: Transload) -> None:
    flip(path, "conv.bias")
    result = program("verify", path.name, path.name, "--hash", COLUMNS="80", python=("-X", "utf8"))
    assert result.returncode == 2  # no such file in the current folder
    result = program("verify", str(path), COLUMNS="80")
    assert result.returncode == 1
    assert max(map(len, result.stdout.split("\n"))) < 120


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param([], "no file is named", id="no arguments"),
        pytest.param(["absent.pt"], "absent.pt: No such file", id="missing file"),
        pytest.param(["--against", "absent.json"], "absent.json: No such file", id="missing manifest"),
    ],
)
def test_missing_arguments_and_files_are_errors(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *arguments]) == 2
    output = capsys.readouterr()
    assert expected in output.err
    assert not output.out


def test_verify_runs_without_installed_packages(program: Transload, path: Path) -> None:
    result = program("verify", str(path), "--hash", "--values", "--json", python=("-S",))
    assert result.returncode == 0, result.stderr
    assert validated(result.stdout)["integrity"] == "whole"


def test_verify_imports_neither_torch_nor_unneeded_modules(imported: Imported, path: Path) -> None:
    modules = imported("verify", str(path), "--hash", "--values")
    assert "transload.verifying" in modules
    assert not modules & UNWANTED


def test_unwritable_manifest_is_reported_before_the_file_is_read(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("it was read")

    monkeypatch.setattr("transload.verifying.verify", never)
    existing = tmp_path / "m.json"
    existing.write_text("mine", encoding="ascii")
    assert main(["verify", str(path), "--write", str(existing)]) == 2
    assert main(["verify", str(path), "--write", str(tmp_path / "no" / "m.json")]) == 2
    output = capsys.readouterr()
    assert not output.out
    assert "--force" in output.err
    assert "$ mkdir " in output.err
    assert existing.read_text(encoding="ascii") == "mine"


def test_manifest_error_at_the_end_prints_no_second_document(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def disk_full(*_: object, **__: object) -> None:
        raise ManifestError("the disk is full")

    monkeypatch.setattr("transload.verifying.write_manifest", disk_full)
    assert main(["verify", str(path), "--write", str(tmp_path / "m.json"), "--json"]) == 2
    output = capsys.readouterr()
    assert validated(output.out)["ok"]
    assert "the disk is full" in output.err


def test_written_manifest_is_reported_without_its_hashes(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "m.json"
    assert main(["verify", str(path), "--write", str(manifest)]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert f"written {manifest}: the hashes of " in output
    assert "sha256 of tensors" not in output


def test_differences_are_shown_in_a_narrow_terminal(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "m.json"
    assert main(["verify", str(path), "--write", str(manifest)]) == 0
    name = inspect(path).tensors[0].name
    flip(path, name)
    monkeypatch.setenv("COLUMNS", "60")
    capsys.readouterr()
    assert main(["verify", str(path), "--against", str(manifest)]) == 1
    output = " ".join(capsys.readouterr().out.split())
    assert f"changed {name} sha256 " in output
    assert "…, was " in output


def test_a_directory_is_one_object_whatever_is_beside_the_checkpoint(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(data / "rank-files" / "torch-2.13-ranks-2" / "fsdp2", folder)
    for beside in ([], ["other.pt"]):
        for name in beside:
            shutil.copyfile(data / "h200" / "mixed_cpu_cuda.pt", folder / name)
        for command in ("verify", "check"):
            main([command, "--json", str(folder)])
            document = json.loads(capsys.readouterr().out)
            validate(document, SCHEMA.with_name(f"{command}.schema.json"))
            assert document["path"] == str(folder)
            assert [each["path"] for each in document.get("beside", [])] == [str(folder / name) for name in beside]
