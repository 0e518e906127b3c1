"""Names that safetensors keeps in its metadata: tensors that share memory are stored once, under one of their names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transload.formats.safetensors import header_metadata

if TYPE_CHECKING:
    from transload.content import Content
    from transload.verifying.result import TensorSum

__all__ = ["with_aliases"]


def with_aliases(content: Content, entries: list[TensorSum]) -> list[TensorSum]:
    """The entries, and one for each further name of a tensor that a safetensors file records.

    ``{"lm_head.weight": "embed.weight"}`` in ``__metadata__`` says that ``lm_head.weight`` is ``embed.weight``, as
    ``safetensors.torch.save_model`` writes it and ``load_model`` reads it.
    """
    known = {entry.name: entry for entry in entries}
    more: dict[str, TensorSum] = {}  # each shard may have the metadata of all
    for file, checkpoint in content.parts:
        if checkpoint.format == "safetensors":
            pairs = header_metadata(content.open_file(file)).items()
            found = {alias: name for alias, name in pairs if name in known and alias not in known and alias != "format"}
            more.update({alias: known[name]._replace(name=alias) for alias, name in found.items()})
    return [*entries, *more.values()]
