"""The headers of a zip archive, read with forgiveness: one of their bits may be another."""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from transload.formats.zip import widen
from transload.io.sources import Source

__all__ = [
    "CENTRAL",
    "DESCRIPTOR",
    "END",
    "END64",
    "LOCAL",
    "MAX_NAME",
    "Descriptor",
    "Line",
    "Local",
    "describes",
    "is_plausible",
    "is_sign",
    "line_of",
    "local_at",
]

LOCAL = b"PK\x03\x04"
CENTRAL = b"PK\x01\x02"
DESCRIPTOR = b"PK\x07\x08"
END64 = b"PK\x06\x06"
END = b"PK\x05\x06"
MAX_NAME = 4096
"""Bytes of a record's name; those of a program are a hundred or two."""

_LOCAL = Struct("<4s5H3L2H")
_CENTRAL = Struct("<4s6H3L5H2L")
_NARROW = Struct("<4s3L")
_WIDE = Struct("<4sL2Q")
_ALL32 = 0xFFFFFFFF
_MAX_EXTRA = 1 << 16


class Local(NamedTuple):
    """What stands before the bytes of a record. ``payload`` is where those begin, if the lengths are right."""

    header: int
    needed: int
    flags: int
    method: int
    time: int
    date: int
    crc32: int
    stored: int
    size: int
    name: bytes
    extra: bytes
    payload: int
    wide: bool

    @property
    def padded(self) -> bool:
        """Whether torch's writer made it: it has a field ``FB`` of filling."""
        at = self.extra.find(b"FB")
        return 0 <= at <= 20


class Line(NamedTuple):
    """A line of the directory, and where it lies."""

    position: int
    made: int
    needed: int
    flags: int
    method: int
    time: int
    date: int
    crc32: int
    stored: int
    size: int
    name: bytes
    extra: bytes
    header: int
    length: int


class Descriptor(NamedTuple):
    """What follows the bytes of a record; ``length`` is its own, 0 if there is none."""

    crc32: int
    stored: int
    size: int
    length: int


def is_sign(data: bytes, sign: bytes) -> bool:
    r"""Whether four bytes are a signature, or one with a flipped bit.

    >>> is_sign(b"PK\x03\x05", LOCAL), is_sign(b"PK\x01\x02", LOCAL)
    (True, False)
    """
    if data == sign:
        return True
    if len(data) < 4:
        return False
    return (int.from_bytes(data, "little") ^ int.from_bytes(sign, "little")).bit_count() <= 1


def local_at(source: Source, header: int) -> Local | None:
    """The header at an offset, whatever its signature; ``None`` where the file ends within it."""
    raw = source.read(header, _LOCAL.size)
    if len(raw) < _LOCAL.size:
        return None
    _, needed, flags, method, time, date, crc, stored, size, n_name, n_extra = _LOCAL.unpack(raw)
    head = source.read(header + _LOCAL.size, n_name + n_extra)
    extra = head[n_name:]
    if _ALL32 in (stored, size):
        size, stored = widen(extra, size, stored)
    payload = header + _LOCAL.size + n_name + n_extra
    wide = extra[:2] == b"\x01\x00" and _is_wide(int.from_bytes(extra[2:4], "little"))
    return Local(header, needed, flags, method, time, date, crc, stored, size, head[:n_name], extra, payload, wide)


def _is_wide(length: int) -> bool:
    """Whether a field of sizes in eight bytes may have a length; one bit of it may be flipped."""
    return any((length ^ told).bit_count() <= 1 for told in (8, 16, 24, 28))


def is_plausible(local: Local | None) -> bool:
    """Whether a header that was come upon by searching is one."""
    if local is None or not 0 < len(local.name) <= MAX_NAME or len(local.extra) > _MAX_EXTRA:
        return False
    return local.method in (0, 8) and not local.flags & ~0x080E and not any(byte < 32 for byte in local.name)


def line_of(data: bytes, at: int, position: int, length: int = 0) -> Line | None:
    """The line of a directory at ``at`` of some bytes that lie at ``position - at`` of the file.

    With a ``length`` the line is known to be so long, and its name is what is left of it.
    """
    if at + _CENTRAL.size > len(data):
        return None
    fields = _CENTRAL.unpack_from(data, at)
    _, made, needed, flags, method, time, date, crc, stored, size, n_name, n_extra, n_comment = fields[:13]
    if length:
        n_name, n_extra, n_comment = length - _CENTRAL.size, 0, 0
    whole = _CENTRAL.size + n_name + n_extra + n_comment
    if at + whole > len(data) or not 0 < n_name <= MAX_NAME:
        return None
    name = data[at + _CENTRAL.size : at + _CENTRAL.size + n_name]
    extra = data[at + _CENTRAL.size + n_name : at + _CENTRAL.size + n_name + n_extra]
    header = fields[16]
    if _ALL32 in (stored, size, header):
        size, stored, header = widen(extra, size, stored, header)
    return Line(position, made, needed, flags, method, time, date, crc, stored, size, name, extra, header, whole)


def describes(source: Source, end: int, *, wide: bool) -> Descriptor | None:
    """The descriptor at an offset, if there is one; its signature may have a flipped bit."""
    form = _WIDE if wide else _NARROW
    raw = source.read(end, form.size)
    if len(raw) < form.size or not is_sign(raw[:4], DESCRIPTOR):
        return None
    _, crc, stored, size = form.unpack(raw)
    return Descriptor(crc, stored, size, form.size)
