"""numpy's archive: one ``.npy`` a tensor, stored as it is, each at a multiple of 64 bytes."""

from __future__ import annotations

import os
import re
from struct import unpack
from typing import TYPE_CHECKING
from zlib import crc32

from transload.converting.comparing import Back
from transload.converting.moving import Descriptor, Writer
from transload.dtypes import ITEMSIZE
from transload.errors import ConvertError
from transload.formats.zip import ALIGNMENT, central_entry, descriptor, end_of_archive, local_header

if TYPE_CHECKING:
    from transload.converting.entries import Data, Entry, Sorted
    from transload.converting.job import Job
    from transload.io.atomic import AtomicFile

__all__ = ["MAX_RANK", "holds", "member_name", "write_npz"]

MAX_RANK = 64
"""Dimensions that numpy takes, from 2.0 on; before that 32."""

_MAX_NAME = 0xFFFF

_DESCRIPTIONS = {
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
# What numpy has no dtype for is kept as bytes of that width; ml_dtypes saves its own so, and views them back.
_AS_BYTES = ("bfloat16", "complex32")


def holds(dtype: str) -> bool:
    """Whether numpy has a dtype, or can keep its bytes."""
    return dtype in _DESCRIPTIONS or dtype in _AS_BYTES or dtype.startswith("float8_")


def is_opaque(dtype: str) -> bool:
    """Whether only the bytes are kept."""
    return dtype not in _DESCRIPTIONS


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


_UNSAFE = re.compile(r'[\\:%"\x00-\x1f]')


def write_npz(job: Job, found: Sorted, data: Data) -> list[Back]:
    """Write the archive; where everything is now."""
    file = job.bundle.add(job.dst)
    writer = Writer(file.descriptor, job.tell)
    directory: list[bytes] = []
    heads: list[bytes] = []
    for entry in found.entries:
        _refuse(entry, job.dst)
        head, at = _head(entry), writer.written
        name, size = _file_name(entry), len(head) + entry.nbytes
        writer.write(local_header(name, size, at, ALIGNMENT))
        writer.write(head)
        checksum = crc32(head)
        for piece in data.pieces(entry):
            checksum = crc32(piece, checksum)
            writer.write(piece)
        writer.write(descriptor(size, checksum, at))
        directory.append(central_entry(name, size, checksum, at))
        heads.append(head)
    start = writer.written
    table = b"".join(directory)
    writer.write(table)
    writer.write(end_of_archive(len(directory), start, len(table)))
    writer.flush()
    return _found(file, found.entries, heads)


def _file_name(entry: Entry) -> bytes:
    return f"{member_name(entry.name)}.npy".encode()


def _refuse(entry: Entry, where: str) -> None:
    """What no program could read again."""
    if len(_file_name(entry)) > _MAX_NAME:
        raise ConvertError(f"the name {entry.name[:40]}… is too long for a zip archive", where=where)
    if len(entry.shape) > MAX_RANK:
        raise ConvertError(f"{entry.name} has {len(entry.shape):,} dimensions: numpy takes {MAX_RANK}", where=where)


def _head(entry: Entry) -> bytes:
    """The header of an array, as numpy writes it: the numbers begin at a multiple of 64."""
    described = _DESCRIPTIONS.get(entry.dtype, f"|V{ITEMSIZE[entry.dtype]}")
    text = f"{{'descr': '{described}', 'fortran_order': False, 'shape': {entry.shape!r}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def _found(file: AtomicFile, entries: tuple[Entry, ...], heads: list[bytes]) -> list[Back]:
    """Where Python's own ``zipfile`` finds the entries."""
    from zipfile import BadZipFile, ZipFile

    source = Descriptor(file.descriptor, file.path)
    places = []
    try:
        with os.fdopen(os.dup(file.descriptor), "rb") as opened, ZipFile(opened) as archive:
            members = archive.infolist()
    except BadZipFile as error:
        raise ConvertError("it is not read back as it was written", where=file.path) from error
    if len(members) != len(entries):
        raise ConvertError("it is not read back as it was written", where=file.path)
    for member, entry, head in zip(members, entries, heads, strict=True):
        lengths = unpack("<HH", source.read(member.header_offset + 26, 4))
        at = member.header_offset + 30 + sum(lengths)
        told = member.filename == _file_name(entry).decode() and member.file_size == len(head) + entry.nbytes
        if not told or source.read(at, len(head)) != head:
            raise ConvertError(f"{entry.name} is not read back as it was written", where=file.path)
        places.append(Back(entry, source, at + len(head)))
    return places
