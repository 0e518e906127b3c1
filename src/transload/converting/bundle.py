"""Several files that appear together: each is written beside its place, and all are renamed when the last is there."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from transload.converting.folder import Folder
from transload.converting.old_set import OldSet, clear_links
from transload.errors import TransloadError, UsageError, cannot_write
from transload.io.atomic import AtomicFile, flush_directory, place_of

__all__ = ["Bundle", "refuse_existing"]


def refuse_existing(paths: list[str], *, overwrite: bool) -> None:
    """Refuse to write over what is there, unless that is asked for and it is a plain file."""
    for path in paths:
        if not os.path.lexists(path):
            continue
        if not overwrite:
            raise UsageError("there is a file already", where=path, fix="Choose another name, or say --force.")
        if os.path.exists(path) and not os.path.isfile(path):  # noqa: PTH110, PTH113 - texts throughout, as given
            raise UsageError("what is there is no plain file", where=path, fix="Choose another name.")


class Bundle:
    """Files under way. Left without an error, all of them are there; with one, none is.

    ``is_source`` tells the files that are read: none of them is replaced.
    """

    def __init__(self, *, overwrite: bool, is_source: Callable[[str], bool] | None = None) -> None:
        self._overwrite = overwrite
        self._is_source = is_source or (lambda _: False)
        self._files: list[AtomicFile | Folder] = []
        self._leader = ""
        self._removed: list[str] = []

    def __enter__(self) -> Any:  # typing.Self is younger than Python 3.10
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is None:
            self._commit()
            return
        for file in self._files:
            file.discard()
        if isinstance(error, OSError) and not isinstance(error, TransloadError):
            raise cannot_write(error, self._files[-1].path if self._files else "") from error

    def add(self, path: str, *, leads: bool = False) -> AtomicFile:
        """A file that will be there in the end. The last one added gets its name last.

        One that ``leads`` is the index of the others: it leads to old ones or to new ones, never to both.
        """
        refuse_existing([path], overwrite=self._overwrite)
        if leads:
            self._leader = path
        self._refuse_source(path, path)
        self._files.append(file := AtomicFile(path))
        return file

    def add_folder(self, path: str) -> Folder:
        """A directory that will be there in the end."""
        for name in os.listdir(path) if os.path.isdir(path) else ():  # noqa: PTH112, PTH208
            self._refuse_source(os.path.join(path, name), path)  # noqa: PTH118
        self._files.append(folder := Folder(path, overwrite=self._overwrite))
        return folder

    def _refuse_source(self, path: str, where: str) -> None:
        """A source is never written over, whatever is asked for."""
        if os.path.lexists(path) and self._is_source(path):
            raise UsageError("the target would be the source itself", where=where, fix="Choose another name.")

    @property
    def paths(self) -> list[str]:
        """What will be there."""
        return [file.path for file in self._files]

    def remove(self, path: str) -> None:
        """A file that is not there any more when the others are: what they replace though they are called otherwise."""
        self._refuse_source(path, path)
        self._removed.append(path)

    def _commit(self) -> None:
        before = {file.path: os.path.lexists(file.path) for file in self._files}
        done: list[AtomicFile | Folder] = []
        old = self._prepared([path for path, there in before.items() if there])
        try:
            for file in self._files:
                file.commit()
                done.append(file)
        except BaseException as error:
            for file in self._files[len(done) + 1 :]:
                file.discard()
            for file in done:
                if not before[file.path]:
                    with suppress(OSError):
                        os.unlink(file.path)  # noqa: PTH108
            with suppress(OSError):
                old.restore(touched=bool(done))
            if isinstance(error, OSError):
                raise cannot_write(error, self._files[len(done)].path) from error
            raise
        self._clear(old)

    def _prepared(self, replaced: list[str]) -> OldSet | _Aside:
        """Let everything reach the disk, and keep what is there."""
        try:
            for file in self._files:
                if isinstance(file, AtomicFile):
                    os.fsync(file.descriptor)
            return self._old([path for path in replaced if path.endswith(".safetensors")])
        except BaseException as error:
            for file in self._files:
                file.discard()
            if isinstance(error, OSError) and not isinstance(error, TransloadError):
                raise cannot_write(error, self._files[0].path) from error
            raise

    def _old(self, shards: list[str]) -> OldSet | _Aside:
        """What the index leads to now, where some of it is replaced."""
        if not shards or not self._leader or not os.path.isfile(self._leader):  # noqa: PTH113
            return _Aside("")
        try:
            return OldSet(self._leader, shards)
        except (OSError, ValueError):  # files that cannot have two names, or an index that is none
            return _Aside(self._leader)

    def _clear(self, old: OldSet | _Aside) -> None:
        """Remove what is not needed any more."""
        old.forget()
        if self._leader:
            clear_links(self._leader)
        for path in self._removed:
            with suppress(OSError):
                os.unlink(path)  # noqa: PTH108


class _Aside:
    """An index that is not there while what it leads to is replaced: nobody takes old and new for one set.

    Without a path there is none.
    """

    def __init__(self, index: str) -> None:
        self._index = place_of(index) if index else ""
        folder, name = os.path.split(self._index)
        self._hidden = os.path.join(folder, f".{name[:150]}.{os.getpid()}-{secrets.token_hex(4)}.part")  # noqa: PTH118
        if index:
            os.rename(self._index, self._hidden)  # noqa: PTH104
            flush_directory(folder)

    def restore(self, *, touched: bool) -> None:
        """Put it back, unless it would lead to old and new ones."""
        if self._index and not touched:
            os.rename(self._hidden, self._index)  # noqa: PTH104
        self.forget()

    def forget(self) -> None:
        """It is not needed any more."""
        if self._index:
            with suppress(OSError):
                os.unlink(self._hidden)  # noqa: PTH108
