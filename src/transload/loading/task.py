"""The work of a load, after all questions are answered: the storages are read, then the object is built over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from transload.loading.errors import LoadError

if TYPE_CHECKING:
    from transload.loading.arrival import Arrival
    from transload.loading.files import Files, Piece
    from transload.loading.storages import How

__all__ = ["Task"]


class Task:
    """Loads what ``files`` hold to where ``arrival`` puts it."""

    def __init__(self, files: Files, arrival: Arrival, how: How) -> None:
        self._files = files
        self._arrival = arrival
        self._how = how

    def build(self, encoding: str) -> Any:
        """The object, through the fixed table: nothing in the file is run."""
        from transload.loading.build import build

        def built(piece: Piece, storages: Any) -> Any:
            main = next((pickle for pickle in piece.checkpoint.pickles if pickle.main), None)
            if main is None:
                raise LoadError("there is no object in it", where=piece.checkpoint.path)
            return build(piece, main, storages, self._arrival, encoding)

        return self._each(built)

    def trust(self, pickle_module: Any, arguments: dict[str, Any]) -> Any:
        """The object, by the file's own pickle, or as the program it is."""
        kind = self._files.checkpoint.format
        if kind in ("torchscript", "torch-export"):
            return self._program()
        from transload.loading.trusted import load_trusted

        def unpickled(piece: Piece, storages: Any) -> Any:
            source = piece.open(piece.index)
            named = {"device_of": self._arrival.device, "pickle_module": pickle_module, **arguments}
            return load_trusted(source, piece.checkpoint, storages.__getitem__, **named)

        return self._each(unpickled)

    def _program(self) -> Any:
        from transload.loading.scripted import load_exported, load_script

        (piece,) = self._files.pieces
        if piece.index:
            fix = "Zip the folder itself, stored, and load that."
            raise LoadError("this program is unpacked", where=piece.checkpoint.path, fix=fix)
        load = load_script if piece.checkpoint.format == "torchscript" else load_exported
        return load(piece.open(""), piece.checkpoint, self._arrival.device, path=piece.path)

    def _each(self, make: Any) -> Any:
        """What all pieces hold: one object, or the dictionaries of shards put together."""
        from transload.loading.plain import plain_tensors
        from transload.loading.storages import read_storages

        made = []
        with _told(self._arrival):
            for piece in self._files.pieces:
                storages = read_storages(piece, self._arrival, self._how)
                plain = piece.checkpoint.format == "safetensors"
                made.append(plain_tensors(piece, storages, self._arrival) if plain else make(piece, storages))
        whole = self._files.checkpoint
        if whole.format == "sharded":
            return _joined(made, whole.path)
        if not made:
            raise LoadError("there is nothing in it to load", where=whole.path)
        return made[0]


def _joined(shards: list[Any], path: str) -> dict[Any, Any]:
    """The dictionaries of all shards as one."""
    out: dict[Any, Any] = {}
    for shard in shards:
        if not isinstance(shard, Mapping):
            what = f"a shard holds {type(shard).__name__}, not a dictionary of tensors"
            raise LoadError(what, where=path, fix="Load the shards one by one.")
        out.update(shard)
    return out


@contextmanager
def _told(arrival: Arrival) -> Iterator[None]:
    """Tell torch where things go while a file is loaded: functions of torch and of programs ask it."""
    import torch

    told: Any = getattr(torch.serialization, "_serialization_tls", None)
    if not hasattr(told, "map_location"):
        yield
        return
    before = told.map_location
    try:
        told.map_location = arrival.locations or None
        yield
    finally:
        told.map_location = before
