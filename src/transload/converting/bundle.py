"""Several files that appear together: each is written beside its place, and all are renamed when the last is there."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from transload.errors import TransloadError, UsageError
from transload.writing.atomic import Beside, flush_directory, place_of
from transload.writing.errors import cannot_write

__all__ = ["Bundle", "Folder", "refuse_existing"]


def refuse_existing(paths: list[str], *, overwrite: bool) -> None:
    """Refuse to write over what is there, unless that is asked for and it is a plain file."""
    for path in paths:
        if not os.path.lexists(path):
            continue
        if not overwrite:
            raise UsageError("there is a file already", where=path, fix="Choose another name, or say --force.")
        if os.path.exists(path) and not os.path.isfile(path):  # noqa: PTH110, PTH113 - texts throughout, as given
            raise UsageError("what is there is no plain file", where=path, fix="Choose another name.")


class Folder:
    """A directory that takes its place when all of it has reached the disk. What it replaces was written by us."""

    def __init__(self, path: str, *, overwrite: bool) -> None:
        self.path = path.rstrip("/" + os.sep) or path
        self._overwrite = overwrite
        self._refuse()
        lead, name = os.path.split(os.path.abspath(self.path))  # noqa: PTH100 - texts throughout, as given
        self.hidden = os.path.join(lead, f".{name[:150]}.{os.getpid()}-{secrets.token_hex(4)}.part")  # noqa: PTH118
        try:
            os.mkdir(self.hidden)  # noqa: PTH102
        except OSError as error:
            raise cannot_write(error, path) from error

    def _refuse(self) -> None:
        if not os.path.lexists(self.path):
            return
        if not os.path.isdir(self.path):  # noqa: PTH112
            raise UsageError("there is a file already", where=self.path, fix="Choose another name.")
        held = os.listdir(self.path)  # noqa: PTH208
        if held and not (self._overwrite and _is_ours(held)):
            fix = "Choose another name." if self._overwrite else "Choose another name, or say --force."
            raise UsageError("there is a directory already, and it is not empty", where=self.path, fix=fix)

    def commit(self) -> None:
        """Rename it; what was there before is removed when that is done."""
        old = f"{self.hidden}.old"
        try:
            self._refuse()
            flush_directory(self.hidden)
            if os.path.isdir(self.path):  # noqa: PTH112
                os.rename(self.path, old)  # noqa: PTH104
            os.rename(self.hidden, self.path)  # noqa: PTH104
        except BaseException:
            if os.path.isdir(old) and not os.path.lexists(self.path):  # noqa: PTH112
                os.rename(old, self.path)  # noqa: PTH104
            self.discard()
            raise
        flush_directory(os.path.dirname(os.path.abspath(self.path)))  # noqa: PTH100, PTH120
        _remove(old)

    def discard(self) -> None:
        """Leave nothing behind."""
        _remove(self.hidden)


def _is_ours(names: list[str]) -> bool:
    return "index.json" in names and all(re.fullmatch(r"index\.json|[0-9]{6,}\.bin", name) for name in names)


def _remove(folder: str) -> None:
    """Remove a directory of plain files."""
    with suppress(OSError):
        for name in os.listdir(folder):  # noqa: PTH208
            os.unlink(os.path.join(folder, name))  # noqa: PTH108, PTH118
        os.rmdir(folder)  # noqa: PTH106


class Bundle:
    """Files under way. Left without an error, all of them are there; with one, none is.

    ``is_source`` tells the files that are read: none of them is replaced.
    """

    def __init__(self, *, overwrite: bool, is_source: Callable[[str], bool] | None = None) -> None:
        self._overwrite = overwrite
        self._is_source = is_source or (lambda _: False)
        self._files: list[Beside | Folder] = []
        self._leader = ""

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

    def add(self, path: str, *, leads: bool = False) -> Beside:
        """A file that will be there in the end. The last one added gets its name last.

        One that ``leads`` tells which others belong together: it is not there while they are being replaced, so that
        nobody takes old and new ones for one set, even if that is never finished.
        """
        refuse_existing([path], overwrite=self._overwrite)
        if leads:
            self._leader = place_of(path)
        self._refuse_source(path, path)
        self._files.append(file := Beside(path))
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

    def _commit(self) -> None:
        before = {file.path: os.path.lexists(file.path) for file in self._files}
        done: list[Beside | Folder] = []
        aside = ""
        try:
            for file in self._files:
                if isinstance(file, Beside):
                    os.fsync(file.descriptor)
            aside = self._set_aside(before)
            for file in self._files:
                file.commit()
                done.append(file)
        except BaseException as error:
            if aside and not done:
                os.rename(aside, self._leader)  # noqa: PTH104
            for file in self._files[len(done) + 1 :]:
                file.discard()
            for file in done:
                if not before[file.path]:
                    with suppress(OSError):
                        os.unlink(file.path)  # noqa: PTH108
            if isinstance(error, OSError):
                raise cannot_write(error, self._files[len(done)].path) from error
            raise
        finally:
            with suppress(OSError):
                os.unlink(aside)  # noqa: PTH108

    def _set_aside(self, before: dict[str, bool]) -> str:
        """Where the old leader is now; empty if it can stay until it is replaced, for it leads to nothing new."""
        replaced = sum(before.values())
        if not os.path.isfile(self._leader) or replaced < 2:  # noqa: PTH113
            return ""
        folder, name = os.path.split(self._leader)
        aside = os.path.join(folder, f".{name[:150]}.{os.getpid()}-{secrets.token_hex(4)}.part")  # noqa: PTH118
        os.rename(self._leader, aside)  # noqa: PTH104
        flush_directory(folder)
        return aside
