"""A checkpoint with the files its bytes lie in held open: what was read to know it is what its tensors come from."""

from __future__ import annotations

import os
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING

from transload.errors import CannotReadError, UsageError
from transload.formats import no_collecting
from transload.io.sources import Source, SourceLike
from transload.loading.errors import BrokenFileError, LoadError, NotACheckpointError, os_error
from transload.loading.files import Files, Piece, open_beside
from transload.opening.inflating import Inflating
from transload.opening.paths import NOWHERE, Paths

if TYPE_CHECKING:
    from transload.checkpoint import Checkpoint, Key, Record, Storage

__all__ = ["Opened", "open_checkpoint"]


class Opened:
    """A judged checkpoint and its open files. Where it is a directory, ``folder`` is where names of files begin."""

    def __init__(self, files: Files, folder: str | None) -> None:
        self.checkpoint: Checkpoint = files.checkpoint
        self.closed = False
        self._files = files
        self._folder = folder
        self._storages = {storage.id: storage for storage in self.checkpoint.storages}
        self._pieces = {piece.path: piece for piece in files.pieces}
        self._sources: dict[str, Source] = {}
        self._inflating: dict[str, Source] = {}
        self._lock = Lock()

    def check_open(self) -> None:
        """``UsageError`` if it was closed."""
        if self.closed:
            raise UsageError("this checkpoint was closed", where=self.checkpoint.path, fix="Open it again to read.")

    def storage(self, id: str | None) -> Storage | None:
        """The storage of that id."""
        return self._storages.get(id or "")

    def file(self, name: str = "") -> Source:
        """One of its files, by the name storages give it; it stays open until all are closed."""
        with self._lock:
            self.check_open()
            known = self._sources.get(name)
            if known is None:
                known = self._sources[name] = self._open(name)
        return known

    def _open(self, name: str) -> Source:
        piece = self.piece(name)
        if piece is not None:
            return piece.open(name)
        return open_beside(os.path.join(self._folder or "", name), len(self._sources))  # noqa: PTH118 - pathlib costs ten milliseconds

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The checkpoints of all its files that are one by themselves."""
        return self._files.pieces

    def piece(self, name: str) -> Piece | None:
        """The checkpoint of one of its files; ``None`` if that was not read as one by itself."""
        if self._folder is None:
            return self._files.pieces[0]
        return self._pieces.get(os.path.join(self._folder, name)) or self._pieces.get("")  # noqa: PTH118 - as below

    def node(self, path: tuple[Key, ...]) -> tuple[Piece, object] | None:
        """The file of which a path leads somewhere, and the inert node there; ``None`` if it leads nowhere."""
        for piece, paths in zip(self.pieces, self._paths, strict=True):
            found = paths.at(path)
            if found is not NOWHERE:
                return piece, found
        return None

    @cached_property
    def _paths(self) -> list[Paths]:
        return [Paths(piece.checkpoint.root) for piece in self.pieces]

    def bytes_of(self, storage: Storage) -> tuple[Source, int]:
        """Where to read a storage, and the position of its first byte; ``LoadError`` if there is no such place."""
        if storage.offset is not None:
            return self.file(storage.file), storage.offset
        if not storage.compressed:
            raise BrokenFileError(f"storage {storage.key} is not in the file", where=self.checkpoint.path)
        source = self.file(storage.file)
        with self._lock:
            known = self._inflating.get(storage.id)
            if known is None:
                known = self._inflating[storage.id] = self._inflate(storage, source)
        return known, 0

    def _inflate(self, storage: Storage, source: Source) -> Source:
        record = self._record(storage, source)
        if record is None or record.offset is None or record.method != 8:
            what = f"storage {storage.key} lies in a record packed in a way torch does not read ({storage.record})"
            raise LoadError(what, where=self.checkpoint.path)
        return Inflating(source, record.offset, record.stored, record.size)

    def _record(self, storage: Storage, source: Source) -> Record | None:
        from transload.formats.zip_index import read_index

        known = {record.name: record for record in self.checkpoint.records} if self._folder is None else {}
        return (known or read_index(source).records).get(storage.record)

    def check_unchanged(self) -> None:
        """``BrokenFileError`` if somebody wrote to a file since it was opened."""
        self._files.check_unchanged()

    def close(self) -> None:
        """Close all files; twice does no harm."""
        with self._lock:
            self.closed = True
            for source in self._sources.values():
                source.close()
            self._files.close()
            self._sources.clear()
            self._inflating.clear()


def open_checkpoint(f: SourceLike) -> Opened:
    """Read what a path, bytes or a file object holds, judge it, and keep it open.

    ``NotACheckpointError`` if it is none; a damaged one opens: what is left of it can be read.
    """
    folder = _folder(os.fspath(f)) if isinstance(f, str | os.PathLike) else None
    try:
        with no_collecting():
            files = Files(f)
    except CannotReadError as error:
        raise os_error(error) from error
    if files.checkpoint.integrity == "not-a-checkpoint":
        files.close()
        raise _other(files.checkpoint)
    return Opened(files, folder)


def _folder(path: str) -> str | None:
    if os.path.isdir(path):  # noqa: PTH112 - as above
        return path
    return os.path.dirname(path) if path.endswith(".index.json") else None  # noqa: PTH120 - as above


def _other(checkpoint: Checkpoint) -> NotACheckpointError:
    """What the file is instead."""
    finding = next((found for found in checkpoint.findings if found.severity == "error"), None)
    what = finding.title if finding else "it is no checkpoint"
    return NotACheckpointError(what, where=checkpoint.path, fix="\n".join(finding.fix) if finding else "")
