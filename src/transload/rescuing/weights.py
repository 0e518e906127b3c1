"""The whole tensors of a program that is not: a dictionary of them by name, as ``torch.save`` writes it."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from transload.checkpoint import Checkpoint, Storage, Tensor
from transload.dtypes import ITEMSIZE, STORAGES
from transload.errors import RescueError
from transload.io.sources import Source
from transload.nodes import Call, Dict, Global, Persistent
from transload.rescuing.layout import Item, laid_out
from transload.rescuing.parts import Assembly, Part, literal

__all__ = ["weights_of"]

_CLASSES = {dtype: name for name, dtype in reversed(STORAGES.items()) if "Untyped" not in name}
_ROOT = b"archive/"
_CHUNK = 1 << 20


def weights_of(source: Source, checkpoint: Checkpoint, tensors: Sequence[Tensor]) -> Source:
    """A file with these tensors, on the CPU, sharing storages as they did."""
    from transload.formats.pickle_writer import dumps

    storages = {storage.id: storage for storage in checkpoint.storages}
    plain = [t for t in tensors if t.kind == "strided" and t.dtype in _CLASSES and t.storage in storages]
    if not plain:
        raise RescueError("none of its tensors can stand by itself", where=source.name, fix="Have them filled: --fill.")
    used = list(dict.fromkeys(tensor.storage or "" for tensor in plain))
    keys = {ident: str(number) for number, ident in enumerate(used)}
    items: list[object] = []
    for tensor in plain:
        items += (tensor.name, _node(tensor, storages[tensor.storage or ""], keys))
    index = dumps(Dict(items))
    big = any(storages[ident].big_endian for ident in used)
    records = [(b"data.pkl", literal(index)), (b"byteorder", literal(b"big" if big else b"little"))]
    records += [(b"data/" + keys[ident].encode(), _bytes(source, storages[ident])) for ident in used]
    records.append((b"version", literal(b"3\n")))
    return Assembly((part for part, _, _ in laid_out([_item(*record) for record in records])), source.name)


def _bytes(source: Source, storage: Storage) -> Part:
    return Part(source, storage.offset or 0, storage.nbytes)


def _item(name: bytes, part: Part) -> Item:
    value = 0
    for start in range(0, part.length, _CHUNK):
        value = crc32(part.source.read(part.offset + start, min(_CHUNK, part.length - start)), value)
    flags = 0x0808 if part.length else 0x0800
    return Item(_ROOT + name, (part,), part.length, part.length, value, flags=flags)


def _node(tensor: Tensor, storage: Storage, keys: dict[str, str]) -> Call:
    numel = storage.nbytes // ITEMSIZE[tensor.dtype]
    kind = Global("torch", _CLASSES[tensor.dtype], 0)
    held = Persistent(("storage", kind, keys[storage.id], "cpu", numel), 0)
    hooks = Call(Global("collections", "OrderedDict", 0), (), "reduce", 0)
    args = (held, tensor.offset, tensor.shape, tensor.stride, False, hooks)
    return Call(Global("torch._utils", "_rebuild_tensor_v2", 0), args, "reduce", 0)
