"""The storages of a pickle, found by the ids it gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transload.loading.objects import Wrong
from transload.read.nodes import Persistent

if TYPE_CHECKING:
    import torch

    from transload.checkpoint import Storage
    from transload.loading.files import Piece

__all__ = ["Held"]

_Found = tuple[Any, Any]  # an untyped storage and its dtype


class Held:
    """The storages that were read, by persistent id; also tensors that a tar archive describes beside its pickle."""

    def __init__(self, piece: Piece, storages: dict[str, torch.UntypedStorage]) -> None:
        import torch

        self._torch = torch
        self._known = {storage.id: self._entry(storage, storages) for storage in piece.checkpoint.storages}
        self._typed: dict[object, Any] = {}
        self._tar = _Tar(piece) if piece.checkpoint.format == "torch-tar" else None

    def _entry(self, storage: Storage, storages: dict[str, torch.UntypedStorage]) -> tuple[Any, Any, str]:
        return storages[storage.id], getattr(self._torch, storage.dtype, None), storage.dtype

    def plain(self, node: object) -> _Found | None:
        """The storage of an id and its dtype; ``None`` if that is anything else than a whole storage with bytes."""
        if type(node) is not Persistent or type(node.id) is not tuple:
            return None
        pid = node.id
        if len(pid) != 5 and (len(pid) != 6 or pid[5] is not None):
            return None
        entry = self._known.get(pid[2]) if pid[0] == "storage" and type(pid[2]) is str else None
        if entry is None or entry[1] is None:
            return None
        # torch makes an empty storage anew for each tensor that has one.
        return (entry[0] if entry[0].nbytes() else self._empty(entry[0])), entry[1]

    def _empty(self, like: Any) -> Any:
        return self._torch.UntypedStorage(0, device=like.device)

    def is_storage(self, node: Persistent) -> bool:
        """Whether an id names a storage."""
        pid = node.id
        return type(pid) is tuple and len(pid) in (5, 6) and pid[0] in ("storage", b"storage")

    def typed(self, node: object) -> Any:
        """The storage of an id as torch gives it to a program: the same one each time."""
        if type(node) is Persistent and self._tar is not None and not self.is_storage(node):
            node = self._tar.storages.get(str(node.id))
        if type(node) is not Persistent or not self.is_storage(node):
            raise Wrong("an id that names no storage")
        pid: Any = node.id
        key = str(pid[2])
        if key not in self._known:
            raise Wrong(f"an id that names the storage {key[:40]!r}, which is not in the file")
        storage, dtype, name = self._known[key]
        if dtype is None:
            raise Wrong(f"a storage of {name}, which this torch does not have")
        view = pid[5] if len(pid) == 6 else None
        if view is not None:
            return self._view(storage, dtype, view)
        if not storage.nbytes():
            return self._wrapped(self._empty(storage), dtype)
        if key not in self._typed:
            self._typed[key] = self._wrapped(storage, dtype)
        return self._typed[key]

    def _view(self, storage: Any, dtype: Any, view: Any) -> Any:
        """A part of a storage, by (key, first element, elements)."""
        match view:
            case (str() as key, int() as first, int() as count) if first >= 0 and count >= 0:
                width = self._torch.empty((), dtype=dtype, device="meta").element_size()
                if (first + count) * width > storage.nbytes():
                    raise Wrong("a part of a storage that reaches beyond it")
                if ("view", key) not in self._typed:
                    part = storage[first * width : (first + count) * width]
                    self._typed["view", key] = self._wrapped(part, dtype)
                return self._typed["view", key]
        raise Wrong("a part of a storage that is none")

    def _wrapped(self, storage: Any, dtype: Any) -> Any:
        return self._torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)

    def outside(self, node: Persistent) -> tuple[Any, ...] | None:
        """Storage, offset, size and stride of a tensor that is described beside the pickle."""
        return None if self._tar is None or type(node.id) is tuple else self._tar.tensors.get(str(node.id))


class _Tar:
    """The tables of a tar archive: its pickle names tensors and storages by number."""

    def __init__(self, piece: Piece) -> None:
        from transload.read import torch_tar

        source = piece.open("")
        found = {member.name.removeprefix("./"): member for member in torch_tar.members(source)[0]}
        reader = torch_tar.Reader(source, found, [])  # the same walk that found its tensors
        reader.read_storages()
        reader.read_tensors()
        self.tensors = reader.tensor_args
        self.storages = reader.storage_ids
