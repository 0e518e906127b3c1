"""Tensors and storages of a checkpoint inside a larger one: a shard, or a record that is a checkpoint itself."""

from __future__ import annotations

from transload.checkpoint import Key, Storage, Tensor


def joined(steps: tuple[Key, ...], name: str) -> str:
    """The name of a thing inside something larger: the steps that lead there, and its own."""
    return "/".join([*map(str, steps), name] if name else map(str, steps))


def moved_tensor(tensor: Tensor, lead: str, steps: tuple[Key, ...] = (), shift: int | None = 0) -> Tensor:
    """A tensor as a part of something larger.

    ``lead`` goes before the id of its storage, ``steps`` before its path and name; its bytes lie ``shift`` further on,
    or, with ``None``, at no place of their own.
    """
    return tensor._replace(
        path=(*steps, *tensor.path),
        name=joined(steps, tensor.name) if steps else tensor.name,
        storage=None if tensor.storage is None else f"{lead}{tensor.storage}",
        parts=tuple([moved_tensor(part, lead, steps, shift) for part in tensor.parts]),
        file_offset=None if tensor.file_offset is None or shift is None else tensor.file_offset + shift,
    )


def moved_storage(
    storage: Storage, lead: str, steps: tuple[Key, ...] = (), shift: int | None = 0, file: str = ""
) -> Storage:
    """A storage as a part of something larger, as ``moved_tensor`` does it; it lies in ``file``."""
    return storage._replace(
        id=f"{lead}{storage.id}",
        offset=None if storage.offset is None or shift is None else storage.offset + shift,
        file=file,
        tensors=tuple([joined(steps, name) for name in storage.tensors]) if steps else storage.tensors,
    )
