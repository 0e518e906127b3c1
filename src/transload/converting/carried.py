"""Tensors that only torch's own format holds (sparse, quantized, nested): their calls, taken over as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transload.dtypes import ITEMSIZE
from transload.formats.tensors import called
from transload.nodes import Call, Global, Persistent

if TYPE_CHECKING:
    from transload.checkpoint import Checkpoint, Key, Storage
    from transload.converting.selection import Named

__all__ = ["KINDS", "carried", "key_of", "plain_dtype", "rewritten"]

KINDS = ("quantized", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "nested")

_FORMATS = ("torch-zip", "torch-legacy", "torch-directory")
# What weights_only calls, and reads, to make one.
_CALLED = frozenset(
    {
        "collections.OrderedDict",
        "torch.Size",
        "torch.serialization._get_layout",
        "torch._utils._rebuild_nested_tensor",
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_qtensor",
        "torch._utils._rebuild_sparse_csr_tensor",
        "torch._utils._rebuild_sparse_tensor",
        "torch._utils._rebuild_tensor",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
    }
)
_MAX_PARTS = 10_000
_ATOMS = frozenset({type(None), bool, int, float, str})


def carried(checkpoint: Checkpoint, named: tuple[Named, ...]) -> dict[tuple[Key, ...], Call]:
    """The calls of such tensors, by path: of those whose calls hold nothing but what belongs there."""
    from transload.converting.below import at

    if checkpoint.format not in _FORMATS:
        return {}
    keys = {storage.key for storage in checkpoint.storages}
    found: dict[tuple[Key, ...], Call] = {}
    for each in named:
        if each.tensor.kind in KINDS:
            node = at(checkpoint.root, each.tensor.path)
            if type(node) is Call and _is_clean(node, keys):
                found[each.tensor.path] = node
    return found


def _is_clean(node: Call, keys: set[str]) -> bool:
    parts: list[Any] = [node]
    for part in parts:  # grows as it goes; what is shared is counted again
        inside = _inside(part, keys)
        if inside is None or len(parts) > _MAX_PARTS:
            return False
        parts += inside
    return True


def _inside(part: Any, keys: set[str]) -> tuple[Any, ...] | None:
    """What is to be looked at next; ``None`` for what does not belong into the call of a tensor."""
    if type(part) is tuple:
        return part
    if type(part) is Call:
        clean = called(part) in _CALLED and not part.states and not part.appended and part.kind == "reduce"
        return (part.args, *(part.items or [])) if clean else None
    if type(part) is Persistent:
        return () if key_of(part) in keys else None
    if type(part) is Global:
        return () if part.module == "torch" else None
    return () if type(part) in _ATOMS else None


def key_of(node: Persistent) -> str:
    """The file's own name of a storage; empty if it has another form."""
    pid: Any = node.id
    whole = type(pid) is tuple and len(pid) >= 5 and pid[0] == "storage" and type(pid[1]) is Global
    return pid[2] if whole and type(pid[2]) is str else ""


def rewritten(node: Any, storage: Callable[[Persistent], Persistent]) -> Any:
    """A clean call with other storages. It is no deeper than the tensors that readers understand."""
    if type(node) is Persistent:
        return storage(node)
    if type(node) is tuple:
        return tuple(rewritten(part, storage) for part in node)
    if type(node) is Call:
        made = Call(node.callee, rewritten(node.args, storage), node.kind, 0)
        made.items = [rewritten(part, storage) for part in node.items] if node.items else None
        return made
    return node


_NUMBERS = {"qint8": "int8", "quint8": "uint8", "qint32": "int32"}


def plain_dtype(storage: Storage) -> str:
    """The dtype by which the bytes of a storage are read: they may have to be turned round."""
    dtype = _NUMBERS.get(storage.dtype, storage.dtype)
    width = ITEMSIZE.get(dtype, 0)
    return dtype if width and not dtype.startswith("q") and storage.nbytes % width == 0 else "uint8"
