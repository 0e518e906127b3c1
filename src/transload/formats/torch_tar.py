"""The tar format of torch 0.1.1 to 0.1.9: four members, three of them streams of pickles mixed with raw numbers."""

from __future__ import annotations

from struct import Struct
from typing import Any, NamedTuple

from transload.checkpoint import Checkpoint
from transload.dtypes import ITEMSIZE, STORAGES
from transload.findings import Problem
from transload.formats.pickle_machine import run_at
from transload.formats.tensors import Place, StorageTable, find_tensors
from transload.formats.torch_zip import pickle_problems
from transload.formats.zip import ends_like_zip
from transload.io.sources import Slice, Source
from transload.nodes import Global, Persistent, Pickle

__all__ = ["looks_like_tar", "members", "read_tar"]


_BLOCK = 512
_WINDOW = 1 << 12
_MAX_MEMBERS = 10_000
_MAX_DIMS = 1024
_MAX_PAX = 1 << 16
_EXTENDED = frozenset({b"x", b"g", b"X", b"L", b"K"})
_WANTED = frozenset({"sys_info", "pickle", "tensors", "storages"})

# What Python's tarfile writes into an extended header for a plain file: its time to the nanosecond, its owner's name.
_PLAIN_PAX = frozenset({b"mtime", b"atime", b"ctime", b"uid", b"gid", b"uname", b"gname", b"comment"})


class Member(NamedTuple):
    """A file in a tar archive; ``odd`` says why another reader may see it otherwise."""

    name: str
    offset: int
    size: int
    odd: str = ""


class _Header(NamedTuple):
    name: str
    size: int
    kind: bytes


def looks_like_tar(source: Source) -> bool:
    """Whether a tar header with a right checksum begins it. tarfile, and so torch, also takes zeros for one."""
    return _header(source.read(0, _BLOCK)) is not None


