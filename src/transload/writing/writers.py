"""The files of each format: a torch zip, safetensors, numpy's archive, and raw files.

Each of ``WRITERS`` writes the entries of a target and reads its table back, as other programs find the tensors. It
returns where they are, so that they can be compared; files that were poured have been compared already.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from struct import unpack
from typing import Any
from zlib import crc32

from transload.dtypes import ITEMSIZE, NUMPY
from transload.errors import ConvertError
from transload.formats.zip import ALIGNMENT
from transload.formats.zip_writer import (
    PIECE,
    SMALL,
    Bunch,
    Chunk,
    Record,
    central_entry,
    descriptor,
    end_of_archive,
    local_header,
    write_checkpoint,
)
from transload.writing.output import clear_parts, index_name, write_text
from transload.writing.plan import SAFETENSORS_DTYPES, Plan, member_name
from transload.writing.transfer import CAN_POUR, Descriptor, Entry, Job, Location, Writer, pour


def _not_as_written(path: str, name: str = "it") -> ConvertError:
    return ConvertError(f"{name} does not read back as it was written", where=path)


# -- torch: a zip archive as ``torch.save`` writes it

_MAX_BUNCH = 1000


def _write_torch(job: Job, plan: Plan) -> list[Location]:
    """Write the object and its storages. A reader must find them just as they were written."""
    from transload.formats import read_source
    from transload.io.atomic import SystemFile

    storages = plan.storages

    def chunks(entry: Entry) -> Iterator[Chunk]:
        for piece in job.pieces(entry, PIECE):
            yield Chunk(bytes(piece))  # a copy: the writer looks some pieces ahead

    def records() -> Iterator[Record | Bunch]:
        small: list[tuple[bytes, bytes]] = []
        for number, entry in enumerate(storages):
            name, size = b"data/%d" % number, entry.nbytes
            if size <= SMALL:
                small.append((name, b"".join(map(bytes, job.pieces(entry)))))
            if small and (size > SMALL or len(small) >= _MAX_BUNCH):
                yield Bunch(small)
                small = []
            if size > SMALL:
                yield Record(name, size, partial(chunks, entry))
        if small:
            yield Bunch(small)

    file = job.bundle.add(job.dst)
    nbytes = sum(entry.nbytes for entry in storages)
    write_checkpoint(SystemFile(file.descriptor, push=True), plan.opening, records(), nbytes, tell=job.progress)

    source = Descriptor(file.descriptor, file.path)
    read = read_source(source)
    problems = [problem for problem in read.problems if problem.code != "leaves-uncounted"]  # a long history of losses
    if len(read.tensors) != len(plan.slots) or problems:
        raise _not_as_written(source.name)
    for tensor, slot in zip(read.tensors, plan.slots, strict=True):
        before = slot.entry.tensor
        if slot.call is not None:
            same = (tensor.kind, tensor.dtype, tensor.shape) == (before.kind, before.dtype, before.shape)
        else:
            found = (tensor.dtype, tensor.offset, tensor.shape, tensor.stride, tensor.storage)
            same = found == (slot.entry.dtype, slot.offset, before.shape, slot.stride, str(slot.storage))
        if not same:
            raise _not_as_written(source.name, slot.entry.name)
    offsets = {storage.key: storage.offset or 0 for storage in read.storages}
    return [Location(entry, source.read, offsets[str(number)]) for number, entry in enumerate(storages) if entry.nbytes]


# -- safetensors: one file, or shards with the index that Hugging Face's loaders expect

_MAX_HEADER = 100_000_000
_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


def _write_safetensors(job: Job, plan: Plan) -> list[Location]:
    """Write a file, or shards of at most ``max_shard_size`` bytes, in the order of the entries, and their index."""
    max_size = plan.options.max_shard_size
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in plan.entries:  # one that is larger than a shard may be has a shard for itself
        if max_size and shards[-1] and size + entry.nbytes > max_size:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    for shard in shards:  # wide numbers come first, so that all begin at a multiple of their width
        shard.sort(key=lambda entry: -ITEMSIZE[entry.dtype])
    headers = [_header(shard, plan) for shard in shards]  # all, before anything is written
    names = [job.dst.removesuffix(".index.json")]
    if (count := len(shards)) > 1:
        stem = names[0].removesuffix(".safetensors")
        names = [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    clear_parts(index_name(job.dst))
    locations: list[Location] = []
    for name, shard, header in zip(names, shards, headers, strict=True):
        file = job.bundle.add(name)
        pours = job.verify and CAN_POUR
        if pours:
            checksums = pour(file.descriptor, header, shard, job, file.path)
            job.checksums.update({id(entry): value for entry, value in zip(shard, checksums, strict=True)})
        else:
            writer = Writer(file.descriptor, job)
            writer.write(header)
            for entry in shard:
                writer.put(entry)
            writer.flush()
        found = _locate(Descriptor(file.descriptor, file.path), shard)
        locations += [] if pours else found
    if len(shards) > 1:
        files = [os.path.basename(name) for name in names]
        weights = {entry.name: file for file, shard in zip(files, shards, strict=True) for entry in shard}
        total = sum(entry.nbytes for entry in plan.entries)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
        job.bundle.add_index(index_name(job.dst), json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n")
        if os.path.isfile(job.dst) and job.dst not in job.bundle.paths:
            job.bundle.remove(job.dst)  # loaders would prefer it to the shards
    return locations


def _header(entries: list[Entry], plan: Plan) -> bytes:
    names = {entry.name for entry in entries}
    metadata = {"format": "pt", **plan.metadata, **{name: kept for name, kept in plan.aliases if kept in names}}
    lines = [f'"__metadata__":{_json(metadata)}']
    at = 0
    for entry in entries:  # line by line: a dictionary of all of them takes five times as much memory
        shape = list(entry.tensor.shape)
        if entry.dtype == "float4_e2m1fn_x2" and shape:  # torch counts pairs, safetensors numbers
            shape[-1] *= 2
        described = f'"dtype":"{SAFETENSORS_DTYPES[entry.dtype]}","shape":[{",".join(map(str, shape))}]'
        lines.append(f'{_json(entry.name)}:{{{described},"data_offsets":[{at},{(at := at + entry.nbytes)}]}}')
    text = f"{{{','.join(lines)}}}".encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER:
        raise ConvertError(f"its header would take {len(text):,} bytes: safetensors allows {_MAX_HEADER:,}")
    return len(text).to_bytes(8, "little") + text


def _locate(source: Descriptor, entries: list[Entry]) -> list[Location]:
    """Where our reader finds the entries of a file that was just written; it must find just them."""
    from transload.formats.safetensors import read_safetensors

    read = read_safetensors(source)
    tensors = {tensor.name: tensor for tensor in read.tensors}
    locations = []
    for entry in entries:
        tensor = tensors.pop(entry.name, None)
        same = tensor is not None and (tensor.dtype, tensor.shape) == (entry.dtype, entry.tensor.shape)
        if tensor is None or not same or (tensor.file_offset is None and entry.nbytes):
            raise _not_as_written(source.name, entry.name)
        locations.append(Location(entry, source.read, tensor.file_offset or 0))
    if tensors or read.problems:
        raise _not_as_written(source.name)
    return locations


# -- npz: one .npy for each tensor, not compressed, each at a multiple of 64 bytes

_MAX_RANK = 64  # dimensions that numpy takes, from 2.0 on; before that 32
_MAX_NAME = 0xFFFF


def _write_npz(job: Job, plan: Plan) -> list[Location]:
    """Write the archive, and look where Python's own ``zipfile`` finds the arrays."""
    from zipfile import BadZipFile, ZipFile

    file = job.bundle.add(job.dst)
    writer = Writer(file.descriptor, job)
    directory: list[bytes] = []
    members: list[tuple[Entry, str, bytes]] = []
    for entry in plan.entries:
        name, shape, at = f"{member_name(entry.name)}.npy", entry.tensor.shape, writer.written
        encoded = name.encode()
        if len(encoded) > _MAX_NAME:
            raise ConvertError(f"the name {entry.name[:40]}… is too long for a zip archive", where=job.dst)
        if len(shape) > _MAX_RANK:
            what = f"{entry.name} has {len(shape):,} dimensions: numpy allows {_MAX_RANK}"
            raise ConvertError(what, where=job.dst)
        # The header of an array, as numpy writes it: the numbers begin at a multiple of 64.
        dtype = NUMPY.get(entry.dtype, f"|V{ITEMSIZE[entry.dtype]}")
        text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape!r}, }}".encode()
        text += b" " * (-(len(text) + 11) % 64) + b"\n"
        head = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
        size, checksum = len(head) + entry.nbytes, crc32(head)
        writer.write(local_header(encoded, size, at, ALIGNMENT))
        writer.write(head)
        for piece in job.pieces(entry):
            checksum = crc32(piece, checksum)
            writer.write(piece)
            job.progress(len(piece))
        writer.write(descriptor(size, checksum, at))
        directory.append(central_entry(encoded, size, checksum, at))
        members.append((entry, name, head))
    start, table = writer.written, b"".join(directory)
    writer.write(table)
    writer.write(end_of_archive(len(directory), start, len(table)))
    writer.flush()

    source = Descriptor(file.descriptor, file.path)
    try:
        with os.fdopen(os.dup(file.descriptor), "rb") as opened, ZipFile(opened) as archive:
            found = archive.infolist()
    except BadZipFile as error:
        raise _not_as_written(source.name) from error
    if len(found) != len(members):
        raise _not_as_written(source.name)
    locations = []
    for info, (entry, name, head) in zip(found, members, strict=True):
        lengths = unpack("<HH", source.read(info.header_offset + 26, 4))
        at = info.header_offset + 30 + sum(lengths)
        same = info.filename == name and info.file_size == len(head) + entry.nbytes
        if not same or source.read(at, len(head)) != head:
            raise _not_as_written(source.name, entry.name)
        locations.append(Location(entry, source.read, at + len(head)))
    return locations


