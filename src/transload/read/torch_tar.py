"""The tar format of torch 0.1.1 to 0.1.9: four members, three of which are streams of pickles mixed with raw numbers."""

from __future__ import annotations

from struct import Struct
from struct import error as struct_error
from typing import Any, NamedTuple

from transload.checkpoint import Checkpoint
from transload.findings import Problem
from transload.read.nodes import Global, Persistent, Pickle
from transload.read.source import Slice, Source
from transload.read.tensors import Place, StorageTable, find_tensors
from transload.read.torch_legacy import run_at
from transload.dtypes import ITEMSIZE, STORAGES

__all__ = ["looks_like_tar", "members", "read_tar"]

_BLOCK = 512
_MAX_MEMBERS = 10_000
_MAX_DIMS = 1024
_I32 = Struct("<i")
_I64 = Struct("<q")
_WANTED = {"sys_info", "pickle", "tensors", "storages"}


class Member(NamedTuple):
    """A file in a tar archive."""

    name: str
    offset: int
    size: int


def looks_like_tar(source: Source) -> bool:
    """A tar header with a right checksum at the very beginning. (tarfile, and so torch, also takes a block of zeros for one.)"""
    return _header(source.read(0, _BLOCK)) is not None


def members(source: Source) -> list[Member]:
    """The plain files of a tar archive, in order, until its end or its first bad header."""
    out: list[Member] = []
    position = 0
    for _ in range(_MAX_MEMBERS):
        header = _header(source.read(position, _BLOCK))
        if header is None:
            break
        name, size, kind = header
        if kind in b"0\0" and not name.endswith("/"):
            out.append(Member(name, position + _BLOCK, size))
        position += _BLOCK + -(-size // _BLOCK) * _BLOCK
    return out


def _header(block: bytes) -> tuple[str, int, bytes] | None:
    if len(block) < _BLOCK or not any(block):
        return None
    size, stated = _octal(block[124:136]), _octal(block[148:156])
    actual = sum(block) - sum(block[148:156]) + 8 * 32
    if size is None or stated != actual:
        return None
    return block[:100].split(b"\0")[0].decode("utf-8", "backslashreplace"), size, block[156:157]


def _octal(field: bytes) -> int | None:
    if field[:1] == b"\x80":  # sizes from 8 GiB on are binary
        return int.from_bytes(field[1:], "big")
    text = field.strip(b" \0")
    return int(text, 8) if text and not text.strip(b"01234567") else None


def read_tar(source: Source) -> Checkpoint | None:
    """The checkpoint in a tar archive; ``None`` if the archive is another."""
    found = {member.name.removeprefix("./"): member for member in members(source)}
    if not {"pickle", "tensors", "storages"} <= found.keys():
        return None
    reader = _Reader(source, found)
    reader.read_storages()
    reader.read_tensors()
    main, _ = run_at(reader.part("pickle"), 0, "pickle")
    main.main = True
    reader.took(main)
    table = StorageTable(lambda key, _: reader.places.get(key, Place(None, 0)))
    for node in reader.storage_ids.values():
        table.resolve(node)
    tree = find_tensors(main.root, table, outside=reader.tensor_args)
    extra = sorted(found.keys() - _WANTED)
    if extra:
        reader.problems.append(Problem("record-foreign", extra[0], f"{len(extra)} members that torch.load does not read"))
    return Checkpoint(
        path=source.name,
        format="torch-tar",
        nbytes=source.size,
        tensors=tree.tensors,
        storages=tree.storages,
        leaves=tree.leaves,
        problems=(*reader.problems, *tree.problems),
        pickles=(main, *(p for p in reader.pickles if p is not main)),
    )


class _Reader:
    """Goes through ``storages`` and ``tensors``: pickles and raw numbers in turn. Stops, with a problem, where it breaks."""

    def __init__(self, source: Source, found: dict[str, Member]) -> None:
        self._source = source
        self._found = found
        self.pickles: list[Pickle] = []
        self.problems: list[Problem] = []
        self.places: dict[str, Place] = {}
        self.storage_ids: dict[str, Persistent] = {}
        self.tensor_args: dict[str, tuple[Any, ...]] = {}

    def part(self, name: str) -> Slice:
        """One member as a source."""
        member = self._found[name]
        if member.offset + member.size > self._source.size:
            self.problems.append(Problem("tar-cut", name, "the archive ends inside this member"))
        return Slice(self._source, member.offset, member.size, name)

    def took(self, pickle: Pickle) -> None:
        """Keep a pickle if it asks for anything or is broken."""
        if pickle.broken:
            self.problems.append(Problem("pickle-broken", pickle.name, pickle.broken))
        if pickle.irregular or pickle.ambiguous:
            at, text = (pickle.irregular or pickle.ambiguous)[0]
            self.problems.append(Problem("pickle-irregular", f"{pickle.name} › byte {at}", text))
        if pickle.main or pickle.globals or pickle.extensions:
            self.pickles.append(pickle)

    def next(self, part: Slice, position: int, name: str) -> tuple[Any, int]:
        """The value of the next pickle; ``None`` once it is broken."""
        pickle, position = run_at(part, position, name)
        self.took(pickle)
        return (None if pickle.broken else pickle.root), position

    def read_storages(self) -> None:
        """``storages``: a count, then for each its id, element count and bytes, then the list of views."""
        part = self.part("storages")
        base = self._found["storages"].offset
        count, position = self.next(part, 0, "storages")
        for _ in range(count if type(count) is int else 0):
            entry, position = self.next(part, position, "storages")
            if not _is_entry(entry):
                self.problems.append(Problem("tar-broken", "storages", f"entry {len(self.places)} is no storage"))
                return
            key, location, kind = str(entry[0]), entry[1], entry[2]
            width = ITEMSIZE[STORAGES.get(kind.name, "uint8")]
            numel = int.from_bytes(part.read(position, 8), "little", signed=True)
            start, nbytes = position + 8, numel * width
            if numel < 0 or start + nbytes > part.size:
                self.problems.append(Problem("storage-cut", f"storage {key}", f"{nbytes} bytes do not fit into the member"))
                return
            self.places[key] = Place(base + start, nbytes, "storages")
            self.storage_ids[key] = Persistent(("storage", kind, key, location, numel), position)
            position = start + nbytes
        views, _ = self.next(part, position, "storages")
        for view in views if type(views) is list else ():
            self._add_view(view)

    def _add_view(self, view: object) -> None:
        if type(view) is tuple and len(view) == 4 and str(view[1]) in self.storage_ids:
            root = self.storage_ids[str(view[1])].id
            self.storage_ids[str(view[0])] = Persistent((*root, (str(view[0]), view[2], view[3])), 0)  # type: ignore[misc]

    def read_tensors(self) -> None:
        """``tensors``: a count, then for each its id and storage, its rank, sizes, strides and offset."""
        part = self.part("tensors")
        count, position = self.next(part, 0, "tensors")
        for _ in range(count if type(count) is int else 0):
            entry, position = self.next(part, position, "tensors")
            if type(entry) is not tuple or len(entry) != 3:
                self.problems.append(Problem("tar-broken", "tensors", f"entry {len(self.tensor_args)} is no tensor"))
                return
            try:
                (rank,) = _I32.unpack(part.read(position, 4))
                rank = rank if 0 <= rank <= _MAX_DIMS else 0
                raw = part.read(position + 8, 16 * rank + 8)
                numbers = tuple(_I64.unpack_from(raw, 8 * i)[0] for i in range(2 * rank + 1))
            except struct_error:
                self.problems.append(Problem("tar-broken", "tensors", "it breaks off inside a tensor"))
                return
            position += 16 + 16 * rank
            storage = self.storage_ids.get(str(entry[1]))
            self.tensor_args[str(entry[0])] = (storage, numbers[-1], numbers[:rank], numbers[rank : 2 * rank])


def _is_entry(entry: object) -> bool:
    return type(entry) is tuple and len(entry) == 3 and type(entry[1]) is str and type(entry[2]) is Global
