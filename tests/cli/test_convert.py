"""The command ``transload convert``: its options, exit codes and streams."""

from __future__ import annotations

import copyreg
import io
import json
import random
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
from transload.judge import inspect

if TYPE_CHECKING:
    from tests.cli.conftest import Imported, Transload

SCHEMA = Path(__file__).parent.parent.parent / "docs" / "convert.schema.json"
NOT_FOR_IT = {"asyncio", "importlib.metadata", "logging", "numpy", "torch", "urllib"}


def valid(text: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(text)
    validate(document, SCHEMA)
    return document


@pytest.fixture
def state(data: Path) -> str:
    return str(data / "h200" / "state_dict_cuda0.pt")


@pytest.fixture
def train(data: Path) -> str:
    return str(data / "h200" / "train_cuda0.ckpt")


def test_a_file(state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "a.safetensors"
    assert main(["convert", state, str(target)]) == 0
    shown = capsys.readouterr()
    assert not shown.err
    assert shown.out.startswith(f"{target}\n")
    assert "10 tensors, 560 B; read back and compared" in shown.out
    assert "head.weight is fc.weight" in shown.out
    assert inspect(target).integrity in ("whole", "unchecked")


def test_options_between_the_files(state: str, tmp_path: Path) -> None:
    assert main(["convert", state, "--to", "safetensors", str(tmp_path / "new" / "a.bin"), "--no-verify"]) == 0
    assert (tmp_path / "new" / "a.bin").exists()


def test_again_only_by_force(state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "a.npz")
    assert main(["convert", state, target]) == 0
    assert main(["convert", state, target]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["convert", state, target, "--force", "--no-verify"]) == 0
    assert "not read back" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt", "a.npz", "a/"])
def test_json_is_what_the_schema_promises(
    train: str, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", train, f"{tmp_path}/{name}", "--json"]) == 0
    document = valid(capsys.readouterr().out)
    assert (document["complete"], document["verified"], document["tensors"]) == (True, True, 30)
    assert all(Path(each).exists() for each in document["files"])


def test_the_schema_allows_nothing_more(train: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", train, "--list", "--json"]) == 0
    document = valid(capsys.readouterr().out)
    with pytest.raises(jsonschema.ValidationError):
        valid(json.dumps({**document, "surprise": 1}))


def test_the_parts(train: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", train, "--list"]) == 0
    assert "--key model " in capsys.readouterr().out
    assert main(["convert", train, "--list", "--json"]) == 0
    found = {part["key"]: part["tensors"] for part in valid(capsys.readouterr().out)["parts"]}
    assert (found[""], found["model"]) == (30, 10)


def test_a_part_in_shards_and_another_dtype(train: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    shown = capsys.readouterr().out
    assert "8 tensors to another dtype" in shown
    assert "20 tensors outside the key" in shown
    found = inspect(tmp_path / "model.safetensors.index.json" if len(list(tmp_path.iterdir())) > 1 else tmp_path)
    assert {"weight", "bias", "bn.weight"} <= {tensor.name for tensor in found.tensors}


def test_what_is_lost_exits_with_1(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zoo = next((data / "torch-releases").glob("torch-2.13*/zoo_cuda0.pt"))
    assert main(["convert", str(zoo), str(tmp_path / "a.safetensors")]) == 1
    shown = capsys.readouterr().out
    assert "lost" in shown
    assert "quant: it is quantized" in shown
    assert (tmp_path / "a.safetensors").exists()
    assert main(["convert", str(zoo), str(tmp_path / "a.pt")]) == 0


def test_what_a_module_leaves(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = data / "h200" / "whole_custom_module_cuda0.pt"
    assert main(["convert", str(whole), str(tmp_path / "a.safetensors")]) == 0
    assert "a.safetensors.leftovers.json" in capsys.readouterr().out


MISTAKES = [
    pytest.param(["{state}"], "DST is missing", id="no target"),
    pytest.param(["{state}", "{tmp}/a.xyz"], "does not say which format", id="an unknown name"),
    pytest.param(["{state}", "{tmp}/a", "--to", "onnx"], "unknown format 'onnx'", id="an unknown format"),
    pytest.param(["{state}", "{tmp}/a.pt", "--dtype", "int4"], "'int4'", id="an unknown dtype"),
    pytest.param(["{state}", "{tmp}/a.safetensors", "--max-shard-size", "many"], "'many'", id="no size"),
    pytest.param(["{state}", "{tmp}/a.pt", "--max-shard-size", "5GB"], "only safetensors", id="shards of torch"),
    pytest.param(["{state}", "{tmp}/a.pt", "--key", "nothing"], "'nothing'", id="an unknown key"),
    pytest.param(["{tmp}/absent.pt", "{tmp}/a.pt"], "absent.pt", id="no source"),
    pytest.param(["{tmp}/absent.pt", "--list"], "absent.pt", id="no source to list"),
    pytest.param(["{readme}", "{tmp}/a.pt"], "README", id="no checkpoint"),
    pytest.param(["{readme}", "--list"], "README", id="no checkpoint to list"),
    pytest.param(["{state}", "{readme}/a.pt"], "README", id="no folder"),
]


@each(("arguments", "told"), MISTAKES)
def test_mistakes(
    data: Path, tmp_path: Path, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    state = str(data / "h200" / "state_dict_cuda0.pt")
    known = {"state": state, "tmp": str(tmp_path), "readme": str(data / "README.md")}
    assert main(["convert", *(word.format(**known) for word in arguments)]) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert told in shown.err
    assert "bug" not in shown.err
    assert list(tmp_path.iterdir()) == []


def test_in_a_process_of_its_own(program: Transload, state: str, tmp_path: Path) -> None:
    done = program("convert", state, str(tmp_path / "a.safetensors"), NO_COLOR="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout


def test_only_what_is_needed_is_imported(imported: Imported, state: str, tmp_path: Path) -> None:
    target = tmp_path / "a.safetensors"
    modules = imported("convert", state, str(target))
    assert target.exists()
    assert not modules & NOT_FOR_IT


TARGETS = ["a.safetensors", "a.pt", "a.npz", "a/", "--max-shard-size"]


def converted(value: object, folder: Path, target: str, *more: str) -> tuple[int, dict[str, Any]]:
    """The exit code of a conversion, and its JSON; ``target`` is a name, or an option for shards."""
    torch.save(value, folder / "src.pt")
    name = "a.safetensors" if target.startswith("--") else target
    shards = [target, "1GB"] if target.startswith("--") else []
    out = io.StringIO()
    with redirect_stdout(out):
        code = main(["convert", str(folder / "src.pt"), f"{folder}/{name}", *shards, *more, "--json"])
    return code, valid(out.getvalue())


@pytest.mark.parametrize("target", TARGETS)
def test_an_array_that_is_written_nowhere_is_named_and_exits_with_1(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value = {"w": torch.ones(3), "in": {"anchors": np.array([1.0, None]), "epoch": 3}}
    code, told = converted(value, tmp_path, target)
    assert (code, told["complete"], [each["name"] for each in told["listed"]]) == (1, True, ["in/anchors"])
    name = "a.safetensors" if target.startswith("--") else target
    assert main(["convert", str(tmp_path / "src.pt"), f"{tmp_path}/{name}", "--force"]) == 1
    assert "not kept    in/anchors: numpy" in capsys.readouterr().out


@pytest.mark.parametrize("target", TARGETS)
def test_a_random_state(target: str, tmp_path: Path) -> None:
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}  # noqa: NPY002
    code, told = converted(state, tmp_path, target)
    assert (code, told["tensors"], told["listed"]) == (0, 2, [])
    assert told["notes"] == ["numpy arrays in the source, now tensors: numpy/1"]


@pytest.mark.parametrize("target", TARGETS)
def test_complete_leftovers_exit_with_0(target: str, tmp_path: Path) -> None:
    value = {"w": torch.ones(3), "epoch": 3, "name": "a", "lr": [0.1, None], "raw": b"\0\1"}
    code, told = converted(value, tmp_path, target)
    assert (code, told["listed"]) == (0, [])


@pytest.mark.parametrize("target", TARGETS)
def test_below_a_key_only_what_is_there_counts(target: str, tmp_path: Path) -> None:
    value = {"model": {"w": torch.ones(3)}, "other": {"w": torch.ones(2), "a": np.array([None])}}
    assert converted(value, tmp_path, target, "--key", "model")[0] == 0
    assert converted(value, tmp_path, target, "--key", "other", "--force")[0] == 1


class Named(dict[str, int]):
    """A dictionary with attributes: older protocols keep its items beside its class."""


class Keyword:
    """Made with a keyword, which only the file knows."""

    def __new__(cls, *, size: int = 0) -> Keyword:  # noqa: ARG004, PYI034 - it is in the file
        return super().__new__(cls)

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, int]]:
        return (), {"size": 7}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("odd", ["items", "keywords", "function"])
def test_nothing_of_an_object_is_lost_silently(odd: str, target: str, tmp_path: Path) -> None:
    value = {"items": reconstructed({"n": 12345}), "keywords": Keyword(), "function": torch.relu}[odd]
    torch.save({"w": torch.ones(3), "odd": value}, tmp_path / "src.pt", pickle_protocol=4)
    name = "a.safetensors" if target.startswith("--") else target
    shards = [target, "1GB"] if target.startswith("--") else []
    assert main(["convert", str(tmp_path / "src.pt"), f"{tmp_path}/{name}", *shards]) == 1


class reconstructed:  # noqa: N801 - it stands for a call
    """``Named`` as protocol 1 writes it."""

    def __init__(self, items: dict[str, int]) -> None:
        self.items = items

    def __reduce__(self) -> Any:
        return copyreg._reconstructor, (Named, dict, self.items), {"extra": 1}  # type: ignore[attr-defined]


@pytest.mark.parametrize("target", TARGETS)
def test_empty_values_are_kept(target: str, tmp_path: Path) -> None:
    code, told = converted({"w": torch.ones(3), "seen": frozenset(), "counts": Counter()}, tmp_path, target)
    assert (code, told["listed"]) == (0, [])
    held = json.loads(Path(told["leftovers"]).read_text(encoding="utf-8"))["data"]
    assert sorted(held) == ["counts", "seen"]
