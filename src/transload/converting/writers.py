"""The formats that hold tensors by name and nothing else: safetensors, numpy's archive, and raw files.

Each ``write_…`` writes the entries of a target and reads its table back, the way other programs would find the tensors.
It returns where they are, so that they can be compared; files that were poured have been compared already.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import closing
from functools import partial
from struct import unpack
from typing import TYPE_CHECKING, Any
from zlib import crc32

from transload.converting.output import clear_parts, index_name, write_text
from transload.converting.transfer import CAN_POUR, Data, Descriptor, Entry, Location, Writer, pour
from transload.dtypes import ITEMSIZE, QUANTIZED, SAFETENSORS
from transload.errors import ConvertError
from transload.formats.zip import ALIGNMENT, central_entry, descriptor, end_of_archive, local_header

if TYPE_CHECKING:
    from transload.converting.output import Job
    from transload.converting.selection import TargetContents

__all__ = ["holds", "is_opaque", "member_name", "shard_names", "write_npz", "write_raw", "write_safetensors"]


def holds(format_: str, dtype: str) -> bool:
    """Whether a format has a dtype, or can keep its bytes."""
    if format_ == "safetensors":
        return dtype in _SAFETENSORS_DTYPES
    if format_ == "npz":
        return dtype in _NUMPY_DTYPES or dtype in ("bfloat16", "complex32") or dtype.startswith("float8_")
    return dtype in ITEMSIZE and dtype not in QUANTIZED


def _not_as_written(path: str, name: str = "it") -> ConvertError:
    return ConvertError(f"{name} does not read back as it was written", where=path)


# -- safetensors: one file, or shards with the index that Hugging Face's loaders expect

_SAFETENSORS_DTYPES = {dtype: name for name, dtype in SAFETENSORS.items()}
_MAX_HEADER = 100_000_000
_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


def write_safetensors(
    job: Job, contents: TargetContents, data: Data, metadata: dict[str, str], max_shard_size: int
) -> list[Location]:
    """Write a file, or shards of at most ``max_shard_size`` bytes and their index."""

    def written_and_compared(nbytes: int) -> None:
        if job.progress is not None:
            job.progress(2 * nbytes)

    shards = _shards(contents.entries, max_shard_size)
    headers = [_header(entries, contents.aliases, metadata) for entries in shards]  # all, before anything is written
    names = shard_names(job.dst, len(shards))
    clear_parts(index_name(job.dst))
    locations: list[Location] = []
    for name, entries, header in zip(names, shards, headers, strict=True):
        file = job.bundle.add(name)
        if job.verify and CAN_POUR:
            checksums = pour(file.descriptor, header, entries, data, where=file.path, progress=written_and_compared)
            job.checksums.update({id(entry): value for entry, value in zip(entries, checksums, strict=True)})
            _locate(Descriptor(file.descriptor, file.path), entries)
            continue
        writer = Writer(file.descriptor, job.progress)
        writer.write(header)
        for entry in entries:
            writer.put(entry, data)
        writer.flush()
        job.copied += writer.copied
        locations += _locate(Descriptor(file.descriptor, file.path), entries)
    if len(shards) > 1:
        files = [os.path.basename(name) for name in names]
        weights = {entry.name: file for file, entries in zip(files, shards, strict=True) for entry in entries}
        total = sum(entry.nbytes for entry in contents.entries)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
        text = json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n"
        write_text(job.bundle.add(index_name(job.dst), is_index=True).descriptor, text)
        if os.path.isfile(job.dst) and job.dst not in job.bundle.paths:
            job.bundle.remove(job.dst)  # loaders would prefer it to the shards
    return locations


def shard_names(dst: str, count: int) -> list[str]:
    """The names of the shards of a file.

    >>> shard_names("m.safetensors", 1), shard_names("m.safetensors", 2)
    (['m.safetensors'], ['m-00001-of-00002.safetensors', 'm-00002-of-00002.safetensors'])
    """
    file = dst.removesuffix(".index.json")
    if count == 1:
        return [file]
    stem = file.removesuffix(".safetensors")
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _shards(entries: tuple[Entry, ...], max_size: int) -> list[list[Entry]]:
    """Entries in shards of at most ``max_size`` bytes, in their order; a larger entry has a shard for itself.

    In a shard, wide numbers come first, so that all begin at a multiple of their width.
    """
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if max_size and shards[-1] and size + entry.nbytes > max_size:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    return [sorted(shard, key=lambda entry: -ITEMSIZE[entry.dtype]) for shard in shards]


def _header(entries: list[Entry], aliases: tuple[tuple[str, str], ...], metadata: dict[str, str]) -> bytes:
    names = {entry.name for entry in entries}
    metadata = {"format": "pt", **metadata, **{name: kept for name, kept in aliases if kept in names}}
    lines = [f'"__metadata__":{_json(metadata)}']
    at = 0
    for entry in entries:  # line by line: a dictionary of all of them takes five times as much memory
        shape = list(entry.shape)
        if entry.dtype == "float4_e2m1fn_x2" and shape:  # torch counts pairs, safetensors numbers
            shape[-1] *= 2
        described = f'"dtype":"{_SAFETENSORS_DTYPES[entry.dtype]}","shape":[{",".join(map(str, shape))}]'
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
        same = tensor is not None and (tensor.dtype, tensor.shape) == (entry.dtype, entry.shape)
        if tensor is None or not same or (tensor.file_offset is None and entry.nbytes):
            raise _not_as_written(source.name, entry.name)
        locations.append(Location(entry, source.read, tensor.file_offset or 0))
    if tensors or read.problems:
        raise _not_as_written(source.name)
    return locations


# -- npz: one .npy for each tensor, not compressed, each at a multiple of 64 bytes

_MAX_RANK = 64  # dimensions that numpy takes, from 2.0 on; before that 32
_MAX_NAME = 0xFFFF
_NUMPY_DTYPES = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "|i1",
    "uint8": "|u1",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
    "bool": "|b1",
    "complex64": "<c8",
    "complex128": "<c16",
}
_UNSAFE = re.compile(r'[\\:%"\x00-\x1f]')


def is_opaque(dtype: str) -> bool:
    """Whether numpy has no such dtype: bytes of that width are kept, as ``ml_dtypes`` saves its own."""
    return dtype not in _NUMPY_DTYPES


def member_name(name: str) -> str:
    """The name of a tensor in the archive: one that no unpacker takes for a place outside of its folder.

    numpy takes ``a.npy`` for the file of ``a``.

    >>> member_name("fc.weight"), member_name("../a"), member_name("/b"), member_name("a.npy")
    ('fc.weight', '%2E%2E/a', '%2Fb', 'a%2Enpy')
    """
    safe = _UNSAFE.sub(lambda found: f"%{ord(found[0]):02X}", name)
    steps = ["%2E" * len(step) if step in (".", "..") else step or "%2F" for step in safe.split("/")]
    made = "/".join(steps).replace("%2F/", "%2F")
    return f"{made.removesuffix('.npy')}%2Enpy" if made.endswith(".npy") else made


def write_npz(job: Job, contents: TargetContents, data: Data) -> list[Location]:
    """Write the archive."""
    file = job.bundle.add(job.dst)
    writer = Writer(file.descriptor, job.progress)
    directory: list[bytes] = []
    members: list[tuple[Entry, str, bytes]] = []
    for entry in contents.entries:
        name, head, at = f"{member_name(entry.name)}.npy", _array_header(entry), writer.written
        encoded, size = name.encode(), len(head) + entry.nbytes
        if len(encoded) > _MAX_NAME:
            raise ConvertError(f"the name {entry.name[:40]}… is too long for a zip archive", where=job.dst)
        if len(entry.shape) > _MAX_RANK:
            what = f"{entry.name} has {len(entry.shape):,} dimensions: numpy allows {_MAX_RANK}"
            raise ConvertError(what, where=job.dst)
        writer.write(local_header(encoded, size, at, ALIGNMENT))
        writer.write(head)
        checksum = crc32(head)
        for piece in data.pieces(entry):
            checksum = crc32(piece, checksum)
            writer.write(piece)
        writer.write(descriptor(size, checksum, at))
        directory.append(central_entry(encoded, size, checksum, at))
        members.append((entry, name, head))
    start, table = writer.written, b"".join(directory)
    writer.write(table)
    writer.write(end_of_archive(len(directory), start, len(table)))
    writer.flush()
    return _locate_members(Descriptor(file.descriptor, file.path), file.descriptor, members)


def _array_header(entry: Entry) -> bytes:
    """The header of an array, as numpy writes it: the numbers begin at a multiple of 64."""
    dtype = _NUMPY_DTYPES.get(entry.dtype, f"|V{ITEMSIZE[entry.dtype]}")
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {entry.shape!r}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def _locate_members(source: Descriptor, file: int, members: list[tuple[Entry, str, bytes]]) -> list[Location]:
    """Where Python's own ``zipfile`` finds the arrays."""
    from zipfile import BadZipFile, ZipFile

    try:
        with os.fdopen(os.dup(file), "rb") as opened, ZipFile(opened) as archive:
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


def write_raw(job: Job, contents: TargetContents, data: Data) -> list[Location]:
    """Write the files and their index."""
    folder = job.bundle.add_folder(job.dst).hidden
    tensors: dict[str, Any] = {}
    locations = []
    for number, entry in enumerate(contents.entries):
        name = f"{number:06d}.bin"
        path = os.path.join(folder, name)
        file = os.open(path, _OPEN, 0o666)
        try:
            writer = Writer(file, job.progress)
            writer.put(entry, data)
            writer.flush()
            os.fsync(file)
        finally:
            os.close(file)
        job.copied += writer.copied
        shape = list(entry.shape)
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
        "aliases": dict(contents.aliases),
    }
    file = os.open(os.path.join(folder, "index.json"), _OPEN, 0o666)
    try:
        write_text(file, json.dumps(index, indent=1).encode() + b"\n")
        os.fsync(file)
    finally:
        os.close(file)
    return locations


def _read_file(path: str, offset: int, count: int) -> bytes:
    """Bytes of a file that is closed again: there may be more of them than a process can have open."""
    from transload.io.sources import FileSource

    with closing(FileSource(path)) as file:
        return file.read(offset, count)
