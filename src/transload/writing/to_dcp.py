"""Write a ``torch.distributed.checkpoint`` directory that any number of ranks can load; torch is not needed.

Each value gets the name that torch gives it, the keys of its path joined by dots. A large tensor is split along its
first dimension, so that a rank reads little more than its own rows. The classes in ``.metadata`` are those of torch
2.1, which later releases read, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from math import ceil
from typing import Any

from transload.dtypes import itemsize
from transload.errors import ConvertError
from transload.formats.graph import call_items
from transload.formats.pickle_writer import dumps
from transload.formats.zip_writer import PIECE, SMALL, Chunk, NewRecord, opening_records, write_checkpoint
from transload.frozen import NamedTuple
from transload.geometry import contiguous
from transload.io.atomic import DescriptorFile
from transload.nodes import Call, Dict, Global, called
from transload.opening import OpenCheckpoint
from transload.opening.damage import records_of, sum_records
from transload.render.words import plural
from transload.writing.objects import Path
from transload.writing.to_torch import TensorCalls, lay_out
from transload.writing.transfer import ConversionJob, TargetTensor

SPLIT = 8 << 20
"""The most bytes of a tensor in one item. torch reads whole items, and each takes it half a millisecond."""

_DATA = "__0_0.distcp"
_CLASSES = "torch.distributed.checkpoint.metadata"
_TENSORS = "torch.distributed._shard.sharded_tensor.metadata"


Leaves = dict[str, tuple[Path, Any]]
"""The tensors and values of an object by their names in the directory, with their paths in the object."""


class Flattened:
    """An object as torch 2.4 and later flatten it: dictionaries are opened, and lists with tensors or dictionaries.

    Unlike torch, this keeps those that are empty. ``versions`` is whether a state dict comes with the versions of its
    modules, which are not kept. ``ConvertError`` if two values have the same name, or if the object is no dictionary.

    >>> Flattened(Dict(["model", Dict(["fc.weight", 1]), "lr", [0.1]])).leaves
    {'model.fc.weight': (('model', 'fc.weight'), 1), 'lr': (('lr',), [0.1])}
    """

    def __init__(self, root: Any) -> None:
        self.leaves: Leaves = {}
        self.versions = False
        if mapping(root) is None:
            raise ConvertError("it is not a dictionary, and torch.distributed.checkpoint stores nothing else")
        self._visit((), root)

    def _visit(self, path: Path, node: Any) -> None:
        pairs = mapping(node)
        if pairs:
            self.versions |= type(node) is Call and bool(node.states)
            for key, value in pairs:
                self._visit((*path, str(key)), value)
        elif type(node) is list and _is_open(node):
            for index, value in enumerate(node):
                self._visit((*path, index), value)
        elif path:
            name = ".".join(map(str, path))
            if name in self.leaves:
                what = f"two values would be called {name!r}: torch.distributed.checkpoint joins keys with dots"
                raise ConvertError(what, fix="--key converts one part alone.")
            self.leaves[name] = path, node


def mapping(node: Any) -> list[tuple[Any, Any]] | None:
    """The entries of a dictionary, ordered or not; ``None`` for anything else."""
    if type(node) is Dict:
        return node.pairs()
    if type(node) is Call and called(node) == "collections.OrderedDict":
        items = call_items(node)
        return list(zip(items[::2], items[1::2], strict=True))
    return None


def _is_open(values: list[Any]) -> bool:
    """Whether a list contains a tensor or a dictionary."""
    return any(
        _is_open(value) if type(value) is list else type(value) is TargetTensor or mapping(value) is not None
        for value in values
    )


class _Item(NamedTuple):
    """An archive in the data file: a value, or the rows of a tensor from ``start`` on."""

    name: str
    start: Path | None
    shape: tuple[int, ...]
    number: int | None
    offset: int
    nbytes: int


def write_dcp(job: ConversionJob, leaves: Leaves) -> None:
    """Write the directory of an object, and check that our reader finds the same in it."""
    folder = job.bundle.add_folder(job.dst).hidden
    items: list[_Item] = []
    with open(os.path.join(folder, _DATA), "xb", buffering=0) as file:
        sink = DescriptorFile(file.fileno())
        # As torch writes them: values before tensors.
        for name, (_, node) in sorted(leaves.items(), key=lambda leaf: type(leaf[1][1]) is TargetTensor):
            if type(node) is TargetTensor:
                items += _write_tensor(job, sink, name, node)
            else:
                begin = sink.written
                write_value(job, sink, node)
                items.append(_Item(name, None, (), None, begin, sink.written - begin))
        os.fsync(file.fileno())
    with open(os.path.join(folder, ".metadata"), "xb") as index:
        index.write(_Metadata().pickled(leaves, items))
        index.flush()
        os.fsync(index.fileno())
    tensors = {name: node for name, (_, node) in leaves.items() if type(node) is TargetTensor}
    read_back_folder(job, folder, tensors)


def _write_tensor(job: ConversionJob, sink: DescriptorFile, name: str, entry: TargetTensor) -> Iterator[_Item]:
    """Write a tensor as one item, or as 2, 4, 8 … items with equal numbers of rows.

    Powers of two, because that many ranks share most tensors: each reads whole items then.
    """
    shape, calls = entry.tensor.shape, TensorCalls([], ())
    rows, count = shape[0] if shape else 1, 1
    while entry.nbytes > SPLIT * count and count < rows:
        count *= 2
    many = ceil(rows / count)
    pieces = _Pieces(job, entry)
    for index, row in enumerate(range(0, rows, many) if rows else (0,)):
        sizes = (min(many, rows - row), *shape[1:]) if shape else shape
        nbytes = itemsize(entry.dtype, entry.tensor.numel // rows * sizes[0]) if shape and rows else entry.nbytes
        begin = sink.written
        call = calls.strided("0", nbytes, entry.dtype, 0, sizes, contiguous(sizes))
        content = b"".join(chunk.view for chunk in pieces.take(nbytes)) if nbytes <= SMALL else None
        record: NewRecord = (b"data/0", nbytes, partial(pieces.take, nbytes) if content is None else content)
        write_checkpoint(sink, opening_records(dumps(call)), [record], nbytes)
        start = (row, *(0 for _ in shape[1:])) if shape else ()
        yield _Item(name, start, sizes, index, begin, sink.written - begin)


class _Pieces:
    """The bytes of a tensor, which several items take one after the other."""

    def __init__(self, job: ConversionJob, entry: TargetTensor) -> None:
        self._progress = job.progress
        self._chunks = (bytes(chunk) for chunk in job.chunks(entry, PIECE))  # copies: the writer reads ahead
        self._rest = memoryview(b"")

    def take(self, nbytes: int) -> Iterator[Chunk]:
        """The next bytes."""
        while nbytes:
            self._rest = self._rest or memoryview(next(self._chunks))
            piece, self._rest = self._rest[:nbytes], self._rest[nbytes:]
            nbytes -= len(piece)
            yield Chunk(piece)
            self._progress(len(piece))


def write_value(job: ConversionJob, sink: DescriptorFile, node: Any) -> None:
    """Write a value as ``torch.save`` would, with the tensors in it."""
    entries = [*tensors_in(node)]
    storages = lay_out(entries, job.reader)
    calls = TensorCalls(storages, job.reader.checkpoint.storages)
    opening = opening_records(dumps(node, expand=(TargetTensor, calls.tensor)))
    records = []
    for number, storage in enumerate(storages):
        pieces = _Pieces(job, storage)
        records.append((b"data/%d" % number, storage.nbytes, partial(pieces.take, storage.nbytes)))
    write_checkpoint(sink, opening, records, sum(storage.nbytes for storage in storages))


def tensors_in(node: Any) -> Iterator[TargetTensor]:
    """The tensors in a value."""
    if type(node) is TargetTensor:
        yield node
    parts = [part for pair in pairs for part in pair] if (pairs := mapping(node)) else node
    for part in parts if type(parts) in (list, tuple) else ():
        yield from tensors_in(part)


class _Metadata:
    """Builds the nodes of ``.metadata``."""

    def __init__(self) -> None:
        self._globals: dict[tuple[str, str], Global] = {}
        self._shapes: dict[tuple[int, ...], Call] = {}

    def pickled(self, leaves: Leaves, items: list[_Item]) -> bytes:
        """The pickle of the metadata for all items."""
        by_name: dict[str, list[_Item]] = {}
        for item in items:
            by_name.setdefault(item.name, []).append(item)
        entries = {name: self._entry(node, by_name[name]) for name, (_, node) in leaves.items()}
        places: list[object] = []
        for item in items:
            place = {} if item.start is None else {"offset": self._size(item.start)}
            index = self._object(_CLASSES, "MetadataIndex", fqn=item.name, index=item.number, **place)
            where = {"relative_path": _DATA, "offset": item.offset, "length": item.nbytes}
            places += [index, self._object("torch.distributed.checkpoint.filesystem", "_StorageInfo", **where)]
        metadata = self._object(
            _CLASSES,
            "Metadata",
            state_dict_metadata=Dict.of(entries.items()),
            planner_data=Dict.of((name, path) for name, (path, _) in leaves.items()),
            storage_data=Dict(places),
        )
        return dumps(metadata)

    def _entry(self, node: Any, items: list[_Item]) -> Call:
        if type(node) is not TargetTensor:
            return self._object(_CLASSES, "BytesStorageMetadata")
        layout = self._call("torch.serialization", "_get_layout", "torch.strided")
        memory_format = self._call(_TENSORS, "MEM_FORMAT_ENCODING", 0)
        properties = Call(self._global(_TENSORS, "TensorProperties"), (), "newobj", 0)
        properties.states = [(self._global("torch", node.dtype), layout, False, memory_format, False)]
        chunks = [
            self._object(
                _CLASSES,
                "ChunkStorageMetadata",
                offsets=self._size(item.start or ()),
                sizes=self._size(item.shape),
            )
            for item in items
        ]
        size = self._size(node.tensor.shape)
        return self._object(_CLASSES, "TensorStorageMetadata", properties=properties, size=size, chunks=chunks)

    def _size(self, shape: tuple[Any, ...]) -> Call:
        return self._shapes.setdefault(shape, self._call("torch", "Size", shape))

    def _global(self, module: str, name: str) -> Global:
        return self._globals.setdefault((module, name), Global(module, name, 0))

    def _call(self, module: str, name: str, argument: object) -> Call:
        return Call(self._global(module, name), (argument,), "reduce", 0)

    def _object(self, module: str, name: str, **state: Any) -> Call:
        made = Call(self._global(module, name), (), "newobj", 0)
        made.states = [Dict.of(state.items())] if state else None
        return made


def read_back_folder(job: ConversionJob, folder: str, entries: dict[str, TargetTensor]) -> None:
    """Compare what our reader finds with what was written; every byte, if the job asks for it."""
    expected = {name: (entry.dtype, entry.tensor.shape) for name, entry in entries.items()}
    with OpenCheckpoint(folder) as opened:
        checkpoint = opened.checkpoint
        tensors = {tensor.name: (tensor.dtype, tensor.shape) for tensor in checkpoint.tensors}
        lost = [name for name, tensor in expected.items() if tensors.get(name) != tensor]
        if lost or checkpoint.problems:
            raise ConvertError(f"{lost[0] if lost else 'it'} does not read back as it was written", where=job.dst)
        if job.verify:
            bad = sum_records(opened.elements, records_of(opened.elements), (), job.progress)
            if bad:
                what = f"{plural(len(bad), 'record')} on the disk differ from what was written"
                raise ConvertError(what, where=job.dst, fix="Try again; if it happens again, the disk is failing.")