# -- raw: a directory with the bytes of each tensor in a numbered file, and an index in JSON
#
# The names of tensors are in the index alone: a file's own words never become paths.

_OPEN = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def _write_raw(job: Job, plan: Plan) -> list[Location]:
    """Write the files and their index."""
    folder = job.bundle.add_folder(job.dst).hidden
    tensors: dict[str, Any] = {}
    locations = []
    for number, entry in enumerate(plan.entries):
        name = f"{number:06d}.bin"
        path = os.path.join(folder, name)
        with _new_file(path) as file:
            writer = Writer(file, job)
            writer.put(entry)
            writer.flush()
        shape = list(entry.tensor.shape)
        tensors[entry.name] = {"file": name, "dtype": entry.dtype, "shape": shape, "nbytes": entry.nbytes}
        if os.stat(path).st_size != entry.nbytes:
            raise _not_as_written(job.dst, entry.name)
        locations.append(Location(entry, partial(_read_file, path), 0))
    index = {
        "format": "transload-raw",
        "version": 1,
        "byteorder": "little",
        "order": "row-major",
        "tensors": tensors,
        "aliases": dict(plan.aliases),
    }
    with _new_file(os.path.join(folder, "index.json")) as file:
        write_text(file, json.dumps(index, indent=1).encode() + b"\n")
    return locations


@contextmanager
def _new_file(path: str) -> Iterator[int]:
    """A new file, by its descriptor, which then reaches the disk."""
    file = os.open(path, _OPEN, 0o666)
    try:
        yield file
        os.fsync(file)
    finally:
        os.close(file)


def _read_file(path: str, offset: int, count: int) -> bytes:
    """Bytes of a file that is closed again: there may be more of them than a process can have open."""
    from transload.io.sources import FileSource

    with closing(FileSource(path)) as file:
        return file.read(offset, count)


WRITERS = {"torch": _write_torch, "safetensors": _write_safetensors, "npz": _write_npz, "raw": _write_raw}
