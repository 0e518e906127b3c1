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
NOT_FOR_IT = {"asyncio", "importlib.metadata", "logging", "numpy", "torch", "urllib"}


def valid(text: str) -> dict[str, Any]:
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
def test_the_exit_code_is_whether_it_loads(
    name: str, code: int, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(data / name)]) == code
    shown = capsys.readouterr()
    assert not shown.err
    assert ("it cannot be loaded: " in shown.out) == bool(code)
    assert main(["check", str(data / name), "--json"]) == code
    assert valid(capsys.readouterr().out)["ok"] == (code == 0)


@pytest.mark.parametrize(
    ("device", "code", "wish"),
    [
        ("auto", 0, "auto"),
        ("cpu", 0, "cpu"),
        ("cuda:63", 1, "cuda:63"),
        ("none", 1, None),
        ("cuda:63, cpu", 0, "cuda:63,cpu"),
        ("cuda:63,cuda:62", 1, "cuda:63,cuda:62"),
    ],
)
def test_the_device_is_the_wish(
    device: str, code: int, wish: str | None, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(data / "h200" / "state_dict_cuda1.pt")
    assert main(["check", path, "--device", device, "--json"]) == code
    document = valid(capsys.readouterr().out)
    assert document["map_location"] == wish
    assert bool(document["plan"]["refused"]) == bool(code)


def test_a_file_that_is_not_there_is_no_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "absent.pt")]) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert shown.err.startswith("transload: ")


def test_it_imports_neither_torch_nor_what_it_does_not_need(imported: Imported, data: Path) -> None:
    modules = imported("check", str(data / "h200" / "train_cuda0.ckpt"))
    assert "transload.checking" in modules
    assert not modules & NOT_FOR_IT


def test_it_runs_where_no_package_is_installed(program: Transload, data: Path) -> None:
    done = program("check", str(data / "h200" / "train_cuda0.ckpt"), "--json", python=("-S",))
    assert done.returncode in (0, 1), done.stderr
    document = valid(done.stdout)
    assert {move["tag"] for move in document["plan"]["moves"]} == {"cuda:0", "cpu"}


def test_a_rank_is_heard(program: Transload, data: Path) -> None:
    done = program("check", str(data / "h200" / "train_cuda0.ckpt"), "--json", LOCAL_RANK="2")
    assert valid(done.stdout)["rank"] == 2


@pytest.fixture
def folder(data: Path, tmp_path: Path) -> Path:
    """Two checkpoints that can be loaded, one that cannot, and something else."""
    for name in ("state_dict_cuda1.pt", "train_cuda0.ckpt", "whole_module_cuda0.pt"):
        shutil.copyfile(data / "h200" / name, tmp_path / name)
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    return tmp_path


@each("name", ["", "/*_cuda*"])
def test_a_directory_or_a_pattern_stands_for_its_files(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", f"{folder}{name}"]) == 1
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()[1:4]] == sorted(map(str, folder.glob("*_cuda*")))
    assert shown.count("cannot be loaded") == 2
    assert "3 files, 1 that cannot be loaded" in shown
    assert main(["check", f"{folder}{name}", "--json"]) == 1
    documents = json.loads(capsys.readouterr().out)
    assert [document["ok"] for document in documents] == [True, True, False]
    for document in documents:
        valid(json.dumps(document))


def test_one_file_that_cannot_be_read_does_not_hide_the_others(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(folder / "missing.pt"), str(folder / "train_cuda0.ckpt")]) == 2
    shown = capsys.readouterr()
    assert "2 files, no problem, 1 not read" in shown.out
    assert "missing.pt: No such file" in shown.err


def test_the_machine_is_examined_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Mock(wraps=probes.probe)
    monkeypatch.setattr(probes, "probe", probe)
    main(["check", str(folder)])
    probe.assert_called_once()


def test_a_module_with_tags_of_a_gpu_needs_a_map_location_too(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", str(data / "h200" / "whole_module_cuda0.pt")])
    shown = " ".join(capsys.readouterr().out.split())
    assert "with torch.serialization.safe_globals([" in shown
    assert "Also pass map_location='cpu' to torch.load, since there is no cuda:0 here." in shown


def test_the_environment_that_is_judged_is_named(data: Path, tmp_path: Path) -> None:
    """Where transload's own Python has no torch, that of the current folder is judged."""
    venv.create(tmp_path / "own", with_pip=False)
    (tmp_path / "venv").symlink_to(sys.prefix)
    file = data / "h200" / "train_cuda0.ckpt"
    done = subprocess.run(
        [tmp_path / "own" / "bin" / "python", "-m", "transload", "check", file],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(transload.__file__).parent.parent), "PATH": ""},
        check=False,
    )
    assert "transload's own environment has no torch; ./venv has one" in " ".join(done.stdout.split()), done.stderr