def members(source: Source, most: int = _MAX_MEMBERS) -> tuple[list[Member], list[Problem]]:
    """The members of a tar archive, in order, until its end or its first bad header; and what is wrong there."""
    out: list[Member] = []
    position, odd, always = 0, "", ""
    for _ in range(most):
        block = source.read(position, _BLOCK)
        header = _header(block)
        if header is None:
            broken = Problem("tar-broken", f"byte {position}", "what should be the header of a member is none")
            return out, [broken] if any(block) else []
        start = position + _BLOCK
        if header.kind in _EXTENDED:
            odd = odd or _renames(header, source.read(start, min(header.size, _MAX_PAX)))
            always = odd if header.kind == b"g" else always
        else:
            odd = odd or always or ("" if header.kind in (b"0", b"\0") else "it is no plain file")
            out.append(Member(header.name, start, header.size, odd))
            odd = ""
        position = start + -(-header.size // _BLOCK) * _BLOCK
    return out, [Problem("tar-broken", f"byte {position}", f"more than {most} members")]


def _renames(header: _Header, data: bytes) -> str:
    """Why an extended header makes the next member another one; empty if it only adds times and owners."""
    plain = header.kind in (b"x", b"g") and header.size <= _MAX_PAX
    if plain and data[-1:] == b"\n" and all(_is_plain_pax(line) for line in data[:-1].split(b"\n")):
        return ""
    return "an extended header changes what it is"


def _is_plain_pax(line: bytes) -> bool:
    """A record of an extended header: its own length, a key and a value. A wrong length hides another record in it."""
    length, _, record = line.partition(b" ")
    return length == b"%d" % (len(line) + 1) and record.partition(b"=")[0] in _PLAIN_PAX


def _header(block: bytes) -> _Header | None:
    if len(block) < _BLOCK or not any(block):
        return None
    size, stated = _octal(block[124:136]), _octal(block[148:156])
    summed = block[:148] + b" " * 8 + block[156:]
    signed = sum(summed) - 256 * sum(byte > 127 for byte in summed)  # as some writers add up; tarfile takes both
    if size is None or stated not in (sum(summed), signed):
        return None
    prefix = block[345:500].split(b"\0")[0]
    name = block[:100].split(b"\0")[0]
    return _Header((prefix + b"/" + name if prefix else name).decode("utf-8", "backslashreplace"), size, block[156:157])


def _octal(field: bytes) -> int | None:
    """A number of a header, exactly as tarfile takes it: torch asks tarfile, and a polyglot lives where we differ."""
    if field[:1] in (b"\x80", b"\xff"):  # sizes from 8 GiB on are binary
        return int.from_bytes(field[1:], "big") - (256 ** (len(field) - 1) if field[0] == 0xFF else 0)
    try:
        return int(field.split(b"\0")[0].decode("ascii", "strict").strip() or "0", 8)
    except ValueError:
        return None


def read_tar(source: Source) -> Checkpoint | None:
    """The checkpoint in a tar archive; ``None`` if the archive is another."""
    listed, problems = members(source)
    found = {member.name.removeprefix("./"): member for member in listed}
    if not {"pickle", "tensors", "storages"} <= found.keys():
        return None
    reader = Reader(source, found, [*problems, *_check_members(listed, source)])
    reader.read_storages()
    reader.read_tensors()
    main = reader.read_main()
    reader.read_beginning()
    table = StorageTable(lambda key, _: reader.places.get(key, Place(None, 0)))
    for node in reader.storage_ids.values():
        table.resolve(node)
    tree = find_tensors(main.root, table, outside=reader.tensor_args)
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


def _check_members(listed: list[Member], source: Source) -> list[Problem]:
    """Whatever makes tarfile, inside torch, take other members than these; and members that torch does not read."""
    out: list[Problem] = []
    seen: set[str] = set()
    for member in listed:
        name = member.name.removeprefix("./")
        if name in _WANTED and (member.odd or name in seen):
            out.append(Problem("tar-ambiguous", name, member.odd or "there are two of this name"))
        elif member.odd.startswith("an extended header"):
            out.append(Problem("tar-ambiguous", name, member.odd))
        if member.offset + member.size > source.size:
            out.append(Problem("tar-cut", name[:80], "the archive ends inside this member"))
        seen.add(name)
    extra = sorted(seen - _WANTED)
    if extra:
        out.append(Problem("record-foreign", extra[0], f"{len(extra)} members that torch.load does not read"))
    if ends_like_zip(source):
        out.append(Problem("zip-inside", detail="zipfile reads the archive at its end, torch the tar before it"))
    return out


class Reader:
    """Goes through ``storages`` and ``tensors``, pickles and raw numbers in turn, until it breaks, with a problem."""

    def __init__(self, source: Source, found: dict[str, Member], problems: list[Problem]) -> None:
        self._source = source
        self._found = found
        self.problems = problems
        self.pickles: list[Pickle] = []
        self.places: dict[str, Place] = {}
        self.storage_ids: dict[str, Persistent] = {}
        self.tensor_args: dict[str, tuple[Any, ...]] = {}

    def part(self, name: str) -> Slice:
        """One member as a source."""
        member = self._found[name]
        return Slice(self._source, member.offset, member.size, name)

    def took(self, pickle: Pickle) -> None:
        """Keep a pickle if it asks for anything, and note what is wrong with it; its ids are numbers, not storages."""
        self.problems += [p for p in pickle_problems(pickle, pickle.end) if p.code != "pickle-odd-id"]
        if pickle.main or pickle.globals or pickle.extensions:
            self.pickles.append(pickle)

    def read_main(self) -> Pickle:
        """The pickle of the object; beside it that of ``sys_info``, which only old readers load."""
        for name in ("sys_info", "pickle"):
            if name in self._found:
                main, _ = run_at(self.part(name), 0, name)
                main.main = name == "pickle"
                self.took(main)
        return main

    def read_beginning(self) -> None:
        """The file as a pickle: torch turns to that as soon as tarfile stumbles, and a header may be one, too."""
        pickle, _ = run_at(self._source, 0, "beginning of the file", _WINDOW)
        if pickle.globals or pickle.extensions or not pickle.broken:
            self.took(pickle)
            self.problems.append(Problem("tar-ambiguous", pickle.name, "it is a pickle as well as a tar header"))

    def next(self, part: Slice, position: int, name: str) -> tuple[Any, int]:
        """The value of the next pickle; ``None`` once it is broken."""
        pickle, position = run_at(part, position, name, _WINDOW)
        self.took(pickle)
        return (None if pickle.broken else pickle.root), position

    def _count(self, part: Slice) -> tuple[int, int]:
        """How many things a member holds, which its first pickle says, and where they begin."""
        count, position = self.next(part, 0, part.name)
        if type(count) is int:
            return count, position
        self.problems.append(Problem("tar-broken", part.name, "it does not say how much it holds"))
        return 0, position

    def read_storages(self) -> None:
        """``storages``: a count, then for each its id, element count and bytes, then the list of views."""
        part = self.part("storages")
        count, position = self._count(part)
        for _ in range(count):
            position = self._read_storage(part, position)
            if position < 0:
                return
        views, _ = self.next(part, position, "storages")
        for view in views if type(views) is list else ():
            if type(view) is tuple and len(view) == 4 and str(view[1]) in self.storage_ids:
                root: Any = self.storage_ids[str(view[1])].id
                self.storage_ids[str(view[0])] = Persistent((*root, (str(view[0]), view[2], view[3])), 0)
            else:
                self.problems.append(Problem("tar-broken", "storages", "a view of no storage"))

    def _read_storage(self, part: Slice, position: int) -> int:
        """Where the next one begins; -1 where this one breaks."""
        entry, position = self.next(part, position, "storages")
        if not _is_entry(entry):
            self.problems.append(Problem("tar-broken", "storages", f"entry {len(self.places)} is no storage"))
            return -1
        key, location, kind = str(entry[0]), entry[1], entry[2]
        count = part.read(position, 8)
        numel, start = int.from_bytes(count, "little", signed=True), position + 8
        nbytes = numel * ITEMSIZE[STORAGES[kind.name]]
        if len(count) < 8 or numel < 0 or start + nbytes > part.size:
            detail = f"{nbytes} bytes do not fit into what is left of the member"
            self.problems.append(Problem("storage-cut", f"storage {key}", detail))
            return -1
        self.places[key] = Place(self._found["storages"].offset + start, nbytes, "storages")
        self.storage_ids[key] = Persistent(("storage", kind, key, location, numel), position)
        return start + nbytes

    def read_tensors(self) -> None:
        """``tensors``: a count, then for each its id and storage, its rank, sizes, strides and offset."""
        part = self.part("tensors")
        count, position = self._count(part)
        for _ in range(count):
            entry, position = self.next(part, position, "tensors")
            if type(entry) is not tuple or len(entry) != 3:
                self.problems.append(Problem("tar-broken", "tensors", f"entry {len(self.tensor_args)} is no tensor"))
                return
            rank = int.from_bytes(part.read(position, 4), "little", signed=True)
            raw = part.read(position + 8, 16 * rank + 8) if 0 <= rank <= _MAX_DIMS else b""
            if len(raw) != 16 * rank + 8:
                self.problems.append(Problem("tar-broken", "tensors", f"tensor {str(entry[0])[:40]} is no tensor"))
                return
            numbers = Struct(f"<{2 * rank + 1}q").unpack(raw)
            position += 16 + 16 * rank
            storage = self.storage_ids.get(str(entry[1]))
            self.tensor_args[str(entry[0])] = (storage, numbers[-1], numbers[:rank], numbers[rank : 2 * rank])


def _is_entry(entry: object) -> bool:
    if type(entry) is not tuple or len(entry) != 3 or type(entry[1]) is not str:
        return False
    return type(entry[2]) is Global and entry[2].name in STORAGES
