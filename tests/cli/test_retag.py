"""The command ``transload retag``: its options, exit codes and streams."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.loading.zoo import save_with_tag
from tests.rank_files import write_ranks
from tests.schema import validate

from transload.cli.main import main
from transload.opening import inspect

if TYPE_CHECKING:
    from tests.cli.conftest import Imported, Transload

SCHEMA = Path(__file__).parent.parent.parent / "docs" / "retag.schema.json"
UNWANTED = {"asyncio", "importlib.metadata", "logging", "numpy", "torch", "urllib"}


@pytest.fixture
def path(data: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "model.pt"
    shutil.copyfile(data / "h200" / "mixed_cpu_cuda.pt", copy)
    return copy


def validated(text: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(text)
    validate(document, SCHEMA)
    return document


def tags(path: Path) -> set[str]:
    return {storage.device for storage in inspect(path).storages}


def test_to_retags_every_storage(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["retag", str(path), "--to", "cpu"]) == 0
    output = capsys.readouterr()
    assert not output.err
    assert output.out.startswith(f"{path}\n")
    assert "→  cpu" in output.out
    assert "stays" in output.out
    assert tags(path) == {"cpu"}
    assert main(["retag", str(path), "--to", "cpu"]) == 0
    assert "nothing: all tags are already as requested" in capsys.readouterr().out


def test_map_retags_the_named_tags_and_to_the_rest(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["retag", str(path), "--map", "cuda:0=cuda:1", "--map", "cpu=mps", "--json"]) == 0
    tags_by_old = {tag["old"]: tag["new"] for tag in validated(capsys.readouterr().out)["tags"]}
    assert tags_by_old == {"cuda:0": "cuda:1", "cpu": "mps"}
    assert main(["retag", str(path), "--map", "mps=cpu", "--to", "xpu:0"]) == 0
    assert tags(path) == {"cpu", "xpu:0"}


def test_dry_run_changes_nothing(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = path.read_bytes()
    assert main(["retag", str(path), "--to", "cuda:3", "--dry-run"]) == 0
    assert "would write" in capsys.readouterr().out
    assert main(["retag", str(path), "--to", "cuda:3", "--dry-run", "--json"]) == 0
    document = validated(capsys.readouterr().out)
    assert (document["done"], document["method"]) == (False, "append")
    assert path.read_bytes() == before


def test_output_option_writes_a_copy(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = path.with_name("copy.pt")
    assert main(["retag", str(path), "--to", "cpu", "-o", str(copy), "--json"]) == 0
    assert validated(capsys.readouterr().out)["out"] == str(copy)
    assert (tags(path), tags(copy)) == ({"cpu", "cuda:0"}, {"cpu"})
    assert main(["retag", str(path), "--to", "cpu", "-o", str(copy)]) == 2
    assert "already" in capsys.readouterr().err


def test_undo_restores_the_file(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = path.read_bytes()
    assert main(["retag", str(path), "--undo"]) == 2
    assert "--keep-undo" in capsys.readouterr().err
    assert main(["retag", str(path), "--to", "cuda:3", "--keep-undo", "--json"]) == 0
    assert validated(capsys.readouterr().out)["undo"]
    assert main(["retag", str(path), "--undo", "--dry-run"]) == 0
    assert path.read_bytes() != before
    capsys.readouterr()
    assert main(["retag", str(path), "--undo", "--json"]) == 0
    assert validated(capsys.readouterr().out)["method"] == "undo"
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "no device is named"),
        (["--to", "cpu:0"], "only 'cpu'"),
        (["--to", "gpu"], "Did you mean cuda:0?"),
        (["--to", "foo:1"], "'foo:1' is not a device"),
        (["--map", "cuda:0"], "--map takes two devices"),
        (["--map", "=cpu"], "--map takes two devices"),
        (["--map", "cuda:0=cpu", "--map", "cuda:0=mps"], "two devices"),
        (["--undo", "--to", "cpu"], "--undo cannot be combined with --to"),
        (["--to", "cpu", "-o", "x.pt", "--keep-undo"], "no undo"),
    ],
    ids=" ".join,
)
def test_invalid_options_are_rejected(
    arguments: list[str], expected: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = path.read_bytes()
    assert main(["retag", str(path), *arguments]) == 2
    output = capsys.readouterr()
    assert not output.out
    assert expected in output.err
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["torchscript_cuda0.pt", "export_cuda0.pt2", "absent.pt"])
def test_unsupported_or_missing_file_is_an_error(
    name: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if (data / "h200" / name).exists():
        shutil.copyfile(data / "h200" / name, tmp_path / name)
    assert main(["retag", str(tmp_path / name), "--to", "cpu"]) == 2
    output = capsys.readouterr()
    assert not output.out
    assert output.err.startswith(f"transload: {tmp_path / name}: ")


def test_retag_runs_without_installed_packages(program: Transload, path: Path) -> None:
    result = program("retag", str(path), "--to", "cpu", "--json", python=("-S",))
    assert result.returncode == 0, result.stderr
    assert validated(result.stdout)["method"] == "patch"
    assert tags(path) == {"cpu"}


def test_retag_imports_neither_torch_nor_unneeded_modules(imported: Imported, path: Path) -> None:
    modules = imported("retag", str(path), "--to", "cpu")
    assert "transload.retagging" in modules
    assert not modules & UNWANTED


def test_tag_that_the_file_does_not_have_is_reported(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["retag", str(path), "--map", "cuda:9=cpu"]) == 0
    assert "nothing is tagged cuda:9; the file has " in capsys.readouterr().out


def test_several_files_and_directories_are_retagged(path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = path.parent / "inner" / "other.pt"
    other.parent.mkdir()
    shutil.copyfile(data / "h200" / "state_dict_cuda1.pt", other)
    sources = [str(path), str(other.parent), str(path.parent / "missing.pt")]
    assert main(["retag", *sources, "--to", "cpu", "--dry-run"]) == 2
    assert "3 files: 2 would be changed, 1 could not be retagged" in capsys.readouterr().out
    assert tags(other) == {"cuda:1"}
    assert main(["retag", *sources, "--to", "cpu", "--keep-undo"]) == 2
    output = capsys.readouterr()
    assert "3 files: 2 changed, 1 could not be retagged" in output.out
    assert "missing.pt: " in output.err
    assert tags(path) == tags(other) == {"cpu"}
    assert main(["retag", *sources[:2], "--undo", "--json"]) == 0
    for document in json.loads(capsys.readouterr().out):
        assert validated(json.dumps(document))["method"] == "undo"
    assert tags(other) == {"cuda:1"}


def test_directory_of_shards_is_retagged(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = path.parent / "sharded"
    folder.mkdir()
    names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    weights = {}
    for number, name in enumerate(names):
        with save_with_tag("cuda:3"):
            torch.save({f"w{number}": torch.ones(2)}, folder / name)
        weights[f"w{number}"] = name
    index = {"metadata": {"total_size": 16}, "weight_map": weights}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert main(["retag", str(folder), "--to", "cuda:0"]) == 0
    assert "2 files: 2 changed" in capsys.readouterr().out
    assert [tags(folder / name) for name in names] == [{"cuda:0"}] * 2


def test_folder_of_rank_files_is_retagged(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_ranks(path.parent / "ranks")
    assert main(["retag", str(path.parent / "ranks"), "--to", "cuda:0"]) == 0
    assert "2 files: 2 changed" in capsys.readouterr().out
    assert tags(path.parent / "ranks") == {"cuda:0"}


def test_output_option_accepts_one_source_only(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["retag", str(path), str(path.parent / "b.pt"), "--to", "cpu", "-o", str(path.parent / "c.pt")]) == 2
    assert "-o names one copy" in capsys.readouterr().err
    assert not (path.parent / "c.pt").exists()
