"""Builders of checkpoint files, valid and malformed: every header field can be set, even to a wrong value.

torch is not used: pickles are assembled from opcodes, archives from structs. Payloads that stand for hostile ones call
``os.getcwd`` or ``builtins.print``, nothing else.
"""

from __future__ import annotations

import functools
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

FUZZ = int(os.environ.get("TRANSLOAD_FUZZ", "1"))
"""Multiplies the number of examples of the property tests."""

ALL32 = 0xFFFFFFFF
LOCAL = struct.Struct("<4s5H3L2H")
CENTRAL = struct.Struct("<4s6H3L5H2L")
END = struct.Struct("<4s4H2LH")
END64 = struct.Struct("<4sQ2H2L4Q")
LOCATOR64 = struct.Struct("<4sLQL")


# -- pickles -----------------------------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    """BINUNICODE."""
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def bignum(value: int) -> bytes:
    """LONG1 or LONG4, for integers that BININT cannot hold."""
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return (b"\x8a" + bytes([len(raw)]) if len(raw) < 256 else b"\x8b" + struct.pack("<i", len(raw))) + raw


def number(value: int) -> bytes:
    """BININT1, BININT or LONG1."""
    if 0 <= value < 256:
        return b"K" + bytes([value])
    return b"J" + struct.pack("<i", value) if -(1 << 31) <= value < 1 << 31 else bignum(value)


