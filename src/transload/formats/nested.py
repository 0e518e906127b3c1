"""What the readers of programs and packages share: nested checkpoints, JSON records, tensors described by JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from transload.checkpoint import Checkpoint, Record, Storage, Tensor
from transload.dtypes import itemsize
from transload.findings import Problem
from transload.formats import pickle_machine
from transload.formats.tensors import Tree
from transload.formats.torch_zip import Archive, pickle_problems, read_pickle, read_torch_zip
from transload.formats.zip import read_index, starts_like_zip
from transload.io.sources import BytesSource, Source, copied
from transload.nodes import Call, Global, Persistent, Pickle

__all__ = [
    "Budget",
    "Described",
    "complaints",
    "device",
    "entries",
    "head",
    "items",
    "load_json",
    "looks_like_pickle",
    "node",
    "number",
    "open_record",
    "read_nested",
    "read_stream",
    "text",
    "typed",
]


ALLOWANCE = 256 << 20
"""Bytes to unpack beyond the size of the file. A megabyte of deflated records, or a thousand directory entries for the
same bytes, would otherwise ask for gigabytes of work."""

_WINDOW = 4096

MAX_PACKED = 64 << 20
"""A compressed record is unpacked whole, so no longer one than this is; torch never compresses."""


class Budget:
    """How many bytes of records may still be read: as many as the file has, and some."""

    def __init__(self, nbytes: int, allowance: int = ALLOWANCE) -> None:
        self.left = nbytes + allowance

    def take(self, record: Record, problems: list[Problem]) -> bool:
        """Whether to read a record. The first that is too much is noted, and no other is read after it."""
        before, self.left = self.left, self.left - record.size
        if before >= 0 > self.left:
            detail = "the file unpacks to far more than it holds: this record and others were not looked at"
            problems.append(Problem("record-unseen", record.name, detail))
        return self.left >= 0


class RecordSource:
    """A stored record as a source: it is read in place, never whole."""

    def __init__(self, archive: Archive, record: Record) -> None:
        self._archive = archive
        self._record = record
        self.name = record.name
        self.size = 0 if record.offset is None else min(record.size, record.stored)

    def read(self, offset: int, count: int) -> bytes:
        """Up to ``count`` bytes from ``offset`` on."""
        count = min(count, self.size - offset)
        if count <= 0 or self._record.offset is None:
            return b""
        part = Record(self._record.name, self._record.offset + offset, count, count)
        return self._archive.read(part, count).data

    def readinto(self, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from ``offset`` on; how many bytes there were."""
        return copied(self, offset, buffer)

    def close(self) -> None:
        """Nothing to give back: the archive is closed by its owner."""


def open_record(archive: Archive, record: Record) -> Source:
    """The content of a record as a source."""
    if record.method == 0:
        return RecordSource(archive, record)
    return BytesSource(archive.read(record, MAX_PACKED).data, record.name)


def head(archive: Archive, record: Record, count: int) -> bytes:
    """The first bytes of a record, without unpacking the rest."""
    if record.method == 0:
        return RecordSource(archive, record).read(0, count)
    return archive.read(record._replace(size=count, stored=min(record.stored, count + _WINDOW)), count + _WINDOW).data


def looks_like_pickle(start: bytes) -> bool:
    """Whether a record begins as a pickle of protocol 2 or later does."""
    return len(start) > 1 and start[0] == 0x80 and 2 <= start[1] <= 5


def read_stream(archive: Archive, name: str, problems: list[Problem], ids: dict[str, tuple[int, ...]]) -> Pickle:
    """Run the pickle in a record, as ``read_pickle`` does; ``ids`` are the persistent ids to expect, by length."""
    met: list[Problem] = []
    pickle = read_pickle(archive, name, met)
    problems += [problem for problem in met if problem.code != "pickle-odd-id"]
    odd = next((held for held in pickle.persistent if not _expected(held.id, ids)), None)
    if odd is not None:
        where = f"{name} › byte {odd.position}"
        problems.append(Problem("pickle-odd-id", where, "a persistent id that no such file has"))
    return pickle


def _expected(pid: object, ids: dict[str, tuple[int, ...]]) -> bool:
    return type(pid) is tuple and bool(pid) and type(pid[0]) is str and len(pid) in ids.get(pid[0], ())


def read_nested(archive: Archive, record: Record) -> Checkpoint:
    """The checkpoint in a record: a ``torch.save`` archive, or bare pickles. Its places are those of the outer file."""
    source = open_record(archive, record)
    if starts_like_zip(source):
        index = read_index(source)
        inner = Archive.of_zip(source, index)
        found = read_torch_zip(inner, index.problems, path=record.name, nbytes=source.size)
    else:
        data = source.read(0, MAX_PACKED)
        pickles = pickle_machine.run_all(data, "pickle") if looks_like_pickle(data[:2]) else []
        problems = [problem for pickle in pickles for problem in pickle_problems(pickle, pickle.end)]
        found = Checkpoint(source.name, "pickle", source.size, problems=tuple(problems), pickles=tuple(pickles))
    return _moved(found, record)


def _moved(inner: Checkpoint, record: Record) -> Checkpoint:
    """The same checkpoint as seen from outside: absolute offsets, ids that are unique there, full places."""
    base = record.offset if record.method == 0 else None
    for pickle in inner.pickles:
        pickle.main = False
        pickle.name = f"{record.name} › {pickle.name}"
    return replace(
        inner,
        tensors=tuple(_moved_tensor(tensor, record.name, base) for tensor in inner.tensors),
        storages=tuple(
            s._replace(id=f"{record.name}/{s.id}", offset=_sum(s.offset, base), record=record.name)
            for s in inner.storages
        ),
        problems=tuple(
            replace(problem, where=" › ".join(filter(None, (record.name, problem.where)))) for problem in inner.problems
        ),
    )


