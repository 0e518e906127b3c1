"""The command ``transload convert``: its options, exit codes and streams."""

from __future__ import annotations

import copyreg
import io
import json
import random
import sys
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import pytest
import torch
from tests.each import each
from tests.schema import validate

from transload.cli.main import main
from transload.opening import inspect

if TYPE_CHECKING:
    from tests.cli.conftest import Imported, Transload

SCHEMA = Path(__file__).parent.parent.parent / "docs" / "convert.schema.json"
UNWANTED = {"asyncio", "importlib.metadata", "logging", "numpy", "torch", "urllib"}


def validated(text: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(text)
    validate(document, SCHEMA)
    return document


@pytest.fixture
def state(data: Path) -> str:
    return str(data / "h200" / "state_dict_cuda0.pt")


@pytest.fixture
def train(data: Path) -> str:
    return str(data / "h200" / "train_cuda0.ckpt")


def test_file_is_converted_to_safetensors(state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "a.safetensors"
    assert main(["convert", state, str(target)]) == 0
    output = capsys.readouterr()
    assert not output.err
    assert output.out.startswith(f"{target}\n")
    assert "10 tensors, 560 B; read back and compared" in output.out
    assert "head.weight is fc.weight" in output.out
    assert inspect(target).integrity in ("whole", "unchecked")


def test_options_are_accepted_between_source_and_target(state: str, tmp_path: Path) -> None:
    assert main(["convert", state, "--to", "safetensors", str(tmp_path / "a.bin"), "--no-verify"]) == 0
    assert (tmp_path / "a.bin").exists()


def test_existing_target_needs_force(state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "a.npz")
    assert main(["convert", state, target]) == 0
    assert main(["convert", state, target]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["convert", state, target, "--force", "--no-verify"]) == 0
    assert "not read back" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt", "a.npz", "a/"])
def test_json_conforms_to_the_schema(train: str, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", train, f"{tmp_path}/{name}", "--json"]) == 0
    document = validated(capsys.readouterr().out)
    assert (document["complete"], document["verified"], document["tensors"]) == (True, True, 30)
    assert all(Path(file).exists() for file in document["files"])


def test_schema_rejects_unknown_fields(train: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", train, "--list", "--json"]) == 0
    document = validated(capsys.readouterr().out)
    with pytest.raises(jsonschema.ValidationError):
        validated(json.dumps({**document, "surprise": 1}))


def test_list_shows_whole_keys_on_a_narrow_terminal(
    train: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["convert", train, "--list"])
    keys = [line.split()[1] for line in capsys.readouterr().out.splitlines() if "--key" in line]
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["convert", train, "--list", "--color", "never"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if "--key" in line] == keys
    assert max(map(len, lines[1:])) <= 40


def test_list_shows_the_parts_and_their_keys(train: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", train, "--list"]) == 0
    assert "--key model " in capsys.readouterr().out
    assert main(["convert", train, "--list", "--json"]) == 0
    counts = {part["key"]: part["tensors"] for part in validated(capsys.readouterr().out)["parts"]}
    assert (counts[""], counts["model"]) == (30, 10)


def test_part_is_converted_to_shards_of_another_dtype(
    train: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "--key",
        "model",
        "--strip",
        "conv.",
        "--dtype",
        "bf16",
        "--max-shard-size",
        "300B",
        "--to",
        "safetensors",
    ]
    assert main(["convert", train, str(tmp_path), *options]) == 0
    output = capsys.readouterr().out
    assert "8 tensors to another dtype" in output
    assert "20 other tensors" in output
    checkpoint = inspect(tmp_path / "model.safetensors.index.json" if len(list(tmp_path.iterdir())) > 1 else tmp_path)
    assert {"weight", "bias", "bn.weight"} <= {tensor.name for tensor in checkpoint.tensors}


def test_lost_tensors_exit_with_1(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zoo = next((data / "torch-releases").glob("torch-2.13*/zoo_cuda0.pt"))
    assert main(["convert", str(zoo), str(tmp_path / "a.safetensors")]) == 1
    output = capsys.readouterr().out
    assert "\n  lost  " in output
    assert "quant: it is quantized" in output
    assert (tmp_path / "a.safetensors").exists()
    assert main(["convert", str(zoo), str(tmp_path / "a.pt")]) == 0


def test_leftovers_of_a_module_are_reported(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = data / "h200" / "whole_custom_module_cuda0.pt"
    assert main(["convert", str(module), str(tmp_path / "a.safetensors")]) == 0
    assert "a.safetensors.leftovers.json" in capsys.readouterr().out


USAGE_ERRORS = [
    pytest.param(["{state}"], "DST is missing", id="no target"),
    pytest.param(["{state}", "{tmp}/a.GGUF"], "GGUF cannot be written", id="unwritten suffix"),
    pytest.param(["{state}", "{tmp}/a", "--to", "json"], "unknown format 'json'", id="unknown format"),
    pytest.param(["{state}", "{tmp}/a.xyz"], "does not say which format", id="unknown suffix"),
    pytest.param(["{state}", "{tmp}/a", "--to", "onnx"], "ONNX cannot be written", id="unwritten format"),
    pytest.param(["{state}", "{tmp}/a.pt", "--dtype", "int4"], "'int4'", id="unknown dtype"),
    pytest.param(["{state}", "{tmp}/a.safetensors", "--max-shard-size", "many"], "'many'", id="invalid size"),
    pytest.param(
        ["{state}", "{tmp}/a.pt", "--max-shard-size", "5GB"], "only safetensors", id="shards in the torch format"
    ),
    pytest.param(["{state}", "{tmp}/a.pt", "--key", "nothing"], "'nothing'", id="unknown key"),
    pytest.param(["{tmp}/absent.pt", "{tmp}/a.pt"], "absent.pt", id="missing source"),
    pytest.param(["{tmp}/absent.pt", "--list"], "absent.pt", id="missing source, --list"),
    pytest.param(["{readme}", "{tmp}/a.pt"], "README", id="not a checkpoint"),
    pytest.param(["{readme}", "--list"], "README", id="not a checkpoint, --list"),
    pytest.param(["{state}", "{readme}/a.pt"], "README", id="target folder is a file"),
]


@each(("arguments", "expected"), USAGE_ERRORS)
def test_usage_errors_are_reported_and_write_nothing(
    data: Path, tmp_path: Path, arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    state = str(data / "h200" / "state_dict_cuda0.pt")
    values = {"state": state, "tmp": str(tmp_path), "readme": str(data / "README.md")}
    assert main(["convert", *(word.format(**values) for word in arguments)]) == 2
    output = capsys.readouterr()
    assert not output.out
    assert expected in output.err
    assert "bug" not in output.err
    assert list(tmp_path.iterdir()) == []


def test_no_color_is_honoured(program: Transload, state: str, tmp_path: Path) -> None:
    result = program("convert", state, str(tmp_path / "a.safetensors"), NO_COLOR="1")
    assert (result.returncode, result.stderr) == (0, "")
    assert "\x1b" not in result.stdout


def test_convert_imports_neither_torch_nor_unneeded_modules(imported: Imported, state: str, tmp_path: Path) -> None:
    target = tmp_path / "a.safetensors"
    modules = imported("convert", state, str(target))
    assert target.exists()
    assert not modules & UNWANTED


TARGETS = ["a.safetensors", "a.pt", "a.npz", "a/", "--max-shard-size"]


def converted(value: object, folder: Path, target: str, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit code of a conversion, and its JSON; ``target`` is a name, or an option for shards."""
    torch.save(value, folder / "src.pt")
    name = "a.safetensors" if target.startswith("--") else target
    shards = [target, "1GB"] if target.startswith("--") else []
    out = io.StringIO()
    with redirect_stdout(out):
        code = main(["convert", str(folder / "src.pt"), f"{folder}/{name}", *shards, *options, "--json"])
    return code, validated(out.getvalue())


@pytest.mark.parametrize("target", TARGETS)
def test_array_that_cannot_be_kept_is_named_and_exits_with_1(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value = {"w": torch.ones(3), "in": {"anchors": np.array([1.0, None]), "epoch": 3}}
    code, report = converted(value, tmp_path, target)
    assert (code, report["complete"], [item["name"] for item in report["listed"]]) == (1, True, ["in/anchors"])
    name = "a.safetensors" if target.startswith("--") else target
    assert main(["convert", str(tmp_path / "src.pt"), f"{tmp_path}/{name}", "--force"]) == 1
    assert "not kept    in/anchors: numpy" in capsys.readouterr().out


@pytest.mark.parametrize("target", TARGETS)
def test_random_states_are_kept_completely(target: str, tmp_path: Path) -> None:
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}  # noqa: NPY002
    code, report = converted(state, tmp_path, target)
    assert (code, report["tensors"], report["listed"]) == (0, 2, [])
    assert report["notes"] == ["numpy arrays in the source, now tensors: numpy/1"]


@pytest.mark.parametrize("target", TARGETS)
def test_complete_leftovers_exit_with_0(target: str, tmp_path: Path) -> None:
    value = {"w": torch.ones(3), "epoch": 3, "name": "a", "lr": [0.1, None], "raw": b"\0\1"}
    code, report = converted(value, tmp_path, target)
    assert (code, report["listed"]) == (0, [])


@pytest.mark.parametrize("target", TARGETS)
def test_exit_code_depends_only_on_values_below_the_key(target: str, tmp_path: Path) -> None:
    value = {"model": {"w": torch.ones(3)}, "other": {"w": torch.ones(2), "a": np.array([None])}}
    assert converted(value, tmp_path, target, "--key", "model")[0] == 0
    assert converted(value, tmp_path, target, "--key", "other", "--force")[0] == 1


class Named(dict[str, int]):
    """A dictionary with attributes: older pickle protocols store its items beside its class."""


class Keyword:
    """Created with a keyword argument that only the pickle contains."""

    def __new__(cls, *, size: int = 0) -> Keyword:  # noqa: ARG004, PYI034 - only the pickle uses it
        return super().__new__(cls)

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, int]]:
        return (), {"size": 7}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["items", "keywords", "function"])
def test_objects_that_cannot_be_kept_exit_with_1(kind: str, target: str, tmp_path: Path) -> None:
    value = {"items": reconstructed({"n": 12345}), "keywords": Keyword(), "function": torch.relu}[kind]
    torch.save({"w": torch.ones(3), "odd": value}, tmp_path / "src.pt", pickle_protocol=4)
    name = "a.safetensors" if target.startswith("--") else target
    shards = [target, "1GB"] if target.startswith("--") else []
    assert main(["convert", str(tmp_path / "src.pt"), f"{tmp_path}/{name}", *shards]) == 1


class reconstructed:  # noqa: N801 - it stands in for a call
    """Pickled like a ``Named`` in protocol 1."""

    def __init__(self, items: dict[str, int]) -> None:
        self.items = items

    def __reduce__(self) -> Any:
        return copyreg._reconstructor, (Named, dict, self.items), {"extra": 1}  # type: ignore[attr-defined]


@pytest.mark.parametrize("target", TARGETS)
def test_empty_values_are_kept(target: str, tmp_path: Path) -> None:
    code, report = converted({"w": torch.ones(3), "seen": frozenset(), "counts": Counter()}, tmp_path, target)
    assert (code, report["listed"]) == (0, [])
    leftovers = json.loads(Path(report["leftovers"]).read_text(encoding="utf-8"))["data"]
    assert sorted(leftovers) == ["counts", "seen"]


@pytest.mark.parametrize("to", ["dcp", "universal"])
def test_report_on_a_directory_matches_the_schema(
    to: str, state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", state, str(tmp_path / "out"), "--to", to, "--json"]) == 0
    assert validated(capsys.readouterr().out)["to"] == to
