"""LoRA adapters, told by the names of their tensors and by their configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.each import for_each

from transload.opening import inspect

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

MATRICES = {
    "base_model.model.m.q.lora_A.weight": torch.ones(4, 6),
    "base_model.model.m.q.lora_B.weight": torch.ones(6, 4),
    "base_model.model.m.v.lora_A.weight": torch.ones(2, 6),
    "base_model.model.m.v.lora_B.weight": torch.ones(6, 2),
}


def test_folder_is_named_as_an_adapter_with_what_its_configuration_says(tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "base_model_name_or_path": "org/name", "use_rslora": True}
    safetensors_torch.save_file(
        MATRICES | {"base_model.model.head.weight": torch.ones(2)}, tmp_path / "adapter_model.safetensors"
    )
    (tmp_path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    checkpoint = inspect(tmp_path)
    assert checkpoint.flavour == "LoRA adapter"
    assert dict(checkpoint.facts).items() >= {
        ("rank", "2, 4"),
        ("alpha", "16"),
        ("target modules", "q, v (2)"),
        ("base model", "org/name"),
        ("variant", "rsLoRA"),
        ("whole tensors", "1: head.weight"),
    }
    assert "LoRA adapter" in str(checkpoint)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"}), encoding="utf-8")
    assert inspect(tmp_path).flavour == "IA3 adapter"
    for broken in ("", "[", "[1]", '{"peft_type": 7, "lora_alpha": [], "base_model_name_or_path": {}}', "[" * 100_000):
        (tmp_path / "adapter_config.json").write_text(broken, encoding="utf-8")
        assert "alpha" not in dict(inspect(tmp_path).facts)
        assert inspect(tmp_path).flavour == ("7 adapter" if "7" in broken else "LoRA adapter")


def test_file_is_told_by_its_names(tmp_path: Path) -> None:
    weights = {f"base_model.model.m.{name}.base_layer.weight": torch.ones(6) for name in "qv"}
    cases = [
        (MATRICES, "LoRA adapter"),
        ({name.replace(".weight", ".default.weight"): value for name, value in MATRICES.items()}, "LoRA adapter"),
        ({"lora_unet_a.lora_down.weight": torch.ones(2), "lora_unet_a.alpha": torch.ones(())}, "LoRA adapter"),
        (MATRICES | weights, ""),
        ({"q.weight": torch.ones(2), "q.lora_A": torch.ones(2), "q.lora_B": torch.ones(2)}, ""),
        ({"explorations.weight": torch.ones(2)}, ""),
        ({"lora.weight": torch.ones(2)}, ""),
    ]

    def told(tensors: dict[str, Any], flavour: str) -> None:
        torch.save(tensors, tmp_path / "a.pt")
        checkpoint = inspect(tmp_path / "a.pt")
        assert checkpoint.flavour == flavour
        assert ("rank" in dict(checkpoint.facts)) == (flavour != "" and len(tensors) == len(MATRICES))

    for_each(cases, lambda case: told(*case))
