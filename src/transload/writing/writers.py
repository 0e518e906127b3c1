"""Write each target format: torch zip, safetensors, npz, and raw files.

Each of ``WRITERS`` writes the entries of a target, checks that a reader finds every tensor there, and compares the
bytes that were written if the job asks for it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from transload.checkpoint import Record as Stored
from transload.checkpoint import Tensor
from transload.dtypes import ITEMSIZE, NUMPY
from transload.errors import ConvertError
from transload.formats.zip_writer import PIECE, SMALL, Chunk, Record, write_archive, write_checkpoint
from transload.io.atomic import DescriptorFile
from transload.io.sources import FileSource, Source
from transload.writing.output import clear_parts, index_name
from transload.writing.plan import SAFETENSORS_DTYPES, Plan, member_name
from transload.writing.transfer import Entry, Job, read_back, write_file


def _not_as_written(path: str, name: str = "it") -> ConvertError:
    return ConvertError(f"{name} does not read back as it was written", where=path)


# -- archives

_Member = tuple[bytes, bytes, Entry]
"""A name in the archive, the header before the bytes of an entry, and the entry."""


def _records(members: Iterable[_Member], job: Job) -> Iterator[Record]:
    for name, head, entry in members:
        size = len(head) + entry.nbytes
        chunks = partial(_chunks, head, entry, job)
        yield Record(name, size, b"".join(chunk.view for chunk in chunks()) if size <= SMALL else chunks)


def _chunks(head: bytes, entry: Entry, job: Job) -> Iterator[Chunk]:
    yield from [Chunk(head)] if head else []
    for piece in job.pieces(entry, PIECE):
        yield Chunk(bytes(piece))  # a copy: the writer reads some pieces ahead
        job.progress(len(piece))


def _write_torch(job: Job, plan: Plan) -> None:
    """Write a zip archive like that of ``torch.save``, and check that our reader finds the same tensors in it."""
    from transload.formats import read_source

    storages = plan.storages
    file = job.bundle.add(job.dst)
    members = ((b"data/%d" % number, b"", entry) for number, entry in enumerate(storages))
    nbytes = sum(entry.nbytes for entry in storages)
    write_checkpoint(file, plan.opening, _records(members, job), nbytes)

    source = FileSource(file.path, file.descriptor)
    read = read_source(source)
    problems = [problem for problem in read.problems if problem.code != "leaves-uncounted"]  # e.g. a long loss history
    if len(read.tensors) != len(plan.placed) or problems:
        raise _not_as_written(source.name)
    for tensor, entry in zip(read.tensors, plan.placed, strict=True):
        before = entry.tensor
        if entry.call is not None:  # carried over with its storages
            same = _geometry(tensor) == _geometry(before)
        else:
            found = (tensor.dtype, tensor.offset, tensor.shape, tensor.stride, tensor.storage)
            same = found == (entry.dtype, entry.offset, before.shape, entry.stride, str(entry.storage))
        if not same:
            raise _not_as_written(source.name, entry.name)
    if job.verify:
        written = {storage.key: storage for storage in read.storages}
        pairs = [(entry, written[str(number)]) for number, entry in enumerate(storages) if entry.nbytes]
        records = [Stored(entry.name, at.offset, at.nbytes, at.stored, at.crc32) for entry, at in pairs]
        read_back(source, records, nbytes, job)


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    parts = tuple(_geometry(part) for part in tensor.parts)
    return tensor.kind, tensor.dtype, tensor.offset, tensor.shape, tensor.stride, parts


# -- safetensors: one file, or shards with the index that Hugging Face's loaders expect

_MAX_HEADER = 100_000_000
_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


def _write_safetensors(job: Job, plan: Plan) -> None:
    """Write one file, or shards of at most ``max_shard_size`` bytes and their index."""
    max_size = plan.options.max_shard_size
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in plan.entries:  # an entry larger than a shard gets its own shard
        if max_size and shards[-1] and size + entry.nbytes > max_size:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    for shard in shards:  # wide dtypes first, so that every tensor is aligned
        shard.sort(key=lambda entry: -ITEMSIZE[entry.dtype])
    headers = [_header(shard, plan) for shard in shards]  # they may fail: build all before writing anything
    names = [job.dst.removesuffix(".index.json")]
    if (count := len(shards)) > 1:
        stem = names[0].removesuffix(".safetensors")
        names = [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    clear_parts(index_name(job.dst))
    for name, shard, header in zip(names, shards, headers, strict=True):
        file = job.bundle.add(name)
        write_file(file.descriptor, header, shard, job, file.path)
        _check_table(FileSource(file.path, file.descriptor), shard)
    if len(shards) > 1:
        files = [os.path.basename(name) for name in names]
        weights = {entry.name: file for file, shard in zip(files, shards, strict=True) for entry in shard}
        total = sum(entry.nbytes for entry in plan.entries)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
        job.bundle.add_index(index_name(job.dst), json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n")
        if os.path.isfile(job.dst) and job.dst not in job.bundle.paths:
            job.bundle.remove(job.dst)  # loaders would prefer it to the shards


def _header(entries: list[Entry], plan: Plan) -> bytes:
    names = {entry.name for entry in entries}
    metadata = {"format": "pt", **plan.metadata, **{name: kept for name, kept in plan.aliases if kept in names}}
    lines = [f'"__metadata__":{_json(metadata)}']
    at = 0
    for entry in entries:  # as text: a dictionary of all entries takes five times as much memory
        shape = list(entry.tensor.shape)
        if entry.dtype == "float4_e2m1fn_x2" and shape:  # torch counts pairs, safetensors counts numbers
            shape[-1] *= 2
        described = f'"dtype":"{SAFETENSORS_DTYPES[entry.dtype]}","shape":[{",".join(map(str, shape))}]'
        lines.append(f'{_json(entry.name)}:{{{described},"data_offsets":[{at},{(at := at + entry.nbytes)}]}}')
    text = f"{{{','.join(lines)}}}".encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER:
        raise ConvertError(f"its header would take {len(text):,} bytes: safetensors allows {_MAX_HEADER:,}")
    return len(text).to_bytes(8, "little") + text


def _check_table(source: Source, entries: list[Entry]) -> None:
    """Check that our reader finds exactly the entries, at their offsets, in a file that was just written."""
    from transload.formats.safetensors import read_safetensors

    read = read_safetensors(source)
    found = {(tensor.name, tensor.dtype, tensor.shape, tensor.file_offset) for tensor in read.tensors}
    at = source.size - sum(entry.nbytes for entry in entries)
    for entry in entries:
        if entry.nbytes and (entry.name, entry.dtype, entry.tensor.shape, at) not in found:
            raise _not_as_written(source.name, entry.name)
        at += entry.nbytes
    if len(read.tensors) != len(entries) or read.problems:
        raise _not_as_written(source.name)


# -- npz: one .npy for each tensor, not compressed, each at a multiple of 64 bytes

_MAX_RANK = 64  # dimensions of an array from numpy 2.0 on; before that 32
_MAX_NAME = 0xFFFF


def _write_npz(job: Job, plan: Plan) -> None:
    """Write the archive, and check that our reader finds the arrays in it."""
    from transload.formats.zip import read_index

    members: list[_Member] = []
    for entry in plan.entries:
        name, shape = f"{member_name(entry.name)}.npy".encode(), entry.tensor.shape
        if len(name) > _MAX_NAME:
            raise ConvertError(f"the name {entry.name[:40]}… is too long for a zip archive", where=job.dst)
        if len(shape) > _MAX_RANK:
            what = f"{entry.name} has {len(shape):,} dimensions: numpy allows {_MAX_RANK}"
            raise ConvertError(what, where=job.dst)
        # The header of a .npy file, padded like numpy's to a multiple of 64 bytes.
        dtype = NUMPY.get(entry.dtype, f"|V{ITEMSIZE[entry.dtype]}")
        text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape!r}, }}".encode()
        text += b" " * (-(len(text) + 11) % 64) + b"\n"
        members.append((name, b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text, entry))
    file = job.bundle.add(job.dst)
    write_archive(file, b"", _records(members, job), lambda _: ())

    source = FileSource(file.path, file.descriptor)
    index = read_index(source)
    if len(index.records) != len(members):
        raise _not_as_written(source.name)
    records = []
    for found, record, (name, head, entry) in zip(index.names, index.records.values(), members, strict=True):
        same = found.encode() == name and record.size == len(head) + entry.nbytes
        if not same or source.read(record.offset or 0, len(head)) != head:
            raise _not_as_written(source.name, entry.name)
        records.append(record._replace(name=entry.name))
    if job.verify:
        read_back(source, records, plan.nbytes, job)


# -- raw: a directory with the bytes of each tensor in a numbered file, and an index in JSON
#
# Tensor names are only in the index: nothing that a file says becomes a path.

_OPEN = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def _write_raw(job: Job, plan: Plan) -> None:
    """Write the files and their index."""
    folder = job.bundle.add_folder(job.dst).hidden
    tensors: dict[str, Any] = {}
    for number, entry in enumerate(plan.entries):
        name = f"{number:06d}.bin"
        with _new_file(os.path.join(folder, name)) as file:
            write_file(file, b"", [entry], job, f"{job.dst} › {entry.name}")
        shape = list(entry.tensor.shape)
        tensors[entry.name] = {"file": name, "dtype": entry.dtype, "shape": shape, "nbytes": entry.nbytes}
    index = {
        "format": "transload-raw",
        "version": 1,
        "byteorder": "little",
        "order": "row-major",
        "tensors": tensors,
        "aliases": dict(plan.aliases),
    }
    with _new_file(os.path.join(folder, "index.json")) as file:
        DescriptorFile(file).write([json.dumps(index, indent=1).encode() + b"\n"])


@contextmanager
def _new_file(path: str) -> Iterator[int]:
    """Create a file; on exit, flush it to disk."""
    file = os.open(path, _OPEN, 0o666)
    try:
        yield file
        os.fsync(file)
    finally:
        os.close(file)


WRITERS = {"torch": _write_torch, "safetensors": _write_safetensors, "npz": _write_npz, "raw": _write_raw}
