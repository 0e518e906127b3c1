"""Files that are tensors and nothing else: a dictionary of them, in the order of the file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transload.loading.errors import BrokenFileError, LoadError
from transload.loading.objects import Wrong
from transload.loading.ordinary import Entry, entries, view
from transload.loading.rebuild import Rebuilder

if TYPE_CHECKING:
    import torch

    from transload.checkpoint import Tensor
    from transload.loading.arrival import Arrival
    from transload.loading.files import Piece

__all__ = ["plain_tensors"]


def plain_tensors(piece: Piece, storages: dict[str, torch.UntypedStorage], arrival: Arrival) -> dict[str, Any]:
    """The tensors of a safetensors file by name."""
    checkpoint = piece.checkpoint
    known: dict[Any, Entry] = entries(checkpoint.storages, storages, arrival)
    rebuilder = Rebuilder(arrival)
    made: dict[str, Any] = {}
    for tensor in checkpoint.tensors:
        entry = known.get(tensor.storage)
        found = None
        if entry is not None and entry[2][4] == tensor.dtype:
            found = view(entry, tensor.offset, tensor.shape, tensor.stride)
        made[tensor.name] = _checked(checkpoint.path, tensor, entry, rebuilder) if found is None else found
    return made


def _checked(path: str, tensor: Tensor, entry: Entry | None, rebuilder: Rebuilder) -> Any:
    """A tensor that is empty, on the meta device, or cannot be made."""
    import torch

    where = f"{path} › {tensor.name}"
    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype):
        what = f"its dtype {tensor.dtype} is none of torch {torch.__version__}"
        raise LoadError(what, where=where, fix="A newer torch may have it.")
    if entry is None:
        raise BrokenFileError("its bytes are not in the file", where=where)
    try:
        return rebuilder.strided(entry[0], dtype, tensor.offset, tensor.shape, tensor.stride)
    except Wrong as reason:
        raise BrokenFileError(f"it holds {reason}", where=where) from reason
