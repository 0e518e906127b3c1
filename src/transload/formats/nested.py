"""Tensors and storages of a checkpoint inside a larger one: a shard, or a record that is itself a checkpoint."""

from __future__ import annotations

from transload.checkpoint import Key, Storage, Tensor


def joined(steps: tuple[Key, ...], name: str) -> str:
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
