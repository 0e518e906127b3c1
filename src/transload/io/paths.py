"""What a path leads to: the source of a file, or a folder of files; on this machine, or by URL elsewhere."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from transload.frozen import Frozen
from transload.io.sources import BytesSource, FileSource, ObjectSource, Source, SourceLike, is_url, system_path

if TYPE_CHECKING:
    from transload.io.folder import Folder


def open_source(f: SourceLike) -> Source:
    """A source for anything ``torch.load`` would take, for bytes, or for the file of a URL."""
    if is_url(f):
        from transload.io.remote import open_url

        return open_url(f)
    if isinstance(f, str | os.PathLike):
        return FileSource(f)
    if isinstance(f, bytes | bytearray | memoryview):
        return BytesSource(f)
    if hasattr(f, "read"):
        return ObjectSource(f)
    from transload.errors import NotAFileError

    raise NotAFileError(f"expected a path, bytes or a binary file object, not {type(f).__name__}")


class Place(Frozen):
    """What a path leads to: a single file, or a folder of files, and the name of the index in it if the path is that.

    To find it out elsewhere, a folder must be listed; it keeps what was listed.
    """

    path: SourceLike
    folder: Folder | None = None
    index: str = ""


def place_of(f: SourceLike) -> Place:
    """What a path leads to; bytes and file objects are single files."""
    if not isinstance(f, str | os.PathLike):
        return Place(f)
    path = os.fspath(f)
    if is_url(path):
        from transload.io.remote import remote_set

        return Place(path, *(remote_set(path) or ()))
    return Place(path, *folder_of(path)) if is_folder(path) or path.endswith(".index.json") else Place(path)


def is_set(path: str | os.PathLike[str]) -> bool:
    """Whether a path leads to a checkpoint of several files: a directory, or the index of shards."""
    return place_of(path).folder is not None


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a path leads to a directory."""
    if is_url(path):
        place = place_of(path)
        return place.folder is not None and not place.index
    return os.path.isdir(system_path(os.fspath(path)))


def folder_of(path: str | os.PathLike[str]) -> tuple[Folder, str]:
    """The folder of a checkpoint of several files, and the name of its index if the path is that."""
    if is_url(path):
        from transload.io.remote import remote_folder

        return remote_folder(path)
    from transload.io.folder import Folder

    path = os.fspath(path)
    folder, name = os.path.split(path)
    return (Folder(folder), name) if name.endswith(".index.json") and not is_folder(path) else (Folder(path), "")
