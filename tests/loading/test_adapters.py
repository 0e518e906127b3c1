"""``load_into`` and LoRA adapters: into a model of peft it is loaded, to any other it is explained."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from tests.each import each

from transload.errors import UsageError
from transload.loading.into import MismatchError, load_into

torch = pytest.importorskip("torch")
nn = torch.nn


class Lora(nn.Module):  # type: ignore[name-defined]
    """A linear module as peft wraps it."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.base_layer = nn.Linear(4, 5)
        self.lora_A = nn.ModuleDict({name: nn.Linear(4, 2, bias=False) for name in names})
        self.lora_B = nn.ModuleDict({name: nn.Linear(2, 5, bias=False) for name in names})


class Saved(nn.Module):  # type: ignore[name-defined]
    """A module that is trained whole."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.original_module = nn.Linear(5, 2)
        self.modules_to_save = nn.ModuleDict({name: nn.Linear(5, 2) for name in names})


def wrapped(*names: str) -> Any:
    inner = nn.ModuleDict({"fc": Lora(names), "head": Saved(names), "norm": nn.LayerNorm(4)})
    return nn.ModuleDict({"base_model": nn.ModuleDict({"model": inner})})


def adapter() -> dict[str, Any]:
    start = "base_model.model"
    return {
        f"{start}.fc.lora_A.weight": torch.ones(2, 4),
        f"{start}.fc.lora_B.weight": torch.ones(5, 2),
        f"{start}.fc.base_layer.bias": torch.ones(5),
        f"{start}.head.weight": torch.ones(2, 5),
        f"{start}.head.bias": torch.ones(2),
        f"{start}.head.modules_to_save.bias": torch.ones(2),  # again: peft writes it so with bias="all"
        f"{start}.head.original_module.bias": torch.zeros(2),
    }


@each("name", ["default", "mine"])
def test_adapter_is_loaded_into_the_model_that_has_one(name: str, tmp_path: Path) -> None:
    torch.save(adapter(), tmp_path / "a.pt")
    model = wrapped(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = load_into(model, tmp_path / "a.pt")
    assert repr(result) == f"<All keys of the adapter {name!r} matched successfully>"
    start, changed = "base_model.model", {}
    for key, value in model.state_dict().items():
        if not torch.equal(value, before[key]):
            changed[key.removeprefix(f"{start}.")] = value
    ones = {f"fc.lora_A.{name}.weight", f"fc.lora_B.{name}.weight", "fc.base_layer.bias"}
    ones |= {f"head.modules_to_save.{name}.weight", f"head.modules_to_save.{name}.bias"}
    assert changed.keys() == ones | {"head.original_module.bias"}
    assert all(bool((changed[key] == 1).all()) for key in ones)


def test_what_the_adapter_lacks_is_missing_and_nothing_of_the_base_model(tmp_path: Path) -> None:
    state = adapter()
    del state["base_model.model.fc.lora_B.weight"]
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(MismatchError) as caught:
        load_into(wrapped("default"), tmp_path / "a.pt")
    assert caught.value.missing_keys == ["base_model.model.fc.lora_B.default.weight"]
    assert caught.value.unexpected_keys == []


def test_of_several_the_active_adapter_is_meant(tmp_path: Path) -> None:
    torch.save(adapter(), tmp_path / "a.pt")
    model = wrapped("one", "two")
    with pytest.raises(UsageError, match="the model has several adapters, and none of them alone is active: one, two"):
        load_into(model, tmp_path / "a.pt")
    model.active_adapter = "two"
    assert "'two'" in repr(load_into(model, tmp_path / "a.pt"))


def test_adapter_for_a_base_model_is_explained(tmp_path: Path) -> None:
    (tmp_path / "ad").mkdir()
    torch.save(adapter(), tmp_path / "ad" / "adapter_model.bin")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "base_model_name_or_path": "org/name"}
    (tmp_path / "ad" / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(MismatchError) as caught:
        load_into(nn.ModuleDict({"fc": nn.Linear(4, 5)}), tmp_path / "ad")
    assert caught.value.what == (
        "it is a LoRA adapter, which changes the weights of a base model and does not replace them: "
        "rank 2, alpha 8, target modules fc (1), base model org/name"
    )
    assert f"$ transload convert BASE --lora {tmp_path / 'ad'} MERGED.safetensors" in caught.value.fix


def test_model_of_peft_is_filled_as_by_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def model() -> Any:
        torch.manual_seed(0)
        base = nn.ModuleDict({"fc": nn.Linear(4, 5), "emb": nn.Embedding(7, 4), "head": nn.Linear(5, 2)})
        settings = {"target_modules": ["fc", "emb"], "modules_to_save": ["head"], "bias": "all"}
        return peft.get_peft_model(base, peft.LoraConfig(r=2, **settings))

    trained, new = model(), model()
    for parameter in trained.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter.data)
    trained.save_pretrained(tmp_path)
    load_into(new, tmp_path)
    values = new.state_dict()
    assert [name for name, value in trained.state_dict().items() if not torch.equal(value, values[name])] == []