def value_of(item: object) -> bytes:
    """The opcodes of a plain value; ``bytes`` already are opcodes."""
    if isinstance(item, bytes):
        return item
    if item is None or isinstance(item, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[item]
    if isinstance(item, int):
        return number(item)
    return text(item) if isinstance(item, str) else tuple_of(*item)  # type: ignore[misc]


def tuple_of(*items: object) -> bytes:
    """MARK … TUPLE."""
    return b"(" + b"".join(map(value_of, items)) + b"t"


def list_of(*items: object) -> bytes:
    """A list."""
    return b"](" + b"".join(map(value_of, items)) + b"e"


def dictionary(pairs: Mapping[Any, object]) -> bytes:
    """A dictionary."""
    return b"}(" + b"".join(value_of(key) + value_of(item) for key, item in pairs.items()) + b"u"


def name(module: str, attribute: str) -> bytes:
    """GLOBAL."""
    return f"c{module}\n{attribute}\n".encode()


def call(callee: bytes, *args: object) -> bytes:
    """REDUCE."""
    return callee + tuple_of(*args) + b"R"


def ordered(pairs: Mapping[Any, object] | None = None) -> bytes:
    """An OrderedDict, as ``state_dict()`` returns."""
    items = b"(" + b"".join(value_of(key) + value_of(item) for key, item in pairs.items()) + b"u" if pairs else b""
    return b"ccollections\nOrderedDict\n)R" + items


def storage_id(
    key: object = "0", numel: object = 4, kind: str = "FloatStorage", device: str = "cpu", *more: object
) -> bytes:
    """The persistent id of a storage."""
    module = "torch.storage" if kind == "UntypedStorage" else "torch"
    return tuple_of("storage", name(module, kind), key, device, numel, *more) + b"Q"


def tensor(
    key: object = "0",
    shape: object = (4,),
    stride: object = (1,),
    offset: object = 0,
    *,
    storage: bytes | None = None,
    numel: object = 4,
) -> bytes:
    """A call of ``_rebuild_tensor_v2``."""
    persistent_id = storage_id(key, numel) if storage is None else storage
    return call(name("torch._utils", "_rebuild_tensor_v2"), persistent_id, offset, shape, stride, False, ordered())


def rebuild_call(function: str, *args: object) -> bytes:
    """A call of any function of ``torch._utils``."""
    return call(name("torch._utils", function), *args)


def pickled(body: bytes, protocol: int = 2) -> bytes:
    """PROTO … STOP."""
    return b"\x80" + bytes([protocol]) + body + b"."


DANGEROUS = call(name("os", "getcwd"))
"""Stands for any call that a file must not make."""


def state_dict(count: int = 2) -> bytes:
    """The pickle of a state dict of vectors ``w0``, ``w1`` … of four floats, each with its own storage."""
    return pickled(ordered({f"w{i}": tensor(str(i)) for i in range(count)}))


# -- zip archives ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One record of an archive. Fields left ``None`` get their correct value; ``local_…`` are in the local header."""

    name: bytes
    data: bytes = b""
    method: int = 0
    flags: int = 0x0808
    needed: int = 0
    time: int = 0
    date: int = 0
    crc32: int | None = None
    stored: int | None = None
    size: int | None = None
    header: int | None = None
    disk: int = 0
    attributes: int = 0
    extra: bytes = b""
    comment: bytes = b""
    raw: bytes | None = None
    local_name: bytes | None = None
    local_flags: int | None = None
    local_method: int | None = None
    local_crc32: int | None = None
    local_stored: int | None = None
    local_size: int | None = None
    local_extra: bytes | None = None
    descriptor: bytes | None = None
    in_file: bool = True
    listed: bool = True

    def payload(self) -> bytes:
        """The bytes as stored in the file."""
        if self.raw is not None:
            return self.raw
        if self.method != 8:
            return self.data
        return deflated(self.data)


@functools.lru_cache(4)
def deflated(data: bytes) -> bytes:
    """A raw deflate stream, cached: the builder needs it, or its length, three times for each record."""
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush()


def or_default(value: int | None, default: int) -> int:
    return default if value is None else value


def local_header(entry: Entry, position: int) -> bytes:
    """The header before a payload, padded as torch pads it: the payload starts at a multiple of 64."""
    title = entry.name if entry.local_name is None else entry.local_name
    extra = entry.local_extra
    if extra is None:
        padding = -(position + LOCAL.size + len(title) + 4) % 64
        extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
    flags = or_default(entry.local_flags, entry.flags)
    known = not flags & 8
    fields = (
        flags,
        or_default(entry.local_method, entry.method),
        entry.time,
        entry.date,
        or_default(entry.local_crc32, zlib.crc32(entry.data) if known else 0),
        or_default(entry.local_stored, len(entry.payload()) if known else 0),
        or_default(entry.local_size, len(entry.data) if known else 0),
        len(title),
        len(extra),
    )
    return LOCAL.pack(b"PK\x03\x04", entry.needed, *fields) + title + extra


def descriptor_of(entry: Entry) -> bytes:
    if entry.descriptor is not None or not or_default(entry.local_flags, entry.flags) & 8:
        return entry.descriptor or b""
    return struct.pack("<4s3L", b"PK\x07\x08", zlib.crc32(entry.data), len(entry.payload()), len(entry.data))


def central_entry(entry: Entry, header: int) -> bytes:
    """An entry of the central directory."""
    fields = (
        *(entry.needed, entry.needed, entry.flags, entry.method, entry.time, entry.date),
        or_default(entry.crc32, zlib.crc32(entry.data)),
        or_default(entry.stored, len(entry.payload())),
        or_default(entry.size, len(entry.data)),
        *(len(entry.name), len(entry.extra), len(entry.comment), entry.disk, 0, entry.attributes),
        or_default(entry.header, header),
    )
    return CENTRAL.pack(b"PK\x01\x02", *fields) + entry.name + entry.extra + entry.comment


@dataclass(frozen=True)
class Tail:
    """The end of an archive. Fields left ``None`` get their correct value; ``zip64`` adds its records before it."""

    zip64: bool = False
    disk: int = 0
    here: int | None = None
    count: int | None = None
    size: int | None = None
    start: int | None = None
    comment: bytes = b""
    comment_length: int | None = None
    wide_count: int | None = None
    wide_size: int | None = None
    wide_start: int | None = None
    wide_length: int = 44
    wide_disk: int = 0
    wide_signature: bytes = b"PK\x06\x06"
    locator: int | None = None
    disks: int = 1
    after: bytes = b""

    def build(self, count: int, size: int, start: int) -> bytes:
        """All end records for a directory of ``count`` entries that occupies ``size`` bytes from ``start``."""
        total = or_default(self.count, min(count, 0xFFFF))
        place = (or_default(self.size, min(size, ALL32)), or_default(self.start, min(start, ALL32)))
        length = or_default(self.comment_length, len(self.comment))
        end = END.pack(b"PK\x05\x06", self.disk, self.disk, or_default(self.here, total), total, *place, length)
        return self.wide(count, size, start) + end + self.comment + self.after

    def wide(self, count: int, size: int, start: int) -> bytes:
        if not self.zip64:
            return b""
        numbers = (
            or_default(self.wide_count, count),
            or_default(self.wide_size, size),
            or_default(self.wide_start, start),
        )
        record = (self.wide_length, 45, 45, self.wide_disk, self.wide_disk, numbers[0], *numbers)
        locator = LOCATOR64.pack(b"PK\x06\x07", 0, or_default(self.locator, start + size), self.disks)
        return END64.pack(self.wide_signature, *record) + locator


def archive(records: Sequence[Entry], tail: Tail | None = None, *, before: bytes = b"", gap: bytes = b"") -> bytes:
    """A zip archive of these records, with ``before`` in front of them and ``gap`` between them and the directory."""
    out = bytearray(before)
    index_entries: list[bytes] = []
    for entry in records:
        header = len(out)
        if entry.in_file:
            out += local_header(entry, header) + entry.payload() + descriptor_of(entry)
        if entry.listed:
            index_entries.append(central_entry(entry, header))
    out += gap
    start, directory = len(out), b"".join(index_entries)
    return bytes(out + directory + (tail or Tail()).build(len(index_entries), len(directory), start))


def entries(
    pickle: bytes | None = None,
    storages: Mapping[str, bytes] | None = None,
    *,
    root: str = "archive",
    extra: Mapping[str, bytes] | None = None,
    **fields: Any,
) -> list[Entry]:
    """The records that torch 2.13 writes, in its order. Without arguments: two vectors of four floats."""
    contents = (
        {str(i): struct.pack("<4f", *range(4 * i, 4 * i + 4)) for i in range(2)} if storages is None else storages
    )
    parts: dict[str, bytes] = {
        "data.pkl": state_dict() if pickle is None else pickle,
        ".format_version": b"1",
        ".storage_alignment": b"64",
        "byteorder": b"little",
        **{f"data/{key}": data for key, data in contents.items()},
        "version": b"3\n",
        ".data/serialization_id": b"0" * 40,
        **(extra or {}),
    }
    return [Entry(f"{root}/{title}".encode(), data, **fields) for title, data in parts.items()]


def find(records: Sequence[Entry], title: str) -> int:
    """The index of the record whose name ends with ``/title``."""
    return next(i for i, entry in enumerate(records) if entry.name.endswith(b"/" + title.encode()))


def with_changes(records: Sequence[Entry], title: str, **changes: Any) -> list[Entry]:
    """The records, with some fields of one of them replaced."""
    at = find(records, title)
    return [*records[:at], replace(records[at], **changes), *records[at + 1 :]]


def checkpoint(pickle: bytes | None = None, storages: Mapping[str, bytes] | None = None, **fields: Any) -> bytes:
    """A complete checkpoint in the zip format."""
    return archive(entries(pickle, storages, **fields))


def records(data: bytes) -> dict[str, bytes]:
    """Name and content of every record, as ``zipfile`` reads them."""
    import io
    import zipfile

    with zipfile.ZipFile(io.BytesIO(data)) as opened:
        return {info.filename: opened.read(info) for info in opened.infolist()}


def zip64_sizes(nbytes: int) -> bytes:
    """The zip64 extra field, in the directory, of an uncompressed record of that size."""
    return struct.pack("<2H2Q", 1, 16, nbytes, nbytes)


def sparse_archive(path: Path, nbytes: int, crc: int, pickle: bytes) -> None:
    """A checkpoint with a storage ``0`` of zeros, which takes no disk space, and after it one of 16 bytes.

    Laid out as torch does beyond 4 GiB: sizes and offsets in zip64 fields, data descriptors of 24 bytes.
    """
    with path.open("wb") as file:
        lines = [central_entry(entry, write_record(file, entry)) for entry in entries(pickle, {})[:1]]
        lines.append(write_zeros(file, b"archive/data/0", nbytes, crc))
        lines += [
            write_far_record(file, b"archive/data/1", struct.pack("<4f", 1, 2, 3, 4)),
            write_far_record(file, b"archive/version", b"3\n"),
        ]
        start, directory = file.tell(), b"".join(lines)
        file.write(directory + Tail(zip64=True, start=ALL32).build(len(lines), len(directory), start))


def is_sparse(path: Path) -> bool:
    """Whether a file has holes, so that it occupies less disk space than its size."""
    status = path.stat()
    return getattr(status, "st_blocks", status.st_size) * 512 < min(status.st_size, 1 << 20)


def write_record(file: BinaryIO, entry: Entry) -> int:
    header = file.tell()
    file.write(local_header(entry, header) + entry.payload() + descriptor_of(entry))
    return header


def write_zeros(file: BinaryIO, title: bytes, nbytes: int, crc: int) -> bytes:
    header = file.tell()
    wide = struct.pack("<2H2Q", 1, 16, nbytes, 0)
    padding = -(header + LOCAL.size + len(title) + len(wide) + 4) % 64
    extra = wide + b"FB" + struct.pack("<H", padding) + b"Z" * padding
    file.write(LOCAL.pack(b"PK\x03\x04", 0, 0x808, 0, 0, 0, 0, 0, 0, len(title), len(extra)) + title + extra)
    file.seek(nbytes, 1)
    file.write(struct.pack("<4sL2Q", b"PK\x07\x08", crc, nbytes, nbytes))
    return CENTRAL.pack(b"PK\x01\x02", 0, 0, 0x808, 0, 0, 0, crc, ALL32, ALL32, len(title), 20, 0, 0, 0, 0, header) + (
        title + zip64_sizes(nbytes)
    )


def write_far_record(file: BinaryIO, title: bytes, data: bytes) -> bytes:
    header, crc = file.tell(), zlib.crc32(data)
    wide = struct.pack("<2HQ", 1, 8, header)
    padding = -(header + LOCAL.size + len(title) + len(wide) + 4) % 64
    extra = wide + b"FB" + struct.pack("<H", padding) + b"Z" * padding
    file.write(LOCAL.pack(b"PK\x03\x04", 0, 0x808, 0, 0, 0, 0, 0, 0, len(title), len(extra)) + title + extra + data)
    file.write(struct.pack("<4sL2Q", b"PK\x07\x08", crc, len(data), len(data)))
    sizes = (crc, len(data), len(data), len(title), len(wide))
    return CENTRAL.pack(b"PK\x01\x02", 0, 0, 0x808, 0, 0, 0, *sizes, 0, 0, 0, 0, ALL32) + title + wide


# -- the older formats: stream and tar ---------------------------------------------------------------------------------

MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
FACTS = dictionary({"protocol_version": 1001, "little_endian": True, "type_sizes": dictionary({"int": 4})})
FLOATS = struct.pack("<4f", 1, 2, 3, 4)


def legacy_object(count: int = 2) -> bytes:
    """A state dict as the stream format writes it: storage ids have six parts."""
    tensors = {f"w{i}": tensor(storage=storage_id(str(i), 4, "FloatStorage", "cpu", None)) for i in range(count)}
    return ordered(tensors)


@dataclass(frozen=True)
class Legacy:
    """The parts of a stream: five pickles, then the storages."""

    magic: bytes = MAGIC
    protocol: bytes = field(default_factory=lambda: pickled(number(1001)))
    facts: bytes = field(default_factory=lambda: pickled(FACTS))
    object: bytes = field(default_factory=lambda: pickled(legacy_object()))
    keys: bytes = field(default_factory=lambda: pickled(list_of("0", "1")))
    storages: tuple[bytes, ...] = (struct.pack("<q", 4) + FLOATS,) * 2
    after: bytes = b""

    def parts(self) -> tuple[bytes, ...]:
        """All parts, in file order."""
        return (self.magic, self.protocol, self.facts, self.object, self.keys, *self.storages, self.after)


def legacy(**parts: Any) -> bytes:
    """A checkpoint in the stream format: two vectors of four floats, unless ``parts`` replace them."""
    return b"".join(Legacy(**parts).parts())


def tar_member(title: bytes, data: bytes, kind: bytes = b"0", **fields: bytes) -> bytes:
    """A header and its data, in blocks of 512 bytes. ``fields`` replace fields of the header."""
    layout: list[tuple[str, int, bytes]] = [
        ("name", 100, title),
        ("mode", 8, b"0000644\0"),
        ("uid", 8, b"0000000\0"),
        ("gid", 8, b"0000000\0"),
        ("size", 12, b"%011o\0" % len(data)),
        ("mtime", 12, b"00000000000\0"),
        ("checksum", 8, b" " * 8),
        ("kind", 1, kind),
        ("link", 100, b""),
        ("magic", 8, b"ustar\x0000"),
        ("owner", 80, b""),
        ("prefix", 155, b""),
    ]
    header = b"".join(fields.get(key, value).ljust(width, b"\0") for key, width, value in layout).ljust(512, b"\0")
    if "checksum" not in fields:
        header = header[:148] + b"%06o\0 " % sum(header) + header[156:]
    return header + data + bytes(-len(data) % 512)


def tar_storages(count: int = 1) -> bytes:
    """The member ``storages``: the count, each storage with its id and bytes, and no views."""
    storages = [
        pickled(tuple_of(i, "cpu", name("torch", "FloatStorage"))) + struct.pack("<q", 4) + FLOATS for i in range(count)
    ]
    return pickled(number(count)) + b"".join(storages) + pickled(b"]")


def tar_tensors(count: int = 1) -> bytes:
    """The member ``tensors``: the count, then each tensor with its storage, shape, stride and offset."""
    tensors = [
        pickled(tuple_of(100 + i, i, name("torch", "FloatTensor"))) + struct.pack("<i4x3q", 1, 4, 1, 0)
        for i in range(count)
    ]
    return pickled(number(count)) + b"".join(tensors)


def tar(parts: Mapping[str, bytes] | None = None, *more: bytes, end: bytes = bytes(1024)) -> bytes:
    """A checkpoint in the tar format: a dictionary with one vector of four floats, unless ``parts`` replace members."""
    members = {
        "sys_info": pickled(FACTS),
        "pickle": pickled(dictionary({"w0": b"P100\n"})),
        "tensors": tar_tensors(),
        "storages": tar_storages(),
        **(parts or {}),
    }
    return b"".join([*(tar_member(title.encode(), data) for title, data in members.items()), *more, end])
