"""What directory checkpoints have in common: a bounded listing, names that stay inside, and merging of parts."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from transload.checkpoint import Checkpoint, GlobalUse, Key, Leaf, Origin, Part, Storage, Tensor
from transload.errors import CannotReadError
from transload.read.noted import Noted
from transload.read.source import FileSource, Source

if TYPE_CHECKING:
    from transload.read.nodes import Pickle

__all__ = ["Listing", "Merger", "Readers", "inner_name", "list_directory", "read_note", "try_list", "try_read"]

# A directory of ten million files must not be listed to its end before anything is said.
MAX_ENTRIES = 10_000
# `latest` and its like hold one word.
MAX_NOTE = 4096


@dataclass(frozen=True, slots=True)
class Readers:
    """How to read what a directory is made of. None of them raises for content."""

    file: Callable[[str], Checkpoint]
    unzipped: Callable[[str], Checkpoint]
    item: Callable[[Source], Checkpoint]
    pickle: Callable[[bytes, str], Pickle]


@dataclass(frozen=True, slots=True)
class Listing:
    """One level of a directory: files with their sizes, folders, and links that lead nowhere."""

    path: str
    files: dict[str, int]
    folders: tuple[str, ...]
    dangling: tuple[str, ...] = ()
    cut: bool = False

    def join(self, name: str) -> str:
        """The path of an entry."""
        return str(Path(self.path, name))


def list_directory(path: str) -> Listing:
    """What a directory holds, sorted by name; ``CannotReadError`` if the system does not say.

    Only one level is listed, so that a loop of symbolic links has nothing to loop through.
    """
    files: dict[str, int] = {}
    folders: list[str] = []
    dangling: list[str] = []
    count = 0
    try:
        with os.scandir(path) as entries:
            for count, entry in enumerate(entries, 1):
                if count > MAX_ENTRIES:
                    break
                _sort_in(entry, files, folders, dangling)
    except (OSError, ValueError) as error:
        what = f"cannot list the directory: {getattr(error, 'strerror', None) or error}"
        raise CannotReadError(what, where=path, errno=getattr(error, "errno", None)) from error
    ordered = dict(sorted(files.items()))
    return Listing(path, ordered, tuple(sorted(folders)), tuple(sorted(dangling)), count > MAX_ENTRIES)


def _sort_in(entry: os.DirEntry[str], files: dict[str, int], folders: list[str], dangling: list[str]) -> None:
    try:
        if entry.is_dir():
            folders.append(entry.name)
        else:
            files[entry.name] = entry.stat().st_size
    except OSError:
        # A link to nothing or to itself: what is left in a cache after its blobs were deleted.
        dangling.append(entry.name)


def try_list(path: str, where: str, noted: Noted) -> Listing | None:
    """A listing, or a problem."""
    try:
        return list_directory(path)
    except CannotReadError as error:
        noted.add("directory-unreadable", where, error.what)
        return None


def read_note(path: str) -> str:
    """The first word or line of a small text file; empty if it cannot be read."""
    try:
        source = FileSource(path)
    except CannotReadError:
        return ""
    try:
        return source.read(0, MAX_NOTE).decode("utf-8", "replace").strip()
    except CannotReadError:
        return ""
    finally:
        source.close()


def inner_name(name: object) -> str:
    """A name from a file as a relative path that cannot leave the directory; empty if it could.

    >>> inner_name("a/./b.bin"), inner_name("../b.bin"), inner_name("/etc/passwd")
    ('a/b.bin', '', '')

    Links are another matter: a download cache is made of links out of the directory, and whoever could plant
    one could have planted the file.
    """
    if type(name) is not str or not name or "\0" in name or "\\" in name or name[1:2] == ":" or name[0] == "/":
        return ""
    steps = [step for step in name.split("/") if step not in ("", ".")]
    return "" if ".." in steps else "/".join(steps)


def try_read(path: str, where: str, read_file: Callable[[str], Checkpoint], noted: Noted) -> Checkpoint | None:
    """Read one file of a directory; a problem instead of an error.

    Only plain files: a shard that is a directory, or an index that names itself, would be read for ever.
    """
    if not Path(path).is_file() or path.endswith(".index.json"):
        noted.add("part-unreadable", where, "it is not a plain file" if Path(path).exists() else "it is not there")
        return None
    try:
        return read_file(path)
    except CannotReadError as error:
        noted.add("part-unreadable", where, error.what)
        return None


class Merger:
    """Puts checkpoints together into one.

    Storages of part ``a.bin`` get ids ``a.bin:…`` and ``file="a.bin"``; with ``named`` the tensors' names get the
    part in front, for parts that hold the same names (the ranks of a parallel run).
    """

    def __init__(self, noted: Noted, *, named: bool = False) -> None:
        self.noted = noted
        self.named = named
        self.tensors: list[Tensor] = []
        self.storages: list[Storage] = []
        self.leaves: list[Leaf] = []
        self.globals: list[GlobalUse] = []
        self.pickles: list[Pickle] = []
        self.parts: list[Part] = []
        self.origins: list[Origin] = []
        self.checksummed = True

    def add(self, part: str, checkpoint: Checkpoint, *, kind: str = "shard", steps: tuple[Key, ...] = ()) -> None:
        """Take in a whole file."""
        if self.named:
            steps = (part, *steps)
        self.take(part, checkpoint, steps=steps)
        facts = (("format", checkpoint.format), ("tensors", f"{len(checkpoint.tensors):,}"))
        self.parts.append(Part(part, kind, checkpoint.nbytes, facts))

    def take(
        self, part: str, checkpoint: Checkpoint, *, steps: tuple[Key, ...] = (), shift: int = 0, label: str = ""
    ) -> tuple[Tensor, ...]:
        """Take in what a checkpoint holds, without a part of its own; its bytes lie ``shift`` into the file."""
        prefix = label or part
        tensors = tuple(_tensor(tensor, prefix, steps, shift) for tensor in checkpoint.tensors)
        self.tensors += tensors
        self.storages += [_storage(storage, part, prefix, steps, shift) for storage in checkpoint.storages]
        self.leaves += [
            Leaf((*steps, *leaf.path), _named(steps, leaf.name), leaf.kind, leaf.text) for leaf in checkpoint.leaves
        ]
        self.globals += [replace(use, stream=_within(prefix, use.stream)) for use in checkpoint.globals]
        for pickle in checkpoint.pickles:
            pickle.path = (*steps, *pickle.path)
        self.pickles += checkpoint.pickles
        self.origins.append(checkpoint.written_by)
        self.checksummed &= checkpoint.checksummed
        self.noted.extend(
            tuple(replace(problem, where=_within(prefix, problem.where)) for problem in checkpoint.problems)
        )
        return tensors

    def lost(self, name: str, kind: str) -> None:
        """Enter a part that should be there and is not."""
        self.parts.append(Part(name, f"missing {kind}", 0))

    def checkpoint(
        self, path: str, format_: str, facts: tuple[tuple[str, str], ...] = (), flavour: str = ""
    ) -> Checkpoint:
        """Everything taken in, as one."""
        same = bool(self.origins) and all(origin == self.origins[0] for origin in self.origins)
        return Checkpoint(
            path=path,
            format=format_,
            nbytes=sum(part.nbytes for part in self.parts),
            flavour=flavour,
            tensors=tuple(self.tensors),
            storages=tuple(self.storages),
            globals=tuple(self.globals),
            leaves=tuple(self.leaves),
            parts=tuple(self.parts),
            facts=facts,
            written_by=self.origins[0] if same else Origin(),
            problems=self.noted.problems(),
            pickles=tuple(self.pickles),
            checksummed=self.checksummed and bool(self.origins),
        )


def _within(part: str, where: str) -> str:
    return f"{part} › {where}" if where else part


def _named(steps: tuple[Key, ...], name: str) -> str:
    return "/".join([*map(str, steps), name] if name else map(str, steps))


def _tensor(tensor: Tensor, prefix: str, steps: tuple[Key, ...], shift: int) -> Tensor:
    """The same tensor in its new place. Spelled out, since ``replace`` takes five times as long."""
    return Tensor(
        (*steps, *tensor.path),
        _named(steps, tensor.name),
        tensor.dtype,
        tensor.shape,
        tensor.stride,
        tensor.device,
        None if tensor.storage is None else f"{prefix}:{tensor.storage}",
        tensor.offset,
        tensor.requires_grad,
        tensor.kind,
        tensor.cls,
        tuple(_tensor(part, prefix, steps, shift) for part in tensor.parts),
        None if tensor.file_offset is None else tensor.file_offset + shift,
        tensor.flags,
    )


def _storage(storage: Storage, part: str, prefix: str, steps: tuple[Key, ...], shift: int) -> Storage:
    return Storage(
        f"{prefix}:{storage.id}",
        storage.key,
        storage.device,
        storage.dtype,
        storage.nbytes,
        storage.stored,
        None if storage.offset is None else storage.offset + shift,
        storage.record,
        part,
        storage.crc32,
        storage.compressed,
        storage.big_endian,
        tuple(_named(steps, name) for name in storage.tensors) if steps else storage.tensors,
    )
