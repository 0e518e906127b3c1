"""Whether a checkpoint fits a model: as ``load_into`` compares them, with nothing loaded."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.each import each
from tests.schema import validate

import transload
from transload.cli.main import main
from transload.errors import UsageError
from transload.loading.into import KeysWarning, MismatchError, load_into
from transload.loading.into.fitting import built, fit

torch = pytest.importorskip("torch")

SCHEMA = Path(__file__).parent.parent.parent / "docs" / "check.schema.json"
MODELS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, out=2):
        super().__init__()
        self.embed, self.fc = nn.Embedding(4, 3), nn.Linear(3, out)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight

class Custom(Net):
    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)

made = Net()

def wide():
    return Net(5)

def more():
    net = Net()
    net.extra = nn.Linear(3, 3)
    return net

def wrapped():
    return nn.ModuleDict({"backbone": Net()})

def noisy():
    print("hello")
    return Net()

def half():
    return Net().half()

def broken():
    raise RuntimeError("no config")

def leaves():
    raise SystemExit(3)

def nothing():
    return 3

def needs_values():
    return nn.Linear(int(torch.ones(1).item()), 2)

def needs_arguments(size):
    return Net(size)
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "fit_nets.py").write_text(MODELS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "fit_nets", raising=False)
    import fit_nets  # type: ignore[import-not-found]

    state = {f"module.{name}": value for name, value in fit_nets.Net().state_dict().items()}
    torch.save({"epoch": 3, "model": state}, "a.pt")
    return fit_nets


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["check", "a.pt", *words])
    output = capsys.readouterr()
    return code, output.out, output.err


@each(
    ("name", "words"),
    [
        ("Net", "it fits Net: 4 keys, found in model"),
        ("made", "removed 'module.' from 4 keys"),
        ("noisy", "it fits Net: 4 keys"),
        ("half", "of another dtype, 4 keys: float32 in the file, float16 in the model; cast=True converts them"),
        ("Custom", "not compared, since these modules load their keys with code of their own: the model"),
    ],
)
@pytest.mark.usefixtures("nets")
def test_model_that_fits_exits_with_0(name: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--model", f"fit_nets:{name}")
    assert code == 0
    assert words in " ".join(out.split())
    assert err == ("hello\n" if name == "noisy" else "")


@each(
    ("name", "words"),
    [
        ("wide", "fc.weight [2, 3] [5, 3]"),
        ("more", "missing in the file: extra.weight, extra.bias"),
        ("wrapped", 'rename={"module.": "backbone."} loads 4 of 4 keys.'),
    ],
)
def test_model_that_does_not_fit_exits_with_1_and_says_what_load_into_says(
    name: str, words: str, nets: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "--model", f"fit_nets:{name}")
    assert code == 1
    assert words in " ".join(out.split())
    model = getattr(nets, name)()
    with pytest.raises(MismatchError) as caught:
        load_into(model, "a.pt", cast=True)
    result = fit("a.pt", model)
    assert (result.why, result.fix) == (caught.value.what, caught.value.fix)
    assert list(result.missing) == caught.value.missing_keys
    assert result.shapes == caught.value.shapes


@each(
    ("model", "words"),
    [
        ("fit_nets:broken", "could not build the model fit_nets:broken: RuntimeError: no config, raised through"),
        ("fit_nets:leaves", "SystemExit: 3"),
        ("fit_nets:nothing", "fit_nets:nothing returned int, not a torch.nn.Module"),
        ("fit_nets:needs_values", "Error: "),  # RuntimeError, or a subclass in old releases
        ("fit_nets:needs_arguments", "TypeError"),
        ("fit_nets:gone", "AttributeError"),
        ("gone_nets:Net", "ModuleNotFoundError: No module named 'gone_nets'\n"),
        ("fit_nets", "--model is 'fit_nets'"),
        ("", "--model is ''"),
        ("fit_nets:MODELS.x.y", "AttributeError"),
        ("transformers:/no/such/folder", "could not build the model transformers:/no/such/folder"),
    ],
)
@pytest.mark.usefixtures("nets")
def test_model_that_cannot_be_built_exits_with_2(model: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--model", model)
    assert (code, out) == (2, "")
    assert words in err
    assert "Traceback" not in err


@each("name", ["Net", "wide"])
@pytest.mark.usefixtures("nets")
def test_json_matches_the_schema(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--model", f"fit_nets:{name}", "--json")
    document = json.loads(out)
    validate(document, SCHEMA)
    assert document["ok"] is document["model"]["ok"] is (code == 0)
    assert [each["key"] for each in document["model"]["shapes"]] == ([] if code == 0 else ["fc.weight", "fc.bias"])


def test_factory_runs_on_the_meta_device_and_a_module_is_not_changed(nets: Any) -> None:
    model = built(nets.Net)
    assert all(parameter.is_meta for parameter in model.parameters())
    before = {name: value.clone() for name, value in nets.made.state_dict().items()}
    assert transload.check("a.pt", model=nets.made).ok
    assert all(torch.equal(before[name], value) for name, value in nets.made.state_dict().items())
    with pytest.raises(UsageError, match="int is not a model"):
        transload.check("a.pt", model=3)


@pytest.mark.usefixtures("nets")
def test_file_with_missing_bytes_does_not_fit() -> None:
    torch.save(torch.nn.Linear(512, 512).state_dict(), "b.pt", _use_new_zipfile_serialization=False)
    os.truncate("b.pt", 4096)
    result = fit("b.pt", torch.nn.Linear(512, 512))
    assert not result.ok
    assert "damaged" in result.why or "cut" in result.why


@pytest.mark.usefixtures("nets")
def test_several_files_give_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"other": torch.ones(2)}, "b.pt")
    code, out, _ = run(capsys, "b.pt", "--model", "fit_nets:Net")
    assert code == 1
    assert "does not fit" in out
    torch.save({"more": torch.ones(2)}, "c.pt")
    _, out, _ = run(capsys, "b.pt", "c.pt", "--model", "fit_nets:Net")
    assert "1 fine, 2 do not fit" in out


@pytest.mark.usefixtures("nets")
def test_file_that_only_load_into_loads_fits_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    content = torch.load("a.pt", weights_only=True)
    torch.save({**content, "last": torch.zeros(5000)}, "a.pt")
    os.truncate("a.pt", os.path.getsize("a.pt") // 2)
    code, out, _ = run(capsys, "--model", "fit_nets:Net")
    assert code == 0
    assert "it cannot be loaded" in out
    assert "load_into loads them, although load refuses the file" in " ".join(out.split())
    model = sys.modules["fit_nets"].Net()
    with pytest.warns(KeysWarning):
        assert "All keys matched" in str(load_into(model, "a.pt"))
    torch.save({"other": torch.ones(2)}, "b.pt")
    _, out, _ = run(capsys, "b.pt", "--model", "fit_nets:Net")
    assert "fits" in next(line for line in out.splitlines() if line.startswith("a.pt")).split()


def test_model_of_transformers_is_made_from_its_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    path = str(tmp_path / "gpt2")
    assert main(["check", path, "--model", f"transformers:{path}"]) == 0
    assert "it fits GPT2LMHeadModel" in capsys.readouterr().out
