"""Simulated power loss: calls are recorded, and from the record follow all states the disk may be in afterwards.

The guarantees: bytes are durable once their file is flushed, names once their folder is. Before that, each write may
be present, absent or torn, independently of the others; name changes happen in order, up to any of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from transload.io import journal
from transload.io.atomic import flush_directory, write_at
from transload.io.sources import journal_path


class Disk:
    """The file system calls of ``io.journal``. While it is entered as a context, all of them go through this object."""

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
        write_at(descriptor, data, offset)

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
    """The paths of the journal of a file and of the journal that undoes its last change."""
    return Path(journal_path(str(path))), Path(journal.undo_path(str(path)))


class Write(NamedTuple):
    """Bytes written to a file."""

    file: int
    offset: int
    data: bytes


class Truncate(NamedTuple):
    """A file set to another length."""

    file: int
    size: int


class Sync(NamedTuple):
    """A file flushed."""

    file: int


class Name(NamedTuple):
    """A name assigned to a file, or removed."""

    name: str
    file: int | None


class SyncFolder(NamedTuple):
    """The folder flushed."""


Call = Write | Truncate | Sync | Name | SyncFolder
DiskState = dict[str, bytes]


class RecordingDisk(Disk):
    """A real disk that records the calls that change it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Call, ...]] = []
        self.names: dict[str, int] = {}
        self._open: dict[int, int] = {}
        self._count = 0

    def file_number(self, path: str | Path) -> int:
        """The number of the file behind a name."""
        path = os.path.realpath(path)
        if path not in self.names:
            self._count += 1
            self.names[path] = self._count
        return self.names[path]

    def change(self, path: str, flags: int) -> int:
        descriptor = super().change(path, flags)
        self._open[descriptor] = self.file_number(path)
        return descriptor

    def create(self, path: str, flags: int, mode: int) -> int:
        assert not os.path.lexists(path)
        descriptor = super().create(path, flags, mode)
        self.names.pop(path, None)
        self._open[descriptor] = self.file_number(path)
        self.calls.append((Name(path, self.names[path]),))
        return descriptor

    def write(self, descriptor: int, data: bytes, offset: int) -> None:
        super().write(descriptor, data, offset)
        self.calls.append((Write(self._open[descriptor], offset, data),))

    def ftruncate(self, descriptor: int, size: int) -> None:
        super().ftruncate(descriptor, size)
        self.calls.append((Truncate(self._open[descriptor], size),))

    def fsync(self, descriptor: int) -> None:
        super().fsync(descriptor)
        self.calls.append((Sync(self._open[descriptor]),))

    def sync_folder(self, folder: str) -> None:
        super().sync_folder(folder)
        self.calls.append((SyncFolder(),))

    def replace(self, old: str, new: str) -> None:
        super().replace(old, new)
        self.names[new] = self.names.pop(old)
        self.calls.append((Name(old, None), Name(new, self.names[new])))

    def unlink(self, path: str) -> None:
        if os.path.lexists(path):
            self.calls.append((Name(path, None),))
        super().unlink(path)
        self.names.pop(path, None)


def possible_states(before: DiskState, names: dict[str, int], calls: list[tuple[Call, ...]]) -> Iterator[DiskState]:
    """Every state a disk may be in if the power fails after these calls; in the last one, all names are changed."""
    files = {names[name]: data for name, data in before.items()}
    pending: dict[int, list[Write | Truncate]] = {}
    synced_names = {name: names[name] for name in before}
    pending_names: list[tuple[Call, ...]] = []
    for group in calls:
        call = group[0]
        if isinstance(call, Write | Truncate):
            pending.setdefault(call.file, []).append(call)
        elif isinstance(call, Sync):
            files[call.file] = content_after(files.get(call.file, b""), pending.pop(call.file, []))
        elif isinstance(call, Name):
            pending_names.append(group)
        else:
            synced_names = names_after(synced_names, pending_names)
            pending_names = []
    choices = [list(subsets(writes)) for writes in pending.values()]
    for count in range(len(pending_names) + 1):
        for chosen in product(*choices):
            content = dict(files)
            for file, done in zip(pending, chosen, strict=True):
                content[file] = content_after(content.get(file, b""), done)
            yield {
                name: content.get(file, b"") for name, file in names_after(synced_names, pending_names[:count]).items()
            }


def subsets(calls: list[Write | Truncate]) -> Iterator[list[Write | Truncate]]:
    """Every subset of the calls; and every prefix whose last write is torn."""
    for chosen in product((False, True), repeat=len(calls)):
        yield [call for call, done in zip(calls, chosen, strict=True) if done]
    for position, call in enumerate(calls):
        if isinstance(call, Write) and len(call.data) > 1:
            yield [*calls[:position], call._replace(data=call.data[: len(call.data) // 2])]


def content_after(data: bytes, calls: list[Write | Truncate]) -> bytes:
    """The content of a file after some calls."""
    out = bytearray(data)
    for call in calls:
        if isinstance(call, Truncate):
            del out[call.size :]
            out.extend(bytes(call.size - len(out)))
        else:
            out.extend(bytes(max(0, call.offset - len(out))))
            out[call.offset : call.offset + len(call.data)] = call.data
    return bytes(out)


def names_after(names: dict[str, int], calls: list[tuple[Call, ...]]) -> dict[str, int]:
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
