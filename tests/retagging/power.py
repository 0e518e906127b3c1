"""A disk whose power fails: every call is noted, and from the notes come all states it may be found in afterwards.

What a disk promises: bytes are safe once their file is flushed, names once their folder is. Before that each write may
have happened or not, in any order, or half; names change in order, up to any of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from transload.io import journal
from transload.io.atomic import flush_directory
from transload.io.sources import journal_path


class Disk:
    """The file system as far as ``io.journal`` changes it. While it is entered, all of those calls come here."""

    def __enter__(self) -> Disk:  # noqa: PYI034 - Self is not in Python 3.10
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(journal, "os", self)
        self._patch.setattr(journal, "write_at", self.write)
        self._patch.setattr(journal, "flush_directory", self.sync_folder)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            return self.create(path, flags, mode)
        return self.change(path, flags) if flags & os.O_RDWR else os.open(path, flags)

    def change(self, path: str, flags: int) -> int:
        return os.open(path, flags)

    def create(self, path: str, flags: int, mode: int) -> int:
        return os.open(path, flags, mode)

    def write(self, descriptor: int, data: bytes, offset: int) -> None:
        assert os.pwrite(descriptor, data, offset) == len(data)

    def ftruncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def sync_folder(self, folder: str) -> None:
        flush_directory(folder)

    def replace(self, old: str, new: str) -> None:
        Path(old).replace(new)

    def unlink(self, path: str) -> None:
        Path(path).unlink()


def journals(path: str | Path) -> tuple[Path, Path]:
    """The journal of a file, and the one that undoes its last change."""
    return Path(journal_path(str(path))), Path(journal.undo_path(str(path)))


class Write(NamedTuple):
    """Bytes written to a file."""

    file: int
    offset: int
    data: bytes


class Cut(NamedTuple):
    """A file of another length."""

    file: int
    size: int


class Sync(NamedTuple):
    """A file flushed."""

    file: int


class Name(NamedTuple):
    """A name for a file, or for none."""

    name: str
    file: int | None


class Folder(NamedTuple):
    """Names flushed."""


Call = Write | Cut | Sync | Name | Folder
World = dict[str, bytes]


class Noting(Disk):
    """A real disk, and notes of what was done to it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Call, ...]] = []
        self.names: dict[str, int] = {}
        self._open: dict[int, int] = {}
        self._count = 0

    def known(self, path: str | Path) -> int:
        """The number of the file behind a name."""
        path = os.path.realpath(path)
        if path not in self.names:
            self._count += 1
            self.names[path] = self._count
        return self.names[path]

    def change(self, path: str, flags: int) -> int:
        descriptor = super().change(path, flags)
        self._open[descriptor] = self.known(path)
        return descriptor

    def create(self, path: str, flags: int, mode: int) -> int:
        assert not os.path.lexists(path)
        descriptor = super().create(path, flags, mode)
        self.names.pop(path, None)
        self._open[descriptor] = self.known(path)
        self.calls.append((Name(path, self.names[path]),))
        return descriptor

    def write(self, descriptor: int, data: bytes, offset: int) -> None:
        super().write(descriptor, data, offset)
        self.calls.append((Write(self._open[descriptor], offset, data),))

    def ftruncate(self, descriptor: int, size: int) -> None:
        super().ftruncate(descriptor, size)
        self.calls.append((Cut(self._open[descriptor], size),))

    def fsync(self, descriptor: int) -> None:
        super().fsync(descriptor)
        self.calls.append((Sync(self._open[descriptor]),))

    def sync_folder(self, folder: str) -> None:
        super().sync_folder(folder)
        self.calls.append((Folder(),))

    def replace(self, old: str, new: str) -> None:
        super().replace(old, new)
        self.names[new] = self.names.pop(old)
        self.calls.append((Name(old, None), Name(new, self.names[new])))

    def unlink(self, path: str) -> None:
        if os.path.lexists(path):
            self.calls.append((Name(path, None),))
        super().unlink(path)
        self.names.pop(path, None)


def worlds(before: World, names: dict[str, int], calls: list[tuple[Call, ...]]) -> Iterator[World]:
    """Every state a disk may be in if the power fails after these calls; the last of them is when all has happened."""
    files = {names[name]: data for name, data in before.items()}
    pending: dict[int, list[Write | Cut]] = {}
    safe = {name: names[name] for name in before}
    later: list[tuple[Call, ...]] = []
    for group in calls:
        call = group[0]
        if isinstance(call, Write | Cut):
            pending.setdefault(call.file, []).append(call)
        elif isinstance(call, Sync):
            files[call.file] = changed(files.get(call.file, b""), pending.pop(call.file, []))
        elif isinstance(call, Name):
            later.append(group)
        else:
            safe = renamed(safe, later)
            later = []
    choices = [list(subsets(waiting)) for waiting in pending.values()]
    for count in range(len(later) + 1):
        for chosen in product(*choices):
            content = dict(files)
            for file, done in zip(pending, chosen, strict=True):
                content[file] = changed(content.get(file, b""), done)
            yield {name: content.get(file, b"") for name, file in renamed(safe, later[:count]).items()}


def subsets(waiting: list[Write | Cut]) -> Iterator[list[Write | Cut]]:
    """Each of them done or not done; or all up to one of which only half is."""
    for chosen in product((False, True), repeat=len(waiting)):
        yield [call for call, done in zip(waiting, chosen, strict=True) if done]
    for place, call in enumerate(waiting):
        if isinstance(call, Write) and len(call.data) > 1:
            yield [*waiting[:place], call._replace(data=call.data[: len(call.data) // 2])]


def changed(data: bytes, calls: list[Write | Cut]) -> bytes:
    """A file after some calls."""
    out = bytearray(data)
    for call in calls:
        if isinstance(call, Cut):
            del out[call.size :]
            out.extend(bytes(call.size - len(out)))
        else:
            out.extend(bytes(max(0, call.offset - len(out))))
            out[call.offset : call.offset + len(call.data)] = call.data
    return bytes(out)


def renamed(names: dict[str, int], calls: list[tuple[Call, ...]]) -> dict[str, int]:
    """The names after some calls."""
    out = dict(names)
    for group in calls:
        for call in group:
            assert isinstance(call, Name)
            if call.file is None:
                out.pop(call.name, None)
            else:
                out[call.name] = call.file
    return out