def _sum(offset: int | None, base: int | None) -> int | None:
    return None if offset is None or base is None else offset + base


def _moved_tensor(tensor: Tensor, record: str, base: int | None) -> Tensor:
    storage = None if tensor.storage is None else f"{record}/{tensor.storage}"
    parts = tuple(_moved_tensor(part, record, base) for part in tensor.parts)
    return tensor._replace(storage=storage, file_offset=_sum(tensor.file_offset, base), parts=parts)


MAX_JSON = 128 << 20
"""The graph of a program of ten thousand layers is some tens of megabytes; as objects it takes twenty times as much."""

MAX_PACKED_JSON = 16 << 20
"""torch stores JSON as it is. A compressed one is somebody else's work: half a megabyte unpacks to half a gigabyte."""

_UNTYPED = Global("torch.storage", "UntypedStorage", 0)
_REBUILD = Global("torch._utils", "_rebuild_tensor_v3", 0)
_PARAMETER = Global("torch._utils", "_rebuild_parameter", 0)


def load_json(archive: Archive, name: str, problems: list[Problem], budget: Budget) -> Any:
    """The value of a JSON record; ``None`` if there is no such record, or if it cannot be read, which is noted."""
    import json

    record = archive.find(name)
    if record is None or not budget.take(record, problems):
        return None
    payload = archive.read(record, MAX_PACKED_JSON if record.method else MAX_JSON)
    if payload.problem:
        problems.append(Problem("record-unreadable", name, payload.problem))
        return None
    if not payload.intact:
        problems.append(Problem("crc-mismatch", name, "it does not have the checksum it was saved with"))
    try:
        return json.loads(payload.data)
    except ValueError as error:
        problems.append(Problem("json-broken", name, str(error)[:200]))
    except RecursionError:
        problems.append(Problem("json-broken", name, "it is nested too deeply"))
    return None


def items(value: Any) -> list[tuple[str, Any]]:
    """The entries of a JSON object; none of anything else."""
    return list(value.items()) if type(value) is dict else []


def entries(value: Any) -> list[Any]:
    """The members of a JSON array; none of anything else."""
    return value if type(value) is list else []


def text(value: Any, longest: int = 80) -> str:
    """A JSON text, not too long; empty for anything else."""
    return value[:longest] if type(value) is str else ""


def number(value: Any) -> Any:
    """An integer as these files write one: plain, as ``{"as_int": 3}``, or as text. Anything else is left as it is.

    >>> number(3), number({"as_int": 3}), number("3"), number({"as_expr": "s0"})
    (3, 3, 3, {'as_expr': 's0'})
    """
    if type(value) is dict and "as_int" in value:
        return value["as_int"]
    if type(value) is str and value.isdecimal() and len(value) < 20:
        return int(value)
    return value


def device(value: Any) -> str:
    """A device as torch's own JSON writes it.

    >>> device({"type": "cuda", "index": 1}), device({"type": "cpu", "index": None})
    ('cuda:1', 'cpu')
    """
    fields = dict(items(value))
    index = fields.get("index")
    return (text(fields.get("type")) or "unknown") + (f":{index}" if type(index) is int else "")


class Described(NamedTuple):
    """A tensor as JSON has it.

    ``record`` is the name of the record that holds its storage, ``nbytes`` how long that is if not the whole record.
    """

    record: str
    dtype: str
    device: str
    offset: Any
    sizes: Any
    strides: Any
    requires_grad: Any = False
    parameter: bool = False
    nbytes: int | None = None


def node(what: Described, archive: Archive) -> Call:
    """The rebuild call for a described tensor. A storage without bytes is taken to be as long as the tensor needs."""
    sizes, strides = (tuple(number(n) for n in entries(part)) for part in (what.sizes, what.strides))
    offset = number(what.offset)
    record = archive.find(what.record)
    nbytes = what.nbytes if what.nbytes is not None else record.size if record is not None else 0
    nbytes = nbytes or _reach(what.dtype, offset, sizes, strides)
    storage = Persistent(("storage", _UNTYPED, what.record, what.device, nbytes), 0)
    dtype = Global("torch", what.dtype or "unknown", 0)
    call = Call(_REBUILD, (storage, offset, sizes, strides, what.requires_grad, None, dtype), "reduce", 0)
    return Call(_PARAMETER, (call, what.requires_grad, None), "reduce", 0) if what.parameter else call


def _reach(dtype: str, offset: Any, sizes: tuple[Any, ...], strides: tuple[Any, ...]) -> int:
    numbers = (offset, *sizes, *strides)
    if 0 in sizes or any(type(n) is not int or not 0 <= n < 1 << 63 for n in numbers):
        return 0
    last = sum((size - 1) * step for size, step in zip(sizes, strides, strict=False))
    return itemsize(dtype, offset + last + 1)


def complaints(tree: Tree, hollow: Iterable[Storage]) -> list[Problem]:
    """The problems of a tree, less disputes over how long a storage is that is not there: each tensor has to guess."""
    unknown = {f"storage {storage.key}" for storage in hollow}
    return [p for p in tree.problems if p.code != "storage-conflict" or p.where not in unknown]


def typed(storages: Iterable[Storage], tensors: Iterable[Tensor]) -> tuple[Storage, ...]:
    """Storages with the dtype of the first tensor that looks at each, for containers that name it only there."""
    first: dict[str | None, str] = {}
    for tensor in tensors:
        first.setdefault(tensor.storage, tensor.dtype)
    return tuple(storage._replace(dtype=first.get(storage.id, storage.dtype)) for storage in storages)
