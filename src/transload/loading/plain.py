"""Files that are tensors and nothing else: a dictionary of them, in the order of the file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transload.loading.errors import BrokenFileError, LoadError
from transload.loading.objects import Wrong
from transload.loading.rebuild import Rebuilder

if TYPE_CHECKING:
    import torch

    from transload.checkpoint import Tensor
    from transload.loading.arrival import Arrival
    from transload.loading.files import Piece

__all__ = ["plain_tensors"]


def plain_tensors(piece: Piece, storages: dict[str, torch.UntypedStorage], arrival: Arrival) -> dict[str, Any]:
    """The tensors of a safetensors file by name."""
    rebuilder = Rebuilder(arrival)
    return {tensor.name: _tensor(piece, tensor, storages, rebuilder) for tensor in piece.checkpoint.tensors}


def _tensor(piece: Piece, tensor: Tensor, storages: dict[str, torch.UntypedStorage], rebuilder: Rebuilder) -> Any:
    import torch

    where = f"{piece.checkpoint.path} › {tensor.name}"
    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype):
        what = f"its dtype {tensor.dtype} is none of torch {torch.__version__}"
        raise LoadError(what, where=where, fix="A newer torch may have it.")
    if tensor.storage is None:
        raise BrokenFileError("its bytes are not in the file", where=where)
    try:
        return rebuilder.strided(storages[tensor.storage], dtype, tensor.offset, tensor.shape, tensor.stride)
    except Wrong as reason:
        raise BrokenFileError(f"it holds {reason}", where=where) from reason
