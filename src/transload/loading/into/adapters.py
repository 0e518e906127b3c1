"""LoRA adapters and models of peft: a file has the matrices of an adapter without its name, the model with it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from transload.checkpoint import Tensor
from transload.errors import UsageError
from transload.findings import join_names
from transload.formats.adapters import Pieces, adapter_in

_SLOT = re.compile(
    r"(?:.*\.)?lora_(?:A|B|embedding_A|embedding_B|magnitude_vector)\.(?P<name>[^.]+)(?:\.(?:weight|bias))?"
)
_KIND = re.compile(r"(?P<head>.*\.lora_(?:A|B|embedding_A|embedding_B|magnitude_vector))(?P<last>\.weight|\.bias)?")


def adapters_of(keys: Iterable[str]) -> list[str]:
    """The names of the LoRA adapters of a model, by its keys."""
    matches = (_SLOT.fullmatch(key) for key in keys if "lora_" in key)
    return list(dict.fromkeys(match["name"] for match in matches if match and match["name"] not in ("weight", "bias")))


class AdapterKeys:
    """The keys of an adapter in a model of peft: a function from the names in a file to those of the model."""

    def __init__(self, name: str, slots: Collection[str], in_file: Collection[str]) -> None:
        self.name, self.slots, self.in_file = name, slots, in_file

    def __call__(self, key: str) -> str | None:
        """The model's key; ``None`` for a second copy of a tensor, which peft writes with ``bias="all"``."""
        plain = key.replace(".modules_to_save.", ".")
        if plain != key and plain in self.in_file:
            return None
        return next((slot for slot in self._candidates(key) if slot in self.slots), key)

    def _candidates(self, key: str) -> Iterator[str]:
        if (match := _KIND.fullmatch(key)) is not None:
            yield f"{match['head']}.{self.name}{match['last'] or ''}"
            yield f"{match['head']}.{self.name}.weight"
        plain = key.replace(".modules_to_save.", ".")
        for dot in reversed([at.start() for at in re.finditer(r"\.", plain)]):
            yield f"{plain[:dot]}.modules_to_save.{self.name}{plain[dot:]}"
        yield key
        head, _, last = key.rpartition(".")
        yield f"{head}.base_layer.{last}"

    def has(self, slot: str) -> bool:
        """Whether a key of the model belongs to the adapter."""
        match = _SLOT.fullmatch(slot)
        return f".modules_to_save.{self.name}." in slot or (match is not None and match["name"] == self.name)


def adapter_keys(model: Any, slots: Collection[str], tensors: Iterable[Tensor]) -> AdapterKeys | None:
    """How the keys of an adapter in a file become those of the model; ``None`` if one of the two is none."""
    names = adapters_of(slots)
    every = [*tensors] if names else []
    if not names or adapter_in(every) is None:
        return None
    keys = {tensor.name.replace("/", ".") for tensor in every}
    if adapters_of(keys):  # saved with their names
        return None
    active = getattr(model, "active_adapter", None)
    name = names[0] if len(names) == 1 else active if isinstance(active, str) and active in names else ""
    if not name:
        what = f"the model has several adapters, and none of them alone is active: {join_names(names)}"
        raise UsageError(what, fix="Choose the one to load into: model.set_adapter(NAME).")
    return AdapterKeys(name, slots, keys)


def described(adapter: Pieces, facts: Iterable[tuple[str, str]]) -> str:
    """What an adapter is, in a sentence."""
    known = dict(facts)
    words = [f"{key} {known[key]}" for key in ("rank", "alpha", "target modules", "base model") if key in known]
    what = "it is a LoRA adapter, which changes the weights of a base model and does not replace them"
    return f"{what}: {', '.join(words)}" if adapter.modules and words else what
