"""LoRA adapters merged into their base model: equal to peft bit by bit, and nothing that is not is written."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.each import for_each
from tests.file_server import Handler, serve

from transload.cli.main import main
from transload.converting import convert
from transload.errors import ConvertError, OverflowRefusedError, UsageError

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": ["fc"], "lora_dropout": 0.1}
P = "base_model.model."


def pair(rank: int, inputs: int, outputs: int, module: str) -> dict[str, Any]:
    torch.manual_seed(rank)
    return {
        f"{P}{module}.lora_A.weight": torch.randn(rank, inputs),
        f"{P}{module}.lora_B.weight": torch.randn(outputs, rank),
    }


@pytest.fixture
def base(tmp_path: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    embed = torch.randn(11, 4)
    state = {
        "m.fc.weight": torch.randn(5, 4),
        "m.fc.bias": torch.randn(5),
        "m.sq.weight": torch.randn(4, 4),
        "m.conv.weight": torch.randn(6, 3, 3, 3),
        "m.embed.weight": embed,
        "m.head.weight": embed,
    }
    torch.save(state, tmp_path / "base.pt")
    return state


def adapter(folder: Path, tensors: dict[str, Any], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    safetensors_torch.save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config), encoding="utf-8")
    return folder


def merged(tmp_path: Path, tensors: dict[str, Any], name: str = "new.pt", **config: Any) -> Any:
    convert(tmp_path / "base.pt", tmp_path / name, lora=adapter(tmp_path / "ad", tensors, **config), overwrite=True)
    if name.endswith(".pt"):
        return torch.load(tmp_path / name, weights_only=True)
    return safetensors_torch.load_file(tmp_path / name)


@pytest.mark.parametrize("name", ["new.pt", "new.safetensors"])
def test_product_is_added_and_everything_else_stays(name: str, base: dict[str, Any], tmp_path: Path) -> None:
    tensors = pair(2, 4, 5, "m.fc")
    new = merged(tmp_path, tensors, name)
    a, b = tensors.values()
    assert torch.equal(new["m.fc.weight"], base["m.fc.weight"] + (b @ a) * (3 / 2))
    stored = base.keys() - ({"m.head.weight"} if name != "new.pt" else set())
    assert new.keys() == stored
    assert all(torch.equal(new[key], base[key]) for key in stored - {"m.fc.weight"})


def test_an_adapter_at_a_url_keeps_its_key(base: dict[str, Any], tmp_path: Path) -> None:
    """Also where its configuration is asked for."""
    tensors = pair(2, 4, 5, "m.fc")
    expected = merged(tmp_path, tensors)
    files = {f"ad/{file.name}": file.read_bytes() for file in (tmp_path / "ad").iterdir()}

    def check(handler: Handler) -> bool:
        if handler.path.endswith("?key=a/b"):
            return False
        handler.reply(403)
        return True

    with serve(files) as server:
        server.fault = check
        url = f"{server.url}/ad/adapter_model.safetensors?key=a/b"
        convert(tmp_path / "base.pt", tmp_path / "far.pt", lora=url)
    loaded = torch.load(tmp_path / "far.pt", weights_only=True)
    assert loaded.keys() == expected.keys() == base.keys()
    assert all(torch.equal(loaded[key], expected[key]) for key in expected)


def test_scale_is_that_of_each_module(base: dict[str, Any], tmp_path: Path) -> None:
    tensors = pair(3, 4, 5, "m.fc") | pair(2, 4, 4, "m.sq")
    (a, b, c, d) = tensors.values()
    patterns: dict[str, Any] = {"rank_pattern": {"fc": 3}, "alpha_pattern": {r"m\.s.": 7}}
    for rslora in (False, True):
        new = merged(tmp_path, tensors, use_rslora=rslora, **patterns)
        over = math.sqrt if rslora else float
        assert torch.equal(new["m.fc.weight"], base["m.fc.weight"] + (b @ a) * (3 / over(3)))
        assert torch.equal(new["m.sq.weight"], base["m.sq.weight"] + (d @ c) * (7 / over(2)))


def test_weights_that_are_stored_transposed(base: dict[str, Any], tmp_path: Path) -> None:
    tensors = pair(2, 5, 4, "m.fc") | pair(2, 4, 4, "m.sq")
    (a, b, c, d) = tensors.values()
    new = merged(tmp_path, tensors, fan_in_fan_out=True)
    assert torch.equal(new["m.fc.weight"], base["m.fc.weight"] + (b @ a).T * (3 / 2))
    assert torch.equal(new["m.sq.weight"], base["m.sq.weight"] + (d @ c).T * (3 / 2))
    with pytest.raises(ConvertError, match="fan_in_fan_out=False is not true of all modules"):
        merged(tmp_path, tensors)


def test_tied_tensors_stay_tied(base: dict[str, Any], tmp_path: Path) -> None:
    tensors = {f"{P}m.embed.lora_embedding_A": torch.randn(2, 11), f"{P}m.embed.lora_embedding_B": torch.randn(4, 2)}
    a, b = tensors.values()
    new = merged(tmp_path, tensors)
    assert torch.equal(new["m.embed.weight"], base["m.embed.weight"] + (b @ a).T * (3 / 2))
    assert new["m.embed.weight"].data_ptr() == new["m.head.weight"].data_ptr()
    both = pair(2, 4, 11, "m.head") | tensors
    with pytest.raises(ConvertError, match="which are one tied tensor"):
        merged(tmp_path, both)


def test_whole_tensors_replace_those_of_the_base_model(base: dict[str, Any], tmp_path: Path) -> None:
    whole = {f"{P}m.head.weight": torch.ones(11, 4).half(), f"{P}score.weight": torch.ones(2, 4)}
    new = merged(tmp_path, pair(2, 4, 5, "m.fc") | whole, modules_to_save=["head", "score"])
    assert torch.equal(new["m.head.weight"], torch.ones(11, 4))  # in the dtype of the base model
    assert torch.equal(new["m.embed.weight"], base["m.embed.weight"])
    assert torch.equal(new["score.weight"], torch.ones(2, 4))


def test_names_may_begin_otherwise_and_may_be_changed(base: dict[str, Any], tmp_path: Path) -> None:
    tensors = pair(2, 4, 5, "transformer.m.fc")
    a, b = tensors.values()
    ad = adapter(tmp_path / "ad", tensors)
    made = convert(tmp_path / "base.pt", tmp_path / "new.pt", lora=ad, only="fc", rename={"m.": "n."})
    new = torch.load(tmp_path / "new.pt", weights_only=True)
    assert torch.equal(new["n.fc.weight"], base["m.fc.weight"] + (b @ a) * (3 / 2))
    assert [*new] == ["n.fc.weight", "n.fc.bias"]
    assert any("names of the adapter begin with 'transformer.'" in note for note in made.notes)
    assert (made.merged, made.others) == (1, 4)


def test_low_precision_is_rounded_once(base: dict[str, Any], tmp_path: Path) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        state = {key: value.to(dtype) for key, value in base.items()}
        torch.save(state, tmp_path / "base.pt")
        tensors = pair(2, 4, 5, "m.fc")
        a, b = tensors.values()
        new = merged(tmp_path, tensors)
        assert torch.equal(new["m.fc.weight"], (state["m.fc.weight"].float() + (b @ a) * (3 / 2)).to(dtype))


@pytest.mark.usefixtures("base")
def test_what_cannot_be_merged_exactly_is_refused(tmp_path: Path) -> None:
    fc = pair(2, 4, 5, "m.fc")
    magnitude = {f"{P}m.fc.lora_magnitude_vector": torch.ones(5)}
    conv = {f"{P}m.conv.lora_A.weight": torch.ones(2, 3, 3, 3), f"{P}m.conv.lora_B.weight": torch.ones(6, 2, 1, 1)}
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        (fc, {"peft_type": "IA3"}, "it is an adapter of the type 'IA3'"),
        (fc, {"peft_type": None}, "it is an adapter of the type None"),
        (fc, {"init_lora_weights": "pissa"}, "init_lora_weights='pissa' changes the weights"),
        (fc, {"layer_replication": [[0, 4]]}, "says layer_replication=[[0, 4]], which cannot be merged here"),
        (fc, {"something_new": True}, "says something_new=True"),
        (fc, {"use_dora": True}, "m.fc lacks the magnitude vector of DoRA"),
        (fc | magnitude, {}, "m.fc has a magnitude vector of DoRA"),
        (conv | {f"{P}m.conv.lora_magnitude_vector": torch.ones(1, 6, 1, 1)}, {"use_dora": True}, "only for linear"),
        (fc, {"r": 4}, "has the shape [2, 4], and its rank is 4"),
        (fc, {"lora_alpha": None}, "has no number for lora_alpha of m.fc"),
        (fc, {"rank_pattern": {"(": 2}}, "rank_pattern has '(', which is no regular expression"),
        (fc, {"rank_pattern": {"a{99999999999999}": 2}}, "rank_pattern has 'a{99999999999999}', which is no"),
        (fc, {"rank_pattern": {"(a+)+b": 2}}, "rank_pattern has '(a+)+b', which may take too long"),
        (fc, {"alpha_pattern": {"(?x:(a+) #\n+)b": 2}}, "which may take too long"),
        (fc, {"alpha_pattern": {"a?" * 40: 2}}, "which may take too long"),
        (fc, {"rank_pattern": [2]}, "has no table for rank_pattern"),
        (fc, {"modules_to_save": 5}, "has no list for modules_to_save"),
        (fc, {"lora_alpha": 10**400}, "has no number for lora_alpha of m.fc"),
        (fc, {"lora_alpha": math.inf}, "has no number for lora_alpha of m.fc"),
        (fc, {"something_new": "x" * 5000}, "x…x"),
        (pair(2, 4, 6, "m.fc"), {}, "the matrices do not fit"),
        (pair(2, 4, 5, "m.other"), {}, "the base model has no m.other.weight, which the adapter changes"),
        ({f"{P}m.fc.lora_A.weight": torch.ones(2, 4)}, {}, "m.fc has lora_A, which peft does not write together"),
        (fc | {f"{P}extra.weight": torch.ones(2)}, {}, "the base model has no extra.weight"),
        (fc | {f"{P}m.fc.lora_B.bias": torch.ones(5), **pair(2, 4, 4, "m.sq")}, {"use_dora": False}, ""),
        ({f"{P}m.fc.weight": torch.ones(5, 4)}, {}, "it has no LoRA matrices"),
        ({"lora_unet_fc.lora_down.weight": torch.ones(2, 4)}, {}, "not those of peft, but of another program"),
        (fc | {f"{P}m.sq.lora_A.weight": torch.ones(2, 4), f"{P}m.sq.lora_B.bias": torch.ones(4)}, {}, "m.sq has"),
    ]

    def refused(tensors: dict[str, Any], config: dict[str, Any], words: str) -> None:
        ad = adapter(tmp_path / "ad", tensors, **config)
        if not words:  # the closest one that can be merged
            convert(tmp_path / "base.pt", tmp_path / "other.pt", lora=ad)
            return
        with pytest.raises(ConvertError, match=re.escape(words)) as caught:
            convert(tmp_path / "base.pt", tmp_path / "new.pt", lora=ad)
        assert str(ad) in caught.value.where
        assert not (tmp_path / "new.pt").exists()

    for_each(cases, lambda case: refused(*case))


def test_quantized_base_is_refused(base: dict[str, Any], tmp_path: Path) -> None:
    ad = adapter(tmp_path / "ad", pair(2, 4, 5, "m.fc"))
    for change, words in (
        ({"m.fc.weight": torch.ones(5, 4, dtype=torch.int8)}, "m.fc.weight is int8: it cannot be added to"),
        ({"m.fc.weight_scale": torch.ones(1)}, "the base model is quantized: it has m.fc.weight_scale"),
    ):
        torch.save(base | change, tmp_path / "base.pt")
        with pytest.raises(ConvertError, match=words):
            convert(tmp_path / "base.pt", tmp_path / "new.pt", lora=ad)


def test_values_that_become_infinite_are_refused(base: dict[str, Any], tmp_path: Path) -> None:
    torch.save({key: value.half() for key, value in base.items()}, tmp_path / "base.pt")
    tensors = {name: value * 1000 for name, value in pair(2, 4, 5, "m.fc").items()}
    ad = adapter(tmp_path / "ad", tensors)
    with pytest.raises(OverflowRefusedError, match=r"the merged .*m.fc.weight has values that are infinite"):
        convert(tmp_path / "base.pt", tmp_path / "new.pt", lora=ad)
    assert convert(tmp_path / "base.pt", tmp_path / "new.pt", lora=ad, allow_inf=True).complete


@pytest.mark.usefixtures("base")
def test_options_that_leave_nothing_to_merge_are_an_error(tmp_path: Path) -> None:
    ad = adapter(tmp_path / "ad", pair(2, 4, 5, "m.fc"))
    with pytest.raises(ConvertError, match="nothing that the adapter changes is left to convert"):
        convert(tmp_path / "base.pt", tmp_path / "new.pt", lora=ad, drop="fc")
    assert not (tmp_path / "new.pt").exists()


@pytest.mark.usefixtures("base")
def test_damaged_adapter_is_refused(tmp_path: Path) -> None:
    tensors = pair(2, 4, 5, "m.fc")
    ad = adapter(tmp_path / "ad", tensors)
    (ad / "adapter_model.safetensors").unlink()
    torch.save(tensors, ad / "adapter_model.bin")
    data = bytearray((ad / "adapter_model.bin").read_bytes())
    data[data.index(tensors[f"{P}m.fc.lora_A.weight"].numpy().tobytes())] ^= 1
    (ad / "adapter_model.bin").write_bytes(data)
    with pytest.raises(ConvertError, match="damaged record"):
        convert(tmp_path / "base.pt", tmp_path / "new.pt", lora=ad)
    (ad / "adapter_config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ConvertError, match=r"adapter_config.json is no JSON object"):
        convert(tmp_path / "base.pt", tmp_path / "new.pt", lora=ad)
    (ad / "adapter_config.json").unlink()
    with pytest.raises(ConvertError, match=r"adapter_config.json cannot be read"):
        convert(tmp_path / "base.pt", tmp_path / "new.pt", lora=ad / "adapter_model.bin")
    assert not (tmp_path / "new.pt").exists()


@pytest.mark.usefixtures("base")
def test_without_torch_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ad = adapter(tmp_path / "ad", pair(2, 4, 5, "m.fc"))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConvertError, match="torch cannot be imported"):
        convert(tmp_path / "base.pt", tmp_path / "new.pt", lora=ad)
    with pytest.raises(UsageError, match="into one base model"):
        convert([tmp_path / "base.pt", tmp_path / "ad"], tmp_path / "new.pt", lora=ad)


@pytest.mark.usefixtures("base")
def test_command_merges_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ad = adapter(tmp_path / "ad", pair(2, 4, 5, "m.fc"))
    assert main(["convert", str(tmp_path / "base.pt"), "--lora", str(ad), str(tmp_path / "new.safetensors")]) == 0
    assert "the adapter into 1 tensor" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "base.pt"), "--lora", str(tmp_path), str(tmp_path / "other.pt")]) == 2


# -- compared with peft itself


class Kinds(torch.nn.Module):  # type: ignore[name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.fc, self.sq = torch.nn.Embedding(11, 6), torch.nn.Linear(6, 8), torch.nn.Linear(8, 8)
        self.conv, self.one, self.c1 = torch.nn.Conv2d(3, 5, 3), torch.nn.Conv2d(5, 4, 1), torch.nn.Conv1d(3, 4, 3)
        self.c3, self.head = torch.nn.Conv3d(3, 4, (2, 3, 3)), torch.nn.Linear(8, 2)


ALL = ["emb", "fc", "sq", "conv", "one", "c1", "c3"]
PATTERNS = {"rank_pattern": {"fc": 4}, "alpha_pattern": {"sq": 3, "c.*": 5.5}}
SETTINGS: list[dict[str, Any]] = [
    {"target_modules": ALL},
    {"target_modules": ALL, "use_rslora": True, "modules_to_save": ["head"], "bias": "all", **PATTERNS},
    {"target_modules": ["fc"], "bias": "lora_only"},
    {"target_modules": ["fc", "conv"], "lora_bias": True},
    {"target_modules": ["fc", "sq"], "use_dora": True},
]


@pytest.mark.filterwarnings("ignore")  # peft takes the bias of lora_bias=True for a matrix of the wrong shape
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_merged_is_equal_to_peft(dtype: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def compare(settings: dict[str, Any]) -> None:
        folder = tmp_path / str(SETTINGS.index(settings))
        torch.manual_seed(1)
        model = Kinds().to(getattr(torch, dtype))
        state = {name: value.clone() for name, value in model.state_dict().items()}
        wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=5, **settings))
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad and "magnitude" not in name:
                parameter.data = torch.randn_like(parameter.data) * 0.1
        wrapped.save_pretrained(folder / "ad")
        safetensors_torch.save_file(state, folder / "base.safetensors")
        model = Kinds().to(getattr(torch, dtype))
        model.load_state_dict(state)
        expected = peft.PeftModel.from_pretrained(model, folder / "ad").merge_and_unload().state_dict()
        convert(folder / "base.safetensors", folder / "new.safetensors", lora=folder / "ad")
        new = safetensors_torch.load_file(folder / "new.safetensors")
        assert new.keys() == expected.keys()
        assert [name for name, value in expected.items() if not torch.equal(value, new[name])] == []

    for_each(SETTINGS, compare)
