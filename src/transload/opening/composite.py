"""Tensors made of other tensors, put together from their parts: sparse, nested, in pieces over several files."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transload.loading.errors import BrokenFileError, LoadError
from transload.nodes import Call
from transload.opening.one import check_one, fill, read_one

if TYPE_CHECKING:
    import torch

    from transload.checkpoint import Tensor
    from transload.loading.files import Piece
    from transload.opening.opened import Opened
    from transload.opening.views import Index

__all__ = ["check_composite", "fill_sharded", "read_composite"]

_Make = Callable[["Opened", "Tensor"], "torch.Tensor"]


def read_composite(
    opened: Opened, tensor: Tensor, *, index: Index, device: str | torch.device, dtype: torch.dtype | None
) -> torch.Tensor:
    """A tensor that is no plain run of elements; read whole, whatever is wanted of it."""
    import torch

    check_composite(opened, tensor)
    make = _MAKERS.get(tensor.kind, _built)
    made = make(opened, tensor)
    if type(index) is not tuple or index:
        made = _indexed(made, index, opened, tensor)
    wanted = dtype if dtype is not None and made.dtype.is_floating_point else made.dtype
    # A class need not know how to be moved where it is already.
    return (
        made if made.is_meta or (made.device, made.dtype) == (torch.device(device), wanted) else made.to(device, wanted)
    )


def _indexed(made: torch.Tensor, index: Index, opened: Opened, tensor: Tensor) -> torch.Tensor:
    try:
        return made[index]
    except (NotImplementedError, RuntimeError) as error:
        what = f"torch cannot take a part of {tensor.name or 'the tensor'}, which is {tensor.kind}: {error}"
        raise LoadError(what, where=opened.checkpoint.path, fix="Read the whole tensor.") from error


def check_composite(opened: Opened, tensor: Tensor) -> None:
    """``LoadError`` if a tensor of this kind is not read by itself, or one of its parts cannot be."""
    if tensor.kind == "sharded" and not _covers(tensor):
        raise BrokenFileError(f"the pieces of {tensor.name} are not all there", where=opened.checkpoint.path)
    if (tensor.kind not in _MAKERS or not (tensor.parts or tensor.kind == "meta")) and _node(opened, tensor) is None:
        kind = f"of the class {tensor.cls}" if tensor.kind == "subclass" else tensor.kind
        what = f"{tensor.name or 'the tensor'} is {kind}, which is not read by itself"
        raise LoadError(what, where=opened.checkpoint.path, fix="Load the whole file instead.")
    for part in tensor.parts:
        check_one(opened, part)


def _node(opened: Opened, tensor: Tensor) -> tuple[Piece, object] | None:
    """The file a tensor is in, and the call there that makes it; ``None`` where there is no such call."""
    found = opened.node(tensor.path)
    return found if found and type(found[1]) is Call else None


def _built(opened: Opened, tensor: Tensor) -> torch.Tensor:
    """By the call that makes it, as the whole file would be loaded."""
    import torch

    from transload.opening.destinations import Destinations
    from transload.opening.subtree import build_node

    found = _node(opened, tensor)
    if found is None:
        raise LoadError(f"{tensor.name} is not read by itself", where=opened.checkpoint.path)
    made = build_node(*found, Destinations(opened.checkpoint, "cpu").arrival)
    if not isinstance(made, torch.Tensor):
        raise BrokenFileError(f"{tensor.name} is no tensor", where=opened.checkpoint.path)
    return made.detach() if made.requires_grad else made


def _meta(opened: Opened, tensor: Tensor) -> torch.Tensor:  # noqa: ARG001 - it has no bytes
    import torch

    return torch.empty_strided(tensor.shape, tensor.stride, dtype=getattr(torch, tensor.dtype), device="meta")


def _device(opened: Opened, tensor: Tensor) -> torch.Tensor:
    import torch

    if not tensor.parts:
        return _built(opened, tensor)
    return read_one(opened, tensor.parts[0]).to(getattr(torch, tensor.dtype))


def _sharded(opened: Opened, tensor: Tensor) -> torch.Tensor:
    import torch

    whole = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="cpu")
    fill_sharded(opened, tensor, whole)
    return whole


def fill_sharded(opened: Opened, tensor: Tensor, target: torch.Tensor) -> None:
    """Each piece read to its place in the whole; the path of a piece ends in the position of its first element."""
    for part in tensor.parts:
        at: tuple[Any, ...] = part.path[len(part.path) - len(part.shape) :]
        window = tuple(slice(first, first + size) for first, size in zip(at, part.shape, strict=True))
        fill(opened, part, target[window])


def _covers(tensor: Tensor) -> bool:
    """Whether the pieces are placed and as many elements as the whole, so that nothing is left as it was in memory."""
    rank = len(tensor.shape)
    placed = all(
        len(part.path) > rank
        and len(part.shape) == rank
        and all(
            type(first) is int and first + size <= end
            for first, size, end in zip(part.path[len(part.path) - rank :], part.shape, tensor.shape, strict=True)
        )
        for part in tensor.parts
    )
    return placed and sum(part.numel for part in tensor.parts) == tensor.numel


_MAKERS: dict[str, _Make] = {"meta": _meta, "device": _device, "sharded": _sharded}
