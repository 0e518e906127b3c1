"""Names that safetensors keeps in its metadata: tensors that share memory are stored once, under one of their names."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from transload.read.safetensors import MAX_HEADER, PREFIX

if TYPE_CHECKING:
    from transload.content import Content
    from transload.read.source import Source
    from transload.verifying.result import TensorSum

__all__ = ["with_aliases"]


def with_aliases(content: Content, entries: list[TensorSum]) -> list[TensorSum]:
    """The entries, and one for each further name of a tensor that a safetensors file records.

    ``{"lm_head.weight": "embed.weight"}`` in ``__metadata__`` says that ``lm_head.weight`` is ``embed.weight``, as
    ``safetensors.torch.save_model`` writes it and ``load_model`` reads it.
    """
    known = {entry.name: entry for entry in entries}
    more: list[TensorSum] = []
    for file, checkpoint in content.parts:
        if checkpoint.format == "safetensors":
            pairs = _metadata(content.open_file(file)).items()
            more += [known[name]._replace(name=alias) for alias, name in pairs if name in known and alias not in known]
    return [*entries, *more]


def _metadata(source: Source) -> dict[str, str]:
    length = int.from_bytes(source.read(0, PREFIX), "little")
    try:
        table = json.loads(source.read(PREFIX, min(length, MAX_HEADER)))
    except (ValueError, RecursionError):
        return {}
    held = table.get("__metadata__") if isinstance(table, dict) else None
    return {key: value for key, value in held.items() if type(value) is str} if isinstance(held, dict) else {}
