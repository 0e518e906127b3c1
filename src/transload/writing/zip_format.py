r"""The bytes of an archive as torch's own writer makes them, record by record; docs/formats.md describes them.

Every record is stored as it is. Its header says nothing of its size: the size and the checksum follow the bytes, in a
descriptor, so a record can be written before its checksum is known. A padding field in the header makes the bytes
begin at a multiple of the alignment. An archive is

    header · bytes · descriptor, for each record; central entry, for each record; end

>>> data = b"3\n"
>>> start = local_header(b"a/version", len(data), 0)
>>> record = start + data + descriptor(len(data), 0x5567_6311, 0)
>>> entry = central_entry(b"a/version", len(data), 0x5567_6311, 0)
>>> archive = record + entry + end_of_archive(1, len(record), len(entry))
>>> archive.index(data) % ALIGNMENT, len(archive) == len(record) + len(entry) + len(end_of_archive(1, 0, 0))
(0, True)
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from zlib import crc32

__all__ = [
    "ALIGNMENT",
    "central_entry",
    "descriptor",
    "descriptor_size",
    "end_of_archive",
    "local_header",
    "small_records",
]

ALIGNMENT = 64
"""torch's default, at which a mapped file gives tensors that every vector unit reads at full speed."""

_ALL16 = 0xFFFF
_ALL32 = 0xFFFFFFFF
_FLAGS = 0x0808  # the name is UTF-8; the sizes follow the bytes
_FB = int.from_bytes(b"FB", "little")
_FLAGS_OF_NOTHING = 0x0800  # nothing follows no bytes
_PADDING = b"Z" * 4096
_MADE_BY = 0x031E  # in the end record alone, as miniz has it: Unix, version 3.0
_NEEDED = 45  # the first version of the specification with 64-bit sizes

_LOCAL = Struct("<4s5H3L2H")
_CENTRAL = Struct("<4s6H3L5H2L")
_DESCRIPTOR = Struct("<4s3L")
_DESCRIPTOR64 = Struct("<4sL2Q")
_FIELD = Struct("<2H")
_END64 = Struct("<4sQ2H2L4Q")
_LOCATOR64 = Struct("<4sLQL")
_END = Struct("<4s4H2LH")


def local_header(name: bytes, size: int, offset: int, alignment: int = ALIGNMENT) -> bytes:
    """What stands before the bytes of a record, with the padding that brings them to a multiple of ``alignment``.

    ``name`` is the whole name, its folder with it; ``offset`` is where the header begins in the archive.
    """
    wide = _wide(size, 0, offset)
    least = _LOCAL.size + len(name) + len(wide) + _FIELD.size
    padding = -(offset + least) % alignment
    flags = _FLAGS if size else _FLAGS_OF_NOTHING
    extra = len(wide) + _FIELD.size + padding
    head = _LOCAL.pack(b"PK\x03\x04", 0, flags, 0, 0, 0, 0, 0, 0, len(name), extra)
    filler = _PADDING[:padding] if padding <= len(_PADDING) else b"Z" * padding
    return b"".join((head, name, wide, b"FB", padding.to_bytes(2, "little"), filler))


def descriptor_size(size: int, offset: int) -> int:
    """The length of what follows the bytes of a record whose header begins at ``offset``."""
    if not size:
        return 0
    return _DESCRIPTOR64.size if _is_wide(size, offset) else _DESCRIPTOR.size


def descriptor(size: int, crc32: int, offset: int) -> bytes:
    """What follows the bytes of a record whose header begins at ``offset``: nothing if it has none."""
    if not size:
        return b""
    form = _DESCRIPTOR64 if _is_wide(size, offset) else _DESCRIPTOR
    return form.pack(b"PK\x07\x08", crc32, size, size)


def central_entry(name: bytes, size: int, crc32: int, offset: int) -> bytes:
    """The line of the directory for a record whose header begins at ``offset``."""
    wide = _wide(size, size, offset)
    flags = _FLAGS if size else _FLAGS_OF_NOTHING
    told = min(size, _ALL32)
    rest = (len(name), len(wide), 0, 0, 0, 0, min(offset, _ALL32))
    head = _CENTRAL.pack(b"PK\x01\x02", 0, 0, flags, 0, 0, 0, crc32, told, told, *rest)
    return head + name + wide if wide else head + name


def end_of_archive(count: int, start: int, size: int) -> bytes:
    """What follows a directory of ``count`` entries and ``size`` bytes which begins at ``start``; it ends the file."""
    end = start + size
    wide = _END64.pack(b"PK\x06\x06", _END64.size - 12, _MADE_BY, _NEEDED, 0, 0, count, count, size, start)
    locator = _LOCATOR64.pack(b"PK\x06\x07", 0, end, 1)
    told = min(count, _ALL16)
    return wide + locator + _END.pack(b"PK\x05\x06", 0, 0, told, told, min(size, _ALL32), min(start, _ALL32), 0)


_LOCAL_HEAD = _LOCAL.pack(b"PK\x03\x04", 0, _FLAGS, 0, 0, 0, 0, 0, 0, 0, 0)[:26]
_CENTRAL_HEAD = _CENTRAL.pack(b"PK\x01\x02", 0, 0, _FLAGS, *[0] * 13)[:16]
_CENTRAL_IN_SHORT = Struct("<16s3LH12sL")
_NOTHING_ELSE = bytes(12)  # no extra field, no comment, disk 0, no attributes


def small_records(
    named: Iterable[tuple[bytes, bytes]], offset: int, alignment: int, checksums: list[int]
) -> tuple[list[bytes], list[bytes], int]:
    """The bytes of records from ``offset`` on, those of their directory, and where they end; each in many parts.

    What ``local_header``, ``descriptor`` and ``central_entry`` would make, at a third of the time.
    """
    out: list[bytes] = []
    entries: list[bytes] = []
    fillers: dict[int, bytes] = {}
    lengths, describe, enter = _FIELD.pack, _DESCRIPTOR.pack, _CENTRAL_IN_SHORT.pack
    for name, content in named:
        size, length, checksum = len(content), len(name), crc32(content)
        checksums.append(checksum)
        if not size or offset >= _ALL32 - size:
            header = local_header(name, size, offset, alignment)
            tail = descriptor(size, checksum, offset)
            out += (header, content, tail)
            entries.append(central_entry(name, size, checksum, offset))
            offset += len(header) + size + len(tail)
            continue
        least = offset + 34 + length
        padding = -least % alignment
        if padding not in fillers:
            fillers[padding] = _FIELD.pack(_FB, padding) + b"Z" * padding
        out += (
            _LOCAL_HEAD,
            lengths(length, padding + 4),
            name,
            fillers[padding],
            content,
            describe(b"PK\x07\x08", checksum, size, size),
        )
        entries += (enter(_CENTRAL_HEAD, checksum, size, size, length, _NOTHING_ELSE, offset), name)
        offset = least + padding + size + 16
    return out, entries, offset


def _is_wide(size: int, offset: int) -> bool:
    return size >= _ALL32 or offset >= _ALL32


def _wide(size: int, stored: int, offset: int) -> bytes:
    """The field of what does not fit into 32 bits: empty if all does."""
    if size < _ALL32 and offset < _ALL32:
        return b""
    numbers = [size, stored] if size >= _ALL32 else []
    if offset >= _ALL32:
        numbers.append(offset)
    return _FIELD.pack(1, 8 * len(numbers)) + b"".join(number.to_bytes(8, "little") for number in numbers)
