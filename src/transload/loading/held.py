"""The storages of a pickle, found by the ids it gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transload.loading.objects import Wrong
from transload.loading.ordinary import Entry, entries
from transload.nodes import Persistent

if TYPE_CHECKING:
    import torch

    from transload.loading.arrival import Arrival
    from transload.loading.files import Piece

__all__ = ["Held"]


class Held:
    """The storages that were read, by persistent id; also tensors that a tar archive describes beside its pickle."""

    def __init__(self, piece: Piece, storages: dict[str, torch.UntypedStorage], arrival: Arrival) -> None:
        import torch

        self._torch = torch
        self.known = entries(piece.checkpoint.storages, storages, arrival)
        self._typed: dict[object, Any] = {}
        self._tar = _Tar(piece) if piece.checkpoint.format == "torch-tar" else None

    def own(self, entry: Entry) -> Any:
        """The storage for one tensor: torch makes an empty one anew for each that has one."""
        storage, nbytes, _ = entry
        return storage if nbytes else self._torch.UntypedStorage(0, device=storage.device)

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
        if key not in self.known:
            raise Wrong(f"an id that names the storage {key[:40]!r}, which is not in the file")
        storage, nbytes, (*_, dtype, name) = self.known[key]
        if dtype is None:
            raise Wrong(f"a storage of {name}, which this torch does not have")
        view = pid[5] if len(pid) == 6 else None
        if view is not None:
            return self._view(storage, dtype, view)
        if not nbytes:
            return self._wrapped(self.own(self.known[key]), dtype)
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
        from transload.formats import torch_tar

        source = piece.open("")
        found = {member.name.removeprefix("./"): member for member in torch_tar.members(source)[0]}
        reader = torch_tar.Reader(source, found, [])  # the same walk that found its tensors
        reader.read_storages()
        reader.read_tensors()
        self.tensors = reader.tensor_args
        self.storages = reader.storage_ids
