"""An unpacked archive: a directory that holds ``data.pkl``, ``data/0`` and so on as files, read where it lies."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from transload.checkpoint import Checkpoint, Record
from transload.errors import CannotReadError
from transload.findings import Problem
from transload.formats.torch_zip import Archive, read_torch_zip
from transload.formats.zip import Payload
from transload.io.sources import FileSource

__all__ = ["open_directory", "read_unzipped"]


MAX_FILES = 200_000
"""Files listed: somebody may point at their home directory. Twenty thousand tensors are twenty thousand files."""

MAX_DEPTH = 32
"""Directories below one another: a program's source lies ten deep at most."""


def read_unzipped(path: str) -> Checkpoint:
    """A checkpoint out of an unpacked ``torch.save`` archive; of a TorchScript program or a package, if it was one.

    ``file`` of a storage is relative to ``path``. A link that leads out of the directory is not followed: a stranger's
    archive could show any file of this machine as its own.
    """
    problems: list[Problem] = []
    home = _home(path)
    archive = open_directory(home, problems)
    nbytes = sum(record.size for record in archive.records.values())
    found = _reader(archive)(archive, problems, path=path, nbytes=nbytes)
    lead = "" if home == path else f"{Path(home).name}/"
    storages = tuple(s._replace(file=f"{lead}{s.record}" if s.record else "") for s in found.storages)
    kind = "torch-directory" if found.format == "torch-zip" else found.format
    return replace(found, format=kind, storages=storages, facts=(*found.facts, ("unpacked", "yes")))


def _home(path: str) -> str:
    """The directory of the records: the one given, or the only thing in it, since unzipping makes a folder."""
    try:
        entries = list(os.scandir(path))
    except OSError as error:
        raise CannotReadError(error.strerror or str(error), where=path, errno=error.errno) from error
    return entries[0].path if len(entries) == 1 and entries[0].is_dir(follow_symlinks=False) else path


def _reader(archive: Archive) -> Callable[..., Checkpoint]:
    if archive.find("constants.pkl") or (archive.find("model.json") and not archive.find("data.pkl")):
        from transload.formats.torchscript import read_torchscript

        return read_torchscript
    if archive.find(".data/extern_modules"):
        from transload.formats.torch_package import read_package

        return read_package
    return read_torch_zip


def open_directory(path: str, problems: list[Problem]) -> Archive:
    """The files of a directory as the records of an archive; those that cannot be are noted in ``problems``."""
    top = Path(os.path.realpath(path))
    records = {name: Record(name, 0, size, size) for name, size in _files(top, problems)}

    def read(record: Record, limit: int) -> Payload:
        if record.size > limit:
            return Payload(b"", intact=False, problem=f"{record.size} bytes are more than the {limit} we read")
        try:
            source = FileSource(top / record.name)
            data = source.read(record.offset or 0, record.size)
            source.close()
        except CannotReadError as error:
            return Payload(b"", intact=False, problem=error.what)
        return Payload(data, intact=True)

    return Archive(records, read, top.name)


def _files(top: Path, problems: list[Problem]) -> Iterator[tuple[str, int]]:
    """Relative name, with slashes, and size of every file; numbers in order, as torch writes storages."""
    count = 0
    for folder, folders, files in os.walk(top):
        here = Path(folder)
        _prune(top, here, folders, problems)
        for name in sorted(files, key=_numeric):
            count += 1
            if count > MAX_FILES:
                problems.append(Problem("directory-too-long", detail=f"only its first {MAX_FILES:,} files were read"))
                return
            size = _size(top, here / name, problems)
            if size is not None:
                yield (here / name).relative_to(top).as_posix(), size


def _numeric(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isascii() and name.isdecimal() and len(name) < 20 else (1 << 64, name)


def _prune(top: Path, here: Path, folders: list[str], problems: list[Problem]) -> None:
    """Do not go into linked directories, which may lead anywhere and round in circles, nor too deep."""
    for name in [name for name in folders if (here / name).is_symlink()]:
        folders.remove(name)
        where = (here / name).relative_to(top).as_posix()
        problems.append(Problem("link-outside", where, "a linked directory is not read"))
    folders.sort()
    if len(here.relative_to(top).parts) >= MAX_DEPTH and folders:
        folders.clear()
        problems.append(Problem("directory-too-long", detail=f"nested deeper than {MAX_DEPTH} directories"))


def _size(top: Path, file: Path, problems: list[Problem]) -> int | None:
    """The size of a plain file inside the directory; ``None``, with a problem, for anything else."""
    where = file.relative_to(top).as_posix()
    if file.is_symlink() and top not in Path(os.path.realpath(file)).parents:
        problems.append(Problem("link-outside", where, "a link that leads out of the directory is not followed"))
        return None
    try:
        status = file.stat()
    except OSError as error:
        problems.append(Problem("record-unreadable", where, error.strerror or str(error)))
        return None
    if not stat.S_ISREG(status.st_mode):
        problems.append(Problem("record-unreadable", where, "it is no regular file"))
        return None
    return status.st_size
