"""A folder of files: what is in it, and the sources of its files. Checkpoints of several files are read through it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import closing
from typing import Literal

from transload.errors import CannotReadError, DirectoryError, ForbiddenFileError, MissingFileError
from transload.frozen import NamedTuple
from transload.io.sources import FileSource, Source, real_path, system_path, was_changed

# A directory of ten million files must not be listed to its end before anything is reported.
MAX_ENTRIES = 10_000
# One that is a checkpoint may have a file for each piece; 64 ranks that save a large model write 138,000.
MAX_MEMBERS = 1_000_000

Entries = tuple[dict[str, int], tuple[str, ...], bool]
"""The files of a folder with their sizes, the folders in it, and whether there are more."""


class Folder:
    """The files below a directory on disk; names are relative to it, with ``/`` between folders.

    ``io.remote`` has one of files elsewhere.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def title(self) -> str:
        """Its own name, even if it was opened as ``.`` or by a link."""
        return os.path.basename(real_path(self.name))

    def list(self, below: str = "", most: int = MAX_ENTRIES) -> Listing:
        """List the folder, or one below it, sorted by name; ``CannotReadError`` if that fails.

        Only one level is listed, so a loop of symbolic links is harmless.
        """
        files: dict[str, int] = {}
        folders: list[str] = []
        links: set[str] = set()
        dangling: list[str] = []
        count = 0
        try:
            with os.scandir(system_path(self.path(below)) or ".") as entries:
                for count, entry in enumerate(entries, 1):
                    if count > most:
                        break
                    if entry.is_symlink():
                        links.add(entry.name)
                    try:
                        if entry.is_dir():
                            folders.append(entry.name)
                        else:
                            files[entry.name] = entry.stat().st_size
                    except OSError:
                        # A link to nothing or to itself: what is left in a cache after its blobs were deleted.
                        dangling.append(entry.name)
        except (OSError, ValueError) as error:
            what = f"cannot list the directory: {getattr(error, 'strerror', None) or error}"
            raise CannotReadError(what, where=self.path(below), errno=getattr(error, "errno", None)) from error
        prefix, ordered = f"{below}/" if below else "", dict(sorted(files.items()))
        return Listing(self, prefix, ordered, tuple(sorted(folders)), links, tuple(sorted(dangling)), count > most)

    def open(self, name: str, *, keep: bool = True) -> Source:
        """The source of a file, which it keeps open, or opens for each read; ``CannotReadError`` if it cannot."""
        return (FileSource if keep else _ReopenedFile)(self.path(name))

    def prepare(self, names: Iterable[str]) -> None:  # noqa: ARG002 - those elsewhere need them
        """Open files that will be needed together, if they are elsewhere and each would have to be waited for."""
        return

    def kind(self, name: str) -> Literal["file", "folder", "link", "other", ""]:
        """What has this name: a plain file, a folder, a link that leads nowhere, something else, or nothing.

        Nothing for a name that is too long, too, and where access is denied.
        """
        path = self.path(name)
        try:
            mode = os.stat(system_path(path)).st_mode
        except (OSError, ValueError):
            return "link" if os.path.islink(path) else ""
        return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"

    def leads_out(self, name: str) -> bool:
        """Whether a name is a link to something outside the folder."""
        return not real_path(self.path(name)).startswith(os.path.join(real_path(self.name or "."), ""))

    def path(self, name: str) -> str:
        """The path of a file, for messages and for programs that take one."""
        return os.path.join(self.name, name) if name else self.name


class _ReopenedFile(FileSource):
    """A file that is opened for each read: a process cannot keep thousands open."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.pace  # noqa: B018 - which is measured once, while it is open
        self.close()

    def _read(self, offset: int, count: int) -> bytes:
        with closing(self._again()) as file:
            return file.read(offset, count)

    def _fill(self, offset: int, buffer: memoryview) -> int:
        with closing(self._again()) as file:
            return file.readinto(offset, buffer, ahead=False)

    def _again(self) -> FileSource:
        file = FileSource(self.name)
        if file.stamp != self.stamp:
            file.close()
            raise was_changed(self.name)
        return file


class Listing(NamedTuple):
    """One level of a folder: files with their sizes, folders, and dangling links; ``prefix`` leads there from the top.

    ``links`` are the names that are links. ``cut`` is whether entries are missing: there are too many, or they could
    not be listed.
    """

    folder: Folder
    prefix: str
    files: dict[str, int]
    folders: tuple[str, ...] = ()
    links: frozenset[str] | set[str] = frozenset()
    dangling: tuple[str, ...] = ()
    cut: bool = False

    @property
    def entries(self) -> int:
        """The number of entries in it."""
        return len(self.files) + len(self.folders) + len(self.dangling)

    def text(self, name: str) -> str:
        """The text of a small file such as ``latest``; empty if it does not exist."""
        try:
            with closing(self.folder.open(self.prefix + name)) as source:
                return source.read(0, 4096).decode("utf-8", "replace").strip()
        except CannotReadError as error:
            # Some stores answer 403 for what does not exist. After other errors, another training step would be read.
            absent = isinstance(error, MissingFileError | ForbiddenFileError | DirectoryError)
            if name in self.files or not absent:
                raise
            return ""


def relative_path(name: object) -> str:
    """A path from a file, normalized; empty if it would lead out of the directory.

    >>> relative_path("a/./b.bin"), relative_path("../b.bin"), relative_path("/etc/passwd")
    ('a/b.bin', '', '')

    Links may lead out of it: a download cache is made of them, and whoever could plant one could have planted the file.
    """
    if type(name) is not str or not name or "\0" in name or "\\" in name or name[1:2] == ":" or name[0] == "/":
        return ""
    steps = [step for step in name.split("/") if step not in ("", ".")]
    # Windows drops a space or a dot at the end: to it, ".. " is "..".
    return "" if any(not step.strip(". ") for step in steps) else "/".join(steps)
