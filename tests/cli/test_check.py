"""The command ``transload check``: its options, exit codes and streams."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
from tests.each import each
from tests.schema import validate

import transload
from transload.cli.main import main
from transload.diagnose import probes

if TYPE_CHECKING:
    from tests.cli.conftest import Imported, Transload

SCHEMA = Path(__file__).parent.parent.parent / "docs" / "check.schema.json"
UNWANTED = {"asyncio", "importlib.metadata", "logging", "numpy", "torch", "urllib"}


def validated(text: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(text)
    validate(document, SCHEMA)
    return document


@each(
    ("name", "code"),
    [
        ("torch-releases/torch-2.13.0-py3.11.7/state_dict_cpu.pt", 0),
        ("h200/train_cuda0.ckpt", 0),
        ("h200/whole_module_cuda0.pt", 1),
        ("h200/torchscript_cuda0.pt", 1),
        ("README.md", 1),
    ],
)
def test_exit_code_says_whether_the_file_loads(
    name: str, code: int, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(data / name)]) == code
    output = capsys.readouterr()
    assert not output.err
    assert ("it cannot be loaded: " in output.out) == bool(code)
    assert main(["check", str(data / name), "--json"]) == code
    assert validated(capsys.readouterr().out)["ok"] == (code == 0)


@pytest.mark.parametrize(
    ("device", "code", "map_location"),
    [
        ("auto", 0, "auto"),
        ("cpu", 0, "cpu"),
        ("cuda:63", 1, "cuda:63"),
        ("none", 1, None),
        ("cuda:63, cpu", 0, "cuda:63,cpu"),
        ("cuda:63,cuda:62", 1, "cuda:63,cuda:62"),
    ],
)
def test_device_option_sets_the_map_location(
    device: str, code: int, map_location: str | None, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(data / "h200" / "state_dict_cuda1.pt")
    assert main(["check", path, "--device", device, "--json"]) == code
    document = validated(capsys.readouterr().out)
    assert document["map_location"] == map_location
    assert bool(document["plan"]["refused"]) == bool(code)


@each("device", ["banana", "cuda:1,banana", "gpu", "cuda:x", "", "cpu,none"])
def test_name_that_is_no_device_is_a_usage_error(device: str, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(data / "h200" / "state_dict_cuda1.pt"), "--device", device]) == 2
    output = capsys.readouterr()
    assert not output.out
    assert "is not a device\n  Use auto, none, or a name such as" in output.err
    assert ("Did you mean cuda?" in output.err) == (device in ("gpu", "cuda:x"))


def test_missing_file_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "absent.pt")]) == 2
    output = capsys.readouterr()
    assert not output.out
    assert output.err.startswith("transload: ")


def test_check_imports_neither_torch_nor_unneeded_modules(imported: Imported, data: Path) -> None:
    modules = imported("check", str(data / "h200" / "train_cuda0.ckpt"))
    assert "transload.checking" in modules
    assert not modules & UNWANTED


def test_check_runs_without_installed_packages(program: Transload, data: Path) -> None:
    result = program("check", str(data / "h200" / "train_cuda0.ckpt"), "--json", python=("-S",))
    assert result.returncode in (0, 1), result.stderr
    document = validated(result.stdout)
    assert {move["tag"] for move in document["plan"]["moves"]} == {"cuda:0", "cpu"}


def test_local_rank_is_read_from_the_environment(program: Transload, data: Path) -> None:
    result = program("check", str(data / "h200" / "train_cuda0.ckpt"), "--json", LOCAL_RANK="2")
    assert validated(result.stdout)["rank"] == 2


@pytest.fixture
def folder(data: Path, tmp_path: Path) -> Path:
    """Two checkpoints that can be loaded, one that cannot, and a text file."""
    for name in ("state_dict_cuda1.pt", "train_cuda0.ckpt", "whole_module_cuda0.pt"):
        shutil.copyfile(data / "h200" / name, tmp_path / name)
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    return tmp_path


@each("name", ["", "/*_cuda*"])
def test_directory_or_pattern_expands_to_its_files(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{folder}{name}"]) == 1
    output = capsys.readouterr().out
    assert [line.split()[0] for line in output.splitlines()[1:4]] == sorted(map(str, folder.glob("*_cuda*")))
    assert output.count("cannot be loaded") == 2
    assert "3 files: 2 fine, 1 cannot be loaded" in output
    assert main(["check", f"{folder}{name}", "--json"]) == 1
    documents = json.loads(capsys.readouterr().out)
    assert [document["ok"] for document in documents] == [True, True, False]
    for document in documents:
        validated(json.dumps(document))


def test_unreadable_file_does_not_hide_the_others(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(folder / "missing.pt"), str(folder / "train_cuda0.ckpt")]) == 2
    output = capsys.readouterr()
    assert "2 files: 1 fine, 1 could not be read" in output.out
    assert "missing.pt: No such file" in output.err


def test_machine_is_examined_once_for_several_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Mock(wraps=probes.probe)
    monkeypatch.setattr(probes, "probe", probe)
    main(["check", str(folder)])
    probe.assert_called_once()


def test_fix_for_a_module_with_gpu_tags_includes_map_location(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", str(data / "h200" / "whole_module_cuda0.pt")])
    output = " ".join(capsys.readouterr().out.split())
    assert "with torch.serialization.safe_globals([" in output
    assert "Also pass map_location='cpu' to torch.load, since there is no cuda:0 here." in output


def test_examined_environment_is_named(data: Path, tmp_path: Path) -> None:
    """If transload's own environment has no torch, the one in the current folder is examined."""
    venv.create(tmp_path / "own", with_pip=False)
    (tmp_path / "venv").symlink_to(sys.prefix)
    file = data / "h200" / "train_cuda0.ckpt"
    result = subprocess.run(
        [tmp_path / "own" / "bin" / "python", "-m", "transload", "check", file],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(transload.__file__).parent.parent), "PATH": ""},
        check=False,
    )
    assert "transload's own environment has no torch; ./venv has one" in " ".join(result.stdout.split()), result.stderr
