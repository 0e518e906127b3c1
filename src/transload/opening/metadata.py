"""What a checkpoint holds beside its tensors, as plain values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transload.formats.safetensors import header_metadata
from transload.opening.paths import NOWHERE, plain

if TYPE_CHECKING:
    from transload.checkpoint import Leaf
    from transload.opening.opened import Opened

__all__ = ["metadata_of"]


def metadata_of(opened: Opened) -> dict[str, Any]:
    """``__metadata__`` of a safetensors file, or of all shards together; the plain values of any other, by name."""
    checkpoint = opened.checkpoint
    if checkpoint.format == "safetensors":
        files = sorted({storage.file for storage in checkpoint.storages} or {""})
    else:
        files = [part.name for part in checkpoint.parts if ("format", "safetensors") in part.facts]
    out: dict[str, Any] = {}
    for name in files:
        out |= header_metadata(opened.file(name))
    for leaf in checkpoint.leaves:
        out.setdefault(leaf.name, _value(opened, leaf))
    return out


def _value(opened: Opened, leaf: Leaf) -> Any:
    """The value itself where it is plain; else what its text says."""
    held = opened.node(leaf.path)
    found = plain(held[1]) if held else NOWHERE
    if found is not NOWHERE:
        return found
    try:
        return _KINDS.get(leaf.kind, str)(leaf.text)
    except ValueError:  # an integer too long to be written out
        return leaf.text


_KINDS: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "bool": lambda text: text == "True",
    "None": lambda _: None,
}
