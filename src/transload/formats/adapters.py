"""Adapters in the layout of peft: what the names of their tensors mean, and what ``adapter_config.json`` says.

A LoRA adapter has two small matrices for each module of a base model: their product is added to its weight. It may also
have whole tensors, which replace those of the base model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from transload.checkpoint import Tensor
from transload.findings import join_names
from transload.frozen import NamedTuple
from transload.io.sources import Source

CONFIG = "adapter_config.json"
_MAX_CONFIG = 16 << 20  # a pattern for each of many modules takes a megabyte
PREFIX = "base_model.model."
"""How peft's names begin: it wraps the base model twice."""
_PIECE = re.compile(
    r"(?P<module>.*[^.])\.(?P<kind>lora_(?:[AB]|embedding_[AB]|magnitude_vector))"
    r"(?:\.(?P<name>(?!weight$|bias$)[^.]+))?(?:\.(?P<last>weight|bias))?"
)
_OTHER = re.compile(r"(?:^|[._])lora[._](?:[ABab]|down|up)(?:$|[._])")
"""Names in other layouts of LoRA: those of kohya's scripts, for example."""
_EMBEDDINGS = 2  # of the input and of the output, whose whole weights an adapter may have, too
_SHOWN = 8


class Pieces(NamedTuple):
    """The tensors of an adapter.

    ``modules`` has the matrices of each module by their kind: ``lora_A``, ``lora_B``, ``lora_embedding_A``,
    ``lora_B.bias`` and so on. ``others`` are all other tensors by name; neither name begins with ``base_model.model.``.
    """

    modules: dict[str, dict[str, Tensor]]
    others: dict[str, Tensor]

    @property
    def ranks(self) -> list[int]:
        """The ranks of its matrices, each once."""
        kinds = ("lora_A", "lora_embedding_A")
        first = (tensors[kind] for tensors in self.modules.values() for kind in kinds if kind in tensors)
        return sorted({tensor.shape[0] for tensor in first if tensor.shape})

    @property
    def targets(self) -> list[str]:
        """The last components of the names of its modules: ``q_proj``."""
        return list(dict.fromkeys(module.rpartition(".")[2] for module in self.modules))


def pieces_of(tensors: Iterable[tuple[str, Tensor]]) -> Pieces:
    """Sort the tensors of an adapter by module; the names are as peft writes them."""
    pieces = Pieces({}, {})
    for whole, tensor in tensors:
        name = whole.removeprefix(PREFIX)
        match = _PIECE.fullmatch(name)
        if match is None:
            pieces.others[name] = tensor
        else:
            kind = match["kind"] + (".bias" if match["last"] == "bias" else "")
            pieces.modules.setdefault(match["module"], {})[kind] = tensor
    return pieces


def adapter_in(tensors: Iterable[Tensor]) -> Pieces | None:
    """The tensors of a LoRA adapter, ``None`` if they are none, or if the weights of the base model are among them."""
    named = [(tensor.name, tensor) for tensor in tensors]
    if not any("lora" in name for name, _ in named):  # as in most files
        return None
    pieces = pieces_of(named)
    weights = sum(f"{m}.weight" in pieces.others or f"{m}.base_layer.weight" in pieces.others for m in pieces.modules)
    if pieces.modules:
        return pieces if weights <= _EMBEDDINGS and (not weights or weights < len(pieces.modules)) else None
    return pieces if all(_OTHER.search(name) or name.endswith(".alpha") for name in pieces.others) else None


def facts_of(pieces: Pieces, config: Mapping[str, Any] | None = None) -> list[tuple[str, str]]:
    """What to say about an adapter: its ranks, its modules and its base model."""
    config = config or {}
    facts = [("rank", ", ".join(map(str, pieces.ranks)))] if pieces.ranks else []
    if type(alpha := config.get("lora_alpha")) in (int, float):
        patterns = config.get("alpha_pattern")
        more = f", and {len(patterns)} patterns" if isinstance(patterns, dict) and patterns else ""
        facts.append(("alpha", f"{alpha}{more}"))
    if pieces.modules:
        facts.append(("target modules", f"{join_names(pieces.targets, _SHOWN)} ({len(pieces.modules):,})"))
    if isinstance(base := config.get("base_model_name_or_path"), str) and base:
        facts.append(("base model", base))
    words = {"use_rslora": "rsLoRA", "use_dora": "DoRA"}
    if variants := [word for key, word in words.items() if config.get(key)]:
        facts.append(("variant", ", ".join(variants)))
    if pieces.modules and pieces.others:
        facts.append(("whole tensors", f"{len(pieces.others):,}: {join_names([*pieces.others], 2)}"))
    return facts


def read_config(source: Source) -> dict[str, Any]:
    """What ``adapter_config.json`` says; empty if it is no JSON object."""
    try:
        config = json.loads(source.read(0, source.size)) if source.size <= _MAX_CONFIG else None
    except (ValueError, RecursionError):
        config = None
    return config if isinstance(config, dict) else {}
