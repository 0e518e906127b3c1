"""The second names of tensors in safetensors files, which hold every tensor once: where its writers note them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transload.checkpoint import Checkpoint
    from transload.tensors import Content

__all__ = ["metadata_of", "with_second_names"]


def metadata_of(content: Content) -> dict[str, str]:
    """What the safetensors files of a checkpoint say of themselves, put together."""
    from transload.formats.safetensors import header_metadata, looks_like
    from transload.formats.zip import starts_like_zip

    found: dict[str, str] = {}
    if content.checkpoint.format not in ("safetensors", "sharded", "directory"):
        return found
    for file in dict.fromkeys(storage.file for storage in content.checkpoint.storages):
        source = content.open_file(file)
        if looks_like(source) and not starts_like_zip(source):
            found.update(header_metadata(source))
    return found


def with_second_names(checkpoint: Checkpoint, metadata: dict[str, str]) -> tuple[Checkpoint, dict[str, str]]:
    """The checkpoint with the tensors that have two names under both; and what else the metadata says."""
    by_name = {tensor.name: tensor for tensor in checkpoint.tensors}
    names = {a: b for a, b in metadata.items() if b in by_name and a not in by_name and a != "format"}
    more = [by_name[kept]._replace(name=name, path=(name,)) for name, kept in names.items()]
    rest = {key: value for key, value in metadata.items() if key not in names and key != "format"}
    return replace(checkpoint, tensors=(*checkpoint.tensors, *more)), rest
