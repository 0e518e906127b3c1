"""Tensors chosen and renamed by pattern, and several checkpoints as one: nothing silent, and ties as before."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.each import each, for_each
from tests.schema import validate

from transload.cli.main import main
from transload.converting import convert
from transload.errors import ConvertError, UsageError
from transload.opening import inspect

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

SCHEMA = Path(__file__).parent.parent.parent / "docs" / "convert.schema.json"
TARGETS = ("new.pt", "new.safetensors", "new.npz", "new/", "dcp")


@pytest.fixture
def train(tmp_path: Path) -> str:
    embed = torch.arange(6.0).view(3, 2)
    model = {"enc.embed": embed, "enc.fc.weight": torch.ones(2, 2), "enc.fc.bias": torch.ones(2), "head": embed}
    path = tmp_path / "train.ckpt"
    torch.save({"epoch": 3, "model": model, "opt": {"lr": 0.5, "state": [torch.zeros(2)]}}, path)
    return str(path)


def names(path: Path) -> list[str]:
    return [tensor.name.replace("/", ".") for tensor in inspect(path).tensors]


def target(folder: Path, name: str) -> tuple[Path, str]:
    return folder / name, "dcp" if name == "dcp" else "raw" if name == "new/" else ""


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


@each("name", TARGETS)
def test_tensors_are_chosen_and_renamed_for_each_target(name: str, train: str, tmp_path: Path) -> None:
    path, to = target(tmp_path, name)
    how = {"key": "model", "only": ["embed$", "fc"], "drop": "bias", "rename": {"enc.": "", "enc.embed": "tok"}}
    made = convert(train, path, to=to, **how)  # type: ignore[arg-type]
    assert made.complete
    assert (made.tensors, made.others) == (2, 3)
    if name == "new/":
        assert [*json.loads((path / "index.json").read_text())["tensors"]] == ["tok", "fc.weight"]
    else:
        assert sorted(names(path)) == ["fc.weight", "tok"]


def test_structure_is_kept_while_tensors_stay_in_their_dictionaries(train: str, tmp_path: Path) -> None:
    convert(train, tmp_path / "new.pt", drop="bias", rename={"model/enc.": "model/"})
    new = load(tmp_path / "new.pt")
    assert (new["epoch"], new["opt"]["lr"], [*new["model"]]) == (3, 0.5, ["embed", "fc.weight", "head"])
    assert new["model"]["embed"].data_ptr() == new["model"]["head"].data_ptr()
    made = convert(train, tmp_path / "flat.pt", key="", rename=(r"^model/", ""))
    assert [*load(tmp_path / "flat.pt")] == ["enc.embed", "enc.fc.weight", "enc.fc.bias", "head", "opt/state/0"]
    assert json.loads(Path(made.leftovers).read_text())["data"]["epoch"] == 3
    assert any("--rename moves tensors" in note for note in made.notes)


def test_names_of_a_dcp_directory_are_those_that_inspect_shows(train: str, tmp_path: Path) -> None:
    convert(train, tmp_path / "dcp", to="dcp")
    for name in ("new.pt", "new.safetensors"):
        convert(tmp_path / "dcp", tmp_path / name, only=r"^model\.enc", rename={"model.enc.embed": "model.tok"})
        assert sorted(names(tmp_path / name)) == ["model.enc.fc.bias", "model.enc.fc.weight", "model.tok"], name
    assert sorted(load(tmp_path / "new.pt")["model"]) == ["enc.fc.bias", "enc.fc.weight", "tok"]


def test_what_cannot_be_done_is_named(train: str, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"only": "nope"}, "--only 'nope' matches no name"),
        ({"only": "model", "drop": ["bias", "nope"]}, "--drop 'nope' matches no name"),
        ({"rename": {"enc": "x"}}, "--rename 'enc' matches no name"),
        ({"rename": [(r"fc(\d)", "x")]}, r"--rename 'fc(\\d)' matches no name"),
        ({"only": "("}, "--only has '(', which is no regular expression"),
        ({"rename": ("(", "")}, "cannot be used"),
        ({"rename": 3}, "rename is of type int"),
        ({"only": "embed", "drop": "embed"}, "no tensor is left to convert"),
        ({"rename": {"model/head": "model/enc.embed"}}, "model/enc.embed and model/head would both be called"),
        ({"rename": {"model/head": "epoch"}, "to": "universal"}, "a universal checkpoint has all tensors"),
    ]

    def refused(how: dict[str, Any], words: str) -> None:
        with pytest.raises((UsageError, ConvertError), match=re.escape(words)):
            convert(train, tmp_path / "new.pt", **how)
        assert not (tmp_path / "new.pt").exists()

    for_each(cases, lambda case: refused(*case))


def test_new_name_of_a_tensor_is_not_that_of_another_value(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "epoch": 3}, tmp_path / "a.pt")
    with pytest.raises(ConvertError, match="the root has a value under the new name 'epoch' already"):
        convert(tmp_path / "a.pt", tmp_path / "new.pt", rename={"a": "epoch"})


def test_command_line_has_names_prefixes_and_expressions(train: str, tmp_path: Path) -> None:
    for number, (rename, expected) in enumerate(
        [
            ("head=last", "enc.embed enc.fc.bias enc.fc.weight last"),
            ("enc.=", "embed fc.bias fc.weight head"),
            ("=net.", "net.enc.embed net.enc.fc.bias net.enc.fc.weight net.head"),
            (r"fc\.(.*)=\1.fc", "enc.bias.fc enc.embed enc.weight.fc head"),
        ]
    ):
        path = tmp_path / f"{number}.pt"
        assert main(["convert", train, str(path), "--key", "model", "--rename", rename]) == 0
        assert sorted(load(path)) == expected.split(), rename


@each("rename", ["nothing", "="])
def test_rename_without_two_names_is_bad_usage(rename: str, train: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", train, "new.pt", "--rename", rename]) == 2
    assert "--rename takes A=B" in capsys.readouterr().err


@each("rename", [r"fc(\d)=\2", "fc(=x", r"fc\d=\g<name>"])
def test_bad_expression_is_named_as_on_the_command_line(
    rename: str, train: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", train, "new.pt", "--rename", rename]) == 2
    err = capsys.readouterr().err
    assert f"--rename {rename!r}" in err
    assert "Pass {" not in err


# -- several


@pytest.fixture
def others(tmp_path: Path) -> list[str]:
    safetensors_torch.save_file(
        {"norm": torch.ones(3), "head": torch.arange(6.0).view(3, 2)}, tmp_path / "b.safetensors"
    )
    np.savez(tmp_path / "c.npz", stats=np.arange(4.0))
    return [str(tmp_path / "b.safetensors"), str(tmp_path / "c.npz")]


@each("name", TARGETS)
def test_several_become_one(name: str, train: str, others: list[str], tmp_path: Path) -> None:
    path, to = target(tmp_path, name)
    made = convert([train, *others], path, to=to)
    assert made.complete
    assert [count for _, _, count in made.inputs] == [5, 2, 1]
    assert made.tensors == 8
    assert json.loads(Path(made.leftovers).read_text())["data"] == {"train.ckpt": {"epoch": 3, "opt": {"lr": 0.5}}}
    if name == "new.pt":
        new = load(path)
        assert torch.equal(new["stats"], torch.arange(4.0, dtype=torch.float64))
        assert new["model/enc.embed"].data_ptr() == new["model/head"].data_ptr()


def test_same_tensor_in_two_is_written_once_and_said(train: str, others: list[str], tmp_path: Path) -> None:
    convert(train, tmp_path / "model.pt", key="model")
    made = convert([tmp_path / "model.pt", others[0]], tmp_path / "new.safetensors")
    assert "in more than one input, with equal values: head" in made.notes
    assert sorted(safetensors_torch.load_file(tmp_path / "new.safetensors")) == [
        *("enc.embed", "enc.fc.bias", "enc.fc.weight", "norm"),
    ]
    assert made.aliases == (("head", "enc.embed"),)


def test_different_tensors_of_one_name_are_refused(train: str, tmp_path: Path) -> None:
    convert(train, tmp_path / "model.pt", key="model")
    cases = [
        (torch.ones(3, 2), "head is in model.pt and in b.pt, with different values"),
        (torch.ones(2), r"head is in model.pt and in b.pt, of the shapes \[3, 2\] and \[2\]"),
        (torch.ones(3, 2).half(), "head is in model.pt and in b.pt, float32 and float16"),
    ]

    def refused(value: Any, words: str) -> None:
        torch.save({"head": value}, tmp_path / "b.pt")
        with pytest.raises(ConvertError, match=words):
            convert([tmp_path / "model.pt", tmp_path / "b.pt"], tmp_path / "new.pt")
        assert not (tmp_path / "new.pt").exists()
        convert([tmp_path / "model.pt", tmp_path / "b.pt"], tmp_path / "new.pt", drop="head")
        (tmp_path / "new.pt").unlink()

    for_each(cases, lambda case: refused(*case))


def test_key_must_exist_in_each(train: str, others: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="there is no tensor below the key 'model'") as caught:
        convert([train, others[0]], tmp_path / "new.pt", key="model")
    assert caught.value.where == others[0]


def test_what_no_source_can_keep_is_named_for_each(others: list[str], data: Path, tmp_path: Path) -> None:
    whole = data / "torch-releases" / "torch-1.0.0-py2.7.18" / "whole_sequential_cuda0.pt"
    made = convert([*others, whole], tmp_path / "new.safetensors")
    alone = convert(whole, tmp_path / "alone.safetensors")
    assert [each.name.partition("/")[2] for each in made.listed] == [each.name for each in alone.listed] != []
    torch.save({"epoch": 3}, tmp_path / "empty.pt")
    with pytest.raises(ConvertError, match="there is no tensor to convert") as caught:
        convert([*others, tmp_path / "empty.pt"], tmp_path / "new.pt")
    assert caught.value.where == str(tmp_path / "empty.pt")


def test_none_of_the_sources_is_overwritten(train: str, others: list[str]) -> None:
    before = Path(others[0]).read_bytes()
    with pytest.raises(UsageError, match="the target is the source itself"):
        convert([train, *others], others[0], overwrite=True)
    assert Path(others[0]).read_bytes() == before


def test_damaged_source_among_several_is_refused(train: str, others: list[str], tmp_path: Path) -> None:
    data = bytearray(Path(train).read_bytes())
    at = data.index(torch.arange(6.0).numpy().tobytes())
    data[at] ^= 1
    Path(train).write_bytes(data)
    with pytest.raises(ConvertError, match="damaged record") as caught:
        convert([*others, train], tmp_path / "new.safetensors")
    assert caught.value.where == train
    assert not (tmp_path / "new.safetensors").exists()


def test_command_merges_and_shows_what_it_read(
    train: str, others: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "new.safetensors")
    assert main(["convert", train, *others, out]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"read {train} (5 tensors), {others[0]} (2 tensors)" in shown
    assert main(["convert", train, *others, out, "--force", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    validate(document, SCHEMA)
    assert [each["tensors"] for each in document["inputs"]] == [5, 2, 1]
    assert main(["convert", train, others[0], "--list"]) == 2
    assert main(["convert", train, "--list", "--only", "fc"]) == 2
    assert main(["convert", train, "--force"]) == 2
    assert "DST is missing" in capsys.readouterr().err
