"""Tensors and storages of a checkpoint inside a larger one: a shard, or a record that is itself a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from transload.checkpoint import Key, Storage, Tensor
from transload.contents import Item
from transload.io.packed import decompressed, why_not
from transload.io.sources import BytesSource, Slice, Source

# An object of a gigabyte would not be one; a piece of a tensor is read in the same way, but not kept.
_MAX_UNPACKED = 16 << 30
_ZSTD = "stream.zstd/1"


def why_packed(packed: str) -> str:
    """Why an item that is encoded in a way, as DCP calls it, cannot be read here; empty if it can."""
    if not packed:
        return ""
    return f"{packed}, which transload does not know" if packed != _ZSTD else why_not("zstd")


def item_source(source: Source, item: Item, name: str) -> Source:
    """An item of a file, in memory if it is packed; ``EOFError`` or ``ImportError`` if it cannot be unpacked."""
    if not item.packed:
        return Slice(source, item.offset, item.length, name)
    if why := why_packed(item.packed):
        raise ImportError(why)
    return BytesSource(b"".join(unpacked_item(source, item.offset, item.length, _MAX_UNPACKED)), name)


def unpacked_item(source: Source, offset: int, stored: int, limit: int) -> Iterator[bytes]:
    """The content of a packed item, in pieces, at most ``limit`` bytes; raises what ``decompressed`` raises."""
    return decompressed(Slice(source, offset, stored, source.name), "zstd", limit)


def joined(steps: tuple[Key, ...], name: str = "") -> str:
    """The name of something inside a larger checkpoint: the steps that lead there, and its own name."""
    return "/".join([*map(str, steps), name] if name else map(str, steps))


def moved_tensor(
    tensor: Tensor, prefix: str, steps: tuple[Key, ...] = (), shift: int | None = 0, named: tuple[Key, ...] = ()
) -> Tensor:
    """A tensor as part of a larger checkpoint.

    ``prefix`` is prepended to the id of its storage, ``steps`` to its path and name; to the name ``named``, if given.
    Its bytes are ``shift`` bytes further on; ``None`` if they have no offset in the file.
    """
    before = named or steps
    return tensor._replace(
        path=(*steps, *tensor.path),
        name=joined(before, tensor.name) if before else tensor.name,
        storage=None if tensor.storage is None else f"{prefix}{tensor.storage}",
        parts=tuple([moved_tensor(part, prefix, steps, shift, named) for part in tensor.parts]),
        file_offset=None if tensor.file_offset is None or shift is None else tensor.file_offset + shift,
    )


def moved_storage(
    storage: Storage, prefix: str, steps: tuple[Key, ...] = (), shift: int | None = 0, file: str = ""
) -> Storage:
    """A storage as part of a larger checkpoint, with the arguments of ``moved_tensor``; its bytes are in ``file``."""
    return storage._replace(
        id=f"{prefix}{storage.id}",
        offset=None if storage.offset is None or shift is None else storage.offset + shift,
        file=file,
        tensors=tuple([joined(steps, name) for name in storage.tensors]) if steps else storage.tensors,
    )
